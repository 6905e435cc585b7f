"""Tests of ``explain`` of ``DataLoader``, ``prefetch`` and attached feeders. Their plants wait, and so need no core."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import aiofeed
from aiofeed import DataLoader
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.loader.workers.fetching import GIL_PROBES
from aiofeed.reports import Explanation
from aiofeed.reports.remedies import explain_loader
from benchmarks.explain import Items, SlowSampler, collate
from tests.support.simulated_device import SimulatedDevice

# A dataset that takes no time, also if other processes use the cores.
NUMBERS: Any = list(range(64))


class WithGil(Items):
    """A ``Dataset`` that holds the GIL while it waits."""

    def __getitem__(self, index: int) -> int:
        ctypes.PyDLL(None).usleep(int(self._seconds * 1e6))
        return index


def explained(loader: Any, step_s: float = 0.0) -> Explanation:
    for _ in loader:
        time.sleep(step_s)
    found = loader.explain()
    assert isinstance(found, Explanation)
    return found


def advice(found: Explanation) -> str:
    return "\n".join(map(str, found.advice))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_dataset_is_named(workers: int) -> None:
    """More workers are advised, and the verdict says whether threads could replace them."""
    found = explained(DataLoader(Items(96, 0.002), batch_size=8, num_workers=workers))
    assert found.stage == "dataset"
    assert "num_workers=" in advice(found)
    assert "The dataset holds the GIL in " in found.verdict


def test_how_often_a_dataset_holds_the_gil_is_measured() -> None:
    """It is measured while the dataset runs, not tried out: each item is requested once."""
    loader = DataLoader(WithGil(160, 0.002), batch_size=8)
    assert explained(loader).stage == "dataset"
    probes, held = loader._aiofeed.stats.dataset_probes
    assert 0 < held <= probes <= GIL_PROBES


def test_the_measurement_of_the_gil_ends() -> None:
    """After so many probes no thread is started, and the counts of an epoch are those since the first one."""
    loader = DataLoader(Items(320, 0.002), batch_size=8)
    for _ in range(2):
        explained(loader)
        assert loader._aiofeed.stats.dataset_probes[0] <= GIL_PROBES


@pytest.mark.parametrize(("held", "threads"), [(1, True), (30, False)])
def test_threads_are_advised_up_to_the_share_of_the_gil(held: int, threads: bool) -> None:
    """If the dataset holds the GIL in one of 40 probes, threads are advised, if in 30, they are not."""
    stats = EpochStats(batches=101, wall_s=10.1, stall_s=9.0, jobs=101, decode_s=18.0, decode_cpu_s=18.0)
    stats.dataset_probes[:] = 40, held
    found = explain_loader(stats, batch_size=8, workers=2, first_epoch=False)
    assert ("threads=" in advice(found)) == threads
    assert "could" in found.verdict


def test_the_wait_for_the_first_batch_is_named() -> None:
    """In a first epoch beside the limit; in later ones it may be the limit, without the time that loading takes."""
    stats = EpochStats(batches=9, wall_s=4.0, first_batch_s=3.0, first_stall_s=3.0, stall_s=3.0, jobs=9, decode_s=0.1)
    explain_epoch = partial(explain_loader, batch_size=8, workers=2, persistent=False)
    found = explain_epoch(stats, first_epoch=True)
    assert found.stage == "step"
    assert "The wait for the first batch took 75% of the epoch." in found.verdict
    found = explain_epoch(stats, first_epoch=False)
    assert found.stage == "first batch"
    assert "persistent_workers=True" in advice(found)
    slow = replace(stats, decode_s=18.0, wall_s=8.0, stall_s=5.0)
    assert explain_epoch(slow, first_epoch=False).stage == "dataset"


def test_a_short_epoch_of_a_slow_dataset() -> None:
    """Its batches are made while the first is awaited: the dataset is named, not the step, after which they come."""
    stats = EpochStats(
        **{"batches": 3, "wall_s": 1.0, "first_batch_s": 0.65, "first_stall_s": 0.65, "stall_s": 0.654},
        **{"jobs": 3, "decode_s": 1.8},
    )
    found = explain_loader(stats, batch_size=16, workers=2, prefetch_batches=4, first_epoch=True)
    assert found.stage == "dataset"
    assert found.waiting == pytest.approx(0.654)
    loading = next(stage for stage in found.stages if stage.name == "dataset")
    assert loading.samples_per_s is not None
    assert found.samples_per_s < loading.samples_per_s < found.stages[-1].samples_per_s  # type: ignore[operator]


class Iterated(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for number in range(160):
            time.sleep(0.002)
            yield number


@pytest.mark.parametrize(
    ("dataset", "batch_size"), [(Iterated(), 8), (Items(160, 0.002), None), (Items(160, 0.002), 8)]
)
def test_threads_are_advised_where_they_are_possible(dataset: Any, batch_size: int | None) -> None:
    """Not for a dataset without indices, nor for single samples: ``DataLoader`` refuses ``threads=`` then."""
    loader = DataLoader(dataset, batch_size=batch_size)
    loader._aiofeed.stats = EpochStats(batches=101, wall_s=10.1, stall_s=9.0, jobs=101, decode_s=9.0)
    loader._aiofeed.stats.dataset_probes[:] = 40, 0
    found = loader.explain()
    possible = isinstance(dataset, Items) and batch_size is not None
    assert found.stage == "dataset"
    assert ("threads" in found.verdict) == ("threads=" in advice(found)) == possible


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_collate_fn_is_named(workers: int) -> None:
    """Its time is not that of the dataset."""
    found = explained(DataLoader(NUMBERS, batch_size=4, num_workers=workers, collate_fn=partial(collate, seconds=0.02)))
    assert found.stage == "collate"


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"threads": 2}])
def test_a_slow_sampler_is_named(options: dict[str, Any]) -> None:
    """Wherever its indices are taken: in the training thread for each batch, or before the first one for a feeder."""
    found = explained(DataLoader(NUMBERS, batch_size=4, sampler=SlowSampler(64, 0.01), **options), 0.001)
    assert found.stage == "sampler"
    assert (found.resource == "the order") == ("threads" in options)


def test_transforms_copies_and_steps_are_told_apart() -> None:
    """A transform without a device runs in the training thread; a step that takes longer than loading is the limit."""
    slow = partial(time.sleep, 0.02)
    for workers in (0, 1):
        loader: Any = DataLoader(NUMBERS, batch_size=4, num_workers=workers, transform=lambda batch: slow() or batch)
        assert explained(loader).stage == "transform"
    copied: Any = DataLoader(NUMBERS, batch_size=4, num_workers=1, device=SimulatedDevice())
    assert {"copy", "dataset", "hand-over"} <= {stage.name for stage in explained(copied).stages}
    assert explained(DataLoader(NUMBERS, batch_size=4, num_workers=1), 0.05).stage == "step"


async def test_an_asynchronous_loop_is_explained() -> None:
    loader = DataLoader(Items(64, 0.002), batch_size=8, num_workers=1)
    async for _ in loader:
        pass
    assert loader.explain().stage == "dataset"


def test_a_loader_is_explained_at_any_time() -> None:
    """Before and within an epoch, after ``break``; pickled, it starts without counters."""
    loader = DataLoader(NUMBERS, batch_size=4)
    assert loader.explain().stage == ""
    for number, _ in enumerate(loader):
        assert (loader.explain().stage == "") == (number < 2)
        if number == 4:
            break
    assert loader.explain().stage != ""


def test_the_iterable_of_prefetch_is_named() -> None:
    """Figures are of batches; the gain is bounded by the step."""

    class Batches:
        def __iter__(self) -> Iterator[int]:
            for number in range(10):
                time.sleep(0.005)
                yield number

    found = explained(aiofeed.prefetch(Batches()), 0.002)
    assert found.stage == "source"
    assert "batches/s" in found.verdict
    assert "waits/batch" in str(found)
    assert found.advice[0].at_most


async def test_an_async_iterable_of_prefetch_is_named() -> None:
    class Batches:
        async def __aiter__(self) -> AsyncIterator[int]:
            for number in range(10):
                await asyncio.sleep(0.005)
                yield number

    batches = aiofeed.prefetch(Batches())
    async for _ in batches:
        pass
    assert batches.explain().stage == "source"


def test_the_server_of_an_attached_feeder_is_named(tmp_path: Path) -> None:
    """What limits it is known to the server's feeder."""
    address = tmp_path / "feed"
    with (
        aiofeed.Feeder(Items(64, 0.002), batch_size=4) as feeder,
        aiofeed.serve(feeder, address),
        aiofeed.attach(address) as attached,
    ):
        found = explained(attached)
    assert found.stage == "server"
    assert "in the process of the server" in advice(found)
