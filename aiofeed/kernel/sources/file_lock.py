"""Locks of files that several processes write."""

from __future__ import annotations

import contextlib
import os
import time

_LOCK_POLL_S = 0.002


def lock_file(descriptor: int, limit_s: float) -> None:
    """Lock an open file or folder with ``flock``; no other process locks it then.

    Raises:
        TimeoutError: Another process has held the lock for ``limit_s``; the message names it. Each process that may
            read a file can lock it.
    """
    import fcntl  # here, so that systems without it can import this module

    deadline = time.monotonic() + limit_s
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = _lock_holder(descriptor)
                raise TimeoutError(f"{holder} has locked it for more than {limit_s:g} s; is it stopped?") from None
            time.sleep(_LOCK_POLL_S)


def _lock_holder(descriptor: int) -> str:
    """Return the process that holds the lock, from ``/proc/locks``, where Linux lists them by device and inode."""
    status = os.fstat(descriptor)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/locks", encoding="ascii") as locks:
        for fields in map(str.split, locks):
            if fields[1] == "FLOCK" and fields[5] == file:
                return f"process {fields[4]}"
    return "another process"
