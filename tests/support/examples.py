"""How many random examples a test draws."""

from __future__ import annotations

import os


def examples(number: int) -> int:
    """Return this number, or with ``AIOFEED_EXAMPLES`` that number for each 250 of it."""
    return number * int(os.environ.get("AIOFEED_EXAMPLES", "250")) // 250
