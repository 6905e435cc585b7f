"""Compares a feeder with a cache to a feeder without one over the same sequence of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiofeed import Feeder


def same_after(step: int, stop: int, cached: Feeder[Any], plain: Feeder[Any], flat: Callable[[Any], Any]) -> None:
    """Stop an epoch of both feeders after ``stop`` batches, then do one operation: both must stay equal.

    Args:
        step: its remainder by 3 chooses the operation: load the own state, `set_epoch`, or finish the epoch.
        stop: the number of batches before the operation.
        cached, plain: the feeders.
        flat: converts a batch to an object that `==` compares.
    """
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
