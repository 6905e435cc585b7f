"""``EncodedCache``: encoded samples in a file that epochs, processes and runs share."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from aiofeed import DataLoader, EncodedCache, Feeder, Files, Mixture, Stream, Tensors
from aiofeed.cache.encoded import source as source_module
from aiofeed.cache.encoded.database import Entry
from aiofeed.cache.encoded.source import CachedSource
from aiofeed.reports.commands.cli import main
from tests.support.encoded import (
    HEADS,
    SIZE,
    Blocks,
    as_it_is,
    block,
    damage,
    entries,
    filled,
    head,
    heads,
    of_feeder,
    write_now,
)
from tests.support.paths import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

# --- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False, "samples"])
def test_samples_are_read_once(tmp_path: Path, in_order: Any) -> None:
    """After the first epoch no sample is read from the source again, also not by a later feeder."""
    source, cache = Blocks(), EncodedCache(tmp_path / "cache", 40 * SIZE)
    for _ in range(2):
        with Feeder(source, decode=head, batch_size=6, shuffle=True, cache=cache, in_order=in_order) as feeder:
            for _ in range(3):
                assert sorted(heads(feeder)) == sorted(HEADS[:40])
        assert set(source.reads.values()) == {1}
    storage = of_feeder(feeder)
    assert storage.cache_misses == 0
    assert storage.cached_bytes == 40 * SIZE
    assert "cached" in str(feeder.statistics())
    assert entries(tmp_path / "cache") == {"count": 40, "nbytes": 40 * SIZE}


async def test_async_iteration(tmp_path: Path) -> None:
    """``async for`` uses the cache, too."""
    source = Blocks()
    async with Feeder(source, decode=head, batch_size=6, cache=EncodedCache(tmp_path / "cache", 1 << 20)) as feeder:
        for _ in range(2):
            assert [int(number) async for batch in feeder for number in batch] == HEADS[:40]
    assert set(source.reads.values()) == {1}


@pytest.mark.parametrize("shuffle", [True, "keyed"])
def test_batches_do_not_depend_on_the_cache(tmp_path: Path, shuffle: Any) -> None:
    """Order, targets, state and resume are those of a feeder without a cache."""

    class Labelled(Blocks):
        def target(self, index: int) -> int:
            return index

    def batches(feeder: Feeder[Any], count: int | None = None) -> list[Any]:
        return [[part.tolist() for part in batch] for _, batch in zip(range(count or 99), feeder, strict=False)]

    plain = Feeder(Labelled(), decode=head, batch_size=6, shuffle=shuffle)
    cached = Feeder(
        Labelled(), decode=head, batch_size=6, shuffle=shuffle, cache=EncodedCache(tmp_path / "cache", 20 * SIZE)
    )
    with plain, cached:
        for _ in range(2):
            assert batches(cached) == batches(plain)
        for stop in range(7):
            assert batches(cached, stop) == batches(plain, stop)
            assert cached.state_dict() == plain.state_dict()
            cached.load_state_dict(plain.state_dict())
            plain.load_state_dict(plain.state_dict())
            assert batches(cached) == batches(plain)


def test_two_feeders_share_a_file(tmp_path: Path) -> None:
    """Feeders that run at the same time use each other's entries; a source with other keys has entries of its own."""
    cache, first, second = EncodedCache(tmp_path / "cache", 1 << 20), Blocks(), Blocks()
    with Feeder(first, decode=head, batch_size=6, cache=cache) as feeder:
        heads(feeder)
    with (
        Feeder(first, decode=head, batch_size=6, cache=cache) as one,
        Feeder(second, decode=head, batch_size=6, cache=cache) as two,
        Feeder(Blocks(20, name="other"), decode=head, batch_size=6, cache=cache) as three,
    ):
        for _ in range(2):
            for batches in zip(one, two, three, strict=False):
                assert len(batches) == 3
    assert not second.reads
    assert entries(tmp_path / "cache")["count"] == 60


PROGRAM = """
import sys
from aiofeed import EncodedCache, Feeder
from tests.support.encoded import HEADS, Blocks, head, heads

source = Blocks(200)
cache = EncodedCache(sys.argv[1], int(sys.argv[2]))
with Feeder(source, decode=head, batch_size=8, shuffle=True, seed=int(sys.argv[3]), cache=cache) as feeder:
    for _ in range(3):
        assert sorted(heads(feeder)) == sorted(HEADS)
"""


@pytest.mark.slow
def test_processes_that_write_at_the_same_time(tmp_path: Path) -> None:
    """Processes create and fill one file together; samples are right and the budget holds."""
    path = tmp_path / "cache"
    command = [sys.executable, "-c", PROGRAM, str(path), str(100 * SIZE)]
    running = [subprocess.Popen([*command, str(seed)], cwd=ROOT, env=environment()) for seed in range(3)]
    assert [process.wait(120) for process in running] == [0] * 3
    found = entries(path)
    assert 90 <= found["count"] <= 100
    assert main(["cache", "verify", str(path)]) == 0


@pytest.mark.slow
def test_worker_processes(tmp_path: Path) -> None:
    """The workers of ``engine="process"`` use the cache; the first samples stay when it is full."""
    cache = EncodedCache(tmp_path / "cache", 20 * SIZE)
    with Feeder(Blocks(), decode=head, batch_size=5, shuffle=True, engine="process:2", cache=cache) as feeder:
        for _ in range(3):
            assert sorted(heads(feeder)) == sorted(HEADS[:40])
    assert entries(tmp_path / "cache") == {"count": 20, "nbytes": 20 * SIZE}


def test_forked_child(tmp_path: Path) -> None:
    """A child of a fork opens the file itself."""
    source, cache = Blocks(), EncodedCache(tmp_path / "cache", 1 << 20)
    feeder = Feeder(source, decode=head, batch_size=5, cache=cache)
    assert heads(feeder) == HEADS[:40]
    child = os.fork()
    if child == 0:
        try:
            good = heads(feeder) == HEADS[:40]
            feeder.close()
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert heads(feeder) == HEADS[:40]
    feeder.close()
    assert entries(tmp_path / "cache")["count"] == 40


def test_pickled_source(tmp_path: Path) -> None:
    """A pickled source opens the file itself; settings survive."""
    source = CachedSource(Blocks(), EncodedCache(tmp_path / "cache", 1 << 20))
    copy = pickle.loads(pickle.dumps(source))
    assert repr(copy).startswith("CachedSource(")
    assert copy.key(3) == "block 3"
    assert len(copy) == 40
    assert pickle.loads(pickle.dumps(EncodedCache("a", 5))) == EncodedCache("a", 5)


# --- what is stored ---------------------------------------------------------------------------------------------------

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=50),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.binary(max_size=5) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """A value with the types of all its parts, and the order of its keys."""
    if isinstance(value, dict):
        return [(typed(key), typed(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(each) for each in value]
    return type(value), repr(value)


@hypothesis.given(value=plain_values)
def test_round_trip(value: Any) -> None:
    """A nested sample is restored exactly, with its types."""
    assert typed(source_module._unpacked(Entry(1, 1, *source_module._packed(value)))) == typed(value)


@pytest.mark.parametrize("value", [bytearray(b"a"), {"a": np.zeros(2)}, [1 << 70], ["\ud800"], {(1, 2): 3}, (set(),)])
async def test_other_samples_are_refused(tmp_path: Path, value: Any) -> None:
    """A sample that cannot be restored exactly is an error that names it and the way out."""

    class Others(Blocks):
        def data(self, index: int) -> Any:
            return value

    source = CachedSource(Others(), EncodedCache(tmp_path / "cache", 1 << 20))
    [error] = await source.read_many([3])
    await source.aclose()
    assert isinstance(error, TypeError)
    assert "'block 3' (index 3)" in str(error)
    assert "leave cache= out" in str(error)


async def test_errors_are_not_cached(tmp_path: Path) -> None:
    """A sample that cannot be read is tried again, and fails or succeeds alone."""

    class Failing(Blocks):
        broken = True

        def data(self, index: int) -> Any:
            return OSError("unreadable") if index == 3 and self.broken else super().data(index)

    source = CachedSource(inner := Failing(), EncodedCache(tmp_path / "cache", 1 << 20))
    first = await source.read_many(range(5))
    assert [type(sample) for sample in first] == [bytes, bytes, bytes, OSError, bytes]
    with pytest.raises(OSError, match="unreadable"):
        await source.read(3)
    inner.broken = False
    assert await source.read_many(range(5)) == [block(index, SIZE) for index in range(5)]
    await source.aclose()
    assert inner.reads == {0: 1, 1: 1, 2: 1, 3: 3, 4: 1}


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_failing_samples_in_a_feeder(tmp_path: Path, on_error: Any) -> None:
    """``on_error`` treats samples that fail as without a cache."""

    class Failing(Blocks):
        async def read(self, index: int) -> bytes:
            if index == 3:
                raise OSError("unreadable")
            return block(index, self.size)

        read_many = None  # type: ignore[assignment]

    results = []
    for cache in (None, EncodedCache(tmp_path / "cache", 1 << 20)):
        with Feeder(Failing(), decode=head, batch_size=6, on_error=on_error, cache=cache) as feeder:
            results.append([heads(feeder), heads(feeder), [failure.index for failure in feeder.failures]])
    assert results[0] == results[1]


async def test_large_samples_are_not_stored(tmp_path: Path) -> None:
    """A sample beyond the budget evicts nothing."""
    sizes = {0: 600, 1: 300, 2: 2000}

    class Sized(Blocks):
        def data(self, index: int) -> bytes:
            return block(index, sizes[index])

    source = CachedSource(Sized(3), EncodedCache(tmp_path / "cache", 1000))
    for index in range(3):
        await source.read(index)
        write_now(source)
    await source.aclose()
    assert entries(tmp_path / "cache") == {"count": 2, "nbytes": 900}


async def test_pending_samples_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that arrive faster than the disk writes are not stored."""
    monkeypatch.setattr(source_module, "MOST_PENDING_BYTES", 5 * SIZE)
    source = CachedSource(Blocks(), EncodedCache(tmp_path / "cache", 1 << 20))
    await source.read_many(range(40))
    await source.aclose()
    assert entries(tmp_path / "cache")["count"] == 5


# --- names ------------------------------------------------------------------------------------------------------------


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    """A file that is replaced is noticed, and so is one of the same name in another folder."""
    cache = EncodedCache(tmp_path / "cache", 1 << 20)

    def read(folder: str, *texts: str) -> list[bytes]:
        (tmp_path / folder).mkdir(exist_ok=True)
        paths = [tmp_path / folder / str(number) for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            if text:
                path.with_suffix(".new").write_text(text)
                path.with_suffix(".new").replace(path)
        with Feeder(Files(paths), decode=as_it_is, collate_fn=list, batch_size=4, cache=cache) as feeder:
            return [data for batch in feeder for data in batch]

    assert read("a", "one", "two") == [b"one", b"two"]
    assert read("a", "", "TWO") == [b"one", b"TWO"]
    assert read("b", "six", "ten") == [b"six", b"ten"]
    assert entries(tmp_path / "cache")["count"] == 5


async def test_version(tmp_path: Path) -> None:
    """A source's ``version`` is a part of the name; without it, its fingerprint is."""

    class Versioned(Blocks):
        number = 1

        def version(self, index: int) -> str:
            return f"{self.number}"

    inner = Versioned()
    source = CachedSource(inner, EncodedCache(tmp_path / "cache", 1 << 20))
    await source.read_many([1, 2])
    inner.number = 2
    await source.read_many([1, 2])
    await source.read_many([1, 2])
    await source.aclose()
    assert inner.reads == {1: 2, 2: 2}
    longer = CachedSource(Blocks(41), EncodedCache(tmp_path / "cache", 1 << 20))
    for _ in range(2):
        await longer.read_many([1])
    await longer.aclose()
    assert longer._source.reads == {1: 1}


def test_mixture(tmp_path: Path) -> None:
    """The samples of a mixture are cached by source, and its order stays."""
    parts = {"a": Blocks(20), "b": Blocks(30, name="other")}
    with Feeder(Mixture(parts), decode=head, batch_size=10, shuffle=True) as plain:
        expected = [heads(plain) for _ in range(2)]
    for part in parts.values():
        part.reads.clear()
    cache = EncodedCache(tmp_path / "cache", 1 << 20)
    with Feeder(Mixture(parts), decode=head, batch_size=10, shuffle=True, cache=cache) as feeder:
        assert [heads(feeder) for _ in range(2)] == expected
    assert all(set(part.reads.values()) == {1} for part in parts.values())


# --- arguments and the command line -----------------------------------------------------------------------------------


def test_arguments() -> None:
    """Bad arguments name themselves."""
    with pytest.raises(TypeError, match="path of a file"):
        EncodedCache(3, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_bytes"):
        EncodedCache("a", 0)
    with pytest.raises(TypeError, match="max_byte"):
        EncodedCache("a", max_byte=3)  # type: ignore[call-arg]


def test_sources_without_bytes_are_refused(tmp_path: Path) -> None:
    """A Dataset, Tensors and a Stream are refused before the first batch, with what to do instead."""
    cache, numbers = EncodedCache(tmp_path / "cache", 1 << 20), torch.arange(8)
    for source in (numbers.tolist(), torch.utils.data.TensorDataset(numbers), Mixture({"a": numbers.tolist()})):
        with pytest.raises(TypeError, match="DiskCache"):
            Feeder(source, batch_size=4, cache=cache)
    with pytest.raises(TypeError, match="leave it out"):
        Feeder(Tensors(numbers), batch_size=4, cache=cache)
    with pytest.raises(ValueError, match="leave it out"):
        Feeder(Stream(lambda: [1, 2]), batch_size=4, cache=cache)
    with pytest.raises(TypeError, match="DiskCache"):
        DataLoader(numbers.tolist(), batch_size=4, cache=cache)  # type: ignore[arg-type]
    assert not (tmp_path / "cache").exists()


async def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``aiofeed cache info`` describes a file, ``verify`` finds damage and ``--repair`` deletes it."""
    path = str(tmp_path / "cache")
    await filled(tmp_path / "cache")
    assert main(["cache", "info", path]) == 0
    assert capsys.readouterr().out == f"{path}: 40 entries, 39.1 KiB of 39.1 KiB\n"
    assert main(["cache", "verify", path]) == 0
    assert "40 entries, 39.1 KiB, 0 damaged" in capsys.readouterr().out
    damage(tmp_path / "cache", "data SET bytes = zeroblob(5) WHERE id = 3")
    for _ in range(2):
        assert main(["cache", "verify", path]) == 1
        assert "1 damaged\n" in capsys.readouterr().out
    assert main(["cache", "verify", path, "--repair"]) == 1
    assert "39 entries, 38.1 KiB, 1 damaged, deleted" in capsys.readouterr().out
    assert main(["cache", "verify", path]) == 0


def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file is not created, and another file is named."""
    assert main(["cache", "verify", str(tmp_path / "none")]) == 1
    assert "there is no cache" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    (tmp_path / "text").write_text("text" * 1000)
    assert main(["cache", "info", str(tmp_path / "text")]) == 1
    assert "another file" in capsys.readouterr().err
