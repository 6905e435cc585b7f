"""Batches of data that stay in memory, on a device or on the host: views of windows that are permuted there.

There is no thread and no event loop: the consumer's own thread makes the windows, on a device one window ahead. No
object refers to itself in a cycle, so that device memory is freed with the feeder and not by the garbage collector.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from aiofeed.kernel.core.errors import DeviceCopyError, IteratorClosedError, ReadError, SampleError
from aiofeed.kernel.core.validation import check_returned
from aiofeed.kernel.devices.backend import poll, poll_pauses
from aiofeed.kernel.engine.fetch.user_errors import sample_error
from aiofeed.kernel.feeder.pipeline import InlineBatches
from aiofeed.kernel.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, QueueItem, ReadyBatch, Stopped
from aiofeed.kernel.sampling.epochs import EpochStart, EpochStream
from aiofeed.kernel.sampling.order import BatchLists
from aiofeed.resident.batch_ranges import BatchRange, BatchRanges, PlannedRanges
from aiofeed.resident.device_windows import DeviceTokenWindows, DeviceWindows
from aiofeed.resident.host_windows import HostWindows, default_modes
from aiofeed.resident.tensors import with_own_rows

if TYPE_CHECKING:
    import torch

    from aiofeed.kernel.core.faces import BaseDevice, BaseSource
    from aiofeed.kernel.core.types import Transform

log: logging.Logger = logging.getLogger("aiofeed.engine")

Windows: TypeAlias = DeviceWindows | HostWindows


class ResidentData:
    """Resident data, uploaded when first used. Outlives the pipelines that use it.

    Args:
        source: ``Tensors`` or ``CachedData``, of which rows are gathered; or a source that gathers samples by itself:
            ``Tokens``, or without a device a ``Table``.
        batch_size: Samples per batch.
        backend: The device; ``None`` for the host.
        memory_bytes: Limit of all windows together, excluding those the user keeps.

    Attributes:
        form_batch: Makes a batch of the rows of each tensor; ``None``: the list of rows is the batch.
    """

    def __init__(self, source: Any, *, batch_size: int, backend: BaseDevice | None, memory_bytes: int) -> None:
        self.source: Any = source
        self.windows: Windows | None = None
        self.form_batch: Callable[[list[torch.Tensor]], Any] | None = source.form_batch
        self.backend = backend
        self._batch_size = batch_size
        self._memory_bytes = memory_bytes

    def open(self) -> Windows:
        """Upload the data, if necessary, and return the object that makes windows of it."""
        if self.windows is None:
            source, sizes = self.source, (self._batch_size, self._memory_bytes)
            if self.backend is None:
                self.windows = HostWindows(source, *sizes)
            else:
                source.mapped.check()
                kind = DeviceTokenWindows if source.traits.rows else DeviceWindows
                self.windows = kind(self.backend, with_own_rows(source), *sizes)
        return self.windows

    def read_error(self, error: OSError, batch_range: BatchRange | None) -> SampleError:
        """Return the error of the first sample of a range whose file became shorter."""
        failed = 0
        for failed in batch_range.indices.tolist() if batch_range and self.source.traits.rows else ():
            try:
                self.source.read_now([failed])
            except OSError:
                break
        return sample_error(ReadError, error, self.source.key(failed), failed)

    def clear(self, timeout_s: float) -> None:
        """Drop the uploaded data, after ``DeviceWindows.close``; ``open`` uploads it again."""
        windows, self.windows = self.windows, None
        if windows is not None:
            windows.close(timeout_s)


class _EpochWindows:
    """The windows of an epoch that are not made yet."""

    def __init__(self, stream: EpochStream, start: EpochStart) -> None:
        self.stream = stream
        self.start = start
        self.made: list[ReadyBatch] = []
        self.end: EndOfEpoch = EndOfEpoch()
        self._ranges: BatchRanges | PlannedRanges
        if isinstance(start.sampled, BatchLists):
            self._ranges = PlannedRanges(stream.schedule, start)
        else:
            self._ranges = BatchRanges(stream.schedule, start.position, start.sampled)
        self._last = stream.schedule.batch_numbers(start.position) - 1

    def next_range(self, windows: Windows) -> BatchRange | None:
        """Return the batches of the next window; ``None`` at the end of the epoch."""
        first = self.start.first_batch
        if self.made:
            # Ctrl-C may have come before they were queued: on the host, those that were not taken are made again.
            last = self.made[-1]
            done = windows.ahead or last.batch is None
            first = last.number + last.followers + 1 if done else self.made[0].number
        found = self._ranges.at(first, windows.max_batches)
        if found is None or not self.stream.is_cut:
            return found
        self.end = EndOfEpoch(found.numbers[0])
        return None

    def next_epoch(self) -> _EpochWindows | None:
        """Return the next epoch of the stream; ``None`` if the stream ends."""
        start = self.stream.after(self.start)
        return None if start is None else _EpochWindows(self.stream, start)

    def make(self, windows: Windows, batch_range: BatchRange, runs: bool = False) -> list[ReadyBatch]:
        """Make a window and return its batches; with ``runs`` the first one may have others that follow it."""
        began = time.perf_counter()
        batch_range, window = windows.make(batch_range)
        seconds, stats = time.perf_counter() - began, self.start.counters
        setattr(stats, windows.statistic, getattr(stats, windows.statistic) + seconds)
        numbers, samples, size = batch_range.numbers, len(batch_range.indices), batch_range.batch_size
        stats.samples_decoded += samples if stats.samples_decoded else 0  # threads have made the batches before
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batches %d to %d: window made in %.1f ms", numbers[0], numbers[-1], seconds * 1e3)
        followers = 0
        if runs and isinstance(window, list) and numbers[-1] - numbers[0] == len(numbers) - 1:
            # The last batch of the epoch may be smaller, and the session acts when it is returned.
            followers = max(len(numbers) - 1 - (numbers[-1] == self._last), 0)
        items = []
        for at in (0, *range(followers + 1, len(numbers))):
            first, last = at * size, min((at + 1) * size, samples)
            batch = window[at] if isinstance(window, list) else (window, first, last)
            indices = batch_range.indices[first:last]
            items.append(ReadyBatch(numbers[at], last - first, batch, counters=stats, indices=indices))
        if followers and isinstance(window, list):
            items[0].following, items[0].followers = window[followers:0:-1], followers
        return items


class WindowQueue(BatchQueue[QueueItem]):
    """A queue without a producer: when it is empty, the consumer's thread makes the next window and queues its batches.

    Ctrl-C loses nothing between batches, while the queue waits for the device, and in the making of a window on the
    host. A Ctrl-C that interrupts the making of one on a device closes the queue, as it may have been made in part; so
    does one that comes in the microsecond in which an epoch ends.
    """

    def __init__(self, data: ResidentData) -> None:
        super().__init__()
        self._data = data
        self._epoch: _EpochWindows | None = None
        # Windows made ahead, each as the list of its batches, and ends of epochs between them.
        self._ahead: deque[list[QueueItem]] = deque()
        # True while state changes in several steps; if it is still True at the next `peek`, Ctrl-C interrupted them.
        self._changing = False

    def __len__(self) -> int:
        """Return 0: no batch is finished before the consumer asks for it."""
        return 0

    def start(self, stream: EpochStream) -> None:
        """Give the batches of a stream from now on."""
        self.stop()
        self._epoch, self._changing = _EpochWindows(stream, stream.first), False
        self.items.clear()

    def stop(self) -> None:
        """Drop all windows and give no more batches."""
        self._epoch = None
        self._ahead.clear()
        self.items.clear()
        self.items.append(Stopped())

    def peek(self, timeout_s: float | None = None) -> QueueItem:
        """Return the next item without removing it; make a window if there is none. An error becomes an item."""
        while not self.items:
            self._refill(None)
        return self.items[0]

    async def peek_async(self, on_long_wait: Callable[[], object] | None = None) -> QueueItem:
        """Return the next item without removing it. Runs other tasks before it makes a window.

        It waits for the device without blocking the event loop. Cancelling the task loses nothing.
        """
        if not self.items:
            began = time.perf_counter()
            await asyncio.sleep(0)
            for pause_s in poll_pauses():
                if not self._must_wait():
                    break
                await asyncio.sleep(pause_s)
            self._refill((began, time.perf_counter()))
        return self.peek()

    def _must_wait(self) -> bool:
        """Return whether the next window has to wait for the device."""
        windows = self._data.windows
        try:
            return windows is not None and self._to_make(windows) is not None and not windows.device_ready()
        except Exception:  # noqa: BLE001 - `_refill` meets the same error and puts it into the queue
            return False

    def _refill(self, waited: tuple[float, float] | None) -> None:
        """Queue the batches of the next window, or the end of the epoch.

        Args:
            waited: When the caller began and ended to wait for the device, or for other tasks of its event loop.
        """
        if self._changing:
            self.items.append(FeedFailure(IteratorClosedError(_INTERRUPTED)))
            return
        batch_range: BatchRange | None = None
        try:
            windows = self._data.open()
            while (epoch := self._to_make(windows)) is not None:
                batch_range = epoch.next_range(windows)
                if batch_range is not None:
                    waited = poll(windows.device_ready) or waited
                if batch_range is not None and not windows.ahead:
                    epoch.made = epoch.make(windows, batch_range, self.runs)
                    epoch.made[0].device_backlog = waited
                    self.items.extend(epoch.made)
                    return
                following = epoch.next_epoch() if batch_range is None else None
                self._changing = True
                if batch_range is not None:
                    epoch.made = epoch.make(windows, batch_range)
                    self._ahead.append([*epoch.made])
                else:
                    self._epoch = following
                    self._ahead.append([epoch.end])
                self._changing = False
            self._changing = True
            items = self._ahead.popleft() if self._ahead else [Stopped()]
            if isinstance(items[0], ReadyBatch):
                items[0].device_backlog = waited
            self.items.extend(items)
            self._changing = False
        except Exception as error:  # noqa: BLE001 - the consumer raises it
            failed = self._data.read_error(error, batch_range) if isinstance(error, OSError) else error
            self.items.append(FeedFailure(failed, failures=(failed,) if isinstance(failed, SampleError) else ()))

    def _to_make(self, windows: Windows) -> _EpochWindows | None:
        """Return the epoch of which a window must be made before the next items can be queued; ``None`` if none."""
        if self._ahead and isinstance(self._ahead[0][0], EndOfEpoch):
            return None
        made = sum(isinstance(items[0], ReadyBatch) for items in self._ahead)
        return self._epoch if made <= windows.ahead else None


_INTERRUPTED = (
    "Ctrl-C interrupted this iterator while it made batches. To go on after the last batch it returned, call "
    "feeder.load_state_dict(feeder.state_dict()) and iterate over the feeder again"
)


class ResidentPipeline:
    """Gives the batches of resident data; see ``WindowQueue``. It has no threads.

    Args:
        data: May be shared with earlier pipelines.
    """

    streams = False
    chunk_size = 0
    tuner = None
    cpu_s: float = 0.0

    def __init__(self, data: ResidentData) -> None:
        self.data = data
        self.queue: WindowQueue = WindowQueue(data)
        self._pid = os.getpid()
        self._stopped = False

    @property
    def inherited(self) -> bool:
        """Whether it belongs to a parent process."""
        return self._pid != os.getpid()

    def start(self) -> None:
        """Make later windows wait for the work that the calling thread has queued on the device."""
        if self.data.windows is not None:
            self.data.windows.wait_for_caller()

    def feed(self, stream: EpochStream) -> None:
        """Give the batches of a stream. Nothing is uploaded or permuted before the first one is asked for."""
        self.queue.start(stream)

    def waiting_for(self) -> tuple[str, ...]:
        """Return the device: the consumer's thread makes the batches."""
        return ("for the device to make room for a window of batches",)

    def watch(self, owner: object) -> None:
        """Do nothing: there are no threads to stop."""

    def consumer_transform(self, transform: Transform | None) -> Transform | None:
        """Return ``transform`` as it is called in the consumer's thread, on a device as in the copy thread.

        There it runs in torch's default modes, whatever the consumer has set, and its errors are ``DeviceCopyError``.
        """
        backend = self.data.backend
        return transform if transform is None or backend is None else partial(_transformed, transform, backend)

    def take(self, item: ReadyBatch) -> Any:
        """Return the batch of an item; the calling thread's current stream waits for it."""
        if self.data.backend is None:
            return item.batch
        window, first, last = item.batch
        rows = window(first, last)
        return rows if self.data.form_batch is None else self.data.form_batch(rows)

    def reusable(self) -> bool:
        """Return whether it can feed another stream."""
        return not self._stopped and not self.inherited

    def stop(self) -> None:
        """Give no more batches. The data stay, for a successor."""
        self._stopped = True
        self.queue.stop()

    def join(self, timeout_s: float) -> bool:
        """Drop the uploaded data."""
        self.data.clear(timeout_s)
        return True

    async def stopped(self) -> None:
        """Drop the uploaded data."""
        self.data.clear(0)


def _transformed(transform: Transform, backend: BaseDevice, batch: Any) -> Any:
    try:
        with default_modes(backend.device.type):
            return check_returned("transform=", transform(batch))
    except Exception as error:
        raise DeviceCopyError(f"transform raised {type(error).__name__} on {backend.name}: {error}") from error


class InlineData(InlineBatches):
    """The data of a source, of which batches are gathered, or views of windows, where they are wanted."""

    def __init__(self, source: BaseSource, length: int) -> None:
        self._source, self._length, self._places = source, length, 0

    def ready(self, stream: EpochStream) -> bool:
        """Return whether the data are in memory, after they were read if they are to be."""
        self._places = stream.schedule.places(self._length)
        return self._source.load(self._places)

    def may_read_ahead(self, streams: bool | None) -> bool:
        """Return whether threads do not stream an epoch while the data have come into memory."""
        return not (streams and self._source.load(self._places))

    def new_pipeline(self, config: Any, running: Any) -> ResidentPipeline:
        """Return a pipeline of the data, which shares those of the running one."""
        if isinstance(running, ResidentPipeline) and not running.inherited:
            return ResidentPipeline(running.data)
        return ResidentPipeline(
            ResidentData(
                self._data(config),
                batch_size=config.batch_size,
                backend=config.backend,
                memory_bytes=config.limits.memory_bytes,
            )
        )

    def _data(self, config: Any) -> Any:
        """Return the object that has the data."""
        return config.source
