"""Further attempts at something that blocks, made in the thread that it blocks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from aiofeed.core.failure_policy import FailurePolicy, backoff_s
from aiofeed.runtime.time_limits import StopFlag

# How soon a pause between two attempts ends once nobody wants the result any more.
_LOOK_S = 0.05

_jitter = random.Random()


def retry_blocking(
    policy: FailurePolicy, failed: BaseException, attempt: Callable[[], Any], stop: StopFlag
) -> tuple[Any, int]:
    """What a further ``attempt`` gave, or the error of the last one; and how many were made.

    Args:
        policy: how often, and for which errors.
        failed: the error of the attempt that was made before.
        attempt: tries again.
        stop: ends it early, with the error.
    """
    made = 0
    while made < policy.retries and policy.is_transient(failed):
        made += 1
        if not _pause(backoff_s(made, _jitter), stop):
            break
        try:
            return attempt(), made
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything; it is raised again by name
            failed = error
    return failed, made


def _pause(seconds: float, stop: StopFlag) -> bool:
    until = time.perf_counter() + seconds
    while not stop.stopped and (left := until - time.perf_counter()) > 0:
        time.sleep(min(left, _LOOK_S))
    return not stop.stopped
