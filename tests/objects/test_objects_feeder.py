"""Feeders over URLs."""

import os
import random
import subprocess
import sys
import traceback
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiofeed
from aiofeed.objects import clients as clients_module
from aiofeed.objects import reader as reader_module
from aiofeed.objects import samples as samples_module
from aiofeed.objects.clients import open_requests
from tests.conftest import write_image_folder
from tests.support.examples import examples
from tests.support.fault_server import Fault
from tests.support.number_decoders import scalar
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import until

EXAMPLES = examples(9)
SAMPLES = 200


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(reader_module, "backoff_s", lambda attempt, jitter: 0.001)


@pytest.fixture
def files(object_server):
    object_server.objects.update({f"bucket/{number}": str(number).encode() for number in range(SAMPLES)})
    urls = [f"s3://bucket/{number}" for number in range(SAMPLES)]
    return aiofeed.Files(urls, list(range(SAMPLES)), options=object_server.options)


def new_feeder(files, **arguments):
    return aiofeed.Feeder(files, **{"decode": scalar, "batch_size": 16, "shuffle": True, "seed": 3, **arguments})


def numbers_of(batch):
    numbers, targets = batch
    assert numbers.tolist() == targets.tolist()
    return numbers.tolist()


def epoch(feeder):
    return [number for batch in feeder for number in numbers_of(batch)]


@pytest.fixture
def expected():
    """The order of epoch 0."""

    class Numbers:
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            return index, index

    with aiofeed.Feeder(Numbers(), batch_size=16, shuffle=True, seed=3) as feeder:
        return epoch(feeder)


def test_images_as_from_files(object_server, tmp_path):
    """Batches of images are the same from a folder, from its URL and from the URLs of its files."""
    folder = write_image_folder(tmp_path / "train", 4)
    for path in folder.rglob("*.jpg"):
        object_server.objects[f"bucket/{path.relative_to(tmp_path)}"] = path.read_bytes()
    local = aiofeed.ImageFolder(folder)
    remote = aiofeed.ImageFolder("s3://bucket/train", options=object_server.options)
    listed = aiofeed.Files(remote.paths, remote.targets)
    by_http = [f"{object_server.endpoint}/bucket/{os.path.relpath(path, tmp_path)}" for path in local.paths]
    sources = [
        local,
        remote,
        listed,
        aiofeed.Files(by_http, local.targets),
        aiofeed.Files(
            [os.path.relpath(path, tmp_path) for path in local.paths],
            local.targets,
            root="s3://bucket",
            options=object_server.options,
        ),
    ]
    epochs = []
    for source in sources:
        decode = aiofeed.DecodeImage(size=32)
        with aiofeed.Feeder(source, decode=decode, batch_size=4, shuffle=True) as feeder:
            epochs.append([(images.tolist(), targets.tolist()) for images, targets in feeder])
    assert all(found == epochs[0] for found in epochs)


@pytest.mark.parametrize("kind", ["classes", "pairs"])
def test_an_object_of_another_size_than_in_its_listing(object_server, kind):
    """An object that was replaced, cut or exchanged by a proxy since it was listed is an error with both sizes."""
    object_server.objects.update({f"bucket/{folder}/{name}.png": b"1" for folder in "xy" for name in range(9)})
    if kind == "classes":
        source = aiofeed.ImageFolder("s3://bucket", options=object_server.options)
    else:
        source = aiofeed.FolderPairs("s3://bucket/x", "s3://bucket/y", options=object_server.options)
    object_server.objects["bucket/y/3.png"] = b"<html>"
    policy = aiofeed.FailurePolicy("skip", max_failures=1)
    with aiofeed.Feeder(source, decode=lambda data: len(data), batch_size=3, on_error=policy) as feeder:
        list(feeder)
        [failure] = feeder.failures
    assert "6 bytes, and the listing has 1" in str(failure)
    assert "bucket/y/3.png" in str(failure)


@pytest.mark.slow
def test_urls_with_queries_of_their_own(object_server, expected, monkeypatch):
    """URLs that differ in their query are read through one client, which keeps some connections only."""
    monkeypatch.setattr(clients_module, "QUERIES", 8)
    object_server.objects.update({f"bucket/{number}": str(number).encode() for number in range(SAMPLES)})
    urls = [f"{object_server.endpoint}/bucket/{number}?w=5%26&id={number}" for number in range(SAMPLES)]
    files = aiofeed.Files(urls, list(range(SAMPLES)))
    with new_feeder(files) as feeder:
        assert epoch(feeder) == expected
        assert sorted(epoch(feeder)) == list(range(SAMPLES))
    assert all(request.query == {"w": ["5&"], "id": [request.key[7:]]} for request in object_server.requests)
    [reader] = files._objects.readers
    assert len(reader._client._made) == 8
    until(lambda: object_server.connections <= 16)


def test_queries_in_a_cache(object_server, tmp_path):
    """A cache distinguishes URLs that differ in their query, but not in its signature."""
    object_server.schedule = lambda request: object_server.objects.update(
        {request.key: request.query["id"][0].encode()}
    )
    for epoch_number in range(2):
        urls = [f"{object_server.endpoint}/bucket/get?id={number}&sig={epoch_number}" for number in range(20)]
        cache = aiofeed.EncodedCache(tmp_path / "cache", 1 << 20)
        with aiofeed.Feeder(aiofeed.Files(urls), decode=scalar, batch_size=4, cache=cache) as feeder:
            assert sorted(number for batch in feeder for number in batch.tolist()) == list(range(20))
            assert feeder.statistics().storage.cache_hits == 20 * epoch_number


def test_statistics(files, expected):
    """``statistics`` shows the requests; of files in a folder it shows none."""
    with new_feeder(files) as feeder:
        assert epoch(feeder) == expected
        found = feeder.statistics().storage
        assert found.requests == SAMPLES + found.hedges
        assert found.bytes_read == sum(len(str(number)) for number in range(SAMPLES))
        assert 0 < found.latency_p50_s <= found.latency_p95_s <= found.latency_p99_s
        assert f"{found.requests} requests" in str(feeder.statistics())
    with aiofeed.Feeder(aiofeed.Files([__file__]), decode=len, batch_size=1) as feeder:
        list(feeder)
        assert feeder.statistics().storage is None


def test_statistics_of_a_mixture(files, object_server):
    """The requests of all its sources that are at URLs, and the latencies of the slowest."""
    other = aiofeed.Files(files.paths[:], list(range(SAMPLES)), options=object_server.options)
    mixture = aiofeed.Mixture({"one": files, "other": other}, {"one": 1.0, "other": 1.0}, until=100)
    with aiofeed.Feeder(mixture, decode=scalar, batch_size=10) as feeder:
        assert sum(len(batch[0]) for batch in feeder) == 100
        storage = feeder.statistics().storage
    parts = [files.storage_statistics(), other.storage_statistics()]
    assert storage.requests == sum(part.requests for part in parts) >= 100
    assert storage.latency_p50_s == max(part.latency_p50_s for part in parts)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"engine": "process:2"}, marks=pytest.mark.slow),
        {"device": SimulatedDevice()},
        {"cache": "host"},
        {"in_order": False},
        {"limits": aiofeed.Limits(read_concurrency=3)},
    ],
    ids=["process", "device", "cache", "unordered", "few reads"],
)
def test_two_epochs(files, expected, arguments):
    """Every sample comes exactly once per epoch, however the feeder works; in order, unless it is not wanted."""
    with new_feeder(files, **arguments) as feeder:
        for number in range(2):
            found = epoch(feeder)
            assert sorted(found) == list(range(SAMPLES))
            if not number and "in_order" not in arguments:
                assert found == expected


def test_breaks(files, object_server):
    """After a ``break``, no request is open, and the next epoch is complete; figures do not grow with the breaks."""
    object_server.schedule = lambda request: Fault(delay_s=0.002)
    with new_feeder(files) as feeder:
        for _ in range(20):
            for _ in feeder:
                break
        assert sorted(epoch(feeder)) == list(range(SAMPLES))
    assert len(files._objects.readers[0]._monitors) <= 2


def test_a_break_cancels_requests(files, object_server):
    """``close`` cancels requests that wait for an answer, at once."""
    object_server.schedule = lambda request: Fault(stall=True) if request.number >= 40 else None
    feeder = new_feeder(files)
    iterator = iter(feeder)
    next(iterator)
    until(lambda: object_server.count > 41)
    feeder.close()
    assert not open_requests


def test_expired_credentials_in_mid_epoch(files, object_server, expected):
    """Credentials that expire in an epoch are obtained again, and nothing is lost."""
    renewed = []

    def check(request):
        if 60 <= request.number < 90:
            renewed.append(request.key)
            return Fault(status=403, code="ExpiredToken") if renewed.count(request.key) == 1 else None
        return None

    object_server.schedule = check
    with new_feeder(files) as feeder:
        assert epoch(feeder) == expected
        assert feeder.statistics().storage.retries >= 1
    assert renewed


def test_throttling(files, object_server, expected):
    """A store that throttles everything for a while delays the epoch, and nothing is lost."""
    object_server.schedule = lambda request: Fault(status=503, code="SlowDown") if 50 < request.number < 900 else None
    with new_feeder(files) as feeder:
        assert epoch(feeder) == expected
        assert feeder.statistics().storage.retries >= 800
        assert feeder.statistics().retries == 0


def test_a_server_that_dies_and_comes_back(files, object_server, expected):
    """A server that is away in an epoch delays it, and nothing is lost."""
    object_server.schedule = lambda request: Fault(delay_s=0.02)  # reads are in flight when it stops
    found = []
    with new_feeder(files, limits=aiofeed.Limits(read_concurrency=16, prefetch_batches=1)) as feeder:
        for number, batch in enumerate(feeder):
            found += numbers_of(batch)
            if number == 3:
                object_server.stop()
                until(lambda: feeder.statistics().storage.retries > 5)
                object_server.start()
    assert found == expected


@pytest.mark.parametrize("action", ["raise", "skip", "replace"])
def test_missing_and_denied_objects(files, object_server, action):
    """A missing object and a denied one are errors with their URLs; skipped or replaced, all others come."""
    bad = {"bucket/7": 404, "bucket/9": 403}
    object_server.schedule = lambda request: Fault(status=bad.get(request.key, 0))
    policy = aiofeed.FailurePolicy(action, retries=3, max_failures=2)
    with new_feeder(files, on_error=policy, shuffle=False) as feeder:
        if action == "raise":
            with pytest.raises(aiofeed.errors.ReadError, match=r"s3://bucket/7.*no such object"):
                epoch(feeder)
            return
        found = epoch(feeder)
        assert set(range(SAMPLES)) - set(found) == {7, 9}
        assert len(found) == SAMPLES - (2 if action == "skip" else 0)
        assert {failure.key for failure in feeder.failures} == {"s3://bucket/7", "s3://bucket/9"}
        assert feeder.statistics().retries == 0
    asked = [request.key for request in object_server.requests]
    assert all(asked.count(key) <= 2 for key in bad)


def test_max_bytes(object_server):
    """An object that is too large is an error before its bytes are read."""
    object_server.objects["bucket/large"] = bytes(3_000_000)
    source = aiofeed.Files(["s3://bucket/large"], max_bytes=1000, options=object_server.options)
    with aiofeed.Feeder(source, decode=len, batch_size=1) as feeder:
        with pytest.raises(aiofeed.errors.ReadError, match="3000000 bytes are more than max_bytes=1000"):
            list(feeder)
        assert feeder.statistics().storage.bytes_read == 0


FAULTS = st.one_of(
    st.none(),
    st.sampled_from([Fault(status=503), Fault(status=500), Fault(close=True), Fault(delay_s=0.01), Fault(cut=0)]),
)


def test_random_schedules(files, object_server, expected):
    """Whatever faults come in whatever order, an epoch is exactly that without faults."""

    @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
    @given(st.lists(FAULTS, max_size=100), st.integers(1, 70), st.booleans())
    def check(faults, reads, stops):
        object_server.count = 0
        object_server.schedule = lambda request: faults[request.number] if request.number < len(faults) else None
        with new_feeder(files, limits=aiofeed.Limits(read_concurrency=reads)) as feeder:
            if stops:
                for _ in feeder:
                    break
                feeder.set_epoch(0)
            assert epoch(feeder) == expected

    check()


# --- arguments


@pytest.mark.parametrize(
    ("paths", "arguments", "error", "message"),
    [
        (["s3://b/a", "c.jpg"], {}, ValueError, "'c.jpg', number 1, is a file, and number 0 is a URL"),
        (["c.jpg", "s3://b/a"], {}, ValueError, "'s3://b/a', number 1, is a URL, and number 0 is a file"),
        (["s3://b/a", 3], {}, TypeError, "number 1 is 3"),
        (["hdfs://b/a"], {}, ValueError, "must be one of s3://"),
        (["a.jpg"], {"options": {}}, ValueError, "options= are for the store of URLs"),
        (["../a.jpg"], {"root": "s3://b/train"}, ValueError, "may lead out of root='s3://b/train'"),
        (["/a.jpg"], {"root": "s3://b/train"}, ValueError, "is not relative to root='s3://b/train'"),
        (["s3://b/a", "s3://c/a"], {"store": SimpleNamespace(get_async=None)}, ValueError, "store= is one bucket"),
        (["s3://b/a"], {"store": "s3://b"}, TypeError, "store must be an obstore store.*got str"),
        (["s3://b/a"], {"options": "region"}, TypeError, "options must be a dict.*got str"),
    ],
)
def test_bad_arguments(paths, arguments, error, message):
    """Lists that cannot be read are errors of the constructor, with the entry and its number."""
    with pytest.raises(error, match=message):
        aiofeed.Files(paths, **arguments)


def test_a_root_is_redacted_once(monkeypatch):
    """Keys below a root need no look at the root for each key."""
    texts = []
    monkeypatch.setattr(samples_module, "redacted", lambda text: texts.append(text) or text)
    source = aiofeed.Files([f"{number}/a..b" for number in range(50)], root="s3://bucket/train")
    assert source.paths[7] == "s3://bucket/train/7/a..b"
    assert texts == ["s3://bucket/train"]


@pytest.mark.parametrize("arguments", [{"options": {}}, {"refresh": True}])
def test_arguments_of_urls_for_a_folder(tmp_path, arguments):
    """Arguments that have an effect on URLs only are an error for a folder."""
    with pytest.raises(ValueError, match="are for URLs"):
        aiofeed.ImageFolder(tmp_path, **arguments)


def test_bad_options(object_server):
    """An option that the store does not have is an error that names it, without the values of others."""
    source = aiofeed.Files(["s3://b/a"], options={"secret_access_key": "hunter-2222", "no_such": "x"})
    with aiofeed.Feeder(source, decode=len, batch_size=1) as feeder, pytest.raises(aiofeed.errors.ReadError) as raised:
        list(feeder)
    assert "no_such" in str(raised.value)
    assert "hunter" not in "".join(traceback.format_exception(raised.value))


def test_urls_of_files(tmp_path):
    """file:// URLs are files."""
    (tmp_path / "a b").write_bytes(b"7")
    source = aiofeed.Files([(tmp_path / "a b").as_uri()])
    assert source.paths == [str(tmp_path / "a b")]
    rooted = aiofeed.Files(["a b"], root=tmp_path.as_uri())
    assert rooted.paths == [str(tmp_path / "a b")]
    for each in (source, rooted):
        with aiofeed.Feeder(each, decode=scalar, batch_size=1) as feeder:
            assert [batch.tolist() for batch in feeder] == [[7]]


def test_without_obstore(tmp_path):
    """Without obstore, a URL is an error that says what to install; paths need no obstore."""
    program = """
import sys
sys.modules["obstore"] = None
import aiofeed
aiofeed.Files(["a.jpg"])
for source in (aiofeed.ImageFolder, lambda url: aiofeed.Files([url])):
    try:
        source("s3://bucket/train")
    except ImportError as error:
        print(error)
"""
    environment = {**os.environ, "AIOFEED_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.count('pip install "aiofeed[objects]"') == 2, done.stderr


def test_obstore_is_imported_when_needed():
    """Files in folders, and a list of URLs that is not read, do not import obstore."""
    program = """
import sys, aiofeed
aiofeed.Files(["s3://bucket/a"]), aiofeed.Files(["a"])
print(sorted(name for name in sys.modules if name in ("obstore", "torch")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


EXITS = {
    "open requests": "sys.exit(7)",
    "error": "raise ValueError",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); list(iterator)",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", EXITS.values(), ids=EXITS)
def test_exit_of_a_feeder(files, object_server, way):
    """An interpreter that exits while requests are open ends as usual."""
    object_server.schedule = lambda request: Fault(delay_s=random.choice([0.001, 0.003]))
    program = f"""
import os, signal, sys, aiofeed
files = aiofeed.Files([f"s3://bucket/{{number % 200}}" for number in range(100000)], options={object_server.options})
feeder = aiofeed.Feeder(files, decode=len, batch_size=16)
iterator = iter(feeder)
next(iterator)
{way}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode in (7, 1, -2, 130), done.stderr
    assert "Aborted" not in done.stderr


@pytest.mark.slow
def test_exit_after_reads(object_server):
    """An exit right after requests does not meet obstore's threads in Python, which would abort the process."""
    object_server.objects["bucket/a"] = b"a"
    program = f"""
import asyncio
from aiofeed.objects.reader import ObjectReader
reader = ObjectReader("s3://bucket", options={object_server.options})
async def main():
    await asyncio.gather(*[reader.read("a") for _ in range(200)])
asyncio.run(main())
"""
    # Without the wait at exit, about one process in seven was aborted.
    for _ in range(20):
        subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("cache", [None, "host"])
def test_a_decoder_gets_the_bytes_of_large_objects(object_server, cache):
    """Large objects reach the decoder as ``bytes``, whose size the statistics count."""
    large = [bytes([number]) * samples_module.UNCOPIED_LEAST for number in range(1, 9)]
    object_server.objects.update({f"bucket/{number}": data for number, data in enumerate(large)})
    files = aiofeed.Files([f"s3://bucket/{number}" for number in range(8)], options=object_server.options)

    def decode(data):
        assert type(data) is bytes
        return np.array([data[0], len(data)])

    with aiofeed.Feeder(files, decode=decode, batch_size=4, cache=cache) as feeder:
        found = np.concatenate([batch.numpy() for batch in feeder])
        assert found.tolist() == [[data[0], len(data)] for data in large]
        assert feeder.statistics().bytes_read == sum(map(len, large))


def test_a_read_many_of_a_subclass_reads_large_objects(object_server):
    """A subclass may replace ``read_many``: it gets ``bytes`` of that of ``Files``, and the feeder its samples."""
    object_server.objects["bucket/a"] = bytes(samples_module.UNCOPIED_LEAST)

    class Ends(aiofeed.Files):
        async def read_many(self, indices, /):
            return [data[:3] + b"end" for data in await super().read_many(indices)]

    files = Ends(["s3://bucket/a"], options=object_server.options)
    with aiofeed.Feeder(files, decode=list, batch_size=1) as feeder:
        assert [[int(value) for value in batch] for batch in feeder] == [list(b"\0\0\0end")]
