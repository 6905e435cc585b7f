"""With engine="process", batches are returned in the ring's memory, which is reused when nothing refers to it."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from typing import Any

import numpy as np
import pytest

from aiofeed import Feeder, Limits
from tests.support import process_parts as parts
from tests.support.waiting import children, until

pytestmark = pytest.mark.usefixtures("forked_workers")


def large(n: int = 2000, **more: Any) -> Feeder[Any]:
    limits = Limits(prefetch_batches=2, decode_threads=1)
    options = {"decode": parts.large, "batch_size": 2, "engine": "process", "limits": limits} | more
    return Feeder(parts.Numbers(n), **options)


def pool(feeder: Feeder[Any]) -> Any:
    pipeline: Any = feeder._session.pipeline
    return pipeline._pool


def is_in_ring(feeder: Feeder[Any], batch: Any) -> bool:
    address = np.asarray(batch).__array_interface__["data"][0]
    segments = pool(feeder)._workers[0].ring._segments.values()
    return any(0 <= address - each.address < each.nbytes for each in segments)


def is_correct(batch: Any, number: int) -> bool:
    return all(bool((row == (2 * number + at) % 251).all()) for at, row in enumerate(batch))


def test_a_batch_is_handed_out_without_a_copy() -> None:
    """It is the slot's memory; the slot is reused after the batch is dropped."""
    with large() as feeder:
        places = set()
        for number, batch in zip(range(30), feeder, strict=False):
            assert is_in_ring(feeder, batch)
            assert is_correct(batch, number)
            places.add(batch.data_ptr())
        # Two in the queue, the consumer's, and those in transit in both directions.
        assert len(places) <= 7


def test_an_array_derived_from_a_batch_keeps_its_slot() -> None:
    """A view, as a NumPy array, after the batch itself is dropped."""
    with large() as feeder:
        iterator = iter(feeder)
        row = next(iterator)[1:, ::2].numpy()
        for _ in range(30):
            next(iterator)
        assert bool((row == 1).all())


def test_small_arrays_are_copied() -> None:
    """Labels that the user keeps do not keep the images."""
    with large(collate_fn=parts.collate_with_labels) as feeder:
        kept = []
        for number, (images, labels) in zip(range(50), feeder, strict=False):
            assert is_in_ring(feeder, images)
            assert not is_in_ring(feeder, labels)
            kept.append((number, labels))
            del images
        assert len(pool(feeder).borrowed) <= 5
        assert all(labels.tolist() == [2 * number % 251, (2 * number + 1) % 251] for number, labels in kept)


def test_a_kept_batch_outlives_the_worker_and_the_feeder() -> None:
    """Its memory is valid after the worker was killed and the feeder closed."""
    feeder = large()
    iterator = iter(feeder)
    kept = [next(iterator) for _ in range(3)]
    os.kill(children()[0].pid, signal.SIGKILL)
    until(lambda: not children())
    feeder.close()
    del feeder, iterator
    gc.collect()
    assert all(is_correct(batch, number) for number, batch in enumerate(kept))


def test_a_batch_in_a_fork_is_never_overwritten() -> None:
    """A batch that existed at a fork keeps its content in the child, although the trainer drops it and continues."""
    with large() as feeder:
        iterator = iter(feeder)
        batch = next(iterator).numpy()  # torch has no threads after a fork
        ours, theirs = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
            child = os.fork()
        if child == 0:
            signal.alarm(30)
            os.read(ours, 1)  # until the trainer has continued
            os._exit(0 if all((row == at).all() for at, row in enumerate(batch)) else 1)
        del batch
        for number in range(1, 20):
            assert is_correct(next(iterator), number)
        os.write(theirs, b"!")
        _, status = os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
        assert os.waitstatus_to_exitcode(status) == 0
        # Slots borrowed after the fork are reused.
        places = {next(iterator).data_ptr() for _ in range(20)}
        assert len(places) <= 7


def test_slots_are_freed_while_no_batch_is_requested() -> None:
    """A consumer that pauses without a batch borrows no slot."""
    with large() as feeder:
        iterator = iter(feeder)
        batch = next(iterator)
        borrowed = pool(feeder).borrowed
        until(lambda: len(borrowed) == 3)  # the batch, and two in the queue
        del batch
        until(lambda: len(borrowed) == 2)
