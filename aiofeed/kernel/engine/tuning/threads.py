"""How many decode threads run: the fewest that decode as much as any. Pure arithmetic.

Each thread count is scored only while the pool is saturated, so a slow consumer does not affect the choice. If the GIL
is why more threads decode no more, there is a message that says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt

from aiofeed.kernel.runtime import machine

# A smaller count is chosen if it gives this part of the best rate. The gap between this and MORE_BRING keeps
# neighbouring counts from alternating.
FEWER_KEEP = 0.97
# A count that gives less than this part of the best rate is too small; one that gives more may seem slower by chance.
CLEARLY_SLOWER = 0.8
# Threads that are on the processor for this part of their time do not wait for each other: no other count is tried.
AT_WORK = 0.85
# Threads that together use less of one core than this wait for storage, not for each other.
ONE_AT_WORK = 0.35
# A smaller count is tried if it is at most a half: the threads in between cost little.
WORTH_A_TRY = 2
# So many jobs score a count: few, so that one is found within 20 batches. They take so long at least that a moment in
# which another thread has the GIL does not decide.
JOBS = 8
SCORE_S = 0.01
# A trial that gives less than this part of the best rate ends after a few jobs: it has shown enough, and is costly.
LEAVE = 0.7
# Seconds of decoding until other counts are tried again; doubled each time that nothing changed.
RETRY_S = 1.0
RETRY_MOST_S = 64.0
# Whatever else calls for a search, what the one before took away was this part of the time since then at most.
COST = 0.02
AHEAD_S = 20.0
# A change by this factor, seen so many times in a row, is another kind of work: the search starts again.
OTHER_WORK = 1.6
LASTS = 2
# A trial ends without a result after this many jobs in a row that ran while threads were idle.
GIVE_UP_JOBS = 48
# Outside a search one job in this many is timed.
TIMED = 8
# A larger number of threads is worth it if it brings this many times as much.
MORE_BRING = 1.08
# The chosen threads together use at least this part of a core, as a held GIL does, and each of more threads is on the
# processor for less than the second part of its time: they wait for each other, not for storage.
CHOSEN_CORES = 0.6
MORE_AT_WORK = 0.8
# Larger samples wait for memory rather than for the GIL: a core copies 3 to 10 GB/s without it.
LARGE_BYTES = 1 << 20
# Passing the GIL on costs a sample no more processor time than this. More threads that each take longer by more than
# this compete for memory.
HANDOVER_S = 100e-6


@dataclass(frozen=True)
class JobTiming:
    """The time that a decode job took.

    Args:
        samples: decoded samples.
        wall_s: seconds from its start to its end.
        cpu_s: seconds of its thread on the processor.
        threads: threads that were at work from its start to its end; 0 if that changed or some were idle.
        nbytes: bytes that it read and wrote.
        pool_cpu_s: seconds of all threads on the processor from its start to its end; 0 if unknown.
    """

    samples: int
    wall_s: float
    cpu_s: float
    threads: int
    nbytes: int = 0
    pool_cpu_s: float = 0.0


@dataclass(eq=False)
class Score:
    """The jobs that ran with one thread count."""

    threads: int
    jobs: int = 0
    samples: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    nbytes: int = 0
    pool_cpu_s: float = 0.0

    def add(self, job: JobTiming) -> None:
        """Count one job."""
        self.jobs += 1
        self.samples += job.samples
        self.nbytes += job.nbytes
        # The clocks are read one after the other; a job cannot have used more processor time than passed.
        self.wall_s += max(job.wall_s, job.cpu_s)
        self.cpu_s += job.cpu_s
        self.pool_cpu_s += job.pool_cpu_s

    @property
    def rate(self) -> float:
        """Samples per second of all threads together."""
        # The jobs that end first had to wait least: the work of all threads shows how long the others wait.
        jobs = min(self.threads, self.pool_cpu_s / self.cpu_s) if self.pool_cpu_s and self.cpu_s else self.threads
        return jobs * self.samples / self.wall_s if self.wall_s else 0.0

    @property
    def cores(self) -> float:
        """The number of cores that all threads use together."""
        return self.rate * self.cpu_s / self.samples if self.wall_s else self.threads

    @property
    def at_work(self) -> float:
        """The part of its time that a thread is on the processor."""
        return self.cores / self.threads

    @property
    def large(self) -> bool:
        """Whether the samples are so large that threads wait for memory, while they count as on the processor."""
        return self.nbytes > LARGE_BYTES * self.samples

    @property
    def cpu_per_sample(self) -> float:
        """Seconds of processor time per sample."""
        return self.cpu_s / self.samples

    def differs(self, before: Score, most: int) -> bool:
        """Whether it is of other work than the score ``before`` of as many threads, so that other counts may suit."""
        less, more = sorted((self.cpu_per_sample, before.cpu_per_sample))
        # A change that is worth little of a core is what jobs cost, not what samples cost.
        other = more > OTHER_WORK * less and (more - less) * max(self.rate, before.rate) > ONE_AT_WORK
        # More threads help those that begin to wait.
        return other or (self.threads < most and self.rate * OTHER_WORK < before.rate)


@dataclass(frozen=True)
class GilLimit:
    """The GIL keeps more threads from decoding more.

    Args:
        threads: decode threads in use.
        held_s: seconds per sample that hold the GIL, or wait for it.
        cores: cores that they use together.
    """

    threads: int
    held_s: float
    cores: float = 1.0

    @property
    def ceiling(self) -> float:
        """Samples per second that one process can decode."""
        return 1.0 / self.held_s


def gil_limit(chosen: Score, more: Score | None) -> GilLimit | None:
    """Return the limit of the GIL, if for it ``more`` threads decode no more than the ``chosen`` ones."""
    if more is None or not chosen.cpu_s or chosen.large:
        return None
    if chosen.cores < CHOSEN_CORES or more.at_work >= MORE_AT_WORK:
        return None
    # If the threads would gain nothing even without waiting, memory is the limit.
    unhindered_s = max(chosen.cpu_per_sample, more.cpu_per_sample - HANDOVER_S)
    if more.threads / unhindered_s < MORE_BRING * chosen.rate:
        return None
    return GilLimit(chosen.threads, min(chosen.cpu_per_sample, 1.0 / chosen.rate), max(chosen.cores, 1.0))


def gil_message(limit: GilLimit, *, cores: int, turbo: bool) -> str:
    """Return the log line; ``turbo`` says whether simplejpeg is not installed and may help.

    It proposes as many processes as use all cores, if each uses as many as this one.
    """
    ways = f'engine="process:{ceil(cores / limit.cores)}"'
    if turbo:
        ways = f"pip install 'aiofeed[turbo]' for small JPEGs, or {ways}"
    return (
        f"Decoding is GIL-bound: {limit.held_s * 1e6:.0f} us per sample hold or wait for the GIL, which limits one "
        f"process to about {limit.ceiling:,.0f} samples/s ({limit.threads} of {cores} decode threads in use). "
        f"Try {ways}."
    )


class ThreadTuner:
    """Chooses the number of decode threads.

    It starts with all of them. If they wait for each other, it tries far fewer, as long as that costs nothing, and then
    numbers in between; if they do not, it tries more, as long as that brings more. It repeats the search at growing
    intervals, and when the work per sample changes for good; what searches take away stays a small part of the time.

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
        # The first job of each thread fills caches, or begins beside jobs of another number of threads.
        self._first_jobs = most
        self._untimed = self._idle_jobs = 0
        # Seconds since the last search, and until the next one at least.
        self._since_s, self._paid_s, self._retry_s = 0.0, 0.0, RETRY_S
        self._chosen: Score | None = None
        # The first score after a search, with which later ones are compared, and how many in a row differ from it.
        self._usual: Score | None = None
        self._others = self._check = 0
        self._search: _Search | None = None
        if not given and most > 1:
            self._search = _Search(most)
        self._score = Score(most)

    @property
    def _closely(self) -> bool:
        """Whether all jobs are timed."""
        return self._search is not None or self._usual is None or 0 < self._others < LASTS

    @property
    def listening(self) -> bool:
        """Whether the next job should be timed; call it once per job."""
        if self.given or self.most == 1:
            return False
        self._untimed = 0 if self._closely else (self._untimed + 1) % TIMED
        return self._untimed == 0

    @property
    def saturated(self) -> bool:
        """Whether a search has found that more threads decode no more."""
        return self._chosen is not None and self._chosen.threads < self.most

    def observe(self, job: JobTiming) -> None:
        """Count a timed job; ``threads`` may change."""
        if self.given or self.most == 1 or not job.samples:
            return
        beside_all = job.threads == self.threads
        self._first_jobs -= beside_all or self.threads == self.most
        if not self.warm:
            return
        if not beside_all:
            self._idle_jobs += not job.threads  # others ended before the number changed
            on_trial = self._search is not None and (self._chosen is not None or self.threads < self.most)
            if on_trial and self._idle_jobs > GIVE_UP_JOBS:
                self._give_up()
            return
        self._idle_jobs = 0
        seconds = 1 if self._closely else TIMED
        self.worked_s += job.cpu_s * seconds
        self._since_s += job.wall_s * seconds / self.threads
        if self._first_jobs >= 0 and self._closely:
            return
        score = self._score
        score.add(job)
        if score.wall_s < SCORE_S * self.threads:
            return
        enough = score.jobs >= max(JOBS, self.threads // 4) // (1 if self._closely else 2)  # a first look
        if self._search is None and enough:
            self._watch(score)
        elif self._search is not None and (enough or self._search.hopeless(score)):
            self._advance(self._search, score)

    def _run(self, threads: int) -> None:
        # The jobs that run now end beside another number of threads.
        self._idle_jobs = -self.threads
        self.threads = self._first_jobs = threads
        self._score = Score(threads)

    def _advance(self, search: _Search, tried: Score) -> None:
        """Try the next count of a search, or choose one if the search has ended."""
        if (next_count := search.step(tried)) is not None:
            self._run(next_count)
            return
        assert search.best is not None
        unchanged = self._chosen is not None and self._chosen.threads == search.best.threads
        self._retry_s = min(self._retry_s * 2, RETRY_MOST_S) if unchanged else RETRY_S
        self._chosen = search.best
        # That fewer threads seemed to do may have been chance, or an engine that was just beginning.
        self._check = search.first.threads if search.first.rate > LEAVE * search.best.rate else 0
        fewer = search.best.threads < self.most
        self.gil = gil_limit(search.best, search.above) if fewer and machine.has_gil() else None
        self._settle(search.best.threads, search.lost_s)

    def _give_up(self) -> None:
        """End a search without a result: the consumer no longer keeps the pool busy."""
        if self._chosen is None:
            self._search = _Search(self.most)
            self._run(self.most)
        else:
            self._settle(self._chosen.threads, 0.0)

    def _settle(self, threads: int, lost_s: float) -> None:
        """End a search that took ``lost_s`` away; the jobs from now on show what is usual."""
        self._search = self._usual = None
        self._paid_s = max(0.0, self._paid_s - self._since_s) + lost_s / COST
        self._since_s, self._others = 0.0, 0
        self._run(threads)

    def _watch(self, score: Score) -> None:
        """Start a search if the work per sample has changed, or if it is time for another one."""
        self._score = Score(self.threads)
        assert self._chosen is not None
        if self._usual is None:
            # The work may have changed at the end of the search.
            self._usual, self._others = score, LASTS if score.differs(self._chosen, self.most) else 0
        elif self._others < LASTS:
            self._others = self._others + 1 if score.differs(self._usual, self.most) else 0
        may_gain = self.threads < self.most or score.at_work < AT_WORK or score.large
        wanted = self._others >= LASTS or (self._since_s >= self._retry_s and may_gain)
        # Too few threads cost more than a search, so that looking for more waits less.
        if wanted and self._since_s >= self._paid_s - AHEAD_S * (self.threads < self.most):
            self._search = _Search(self.most, self._check)
            self._advance(self._search, score)


class _Search:
    """One search for the smallest count that decodes as much as any.

    Each thread more adds at most as much as those before it, so two counts show where the best one may be. It is no
    generator: closing one is Python code that the garbage collector would run, where Ctrl-C would be lost.

    Args:
        most: the largest count.
        check: a larger count than that in use, to be tried first.

    Attributes:
        first: the count in use.
        best: the count chosen so far.
        above: the next larger count that was tried, which brought no more.
    """

    def __init__(self, most: int, check: int = 0) -> None:
        self._most = most
        self._check = check
        self._peak = 0.0
        self._tried: list[Score] = []
        self.first = Score(most)
        self.best: Score | None = None
        self.above: Score | None = None

    @property
    def lost_s(self) -> float:
        """Seconds of decoding that the trials took away."""
        # A trial lasts as long as its scored jobs, the first of each thread, and half of one that ran before.
        usual, tried = self.first.rate, self._tried
        return sum(
            each.wall_s * (1 / each.threads + 1.5 / each.jobs) * max(0.0, 1 - each.rate / usual) for each in tried
        )

    def hopeless(self, trial: Score) -> bool:
        """Whether a trial is clearly slower than what was tried before."""
        return trial.jobs >= max(3, trial.threads // 2) and trial.rate < LEAVE * self._peak

    def step(self, tried: Score) -> int | None:
        """Return the count to try next; ``None`` if ``best`` is found."""
        self.first = self.first if self._tried else tried
        self._peak = max(self._peak, tried.rate)
        counts = self._tried = sorted([*self._tried, tried], key=lambda score: score.threads)
        at = next(at for at, score in enumerate(counts) if score.rate >= self._bar(score))
        self.best, threads = counts[at], counts[at].threads
        above = self.above = counts[at + 1] if at + 1 < len(counts) else None
        if tried is self.first and self._check > tried.threads:
            return self._check
        if (fewer := self._fewer()) is not None:
            return fewer
        if at and WORTH_A_TRY**2 * self._needed(counts[at - 1]) <= threads:
            return isqrt(counts[at - 1].threads * threads)
        if above is None and threads < self._most:
            return min(2 * threads, self._most)
        return None

    def _needed(self, below: Score) -> int:
        """Return the fewest threads that may do as much as the best: none adds more than each of those ``below``."""
        return ceil(FEWER_KEEP * self._peak / below.rate * below.threads)

    def _bar(self, score: Score) -> float:
        """Return the rate from which a count is good enough: more threads than at first must bring more."""
        return self._peak / MORE_BRING if score is self.first else FEWER_KEEP * self._peak

    def _fewer(self) -> int | None:
        """Fewer threads than those that decode as much, which may do so too; ``None`` if none are worth a try."""
        # Chance may make a count appear a little slower.
        slower = [score for score in self._tried if score.rate < CLEARLY_SLOWER * self._peak]
        score = next(score for score in self._tried if score not in slower)
        at_work = max(score.at_work, score.cpu_s / score.wall_s)
        if not score.large and (score.cores <= ONE_AT_WORK or at_work >= AT_WORK):
            return None
        below = [self._needed(each) for each in slower if each.threads < score.threads]
        least = max(1, 1 if score.large else ceil(score.cores - 0.2), *below)
        return isqrt(least * score.threads) if WORTH_A_TRY * least <= score.threads else None
