"""For any data, ranks, limits and breaks: epochs equal those of DistributedSampler, and a resume changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from aiofeed import Feeder, Limits
from tests.support.process_parts import Numbers

# `make test-long` sets this.
EXAMPLES = int(os.environ.get("AIOFEED_EXAMPLES", "30"))


def augmented(data: bytes, *, rng: torch.Generator) -> tuple[int, torch.Tensor]:
    """The number and two random numbers of the sample."""
    return int(data), torch.rand(2, generator=rng)


@dataclass(frozen=True)
class Case:
    n: int
    batch_size: int
    world_size: int
    epoch: int
    seed: int
    shuffle: bool | str
    drop_last: bool

    def feeder(self, rank: int, limits: Limits, **other: Any) -> Feeder[Any]:
        options: dict[str, Any] = {
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "shard": (rank, self.world_size),
            "limits": limits,
            **other,
        }
        return Feeder(Numbers(self.n), decode=augmented, **options)


cases = st.builds(
    Case,
    n=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 1000),
    shuffle=st.sampled_from([False, True, "keyed"]),
    drop_last=st.booleans(),
)
limits_of_all_kinds = st.builds(
    Limits, read_concurrency=st.integers(1, 20), decode_threads=st.integers(1, 3), prefetch_batches=st.integers(1, 4)
)

Batch = tuple[list[int], list[list[float]]]


def plain(batch: Any) -> Batch:
    return batch[0].tolist(), batch[1].tolist()


def epoch_of(feeder: Feeder[Any]) -> list[Batch]:
    return [plain(batch) for batch in feeder]


def indices_of(batches: list[Batch]) -> list[int]:
    return [index for indices, _ in batches for index in indices]


@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(case=cases, one=limits_of_all_kinds, other=limits_of_all_kinds, cut=st.integers(0, 12), rank=st.integers(0, 3))
def test_interrupted_and_resumed_equals_uninterrupted(
    case: Case, one: Limits, other: Limits, cut: int, rank: int
) -> None:
    """An epoch stopped after any batch and resumed with any limits, and the next one, equal uninterrupted ones."""
    rank %= case.world_size
    whole = case.feeder(rank, one)
    whole.set_epoch(case.epoch)
    wanted = epoch_of(whole), epoch_of(whole)
    assert len(wanted[0]) == len(whole)
    if case.shuffle != "keyed" and case.n:
        sampler = DistributedSampler(
            range(case.n), case.world_size, rank, bool(case.shuffle), case.seed, drop_last=case.drop_last
        )
        sampler.set_epoch(case.epoch)
        indices = list(sampler)
        if case.drop_last:
            indices = indices[: len(indices) // case.batch_size * case.batch_size]
        assert indices_of(wanted[0]) == indices
    whole.close()

    first = case.feeder(rank, one)
    first.set_epoch(case.epoch)
    iterator = iter(first)
    before = [plain(batch) for _, batch in zip(range(cut), iterator, strict=False)]
    state = first.state_dict()
    first.close()

    second = case.feeder(rank, other)
    second.load_state_dict(state)
    assert second.state_dict() == state
    after = epoch_of(second)
    if len(before) == len(wanted[0]) and before:
        assert (before, after) == wanted  # the state is the start of the next epoch
    else:
        assert before + after == wanted[0]
        if wanted[0]:
            assert epoch_of(second) == wanted[1]
    second.close()


@pytest.mark.timeout(3600)
@settings(max_examples=max(EXAMPLES // 4, 40), suppress_health_check=list(HealthCheck))
@given(
    case=cases,
    limits=limits_of_all_kinds,
    cut=st.integers(0, 8),
    new_world=st.integers(1, 4),
    new_batch=st.integers(1, 9),
)
def test_a_resume_with_other_shards_sees_the_rest_once(
    case: Case, limits: Limits, cut: int, new_world: int, new_batch: int
) -> None:
    """Resumed with another world size and batch size, an epoch has the remaining samples only."""
    seen: list[int] = []
    states = []
    for rank in range(case.world_size):
        feeder = case.feeder(rank, limits)
        cut = min(cut, len(feeder))
        iterator = iter(feeder)
        seen += indices_of([plain(next(iterator)) for _ in range(cut)])
        states.append(feeder.state_dict())
        feeder.close()
    assert all(state == states[0] for state in states)  # every rank has the same state
    rest: list[int] = []
    lengths = set()
    for rank in range(new_world):
        feeder = case.feeder(rank, limits, shard=(rank, new_world), batch_size=new_batch)
        feeder.load_state_dict(states[0])
        batches = epoch_of(feeder)
        lengths.add(len(batches))
        rest += indices_of(batches)
        epoch = feeder.epoch
        feeder.close()
    assert len(lengths) == 1
    if epoch == 1:  # no sample was left, so this is the next epoch
        assert len(set(seen)) >= case.n - case.world_size * case.batch_size - new_world * new_batch
    elif case.drop_last:
        assert not set(seen) & set(rest)
        assert len(rest) == len(set(rest))
        assert len(seen) + len(rest) > case.n - new_world * new_batch
    else:
        assert set(seen) | set(rest) == set(range(case.n))
        # Padding repeats fewer samples than there are ranks.
        assert len(rest) - len(set(rest) - set(seen)) < new_world


@pytest.mark.timeout(3600)
@settings(max_examples=max(EXAMPLES // 10, 30), suppress_health_check=list(HealthCheck))
@given(case=cases, limits=limits_of_all_kinds, cut=st.integers(0, 12))
def test_out_of_order_the_rest_is_exact(case: Case, limits: Limits, cut: int) -> None:
    """With in_order=False, the batches before and after the resume are all batches of the epoch, bit for bit."""
    ordered = case.feeder(0, limits)
    wanted = sorted(epoch_of(ordered))
    ordered.close()
    first = case.feeder(0, limits, in_order=False)
    cut = min(cut, max(len(first) - 1, 0))
    iterator = iter(first)
    before = [plain(next(iterator)) for _ in range(cut)]
    state = first.state_dict()
    first.close()
    second = case.feeder(0, limits, in_order=False)
    second.load_state_dict(state)
    assert sorted(before + epoch_of(second)) == wanted
    second.close()
