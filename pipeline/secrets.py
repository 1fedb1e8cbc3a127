"""URLs without their secrets, for everything that is written, printed or compared."""

import re
from urllib.parse import unquote

# In these URLs the part before the @ is the container, not a user.
CONTAINERS = {"abfs", "abfss", "adl", "az", "wasb", "wasbs"}
# The host of these URLs is a bucket, which has no port: what follows a colon is a password.
BUCKETS = CONTAINERS | {"gcs", "gs", "oci", "r2", "s3", "s3a", "s3n"}
# One slash is a slip that leaves the password in place. A drive letter is no scheme.
SCHEME = re.compile(r"([A-Za-z][\w+.-]{1,30}):/+")
# Inside a URL, one slash begins another one only after a common scheme: a password may have :/ in it.
NESTED = re.compile(r"[A-Za-z][\w+.-]{1,30}://|(?:https?|ftps?|hdfs|abfss?|adl|az|wasbs?|gcs|gs|oci|r2|s3[an]?):/")
LINK = re.compile(r"::(?=[A-Za-z][\w+.-]*(?:://|::))")  # between the parts of a chained URL
PARAMETER = re.compile(r"[?#&;]([^?#&;=\s]+)=")
SECRET = re.compile(
    r"^x-(amz|goog|ms|oss|cos)-|^(sig|sas|key|auth|jwt|code)$|(^|[-_.])(pass|pw|pwd)($|[-_.])|signature|token|secret"
    r"|passw|passphrase|credential|authorization|oauth|bearer|hmac"
    r"|(access|account|api|shared|private|subscription)[-_.]?key|accessid|session",
    re.IGNORECASE,
)
CLOSING = "\"'`<>()[]{},.;:!"  # punctuation that may follow a URL in a sentence


def anonymous(url: str) -> str:
    """The URL without user and password, and without a query that holds a signature, token or key.

    Other text is returned unchanged. If the end of a password is ambiguous, the longer one is removed.
    """
    return "::".join(_without_user(_without_signature(link)) for link in LINK.split(url))


def redacted(text: str) -> str:
    """The text with every URL in it made anonymous."""
    return re.sub(rf"{SCHEME.pattern}\S+", _anonymous_word, text)


def no_url(url: str) -> str | None:
    """Why neither a URL nor a path is meant, if so: `https:/host` would be a folder called `https:`."""
    start = re.match(r"\w{2,}:/(?!/)", url)
    return start and f"{anonymous(url)}: expected a path, or a URL that begins with {start[0]}/"


def has_user(url: str) -> bool:
    """Whether the URL of a bucket has a user or password in it, which no store reads from there."""
    return any(_scheme(link) in BUCKETS and _without_user(link) != link for link in LINK.split(url))


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def _anonymous_word(found: re.Match[str]) -> str:
    url = found[0].rstrip(CLOSING)
    return anonymous(url) + found[0][len(url) :]


def _without_signature(url: str) -> str:
    """Remove the whole query if it is signed: the rest is useless, and differs with each signature."""
    if not SCHEME.search(url):
        return url
    for found in PARAMETER.finditer(url):
        if SECRET.search(unquote(found[1])):
            begin = max(url.rfind(mark, 0, found.start() + 1) for mark in "?#")
            return url[: begin if begin >= 0 else found.start()]
    return url


def _without_user(url: str) -> str:
    """A URL may contain other URLs, such as a proxy's."""
    first = SCHEME.search(url)
    begins = [first.start(), *(found.start() for found in NESTED.finditer(url, first.end()))] if first else []
    pieces = [url[i:j] for i, j in zip([0, *begins], [*begins, len(url)], strict=True)]
    return "".join(map(_one_without_user, pieces))


def _one_without_user(url: str) -> str:
    found = SCHEME.match(url)
    if found is None:
        return url
    scheme, rest = found[1].lower(), url[found.end() :]
    if found[0].lower() == "file:///":
        return url
    query = re.search(r"[?#][^?#=@]*=", rest)
    place = rest[: query.start()] if query and "@" in rest[: query.start()] else rest
    authority = re.split("[/?#]", place, maxsplit=1)[0]
    if _has_password(scheme, authority):
        return url[: found.end()] + rest[place.rfind("@") + 1 :]  # a password may have / and @ in it
    if scheme in CONTAINERS:
        return url
    return url[: found.end()] + rest[authority.rfind("@") + 1 :]


def _has_password(scheme: str, authority: str) -> bool:
    """Whether there is a colon that is not part of a port, an IPv6 address or a container."""
    if ":" not in authority.split("@", 1)[0].split("[", 1)[0]:
        return False
    return scheme in BUCKETS or re.fullmatch(r"[^:@]*:\d{0,5}", authority) is None
