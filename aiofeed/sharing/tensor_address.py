"""Where shared tensors are found: a Unix socket that only this user can reach, and that nobody else's can pass for.

A name stands in a folder of this user's own; a path stands where it says. Whoever binds or removes a socket holds a
lock on its folder meanwhile, so that of two that find a dead one, one takes its place and the other finds it taken.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiofeed.errors import FeedError

# `sun_path`, less the zero at its end.
_MOST_BYTES = 107 if sys.platform == "linux" else 103
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_POLL_S = 0.02
_BACKLOG = 64


def socket_path(address: str | os.PathLike[str]) -> Path:
    """The socket of an address.

    Raises:
        TypeError, ValueError: it is neither a name nor a path, or too long for a socket.
    """
    if not isinstance(address, str | os.PathLike):
        raise TypeError(f"address={address!r}: expected a name or a path, not {type(address).__name__}")
    text = os.fspath(address)
    if not isinstance(text, str):
        raise TypeError(f"address={address!r}: expected a path of type str, not {type(text).__name__}")
    if os.sep in text and "\0" not in text:
        path = Path(text).absolute()
    elif _NAME.fullmatch(text) and text not in (".", ".."):
        path = _folder() / f"{text}.tensors"
    else:
        raise ValueError(
            f"address={address!r}: expected a name of up to 64 letters, digits, '.', '_' and '-', or a path with a "
            f"{os.sep!r} in it"
        )
    if (nbytes := len(os.fsencode(path))) > _MOST_BYTES:
        raise ValueError(
            f"address={address!r}: {path} has {nbytes} bytes, and a socket's path at most {_MOST_BYTES}; "
            f"use a shorter one"
        )
    return path


def claim(path: Path) -> socket.socket:
    """A listening socket at a path, in place of a dead one if there is one.

    Raises:
        FeedError: the address is taken, or is not to be had.
    """
    if path.parent == _folder():
        _make_folder(path.parent)
    try:
        with _locked(path.parent):
            if _look(path):
                path.unlink()  # its process has gone without closing it
            return _listen(path)
    except OSError as error:
        raise FeedError(f"tensors cannot be shared at {path}: {error.strerror or error}") from error


def check_free(path: Path) -> None:
    """Raise early what ``claim`` would: before gigabytes are copied for nothing.

    Raises:
        FeedError: the address is taken.
    """
    _look(path)


def release(path: Path, inode: int) -> None:
    """Remove a socket, if it is still the one that was claimed."""
    try:
        with _locked(path.parent):
            if path.lstat().st_ino == inode:
                path.unlink()
    except OSError:
        pass  # somebody has removed it, or its folder, before


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection to whoever shares tensors there; waits for them to come.

    Raises:
        FeedError: nobody has come in time, or another user has.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - time.monotonic(), _POLL_S))
            sock.connect(os.fspath(path))
            if (uid := peer_uid(sock)) != os.getuid():
                raise FeedError(
                    f"the process that shares tensors at {path} runs as user {uid}, this one as user {os.getuid()}; "
                    f"tensors are shared between processes of one user only"
                )
            return sock
        except (FileNotFoundError, ConnectionRefusedError, TimeoutError, BlockingIOError) as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise FeedError(_nobody(path, timeout_s, error)) from None
        except OSError as error:
            sock.close()
            raise FeedError(f"the tensors at {path} cannot be reached: {error.strerror or error}") from error
        except BaseException:
            sock.close()
            raise
        time.sleep(_POLL_S)


def peer_uid(sock: socket.socket) -> int:
    """The user whose process is at the other end."""
    if sys.platform == "linux":
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return int(uid)
    # LOCAL_PEERCRED of macOS and the BSDs: struct xucred begins with its version and the user.
    _, uid = struct.unpack_from("II", sock.getsockopt(0, 1, 76))
    return int(uid)


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"aiofeed-{os.getuid()}"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise FeedError(f"the folder {folder} of shared addresses cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise FeedError(
            f"{folder} is not a folder of this user's alone (of user {found.st_uid}, {stat.filemode(found.st_mode)}); "
            f"remove it, or give share() a path of your own"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl

    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        # Not left to the last close: a process forked meanwhile has the descriptor too.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _look(path: Path) -> bool:
    """Whether a dead socket is in the way; an error where it is something else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise FeedError(f"tensors cannot be shared at {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise FeedError(f"tensors cannot be shared at {path}: there is something that is no socket")
    if found.st_uid != os.getuid():
        raise FeedError(f"tensors cannot be shared at {path}: it belongs to user {found.st_uid}")
    if _is_alive(path):
        raise FeedError(
            f"the address {path} is taken: a process that runs shares tensors there; attach_tensors() gives those, "
            f"and share() takes any other address"
        )
    return True


def _is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        return sock.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
        path.chmod(0o600)  # before anybody can connect: that is refused until it listens
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _nobody(path: Path, timeout_s: float, error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        why = f"the process that shared tensors at {path} has ended"
    elif isinstance(error, FileNotFoundError):
        why = f"nobody shares tensors at {path}"
    else:
        why = f"whoever shares tensors at {path} takes no more connections: {error}"
    return (
        f"{why} (waited {timeout_s:g} s); start that process first: it calls aiofeed.share(tensors, address) and keeps "
        f"what that returns"
    )
