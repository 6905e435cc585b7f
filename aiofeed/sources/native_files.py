"""Reads a group of small files in one call without the GIL, by ``native_files.c`` if it was built.

Reading a file in Python releases and takes the GIL five times, and each time it competes with decode threads and the
training loop.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
        """The contents of small regular files; ``None`` for each file that must be read in another way.

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
    """The library; ``None`` if it was not built or cannot be loaded."""
    if not LIBRARY.exists():
        return None
    try:
        return GroupReader()
    except (OSError, AttributeError) as error:
        _log.warning("%s cannot be used, so files are read without it: %s", LIBRARY, error)
        return None
