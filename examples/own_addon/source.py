"""A source: the lines of a text file."""

import asyncio
import os
from itertools import accumulate
from pathlib import Path


class Lines:
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

    def _read(self, index: int) -> bytes:
        start, stop = self.offsets[index : index + 2]
        with Path(self.path).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)
