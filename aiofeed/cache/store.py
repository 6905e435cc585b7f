"""The interface of sample stores: where decoded samples are cached."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.layout import Layout, Parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.cache.decoder_codec import NotCacheableError
    from aiofeed.core.types import HostTensor
    from aiofeed.devices.backend import DeviceBackend

# Slot numbers of samples that are not cached, and of samples that are being written.
EMPTY = -1
WRITING = -2


class SampleStore(ABC):
    """The cached samples of one feeder.

    Thread-safe. A cached sample neither moves nor changes, so readers take no lock. Pickling keeps the arguments and
    drops the samples.

    Args:
        samples: Length of the source.
    """

    needs_layout = False
    """Whether the layout must be known before the first batch is built."""
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
        # For each sample the number of its row, ``EMPTY`` or ``WRITING``.
        self.slots: NDArray[np.int64] = np.full(self.samples, EMPTY, np.int64)
        self._reset_lock()

    def _reset_lock(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def attach(self, backend: DeviceBackend | None) -> None:
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
        if layout is not None:
            self.set_layout(layout)

    def _after_fork(self) -> None:
        """Replace what belongs to the parent process."""
        self._reset_lock()

    def set_layout(self, layout: Layout) -> bool:
        """Set the layout of all samples; False if they have another one already.

        Raises:
            CacheError: There is no room.
        """
        if self.layout is None:
            with self._lock:
                if self.layout is None:
                    self._allocate(layout)
                    self.layout = layout
        return self.layout == layout

    @abstractmethod
    def _allocate(self, layout: Layout) -> None:
        """Allocate memory for samples of this layout."""

    def has(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which samples are cached and verified. Never blocks."""
        return self.slots[indices] >= 0

    def unverified(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples that another process or run has cached and that ``find`` has not verified. Never blocks."""
        return indices[:0]

    def find(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which samples are cached, after verifying those that are not verified. May block.

        Raises:
            CacheError: The store cannot be used.
        """
        return self.has(indices)

    def copy_rows(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copy cached samples into ``out``, C-contiguous [N, bytes of a sample]."""
        # Any other mode would gather into a buffer first.
        np.take(self._arena, self.slots[indices], axis=0, out=out, mode="clip")

    def parts(self, index: int) -> Parts:
        """The arrays of a cached sample; read-only views."""
        assert self.layout is not None
        row: NDArray[np.uint8] = self._arena[self.slots[index]]
        row.flags.writeable = False
        return self.layout.split(row)

    @abstractmethod
    def put(self, index: int, parts: Parts) -> None:
        """Cache a copy of a sample, unless it is cached already or there is no room."""

    def put_target(self, index: int, target: Any) -> None:
        """Cache a sample's target; called before ``put``.

        Raises:
            CacheError: The target cannot be cached.
        """
        return None

    def claim(self, index: int) -> bool:
        """Whether the calling thread may decode a sample now; False if another thread or process is decoding it.

        Raises:
            CacheError: The store cannot be used.
        """
        return True

    def release(self, index: int) -> None:
        """End a claim."""
        return None

    def sample_to_compare(self, indices: NDArray[np.int64]) -> int | None:
        """One of these samples that must be compared with the source's, to notice that the source has changed."""
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
        """The columns of a batch, with what adds cached samples to them on the device.

        Args:
            columns: A tensor for each part of the layout, [N, ...]; rows of cached samples are undefined.
            indices: The samples of the batch, [N].
            cached: Which of them were cached when they were requested, [N].
            pinned: Whether ``indices`` is page-locked memory.
        """
        return list(columns)
