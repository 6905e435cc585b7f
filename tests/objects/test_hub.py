"""``hf://`` URLs: files of the Hugging Face Hub in every source that takes URLs."""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiofeed import Feeder, Files, ImageFolder, ParquetRows, Tokens
from aiofeed.objects import hub as hub_module
from aiofeed.objects.reader import ObjectReader
from tests.support.hub_server import HubServer, commit_of
from tests.support.token_files import write_megatron

pytest.importorskip("huggingface_hub")

TOKENS = np.arange(600, dtype=np.uint16)
FIRST, SECOND = commit_of("1"), commit_of("2")
FILES = {
    "small.txt": b"small",
    "data/a b#%.bin": TOKENS[:400].tobytes(),
    "data/b.bin": TOKENS[400:].tobytes(),
    "data/c/d.txt": b"d" * 300,
    "data-2/e.txt": b"e",
}
ROOT = "hf://datasets/owner/name"


@pytest.fixture
def hub(obstore_started: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[HubServer]:
    """A Hub with a dataset, a model and a space, whose token is ``hf_secret_token``."""
    server = HubServer(token="hf_secret_token")
    for kind in ("datasets", "models", "spaces"):
        server.repositories[f"{kind}/owner/name"] = {FIRST: dict(FILES)}
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "aiofeed-cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret_token")
    monkeypatch.setattr(hub_module, "PAUSE_S", 0.001)
    with server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


@pytest.mark.parametrize("root", [ROOT, f"{ROOT}@main", f"{ROOT}@{FIRST}", "hf://owner/name", "hf://models/owner/name",
                                  "hf://spaces/owner/name@main"])  # fmt: skip
async def test_files_of_repositories(root: str, hub: HubServer) -> None:
    """Files of any size and name are read whole and in ranges; their URLs have the commit."""
    reader = ObjectReader(root)
    for name, data in FILES.items():
        assert await reader.read(name) == data
        info = await reader.head(name)
        assert info.size == len(data)
        assert await reader.read_ranges(name, [0, 1], [1, len(data)], info=info) == [data[:1], data[1:]]
    assert reader.url("small.txt") == f"{root.partition('@')[0]}@{FIRST}/small.txt"


async def test_listing(hub: HubServer) -> None:
    """All pages of a folder are listed, with the files of the folders in it."""
    reader = ObjectReader(ROOT)
    listed = {key: info.size async for page in reader.list() for key, info in page}
    assert listed == {key: len(data) for key, data in FILES.items()}
    assert [key async for page in reader.list("data/") for key, _ in page] == [
        "data/a b#%.bin",
        "data/b.bin",
        "data/c/d.txt",
    ]
    below = ObjectReader(f"{ROOT}/data")
    assert [key async for page in below.list() for key, _ in page] == ["a b#%.bin", "b.bin", "c/d.txt"]


def test_tokens(hub: HubServer) -> None:
    """Token files are found by a glob, and windows read from signed URLs, each of which is requested once."""
    source = Tokens(f"{ROOT}/data/*.bin", 8)
    with Feeder(source, batch_size=5, shuffle=True) as feeder:
        seen = [window for batch in feeder for window in batch.tolist()]
    assert sorted(seen) == TOKENS.reshape(-1, 8).tolist()
    assert source.key(0) == f"{ROOT}@{FIRST}/data/a b#%.bin[0:8]"
    assert len([each for each in hub.paths("/resolve/") if each.startswith("HEAD") and each.endswith(".bin")]) == 2
    assert not [path for method, path, token in hub.requests if path.startswith("/cdn/") and token is not None]


def test_files_and_shards(hub: HubServer, tmp_path: Any) -> None:
    """``Files``, ``ImageFolder`` and Parquet read the Hub as they read other URLs."""
    files = Files(["small.txt", "data/c/d.txt"], root=ROOT)
    with Feeder(files, decode=lambda data: len(data), batch_size=2) as feeder:
        assert next(iter(feeder)).tolist() == [5, 300]
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"x": list(range(100))}), tmp_path / "t.parquet")
    hub.repositories["datasets/owner/name"][FIRST]["t.parquet"] = (tmp_path / "t.parquet").read_bytes()
    rows = ParquetRows(f"{ROOT}/t.parquet")
    with Feeder(rows, decode=lambda row: row["x"], batch_size=100) as feeder:
        assert next(iter(feeder)).tolist() == list(range(100))
    hub.repositories["datasets/owner/name"][FIRST] |= {"images/a/1.jpg": b"1", "images/b/2.jpg": b"2" * 300}
    with Feeder(ImageFolder(f"{ROOT}@main/images"), decode=len, batch_size=2) as feeder:
        sizes, labels = next(iter(feeder))
    assert (sizes.tolist(), labels.tolist()) == ([1, 300], [0, 1])


def test_megatron_beside_its_index(hub: HubServer, tmp_path: Any) -> None:
    """The index beside a ``.bin`` is found in the repository."""
    path = write_megatron(tmp_path / "m.bin", np.split(TOKENS, [7, 500]))
    for each in (path, path.with_suffix(".idx")):
        hub.repositories["datasets/owner/name"][FIRST][each.name] = each.read_bytes()
    source = Tokens(f"{ROOT}/m.bin", 8)
    [documents] = source.documents
    assert documents is not None
    assert documents.tolist() == [0, 7, 500, 600]


def test_the_revision_is_resolved_once(hub: HubServer) -> None:
    """A branch that moves changes neither a source nor its copies; a new source reads its new commit."""
    source = Tokens(f"{ROOT}@main/data/b.bin", 8)
    assert len(hub.paths("/api/datasets/owner/name/revision/main")) == 1
    hub.repositories["datasets/owner/name"][SECOND] = {"data/b.bin": bytes(400)}
    hub.branches["main"] = SECOND
    copied = pickle.loads(pickle.dumps(source))
    with Feeder(copied, batch_size=25) as feeder:
        assert next(iter(feeder)).flatten().tolist() == TOKENS[400:].tolist()
    assert Tokens(f"{ROOT}@main/data/b.bin", 8)[0].tolist() == [0] * 8


def test_an_expired_url_is_signed_again(hub: HubServer) -> None:
    """A signed URL is used until the server refuses it, and then requested again once."""
    source = Tokens(f"{ROOT}/data/b.bin", 8)
    assert source[0].tolist() == TOKENS[400:408].tolist()
    assert source[1].tolist() == TOKENS[408:416].tolist()
    signed = [each for each in hub.paths("/resolve/") if each.endswith("/b.bin")]
    assert len(signed) == 1
    hub.signature = "signature-2"
    assert source[2].tolist() == TOKENS[416:424].tolist()
    assert source[3].tolist() == TOKENS[424:432].tolist()
    assert len([each for each in hub.paths("/resolve/") if each.endswith("/b.bin")]) == 2


@pytest.mark.parametrize("part", ["/api/", "/resolve/", "/cdn/"])
@pytest.mark.parametrize("status", [429, 503])
def test_faults_are_sent_again(part: str, status: int, hub: HubServer) -> None:
    """A busy Hub, and a busy server of files, are asked again."""
    left = [2]

    def fault(method: str, path: str) -> tuple[int, dict[str, str]] | None:
        if part not in path or not left[0]:
            return None
        left[0] -= 1
        return status, {}

    hub.fault = fault
    assert Tokens(f"{ROOT}/data/b.bin", 8)[0].tolist() == TOKENS[400:408].tolist()
    assert left == [0]


@pytest.mark.parametrize(
    ("headers", "wait_s"),  # a negative number: so many usual pauses
    [
        ({"Retry-After": "40"}, 40.0),
        ({"RateLimit": '"resolvers";r=0;t=40'}, 40.0),
        ({"Retry-After": "Thu, 26 Nov 2026 20:00:40 GMT"}, 40.0),
        ({"Retry-After": "Thu, 26 Nov 2026 19:00:00 GMT"}, -1),
        ({"Retry-After": "Thu, 26 Nov 2026 20:30:00 GMT"}, -2),  # too long; the usual pause
        ({"Retry-After": "soon"}, -2),
    ],
)
def test_retry_after_is_obeyed(
    headers: dict[str, str], wait_s: float, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is sent to the Hub before the seconds that it asks to wait are over, or the time that it names."""
    clock, waits = [1000.0], list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock[0] += seconds

    reader = ObjectReader(ROOT)
    monkeypatch.setattr(hub_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(hub_module.time, "time", lambda: 1_795_723_200.0)  # Thu, 26 Nov 2026 20:00:00 GMT
    monkeypatch.setattr(hub_module.asyncio, "sleep", sleep)
    times: list[float] = []

    def fault(method: str, path: str) -> tuple[int, dict[str, str]] | None:
        times.append(clock[0])
        return (429, headers) if len(times) == 1 else None

    hub.fault = fault
    assert asyncio.run(reader.head("data/b.bin")).size == 400
    wait_s = wait_s if wait_s > 0 else -wait_s * hub_module.PAUSE_S
    assert times == [1000.0, 1000.0 + wait_s]
    assert waits == [wait_s]


def test_the_token_is_nowhere(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    """No repr, pickle, log line or error has the token or a signature, also not in what caused the error."""
    caplog.set_level(logging.DEBUG, "aiofeed")
    source = Tokens(f"{ROOT}/data/b.bin", 8)
    assert source[0].tolist() == TOKENS[400:408].tolist()
    reader = source._shards[0].reader  # type: ignore[attr-defined]
    shown = [repr(source), repr(reader), repr(reader._client), repr(pickle.dumps(source)), source.fingerprint()]
    hub.fault = lambda method, path: (403, {})
    for read in (lambda: source[5], lambda: Tokens(f"{ROOT}/data/b.bin", 8)):
        with pytest.raises(PermissionError) as caught:
            read()
        error: BaseException | None = caught.value
        while error is not None:
            shown += [str(error), repr(error.__dict__)]
            error = error.__cause__ or error.__context__
    assert not [text for text in [*shown, caplog.text] if "hf_secret_token" in text or "signature-1" in text]


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        (f"{ROOT}/absent.bin", FileNotFoundError, rf"no such object: '{ROOT}@{FIRST}/absent.bin'"),
        (f"{ROOT}@absent/b.bin", FileNotFoundError, "no such repository or revision.*@absent"),
        ("hf://datasets/owner/absent/b.bin", FileNotFoundError, "no such repository.*HF_TOKEN"),
        ("hf://datasets/owner", ValueError, "names no repository"),
        ("hf://datasets/own er/name/b.bin", ValueError, "own er"),
    ],
)
def test_what_is_missing_is_named(url: str, error: type[Exception], message: str, hub: HubServer) -> None:
    """A wrong URL, repository, revision or path is an error with the URL, when the source is made."""
    with pytest.raises(error, match=message):
        Tokens(url, 8)


def test_the_extra_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without huggingface_hub the error says what to install; a store of obstore cannot read the Hub."""
    from obstore.store import MemoryStore

    with pytest.raises(ValueError, match="store= is an obstore store"):
        Tokens(f"{ROOT}/data/b.bin", 8, store=MemoryStore())
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'pip install "aiofeed\[hub\]"'):
        Tokens(f"{ROOT}/data/b.bin", 8)
