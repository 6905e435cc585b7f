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
