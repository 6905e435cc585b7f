"""How many random examples a test draws."""

from __future__ import annotations

import os


def examples(number: int) -> int:
    """Return `number`, or with ``AIOFEED_EXAMPLES=N``, as `make test-long` sets it, `number * N // 250`."""
    return number * int(os.environ.get("AIOFEED_EXAMPLES", "250")) // 250
