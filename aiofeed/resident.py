"""Batches of data that stay in memory, on the device or the host: views of windows that are permuted there.

There is no thread and no event loop behind it: the consumer's own thread makes what it asks for, on the host, or queues
it one window ahead, on a device. Nothing here refers to itself in a circle: device memory goes when its feeder does,
not when the collector comes by.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from aiofeed import trace
from aiofeed.counters import Counters
from aiofeed.device_windows import DeviceWindows
from aiofeed.errors import DeviceCopyError
from aiofeed.handoff import Handoff
from aiofeed.items import Closed, Ended, Failed, Item, Ready
from aiofeed.order import Stretch
from aiofeed.sources.tensors import Tensors
from aiofeed.stream import Stream
from aiofeed.windows import HostWindows, Made, Window, Windows

if TYPE_CHECKING:
    from aiofeed.device import DeviceBackend


class Store:
    """Resident data, uploaded when first asked for. It outlives the streams that are served from it.

    Args:
        source: the data.
        batch_size: samples per batch.
        backend: the device; ``None``: the host.
        memory_bytes: of all windows together, those that the user keeps not counted.
    """

    def __init__(self, source: Tensors, *, batch_size: int, backend: DeviceBackend | None, memory_bytes: int) -> None:
        self._source = source
        self.batch_size = batch_size
        self.backend = backend
        self._memory_bytes = memory_bytes
        self._windows: Windows | None = None

    def open(self) -> Windows:
        """What makes windows of the data."""
        if self._windows is None:
            if self.backend is None:
                self._windows = HostWindows(self._source, self.batch_size, self._memory_bytes)
            else:
                self._windows = DeviceWindows(self.backend, self._source, self.batch_size, self._memory_bytes)
        return self._windows

    def follow(self) -> None:
        """What the calling thread has queued on the device comes before later windows."""
        if isinstance(self._windows, DeviceWindows):
            self._windows.follow()

    def clear(self) -> None:
        """Let go of the data; they are uploaded again when asked for again."""
        self._windows = None


class Pulled(Handoff[Item]):
    """A handoff into which nobody puts: the next item is made when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._now: Iterator[Item] = iter(())
        self._later: Iterator[Iterator[Item]] = iter(())

    def begin(self, windows: Iterator[Iterator[Item]]) -> None:
        """Give these items from now on; they come by windows."""
        self.items.clear()
        self._now, self._later = iter(()), windows

    def put(self, item: Item) -> None:
        """Nobody waits here, so that nobody has to be told that it was closed."""

    def first(self, timeout_s: float | None = None) -> Item:
        """The next item, made now and kept until it is deleted; a failure as one."""
        if not self.items:
            self.items.append(self._make())
        return self.items[0]

    async def first_async(self) -> Item:
        """The same. Between windows it lets other tasks run, and can be cancelled, which loses nothing."""
        if not self.items:
            for item in self._now:
                self.items.append(item)
                break
            else:
                await asyncio.sleep(0)
        return self.first()

    def _make(self) -> Item:
        try:
            for item in self._now:
                return item
            for window in self._later:
                self._now = window
                return next(window)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised at the consumer's line
            return Failed(error)
        return Closed()


class Resident:
    """What stands behind a feeder of data that stay where they are: its store, and the batches of a stream.

    Args:
        store: the data.
        transform: applied to each batch, in the consumer's thread and on its stream.
    """

    queue_depth = 0
    chunk_size = 0
    tuner = None

    def __init__(self, store: Store, transform: Callable[[Any], Any] | None) -> None:
        self._store = store
        self._transform = transform
        self._pulled = Pulled()
        self.handoff: Handoff[Item] = self._pulled
        self._pid = os.getpid()
        self._stopped = False

    def successor(self) -> Resident:
        """Another with the same data, where they have not been let go of."""
        return Resident(self._store, self._transform)

    @property
    def delivery(self) -> Resident:
        """Itself."""
        return self

    @property
    def inherited(self) -> bool:
        """Whether it belongs to a parent process."""
        return self._pid != os.getpid()

    def start(self, stream: Stream) -> None:
        """Begin to give the batches of a stream; nothing is uploaded or permuted before the first is asked for."""
        self._pulled.begin(_items(self._store, stream))

    def watch(self, owner: object) -> None:
        """Nothing to do: what it holds goes when it goes."""

    def begin(self) -> None:
        """A pass begins in the calling thread."""
        self._store.follow()

    def take(self, item: Ready) -> Any:
        """The batch, transformed where there is a transform."""
        if self._transform is None:
            return item.batch
        try:
            return self._transform(item.batch)
        except Exception as error:
            backend = self._store.backend
            if backend is None:
                error.add_note(f"in transform= of batch {item.number}")
                raise
            raise DeviceCopyError(
                f"transform raised {type(error).__name__} on {backend.name}, in batch {item.number}: {error}"
            ) from error

    def reusable(self) -> bool:
        """Whether another stream can be started."""
        return not self._stopped and not self.inherited

    def stop(self) -> None:
        """Give no more. The data stay, for a successor."""
        self._stopped = True
        self._pulled.begin(iter(()))

    def join(self, timeout_s: float) -> bool:
        """Let go of the data."""
        self._store.clear()
        return True

    async def stopped(self) -> None:
        """Let go of the data."""
        self._store.clear()


def _items(store: Store, stream: Stream) -> Iterator[Iterator[Item]]:
    """The batches of a stream's epochs, by windows, and the epochs' ends."""
    windows = store.open()
    for made in _ahead(_made(windows, stream), windows.ahead):
        items = iter((made,)) if isinstance(made, Ended) else _batches(*made)
        # The last reference to a window is to be the user's.
        del made
        yield items
        del items


def _batches(stretch: Stretch, window: Window) -> Iterator[Item]:
    samples, size, counters = len(stretch.indices), stretch.batch_size, Counters()
    for at, number in enumerate(stretch.numbers):
        first, last = at * size, min((at + 1) * size, samples)
        yield Ready(number, last - first, window.batch(first, last), None, 0, None, counters)
    window.used()


def _made(windows: Windows, stream: Stream) -> Iterator[Made | Ended]:
    """The windows of a stream's epochs, made as they are asked for."""
    for start, permutation, counters in stream.epochs():
        began = time.perf_counter()
        for stretch in stream.schedule.stretches(start, permutation, lambda: windows.most):
            for made in windows.make(stretch):
                ended = time.perf_counter()
                if windows.stage == "copy":
                    counters.copy_s += ended - began
                else:
                    counters.collate_s += ended - began
                if trace.listeners:
                    trace.emit(windows.stage, began, ended, stretch.numbers[0])
                yield made
                began = time.perf_counter()
        yield Ended()


def _ahead(made: Iterable[Made | Ended], windows: int) -> Iterator[Made | Ended]:
    """The same, with so many windows made before they are asked for. The end of an epoch is passed on at once."""
    queue: deque[Made | Ended] = deque()
    waiting = 0
    for entry in made:
        queue.append(entry)
        waiting += not isinstance(entry, Ended)
        while queue and (waiting > windows or isinstance(queue[0], Ended)):
            waiting -= not isinstance(queue[0], Ended)
            yield queue.popleft()
    yield from queue
