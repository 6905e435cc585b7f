"""The bridge alone: look-ahead and side-stream copies for batches that somebody else makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from aiofeed.core.limits import DEVICE_BATCHES, PREFETCH_BATCHES, positive_int
from aiofeed.core.statistics import Counters
from aiofeed.devices.copy_thread import CopyThread
from aiofeed.devices.resolve import DeviceGroup, resolve_devices
from aiofeed.feeder.arguments import a_callable
from aiofeed.feeder.iterator import FeedIterator
from aiofeed.feeder.pull import LoopPull, ThreadPull
from aiofeed.runtime.buffers import PinnedMemory
from aiofeed.runtime.cancellation import EndedBy
from aiofeed.runtime.event_loop import Runtime
from aiofeed.runtime.items import Failed, Item, Ready
from aiofeed.runtime.queue import Handoff

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.devices.resolve import Device

BatchT = TypeVar("BatchT")
Transform = Callable[[Any], Any]


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
        self._transform: Transform | None = a_callable("transform", transform)
        self._prefetch_batches = positive_int("prefetch_batches", prefetch_batches)
        self._device_batches = positive_int("device_batches", device_batches)

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
            memory = PinnedMemory(self._backend.pin, keep=8 * (self._prefetch_batches + 1))
        finished: Handoff[Item] = Handoff()
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
        iterator: FeedIterator[BatchT] = FeedIterator(delivery, Counters(), observer=_Nobody(delivery))
        delivery.watch(iterator)
        try:
            delivery.launch()
        except BaseException:  # Ctrl-C, or no more threads: those that have started end
            delivery.stop()
            raise
        return iterator

    def _deliver(self, producer: ThreadPull | _LoopProducer, finished: Handoff[Item]) -> _PullDelivery:
        if self._backend is None:
            return _PullDelivery(producer, finished, self._transform)
        return _CopiedDelivery(producer, finished, self._backend, self._transform, self._device_batches)


class _LoopProducer:
    """A ``LoopPull`` and the runtime that it lives on."""

    def __init__(
        self, batches: AsyncIterable[Any], handoff: Handoff[Item], *, room: int, memory: PinnedMemory | None
    ) -> None:
        self._runtime = Runtime(read_threads=1, decode_threads=1)
        self._pull = LoopPull(batches, handoff, room=room, memory=memory)

    def launch(self) -> None:
        self._runtime.launch()
        self._runtime.start(partial(_run, self._runtime, self._pull))

    def watch(self, owner: object) -> None:
        self._runtime.watch(owner)

    def at_exit(self, function: Callable[[], object]) -> None:
        self._runtime.at_exit(function)

    def taken(self) -> None:
        self._runtime.call(self._pull.taken)

    def stop(self) -> None:
        self._runtime.stop()

    def join(self, timeout_s: float) -> bool:
        return self._runtime.join(timeout_s)


async def _run(runtime: Runtime, pull: LoopPull) -> None:
    with EndedBy(lambda: runtime.stopping):
        await pull.run()


class _PullDelivery:
    """Batches as they came, transformed in the consumer's thread."""

    def __init__(
        self, producer: ThreadPull | _LoopProducer, handoff: Handoff[Item], transform: Transform | None
    ) -> None:
        self.handoff = handoff
        self._producer = producer
        self._transform = transform

    def take(self, item: Ready) -> Any:
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
        finished: Handoff[Item],
        backend: DeviceBackend | DeviceGroup,
        transform: Transform | None,
        room: int,
    ) -> None:
        from aiofeed.devices.group_copier import copier_for

        super().__init__(producer, Handoff(), None)
        self._copier = copier_for(backend, transform)
        self._copier.follow()

        def issued(item: Ready) -> None:
            producer.taken()

        self._thread = CopyThread(self._copier, finished, self.handoff, room=room, issued=issued)
        if isinstance(producer, _LoopProducer):
            # It says nothing when it is stopped in the middle; the copy thread would wait for its next batch for ever.
            producer.at_exit(self._thread.stop)

    def take(self, item: Ready) -> Any:
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

    def handing_out(self, item: Ready) -> None:
        pass

    def handed_out(self, item: Ready) -> None:
        pass

    def failed(self, item: Failed) -> None:
        pass

    def ended(self) -> None:
        self._delivery.stop()
