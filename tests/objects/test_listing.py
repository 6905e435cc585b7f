import json
import logging
import os
import re
import signal

import pytest

import aiofeed
from aiofeed.common import cache_folder as folder_module
from aiofeed.common import progress_bar
from aiofeed.common.cache_folder import cache_folder
from aiofeed.objects import reader
from aiofeed.objects.clients import open_requests
from aiofeed.objects.listing import list_objects
from aiofeed.objects.reader import ObjectReader
from tests.support.fault_server import Fault

KEYS = sorted([f"c{number % 3}/{number:03}.jpg" for number in range(40)] + ["a.txt", "c1/deep/er/x.png", "z.txt"])


@pytest.fixture(autouse=True)
def folder(object_server, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "backoff_s", lambda attempt, jitter: 0.001)
    monkeypatch.setattr(reader, "PAGE", 7)
    return tmp_path / "aiofeed-cache"


@pytest.fixture
def bucket(server):
    server.page = 7
    server.objects.update({f"bucket/train/{key}": key.encode() for key in KEYS})
    server.objects["bucket/train-2/other.jpg"] = b""
    return ObjectReader("s3://bucket/train/", options=server.options)


def test_all_objects_in_order(bucket):
    """A listing has every key below the URL in the order of its bytes, and the sizes."""
    found = list_objects(bucket)
    assert list(found.keys) == KEYS
    assert found.sizes.tolist() == [len(key) for key in KEYS]


def test_a_folder_of_files(tmp_path):
    """A folder is listed like a bucket, and not cached."""
    for key in KEYS:
        (tmp_path / "train" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / key).write_bytes(key.encode())
    found = list_objects(ObjectReader(str(tmp_path / "train")))
    assert (list(found.keys), found.sizes.tolist()) == (KEYS, [len(key) for key in KEYS])
    assert not cache_folder().exists()


def test_a_flat_bucket(server):
    """Keys without folders are listed page by page."""
    server.page = 3
    server.objects.update({f"bucket/{number}": b"" for number in range(10)})
    assert len(list_objects(ObjectReader("s3://bucket", options=server.options)).keys) == 10
    assert all("delimiter" not in request.query for request in server.requests)


def test_an_empty_bucket(server):
    """A bucket without objects has an empty listing, from the cache too."""
    empty = ObjectReader("s3://bucket", options=server.options)
    assert [len(list_objects(empty).keys) for _ in range(2)] == [0, 0]


def test_the_cache_is_used_until_refreshed(bucket, server):
    """A second listing makes no request; ``refresh`` lists again, and the etag tells whether anything changed."""
    first = list_objects(bucket)
    before = server.count
    cached = list_objects(ObjectReader("s3://bucket/train/", options=server.options))
    assert server.count == before
    assert (list(cached.keys), cached.sizes.tolist()) == (list(first.keys), first.sizes.tolist())
    assert (cached.etag, cached.listed_at) == (first.etag, first.listed_at)
    assert list_objects(bucket, refresh=True).etag == first.etag
    server.objects["bucket/train/c0/000.jpg"] = b"replaced"
    assert list_objects(bucket, refresh=True).etag != first.etag


def test_listings_of_other_servers_are_others(bucket, server):
    """The same bucket name at another endpoint has a listing of its own."""
    list_objects(bucket)
    other = ObjectReader("s3://bucket/train/", options={**server.options, "endpoint": f"{server.endpoint}/"})
    before = server.count
    list_objects(other)
    assert server.count > before


@pytest.mark.parametrize("damage", [b"", b"{}\n", b'{"version": 1, "objects": 9', "cut"])
def test_a_damaged_cache_is_made_again(bucket, folder, damage):
    """A cached listing that is cut or has other contents is not used."""
    expected = list(list_objects(bucket).keys)
    [path] = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if damage == "cut" else damage)
    assert list(list_objects(bucket).keys) == expected


def test_a_cache_that_cannot_be_written(bucket, folder, caplog):
    """If the cache cannot be written, the listing is used without it, with a log line."""
    folder.write_bytes(b"a file in the place of the folder")
    assert list(list_objects(bucket).keys) == KEYS
    assert "is not cached" in caplog.text


def test_the_cache_has_no_credentials(server, folder):
    """Neither the name nor the contents of the file have credentials."""
    server.objects["bucket/a"] = b""
    options = {**server.options, "secret_access_key": "hunter2222", "token": "hunter3333"}
    list_objects(ObjectReader("s3://bucket", options=options))
    [path] = folder.iterdir()
    assert b"hunter" not in path.name.encode() + path.read_bytes()
    assert json.loads(path.read_bytes().partition(b"\n")[0])["url"] == "s3://bucket/"


def test_faults_lose_no_key(bucket, server):
    """A page that fails is listed again after the last key; none is lost or comes twice."""
    server.schedule = lambda request: [None, Fault(status=503), Fault(cut=50), Fault(close=True)][request.number % 4]
    assert list(list_objects(bucket).keys) == KEYS


def test_progress_is_logged(bucket, monkeypatch, caplog):
    """A listing that takes long logs how many keys it has."""
    monkeypatch.setattr(progress_bar, "LOG_EVERY_S", 0.0)
    list_objects(bucket)
    assert re.findall(r"listed (\d+) keys of s3://bucket/train/", caplog.text)[-1] == str(len(KEYS) - 2)


def test_a_listing_from_the_cache_is_logged(bucket, caplog):
    """The age of a cached listing and the way to refresh it are logged."""
    caplog.set_level(logging.INFO)
    list_objects(bucket)
    list_objects(bucket)
    assert "a listing 0.0 hours old" in caplog.text
    assert "refresh=True" in caplog.text


def test_denied(bucket, server):
    """Without the permission to list there is an error that names the URL, at once."""
    server.schedule = lambda request: Fault(status=403, code="AccessDenied")
    with pytest.raises(PermissionError, match=r"access is denied.*AccessDenied"):
        list_objects(bucket)
    assert server.count == 1


def test_web_servers_cannot_be_listed(server):
    """A web server has no listing: the error says what to pass instead."""
    with pytest.raises(ValueError, match=r"cannot be listed.*aiofeed\.Files"):
        aiofeed.ImageFolder(f"{server.endpoint}/train")


@pytest.mark.usefixtures("obstore_started")
def test_other_stores():
    """A store in memory is listed, and not cached."""
    from obstore.store import MemoryStore

    store = MemoryStore()
    store.put("cat/1.jpg", b"1")
    assert list(aiofeed.ImageFolder("", store=store).paths) == ["cat/1.jpg"]
    store.put("cat/2.jpg", b"2")
    assert list(aiofeed.ImageFolder("", store=store).paths) == ["cat/1.jpg", "cat/2.jpg"]
    store.put("train/dog/3.jpg", b"3")
    assert list(aiofeed.ImageFolder("train", store=store).paths) == ["train/dog/3.jpg"]
    source = aiofeed.ImageFolder("s3://bucket/train/", store=store)
    assert list(source.paths) == ["s3://bucket/train/dog/3.jpg"]
    for each in (source, aiofeed.ImageFolder("train", store=store)):
        with aiofeed.Feeder(each, decode=len, batch_size=1) as feeder:
            assert len(list(feeder)) == 1


def test_folders_as_on_disk(server, tmp_path):
    """``ImageFolder`` at a URL has the classes, the targets and the order that it has on disk."""
    names = ["b.jpg", "b/c.JPG", "b/d.webp", "b!/e.png", "a.txt", "é.jpg", "Z.jpg", ".jpg", "b/c/d/e.bmp", "b/c-d.tif"]
    for kind in ("cats", "cats!", "Dogs", ".hidden", "ä"):
        for name in names:
            path = tmp_path / "train" / kind / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            server.objects[f"bucket/train/{kind}/{name}"] = b""
    server.objects["bucket/train/README.jpg"] = b""
    local = aiofeed.ImageFolder(tmp_path / "train")
    remote = aiofeed.ImageFolder("s3://bucket/train", options=server.options)
    assert [os.path.relpath(path, tmp_path) for path in local.paths] == [path[12:] for path in remote.paths]
    assert (local.classes, local.class_to_idx) == (remote.classes, remote.class_to_idx)
    assert local.targets == list(remote.targets)
    assert type(remote.target(3)) is int
    assert list(aiofeed.ImageFolder((tmp_path / "train").as_uri()).paths) == local.paths


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "has no sub-folders"),
        (["a.jpg", "b.jpg"], "has 2 images but no sub-folders"),
        (["c/", "c/a.txt", "d/a.jpg"], "class 'c' of 's3://bucket/train' has no images"),
    ],
)
def test_folders_without_images(server, keys, message):
    """A URL without classes, or a class without images, is the error that a folder raises."""
    server.objects.update({f"bucket/train/{key}": b"" for key in keys})
    with pytest.raises(FileNotFoundError, match=message):
        aiofeed.ImageFolder("s3://bucket/train", options=server.options)


def test_default_folder_of_the_cache(monkeypatch):
    """Without $AIOFEED_CACHE, caches are in the cache folder of the platform."""
    monkeypatch.delenv("AIOFEED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setattr(folder_module.sys, "platform", "linux")
    assert str(cache_folder()) == "/caches/aiofeed"


def test_without_a_home_nothing_is_cached(monkeypatch, server, caplog):
    """A user id without an account and without HOME has no cache folder, which one warning says."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AIOFEED_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(folder_module.Path, "home", home)
    folder_module._warn_without_home.cache_clear()
    server.objects.update({f"bucket/train/ant/{number}.jpg": b"" for number in range(3)})
    for _ in range(2):
        assert len(aiofeed.ImageFolder("s3://bucket/train", options=server.options)) == 3
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "listings and indexes are not cached, because this user has no home folder"
    ]


def test_ctrl_c_while_listing(bucket, server):
    """Ctrl-C ends a listing whose server does not answer, and its request."""

    def interrupt(request):
        os.kill(os.getpid(), signal.SIGINT)
        return Fault(stall=True)

    server.schedule = interrupt
    with pytest.raises(KeyboardInterrupt):
        list_objects(bucket)
    assert not open_requests


async def test_listing_beside_a_loop(bucket):
    """A source can be made where an event loop runs, as in a notebook."""
    assert len(list_objects(bucket).keys) == len(KEYS)
