"""A source: the lines of a text file."""

import asyncio
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from aiofeed.kernel.core.faces import BaseSource


class Lines(BaseSource):
    """The lines of a file. Only their places are kept in memory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with open(path, "rb") as file:
            self.offsets = [0, *accumulate(map(len, file))]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def key(self, index: int) -> str:
        """Return the name of a sample in errors."""
        return f"{self.path}:{index + 1}"

    async def read(self, index: int) -> bytes:
        """Return a line. A thread reads, because files have no asynchronous reads."""
        return await asyncio.to_thread(self._read, index)

    async def read_many(self, indices: Sequence[int]) -> list[bytes]:
        """Return several lines: one change of threads for all of them."""
        return await asyncio.to_thread(lambda: [self._read(index) for index in indices])

    def nbytes(self, index: int) -> int:
        """Return the length of a line."""
        return self.offsets[index + 1] - self.offsets[index]

    def _read(self, index: int) -> bytes:
        with Path(self.path).open("rb") as file:
            file.seek(self.offsets[index])
            return file.read(self.nbytes(index))
