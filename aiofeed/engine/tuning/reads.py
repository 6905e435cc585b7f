"""How many samples are read at a time, found out as they are. Pure arithmetic.

By Little's law as many reads as are under way, divided by the time of one, are read per second. Storage that makes
them wait gives more where more are asked for; storage or memory that is full only makes each take longer.
"""

from __future__ import annotations

# Reads are doubled where they take this long and decoding waits for them, as long as that brings so much more; where
# they are large, halved again as long as that keeps so much.
SLOW_READ_S = 0.010
READS_BRING = 1.15
READS_KEEP = 0.95
READS_MOST = 512
READS_LEAST = 2
# Encoded bytes that are under way unless more of them are found to help: at 1 GB/s they are read in 67 ms, longer than
# most storage takes to answer. Read ahead of decoding, more of them fall out of every cache before they are looked at,
# and are given memory that nobody has touched yet.
FREE_BYTES = 64 << 20
# Samples that their mean size is taken over, and by how much it has to change to count.
WEIGHED = 64
OTHER_SIZE = 1.5
# Windows until something is tried again that did not help: soon, since at the beginning other things take time, too;
# then so many times later, each time.
READS_LATER = 4
LATER_TIMES = 16
# Windows until something is given up that nobody needed; doubled each time.
READS_UNUSED = 16
LATER_MOST = 1024
# Decoding waits for reads where it does so for this part of the time. Reads that were begun together come together, and
# only the first of them finds it idle: so time is what counts, and not how many did.
WAITING = 0.125
# Chunks that a window has at least; beyond that, as many samples as may be under way.
WINDOW_CHUNKS = 16


class ReadTuner:
    """How many samples are read at a time.

    It begins with what was said, or fewer where they are so large that those would be more than ``FREE_BYTES``. While
    reads are slow and decoding waits for them, twice as many are tried, again and again, as long as that helps. What
    is more than ``FREE_BYTES`` is halved where that takes nothing away.

    Args:
        start: how many at first.
        given: whether the user said so many; then it stays.
        most: how many there may be.
    """

    def __init__(self, start: int, *, given: bool = False, most: int = READS_MOST) -> None:
        self.concurrency = start
        self.most = max(start, most)
        self.given = given
        self._start = self._base = start
        self._sample_bytes = 0.0
        # What was tried before this, and what it gave, in samples per second.
        self._before: tuple[int, float] | None = None
        self._fewer_next = True
        self._pause = self._unused = 0
        self._later, self._patience = READS_LATER, READS_UNUSED
        self._last = float("-inf")
        # From the first on time counts.
        self._begin(1)

    def _begin(self, skip: int) -> None:
        """A new window; so many samples are read first that belong to no number."""
        self._skip = skip
        self._samples = self._chunks = 0
        self._sum_s = self._total_s = self._starving_s = 0.0

    def observe(
        self, now: float, seconds: float, samples: int, nbytes: int = 0, *, concurrency: int, starving: bool
    ) -> None:
        """Take note of a chunk's reads.

        Args:
            now: when the last of them was there, in seconds of a clock that never goes back.
            seconds: that it took.
            samples: how many.
            nbytes: of all of them; 0 where that is not known.
            concurrency: what it was when they began.
            starving: whether as many as may be were under way and decoding waited for them.
        """
        if self.given:
            return
        # A pause between epochs is nobody's.
        gap_s, self._last = min(now - self._last, seconds), now
        if nbytes:
            self._weigh(nbytes, samples)
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
        if self._samples < self.concurrency or self._chunks < WINDOW_CHUNKS:
            return
        mean_s, often = self._sum_s / self._samples, self._starving_s > WAITING * self._total_s
        # As long as all are under way that is how many there are by the time of one; and also where they are not.
        rate = self._samples / self._total_s if self._total_s else 0.0
        self._begin(0)
        if often:
            self._unused = 0
        if self._pause:
            self._pause -= 1
        elif often and rate:
            self._judge(rate, slow=mean_s > SLOW_READ_S)
        elif not often:
            self._idle()

    @property
    def _heavy(self) -> bool:
        return self.concurrency > self._base and self.concurrency * self._sample_bytes > FREE_BYTES

    def _weigh(self, nbytes: int, samples: int) -> None:
        """Begin with fewer where samples are large; with more again where they are not."""
        share = min(1.0, samples / WEIGHED) if self._sample_bytes else 1.0
        self._sample_bytes += (nbytes / samples - self._sample_bytes) * share
        base = min(self._start, max(READS_LEAST, int(FREE_BYTES / self._sample_bytes)))
        if base < self._start and 1 / OTHER_SIZE < base / self._base < OTHER_SIZE:
            return
        low = self.concurrency <= self._base
        self._base = base
        if (low or self.concurrency < base) and self.concurrency != base:
            self._before = None
            self._set(base)

    def _set(self, concurrency: int) -> None:
        self.concurrency = concurrency
        # The first that are begun still find as few, or as many, under way as there were before.
        self._begin(concurrency)

    def _judge(self, rate: float, *, slow: bool) -> None:
        """What to try next, now that so many samples per second are known to come of this number."""
        before, self._before = self._before, (self.concurrency, rate)
        rose = before is not None and before[0] < self.concurrency
        fell = before is not None and before[0] > self.concurrency
        if before is not None and rate < before[1] * (READS_BRING if rose else READS_KEEP):
            self._before, self._pause, self._fewer_next = None, self._later, rose
            self._later = min(LATER_TIMES * self._later, LATER_MOST)
            self._set(before[0])
        elif self._heavy and not rose and (fell or self._fewer_next or not slow):
            self._set(max(self.concurrency // 2, self._base))
        elif slow and not fell and self.concurrency < self.most:
            self._set(min(2 * self.concurrency, self.most))
        else:
            self._before, self._pause = None, LATER_TIMES * READS_LATER if rose or fell else 0

    def _idle(self) -> None:
        """Nobody waits for reads: after a while fewer do, where they are large."""
        self._before = None
        self._unused += 1
        if self._unused >= self._patience and self._heavy:
            self._unused, self._patience = 0, min(2 * self._patience, LATER_MOST)
            self._fewer_next = False
            self._set(max(self.concurrency // 2, self._base))
