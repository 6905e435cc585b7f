"""Batches of data that stay in memory, on the device or the host: views of windows that are permuted there.

There is no thread and no event loop behind it: the consumer's own thread makes what it asks for, on the host, or queues
it one window ahead, on a device. Nothing here refers to itself in a circle: device memory goes when its feeder does,
not when the collector comes by.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from aiofeed.core.errors import DeviceCopyError
from aiofeed.engine.resident.cursor import Pulled, Walk
from aiofeed.engine.resident.device_windows import DeviceWindows
from aiofeed.engine.resident.host_windows import HostWindows, Rows, Windows
from aiofeed.runtime.queue import BatchQueue, QueueItem, ReadyBatch
from aiofeed.sampling.epochs import EpochStream

if TYPE_CHECKING:
    import torch

    from aiofeed.devices.backend import DeviceBackend


class ResidentData:
    """Resident data, uploaded when first asked for. It outlives the streams that are served from it.

    Args:
        source: the data.
        batch_size: samples per batch.
        backend: the device; ``None``: the host.
        memory_bytes: of all windows together, those that the user keeps not counted.
    """

    def __init__(self, source: Rows, *, batch_size: int, backend: DeviceBackend | None, memory_bytes: int) -> None:
        self.source = source
        self.batch_size = batch_size
        self.backend = backend
        self._memory_bytes = memory_bytes
        self._windows: Windows | None = None

    def open(self) -> Windows:
        """What makes windows of the data."""
        if self._windows is None:
            if self.backend is None:
                self._windows = HostWindows(self.source, self.batch_size, self._memory_bytes)
            else:
                self._windows = DeviceWindows(self.backend, self.source, self.batch_size, self._memory_bytes)
        return self._windows

    def follow(self) -> None:
        """What the calling thread has queued on the device comes before later windows."""
        if isinstance(self._windows, DeviceWindows):
            self._windows.follow()

    def clear(self) -> None:
        """Let go of the data; they are uploaded again when asked for again."""
        self._windows = None


class ResidentPipeline:
    """What stands behind a feeder of data that stay where they are: its store, and the batches of a stream.

    Args:
        store: the data.
        transform: applied to each batch, in the consumer's thread and on its stream; on a device in torch's default
            modes, whatever the consumer has set, as in the thread where batches on their way are transformed.
        shape: makes a batch of the rows of each tensor; ``None``: their list.
    """

    queue_depth = 0
    chunk_size = 0
    tuner = None

    def __init__(
        self,
        store: ResidentData,
        transform: Callable[[Any], Any] | None,
        shape: Callable[[list[torch.Tensor]], Any] | None = None,
    ) -> None:
        self._store = store
        self._transform = transform
        self._shape = shape
        self._pulled = Pulled()
        self.queue: BatchQueue[QueueItem] = self._pulled
        self._pid = os.getpid()
        self._stopped = False
        self._watched: weakref.ref[object] | None = None
        # What stood in its place, and may not be gone yet.
        self.before: Any = None

    def successor(self) -> ResidentPipeline:
        """Another with the same data, where they have not been let go of."""
        found = ResidentPipeline(self._store, self._transform, self._shape)
        found.before = self.before
        return found

    @property
    def source(self) -> Rows:
        """The data."""
        return self._store.source

    @property
    def delivery(self) -> ResidentPipeline:
        """Itself."""
        return self

    @property
    def inherited(self) -> bool:
        """Whether it belongs to a parent process."""
        return self._pid != os.getpid()

    def start(self, stream: EpochStream) -> None:
        """Begin to give the batches of a stream; nothing is uploaded or permuted before the first is asked for."""
        self._pulled.begin(Walk(self._store.open, stream))

    def watch(self, owner: object) -> None:
        """Give no more to others once ``owner`` is dropped; it replaces the one watched before."""
        self._watched = weakref.ref(owner)

    def begin(self) -> None:
        """A pass begins in the calling thread."""
        self._store.follow()

    def take(self, item: ReadyBatch) -> Any:
        """The batch, transformed where there is a transform."""
        window, first, last = item.batch
        batch = window.batch(first, last)
        if self._shape is not None:
            batch = self._shape(batch)
        if self._transform is None:
            return batch
        backend = self._store.backend
        try:
            if backend is None:
                return self._transform(batch)
            with _modes_of_a_new_thread(backend.device.type):
                return self._transform(batch)
        except Exception as error:
            if backend is None:
                error.add_note(f"in transform= of batch {item.number}")
                raise
            raise DeviceCopyError(
                f"transform raised {type(error).__name__} on {backend.name}, in batch {item.number}: {error}"
            ) from error

    def reusable(self) -> bool:
        """Whether another stream can be started."""
        left = self._watched is not None and self._watched() is None
        return not self._stopped and not left and not self.inherited

    def stop(self) -> None:
        """Give no more. The data stay, for a successor."""
        self._stopped = True
        self._pulled.begin(None)

    def join(self, timeout_s: float) -> bool:
        """Let go of the data, and wait for the end of what stood in its place; whether that has come."""
        self._store.clear()
        return self.before is None or bool(self.before.join(timeout_s))

    async def stopped(self) -> None:
        """The same, without blocking the caller's loop."""
        self._store.clear()
        if self.before is not None:
            await self.before.stopped()


@contextmanager
def _modes_of_a_new_thread(device_type: str) -> Iterator[None]:
    """No autocast, no inference mode, gradients on: an epoch that streams and one that does not give the same."""
    import torch

    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            modes.enter_context(torch.enable_grad())
        if torch.is_autocast_enabled(device_type):
            modes.enter_context(torch.autocast(device_type, enabled=False))
        yield
