"""Rows of decoded samples, and which of them may be believed."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.layout import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

# In the place of a slot: nothing is kept; what is kept is being written.
NONE = -1
COMING = -2


class SampleStore(ABC):
    """The kept samples of one feeder.

    Any thread may ask and put. A row is believed once it is whole, and from then on it neither moves nor changes: so a
    reader needs no lock. Pickled, it is a store of the same kind without what this process knows.

    Args:
        samples: length of the source.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._blank()

    def _blank(self) -> None:
        self.layout: Layout | None = None
        self._arena: NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._slots: NDArray[np.int64] = np.full(self.samples, NONE, np.int64)
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        blank = ("layout", "_arena", "_slots", "_pid", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in blank}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._blank()

    def begin(self, layout: Layout | None) -> None:
        """Make ready in this process: to be called before anything else. A store that was inherited by fork is mended.

        Args:
            layout: of the samples, where it is known before one was decoded.

        Raises:
            CacheError: it cannot be used.
        """
        if self._pid != os.getpid():
            self._inherit()
        if layout is not None:
            self.settle(layout)

    def _inherit(self) -> None:
        """The locks, and what else belongs to the parent, are replaced."""
        self._renew()

    def settle(self, layout: Layout) -> bool:
        """Samples look like this; False where those that are kept look otherwise.

        Raises:
            CacheError: there is no room.
        """
        if self.layout is None:
            with self._lock:
                if self.layout is None:
                    self._open(layout)
                    self.layout = layout
        return self.layout == layout

    @abstractmethod
    def _open(self, layout: Layout) -> None:
        """Provide ``_arena`` for samples of this layout."""

    def has(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which samples are kept, and are believed."""
        return self._slots[indices] >= 0

    def doubtful(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those that are said to be kept, but were not looked at by this process; ``check`` does."""
        return indices[:0]

    def check(self, indices: NDArray[np.int64]) -> None:
        """Believe what proves to be whole. It takes its time: not for the loop's thread."""
        return None

    def take(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copy samples that ``has`` said are there into ``out``, C-contiguous [N, bytes of a sample]."""
        # Any other mode would gather into a buffer first.
        np.take(self._arena, self._slots[indices], axis=0, out=out, mode="clip")

    def row(self, index: int) -> NDArray[np.uint8]:
        """The bytes of a sample that ``has`` said is there; not to be written to."""
        row: NDArray[np.uint8] = self._arena[self._slots[index]]
        row.flags.writeable = False
        return row

    @abstractmethod
    def put(self, index: int, row: NDArray[np.uint8]) -> None:
        """Keep a sample, where there is room and it is not kept already. Copies ``row``."""
