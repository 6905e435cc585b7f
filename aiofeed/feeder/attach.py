"""One feeder for several training processes of a host: the end of each of these. The mechanism is in ``share``."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed.core.errors import StateError
from aiofeed.core.limits import PREFETCH_BATCHES
from aiofeed.core.statistics import EpochStats, FeedStatistics
from aiofeed.core.types import Transform, public
from aiofeed.core.validation import check_callable
from aiofeed.devices.resolve import resolve_device
from aiofeed.feeder.iterator import FeedIterator
from aiofeed.runtime import threads
from aiofeed.runtime.buffers import HostBufferPool, PinnedBufferPool
from aiofeed.runtime.event_loop import EventLoopThread
from aiofeed.runtime.queue import FeedFailure, ReadyBatch
from aiofeed.runtime.tensors import as_tensors
from aiofeed.runtime.threads import JOIN_S

if TYPE_CHECKING:
    import torch

    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.feeder.attached_passes import DevicePass, HostPass
    from aiofeed.processes.serving.subscription import Subscription


log = logging.getLogger("aiofeed.feeder")

_NO_STATE = "the server's feeder has the state: save and load it there, beside the server"


@public
def attach(
    address: str | os.PathLike[str],
    device: str | int | torch.device | DeviceBackend | None = None,
    *,
    transform: Transform | None = None,
    wait_s: float = 10.0,
) -> AttachedFeed:
    """The batches of a feeder that another process of this host serves; see ``aiofeed.serve``.

    Args:
        address: as the server has it.
        device: where batches go, as ``Feeder``'s; ``None`` for host tensors, which are this process's own.
        transform: applied to each batch on the device, on the side stream (on the host: in the consumer's thread).
        wait_s: how long to wait, blocking, for a server that is not there yet.

    Where the server's feeder has the same GPU, batches are copied from its memory, on the device; in all other cases
    they come through host memory.

    It blocks while it connects, if only for milliseconds; in async code: ``await asyncio.to_thread(attach, address)``.

    Returns:
        What is used like a ``Feeder``: each ``iter()`` is one epoch of the server's.

    Raises:
        FeedError: there is no server, it is another user's, or it refuses.
        TypeError, ValueError: an argument of the wrong kind or out of range.
    """
    from aiofeed.processes.ipc.address import SERVER, resolve

    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or wait_s < 0:
        raise ValueError(f"wait_s must be 0 or more seconds, got {wait_s!r}")
    attached = AttachedFeed(resolve(address, SERVER), resolve_device(device), check_callable("transform", transform))
    attached._connect(float(wait_s))
    return attached


class AttachedFeed:
    """What ``attach`` returns: the batches of a served feeder, with ``for`` or ``async for``.

    Each ``iter()`` is one epoch, which the server begins; one that is left early, by ``break``, leaves the server until
    the next ``iter()``. Errors of the feeder are raised at the ``for`` line, with the types and words that they have
    there; a server that dies is a ``WorkerDiedError``.
    """

    def __init__(self, path: Path, backend: DeviceBackend | None, transform: Transform | None) -> None:
        self._path = path
        self._backend = backend
        self._transform = transform
        self._pid = os.getpid()
        self._loop_thread: EventLoopThread | None = None
        self._attachment: Subscription | None = None
        self._iterator: weakref.ref[FeedIterator[Any]] | None = None
        self._delivery: HostPass | DevicePass | None = None
        self._past, self._counters = EpochStats(), EpochStats()
        self._said = _Said()

    def _connect(self, wait_s: float) -> None:
        from aiofeed.processes.serving.connect import subscribe

        backend, said = self._backend, _Said()
        memory = HostBufferPool(PREFETCH_BATCHES + 2) if backend is None else PinnedBufferPool(backend.pin, keep=16)
        loop_thread = EventLoopThread(read_threads=1, decode_threads=1)
        host_only = self._attachment is not None and self._attachment.host_only
        attachment, said.batches = subscribe(
            self._path,
            wait_s,
            backend,
            memory=memory,
            wrap=as_tensors if backend is None else _unchanged,
            executor=loop_thread.decode_pool,
            on_epoch=said.begun,
            host_only=host_only,
        )
        attachment.host_only = host_only
        self._said = said
        self._pid = os.getpid()
        self._attachment, self._loop_thread = attachment, loop_thread
        loop_thread.at_exit(attachment.close_unused)
        loop_thread.at_exit(memory.close)
        loop_thread.watch(self)
        try:
            loop_thread.launch()
            loop_thread.start(attachment.run)
        except BaseException:
            loop_thread.stop()
            attachment.close_unused()
            raise

    def __len__(self) -> int:
        """Batches per epoch: of this consumer, where they are shared out (about, until an epoch has begun)."""
        return self._said.batches

    @property
    def epoch(self) -> int:
        """The number, at the server, of the epoch that is being iterated or was last; -1 before the first."""
        return self._said.epoch

    def __iter__(self) -> FeedIterator[Any]:
        """Take part in the next epoch; an iterator that is still open is closed."""
        if self._loop_thread is None or self._loop_thread.inherited or self._loop_thread.stopping:
            # Closed before, or in a fork, which has none of the threads.
            self._iterator = self._delivery = None
            self._connect(0.0)
        loop_thread, attachment = self._loop_thread, self._attachment
        assert loop_thread is not None
        assert attachment is not None
        self._close_iterator("a newer iterator of the same consumer was started", superseded=True)
        delivery = self._deliver(loop_thread, attachment)
        self._past.add(self._counters)
        self._counters = delivery.pass_.counters
        iterator: FeedIterator[Any] = FeedIterator(delivery, self._counters, observer=_Keeper(self))
        self._iterator, self._delivery = weakref.ref(iterator), delivery
        try:
            delivery.watch(iterator)
            delivery.launch()
            loop_thread.call(attachment.begin, delivery.pass_)
        except BaseException:  # Ctrl-C, or no more threads
            delivery.stop()
            raise
        return iterator

    def __aiter__(self) -> FeedIterator[Any]:
        """Take part in the next epoch; an iterator that is still open is closed."""
        return iter(self)

    def _deliver(self, loop_thread: EventLoopThread, attachment: Subscription) -> HostPass | DevicePass:
        from aiofeed.feeder.attached_passes import deliver

        return deliver(loop_thread, attachment, self._backend, self._transform)

    def _close_iterator(self, reason: str, *, superseded: bool = False) -> None:
        if self._delivery is not None:
            self._delivery.pass_.superseded = superseded
            iterator = self._iterator() if self._iterator is not None else None
            if iterator is not None and iterator.live:
                iterator.close(reason)
            else:
                self._delivery.stop()
        self._iterator = self._delivery = None

    def statistics(self, total: bool = False) -> FeedStatistics:
        """Where this consumer's time went: its own counts, waits and copies; what the feeder did, the server knows."""
        counters = EpochStats()
        if total:
            counters.add(self._past)
        counters.add(self._counters)
        depth = 0 if self._delivery is None else len(self._delivery.queue)
        return FeedStatistics(**counters.totals(), queue_depth=depth)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Refused.

        Raises:
            StateError: always; the server's feeder has the state.
        """
        raise StateError(f"what attach() gives has no state_dict: {_NO_STATE}")

    def load_state_dict(self, state_dict: object) -> None:
        """Refused.

        Raises:
            StateError: always; the server's feeder has the state.
        """
        raise StateError(f"what attach() gives has no load_state_dict: {_NO_STATE}")

    def set_epoch(self, epoch: int) -> None:
        """Refused.

        Raises:
            StateError: always; the server counts the epochs.
        """
        raise StateError("the server counts the epochs, for all its consumers: there is no set_epoch here")

    def close(self) -> None:
        """Leave the server and stop the threads, 5 s at most. Idempotent; the next ``iter()`` attaches anew."""
        delivery = self._delivery
        if (loop_thread := self._stop()) is None:
            return
        ended = loop_thread.join(JOIN_S) and (delivery is None or delivery.join(JOIN_S))
        _release_unused()
        if not ended:
            log.warning("the threads of attach(%r) did not end within %.0f s", str(self._path), JOIN_S)
            threads.unregister(loop_thread)

    async def aclose(self) -> None:
        """``close`` for async code: never blocks the caller's event loop."""
        delivery = self._delivery
        if (loop_thread := self._stop()) is not None:
            await asyncio.wait([asyncio.wrap_future(loop_thread.finished)], timeout=JOIN_S)
            if delivery is not None:
                await delivery.stopped()
            _release_unused()

    def _stop(self) -> EventLoopThread | None:
        loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is None or loop_thread.inherited:
            return None
        self._close_iterator("the consumer was closed")
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
        return f"Attached({str(self._path)!r})"


class _Said:
    """What the server has said last. The attachment refers to it, and not to what the user holds."""

    def __init__(self, batches: int = 0) -> None:
        self.batches = batches
        self.epoch = -1

    def begun(self, epoch: int, batches: int) -> None:
        self.epoch, self.batches = epoch, batches


class _Keeper:
    """Keeps what is attached alive while one iterates it."""

    def __init__(self, attached: AttachedFeed) -> None:
        self._attached = attached

    def handing_out(self, item: ReadyBatch) -> None:
        pass

    def handed_out(self, item: ReadyBatch) -> None:
        pass

    def failed(self, item: FeedFailure) -> None:
        pass

    def ended(self) -> None:
        if self._attached._delivery is not None:
            self._attached._delivery.ended()


def _release_unused() -> None:
    """Let the device forget shared memory whose last copy has ended just now."""
    from aiofeed.processes.ipc.ring import release_unused

    release_unused()


def _unchanged(batch: Any) -> Any:
    """The copier takes a batch as it lies in its slot."""
    return batch
