"""Where a server is found: a Unix socket of this user's own, in a folder of this user's own.

A server that was killed leaves its socket behind. Whether one is alive is asked under a lock on the folder, so that of
two servers that start at once one is refused; no file is left beside the socket.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import tempfile
from pathlib import Path

from aiofeed.errors import FeedError
from aiofeed.sharing.peers import is_alive, peer_of

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# What sockaddr_un holds, its final zero included: 108 on Linux, 104 on macOS and the BSDs.
_LONGEST_PATH = 103
_BACKLOG = 64


def resolve(address: str | os.PathLike[str]) -> Path:
    """The path of the socket: of a plain name, in this user's private folder.

    Raises:
        TypeError, ValueError: it is neither a path nor a plain name, or longer than sockets' paths may be.
        FeedError: the private folder is somebody else's, or open to others.
    """
    if not isinstance(address, str | os.PathLike):
        raise TypeError(f"address must be a name or the path of a Unix socket, got {address!r}")
    if not hasattr(socket, "AF_UNIX"):
        raise ValueError("serve and attach need Unix sockets, which this system lacks")
    text = os.fspath(address)
    if isinstance(address, str) and os.sep not in text:
        if not _NAME.fullmatch(text):
            raise ValueError(
                f"address {text!r}: a name has letters, digits, '_', '-' and '.', at most 64; a path has a {os.sep!r}"
            )
        path = private_folder() / f"{text}.sock"
    else:
        path = Path(text).absolute()
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(f"{path}: sockets' paths have at most {_LONGEST_PATH} bytes; give a plain name instead")
    return path


def private_folder() -> Path:
    """This user's folder of sockets, made where it is missing; the system takes it away with the session or the boot.

    Raises:
        FeedError: it is somebody else's, or open to others.
    """
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and _private(Path(session)):
        folder = Path(session) / "aiofeed"
    else:
        folder = Path(tempfile.gettempdir()) / f"aiofeed-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _private(folder):
        raise FeedError(
            f"{folder} must be a folder of yours that is open to nobody else: remove it, `chmod 700` it, "
            f"or give the path of a socket elsewhere as the address"
        )
    return folder


def _private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


class Listener:
    """A listening socket, open to this user alone. Close it.

    Args:
        path: where; the socket of a dead server is replaced.

    Raises:
        FeedError: another server is there, or something that is no socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind()
            self.sock.setblocking(False)
        except BaseException:
            self.sock.close()
            raise

    def _bind(self) -> None:
        try:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise FeedError(f"no socket can be made in {self.path.parent}: {error.strerror}") from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self._clear()
            try:
                self.sock.bind(os.fspath(self.path))
            except OSError as error:
                raise FeedError(f"no socket can be made at {self.path}: {error.strerror}") from error
            # Until it listens nobody can connect.
            self.path.chmod(0o600)
            self.sock.listen(_BACKLOG)
            self._identity = _identity(self.path)
        finally:
            os.close(folder)

    def _clear(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise FeedError(f"{self.path} is there already and is no socket: it stays; give another address")
        pid = 0
        try:
            sock = _open(self.path)
            if sock is not None:
                with sock:
                    pid = peer_of(sock).pid
        except BlockingIOError:
            pass
        else:
            if sock is None:
                self.path.unlink()
                return
        raise FeedError(
            f"a server listens at {self.path} already{f' (pid {pid})' if pid else ''}: attach to it, "
            f"close it, or give another address"
        )

    def close(self) -> None:
        """Stop listening, and take the socket away unless another server's stands there by now. Idempotent."""
        if self.sock.fileno() < 0:
            return
        if self._identity == _identity(self.path):
            self.path.unlink(missing_ok=True)
        self.sock.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open(path: Path) -> socket.socket | None:
    """A connection to whoever listens there; ``None`` where it is nobody who lives.

    Raises:
        BlockingIOError: too many wait to be accepted.
        FeedError: it is another user's, or cannot be reached.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not to be held up by one that does not accept: it is there.
        sock.setblocking(False)
        code = sock.connect_ex(os.fspath(path))
        if code in (errno.ECONNREFUSED, errno.ENOENT):
            sock.close()
            return None
        if code == errno.EAGAIN:
            raise BlockingIOError(code, os.strerror(code))
        if code:
            raise FeedError(f"no connection to {path}: {os.strerror(code)}")
        peer = peer_of(sock)
        if peer.uid != os.getuid():
            raise FeedError(f"{path} is a server of user {peer.uid}, not yours: give another address")
        if not is_alive(peer.pid):
            # A fork of a dead server's still holds its socket.
            sock.close()
            return None
    except BaseException:
        sock.close()
        raise
    return sock


def connect(path: Path) -> socket.socket | None:
    """A blocking connection to this user's server; ``None`` where there is none, or it is too busy just now.

    Raises:
        FeedError: it is another user's, or cannot be reached.
    """
    try:
        sock = _open(path)
    except BlockingIOError:
        return None
    if sock is not None:
        sock.setblocking(True)
    return sock
