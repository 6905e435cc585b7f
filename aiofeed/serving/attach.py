"""``attach``: the batches of a feeder that another process serves. The protocol is in ``subscription.py``."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed import _load_addon as load_addon
from aiofeed.ipc.address import SERVER, resolve
from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.limits import PREFETCH_BATCHES
from aiofeed.kernel.core.statistics import EpochStats, FeedStatistics, new_events
from aiofeed.kernel.core.types import Transform, public
from aiofeed.kernel.core.validation import check_callable, explain_arguments
from aiofeed.kernel.devices.pinned import PinnedBufferPool, release_unused
from aiofeed.kernel.devices.resolve import resolve_device
from aiofeed.kernel.feeder.delivery import Delivery
from aiofeed.kernel.feeder.iterator import EpochObserver, EpochStartLock, FeedIterator
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.event_loop import EventLoopThread
from aiofeed.kernel.runtime.queue import ReadyBatch
from aiofeed.kernel.runtime.threads import JOIN_S
from aiofeed.serving.connect import connect_to_server
from aiofeed.serving.subscription import EpochFeed, Subscription

if TYPE_CHECKING:
    import torch

    from aiofeed.kernel.core.faces import BaseDevice
    from aiofeed.reports.explanation import Explanation
    from aiofeed.reports.timeline import Timeline

log: logging.Logger = logging.getLogger("aiofeed.feeder")

_NO_STATE = "the server's feeder has the state: save and load it in the server's process"


@public
@explain_arguments()
def attach(
    address: str | os.PathLike[str],
    device: str | int | torch.device | BaseDevice | None = None,
    *,
    transform: Transform | None = None,
    wait_s: float = 10.0,
) -> AttachedFeed:
    """Connect to a feeder that another process of this host serves with ``aiofeed.serve``.

    Example:
        ```python
        import aiofeed

        feeder = aiofeed.Feeder(list(range(100)), batch_size=10)
        with aiofeed.serve(feeder, "numbers"):  # in another process
            for batch in aiofeed.attach("numbers", device="auto"):
                print(batch)
        ```

    If the server's feeder is on the same GPU, batches are copied within device memory; otherwise they come
    through host memory. The call blocks while it connects, usually for milliseconds; in async code use
    ``await asyncio.to_thread(attach, address)``.

    Args:
        address: The server's address.
        device: The device for batches, as for ``Feeder``; ``None`` for host tensors in this process's memory.
        transform: Called with each batch on the device, on the side stream; without a device in the consumer's thread.
        wait_s: Maximum time to wait for a server that has not started yet.

    Returns:
        An object to iterate like a ``Feeder``. Each ``iter()`` is one epoch of the server's feeder.

    Raises:
        FeedError: There is no server, it belongs to another user, or it refuses the connection.
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or wait_s < 0:
        raise ValueError(f"wait_s must be 0 or more seconds, got {wait_s!r}")
    attached = AttachedFeed(resolve(address, SERVER), resolve_device(device), check_callable("transform", transform))
    attached._connect(float(wait_s))
    return attached


class AttachedFeed:
    """The result of ``attach``: the batches of a served feeder, for ``for`` or ``async for``.

    Each ``iter()`` is one epoch, which the server starts. After a ``break`` the server sends nothing until the next
    ``iter()``. Errors of the feeder are raised with their types and messages; if the server dies, ``WorkerDiedError``.
    """

    def __init__(self, address: Path, backend: BaseDevice | None, transform: Transform | None) -> None:
        self._address = address
        self._backend = backend
        self._transform = transform
        self._loop_thread: EventLoopThread | None = None
        self._subscription: Subscription | None = None
        self._epoch: EpochFeed | None = None
        self._delivery: Delivery | None = None
        self._beginnings = EpochStartLock()
        self._earlier_stats, self._stats = EpochStats(), EpochStats()
        self._events = new_events()

    def _connect(self, wait_s: float) -> tuple[EventLoopThread, Subscription]:
        backend = self._backend
        memory = HostBufferPool(PREFETCH_BATCHES + 2) if backend is None else PinnedBufferPool(backend.pin, keep=16)
        loop_thread = EventLoopThread(read_threads=1, decode_threads=1)
        host_only = self._subscription is not None and self._subscription.host_only
        link = connect_to_server(self._address, wait_s, backend, host_only=host_only)
        subscription = Subscription(link, backend, memory, loop_thread.decode_pool)
        subscription.host_only = host_only
        self._subscription, self._loop_thread = subscription, loop_thread
        loop_thread.at_exit(subscription.close_unused)
        loop_thread.at_exit(memory.close)
        loop_thread.watch(self)
        try:
            loop_thread.launch()
            loop_thread.start(subscription.run)
        except BaseException:
            loop_thread.stop()
            subscription.close_unused()
            raise
        return loop_thread, subscription

    def __len__(self) -> int:
        """Return the batches per epoch for this consumer; in mode "shard" an estimate until an epoch has started.

        Raises:
            TypeError: The server's feeder has no length, because its source is a ``Stream`` without one.
        """
        batches = 0 if self._subscription is None else self._subscription.batches
        if batches is None:
            raise TypeError("the attached feeder has no len(): the server feeds a Stream, whose end is not known")
        return batches

    @property
    def epoch(self) -> int:
        """The server's number of the current or last epoch; -1 before the first."""
        return -1 if self._subscription is None else self._subscription.epoch

    def __iter__(self) -> FeedIterator[Any]:
        """Take part in the next epoch; close the open iterator."""
        return self._beginnings.run(self._begin, self._stop)

    def _begin(self) -> FeedIterator[Any]:
        loop_thread, subscription = self._loop_thread, self._subscription
        if loop_thread is None or subscription is None or loop_thread.inherited or loop_thread.stopping:
            # Closed, or forked: a child process has none of the threads.
            self._epoch = self._delivery = None
            loop_thread, subscription = self._connect(0.0)
        self._close_iterator("a newer iterator of the same consumer was started", superseded=True)
        epoch = EpochFeed(loop_thread, subscription, room=PREFETCH_BATCHES)
        backend, transform, copier = self._backend, self._transform, None
        if backend is not None:
            copier, transform = subscription.copier(backend, transform), None
        delivery = Delivery(epoch, copier, transform)
        self._earlier_stats.add(self._stats)
        self._stats = epoch.counters
        self._stats.events = self._events
        iterator: FeedIterator[Any] = FeedIterator(delivery, self._stats, _ServedObserver(self, delivery, epoch))
        self._epoch, self._delivery = epoch, delivery
        try:
            delivery.watch(iterator)
            delivery.start()
        except BaseException:  # Ctrl-C, or no more threads
            delivery.stop()
            raise
        return iterator

    def __aiter__(self) -> FeedIterator[Any]:
        """Take part in the next epoch; close the open iterator."""
        return iter(self)

    def _close_iterator(self, reason: str, *, superseded: bool = False) -> None:
        if (epoch := self._epoch) is not None and (delivery := self._delivery) is not None:
            epoch.superseded = superseded
            delivery.stop(reason)
        self._epoch = self._delivery = None

    def statistics(self, total: bool = False) -> FeedStatistics:
        """Return this consumer's counts, waits and copies; the server's process has the feeder's statistics."""
        stats = EpochStats()
        if total:
            stats.add(self._earlier_stats)
        stats.add(self._stats)
        depth = 0 if self._delivery is None else len(self._delivery.queue)
        return FeedStatistics(**stats.totals(), queue_depth=depth)  # type: ignore[arg-type]

    def explain(self) -> Explanation:
        """Explain where this consumer's time of the current or last epoch went, as ``Feeder.explain`` does.

        It tells the server from the copies of this process; the server's ``feeder.explain()`` has the rest.
        """
        device, transform = self._backend is not None, self._transform is not None
        explanation: Explanation = load_addon("explain_attached", "explain()")(
            self._stats, first_epoch=not self._earlier_stats.batches, device=device, transform=transform
        )
        return explanation

    def timeline(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        seconds: float = 10.0,
        merge: str | os.PathLike[str] | None = None,
    ) -> Timeline:
        """Write when copies, waits and steps of this process took place; arguments and errors of ``Feeder.timeline``.

        The server's feeder has the reads and decode jobs; ``merge`` its timeline to see both.
        """
        write_timeline = load_addon("write_timeline", "timeline()")
        return write_timeline(self._events, path, seconds=seconds, merge=merge)  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Not supported.

        Raises:
            StateError: Always; the server's feeder has the state.
        """
        raise StateError(f"the result of attach() has no state_dict: {_NO_STATE}")

    def load_state_dict(self, state_dict: object) -> None:
        """Not supported.

        Raises:
            StateError: Always; the server's feeder has the state.
        """
        raise StateError(f"the result of attach() has no load_state_dict: {_NO_STATE}")

    def set_epoch(self, epoch: int) -> None:
        """Not supported.

        Raises:
            StateError: Always; the server counts the epochs.
        """
        raise StateError("the result of attach() has no set_epoch: the server counts the epochs for all its consumers")

    def close(self) -> None:
        """Disconnect and stop the threads; waits up to 5 s. Idempotent; the next ``iter()`` connects again."""
        delivery = self._delivery
        if (loop_thread := self._stop()) is None:
            return
        ended = loop_thread.join(JOIN_S) and (delivery is None or delivery.join(JOIN_S))
        release_unused()
        if not ended:
            log.warning("the threads of attach(%r) did not end within %.0f s", str(self._address), JOIN_S)

    async def aclose(self) -> None:
        """Like ``close``, without blocking the caller's event loop."""
        delivery = self._delivery
        if (loop_thread := self._stop()) is not None:
            await asyncio.wait([asyncio.wrap_future(loop_thread.finished)], timeout=JOIN_S)
            if delivery is not None:
                await delivery.stopped()
            release_unused()

    def _stop(self, reason: str = "the consumer was closed") -> EventLoopThread | None:
        # First, so that an `iter` that begins after the next line connects again.
        loop_thread, self._loop_thread = self._loop_thread, None
        self._beginnings.stopped = reason
        if loop_thread is None or loop_thread.inherited:
            return None
        self._close_iterator(reason)
        loop_thread.stop()
        return loop_thread

    def __enter__(self) -> AttachedFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AttachedFeed:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"Attached({str(self._address)!r})"


class _ServedObserver(EpochObserver):
    """Keeps the ``AttachedFeed`` alive while it is iterated."""

    def __init__(self, attached: AttachedFeed, delivery: Delivery, epoch: EpochFeed) -> None:
        super().__init__(delivery)
        self._attached = attached
        self._epoch = epoch

    def returning(self, item: ReadyBatch) -> None:
        """Tell the subscription of the first batch: an epoch without one is given to the next iterator."""
        if not self._epoch.started:
            self._epoch.mark_started()
