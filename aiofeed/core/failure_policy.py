"""What to do about a sample that fails: decisions, and nothing that acts on them. Pure."""

from __future__ import annotations

import errno
import math
import random
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias, get_args

from aiofeed.core.types import public

Action: TypeAlias = Literal["raise", "skip", "replace"]

# The first pause before a read is tried again, and the longest; each is double the one before. Object stores ask for
# tens of milliseconds, and after a few seconds it is no hiccup any more.
BACKOFF_S = 0.05
BACKOFF_MOST_S = 5.0

# What a file system says of things that will not be otherwise in a moment.
_PERMANENT_NAMES = (
    *("EACCES", "EBADF", "EFBIG", "EINVAL", "EISDIR", "ELOOP", "ENAMETOOLONG", "ENODEV", "ENOENT", "ENOEXEC"),
    *("ENOSYS", "ENOTBLK", "ENOTDIR", "ENOTSUP", "ENXIO", "EOPNOTSUPP", "EOVERFLOW", "EPERM", "EROFS"),
)
_PERMANENT = frozenset(getattr(errno, name) for name in _PERMANENT_NAMES if hasattr(errno, name))


@public
@dataclass(frozen=True)
class FailurePolicy:
    """What a sample that cannot be read or decoded does to its epoch.

    Args:
        action: "raise" it at the ``for`` line; "skip" it, so that its batch is shorter; "replace" it by the next good
            sample of the epoch's order, with the random numbers of the one that failed.
        retries: how often a read is tried again, with a pause that doubles from 0.05 s up to 5 s, give or take a
            quarter. Only what can pass is: a time-out, a broken connection, an input/output error; not a missing file.
        read_timeout_s: most seconds that one attempt to read a sample may take.
        decode_timeout_s: most seconds that decoding a sample may take. Its thread cannot be stopped: another one
            takes its place, and what it comes to in the end is dropped. A ``Dataset``, which reads and decodes in one,
            may take the sum of both.
        max_failures: with "skip" and "replace", how many samples of one epoch may fail on a rank, as an int, or as a
            part of the source's length, rounded up, as a float. A pass that goes on from a saved state counts anew.
        retry_on: types of errors, beside the above, that can pass: those of a storage client, say.

    Raises:
        TypeError: a value of the wrong kind.
        ValueError: a value out of range.
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
        if isinstance(self.retries, bool) or not isinstance(self.retries, int):
            raise TypeError(f"retries must be an int, got {self.retries!r}")
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, got {self.retries}")
        for name in ("read_timeout_s", "decode_timeout_s"):
            _check_seconds(name, getattr(self, name))
        _check_most(self.max_failures)
        kinds: Any = self.retry_on
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise TypeError(f"retry_on must be a tuple of exception types, got {self.retry_on!r}")
        object.__setattr__(self, "retry_on", kinds)

    def allowed(self, length: int) -> int:
        """How many samples of an epoch may fail, of a source of ``length``."""
        if isinstance(self.max_failures, int):
            return self.max_failures
        # Rounded up, or one bad file among fifty would be too many for a part of a hundredth.
        # The product of 0.07 and 100 is a little above 7.
        return math.ceil(self.max_failures * length - 1e-9)

    def is_transient(self, error: BaseException) -> bool:
        """Whether the same read may succeed in a moment."""
        if isinstance(error, self.retry_on):
            return True
        if isinstance(error, TimeoutError | ConnectionError | EOFError):  # EOFError: the other side hung up
            return True
        # Without a number it is no operating system's: Pillow's for a broken image, say.
        return isinstance(error, OSError) and error.errno is not None and error.errno not in _PERMANENT


def as_policy(value: object) -> FailurePolicy:
    """``on_error=`` as a policy: one of the three words, or a policy itself."""
    if isinstance(value, FailurePolicy):
        return value
    if isinstance(value, str):
        return FailurePolicy(value)  # type: ignore[arg-type]
    raise TypeError(f"on_error must be 'raise', 'skip', 'replace' or a FailurePolicy, got {value!r}")


def backoff_s(attempt: int, jitter: random.Random) -> float:
    """Seconds to wait before attempt number ``attempt``, from 1 on.

    With jitter, since reads that failed together would all come back together.
    """
    pause: float = min(BACKOFF_S * 2.0 ** min(attempt - 1, 30), BACKOFF_MOST_S)
    return pause * jitter.uniform(0.75, 1.25)


def _check_seconds(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds or None, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}; None sets no limit")


def _check_most(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"max_failures must be an int (how many) or a float (what part), got {value!r}")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"max_failures must be at least 0, got {value}")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise ValueError(f"max_failures as a float is a part of the source, 0.0 to 1.0, got {value}")
