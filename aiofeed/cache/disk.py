"""Decoded samples in a file, mapped into memory and shared by the processes of a host."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.host import check_max_bytes
from aiofeed.cache.layout import ItemLayout, Layout
from aiofeed.cache.store import SampleStore
from aiofeed.core.errors import CacheError
from aiofeed.core.types import public

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.cache.disk_format import CacheFile

log = logging.getLogger("aiofeed.cache")
# In the place of a decoder's identity.
NO_DECODER = "none, the items of a Dataset"


@public
@dataclass(frozen=True)
class DiskCache:
    """Keep decoded samples in a file: ``cache=DiskCache("train.cache")``.

    The file is filled while the first epoch runs, by all processes that use it, the ranks of a host say; what one
    has written the others need not decode. A later run goes on with it, after a crash as well. Its room on the disk is
    taken when it is made. Each process compares a sample's checksum before it first uses it: what does not match,
    after a crash or on a damaged disk, is decoded again and written anew.

    A file of other data, of a decoder with other settings or of another version is refused with a ``CacheError`` and
    never touched. Data are known by the source's fingerprint (its own, or type, length and keys): files that are
    changed in place, under the same names, are not noticed.

    Of a ``Dataset`` the items are kept: tensors, arrays and numbers, nested, of fixed shapes and dtypes. Each is made
    once, whichever process makes it. It is known by its length, the form of its items and
    ``FromDataset(fingerprint=...)``; else by type, code of ``__getitem__`` and ``repr``, and the first item that is
    taken from the file is asked for once more: a log line says so where it is another now.

    Use a local disk: the lock between processes is ``flock``. Linux and macOS.

    Args:
        path: of the file; its folder has to be there.
        max_bytes: of the file, when it is made; those that are met first are kept. ``None``: room for all.
    """

    path: str | os.PathLike[str]
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"DiskCache takes the path of a file, got {self.path!r}")
        object.__setattr__(self, "path", os.fspath(self.path))
        check_max_bytes("DiskCache", self.max_bytes)
        try:
            import fcntl  # noqa: F401 - whether it is there
        except ImportError:
            raise ValueError('DiskCache needs POSIX file locks, which this system lacks; use cache="host"') from None

    def verify(self) -> tuple[int, ...]:
        """Compare all checksums: the indices of the samples that are damaged and are going to be decoded again.

        Raises:
            CacheError: there is no such file, or it is none of ours, damaged as a whole or cut short.
        """
        from aiofeed.cache.disk_format import checksum, open_file

        file = open_file(str(self.path), create=False)
        if file is None or file.describe() is None:
            raise CacheError(f"there is no cache at {self.path!r}")
        table, rows = file.open_rows()
        kept = np.flatnonzero(table["row"]).tolist()
        return tuple(index for index in kept if _whole(checksum, index, table[index], rows) is None)


class DiskStore(SampleStore):
    """What one process knows of a file: the rows it has written, or compared with their checksums.

    Args:
        samples: length of the source.
        cache: what the user said.
        source: fingerprint of the source.
        decoder: identity of the decoder; ``NO_DECODER`` where a ``Dataset``'s items are kept.
    """

    def __init__(self, samples: int, cache: DiskCache, source: str, decoder: str = NO_DECODER) -> None:
        self._cache = cache
        self._source = source
        self._decoder = decoder
        super().__init__(samples)

    def _blank(self) -> None:
        super()._blank()
        self._file: CacheFile | None = None
        self._table: NDArray[np.void] = np.empty(0, [("row", "<u8"), ("crc", "<u4"), ("unused", "<u4")])
        self._damaged: set[int] = set()
        self._told = False
        self._writes = True
        self._claims = Claims(str(self._cache.path))
        # Whether the file was there, so that what it is of has to be believed.
        self.met = False

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_file", "_table", "_damaged", "_told", "_writes", "_claims", "met")
        return {name: value for name, value in super().__getstate__().items() if name not in mine}

    def _inherit(self) -> None:
        # A lock belongs to an open file, and that is shared with the parent: the child opens it for itself.
        self._blank()

    def begin(self, layout: Layout | None) -> None:
        """Open the file, where there is one, and learn from it what samples look like."""
        super().begin(layout)
        if self.layout is None:
            from aiofeed.cache.disk_format import open_file

            with self._lock:
                file = open_file(self.path, create=False) if self.layout is None else None
                described = None if file is None else file.describe()
                if file is not None and described is not None:
                    self._adopt(file, described, None)
                    self.layout = file.layout
                    self.met = True

    def settle(self, layout: Layout) -> bool:
        """Samples look like this; False where those that are kept look otherwise.

        Raises:
            CacheError: there is no room, or the file has items of another form.
        """
        alike, known = super().settle(layout), self.layout
        if isinstance(known, ItemLayout) and known.template is None:
            # Only the file has said what items look like.
            if not alike:
                raise self.other_form(str(layout))
            self.layout = layout
        return alike

    @property
    def path(self) -> str:
        """Of the file."""
        return str(self._cache.path)

    def other_form(self, here: str) -> CacheError:
        """The error of a file that has items of another form."""
        return self._other(self.path, [f"form of a sample: {self.layout} in the file, {here} here"])

    def claim(self, index: int) -> bool:
        """Whether the calling thread is to make a sample now; False where another, or another process, is at it.

        Raises:
            CacheError: the file can neither be opened nor made.
        """
        with self._lock:
            return self._claims.take(index, self._file)

    def release(self, index: int) -> None:
        """What ``claim`` gave is given back."""
        with self._lock:
            self._claims.release(index)

    def _open(self, layout: Layout) -> None:
        from aiofeed.cache.disk_format import open_file

        path = self.path
        if layout.nbytes * self.samples == 0:
            raise CacheError(f"there is nothing to keep: {self.samples} samples of {layout.nbytes} bytes")
        file = self._claims.begun or open_file(path, create=True)
        assert file is not None
        try:
            with file.locked():
                described = file.describe()
                if described is None:
                    if not file.writable:
                        raise CacheError(f"the cache {path!r} is empty and may not be written to")
                    mine = {"samples": self.samples, "source": self._source, "decoder": self._decoder}
                    described = file.make(mine, layout, self._cache.max_bytes, self._claims.making)
        except OSError as error:
            raise CacheError(f"the cache {path!r} cannot be used: {error}") from error
        self._adopt(file, described, layout)

    def _adopt(self, file: CacheFile, described: dict[str, Any], layout: Layout | None) -> None:
        """Use a file, if it is one for these data and this decoder."""
        compared: list[tuple[str, Any, Any]] = [
            ("samples", described["samples"], self.samples),
            ("decoder", described["decoder"], self._decoder),
            ("form of a sample", file.layout, layout or file.layout),
            ("fingerprint of the source", described["source"], self._source),
        ]
        differ = [f"{what}: {there} in the file, {here} here" for what, there, here in compared if there != here]
        if differ:
            alone = len(differ) == 1 and described["source"] != self._source and self._decoder == NO_DECODER
            says = f". Where the items are the same, FromDataset(dataset, fingerprint={described['source']!r}) says so"
            raise self._other(file.path, differ, says if alone else "")
        if file.capacity < file.samples:
            log.info("the cache %s has room for %d of %d samples", file.path, file.capacity, file.samples)
        self._table, self._arena = file.open_rows()
        self._file, self._claims.begun = file, None
        self._writes = file.writable

    def _other(self, path: str, differ: Sequence[str], way_out: str = "") -> CacheError:
        return CacheError(
            f"the cache {path!r} was filled from something else: {'; '.join(differ)}. Delete the file, or give "
            f"DiskCache another path{way_out}"
        )

    def doubtful(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those whose entry says that they are there and whose checksum was not compared."""
        if self._file is None:
            return indices[:0]
        entries = self._table["row"][indices]
        doubtful: NDArray[np.int64] = indices[(entries != 0) & (self._slots[indices] < 0)]
        if self._damaged and len(doubtful):
            doubtful = np.array([index for index in doubtful.tolist() if index not in self._damaged], np.int64)
        return doubtful

    def check(self, indices: NDArray[np.int64]) -> None:
        """Compare checksums."""
        from aiofeed.cache.disk_format import checksum

        for index in indices.tolist():
            row = _whole(checksum, index, self._table[index], self._arena)
            if row is not None:
                self._slots[index] = row
                continue
            assert self._file is not None
            # Seen in the middle of a write? Once more, when nobody writes.
            with self._lock, self._file.locked():
                row = _whole(checksum, index, self._table[index], self._arena)
                if row is None:
                    self._damaged.add(index)
                    if not self._told:
                        self._told = True
                        log.warning(
                            "the cache %s has damaged samples, number %d the first: they are decoded again",
                            self._file.path,
                            index,
                        )
                else:
                    self._slots[index] = row

    def put(self, index: int, row: NDArray[np.uint8]) -> None:
        """Write a sample, where there is room and nobody has written it."""
        from aiofeed.cache.disk_format import checksum

        file = self._file
        if file is None or not self._writes or self._slots[index] >= 0:
            return
        crc = checksum(index, row)
        try:
            with self._lock, file.locked():
                number = int(self._table["row"][index])
                if number and index not in self._damaged:
                    return  # another process was faster; its row is compared before it is used
                # A place for each, where all have one: then nothing is lost with a process that ends half-way.
                place = index if file.capacity == file.samples else number - 1
                if not 0 <= place < file.capacity or (number and file.capacity < file.samples):
                    fresh = file.next_row()
                    if fresh is None:
                        return
                    place = fresh
                file.write(index, place, row, crc)
                self._damaged.discard(index)
            file.bring_near(place)
            self._slots[index] = place
        except OSError as error:
            with self._lock:
                told, self._writes = not self._writes, False
            if not told:
                log.warning("the cache %s is not written to any more: %s", file.path, str(error))


def _whole(
    checksum: Callable[[int, NDArray[np.uint8]], int], index: int, entry: np.void, rows: NDArray[np.uint8]
) -> int | None:
    """The row of a sample where its checksum matches."""
    row, crc = int(entry["row"]) - 1, int(entry["crc"])
    return row if 0 <= row < len(rows) and checksum(index, rows[row]) == crc else None


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
