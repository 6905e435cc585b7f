"""Shared memory has no name, cannot shrink, and is an error with the figures if there is not enough of it."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aiofeed.ipc import shared_memory as segments
from aiofeed.ipc.framing import ProtocolError, close_all
from aiofeed.ipc.ring import Ring, Slot, SlotPool
from aiofeed.ipc.schema import ArrayNode
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.runtime import machine

linux = pytest.mark.skipif(sys.platform != "linux", reason="uses /dev/shm and memfd")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that has only named shared memory."""
    monkeypatch.delattr(os, "memfd_create", raising=False)


def write_and_read(nbytes: int) -> None:
    """Write through one mapping and read through another."""
    segment, descriptor = segments.create_segment(0, nbytes)
    other = segments.open_segment(0, segment.nbytes, descriptor)
    segment.memory[:5] = np.frombuffer(b"hello", np.uint8)
    assert other.memory[:5].tobytes() == b"hello"
    assert segment.nbytes >= nbytes


def test_one_process_reads_what_another_writes() -> None:
    """They share a descriptor, and no name."""
    write_and_read(100_000)


@linux
def test_named_memory_loses_its_name_at_once(named: None) -> None:
    """Nothing is left in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    write_and_read(100_000)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "aiofeed" in name]


@linux
def test_named_memory_whose_lock_is_held_is_an_error(
    named: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait has a limit."""
    monkeypatch.setattr(segments, "_LOCK_LIMIT_S", 0.05)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open(tmp_path / f"aiofeed-{os.getuid()}.lock", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FeedError, match=r"cannot be locked: .*process .* has locked it"):
            write_and_read(100_000)
    os.chmod(held.name, 0o600)
    write_and_read(100_000)


@linux
def test_a_segment_left_by_a_crash_is_removed(named: None) -> None:
    """It is found by its name; other files stay."""
    stale = Path("/dev/shm") / f"aiofeed-{os.getuid()}"
    foreign = Path("/dev/shm") / f"{stale.name}-of-somebody-else"
    stale.write_bytes(b"left behind")
    foreign.write_bytes(b"not ours")
    try:
        write_and_read(100_000)
        assert not stale.exists()
        assert foreign.read_bytes() == b"not ours"
    finally:
        foreign.unlink()
        stale.unlink(missing_ok=True)


@linux
def test_a_full_file_system_is_an_error_with_the_figures(named: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the segment is created; not a SIGBUS when it is written."""
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 60)
    with pytest.raises(FeedError, match=r"needs 1048576\.0 GiB of shared memory.*/dev/shm has .* of .*--shm-size"):
        segments.create_segment(0, 1 << 50)


def test_too_little_memory_is_an_error_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the cgroup counts: beyond it the kernel would kill a process."""
    monkeypatch.setattr(machine, "free_memory", lambda: 10 << 20)
    with pytest.raises(FeedError, match=r"needs 11\.0 MiB of shared memory.* has 10\.0 MiB left"):
        segments.create_segment(0, 11 << 20)


@linux
def test_memory_that_could_shrink_is_refused(tmp_path: Path) -> None:
    """A file, an unsealed memfd, a memfd that is smaller than announced."""
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 65536)
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, 65536)
    for descriptor, announced in ((file, 65536), (unsealed, 65536), (segments.anonymous_memory(65536), 65537)):
        with pytest.raises(ProtocolError):
            segments.open_segment(0, announced, descriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(made := segments.anonymous_memory(65536), 0)
    os.close(made)


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    """A pool that keeps two free segments, for one reader."""
    made = SlotPool(2, "", single_reader=True)
    yield made
    made.close()


def test_slots_are_reused_and_grow(pool: SlotPool) -> None:
    """A larger batch gets a new segment, and the reader gets the new and the retired segments."""
    ring, known = Ring(), set[int]()

    def write(sizes: list[int]) -> tuple[Slot, int, list[int]]:
        slot = pool.lease()
        for size in sizes:
            slot.take(size)[:] = 1
        new, descriptors, retired = pool.introduce(slot.segments, known)
        ring.map_segments(new, descriptors, retired)
        return slot, len(new), retired

    slot, new, _ = write([100_000, 512])
    assert (new, len(slot.segments)) == (1, 1)
    slot.give_back()
    slot, new, _ = write([100_000, 512])
    assert new == 0
    first = {segment.number for segment in slot.segments}
    other, new, _ = write([100_000])
    assert new == 1
    assert not first & {segment.number for segment in other.segments}
    slot.give_back()
    other.give_back()
    for _ in range(2):
        slot, new, _ = write([10_000_000])
        slot.give_back()
    assert new == 0
    retired = []
    for _ in range(4):
        slots = [write([10_000_000])[0] for _ in range(3)]
        for slot in slots:
            slot.give_back()
        slot, _, now = write([1])
        slot.give_back()
        retired += now
    assert retired
    assert len(pool._free) == 2


def test_a_slot_that_a_process_may_still_read_is_never_reused(pool: SlotPool) -> None:
    """Its segment is retired, and the reader unmaps it."""
    slot, known = pool.lease(), set[int]()
    slot.take(100)
    new, descriptors, _ = pool.introduce(slot.segments, known)
    close_all(descriptors)
    slot.give_back(reusable=False)
    assert not pool._free
    assert pool.introduce([], known)[2] == [new[0].number]
    assert known == set()


def test_each_of_several_readers_gets_a_descriptor_of_its_own() -> None:
    """Also one that comes later; a segment that it knows is not sent again."""
    pool = SlotPool(2, "", single_reader=False)
    slot = pool.lease()
    slot.take(100)[:5] = np.frombuffer(b"hello", np.uint8)
    for _ in range(2):
        known = set[int]()
        new, descriptors, _ = pool.introduce(slot.segments, known)
        ring = Ring()
        ring.map_segments(new, descriptors)
        assert ring.view(ArrayNode("array", new[0].number, 0, [5], "|u1")).tobytes() == b"hello"
        assert pool.introduce(slot.segments, known) == ([], [], [])
    pool.close()


def test_a_first_batch_of_many_arrays_has_few_segments(pool: SlotPool) -> None:
    """The number of descriptors in a message is limited."""
    slot = pool.lease()
    arrays = [slot.take(300_000) for _ in range(200)]
    assert len(slot.segments) <= 10
    assert all(slot.locate(each) is not None for each in arrays)
    slot.give_back()
    again = pool.lease()
    for _ in range(200):
        again.take(300_000)
    assert len(again.segments) <= 10


def test_a_slot_is_given_back_once(pool: SlotPool) -> None:
    """A second call does nothing."""
    slot = pool.lease()
    slot.take(10)
    slot.give_back()
    slot.give_back()
    assert len(pool._free) == 1
