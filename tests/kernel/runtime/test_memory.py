"""`memory_bytes` limits the bytes in flight, measured by a ledger of all live bytes and by the system."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from aiofeed import Feeder, Limits
from aiofeed.kernel.runtime import machine

if TYPE_CHECKING:
    from numpy.typing import NDArray

KIB, MIB = 1 << 10, 1 << 20


class Ledger:
    """Counts the live bytes and their peak."""

    def __init__(self) -> None:
        self.now = self.peak = self.added = 0
        self._lock = threading.RLock()  # a finalizer may run inside

    def array(self, nbytes: int) -> NDArray[np.uint8]:
        """An array that is counted until nothing refers to it."""
        made = np.ones(nbytes, np.uint8)
        self._add(nbytes)
        weakref.finalize(made, self._add, -nbytes)
        return made

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self.now += nbytes
            self.added += max(nbytes, 0)
            self.peak = max(self.peak, self.now)

    def forget_peak(self) -> None:
        self.peak = self.now


class Sized:
    """Samples of given encoded sizes; the decoded size is ``growth`` times as large."""

    def __init__(self, sizes: list[int], growth: int = 1) -> None:
        self.sizes = sizes
        self.growth = growth
        self.ledger = Ledger()

    def __len__(self) -> int:
        return len(self.sizes)

    def key(self, index: int) -> str:
        return f"{self.sizes[index]} bytes"

    async def read(self, index: int) -> memoryview:
        return memoryview(self.ledger.array(self.sizes[index]))

    def decode(self, data: memoryview) -> NDArray[np.uint8]:
        return self.ledger.array(data.nbytes * self.growth)

    def feeder(self, batch_size: int, **limits: int) -> Feeder[Any]:
        # A batch is the list of its samples, so the ledger has all of its bytes.
        return Feeder(
            self,
            decode=self.decode,
            batch_size=batch_size,
            collate_fn=list,
            limits=Limits(**limits),  # type: ignore[arg-type]
            shuffle=True,
            shard=None,
        )

    def epoch(self, feeder: Feeder[Any]) -> int:
        """Iterate an epoch, dropping each batch at once, and check its samples; return the peak of live bytes."""
        self.ledger.forget_peak()
        sizes = []
        for batch in feeder:
            sizes += [sample.nbytes for sample in batch]
            del batch
        assert sorted(sizes) == sorted(size * self.growth for size in self.sizes)
        return self.ledger.peak


def settled(feeder: Feeder[Any], source: Sized) -> None:
    """Wait until the engine adds no more memory: a few iterations of its loop have not changed the ledger."""
    loop_thread = feeder._session.pipeline.loop_thread  # type: ignore[union-attr]
    seen, same = -1, 0
    while same < 5:
        done = threading.Event()
        loop_thread.call(done.set)
        assert done.wait(10)
        loop_thread.decode_pool.submit(int).result(10)
        same = same + 1 if source.ledger.added == seen else 0
        seen = source.ledger.added


def mixed(seed: int) -> list[int]:
    """Mostly 1 KiB, sometimes up to 40 MiB."""
    sizes = [40 * MIB, 20 * MIB, 10 * MIB, 5 * MIB] * 4 + [KIB] * 104
    random.Random(seed).shuffle(sizes)
    return sizes


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("decode_threads", [1, 3])
def test_samples_of_one_size_stay_within_memory_bytes(batch_size: int, decode_threads: int) -> None:
    """Encoded plus decoded bytes never exceed memory_bytes and the batch that was returned."""
    source = Sized([MIB] * 60)
    most = 16 * MIB
    with source.feeder(batch_size, memory_bytes=most, prefetch_batches=8, decode_threads=decode_threads) as feeder:
        for _ in range(3):
            # On a free-threaded build dropped bytes and samples are freed when the thread that made them runs again.
            late = 2 * decode_threads * machine.FREE_THREADED
            assert source.epoch(feeder) <= most + (batch_size + late) * MIB


def test_a_sample_larger_than_memory_bytes_proceeds_alone() -> None:
    """One batch may always proceed; one above the limit does so alone."""
    source = Sized([40 * MIB] * 8)
    with source.feeder(1, memory_bytes=8 * MIB, prefetch_batches=4) as feeder:
        for _ in range(2):
            # Encoded, decoded, and the one returned before.
            assert source.epoch(feeder) <= 3 * 40 * MIB


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("memory_bytes", [8 * MIB, 64 * MIB])
def test_a_mix_of_tiny_and_huge_samples_is_bounded(memory_bytes: int, seed: int) -> None:
    """Sizes are known after reading, so memory_bytes is exceeded by the concurrent reads of huge samples at most."""
    source = Sized(mixed(seed))
    reads, largest = 2, max(source.sizes)
    with source.feeder(1, memory_bytes=memory_bytes, read_concurrency=reads, prefetch_batches=2) as feeder:
        peaks = [source.epoch(feeder) for _ in range(3)]
    # One sample is both encoded and decoded, and one was returned.
    assert max(peaks) <= memory_bytes + (reads + 2) * largest
    # All samples, encoded and decoded, would be several times as large.
    assert 2 * sum(source.sizes) > 2.5 * (memory_bytes + (reads + 2) * largest)
    gc.collect()
    assert source.ledger.now == 0


def test_the_result_of_collate_fn_counts() -> None:
    """Finished batches made by a collate_fn stay within memory_bytes."""
    source = Sized([256 * KIB] * 48, growth=8)
    with source.feeder(1, memory_bytes=10 * MIB, prefetch_batches=16) as feeder:
        iterator = iter(feeder)
        held = next(iterator)
        # The consumer waits, so the engine reads ahead as far as it may.
        settled(feeder, source)
        assert held[0].nbytes < source.ledger.peak <= 10 * MIB + 2 * MIB
        del held, iterator


def test_resident_memory_is_flat_over_epochs() -> None:
    """Later epochs have the peak of the first ones, apart from memory that malloc retains."""
    sizes = [2 * MIB] * 40
    resident: list[int] = []
    process = psutil.Process()
    # Batches of default_collate use the feeder's own buffers.
    source = Sized(sizes)
    with Feeder(source, decode=source.decode, batch_size=4, limits=Limits(memory_bytes=64 * MIB), shard=None) as feeder:
        for _ in range(6):
            for batch in feeder:
                del batch
            resident.append(process.memory_info().rss)
        assert max(resident[3:]) <= max(resident[:3]) + 32 * MIB
        assert max(resident) - resident[0] < sum(sizes)
    gc.collect()
    assert source.ledger.now == 0


def test_dropped_batches_cost_no_page_faults() -> None:
    """Large batches reuse the mapped memory of dropped ones, and never that of a batch that is referenced."""
    resource: Any = pytest.importorskip("resource", reason="counts page faults")
    pages = 16 * MIB // resource.getpagesize()
    sample = np.ones(4 * MIB, np.uint8)
    with Feeder([sample] * 160, batch_size=4, shard=None) as feeder:
        batches = iter(feeder)
        kept = next(batches)
        for _ in range(10):
            batch = next(batches)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            batch = next(batches)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2 * pages
        assert kept.data_ptr() != batch.data_ptr()
        del batches, kept, batch
