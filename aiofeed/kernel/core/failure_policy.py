"""The policy for samples that fail. Decisions only, no I/O."""

from __future__ import annotations

import errno
import math
import random
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias, get_args

from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_int_from, explain_arguments

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
