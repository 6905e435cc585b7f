"""Batches of engine processes that the user has as they lie in the ring: when their memory is used again."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import warnings
from typing import Any

import numpy as np

from aiofeed import Feeder, Limits
from aiofeed.processes.ipc.passing import Passable
from tests.support import process_parts as parts
from tests.support.waiting import children, until


def large(n: int = 2000, **more: Any) -> Feeder[Any]:
    limits = Limits(prefetch_batches=2, decode_threads=1)
    options = {"decode": parts.large, "batch_size": 2, "engine": "process", "limits": limits} | more
    return Feeder(parts.Numbers(n), **options)


def processes(feeder: Feeder[Any]) -> Any:
    pipeline: Any = feeder._session.pipeline
    return pipeline._processes


def lies_in_the_ring(feeder: Feeder[Any], batch: Any) -> bool:
    address = np.asarray(batch).__array_interface__["data"][0]
    segments = processes(feeder)._processes[0].ring._segments.values()
    return any(0 <= address - each.address < each.nbytes for each in segments)


def right(batch: Any, number: int) -> bool:
    return all(bool((row == (2 * number + at) % 251).all()) for at, row in enumerate(batch))


def test_nothing_is_copied_on_the_way_to_the_consumer() -> None:
    """The batch is the slot's memory, and the slot is used again once the batch is dropped."""
    with large() as feeder:
        places = set()
        for number, batch in zip(range(60), feeder, strict=False):
            assert lies_in_the_ring(feeder, batch)
            assert right(batch, number)
            places.add(batch.data_ptr())
        # Two that wait, the consumer's, and those on their way there and back.
        assert len(places) <= 7


def test_what_is_derived_from_a_batch_keeps_its_slot() -> None:
    """A view, or numpy's face of it, however long the batch itself is gone."""
    with large() as feeder:
        iterator = iter(feeder)
        row = next(iterator)[1:, ::2].numpy()
        for _ in range(30):
            next(iterator)
        assert bool((row == 1).all())


def test_small_arrays_are_the_users_own() -> None:
    """Labels that are kept keep no images."""
    with large(collate_fn=parts.collate_with_labels) as feeder:
        kept = []
        for number, (images, labels) in zip(range(50), feeder, strict=False):
            assert lies_in_the_ring(feeder, images)
            assert not lies_in_the_ring(feeder, labels)
            kept.append((number, labels))
            del images
        assert len(processes(feeder).lending) <= 5
        assert all(labels.tolist() == [2 * number % 251, (2 * number + 1) % 251] for number, labels in kept)


def test_a_kept_batch_outlives_the_process_and_the_feeder() -> None:
    """Its memory is nobody else's, whoever is killed or closed."""
    feeder = large()
    iterator = iter(feeder)
    kept = [next(iterator) for _ in range(3)]
    os.kill(children()[0].pid, signal.SIGKILL)
    until(lambda: not children())
    feeder.close()
    del feeder, iterator
    gc.collect()
    assert all(right(batch, number) for number, batch in enumerate(kept))


def test_what_a_fork_has_is_not_overwritten() -> None:
    """A batch that was there when the trainer was forked stays as it was, though the trainer drops it and goes on."""
    with large() as feeder:
        iterator = iter(feeder)
        batch = next(iterator).numpy()  # torch's threads are not there after a fork
        ours, theirs = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork of several threads: that is what is tested
            child = os.fork()
        if child == 0:
            signal.alarm(30)
            os.read(ours, 1)  # until the trainer has gone on
            os._exit(0 if all((row == at).all() for at, row in enumerate(batch)) else 1)
        del batch
        for number in range(1, 40):
            assert right(next(iterator), number)
        os.write(theirs, b"!")
        _, status = os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
        assert os.waitstatus_to_exitcode(status) == 0
        # Those that were lent after it are used again.
        places = {next(iterator).data_ptr() for _ in range(40)}
        assert len(places) <= 7


def test_what_was_passed_on_to_one_who_is_not_heard_of_is_not_overwritten() -> None:
    """A server's consumer that was let go may still read a slot: it stays as it was, though the server drops it."""
    passable = Passable(slots=2)
    feeder = large()
    feeder._pass_on(passable)
    with feeder:
        iterator = iter(feeder)
        batch = next(iterator).numpy()
        expected = batch.copy()
        found = passable.hold(batch)
        assert found is not None
        number, offset = found
        nbytes, descriptor = passable.descriptor(number)
        with mmap.mmap(descriptor, nbytes) as theirs:
            os.close(descriptor)
            passable.drop(number, again=False)
            del batch
            for later in range(1, 40):
                assert right(next(iterator), later)
            seen = np.frombuffer(theirs[offset : offset + expected.nbytes], expected.dtype)
            assert bool((seen == expected.ravel()).all())


def test_slots_come_back_while_nobody_asks_for_batches() -> None:
    """A consumer that pauses with nothing in hand holds nothing."""
    with large() as feeder:
        iterator = iter(feeder)
        batch = next(iterator)
        lending = processes(feeder).lending
        until(lambda: len(lending) == 3)  # it, and two that wait
        del batch
        until(lambda: len(lending) == 2)
