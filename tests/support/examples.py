"""How many random examples a test draws."""

from __future__ import annotations

import os


def examples(number: int) -> int:
    """Return `number`, or `number * N // 250` if ``AIOFEED_EXAMPLES=N`` is in the environment, as in `make test-long`."""
    return number * int(os.environ.get("AIOFEED_EXAMPLES", "250")) // 250
