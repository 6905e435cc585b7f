"""How many threads decode, found out as they do. Pure arithmetic.

Each number is judged by what it gives while there is more to do than it can do: jobs that ran while a thread was idle
say nothing, so a slow consumer changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiofeed.engine.tuning.gil import GilLimit, held_share

# Threads that are at work, and not waiting, for so much of their jobs' time gain nothing from there being fewer.
AT_WORK = 0.85
# All threads together are at work for less than this only where they wait for storage, not for one another: of those
# that want the GIL, one has it.
SOMEBODY = 0.35
# Fewer threads that give so much of the best are preferred; more of them have to give so much more. What lies between
# keeps two neighbours from taking turns.
FEWER_KEEP = 0.97
MORE_BRING = 1.08
# Jobs to judge a number of threads by: at first few, so that 20 batches are enough; later, where it is known already,
# more, so that chance has less of a say.
FIRST_JOBS = 4
LATER_JOBS = 12
# Threads that waited for a core for more than this part of their time: while one waits, another may hold the GIL, so
# their waiting cannot be told apart, and what the clock on the wall says is judged, over more jobs.
CROWDED = 0.25
CROWDED_JOBS = 3
# Seconds of decoding between one look and the next, doubled each time that nothing has changed.
LOOK_S = 0.5
LOOK_MOST_S = 64.0
# Samples that take so much more or less than when their threads were chosen are another kind of work.
OTHER_WORK = 1.6
# A number that is being tried and that so many jobs in a row say nothing of is given up.
GIVE_UP_JOBS = 48
# Where a job copies more than this of each sample, as fast as this or faster, most of its time is copying, which a core
# does at 3 to 10 GB/s and without the GIL. Smaller samples stay in a core's cache.
LARGE_BYTES = 1 << 20
COPIED_BYTES_S = 2.5e9
# Passing the GIL on takes no more of a sample's processor time than this. Where more of it is taken as more threads are
# at work, they fight for memory.
HANDOVER_S = 100e-6
# Of jobs that are only watched for a change of work, one in so many is measured.
WATCHED = 8


@dataclass(frozen=True)
class JobTiming:
    """What a decode job took.

    Args:
        samples: how many it decoded.
        wall_s: from its beginning to its end.
        cpu_s: of its thread.
        queued_s: that its thread was ready to run and had no core, which is other programs' doing; 0 where unknown.
        threads: how many were at work from its beginning to its end; 0 where that changed, or some were idle.
        nbytes: that it has certainly copied: samples that were read within it, and the rows it wrote.
    """

    samples: int
    wall_s: float
    cpu_s: float
    queued_s: float
    threads: int
    nbytes: int = 0


@dataclass(eq=False)
class _Sample:
    """Jobs of one number of threads, taken together."""

    threads: int
    jobs: int = 0
    samples: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    nbytes: int = 0

    def add(self, job: JobTiming) -> None:
        self.jobs += 1
        self.samples += job.samples
        self.nbytes += job.nbytes
        # Clocks are read one after the other: a job has used no more processor than it was on.
        self.wall_s += max(job.wall_s, job.cpu_s)
        self.busy_s += max(job.wall_s - job.queued_s, job.cpu_s)
        self.cpu_s += job.cpu_s

    @property
    def crowded(self) -> bool:
        """Whether threads waited so long for cores that it is not enough to leave that out."""
        return self.wall_s - self.busy_s > CROWDED * self.wall_s

    @property
    def rate(self) -> float:
        """Samples per second of all threads together, had they had cores of their own."""
        return self.threads * self.samples / self.busy_s if self.busy_s else 0.0

    def times(self, other: _Sample) -> float:
        """How many times as fast as another number of threads."""
        if self.crowded or other.crowded:
            mine, others = self.threads * self.samples / self.wall_s, other.threads * other.samples / other.wall_s
            return mine / others if others else 1.0
        return self.rate / other.rate if other.rate else 1.0

    @property
    def at_work(self) -> float:
        """The part of its time that a thread is at work."""
        return self.cpu_s / self.busy_s if self.busy_s else 1.0

    @property
    def cpu_per_sample(self) -> float:
        return self.cpu_s / self.samples

    @property
    def copies(self) -> bool:
        """Whether samples are large, and copied for most of the time."""
        return self.nbytes > LARGE_BYTES * self.samples and self.nbytes > COPIED_BYTES_S * self.cpu_s


class ThreadTuner:
    """How many threads decode: as many as help.

    It begins with all of them. Where they wait for each other it tries half, and stays if that gives as much. From then
    on it looks again now and then, at longer and longer intervals, and at once where the work has changed.

    Args:
        most: threads there may be.
        given: whether the user said how many; then that is how many there are.
    """

    def __init__(self, most: int, *, given: bool = False) -> None:
        self.most = most
        self.given = given
        self.threads = most
        self.gil: GilLimit | None = None
        # Seconds of decoding that the consumer waited for, of all threads together; an estimate where few are measured.
        self.worked_s = 0.0
        # Set once the first batch is there: until then jobs import modules and fill caches.
        self.warm = False
        self._look_s = LOOK_S
        self._jobs = FIRST_JOBS
        self._watched = self._missed = 0
        self._since_s = 0.0
        self._chosen: _Sample | None = None
        self._search: _Search | None = None
        if not given and most > 1:
            self._begin()

    @property
    def listening(self) -> bool:
        """Whether the next job is to be measured; asked once per job."""
        if self.given or self.most == 1 or not self.warm:
            return False
        if self._search is not None:
            return True
        self._watched = (self._watched + 1) % WATCHED
        return self._watched == 0

    def observe(self, job: JobTiming) -> None:
        """Take note of a job that was measured; ``threads`` may be another number afterwards."""
        if self.given or self.most == 1 or not job.samples:
            return
        if job.threads != self.threads:
            self._missed += 1
            if self._search is not None and self._missed > GIVE_UP_JOBS:
                self._give_up()
            return
        self._missed = 0
        self.worked_s += job.cpu_s * (1 if self._search is not None else WATCHED)
        window = self._window
        window.add(job)
        if self._search is None:
            self._watch(window, job)
        elif window.jobs >= max(self._jobs, 2 * self.threads) * (CROWDED_JOBS if window.crowded else 1):
            self._step(window)

    def _begin(self) -> None:
        self._search = _Search(self.most)
        self._try(self.threads)

    def _give_up(self) -> None:
        """Back to what was chosen: the consumer has slowed down, and nothing can be found out."""
        if self._chosen is None:
            self.threads = self.most
            self._begin()
        else:
            self._search, self._since_s = None, 0.0
            self._try(self._chosen.threads)

    def _try(self, threads: int) -> None:
        self.threads = threads
        self._missed = 0
        self._window = _Sample(threads)

    def _step(self, window: _Sample) -> None:
        assert self._search is not None
        following = self._search.step(window)
        if following is not None:
            self._try(following)
            return
        found, above = self._search.chosen, self._search.above
        assert found is not None
        before, self._chosen, self._search = self._chosen, found, None
        same = before is not None and before.threads == found.threads
        self._look_s = min(self._look_s * 2, LOOK_MOST_S) if same else LOOK_S
        self._since_s = 0.0
        self._jobs = LATER_JOBS
        self.gil = gil_limit(found, above) if found.threads < self.most else None
        self._try(found.threads)

    def _watch(self, window: _Sample, job: JobTiming) -> None:
        """Look out for other work, and for the time to look again."""
        assert self._chosen is not None
        self._since_s += job.wall_s * WATCHED / self.threads
        if window.jobs < FIRST_JOBS:
            return
        changed = window.cpu_per_sample / max(self._chosen.cpu_per_sample, 1e-9)
        other = not 1 / OTHER_WORK < changed < OTHER_WORK
        if other:
            self._chosen, self._jobs = None, FIRST_JOBS
        # Threads that are all at work, and are all there are, leave nothing to find out.
        open_end = self.threads < self.most or window.at_work < AT_WORK
        if other or (self._since_s >= self._look_s and open_end):
            self._begin()
        else:
            self._try(self.threads)


class _Search:
    """From a number of threads down to fewer that do as well, or else up to more that do better.

    No generator, whose end would be Python code that the collector runs: a Ctrl-C in it would be lost.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._start = self._below = 0
        self._upwards = False
        self.chosen: _Sample | None = None
        self._best: _Sample | None = None
        self.above: _Sample | None = None

    def step(self, tried: _Sample) -> int | None:
        """The number to try after the one that was; ``None`` where ``chosen`` is found."""
        if self.chosen is None or self._best is None:
            self.chosen = self._best = tried
            self._start = tried.threads
        elif self._upwards:
            if tried.times(self.chosen) < MORE_BRING:
                self.above = tried
                return None
            self.chosen = tried
        elif tried.times(self._best) >= FEWER_KEEP:
            self._best = tried if tried.times(self._best) > 1 else self._best
            self.above, self.chosen = self.chosen, tried
        else:
            self._below = tried.threads
        threads = self.chosen.threads
        if not self._upwards:
            if (less := _fewer(self.chosen, self._below)) is not None:
                return less
            self._upwards = threads == self._start
        if self._upwards and threads < self._most:
            return min(threads + max(1, threads // 2), self._most)
        return None


def _fewer(chosen: _Sample, below: int) -> int | None:
    """Fewer threads than the chosen that may do, of which ``below`` are too few; ``None`` where there are none."""
    worth = chosen.threads * chosen.at_work
    if chosen.at_work >= AT_WORK or worth < SOMEBODY or chosen.threads - below < 2:
        return None
    if not below:
        # What they are worth together, straight away: on the way there they all wait for the same.
        return min(max(1, round(worth)), chosen.threads - 1)
    return (chosen.threads + below) // 2


def gil_limit(chosen: _Sample, more: _Sample | None) -> GilLimit | None:
    """What keeps ``more`` threads from giving more than the ``chosen`` ones, where it is the GIL.

    That is: the chosen are mostly at work, so that no storage is waited for, and more of them wait for one another. And
    it is not memory: more of them would give more if they did not wait, although each takes longer beside the others;
    and they do more than copy large samples, where who waits does so for memory that the system maps.
    """
    if more is None or not chosen.cpu_s or chosen.at_work < 0.6 or more.at_work >= 0.8 or chosen.copies:
        return None
    cpu_s = chosen.cpu_per_sample
    beside_s = max(cpu_s, more.cpu_per_sample - HANDOVER_S)
    if more.threads / beside_s < MORE_BRING * chosen.rate:
        return None
    return GilLimit(chosen.threads, cpu_s, cpu_s * held_share(more.threads, more.rate * beside_s))
