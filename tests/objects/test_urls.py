import pytest

from aiofeed.kernel.core.formatting import redacted
from aiofeed.objects.urls import join_url, scheme_of, secrets_of, split_url, with_query


@pytest.mark.parametrize(
    ("url", "root", "key"),
    [
        ("s3://bucket/a b%20c?d#e.jpg", "s3://bucket", "a b%20c?d#e.jpg"),
        ("S3://bucket/a", "s3://bucket", "a"),
        ("gs://bucket", "gs://bucket", ""),
        ("az://container/x/y", "az://container", "x/y"),
        ("https://host:8000/a%20b.jpg", "https://host:8000", "a b.jpg"),
        ("https://user:pass@host/a.jpg?sig=1&se=2", "https://user:pass@host?sig=1&se=2", "a.jpg"),
        ("file:///data/a%20b.jpg", "", "/data/a b.jpg"),
        ("file://localhost/data", "", "/data"),
        ("/data/a%20b.jpg", "", "/data/a%20b.jpg"),
        ("C:\\data\\a.jpg", "", "C:\\data\\a.jpg"),
    ],
)
def test_root_and_key(url, root, key):
    """A URL has a root and a key; keys of buckets are plain text, those of web servers are quoted."""
    assert split_url(url) == (root, key)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hdfs://host/a", "one of s3://, gs://, az://, hf://, http://, https://, file://"),
        ("s3:///a", "no bucket"),
        ("http:///a", "no host"),
        ("file://host/a", "three slashes"),
        ("s3://AKIAKEY:hunter22@bucket/a", "pass them in options="),
        ("s3://bucket?sig=hunter22", "pass them in options="),
    ],
)
def test_urls_that_cannot_be_read(url, message):
    """A URL that no store reads is an error that says why, without credentials."""
    with pytest.raises(ValueError, match=message) as error:
        split_url(url)
    assert "hunter22" not in str(error.value)


def test_queries_of_keys():
    """A key with a query is shown with a hash of it, which does not depend on signatures, and without values."""

    def shown(url):
        return join_url(*with_query(*split_url(url)))

    plain, signed = "https://host/get", "https://host/get?id=hunter&X-Amz-Date={0}&X-Amz-Signature={0}&se={0}&sig={0}"
    assert with_query(*split_url("https://host/a%3Fb?c=d")) == ("https://host", "a?b\0c=d")
    assert shown(f"{plain}?X-Goog-Signature=hunter&Expires=1") == plain
    assert shown(signed.format("hunter22")) == shown(signed.format("hunter33")) == shown(f"{plain}?id=hunter")
    assert len({shown(f"{plain}?st={number}") for number in range(100)} | {plain}) == 101
    assert "hunter" not in shown(signed)


def test_paths_have_no_scheme():
    """Paths of the file system are no URLs."""
    assert [scheme_of(path) for path in ("a.jpg", "/a:/b", "C://a", None, 3)] == [None] * 5


def test_redacted():
    """User names, passwords, values of queries and given secrets are hidden, and nothing else."""
    text = "GET https://me:hunter22@host/a?sig=hunter33&x-amz-signature=hunter44 failed: token hunter55 at 10:30"
    shown = redacted(text, ["hunter55"])
    assert shown == "GET https://***@host/a?sig=***&x-amz-signature=*** failed: token *** at 10:30"
    assert join_url("https://me:hunter22@host?sig=hunter33", "a/b.jpg") == "https://***@host/a/b.jpg"


def test_secrets_of_options_and_environment(monkeypatch):
    """Credentials of a URL, and values of options and variables with telling names, are secrets; short ones are not."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "environment-1")
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "environment-22")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    options = {
        "secret_access_key": "option-1",
        "config": {"sas_key": "option-22", "endpoint": "http://host"},
        "client_options": {"default_headers": {"x": b"header-333"}, "allow_http": "true"},
        "token": "short",
    }
    found = secrets_of("https://url-user1:url-pass1@host?sig=url-query1", options)
    assert {"url-user1", "url-pass1", "url-query1"} <= set(found)
    assert {"environment-1", "environment-22", "option-1", "option-22", "header-333"} <= set(found)
    assert not {"eu-central-1", "http://host", "true", "short"} & set(found)
    assert found == sorted(found, key=len, reverse=True)
