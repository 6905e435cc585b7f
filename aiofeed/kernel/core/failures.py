"""Samples that fail: the policy for them, and what counts and lists them. Decisions only, no I/O."""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from aiofeed.kernel.core.errors import OF_CODE, SampleError, TooManyFailures
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import public, public_in
from aiofeed.kernel.core.validation import check_int_from, explain_arguments

log: logging.Logger = logging.getLogger("aiofeed.core")

# Bounds for a dataset in which everything fails.
KEPT_MOST = 10_000
LOGGED_MOST = 100

Action: TypeAlias = Literal["raise", "skip", "replace"]

# The first and the longest pause before another attempt to read; each pause is double the one before. Object stores
# ask for tens of milliseconds, and a fault that lasts for seconds is not transient.
BACKOFF_S = 0.05
BACKOFF_MOST_S = 5.0

# Errors of a file system that another attempt does not change.
_PERMANENT_NAMES = (
    *("EACCES", "EBADF", "EFBIG", "EINVAL", "EISDIR", "ELOOP", "ENAMETOOLONG", "ENODEV", "ENOENT", "ENOEXEC"),
    *("ENOSYS", "ENOTBLK", "ENOTDIR", "ENOTSUP", "ENXIO", "EOPNOTSUPP", "EOVERFLOW", "EPERM", "EROFS"),
)
_PERMANENT = frozenset(getattr(errno, name) for name in _PERMANENT_NAMES if hasattr(errno, name))


@public
@explain_arguments({"retry": "pass retries=", "timeout": "pass read_timeout_s=", "max_errors": "pass max_failures="})
@dataclass(frozen=True)
class FailurePolicy:
    """What to do with samples that cannot be read or decoded.

    Example:
        ```python
        import aiofeed

        policy = aiofeed.FailurePolicy("skip", retries=3, read_timeout_s=10, max_failures=100)
        photos = aiofeed.ImageFolder("photos")
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(photos, decode=decode, batch_size=32, on_error=policy)
        for images, labels in feeder:
            print(images.shape)
        print(feeder.failures)
        ```

    Args:
        action: "raise" the error at the ``for`` line; "skip" the sample, which shortens its batch (on one rank a batch
            of which nothing is left is left out); "replace" it by the next good sample in the order of the epoch, with
            the random numbers of the failed one.
        retries: The maximum number of further attempts to read a sample, after pauses that double from 0.05 s up to
            5 s, with 25 % jitter. Only transient errors are retried: timeouts, connection errors, EIO; not
            FileNotFoundError.
        read_timeout_s: The time limit of one attempt to read a sample.
        decode_timeout_s: The time limit for decoding a sample. Its thread cannot be stopped: another one continues, and
            the late result is discarded. A ``Dataset``, which reads and decodes in one call, gets the sum of both.
        max_failures: With "skip" and "replace", the maximum number of failed samples per epoch and rank: a number as an
            int, or a fraction of the source's length, rounded up, as a float. The default allows one sample of up to
            100, so give a number for small sources. A resumed epoch counts from 0.
        retry_on: Further exception types to retry, such as those of a storage client.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    action: Action = "raise"
    _: KW_ONLY
    retries: int = 0
    read_timeout_s: float | None = None
    decode_timeout_s: float | None = None
    max_failures: int | float = 0.01
    retry_on: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(f"on_error must be 'raise', 'skip', 'replace' or a FailurePolicy, got {self.action!r}")
        object.__setattr__(self, "retries", check_int_from(0, "retries", self.retries))
        for name in ("read_timeout_s", "decode_timeout_s"):
            _check_seconds(name, getattr(self, name))
        _check_max_failures(self.max_failures)
        kinds: Any = self.retry_on
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise TypeError(f"retry_on must be a tuple of exception types, got {self.retry_on!r}")
        object.__setattr__(self, "retry_on", kinds)

    def allowed(self, length: int) -> int:
        """Return the maximum number of failed samples per epoch, for a source of ``length`` samples."""
        if isinstance(self.max_failures, int):
            return self.max_failures
        # Rounded up, so that a fraction of 0.01 allows one bad file among fifty. 1e-9, because 0.07 * 100 exceeds 7.
        return math.ceil(self.max_failures * length - 1e-9)

    def is_transient(self, error: BaseException) -> bool:
        """Return whether another attempt to read may succeed."""
        if isinstance(error, self.retry_on):
            return True
        if isinstance(error, TimeoutError | ConnectionError | EOFError):  # EOFError: the peer closed the connection
            return True
        # An OSError without a number is not from the operating system; Pillow raises one for a broken image.
        return isinstance(error, OSError) and error.errno is not None and error.errno not in _PERMANENT


def as_policy(value: object) -> FailurePolicy:
    """Return the policy that ``on_error=`` means: an action or a ``FailurePolicy``."""
    if isinstance(value, FailurePolicy):
        return value
    if isinstance(value, str):
        return FailurePolicy(value)  # type: ignore[arg-type]
    raise TypeError(f"on_error must be 'raise', 'skip', 'replace' or a FailurePolicy, got {value!r}")


def backoff_s(attempt: int, jitter: random.Random) -> float:
    """Seconds to wait before another attempt, the first of which is number 1.

    Jitter spreads reads that failed at the same time.
    """
    pause: float = min(BACKOFF_S * 2.0 ** min(attempt - 1, 30), BACKOFF_MOST_S)
    return pause * jitter.uniform(0.75, 1.25)


def _check_seconds(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds or None, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}; pass None for no limit")


def _check_max_failures(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"max_failures must be an int (a number) or a float (a fraction), got {value!r}")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"max_failures must be at least 0, got {value}")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise ValueError(f"max_failures as a float must be a fraction from 0.0 to 1.0, got {value}")


@public_in("aiofeed.reports")
@dataclass(frozen=True)
class Failure:
    """A sample that failed.

    Example:
        ```python
        import aiofeed

        files = aiofeed.Files(["photos/cat/0.jpg", "photos.csv"])  # the second one is no image
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(files, decode=decode, batch_size=2, on_error="skip")
        for images in feeder:
            print(images.shape)
        for failure in feeder.failures:
            print(failure.key, failure.stage, failure.error)
        ```

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
