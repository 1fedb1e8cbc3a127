"""Secrets are removed from URLs, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exspec.pipeline.secrets import anonymous, redacted

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


@given(
    scheme=st.sampled_from(["s3", "https", "ftp", "abfs", "simplecache::s3"]),
    secret=st.text("abcXYZ019/@+=:?#&%", max_size=12).filter(lambda s: "//" not in s and "::" not in s),
)
def test_a_password_is_removed_entirely(scheme: str, secret: str) -> None:
    made = anonymous(f"{scheme}://user:SECRET{secret}@host/path")
    assert "SECRET" not in made
    assert made.endswith("host/path")
