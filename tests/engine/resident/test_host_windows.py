"""Rows gathered by torch's own threads: the same bytes as numpy's one gives, and no thread that is not there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import Feeder, Limits, Tensors
from aiofeed.engine.resident import host_windows
from aiofeed.runtime import threads
from aiofeed.sampling import order
from aiofeed.sampling.order import BatchRange, BatchRanges, Shard, plans, shuffled


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch has two threads, however few cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of torch's has gathered; windows of any size are worth one."""
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
    """Rows of every size and dtype, bit for bit."""
    x = rows_of(dtype, *shape)
    if dtype is torch.bool:
        x = x.view(torch.uint8).bitwise_and(1).view(torch.bool)
    several = batches(x)
    assert sum(gathered) == 50
    monkeypatch.setattr(host_windows, "_threads", lambda: False)
    one = batches(x)
    assert sum(gathered) == 50
    assert [(raw(a), a.dtype, a.shape) for [a] in several] == [(raw(b), b.dtype, b.shape) for [b] in one]


def test_one_thread_is_left_alone(gathered: list[int], two_threads: None) -> None:
    """Where torch has one thread, numpy's is as good."""
    torch.set_num_threads(1)
    batches(torch.zeros(50, 100))
    assert gathered == []


@pytest.mark.usefixtures("two_threads")
def test_an_interpreter_that_ends_begins_nothing_of_torchs(
    gathered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon thread that comes back to it from C++ would abort the process."""
    monkeypatch.setattr(threads, "_ending", True)
    batches(torch.zeros(50, 100))
    assert gathered == []


@pytest.mark.usefixtures("two_threads")
def test_what_may_not_be_written_to(gathered: list[int]) -> None:
    """torch has no such tensors, and warns of them."""
    x = np.arange(100.0).reshape(50, 2)
    x.flags.writeable = False
    found = torch.cat([rows for [rows] in batches(x)])
    assert gathered == []
    assert sorted(found[:, 0].tolist()) == x[:, 0].tolist()


@pytest.mark.usefixtures("two_threads")
def test_rows_without_bytes(gathered: list[int]) -> None:
    """There is nothing to gather in them."""
    assert [rows.shape for rows, _ in batches(torch.zeros(9, 0), torch.arange(9))] == [(7, 0), (2, 0)]
    assert gathered == []


@pytest.mark.usefixtures("two_threads")
def test_under_inference_mode(gathered: list[int]) -> None:
    """Begun under it or outside it, batches can be trained on."""
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
@pytest.mark.parametrize("begun", ["before", "under it"])
def test_under_a_mode_of_fake_tensors(gathered: list[int], begun: str, allow: bool) -> None:
    """It has no failures, and no batch behind it has other rows than its own."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = np.arange(100.0).reshape(50, 2)
    feeder: Feeder[Any] = Feeder(
        Tensors(x), batch_size=7, sampler=list(range(49, -1, -1)), limits=Limits(memory_bytes=1)
    )
    iterator = iter(feeder)
    if begun == "before":
        next(iterator)
    with FakeTensorMode(allow_non_fake_inputs=allow):
        next(iterator)
    found = torch.cat([rows for [rows] in iterator])
    assert torch.equal(found, torch.from_numpy(x[::-1].copy()[-len(found) :]))
    assert len(found) == (36 if begun == "before" else 43)


FORKS = """
import os, sys
import torch

torch.set_num_threads(2)
x = torch.arange(200_000.0).reshape(2_000, 100)
x[torch.randperm(2_000)].sum()  # torch's threads are there from now on, in this process


def child():
    import aiofeed

    feeder = aiofeed.Feeder(aiofeed.Tensors(x), batch_size=500, shuffle=True)
    os._exit(0 if sum(len(rows) for [rows] in feeder) == 2_000 else 1)


if sys.argv[1] in ("fork", "of a child"):
    import aiofeed.feeder.feeder

if sys.argv[1] == "fork":
    pid = os.fork()
    if not pid:
        child()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

import multiprocessing

if sys.argv[1] == "of a child":
    sys.modules["__main__"].__name__ = "__mp_main__"  # as in a child that was not forked, which now forks another
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
sys.exit(process.exitcode)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a fork of threads is not safe at all")
@pytest.mark.parametrize("way", ["fork", "multiprocessing", "of a child"])
def test_a_forked_child_waits_for_no_thread(way: str) -> None:
    """A fork does not copy OpenMP's threads, and asking them would hang; after any fork that may_be_fork() notices."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, way]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("skip", [frozenset[int](), frozenset({0, 4, 5})])
def test_stretches_are_the_plans_whatever_is_computed_at_once(
    batch_size: int, skip: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are shorter than a stretch, longer, and met in their middle."""
    shard = Shard(length=53, batch_size=batch_size, rank=1, world_size=3)
    permutation = shuffled(53, 1, 0)
    wanted = [(plan.number, plan.indices) for plan in plans(shard, lambda: permutation, 0, skip)]
    for computed in (1, 7, 16, 1000):
        monkeypatch.setattr(order, "RANGE_BLOCK", computed)
        for most in (1, 2, 5, 100):
            batch_ranges = BatchRanges(shard, lambda: permutation, skip)
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
