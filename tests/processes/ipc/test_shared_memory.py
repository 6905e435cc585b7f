"""Shared memory: without a name, never shorter than it says, and a clear error where there is no room."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc import shared_memory as segments
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.processes.ipc.ring import Ring, SlotMemory
from aiofeed.runtime import machine

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /dev/shm and memfd")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that has named shared memory only."""
    monkeypatch.delattr(os, "memfd_create", raising=False)


def both_ends(nbytes: int) -> None:
    segment, descriptor = segments.create(0, nbytes)
    other = segments.adopt(0, segment.nbytes, descriptor)
    segment.memory[:5] = np.frombuffer(b"hello", np.uint8)
    assert other.memory[:5].tobytes() == b"hello"
    assert segment.nbytes >= nbytes


def test_what_one_end_writes_the_other_reads() -> None:
    """Through a descriptor alone."""
    both_ends(100_000)


@linux
def test_named_memory_has_no_name_either(named: None) -> None:
    """Once it is open, nothing of it is left in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    both_ends(100_000)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "aiofeed" in name]


@linux
def test_a_stale_segment_is_swept_and_nobody_elses_touched(named: None) -> None:
    """What a crash between opening and unlinking left is found by its name."""
    stale = Path("/dev/shm") / segments.segment_name().lstrip("/")
    foreign = Path("/dev/shm") / f"{stale.name}-of-somebody-else"
    stale.write_bytes(b"left behind")
    foreign.write_bytes(b"not ours")
    try:
        both_ends(100_000)
        assert not stale.exists()
        assert foreign.read_bytes() == b"not ours"
    finally:
        foreign.unlink()
        stale.unlink(missing_ok=True)


@linux
def test_a_full_file_system_is_an_error_with_the_figures(named: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a byte is written, not a bus error when one is."""
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 60)
    with pytest.raises(FeedError, match=r"needs 1048576\.0 GiB of shared memory.*/dev/shm has .* of .*--shm-size"):
        segments.create(0, 1 << 50)


def test_more_than_the_container_may_have_is_an_error_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cgroup's limit too: before the kernel kills somebody for it."""
    monkeypatch.setattr(machine, "free_memory", lambda: 10 << 20)
    with pytest.raises(FeedError, match=r"needs 11\.0 MiB of shared memory, and 10\.0 MiB are left"):
        segments.create(0, 11 << 20)


@linux
def test_memory_that_could_shrink_is_refused(tmp_path: Path) -> None:
    """A file, an unsealed memfd, one that is shorter than was said."""
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 65536)
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, 65536)
    for descriptor, announced in ((file, 65536), (unsealed, 65536), (segments.anonymous(65536), 65537)):
        with pytest.raises(ProtocolError):
            segments.adopt(0, announced, descriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(made := segments.anonymous(65536), 0)
    os.close(made)


def test_slots_are_used_again_and_grow() -> None:
    """The same memory serves one batch after another; a larger one gets more, and the trainer hears what is new."""
    memory = SlotMemory(keep=2)
    ring = Ring()

    def fill(sizes: list[int]) -> tuple[Any, int, list[int]]:
        slot = memory.lease()
        for size in sizes:
            slot.take(size)[:] = 1
        new, descriptors, retired = memory.introduce(slot.segments)
        ring.learn(new, descriptors)
        ring.forget(retired)
        return slot, len(new), retired

    slot, new, _ = fill([100_000, 512])
    assert (new, len(slot.segments)) == (1, 1)
    slot.give_back()
    slot, new, _ = fill([100_000, 512])
    assert new == 0
    first = {segment.number for segment in slot.segments}
    held, new, _ = fill([100_000])
    assert new == 1
    assert not first & {segment.number for segment in held.segments}
    slot.give_back()
    held.give_back()
    for _ in range(2):
        slot, new, _ = fill([10_000_000])
        slot.give_back()
    assert new == 0
    retired = []
    for _ in range(4):
        slots = [fill([10_000_000])[0] for _ in range(3)]
        for slot in slots:
            slot.give_back()
        slot, _, gone = fill([1])
        slot.give_back()
        retired += gone
    assert retired
    assert len(memory._free) == 2


def test_a_first_batch_of_many_arrays_has_few_segments() -> None:
    """Their descriptors travel with one message, which has room for few."""
    memory = SlotMemory(keep=4)
    slot = memory.lease()
    arrays = [slot.take(300_000) for _ in range(200)]
    assert len(slot.segments) <= 10
    assert all(slot.locate(each) is not None for each in arrays)
    slot.give_back()
    again = memory.lease()
    for _ in range(200):
        again.take(300_000)
    assert len(again.segments) <= 10
    for kept in (again.segments, memory._free):
        for descriptor in memory.introduce(kept)[1]:
            os.close(descriptor)


def test_a_slot_is_given_back_once() -> None:
    """Twice is as once."""
    memory = SlotMemory(keep=4)
    slot = memory.lease()
    slot.take(10)
    slot.give_back()
    slot.give_back()
    assert len(memory._free) == 1
    for segment in memory._free:
        _, descriptors, _ = memory.introduce([segment])
        for descriptor in descriptors:
            os.close(descriptor)
