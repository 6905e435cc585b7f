"""Retries of blocking calls, in the calling thread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from aiofeed.core.failure_policy import FailurePolicy, backoff_s
from aiofeed.runtime.time_limits import StopFlag

# A pause between two attempts checks the stop flag this often.
POLL_INTERVAL_S = 0.05

_jitter = random.Random()


def retry_blocking(
    policy: FailurePolicy, failed: BaseException, attempt: Callable[[], Any], stop: StopFlag
) -> tuple[Any, int]:
    """Retry a call that failed; return its result or last error, and the number of further attempts.

    Args:
        policy: The maximum number of attempts and the errors to retry.
        failed: The error of the first attempt.
        attempt: The call.
        stop: Ends the retries early, with the last error.
    """
    made = 0
    while made < policy.retries and policy.is_transient(failed):
        made += 1
        if not _pause(backoff_s(made, _jitter), stop):
            break
        try:
            return attempt(), made
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the caller raises it with the name of the sample
            failed = error
    return failed, made


def _pause(seconds: float, stop: StopFlag) -> bool:
    until = time.perf_counter() + seconds
    while not stop.stopped and (left := until - time.perf_counter()) > 0:
        time.sleep(min(left, POLL_INTERVAL_S))
    return not stop.stopped
