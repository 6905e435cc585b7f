"""Small files, a group in one call that does not hold the GIL: ``native_files.c``, built where it can be.

Read by Python, a file takes and gives back the GIL five times, and threads that read or decode, and the training loop,
wait for it in between.
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

# What is read is copied once more: of larger files that takes longer than handing the GIL to and fro.
SMALL = 32 * 1024
# What a call reads at a time: it stays in a core's own cache until it is copied.
CAPACITY = 8 * SMALL
# Buffers that are kept for the next call. Slow storage is read by hundreds of threads, a file each, and needs none.
SPARE = 32


class GroupReader:
    """The library, loaded. May be used by several threads.

    Raises:
        OSError: it cannot be used.
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
        """The contents of regular files; ``None`` for each that is to be read otherwise, for whatever reason.

        Args:
            paths: of the files.
            flags: to open them with.
            max_bytes: of one file; never more than ``SMALL`` are read.
        """
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = memoryview(np.empty(CAPACITY, np.uint8))  # type: ignore[arg-type]
        try:
            return self._fill(memory, paths, flags, min(max_bytes, SMALL))
        finally:
            self._spare.append(memory)

    def _fill(self, memory: memoryview, paths: Sequence[str], flags: int, most: int) -> list[bytes | None]:
        found: list[bytes | None] = []
        address = np.frombuffer(memory, np.uint8).ctypes.data
        while len(found) < len(paths):
            rest = paths[len(found) :]
            try:
                names = os.fsencode("\0".join(rest))
            except (TypeError, ValueError):  # no text, or none that is a name here: whoever opens it says so
                return [*found, *[None] * len(rest)]
            sizes = np.empty(len(rest), np.int64)
            # A name with a NUL in it would be two.
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
    """The library; ``None`` where it was not built, or is of no use."""
    if not LIBRARY.exists():
        return None
    try:
        return GroupReader()
    except (OSError, AttributeError) as error:
        _log.warning("%s cannot be used, files are read without it: %s", LIBRARY, error)
        return None
