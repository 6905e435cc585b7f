"""Who is at the other end of a Unix socket, as the kernel says it, and word of that process's end."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiofeed.core.errors import FeedError, WorkerDiedError
from aiofeed.devices.backend import Event
from aiofeed.processes.ipc.cuda_ipc import SharedEvent

# How often processes are looked at where the kernel does not tell of their end.
LOOK_S = 0.25
# PF_EXITING of Linux.
_EXITING = 0x4


# How soon, and then how seldom, an event is looked at again.
_FIRST_LOOK_S = 20e-6
_LOOK_S = 1e-3


@dataclass(frozen=True)
class Peer:
    """The process at the other end.

    Args:
        pid: its number when it connected (or began to listen); 0 where that is not known.
        uid: its user.
    """

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Who is at the other end of a connected Unix socket.

    Raises:
        OSError: the kernel does not say.
    """
    if hasattr(socket, "SO_PEERCRED"):
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Peer(pid, uid)
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
    if libc.getpeereid(sock.fileno(), ctypes.byref(uid), ctypes.byref(gid)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    pid = 0
    if sys.platform == "darwin":
        pid = sock.getsockopt(0, 2)  # SOL_LOCAL, LOCAL_PEERPID
    return Peer(pid, uid.value)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is not known is taken to."""
    if not pid:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def exiting(pid: int) -> bool:
    """Whether a process has begun to end, as far as the system tells.

    It lets go of its devices in the middle of that, and is known to have ended only afterwards.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False  # no such file system; or ended altogether, which others tell
    state, *rest = stat[stat.rindex(b")") + 2 :].split()
    return state in (b"Z", b"X") or bool(int(rest[5]) & _EXITING)


class ProcessWatch:
    """Word of a process's end, though somebody else, a fork of its, holds its connection open. On a running loop.

    Args:
        pid: the process; 0: nobody is watched.
        ended: called once, when it has.
    """

    def __init__(self, pid: int, ended: Callable[[], object]) -> None:
        self._pid = pid
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = -1
        if not pid or pid == os.getpid():
            return
        if hasattr(os, "pidfd_open"):
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(self._fire)
                return
            except OSError:
                pass  # no room for one, or an older kernel
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._fire)
        else:
            self._look()

    def _look(self) -> None:
        if is_alive(self._pid):
            self._timer = self._loop.call_later(LOOK_S, self._look)
        else:
            self._fire()

    def _fire(self) -> None:
        ended, self._ended = self._ended, _nothing
        self.close()
        ended()

    def close(self) -> None:
        """Watch no more; idempotent."""
        self._ended = _nothing
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._loop.remove_reader(descriptor)
            os.close(descriptor)


def _nothing() -> None:
    pass


class ProcessLiveness:
    """Tells of a process's life as it is now, not as of its last message.

    Where the server dies, its device may drop what it had queued, or complete events whose work was never done. So an
    event of a copy proves that the copy is right only if the server is seen to live after the event was complete.

    Args:
        pid: the process.
        died: makes the error to raise.
    """

    def __init__(self, pid: int, died: Callable[[], FeedError]) -> None:
        self._pid = pid
        self._died = died
        self._lock = threading.Lock()
        self._descriptor = -1
        self._settled = self._ended = False
        if hasattr(os, "pidfd_open"):
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended = True
            except OSError:
                pass  # no room for one, or an older kernel: a signal's number then asks

    def alive(self) -> bool:
        """Whether the process has not ended, nor begun to."""
        with self._lock:
            if self._ended or self._descriptor < 0:
                self._ended = self._ended or not is_alive(self._pid)
            else:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLIN)
                self._ended = bool(poll.poll(0)) or exiting(self._pid)
            return not self._ended

    def check(self) -> None:
        """Raise where it has ended, unless all that was copied is known to be right."""
        if not self._settled and not self.alive():
            raise self._died()

    def wait(self, event: Event | SharedEvent, limit_s: float | None = None) -> None:
        """Wait until work on its memory is complete, and known to be right. For threads of aiofeed's own.

        An event whose server has died may never be complete, so it is looked at and not waited for.

        Raises:
            WorkerDiedError: the process has ended.
            TimeoutError: it took longer than ``limit_s``.
        """
        pause_s, deadline = _FIRST_LOOK_S, None if limit_s is None else time.monotonic() + limit_s
        while not self._complete(event):
            self.check()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"a copy from the server's device memory took longer than {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
        self.check()

    def _complete(self, event: Event | SharedEvent) -> bool:
        try:
            return event.query()
        except RuntimeError:
            self.check()  # the server has died, and what it had with it: that is what is to be heard of
            raise

    def settle(self) -> None:
        """All that was copied is right, and nothing is copied any more: from here on the process may end."""
        self._settled = True

    def close(self) -> None:
        """Ask no more; idempotent."""
        with self._lock:
            descriptor, self._descriptor, self._ended = self._descriptor, -1, True
        if descriptor >= 0:
            os.close(descriptor)


def died(path: object, pid: int) -> WorkerDiedError:
    """The error of a server that ended without a word."""
    who = f" (pid {pid})" if pid else ""
    return WorkerDiedError(f"the server at {path}{who} has died: start it again, and attach again")
