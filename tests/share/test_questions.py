"""An engine process may ask for another sample in the place of one that failed: the way there and back."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, cast

import share_parts as parts

from aiofeed.runtime import Runtime
from aiofeed.share.child import _Worker
from aiofeed.share.messages import Answer, Ask, FromEngine, decode_from_engine
from aiofeed.share.process import EngineProcess
from aiofeed.share.processes import EngineProcesses
from aiofeed.share.travel import Cargo
from aiofeed.share.wire import Wire
from aiofeed.types import BatchPlan

CARGO = Cargo(parts.Numbers(4), parts.number, None, 4, 1, 1, 1, 2, True)


class Trainer:
    """The trainer's side, for a worker that lives in this process: it has one batch under way."""

    def __init__(self, sock: socket.socket, processes: EngineProcesses) -> None:
        self.number = 0
        self.at_work: dict[int, Any] = {}
        self._processes = processes
        self._wire = Wire(sock, received=self._received, lost=lambda error: None)

    def send(self, message: Any) -> None:
        from aiofeed.share.messages import encode

        self._wire.send(encode(message))

    def close(self) -> None:
        self._wire.close()

    def _received(self, payload: bytes, descriptors: list[int]) -> None:
        message: FromEngine = decode_from_engine(payload)
        self._processes.heard(cast("EngineProcess", self), message)


async def ask(answer: Any) -> list[Answer]:
    """Two questions at once about position 2 and 3 of batch 0."""
    ours, theirs = socket.socketpair()
    processes = EngineProcesses(CARGO, None, answer)
    trainer = Trainer(ours, processes)
    work = type("Work", (), {"plan": BatchPlan(7, [0, 1, 2, 3], [4, 5, 6, 7], 1)})()
    trainer.at_work[0] = work
    worker = _Worker(cast("Runtime", None), CARGO, os.getppid(), 0)
    worker._wire = Wire(theirs, received=worker._received, lost=lambda error: None)
    answers = await asyncio.gather(worker.ask(0, 2), worker.ask(0, 3))
    worker._wire.close()
    trainer.close()
    await processes.aclose()
    return answers


async def test_a_question_is_answered_by_the_trainer() -> None:
    """Which plan and which position it is about; answers find their questions, in whatever order they come."""
    second = asyncio.Event()

    async def answer(question: Ask, plan: BatchPlan) -> Answer:
        if question.position == 2:
            await second.wait()
        second.set()
        return Answer(question.ticket, plan.indices[question.position] + 100, plan.positions[question.position] + 100)

    found = await ask(answer)
    assert [(each.index, each.position) for each in found] == [(102, 106), (103, 107)]


async def test_without_anybody_to_answer_there_is_none() -> None:
    """The question is answered with nothing rather than left open."""
    assert [(each.index, each.position) for each in await ask(None)] == [(None, None)] * 2
