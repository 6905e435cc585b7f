"""The main function of a worker process: it reads and decodes the batches that the trainer plans, until it is stopped.

It exits as soon as the trainer is gone: the connection ends; if another process (a fork of the trainer) holds that
open, the parent's process id changes and, on Linux, the kernel kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import numpy as np

from aiofeed.core.errors import CollateError, FeedError, add_note
from aiofeed.core.formatting import format_error
from aiofeed.core.statistics import EpochStats, new_events
from aiofeed.processes.ipc.error_codec import describe
from aiofeed.processes.ipc.framing import MAX_MESSAGE_BYTES, Connection, ProtocolError, close_all, send_message
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.workers.protocol import (
    BatchFinished,
    FromWorker,
    PlanBatch,
    ReplacementAnswer,
    ReplacementRequest,
    StopWorker,
    WorkerEnded,
    WorkerReady,
    decode_to_worker,
)
from aiofeed.processes.workers.spawn import WorkerConfig, read_config
from aiofeed.processes.workers.worker_engine import RemoteOrder, WorkerEngine, WorkerPlan
from aiofeed.runtime.event_loop import MOST_READ_THREADS, EventLoopThread, reserve_standard_descriptors
from aiofeed.sampling.epochs import EpochStart, Step

# Interval of the checks for a trainer whose end the connection does not show.
HEARTBEAT_S = 0.25


def main(connection: int, config: int, parent: int, number: int) -> None:
    """Run as a worker process.

    Args:
        connection, config: Descriptors of the socket to the trainer, and of the file with the configuration.
        parent: The trainer's process id.
        number: Number of this worker, from 0.
    """
    _exit_with(parent)
    reserve_standard_descriptors()
    sock = socket.socket(fileno=connection)
    status = 1
    try:
        worker_config = read_config(config)
        loop_thread = EventLoopThread(
            read_threads=min(worker_config.most_reads(number), MOST_READ_THREADS),
            decode_threads=worker_config.share(worker_config.decode_threads, number),
        )
        worker = _Worker(loop_thread, worker_config, parent, number)
        loop_thread.launch(import_torch=False)
        loop_thread.start(partial(worker.serve, sock))
        loop_thread.finished.result()
        status = 0
    except BaseException as error:  # noqa: BLE001 - the user's modules and objects may raise anything when they are loaded
        failure = FeedError(f'a worker process of engine="process" could not start: {format_error(error)}')
        failure.__cause__ = error
        sock.setblocking(True)
        send_message(sock, encode(WorkerEnded(describe(failure))))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or a closed one
                stream.flush()
        # Ends threads that cannot leave a decoder, and those of the user's modules.
        os._exit(status)


def _exit_with(parent: int) -> None:
    """Let the kernel kill this process when the trainer ends."""
    if sys.platform == "linux":
        import ctypes

        # PR_SET_PDEATHSIG: sent when the *thread* that started this process ends. That is the thread of the trainer's
        # event loop, which waits for its workers before it ends.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Worker:
    """A worker process, on its event loop."""

    def __init__(self, loop_thread: EventLoopThread, worker_config: WorkerConfig, parent: int, number: int) -> None:
        self._loop_thread = loop_thread
        self._config = worker_config
        self._parent = parent
        self._number = number
        self._plans: asyncio.Queue[WorkerPlan] = asyncio.Queue()
        self._tickets = itertools.count()
        self._requests: dict[int, asyncio.Future[ReplacementAnswer]] = {}
        self._connection: Connection | None = None
        self._engine: WorkerEngine | None = None

    async def serve(self, sock: socket.socket) -> None:
        """Open the source and assemble batches, until cancelled."""
        self._connection = Connection(sock, received=self._received, lost=self._lost)
        self._check_parent()
        source = self._config.source
        try:
            if (opener := getattr(source, "open", None)) is not None:
                await opener()
        except BaseException as error:  # the user's coroutine may raise anything; the trainer raises it
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            add_note(error, f"in {type(source).__name__}.open()")
            self.send(WorkerEnded(describe(error)))
            return
        if (closer := getattr(source, "aclose", None)) is not None:
            self._loop_thread.at_stop(closer)
        self._engine = WorkerEngine(
            self._steps(),
            worker_config=self._config,
            number=self._number,
            executor=self._loop_thread.decode_pool,
            send=self.send,
            late_s=self._loop_thread.late_s,
        )
        self.send(WorkerReady())
        await self._engine.run()

    async def _steps(self) -> AsyncGenerator[Step, None]:
        while True:
            if self._engine is not None and self._plans.empty():
                self._engine.out_of_plans()
            plan = await self._plans.get()
            yield EpochStart(EpochStats(events=new_events()))  # statistics of this batch alone
            yield plan

    async def request_index(self, serial: int, position: int) -> int:
        """The index at a position of the epoch's order, which the trainer has; ``FeedError`` if there is no order."""
        ticket = next(self._tickets)
        self._requests[ticket] = asyncio.get_running_loop().create_future()
        self.send(ReplacementRequest(ticket, serial, position))
        try:
            answer = await self._requests[ticket]
        finally:
            del self._requests[ticket]
        if answer.index is None:
            raise FeedError(f"the epoch has no order with a position {position}")
        return answer.index

    def send(self, message: FromWorker, descriptors: Sequence[int] = ()) -> None:
        """Send a message to the trainer; a batch whose description is too long for one is sent as failed."""
        assert self._connection is not None
        payload = encode(message)
        if len(payload) > MAX_MESSAGE_BYTES and isinstance(message, BatchFinished):
            close_all(descriptors)
            descriptors = ()
            error = CollateError(
                f"the numbers and strings of a batch take {len(payload)} bytes beside its arrays; at most "
                f"{MAX_MESSAGE_BYTES} can be sent to another process: put them into arrays"
            )
            payload = encode(BatchFinished(message.serial, message.stats, message.nbytes, [], describe(error)))
        self._connection.send(payload, descriptors)

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message = decode_to_worker(payload)
        if descriptors:
            raise ProtocolError("a message to a worker has no descriptors")
        if isinstance(message, StopWorker):
            self._loop_thread.stop()
        elif isinstance(message, ReplacementAnswer):
            if (request := self._requests.get(message.ticket)) is not None and not request.done():
                request.set_result(message)
        elif isinstance(message, PlanBatch):
            if self._engine is None:
                raise ProtocolError("a plan before the source is open")
            if message.may_decode:
                self._engine.permits.may_decode.add(message.serial)
            self._plans.put_nowait(self._plan(message))
        elif self._engine is not None:
            self._engine.received(message)

    def _plan(self, message: PlanBatch) -> WorkerPlan:
        if len(message.indices) % 8 or len(message.indices) != len(message.positions) or not message.indices:
            raise ProtocolError("a plan whose indices and positions do not match")
        if len(message.pieces) % (5 * 8):
            raise ProtocolError("a plan with an incomplete piece of a sample")
        indices: list[int] = np.frombuffer(message.indices, np.int64).tolist()
        positions: list[int] = np.frombuffer(message.positions, np.int64).tolist()
        request = partial(self.request_index, message.serial)
        order = RemoteOrder(message.order_length, request) if message.order_length else None
        pieces = np.frombuffer(message.pieces, np.int64).reshape(-1, 5) if message.pieces else None
        plan = message.number, indices, positions, message.epoch_seed, order
        return WorkerPlan(*plan, pieces=pieces, serial=message.serial)

    def _lost(self, error: Exception | None) -> None:
        os._exit(1)  # the trainer is gone; or it sent an invalid message, and sees this process end

    def _check_parent(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._check_parent)
