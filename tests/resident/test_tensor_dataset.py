"""A `TensorDataset` in host memory is fed as `Tensors`; its batches are those of `DataLoader`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset, random_split

from aiofeed import Feeder, FromDataset
from aiofeed.resident.pipeline import ResidentPipeline

N = 24
X = torch.randn(N, 3, 2)
Y = torch.arange(N)
PLAIN = TensorDataset(X, Y)


def pipeline(feeder: Feeder[Any]) -> object:
    return feeder._session.pipeline


def assert_as_dataloader(dataset: Dataset[Any], **options: Any) -> Feeder[Any]:
    """All batches of a feeder equal those of a DataLoader in values, types and dtypes; return the feeder."""
    feeder: Feeder[Any] = Feeder(dataset, batch_size=5, **options)  # type: ignore[arg-type]
    batches = list(feeder)
    expected = list(DataLoader(dataset, 5))
    assert len(batches) == len(expected)
    for batch, wanted in zip(batches, expected, strict=True):
        assert type(batch) is type(wanted) is list
        for one, other in zip(batch, wanted, strict=True):
            assert (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
            assert torch.equal(one, other)
    feeder.close()
    return feeder


PARTS: dict[str, Any] = {
    "whole": PLAIN,
    "one tensor": TensorDataset(Y),
    "bfloat16": TensorDataset(X.to(torch.bfloat16), Y > 3),
    "subset": Subset(PLAIN, [7, 3, 3, 23, 0, -1, -24]),
    "of a tensor": Subset(PLAIN, torch.tensor([5, 4, 3, 2, 1, 0])),  # type: ignore[arg-type]
    "nested": Subset(Subset(PLAIN, range(20, 4, -1)), [0, 2, 15, -1, 4, 4]),
    "split": random_split(PLAIN, [16, 8])[1],
    "empty part": Subset(PLAIN, []),
    "empty": TensorDataset(X[:0], Y[:0]),
}


@pytest.mark.parametrize("dataset", PARTS.values(), ids=PARTS)
def test_batches_are_those_of_dataloader(dataset: Any) -> None:
    """Without threads: the rows are gathered in the consumer's thread."""
    feeder = assert_as_dataloader(dataset)
    assert isinstance(pipeline(feeder), ResidentPipeline)
    assert feeder.dataset is dataset
    assert "TensorDataset" in repr(feeder) or "Subset" in repr(feeder)


class Doubled(TensorDataset):
    """A `TensorDataset` with items of its own."""

    def __getitem__(self, index: int) -> Any:
        return [2 * part for part in super().__getitem__(index)]


class Backwards(Subset[Any]):
    """A `Subset` with an order of its own."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(len(self) - 1 - index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "subclass": (Doubled(X, Y), {}),
    "subclass of Subset": (Backwards(PLAIN, range(10)), {}),
    "transposed": (TensorDataset(X.transpose(1, 2), Y), {}),
    "FromDataset": (FromDataset(PLAIN), {}),
    "cache": (PLAIN, {"cache": "host"}),
    "collate_fn": (PLAIN, {"collate_fn": torch.utils.data.default_collate}),
}


@pytest.mark.parametrize(("dataset", "options"), OTHERS.values(), ids=OTHERS)
def test_other_datasets_and_options_are_called_sample_by_sample(dataset: Any, options: dict[str, Any]) -> None:
    """Where rows are not the samples, or an option needs samples."""
    feeder: Feeder[Any] = Feeder(dataset, batch_size=5, **options)
    expected = list(DataLoader(dataset.dataset if isinstance(dataset, FromDataset) else dataset, 5))
    for batch, wanted in zip(feeder, expected, strict=True):
        for one, other in zip(batch, wanted, strict=True):
            assert torch.equal(one, other)
    assert not isinstance(pipeline(feeder), ResidentPipeline)
    feeder.close()


def test_tensors_that_require_grad_are_stacked() -> None:
    """So that gradients flow into them, as with `DataLoader`."""
    x = torch.randn(4, 2, requires_grad=True)
    with Feeder(TensorDataset(x), batch_size=4) as feeder:
        [[batch]] = feeder
    batch.sum().backward()
    assert x.grad is not None


def test_order_sampler_and_resume_of_a_part() -> None:
    """Shuffled as any dataset; a state is that of a feeder that calls the dataset."""
    part = random_split(PLAIN, [16, 8])[0]
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5}
    with Feeder(part, **options) as feeder, Feeder(FromDataset(part), **options) as streaming:
        for _ in range(2):
            for batch, wanted in zip(feeder, streaming, strict=True):
                assert all(map(torch.equal, batch, wanted))
        next(iter(feeder))
        streaming.load_state_dict(feeder.state_dict())
        feeder.load_state_dict(feeder.state_dict())
        for batch, wanted in zip(feeder, streaming, strict=True):
            assert all(map(torch.equal, batch, wanted))
    generator = torch.Generator().manual_seed(1)
    with Feeder(part, batch_size=4, sampler=RandomSampler(part, generator=generator)) as feeder:
        found = torch.cat([labels for _, labels in feeder])
    order = list(RandomSampler(part, generator=torch.Generator().manual_seed(1)))
    assert found.tolist() == [int(part[index][1]) for index in order]


def test_data_changed_between_epochs_are_seen() -> None:
    """The tensors are not copied, and writing into a batch does not change them."""
    x = torch.zeros(8)
    with Feeder(TensorDataset(x), batch_size=4) as feeder:
        for [batch] in feeder:
            batch += 1
        assert x.eq(0).all()
        x += 5
        assert all(batch.eq(5).all() for [batch] in feeder)
