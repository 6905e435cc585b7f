"""`DiskCache`: a file that is gone on with, shared, and never believed where it is wrong."""

from __future__ import annotations

import errno
import functools
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import CacheError, DecodeImage, DiskCache, Feeder, ImageFolder, Limits
from aiofeed.cache import disk_format as cache_file
from aiofeed.cache.disk_format import open_file
from aiofeed.cache.fingerprint import identity
from tests.support.paths import ROOT, environment


class Rows:
    """A source of n numbers, each its own bytes, that counts its reads."""

    def __init__(self, n: int = 40, name: str = "row") -> None:
        self.n = n
        self.name = name
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"{self.name} {index}"

    async def read(self, index: int) -> bytes:
        self.reads[index] += 1
        return b"%d" % index


def block(data: bytes) -> np.ndarray:
    """A hundred numbers that belong to this sample alone."""
    return np.random.default_rng(int(data)).integers(0, 1 << 30, 100)


def other(data: bytes) -> np.ndarray:
    return block(data) + 1


def slow(data: bytes) -> np.ndarray:
    time.sleep(0.002)
    return block(data)


def check(batches: Any, n: int = 40) -> None:
    """All samples, in order, and right."""
    rows = torch.cat(list(batches))
    assert rows.shape == (n, 100)
    for index, row in enumerate(rows):
        assert (row.numpy() == block(b"%d" % index)).all(), index


def run(path: Path, n: int = 40, source: Rows | None = None, epochs: int = 1, **arguments: Any) -> Rows:
    source = source or Rows(n)
    cache = DiskCache(path, arguments.pop("max_bytes", None))
    with Feeder(source, **{"decode": block, "batch_size": 8} | arguments, cache=cache) as feeder:
        for _ in range(epochs):
            check(feeder, n)
    return source


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.cache"


def places(path: Path) -> tuple[int, int]:
    """Where the table and the rows begin."""
    file = open_file(str(path), create=False)
    assert file is not None
    file.describe()
    return file._table_at, file._rows_at


def test_a_second_run_reads_nothing(path: Path) -> None:
    assert run(path).reads == Counter(range(40))
    assert run(path, epochs=2).reads == Counter()
    assert DiskCache(path).verify() == ()


def test_an_interrupted_run_is_continued(path: Path) -> None:
    source = Rows()
    with Feeder(source, decode=block, batch_size=8, cache=DiskCache(path), limits=Limits(prefetch_batches=1)) as feeder:
        for _ in feeder:
            break
    written = 40 - len(run(path).reads)
    assert 8 <= written < 40 or written == 40
    assert run(path).reads == Counter()


def test_pictures_of_other_crops_share_a_file(jpeg_folder: Path, path: Path) -> None:
    """What is kept does not depend on how it is augmented, nor on where the data are."""
    source = ImageFolder(jpeg_folder)
    first, second = (DecodeImage(16, crop="random", flip=flip, scale=(0.2 + flip / 2, 1)) for flip in (False, True))
    for decode in (first, second):
        with Feeder(source, decode=decode, batch_size=9, cache=DiskCache(path)) as feeder:
            list(feeder)
    assert feeder.statistics().bytes_read == 0
    whole = DecodeImage(16, crop="random", cached_size=50)
    with (
        Feeder(source, decode=whole, batch_size=9, cache=DiskCache(path)) as feeder,
        pytest.raises(CacheError, match=r"decoder: .*\[20, 20\].* in the file, .*\[50, 50\]"),
    ):
        list(feeder)


# --- what is not ours -------------------------------------------------------------------------------------------------


def changed(path: Path, message: str, **arguments: Any) -> None:
    """It is refused, and stays as it was."""
    before = path.read_bytes()
    with pytest.raises(CacheError, match=message):
        run(path, **arguments)
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_refused_and_stays(path: Path) -> None:
    run(path)
    changed(path, "fingerprint of the source: .* in the file, .* here.*Delete", source=Rows(40, "line"))
    changed(path, "samples: 40 in the file, 41 here", n=41)
    changed(path, "decoder: .*block .* in the file, .*other .* here", decode=other)
    path.write_bytes(b"precious")
    changed(path, "is not a cache")
    path.write_bytes(bytes(100))
    changed(path, "is not a cache")


def test_another_version_a_damaged_header_and_a_short_file_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(path)
    whole = path.read_bytes()
    monkeypatch.setattr(cache_file, "VERSION", 2)
    changed(path, "version 1, this aiofeed has 2: delete")
    monkeypatch.undo()
    for at in (45, 60, 20, 21):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        changed(path, "header .* is damaged: delete")
    for size in (len(whole) - 1, len(whole) // 2, 4097, 300):
        path.write_bytes(whole[:size])
        changed(path, "truncated|damaged")


def test_paths_that_cannot_be_are_told(path: Path) -> None:
    for bad, message in ((path / "none/x", "cannot be created.*there is no folder"), (path.parent, "folder")):
        with pytest.raises(CacheError, match=message):
            run(bad)
    with pytest.raises(CacheError, match="no cache"):
        DiskCache(path).verify()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_holds_nobody_up(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(CacheError):
        run(path)


def test_no_room_is_told_before_anything_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, jpeg_folder: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with (
        Feeder(ImageFolder(jpeg_folder), decode=DecodeImage(16), batch_size=8, cache=DiskCache(path)) as feeder,
        pytest.raises(CacheError, match=r"needs .*bytes\) for 36 samples, and .* are free in .*max_bytes"),
    ):
        iter(feeder)
    assert path.read_bytes() == b""
    monkeypatch.undo()
    with Feeder(ImageFolder(jpeg_folder), decode=DecodeImage(16), batch_size=8, cache=DiskCache(path)) as feeder:
        list(feeder)
    assert DiskCache(path).verify() == ()


def test_a_write_that_fails_does_not_end_the_training(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Any, *_: Any) -> None:
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(cache_file.CacheFile, "write", full)
    assert run(path, epochs=2).reads[0] >= 2
    assert caplog.text.count("not written to any more") == 1


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write anywhere")
def test_a_file_that_may_not_be_written_to_is_read(path: Path) -> None:
    run(path)
    path.chmod(stat.S_IRUSR)
    assert run(path).reads == Counter()


def test_max_bytes_keeps_the_first_that_are_met(path: Path) -> None:
    run(path, limits=Limits(decode_threads=1), max_bytes=8192 + 800 * 10)
    assert path.stat().st_size <= 8192 + 800 * 10
    assert set(run(path).reads) == set(range(10, 40))
    path.unlink()
    with pytest.raises(CacheError, match=r"no room for a single sample: one takes .*, all of them"):
        run(path, max_bytes=100)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [None, 8192 + 800 * 30])
@pytest.mark.parametrize("seed", range(6))
def test_flipped_bits_are_never_seen(path: Path, most: int | None, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """In rows or in the table: what does not match is decoded again, and is written anew where there is room."""
    numbers = random.Random(seed)
    run(path, max_bytes=most)
    missing = set(run(path).reads)
    table, rows = places(path)
    data = bytearray(path.read_bytes())
    for _ in range(5):
        data[numbers.randrange(rows, len(data))] ^= 1 << numbers.randrange(8)
        data[numbers.randrange(table, table + 40 * 16)] ^= 1 << numbers.randrange(8)
    path.write_bytes(data)
    damaged = set(DiskCache(path).verify())
    read = set(run(path).reads)
    assert damaged
    assert missing | damaged <= read
    assert len(read) <= len(missing) + 10
    assert caplog.text.count("damaged samples") == 1
    if most is None:
        assert DiskCache(path).verify() == ()
        assert run(path).reads == Counter()


def test_entries_that_changed_places_are_not_believed(path: Path) -> None:
    run(path)
    table, _ = places(path)
    data = bytearray(path.read_bytes())
    data[table : table + 16], data[table + 16 : table + 32] = data[table + 16 : table + 32], data[table : table + 16]
    path.write_bytes(data)
    assert set(run(path).reads) == {0, 1}


def test_rows_that_never_reached_the_disk_are_not_believed(path: Path) -> None:
    """The table did, and the rows did not: a machine that lost power."""
    run(path)
    _, rows = places(path)
    data = bytearray(path.read_bytes())
    data[rows + 800 * 10 : rows + 800 * 20] = bytes(8000)
    path.write_bytes(data)
    assert set(run(path).reads) == set(range(10, 20))
    assert run(path).reads == Counter()


def test_a_file_whose_making_was_interrupted_is_made(path: Path) -> None:
    run(path)
    whole = path.read_bytes()
    for begun in (b"", whole[:16] + bytes(24), whole[:16] + bytes(len(whole) - 16)):
        path.write_bytes(begun)
        run(path)
        assert DiskCache(path).verify() == ()
        assert run(path).reads == Counter()


# --- several processes ------------------------------------------------------------------------------------------------

CHILD = """
import sys
from tests.cache.test_disk import DiskCache, Feeder, Limits, Rows, check, slow
path, rank, world, threads = sys.argv[1], *map(int, sys.argv[2:])
source = Rows(200)
cache = DiskCache(path, 16384 + 800 * 150 if rank < 0 else None)
shard = (rank, world) if world > 1 else None
with Feeder(source, decode=slow, batch_size=8, shuffle=world > 1, shard=shard, cache=cache,
            limits=Limits(decode_threads=threads)) as feeder:
    print("begun", flush=True)
    for epoch in range(2):
        if world == 1:
            check(feeder, 200)
        else:
            for batch in feeder:
                pass
print(source.reads.total(), flush=True)
"""


def child(path: Path, rank: int = 0, world: int = 1, threads: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(rank), str(world), str(threads)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> int:
    """How many samples it has read."""
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0
    return int(output.split()[-1])


def run_slow(path: Path) -> Rows:
    return run(path, 200, decode=slow)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_processes_fill_a_file_together(path: Path, world: int) -> None:
    """At the same time, from nothing: all of the same samples, or each a rank's."""
    processes = [child(path, rank, world) for rank in range(3)]
    total = sum(map(ended, processes))
    assert DiskCache(path).verify() == ()
    assert run_slow(path).reads == Counter()
    assert total < 3 * 200 + (3 * 200 if world == 1 else 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, -1])
def test_killed_at_any_moment_nothing_wrong_is_believed(path: Path, rank: int) -> None:
    """Again and again, and gone on with each time; also where rows are given out as samples are met."""
    numbers = random.Random(rank)
    for _ in range(6):
        processes = [child(path, rank, threads=2) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(numbers.uniform(0, 0.25))
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        # The system has what they wrote; all of it is whole, for rows come before their entries.
        if path.exists() and path.stat().st_size > 4096:  # they may have been killed before they made it
            assert DiskCache(path).verify() == ()
    assert len(run(path, 200, decode=slow).reads) < 200
    assert (rank == -1) == bool(run(path, 200, decode=slow).reads)


def test_killed_while_it_is_made(path: Path) -> None:
    """By a write of the description that never comes."""
    pid = os.fork() if hasattr(os, "fork") else 0
    if pid == 0:
        cache_file.CacheFile._reserve = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        run(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    run(path)
    assert DiskCache(path).verify() == ()


@pytest.mark.parametrize("engines", ["process", "process:2"])
def test_engine_processes_share_the_file(jpeg_folder: Path, path: Path, engines: str) -> None:
    """What they write a thread engine reads, and the batches are those of one."""
    for decode in (DecodeImage(16), DecodeImage(16, crop="random", flip=True)):
        file = path.with_suffix(f".{decode.crop}")
        arguments: dict[str, Any] = {"decode": decode, "batch_size": 5, "shuffle": True}
        with Feeder(ImageFolder(jpeg_folder), cache="host", **arguments) as feeder:
            expected = [list(feeder) for _ in range(2)]
        with Feeder(ImageFolder(jpeg_folder), cache=DiskCache(file), engine=engines, **arguments) as feeder:
            found = [list(feeder) for _ in range(2)]
        for wanted, got in zip(sum(expected, []), sum(found, []), strict=True):
            assert torch.equal(wanted[0], got[0])
            assert torch.equal(wanted[1], got[1])
        with Feeder(ImageFolder(jpeg_folder), cache=DiskCache(file), **arguments) as feeder:
            list(feeder)
        assert feeder.statistics().bytes_read == 0


# --- who decoded ------------------------------------------------------------------------------------------------------


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, data: bytes) -> Any:
        return block(data) * self.scale


class Shown(Settings):
    def __repr__(self) -> str:
        return f"Shown({self.scale})"


class Printed(Settings):
    def fingerprint(self) -> str:
        return f"times {self.scale}"


def scaled(data: bytes, scale: float = 1.0) -> Any:
    return block(data) * scale


def times(scale: Any) -> Any:
    return lambda data: block(data) * scale


def test_identities_tell_decoders_apart() -> None:
    decoders = [
        block,
        other,
        scaled,
        functools.partial(scaled, scale=2.0),
        functools.partial(scaled, scale=3.0),
        times(2),
        times(3),
        Shown(2),
        Shown(3),
        Shown(2).__call__,
        Printed(2),
        Printed(3),
        DecodeImage(16),
        DecodeImage(17),
        bytes,
    ]
    found = [identity(decoder) for decoder in decoders]
    assert len(set(found)) == len(found)
    assert identity(times(2)) == identity(times(2))
    assert identity(Shown(2)) == identity(Shown(2))


@pytest.mark.parametrize("decode", [Settings(2), times(object()), functools.partial(scaled, scale=object())])
def test_a_decoder_that_does_not_tell_is_refused(decode: Any, path: Path) -> None:
    with pytest.raises(TypeError, match=r"fingerprint\(\) that returns a str"):
        Feeder(Rows(), decode=decode, batch_size=4, cache=DiskCache(path))
    assert not path.exists()
