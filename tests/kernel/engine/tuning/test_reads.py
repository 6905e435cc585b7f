"""How many samples are read at a time, as arithmetic: storages and engines are simulated, nothing is timed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from aiofeed.kernel.engine.tuning.reads import FREE_BYTES, READS_LEAST, READS_MOST, ReadTuner

BATCH = 64
MB = 1_000_000
ENDLESS = 1e12


@dataclass(frozen=True)
class Storage:
    """What a read takes.

    Args:
        latency_s: until the first byte.
        bandwidth: bytes per second, of all reads together, one after the other.
        able: reads that it serves at a time; others wait.
        jitter: sigma of the logarithm of the latency.
    """

    latency_s: float = 0.0
    bandwidth: float = ENDLESS
    able: int = 1 << 20
    jitter: float = 0.0


@dataclass(eq=False)
class Chunk:
    """Samples that are read together, of which ``left`` are not there."""

    started: float
    size: int
    concurrency: int
    left: int


@dataclass
class Feed:
    """An engine: it reads chunks ahead, as far as it may, of which decoders take one after the other.

    Args:
        nbytes: of a sample.
        decode_s: seconds that it takes to decode one, of all decoders together.
        fixed: keeps to so many reads, rather than to the tuner's number.
    """

    storage: Storage
    nbytes: int
    decode_s: float = 0.0
    fixed: int = 0
    tuner: ReadTuner = field(default_factory=lambda: ReadTuner(64))
    random: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 0.0
    reading: int = 0
    decoded: int = 0
    pipe_free: float = 0.0
    decoder_free: float = 0.0
    held_by_reads: bool = False
    history: list[int] = field(default_factory=lambda: [64])

    def __post_init__(self) -> None:
        # What happens next: when, in which order, what, and the chunk it happens to.
        self._events: list[tuple[float, int, Callable[[Chunk], None], Chunk]] = []
        self._serial = itertools.count()
        self._waiting: deque[Chunk] = deque()
        self._served = self._issued = self._undecoded = 0

    @property
    def concurrency(self) -> int:
        return self.fixed or self.tuner.concurrency

    def _size(self) -> int:
        slow = max(8, self.concurrency // 8) if self.storage.latency_s > 0.010 else BATCH
        return max(1, min(slow, (16 << 20) // self.nbytes, self.concurrency, BATCH))

    def _at(self, when: float, what: Callable[[Chunk], None], chunk: Chunk) -> None:
        heapq.heappush(self._events, (when, next(self._serial), what, chunk))

    def _plan(self) -> None:
        ahead = (3 + -(-self.concurrency // BATCH)) * BATCH
        while True:
            size = self._size()
            if self._issued + size - self.decoded > ahead:
                self.held_by_reads = False
                return
            if self.reading + size > self.concurrency:
                self.held_by_reads = True
                return
            self.reading += size
            self._issued += size
            chunk = Chunk(self.now, size, self.concurrency, size)
            for _ in range(size):
                self._ask(chunk)

    def _ask(self, chunk: Chunk) -> None:
        if self._served == self.storage.able:
            self._waiting.append(chunk)
            return
        self._served += 1
        latency_s = self.storage.latency_s * self.random.lognormvariate(0.0, self.storage.jitter)
        self._at(self.now + latency_s, self._answered, chunk)

    def _answered(self, chunk: Chunk) -> None:
        self.pipe_free = max(self.pipe_free, self.now) + self.nbytes / self.storage.bandwidth
        self._at(self.pipe_free, self._there, chunk)

    def _there(self, chunk: Chunk) -> None:
        self._served -= 1
        if self._waiting:
            self._ask(self._waiting.popleft())
        chunk.left -= 1
        if chunk.left:
            return
        starving = self.held_by_reads and not self._undecoded
        self.reading -= chunk.size
        self._undecoded += chunk.size
        self.decoder_free = max(self.decoder_free, self.now) + chunk.size * self.decode_s
        self._at(self.decoder_free, self._decoded, chunk)
        if not self.fixed:
            took_s, nbytes = self.now - chunk.started, chunk.size * self.nbytes
            self.tuner.observe(self.now, took_s, chunk.size, nbytes, concurrency=chunk.concurrency, starving=starving)
            if self.tuner.concurrency != self.history[-1]:
                self.history.append(self.tuner.concurrency)

    def _decoded(self, chunk: Chunk) -> None:
        self._undecoded -= chunk.size
        self.decoded += chunk.size

    def run(self, samples: int) -> float:
        """Until so many more are decoded; samples per second."""
        began, goal = self.now, self.decoded + samples
        while self.decoded < goal:
            self._plan()
            self.now, _, happen, chunk = heapq.heappop(self._events)
            happen(chunk)
        return samples / (self.now - began)


def best(storage: Storage, nbytes: int, decode_s: float) -> float:
    """The most that any number of reads gives, in samples per second."""
    rates = []
    for fixed in (2, 8, 32, 64, 128, 256, 512):
        feed = Feed(storage, nbytes, decode_s, fixed=fixed)
        feed.run(16 * BATCH)
        rates.append(feed.run(32 * BATCH))
    return max(rates)


STORAGES = {
    "20 ms": Storage(0.020),
    "20 ms, jittery": Storage(0.020, jitter=0.5),
    "20 ms, 1 GB/s": Storage(0.020, 1e9),
    "20 ms, 128 at a time": Storage(0.020, able=128),
    "100 ms, 1 GB/s, jittery": Storage(0.100, 1e9, jitter=0.5),
    "100 ms, 5 GB/s": Storage(0.100, 5e9),
    "disk, 150 MB/s": Storage(0.008, 150e6, jitter=0.3),
    "page cache": Storage(0.000002, 4e9),
}


@pytest.mark.parametrize("decode_s", [0.0, 0.001], ids=lambda value: f"{value * 1e3:g} ms")
@pytest.mark.parametrize("nbytes", [100_000, 8 * MB], ids=["100 KB", "8 MB"])
@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_what_is_found_gives_nearly_as_much_as_the_best_number(storage: Storage, nbytes: int, decode_s: float) -> None:
    """Whatever the storage, the samples and their decoder; where reads jitter, chance has a say."""
    feed = Feed(storage, nbytes, decode_s)
    feed.run(40 * BATCH)
    assert feed.run(60 * BATCH) >= (0.7 if storage.jitter > 0.4 else 0.85) * best(storage, nbytes, decode_s)


@pytest.mark.parametrize("decode_s", [0.0, 0.005], ids=lambda value: f"{value * 1e3:g} ms")
@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_nothing_swings(storage: Storage, decode_s: float) -> None:
    """What was tried in vain is tried again less and less often: nearly as often in 100 batches as then in 300."""
    feed = Feed(storage, 8 * MB, decode_s)
    feed.run(100 * BATCH)
    known = len(feed.history)
    feed.run(300 * BATCH)
    assert len(feed.history) - known <= 8


@pytest.mark.parametrize("nbytes", [8 * MB, 30 * MB, 900 * MB])
def test_large_samples_begin_with_few_from_the_first_chunk_on(nbytes: int) -> None:
    """What is under way is not more than ``FREE_BYTES``, or two samples."""
    tuner = ReadTuner(64)
    tuner.observe(0.0, 0.001, 1, nbytes, concurrency=64, starving=False)
    assert tuner.concurrency == max(READS_LEAST, FREE_BYTES // nbytes)


@pytest.mark.parametrize("decode_s", [0.0, 0.002])
def test_large_files_of_the_page_cache_stay_few(decode_s: float) -> None:
    """More of them only take longer each."""
    feed = Feed(STORAGES["page cache"], 8 * MB, decode_s)
    feed.run(200 * BATCH)
    assert feed.tuner.concurrency == FREE_BYTES // (8 * MB)


def test_small_samples_are_never_fewer() -> None:
    """Whatever the storage: below ``FREE_BYTES`` they cost nothing."""
    for storage in STORAGES.values():
        feed = Feed(storage, 2_000, 0.0005)
        feed.run(60 * BATCH)
        assert min(feed.history) == 64


def test_samples_that_become_small_are_as_many_as_ever() -> None:
    """A large one among them does not hold up the others for long."""
    tuner = ReadTuner(64)
    tuner.observe(0.0, 0.001, 1, 100 * MB, concurrency=64, starving=False)
    for now in range(1, 60):
        tuner.observe(now, 0.001, 8, 8 * 100_000, concurrency=tuner.concurrency, starving=False)
    assert tuner.concurrency == 64


@pytest.mark.parametrize("samples", [1, 16, 48, 64])
def test_chunks_of_unknown_size_change_nothing(samples: int) -> None:
    """What decode jobs read themselves is not weighed: however many such chunks come, the others' size stands."""
    tuner = ReadTuner(64)
    tuner.observe(0.0, 0.001, 8, 8 * 4_000_000, concurrency=64, starving=False)
    few = tuner.concurrency
    assert few < 64
    for now in range(1, 3000):
        tuner.observe(now, 0.0, samples, 0, concurrency=tuner.concurrency, starving=False)
    assert tuner.concurrency == few


# --- where only the latency is given ----------------------------------------------------------------------------------


def read(tuner: ReadTuner, latency: Callable[[int], float], samples: int, *, starving: bool = True) -> int:
    """Samples until ``samples`` were read; what concurrency is then."""
    now = 0.0
    while samples > 0:
        size = min(max(8, tuner.concurrency // 8), samples)
        now += latency(tuner.concurrency) * size / tuner.concurrency
        tuner.observe(now, latency(tuner.concurrency), size, concurrency=tuner.concurrency, starving=starving)
        samples -= size
    return tuner.concurrency


def test_slow_reads_that_are_waited_for_go_up_to_the_most_within_twenty_batches() -> None:
    """Storage that answers in 20 ms however many ask is asked for as many as may be."""
    assert read(ReadTuner(64), lambda _: 0.020, 20 * BATCH) == READS_MOST


def test_other_reads_stay_as_they_are() -> None:
    """Those of a millisecond, those for which nobody waits, and as many as the user said."""
    assert read(ReadTuner(64), lambda _: 0.001, 100 * BATCH) == 64
    assert read(ReadTuner(64), lambda _: 0.020, 100 * BATCH, starving=False) == 64
    assert read(ReadTuner(16, given=True), lambda _: 0.5, 60 * BATCH) == 16


@pytest.mark.parametrize("able", [64, 128, 200])
def test_storage_that_is_full_is_not_asked_for_more(able: int) -> None:
    """Storage that serves so many at a time makes the others wait: the concurrency it can use is kept."""
    found = read(ReadTuner(64), lambda many: 0.020 * max(1.0, many / able), 60 * BATCH)
    assert able / 2 < found <= able * 1.3


def test_reads_begun_before_a_change_say_nothing() -> None:
    """Of what was under way when the concurrency changed, nothing counts."""
    tuner = ReadTuner(64)
    for now in range(100):
        tuner.observe(now, 0.5, 8, concurrency=32, starving=True)
    assert tuner.concurrency == 64
