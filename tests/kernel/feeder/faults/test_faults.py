"""Faults of storage, threads, memory, descriptors and device cause errors, never a hang or a wrong batch."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import mmap
import random
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import FailurePolicy, Feeder, FeedError, Files, Limits, prefetch
from aiofeed.errors import DecodeError, DeviceCopyError, ReadError, WorkerDiedError
from aiofeed.kernel.devices.pinned import release_unused
from aiofeed.kernel.engine.assembly import Assembly
from aiofeed.kernel.runtime.buffers import SMALL_BYTES, HostBufferPool
from aiofeed.kernel.runtime.thread_pool import ThreadPool
from tests.soak.faulty import threads_refused
from tests.support.fork_server import ForkServer
from tests.support.process_parts import Numbers
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_streams import SimulatedEvent

WIDE = SMALL_BYTES  # bytes of a sample; a batch of these has a memory block of its own


class Threaded(Numbers):
    """Numbers that are read in a thread."""

    async def read(self, index: int) -> bytes:
        return await asyncio.to_thread(lambda: b"%d" % index)


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


def wide(data: bytes) -> torch.Tensor:
    return torch.full((WIDE,), int(data) % 256, dtype=torch.uint8)


def values(batches: Any) -> list[int]:
    return [value for batch in batches for value in batch.tolist()]


# --- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False, "samples"])
@pytest.mark.parametrize("seed", range(4))
def test_reads_with_a_heavy_tail(seed: int, in_order: Any) -> None:
    """If some reads take hundreds of times as long as others, every sample comes once, with in_order in order."""
    drawn = random.Random(seed)

    class Tail(Numbers):
        async def read(self, index: int) -> bytes:
            # Event loop cycles instead of seconds: 1 for most reads, some hundreds for a few.
            for _ in range(min(int(drawn.paretovariate(0.8)), 800)):
                await asyncio.sleep(0)
            return await super().read(index)

    limits = Limits(read_concurrency=drawn.choice((1, 5, 64)), prefetch_batches=drawn.choice((1, 3)))
    with Feeder(Tail(200), decode=number, batch_size=8, limits=limits, in_order=in_order) as feeder:
        for _ in range(2):
            got = values(feeder)
            assert sorted(got) == list(range(200))
            assert got == list(range(200)) or in_order is not True


def test_a_file_that_shrinks_between_epochs(tmp_path: Path) -> None:
    """A truncated file is a DecodeError with its path; after it is restored, an epoch is complete."""
    paths = [tmp_path / str(index) for index in range(12)]
    for index, path in enumerate(paths):
        path.write_bytes(np.full(4, index, np.int64).tobytes())

    def decode(data: bytes) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(data, np.int64).reshape(4).copy())[0]

    with Feeder(Files(paths), decode=decode, batch_size=4) as feeder:
        assert values(feeder) == list(range(12))
        whole = paths[7].read_bytes()
        paths[7].write_bytes(whole[:9])
        with pytest.raises(DecodeError) as caught:
            # An epoch that was read ahead may have the old bytes.
            for _ in range(3):
                list(feeder)
        assert caught.value.key == str(paths[7])
        paths[7].write_bytes(whole)
        assert values(feeder) == list(range(12))


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_pool_without_a_thread_rejects_each_job() -> None:
    """If no thread can be started, submit raises and queues nothing; the pool works when threads can be started."""
    pool = ThreadPool("test", 3, max_running=1)
    with threads_refused("aiofeed-test", 3):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                pool.submit(int)
    assert (pool.running, pool.backlog) == (0, 0)
    assert pool.submit(int).result(5) == 0
    pool.stop()
    assert pool.join(5)


def test_a_pool_that_gets_no_further_thread_uses_those_it_has() -> None:
    """Jobs wait for the existing thread; another is started when that is possible."""
    pool = ThreadPool("test", 3)
    release, started = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        assert release.wait(5)

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("aiofeed-test-")]

    with threads_refused("aiofeed-test-1", 10):
        futures = [pool.submit(first)]
        assert started.wait(5)
        futures += [pool.submit(lambda: None) for _ in range(5)]
        assert (len(threads()), pool.running, pool.backlog) == (1, 1, 5)
        pool.set_max_running(2)
        release.set()
        for future in futures:
            future.result(5)
    release.clear()
    started.clear()
    futures = [pool.submit(first), pool.submit(lambda: None)]
    futures[1].result(5)
    assert len(threads()) == 2
    release.set()
    futures[0].result(5)
    pool.stop()
    assert pool.join(5)


@pytest.mark.parametrize("name", ["read", "decode", "engine", "copy"])
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_threads_that_cannot_be_started(name: str, device: bool) -> None:
    """If a thread cannot be started, the error is raised or the feeder works without it; the next epoch is complete."""
    feeder = Feeder(
        Threaded(), decode=number, batch_size=4, device=SimulatedDevice() if device else None  # type: ignore[arg-type]
    )  # fmt: skip
    raised: list[tuple[type, str]] = []
    with threads_refused(f"aiofeed-{name}", 1):
        try:
            assert values(feeder) == list(range(40))
        except (RuntimeError, ReadError) as error:
            raised.append((type(error), str(error)))
    for kind, text in raised:
        assert "can't start new thread" in text
        assert (kind is ReadError) == (name == "read")
    assert bool(raised) == (device or name != "copy")  # without a device there is no copy thread
    assert values(feeder) == list(range(40))
    feeder.close()


@pytest.mark.parametrize("name", ["pull", "copy", "engine"])
def test_prefetch_without_a_thread(name: str) -> None:
    """If a thread of `prefetch` cannot be started, `iter` raises and no thread is left."""

    async def batches() -> Any:
        for _ in range(100):
            yield torch.zeros(2)

    source = batches() if name == "engine" else [torch.zeros(2)] * 100
    feed = prefetch(source, SimulatedDevice())  # type: ignore[arg-type]
    with threads_refused(f"aiofeed-{name}", 1), pytest.raises(RuntimeError, match="can't start new thread"):
        iter(feed)
    assert [batch.tolist() for batch in feed] == [[0.0, 0.0]] * 100


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """`mappings[:] = [n]`: the next n anonymous mappings fail, as if the system had no more memory."""
    failures = [0]

    class Mapping(mmap.mmap):
        def __new__(cls, *arguments: Any, **options: Any) -> Mapping:
            if failures[0] > 0:
                failures[0] -= 1
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return super().__new__(cls, *arguments, **options)

    monkeypatch.setattr("aiofeed.kernel.runtime.buffers.mmap.mmap", Mapping)
    yield failures
    gc.collect()


def test_a_failed_mapping_is_repeated_without_cached_blocks(mappings: list[int]) -> None:
    """If a mapping fails, the pool returns its free blocks to the system and tries again."""
    memory = HostBufferPool(keep=4)
    blocks = [memory.take(4 * SMALL_BYTES) for _ in range(3)]
    del blocks
    mappings[:] = [1]
    assert memory.take(40 * SMALL_BYTES).nbytes == 40 * SMALL_BYTES
    assert not memory._free


def test_failed_allocation_is_a_memory_error(mappings: list[int]) -> None:
    """The MemoryError gives the number of bytes, and a later epoch is complete."""
    mappings[:] = [10_000]
    with pytest.raises(MemoryError, match=f"{WIDE} bytes"):
        HostBufferPool(keep=4).take(WIDE)
    feeder = Feeder(Numbers(), decode=wide, batch_size=4)
    with pytest.raises((MemoryError, FeedError)) as caught:
        list(feeder)
    assert isinstance(caught.value, MemoryError) or isinstance(caught.value.__cause__, MemoryError)
    del caught
    mappings[:] = [0]
    assert [batch[:, 0].tolist() for batch in feeder] == [list(range(n, n + 4)) for n in range(0, 40, 4)]
    feeder.close()


def test_memory_that_cannot_be_pinned_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """If memory cannot be pinned, batches are right and one warning is logged."""
    feeder = Feeder(Numbers(), decode=number, batch_size=4, device=SimulatedDevice(pin_fails=True))  # type: ignore[arg-type]
    for _ in range(2):
        assert values(feeder) == list(range(40))
    feeder.close()
    assert [record.message.split(" (")[0] for record in caplog.records] == ["memory cannot be pinned"]


# --- the device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [1, 2, 7, 10])
def test_a_device_error_in_a_copy(fails_at: int) -> None:
    """A failed copy is a DeviceCopyError after all earlier batches; the next epoch is complete."""
    device = SimulatedDevice(copy_fails_at=fails_at)
    feeder = Feeder(Numbers(), decode=number, batch_size=4, device=device)  # type: ignore[arg-type]
    seen: list[int] = []
    with pytest.raises(DeviceCopyError, match=f"simulated device error at copy {fails_at}"):
        for batch in feeder:
            seen += batch.tolist()
    assert seen == list(range(4 * (fails_at - 1)))
    assert values(feeder) == list(range(40))
    feeder.close()
    gc.collect()  # the error referred to the batch
    release_unused()
    assert device.pinned_bytes == 0


# --- descriptors ------------------------------------------------------------------------------------------------------


def test_a_source_out_of_descriptors() -> None:
    """EMFILE in a read is a ReadError with its cause, in `open` the OSError itself; later epochs work."""

    class Exhausted(Numbers):
        at = "read"

        def fail(self, at: str) -> None:
            if self.at == at:
                raise OSError(errno.EMFILE, "Too many open files")

        async def open(self) -> None:
            self.fail("open")

        async def read(self, index: int) -> bytes:
            self.fail("read")
            return await super().read(index)

    source = Exhausted()
    feeder = Feeder(source, decode=number, batch_size=4)
    with pytest.raises(ReadError, match="Too many open files") as caught:
        list(feeder)
    assert isinstance(caught.value.__cause__, OSError)
    source.at = "open"
    with pytest.raises(OSError, match="Too many open files") as opening:
        list(feeder)
    assert opening.value.errno == errno.EMFILE
    source.at = ""
    assert values(feeder) == list(range(40))
    feeder.close()


OLD_LOOP = pytest.mark.skipif(
    sys.platform != "win32" and metadata.version("uvloop") < "0.22", reason="a loop that cannot open keeps descriptors"
)


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource")
@pytest.mark.parametrize("when", ["before iter", pytest.param("while reading", marks=OLD_LOOP)])
def test_a_process_out_of_descriptors(fork_server: ForkServer, tmp_path: Path, when: str) -> None:
    """Without free descriptors the error has EMFILE; with descriptors again, the epoch is complete."""
    for index in range(8):
        (tmp_path / str(index)).write_bytes(b"%d" % index)
    program = f"""
        import errno, os, resource
        import torch
        from aiofeed import Feeder, Files
        from aiofeed.errors import ReadError

        feeder = Feeder(Files([f"{tmp_path}/{{n}}" for n in range(8)]), batch_size=4,
                        decode=lambda data: torch.tensor(int(data)))
        if {when!r} == "while reading":
            iterator = iter(feeder)
            next(iterator)
            del iterator
            feeder.close()
        taken = []
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
            if len(taken) == 64:
                _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, most))
        if {when!r} == "while reading":
            # Enough descriptors for the event loop, too few for a file.
            for free in range(1, 40):
                os.close(taken.pop())
                try:
                    list(feeder)
                except ReadError as error:
                    assert error.__cause__.errno == errno.EMFILE
                    print("ReadError")
                    break
                except OSError as error:
                    assert error.errno == errno.EMFILE, error
                else:
                    print("enough")
                    break
        else:
            try:
                iter(feeder)
            except OSError as error:
                assert error.errno == errno.EMFILE
                print("EMFILE")
        for descriptor in taken:
            os.close(descriptor)
        print(sorted(x for batch in feeder for x in batch.tolist()))
        feeder.close()
        """
    found = fork_server.run(textwrap.dedent(program))
    first, *rest = found.stdout.splitlines()
    assert first in ("EMFILE", "ReadError", "enough")
    assert rest == ["[0, 1, 2, 3, 4, 5, 6, 7]"]
    # uvloop prints this if it finds no descriptors for a loop.
    assert set(found.stderr.splitlines()) <= {"deallocating an open event loop"}
    assert found.returncode == 0


def test_a_failed_iter_does_not_change_the_totals() -> None:
    """A failed `iter` does not change the total statistics of earlier epochs."""
    feeder = Feeder(Numbers(), decode=number, batch_size=4)
    assert values(feeder) == list(range(40))
    feeder.close()
    with threads_refused("aiofeed-engine", 2):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                iter(feeder)
    assert feeder.statistics(total=True).samples == 40
    assert values(feeder) == list(range(40))
    assert feeder.statistics(total=True).samples == 80
    feeder.close()


@pytest.mark.parametrize("executor", ["read", "decode"])
def test_a_stopped_pool_is_an_error(executor: str, caplog: pytest.LogCaptureFixture) -> None:
    """If a pool accepts no jobs, the error is raised at the `for` line; nothing hangs or is logged."""
    feeder = Feeder(Threaded(400), decode=number, batch_size=4)
    iterator = iter(feeder)
    next(iterator)
    loop_thread = feeder._session.pipeline.loop_thread  # type: ignore[union-attr]
    getattr(loop_thread, f"{executor}_pool").stop()
    with pytest.raises((RuntimeError, FeedError)):
        list(iterator)
    del iterator
    assert values(feeder) == list(range(400))
    feeder.close()
    assert not caplog.records


class SelfCancelling:
    """A source of which one read cancels its own task."""

    def __len__(self) -> int:
        return 8

    def key(self, index: int) -> str:
        return f"sample {index}"

    async def read(self, index: int) -> bytes:
        if index == 5:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        await asyncio.sleep(0)
        return b"%d" % index


def test_a_read_that_cancels_itself_is_an_error_of_its_sample() -> None:
    """The error names the sample, and the other reads of the batch succeed."""
    with Feeder(SelfCancelling(), decode=number, batch_size=8) as feeder, pytest.raises(ReadError, match="sample 5"):
        list(feeder)
    with Feeder(
        SelfCancelling(), decode=number, batch_size=8, on_error=FailurePolicy("skip", max_failures=1)
    ) as feeder:
        [batch] = list(feeder)
    assert batch.tolist() == [0, 1, 2, 3, 4, 6, 7]


class LeftCancelled(Numbers):
    """A source of which one read cancels its task and does not clear the cancellation, as some time limits do."""

    def __init__(self, way: str) -> None:
        super().__init__(12)
        self.way = way
        self.asked: Counter[int] = Counter()

    async def read(self, index: int) -> bytes:
        self.asked[index] += 1
        if index == 5:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if self.way == "at the next await":
                return b"%d" % index
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if self.way == "raised":
                    raise
                if self.way == "another error":
                    raise TimeoutError("too late") from None
        return b"%d" % index


class ManyLeftCancelled(LeftCancelled):
    """The same with read_many."""

    async def read_many(self, indices: Sequence[int]) -> list[bytes]:
        return [await self.read(index) for index in indices]


SUCCEED = ("suppressed", "at the next await")
FAIL = ("raised", "another error")
LEFT = pytest.mark.parametrize("source", [LeftCancelled, ManyLeftCancelled])
ALONE_OR_NOT = pytest.mark.parametrize("batch_size", [1, 4])


@LEFT
@ALONE_OR_NOT
@pytest.mark.parametrize("in_order", [True, False, "samples"])
@pytest.mark.parametrize("way", SUCCEED)
def test_a_read_that_leaves_its_task_cancelled_loses_no_batch(
    way: str, in_order: Any, batch_size: int, source: type[LeftCancelled]
) -> None:
    """If the read returns a value, its batch is returned."""
    with Feeder(source(way), decode=number, batch_size=batch_size, in_order=in_order) as feeder:
        assert sorted(values(feeder)) == list(range(12))


@LEFT
@ALONE_OR_NOT
@pytest.mark.parametrize("way", FAIL)
def test_a_read_that_fails_and_leaves_its_task_cancelled_is_named(
    way: str, batch_size: int, source: type[LeftCancelled]
) -> None:
    """If the read fails, the error comes after all earlier batches, or the sample is skipped or replaced."""
    with Feeder(source(way), decode=number, batch_size=batch_size) as feeder:
        iterator = iter(feeder)
        before = [value for _ in range(5 // batch_size) for value in next(iterator).tolist()]
        assert before == list(range(5 // batch_size * batch_size))
        with pytest.raises(ReadError, match="number 5"):
            next(iterator)
    policy = FailurePolicy("replace", max_failures=1)
    with Feeder(source(way), decode=number, batch_size=batch_size, on_error=policy) as feeder:
        assert values(feeder) == [0, 1, 2, 3, 4, 6, *range(6, 12)]
        assert [failure.key for failure in feeder.failures] == ["number 5"]


def test_a_read_that_leaves_its_task_cancelled_is_retried() -> None:
    """Such a read is retried as often as the policy allows."""
    source = LeftCancelled("another error")
    policy = FailurePolicy("skip", retries=2, max_failures=1)
    with Feeder(source, decode=number, batch_size=1, on_error=policy) as feeder:
        assert values(feeder) == [*range(5), *range(6, 12)]
    assert source.asked[5] == 3


@pytest.mark.parametrize("way", SUCCEED)
def test_a_replacement_that_leaves_its_task_cancelled_succeeds(way: str) -> None:
    """The task that replaces a failed sample goes on after such a read."""

    class Missing(LeftCancelled):
        async def read(self, index: int) -> bytes:
            if index == 4:
                raise FileNotFoundError(index)
            return await super().read(index)

    with Feeder(Missing(way), decode=number, batch_size=4, on_error=FailurePolicy("replace", max_failures=1)) as feeder:
        assert values(feeder) == [0, 1, 2, 3, 5, 5, *range(6, 12)]


@LEFT
@pytest.mark.parametrize("way", [*SUCCEED, *FAIL])
def test_a_first_read_for_a_cache_that_leaves_its_task_cancelled(way: str, source: type[LeftCancelled]) -> None:
    """The cache takes its layout from the first sample that can be read, also after such a read."""

    class First(source):  # type: ignore[misc, valid-type]
        async def read(self, index: int) -> bytes:
            return bytes(await super().read({0: 5, 5: 0}.get(index, index)))

    policy = FailurePolicy("skip", max_failures=1)
    with Feeder(First(way), decode=number, batch_size=4, cache="device", on_error=policy) as feeder:
        for _ in range(2):
            assert values(feeder) == [*([] if way in FAIL else [5]), 1, 2, 3, 4, 0, *range(6, 12)]


def test_a_first_decode_for_a_cache_that_raises_cancelled_error() -> None:
    """The sample counts as a failure of its batch, by name."""

    def decode(data: bytes) -> torch.Tensor:
        if data == b"0":
            raise asyncio.CancelledError
        return torch.tensor(int(data))

    policy = FailurePolicy("skip", max_failures=1)
    with Feeder(Numbers(8), decode=decode, batch_size=4, cache="device", on_error=policy) as feeder:
        assert values(feeder) == list(range(1, 8))
        assert [failure.key for failure in feeder.failures] == ["number 0"]


@pytest.mark.parametrize("way", [*SUCCEED, *FAIL])
def test_an_open_that_leaves_its_task_cancelled(way: str) -> None:
    """If open() leaves its task cancelled, the source is open, or the error of open() is raised."""

    class Opened(LeftCancelled):
        async def open(self) -> None:
            await LeftCancelled(self.way).read(5)

        async def read(self, index: int) -> bytes:
            return b"%d" % index

    with Feeder(Opened(way), decode=number, batch_size=4) as feeder:
        if way in SUCCEED:
            assert values(feeder) == list(range(12))
        else:
            with pytest.raises((FeedError, TimeoutError)) as caught:
                next(iter(feeder))
            assert "in Opened.open()" in caught.value.__notes__


class Meddling(Numbers):
    """A source of which one read cancels the engine's task of the chunk."""

    async def read(self, index: int) -> bytes:
        if index < 3:
            await asyncio.sleep(3600)
        for task in asyncio.all_tasks():
            if "Engine._do" in repr(task):
                task.cancel()
        return b"%d" % index


def test_a_source_that_cancels_an_engine_task_is_an_error() -> None:
    """The consumer gets a FeedError for the batch."""
    with Feeder(Meddling(), decode=number, batch_size=4) as feeder, pytest.raises(FeedError, match="not by aiofeed"):
        next(iter(feeder))


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that refuses notes and a traceback."""

    number: int = 1


class ErrorWithoutNotes(Exception):
    __notes__ = 3


class RaisingItems(torch.utils.data.Dataset[int]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise self.error


class RaisingSource(Numbers):
    """A source whose `open` or `read` raises."""

    def __init__(self, error: Exception, method: str) -> None:
        super().__init__()
        self.error = error
        self.method = method

    async def open(self) -> None:
        if self.method == "open":
            raise self.error

    async def read(self, index: int) -> bytes:
        if self.method == "read":
            raise self.error
        return await super().read(index)


@pytest.mark.parametrize("stage", ["open", "read", "decode", "collate_fn", "transform", "Tensors", "Dataset", "device"])
@pytest.mark.parametrize("error", [FrozenError(), ErrorWithoutNotes()], ids=lambda error: type(error).__name__)
def test_an_exception_that_refuses_notes_is_raised(stage: str, error: Exception) -> None:
    """The consumer gets it, or an error with it as the cause; it never waits."""

    def fail(*_: object) -> Any:
        raise error

    source = RaisingSource(error, stage)
    feeders: dict[str, Any] = {
        "open": lambda: Feeder(source, decode=number, batch_size=4),
        "read": lambda: Feeder(source, decode=number, batch_size=4),
        "decode": lambda: Feeder(source, decode=fail, batch_size=4),
        "collate_fn": lambda: Feeder(source, decode=number, batch_size=4, collate_fn=fail),
        "transform": lambda: Feeder(source, decode=number, batch_size=4, transform=fail),
        "Tensors": lambda: Feeder(aiofeed.Tensors(torch.arange(4)), batch_size=4, transform=fail),
        "Dataset": lambda: Feeder(RaisingItems(error), batch_size=4),
        "device": lambda: Feeder(source, decode=number, batch_size=4, device=SimulatedDevice(), transform=fail),
    }
    with feeders[stage]() as feeder, pytest.raises((type(error), FeedError)) as caught:
        list(feeder)
    assert error in (caught.value, caught.value.__cause__)


@pytest.mark.parametrize("latency", ["random", "late", "early"])
@pytest.mark.parametrize("taken", [1, 3])
def test_memory_is_not_freed_after_the_device_has_failed(
    latency: Any, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal memory access torch would end the process when it frees memory, before the error is shown."""
    monkeypatch.setattr("aiofeed.kernel.devices.pinned._kept", None)
    monkeypatch.setattr("aiofeed.kernel.devices.copy_thread._kept", [])
    simulated = SimulatedDevice(latency=latency)
    feeder: Feeder[torch.Tensor] = Feeder(Numbers(400), decode=wide, batch_size=4, device=simulated)
    iterator = iter(feeder)
    kept = [next(iterator) for _ in range(taken)]
    simulated.fail()
    with pytest.raises((DeviceCopyError, RuntimeError), match="illegal memory access"):
        while True:
            kept.append(next(iterator))
    feeder.close()
    del feeder, iterator
    gc.collect()
    assert simulated.freed_after_failure == 0
    assert simulated.pinned_bytes > 0
    del kept


@pytest.mark.parametrize("decode_s", [0.0, 0.003])
@pytest.mark.parametrize("device", [False, True])
def test_an_error_in_a_callback_of_the_loop_is_raised(
    device: bool, decode_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocation that fails in a callback of aiofeed ends the feed with an error; the consumer does not wait.

    While slow samples are decoded, taken batches are released when a job ends, not by a wake of the loop.
    """

    def slow_number(sample: Any) -> torch.Tensor:
        time.sleep(decode_s)
        return number(sample)

    calls = Counter[str]()

    def fail_once(assembly: Assembly, item: Any) -> None:
        calls["taken"] += 1
        if calls["taken"] == 2:
            raise MemoryError("no memory for a callback")

    monkeypatch.setattr(Assembly, "taken", fail_once)
    feeder = Feeder(Numbers(200), decode=slow_number, batch_size=4, device=SimulatedDevice() if device else None)
    with feeder, pytest.raises((WorkerDiedError, MemoryError), match="no memory for a callback"):
        list(feeder)


def test_a_broken_device_ends_the_copy_thread_with_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every call to the device fails, as after an illegal kernel, the error is raised once and not printed."""

    def lost(event: SimulatedEvent) -> bool:
        raise RuntimeError("the device is lost")

    feeder = Feeder(Numbers(), decode=number, batch_size=4, device=SimulatedDevice(latency="late"))
    iterator = iter(feeder)
    next(iterator)
    with monkeypatch.context() as patched:
        patched.setattr(SimulatedEvent, "query", lost)
        patched.setattr(SimulatedEvent, "synchronize", lost)
        with pytest.raises(DeviceCopyError, match="the device is lost"):
            for _ in iterator:
                pass
        feeder.close()
