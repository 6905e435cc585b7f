"""How many samples are read at a time: doubled while that pays. Pure arithmetic.

By Little's law the reads in flight, divided by the time of one read, are the reads per second. Storage with latency
gives more if more reads are in flight; storage whose bandwidth is used up only takes longer for each.
"""

from __future__ import annotations

# More reads are tried while a read takes this long and decoding waits for reads.
SLOW_READ_S = 0.010
# Doubling must bring this many times as many samples per second.
READS_BRING = 1.15
READS_MOST = 512
READS_LEAST = 2
# Encoded bytes in flight at first: 67 ms at 1 GB/s, longer than most storage takes to answer. More bytes fall out of
# the caches before they are decoded.
FREE_BYTES = 64 << 20
# Decoding waits for reads if it does so for this part of the time.
WAITING = 0.125
# Chunks that score a number of reads; at least as many samples as are in flight.
SCORE_CHUNKS = 16
# Scores until a doubling that did not pay is tried again; multiplied each time.
RETRY_SCORES = 4
RETRY_TIMES = 16
RETRY_MOST = 1024


class ReadTuner:
    """Chooses how many samples are read at a time.

    It starts with ``start``, or fewer if the samples are so large that these would be more than ``FREE_BYTES``. While
    reads are slow and decoding waits for them, it doubles the number as long as that brings more.

    Args:
        start: the number at first.
        given: whether the user gave the number; then it stays.
        most: the largest number.
    """

    def __init__(self, start: int, *, given: bool = False, most: int = READS_MOST) -> None:
        self.concurrency: int = start
        self.given = given
        self._most = max(start, most)
        self._start = self._base = start
        self._sample_bytes = 0.0
        # The number before the last doubling, and its samples per second.
        self._before: tuple[int, float] | None = None
        self._pause, self._retry = 0, RETRY_SCORES
        self._last = float("-inf")
        self._score_next(skip=1)

    @property
    def saturated(self) -> bool:
        """Whether the last doubling brought nothing and was undone."""
        return self._pause > 0

    def _score_next(self, skip: int) -> None:
        """Start a score; it leaves out ``skip`` samples, whose reads began before the number changed."""
        self._skip = skip
        self._samples = self._chunks = 0
        self._sum_s = self._total_s = self._starving_s = 0.0

    def observe(
        self, now: float, seconds: float, samples: int, nbytes: int = 0, *, concurrency: int, starving: bool
    ) -> None:
        """Count the reads of one chunk.

        Args:
            now: when the last read ended, in seconds of a monotonic clock.
            seconds: duration of the reads.
            samples: samples read.
            nbytes: encoded bytes; 0 if unknown.
            concurrency: the number in force when the reads began.
            starving: whether as many reads as allowed were in flight and decoding waited for them.
        """
        if self.given:
            return
        gap_s, self._last = min(now - self._last, seconds), now  # a pause between epochs does not count
        if nbytes:
            self._limit_bytes(nbytes / samples)
        if concurrency != self.concurrency:
            return
        if self._skip > 0:
            self._skip -= samples
            return
        self._samples += samples
        self._chunks += 1
        self._total_s += gap_s
        self._starving_s += gap_s if starving else 0.0
        self._sum_s += seconds * samples
        if self._samples >= self.concurrency and self._chunks >= SCORE_CHUNKS:
            self._judge()

    def _limit_bytes(self, sample_bytes: float) -> None:
        """Keep ``FREE_BYTES`` in flight at first, by the mean size of samples."""
        known = self._sample_bytes
        self._sample_bytes += (sample_bytes - known) * (0.1 if known else 1.0)
        base = min(self._start, max(READS_LEAST, int(FREE_BYTES / self._sample_bytes)))
        # Means waver: only a size of another order changes the number.
        if not 2 / 3 < base / self._base < 3 / 2 or base == self._start != self._base:
            self._base, self._before = base, None
            self._set(base)

    def _judge(self) -> None:
        """Double the number, undo the last doubling, or leave it."""
        slow = self._sum_s / self._samples > SLOW_READ_S
        waits = self._starving_s > WAITING * self._total_s
        rate = self._samples / self._total_s if self._total_s else 0.0
        self._score_next(skip=0)
        if self._before is not None and rate < READS_BRING * self._before[1]:
            fewer, self._before = self._before[0], None
            self._pause, self._retry = self._retry, min(RETRY_TIMES * self._retry, RETRY_MOST)
            self._set(fewer)
        elif self._pause:
            self._pause -= 1
        elif waits and slow and rate and self.concurrency < self._most:
            self._before = self.concurrency, rate
            self._set(min(2 * self.concurrency, self._most))
        else:
            self._before = None

    def _set(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self._score_next(skip=concurrency)
