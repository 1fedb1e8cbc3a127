"""Secrets are removed from URLs, and nothing else is."""

from collections.abc import Iterator
from pathlib import Path
from socket import EAI_AGAIN, EAI_NONAME, gaierror

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st
from s3fs.errors import translate_boto_error

from exspec.jobs import cli
from exspec.pipeline import storage
from exspec.pipeline.errors import JobError
from exspec.pipeline.input.shards import find_shards
from exspec.pipeline.secrets import anonymous, redacted
from exspec.pipeline.storage import Folder

V4 = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIASECRET%2Fus&X-Amz-Date=2026&X-Amz-Signature=SECRET"
SAS = "sv=2024-11-04&ss=b&srt=sco&sp=rl&se=2026-12-01T00:00:00Z&sig=SECRET%3D"
KEPT = [
    "some/model",
    "/data/in/part-*.parquet",
    "/data/user:name@place/in",
    "s3://bucket/folder",
    "s3://bucket/key@2x/file",
    "s3://bucket/part-?.parquet",
    "s3://bucket/day=2026-01-31/token=x/part.parquet",
    "s3a://bucket/folder",
    "https://bucket.s3.eu-central-1.amazonaws.com/key@2x",
    "https://s3.eu-central-1.amazonaws.com/bucket/key?versionId=3",
    "http://127.0.0.1:9000/bucket/a:b@c",
    "http://[::1]:9000/bucket/a@b",
    "gs://bucket/folder/a@b",
    "gcs://bucket/folder",
    "https://storage.googleapis.com/bucket/key?generation=17",
    "abfs://container@account.dfs.core.windows.net/path",
    "abfss://container@account.dfs.core.windows.net/path/a@b",
    "abfs://container/path",
    "az://container/path",
    "az://container@account.blob.core.windows.net/path",
    "wasbs://container@account.blob.core.windows.net/path",
    "https://account.blob.core.windows.net/container/path",
    "simplecache::s3://bucket/key@2x",
    "zip://*.parquet::s3://bucket/in.zip",
    "memory://folder/file",
    "file:///data/a@b",
    "hf://datasets/user/name@main/in",
    "https://host/find?mail=a@b",
    "https://host?mail=a@b",
    "https://host/find?bypass=1&compass=north&pwned=no",
    "file:///user@host/in",
    "C:/Users/a@b",
]
CUT = {
    "s3://SECRET:SECRET@bucket/folder": "s3://bucket/folder",
    "s3://AKIA:SEC/RET+x@bucket/folder": "s3://bucket/folder",
    "s3://AKIA:123/SECRET@bucket/folder": "s3://bucket/folder",
    "s3://AKIA:SEC@RET@bucket/folder": "s3://bucket/folder",
    "s3a://AKIA:SEC/R@ET@bucket/folder": "s3a://bucket/folder",
    "S3://AKIA:SECRET@bucket/folder": "S3://bucket/folder",
    "simplecache::s3://AKIA:SECRET@bucket/folder": "simplecache::s3://bucket/folder",
    "zip://*.csv::simplecache::https://u:SECRET@host/in.zip": "zip://*.csv::simplecache::https://host/in.zip",
    "https://user:SECRET@host:8443/a": "https://host:8443/a",
    "https://user:12345@host/a": "https://host/a",
    "https://user:1@2/SECRET@host/a": "https://host/a",
    "https://SECRET@host/a@b": "https://host/a@b",
    "https://user:SEC?RET@host/a": "https://host/a",
    "https://user:SECRET@host/a?mail=a@b": "https://host/a?mail=a@b",
    "https://user:SECRET@[::1]:9000/a": "https://[::1]:9000/a",
    f"https://bucket.s3.amazonaws.com/key?{V4}": "https://bucket.s3.amazonaws.com/key",
    f"https://s3.eu-central-1.amazonaws.com/bucket/key?{V4}": "https://s3.eu-central-1.amazonaws.com/bucket/key",
    "https://bucket.s3.amazonaws.com/key?AWSAccessKeyId=SECRET&Expires=1&Signature=SECRET": (
        "https://bucket.s3.amazonaws.com/key"
    ),
    "https://s3.amazonaws.com/bucket/key?versionId=3&X-Amz-Security-Token=SECRET": "https://s3.amazonaws.com/bucket/key",
    "https://storage.googleapis.com/b/k?GoogleAccessId=me&Expires=1&Signature=SECRET": (
        "https://storage.googleapis.com/b/k"
    ),
    "https://storage.googleapis.com/b/k?X-Goog-Algorithm=RSA&X-Goog-Credential=SECRET&X-Goog-Signature=SECRET": (
        "https://storage.googleapis.com/b/k"
    ),
    "gs://bucket/key?access_token=SECRET": "gs://bucket/key",
    f"https://account.blob.core.windows.net/container/path?{SAS}": (
        "https://account.blob.core.windows.net/container/path"
    ),
    f"abfss://container@account.dfs.core.windows.net/path?{SAS}": (
        "abfss://container@account.dfs.core.windows.net/path"
    ),
    f"az://container/part-?.parquet?{SAS}": "az://container/part-?.parquet",
    "abfs://container:SECRET@account.dfs.core.windows.net/path": "abfs://account.dfs.core.windows.net/path",
    "https://host/a?AccessKey=SECRET": "https://host/a",
    "https://host/a?AccountKey=SECRET": "https://host/a",
    "https://host/a?token=SECRET": "https://host/a",
    "https://host/a?x=1&api_key=SECRET": "https://host/a",
    "https://host/a?%73ig=SECRET": "https://host/a",
    "https://host/a#access_token=SECRET": "https://host/a",
    "https://proxy/?url=https://u:SECRET@host/a": "https://proxy/?url=https://host/a",
    "https://proxy/?url=https://host/a&sig=SECRET": "https://proxy/",
    "https://host/a?pass=SECRET": "https://host/a",
    "https://host/a?pw=SECRET": "https://host/a",
    "https://host/a?user_pass=SECRET": "https://host/a",
    "https://host/a?bearer=SECRET": "https://host/a",
    "https://host/a?oauth=SECRET": "https://host/a",
    "https://host/a?hmac=SECRET": "https://host/a",
    "https:/u:SECRET@host/a": "https:/host/a",
    "https:/SECRET@host/a": "https:/host/a",
    "https:///u:SECRET@host/a": "https:///host/a",
    "s3:/AKIA:SEC/RET@bucket/folder": "s3:/bucket/folder",
    "1https://u:SECRET@host/a": "1https://host/a",
    "s3://user:SECRET:/@host/path": "s3://host/path",
    "https://proxy/?url=https:/u:SECRET@host/a": "https://proxy/?url=https:/host/a",
    "url_https://u:SECRET@host/a": "url_https://host/a",
    "/here/https:/u:SECRET@host/a": "/here/https:/host/a",
}


@pytest.mark.parametrize("url", KEPT)
def test_other_parts_of_a_url_stay(url: str) -> None:
    assert anonymous(url) == url
    assert redacted(url) == url


@pytest.mark.parametrize("url", CUT)
def test_secrets_are_removed(url: str) -> None:
    assert anonymous(url) == CUT[url]
    assert anonymous(CUT[url]) == CUT[url]


@pytest.mark.parametrize("url", CUT)
def test_urls_in_a_text(url: str) -> None:
    text = redacted(f"cannot read {url}: no access ('{url}', {url}).")
    assert "SECRET" not in text
    assert text == f"cannot read {CUT[url]}: no access ('{CUT[url]}', {CUT[url]})."


@settings(max_examples=500, derandomize=True)
@given(
    scheme=st.sampled_from(["s3", "https", "ftp", "abfs", "simplecache::s3"]),
    secret=st.text("abcXYZ019/@+=:?#&%", max_size=12).filter(lambda s: "//" not in s and "::" not in s),
)
def test_a_password_is_removed_entirely(scheme: str, secret: str) -> None:
    made = anonymous(f"{scheme}://user:SECRET{secret}@host/path")
    assert "SECRET" not in made
    assert made.endswith("host/path")


PARTS = st.text("abcXYZ019/@+=:?#&%.-_ ", max_size=12)
PARAMETERS = ["pass", "pw", "pwd", "password", "bearer", "oauth", "hmac", "sig", "token", "api_key", "X-Amz-Signature"]


@given(
    slashes=st.integers(1, 3),
    scheme=st.sampled_from(["s3", "https", "ftp", "abfs", "simplecache::s3", "gs", "r2"]),
    secret=st.text("abcXYZ019/+=%-_", max_size=12).filter(lambda s: "//" not in s),
    before=PARTS,
    after=st.sampled_from(["", ".", "', b", ") or not", '"}', "\ns3://bucket/a@b"]),
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_a_password_is_in_no_text(slashes: int, scheme: str, secret: str, before: str, after: str) -> None:
    text = f"{before}{scheme}:{'/' * slashes}user:SECRET{secret}@host/path{after}"
    assert "SECRET" not in redacted(text)
    assert redacted(redacted(text)) == redacted(text)


@given(
    scheme=st.sampled_from(["s3", "https", "gs"]), name=st.sampled_from(PARAMETERS), before=PARTS, upper=st.booleans()
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_a_secret_parameter_is_in_no_text(scheme: str, name: str, before: str, upper: bool) -> None:
    assert "SECRET" not in redacted(f"{before}{scheme}://host/a?x=1&{name.upper() if upper else name}=SECRET'")


@given(st.text(max_size=60))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_a_text_without_a_url_stays(text: str) -> None:
    assert redacted(text.replace(":", ";")) == text.replace(":", ";")


@pytest.mark.parametrize(
    "url", ["s3://KEY:SECRET@bucket/in", "gs://KEY:SECRET@bucket/in", "simplecache::s3://K:SECRET@b/in"]
)
def test_a_bucket_with_a_password_is_refused_at_once(url: str) -> None:
    """The store would take the password for a part of the bucket's name, and print it."""
    for refused in (lambda: Folder(url).names(), lambda: find_shards([url], {})):
        with pytest.raises(JobError, match="a user or password is in the URL, where no store looks for it") as error:
            refused()
        assert "SECRET" not in repr(error.value)


LINES = {
    "an input": ["plan", "--input", "s3://KEY:SECRET@bucket/", "--output", "out"],
    "an output": ["run", "--input", "in", "--output", "s3://KEY:SECRET@bucket/out"],
    "an input with one slash": ["plan", "--input", "https:/u:SECRET@host.invalid/in", "--output", "out"],
    "a target": ["plan", "--input", "in", "--output", "out", "--target", "gs://KEY:SECRET@bucket/model"],
    "a host that does not exist": ["report", "ftp://u:SECRET@host.invalid/out"],
    "a superfluous argument": ["report", "--price-per-gpu-hour", "https://u:SECRET@host/x"],
    "a wrong value": ["plan", "--input", "in", "--output", "out", "--seed-column", "a", "--top-p", "s3://K:SECRET@b"],
    "an unknown command": ["https://u:SECRET@host/x"],
    "a defect": ["messages", "https://u:SECRET@host/x"],
}


@pytest.mark.parametrize("words", LINES.values(), ids=LINES)
def test_the_command_line_prints_no_secret(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(place: object, *_: object) -> None:
        raise AssertionError(f"cannot write to https://u:SECRET@host/{place}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("exspec.jobs.demo.shards.write_shards", fails)
    monkeypatch.setattr("sys.argv", ["exspec", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == (3 if words[0] == "messages" else 2)
    printed = "".join(capsys.readouterr())
    assert printed
    assert "SECRET" not in printed


CHAIN = {
    "an unknown host": (gaierror(EAI_NONAME, "Name or service not known"), False),
    "a name server that does not answer": (gaierror(EAI_AGAIN, "Temporary failure in name resolution"), True),
    "a cut connection": (ConnectionResetError("reset"), True),
    "access denied": (PermissionError("Access Denied"), False),
}


@pytest.mark.parametrize(("cause", "transient"), CHAIN.values(), ids=CHAIN)
def test_an_error_that_cannot_pass_is_not_retried(cause: OSError, transient: bool) -> None:
    assert storage._is_transient(cause) == transient
    wrapped = type(cause).__mro__[0]("wrapped") if not isinstance(cause, gaierror) else OSError("cannot connect")
    wrapped.__cause__ = cause
    assert storage._is_transient(wrapped) == transient


STATUSES = {
    "InvalidBucketName": (400, False),
    "AuthorizationHeaderMalformed": (400, False),
    "RequestTimeout": (400, True),
    "ConditionalRequestConflict": (409, True),
    "SlowDown": (503, True),
}


@pytest.mark.parametrize("code", STATUSES)
def test_an_answer_of_s3_that_will_not_change_is_not_retried(code: str) -> None:
    status, transient = STATUSES[code]
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    assert storage._is_transient(translate_boto_error(ClientError(answer, "PutObject"))) == transient


def test_a_url_with_one_slash_is_no_path() -> None:
    with pytest.raises(JobError, match="expected a path, or a URL that begins with https://") as refused:
        Folder("https:/user:SECRET@host/rows").sizes()
    assert "SECRET" not in str(refused.value)


def test_retries_that_last_are_named_once_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "SILENT", 0.0)
    monkeypatch.setattr(storage, "said", -storage.PATIENCE)
    for _ in range(2):
        left = iter([OSError("https://h/x?sig=SECRET refuses\nthe connection"), OSError("it refuses")])

        def fails(left: Iterator[OSError] = left) -> str:
            if error := next(left, None):
                raise error
            return "answer"

        assert storage.attempt(fails) == "answer"
    printed = capsys.readouterr().err
    assert printed == "the store fails (OSError: https://h/x refuses the connection); trying again for 180 s\n"
