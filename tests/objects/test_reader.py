import asyncio
from typing import Any

import pytest

from aiofeed.objects.reader import PART_BYTES, ObjectReader

BIG = bytes(range(256)) * (3 * PART_BYTES // 256)
OBJECTS = {"a": b"0123456789" * 100, "d/b": b"b", "d/e f#%[1].bin": b"e", "d-2/c": b"c", "empty": b"", "big": BIG}


@pytest.fixture(params=["s3", "gs", "az", "http", "local"])
def reader(request, server, tmp_path):
    server.objects.update({f"bucket/{key}": data for key, data in OBJECTS.items()})
    server.page = 2
    if request.param == "s3":
        return ObjectReader("s3://bucket", options=server.options)
    if request.param == "gs":
        return ObjectReader("gs://bucket", options={"base_url": server.endpoint, "skip_signature": True})
    if request.param == "az":
        options = {"account_name": "account", "endpoint": server.endpoint, "skip_signature": True}
        return ObjectReader("az://bucket", options=options)
    if request.param == "http":
        return ObjectReader(f"{server.endpoint}/bucket/")
    for key, data in OBJECTS.items():
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(data)
    return ObjectReader(f"file://{tmp_path}")


async def test_whole_objects(reader):
    """An object of any size and name is read whole, and ``head`` returns its size."""
    for key, data in OBJECTS.items():
        assert await reader.read(key) == data
        assert (await reader.head(key)).size == len(data)


async def test_ranges(reader):
    """Ranges in any order, that overlap, are empty, far apart or long, return their own bytes."""
    starts = [700_000, 5, 900_000, 4, 5, 0, PART_BYTES - 1]
    ends = [700_010, 10, 2 * PART_BYTES + 5, 4, 5, 7, 3 * PART_BYTES]
    info = await reader.head("big")
    found = await reader.read_ranges("big", starts, ends, info=info)
    assert found == [BIG[start:end] for start, end in zip(starts, ends, strict=True)]
    assert {type(data) for data in found} == {bytes}


async def test_views(reader):
    """Large ranges may be views of one request's bytes; small ones never keep what was received with them."""
    # A small range alone, a small and a large one that one request reads, and one of several parts.
    starts, ends = [0, 1 << 20, (1 << 20) + 5, PART_BYTES], [9, (1 << 20) + 7, 3 << 20, 3 * PART_BYTES]
    found = await reader.read_views("big", starts, ends)
    assert [bytes(data) for data in found] == [BIG[start:end] for start, end in zip(starts, ends, strict=True)]
    assert type(found[0]) is bytes
    if not reader.is_local:
        assert {type(data) for data in found[1:]} == {memoryview}
        assert found[1].obj is found[2].obj


@pytest.mark.parametrize("reader", ["s3", "gs", "local"], indirect=True)
async def test_listing(reader):
    """Pages list the keys below a folder, with their sizes."""
    listed = {key: info.size async for page in reader.list() for key, info in page}
    assert listed == {key: len(data) for key, data in OBJECTS.items()}
    assert [key async for page in reader.list("d") for key, _ in page] == ["d/b", "d/e f#%[1].bin"]


@pytest.mark.parametrize("key", ["missing", "missing/too"])
async def test_a_missing_object_is_not_asked_for_again(reader, server, key):
    """A missing object is a ``FileNotFoundError`` after one request."""
    before = server.count
    with pytest.raises(FileNotFoundError, match=key):
        await reader.read(key)
    assert server.count - before <= 1


async def test_a_range_past_the_end_is_an_error(reader):
    """A range of which the object has only a part, or nothing, is an error with the object's name."""
    for start, end in ((990, 1001), (2000, 2001)):
        with pytest.raises(OSError, match=r"(ends before byte|is shorter than).*a$"):
            await reader.read_ranges("a", [start], [end])


async def test_a_changed_object_is_an_error(reader):
    """With the etag of another version, a range is an error with the object's name."""
    info = await reader.head("a")
    with pytest.raises(OSError, match=r"has changed.*a$"):
        await reader.read_ranges("a", [0], [1], info=info._replace(etag='"other"'))


# --- options that obstore does not take -------------------------------------------------------------------------------

KEYS = {"access_key_id": "key", "secret_access_key": "hidden", "region": "us-east-1"}


@pytest.mark.parametrize("name", ["endpoint", "aws_endpoint_url", "AWS_ENDPOINT"])
@pytest.mark.parametrize("root", ["s3://bucket/train", "az://account/train"])
def test_an_endpoint_without_a_scheme_is_refused(root: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """obstore would panic at the first request; the error shows the endpoint with a scheme."""
    reader = ObjectReader(root, options={**KEYS, name: "127.0.0.1:9"})
    with pytest.raises(
        ValueError, match=r'the endpoint .* must begin with http:// .*"http://127\.0\.0\.1:9"'
    ) as raised:
        asyncio.run(reader.read("x"))
    assert "hidden" not in str(raised.value)
    assert "panicked" not in capfd.readouterr().err


def read_of(root: str, **options: Any) -> str:
    """The error of a read by a store with these options."""
    with pytest.raises((ValueError, OSError)) as raised:
        asyncio.run(ObjectReader(root, options={**KEYS, **options}).read("x"))
    return str(raised.value)


@pytest.mark.parametrize("url", ["", "http://", "://host", "ftp://a", "http://[::1", "http://a:99999", "http://a b"])
def test_an_endpoint_that_names_no_server_is_refused(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever is wrong with the URL."""
    for name in ("endpoint", "metadata_endpoint"):
        found = read_of("s3://bucket/train", **{name: url})
        assert f"the endpoint {url!r} must" in found
        assert f'{{"{name}": "http://' in found
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("root", "name", "of_another"),
    [
        ("s3://bucket/train", "AWS_ENDPOINT", "GOOGLE_BASE_URL"),
        ("s3://bucket/train", "AWS_ENDPOINT_URL_S3", "AZURE_ENDPOINT"),
        ("az://account/train", "AZURE_STORAGE_ENDPOINT", "AWS_ENDPOINT"),
        ("gs://bucket/train", "GOOGLE_BASE_URL", "AWS_ENDPOINT_URL"),
    ],
)
def test_endpoints_in_the_environment_are_checked(
    root: str, name: str, of_another: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the URL's store, by all their names."""
    monkeypatch.setenv(of_another, "minio:9000")
    ObjectReader(root, options={"account_name": "account"} if root[0] == "a" else {})._client.store()
    monkeypatch.setenv(name, "127.0.0.1:9")
    with pytest.raises(ValueError, match=rf"127\.0\.0\.1:9' must begin .*{name.lower()}"):
        ObjectReader(root, options={})._client.store()


def test_an_option_takes_the_place_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is not used is not checked; one with http:// allows it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    ObjectReader("s3://bucket", options={**KEYS, "endpoint": "http://127.0.0.1:9"})._client.store()
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    store, _ = ObjectReader("s3://bucket", options=KEYS)._client.store()
    assert store.client_options["allow_http"]


@pytest.mark.parametrize("name", ["access_key_id", "secret_access_key", "token", "region"])
def test_a_setting_with_a_line_break_is_refused_by_its_name(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """As of a secret that was read from a file, which is not shown."""
    found = read_of("s3://bucket/train", **{name: "hidden\n"})
    assert f"{name} has a space, a line break" in found
    assert "hidden" not in found
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["config", "client_options"])
def test_options_within_options_must_be_dicts(name: str) -> None:
    """The error names them."""
    with pytest.raises(TypeError, match=rf"options: '{name}' must be a dict, got bytes"):
        ObjectReader("s3://bucket", options={name: b"x"})


@pytest.mark.parametrize(
    "option", [{"allow_http": True}, {"allow_http": "true"}, {"client_options": {"allow_http": True}}]
)
def test_allow_http_is_an_option_of_the_client(option: dict[str, Any]) -> None:
    """It is taken beside the others, too."""
    store, _ = ObjectReader("s3://bucket/train", options={**KEYS, **option})._client.store()
    assert store.client_options["allow_http"]


def test_a_panic_of_obstore_is_an_error_of_the_read() -> None:
    """Rust code that panics raises what is no ``Exception``; it fails the read, and other errors pass."""

    class PanicException(BaseException):
        """As pyo3 names it."""

    reader = ObjectReader("s3://bucket/train", options=KEYS)

    def read(error: BaseException) -> None:
        async def attempt(store: Any) -> None:
            raise error

        asyncio.run(reader._retried("x", attempt))

    with pytest.raises(OSError, match=r"at one of options=.*Option::unwrap.*: s3://bucket/train/x"):
        read(PanicException("called `Option::unwrap()`"))
    with pytest.raises(GeneratorExit):
        read(GeneratorExit())
