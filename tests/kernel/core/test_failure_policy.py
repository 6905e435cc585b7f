"""`FailurePolicy`: its arguments, transient errors and pauses."""

from __future__ import annotations

import asyncio
import errno
import random

import pytest
from PIL import UnidentifiedImageError

from aiofeed import FailurePolicy
from aiofeed.kernel.core.failures import BACKOFF_MOST_S, BACKOFF_S, as_policy, backoff_s


@pytest.mark.parametrize("word", ["raise", "skip", "replace"])
def test_an_action_is_a_policy(word: str) -> None:
    """`on_error` takes an action by name, or a policy."""
    policy = as_policy(word)
    assert policy.action == word
    assert as_policy(policy) is policy


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"action": "ignore"}, ValueError, "'raise', 'skip', 'replace'.*'ignore'"),
        ({"retries": -1}, ValueError, "retries must be at least 0, got -1"),
        ({"retries": True}, TypeError, "retries must be an int"),
        ({"retries": 1.5}, TypeError, "retries must be an int"),
        ({"read_timeout_s": 0}, ValueError, "read_timeout_s must be above 0"),
        ({"decode_timeout_s": float("inf")}, ValueError, "decode_timeout_s must be above 0 and finite"),
        ({"decode_timeout_s": "2"}, TypeError, "decode_timeout_s must be a number of seconds"),
        ({"max_failures": -1}, ValueError, "max_failures must be at least 0"),
        ({"max_failures": 1.5}, ValueError, "0.0 to 1.0"),
        ({"max_failures": float("nan")}, ValueError, "0.0 to 1.0"),
        ({"max_failures": None}, TypeError, "max_failures must be an int"),
        ({"retry_on": ("OSError",)}, TypeError, "retry_on must be a tuple of exception types"),
        ({"retry_on": KeyboardInterrupt}, TypeError, "retry_on must be a tuple of exception types"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    """The error states the received value and what is allowed."""
    with pytest.raises(error, match=message):
        FailurePolicy(**arguments)  # type: ignore[arg-type]


def test_on_error_of_another_kind_is_refused() -> None:
    """`on_error` must be an action or a policy."""
    with pytest.raises(TypeError, match="on_error must be"):
        as_policy(None)


@pytest.mark.parametrize(
    ("most", "length", "allowed"),
    [(0, 100, 0), (7, 100, 7), (0.01, 100, 1), (0.01, 50, 1), (0.01, 150, 2), (0.0, 100, 0), (1.0, 10, 10)],
)
def test_max_failures_is_a_number_or_a_fraction(most: float, length: int, allowed: int) -> None:
    """A fraction is rounded up: 0.01 allows one bad file among fifty."""
    assert FailurePolicy("skip", max_failures=most).allowed(length) == allowed


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (OSError(errno.EIO, "input/output error"), True),
        (OSError(errno.ESTALE, "stale file handle"), True),
        (OSError(errno.EMFILE, "too many open files"), True),
        (TimeoutError("no answer"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (asyncio.IncompleteReadError(b"", 10), True),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (PermissionError(errno.EACCES, "permission denied"), False),
        (IsADirectoryError(errno.EISDIR, "is a directory"), False),
        (UnidentifiedImageError("cannot identify image"), False),
        (ValueError("no"), False),
        (asyncio.CancelledError(), False),
        (KeyError("named"), True),
    ],
)
def test_transient_errors(error: BaseException, transient: bool) -> None:
    """I/O and network errors are transient; a missing file and a broken image are not."""
    assert FailurePolicy(retries=1, retry_on=(KeyError,)).is_transient(error) is transient


def test_pauses_double_up_to_a_limit_with_jitter() -> None:
    """Each pause is double the one before, with 25 % jitter."""
    jitter = random.Random(1)
    for attempt in range(1, 40):
        middle = min(BACKOFF_S * 2 ** (attempt - 1), BACKOFF_MOST_S)
        pauses = [backoff_s(attempt, jitter) for _ in range(200)]
        assert 0.75 * middle <= min(pauses) < 0.85 * middle
        assert 1.15 * middle < max(pauses) <= 1.25 * middle
