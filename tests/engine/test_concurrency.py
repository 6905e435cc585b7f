"""What a feeder does with the numbers that were found: jobs say what the test wants them to, not what they took."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiofeed import Feeder, FromDataset, Limits
from aiofeed.core.types import Row
from aiofeed.engine import assembler
from aiofeed.engine.concurrency import JobTimer
from aiofeed.engine.fetch.fetcher import FIRST_CHUNK, ChunkSizer
from aiofeed.engine.tuning import reads
from aiofeed.engine.tuning.threads import JobTiming
from aiofeed.runtime import machine
from aiofeed.runtime.thread_pool import ThreadPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLES = 512
BATCH = 8


class Numbers:
    """Samples whose reads are a turn of the loop."""

    def __len__(self) -> int:
        return SAMPLES

    def key(self, index: int) -> str:
        return f"number {index}"

    async def read(self, index: int) -> bytes:
        return index.to_bytes(2, "big")


def decode(data: bytes) -> torch.Tensor:
    return torch.tensor(int.from_bytes(data, "big"))


class FakeMeter(JobTimer):
    """Jobs that take turns, as under the GIL."""

    made = 0

    def __init__(self, pool: ThreadPool) -> None:
        type(self).made += 1
        self._max_running = pool.max_running

    def job(self, samples: int, nbytes: int) -> JobTiming:
        return JobTiming(samples, self._max_running * samples * 1e-4, samples * 0.9e-4, self._max_running)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpus", lambda: 4)
    # Else so little work would be left to a thread by itself, whatever was found.
    monkeypatch.setattr("aiofeed.engine.fetch.source.TINY_DECODE_S", 0.0)
    FakeMeter.made = 0
    monkeypatch.setattr(assembler, "JobTimer", FakeMeter)


def feeding(source: Any, **options: Any) -> Feeder[Any]:
    return Feeder(source, **options)


def epochs_until(feeder: Feeder[Any], threads: int) -> None:
    """Epochs, until so many threads decode; the test's limit on time ends what never comes."""
    while feeder.statistics().decode_threads != threads:
        for _ in feeder:
            pass


@pytest.mark.usefixtures("four_cores")
def test_threads_that_do_not_help_are_taken_away_and_statistics_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """From four threads to one, with one warning that names the GIL once it matters, for a feeder's life."""
    with (
        caplog.at_level(logging.WARNING, logger="aiofeed"),
        feeding(Numbers(), decode=decode, batch_size=BATCH) as feeder,
    ):
        assert feeder.statistics().decode_threads == 4
        assert feeder.statistics().gil_us == 0
        epochs_until(feeder, 1)
        found = feeder.statistics()
        assert found.gil_us == pytest.approx(90, rel=0.02)
        assert not caplog.records, "told of for a fraction of a second"
        while not caplog.records:
            for _ in feeder:
                pass
        feeder.close()
        epochs_until(feeder, 1)
        for _ in feeder:
            pass
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    for part in ("GIL-bound: 90 us", "1 of 4 decode threads", 'engine="process:4"'):
        assert part in told[0]


@pytest.mark.usefixtures("four_cores")
def test_what_was_found_outlives_close() -> None:
    """A feeder that is closed and iterated again goes on with what it knew."""
    feeder = feeding(Numbers(), decode=decode, batch_size=BATCH)
    epochs_until(feeder, 1)
    feeder.close()
    for _ in feeder:
        break
    assert feeder._session.pipeline.loop_thread.decode_pool.max_running == 1  # type: ignore[union-attr]
    feeder.close()


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("source", [Numbers(), FromDataset(list(range(SAMPLES)), threads=3)], ids=["said", "dataset"])
def test_threads_that_the_user_gave_stay(source: Any) -> None:
    """``decode_threads`` and ``FromDataset(threads=)`` are kept, and nothing is measured."""
    dataset = isinstance(source, FromDataset)
    limits = None if dataset else Limits(decode_threads=3)
    with feeding(source, decode=None if dataset else decode, batch_size=BATCH, limits=limits) as feeder:
        for _ in range(3):
            for _ in feeder:
                pass
        assert feeder.statistics().decode_threads == 3
    assert FakeMeter.made == 0


class Near(Numbers):
    """Samples that the decode thread may read itself."""

    answers_at_once = True

    def read_now(self, indices: list[int]) -> list[bytes]:
        return [index.to_bytes(2, "big") for index in indices]


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("limits", "max_running"), [(None, 1), (Limits(decode_threads=3), 3)])
def test_samples_that_take_nothing_get_one_thread_unless_the_user_says_more(
    limits: Limits | None, max_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look; statistics say what is in force."""
    for name in ("TINY_DECODE_S", "SMALL_DECODE_S"):
        monkeypatch.setattr(f"aiofeed.engine.fetch.source.{name}", 1.0)
    monkeypatch.setattr(FakeMeter, "job", lambda meter, samples, nbytes: None)
    with feeding(Near(), decode=decode, batch_size=BATCH, limits=limits) as feeder:
        for _ in feeder:
            pass
        assert feeder.statistics().decode_threads == max_running
        assert feeder._session.pipeline.loop_thread.decode_pool.max_running == max_running  # type: ignore[union-attr]


@pytest.mark.usefixtures("four_cores")
def test_batches_do_not_depend_on_what_is_found() -> None:
    """The same batches in the same order while threads come and go as with one thread from the start."""
    with feeding(Numbers(), decode=decode, batch_size=BATCH, shuffle=True, seed=3) as feeder:
        found = [batch.tolist() for _ in range(4) for batch in feeder]
        assert feeder.statistics().decode_threads < 4
    one = Limits(decode_threads=1)
    with feeding(Numbers(), decode=decode, batch_size=BATCH, shuffle=True, seed=3, limits=one) as feeder:
        assert found == [batch.tolist() for _ in range(4) for batch in feeder]


@pytest.mark.usefixtures("four_cores")
def test_a_consumer_that_is_slower_takes_no_thread_away() -> None:
    """While a finished batch waits, jobs say nothing: each epoch is read by a consumer that lets the queue fill."""
    with feeding(Numbers(), decode=decode, batch_size=BATCH) as feeder:
        left = SAMPLES // BATCH
        for _ in feeder:
            left -= 1
            while feeder.statistics().queue_depth < min(2, left):
                threading.Event().wait(0.0005)
        assert FakeMeter.made > SAMPLES // BATCH // 2
        assert feeder.statistics().decode_threads == 4


class Far(Numbers):
    """Reads that take a moment; how many are under way."""

    under_way = most = 0

    async def read(self, index: int) -> bytes:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        return await super().read(index)


def test_slow_reads_become_more_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many at a time are asked for, and statistics say how many."""
    monkeypatch.setattr(reads, "SLOW_READ_S", 0.005)
    monkeypatch.setattr(reads, "READS_BRING", 0.0)
    source = Far()
    with feeding(source, decode=decode, batch_size=BATCH) as feeder:
        assert feeder.statistics().read_concurrency == 64
        while feeder.statistics().read_concurrency < 256:
            for _ in feeder:
                pass
        for _ in feeder:
            pass
    assert 64 < source.most <= feeder.statistics().read_concurrency


def test_a_given_read_concurrency_is_never_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow reads are."""
    monkeypatch.setattr(reads, "SLOW_READ_S", 0.0)
    monkeypatch.setattr(reads, "READS_BRING", 0.0)
    source = Far()
    with feeding(source, decode=decode, batch_size=BATCH, limits=Limits(read_concurrency=16)) as feeder:
        for _ in range(3):
            for _ in feeder:
                pass
    assert source.most == 16


class IntoRows:
    """As ``decode``, into rows of the batch's memory: how large a batch becomes is known before the first is read."""

    row = Row((1,), "int64")
    takes_seed = False

    def __call__(self, data: bytes) -> torch.Tensor:
        return decode(data).reshape(1)

    def decode_into(self, data: bytes, out: NDArray[Any], seed: int | None = None) -> None:
        out[...] = int.from_bytes(data, "big")


def test_a_chunk_that_waits_while_fewer_reads_are_allowed_than_it_has_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read all the same, alone: samples turn out to be large when the first reads are back."""
    monkeypatch.setattr(reads, "FREE_BYTES", 4)
    with feeding(Far(), decode=IntoRows(), batch_size=32, limits=Limits(decode_threads=1)) as feeder:
        assert torch.cat(list(feeder)).flatten().tolist() == list(range(SAMPLES))


# --- what a job takes -------------------------------------------------------------------------------------------------


def test_a_meter_tells_work_from_waiting() -> None:
    """Wall-clock time, the thread's own, and all threads at work."""
    pool = ThreadPool("test", 1)

    def wait_and_work() -> JobTiming:
        meter = JobTimer(pool)
        threading.Event().wait(0.02)
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass
        return meter.job(3)

    job = pool.submit(wait_and_work).result(5)
    pool.stop()
    assert pool.join(5)
    assert job.samples == 3
    assert job.threads == 1
    assert job.cpu_s >= 0.005
    assert job.wall_s >= 0.02 + job.cpu_s - 0.001


def test_a_job_beside_an_idle_thread_says_so() -> None:
    """Threads is 0 where one of them has nothing to do."""
    pool = ThreadPool("test", 2)
    assert pool.submit(lambda: JobTimer(pool).job(1)).result(5).threads == 0
    pool.stop()
    assert pool.join(5)


# --- the size of a chunk ----------------------------------------------------------------------------------------------


def test_waiting_for_the_gil_makes_no_chunk_smaller() -> None:
    """What counts is the time on the processor, where that is a good part of it."""
    pace = ChunkSizer()
    pace.observe(0.064 * 4, 64, 0.064)
    assert pace.seconds == pytest.approx(0.001)
    assert pace.chunk_size(64, 2) == 32


def test_waiting_for_something_of_its_own_does() -> None:
    """A decoder that sleeps has hardly any time on the processor, and its chunks are small."""
    pace = ChunkSizer()
    pace.observe(1.0, 10, 0.001)
    assert pace.chunk_size(64, 2) == 1


def test_a_chunk_of_large_samples_is_small() -> None:
    """What is read is decoded before it has left every cache: 16 MiB of it, or one sample."""
    pace = ChunkSizer()
    pace.observe(0.001, 1, 0.001)
    pace.weigh(8 * 100_000, 8)
    assert pace.chunk_size(64, 2) == 32
    for _ in range(100):
        pace.weigh(8 * 8_000_000, 8)
    assert pace.chunk_size(64, 2) == 2
    for _ in range(100):
        pace.weigh(2 * 40_000_000, 2)
    assert pace.chunk_size(64, 2) == 1


def test_nothing_known_makes_a_first_chunk() -> None:
    """Before anything was decoded."""
    assert ChunkSizer().chunk_size(64, 2) == FIRST_CHUNK
