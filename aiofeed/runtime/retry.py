"""Retries of blocking calls, in the calling thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from aiofeed.core.failure_policy import FailurePolicy, backoff_s

_jitter = random.Random()


def retry_blocking(
    policy: FailurePolicy, failed: BaseException, attempt: Callable[[], Any], stop: threading.Event
) -> tuple[Any, int]:
    """Retry a call that failed; return its result or last error, and the number of further attempts.

    ``failed`` is the error of the first attempt. ``stop`` ends the retries early, with the last error.
    """
    made = 0
    while made < policy.retries and policy.is_transient(failed):
        made += 1
        if stop.wait(backoff_s(made, _jitter)):
            break
        try:
            return attempt(), made
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the caller raises it with the name of the sample
            failed = error
    return failed, made
