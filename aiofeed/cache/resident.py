"""``cache="device"``: stores for all samples and targets, where batches are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.cache.host import local_ranks
from aiofeed.cache.layout import Layout, Parts, as_bytes
from aiofeed.cache.store import EMPTY, WRITING, SampleStore
from aiofeed.core.errors import CacheError
from aiofeed.core.formatting import format_bytes

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

WAY_OUT = 'cache="host" caches as many as fit into host memory, and DiskCache(path) caches them in a file'


class ResidentStore(SampleStore):
    """Samples and targets of one process. Row ``i`` is sample ``i``, so that whole epochs can be permuted.

    Args:
        samples: Length of the source.
        batch_size: Samples per batch.
    """

    needs_layout = True

    def __init__(self, samples: int, batch_size: int) -> None:
        self._batch_size = batch_size
        super().__init__(samples)

    def _reset(self) -> None:
        super()._reset()
        self.targets: list[Any] = []
        self._target_kind: str | None = None
        self._targets_fit = False

    def _after_fork(self) -> None:
        # A child cannot use its parent's device memory, and would copy rows in host memory page by page.
        self._reset()

    def __len__(self) -> int:
        return self.samples

    @property
    def slots(self) -> NDArray[np.int64]:
        """For each sample a number that is negative unless the sample is cached."""
        return self._slots

    @property
    def cached_samples(self) -> int:
        """How many samples are cached."""
        return int(np.count_nonzero(self._slots >= 0))

    def has_all(self, indices: NDArray[np.int64] | None = None) -> bool:
        """Whether these samples are cached; without ``indices`` whether all are."""
        return self.layout is not None and bool(
            (self._slots if indices is None else self._slots[indices]).min(initial=0) >= 0
        )

    def put_target(self, index: int, target: Any) -> None:
        """Cache a sample's target; called before ``put``.

        Raises:
            CacheError: The target cannot be in one tensor with the others, or targets like it do not all fit.
        """
        kind = target_kind(target)
        if kind is None:
            raise CacheError(
                f'cache="device" caches targets that are numbers, tensors, arrays, or tuples and dicts of these, and '
                f"this one is a {type(target).__name__}: {str(target)[:80]!r}; {WAY_OUT}"
            )
        with self._lock:
            if not self.targets:
                self.targets = [None] * self.samples
                self._target_kind = kind
        if kind != self._target_kind:
            raise CacheError(
                f'cache="device" caches targets that are all alike; the first was {self._target_kind}, this one is '
                f"{kind}; {WAY_OUT}"
            )
        if not self._targets_fit:
            self._check_target_memory(target)
            self._targets_fit = True
        self.targets[index] = target

    def _check_target_memory(self, target: Any) -> None:
        """Raise ``CacheError`` unless targets like this one all fit beside the samples."""

    def data(self) -> list[torch.Tensor]:
        """A tensor for each part of the layout, [samples, ...], on the device if there is one; not a copy."""
        raise NotImplementedError

    def _check_memory(self, layout: Layout, free: int | None, where: str) -> None:
        """Raise ``CacheError`` unless all samples and two batches fit into the free memory, if that is known."""
        if free is not None and (self.samples + 2 * self._samples_of_batch()) * layout.nbytes > free:
            raise self._no_memory(layout, free, where)

    def _samples_of_batch(self) -> int:
        return min(self._batch_size, self.samples)

    def _no_memory(self, layout: Layout, free: int | None, where: str) -> CacheError:
        found = "" if free is None else f", which has {format_bytes(free)} free"
        return CacheError(
            f'cache="device" does not fit {where}{found}: {self.samples:,} samples of {format_bytes(layout.nbytes)} '
            f"each ({layout}) take {format_bytes(self.samples * layout.nbytes)}, and two batches "
            f"{format_bytes(2 * self._samples_of_batch() * layout.nbytes)} beside them; "
            f"{WAY_OUT}"
        )


class HostRows(ResidentStore):
    """Samples in host memory.

    Args:
        samples, batch_size: As for ``ResidentStore``.
        free_memory: Returns the bytes of free memory.
    """

    def __init__(self, samples: int, batch_size: int, free_memory: Callable[[], int]) -> None:
        self._free_memory = free_memory
        super().__init__(samples, batch_size)

    def _reset(self) -> None:
        super()._reset()
        self._columns: list[NDArray[np.uint8]] = []

    def _allocate(self, layout: Layout) -> None:
        ranks = local_ranks()
        shared = f" for each of {ranks} ranks" if ranks > 1 else ""
        free, where = self._free_memory() // ranks, f"into host memory{shared}"
        self._check_memory(layout, free, where)
        try:
            self._columns = [np.empty((self.samples, part.nbytes), np.uint8) for part in layout.parts]
        except MemoryError as error:
            raise self._no_memory(layout, free, where) from error
        self._arena = self._columns[0]

    def put(self, index: int, parts: Parts) -> None:
        """Cache a copy of a sample, unless it is cached already."""
        with self._lock:
            if self._slots[index] != EMPTY:
                return
            self._slots[index] = WRITING
        for column, part in zip(self._columns, parts, strict=True):
            column[index] = as_bytes(part)
        self._slots[index] = index

    def parts(self, index: int) -> Parts:
        """The arrays of a cached sample; read-only views."""
        assert self.layout is not None
        found = [part.view(column[index]) for part, column in zip(self.layout.parts, self._columns, strict=True)]
        for array in found:
            array.flags.writeable = False
        return found

    def data(self) -> list[torch.Tensor]:
        """A tensor for each part of the layout; views."""
        import torch

        assert self.layout is not None
        found = []
        for part, rows in zip(self.layout.parts, self._columns, strict=True):
            typed = torch.from_numpy(rows.view(part.dtype).reshape(self.samples, *part.shape))
            found.append(typed if part.torch_dtype is None else typed.view(getattr(torch, part.torch_dtype)))
        return found


def target_kind(target: Any) -> str | None:
    """Type, dtype and shape of a target: targets that fit into one tensor have the same. ``None`` if no tensor can."""
    if type(target) in (int, float, bool) or isinstance(target, np.generic):
        kind = type(target).__name__
        return kind if not isinstance(target, np.generic) or target.dtype.kind in "biufc" else None
    if isinstance(target, np.ndarray):
        return f"array {target.dtype} {list(target.shape)}" if target.dtype.kind in "biufc" else None
    if isinstance(target, Mapping):
        kinds = {str(name): target_kind(value) for name, value in target.items()}
        return None if type(target) is not dict or None in kinds.values() else f"dict {kinds}"
    if isinstance(target, tuple | list):
        parts = [target_kind(value) for value in target]
        return None if not parts or None in parts else f"{type(target).__name__} ({', '.join(map(str, parts))})"
    if hasattr(target, "__torch_function__") and hasattr(target, "layout"):
        plain = str(target.layout) == "torch.strided" and str(target.device) == "cpu" and not target.requires_grad
        return f"tensor {target.dtype} {list(target.shape)}" if plain else None
    return None


def target_bytes(target: Any) -> int:
    """Bytes that a target takes in a tensor; 0 for what no tensor can contain."""
    if isinstance(target, bool):
        return 1
    if isinstance(target, int | float):
        return 8
    if isinstance(target, Mapping):
        return sum(map(target_bytes, target.values()))
    if isinstance(target, tuple | list):
        return sum(map(target_bytes, target))
    return int(getattr(target, "nbytes", 0))
