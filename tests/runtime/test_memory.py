"""`memory_bytes`: what is in flight, by the test's own accounting of every byte that is alive, and by the system's."""

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

if TYPE_CHECKING:
    from numpy.typing import NDArray

KIB, MIB = 1 << 10, 1 << 20


class Ledger:
    """Bytes that are alive now, and the most there were at a time."""

    def __init__(self) -> None:
        self.now = self.peak = self.added = 0
        self._lock = threading.Lock()

    def array(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory that is counted until nothing refers to it."""
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
    """Samples of given sizes, as large decoded as encoded, or so many times as large."""

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
        # A batch is the list of its samples, so that every byte of it is in the ledger.
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
        """The most bytes alive in one epoch, of which every sample came; what was handed out is dropped at once."""
        self.ledger.forget_peak()
        came = []
        for batch in feeder:
            came += [sample.nbytes for sample in batch]
            del batch
        assert sorted(came) == sorted(size * self.growth for size in self.sizes)
        return self.ledger.peak


def settled(feeder: Feeder[Any], source: Sized) -> None:
    """Let the engine do all that it may: its loop has gone round a few times with nothing new to count."""
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
    """Mostly a KiB, now and then up to 40 MiB."""
    sizes = [40 * MIB, 20 * MIB, 10 * MIB, 5 * MIB] * 4 + [KIB] * 104
    random.Random(seed).shuffle(sizes)
    return sizes


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("decode_threads", [1, 3])
def test_samples_of_one_size_stay_within_memory_bytes(batch_size: int, decode_threads: int) -> None:
    """Encoded plus decoded, at any moment: no more than that, beside the batch that was handed out."""
    source = Sized([MIB] * 60)
    most = 16 * MIB
    with source.feeder(batch_size, memory_bytes=most, prefetch_batches=8, decode_threads=decode_threads) as feeder:
        for _ in range(3):
            assert source.epoch(feeder) <= most + batch_size * MIB


def test_a_sample_larger_than_memory_bytes_goes_alone() -> None:
    """One batch may always proceed, and while it does no other does."""
    source = Sized([40 * MIB] * 8)
    with source.feeder(1, memory_bytes=8 * MIB, prefetch_batches=4) as feeder:
        for _ in range(2):
            # Encoded and decoded, and the one handed out before.
            assert source.epoch(feeder) <= 3 * 40 * MIB


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("memory_bytes", [8 * MIB, 64 * MIB])
def test_a_mix_of_tiny_and_huge_samples_is_bounded(memory_bytes: int, seed: int) -> None:
    """Sizes are learned by reading: beyond memory_bytes there is at most what was being read when a huge one came."""
    source = Sized(mixed(seed))
    reads, largest = 2, max(source.sizes)
    with source.feeder(1, memory_bytes=memory_bytes, read_concurrency=reads, prefetch_batches=2) as feeder:
        peaks = [source.epoch(feeder) for _ in range(3)]
    # The one decoded is there twice, encoded and decoded, and one was handed out.
    assert max(peaks) <= memory_bytes + (reads + 2) * largest
    # Encoded and decoded, all of it would be several times that.
    assert 2 * sum(source.sizes) > 2.5 * (memory_bytes + (reads + 2) * largest)
    gc.collect()
    assert source.ledger.now == 0


def test_what_collate_fn_made_counts() -> None:
    """With a collate_fn as without: the finished batches that wait are within memory_bytes."""
    source = Sized([256 * KIB] * 48, growth=8)
    with source.feeder(1, memory_bytes=10 * MIB, prefetch_batches=16) as feeder:
        iterator = iter(feeder)
        held = next(iterator)
        # The consumer takes its time: as much is read ahead as may be.
        settled(feeder, source)
        assert held[0].nbytes < source.ledger.peak <= 10 * MIB + 2 * MIB
        del held, iterator


def test_resident_memory_is_flat_over_epochs() -> None:
    """The peak of later epochs is that of the first ones, give or take what malloc keeps."""
    sizes = [2 * MIB] * 40
    resident: list[int] = []
    process = psutil.Process()
    # default_collate's rules: the feeder's own memory for batches, used again.
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
    """Once the first batches have come back, memory of the next is mapped already, however large; a kept one stays."""
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
