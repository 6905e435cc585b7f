"""An engine process may ask for another sample in the place of one that failed: the way there and back."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, cast

import pytest

from aiofeed.core.errors import FeedError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.types import BatchPlan
from aiofeed.processes.ipc.framing import Connection
from aiofeed.processes.ipc.schema import FromEngine, decode_from_engine
from aiofeed.processes.workers.handle import WorkerHandle
from aiofeed.processes.workers.main import _Worker
from aiofeed.processes.workers.pool import WorkerPool
from aiofeed.processes.workers.spawn import WorkerConfig
from aiofeed.runtime.event_loop import EventLoopThread
from tests.support import process_parts as parts

CARGO = WorkerConfig(parts.Numbers(4), parts.number, None, 4, 1, 1, 1, 2, True, FailurePolicy())


class Trainer:
    """The trainer's side, for a worker that lives in this process: it has one batch under way."""

    def __init__(self, sock: socket.socket, processes: WorkerPool) -> None:
        self.number = 0
        self.at_work: dict[int, Any] = {}
        self._processes = processes
        self._wire = Connection(sock, received=self._received, lost=lambda error: None)

    def send(self, message: Any) -> None:
        from aiofeed.processes.ipc.schema import encode

        self._wire.send(encode(message))

    def close(self) -> None:
        self._wire.close()

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message: FromEngine = decode_from_engine(payload)
        self._processes.heard(cast("WorkerHandle", self), message)


async def ask(order: Any) -> list[int]:
    """Two questions at once about positions of the epoch of batch 0."""
    ours, theirs = socket.socketpair()
    processes = WorkerPool(CARGO, None)
    trainer = Trainer(ours, processes)
    trainer.at_work[0] = type("Work", (), {"plan": BatchPlan(7, [0, 1, 2, 3], [4, 5, 6, 7], 1, order)})()
    worker = _Worker(cast("EventLoopThread", None), CARGO, os.getppid(), 0)
    worker._wire = Connection(theirs, received=worker._received, lost=lambda error: None)
    try:
        return await asyncio.gather(worker.ask(0, 2), worker.ask(0, 3))
    finally:
        worker._wire.close()
        trainer.close()
        await processes.aclose()


class Backwards:
    """An order of a hundred."""

    length = 100

    def index_at(self, position: int) -> int:
        return 99 - position


async def test_a_question_is_answered_from_the_epochs_order() -> None:
    """Each answer finds its question."""
    assert await ask(Backwards()) == [97, 96]


async def test_without_an_order_there_is_no_answer() -> None:
    """The question is answered all the same, rather than left open."""
    with pytest.raises(FeedError, match="nobody knows"):
        await ask(None)
