"""Batches of data that stay in memory, on the device or the host: views of windows that are permuted there.

There is no thread and no event loop behind it: the consumer's own thread makes what it asks for, on the host, or queues
it one window ahead, on a device. Nothing here refers to itself in a circle: device memory goes when its feeder does,
not when the collector comes by.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiofeed import trace
from aiofeed.counters import Counters
from aiofeed.device_windows import DeviceWindows
from aiofeed.errors import DeviceCopyError
from aiofeed.handoff import Handoff
from aiofeed.items import Closed, Ended, Failed, Item, Ready
from aiofeed.order import Stretch
from aiofeed.stream import EpochStart, Stream
from aiofeed.windows import HostWindows, Made, Rows, Window, Windows

if TYPE_CHECKING:
    import torch

    from aiofeed.device import DeviceBackend


class Store:
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


class _Items(deque[Item]):
    """The items of a window, and where to go on behind them: one assignment puts both in place."""

    after: _Walk | None = None
    used: Callable[[], object] | None = None


class Pulled(Handoff[Item]):
    """A handoff into which nobody puts: the next items are made when they are asked for.

    The queue is replaced whole, so that Ctrl-C anywhere in the making of a window loses nothing: it is made again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.items: _Items = _Items()

    def begin(self, walk: _Walk | None) -> None:
        """Give the items of a walk from now on."""
        items = _Items()
        items.after = walk
        self.items = items

    def put(self, item: Item) -> None:
        """Nobody waits here, so that nobody has to be told that it was closed."""

    def first(self, timeout_s: float | None = None) -> Item:
        """The next item, made now and kept until it is deleted; a failure as one."""
        if not self.items:
            self._make()
        return self.items[0]

    async def first_async(self) -> Item:
        """The same. Between windows it lets other tasks run, and can be cancelled, which loses nothing."""
        if not self.items:
            await asyncio.sleep(0)
        return self.first()

    def _make(self) -> None:
        now = self.items
        items = _Items()
        try:
            if now.used is not None:
                now.used()
            if now.after is not None:
                items = now.after.items()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised at the consumer's line
            items.append(Failed(error))
        if not items:
            items.append(Closed())
        self.items = items


class Resident:
    """What stands behind a feeder of data that stay where they are: its store, and the batches of a stream.

    Args:
        store: the data.
        transform: applied to each batch, in the consumer's thread and on its stream.
        shape: makes a batch of the rows of each tensor; ``None``: their list.
    """

    queue_depth = 0
    chunk_size = 0
    tuner = None

    def __init__(
        self,
        store: Store,
        transform: Callable[[Any], Any] | None,
        shape: Callable[[list[torch.Tensor]], Any] | None = None,
    ) -> None:
        self._store = store
        self._transform = transform
        self._shape = shape
        self._pulled = Pulled()
        self.handoff: Handoff[Item] = self._pulled
        self._pid = os.getpid()
        self._stopped = False
        self._watched: weakref.ref[object] | None = None
        # What stood in its place, and may not be gone yet.
        self.before: Any = None

    def successor(self) -> Resident:
        """Another with the same data, where they have not been let go of."""
        found = Resident(self._store, self._transform, self._shape)
        found.before = self.before
        return found

    @property
    def source(self) -> Rows:
        """The data."""
        return self._store.source

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
        self._pulled.begin(_Walk(self._store, stream))

    def watch(self, owner: object) -> None:
        """Give no more to others once ``owner`` is dropped; it replaces the one watched before."""
        self._watched = weakref.ref(owner)

    def begin(self) -> None:
        """A pass begins in the calling thread."""
        self._store.follow()

    def take(self, item: Ready) -> Any:
        """The batch, transformed where there is a transform."""
        window, first, last = item.batch
        batch = window.batch(first, last)
        if self._shape is not None:
            batch = self._shape(batch)
        if self._transform is None:
            return batch
        try:
            return self._transform(batch)
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


class _Epoch:
    """An epoch of a stream, to be cut into windows."""

    def __init__(self, stream: Stream, start: EpochStart) -> None:
        self.start = start
        self.counters = start.counters
        self.stretches = stream.schedule.stretches(start.position, start.permutation)


class _Walk:
    """Where a stream stands: what was made ahead, and what is to be made next. It does not change.

    Args:
        store: the data.
        stream: the epochs.
        ahead: windows that were made but not asked for, and ends of epochs between them.
        epoch: what is to be made next is of this; ``None``: nothing was made yet, or with ``over`` nothing is left.
        number: the batch that is made next.
        over: whether the stream has ended.
    """

    __slots__ = ("ahead", "epoch", "number", "over", "store", "stream")

    def __init__(
        self,
        store: Store,
        stream: Stream,
        ahead: tuple[tuple[_Epoch, Made | None], ...] = (),
        epoch: _Epoch | None = None,
        number: int = 0,
        over: bool = False,
    ) -> None:
        self.store = store
        self.stream = stream
        self.ahead = ahead
        self.epoch = epoch
        self.number = number
        self.over = over

    def items(self) -> _Items:
        """The next window's items, or an epoch's end; none behind the last."""
        windows = self.store.open()
        walk = self
        # The end of an epoch is passed on at once.
        while not walk.over and not (walk.ahead and walk.ahead[0][1] is None) and walk._windows <= windows.ahead:
            walk = walk._further(windows)
        items = _Items()
        if walk.ahead:
            (epoch, made), rest = walk.ahead[0], walk.ahead[1:]
            items.after = _Walk(walk.store, walk.stream, rest, walk.epoch, walk.number, walk.over)
            if made is None:
                items.append(Ended())
            else:
                items.extend(_batches(*made, epoch.counters))
                items.used = made[1].used
        return items

    @property
    def _windows(self) -> int:
        return sum(made is not None for _, made in self.ahead)

    def _further(self, windows: Windows) -> _Walk:
        epoch = self.epoch or _Epoch(self.stream, self.stream.first)
        began = time.perf_counter()
        stretch = epoch.stretches.at(self.number, windows.most)
        if stretch is None:
            following = self.stream.after(epoch.start)
            upcoming = None if following is None else _Epoch(self.stream, following)
            return _Walk(self.store, self.stream, (*self.ahead, (epoch, None)), upcoming, over=following is None)
        made = windows.make(stretch)
        ended, first, last = time.perf_counter(), made[0].numbers[0], made[0].numbers[-1]
        if windows.stage == "copy":
            epoch.counters.copy_s += ended - began
        else:
            epoch.counters.collate_s += ended - began
        if trace.listeners:
            trace.emit(windows.stage, began, ended, first)
        return _Walk(self.store, self.stream, (*self.ahead, (epoch, made)), epoch, last + 1)


def _batches(stretch: Stretch, window: Window, counters: Counters) -> list[Item]:
    samples, size = len(stretch.indices), stretch.batch_size
    items: list[Item] = []
    for at, number in enumerate(stretch.numbers):
        first, last = at * size, min((at + 1) * size, samples)
        items.append(Ready(number, last - first, (window, first, last), None, 0, None, counters))
    return items
