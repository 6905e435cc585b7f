"""Which samples failed: an epoch's tally, which says when it is too many, and the feeder's list of them."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from aiofeed.core.errors import SampleError, TooManyFailures
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.statistics import EpochStats
from aiofeed.core.types import public

log = logging.getLogger("aiofeed.core")

# A data set that is broken altogether fills neither the memory nor the log.
KEPT_MOST = 10_000
LOGGED_MOST = 100

_DONE = {"raise": "", "skip": "skipped: ", "replace": "replaced: "}


@public
@dataclass(frozen=True)
class Failure:
    """A sample that failed.

    Args:
        key: its name, a path or a URL.
        index: its position in the source.
        stage: "read" or "decode".
        error: what was wrong, with its cause; without tracebacks, which would keep the sample's memory alive.
        epoch: the epoch in which it failed.
    """

    key: str
    index: int
    stage: str
    error: SampleError
    epoch: int


class FailureCounter:
    """The samples of one epoch that failed, each counted once however often it was met; kept on the engine's loop.

    Args:
        policy: how many may.
        length: of the source.
    """

    def __init__(self, policy: FailurePolicy, length: int) -> None:
        self._policy = policy
        self._length = length
        self._counted: set[int] = set()
        # What is known to fail, by index, before its batch's turn: no candidate to replace another.
        self.known: dict[int, SampleError] = {}

    def know(self, error: SampleError) -> SampleError:
        """Remember that a sample fails."""
        return self.known.setdefault(error.index, error)

    @property
    def allowed(self) -> int:
        """How many may fail."""
        return self._policy.allowed(self._length)

    def count(self, failures: Iterable[SampleError]) -> None:
        """Count the failures of a batch in its turn."""
        self._counted.update(failure.index for failure in failures)

    def too_many(self, last: SampleError) -> TooManyFailures | None:
        """The error to raise where more failed than may; ``last`` is quoted."""
        if self._policy.action == "raise" or len(self._counted) <= self.allowed:
            return None
        most = self._policy.max_failures
        part = "" if isinstance(most, int) else f", {self.allowed} of {self._length}"
        error = TooManyFailures(
            f"{len(self._counted)} samples failed in this epoch, more than max_failures={most} allows{part}; the last: "
            f"{last}. feeder.failures lists them; if so many are expected, "
            f"pass on_error=FailurePolicy({self._policy.action!r}, max_failures=...)"
        )
        error.__cause__ = last
        return error


class FailureLog:
    """The feeder's list of failures, as their batches are handed out, and one log line for each key.

    Args:
        policy: what becomes of them.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self._failures: list[Failure] = []
        self._keys: set[str] = set()
        self._logged = 0
        self._epoch: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._first: SampleError | None = None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """In the order in which their batches were handed out, at most the first 10,000."""
        return tuple(self._failures)

    def begin(self) -> None:
        """Another epoch begins."""
        self._epoch.clear()
        self._seen.clear()
        self._first = None

    def add(self, failures: Iterable[SampleError], epoch: int) -> int:
        """Take note of failures, each sample once per epoch; how many were new."""
        before = len(self._seen)
        for error in failures:
            if error.index in self._seen:
                continue
            self._seen.add(error.index)
            self._epoch[error.stage] += 1
            self._first = self._first or light(error)
            if len(self._failures) < KEPT_MOST:
                self._failures.append(Failure(error.key, error.index, error.stage, light(error), epoch))
            if self._policy.action != "raise":  # what is raised is told by its traceback
                self._tell(error)
        return len(self._seen) - before

    def _tell(self, error: SampleError) -> None:
        if error.key in self._keys or self._logged >= LOGGED_MOST:
            return
        self._keys.add(error.key)
        self._logged += 1
        more = "; further ones are only counted and listed in feeder.failures" if self._logged == LOGGED_MOST else ""
        log.warning("%s%s%s", _DONE[self._policy.action], error, more)

    def summarise(self, epoch: int, counters: EpochStats) -> None:
        """Log what failed in a pass through ``epoch`` that has ended, where anything did."""
        if not self._seen:
            return
        stages = ", ".join(f"{count} to {stage}" for stage, count in sorted(self._epoch.items()))
        log.warning(
            "epoch %d: %d samples failed (%s) and were %s, %d handed out; the first: %s; feeder.failures lists them",
            epoch,
            len(self._seen),
            stages,
            "replaced" if self._policy.action == "replace" else "skipped",
            counters.samples,
            self._first,
        )


def light(error: SampleError) -> SampleError:
    """The same error without tracebacks, and its cause where that is small: some carry the whole document along."""
    light = type(error)(str(error), key=error.key, index=error.index, stage=error.stage)
    cause = error.__cause__
    if cause is not None and set(vars(cause)) <= {"__notes__"} and all(map(_is_small, cause.args)):
        try:
            light.__cause__ = copy.copy(cause)
            light.__cause__.__traceback__ = None
        except BaseException:  # noqa: BLE001 - the user's exception may resist; its text is in the message
            light.__cause__ = None
    return light


def _is_small(value: object) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, str | bytes) and len(value) <= 1000)
