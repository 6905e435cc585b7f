"""Compares a feeder with a cache to one without: both are left and resumed alike, and give the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiofeed import Feeder


def same_after(step: int, stop: int, cached: Feeder[Any], plain: Feeder[Any], flat: Callable[[Any], Any]) -> None:
    """Leave an epoch of both after ``stop`` batches and continue as ``step`` says; ``flat`` makes them comparable."""
    expected: list[Any] = []
    found: list[Any] = []
    for feeder, batches in ((cached, found), (plain, expected)):
        iterator = iter(feeder)
        batches += [flat(batch) for batch, _ in zip(iterator, range(stop), strict=False)]
        if step % 3 == 0:
            feeder.load_state_dict(feeder.state_dict())
        elif step % 3 == 1:
            feeder.set_epoch(step + 1)
        else:
            batches += [flat(batch) for batch in iterator]
    assert found == expected
    assert cached.state_dict() == plain.state_dict()
