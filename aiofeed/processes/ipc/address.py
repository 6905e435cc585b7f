"""Where a server, or whoever shares tensors, is found: a Unix socket of this user's own.

A name stands in a folder of this user's alone; a path stands where it says. Who was killed leaves a socket behind.
Whether anybody lives there is asked under a lock on the folder, so that of two that start at once one is refused; no
file is left beside the socket.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from aiofeed.core.errors import FeedError
from aiofeed.processes.ipc.peers import is_alive, peer_of

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# What sockaddr_un holds, less the zero at its end.
_MOST_BYTES = 107 if sys.platform == "linux" else 103
_BACKLOG = 64
_POLL_S = 0.02


@dataclass(frozen=True)
class AddressKind:
    """What is found at an address, in words for errors.

    Args:
        suffix: of the socket of a plain name.
        taken: who is there already, and what to do.
        absent: that nobody is.
        ended: that somebody was.
        start: what would help.
    """

    suffix: str
    taken: tuple[str, str]
    absent: str
    ended: str
    start: str


SERVER = AddressKind(
    ".sock",
    ("a server listens", "attach to it, close it, or give another address"),
    "no server listens",
    "the server has ended that listened",
    "start one with aiofeed.serve(feeder, address)",
)
TENSORS = AddressKind(
    ".tensors",
    ("a process shares tensors", "attach_tensors() gives those, and share() takes any other address"),
    "nobody shares tensors",
    "the process has ended that shared tensors",
    "start that process first: it calls aiofeed.share(tensors, address) and keeps what that returns",
)


def resolve(address: str | os.PathLike[str], kind: AddressKind) -> Path:
    """The path of the socket: of a plain name, in this user's private folder.

    Raises:
        TypeError, ValueError: it is neither a path nor a plain name, or longer than sockets' paths may be.
        FeedError: the private folder is somebody else's, or open to others.
    """
    if not isinstance(address, str | os.PathLike) or not isinstance(text := os.fspath(address), str):
        raise TypeError(
            f"address={address!r}: expected a name or the path of a Unix socket, not {type(address).__name__}"
        )
    if not hasattr(socket, "AF_UNIX"):
        raise ValueError("what processes share needs Unix sockets, which this system lacks")
    if "\0" in text or (isinstance(address, str) and os.sep not in text and not _NAME.fullmatch(text)):
        raise ValueError(
            f"address={address!r}: a name has letters, digits, '_', '-' and '.', at most 64; a path has a {os.sep!r}"
        )
    named = isinstance(address, str) and os.sep not in text
    path = private_folder() / f"{text}{kind.suffix}" if named else Path(text).absolute()
    if (nbytes := len(os.fsencode(path))) > _MOST_BYTES:
        raise ValueError(
            f"address={address!r}: {path} has {nbytes} bytes, and a socket's path at most {_MOST_BYTES}; "
            f"use a shorter one, or a plain name"
        )
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
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise FeedError(f"the folder {folder} of addresses cannot be made: {error.strerror}") from error
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
        path: where; the socket of a dead process is replaced.
        kind: of what listens.

    Raises:
        FeedError: another one is there, or something that is no socket.
    """

    def __init__(self, path: Path, kind: AddressKind) -> None:
        self.path = path
        self._kind = kind
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
            if _is_dead(self.path, self._kind):
                self.path.unlink()
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

    def close(self) -> None:
        """Stop listening, and take the socket away unless another one stands there by now. Idempotent."""
        if self.sock.fileno() < 0:
            return
        if self._identity == _identity(self.path):
            self.path.unlink(missing_ok=True)
        self.sock.close()


def check_free(path: Path, kind: AddressKind) -> None:
    """Raise early what a ``Listener`` would: before gigabytes are copied for nothing.

    Raises:
        FeedError: the address is taken.
    """
    _is_dead(path, kind)


def _is_dead(path: Path, kind: AddressKind) -> bool:
    """Whether the socket of a dead process is in the way; ``FeedError`` where it is anything else."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False  # nothing is there, or binding says what is wrong
    if not stat.S_ISSOCK(mode):
        raise FeedError(f"{path} is there already and is no socket: it stays; give another address")
    pid = 0
    try:
        sock = _open(path)
        if sock is None:
            return True
        with sock:
            pid = peer_of(sock).pid
    except BlockingIOError:
        pass  # whoever it is has much to do
    who, instead = kind.taken
    raise FeedError(f"{who} at {path} already{f' (pid {pid})' if pid else ''}: {instead}")


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
            raise FeedError(f"{path} cannot be reached: {os.strerror(code)}")
        peer = peer_of(sock)
        if peer.uid != os.getuid():
            raise FeedError(
                f"what listens at {path} runs as user {peer.uid}, this process as user {os.getuid()}: "
                f"give an address of your own"
            )
        if not is_alive(peer.pid):
            # A fork of a dead server's still holds its socket.
            sock.close()
            return None
    except BaseException:
        sock.close()
        raise
    return sock


def connect(path: Path, kind: AddressKind, wait_s: float) -> socket.socket:
    """A blocking connection to this user's process that listens there; waits, blocking, for it to come.

    Raises:
        FeedError: nobody came in time, it is another user's, or it cannot be reached.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            sock, busy = _open(path), False
        except BlockingIOError:
            sock, busy = None, True
        if sock is not None:
            sock.setblocking(True)
            return sock
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    waited = f" (waited {wait_s:g} s)" if wait_s else ""
    if busy:
        raise FeedError(f"whatever listens at {path} takes no more connections{waited}")
    raise FeedError(f"{kind.ended if path.is_socket() else kind.absent} at {path}{waited}: {kind.start}")
