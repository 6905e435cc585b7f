"""``DiskCache`` of decoded and of encoded samples: a file of several runs and processes, whose damage is never seen."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import DecodeImage, DiskCache, Feeder, ImageFolder, Limits
from aiofeed.cache import disk_format as cache_file
from aiofeed.cache.disk_format import open_file
from aiofeed.common.fingerprint import identity
from aiofeed.errors import CacheError
from tests.support.fork_server import ForkServer
from tests.support.mutations import mutated
from tests.support.paths import ROOT, environment

kinds = pytest.mark.parametrize("encoded", [False, True], ids=["decoded", "encoded"])


class Rows:
    """A source of n numbers as bytes that counts its reads."""

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
    """A hundred numbers, different for each sample."""
    return np.random.default_rng(int(data)).integers(0, 1 << 30, 100)


def other(data: bytes) -> np.ndarray:
    return block(data) + 1


def slow(data: bytes) -> np.ndarray:
    time.sleep(0.002)
    return block(data)


def check(batches: Any, n: int = 40) -> None:
    """Assert that batches have all samples, in order, with the right contents."""
    rows = torch.cat(list(batches))
    assert rows.shape == (n, 100)
    for index, row in enumerate(rows):
        assert (row.numpy() == block(b"%d" % index)).all(), index


def run(path: Path, n: int = 40, source: Rows | None = None, epochs: int = 1, **arguments: Any) -> Rows:
    source = source or Rows(n)
    cache = DiskCache(path, arguments.pop("max_bytes", None), arguments.pop("encoded", False))
    with Feeder(source, **{"decode": block, "batch_size": 8} | arguments, cache=cache) as feeder:
        for _ in range(epochs):
            check(feeder, n)
    return source


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.cache"


def offsets(path: Path) -> tuple[int, int]:
    """Offsets of the table and of the rows."""
    file = open_file(str(path), create=False)
    assert file is not None
    file.describe()
    return file._table_at, file._rows_at


@kinds
def test_a_second_run_reads_nothing(path: Path, encoded: bool) -> None:
    assert run(path, encoded=encoded).reads == Counter(range(40))
    assert run(path, epochs=2, encoded=encoded).reads == Counter()
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
    """Cached pictures do not depend on augmentation settings, nor on the folder of the data."""
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


# --- other files ------------------------------------------------------------------------------------------------------


def refused(path: Path, message: str, **arguments: Any) -> None:
    """Assert that the file is refused and not changed."""
    before = path.read_bytes()
    with pytest.raises(CacheError, match=message):
        run(path, **arguments)
    assert path.read_bytes() == before


@kinds
def test_a_file_of_other_data_is_refused_and_not_changed(path: Path, encoded: bool) -> None:
    run(path, encoded=encoded)
    refused(
        path, "fingerprint of the source: .* in the file, .* here.*Delete", source=Rows(40, "line"), encoded=encoded
    )
    refused(path, "samples: 40 in the file, 41 here", n=41, encoded=encoded)
    refused(path, "decoder: .* in the file, .*other .* here", decode=other)
    refused(path, "decoder: .* in the file, .* here", encoded=not encoded)
    path.write_bytes(b"precious")
    refused(path, "is not a cache", encoded=encoded)
    path.write_bytes(bytes(100))
    refused(path, "is not a cache", encoded=encoded)


@kinds
def test_another_version_a_damaged_header_and_a_truncated_file_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, encoded: bool
) -> None:
    run(path, encoded=encoded)
    whole = path.read_bytes()
    monkeypatch.setattr(cache_file, "VERSION", 2)
    refused(path, "version 1, this aiofeed has 2: delete", encoded=encoded)
    monkeypatch.undo()
    for at in (45, 60, 20, 21):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        refused(path, "header .* is damaged: delete", encoded=encoded)
    for size in (8191 if encoded else len(whole) - 1, len(whole) // 2, 4097, 300):
        path.write_bytes(whole[:size])
        refused(path, "truncated|damaged", encoded=encoded)


def rewrite_header(path: Path, text: bytes) -> None:
    """Replace the description in a file's header, with the checksum that belongs to it."""
    data = bytearray(path.read_bytes())
    data[: cache_file._HEAD.size] = cache_file._HEAD.pack(cache_file._MAGIC, len(text), zlib.crc32(text), 0)
    at = cache_file._DESCRIPTION_AT
    data[at : at + len(text)] = text
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in ("version", "samples", "source", "decoder", "shape", "dtype", "capacity", "tensor")),
        {"samples": 0},
        {"samples": "forty"},
        {"capacity": -1},
        {"capacity": 10**30},
        {"shape": [-1]},
        {"shape": ["a"]},
        {"dtype": "nonsense"},
        {"dtype": []},
        {"torch_dtype": "nonsense"},
        {"torch_dtype": "bfloat16"},
        {"form": 5},
        {"form": "[]"},
    ],
    ids=repr,
)
def test_a_header_with_nonsense_and_a_valid_checksum_is_refused(path: Path, change: dict[str, Any]) -> None:
    """A description that no aiofeed writes is a ``CacheError`` of ``verify`` and of a feeder, and is not changed."""
    run(path)
    described = open_file(str(path), create=False).describe()
    rewrite_header(path, json.dumps(described | change).encode())
    refused(path, "header .* is damaged .*: delete")
    with pytest.raises(CacheError, match=r"header .* is damaged"):
        DiskCache(path).verify()
    [name] = change
    if described.pop(name, None) is not None:
        rewrite_header(path, json.dumps(described).encode())
        refused(path, f"header .* is damaged .*{name}.*: delete")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"5", b"[]", b"[" * 3000])
def test_a_header_that_is_no_description_is_refused(path: Path, text: bytes) -> None:
    """A header that is no JSON, or no JSON object, is a ``CacheError``."""
    run(path)
    rewrite_header(path, text or b" ")
    refused(path, "header .* is damaged .*: delete")


@pytest.mark.parametrize("stage", ["creation", "verification"])
def test_a_file_that_cannot_be_locked_is_an_error_that_names_it(
    path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If ``flock`` fails, for a new file or a row with a wrong checksum, the error has the path."""
    if stage == "verification":
        run(path)
        file = open_file(str(path), create=False)
        file.describe()
        with path.open("r+b") as raw:
            raw.seek(file._rows_at)
            raw.write(b"\xff" * 8)

    def no_lock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(cache_file.fcntl, "flock", no_lock)
    with pytest.raises(CacheError, match=rf"{path}.* cannot be used: .*No locks"):
        run(path)


def test_impossible_paths_are_errors(path: Path) -> None:
    for bad, message in ((path / "none/x", "cannot be created.*there is no folder"), (path.parent, "folder")):
        with pytest.raises(CacheError, match=message):
            run(bad)
    with pytest.raises(CacheError, match="no cache"):
        DiskCache(path).verify()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_is_refused_without_blocking(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(CacheError):
        run(path)


def test_a_full_disk_is_an_error_before_the_first_read(
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
    assert not path.exists()
    monkeypatch.undo()
    with Feeder(ImageFolder(jpeg_folder), decode=DecodeImage(16), batch_size=8, cache=DiskCache(path)) as feeder:
        list(feeder)
    assert DiskCache(path).verify() == ()


@kinds
def test_a_write_that_fails_does_not_end_the_training(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, encoded: bool
) -> None:
    def full(self: Any, *_: Any) -> None:
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(cache_file.CacheFile, "write", full)
    assert run(path, epochs=2, encoded=encoded).reads[39] >= 2  # the first few are in memory
    assert caplog.text.count("not written to any more") == 1


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_file_is_used(path: Path) -> None:
    run(path)
    path.chmod(stat.S_IRUSR)
    assert run(path).reads == Counter()


def test_max_bytes_caches_the_samples_decoded_first(path: Path) -> None:
    run(path, limits=Limits(decode_threads=1), max_bytes=8192 + 800 * 10)
    assert path.stat().st_size <= 8192 + 800 * 10
    assert set(run(path).reads) == set(range(10, 40))
    path.unlink()
    with pytest.raises(CacheError, match=r"no room for a single sample: one takes .*, all of them"):
        run(path, max_bytes=100)


# --- damage -----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("room", [None, 30])
@pytest.mark.parametrize("seed", range(6))
def test_flipped_bits_are_never_seen(
    path: Path, room: int | None, seed: int, caplog: pytest.LogCaptureFixture, encoded: bool
) -> None:
    """A sample with damaged row, record or entry is obtained again, and written again if there is room."""
    numbers = random.Random(seed)
    run(path, max_bytes=room and 8192 + (64 if encoded else 800) * room, encoded=encoded)
    missing = set(run(path, encoded=encoded).reads)
    table, rows = offsets(path)
    data = bytearray(path.read_bytes())
    for _ in range(5):
        data[numbers.randrange(rows, len(data))] ^= 1 << numbers.randrange(8)
        data[numbers.randrange(table, table + 40 * 16)] ^= 1 << numbers.randrange(8)
    path.write_bytes(data)
    damaged = set(DiskCache(path).verify())
    read = set(run(path, encoded=encoded).reads)
    assert damaged
    assert missing | damaged <= read
    assert len(read) <= len(missing) + 10
    assert caplog.text.count("damaged samples") == 1
    if room is None:
        assert DiskCache(path).verify() == ()
        assert run(path, encoded=encoded).reads == Counter()


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 1000), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("content", ["rows", "sized", "encoded"])
def test_a_mutated_file_gives_the_data_or_an_error_that_names_it(path: Path, seeds: range, content: str) -> None:
    """Rows, and records of samples of several sizes and of encoded samples."""

    def decode(data: bytes) -> Any:
        return block(data) if content == "rows" else block(data)[: int(data) % 7]

    def seen() -> list[list[int]]:
        cache = DiskCache(path, encoded=content == "encoded")
        with Feeder(Rows(), decode=decode, batch_size=8, collate_fn=list, cache=cache) as feeder:
            return [sample.tolist() for batch in feeder for sample in batch]

    wanted = seen()
    data = path.read_bytes()
    head = offsets(path)[1]
    for seed in seeds:
        path.write_bytes(mutated(data, seed, head))
        try:
            assert seen() == wanted, seed
            assert seen() == wanted, seed
            DiskCache(path).verify()
        except CacheError as error:
            assert str(path) in str(error), seed  # noqa: PT017 - either is right


@pytest.mark.parametrize("function", ["pread", "preadv"])
def test_a_disk_that_cannot_be_read_is_an_error_that_names_the_file(
    path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever part of the file it is."""

    def decode(data: bytes) -> Any:
        return block(data)[: int(data) % 7]

    with Feeder(Rows(), decode=decode, batch_size=8, collate_fn=list, cache=DiskCache(path)) as feeder:
        list(feeder)
    read = getattr(os, function)

    def failing(*arguments: Any) -> Any:
        if next(calls) == fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)

    monkeypatch.setattr(os, function, failing)
    for fails_at in (1, 2, 3, 7, 50):
        # A job that reads ends after its feeder is closed, and must not get the next error.
        while any(thread.name.startswith("aiofeed-read") for thread in threading.enumerate()):
            time.sleep(0.001)
        calls = itertools.count(1)
        try:
            with Feeder(Rows(), decode=decode, batch_size=8, collate_fn=list, cache=DiskCache(path)) as feeder:
                list(feeder)
        except CacheError as error:
            assert re.search(r"cannot be read: .*Input/output error", str(error))  # noqa: PT017
            assert str(path) in str(error)  # noqa: PT017
        else:
            # How many samples one call reads follows from the time.
            assert fails_at > 1
            assert next(calls) <= fails_at


@kinds
def test_swapped_entries_are_not_used(path: Path, encoded: bool) -> None:
    run(path, encoded=encoded)
    table, _ = offsets(path)
    data = bytearray(path.read_bytes())
    data[table : table + 16], data[table + 16 : table + 32] = data[table + 16 : table + 32], data[table : table + 16]
    path.write_bytes(data)
    assert set(run(path, encoded=encoded).reads) == {0, 1}


def test_rows_that_never_reached_the_disk_are_not_used(path: Path) -> None:
    """After a power failure the table may be on disk and the rows not."""
    run(path)
    _, rows = offsets(path)
    data = bytearray(path.read_bytes())
    data[rows + 800 * 10 : rows + 800 * 20] = bytes(8000)
    path.write_bytes(data)
    assert set(run(path).reads) == set(range(10, 20))
    assert run(path).reads == Counter()


def test_a_counter_of_rows_that_never_reached_the_disk_overwrites_no_row(path: Path) -> None:
    """After a power failure the header may count fewer rows than there are; none of them is given to another sample."""
    room = 800 * 20 + 4096 * 2  # of 40 samples
    with Feeder(Rows(), decode=block, batch_size=8, cache=DiskCache(path, room), sampler=range(0, 10)) as feeder:
        list(feeder)
    with path.open("r+b") as file:
        file.seek(cache_file._USED_AT)
        file.write(bytes(8))
    run(path, max_bytes=room, epochs=3)
    assert DiskCache(path).verify() == ()


TRUNCATED_WHILE_USED = """
import os, sys
from tests.cache.test_disk import Rows, block
from aiofeed import DiskCache, Feeder
from aiofeed.errors import CacheError
path, left = sys.argv[1], int(sys.argv[2])
with Feeder(Rows(), decode=block, batch_size=8, cache=DiskCache(path)) as feeder:
    list(feeder)
    os.truncate(path, left)
    try:
        list(feeder)
    except CacheError as error:
        print(error)
"""


@pytest.mark.parametrize("left", [0, 5000, 20_000])
def test_a_file_that_is_truncated_while_it_is_used_is_an_error(fork_server: ForkServer, path: Path, left: int) -> None:
    """Another program cuts the file, as ``> train.cache`` does: a `CacheError`, and the process goes on."""
    done = fork_server.run(TRUNCATED_WHILE_USED, path, left)
    assert done.returncode == 0, done.stderr
    assert f"is truncated: it has {left} of" in done.stdout


LOCKS = """
import fcntl, sys, time
file = open(sys.argv[1], "rb")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


@kinds
@pytest.mark.parametrize("begun", [False, True])
def test_a_process_that_is_stopped_with_the_lock_does_not_block_others(
    encoded: bool, begun: bool, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a while a new file is a `CacheError` that names the process, and a file in use is not written any more."""
    monkeypatch.setattr(cache_file, "LOCK_LIMIT_S", 0.2)
    if begun:
        cache = DiskCache(path, encoded=encoded)
        with Feeder(Rows(), decode=block, batch_size=8, cache=cache, sampler=range(8)) as feeder:
            list(feeder)
    else:
        path.touch()
    holder = subprocess.Popen([sys.executable, "-c", LOCKS, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "locked\n"
        holder.send_signal(signal.SIGSTOP)
        who = f"process {holder.pid} has locked it" if sys.platform == "linux" else "has locked it"
        if begun:
            run(path, encoded=encoded)
            assert who in caplog.text
        else:
            with pytest.raises(CacheError, match=who):
                run(path, encoded=encoded)
    finally:
        holder.kill()
        holder.communicate()


@kinds
def test_a_file_whose_creation_was_interrupted_is_created_again(path: Path, encoded: bool) -> None:
    run(path, encoded=encoded)
    whole = path.read_bytes()
    for partial in (b"", whole[:16] + bytes(24), whole[:16] + bytes(len(whole) - 16)):
        path.write_bytes(partial)
        run(path, encoded=encoded)
        assert DiskCache(path).verify() == ()
        assert run(path, encoded=encoded).reads == Counter()


# --- several processes ------------------------------------------------------------------------------------------------

CHILD = """
import sys
from tests.cache.test_disk import DiskCache, Feeder, Limits, Rows, check, slow
path, rank, world, threads, encoded = sys.argv[1], *map(int, sys.argv[2:])
source = Rows(200)
room = 8192 + 64 * 150 if encoded else 16384 + 800 * 150
cache = DiskCache(path, room if rank < 0 else None, bool(encoded))
shard = (rank, world) if world > 1 else None
with Feeder(source, decode=slow, batch_size=8, shuffle=world > 1, shard=shard, cache=cache,
            limits=Limits(decode_threads=threads)) as feeder:
    print("started", flush=True)
    for epoch in range(2):
        if world == 1:
            check(feeder, 200)
        else:
            for batch in feeder:
                pass
print(source.reads.total(), flush=True)
"""


def child(path: Path, rank: int = 0, world: int = 1, *, encoded: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(rank), str(world), "2", str(int(encoded))],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


def reads_of(process: subprocess.Popen[str]) -> int:
    """How many samples a process has read when it ends."""
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0
    return int(output.split()[-1])


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("world", [1, 3])
def test_processes_fill_a_file_together(path: Path, world: int, encoded: bool) -> None:
    """They start at the same time without a file, with the same samples or each with a rank's."""
    processes = [child(path, rank, world, encoded=encoded) for rank in range(3)]
    total = sum(map(reads_of, processes))
    assert DiskCache(path).verify() == ()
    assert run(path, 200, decode=slow, encoded=encoded).reads == Counter()
    assert total < 3 * 200 + (3 * 200 if world == 1 else 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@kinds
@pytest.mark.parametrize("rank", [0, -1])
def test_a_kill_at_any_moment_leaves_a_valid_file(path: Path, rank: int, encoded: bool) -> None:
    """Each of several runs continues with the file, also if rows are assigned in the order of decoding."""
    numbers = random.Random(rank)
    for _ in range(6):
        processes = [child(path, rank, encoded=encoded) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(numbers.uniform(0, 0.25))
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        # The system has all that they wrote. It is valid, because a row is written before its entry.
        if path.exists() and path.stat().st_size > 4096:  # a kill may come before the file is created
            assert DiskCache(path).verify() == ()
    assert len(run(path, 200, decode=slow, encoded=encoded).reads) < 200
    assert (rank == -1) == bool(run(path, 200, decode=slow, encoded=encoded).reads)


@kinds
def test_a_kill_during_creation_leaves_a_file_that_is_created_again(path: Path, encoded: bool) -> None:
    """The process dies before it writes the description."""
    pid = os.fork() if hasattr(os, "fork") else 0
    if pid == 0:
        cache_file.CacheFile._reserve = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        run(path, encoded=encoded)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    run(path, encoded=encoded)
    assert DiskCache(path).verify() == ()


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("engines", ["process", "process:2"])
def test_engine_processes_share_the_file(jpeg_folder: Path, path: Path, engines: str) -> None:
    """A thread engine reads what they have written, and batches equal those of a thread engine."""
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


# --- decoders ---------------------------------------------------------------------------------------------------------


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, data: bytes) -> Any:
        return block(data) * self.scale


class WithRepr(Settings):
    def __repr__(self) -> str:
        return f"WithRepr({self.scale})"


class WithFingerprint(Settings):
    def fingerprint(self) -> str:
        return f"times {self.scale}"


def scaled(data: bytes, scale: float = 1.0) -> Any:
    return block(data) * scale


def times(scale: Any) -> Any:
    return lambda data: block(data) * scale


def test_decoders_with_other_code_or_settings_have_other_identities() -> None:
    decoders = [
        block,
        other,
        scaled,
        functools.partial(scaled, scale=2.0),
        functools.partial(scaled, scale=3.0),
        times(2),
        times(3),
        WithRepr(2),
        WithRepr(3),
        WithRepr(2).__call__,
        WithFingerprint(2),
        WithFingerprint(3),
        DecodeImage(16),
        DecodeImage(17),
        bytes,
    ]
    found = [identity(decoder) for decoder in decoders]
    assert len(set(found)) == len(found)
    assert identity(times(2)) == identity(times(2))
    assert identity(WithRepr(2)) == identity(WithRepr(2))


@pytest.mark.parametrize("decode", [Settings(2), times(object()), functools.partial(scaled, scale=object())])
def test_a_decoder_with_unknown_settings_is_refused(decode: Any, path: Path) -> None:
    with pytest.raises(TypeError, match=r"fingerprint\(\) that returns a str"):
        Feeder(Rows(), decode=decode, batch_size=4, cache=DiskCache(path))
    assert not path.exists()
