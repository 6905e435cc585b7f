"""Buffer pools: memory is reused, and never while anything refers to it."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed.kernel.core.types import HostTensor
from aiofeed.kernel.devices.copier import Copier
from aiofeed.kernel.devices.pinned import PinnedBufferPool, keep_pinned_memory, pinned_mapping, release_unused
from aiofeed.kernel.runtime import buffers
from aiofeed.kernel.runtime.buffers import SMALL_BYTES, HostBufferPool, array
from tests.support.simulated_device import SimulatedDevice

LARGE = 4 * SMALL_BYTES


def test_dropped_memory_is_used_again() -> None:
    """The next batch gets the block of a batch that was dropped."""
    memory = HostBufferPool(keep=2)
    first = memory.take(LARGE)
    address = first.ctypes.data
    del first
    assert memory.take(LARGE).ctypes.data == address


DERIVED: dict[str, Callable[[Any], Any]] = {
    "view": lambda owner: owner.view(np.int64),
    "reshape": lambda owner: owner.reshape(2, -1)[1],
    "tensor": torch.from_numpy,
    "detached": lambda owner: torch.from_numpy(owner.reshape(4, -1)).permute(1, 0).detach(),
    "numpy of tensor": lambda owner: torch.from_numpy(owner).numpy()[::2],
    "slice": lambda owner: torch.from_numpy(owner)[5:9],
}


@pytest.mark.parametrize("derive", DERIVED)
def test_memory_with_any_derived_object_alive_is_left_alone(derive: str) -> None:
    """A block is not reused while a tensor, view or array derived from it is alive, and is reused afterwards."""
    memory = HostBufferPool(keep=2)
    owner = memory.take(LARGE)
    owner[:] = 7
    address = owner.ctypes.data
    kept = DERIVED[derive](owner)
    del owner
    for _ in range(4):
        other = memory.take(LARGE)
        other[:] = 0
        del other
    assert set(np.asarray(kept).view(np.uint8).ravel().tolist()) == {7}
    del kept
    assert address in {block.ctypes.data for block in [memory.take(LARGE) for _ in range(2)]}


def test_small_memory_does_not_keep_a_block() -> None:
    """Labels have memory of their own, so keeping them keeps no block."""
    memory = HostBufferPool(keep=2)
    block = memory.take(LARGE)
    address = block.ctypes.data
    del block
    labels = array(memory, (64,), np.dtype(np.int64))
    assert labels.shape == (64,)
    assert memory.take(LARGE).ctypes.data == address


def test_free_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the blocks that come back, `keep` are reused and the others go back to the system."""
    mapped: list[int] = []
    real = buffers.anonymous

    def anonymous(size: int) -> mmap.mmap:
        mapped.append(size)
        return real(size)

    monkeypatch.setattr(buffers, "anonymous", anonymous)
    memory = HostBufferPool(keep=2)
    for most in (5, 5 + 3):
        blocks = [memory.take(LARGE) for _ in range(5)]
        assert len(mapped) == most
        del blocks
    memory.close()
    assert memory.take(LARGE).nbytes == LARGE
    assert len(mapped) == 5 + 3 + 1


def test_batches_that_the_user_kept_do_not_stay_as_free_memory() -> None:
    """Of many blocks that are dropped at once, as many stay as there may be in flight, by number and by bytes."""
    memory = HostBufferPool(keep=100, most_bytes=10 * LARGE)
    blocks = [memory.take(LARGE) for _ in range(50)]
    blocks.clear()
    memory.take(LARGE)
    assert len(memory._free) + len(memory._lent) == 10
    small = HostBufferPool(keep=100, most_bytes=1)
    blocks = [small.take(LARGE) for _ in range(50)]
    blocks.clear()
    small.take(LARGE)
    assert len(small._free) + len(small._lent) == 4


def test_a_much_larger_block_is_not_spent_on_a_small_request() -> None:
    """A block is reused for requests of at least half its size."""
    memory = HostBufferPool(keep=4)
    large = memory.take(10 * LARGE)
    address = large.ctypes.data
    del large
    assert memory.take(LARGE).ctypes.data != address


def test_pinned_memory_comes_back_when_given_back() -> None:
    """The blocks of a lease are reused after give_back, and only then; a second give_back does nothing."""
    pinned: list[np.ndarray] = []

    def pin(nbytes: int) -> np.ndarray:
        pinned.append(np.empty(nbytes, np.uint8))
        return pinned[-1]

    memory = PinnedBufferPool(pin, keep=4)
    lease = memory.lease()
    lease.take(1000)
    other = memory.lease()
    other.take(1000)
    assert len(pinned) == 2
    lease.give_back()
    lease.give_back()
    again = memory.lease()
    assert again.take(900).nbytes == 900
    assert len(pinned) == 2
    assert again.take(900).nbytes == 900
    assert len(pinned) == 3
    assert memory.pinned


def test_memory_that_cannot_be_pinned_falls_back_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A refusal to pin is logged once, and pageable memory is used."""

    def refuse(nbytes: int) -> np.ndarray:
        raise RuntimeError("no locked memory left")

    memory = PinnedBufferPool(refuse, keep=4)
    with caplog.at_level(logging.WARNING, "aiofeed"):
        lease = memory.lease()
        assert lease.take(100).nbytes == lease.take(100).nbytes == 100
    assert len(caplog.records) == 1
    assert "no locked memory left" in caplog.text
    assert not lease.pinned


def test_the_warning_that_memory_cannot_be_pinned_keeps_nothing_alive(caplog: pytest.LogCaptureFixture) -> None:
    """The log record has the error's text and no reference to its traceback."""

    class Batch:
        pass

    def refuse(nbytes: int) -> np.ndarray:
        raise RuntimeError("no locked memory left")

    def work() -> weakref.ref[Batch]:
        batch = Batch()
        PinnedBufferPool(refuse, keep=4).take(100)
        return weakref.ref(batch)

    with caplog.at_level(logging.WARNING, "aiofeed"):
        gone = work()
    gc.collect()
    assert len(caplog.records) == 1
    assert gone() is None


def test_pinned_memory_is_exact_and_goes_back_to_the_system() -> None:
    """Blocks take whole pages, not powers of two; those beyond ``keep`` and those of a closed pool are unregistered."""
    device = SimulatedDevice(latency="late")
    pool = PinnedBufferPool(device.pin, keep=1)
    leases = [pool.lease() for _ in range(3)]
    for lease in leases:
        lease.take(36 * mmap.PAGESIZE + 1)
    block = 37 * mmap.PAGESIZE
    assert device.pinned_bytes == 3 * block
    leases[0].give_back()
    assert device.pinned_bytes == 3 * block
    leases[1].give_back()
    assert device.pinned_bytes == 2 * block
    pool.close()
    assert device.pinned_bytes == block
    leases[2].give_back()
    assert device.pinned_bytes == 0


def test_pinned_memory_is_not_unregistered_while_a_copy_reads_it() -> None:
    """The memory of a lease that is dropped with its pool stays registered until its copy has run."""
    device = SimulatedDevice(latency="late")
    pool = PinnedBufferPool(device.pin, keep=1)
    lease, copier = pool.lease(), Copier(device)
    memory = lease.take(1000)
    memory[:] = 7
    pending = copier.issue(HostTensor(memory, pinned=True))
    del memory, lease
    pool.close()
    del pool, copier
    release_unused()
    assert device.pinned_bytes > 0
    pending.copied.synchronize()
    assert pending.batch.tolist() == [7] * 1000
    Copier(device).release()
    assert device.pinned_bytes == 0


def test_pinned_memory_of_a_failed_device_stays_registered() -> None:
    """After ``keep_pinned_memory`` nothing is unregistered or unmapped."""
    device = SimulatedDevice()
    pool = PinnedBufferPool(device.pin, keep=1)
    lease = pool.lease()
    memory = lease.take(1000)
    memory[:] = 7
    mapping = weakref.ref(memory.base.base)
    device.fail()
    keep_pinned_memory()
    del memory
    lease.give_back()
    pool.close()
    del lease, pool
    gc.collect()
    release_unused()
    assert device.freed_after_failure == 0
    assert bytes(mapping()[:1000]) == bytes([7] * 1000)


def test_memory_that_cannot_be_unregistered_stays_mapped() -> None:
    """A driver may still read it."""

    def refuse(memory: np.ndarray) -> None:
        raise RuntimeError("the device has failed")

    memory = pinned_mapping(1000, lambda memory: None, refuse)
    mapping = weakref.ref(memory.base)
    del memory
    release_unused()
    assert mapping() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="needs MADV_WIPEONFORK")
def test_a_fork_leaves_pinned_pages_where_they_are() -> None:
    """A child gets zeros: if it shared the pages, the parent's next write would move them away from the device."""
    memory = SimulatedDevice().pin(3 * mmap.PAGESIZE)
    memory[:] = 7
    child = os.fork()
    if child == 0:
        os._exit(int(memory.max()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.min() == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_keeps_its_batches() -> None:
    """A child that was forked while a block was in use does not see later writes of its parent."""
    memory = HostBufferPool(keep=2)
    block = memory.take(200_000)
    block[:] = 1
    answer, write_answer = os.pipe()
    go, wait = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        os.write(write_answer, b"%d" % int(block.max()))
        os._exit(0)
    block[:] = 2
    os.write(wait, b".")
    os.waitpid(child, 0)
    assert os.read(answer, 8) == b"1"
    for descriptor in (answer, write_answer, go, wait):
        os.close(descriptor)
