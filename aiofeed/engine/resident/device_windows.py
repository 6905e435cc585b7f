"""Data on a device, and windows of it that are permuted there, on the side stream, while the one before is used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from aiofeed.core.errors import DeviceCopyError
from aiofeed.core.formatting import format_bytes
from aiofeed.core.types import HostTensor
from aiofeed.engine.resident.host_windows import (
    FIRST_LOOK_S,
    LOOK_S,
    Made,
    Rows,
    Window,
    as_tensor,
    row_bytes,
    window_batches,
)
from aiofeed.runtime.buffers import PinnedBufferPool, array
from aiofeed.runtime.tensors import tensor_row_bytes, view_as_integers
from aiofeed.sampling.order import BatchRange

if TYPE_CHECKING:
    import torch

    from aiofeed.devices.backend import DeviceBackend, Event, Stream
    from aiofeed.devices.copier import Copier, PendingCopy

# A device permutes that much in a fraction of a millisecond, which hides what it costs the host to say so.
DEVICE_WINDOW_BYTES = 64 << 20
# The one that is used, the next, and those whose last work may still be queued.
QUEUED_WINDOWS = 2
DEVICE_WINDOWS = 2 + QUEUED_WINDOWS
# Of the device's free memory, windows take no more.
FREE_SHARE = 4
# What says which sample a row is goes to the device with each window: of small rows the larger part.
_INDEX_BYTES = 8


class DeviceWindow(Window):
    """Rows on a device, or on their way.

    Args:
        copier: hands them to the consumer's stream.
        in_flight: the rows.
        begun: called when its first batch is handed out, with the list of the streams that use it, which still grows.
    """

    def __init__(self, copier: Copier, in_flight: PendingCopy, begun: Callable[[list[Stream]], object]) -> None:
        self._copier = copier
        self._in_flight = in_flight
        self._streams: list[Stream] = []
        self._begun = begun

    def batch(self, first: int, last: int) -> list[torch.Tensor]:
        """Rows ``first`` to ``last - 1`` of each tensor; the calling thread's current stream waits for them."""
        import torch

        stream = self._copier.backend.current_stream()
        if stream not in self._streams:
            self._copier.deliver(self._in_flight)
            self._streams.append(stream)
            if len(self._streams) == 1:
                self._begun(self._streams)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.batch(first, last)
        # Views with a version counter of their own.
        return [rows[first:last].data for rows in self._in_flight.batch]


class DeviceWindows:
    """Data on a device, uploaded here, and permuted on the side stream.

    A window is fresh memory on the side stream each time, and dropped when its batches were handed out: the device's
    allocator gives it out again once the last view is gone and the streams that used it are through. No finalizer of
    ours has a part in it.

    Args:
        backend: the device.
        source: the data.
        batch_size: samples per batch.
        memory_bytes: of all windows together, those that the user keeps not counted.

    Raises:
        DeviceCopyError: the data, and windows of one batch beside them, do not fit on the device.
    """

    # It is made on the side stream while the one before is used.
    ahead = 1
    stage = "copy"

    def __init__(self, backend: DeviceBackend, source: Rows, batch_size: int, memory_bytes: int) -> None:
        from aiofeed.devices.copier import Copier

        self._backend = backend
        self._source = source
        self._batch_bytes = batch_size * row_bytes(source)
        rows = _DeviceRows(source.alias)
        self._copier = Copier(backend, rows)
        self._indices = PinnedBufferPool(backend.pin, keep=DEVICE_WINDOWS)
        self._copying: deque[tuple[Event, Callable[[], None]]] = deque()
        # Of windows of which batches were handed out: the streams that use them, and once no more are, what is queued.
        self._begun: deque[list[Stream]] = deque()
        self._queued: deque[list[Event]] = deque()
        self.waited: tuple[float, float] | None = None
        self.follow()
        rows.data = self._upload()
        bounds = [DEVICE_WINDOW_BYTES, memory_bytes // DEVICE_WINDOWS]
        if (memory := free_and_total(backend)) is not None:
            bounds.append(memory[0] // FREE_SHARE)
        self.most = window_batches(self._batch_bytes + batch_size * _INDEX_BYTES, *bounds)

    def follow(self) -> None:
        """Let the side stream wait for what the calling thread has queued: data that are made on the device, say."""
        self._copier.follow()

    def behind(self) -> bool:
        """Whether ``make`` would wait for the device."""
        self._note_queued()
        return self._exceeds(QUEUED_WINDOWS)

    def make(self, batch_range: BatchRange) -> Made:
        """A window, of a part of the stretch where memory is short.

        Raises:
            DeviceCopyError: there is no room for a single batch.
        """
        self._note_queued()
        # A consumer that is further ahead of its device waits here: that bounds the memory, and the device has work.
        self.waited = self._wait(QUEUED_WINDOWS)
        while True:
            try:
                return batch_range, self._issue(batch_range)
            except DeviceCopyError as error:
                cause = error.__cause__
                if not _is_out_of_memory(cause):
                    raise
                if len(batch_range.numbers) == 1:
                    # Without the traceback, whose frames hold device memory.
                    raise self._does_not_fit("a window of one batch") from cause.with_traceback(None)
                # Its traceback's frames hold device memory.
                del cause
            # Pieces so small that as many as are alive at a time take half of what was refused.
            self.most = max(len(batch_range.numbers) // (2 * DEVICE_WINDOWS), 1)
            self._wait(0)
            batch_range = batch_range.head(self.most)

    def _note_queued(self) -> None:
        # Another window is made once the one before is used up, or the pass that it was made for was left.
        while self._begun:
            self._queued.append([self._backend.record(stream) for stream in self._begun[0]])
            self._begun.popleft()

    def _exceeds(self, most: int) -> bool:
        """Whether more windows than so many are used by work that is still queued."""
        try:
            while len(self._queued) > most and all(event.query() for event in self._queued[0]):
                self._queued.popleft()
        except Exception as error:
            raise DeviceCopyError(
                f"{self._backend.name} failed in work queued before: {type(error).__name__}: {error}"
            ) from error
        return len(self._queued) > most

    def _wait(self, most: int) -> tuple[float, float] | None:
        """Wait until no more windows than so many are used by work that is still queued; from when to when."""
        if not self._exceeds(most):
            return None
        since = time.perf_counter()
        # Looked at rather than waited for, which Ctrl-C could not break: a window may be minutes of steps.
        pause_s = FIRST_LOOK_S
        while self._exceeds(most):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S)
        return since, time.perf_counter()

    def _issue(self, batch_range: BatchRange) -> DeviceWindow:
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()[1]()
        start, count = int(batch_range.indices[0]), len(batch_range.indices)
        if batch_range.run:
            in_flight = self._copier.issue((None, start, count))
        else:
            lease = self._indices.lease()
            indices = array(lease, (count,), np.dtype(np.int64))
            np.copyto(indices, batch_range.indices)
            in_flight = self._copier.issue((HostTensor(indices, pinned=lease.pinned), start, count))
            self._copying.append((in_flight.copied, lease.give_back))
        return DeviceWindow(self._copier, in_flight, self._begun.append)

    def _upload(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        import torch

        backend, side = self._backend, self._backend.side_stream()
        memory = free_and_total(backend)
        if memory is not None and self._data_bytes(there=False) + 2 * self._batch_bytes > memory[0]:
            raise self._does_not_fit("the whole")
        resident = []
        try:
            with torch.inference_mode(False), torch.no_grad(), backend.use_stream(side):
                for given in self._source.tensors:
                    tensor = as_tensor(given)
                    flat = view_as_integers(tensor.contiguous())
                    there = backend.copy(flat)
                    # It may be the user's own, made on another stream, and dropped while the side stream reads it.
                    backend.record_stream(there, side)
                    # The host's memory, ours or the user's, is read until then.
                    backend.record(side).synchronize()
                    resident.append((there, tensor.dtype))
        except Exception as error:
            if _is_out_of_memory(error):
                raise self._does_not_fit("the whole") from error.with_traceback(None)
            raise DeviceCopyError(
                f"uploading {self._source!r} to {backend.name} failed: {type(error).__name__}: {error}"
            ) from error
        return resident

    def _data_bytes(self, *, there: bool) -> int:
        """Bytes of the data; without ``there`` of those that are not on the device already."""
        device = self._backend.device
        first = 0 if there else getattr(self._source, "there", 0)
        return sum(
            len(tensor) * tensor_row_bytes(tensor)
            for tensor in self._source.tensors[first:]
            if there or device.type == "cpu" or getattr(tensor, "device", None) != device
        )

    def _does_not_fit(self, what: str) -> DeviceCopyError:
        memory = free_and_total(self._backend)
        found = "" if memory is None else f", which has {format_bytes(memory[0])} free of {format_bytes(memory[1])}"
        return DeviceCopyError(
            f"{what} of {self._source!r} does not fit on {self._backend.name}{found}: the data take "
            f"{format_bytes(self._data_bytes(there=True))}, and two windows of one batch each "
            f"{format_bytes(2 * self._batch_bytes)} beside them. {self._way_out()}"
        )

    def _way_out(self) -> str:
        if hasattr(self._source, "there"):
            return 'cache="host" keeps them in host memory, from where batches are copied'
        return (
            "To have batches copied from host memory instead, pass the data as a Dataset: "
            "Feeder(torch.utils.data.TensorDataset(...), device=..., ...)"
        )


class _DeviceRows:
    """Data on a device, as integers, with their dtypes; called on the side stream. Refers to nothing else of ours."""

    def __init__(self, alias: bool) -> None:
        self.data: list[tuple[torch.Tensor, torch.dtype]] = []
        self._alias = alias

    def __call__(self, wanted: tuple[torch.Tensor | None, int, int]) -> list[torch.Tensor]:
        """The rows of a window: those at indices, or ``count`` from ``start`` on."""
        import torch

        indices, start, count = wanted
        found = []
        # Made under the user's torch.inference_mode, they could not be trained on outside it.
        with torch.inference_mode(False), torch.no_grad():
            for data, dtype in self.data:
                if indices is not None:
                    rows = data.index_select(0, indices)
                else:
                    rows = data.narrow(0, start, count)
                    rows = rows if self._alias else rows.clone()
                found.append(rows.view(dtype))
        return found


def free_and_total(backend: DeviceBackend) -> tuple[int, int] | None:
    """Bytes of the device's memory that are free, and all of them; ``None`` where the backend cannot tell."""
    memory: Callable[[], tuple[int, int] | None] | None = getattr(backend, "memory", None)
    return None if memory is None else memory()


def _is_out_of_memory(error: BaseException | None) -> TypeGuard[torch.OutOfMemoryError]:
    import torch

    return isinstance(error, torch.OutOfMemoryError)
