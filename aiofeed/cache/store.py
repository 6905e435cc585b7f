"""The interface of sample stores: where decoded samples are cached."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.layout import RECORDS, UNIT, Layout, NotCacheableError, Parts, pack, pack_record
from aiofeed.cache.sample_codec import value_of
from aiofeed.kernel.core.faces import CacheStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.kernel.core.faces import BaseDevice
    from aiofeed.kernel.core.types import HostTensor

log: logging.Logger = logging.getLogger("aiofeed.cache")

# Slot numbers of samples that are not cached, and of samples that are being written.
EMPTY = -1
WRITING = -2
# Slot numbers from here on are records, see ``record_slot``. Their length is counted in so many bits.
RECORD = 1 << 62
_LENGTH_BITS = 25
# The system reads no longer ones at once.
_MOST_UNITS = (1 << _LENGTH_BITS) - 64
# The slot number of a sample that is kept as bytes until the layout is decided.
PENDING = RECORD - 1
# Rows are allocated for all samples at once, so this many samples must have the layout of the first one, or all.
DECIDING = 4


class SampleStore(CacheStore, ABC):
    """The cached samples of one feeder.

    Samples with the layout of the first are stored as rows, others as records. If the first few differ, all are
    records. Thread-safe. A cached sample neither moves nor changes, so readers take no lock. Pickling keeps the
    arguments and drops the samples.

    Args:
        samples: Length of the source.
    """

    needs_layout = False
    """Whether all samples have one layout, which must be known before the first batch is built."""
    on_device = False
    """Whether samples are cached on a device; ``complete`` then adds them to a batch there."""
    claims = False
    """Whether several processes avoid decoding the same sample at the same time, by ``claim`` and ``release``."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._arguments = (*vars(self), "_arguments")
        self._reset()

    def _reset(self) -> None:
        """Begin without samples. Everything set here belongs to this process."""
        self.layout: Layout | None = None
        self._arena: NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        # For each sample the number of its row, ``EMPTY``, ``WRITING``, ``PENDING`` or from ``RECORD`` on.
        self.slots: NDArray[np.int64] = np.full(self.samples, EMPTY, np.int64)
        # False while the first samples are kept as bytes and it is open whether they share a layout.
        self.layout_decided: bool = False
        self._pending: dict[int, tuple[NDArray[np.uint8], Layout]] = {}
        self._pending_bytes = 0
        # The layouts of the first samples, also of those that are too large to be kept.
        self._first: list[Layout] = []
        self._deciding = min(DECIDING, self.samples)
        self._too_large_logged = False
        self._reset_lock()

    def _reset_lock(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def attach(self, backend: BaseDevice | None) -> None:
        """Set the device of the feeder's batches."""
        return None

    def free_with(self, owner: object) -> None:
        """Free device memory when ``owner`` is dropped, instead of by the garbage collector."""
        return None

    def open(self, layout: Layout | None) -> None:
        """Prepare for use in this process, also after a fork. Call it before anything else.

        Args:
            layout: Layout of the samples, if it is known before the first is decoded.

        Raises:
            CacheError: The store cannot be used.
        """
        if self._pid != os.getpid():
            self._after_fork()
        if layout is not None and self.layout is None:
            with self._lock:
                self._use_layout(layout)

    def _after_fork(self) -> None:
        """Replace what belongs to the parent process."""
        self._reset_lock()

    def set_layout(self, layout: Layout) -> Layout:
        """Set the layout of rows, unless it is set already, and return it.

        Raises:
            CacheError: There is no room.
            NotCacheableError: Rows have another layout.
        """
        with self._lock:
            if self.layout is None:
                self.layout = self._allocate(layout) if self.needs_layout else layout
            known = self.layout
        if known is None or known != layout:
            raise NotCacheableError(f"the others are each a {known}, this one is a {layout}")
        return known

    def _use_layout(self, layout: Layout) -> None:
        self.layout = self._allocate(layout)
        self.layout_decided = True

    @abstractmethod
    def _allocate(self, layout: Layout) -> Layout | None:
        """Allocate memory for rows of this layout. Returns the layout in use: of a file's rows, if known."""

    def choose_layout(self, *, last: bool = False) -> None:
        """Choose rows or records by the first samples, and write those that are pending; called after each chunk.

        Args:
            last: Whether there are no more samples for now.

        Raises:
            CacheError: There is no room.
        """
        with self._lock:
            enough = last or self.claims or len(self._first) >= self._deciding
            if not self._first or self.layout_decided or not enough:
                return
            # Another process that claims items waits for the decision: a few samples alone are records.
            alike = len(self._first) >= self._deciding and all(layout == self.layout for layout in self._first)
            self._use_layout(self.layout if alike and self.layout is not None else RECORDS)
            for index, (row, layout) in self._pending.items():
                self._pending_bytes -= row.nbytes
                self._write(index, _split(row, layout), layout)
                self._pending_bytes += row.nbytes * (self.slots[index] == PENDING)
            # Readers look here before they look at the slot. What could not be written stays.
            self._pending = {index: row for index, row in self._pending.items() if self.slots[index] == PENDING}

    def _room(self) -> int:
        """Return how many bytes may be kept before the layout is decided."""
        raise NotImplementedError

    def nbytes(self, index: int) -> int:
        """Return the bytes of a cached sample."""
        slot = int(self.slots[index])
        return units_of(slot)[1] * UNIT if slot >= RECORD or self.layout is None else self.layout.nbytes

    def has(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which samples are cached and verified, without blocking."""
        return self.slots[indices] >= 0

    def unverified(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those that another process or run has cached and ``find`` has not verified, without blocking."""
        return indices[:0]

    def find(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which samples are cached, after verifying those that are not verified. May block.

        Raises:
            CacheError: The store cannot be used.
        """
        return self.has(indices)

    def are_rows(self, indices: NDArray[np.int64]) -> bool:
        """Return whether these cached samples are rows, which ``copy_rows`` copies."""
        return bool(self.slots[indices].max(initial=0) < PENDING)

    def forget(self, index: int) -> None:
        """Make a cached sample one that is not cached, because it has changed."""
        raise NotImplementedError

    def copy_rows(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copy cached samples into ``out``, C-contiguous [N, bytes of a sample]."""
        # Any other mode would gather into a buffer first.
        np.take(self._arena, self.slots[indices], axis=0, out=out, mode="clip")

    def get(self, index: int) -> tuple[Parts, Layout]:
        """Return the arrays of a cached sample, not to be written to, and their layout."""
        if (pending := self._pending.get(index)) is not None:
            return _split(*pending), pending[1]
        if (slot := int(self.slots[index])) >= RECORD:
            return [self._record(slot)], RECORDS
        assert self.layout is not None
        return self.parts(index), self.layout

    def _record(self, slot: int) -> NDArray[np.uint8]:
        """Return a cached record."""
        raise NotImplementedError

    def parts(self, index: int) -> Parts:
        """Return the arrays of a row; read-only views."""
        assert self.layout is not None
        row: NDArray[np.uint8] = self._arena[self.slots[index]]
        row.flags.writeable = False
        return self.layout.split(row)

    def put(self, index: int, parts: Parts, layout: Layout) -> None:
        """Cache a copy of a sample, unless it is cached already or there is no room.

        Raises:
            CacheError: It is one of the first samples, and there is no room for rows.
        """
        if not self.layout_decided:
            with self._lock:
                if not self.layout_decided and self.slots[index] == EMPTY:
                    self._first.append(layout)
                    row = pack(parts)
                    if self._pending_bytes + row.nbytes <= self._room():
                        row = row.copy()
                        row.flags.writeable = False
                        self._pending_bytes += row.nbytes
                        self._pending[index] = row, layout
                        self.slots[index] = PENDING
                    if len(self._first) >= self._deciding or layout != self.layout:
                        self.choose_layout()
        if self.slots[index] == EMPTY and self.layout_decided:
            self._write(index, parts, layout)

    def _write(self, index: int, parts: Parts, layout: Layout) -> None:
        if layout == self.layout and layout is not RECORDS:
            self._store(index, pack(parts), 0)
            return
        record = parts[0] if layout is RECORDS else pack_record(value_of(parts, layout))
        if (units := record.nbytes // UNIT) <= _MOST_UNITS:
            self._store(index, record, units)
        elif not self._too_large_logged:
            self._too_large_logged = True
            log.warning("a cache stores at most 2 GiB of a sample: larger ones, such as %d, are decoded again", index)

    def _store(self, index: int, data: NDArray[np.uint8], units: int) -> None:
        """Cache a row, or a record of so many units, if there is room."""
        raise NotImplementedError

    def put_target(self, index: int, target: Any) -> None:
        """Cache a sample's target; called before ``put``.

        Raises:
            CacheError: The target cannot be cached.
        """
        return None

    def claim(self, index: int) -> bool:
        """Return whether this thread may decode a sample now; False if another thread or process is decoding it.

        Raises:
            CacheError: The store cannot be used.
        """
        return True

    def release(self, index: int) -> None:
        """End a claim."""
        return None

    def sample_to_compare(self, indices: NDArray[np.int64]) -> int | None:
        """Return one of these samples to compare with the source's, to notice that the source has changed."""
        return None

    def compare(self, index: int, key: str, found: Parts | NotCacheableError) -> None:
        """Compare a cached sample with what the source gives now: its arrays, or why it has another layout.

        Raises:
            CacheError: It has another layout.
        """
        return None

    def complete(
        self, columns: list[HostTensor], indices: NDArray[np.int64], cached: NDArray[np.bool_], *, pinned: bool
    ) -> list[Any]:
        """Return the columns of a batch, with what adds cached samples to them on the device.

        Args:
            columns: A tensor for each part of the layout, [N, ...]; rows of cached samples are undefined.
            indices: The samples of the batch, [N].
            cached: Which of them were cached when they were requested, [N].
            pinned: Whether ``indices`` is page-locked memory.
        """
        return list(columns)


def record_slot(unit: int, units: int) -> int:
    """Return the slot number of a record of so many units of ``UNIT`` bytes that begins at a unit."""
    return RECORD + (unit << _LENGTH_BITS) + units


def units_of(slot: int) -> tuple[int, int]:
    """Return the first unit of a record and its number of units."""
    return divmod(slot - RECORD, 1 << _LENGTH_BITS)


def _split(row: NDArray[np.uint8], layout: Layout) -> Parts:
    return [row] if layout is RECORDS else layout.split(row)
