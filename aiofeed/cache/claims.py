"""Who is making which sample, among the threads of a process and the processes that share a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiofeed.cache.disk_format import CacheFile


class Claims:
    """The samples that threads of this process are making; called under a lock of the caller's.

    Args:
        path: of the file, which is made, empty, for the first claim.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._taken: dict[int, tuple[CacheFile, int | None]] = {}
        # The file while nobody knows what samples look like.
        self.begun: CacheFile | None = None

    def take(self, index: int, file: CacheFile | None) -> bool:
        """Claim a sample; False where another is at it.

        Args:
            index: of the sample.
            file: in use; ``None``: there is none yet. Then one is claimed at a time: it tells what samples look like.

        Raises:
            CacheError: the file can neither be opened nor made, or is none of ours.
        """
        if index in self._taken or (file is None and self._taken):
            return False
        entry: int | None = index
        if file is None:
            from aiofeed.cache.disk_format import open_file

            file, entry = self.begun or open_file(self._path, create=True), None
            self.begun = file
            assert file is not None
        if not file.claim(entry):
            return False
        if entry is None and file.describe() is not None:
            # Another process has made it since it was looked for: it has entries to claim.
            file.unclaim(None)
            self.begun = None
            return False
        self._taken[index] = (file, entry)
        return True

    def release(self, index: int) -> None:
        """Give a claim back."""
        file, entry = self._taken.pop(index)
        file.unclaim(entry)
        if entry is None and file.made:
            file.unclaim(index)

    @property
    def making(self) -> int | None:
        """The sample that is made while there is no file yet."""
        return next((index for index, (_, entry) in self._taken.items() if entry is None), None)
