"""The process at the other end of a Unix socket: its identity, as the kernel reports it, and whether it still runs."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Interval of the checks on systems without pidfd.
POLL_S = 0.25
# PF_EXITING, include/linux/sched.h.
_PF_EXITING = 0x4


@dataclass(frozen=True)
class Peer:
    """The process at the other end, when it connected or began to listen. An unknown process has the id 0."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process at the other end of a connected Unix socket; ``OSError`` if the kernel does not report it."""
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
    """Return whether a process exists. True for the unknown process id 0."""
    if not pid:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_exiting(pid: int) -> bool:
    """Return whether a process has begun to exit; False if the system does not tell.

    A process closes its devices in the middle of its exit; its pidfd becomes readable only at the end of it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False  # no /proc; or the process is gone, which `is_alive` and the pidfd tell
    state, *rest = stat[stat.rindex(b")") + 2 :].split()
    return state in (b"Z", b"X") or bool(int(rest[5]) & _PF_EXITING)


def describe_exit(status: int | None, memory_hint: str = "") -> str:
    """Say how a process of the user's code ended, from its exit status, which is negative for a signal."""
    if status is None:
        return "ended; its exit status is unknown, because SIGCHLD is ignored or other code has reaped it"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ""
    if -status == signal.SIGKILL:
        hint = f"; the machine or its container may have run out of memory{memory_hint}"
    elif -status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        hint = "; native code of the dataset or source, the decoder or collate_fn crashed"
    return f"was killed by {name} (exit status {status}){hint}"


class ProcessMonitor:
    """Tells whether a process runs, and calls back when it ends; through a pidfd on Linux.

    An open connection to the process does not tell: a fork of the process may hold it open.

    Args:
        pid: The process. 0 (unknown) and this process itself are not monitored and count as running.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pid = 0 if pid == os.getpid() else pid
        self._lock = threading.Lock()
        self._descriptor = -1
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        if not self._pid or not hasattr(os, "pidfd_open"):
            return
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True
        except OSError:
            pass  # too many descriptors, or an older kernel: `is_alive` is asked instead

    def alive(self) -> bool:
        """Return whether the process has neither ended nor begun to exit. For any thread. False once closed."""
        with self._lock:
            if not self._ended and self._pid:
                if self._descriptor >= 0:
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLIN)
                    ended = bool(poll.poll(0))
                else:
                    ended = not is_alive(self._pid)
                self._ended = ended or is_exiting(self._pid)
            return not self._ended

    def call_at_end(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once on the running loop when the process has ended."""
        self._loop = asyncio.get_running_loop()
        if self._ended:
            self._loop.call_soon(self._report, callback)
        elif self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._report, callback)
        elif self._pid:
            self._poll(callback)

    def _poll(self, callback: Callable[[], object]) -> None:
        if self._loop is None:
            return
        if is_alive(self._pid):
            self._timer = self._loop.call_later(POLL_S, self._poll, callback)
        else:
            self._report(callback)

    def _report(self, callback: Callable[[], object]) -> None:
        if self._loop is not None:
            self._stop_calling()
            self._ended = True
            callback()

    def _stop_calling(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor >= 0:
            loop.remove_reader(self._descriptor)

    def close(self) -> None:
        """Stop monitoring: no callback comes any more. On the loop that ``call_at_end`` was called on. Idempotent."""
        self._stop_calling()
        with self._lock:
            descriptor, self._descriptor, self._ended = self._descriptor, -1, True
        if descriptor >= 0:
            os.close(descriptor)
