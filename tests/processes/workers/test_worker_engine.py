"""A worker requests a sample to replace one that failed: the request and its answer."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiofeed.core.errors import FeedError
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.core.types import BatchPlan
from aiofeed.processes.ipc.framing import Connection
from aiofeed.processes.ipc.schema import encode
from aiofeed.processes.workers.handle import WorkerHandle
from aiofeed.processes.workers.main import _Worker
from aiofeed.processes.workers.pool import ProcessPool
from aiofeed.processes.workers.protocol import FromWorker, decode_from_worker
from aiofeed.processes.workers.spawn import WorkerConfig
from aiofeed.runtime.event_loop import EventLoopThread
from tests.support import process_parts as parts

CONFIG = WorkerConfig(parts.Numbers(4), parts.number, None, 4, 1, 1, 1, 2, True, FailurePolicy())


class Trainer:
    """The trainer's side of a worker in this process."""

    def __init__(self, sock: socket.socket, pool: ProcessPool) -> None:
        self.number = 0
        self.assigned: dict[int, Any] = {}
        self._pool = pool
        self._connection = Connection(sock, received=self._received, lost=lambda error: None)

    def send(self, message: Any) -> None:
        self._connection.send(encode(message))

    def close(self) -> None:
        self._connection.close()

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message: FromWorker = decode_from_worker(payload)
        self._pool.received(cast("WorkerHandle", self), message)


async def request(order: Any) -> list[int]:
    """The answers to two concurrent requests of batch 0."""
    ours, theirs = socket.socketpair()
    pool = ProcessPool(CONFIG, None)
    trainer = Trainer(ours, pool)
    trainer.assigned[0] = SimpleNamespace(plan=BatchPlan(7, [0, 1, 2, 3], [4, 5, 6, 7], 1, order))
    worker = _Worker(cast("EventLoopThread", None), CONFIG, os.getppid(), 0)
    worker._connection = Connection(theirs, received=worker._received, lost=lambda error: None)
    try:
        return await asyncio.gather(worker.request_index(0, 2), worker.request_index(0, 3))
    finally:
        worker._connection.close()
        trainer.close()
        await pool.aclose()


class Backwards:
    """The positions 0 to 99, from the end."""

    length = 100

    def index_at(self, position: int) -> int:
        return 99 - position


async def test_a_request_is_answered_from_the_epochs_order() -> None:
    """Each answer reaches its request."""
    assert await request(Backwards()) == [97, 96]


async def test_a_request_without_an_order_is_an_error() -> None:
    """The worker does not wait for an answer that never comes."""
    with pytest.raises(FeedError, match="has no order"):
        await request(None)
