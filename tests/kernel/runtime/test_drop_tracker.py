"""Objects that have been garbage-collected are reported, and no others."""

from __future__ import annotations

import gc

import numpy as np

from aiofeed.kernel.runtime.buffers import DropTracker


def test_a_dropped_object_is_reported_once() -> None:
    """By the value that was given for it; the others are not."""
    tracker: DropTracker[str] = DropTracker()
    kept, dropped = np.zeros(3), np.zeros(3)
    tracker.watch(kept, "kept")
    tracker.watch(dropped, "dropped")
    assert list(tracker.collected()) == []
    del dropped
    gc.collect()
    assert list(tracker.collected()) == ["dropped"]
    assert list(tracker.collected()) == []
    assert len(tracker) == 1


def test_a_forgotten_value_is_not_reported() -> None:
    """Whether its object was dropped before or after."""
    tracker: DropTracker[str] = DropTracker()
    before, after = np.zeros(3), np.zeros(3)
    tracker.watch(before, "before")
    tracker.watch(after, "after")
    del before
    tracker.forget("before")
    tracker.forget("after")
    del after
    gc.collect()
    assert list(tracker.collected()) == []
    assert len(tracker) == 0
