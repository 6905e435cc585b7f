"""Spans for whoever listens; a single attribute test where nobody does."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, float, float, int], None]
"""Called with the stage's name, start and end (``time.perf_counter`` seconds) and the batch's number."""

listeners: list[Listener] = []
"""Whoever wants spans appends a callable; it is called in whichever thread did the work and must be quick."""


def emit(stage: str, start_s: float, end_s: float, batch: int) -> None:
    """Tell every listener of one finished piece of work."""
    for listener in tuple(listeners):
        listener(stage, start_s, end_s, batch)
