"""A torch map-style ``Dataset`` as a source: its items come decoded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from aiofeed.core.types import Source, public
from aiofeed.core.validation import check_positive_int

ItemT_co = TypeVar("ItemT_co", covariant=True)


class MapDataset(Protocol[ItemT_co]):
    """What is asked of a Dataset: ``__getitem__`` and ``__len__``."""

    def __getitem__(self, index: int, /) -> ItemT_co:
        """One sample."""
        ...

    def __len__(self) -> int:
        """The number of samples."""
        ...


@public
class FromDataset:
    """A map-style ``Dataset``; ``__getitems__`` is used where it has one.

    A ``Dataset`` was written for worker processes, each with a copy of its own, so it is called by one thread only
    unless you say that more are safe.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``.
        threads: how many threads may call it at the same time, those of earlier passes and other feeders included; a
            call that ran over a time limit does not count any more.
        fingerprint: what its items are, in words of yours, for a state and a ``DiskCache`` to know it by: others for
            other data and other settings. ``None``: they go by what can be seen of it.

    Raises:
        TypeError: an ``IterableDataset``, an object without the two methods, or a fingerprint that is no text.
    """

    def __init__(self, dataset: MapDataset[Any], threads: int = 1, *, fingerprint: str | None = None) -> None:
        if is_iterable_dataset(dataset):
            raise TypeError(
                f"{type(dataset).__name__} is an IterableDataset: it has no index, so no order, shards or state. "
                f"Use aiofeed.prefetch(DataLoader(dataset, ...), device=...) for look-ahead and copies alone"
            )
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(f"a Dataset needs __getitem__ and __len__, got {type(dataset).__name__}")
        self.dataset = dataset
        self.threads = check_positive_int("FromDataset(threads=...)", threads)
        if fingerprint is not None and (not isinstance(fingerprint, str) or not fingerprint):
            raise TypeError(f"FromDataset(fingerprint=...) must be a text, got {fingerprint!r}")
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"FromDataset({type(self.dataset).__name__}, threads={self.threads})"

    def fingerprint(self) -> str | None:
        """What the user said that it is."""
        return self._fingerprint

    def key(self, index: int, /) -> str:
        """The dataset's name and the index: a Dataset has no names of its own."""
        return f"{type(self.dataset).__name__}[{index}]"

    def items(self, indices: Sequence[int]) -> list[Any]:
        """The samples, in one call where the dataset has ``__getitems__``."""
        many: Callable[[list[int]], Sequence[Any]] | None = getattr(self.dataset, "__getitems__", None)
        if many is None:
            return [self.dataset[index] for index in indices]
        found = list(many(list(indices)))
        if len(found) != len(indices):
            raise ValueError(f"{type(self.dataset).__name__}.__getitems__ gave {len(found)} of {len(indices)} samples")
        return found


def is_iterable_dataset(value: object) -> bool:
    """Whether ``value`` is a torch ``IterableDataset``; torch is not imported to find out."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.IterableDataset)


def is_map_dataset(value: object) -> bool:
    """Whether ``value`` has a Dataset's two methods and none of a Source's."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not hasattr(value, "read")


def check_part(dataset: Any) -> None:
    """``TypeError`` for torch's ``Subset`` of what gives bytes, and has no items."""
    data = sys.modules.get("torch.utils.data")
    # A subclass, or a Dataset of the user's, may get its items from what it is a part of in its own way.
    if data is None or not isinstance(dataset, data.Subset) or type(dataset).__getitem__ is not data.Subset.__getitem__:
        return
    whole = dataset.dataset
    if isinstance(whole, Source) and not hasattr(whole, "__getitem__"):
        raise TypeError(
            f"a {type(dataset).__name__} asks for items, which {type(whole).__name__} lacks: for a part of it "
            f"pass sampler=indices, or aiofeed.Files(paths, targets) with those of the part"
        )
