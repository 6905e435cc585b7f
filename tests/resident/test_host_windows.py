"""Rows gathered by torch's threads: the same bytes as numpy gives, and no hang in forked processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import Feeder, Limits, Tensors
from aiofeed.kernel.runtime import threads
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.resident import batch_ranges as batch_ranges_module
from aiofeed.resident import host_windows
from aiofeed.resident.batch_ranges import BatchRange, BatchRanges


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Give torch two threads on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of row counts that torch has gathered; windows of any size use torch's threads."""
    rows: list[int] = []
    select = torch.index_select

    def counting(data: Any, dim: int, index: torch.Tensor, **options: Any) -> torch.Tensor:
        rows.append(len(index))
        return select(data, dim, index, **options)

    monkeypatch.setattr(host_windows, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(torch, "index_select", counting)
    return rows


def batches(*given: Any, batch_size: int = 7) -> list[list[torch.Tensor]]:
    feeder: Feeder[Any] = Feeder(Tensors(*given), batch_size=batch_size, shuffle=True, seed=3)
    return list(feeder)


def rows_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(256, (50, count), dtype=torch.uint8).view(dtype).reshape(50, *shape)


def raw(batch: torch.Tensor) -> bytes:
    return batch.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2), (5, 1, 3), (8,)])
@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bfloat16, torch.float32, torch.complex128, torch.bool, torch.uint16, torch.float8_e4m3fn],
)
def test_bytes_are_those_of_one_thread(
    dtype: torch.dtype, shape: tuple[int, ...], gathered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's threads gather the same bytes as numpy, for every dtype and row size."""
    x = rows_of(dtype, *shape)
    if dtype is torch.bool:
        x = x.view(torch.uint8).bitwise_and(1).view(torch.bool)
    several = batches(x)
    assert sum(gathered) == 50
    monkeypatch.setattr(host_windows, "_threads", lambda: False)
    one = batches(x)
    assert sum(gathered) == 50
    assert [(raw(a), a.dtype, a.shape) for [a] in several] == [(raw(b), b.dtype, b.shape) for [b] in one]


def test_a_single_torch_thread_is_not_used(gathered: list[int], two_threads: None) -> None:
    """If torch has one thread, numpy gathers."""
    torch.set_num_threads(1)
    batches(torch.zeros(50, 100))
    assert gathered == []


@pytest.mark.usefixtures("two_threads")
def test_torch_threads_are_not_used_at_interpreter_exit(gathered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At interpreter exit numpy gathers: a daemon thread that returns from C++ would abort the process."""
    monkeypatch.setattr(threads, "_ending", True)
    batches(torch.zeros(50, 100))
    assert gathered == []


@pytest.mark.usefixtures("two_threads")
def test_read_only_data(gathered: list[int]) -> None:
    """numpy gathers read-only data; torch has no read-only tensors."""
    x = np.arange(100.0).reshape(50, 2)
    x.flags.writeable = False
    found = torch.cat([rows for [rows] in batches(x)])
    assert gathered == []
    assert sorted(found[:, 0].tolist()) == x[:, 0].tolist()


@pytest.mark.usefixtures("two_threads")
def test_rows_without_bytes(gathered: list[int]) -> None:
    """Rows without bytes work."""
    assert [rows.shape for rows, _ in batches(torch.zeros(9, 0), torch.arange(9))] == [(7, 0), (2, 0)]
    assert gathered == []


@pytest.mark.usefixtures("two_threads")
def test_under_inference_mode(gathered: list[int]) -> None:
    """Batches are no inference tensors, also if the epoch starts under inference_mode."""
    x = torch.arange(100.0).reshape(50, 2)
    feeder: Feeder[Any] = Feeder(Tensors(x), batch_size=7, shuffle=True)
    with torch.inference_mode():
        iterator = iter(feeder)
        found = [next(iterator)[0]]
    found += [rows for [rows] in iterator]
    found += [rows for [rows] in feeder]
    assert sum(gathered) == 100
    assert not any(rows.is_inference() for rows in found)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("started", ["before", "inside"])
def test_under_a_fake_tensor_mode(gathered: list[int], started: str, allow: bool) -> None:
    """Under FakeTensorMode nothing fails, and later batches have the right rows."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = np.arange(100.0).reshape(50, 2)
    feeder: Feeder[Any] = Feeder(
        Tensors(x), batch_size=7, sampler=list(range(49, -1, -1)), limits=Limits(memory_bytes=1)
    )
    iterator = iter(feeder)
    if started == "before":
        next(iterator)
    with FakeTensorMode(allow_non_fake_inputs=allow):
        next(iterator)
    found = torch.cat([rows for [rows] in iterator])
    assert torch.equal(found, torch.from_numpy(x[::-1].copy()[-len(found) :]))
    assert len(found) == (36 if started == "before" else 43)


FORKS = """
import os, sys
import torch

torch.set_num_threads(2)
x = torch.arange(200_000.0).reshape(2_000, 100)
x[torch.randperm(2_000)].sum()  # starts torch's threads in this process


def child():
    import aiofeed

    feeder = aiofeed.Feeder(aiofeed.Tensors(x), batch_size=500, shuffle=True)
    os._exit(0 if sum(len(rows) for [rows] in feeder) == 2_000 else 1)


def of_multiprocessing():
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode


def of_os():
    pid = os.fork()
    if not pid:
        child()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


print("multiprocessing", of_multiprocessing())
import aiofeed.kernel.feeder.feeder
print("fork", of_os())
sys.modules["__main__"].__name__ = "__mp_main__"  # as in a spawned child, which now forks
print("of a child", of_multiprocessing())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a fork with threads is not safe")
def test_a_forked_child_does_not_hang() -> None:
    """A forked child that may_be_fork() notices does not use OpenMP's threads, which a fork does not copy."""
    command = [sys.executable, "-W", "ignore", "-u", "-c", FORKS]
    done = subprocess.run(command, timeout=120, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines() == ["multiprocessing 0", "fork 0", "of a child 0"]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("skip", [frozenset[int](), frozenset({0, 4, 5})])
def test_batch_ranges_equal_the_plans(batch_size: int, skip: frozenset[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch ranges equal the plans for blocks of indices of any size, also from the middle of a block."""
    schedule_of_rank = Schedule(length=53, batch_size=batch_size, seed=1, shuffle=True, rank=1, world_size=3)
    start = Position(ahead=skip)
    wanted = [(plan.number, plan.indices) for plan in schedule_of_rank.plans(start)]
    for computed in (1, 7, 16, 1000):
        monkeypatch.setattr(batch_ranges_module, "RANGE_BLOCK", computed)
        for most in (1, 2, 5, 100):
            batch_ranges = BatchRanges(schedule_of_rank, start)
            found: list[tuple[int, list[int]]] = []
            first = 0
            while (batch_range := batch_ranges.at(first, most)) is not None:
                found += by_number(batch_range)
                first = batch_range.numbers[-1] + 1
            assert found == wanted
            assert by_number(batch_ranges.at(1, 1)) == [each for each in wanted if each[0] >= 1][:1]


def by_number(batch_range: BatchRange | None) -> list[tuple[int, list[int]]]:
    assert batch_range is not None
    size = batch_range.batch_size
    return [
        (number, batch_range.indices[at * size : (at + 1) * size].tolist())
        for at, number in enumerate(batch_range.numbers)
    ]
