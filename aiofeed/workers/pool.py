"""The workers of a feeder, as the trainer's loop sees them: started, given batches, monitored and stopped.

``WorkerPool`` gives them batches, whatever they are; ``ProcessPool`` has worker processes.

Shutdown of processes: ``aclose`` asks all workers to stop, gives them ``GRACE_S`` to close their sources, kills those
that are left, and reaps every one. A worker that ends without being asked raises ``WorkerDiedError`` in the consumer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from aiofeed.ipc.error_codec import rebuild
from aiofeed.ipc.framing import ProtocolError
from aiofeed.ipc.ring import Borrowed, free_dropped_slots
from aiofeed.kernel.core.errors import FeedError, WorkerDiedError
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.tuning.reads import READS_MOST
from aiofeed.kernel.runtime.buffers import DropTracker, release_unused
from aiofeed.workers import protocol
from aiofeed.workers.handle import AssignedBatch, Handle, WorkerHandle
from aiofeed.workers.spawn import WorkerConfig, write_config

if TYPE_CHECKING:
    from aiofeed.kernel.core.faces import BaseDevice

log: logging.Logger = logging.getLogger("aiofeed.processes")

HandleT = TypeVar("HandleT", bound=Handle)

# Time for a worker to close its source before it is killed.
GRACE_S = 3.0
# A killed process is gone within milliseconds, unless the kernel is busy freeing its memory.
REAP_S = 1.0
# Interval of the checks for dropped batches, and for workers whose end their connection does not show, because another
# process holds it open.
CHECK_S = 0.2
_POLL_S = 0.005


class WorkerPool(ABC, Generic[HandleT]):
    """All workers of a feeder.

    Attributes:
        borrowed: The memory of workers that batches of the user lie in.
        most_borrowed: Most segments of it that the user may have; the batches of others are copied.
    """

    most_borrowed: float = math.inf

    def __init__(self, worker_config: WorkerConfig) -> None:
        self.borrowed: DropTracker[Borrowed] = DropTracker()
        self._count = worker_config.engines
        self._reads = [worker_config.share(worker_config.read_concurrency, number) for number in range(self._count)]
        self._workers: list[HandleT] = []
        self._serials = itertools.count()
        self._ready: asyncio.Future[None] | None = None
        self._error: FeedError | None = None
        self._on_error: Callable[[FeedError], None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Start the workers and wait until batches can be assigned. Idempotent.

        Raises:
            Exception: A worker could not load its configuration, its source could not be opened, or it died.
        """
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._start_workers()
            self._check_regularly()
        await self._ready

    @property
    def started(self) -> bool:
        """Whether batches can be assigned. For any thread."""
        return self._ready is not None and self._ready.done()

    @abstractmethod
    def _start_workers(self) -> None:
        """Start the workers, once, on the loop's thread."""

    def _check_regularly(self) -> None:
        """Free slots and check the workers, every ``CHECK_S``."""
        if self._stopping or self._error is not None:
            return
        free_dropped_slots(self.borrowed)
        self._check()
        asyncio.get_running_loop().call_later(CHECK_S, self._check_regularly)

    @abstractmethod
    def _check(self) -> None:
        """Look for failures that no message reports."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop all workers."""

    @property
    def busy(self) -> bool:
        """Whether every worker has a batch to decode and one of them has two. For any thread."""
        decoding = [worker.decoding for worker in self._workers]
        return min(decoding, default=0) > 0 and sum(decoding) > len(decoding)

    @property
    def more_batches(self) -> int:
        """Batches beyond ``prefetch_batches``: one per worker after the first, so that each can decode one."""
        return self._count - 1

    def taken(self, stats: EpochStats) -> int:
        """Note that the training has taken a batch of an epoch; returns how many more may now be in flight."""
        return 0

    def set_reads(self, number: int, reads: int) -> int:
        """Note how many samples a worker reads at a time; returns how many all of them read."""
        self._reads[number] = max(1, min(reads, max(READS_MOST, self._reads[number])))
        return sum(self._reads)

    def call_on_error(self, callback: Callable[[FeedError], None]) -> None:
        """Call back, at once or later, when a worker has failed."""
        self._on_error = callback
        if self._error is not None:
            callback(self._error)

    def assign(self, plan: BatchPlan, *, may_decode: bool, was_read: Callable[[], None]) -> AssignedBatch:
        """Give a batch to the worker that has the fewest."""
        reply: asyncio.Future[protocol.BatchFinished] = asyncio.get_running_loop().create_future()
        batch = AssignedBatch(plan, reply, was_read, may_decode, time.monotonic())
        self._dispatch(batch, self._workers)
        return batch

    def assigned(self, plan: BatchPlan) -> AssignedBatch | None:
        """Return the unfinished batch of a plan; ``None`` if no worker has it."""
        batches = (batch for worker in self._workers for batch in list(worker.assigned.values()))
        return next((batch for batch in batches if batch.plan is plan), None)

    def _dispatch(self, batch: AssignedBatch, workers: Sequence[HandleT]) -> None:
        """Send the plan of a batch to that of some workers that has the fewest."""
        worker = min(workers, key=lambda each: (len(each.assigned), each.number))
        plan, serial = batch.plan, next(self._serials)
        worker.assigned[serial] = batch
        worker.decoding += batch.may_decode
        batch.copies.append((worker, serial))
        indices, positions = np.asarray(plan.indices, np.int64), np.asarray(plan.positions, np.int64)
        length = 0 if plan.replacements is None else plan.replacements.length
        pieces = b"" if plan.pieces is None else plan.pieces.tobytes()
        samples = indices.tobytes(), positions.tobytes()
        worker.send(
            protocol.PlanBatch(serial, plan.number, plan.epoch_seed, *samples, batch.may_decode, length, pieces)
        )

    def start_decoding(self, batch: AssignedBatch) -> None:
        """Permit its workers to decode a batch."""
        batch.may_decode, batch.permitted_at = True, time.monotonic()
        for worker, serial in batch.copies:
            worker.decoding += 1
            worker.send(protocol.StartDecoding(serial))

    def received(self, worker: HandleT, message: protocol.FromWorker) -> None:
        """Process a message of a worker; ``ProtocolError`` if it is about a batch that the worker does not have."""
        if isinstance(message, protocol.BatchFinished):
            batch = _assigned(worker, message.serial)
            del worker.assigned[message.serial]
            worker.decoding -= batch.may_decode
            if not batch.reply.done():
                batch.finished_by, batch.serial, batch.ring = worker, message.serial, worker.ring
                batch.reply.set_result(message)
        elif isinstance(message, protocol.ReadReport):
            _assigned(worker, message.serial).was_read()
        elif isinstance(message, protocol.WorkerReady):
            worker.ready = True
            self._worker_ready(worker)
        elif isinstance(message, protocol.ReplacementRequest):
            order = _assigned(worker, message.serial).plan.replacements
            index = None if order is None or message.position < 0 else order.index_at(message.position)
            assert index is None or isinstance(index, int)
            worker.send(protocol.ReplacementAnswer(message.ticket, index))
        elif isinstance(message, protocol.WorkerEnded):
            self._fail(rebuild(message.error))

    def _worker_ready(self, worker: HandleT) -> None:
        """Note that a worker takes plans."""
        if self._ready is not None and not self._ready.done() and all(each.ready for each in self._workers):
            self._ready.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error if isinstance(error, FeedError) else FeedError(f"{type(error).__name__}: {error}")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)  # an error of the source's open() reaches the user unchanged
        if self._on_error is not None:
            self._on_error(self._error)


class ProcessPool(WorkerPool[WorkerHandle]):
    """The worker processes of a feeder.

    Args:
        worker_config: Pickled by this constructor.
        backend: The device that copies from their rings; ``None`` for none.
    """

    def __init__(self, worker_config: WorkerConfig, backend: BaseDevice | None) -> None:
        super().__init__(worker_config)
        self._config = write_config(worker_config)
        # For a pool that is never started. At interpreter exit the system closes it.
        self._close_config = weakref.finalize(self, os.close, self._config)
        self._close_config.atexit = False
        self._backend = backend

    def _start_workers(self) -> None:
        try:
            # On the loop's thread, because Linux kills a worker when the thread that started it ends (`main.py`).
            for number in range(self._count):
                worker = WorkerHandle(
                    number, self._count, self._config, self._backend, received=self.received, lost=self._lost
                )
                self._workers.append(worker)
        finally:
            self._close_config()

    def _lost(self, worker: WorkerHandle, error: Exception | None) -> None:
        """Fail, because the connection of a worker has ended."""
        if self._stopping or self._error is not None:
            return
        if error is not None:
            worker.kill()
            failure = FeedError(f"{worker.name} sent a message that was refused: {error}")
            failure.__cause__ = error
            self._fail(failure)
            return
        self._reaping = asyncio.ensure_future(self._await_exit_status(worker))

    async def _await_exit_status(self, worker: WorkerHandle) -> None:
        """Fail with the exit status, which is available some milliseconds after the connection has ended."""
        await _wait_for_end([worker], REAP_S)
        if not self._stopping and self._error is None:
            self._fail_dead(worker)
            worker.kill()

    def _check(self) -> None:
        if dead := next((worker for worker in self._workers if worker.ended()), None):
            self._fail_dead(dead)

    def _fail_dead(self, worker: WorkerHandle) -> None:
        numbers = [batch.plan.number for batch in worker.assigned.values()]
        lost = f"; {len(numbers)} of its batches were unfinished, the first is batch {numbers[0]}" if numbers else ""
        self._fail(WorkerDiedError(worker.describe_end() + lost, exit_status=worker.exit_status))

    async def aclose(self) -> None:
        """Stop all workers; see the top of this module."""
        self._stopping = True
        for worker in self._workers:
            if worker.ready:
                worker.send(protocol.StopWorker())
            else:
                worker.kill()  # its source is not open yet, so there is nothing to clean up
        if not await _wait_for_end(self._workers, GRACE_S):
            running = [worker for worker in self._workers if not worker.ended()]
            log.warning(
                'killing %d worker process(es) of engine="process" that did not stop within %.0f s',
                len(running),
                GRACE_S,
            )
            for worker in running:
                worker.kill()
            await _wait_for_end(running, REAP_S)
        for worker in self._workers:
            worker.close()
        self._on_error = None
        release_unused()


def _assigned(worker: Handle, serial: int) -> AssignedBatch:
    try:
        return worker.assigned[serial]
    except KeyError:
        raise ProtocolError(f"a message about batch {serial}, which this worker does not have") from None


async def _wait_for_end(workers: Sequence[WorkerHandle], limit_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not all(worker.ended() for worker in workers):
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
