"""Another implementation of S3: moto's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiofeed
from aiofeed.objects.reader import ObjectReader
from tests.support.fault_server import start_obstore

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.filterwarnings("default")]

NUMBERS = 1010


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, Any]]:
    """The options of a bucket with more objects than a page of a listing has."""
    pytest.importorskip("moto")
    boto3 = pytest.importorskip("boto3")
    from moto.server import ThreadedMotoServer

    start_obstore()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    options = {"access_key_id": "test", "secret_access_key": "testtest", "region": "us-east-1"}
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="test", aws_secret_access_key="testtest", region_name="us-east-1"
    )
    client.create_bucket(Bucket="bucket")
    for number in range(NUMBERS):
        client.put_object(
            Bucket="bucket", Key=f"train/c{int(number < 5)}/{number:05} é+.jpg", Body=str(number).encode()
        )
    yield {"endpoint": endpoint, **options}
    client.close()
    server.stop()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path))


def test_an_epoch(bucket: dict[str, Any]) -> None:
    """A bucket is listed in several pages, and each object is read once in an epoch."""
    source = aiofeed.ImageFolder("s3://bucket/train/", options=bucket)
    assert (len(source), source.classes) == (NUMBERS, ["c0", "c1"])
    with aiofeed.Feeder(source, decode=int_of, batch_size=64, shuffle=True) as feeder:
        found = [pair for numbers, targets in feeder for pair in zip(numbers.tolist(), targets.tolist(), strict=True)]
    assert sorted(found) == [(number, int(number < 5)) for number in range(NUMBERS)]


def int_of(data: bytes) -> int:
    return int(data)


async def test_ranges_and_etags(bucket: dict[str, Any]) -> None:
    """Ranges are those of the object; another etag is an error, and so is a missing object."""
    reader = ObjectReader("s3://bucket/train", options=bucket)
    key = "c0/01001 é+.jpg"
    info = await reader.head(key)
    assert info.size == 4
    assert await reader.read_ranges(key, [0, 2], [1, 4], info=info) == [b"1", b"01"]
    with pytest.raises(OSError, match="has changed"):
        await reader.read_ranges(key, [0], [1], info=info._replace(etag='"0"'))
    with pytest.raises(FileNotFoundError):
        await reader.read("nothing")
    with pytest.raises(OSError, match="ends before byte"):
        await reader.read_ranges(key, [0], [5])
