"""Decoded samples that stay where batches are wanted, all of them: in host memory, or on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.host import local_ranks
from aiofeed.cache.layout import ItemLayout, Layout
from aiofeed.cache.store import COMING, NONE, SampleStore
from aiofeed.core.errors import CacheError
from aiofeed.core.formatting import format_bytes

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

WAY_OUT = 'cache="host" keeps as many as fit into host memory, and DiskCache(path) keeps them in a file'


class ResidentStore(SampleStore):
    """Rows and targets of one process: row ``i`` is sample ``i``, so that epochs can be permuted out of them.

    Args:
        samples: length of the source.
        batch_size: samples per batch.
    """

    def __init__(self, samples: int, batch_size: int) -> None:
        self._batch_size = batch_size
        super().__init__(samples)

    def _blank(self) -> None:
        super()._blank()
        self.targets: list[Any] = []
        # Whether there is room for them, as far as one of them tells.
        self._targets_fit = False
        self._kind: Any = None

    def __getstate__(self) -> dict[str, Any]:
        mine = ("targets", "_targets_fit", "_kind")
        return {name: value for name, value in super().__getstate__().items() if name not in mine}

    def _inherit(self) -> None:
        # A child has no use for a device's memory of its parent's, and rows of the host it would copy page by page.
        self._blank()

    def __len__(self) -> int:
        return self.samples

    @property
    def slots(self) -> NDArray[np.int64]:
        """By sample: not below 0 where it is kept."""
        return self._slots

    @property
    def held(self) -> int:
        """How many samples are kept."""
        return int(np.count_nonzero(self._slots >= 0))

    def holds(self, indices: NDArray[np.int64] | None = None) -> bool:
        """Whether all samples are kept, or all of these."""
        return self.layout is not None and bool(
            (self._slots if indices is None else self._slots[indices]).min(initial=0) >= 0
        )

    def note(self, index: int, target: Any) -> None:
        """Keep a sample's target; before its row.

        Raises:
            CacheError: it cannot stand in a tensor with the others, or there is no room for all that are like it.
        """
        kind = kind_of(target)
        if kind is None:
            raise CacheError(
                f'cache="device" keeps targets that are numbers, tensors, arrays, or tuples and dicts of these, and '
                f"this one is a {type(target).__name__}: {str(target)[:80]!r}; {WAY_OUT}"
            )
        with self._lock:
            if not self.targets:
                self.targets = [None] * self.samples
                self._kind = kind
        if kind != self._kind:
            raise CacheError(
                f'cache="device" keeps targets that are all alike; the first was {self._kind}, this one is {kind}; '
                f"{WAY_OUT}"
            )
        if not self._targets_fit:
            self._check_targets(target)
            self._targets_fit = True
        self.targets[index] = target

    def _check_targets(self, target: Any) -> None:
        """``CacheError`` where targets like this one do not fit in where their samples are."""

    def data(self) -> list[torch.Tensor]:
        """The rows of each column, [samples, ...], on the device where there is one, as they lie in memory."""
        raise NotImplementedError

    def _check_room(self, layout: Layout, free: int | None, where: str) -> None:
        """``CacheError`` where the whole, and two batches beside it, do not fit into what is free."""
        if free is not None and (self.samples + 2 * self._samples_of_batch()) * layout.nbytes > free:
            raise self._no_room(layout, free, where)

    def _samples_of_batch(self) -> int:
        return min(self._batch_size, self.samples)

    def _no_room(self, layout: Layout, free: int | None, where: str) -> CacheError:
        found = "" if free is None else f", which has {format_bytes(free)} free"
        return CacheError(
            f'cache="device" does not fit {where}{found}: {self.samples:,} samples of {format_bytes(layout.nbytes)} '
            f"each ({layout}) take {format_bytes(self.samples * layout.nbytes)}, and two batches "
            f"{format_bytes(2 * self._samples_of_batch() * layout.nbytes)} beside them; "
            f"{WAY_OUT}"
        )


class HostRows(ResidentStore):
    """Rows in host memory.

    Args:
        samples, batch_size: as of ``ResidentStore``.
        free_memory: how much there is.
    """

    def __init__(self, samples: int, batch_size: int, free_memory: Callable[[], int]) -> None:
        self._free_memory = free_memory
        super().__init__(samples, batch_size)

    def _blank(self) -> None:
        super()._blank()
        self._columns: list[NDArray[np.uint8]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_columns"}

    def _open(self, layout: Layout) -> None:
        ranks = local_ranks()
        shared = f" for each of {ranks} ranks" if ranks > 1 else ""
        free, where = self._free_memory() // ranks, f"into host memory{shared}"
        self._check_room(layout, free, where)
        try:
            self._columns = [np.empty((self.samples, column.nbytes), np.uint8) for column in layout.columns]
        except MemoryError as error:
            raise self._no_room(layout, free, where) from error
        self._arena = self._columns[0]

    def put(self, index: int, row: NDArray[np.uint8]) -> None:
        """Keep a sample, where it is not kept already."""
        with self._lock:
            if self._slots[index] != NONE:
                return
            self._slots[index] = COMING
        layout = self.layout
        pieces = layout.pieces(row) if isinstance(layout, ItemLayout) else [row]
        for column, piece in zip(self._columns, pieces, strict=True):
            column[index] = piece
        self._slots[index] = index

    def row(self, index: int) -> NDArray[np.uint8]:
        """The bytes of a sample that ``has`` said is there; not to be written to."""
        if len(self._columns) == 1:
            return super().row(index)
        return np.concatenate([column[index] for column in self._columns])

    def data(self) -> list[torch.Tensor]:
        """The rows of each column; views."""
        import torch

        assert self.layout is not None
        found = []
        for column, rows in zip(self.layout.columns, self._columns, strict=True):
            typed = torch.from_numpy(rows.view(column.dtype).reshape(self.samples, *column.shape))
            found.append(typed if column.torch_dtype is None else typed.view(getattr(torch, column.torch_dtype)))
        return found


def kind_of(target: Any) -> str | None:
    """What two targets must have in common to stand in one tensor, or one structure of tensors; ``None``: nothing."""
    if type(target) in (int, float, bool) or isinstance(target, np.generic):
        kind = type(target).__name__
        return kind if not isinstance(target, np.generic) or target.dtype.kind in "biufc" else None
    if isinstance(target, np.ndarray):
        return f"array {target.dtype} {list(target.shape)}" if target.dtype.kind in "biufc" else None
    if isinstance(target, Mapping):
        kinds = {str(name): kind_of(value) for name, value in target.items()}
        return None if type(target) is not dict or None in kinds.values() else f"dict {kinds}"
    if isinstance(target, tuple | list):
        parts = [kind_of(value) for value in target]
        return None if not parts or None in parts else f"{type(target).__name__} ({', '.join(map(str, parts))})"
    if hasattr(target, "__torch_function__") and hasattr(target, "layout"):
        plain = str(target.layout) == "torch.strided" and str(target.device) == "cpu" and not target.requires_grad
        return f"tensor {target.dtype} {list(target.shape)}" if plain else None
    return None


def target_bytes(target: Any) -> int:
    """Bytes of a target as it stands in a tensor with the others; 0 for what cannot."""
    if isinstance(target, bool):
        return 1
    if isinstance(target, int | float):
        return 8
    if isinstance(target, Mapping):
        return sum(map(target_bytes, target.values()))
    if isinstance(target, tuple | list):
        return sum(map(target_bytes, target))
    return int(getattr(target, "nbytes", 0))
