"""Addresses: Unix sockets of this user, at which a server or a process with shared tensors listens.

A plain name stands for a socket in a private folder of this user; a path is used as given. A process that was killed
leaves its socket file behind; the next ``Listener`` replaces it. Whether a socket is dead is checked under a lock on
the folder, so that of two processes that start at once one is refused; no lock file is left beside the socket.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiofeed.ipc.peers import Peer, is_alive, peer_of
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.event_loop import reserve_standard_descriptors

log: logging.Logger = logging.getLogger("aiofeed.processes")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# The size of sun_path in sockaddr_un, without the terminating zero.
_MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
_BACKLOG = 64
_POLL_S = 0.02
MAX_CONNECTIONS = 256
# The folder of a socket is locked for some system calls.
LOCK_LIMIT_S = 5.0
_WRITABLE = "use the path of a socket in a writable folder as the address, or set TMPDIR to such a folder"
# After a failed accept (no file descriptors left), before the next one.
_RETRY_S = 0.5


@dataclass(frozen=True)
class AddressKind:
    """The kind of server at an address (feed or tensors), and its error messages.

    Args:
        suffix: File suffix of the socket of a plain name.
        taken: Text for an address where one listens already, and what to do.
        absent: Text for an address where none listens.
        ended: Text for the socket of a dead one.
        start: How to start one.
        what: The functions that use such an address.
        instead: What to do on a system without Unix sockets.
    """

    suffix: str
    taken: tuple[str, str]
    absent: str
    ended: str
    start: str
    what: str
    instead: str


SERVER = AddressKind(
    ".sock",
    ("a server listens", "attach to it, close it, or choose another address"),
    "no server listens",
    "the server has ended that listened",
    "start one with aiofeed.serve(feeder, address)",
    "aiofeed.serve and attach",
    "give each process a Feeder of its own",
)
TENSORS = AddressKind(
    ".tensors",
    ("a process shares tensors", "get those with attach_tensors(), or choose another address for share()"),
    "no process shares tensors",
    "the process has ended that shared tensors",
    "start a process that calls aiofeed.processes.share(tensors, address) and keeps the result",
    "aiofeed.processes.share and attach_tensors",
    "map a file in each process, with numpy.load(path, mmap_mode='r') or torch.from_file(path, shared=True)",
)


def resolve(address: str | os.PathLike[str], kind: AddressKind) -> Path:
    """Return the path of the socket; that of a plain name is in this user's private folder.

    Raises:
        TypeError, ValueError: The address is neither a path nor a plain name, or is too long for a socket.
        FeedError: The private folder belongs to another user, or is open to others; the system has no Unix sockets.
    """
    if not isinstance(address, str | os.PathLike) or not isinstance(text := os.fspath(address), str):
        raise TypeError(
            f"address={address!r}: expected a name or the path of a Unix socket, not {type(address).__name__}"
        )
    if not machine.passes_descriptors():
        raise FeedError(f"{kind.what} need Unix sockets that pass descriptors, which Windows lacks: {kind.instead}")
    if "\0" in text or (isinstance(address, str) and os.sep not in text and not NAME.fullmatch(text)):
        raise ValueError(
            f"address={address!r}: a name has letters, digits, '_', '-' and '.', at most 64; a path has a {os.sep!r}"
        )
    is_name = isinstance(address, str) and os.sep not in text
    path = private_folder() / f"{text}{kind.suffix}" if is_name else Path(text).absolute()
    if (nbytes := len(os.fsencode(path))) > _MAX_PATH_BYTES:
        raise ValueError(
            f"address={address!r}: {path} has {nbytes} bytes, and a socket's path at most {_MAX_PATH_BYTES}; "
            f"use a shorter one, or a plain name"
        )
    return path


def private_folder() -> Path:
    """This user's folder of sockets; created if missing. The system removes it with the session or at the next boot.

    Raises:
        FeedError: It belongs to another user, or is open to others.
    """
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and _is_private(Path(session)):
        folder = Path(session) / "aiofeed"
    else:
        with _writing("no folder for sockets"):
            folder = Path(tempfile.gettempdir()) / f"aiofeed-{os.getuid()}"
    with _writing(f"cannot create the folder {folder} for sockets"):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        raise FeedError(
            f"{folder} must be a folder of yours that is open to nobody else: remove it, `chmod 700` it, "
            f"or use the path of a socket elsewhere as the address"
        )
    return folder


@contextmanager
def _writing(failure: str) -> Iterator[None]:
    """Raise ``FeedError`` for an ``OSError``: what has failed, and why, and which folder to use."""
    try:
        yield
    except OSError as error:
        raise FeedError(f"{failure}: {error.strerror or error}; {_WRITABLE}") from error


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


class Listener:
    """A listening socket, open to this user alone; it replaces the socket of a dead process. Close it.

    Raises:
        FeedError: Another process listens there, or the file there is not a socket.
    """

    def __init__(self, path: Path, kind: AddressKind) -> None:
        self.path = path
        self._retry: asyncio.TimerHandle | None = None
        self.sock: socket.socket = _new_socket()
        try:
            self._bind(kind)
            self.sock.setblocking(False)
        except BaseException:
            self.sock.close()
            raise

    def _bind(self, kind: AddressKind) -> None:
        with _writing(f"no socket can be made in {self.path.parent}"):
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _writing(f"the folder {self.path.parent} cannot be locked"):
                machine.lock_file(folder, LOCK_LIMIT_S)
            if check_free(self.path, kind):
                self.path.unlink()
            with _writing(f"no socket can be made at {self.path}"):
                self.sock.bind(os.fspath(self.path))
            # Nobody can connect before `listen`.
            self.path.chmod(0o600)
            self.sock.listen(_BACKLOG)
            self._identity = _identity(self.path)
        finally:
            os.close(folder)

    def start_accepting(self, accepted: Callable[[socket.socket, Peer], object], connections: Sized) -> None:
        """Accept this user's processes on the running loop.

        Args:
            accepted: Called with each connected socket, which it owns then.
            connections: Those that are open; beyond ``MAX_CONNECTIONS`` new ones are refused.
        """
        asyncio.get_running_loop().add_reader(self.sock.fileno(), self._accept, accepted, connections)

    def stop_accepting(self) -> None:
        """Accept no more connections; on the same loop. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        if self.sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.sock.fileno())

    def _accept(self, accepted: Callable[[socket.socket, Peer], object], connections: Sized) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            log.error("cannot accept a connection at %s, next attempt in %g s: %s", self.path, _RETRY_S, error)
            loop.remove_reader(self.sock.fileno())
            self._retry = loop.call_later(_RETRY_S, self.start_accepting, accepted, connections)
            return
        try:
            peer = peer_of(sock)
        except OSError:
            sock.close()  # the peer has gone
            return
        if peer.uid != os.getuid() or len(connections) >= MAX_CONNECTIONS:
            log.warning("refused a connection of process %d of user %d at %s", peer.pid, peer.uid, self.path)
            sock.close()
            return
        accepted(sock, peer)

    def close(self) -> None:
        """Close the socket and remove its file, unless another process has replaced that. Idempotent."""
        if self.sock.fileno() < 0:
            return
        if self._identity == _identity(self.path):
            self.path.unlink(missing_ok=True)
        self.sock.close()


def check_free(path: Path, kind: AddressKind) -> bool:
    """Check that no process listens at a path; whether a dead process has left its socket there.

    Raises:
        FeedError: A process listens there, or the file there is not a socket.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False  # no such file; or `bind` reports the error
    if not stat.S_ISSOCK(mode):
        raise FeedError(f"{path} exists and is not a socket: choose another address")
    pid = 0
    try:
        sock = _open(path)
        if sock is None:
            return True
        with sock:
            pid = peer_of(sock).pid
    except BlockingIOError:
        pass  # a process listens there and is busy
    who, instead = kind.taken
    raise FeedError(f"{who} at {path} already{f' (pid {pid})' if pid else ''}: {instead}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _new_socket() -> socket.socket:
    reserve_standard_descriptors()
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _open(path: Path) -> socket.socket | None:
    """Connect to the process that listens at a path; ``None`` if none does, or it is dead.

    Raises:
        BlockingIOError: Its backlog is full.
        FeedError: It belongs to another user, or cannot be reached.
    """
    sock = _new_socket()
    try:
        # Do not wait for a process that does not accept: it is there.
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
                f"the process that listens at {path} runs as user {peer.uid}, this process as user {os.getuid()}: "
                f"use an address of your own"
            )
        if not is_alive(peer.pid):
            # A fork of the dead process still holds the listening socket.
            sock.close()
            return None
    except BaseException:
        sock.close()
        raise
    return sock


def connect(path: Path, kind: AddressKind, wait_s: float) -> socket.socket:
    """Return a blocking connection to this user's process that listens at a path; wait until there is one.

    Raises:
        FeedError: There was none within ``wait_s``, it belongs to another user, or it cannot be reached.
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
        raise FeedError(f"the process that listens at {path} accepts no more connections{waited}")
    raise FeedError(f"{kind.ended if path.is_socket() else kind.absent} at {path}{waited}: {kind.start}")
