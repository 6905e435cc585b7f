"""The bridge alone: look-ahead and side-stream copies for batches that somebody else makes."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Sequence, Sized
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from aiofeed.core.errors import as_exception
from aiofeed.core.limits import DEVICE_BATCHES, PREFETCH_BATCHES
from aiofeed.core.statistics import EpochStats
from aiofeed.core.types import Transform, public
from aiofeed.core.validation import check_callable, check_positive_int
from aiofeed.devices.copy_thread import CopyThread
from aiofeed.devices.resolve import DeviceGroup, resolve_devices
from aiofeed.feeder.iterator import FeedIterator
from aiofeed.runtime import threads
from aiofeed.runtime.buffers import BufferPool, PinnedBufferPool
from aiofeed.runtime.cancellation import EndedBy, clear_cancellation, is_cancelled
from aiofeed.runtime.event_loop import EventLoopThread
from aiofeed.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, QueueItem, ReadyBatch, Stopped
from aiofeed.runtime.tensors import stage
from aiofeed.runtime.threads import DaemonThread

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.devices.resolve import Device

BatchT = TypeVar("BatchT")


@public
def prefetch(
    batches: Iterable[BatchT] | AsyncIterable[BatchT],
    device: Device | Sequence[Device] = None,
    *,
    transform: Transform | None = None,
    prefetch_batches: int = PREFETCH_BATCHES,
    device_batches: int = DEVICE_BATCHES,
) -> Prefetch[BatchT]:
    """Look-ahead, and copies on a side stream, for any iterable of batches: an existing ``DataLoader``, say.

    Args:
        batches: an iterable is iterated in a thread of its own; an async iterable on an event loop of its own.
        device: where tensors go, nested in tuple, list, dict, namedtuple or dataclass; ``None``: look-ahead alone.
            A list of devices: a batch comes as a tuple with one part per device, as ``scatter`` gives it.
        transform: applied to each batch on the device, on the side stream (on the host: in the consumer's thread).
        prefetch_batches: batches that may wait in host memory.
        device_batches: batches that may be on the device before they are asked for.

    Returns:
        An object that is iterated with ``for`` or ``async for``, as often as ``batches`` can be, and that has
        ``len()`` where ``batches`` has. Errors of ``batches`` are raised as they are, in their batch's turn.

    Raises:
        TypeError: ``batches`` is not iterable.
    """
    return Prefetch(batches, device, transform, prefetch_batches, device_batches)


class Prefetch(Generic[BatchT]):
    """What ``prefetch`` returns."""

    def __init__(
        self,
        batches: Iterable[BatchT] | AsyncIterable[BatchT],
        device: Device | Sequence[Device],
        transform: Transform | None,
        prefetch_batches: int,
        device_batches: int,
    ) -> None:
        if not isinstance(batches, Iterable | AsyncIterable) and not hasattr(batches, "__getitem__"):
            raise TypeError(f"prefetch takes an iterable or an async iterable of batches, got {batches!r}")
        self._batches = batches
        self._device = device
        self._backend = resolve_devices(device)
        self._transform: Transform | None = check_callable("transform", transform)
        self._prefetch_batches = check_positive_int("prefetch_batches", prefetch_batches)
        self._device_batches = check_positive_int("device_batches", device_batches)

    def __repr__(self) -> str:
        return f"Prefetch({type(self._batches).__name__}, device={self._device!r})"

    def __len__(self) -> int:
        """Batches per pass, where ``batches`` knows."""
        if not isinstance(self._batches, Sized):
            raise TypeError(f"{type(self._batches).__name__} has no len()")
        return len(self._batches)

    def __iter__(self) -> FeedIterator[BatchT]:
        """Begin a pass."""
        return self._begin()

    def __aiter__(self) -> FeedIterator[BatchT]:
        """Begin a pass."""
        return self._begin()

    def _begin(self) -> FeedIterator[BatchT]:
        memory = None
        if self._backend is not None:
            memory = PinnedBufferPool(self._backend.pin, keep=8 * (self._prefetch_batches + 1))
        finished: BatchQueue[QueueItem] = BatchQueue()
        producer: ThreadPull | _LoopProducer
        if isinstance(self._batches, AsyncIterable):
            producer = _LoopProducer(self._batches, finished, room=self._prefetch_batches, memory=memory)
        else:
            iterable = cast("Iterable[Any]", self._batches)
            producer = ThreadPull(iterable, finished, room=self._prefetch_batches, memory=memory)
        try:
            delivery = self._deliver(producer, finished)
        except BaseException:  # nobody else knows of the producer
            producer.stop()
            raise
        iterator: FeedIterator[BatchT] = FeedIterator(delivery, EpochStats(), observer=_Nobody(delivery))
        delivery.watch(iterator)
        try:
            delivery.launch()
        except BaseException:  # Ctrl-C, or no more threads: those that have started end
            delivery.stop()
            raise
        return iterator

    def _deliver(self, producer: ThreadPull | _LoopProducer, finished: BatchQueue[QueueItem]) -> _PullDelivery:
        if self._backend is None:
            return _PullDelivery(producer, finished, self._transform)
        return _CopiedDelivery(producer, finished, self._backend, self._transform, self._device_batches)


class _LoopProducer:
    """A ``LoopPull`` and the runtime that it lives on."""

    def __init__(
        self, batches: AsyncIterable[Any], queue: BatchQueue[QueueItem], *, room: int, memory: PinnedBufferPool | None
    ) -> None:
        self._loop_thread = EventLoopThread(read_threads=1, decode_threads=1)
        self._pull = LoopPull(batches, queue, room=room, memory=memory)

    def launch(self) -> None:
        self._loop_thread.launch()
        self._loop_thread.start(partial(_run, self._loop_thread, self._pull))

    def watch(self, owner: object) -> None:
        self._loop_thread.watch(owner)

    def at_exit(self, function: Callable[[], object]) -> None:
        self._loop_thread.at_exit(function)

    def taken(self) -> None:
        self._loop_thread.call(self._pull.taken)

    def stop(self) -> None:
        self._loop_thread.stop()

    def join(self, timeout_s: float) -> bool:
        return self._loop_thread.join(timeout_s)


async def _run(loop_thread: EventLoopThread, pull: LoopPull) -> None:
    with EndedBy(lambda: loop_thread.stopping):
        await pull.run()


class _PullDelivery:
    """Batches as they came, transformed in the consumer's thread."""

    def __init__(
        self, producer: ThreadPull | _LoopProducer, queue: BatchQueue[QueueItem], transform: Transform | None
    ) -> None:
        self.queue = queue
        self._producer = producer
        self._transform = transform

    def take(self, item: ReadyBatch) -> Any:
        self._producer.taken()
        return item.batch if self._transform is None else self._transform(item.batch)

    def launch(self) -> None:
        self._producer.launch()

    def watch(self, owner: object) -> None:
        self._producer.watch(owner)

    def stop(self) -> None:
        self._producer.stop()

    async def stopped(self) -> None:
        await asyncio.to_thread(self._producer.join, 5.0)


class _CopiedDelivery(_PullDelivery):
    """Batches on a device."""

    def __init__(
        self,
        producer: ThreadPull | _LoopProducer,
        finished: BatchQueue[QueueItem],
        backend: DeviceBackend | DeviceGroup,
        transform: Transform | None,
        room: int,
    ) -> None:
        from aiofeed.devices.group_copier import copier_for

        super().__init__(producer, BatchQueue(), None)
        self._copier = copier_for(backend, transform)
        self._copier.follow()

        def issued(item: ReadyBatch) -> None:
            producer.taken()

        self._thread = CopyThread(self._copier, finished, self.queue, room=room, issued=issued)
        if isinstance(producer, _LoopProducer):
            # It says nothing when it is stopped in the middle; the copy thread would wait for its next batch for ever.
            producer.at_exit(self._thread.stop)

    def take(self, item: ReadyBatch) -> Any:
        return self._thread.take(item)

    def launch(self) -> None:
        self._thread.launch()
        super().launch()

    def watch(self, owner: object) -> None:
        super().watch(owner)
        self._thread.watch(owner)

    def stop(self) -> None:
        self._thread.stop()
        self._producer.stop()


class _Nobody:
    """An observer that only stops the threads at the end."""

    def __init__(self, delivery: _PullDelivery) -> None:
        self._delivery = delivery

    def handing_out(self, item: ReadyBatch) -> None:
        pass

    def handed_out(self, item: ReadyBatch) -> None:
        pass

    def failed(self, item: FeedFailure) -> None:
        pass

    def ended(self) -> None:
        self._delivery.stop()


def _ready(batch: Any, number: int, memory: BufferPool | None) -> ReadyBatch:
    if memory is None:
        return ReadyBatch(number, 0, batch)
    lease = memory.lease()
    staged, _ = stage(batch, lease)
    return ReadyBatch(number, 0, staged, lease)


class ThreadPull:
    """Takes batches from an iterable, a bounded number ahead.

    Args:
        batches: iterated in a thread of its own, started and closed there.
        queue: where the batches go.
        room: how many may wait.
        memory: pinned memory that tensors are moved to; ``None`` leaves them where they are.
    """

    def __init__(
        self, batches: Iterable[Any], queue: BatchQueue[QueueItem], *, room: int, memory: BufferPool | None
    ) -> None:
        self._batches: Iterable[Any] | None = batches
        self.pid = os.getpid()
        self._queue = queue
        self._memory = memory
        self._stopped = False
        self._watched: weakref.ref[Any] | None = None
        # Anything but True ends the thread. When the one that is watched is dropped, its weak reference lands here
        # (a C function: no Python code runs in the collector).
        self._room: SimpleQueue[object] = SimpleQueue()
        for _ in range(room):
            self._room.put(True)
        self._thread = DaemonThread(self._main, "aiofeed-pull")

    def launch(self) -> None:
        """Start the thread."""
        threads.register(self)
        self._thread.start()

    def taken(self) -> None:
        """A batch has left the queue."""
        self._room.put(True)

    def watch(self, owner: object) -> None:
        """End when ``owner`` is dropped."""
        self._watched = weakref.ref(owner, self._room.put)

    def stop(self) -> None:
        """Signal the thread to end. Never blocks; an iterable that is computing its next batch is left to finish it."""
        self._stopped = True
        self._room.put(False)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end, up to ``timeout_s``; whether it has."""
        return self._thread.join(timeout_s)

    def _main(self) -> None:
        batches, self._batches = self._batches, None
        assert batches is not None
        try:
            iterator = iter(batches)
            del batches
            try:
                self._pull(iterator)
            finally:
                # A generator is closed by the thread that ran it.
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # noqa: BLE001 - the user's iterable may raise anything; it is raised at the `for` line
            self._queue.put(FeedFailure(error))
        else:
            self._queue.put(Stopped())  # where it has not ended: a copy thread behind this one ends too

    def _over(self) -> bool:
        return self._stopped or (self._watched is not None and self._watched() is None)

    def _pull(self, iterator: Any) -> None:
        number = 0
        # Room that was there before it was told to end is not used any more.
        while self._room.get() is True and not self._over():
            try:
                batch = next(iterator)
            except StopIteration:
                self._queue.put(EndOfEpoch())
                return
            self._queue.put(_ready(batch, number, self._memory))
            del batch
            number += 1


class LoopPull:
    """Takes batches from an async iterable, on the engine's loop.

    Args:
        batches: iterated by one task.
        queue: where the batches go.
        room: how many may wait.
        memory: pinned memory that tensors are moved to; ``None`` leaves them where they are.
    """

    def __init__(
        self, batches: AsyncIterable[Any], queue: BatchQueue[QueueItem], *, room: int, memory: BufferPool | None
    ) -> None:
        self._batches = batches
        self._queue = queue
        self._memory = memory
        self._room = asyncio.Semaphore(room)

    def taken(self, _: int = 0) -> None:
        """A batch has left the queue; called on the loop."""
        self._room.release()

    async def run(self) -> None:
        """Take batches until there are none, or the task is cancelled."""
        iterator = None
        number = 0
        try:
            iterator = aiter(self._batches)
            while True:
                await self._room.acquire()
                try:
                    batch = await anext(iterator)
                except StopAsyncIteration:
                    self._queue.put(EndOfEpoch())
                    return
                await clear_cancellation()  # the iterable may have swallowed ours, or left one of its own
                if self._memory is None:
                    item = ReadyBatch(number, 0, batch)
                else:
                    item = await asyncio.to_thread(_ready, batch, number, self._memory)
                self._queue.put(item)
                number += 1
        except BaseException as error:  # the user's iterable may raise anything; it is raised at the `for` line
            if isinstance(error, GeneratorExit):
                raise
            if is_cancelled():
                if isinstance(error, asyncio.CancelledError):
                    raise
                return  # it failed as it was stopped, and nobody asks any more
            self._queue.put(FeedFailure(as_exception(error)))
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()
