"""File format of a ``DiskCache``: a header, a table with an entry per sample, rows, and records.

    0       magic, length and CRC-32 of the description (0 until the file is complete), number of rows in use, number of
            units of records in use
    40      the description, JSON; for a ``Dataset``'s items it includes their structure
    table   an entry of 16 bytes per sample: number of its row + 1 (0: none), or the slot number of
            its record + 1, see ``store.py``; CRC-32 of index and row or record
    rows    at a multiple of 4096, one after the other
    records at a multiple of 4096, in units of 64 bytes, see ``layout.py``; the file grows with them

Header and table are little-endian. Processes write with ``pwrite`` under an exclusive ``flock``, the row or record
before its entry, and never over a record. Reading takes no lock: an entry is used only after its checksum was verified,
so the order in which writes reach the disk does not matter. A process that makes an item may claim it by locking the
bytes of its entry, or byte 0 before there are entries. Such locks end with the open file, do not conflict with the
``flock``, and only save work: the file is correct without them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import stat
import struct
import sys
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import msgspec
import numpy as np

from aiofeed.cache.layout import RECORDS, UNIT, ItemLayout, Layout, layout_from_file
from aiofeed.cache.store import RECORD, record_slot, units_of
from aiofeed.kernel.core.errors import CacheError
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.sources.file_lock import lock_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1
_MAGIC = b"aiofeed samples\n"
_HEAD = struct.Struct("<16sIIQ")
_USED = struct.Struct("<Q")
_USED_AT = 24
_USED_UNITS_AT = 32
_DESCRIPTION_AT = 40
_ENTRY = struct.Struct("<QII")
_ENTRY_TYPE = np.dtype([("row", "<u8"), ("crc", "<u4"), ("unused", "<u4")])
_PAGE = 4096
# What an ``EncodedCache`` was until version 0.9: an SQLite database with this application's id.
_DATABASE, _DATABASE_AT = b"aFec", 68
# Locks that belong to an open file, not to a process. On systems other than Linux they conflict with the flock.
_LINUX = sys.platform == "linux" and struct.calcsize("l") == 8
_OWN_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None) if _LINUX else None
_FLOCK = struct.Struct("hhqqi4x")
# A write takes milliseconds. A process that holds the lock for longer was probably stopped, by Ctrl-Z or a debugger.
LOCK_LIMIT_S = 5.0


class _Version(TypedDict):
    version: int


class Description(_Version):
    """The description in the header; ``form``, ``types`` and ``told`` are those of an ``ItemLayout``."""

    samples: Annotated[int, msgspec.Meta(ge=1, lt=1 << 60)]
    capacity: Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
    source: str
    decoder: str
    shape: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]]
    dtype: str
    torch_dtype: str | None
    tensor: bool
    form: NotRequired[str]
    types: NotRequired[list[str]]
    told: NotRequired[str]
    max_bytes: NotRequired[int | None]


class CacheFile:
    """An open file. It is closed when nothing refers to it any more.

    Args:
        path: Path of an existing file.
        created: Whether this process has created it.
    """

    _least_used: tuple[int, int] | None = None

    def __init__(self, path: str, *, created: bool = False) -> None:
        self.path = path
        self.created = created
        self.writable: bool = True
        flags = os.O_CLOEXEC | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self._fd = os.open(path, os.O_RDWR | flags)
        except OSError as error:
            if error.errno == errno.EISDIR:
                raise CacheError(f"DiskCache: {path!r} is a folder; name a file in it") from error
            if error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
                raise
            self._fd = os.open(path, os.O_RDONLY | flags)
            self.writable = False
        # Unlike a `__del__`, it does not run at interpreter exit, when modules may be gone.
        weakref.finalize(self, os.close, self._fd).atexit = False
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise CacheError(f"DiskCache: {path!r} is not a regular file; choose another path")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the file, so that no other process writes. Threads of this process need a lock of their own.

        Raises:
            TimeoutError: Another process holds the lock for longer than a write takes.
        """
        lock_file(self._fd, LOCK_LIMIT_S)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def claim(self, index: int | None) -> bool:
        """Claim an item, or with ``None`` the first item of an empty file; False if another process has claimed it.

        The claim ends with the open file at the latest. On systems without such locks every claim succeeds.
        """
        return self._lock_entry(index, fcntl.F_WRLCK)

    def release(self, index: int | None) -> None:
        """End a claim."""
        self._lock_entry(index, fcntl.F_UNLCK)

    @property
    def has_entries(self) -> bool:
        """Return whether the offsets of its entries are known."""
        return hasattr(self, "_table_at")

    def _lock_entry(self, index: int | None, kind: int) -> bool:
        if _OWN_LOCK is None or not self.writable:
            return True
        at, nbytes = (0, 1) if index is None else (self._table_at + index * _ENTRY.size, _ENTRY.size)
        try:
            fcntl.fcntl(self._fd, _OWN_LOCK, _FLOCK.pack(kind, os.SEEK_SET, at, nbytes, 0))
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

    def describe(self) -> Description | None:
        """Return the description; ``None`` if the file is empty or its creation was interrupted.

        Raises:
            CacheError: The file is not a cache, has a header that is damaged, another version, or is too short.
        """
        head = self._read(_HEAD.size, 0)
        if not head:
            return None
        if not head.startswith(_MAGIC):
            if self._read(len(_DATABASE), _DATABASE_AT) == _DATABASE:
                raise self._unusable("was written by the EncodedCache of an older aiofeed, a database")
            raise CacheError(f"{self.path!r} is not a cache of samples; choose another path")
        if len(head) < _HEAD.size:
            return None
        _, length, crc, _ = _HEAD.unpack(head)
        if not length:
            return None
        text = self._read(length, _DESCRIPTION_AT)
        if zlib.crc32(text) != crc:
            raise self._unusable("has a header that is damaged")
        try:
            content = json.loads(text)
            version = msgspec.convert(content, _Version)["version"]
            if version != VERSION:
                raise self._unusable(f"has version {version}, this aiofeed has {VERSION}")
            described = msgspec.convert(content, Description)
            self._set_offsets(described, length)
        # A program that writes a valid checksum may write anything: RecursionError is a deep nesting, a KeyError a
        # missing part of an item's layout, a TypeError a dtype that does not exist.
        except (ValueError, TypeError, KeyError, RecursionError, msgspec.MsgspecError) as error:
            raise self._unusable(f"has a header that is damaged ({error})") from error
        self.check_size()
        return described

    def _set_offsets(self, described: Description, length: int) -> None:
        self.samples: int = described["samples"]
        self.capacity: int = described["capacity"]
        self.layout: Layout = _described_layout(described)
        self._table_at = _next_page(_DESCRIPTION_AT + length)
        self._rows_at = _next_page(self._table_at + self.samples * _ENTRY.size)
        self._end = self._rows_at + self.capacity * self.layout.nbytes
        self._records_at = _next_page(self._end)
        # 37 bits of a slot number count units.
        self._records_end = min(described.get("max_bytes") or 1 << 43, 1 << 43)

    def create(
        self, samples: int, source: str, decoder: str, layout: Layout, max_bytes: int | None, claimed: list[int]
    ) -> Description:
        """Write the header and allocate all disk space, inside ``locked``. Returns the description.

        Args:
            samples: Length of the source.
            source: Fingerprint of the source.
            decoder: Identity of the decoder.
            layout: Layout of a sample.
            max_bytes: Largest size of the file, now and later.
            claimed: Items that are made but not written; they are claimed before other processes see the header.

        Raises:
            CacheError: There is no room.
        """
        row = layout.nbytes
        described: Description = {
            "version": VERSION,
            "samples": samples,
            "source": source,
            "decoder": decoder,
            "shape": list(layout.shape),
            "dtype": layout.dtype,
            "torch_dtype": layout.torch_dtype,
            "tensor": layout.tensor,
            "capacity": samples if row else 0,
            "max_bytes": max_bytes,
        }
        if isinstance(layout, ItemLayout):
            described |= {"form": layout.form, "types": list(layout.types), "told": layout.description}
        # The length must not depend on the capacity.
        length = len(json.dumps(described)) + 20
        self._set_offsets(described, length)
        least = self._rows_at + (row or UNIT)
        if max_bytes is not None and row:
            described["capacity"] = min(samples, max((max_bytes - self._rows_at) // row, 0))
        if max_bytes is not None and max_bytes < least:
            self.remove_if_empty()
            raise CacheError(
                f"DiskCache(max_bytes={max_bytes}) has no room for a single sample: one takes {format_bytes(least)} "
                f"({least} bytes)" + (f", all of them {format_bytes(self._end)}" if row else "")
            )
        text = json.dumps(described).ljust(length).encode()
        self._set_offsets(described, length)
        self._write(_HEAD.pack(_MAGIC, 0, 0, 0), 0)
        self._reserve()
        self._write(text, _DESCRIPTION_AT)
        os.fsync(self._fd)
        for index in claimed:
            self.claim(index)
        self._write(_HEAD.pack(_MAGIC, length, zlib.crc32(text), 0), 0)
        os.fsync(self._fd)
        return described

    def _reserve(self) -> None:
        folder = os.path.dirname(os.path.abspath(self.path))
        try:
            free = shutil.disk_usage(folder).free
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, self._end)
            else:
                if free < self._end:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.ftruncate(self._fd, self._end)
        except OSError as error:
            os.ftruncate(self._fd, 0)
            self.remove_if_empty()
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            raise CacheError(
                f"the cache {self.path!r} needs {format_bytes(self._end)} ({self._end} bytes) for {self.capacity} "
                f"samples, and {format_bytes(free)} are free in {folder!r} ({os.strerror(error.errno or 0)}): "
                f"free some space, choose another path, or cache fewer samples with DiskCache(path, max_bytes=...)"
            ) from error

    def remove_if_empty(self) -> None:
        """Remove the file, inside ``locked``, if this object created it and nothing was written."""
        if self.created and not os.fstat(self._fd).st_size:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    @property
    def removed(self) -> bool:
        """Return whether the file has been removed, as by another process before it could write the header."""
        return not os.fstat(self._fd).st_nlink

    def open_rows(self) -> NDArray[np.uint8]:
        """Return the rows as a read-only view of shared memory, which shows what other processes write.

        Call ``check_size`` before each use. A view of a file that another program has truncated ends the process by
        SIGBUS. Reading rows by system calls would leave no gap, but epochs of 150 KB samples took 1.4 times as long.
        """
        memory = mmap.mmap(self._fd, self._end, access=mmap.ACCESS_READ)
        rows = np.frombuffer(memory, np.uint8, self.capacity * self.layout.nbytes, self._rows_at)
        self._rows = rows.reshape(self.capacity, self.layout.nbytes)
        return self._rows

    def check_size(self) -> None:
        """Raise ``CacheError`` if another program has truncated the file."""
        if os.fstat(self._fd).st_size < self._end:
            raise self._truncated()

    def slot_of(self, index: int) -> int | None:
        """Return the number of a sample's slot; ``None`` if it was not written."""
        return self._entry(index)[0]

    def table(self) -> NDArray[np.void]:
        """Return a copy of all entries."""
        self.check_size()
        return np.frombuffer(self._read(self.samples * _ENTRY.size, self._table_at), _ENTRY_TYPE)

    def valid_slot(self, index: int) -> int | None:
        """Return the number of a sample's slot if its checksum matches; call ``open_rows`` before."""
        slot, crc = self._entry(index)
        self.check_size()
        if slot is None or self.capacity <= slot < RECORD or self._end_of(slot) > os.fstat(self._fd).st_size:
            return None
        data = self._rows[slot] if slot < RECORD else self.record(slot)
        return slot if checksum(index, data) == crc else None

    def record(self, slot: int) -> NDArray[np.uint8]:
        """Return a record, in memory of its own."""
        end, memory = self._end_of(slot), np.empty(units_of(slot)[1] * UNIT, np.uint8)
        try:
            if os.preadv(self._fd, [memory.data], end - memory.nbytes) == memory.nbytes:
                return memory
        except OSError as error:
            raise self._unusable(f"cannot be read: {error}") from error
        raise self._truncated(end)

    def _end_of(self, slot: int) -> int:
        if slot < RECORD:
            return self._rows_at + (slot + 1) * self.layout.nbytes
        return self._records_at + sum(units_of(slot)) * UNIT

    def _entry(self, index: int) -> tuple[int | None, int]:
        entry = self._read(_ENTRY.size, self._table_at + index * _ENTRY.size)
        if len(entry) < _ENTRY.size:
            raise self._truncated()
        number, crc, _ = _ENTRY.unpack(entry)
        return (number - 1 if number else None), crc

    def _truncated(self, end: int = 0) -> CacheError:
        return self._unusable(f"is truncated: it has {os.fstat(self._fd).st_size} of {end or self._end} bytes")

    def next_row(self) -> int | None:
        """Return the number of an unused row, inside ``locked``; ``None`` if all are in use."""
        used = max(self._used(_USED_AT), self._counted()[0])
        if used >= self.capacity:
            return None
        self._write(_USED.pack(used + 1), _USED_AT)
        return used

    def next_record(self, units: int) -> int | None:
        """Return the slot number of a new record of so many units, inside ``locked``; ``None`` if there is no room."""
        used = max(self._used(_USED_UNITS_AT), self._counted()[1])
        if self._records_at + (used + units) * UNIT > self._records_end:
            return None
        self._write(_USED.pack(used + units), _USED_UNITS_AT)
        return record_slot(used, units)

    def _used(self, at: int) -> int:
        return int(_USED.unpack(self._read(_USED.size, at))[0])

    def _counted(self) -> tuple[int, int]:
        """Return the rows and units that the table uses: after a power failure more than the header counts."""
        if self._least_used is None:
            numbers, size = self.table()["row"].astype(np.int64), os.fstat(self._fd).st_size
            ends = [self._end_of(slot) for slot in (numbers[numbers > RECORD] - 1).tolist()]
            units = (max((end for end in ends if end <= size), default=self._records_at) - self._records_at) // UNIT
            self._least_used = int(numbers[numbers <= RECORD].max(initial=0)), units
        return self._least_used

    def write(self, index: int, slot: int, data: NDArray[np.uint8]) -> None:
        """Write a row or record, then its entry, inside ``locked``."""
        self._write(data.data, self._end_of(slot) - data.nbytes)
        self._write(_ENTRY.pack(slot + 1, checksum(index, data), 0), self._table_at + index * _ENTRY.size)

    def _read(self, nbytes: int, at: int) -> bytes:
        try:
            return os.pread(self._fd, nbytes, at)
        except OSError as error:
            raise self._unusable(f"cannot be read: {error}") from error

    def _unusable(self, problem: str) -> CacheError:
        return CacheError(f"the cache {self.path!r} {problem}: delete the file, or choose another path")

    def _write(self, data: Any, at: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            count = os.pwrite(self._fd, view, at)
            view, at = view[count:], at + count


def checksum(index: int, row: NDArray[np.uint8]) -> int:
    """Return the CRC-32 of a sample's index and its row, so that the row of one sample is never taken for another's."""
    return zlib.crc32(row.data, zlib.crc32(index.to_bytes(8, "little")))


def open_file(path: str, *, create: bool) -> CacheFile | None:
    """Open the file at a path; ``None`` if it does not exist and ``create`` is false."""
    try:
        return CacheFile(path)
    except FileNotFoundError:
        if not create:
            return None
    except OSError as error:
        raise CacheError(f"the cache {path!r} cannot be opened: {error}") from error
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666))
        return CacheFile(path, created=True)
    except OSError as error:
        folder = os.path.dirname(path) or "."
        hint = f"there is no folder {folder!r}: create it first"
        if os.path.isdir(folder):
            hint = "choose a path in a writable folder, with enough space, of a local disk"
        raise CacheError(f"the cache {path!r} cannot be created: {error}; {hint}") from error


def _described_layout(described: Description) -> Layout:
    shape, dtype = tuple(described["shape"]), described["dtype"]
    if "form" in described:
        types = tuple(described["types"])
        return ItemLayout(shape, dtype, form=described["form"], types=types, description=described["told"])
    layout = layout_from_file(shape, dtype, described["torch_dtype"], tensor=described["tensor"])
    return RECORDS if layout == RECORDS else layout


def _next_page(at: int) -> int:
    return -(-at // _PAGE) * _PAGE
