"""What do plans by length cost, and how even and full are their batches?

10 million log-normal lengths with a mean of 512 tokens, shuffled. Per plan, each round in a new process: the time to
list the batches of an epoch, which ``iter()`` waits for, and the size of the list.
``TokenBudget`` of 65,536 tokens: how much the costs of one step differ between 8 ranks, on average. ``Pack`` into rows
of 2,048: the part of the tokens that is padding. Then, for shuffled samples without a plan, how much later the first
batch comes after a resume in the middle of an epoch of 10 million samples than at its start.

Targets: costs differ by at most 5 %, and at most 2 % is padding with whole documents.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, at_most, column
from benchmarks.harness import Contender, Measure, Settings, interleave_fresh

if TYPE_CHECKING:
    from aiofeed.sampling.listers.length_plans import LengthPlan
    from aiofeed.sampling.order import BatchLists

TITLE = "Plans and resume, 10 million samples"

MEAN = 512
CONTEXT = 2048
MAX_TOKENS = 65_536
RANKS = 8


def run(settings: Settings) -> list[Figure]:
    samples = {"samples": settings.size(10_000_000, 10_000)}
    kinds = {"TokenBudget": "budget", "Pack": "split", "Pack, whole documents": "whole"}
    contenders = [
        *(Contender(label, plan, {**samples, "kind": kind}, ("numpy", "torch")) for label, kind in kinds.items()),
        *(
            Contender(f"shuffle={shuffle!r}", resume, {**samples, "shuffle": shuffle}, ("torch", "aiofeed:Feeder"))
            for shuffle in (True, "keyed")
        ),
    ]
    found = interleave_fresh(contenders, settings)
    figures = [
        Figure(
            "TokenBudget: difference of costs between 8 ranks",
            column(found["TokenBudget"], "quality"),
            "",
            at_most(0.05),
        ),
        Figure("Pack: padding", column(found["Pack"], "quality"), "", at_most(0.02)),
        Figure("Pack, whole documents: padding", column(found["Pack, whole documents"], "quality"), "", at_most(0.02)),
    ]
    for label in kinds:
        figures += [
            Figure(f"{label}: time to list an epoch", column(found[label], "list_s", 1e3), "ms"),
            Figure(f"{label}: size of the list", column(found[label], "nbytes", 1e-6), "MB"),
        ]
    for contender in contenders[len(kinds) :]:
        resumed = found[contender.label]
        figures += [
            Figure(f"{contender.label}: first batch of an epoch", column(resumed, "start_s", 1e3), "ms"),
            Figure(f"{contender.label}: resume in the middle, later", column(resumed, "later_s", 1e3), "ms"),
        ]
    return figures


def lengths_of(samples: int) -> Any:
    import numpy as np

    sigma = 0.8
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - sigma**2 / 2, sigma, samples)
    return np.clip(drawn.astype(np.int64), 1, CONTEXT)


@contextmanager
def plan(samples: int, kind: str) -> Iterator[Measure]:
    from aiofeed import Pack, TokenBudget
    from aiofeed.sampling.listers.length_plans import PlanLister

    lengths = lengths_of(samples)
    made: LengthPlan
    made = TokenBudget(lengths, MAX_TOKENS) if kind == "budget" else Pack(lengths, CONTEXT, split=kind == "split")
    made.bind(samples)
    lister = PlanLister(made, 0, shuffle=True, drop_last=False)

    def measure() -> Mapping[str, float]:
        started = time.perf_counter()
        lists = lister.list_epoch(0, resumed=False)
        list_s = time.perf_counter() - started
        arrays = [array for array in (lists.indices, lists.offsets, lists.spans) if array is not None]
        tokens = len(lists) * 8 * CONTEXT
        quality = difference(lists, lengths) if kind == "budget" else 1 - float(lengths.sum()) / tokens
        return {"list_s": list_s, "nbytes": float(sum(array.nbytes for array in arrays)), "quality": quality}

    yield measure


def difference(lists: BatchLists, lengths: Any) -> float:
    """How much cheaper the cheapest batch of a step is than the most expensive, on average."""
    import numpy as np

    costs = np.maximum.reduceat(lengths[lists.indices], lists.offsets[:-1]) * np.diff(lists.offsets)
    ranks = min(RANKS, len(costs))
    steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks)
    return float(((steps.max(1) - steps.min(1)) / steps.max(1)).mean())


class Numbers:
    """A Dataset of small tensors."""

    def __init__(self, samples: int) -> None:
        import torch

        self._samples = samples
        self._sample = torch.zeros(16)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return self._sample


@contextmanager
def resume(samples: int, shuffle: Any) -> Iterator[Measure]:
    import aiofeed

    def first_batch(position: int) -> float:
        with aiofeed.Feeder(Numbers(samples), batch_size=64, shuffle=shuffle, shard=None) as feeder:
            state = feeder.state_dict()
            feeder.load_state_dict({**state, "position": position})
            started = time.perf_counter()
            next(iter(feeder))
            return time.perf_counter() - started

    def measure() -> Mapping[str, float]:
        start_s = first_batch(0)
        return {"start_s": start_s, "later_s": first_batch(samples // 2) - start_s}

    first_batch(0)
    yield measure
