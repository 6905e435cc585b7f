"""Reads whole files: which may be opened, how many bytes are read, and whether one changed meanwhile."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import logging
import os
import re
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aiofeed import _load_addon

# Far above the size of a sample, far below the memory of a machine.
MAX_BYTES = 1 << 30

# Without O_NONBLOCK, opening a FIFO waits for a writer. The flag has no effect on regular files.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
)
_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)

# A URL, and its scheme.
URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
# What is no path: with a home folder, a URL with one slash, a path of Windows.
_NO_PATH = re.compile(r"~|(s3|gs|az|hf|https?|file):/(?=[^/])|[A-Za-z]:[/\\]")

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
    """Which files a source may read.

    Args:
        max_bytes: The maximum size of a file.
        follow_symlinks: Whether a path may be a link, or lead through a link below ``root``.
        root: The folder that all paths begin with. Links in the path of the folder itself are allowed.
    """

    max_bytes: int = MAX_BYTES
    follow_symlinks: bool = True
    root: str | None = None


_ANY = ReadRules()


def read_file(path: str, rules: ReadRules = _ANY) -> bytes:
    """Return the contents of a regular file; the size 0 is a hint only (files of /proc).

    Raises:
        OSError: An error of the system, or ``ENXIO``: not a regular file; ``EFBIG``: more than ``max_bytes``;
            ``ELOOP``: a link that must not be followed; ``EBUSY`` (transient): the file changed during the read, or the
            read ended before the file.
    """
    descriptor = _open(path, rules)
    try:
        before = os.fstat(descriptor)
        size = before.st_size
        if not stat.S_ISREG(before.st_mode):
            raise _not_regular(path, before.st_mode)
        if size > rules.max_bytes:
            raise too_large(path, f"{size} bytes are", rules.max_bytes)
        # One byte more than the size: shrinking a much larger buffer afterwards takes ten times as long as the read.
        data = os.read(descriptor, size + 1 if size else _UNSIZED)
        if len(data) < size or not size:
            data = _rest(descriptor, data, path, rules.max_bytes)
        # Detects a file that is being written. If the size is the same as before and as many bytes were read, the end
        # needs no further read, so the second fstat replaces one. Not detected: changes within one tick of the file
        # system's clock, and an incomplete file whose writer pauses.
        after = os.fstat(descriptor)
        # A file server may report the old size of a file that ends earlier by now. Files of /proc have the size 0.
        if after.st_size != size or after.st_mtime_ns != before.st_mtime_ns or (size and len(data) != size):
            message = f"the file changed while it was read: from {size} to {after.st_size} bytes, {len(data)} were read"
            raise OSError(errno.EBUSY, message, path)
        return data
    finally:
        os.close(descriptor)


def _open(path: str, rules: ReadRules) -> int:
    try:
        if rules.follow_symlinks:
            return os.open(path, _FLAGS)
        from aiofeed.kernel.sources.links import open_unlinked

        return open_unlinked(path, rules.root, _FLAGS)
    except ValueError as error:  # a NUL in it, or half of a character
        raise OSError(errno.EINVAL, f"it is no path: {error}", path) from None
    except OSError as error:
        # The system refuses to open a socket, without saying that it is one.
        if error.errno in (errno.ENXIO, errno.EOPNOTSUPP) and not stat.S_ISREG(mode := os.stat(path).st_mode):
            raise _not_regular(path, mode) from None
        raise


def open_file(path: str) -> int:
    """Return the descriptor of a regular file.

    Raises:
        OSError: An error of the system, or ``ENXIO``: not a regular file.
    """
    descriptor = _open(path, _ANY)
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path, mode)
    return descriptor


def read_group(reader: GroupReader, paths: Sequence[str], rules: ReadRules) -> Sequence[bytes | None] | None:
    """The contents of small files in one call; ``None`` for each file, or for all, that ``read_file`` must read."""
    if rules.follow_symlinks:
        return reader.read(paths, _FLAGS, rules.max_bytes)
    # The library cannot check the folders below a root for links.
    return reader.read(paths, _FLAGS | _NOFOLLOW, rules.max_bytes) if _NOFOLLOW and rules.root is None else None


def _rest(descriptor: int, data: bytes, path: str, max_bytes: int) -> bytes:
    """``data`` and the rest of the file."""
    parts = [data]
    total = len(data)
    while data:
        if total > max_bytes:
            raise too_large(path, "there are", max_bytes)
        data = os.read(descriptor, _LARGE)
        parts.append(data)
        total += len(data)
    return b"".join(parts) if len(parts) > 2 else parts[0]


def _not_regular(path: str, mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return OSError(errno.ENXIO, f"samples are read from regular files, but this is {kind}", path)


def too_large(path: str, size: str, max_bytes: int) -> OSError:
    """Return the error of a file or object of more than ``max_bytes``."""
    message = f"{size} more than max_bytes={max_bytes} allows; raise max_bytes if such files are expected"
    return OSError(errno.EFBIG, message, path)


def local_path(path: str) -> str | None:
    """Return a path as it is, and that of a ``file://`` URL; ``None`` for a URL that a store reads.

    Raises:
        ValueError: No store reads URLs of this scheme.
    """
    return path if URL.match(path) is None else _load_addon("path_of_url", "a URL")(path)


def check_path(path: str) -> str:
    """Return a path or URL as it is.

    Raises:
        FileNotFoundError: There is none, and it begins with ``~``, as a path of Windows or a URL with one slash.
    """
    match = _NO_PATH.match(path)
    if match is None or (os.name == "nt" and path[1] == ":") or os.path.exists(path):
        return path
    way = "it is a path of Windows, and the system here is another one"
    if match[0] == "~":
        way = f"Python does not expand ~, as a shell does: pass os.path.expanduser({path!r})"
    elif match[1]:
        way = f"a URL has two slashes: {match[1]}://{path[match.end() :]}"
    raise FileNotFoundError(errno.ENOENT, way, path)


# --- Groups of small files, read in one call without the GIL by ``native_files.c`` if it was built. Reading a file in
# Python releases and takes the GIL five times, and each time it competes with decode threads and the training loop.

_log = logging.getLogger("aiofeed.sources")

LIBRARY = Path(__file__).with_name("_native_files.so")
_VERSION = 1

# The largest file that is read: its bytes are copied once more, which for larger files takes longer than the GIL does.
SMALL = 32 * 1024
# The buffer of a call, small enough to stay in the cache of a core until its contents are copied.
CAPACITY = 8 * SMALL
# The number of buffers kept for later calls. Slow storage is read by hundreds of threads, one file each, without them.
SPARE = 32


class GroupReader:
    """The loaded library. Thread-safe.

    Raises:
        OSError: The library cannot be loaded.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        library = ctypes.CDLL(str(path))
        if library.aiofeed_files_version() != _VERSION:
            raise OSError("it was built for another release of aiofeed; install aiofeed again")
        self._read = library.aiofeed_read_group
        self._read.argtypes = [
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_void_p,
        ]
        self._read.restype = ctypes.c_int32
        self._spare: deque[memoryview] = deque(maxlen=SPARE)

    def read(self, paths: Sequence[str], flags: int, max_bytes: int) -> list[bytes | None]:
        """Return the contents of small regular files; ``None`` for each file that must be read in another way.

        Args:
            paths: The paths of the files.
            flags: The flags of ``open``.
            max_bytes: The maximum size of a file, at most ``SMALL``.
        """
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = memoryview(np.empty(CAPACITY, np.uint8))  # type: ignore[arg-type]
        try:
            return self._read_into(memory, paths, flags, min(max_bytes, SMALL))
        finally:
            self._spare.append(memory)

    def _read_into(self, memory: memoryview, paths: Sequence[str], flags: int, most: int) -> list[bytes | None]:
        found: list[bytes | None] = []
        address = np.frombuffer(memory, np.uint8).ctypes.data
        while len(found) < len(paths):
            rest = paths[len(found) :]
            try:
                names = os.fsencode("\0".join(rest))
            except (TypeError, ValueError):  # not a path; Python's open() raises the error
                return [*found, *[None] * len(rest)]
            sizes = np.empty(len(rest), np.int64)
            # A path with a NUL in it would be read as two.
            if names.count(0) != len(rest) - 1:
                return [*found, *[None] * len(rest)]
            read = self._read(names, len(rest), flags, most, address, len(memory), sizes.ctypes.data)
            at = 0
            for size in sizes[:read].tolist():
                if size < 0:
                    found.append(None)
                else:
                    found.append(memory[at : at + size].tobytes())
                    at += size
        return found


@functools.cache
def group_reader() -> GroupReader | None:
    """Return the library; ``None`` if it was not built or cannot be loaded."""
    if not LIBRARY.exists():
        return None
    try:
        return GroupReader()
    except (OSError, AttributeError) as error:
        _log.warning("%s cannot be used, so files are read without it: %s", LIBRARY, error)
        return None


# --- Which data is this

# Files, or parts of them, whose contents identify the data; and the bytes at the head, in the middle and at the end of
# each. 256 files take 5 ms.
SAMPLED = 256
SAMPLE_BYTES = 4 << 10


class Content(NamedTuple):
    """A part of the data of a source, by which they are recognized.

    Args:
        place: The path of a file; as bytes, what is known about the part without reading it.
        start: The first byte of the part in the file.
        end: The byte after its last one; ``None``: the end of the file.
        kind: What a digest of such parts is called.
    """

    place: str | bytes
    start: int = 0
    end: int | None = None
    kind: str = "contents"

    def sample(self) -> bytes:
        """Return the size and some bytes of the part.

        Raises:
            OSError: The file cannot be read.
        """
        if isinstance(self.place, bytes):
            return self.place
        with open(open_file(self.place), "rb", buffering=0) as file:
            size = (os.fstat(file.fileno()).st_size if self.end is None else self.end) - self.start
            is_small = size <= 3 * SAMPLE_BYTES
            found = b"%d" % size
            for at in (0,) if is_small else (0, size // 2, size - SAMPLE_BYTES):
                file.seek(self.start + at)
                found += file.read(max(size, 0) if is_small else SAMPLE_BYTES)
            return found


def evenly(count: int, most: int = SAMPLED) -> list[int]:
    """Return up to ``most`` of ``count`` positions, evenly chosen, with the first and the last one."""
    return list(range(count)) if count <= most else [at * (count - 1) // max(most - 1, 1) for at in range(most)]


def digest_of(parts: Sequence[Content]) -> str:
    """Return the kinds of parts, and a digest of what is known about them and of some files.

    Raises:
        OSError: A file cannot be read.
    """
    known, files = ([part for part in parts if isinstance(part.place, kind)] for kind in (bytes, str))
    chosen = known + [files[at] for at in evenly(len(files))]
    samples = b"".join([hashlib.sha256(part.sample()).digest() for part in chosen])
    return f"{'+'.join(sorted({part.kind for part in chosen}))}={hashlib.sha256(samples).hexdigest()[:32]}"
