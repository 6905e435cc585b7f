"""``prefetch``: look-ahead and copies to a device for batches of any iterable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Iterable, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.errors import as_exception
from aiofeed.kernel.core.limits import DEVICE_BATCHES, PREFETCH_BATCHES
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import Transform, public
from aiofeed.kernel.core.validation import check_callable, check_positive_int, explain_arguments
from aiofeed.kernel.devices.copier import Copier, copier_for
from aiofeed.kernel.devices.pinned import PinnedBufferPool
from aiofeed.kernel.devices.resolve import resolve_devices
from aiofeed.kernel.feeder.delivery import Delivery, LoopProducer
from aiofeed.kernel.feeder.iterator import EpochObserver, FeedIterator
from aiofeed.kernel.runtime.bounded_thread import BoundedThread
from aiofeed.kernel.runtime.cancellation import clear_cancellation, ended_by, is_cancelled
from aiofeed.kernel.runtime.event_loop import EventLoopThread
from aiofeed.kernel.runtime.queue import (
    BatchQueue,
    EndOfEpoch,
    FeedFailure,
    QueueItem,
    ReadyBatch,
    Stopped,
    drop_batches,
)
from aiofeed.kernel.runtime.tensors import stage
from aiofeed.kernel.runtime.threads import JOIN_S

BatchT = TypeVar("BatchT")
ChangedT = TypeVar("ChangedT")

if TYPE_CHECKING:
    from typing import TypeAlias, Unpack

    import typing_extensions

    from aiofeed.kernel.devices.resolve import Device
    from aiofeed.kernel.feeder.feeder import NoSuchArgument
    from aiofeed.reports.explanation import Explanation

    Batches: TypeAlias = Iterable[BatchT] | AsyncIterable[BatchT]

    class _Lookahead(typing_extensions.TypedDict, total=False, extra_items=NoSuchArgument):  # type: ignore[call-arg]
        """Arguments of ``prefetch`` that do not change the type of batches."""

        prefetch_batches: int
        device_batches: int


# A str is a Sequence[str], too; type checkers take the first overload that fits.
@overload
def prefetch(  # type: ignore[overload-overlap]
    batches: Batches[BatchT], device: Device = None, *, transform: None = None, **lookahead: Unpack[_Lookahead]
) -> Prefetch[BatchT]: ...
@overload
def prefetch(  # type: ignore[overload-overlap]
    batches: Batches[BatchT],
    device: Device = None,
    *,
    transform: Callable[[BatchT], ChangedT],
    **lookahead: Unpack[_Lookahead],
) -> Prefetch[ChangedT]: ...
@overload
def prefetch(
    batches: Batches[BatchT], device: Sequence[Device], *, transform: None = None, **lookahead: Unpack[_Lookahead]
) -> Prefetch[tuple[BatchT, ...]]: ...
@overload
def prefetch(
    batches: Batches[BatchT],
    device: Sequence[Device],
    *,
    transform: Callable[[BatchT], ChangedT],
    **lookahead: Unpack[_Lookahead],
) -> Prefetch[tuple[ChangedT, ...]]: ...
@public
@explain_arguments()
def prefetch(
    batches: Iterable[Any] | AsyncIterable[Any],
    device: Device | Sequence[Device] = None,
    *,
    transform: Transform | None = None,
    prefetch_batches: int = PREFETCH_BATCHES,
    device_batches: int = DEVICE_BATCHES,
) -> Prefetch[Any]:
    """Load batches of any iterable ahead, e.g. of a ``DataLoader``, and copy them to a device on a side stream.

    Example:
        ```python
        import torch

        import aiofeed

        batches = torch.rand(10, 32, 8)  # or a DataLoader, or any other iterable of batches
        for batch in aiofeed.prefetch(batches, device="auto"):
            print(batch.shape, batch.device)
        ```

    Args:
        batches: An iterable, which runs in a thread of its own, or an async iterable, which runs on an event loop of
            its own.
        device: The device for the tensors of a batch, nested in tuple, list, dict, namedtuple or dataclass. ``None``
            loads ahead only. With a list of devices a batch is a tuple with one part per device, as from ``scatter``.
        transform: Called with each batch on the device, on the side stream; without a device in the consumer's thread.
        prefetch_batches: Maximum number of batches that wait in host memory.
        device_batches: Maximum number of batches on the device that the consumer has not taken.

    Returns:
        An object to iterate with ``for`` or ``async for``, as often as ``batches``. It has ``len()`` if ``batches``
        has. Exceptions of ``batches`` are raised unchanged, after the batches before them.

    Raises:
        TypeError: ``batches`` is not iterable.
    """
    return Prefetch(batches, device, transform, prefetch_batches, device_batches)


class Prefetch(Generic[BatchT]):
    """The result of ``prefetch``."""

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
        self.stats: EpochStats = EpochStats()

    def __repr__(self) -> str:
        return f"Prefetch({type(self._batches).__name__}, device={self._device!r})"

    def __len__(self) -> int:
        """Return the number of batches of one iteration, if ``batches`` has a length."""
        if not isinstance(self._batches, Sized):
            raise TypeError(f"{type(self._batches).__name__} has no len()")
        return len(self._batches)

    def __iter__(self) -> FeedIterator[BatchT]:
        """Start an iteration."""
        return self.start(IterableProducer if not isinstance(self._batches, AsyncIterable) else AsyncIterableProducer)

    def start(
        self,
        new_producer: Callable[..., IterableProducer | AsyncIterableProducer],
        new_observer: Callable[[Delivery], EpochObserver] = EpochObserver,
    ) -> FeedIterator[BatchT]:
        """Start an iteration with a producer, made with the arguments of ``IterableProducer``, and an observer."""
        copier, transform = self.new_copier()
        memory = None
        if self._backend is not None:
            memory = PinnedBufferPool(self._backend.pin, keep=8 * (self._prefetch_batches + 1))
        queue: BatchQueue[QueueItem] = BatchQueue()
        producer = new_producer(self._batches, queue, room=self._prefetch_batches, memory=memory)
        producer.counters = self.stats = EpochStats()
        delivery = Delivery(producer, copier, transform, self._device_batches)
        iterator: FeedIterator[BatchT] = FeedIterator(delivery, self.stats, new_observer(delivery))
        delivery.watch(iterator)
        try:
            delivery.start()
        except BaseException:  # Ctrl-C, or no more threads: stop the threads that have started
            delivery.stop()
            raise
        return iterator

    def explain(self) -> Explanation:
        """Explain where the time of the current or last iteration went, as ``Feeder.explain`` does."""
        device, transform = self._backend is not None, self._transform is not None
        explanation: Explanation = load_addon("explain_prefetch", "explain()")(
            self.stats, device=device, transform=transform
        )
        return explanation

    def __aiter__(self) -> FeedIterator[BatchT]:
        """Start an iteration."""
        return iter(self)

    def new_copier(self) -> tuple[Copier | None, Transform | None]:
        """Return the copier to the device, if any, and the transform that it does not call itself."""
        if self._backend is None:
            return None, self._transform
        return copier_for(self._backend, self._transform), None


def _ready(batch: Any, number: int, memory: PinnedBufferPool | None, counters: EpochStats, asked: float) -> ReadyBatch:
    """Return the item of a batch, for which the iterable was asked at this time."""
    began, lease = time.perf_counter(), None
    counters.decode_s += began - asked
    if memory is not None:
        lease = memory.lease()
        batch, _ = stage(batch, lease)
        counters.collate_s += time.perf_counter() - began
    return ReadyBatch(number, 1, batch, lease, counters=counters)


class IterableProducer(BoundedThread):
    """A producer that iterates an iterable in a thread of its own, a bounded number of batches ahead.

    Args:
        batches: Iterated and closed in the thread.
        queue: Receives the batches.
        room: Maximum number of batches in the queue.
        memory: Pinned memory to which tensors are copied; ``None``: tensors stay where they are.

    Attributes:
        counters: Statistics of the iteration.
        described: Says what the next batch waits for, see ``Producer.waiting_for``.
    """

    def __init__(
        self, batches: Iterable[Any], queue: BatchQueue[QueueItem], *, room: int, memory: PinnedBufferPool | None
    ) -> None:
        super().__init__("aiofeed-pull", room)
        self._batches: Iterable[Any] | None = batches
        awaited = f"for the next batch of {type(batches).__name__}, in a thread of its own"
        self.described: Callable[[], tuple[Any, ...]] = lambda: (awaited,)
        self.queue = queue
        self._memory = memory
        self.counters: EpochStats = EpochStats()

    def take(self, item: ReadyBatch) -> Any:
        """Return the batch of an item and allow one more, once per item."""
        if not item.taken:
            # The interpreter runs signal handlers after a call, so not between these two lines.
            item.taken = True
            self._room.put(True)
        return item.batch

    def waiting_for(self) -> tuple[Any, ...]:
        """See ``Producer.waiting_for``."""
        return self.described()

    def _main(self) -> None:
        batches, self._batches = self._batches, None
        assert batches is not None
        try:
            iterator = iter(batches)
            del batches
            try:
                self._pull(iterator)
            finally:
                # Close a generator in the thread that ran it.
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # noqa: BLE001 - the user's iterable may raise anything; the consumer raises it
            self.queue.put(FeedFailure(error))
        else:
            self.queue.put(Stopped())  # ends a copy thread that waits for a batch
        finally:
            if self._unwanted():  # the copy thread may have ended before the last batch was put
                drop_batches(self.queue)
            if self._memory is not None:
                self._memory.close()

    def _pull(self, iterator: Any) -> None:
        number = 0
        # Check `_unwanted`, too: there may be room left in front of the item that ends the thread.
        while self._room.get() is True and not self._unwanted():
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                self.queue.put(EndOfEpoch())
                return
            self.queue.put(_ready(batch, number, self._memory, self.counters, asked))
            del batch
            number += 1


class AsyncIterableProducer(LoopProducer):
    """A producer that iterates an async iterable in a task of its own event loop. Arguments as ``IterableProducer``."""

    def __init__(
        self, batches: AsyncIterable[Any], queue: BatchQueue[QueueItem], *, room: int, memory: PinnedBufferPool | None
    ) -> None:
        super().__init__(EventLoopThread(read_threads=1, decode_threads=1), queue)
        self._batches = batches
        self._memory = memory
        self.counters: EpochStats = EpochStats()
        self._room = asyncio.Semaphore(room)
        self.loop_thread.at_exit(partial(drop_batches, queue))
        if memory is not None:
            self.loop_thread.at_exit(memory.close)

    def start(self) -> None:
        """Start the event loop and the task."""
        super().start()
        self.loop_thread.start(self._run)

    def waiting_for(self) -> tuple[str, ...]:
        """See ``Producer.waiting_for``."""
        return (f"for the next batch of {type(self._batches).__name__}, an async iterable in a thread of its own",)

    async def stopped(self) -> None:
        """Wait for the threads to end without blocking the caller's event loop."""
        await asyncio.to_thread(self.join, JOIN_S)

    async def _run(self) -> None:
        loop_thread = self.loop_thread
        with ended_by(lambda: loop_thread.stopping):
            await self.run()

    def _count_taken(self, item: ReadyBatch) -> None:
        """Allow one more batch, once per item; called on the loop."""
        if not item.taken:
            item.taken = True
            self._room.release()

    async def run(self) -> None:
        """Put batches into the queue until the iterable ends or the task is cancelled."""
        iterator = None
        number = 0
        try:
            iterator = aiter(self._batches)
            while True:
                await self._room.acquire()
                asked = time.perf_counter()
                try:
                    batch = await anext(iterator)
                except StopAsyncIteration:
                    self.queue.put(EndOfEpoch())
                    return
                await clear_cancellation()  # the iterable may have suppressed our cancellation, or cancelled the task
                make = partial(_ready, batch, number, self._memory, self.counters, asked)
                item = make() if self._memory is None else await asyncio.to_thread(make)
                item.on_taken = partial(self.loop_thread.call, self._count_taken)
                self.queue.put(item)
                number += 1
        except BaseException as error:  # the user's iterable may raise anything; the consumer raises it
            if isinstance(error, GeneratorExit):
                raise
            if is_cancelled():
                if isinstance(error, asyncio.CancelledError):
                    raise
                return  # the iterable failed after it was stopped, and no consumer waits
            self.queue.put(FeedFailure(as_exception(error)))
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()
