"""Shared memory without a name: made by one process, passed on as a descriptor, gone with the last that maps it.

On Linux it is a memfd, sealed so that it cannot shrink under whoever maps it: an access is never a bus error. Where
there are only named segments (macOS), the name lives for as long as it takes to open and unlink it, under a lock. One
that is found while the lock is held was left by a crash in between, and is swept: it can be nobody else's.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from aiofeed.core.errors import FeedError
from aiofeed.core.formatting import format_bytes
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.runtime import machine
from aiofeed.runtime.buffers import Bytes

GRAIN = 64 * 1024
_SHM = Path("/dev/shm")  # where Linux keeps named segments; macOS keeps them nowhere that can be seen


@dataclass(frozen=True, eq=False)
class Segment:
    """Mapped shared memory.

    Args:
        number: what its owner calls it.
        memory: all of its bytes.
        address: where they are mapped.
    """

    number: int
    memory: Bytes
    address: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes


def create(number: int, nbytes: int) -> tuple[Segment, int]:
    """New memory of at least ``nbytes``, and the descriptor to pass on.

    Raises:
        FeedError: there is no room for it; the message has the figures.
    """
    nbytes = -(-nbytes // GRAIN) * GRAIN
    free = machine.free_memory()
    if nbytes > free:
        raise FeedError(
            f"a batch needs {format_bytes(nbytes)} of shared memory, and {format_bytes(free)} are left to this machine "
            f"or container; make batches smaller, or raise the container's memory limit"
        )
    descriptor = anonymous(nbytes)
    try:
        return _map(number, descriptor, nbytes), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def adopt(number: int, nbytes: int, descriptor: int) -> Segment:
    """Map memory that another process has made; the descriptor is closed.

    Raises:
        WireError: it is not as large as was said, or may shrink.
    """
    try:
        size = os.fstat(descriptor).st_size
        if nbytes < 1 or size < nbytes:
            raise ProtocolError(f"a segment of {size} bytes where {nbytes} were announced")
        if hasattr(os, "memfd_create") and not _sealed(descriptor):
            raise ProtocolError("a segment that may shrink while it is read")
        return _map(number, descriptor, nbytes)
    finally:
        os.close(descriptor)


def anonymous(nbytes: int) -> int:
    """A descriptor of ``nbytes`` of shared memory without a name."""
    return _memfd(nbytes) if hasattr(os, "memfd_create") else _unlinked(nbytes)


def _map(number: int, descriptor: int, nbytes: int) -> Segment:
    memory: Bytes = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    return Segment(number, memory, memory.__array_interface__["data"][0])


def _memfd(nbytes: int) -> int:
    descriptor = os.memfd_create("aiofeed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sealed(descriptor: int) -> bool:
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no memfd
        return False


class _NamedMemory(Protocol):
    def shm_open(self, path: str, flags: int, mode: int = 0o777) -> int: ...

    def shm_unlink(self, path: str) -> None: ...


def _unlinked(nbytes: int) -> int:
    import _posixshmem  # type: ignore[import-not-found]  # the only way there is; multiprocessing.shared_memory stands on it and keeps the name

    named = cast("_NamedMemory", _posixshmem)
    name = segment_name()
    lock = os.open(_lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            named.shm_unlink(name)  # left by a crash between the two lines below: the lock is ours
        except FileNotFoundError:
            pass
        descriptor = named.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        named.shm_unlink(name)
    finally:
        os.close(lock)
    try:
        _reserve(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def segment_name() -> str:
    """The name that a named segment of this user has for a moment."""
    return f"/aiofeed-{os.getuid()}"


def _lock_path() -> str:
    return os.path.join(tempfile.gettempdir(), f"aiofeed-{os.getuid()}.lock")


def _reserve(descriptor: int, nbytes: int) -> None:
    # Without its pages a full file system shows as a bus error, at the first byte that does not fit.
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
            room = f"; {_SHM} has {free} of {total}"
        raise FeedError(
            f"a batch needs {format_bytes(nbytes)} of shared memory, and the system has not as much{room}; "
            f"make batches smaller, or give it more (in a container: --shm-size)"
        ) from error
