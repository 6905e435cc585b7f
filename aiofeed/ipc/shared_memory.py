"""Shared memory without a name: created by one process, passed on as a descriptor, freed with its last mapping.

On Linux it is a memfd, sealed so that it cannot shrink while another process has it mapped; otherwise an access could
raise SIGBUS. Systems with only named segments (macOS): the name exists while the segment is opened and unlinked, under
a lock. A segment found under that name while the lock is held was left by a crash, and is removed.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aiofeed.ipc.framing import ProtocolError
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.buffers import Bytes
from aiofeed.kernel.runtime.event_loop import reserve_standard_descriptors
from aiofeed.kernel.sources.file_lock import lock_file

# Segments are multiples of this size.
GRAIN = 64 * 1024
# The file beside named segments is locked for some system calls.
_LOCK_LIMIT_S = 5.0
# From this size on, a segment is compared with the free memory of the machine.
_CHECKED_BYTES = 8 << 20
_SHM = Path("/dev/shm")  # named segments on Linux; macOS does not show them in the file system


@dataclass(frozen=True, eq=False)
class Segment:
    """Mapped shared memory, at an ``address``; the process that created it has numbered it."""

    number: int
    memory: Bytes
    address: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes

    def owner(self) -> Bytes:
        """Return a new ndarray of its memory. Arrays made from it keep it alive: their bases end at the mapping."""
        mapping: Any = self.memory.base
        return np.frombuffer(mapping, np.uint8)


def create_segment(number: int, nbytes: int) -> tuple[Segment, int]:
    """Create a segment of at least ``nbytes``; also returns its descriptor.

    Raises:
        FeedError: There is not enough memory; the message has the figures.
    """
    nbytes = -(-nbytes // GRAIN) * GRAIN
    # Reading the free memory takes 0.4 ms.
    if nbytes >= _CHECKED_BYTES and nbytes > (free := machine.free_memory()):
        raise FeedError(
            f"a batch needs {format_bytes(nbytes)} of shared memory, and this machine or container has "
            f"{format_bytes(free)} left; make batches smaller, or raise the container's memory limit"
        )
    descriptor = anonymous_memory(nbytes)
    try:
        return _map(number, descriptor, nbytes), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def open_segment(number: int, nbytes: int, descriptor: int, *, private: bool = False, sealed: bool = True) -> Segment:
    """Map a segment and close its descriptor; see ``Ring``.

    Raises:
        ProtocolError: It is smaller than ``nbytes``, or could shrink.
    """
    try:
        size = os.fstat(descriptor).st_size
        if nbytes < 1 or size < nbytes:
            raise ProtocolError(f"a segment has {size} bytes and was announced with {nbytes}")
        if sealed and hasattr(os, "memfd_create") and not _is_sealed(descriptor):
            raise ProtocolError("a segment is not sealed against shrinking")
        return _map(number, descriptor, nbytes, private=private)
    finally:
        os.close(descriptor)


def anonymous_memory(nbytes: int) -> int:
    """Create ``nbytes`` of shared memory without a name; returns its descriptor."""
    reserve_standard_descriptors()
    return _memfd(nbytes) if hasattr(os, "memfd_create") else _unlinked(nbytes)


def _map(number: int, descriptor: int, nbytes: int, *, private: bool = False) -> Segment:
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
    memory: Bytes = np.frombuffer(mmap.mmap(descriptor, nbytes, access=access), np.uint8)
    return Segment(number, memory, memory.__array_interface__["data"][0])


def _memfd(nbytes: int) -> int:
    import fcntl  # here, so that systems without it can import this module

    descriptor = os.memfd_create("aiofeed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_sealed(descriptor: int) -> bool:
    import fcntl

    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # not a memfd
        return False


def _unlinked(nbytes: int) -> int:
    # multiprocessing.shared_memory uses this module, and keeps the name.
    import _posixshmem  # type: ignore[import-not-found]

    name = f"/aiofeed-{os.getuid()}"
    path = os.path.join(tempfile.gettempdir(), f"aiofeed-{os.getuid()}.lock")
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            lock_file(lock, _LOCK_LIMIT_S)
        except OSError as error:
            raise FeedError(f"no shared memory: {path} cannot be locked: {error}") from error
        try:
            # Left by a crash between the two calls below; the lock excludes any other process.
            _posixshmem.shm_unlink(name)
        except FileNotFoundError:
            pass
        descriptor: int = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _posixshmem.shm_unlink(name)
    finally:
        os.close(lock)
    try:
        _allocate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _allocate(descriptor: int, nbytes: int) -> None:
    # With ftruncate alone, writing to a full file system would raise SIGBUS.
    try:
        os.ftruncate(descriptor, nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EINVAL):
            raise
        room = ""
        if _SHM.is_dir():
            found = os.statvfs(_SHM)
            free, total = (format_bytes(blocks * found.f_frsize) for blocks in (found.f_bavail, found.f_blocks))
            room = f"; {_SHM} has {free} of {total} left"
        raise FeedError(
            f"a batch needs {format_bytes(nbytes)} of shared memory, and the system does not have as much{room}; "
            f"make batches smaller, or give the system more (in a container: --shm-size)"
        ) from error
