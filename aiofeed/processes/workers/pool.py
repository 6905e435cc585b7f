"""The engine processes of a feeder, as the trainer's loop sees them: started, told, heard, and ended with it.

The shutdown contract: ``aclose`` tells all of them to stop, waits ``GRACE_S`` for them to close their sources, kills
those that are left, and reaps every one. A process that ends without having been told is a ``WorkerDiedError`` for
whatever waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aiofeed.core.errors import FeedError, WorkerDiedError
from aiofeed.core.types import BatchPlan
from aiofeed.engine.tuning.reads import READS_MOST
from aiofeed.processes.ipc.error_codec import rebuild
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.processes.ipc.ring import release_unused
from aiofeed.processes.ipc.schema import (
    BatchFailed,
    BatchReady,
    FromEngine,
    ReadReport,
    ReplacementAnswer,
    ReplacementRequest,
    StopWorker,
    WorkerEnded,
    WorkerPlanMessage,
    WorkerReady,
)
from aiofeed.processes.workers.handle import Work, WorkerHandle
from aiofeed.processes.workers.spawn import WorkerConfig, write_config
from aiofeed.processes.workers.zero_copy import BorrowTracker

if TYPE_CHECKING:
    from aiofeed.devices.backend import DeviceBackend
    from aiofeed.processes.ipc.passing import Passable

log = logging.getLogger("aiofeed.processes")

# What closing a source may take in an engine process before that is killed.
GRACE_S = 3.0
# A process that has been killed is gone within milliseconds, unless the kernel is busy with its memory.
REAP_S = 1.0
# How often the processes are looked at; one whose connection tells at once need not wait for it.
LOOK_S = 0.2
_SOON_S = 0.005


class WorkerPool:
    """All of a feeder's processes.

    Args:
        worker_config: what they work with; it is pickled here and now.
        backend: the device that copies from their rings; ``None`` for the host.
        passable: is told of their rings.
    """

    def __init__(
        self, worker_config: WorkerConfig, backend: DeviceBackend | None, passable: Passable | None = None
    ) -> None:
        self.count = worker_config.engines
        self._reads = [
            worker_config.share(worker_config.read_concurrency, number) for number in range(worker_config.engines)
        ]
        self.lending = BorrowTracker()
        self._start: int | None = write_config(worker_config)
        self._backend = backend
        self._passable = passable
        self._processes: list[WorkerHandle] = []
        self._serials = itertools.count()
        self._ready: asyncio.Future[None] | None = None
        self._error: FeedError | None = None
        self._broken: Callable[[FeedError], None] | None = None
        self._stopping = False

    def __del__(self) -> None:
        # Never started: nobody else closes it.
        if self._start is not None:
            os.close(self._start)

    @property
    def pids(self) -> tuple[int, ...]:
        """Their process ids."""
        return tuple(process.pid for process in self._processes)

    @property
    def busy(self) -> bool:
        """Whether each has a batch to decode, and one of them another behind it; asked in any thread."""
        decoding = [process.decoding for process in self._processes]
        return min(decoding, default=0) > 0 and sum(decoding) > len(decoding)

    def count_reads(self, number: int, reads: int) -> int:
        """How many samples all of them read at a time, now that one has said how many it does."""
        self._reads[number] = max(1, min(reads, max(READS_MOST, self._reads[number])))
        return sum(self._reads)

    async def start(self) -> None:
        """Start them, and wait until all are ready; idempotent.

        Raises:
            Exception: one could not load what it needs, its source could not be opened, or it died.
        """
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            start, self._start = self._start, None
            assert start is not None
            try:
                # On the loop's own thread: the kernel ends a process with the thread that started it.
                for number in range(self.count):
                    self._processes.append(WorkerHandle(number, start, self, self._backend, self._passable))
            finally:
                os.close(start)
            self._look()
        await self._ready

    def when_broken(self, callback: Callable[[FeedError], None]) -> None:
        """Call back, at once or later, when a process is gone without having been told to."""
        self._broken = callback
        if self._error is not None:
            callback(self._error)

    def assign(self, plan: BatchPlan, *, opened: bool, was_read: Callable[[], None]) -> Work:
        """Have a batch assembled by whichever process has the least to do."""
        process = min(self._processes, key=_load)
        serial = next(self._serials)
        work = Work(process, serial, asyncio.get_running_loop().create_future(), was_read, plan)
        process.at_work[serial] = work
        indices, positions = np.asarray(plan.indices, np.int64), np.asarray(plan.positions, np.int64)
        length = 0 if plan.order is None else plan.order.length
        process.send(
            WorkerPlanMessage(
                serial, plan.number, plan.epoch_seed, indices.tobytes(), positions.tobytes(), opened, length
            )
        )
        return work

    def heard(self, process: WorkerHandle, message: FromEngine) -> None:
        """A process has said something."""
        if isinstance(message, BatchReady | BatchFailed):
            work = self._work(process, message.serial)
            del process.at_work[message.serial]
            if not work.reply.done():
                work.reply.set_result(message)
        elif isinstance(message, ReadReport):
            self._work(process, message.serial).was_read()
        elif isinstance(message, WorkerReady):
            process.ready = True
            if self._ready is not None and not self._ready.done() and all(each.ready for each in self._processes):
                self._ready.set_result(None)
        elif isinstance(message, ReplacementRequest):
            order = self._work(process, message.serial).plan.order
            index = None if order is None or message.position < 0 else order.index_at(message.position)
            assert index is None or isinstance(index, int)
            process.send(ReplacementAnswer(message.ticket, index))
        elif isinstance(message, WorkerEnded):
            self._break(rebuild(message.error))

    def _work(self, process: WorkerHandle, serial: int) -> Work:
        try:
            return process.at_work[serial]
        except KeyError:
            raise ProtocolError(f"word of batch {serial}, which nobody has asked for") from None

    def lost(self, process: WorkerHandle, error: Exception | None) -> None:
        """A process's connection has ended."""
        if self._stopping or self._error is not None:
            return
        if error is not None:
            process.kill()
            broken = FeedError(f"{process.describe(None)}: what it sent was refused: {error}")
            broken.__cause__ = error
            self._break(broken)
            return
        self._await_status(process, int(REAP_S / _SOON_S))

    def _await_status(self, process: WorkerHandle, looks: int) -> None:
        """The connection is gone before the exit status is there: a few milliseconds."""
        if self._stopping or self._error is not None:
            return
        status = process.poll()
        if status is None and looks:
            asyncio.get_running_loop().call_later(_SOON_S, self._await_status, process, looks - 1)
            return
        if status is None:
            process.kill()
        self._died(process, status)

    def _look(self) -> None:
        """See whether all of them run; somebody else may hold the other end of a connection."""
        if self._stopping or self._error is not None:
            return
        self.lending.collect()
        for process in self._processes:
            if (status := process.poll()) is not None:
                self._died(process, status)
                return
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _died(self, process: WorkerHandle, status: int | None) -> None:
        under_way = [work.plan.number for work in process.at_work.values()]
        what = f"; it had {len(under_way)} batches under way, from batch {under_way[0]} on" if under_way else ""
        self._break(WorkerDiedError(process.describe(status) + what, exit_status=status))

    def _break(self, error: Exception) -> None:
        if self._error is not None:
            return
        if not isinstance(error, FeedError):
            # Of a source's open(): the user's own error, as it is.
            if self._ready is not None and not self._ready.done():
                self._error = FeedError(str(error))
                self._ready.set_exception(error)
                return
            error = FeedError(f"{type(error).__name__}: {error}")
        self._error = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        if self._broken is not None:
            self._broken(error)

    async def aclose(self) -> None:
        """End all of them; see above."""
        self._stopping = True
        for process in self._processes:
            if process.ready:
                process.send(StopWorker())
            else:
                process.kill()  # its source is not open yet: there is nothing to clean up
        if not await _all_gone(self._processes, GRACE_S):
            left = [process for process in self._processes if process.poll() is None]
            log.warning(
                '%d process(es) of engine="process" did not end within %.0f s of being told to, and are killed',
                len(left),
                GRACE_S,
            )
            for process in left:
                process.kill()
            await _all_gone(left, REAP_S)
        for process in self._processes:
            process.close()
        self._broken = None
        release_unused()


async def _all_gone(processes: Sequence[WorkerHandle], limit_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while any(process.poll() is None for process in processes):
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_SOON_S)
    return True


def _load(process: WorkerHandle) -> tuple[int, int]:
    return len(process.at_work), process.number
