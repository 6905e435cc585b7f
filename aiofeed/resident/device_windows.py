"""Windows of data on a device: permuted on the side stream while the consumer uses the window before.

Of files of tokens, all are copied to the device once, and a gather makes several batches.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiofeed.kernel.core.errors import DeviceCopyError
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.types import HostTensor
from aiofeed.kernel.devices.backend import is_complete, is_out_of_memory, poll
from aiofeed.kernel.devices.cuda import allocating
from aiofeed.kernel.runtime.buffers import PinnedBufferPool, array
from aiofeed.kernel.runtime.tensors import INTEGER_OF_SIZE, tensor_row_bytes, view_as_integers
from aiofeed.resident.batch_ranges import BatchRange
from aiofeed.resident.host_windows import Window, row_bytes, user_tensor, window_batches

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.kernel.core.faces import BaseDevice, Event, Stream
    from aiofeed.kernel.devices.copier import Copier, PendingCopy

log: logging.Logger = logging.getLogger("aiofeed.engine")

# A device permutes that much in a fraction of a millisecond, which is longer than the host takes to queue it.
DEVICE_WINDOW_BYTES = 64 << 20
# Host memory that the upload of tokens takes: files may be larger than host memory.
UPLOAD_BYTES = 64 << 20
# Windows whose last work may still be queued; beside them, the window in use and the next one.
QUEUED_WINDOWS = 2
DEVICE_WINDOWS = 2 + QUEUED_WINDOWS
# Windows use at most this fraction (1 / FREE_SHARE) of the device's free memory.
FREE_SHARE = 4
# Each window is copied to the device with one index per row, which for small rows is larger than the rows.
_INDEX_BYTES = 8


class DeviceData(NamedTuple):
    """A tensor of the data on the device: its rows as words, and the shape and dtype of a row."""

    words: torch.Tensor
    shape: Sequence[int]
    dtype: torch.dtype


def _device_batch(
    copier: Copier, pending: PendingCopy, streams: list[Stream], in_use: deque[list[Stream]], first: int, last: int
) -> list[torch.Tensor]:
    """Return rows ``first`` to ``last - 1`` of each tensor; the calling thread's current stream waits for them.

    Args:
        copier: Hands the rows to the consumer's stream.
        pending: The rows, permuted by work that may still be queued.
        streams: The streams that use the window; this function adds the current one.
        in_use: Receives ``streams`` at the first batch.
    """
    import torch

    stream = copier.backend.current_stream()
    if stream not in streams:
        copier.deliver(pending)
        streams.append(stream)
        if len(streams) == 1:
            in_use.append(streams)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _device_batch(copier, pending, streams, in_use, first, last)
    # `.data` gives each view a version counter of its own.
    return [rows[first:last].data for rows in pending.batch]


class DeviceWindows:
    """Uploads data to a device and makes windows of it there, on the side stream.

    Each window is allocated on the side stream and dropped after its batches were returned. The device's allocator
    reuses its memory once the last view is gone and the streams that used it have caught up; no finalizer is involved.
    Arguments as for ``ResidentData``.

    Raises:
        DeviceCopyError: The data and two windows of one batch do not fit on the device.
    """

    # The side stream makes it while the consumer uses the one before.
    ahead = 1
    statistic = "copy_s"

    def __init__(self, backend: BaseDevice, source: Any, batch_size: int, memory_bytes: int) -> None:
        from aiofeed.kernel.devices.copier import Copier

        self._backend = backend
        self._source: Any = source
        self._batch_bytes = batch_size * row_bytes(source)
        # The data on the device; filled below.
        data: list[DeviceData] = []
        self._copier = Copier(backend, partial(self._gather(), data, source))
        # Data that are used where the user has them, in memory that torch did not allocate.
        self._foreign: list[torch.Tensor] = []
        self._indices = PinnedBufferPool(backend.pin, keep=DEVICE_WINDOWS)
        self._copying: deque[tuple[Event, Callable[[], None]]] = deque()
        # For each window with batches returned: first the streams that use it, then, when its last batch was
        # returned, events after the work that is queued on them.
        self._in_use: deque[list[Stream]] = deque()
        self._queued: deque[list[Event]] = deque()
        self.wait_for_caller()
        data += self._upload()
        bounds = [DEVICE_WINDOW_BYTES, memory_bytes // DEVICE_WINDOWS]
        if (memory := free_and_total(backend)) is not None:
            bounds.append(memory[0] // FREE_SHARE)
        self.max_batches: int = window_batches(self._batch_bytes + batch_size * _INDEX_BYTES, *bounds)

    def wait_for_caller(self) -> None:
        """Make the side stream wait for the calling thread's queued work, e.g. data computed on the device."""
        self._copier.wait_for_caller()

    def device_ready(self) -> bool:
        """Return whether queued work uses at most ``QUEUED_WINDOWS`` windows.

        Waiting for that before each window bounds the memory of a consumer that runs ahead of its device.
        """
        # A new window is made when the one before is used up or its iteration was left.
        while self._in_use:
            self._queued.append([self._backend.record(stream) for stream in self._in_use[0]])
            self._in_use.popleft()
        return self._at_most_queued(QUEUED_WINDOWS)

    def make(self, batch_range: BatchRange) -> tuple[BatchRange, Window]:
        """Make a window of a batch range, or of its head if memory is short.

        Raises:
            DeviceCopyError: A window of one batch does not fit.
        """
        while True:
            try:
                return batch_range, self._issue(batch_range)
            except DeviceCopyError as error:
                cause = error.__cause__
                if not is_out_of_memory(cause):
                    raise
                if len(batch_range.numbers) == 1:
                    # Drop the traceback: its frames refer to device memory.
                    raise self._does_not_fit("a window of one batch") from cause.with_traceback(None)
                # The traceback's frames refer to device memory.
                del cause
            # All windows alive at a time then take at most half of the refused size.
            self.max_batches = max(len(batch_range.numbers) // (2 * DEVICE_WINDOWS), 1)
            poll(partial(self._at_most_queued, 0))
            batch_range = batch_range.head(self.max_batches)

    def close(self, timeout_s: float) -> None:
        """Wait for the windows that are made of memory that torch did not allocate, and unlock pinned memory.

        Another process may unmap such memory, or use it again, as soon as nothing refers to the data. If the wait is
        too short or the windows are dropped without it, a later ``release`` of any copier drops the data.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if self._foreign:
                made = self._backend.record(self._backend.side_stream())
                poll(lambda: made.query() or time.monotonic() >= deadline)
            self._give_back_copied()
            self._copier.release()
        except Exception as error:  # noqa: BLE001 - the device has failed; its next use raises the error
            log.debug("%s failed while its last windows were awaited: %s", self._backend.name, error)
        self._indices.close()

    def _at_most_queued(self, windows: int) -> bool:
        """Return whether queued work uses at most this number of windows."""
        name = self._backend.name
        while len(self._queued) > windows and all(is_complete(event, name) for event in self._queued[0]):
            self._queued.popleft()
        return len(self._queued) <= windows

    def _issue(self, batch_range: BatchRange) -> Window:
        self._give_back_copied()
        start, count = int(batch_range.indices[0]), len(batch_range.indices)
        rows = self._rows(batch_range)
        if rows is None:
            pending = self._copier.issue((None, start, count))
        else:
            lease = self._indices.lease()
            indices = array(lease, (count,), np.dtype(np.int64))
            np.copyto(indices, rows)
            pending = self._copier.issue((HostTensor(indices, pinned=lease.pinned), start, count))
            self._copying.append((pending.copied, lease.give_back))
        if self._foreign:
            self._copier.keep_until(pending.ready, self._foreign)
        return partial(_device_batch, self._copier, pending, [], self._in_use)

    def _gather(self) -> Callable[..., list[torch.Tensor]]:
        """Return the function that makes a window."""
        return _gather

    def _rows(self, batch_range: BatchRange) -> NDArray[np.int64] | None:
        """Return the rows to gather; ``None`` for consecutive ones."""
        return None if batch_range.run else batch_range.indices

    def _give_back_copied(self) -> None:
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()[1]()

    def _upload(self) -> list[DeviceData]:
        backend = self._backend
        memory = free_and_total(backend)
        if memory is not None and self._data_bytes(only_to_copy=True) + 2 * self._batch_bytes > memory[0]:
            raise self._does_not_fit("all")
        try:
            with filling(backend):
                return self._copy_data()
        except Exception as error:
            if is_out_of_memory(error):
                raise self._does_not_fit("all") from error.with_traceback(None)
            raise DeviceCopyError(
                f"uploading {self._source!r} to {backend.name} failed: {type(error).__name__}: {error}"
            ) from error

    def _copy_data(self) -> list[DeviceData]:
        """Copy the data to the device; called with the side stream current."""
        backend, side = self._backend, self._backend.side_stream()
        copied = []
        for data in self._source.tensors:
            tensor = user_tensor(data)
            # Keep this reference until the copy has run.
            host = view_as_integers(tensor.contiguous())
            copy = backend.copy(host)
            # It may be the user's tensor: allocated on another stream, dropped while the side stream reads it.
            backend.record_stream(copy, side)
            if copy is host and not _is_torchs(copy):
                # `record_stream` does nothing for it.
                self._foreign.append(copy)
            # The copy reads host memory until this event is complete.
            backend.record(side).synchronize()
            copied.append(DeviceData(rows_as_words(copy), tensor.shape[1:], tensor.dtype))
        return copied

    def _data_bytes(self, *, only_to_copy: bool) -> int:
        """Return the bytes of the data, or with ``only_to_copy`` of those that are not on the device yet."""
        device = self._backend.device
        first = getattr(self._source, "on_device", 0) if only_to_copy else 0
        return sum(
            len(tensor) * tensor_row_bytes(tensor)
            for tensor in self._source.tensors[first:]
            if not only_to_copy or device.type == "cpu" or getattr(tensor, "device", None) != device
        )

    def _does_not_fit(self, what: str) -> DeviceCopyError:
        memory = free_and_total(self._backend)
        found = "" if memory is None else f", which has {format_bytes(memory[0])} free of {format_bytes(memory[1])}"
        return DeviceCopyError(
            f"{what} of {self._source!r} does not fit on {self._backend.name}{found}: the data take "
            f"{format_bytes(self._data_bytes(only_to_copy=False))}, and two windows of one batch each "
            f"{format_bytes(2 * self._batch_bytes)} more. {self._alternative()}"
        )

    def _alternative(self) -> str:
        if hasattr(self._source, "on_device"):
            return 'cache="host" keeps the samples in host memory and copies batches from there'
        return (
            "To copy batches from host memory instead, pass the data as a Dataset: "
            "Feeder(torch.utils.data.TensorDataset(...), device=..., ...)"
        )


class DeviceTokenWindows(DeviceWindows):
    """Uploads the tokens of files to a device, and gathers windows of them there. Arguments as for ``ResidentData``."""

    def __init__(self, backend: BaseDevice, source: Any, batch_size: int, memory_bytes: int) -> None:
        arrays = source.arrays
        self._dtype = np.result_type(*{tokens.dtype for tokens in arrays}).newbyteorder("=")
        self._count = sum(map(len, arrays))
        super().__init__(backend, source, batch_size, memory_bytes)
        # While it is made, a window takes as much memory again: the position of each token.
        self.max_batches: int = max(self.max_batches // 2, 1)

    def _rows(self, batch_range: BatchRange) -> NDArray[np.int64]:
        first: NDArray[np.int64] = self._source.first_tokens(batch_range.indices)
        return first

    def _copy_data(self) -> list[DeviceData]:
        import torch

        backend, step, at = self._backend, max(UPLOAD_BYTES // self._dtype.itemsize, 1), 0
        flat: torch.Tensor | None = None
        for tokens in self._source.arrays:
            for first in range(0, len(tokens), step):
                # As signed integers, which all devices can gather. The copy to the device reads this memory.
                piece = tokens[first : first + step].astype(self._dtype).view(f"i{self._dtype.itemsize}")
                host = torch.from_numpy(piece)
                copy = backend.copy(host)
                flat = copy.new_empty(self._count) if flat is None else flat
                flat[at : at + len(host)].copy_(copy)
                backend.record(backend.side_stream()).synchronize()
                at += len(host)
        assert flat is not None
        return [DeviceData(flat, (), getattr(torch, self._dtype.name))]

    def _data_bytes(self, *, only_to_copy: bool) -> int:
        return self._count * self._dtype.itemsize

    def _alternative(self) -> str:
        return "Without cache= batches are gathered from the files and copied"

    def _gather(self) -> Callable[..., list[torch.Tensor]]:
        return _gather_tokens


def _gather(data: list[DeviceData], source: Any, wanted: tuple[torch.Tensor | None, int, int]) -> list[torch.Tensor]:
    """Return the rows of a window: those at the indices, or without indices ``count`` rows from ``start``.

    The copier calls it on the side stream.
    """
    import torch

    indices, start, count = wanted
    found = []
    # Tensors made under the user's torch.inference_mode could not be trained on outside it.
    with torch.inference_mode(False), torch.no_grad():
        for words, shape, dtype in data:
            if indices is not None:
                rows = words.index_select(0, indices)
            else:
                rows = words.narrow(0, start, count)
                rows = rows if source.alias else rows.clone()
            found.append(words_as_rows(rows, shape, dtype))
    return found


def _gather_tokens(data: list[DeviceData], source: Any, wanted: tuple[torch.Tensor, int, int]) -> list[torch.Tensor]:
    """Return the tokens of windows, and with targets those that follow, as int64; ``wanted`` as for rows.

    The copier calls it on the side stream.
    """
    import torch

    [(flat, _, dtype)], (first, _, count) = data, wanted
    with torch.inference_mode(False), torch.no_grad():
        needed = source.block + source.targets
        positions = first.unsqueeze(1) + torch.arange(needed, device=first.device)
        tokens = flat.index_select(0, positions.view(-1)).view(count, needed)
        parts = [tokens[:, at : at + source.block] for at in range(1 + source.targets)]
        parts = [part.to(torch.int64, copy=True, memory_format=torch.contiguous_format) for part in parts]
        if not dtype.is_signed:
            for part in parts:
                part.bitwise_and_((1 << 8 * dtype.itemsize) - 1)
        return parts


def _is_torchs(tensor: torch.Tensor) -> bool:
    """Return whether torch's allocator owns a tensor's memory; not that of another process or another library."""
    return tensor.untyped_storage().resizable()


@contextmanager
def filling(backend: BaseDevice) -> Iterator[None]:
    """Allocate memory for data that stay on the device, on its side stream, whatever the modes of the consumer are."""
    import torch

    side = backend.use_stream(backend.side_stream())
    with torch.inference_mode(False), torch.no_grad(), allocating(backend.device), side:
        yield


def free_and_total(backend: BaseDevice) -> tuple[int, int] | None:
    """Return the free and total bytes of the device's memory; ``None`` if the backend does not know them."""
    return backend.memory()


def integer_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the integer dtype of the same size; the dtype itself if there is none."""
    name = INTEGER_OF_SIZE.get(dtype.itemsize)
    return dtype if name is None else np.dtype(name)


def rows_as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a contiguous tensor [N, ...] as [N, words], integers as large as row size and address allow.

    A device gathers few large elements faster than many small ones. ``words_as_rows`` undoes it.
    """
    import torch

    nbytes, start = tensor_row_bytes(tensor), tensor.data_ptr() | int(tensor.storage_offset()) * tensor.itemsize
    flat = tensor.view(len(tensor), nbytes // tensor.itemsize)
    if not flat.numel():  # torch does not change the element size of an empty tensor
        return view_as_integers(flat)
    size = next(size for size in (8, 4, 2, 1) if (nbytes | start) % size == 0)
    return flat.view(getattr(torch, INTEGER_OF_SIZE[size]))


def words_as_rows(words: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Rows that ``rows_as_words`` has made words of, or some of them, with the shape and dtype of a row."""
    return words.view(dtype).view(len(words), *shape)
