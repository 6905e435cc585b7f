"""Counts and lists the samples that failed."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from aiofeed.kernel.core.errors import OF_CODE, SampleError, TooManyFailures
from aiofeed.kernel.core.failure_policy import FailurePolicy
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import public_in

log: logging.Logger = logging.getLogger("aiofeed.core")

# Bounds for a dataset in which everything fails.
KEPT_MOST = 10_000
LOGGED_MOST = 100


@public_in("aiofeed.reports")
@dataclass(frozen=True)
class Failure:
    """A sample that failed.

    Args:
        key: The name of the sample, such as its path or URL.
        index: Its index in the source.
        stage: "read" or "decode".
        error: The error with its cause, without tracebacks, which would keep the memory of the sample alive.
        epoch: The epoch in which it failed.
    """

    key: str
    index: int
    stage: str
    error: SampleError
    epoch: int


@dataclass(eq=False)
class FailureCounter:
    """Counts the failed samples of one epoch, each once. Used on the engine's loop only.

    Attributes:
        known: The first error of each failed sample, by index; these samples replace no other sample.
    """

    policy: FailurePolicy
    length: int
    known: dict[int, SampleError] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)

    def remember(self, error: SampleError) -> SampleError:
        """Record that a sample fails; return its first error."""
        return self.known.setdefault(error.index, error)

    @property
    def allowed(self) -> int:
        """The maximum number of failures."""
        return self.policy.allowed(self.length)

    def count(self, failures: Iterable[SampleError]) -> None:
        """Count the failures of a batch, when all batches before it have been counted."""
        self._counted.update(failure.index for failure in failures)

    def too_many(self, last: SampleError) -> TooManyFailures | None:
        """Return the error to raise if too many samples failed, else ``None``; ``last`` is quoted."""
        if self.policy.action == "raise" or len(self._counted) <= self.allowed:
            return None
        limit = self.policy.max_failures
        number = "" if isinstance(limit, int) else f": {self.allowed} of {self.length}"
        failed, action = len(self._counted), self.policy.action
        way = f"on_error=FailurePolicy({action!r}, max_failures=...) with a number of samples or a fraction"
        error = TooManyFailures(
            f"{failed} sample{'s' * (failed != 1)} failed in this epoch, more than max_failures={limit} allows{number};"
            f" the last: {last}. feeder.failures lists them"
            f"{'' if isinstance(last.__cause__, OF_CODE) else f'; to allow more, pass {way}'}"
        )
        error.__cause__ = last
        return error


class FailureLog:
    """The failures of the batches that were returned; logs each key once."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self._treatment = "replaced" if policy.action == "replace" else "skipped"
        self._failures: list[Failure] = []
        self._keys: set[str] = set()
        self._logged = 0
        self._epoch: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._first: SampleError | None = None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The first 10,000 failures, in the order of their batches."""
        return tuple(self._failures)

    def begin(self) -> None:
        """Start an epoch."""
        self._epoch.clear()
        self._seen.clear()
        self._first = None

    def add(self, failures: Iterable[SampleError], epoch: int) -> int:
        """Add failures, each sample once per epoch; return how many were added."""
        before = len(self._seen)
        for error in failures:
            if error.index in self._seen:
                continue
            self._seen.add(error.index)
            self._epoch[error.stage] += 1
            self._first = self._first or _without_tracebacks(error)
            if len(self._failures) < KEPT_MOST:
                self._failures.append(Failure(error.key, error.index, error.stage, _without_tracebacks(error), epoch))
            if self._policy.action != "raise":  # its traceback is printed
                self._log(error)
        return len(self._seen) - before

    def _log(self, error: SampleError) -> None:
        if error.key in self._keys or self._logged >= LOGGED_MOST:
            return
        self._keys.add(error.key)
        self._logged += 1
        more = "; further failures are only listed in feeder.failures" if self._logged == LOGGED_MOST else ""
        log.warning("%s: %s%s", self._treatment, error, more)

    def summarise(self, epoch: int, counters: EpochStats) -> None:
        """Log the number of failures of an epoch that has ended, if any."""
        if not self._seen:
            return
        stages = ", ".join(f"{count} to {stage}" for stage, count in sorted(self._epoch.items()))
        failed = len(self._seen)
        log.warning(
            "epoch %d: %s %s, %d returned; the first: %s; feeder.failures lists them",
            epoch,
            f"1 sample failed ({stages}) and was" if failed == 1 else f"{failed} samples failed ({stages}) and were",
            self._treatment,
            counters.samples,
            self._first,
        )


def _without_tracebacks(error: SampleError) -> SampleError:
    """A copy of the error without tracebacks, and without its cause if that is large, such as a whole document."""
    copied = type(error)(str(error), key=error.key, index=error.index, stage=error.stage)
    cause = error.__cause__
    # An exception of user code may refuse to be copied; its text is in the message.
    with contextlib.suppress(Exception, SystemExit):
        if cause is not None and set(vars(cause)) <= {"__notes__"} and all(map(_is_small, cause.args)):
            kept = copy.copy(cause)
            kept.__traceback__ = None
            copied.__cause__ = kept
    return copied


def _is_small(value: object) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, str | bytes) and len(value) <= 1000)
