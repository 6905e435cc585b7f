"""One file, whole: what may be opened, how much is read, and whether it stood still meanwhile."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from aiofeed.sources.native_files import GroupReader

# Far above any sample, far below any machine's memory.
MAX_BYTES = 1 << 30

# Without O_NONBLOCK, opening a FIFO waits for a writer, for ever if none comes. Regular files do not know it.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
)
_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
# O_PATH asks no more of a folder than passing through it does.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_CAN_WALK = bool(_NOFOLLOW) and os.open in os.supports_dir_fd

# A file that was left alone for so long before it is read was left alone while it was read: one look, afterwards, shows
# that, and a tiny file takes a sixth less. So long, because a file server has a clock of its own.
SETTLED_S = 300.0
# By the time of the last change of the inode, which nobody can set; Windows has that of creation in its place.
_TELLS_CHANGES = sys.platform != "win32" and hasattr(os, "pread")
# Of larger files the second look costs nothing beside the read.
_TINY = 256 * 1024

_UNSIZED = 16 * 1024
_LARGE = 1024 * 1024

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


@dataclass(frozen=True)
class ReadRules:
    """What a source's files have to keep to.

    Args:
        max_bytes: of one file.
        follow_symlinks: whether a path may be a link, or lead through one below ``root``.
        root: the folder that all paths begin with; links above it are nobody's concern here.
    """

    max_bytes: int = MAX_BYTES
    follow_symlinks: bool = True
    root: str | None = None


_ANY = ReadRules()


def settled_by(now: float) -> float:
    """Files that have not changed since then are settled, at ``now`` as ``time.time()`` has it."""
    return now - SETTLED_S if _TELLS_CHANGES else 0.0


def read_settled(path: str, rules: ReadRules, since: float) -> bytes | None:
    """What ``read_file`` gives, sooner, of a tiny file that has not changed since ``since``; ``None`` of any other.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, _FLAGS) if rules.follow_symlinks else _open_unlinked(path, rules.root)
    try:
        # Nothing is read of what has no end to seek: FIFOs, sockets, terminals; nor of endless devices, whose end is 0.
        size = os.lseek(descriptor, 0, os.SEEK_END)
        if not 0 < size <= _TINY or size > rules.max_bytes:
            return None
        data = os.pread(descriptor, size + 1, 0)
        seen = os.fstat(descriptor)
    except OSError:
        return None  # ``read_file`` finds out what it is, and says it
    finally:
        os.close(descriptor)
    # Some file systems know of no change but that of the contents.
    settled = 0 < seen.st_ctime < since and seen.st_mtime < since and stat.S_ISREG(seen.st_mode)
    return data if settled and len(data) == size == seen.st_size else None


def read_file(path: str, rules: ReadRules = _ANY) -> bytes:
    """The contents of a regular file, to its end: sizes are only hints (files of /proc, short reads).

    Raises:
        OSError: whatever the system says. ``ENXIO``: no regular file. ``EFBIG``: more than ``max_bytes``. ``ELOOP``: a
            link that is not to be followed. ``EBUSY``, which may pass: the file changed meanwhile.
    """
    descriptor = os.open(path, _FLAGS) if rules.follow_symlinks else _open_unlinked(path, rules.root)
    try:
        before = os.fstat(descriptor)
        size = before.st_size
        if not stat.S_ISREG(before.st_mode):
            raise _no_file(path, before.st_mode)
        if size > rules.max_bytes:
            raise _too_large(path, f"{size} bytes are", rules.max_bytes)
        # Exactly the file and a byte: a much larger buffer is cut down afterwards, which costs ten times the read.
        data = os.read(descriptor, size + 1 if size else _UNSIZED)
        if len(data) < size or not size:
            data = _rest(descriptor, data, path, rules.max_bytes)
        # A file that is being written would give half a picture. Of a file that is as long as it was, and was read to
        # that length, no second read has to show that there is no more: so the two calls of fstat cost one read less.
        # What goes unnoticed: changes within one tick of the file system's clock, and a writer that paused all along.
        after = os.fstat(descriptor)
        if after.st_size != size or after.st_mtime_ns != before.st_mtime_ns:
            told = f"the file changed while it was read: from {size} to {after.st_size} bytes"
            raise OSError(errno.EBUSY, told, path)
        return data
    finally:
        os.close(descriptor)


def read_group(reader: GroupReader, paths: Sequence[str], rules: ReadRules) -> Sequence[bytes | None] | None:
    """What ``read_file`` gives, of all small files at once; ``None`` of one that it has to be asked for, or of all."""
    if rules.follow_symlinks:
        return reader.read(paths, _FLAGS, rules.max_bytes)
    # What leads through folders below a root, one at a time, is not the library's to follow.
    return reader.read(paths, _FLAGS | _NOFOLLOW, rules.max_bytes) if _NOFOLLOW and rules.root is None else None


def _rest(descriptor: int, data: bytes, path: str, max_bytes: int) -> bytes:
    """``data`` and what follows it to the end of the file."""
    parts = [data]
    total = len(data)
    while data:
        if total > max_bytes:
            raise _too_large(path, "there are", max_bytes)
        data = os.read(descriptor, _LARGE)
        parts.append(data)
        total += len(data)
    return b"".join(parts) if len(parts) > 2 else parts[0]


def _no_file(path: str, mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return OSError(errno.ENXIO, f"samples are read from regular files, this is {kind}", path)


def _too_large(path: str, there_are: str, max_bytes: int) -> OSError:
    told = f"{there_are} more than max_bytes={max_bytes} allows; raise max_bytes if such files are expected"
    return OSError(errno.EFBIG, told, path)


# --- links


def beneath(root: str, path: str) -> str:
    """``path`` joined to ``root``; ``ValueError`` where it would leave it, links aside."""
    parts = path.replace(os.altsep, os.sep).split(os.sep) if os.altsep else path.split(os.sep)
    if os.path.isabs(path) or os.path.splitdrive(path)[0] or not parts[0]:
        raise ValueError(f"{path!r} is not relative to root={root!r}, as all paths must be where a root is given")
    if os.pardir in parts:
        raise ValueError(f"{path!r} may leave root={root!r}: {os.pardir!r} is not allowed where a root is given")
    return os.path.join(root, path)


def refuse_links(root: str, path: str, known: dict[str, bool]) -> None:
    """``ValueError`` where ``path`` leads through a link below ``root``; what was found out is kept in ``known``."""
    if (link := _first_link(root, path, known)) is not None:
        raise ValueError(f"{path!r} leads through the symbolic link {link!r}, and follow_symlinks=False")


def _first_link(root: str, path: str, known: dict[str, bool]) -> str | None:
    """The uppermost component of ``path`` below ``root`` that is a link. The file's own is not kept in ``known``."""
    at = len(os.path.join(root, ""))
    while (at := path.find(os.sep, at)) >= 0:
        folder = path[:at]
        if folder not in known:
            known[folder] = os.path.islink(folder)
        if known[folder]:
            return folder
        at += 1
    return path if os.path.islink(path) else None


def _open_unlinked(path: str, root: str | None) -> int:
    """Open ``path`` without following a link: its last component, or all below ``root``.

    Listing looked for links already. Here they are looked for by the very calls that open, so that one put in place
    since then leads nowhere either.
    """
    if root is None:
        root, name = os.path.split(path)
        parts = [name]
    else:
        prefix = os.path.join(root, "")
        if not path.startswith(prefix):
            raise OSError(errno.EPERM, f"not below root={root!r}", path)
        parts = [part for part in path[len(prefix) :].split(os.sep) if part not in ("", os.curdir)]
    if not _CAN_WALK:  # Windows; what is swapped between these two lines goes unnoticed
        if (link := _first_link(root, path, {})) is not None:
            raise _is_link(path, link)
        return os.open(path, _FLAGS)
    try:
        return _walk(root or os.curdir, parts)
    except OSError as error:
        # A link where a folder is wanted is reported as ENOTDIR.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and (link := _first_link(root, path, {})) is not None:
            raise _is_link(path, link) from None
        raise OSError(error.errno, error.strerror, path) from None


def _walk(root: str, parts: list[str]) -> int:
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            if part == os.pardir:
                raise OSError(errno.EPERM, f"{os.pardir!r} leads out")
            inner = os.open(part, _FOLDER | _NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], _FLAGS | _NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def _is_link(path: str, link: str) -> OSError:
    what = "it is a symbolic link" if link == path else f"it leads through the symbolic link {link!r}"
    return OSError(errno.ELOOP, f"{what}, and follow_symlinks=False", path)
