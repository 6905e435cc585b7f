"""Windows of data in host memory: the rows of a few batches, permuted into a buffer of their own.

A window is small compared with the data. Permuting window by window is as fast as permuting a whole epoch at once, or
faster if two windows fit into a core's cache. It needs no second copy of the data and causes no pause between epochs,
and a batch that the user keeps retains only the memory of its window. If torch has several threads, it gathers rows.

A batch is a view of its window with a version counter of its own. With a shared counter, autograd would take a write
into one batch for a write into every batch of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.kernel.runtime.buffers import HostBufferPool, array
from aiofeed.kernel.runtime.tensors import is_tensor, keep_memory, tensor_row_bytes, view_as_integers
from aiofeed.kernel.runtime.threads import is_ending, may_be_fork
from aiofeed.resident.batch_ranges import BatchRange

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Two windows of this size fit into the cache of one or two cores, and making one takes a fraction of a millisecond.
# 60,000 images of 28 x 28 float32 in batches of 256 take 39 ms of CPU time per epoch in windows of 3 MiB, 42 of 2, and
# 38 of 4; 20 million tokens in windows of 1,024 with targets 12.8 ms of 3 MiB, 13.4 of 2, and 14.7 of 4.
WINDOW_BYTES = 3 << 20
# The window in use, and the previous one, of which the consumer still holds a batch.
WINDOWS = 2
# From this size on, torch's threads gather faster than numpy's single one.
PARALLEL_BYTES = 128 << 10


Window: TypeAlias = "Callable[[int, int], list[torch.Tensor]] | list[Any]"
"""On a device: returns rows ``first`` to ``last - 1`` of each tensor, for work on the calling thread's current stream.
On the host: the rows of each batch."""


def window_batches(batch_bytes: int, *bounds: int) -> int:
    """Return how many batches fit into each of ``bounds`` (bytes); at least 1."""
    return max(min(bounds) // max(batch_bytes, 1), 1)


def row_bytes(source: Any) -> int:
    """Return the bytes of one sample in a batch."""
    return source.sample_bytes if source.traits.rows else sum(map(tensor_row_bytes, source.tensors))


def _host_batches(
    torch: Any, rows: list[NDArray[Any]], dtypes: Sequence[torch.dtype | None] | None, size: int
) -> list[list[torch.Tensor]]:
    """Split the rows of each array into batches; their memory is reused when nothing refers to it."""
    if torch.is_inference_mode_enabled():
        # Inference tensors could not be trained on later; batches of other sources can.
        with torch.inference_mode(False):
            return _host_batches(torch, rows, dtypes, size)
    columns = []
    for each, dtype in zip(rows, dtypes or [None] * len(rows), strict=True):
        parts = [each[first : first + size] for first in range(0, len(each), size)]
        # For torch each batch has a storage of its own, so that saving a batch saves only the batch.
        tensors = list(map(torch.from_numpy, parts))
        for storage, part in zip(map(torch.Tensor.untyped_storage, tensors), parts, strict=True):
            keep_memory(storage, part)
        columns.append(tensors if dtype is None else [tensor.view(dtype) for tensor in tensors])
    return list(map(list, zip(*columns, strict=True)))


class HostWindows:
    """Makes windows of data in host memory, in the consumer's thread. Arguments as for ``ResidentData``."""

    # Windows to make before the consumer needs them. It would wait as long for another thread, and gain nothing while
    # all cores are busy.
    ahead = 0
    # The field of ``EpochStats`` that counts the time of making windows.
    statistic = "collate_s"

    def __init__(self, source: Any, batch_size: int, memory_bytes: int) -> None:
        import torch

        self._torch = torch
        self._dtypes: Sequence[torch.dtype | None] | None = None
        self._form_batch: Callable[[list[torch.Tensor]], Any] | None = source.form_batch
        self._gather: Callable[[BatchRange, HostBufferPool], list[NDArray[Any]]]
        if source.traits.rows:
            self._gather = lambda batch_range, memory: source.gathered(batch_range.indices, memory)
            buffers = 1
        else:
            data = _HostData(source)
            self._gather, self._dtypes = data.gather, data.dtypes
            buffers = len(source.tensors)
        self._memory = HostBufferPool(keep=WINDOWS * buffers)
        self.max_batches: int = window_batches(batch_size * row_bytes(source), WINDOW_BYTES, memory_bytes // WINDOWS)

    def device_ready(self) -> bool:
        """Return True: nothing is queued on the host."""
        return True

    def wait_for_caller(self) -> None:
        """Do nothing: nothing is queued on the host."""

    def close(self, timeout_s: float) -> None:
        """Do nothing: nothing is queued on the host."""

    def make(self, batch_range: BatchRange) -> tuple[BatchRange, Window]:
        """Make a window of a batch range."""
        rows = self._gather(batch_range, self._memory)
        batches = _host_batches(self._torch, rows, self._dtypes, batch_range.batch_size)
        return batch_range, batches if self._form_batch is None else list(map(self._form_batch, batches))


class _HostData:
    """Tensors in host memory, of which rows are gathered.

    Attributes:
        dtypes: The torch dtype of each tensor whose dtype numpy lacks; ``None`` if there is no such tensor.
    """

    def __init__(self, source: Any) -> None:
        self._data, dtypes = zip(*map(_host_rows, source.tensors), strict=True)
        self.dtypes: Sequence[torch.dtype | None] | None = dtypes if any(dtypes) else None
        self._torch_rows = list(map(_torch_rows, self._data))
        self._alias, self._mapped = source.alias, source.mapped
        self._rows = source.rows

    def gather(self, batch_range: BatchRange, memory: HostBufferPool) -> list[NDArray[Any]]:
        """Return the rows of a batch range, of each tensor: a copy, or with ``alias`` and without a shuffle a view."""
        indices = batch_range.indices
        self._mapped.check()
        if self._rows is not None:
            indices = self._rows[indices]
        elif batch_range.run:
            start, end = int(indices[0]), int(indices[-1]) + 1
            rows = [data[start:end] for data in self._data]
            return rows if self._alias else [_copy(each, memory) for each in rows]
        return [_take(*columns, indices, memory) for columns in zip(self._data, self._torch_rows, strict=True)]


def _copy(rows: NDArray[Any], memory: HostBufferPool) -> NDArray[Any]:
    target = array(memory, rows.shape, rows.dtype)
    np.copyto(target, rows)
    return target


def _take(
    data: NDArray[Any], rows: torch.Tensor | None, indices: NDArray[np.int64], memory: HostBufferPool
) -> NDArray[Any]:
    """Return a copy of the rows of ``data`` at indices; ``rows`` are the same data for torch, if torch can gather."""
    target = array(memory, (len(indices), *data.shape[1:]), data.dtype)
    if rows is None or target.nbytes < PARALLEL_BYTES or not _threads() or not _torch_gather(rows, indices, target):
        # All indices are valid; with mode "raise" numpy would gather into a temporary buffer.
        np.take(data, indices, axis=0, out=target, mode="clip")
    return target


def _torch_gather(rows: torch.Tensor, indices: NDArray[np.int64], target: NDArray[Any]) -> bool:
    """Gather rows with torch's threads; return False if torch cannot do it now."""
    import torch

    at, out = torch.from_numpy(indices), torch.from_numpy(_as_integers(target))
    # Under a FakeTensorMode these are fake tensors, and operations on them write no memory.
    if not type(rows) is type(at) is type(out) is torch.Tensor:
        return False
    torch.index_select(rows, 0, at, out=out)
    return True


def user_tensor(data: Any) -> torch.Tensor:
    """Return the user's data as a plain tensor; a view if possible."""
    import torch

    if is_tensor(data):
        found: torch.Tensor = data.detach().resolve_conj().resolve_neg()
        return found
    # Tensors cannot be read-only, have negative strides (x[::-1]) or be fields of records.
    return torch.from_numpy(np.require(data, requirements=("C", "W", "A")))


def _as_integers(data: NDArray[Any]) -> NDArray[Any]:
    """Return the same memory as [N, integers per row], with the largest integer type that divides a row."""
    row = data.nbytes // len(data)
    size = next(size for size in (8, 4, 2, 1) if row % size == 0)
    return data.reshape(len(data), -1).view(np.uint8).view(f"i{size}" if size > 1 else np.uint8)


def _torch_rows(data: NDArray[Any]) -> torch.Tensor | None:
    """Return the data as integers for torch's gather; ``None`` if torch cannot gather them."""
    import torch

    # Tensors cannot be read-only.
    if data.ndim < 2 or not data.nbytes or not data.flags.writeable:
        return None
    return torch.from_numpy(_as_integers(data))


def _threads() -> bool:
    """Return whether torch's threads can be used: there are several, and they belong to this process."""
    import torch

    return not (is_ending() or may_be_fork()) and torch.get_num_threads() > 1


def _host_rows(data: Any) -> tuple[NDArray[Any], torch.dtype | None]:
    """Return the data as a contiguous array, a view if possible, and the torch dtype if numpy has no such dtype."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(data.shape), None
    tensor = user_tensor(data)
    if tensor.device.type != "cpu":
        raise TypeError(f"the data are on {tensor.device}: pass device= to feed them from there, or .cpu()")
    tensor = tensor.contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:  # a dtype that numpy lacks
        return view_as_integers(tensor).numpy(), tensor.dtype


@contextmanager
def default_modes(device_type: str) -> Iterator[None]:
    """Turn off autocast and inference mode and turn on gradients, as in a new thread."""
    import torch

    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            modes.enter_context(torch.enable_grad())
        if torch.is_autocast_enabled(device_type):
            modes.enter_context(torch.autocast(device_type, enabled=False))
        yield
