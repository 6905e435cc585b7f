"""Tests of the line in the log that says what ``next`` has been waiting for."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiofeed
from aiofeed import DataLoader, Feeder
from aiofeed.kernel.runtime import queue


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "LONG_WAIT_S", 0.2)


class Logged(logging.Handler):
    """Collects the lines, and sets an event at the first one that has the text ``wanted``."""

    wanted = ""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.first = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "next() has waited" in record.getMessage():
            self.lines.append(record.getMessage())
            if self.wanted in self.lines[-1]:
                self.first.set()


@pytest.fixture
def logged() -> Iterator[Logged]:
    handler = Logged()
    logging.getLogger("aiofeed").addHandler(handler)
    yield handler
    logging.getLogger("aiofeed").removeHandler(handler)


class Blocked:
    """A source of 8 samples of which one blocks in ``read`` until the line is in the log."""

    def __init__(self, logged: Logged, at: int = 6) -> None:
        self._logged, self._at = logged, at

    def __len__(self) -> int:
        return 8

    def key(self, index: int) -> str:
        return f"file {index}.jpg"

    async def read(self, index: int) -> bytes:
        if index == self._at:
            await asyncio.to_thread(self._logged.first.wait, 30)
        return bytes([index])


def decode(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data))


def test_a_read_that_takes_long_is_named(logged: Logged) -> None:
    """The line names the file, since when, the process and how to get the stacks; there is one line."""
    with Feeder(Blocked(logged), decode=decode, batch_size=4) as feeder:
        assert len(list(feeder)) == 2
    [line] = logged.lines
    assert "for batch 1: reading " in line
    assert "'file 6.jpg'" in line
    assert f"py-spy dump --pid {os.getpid()}" in line
    assert "batches returned: 1" in line


def test_a_decode_job_that_takes_long_is_named(logged: Logged) -> None:
    """Samples that the job has decoded are not named."""

    def decode_slowly(data: bytes) -> torch.Tensor:
        if data == b"\x06":
            logged.first.wait(30)
        return decode(data)

    source, limits = Blocked(logged, at=-1), aiofeed.Limits(decode_threads=1)
    with Feeder(source, decode=decode_slowly, batch_size=4, limits=limits) as feeder:
        assert len(list(feeder)) == 2
    [line] = logged.lines
    assert "for batch 1: decoding 'file 6.jpg', 'file 7.jpg' for 0 s" in line


async def test_async_iteration_has_the_line(logged: Logged) -> None:
    async with Feeder(Blocked(logged), decode=decode, batch_size=4) as feeder:
        assert len([batch async for batch in feeder]) == 2
    [line] = logged.lines
    assert "'file 6.jpg'" in line


def test_a_long_step_has_no_line(logged: Logged) -> None:
    """The time between two calls of ``next`` is that of the training."""
    with Feeder(Blocked(logged, at=-1), decode=decode, batch_size=4) as feeder:
        iterator = iter(feeder)
        next(iterator)
        assert not logged.first.wait(0.2)
        next(iterator)
    assert logged.lines == []


class Waits(torch.utils.data.Dataset[Any]):
    """Sample 6 waits for a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        while index == 6 and not self._file.exists():
            threading.Event().wait(0.01)
        return index


async def test_a_step_that_blocks_the_loop_has_no_line(logged: Logged) -> None:
    """A batch that arrives while a step blocks the event loop of a waiting task was not waited for."""
    async with Feeder(Blocked(logged, at=-1), decode=decode, batch_size=4) as feeder:
        iterator = aiter(feeder)
        waiting = asyncio.create_task(anext(iterator))
        await asyncio.sleep(0)
        assert not logged.first.wait(0.4)  # blocks the loop
        await waiting
    assert logged.lines == []


@pytest.mark.parametrize(("transform", "timeout"), [(None, 0), (None, 60), (lambda batch: batch, 0)])
def test_a_worker_that_takes_long_is_named(logged: Logged, tmp_path: Path, transform: Any, timeout: float) -> None:
    """The line names the batch, the worker, its samples and its process, whether or not a thread receives batches."""
    file = tmp_path / "go"
    threading.Thread(target=lambda: logged.first.wait(30) and file.touch()).start()
    loader = DataLoader(Waits(file), batch_size=4, num_workers=2, timeout=timeout, transform=transform)
    assert len(list(loader)) == 2
    assert "for batch 1: worker 1 (pid " in logged.lines[0]
    assert "was asked for [4, 5, 6, 7] 0 s ago" in logged.lines[0]
    assert logged.lines[0].count("py-spy dump --pid") == 2


@pytest.mark.usefixtures("forked_workers")
def test_worker_processes_of_a_feeder_are_named(logged: Logged, tmp_path: Path) -> None:
    file = tmp_path / "go"
    threading.Thread(target=lambda: logged.first.wait(30) and file.touch()).start()
    with Feeder(Waits(file), batch_size=4, engine="process:1") as feeder:
        assert len(list(feeder)) == 2
    assert any("py-spy dump --pid" in line for line in logged.lines)


class LoadsSlowly(Waits):
    """A worker process that unpickles it waits for the file."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        while not self._file.exists():
            threading.Event().wait(0.01)


@pytest.mark.usefixtures("forked_workers")
def test_workers_that_take_long_to_start_are_named(logged: Logged, tmp_path: Path) -> None:
    file = tmp_path / "go"
    threading.Thread(target=lambda: logged.first.wait(30) and file.touch()).start()
    with Feeder(LoadsSlowly(file), batch_size=4, engine="process:1") as feeder:
        assert len(list(feeder)) == 2
    assert "for the workers to start" in logged.lines[0]


def test_the_iterable_of_prefetch_is_named(logged: Logged) -> None:
    def batches() -> Iterator[int]:
        yield 0
        logged.first.wait(30)
        yield 1

    assert list(aiofeed.prefetch(batches())) == [0, 1]
    [line] = logged.lines
    assert "for the next batch of generator, in a thread of its own" in line


def test_the_server_of_an_attached_feeder_is_named(logged: Logged, tmp_path: Path) -> None:
    address, logged.wanted = tmp_path / "feed", "for the server"
    with (
        Feeder(Blocked(logged), decode=decode, batch_size=4) as feeder,
        aiofeed.serve(feeder, address),
        aiofeed.attach(address) as attached,
    ):
        assert len(list(attached)) == 2
    assert any(f"for the server at {address} (pid {os.getpid()}), and its epoch 0" in line for line in logged.lines)
