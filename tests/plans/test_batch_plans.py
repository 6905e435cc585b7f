"""Feeders with ``batch_sampler=``, ``Buckets`` and ``TokenBudget``: batches, ranks, state, and what they work with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from aiofeed import Buckets, DiskCache, Feeder, Tensors, TokenBudget, pad_collate
from aiofeed.errors import StateError

pytestmark = pytest.mark.usefixtures("forked_workers")

LENGTHS = np.random.default_rng(0).integers(1, 30, 60)


class Sequences:
    """Samples of different lengths: the index, as often as the sample is long."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise ValueError("broken")
        return torch.full((int(LENGTHS[index]),), index)


def indices(batch: Any) -> list[int]:
    """The indices of a padded batch of ``Sequences``."""
    return [int(row[0]) for row in batch[0]]


def feeder(**options: Any) -> Feeder[Any]:
    options.setdefault("batch_size", TokenBudget(LENGTHS, 120, window=20))
    options.setdefault("source", Sequences())
    return Feeder(**{"shard": None, "collate_fn": pad_collate(-1), **options})


@pytest.fixture
def expected() -> Iterator[list[list[int]]]:
    """The batches of one shuffled epoch."""
    with feeder(shuffle=True) as whole:
        yield [indices(batch) for batch in whole]


def test_batches_are_padded_and_have_every_sample(expected: list[list[int]]) -> None:
    """Each batch keeps the budget, and its mask covers the tokens."""
    assert sorted(itertools.chain.from_iterable(expected)) == list(range(60))
    with feeder(shuffle=True) as whole:
        assert len(whole) == len(expected)
        for batch, mask in whole:
            assert batch.numel() <= 120
            assert torch.equal(batch != -1, mask.bool())
            assert mask.sum(1).tolist() == LENGTHS[indices((batch,))].tolist()


def test_a_disk_cache(tmp_path: Path, expected: list[list[int]]) -> None:
    """Samples of different lengths fit into no cache; those of one length do."""
    rows = TensorDataset(torch.arange(60.0).reshape(60, 1).repeat(1, 3))
    with feeder(source=rows, shuffle=True, cache=DiskCache(tmp_path / "rows"), collate_fn=None) as cached:
        for _ in range(2):
            batches = [batch[0][:, 0].long().tolist() for batch in cached]
            assert sorted(itertools.chain.from_iterable(batches)) == list(range(60))


def test_a_tensor_dataset_and_a_device_cache(expected: list[list[int]]) -> None:
    """Batches of other sizes than the windows of resident data are streamed."""
    rows = TensorDataset(torch.arange(60))
    for options in ({}, {"cache": "device"}):
        with feeder(source=rows, shuffle=True, collate_fn=None, **options) as whole:
            for number in range(3):
                batches = [batch[0].tolist() for batch in whole]
                assert number or batches == expected
                assert sorted(itertools.chain.from_iterable(batches)) == list(range(60))
    with feeder(source=Tensors(torch.arange(60)), shuffle=True, collate_fn=None) as whole:
        assert [batch[0].tolist() for batch in whole] == expected


def test_a_failing_sample_is_replaced_or_skipped(expected: list[list[int]]) -> None:
    """A batch with a skipped sample is shorter; the number of batches stays."""
    lost = max(expected, key=len)[0]
    with feeder(source=Sequences(lost), shuffle=True, on_error="skip") as skipping:
        batches = [indices(batch) for batch in skipping]
    assert [sorted(batch) for batch in batches] == [sorted(set(batch) - {lost}) for batch in expected]
    with feeder(source=Sequences(lost), shuffle=True, on_error="replace") as replacing:
        assert [len(indices(batch)) for batch in replacing] == list(map(len, expected))


def test_a_state_of_another_plan_is_refused() -> None:
    """Also one of a number of samples."""
    with feeder(shuffle=True) as one:
        state = one.state_dict()
    for options in ({"batch_size": 4}, {"batch_size": Buckets(LENGTHS, [10], [8, 4])}):
        with feeder(shuffle=True, **options) as other, pytest.raises(StateError):
            other.load_state_dict(state)


def test_epochs_and_repr() -> None:
    """``epochs`` runs them one after the other; ``repr`` shows the plan."""
    with feeder(shuffle=True) as whole:
        assert "batch_size=TokenBudget(max_tokens=120" in repr(whole)
        epochs = [[indices(batch) for batch in whole] for _ in whole.epochs(3)]
    assert all(sorted(itertools.chain.from_iterable(each)) == list(range(60)) for each in epochs)


# --- batch samplers ---


def sampler(seed: int = 3) -> BatchSampler:
    return BatchSampler(RandomSampler(range(60), generator=torch.Generator().manual_seed(seed)), 7, False)


def of_loader() -> list[list[int]]:
    loader = DataLoader(Sequences(), batch_sampler=sampler(), collate_fn=pad_collate(-1))  # type: ignore[arg-type]
    return [indices(batch) for _ in range(2) for batch in loader]


def by_sampler(**options: Any) -> Feeder[Any]:
    return feeder(**{"batch_size": None, "batch_sampler": sampler(), **options})


def test_batches_are_those_of_a_dataloader() -> None:
    """With the same batch sampler; also lists of lists."""
    with by_sampler() as whole:
        assert [indices(batch) for _ in range(2) for batch in whole] == of_loader()
        assert len(whole) == 9
    batches = [[3], [4, 4, 59], [0, 1]]
    with by_sampler(batch_sampler=batches) as whole:
        assert [indices(batch) for batch in whole] == batches


def test_batches_are_sharded_unless_the_sampler_is_distributed() -> None:
    """Rank r takes batches r, r + R, ...; all ranks as many, by repeating the first batches."""
    expected = of_loader()[:9]
    for rank in (0, 1):
        with by_sampler(shard=(rank, 2)) as part:
            assert len(part) == 5
            assert [indices(batch) for batch in part] == [*expected, expected[0]][rank::2]
    distributed = DistributedSampler(range(60), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    with by_sampler(batch_sampler=BatchSampler(distributed, 7, False), shard=(1, 2)) as part:
        assert list(itertools.chain.from_iterable(map(indices, part))) == list(range(1, 60, 2))


def test_a_batch_sampler_resumes_exactly() -> None:
    """By its sampler's generator; one of the global generator is refused."""
    expected = of_loader()
    with by_sampler() as first:
        batches = iter(first)
        seen = [indices(next(batches)) for _ in range(12 - 9)]
        state = json.loads(json.dumps(first.state_dict()))
    with by_sampler(batch_sampler=sampler(99)) as second:
        second.load_state_dict(state)
        assert seen + [indices(batch) for batch in second] == expected[:9]
        assert [indices(batch) for batch in second] == expected[9:]
    unseeded = BatchSampler(RandomSampler(range(60)), 7, False)
    with by_sampler(batch_sampler=unseeded) as first:
        next(iter(first))
        state = first.state_dict()
    with by_sampler(batch_sampler=unseeded) as second:
        second.load_state_dict(state)
        with pytest.raises(StateError, match="generator of its own"):
            next(iter(second))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4}, "leave out batch_size="),
        ({"shuffle": True}, "leave out shuffle="),
        ({"drop_last": True}, "leave out drop_last="),
        ({"sampler": [1]}, "leave out sampler="),
        ({"static_batches": True}, "drop_last=True"),
    ],
    ids=str,
)
def test_options_that_a_batch_sampler_excludes(options: dict[str, Any], message: str) -> None:
    """The message names them."""
    with pytest.raises(ValueError, match=message):
        by_sampler(**options)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([[1], []], ValueError, "empty batch, number 1"),
        ([[1], [60]], ValueError, "index 60, but the source has 60 samples"),
        ([[1], [-1]], ValueError, "index -1"),
        ([1, 2], TypeError, "lists of indices, got 1"),
        ([["a"]], TypeError, "int"),
    ],
)
def test_wrong_batches_are_refused(batches: Any, error: type[Exception], message: str) -> None:
    """Before the first batch."""
    with by_sampler(batch_sampler=batches) as wrong, pytest.raises(error, match=message):
        iter(wrong)


def test_a_plan_excludes_a_sampler_and_keyed_shuffling() -> None:
    """The message names the plan."""
    with pytest.raises(ValueError, match=r"TokenBudget.*a plan decides the order"):
        feeder(sampler=[1])
    with pytest.raises(ValueError, match="shuffle=True"):
        feeder(shuffle="keyed")
    with pytest.raises(ValueError, match="60 lengths for 10 samples"):
        feeder(source=TensorDataset(torch.arange(10)))


class Growing:
    """A batch sampler with one batch more in odd epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5]] if self.epoch % 2 else [[0, 1, 2], [3, 4, 5]])


def test_a_rank_without_a_batch_in_one_epoch() -> None:
    """The epoch has passed when its end was reached, not at `iter()`; the state is then the start of the next one."""
    source = TensorDataset(torch.arange(6))

    def rank(number: int) -> Feeder[Any]:
        return Feeder(source, batch_sampler=Growing(), pad=False, shard=(number, 3))

    ranks = [rank(number) for number in range(3)]
    for epoch in range(4):
        iter(ranks[2])  # twice, as Lightning calls it
        assert ranks[2].state_dict()["epoch"] == epoch
        seen = [int(value) for each in ranks for [batch] in each for value in batch]
        assert sorted(seen) == list(range(6))
        assert [each.state_dict()["epoch"] for each in ranks] == [epoch + 1] * 3
        if epoch == 2:
            state = json.loads(json.dumps(ranks[2].state_dict()))
            ranks[2].close()
            ranks[2] = rank(2)
            ranks[2].load_state_dict(state)
    for each in ranks:
        each.close()
