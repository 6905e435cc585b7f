"""Files that are mapped into memory: their sizes are compared before their memory is read."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np


class MappedFiles:
    """The files whose memory rows are read from. To read behind the end of a file ends the process by SIGBUS.

    Args:
        files: For some rows the paths of their files, each with the bytes that are mapped, and the number of rows.
    """

    def __init__(self, files: Iterable[tuple[Iterable[tuple[str, int]], int]]) -> None:
        given = list(files)
        self._files = [[(os.path.abspath(path), nbytes, os.stat(path)) for path, nbytes in paths] for paths, _ in given]
        self._ends = list(accumulate(rows for _, rows in given))

    def check(self, rows: Sequence[int] | np.ndarray[Any, Any] | None = None) -> None:
        """Raise ``OSError`` if a file of some rows is shorter than its mapping, or its status is not known.

        A file that was removed or replaced keeps its memory. No file is opened: there may be more than can be open.
        """
        numbers: Iterable[int] = range(len(self._files))
        if rows is not None and len(self._files) > 1:
            numbers = set(np.searchsorted(self._ends, rows, side="right").tolist())
        for path, nbytes, known in (file for number in numbers for file in self._files[number]):
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue
            if status.st_size < nbytes and os.path.samestat(status, known):
                message = f"the file became shorter while it was mapped: from {nbytes} to {status.st_size} bytes"
                raise OSError(errno.EBUSY, message, path)


def file_of(array: Any) -> list[tuple[str, int]]:
    """Return the file that an array of numpy maps, and the bytes up to the end of the mapping; none of other memory."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    if not isinstance(array, np.memmap) or not os.path.exists(array.filename or ""):
        return []
    return [(str(array.filename), array.offset + array.nbytes)]
