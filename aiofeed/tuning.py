"""How many samples are read at a time, found out as they are; with it the threads, for one feeder. Pure arithmetic."""

from __future__ import annotations

from aiofeed.thread_tuning import GilLimit, ThreadTuner

# Reads are doubled where they take this long and decoding waits for them, as long as that brings so much more.
SLOW_READ_S = 0.010
READS_BRING = 1.15
READS_MOST = 512
# Windows until reads are looked at again that more of them at a time did not help.
READS_LATER = 64


class ReadTuner:
    """How many samples are read at a time: twice as many, again and again, while reads are slow and that helps.

    Args:
        start: how many at first.
        given: whether the user said so many; then it stays.
    """

    def __init__(self, start: int, *, given: bool = False) -> None:
        self.concurrency = start
        self.most = max(start, READS_MOST)
        self.given = given
        self._before: tuple[int, float] | None = None
        self._pause = 0
        self._clear()

    def _clear(self) -> None:
        self._samples = self._chunks = self._starving = 0
        self._sum_s = 0.0

    def observe(self, seconds: float, samples: int, *, concurrency: int, starving: bool) -> None:
        """Take note of a chunk's reads.

        Args:
            seconds: until the last of them was there.
            samples: how many.
            concurrency: what it was when they began.
            starving: whether as many as may be were under way and decoding waited for them.
        """
        if self.given or concurrency != self.concurrency:
            return
        self._samples += samples
        self._chunks += 1
        self._starving += starving
        self._sum_s += seconds * samples
        if self._samples < self.concurrency // 2 or self._chunks < 3:
            return
        mean_s, often = self._sum_s / self._samples, 2 * self._starving > self._chunks
        self._clear()
        if self._pause:
            self._pause -= 1
        elif often and mean_s > SLOW_READ_S:
            self._decide(self.concurrency / mean_s)

    def _decide(self, rate: float) -> None:
        before, self._before = self._before, (self.concurrency, rate)
        if before is not None and before[0] < self.concurrency and rate < READS_BRING * before[1]:
            self.concurrency, self._before, self._pause = before[0], None, READS_LATER
        elif self.concurrency < self.most:
            self.concurrency = min(2 * self.concurrency, self.most)


# A sample costs an engine process some 20 us beside its decoding: of less than twice that under the GIL nothing is won.
WORTH_TELLING_S = 40e-6


class Tuner:
    """Both, for one feeder.

    Args:
        decode_threads, threads_given, read_concurrency, reads_given: as of ``ThreadTuner`` and ``ReadTuner``.
    """

    def __init__(self, *, decode_threads: int, threads_given: bool, read_concurrency: int, reads_given: bool) -> None:
        self.decoding = ThreadTuner(decode_threads, given=threads_given)
        self.reading = ReadTuner(read_concurrency, given=reads_given)
        self.told = False
        # Threads that may decode now, as whoever goes by this says: the samples may be such that it takes fewer.
        self.lanes = decode_threads

    def news(self) -> GilLimit | None:
        """The GIL's limit, once, where there is a way out."""
        if self.told or self.decoding.gil is None or self.decoding.gil.held_s < WORTH_TELLING_S:
            return None
        self.told = True
        return self.decoding.gil


def gil_message(limit: GilLimit, *, cores: int, turbo: bool) -> str:
    """What to tell of it, and the way out; ``turbo``: whether simplejpeg might help."""
    ways = f'engine="process:{cores}"'
    if turbo:
        ways = f"pip install 'aiofeed[turbo]' for small JPEGs, or {ways}"
    return (
        f"decoding is held up by the GIL: {limit.held_s * 1e6:.0f} of the {limit.cpu_s * 1e6:.0f} us that a sample "
        f"takes are under it, or lost in passing it on, so that one process stops at {limit.ceiling:.0f} samples/s; "
        f"{limit.threads} of {cores} threads decode. The way out: {ways}"
    )
