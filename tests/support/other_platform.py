"""Makes this process look like Windows or macOS to aiofeed. Call ``become`` before ``import aiofeed``.

Modules of aiofeed get views of ``os``, ``socket`` and others without the names that the platform lacks; the standard
library, which would break, keeps the real modules.
"""

from __future__ import annotations

import _socket
import asyncio
import builtins
import ctypes
import importlib
import io
import mmap
import os
import select
import signal
import socket
import struct
import sys
import types
from typing import Any, NoReturn

# By "Availability" in https://docs.python.org/3/library/os.html, socket.html, mmap.html and others.
LINUX_ONLY: dict[types.ModuleType, str] = {
    os: (
        "copy_file_range eventfd memfd_create pidfd_open posix_fadvise posix_fallocate sched_getaffinity "
        "sched_setaffinity splice O_NOATIME O_PATH O_TMPFILE MFD_CLOEXEC MFD_ALLOW_SEALING"
    ),
    socket: "MSG_CMSG_CLOEXEC SO_DOMAIN SO_PEERCRED",
    select: "epoll",
    mmap: "MADV_DONTFORK MADV_HUGEPAGE MAP_POPULATE",
    signal: "SIGPOLL SIGRTMAX SIGRTMIN SIGSTKFLT",
}
POSIX_ONLY: dict[types.ModuleType, str] = {
    os: (
        "chown fchdir fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpriority "
        "getsid getuid killpg lchown mkfifo nice pathconf posix_spawn pread preadv pwrite pwritev readv "
        "register_at_fork sendfile setgid setpgid setpriority setsid setuid statvfs sync sysconf uname wait wait4 "
        "writev WNOHANG O_ASYNC O_CLOEXEC O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC"
    ),
    socket: "AF_UNIX CMSG_LEN CMSG_SPACE MSG_CTRUNC MSG_DONTWAIT MSG_NOSIGNAL SCM_RIGHTS recv_fds send_fds",
    select: "poll",
    mmap: (
        "MADV_DONTNEED MADV_RANDOM MADV_SEQUENTIAL MADV_WILLNEED MAP_ANON MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED "
        "PROT_EXEC PROT_READ PROT_WRITE"
    ),
    signal: (
        "SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIG_BLOCK "
        "alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait"
    ),
}
POSIX_MODULES = ("_posixshmem", "fcntl", "grp", "pwd", "resource", "termios", "uvloop")


def become(platform: str) -> None:
    """Look like "win32" or "darwin"."""
    windows = platform == "win32"
    views = {
        module.__name__: _view(module, set(" ".join(table.get(module, "") for table in tables).split()))
        for tables in [(LINUX_ONLY, POSIX_ONLY) if windows else (LINUX_ONLY,)]
        for module in LINUX_ONLY
    }
    views["sys"] = _view(sys, set(), platform=platform)
    views["ctypes"] = _view(ctypes, set(), CDLL=_no_libc if windows else _libc_of_macos)
    if windows:
        _load_users_of_posix()
        for name in POSIX_MODULES:
            sys.modules[name] = None  # type: ignore[assignment]
        for method in ("add_reader", "add_writer", "add_signal_handler"):  # those of Windows' default event loop
            setattr(asyncio.SelectorEventLoop, method, _not_implemented)
    else:
        socket.socket.setsockopt = _setsockopt_of_macos  # type: ignore[method-assign, assignment]
        socket.socket.getsockopt = _getsockopt_of_macos  # type: ignore[method-assign, assignment]
    real_import, real_open = builtins.__import__, io.open

    def import_(name: str, globals: Any = None, *rest: Any, **more: Any) -> Any:
        if (globals or {}).get("__name__", "").startswith("aiofeed") and name in views:
            return views[name]
        return real_import(name, globals, *rest, **more)

    def open_(file: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(file, str | os.PathLike) and os.fspath(file).startswith(("/proc/", "/sys/fs/cgroup", "/dev/shm")):
            raise FileNotFoundError(2, os.strerror(2), file)
        return real_open(file, *rest, **more)

    builtins.__import__ = import_
    builtins.open = io.open = open_


def _view(module: types.ModuleType, absent: set[str], **replaced: object) -> types.ModuleType:
    """A module with the attributes of another one, without some of them."""

    def attribute(name: str) -> Any:
        if name in absent:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on this platform")
        return getattr(module, name)

    view = types.ModuleType(module.__name__)
    vars(view).update(replaced, __getattr__=attribute)
    return view


def _load_users_of_posix() -> None:
    """Import the packages that use modules of POSIX where there are any."""
    for name in ("concurrent.futures", "multiprocessing.connection", "PIL.Image", "sqlite3", "subprocess", "uuid"):
        importlib.import_module(name)
    for name in ("multiprocessing.shared_memory", "torch.multiprocessing", "torch.utils.data", "aiofiles", "numpy"):
        importlib.import_module(name)


def _not_implemented(*_: object) -> NoReturn:
    raise NotImplementedError


def _no_libc(name: str | None, *rest: Any, **more: Any) -> Any:
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    if name.endswith(".so"):
        raise FileNotFoundError(f"Could not find module {name!r}")
    return ctypes.CDLL(name, *rest, **more)


def _setsockopt_of_macos(self: socket.socket, level: int, option: int, *value: Any) -> None:
    if (level, option) != (socket.SOL_SOCKET, 0x1022):  # SO_NOSIGPIPE
        _socket.socket.setsockopt(self, level, option, *value)


def _getsockopt_of_macos(self: socket.socket, level: int, option: int, *size: int) -> Any:
    if (level, option) == (0, 2):  # SOL_LOCAL, LOCAL_PEERPID
        return struct.unpack("3i", _socket.socket.getsockopt(self, socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return _socket.socket.getsockopt(self, level, option, *size)


def _libc_of_macos(name: str | None, *rest: Any, **more: Any) -> Any:
    """The C library, with the BSD function ``getpeereid``."""
    library = ctypes.CDLL(name, *rest, **more)
    if name is None:

        def getpeereid(descriptor: int, uid: Any, gid: Any) -> int:
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, uid._obj.value, gid._obj.value = struct.unpack("3i", credentials)
            return 0

        library.getpeereid = getpeereid
    return library
