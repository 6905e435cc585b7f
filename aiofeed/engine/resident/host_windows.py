"""Data that stays where it is, and windows of it: some batches' rows, permuted into memory of their own.

A window is small against the data. That is as fast as permuting an epoch at once, or faster where a core's cache holds
two of them, needs no second copy of the data, makes nobody wait where epochs meet, and a batch that the user keeps
keeps no more than its window. On the host torch's own threads gather the rows, where it has several.

A batch is a view of its window, and no view of another batch's rows, with a version counter of its own: autograd would
otherwise take a write into one batch for a write into all of the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from aiofeed.runtime.buffers import HostBufferPool, array
from aiofeed.runtime.tensors import tensor_row_bytes, view_as_integers
from aiofeed.runtime.threads import is_ending, may_be_fork
from aiofeed.sampling.order import BatchRange

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Two of them stay in the cache of a core or two, and each is made in a fraction of a millisecond.
HOST_WINDOW_BYTES = 1 << 20
# The one that is used, and the last, of which the consumer still holds a batch.
HOST_WINDOWS = 2
# How soon, and then how seldom, a device that is behind is looked at again.
FIRST_LOOK_S = 20e-6
LOOK_S = 1e-3
# From here on torch's threads gather faster than numpy's one does.
PARALLEL_BYTES = 128 << 10
# What carries a number of so many bytes where only its place changes: not every dtype has every operation.


class Rows(Protocol):
    """Data of which windows are made."""

    @property
    def tensors(self) -> Sequence[Any]:
        """Each [N, ...], tensors or arrays; sample ``i`` is row ``i`` of each."""
        ...

    @property
    def alias(self) -> bool:
        """Whether a batch may be a view of them where rows follow one another."""
        ...


class Window(Protocol):
    """Some batches, side by side."""

    def batch(self, first: int, last: int) -> list[torch.Tensor]:
        """Rows ``first`` to ``last - 1`` of each tensor, for work on the calling thread's current stream."""
        ...


Made: TypeAlias = tuple[BatchRange, Window]
"""A window, and what is in it."""


class Windows(Protocol):
    """Resident data, and what makes windows of it."""

    ahead: int
    """How many windows should be made before they are asked for."""
    most: int
    """Batches of the next window, at most."""
    stage: str
    """What making one is called where time is accounted for: "collate" or "copy"."""
    waited: tuple[float, float] | None
    """From when to when the last ``make`` waited for the device (``time.perf_counter`` seconds), if it did."""

    def behind(self) -> bool:
        """Whether ``make`` would wait for the device."""
        ...

    def make(self, batch_range: BatchRange) -> Made:
        """A window of a stretch, or of its head where memory is short."""
        ...


def window_batches(batch_bytes: int, *bounds: int) -> int:
    """How many batches a window has, 1 at least, so that it exceeds none of ``bounds`` (bytes)."""
    return max(min(bounds) // max(batch_bytes, 1), 1)


def row_bytes(source: Rows) -> int:
    """Bytes of one sample."""
    return sum(map(tensor_row_bytes, source.tensors))


class HostWindow(Window):
    """Rows in host memory that is used again once nothing refers to them."""

    def __init__(self, rows: list[NDArray[Any]], dtypes: Sequence[torch.dtype | None]) -> None:
        import torch

        self._rows = rows
        self._dtypes = dtypes
        self._plain = not any(dtypes)
        self._tensor = torch.from_numpy
        self._under_inference_mode, self._inference_mode = torch.is_inference_mode_enabled, torch.inference_mode

    def batch(self, first: int, last: int) -> list[torch.Tensor]:
        """Rows ``first`` to ``last - 1`` of each tensor."""
        if self._under_inference_mode():
            # Made under it they could not be trained on outside, and a batch from elsewhere can.
            with self._inference_mode(False):
                return self.batch(first, last)
        # Each a storage of its own as torch sees it, so that saving a batch saves no more than the batch.
        tensor = self._tensor
        batch = [tensor(rows[first:last]) for rows in self._rows]
        if self._plain:
            return batch
        return [rows if dtype is None else rows.view(dtype) for rows, dtype in zip(batch, self._dtypes, strict=True)]


class HostWindows:
    """Data in host memory, permuted by the consumer's thread.

    Args:
        source: the data.
        batch_size: samples per batch.
        memory_bytes: of all windows together, those that the user keeps not counted.
    """

    # Made by the thread that asks: it would wait for another as long, and gain nothing where cores are busy.
    ahead = 0
    stage = "collate"
    waited: tuple[float, float] | None = None

    def __init__(self, source: Rows, batch_size: int, memory_bytes: int) -> None:
        self._data, self._dtypes = zip(*map(_host_rows, source.tensors), strict=True)
        self._words = list(map(_words, self._data))
        self._alias = source.alias
        self._memory = HostBufferPool(keep=HOST_WINDOWS * len(self._data))
        batch_bytes = batch_size * row_bytes(source)
        self.most = window_batches(batch_bytes, HOST_WINDOW_BYTES, memory_bytes // HOST_WINDOWS)

    def behind(self) -> bool:
        """No: what is made here is there."""
        return False

    def make(self, batch_range: BatchRange) -> Made:
        """One window."""
        indices = batch_range.indices
        if batch_range.run:
            start, end = int(indices[0]), int(indices[-1]) + 1
            rows = [data[start:end] for data in self._data]
            if not self._alias:
                rows = [self._copied(each) for each in rows]
        else:
            rows = [self._gathered(data, words, indices) for data, words in zip(self._data, self._words, strict=True)]
        return batch_range, HostWindow(rows, self._dtypes)

    def _copied(self, rows: NDArray[Any]) -> NDArray[Any]:
        target = array(self._memory, rows.shape, rows.dtype)
        np.copyto(target, rows)
        return target

    def _gathered(self, data: NDArray[Any], words: torch.Tensor | None, indices: NDArray[np.int64]) -> NDArray[Any]:
        target = array(self._memory, (len(indices), *data.shape[1:]), data.dtype)
        if words is None or target.nbytes < PARALLEL_BYTES or not _threads() or not _gather(words, indices, target):
            # The indices are good, and any other mode would gather into a buffer first.
            np.take(data, indices, axis=0, out=target, mode="clip")
        return target


def _gather(words: torch.Tensor, indices: NDArray[np.int64], target: NDArray[Any]) -> bool:
    """Gather rows by torch's own threads; whether that could be done."""
    import torch

    at, out = torch.from_numpy(indices), torch.from_numpy(_as_words(target))
    # Where a mode of torch's makes fake tensors of all, what is done with them is done to no memory.
    if not type(words) is type(at) is type(out) is torch.Tensor:
        return False
    torch.index_select(words, 0, at, out=out)
    return True


def as_tensor(given: Any) -> torch.Tensor:
    """What the user gave as a tensor; a view where that can be."""
    import torch

    if isinstance(given, torch.Tensor):
        return given.detach().resolve_conj().resolve_neg()
    # torch has no tensors that it may not write to, and none that lie backwards (x[::-1]) or between others' bytes.
    return torch.from_numpy(np.require(given, requirements=("C", "W", "A")))


def _as_words(data: NDArray[Any]) -> NDArray[Any]:
    """The same memory, [N, words of a row]: the largest integers of which a row is a whole number."""
    row = data.nbytes // len(data)
    size = next(size for size in (8, 4, 2, 1) if row % size == 0)
    return data.reshape(len(data), -1).view(np.uint8).view(f"i{size}" if size > 1 else np.uint8)


def _words(data: NDArray[Any]) -> torch.Tensor | None:
    """Data as torch's own threads gather them; ``None`` where they do not."""
    import torch

    # torch has no tensors that it may not write to.
    if data.ndim < 2 or not data.nbytes or not data.flags.writeable:
        return None
    return torch.from_numpy(_as_words(data))


def _threads() -> bool:
    """Whether torch's threads may be asked: there are some, and they are this process's."""
    import torch

    return not (is_ending() or may_be_fork()) and torch.get_num_threads() > 1


def _host_rows(given: Any) -> tuple[NDArray[Any], torch.dtype | None]:
    """The data as an array, and the torch dtype where numpy has none. A view, where rows lie one after another."""
    if isinstance(given, np.ndarray):
        return np.ascontiguousarray(given).reshape(given.shape), None
    tensor = as_tensor(given)
    if tensor.device.type != "cpu":
        raise TypeError(f"the data are on {tensor.device}: pass device= to feed them from there, or .cpu()")
    tensor = tensor.contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:  # a dtype that numpy lacks
        return view_as_integers(tensor).numpy(), tensor.dtype
