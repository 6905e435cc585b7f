"""How many decode threads run: hill climbing on samples per second. Pure arithmetic.

Each thread count is scored only while the pool is saturated, so a slow consumer does not affect the choice.
"""

from __future__ import annotations

from aiofeed.engine.tuning.gil import MORE_BRING, GilLimit, gil_limit
from aiofeed.engine.tuning.score import JobTiming, Score
from aiofeed.runtime import machine

# A smaller count is chosen if it gives this part of the best rate. The gap between this and MORE_BRING keeps
# neighbouring counts from alternating.
FEWER_KEEP = 0.97
# Below this part of the best rate few jobs decide.
CLEARLY_SLOWER = 0.8
# Threads that are on the processor for this part of their time do not wait for each other: no other count is tried.
AT_WORK = 0.85
# Threads that together use less of one core than this wait for storage, not for each other.
ONE_AT_WORK = 0.35
# Jobs that score a count: few at first, so that a count is found within 20 batches, more once one is known.
FIRST_JOBS = 4
LATER_JOBS = 12
# Seconds of decoding until other counts are tried again; doubled each time that nothing changed.
RETRY_S = 4.0
RETRY_MOST_S = 64.0
# A change of processor time per sample by this factor is another kind of work: the search starts again.
OTHER_WORK = 1.6
# A trial ends without a result after this many jobs in a row that ran while threads were idle.
GIVE_UP_JOBS = 48
# Outside a search one job in this many is timed.
TIMED = 8


class ThreadTuner:
    """Chooses the number of decode threads.

    It starts with all of them. If they wait for each other, it tries fewer, as long as that costs nothing; otherwise it
    tries more, as long as that brings more. It repeats the search at growing intervals, and at
    once when the work per sample changes.

    Args:
        most: the largest number of threads.
        given: whether the user gave the number; then it stays.
    """

    def __init__(self, most: int, *, given: bool = False) -> None:
        self.most = most
        self.threads: int = most
        self.given = given
        self.gil: GilLimit | None = None
        # Seconds of processor time that the consumer waited for, over all threads; estimated outside a search.
        self.worked_s: float = 0.0
        # True once the first batch is finished. Jobs before it import modules and fill caches.
        self.warm = False
        self._jobs = FIRST_JOBS
        self._untimed = self._idle_jobs = 0
        self._retry_s, self._since_s = RETRY_S, 0.0
        self._chosen: Score | None = None
        self._search: _Search | None = None
        if not given and most > 1:
            self._search = _Search(most)
        self._score = Score(most)

    @property
    def listening(self) -> bool:
        """Whether the next job should be timed; call it once per job."""
        if self.given or self.most == 1 or not self.warm:
            return False
        if self._search is not None:
            return True
        self._untimed = (self._untimed + 1) % TIMED
        return self._untimed == 0

    @property
    def saturated(self) -> bool:
        """Whether a search has found that more threads decode no more."""
        return self._chosen is not None and self._chosen.threads < self.most

    def observe(self, job: JobTiming) -> None:
        """Count a timed job; ``threads`` may change."""
        if self.given or self.most == 1 or not job.samples:
            return
        if job.threads != self.threads:
            self._idle_jobs += 1
            if self._search is not None and self._idle_jobs > GIVE_UP_JOBS:
                self._give_up()
            return
        self._idle_jobs = 0
        self.worked_s += job.cpu_s * (1 if self._search is not None else TIMED)
        self._score.add(job)
        if self._search is None:
            self._watch(job)
        elif self._score.jobs >= self._jobs_needed(self._search):
            self._advance(self._search)

    def _jobs_needed(self, search: _Search) -> int:
        return FIRST_JOBS if search.is_clear(self._score) else max(self._jobs, 2 * self.threads)

    def _run(self, threads: int) -> None:
        self.threads = threads
        self._idle_jobs = 0
        self._score = Score(threads)

    def _advance(self, search: _Search) -> None:
        """Try the next count of a search, or choose one if the search has ended."""
        if (next_count := search.step(self._score)) is not None:
            self._run(next_count)
            return
        assert search.best is not None
        unchanged = self._chosen is not None and self._chosen.threads == search.best.threads
        self._retry_s = min(self._retry_s * 2, RETRY_MOST_S) if unchanged else RETRY_S
        self._chosen, self._search, self._since_s, self._jobs = search.best, None, 0.0, LATER_JOBS
        fewer = search.best.threads < self.most
        self.gil = gil_limit(search.best, search.above) if fewer and machine.has_gil() else None
        self._run(search.best.threads)

    def _give_up(self) -> None:
        """End a search without a result: the consumer no longer keeps the pool busy."""
        if self._chosen is None:
            self._search = _Search(self.most)
            self._run(self.most)
        else:
            self._search, self._since_s = None, 0.0
            self._run(self._chosen.threads)

    def _watch(self, job: JobTiming) -> None:
        """Start a search if the work per sample has changed, or if it is time for another one."""
        assert self._chosen is not None
        score = self._score
        self._since_s += job.wall_s * TIMED / self.threads
        if score.jobs < FIRST_JOBS:
            return
        change = score.cpu_per_sample / max(self._chosen.cpu_per_sample, 1e-9)
        changed = not 1 / OTHER_WORK < change < OTHER_WORK
        if changed:
            self._chosen, self._jobs = None, FIRST_JOBS
        may_gain = self.threads < self.most or score.at_work < AT_WORK
        if changed or (self._since_s >= self._retry_s and may_gain):
            self._search = _Search(self.most)
        self._run(self.threads)


class _Search:
    """One search: down while that costs nothing, else up while that brings more.

    It is no generator: closing one is Python code that the garbage collector would run, where Ctrl-C would be lost.

    Attributes:
        best: the count chosen so far.
        above: the next larger count that was tried, which brought no more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._peak = 0.0
        self._upwards = False
        self.best: Score | None = None
        self.above: Score | None = None

    def is_clear(self, tried: Score) -> bool:
        """Whether the count is so much slower than the best that a few jobs are enough to reject it."""
        return tried.rate < CLEARLY_SLOWER * self._peak

    def step(self, tried: Score) -> int | None:
        """The count to try next; ``None`` if ``best`` is found."""
        if self.best is None:
            self.best = tried
        elif self._upwards:
            if tried.rate < MORE_BRING * self.best.rate:
                self.above = tried
                return None
            self.best = tried
        elif tried.rate >= FEWER_KEEP * self._peak:
            self.best, self.above = tried, self.best
        elif self.above is not None:
            return None
        else:
            self._upwards = True
        self._peak = max(self._peak, tried.rate)
        threads = self.best.threads
        if not self._upwards and threads > 1 and ONE_AT_WORK / threads < self.best.at_work < AT_WORK:
            # As many as the processors that all of them use together.
            return max(1, min(threads - 1, round(threads * self.best.at_work)))
        if self.above is None and threads < self._most:
            self._upwards = True
            return min(threads + max(1, threads // 2), self._most)
        return None
