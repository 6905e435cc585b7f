"""The order of an epoch, compared with torch's samplers and by its properties."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from aiofeed.kernel.sampling.order import epoch_seed, feistel, feistel_each, mix64, sample_seed, shuffled
from aiofeed.kernel.sampling.schedule import Position, Schedule


def indices_of(schedule: Schedule, epoch: int = 0) -> list[int]:
    return [index for plan in schedule.plans(Position(epoch)) for index in plan.indices]


@given(
    n=st.integers(1, 200),
    world=st.integers(1, 9),
    seed=st.integers(0, 100),
    epoch=st.integers(0, 5),
    drop=st.booleans(),
    shuffle=st.booleans(),
)
def test_every_rank_has_the_indices_of_distributed_sampler(n, world, seed, epoch, drop, shuffle) -> None:
    """With a batch size of 1, the indices of each rank are those of torch's DistributedSampler."""
    for rank in range(world):
        sampler = DistributedSampler(range(n), world, rank, shuffle=shuffle, seed=seed, drop_last=drop)
        sampler.set_epoch(epoch)
        schedule = Schedule(
            length=n, batch_size=1, seed=seed, shuffle=shuffle, rank=rank, world_size=world, drop_last=drop
        )
        # With fewer samples than ranks, both are empty with drop_last=True.
        assert indices_of(schedule, epoch) == list(sampler)


@given(n=st.integers(0, 300), world=st.integers(1, 7), batch=st.integers(1, 40), drop=st.booleans(), pad=st.booleans())
def test_batches_cover_the_epoch(n, world, batch, drop, pad) -> None:
    """All batches but the last are full, and the ranks together see every sample unless drop_last drops some."""
    seen: list[int] = []
    for rank in range(world):
        schedule = Schedule(length=n, batch_size=batch, rank=rank, world_size=world, drop_last=drop, pad=pad)
        sizes = [len(plan.indices) for plan in schedule.plans(Position())]
        assert len(sizes) == schedule.batches()
        assert sum(sizes) == schedule.samples()
        assert all(size == batch for size in sizes[:-1])
        assert not (drop and sizes and sizes[-1] != batch)
        seen += indices_of(schedule)
    if not drop:
        assert set(seen) == set(range(n))
        if not pad:
            assert sorted(seen) == list(range(n))


def test_without_padding_lengths_differ_by_one_at_most() -> None:
    """pad=False gives each sample once, so ranks have different lengths."""
    lengths = [Schedule(length=10, batch_size=1, rank=r, world_size=4, pad=False).samples() for r in range(4)]
    assert lengths == [3, 3, 2, 2]


def test_keyed_differs_by_epoch_and_seed_and_from_the_identity() -> None:
    """Each seed and epoch has its own order, and none is sequential."""
    positions = np.arange(1000, dtype=np.int64)
    orders = {tuple(feistel(1000, seed, epoch)(positions).tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert tuple(range(1000)) not in orders


def test_keyed_spreads_like_a_random_permutation() -> None:
    """The order has no correlation with the identity, and neighbours are as far apart as in a random permutation."""
    n = 20_000
    order = feistel(n, 3, 0)(np.arange(n, dtype=np.int64))
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.03
    assert abs(np.abs(np.diff(order)).mean() / (n / 3) - 1) < 0.03


def test_shuffled_is_torch_randperm() -> None:
    """shuffle=True is torch.randperm with a generator seeded with seed + epoch; the global generator is not used."""
    state = torch.get_rng_state()
    order = shuffled(50, 7, 2)
    assert order(np.arange(50)).tolist() == torch.randperm(50, generator=torch.Generator().manual_seed(9)).tolist()
    assert torch.equal(torch.get_rng_state(), state)


def test_sample_seeds_are_distinct_and_of_63_bits() -> None:
    """Each (epoch, position) has its own seed that a torch.Generator accepts."""
    seeds = {sample_seed(epoch_seed(0, epoch), position) for epoch in range(20) for position in range(500)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert mix64(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 seeded with 0


@given(
    n=st.integers(1, 120),
    world=st.integers(1, 5),
    batch=st.integers(1, 12),
    done=st.integers(0, 6),
    new_world=st.integers(1, 5),
    new_batch=st.integers(1, 12),
)
def test_the_rest_is_exact_with_other_shards(n, world, batch, done, new_world, new_batch) -> None:
    """After a resume with another world size and batch size, only the remaining samples are seen, each once."""
    first = [Schedule(length=n, batch_size=batch, rank=r, world_size=world) for r in range(world)]
    done = min(done, first[0].batches())
    before = [i for s in first for plan in list(s.plans(Position()))[:done] for i in plan.indices]
    consumed = first[0].consumed_after(0, done)
    after: list[int] = []
    for rank in range(new_world):
        rest = Schedule(length=n, batch_size=new_batch, rank=rank, world_size=new_world)
        for plan in rest.plans(Position(0, consumed)):
            after += [i for i, position in zip(plan.indices, plan.positions, strict=True) if position < n]
    assert sorted(set(before)) == list(range(min(consumed, n)))
    assert sorted(after) == list(range(min(consumed, n), n))


def test_blocks_of_plans_do_not_change_the_batches() -> None:
    """Each batch has the indices of its own positions, also with skipped batches and a short last one."""
    order = shuffled(5000, seed=1, epoch=2)
    for batch_size in (1, 7, 64, 1024, 3000):
        schedule = Schedule(length=5000, batch_size=batch_size, seed=1, shuffle=True, rank=1, world_size=2)
        batches = schedule.batches(100)
        skip = frozenset(range(0, batches, 3))
        planned = {plan.number: plan for plan in schedule.plans(Position(2, 100, skip))}
        assert list(planned) == [number for number in range(batches) if number not in skip]
        for number, plan in planned.items():
            positions = schedule.positions(100, number)
            assert plan.positions == positions.tolist()
            assert plan.indices == order(positions % 5000).tolist()


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1))
def test_many_permutations_at_once_are_those_of_each(drawn: list[tuple[int, int, int]]) -> None:
    """Each position is of a permutation with a length, a seed and an epoch of its own."""
    positions = [n * 7 // 10 for n, _, _ in drawn]
    found = feistel_each(
        np.array([n for n, _, _ in drawn]),
        np.array([seed for _, seed, _ in drawn], np.uint64),
        np.array([epoch for _, _, epoch in drawn]),
        np.arange(len(drawn))[::-1],
        np.array(positions)[::-1],
    )[::-1]
    one_by_one = [feistel(*each)(np.array([at]))[0] for each, at in zip(drawn, positions, strict=True)]
    assert found.tolist() == one_by_one
