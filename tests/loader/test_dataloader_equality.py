"""A property test: ``aiofeed.DataLoader`` gives torch's batches, errors and random numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from aiofeed import DataLoader
from tests.support.loader_parts import (
    DrawingSampler,
    Random,
    StatefulSampler,
    Stream,
    draw_all,
    same,
    seed_all,
    without_none,
)
from tests.support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

EXAMPLES = int(os.environ.get("AIOFEED_EXAMPLES", "2000")) // 20

SAMPLERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda n: {},
    "shuffle": lambda n: {"shuffle": True},
    "replacement": lambda n: {"sampler": RandomSampler(range(n), replacement=True, num_samples=n + 3)},
    "weighted": lambda n: {"sampler": WeightedRandomSampler([1.0 + index % 3 for index in range(n)], n)},
    "distributed": lambda n: {"sampler": DistributedSampler(range(n), 2, 1)},  # type: ignore[arg-type]
    "drawing": lambda n: {"sampler": DrawingSampler(n)},
    "stateful": lambda n: {"sampler": StatefulSampler(n)},
    "batches": lambda n: {"batch_sampler": BatchSampler(SequentialSampler(range(n)), 3, False)},
    "random batches": lambda n: {"batch_sampler": BatchSampler(DrawingSampler(n), 4, True)},
    "lists": lambda n: {"batch_sampler": [[index, index // 2] for index in range(n)]},
}


@st.composite
def cases(draw: st.DrawFn, workers: st.SearchStrategy[int]) -> dict[str, Any]:
    """A loader's arguments, and what a script does with it."""
    n = draw(st.integers(1, 14))
    bad = tuple(draw(st.lists(st.integers(0, n - 1), max_size=2)))
    num_workers = draw(workers)
    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        options["prefetch_factor"] = draw(st.integers(1, 3))
        options["persistent_workers"] = draw(st.booleans())
    iterable = draw(st.booleans())
    sampler = "none" if iterable else draw(st.sampled_from(list(SAMPLERS)))
    if "batch_sampler" not in SAMPLERS[sampler](n):
        options["batch_size"] = draw(st.sampled_from([None, 1, 2, 5]))
        options["drop_last"] = options["batch_size"] is not None and draw(st.booleans())
    dataset: Any = Stream(n, draw(st.integers(0, 3)), bad) if iterable else Random(n, bad)
    if not iterable and options.get("batch_size", 1) is not None:
        options["collate_fn"] = without_none
    return {
        "dataset": dataset,
        "options": options,
        "sampler": sampler,
        "generator": draw(st.booleans()),
        # After how many batches each epoch is left; some epochs are complete.
        "epochs": draw(st.lists(st.sampled_from([0, 1, 2, 3, 99]), min_size=1, max_size=3)),
    }


def run(cls: Any, case: dict[str, Any], **extras: Any) -> list[Any]:
    """The batches and errors of all epochs, with draws from the generators before, between and after."""
    seed_all(5)
    outcomes: list[Any] = []
    options = {**case["options"], **SAMPLERS[case["sampler"]](getattr(case["dataset"], "n", 0)), **extras}
    generator = torch.Generator().manual_seed(8) if case["generator"] else None
    loader = cls(case["dataset"], generator=generator, **options)
    for stop in case["epochs"]:
        iterator = iter(loader)
        for _ in range(stop):
            outcomes.append(draw_all())
            try:
                outcomes.append(next(iterator))
            except StopIteration:
                outcomes.append("end")
                break
            except Exception as error:
                # A traceback would keep torch's iterator alive.
                outcomes.append(error.with_traceback(None))
        del iterator
        outcomes.append(draw_all())
        if generator is not None:
            outcomes.append(generator.get_state())
    return outcomes


def check(case: dict[str, Any]) -> None:
    theirs, ours = run(torch_data.DataLoader, case), run(DataLoader, case)
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        assert same(one, other), f"{number}: {one!r}\nis here\n{other!r}"


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(cases(st.just(0)))
def test_the_caller_s_thread_gives_torch_s_batches(case: dict[str, Any]) -> None:
    """Without workers all batches, errors and draws are torch's, also around epochs that were left."""
    check(case)


@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(cases(st.integers(1, 3)))
def test_workers_give_torch_s_batches(case: dict[str, Any]) -> None:
    """With workers all batches, errors and draws are torch's, also around epochs that were left."""
    check(case)


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2, suppress_health_check=[HealthCheck.too_slow])
@given(cases(st.integers(0, 3)))
def test_many_loaders_give_torch_s_batches(case: dict[str, Any]) -> None:
    """All batches, errors and draws are torch's, in many examples."""
    check(case)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", [False, True])
def test_a_device_and_a_transform_change_no_number(workers: int, device: bool) -> None:
    """Batches on a device, or after a transform, are torch's, and so are the generators."""
    options = {"num_workers": workers, "batch_size": 3, "persistent_workers": bool(workers), "collate_fn": without_none}
    case = {
        "dataset": Random(11, (4,)) if not workers else Random(11),
        "options": options,
        "sampler": "drawing",
        "generator": True,
        "epochs": [99, 2, 99],
    }
    extras = {"device": SimulatedDevice() if device else None, "transform": lambda batch: batch}
    theirs, ours = run(torch_data.DataLoader, case), run(DataLoader, case, **extras)
    assert same(_on_host(ours), theirs)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu().as_subclass(torch.Tensor) if type(value) is not torch.Tensor else value
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        values = [_on_host(each) for each in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    return value
