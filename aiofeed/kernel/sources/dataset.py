"""A map-style torch ``Dataset`` as a source of decoded samples."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from aiofeed.kernel.core.errors import add_note
from aiofeed.kernel.core.types import Source, Traits, public
from aiofeed.kernel.core.validation import check_callable, check_positive_int, counted, explain_arguments
from aiofeed.kernel.sources.subset import IndexedSource, part_fingerprint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ItemT_co = TypeVar("ItemT_co", covariant=True)


class MapDataset(Protocol[ItemT_co]):
    """The methods that a Dataset must have: ``__getitem__`` and ``__len__``."""

    def __getitem__(self, index: int, /) -> ItemT_co:
        """Return a sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


@public
@explain_arguments()
class FromDataset(IndexedSource):
    """A map-style ``Dataset``; uses ``__getitems__`` if the dataset has it.

    Example:
        ```python
        import torch

        import aiofeed

        dataset = torch.utils.data.TensorDataset(torch.rand(100, 8), torch.arange(100))
        feeder = aiofeed.Feeder(aiofeed.FromDataset(dataset, threads=4), batch_size=10)
        for x, y in feeder:
            print(x.shape, y)
        ```

    A ``Dataset`` is usually written for worker processes, each with its own copy, so by default one thread calls it:
    the same one for as long as the dataset exists, or for small batches the thread that iterates. Parts of
    a dataset share its thread: what ``Subset``, ``ConcatDataset`` or another object with an attribute ``dataset`` or
    ``datasets`` leads to counts as the dataset.

    Args:
        dataset: Any object with ``__getitem__`` and ``__len__``.
        threads: The maximum number of concurrent calls, shared by all feeders and iterators over the dataset. A call in
            progress counts after ``break``, too, until it exceeds its time limit. ``"auto"``: any number, for a dataset
            that is thread-safe; each feeder chooses how many threads it uses.
        setup: Called as ``setup(dataset)`` once in each thread that will call the dataset, before its first call. With
            ``engine="process"`` that is a thread of the worker process. It replaces ``worker_init_fn``.
        fingerprint: Identifies the data and settings of the dataset in saved states and in a ``DiskCache``. Default:
            computed from the dataset's attributes.

    Raises:
        TypeError: An ``IterableDataset``, an object without the two methods, a setup that cannot be called, or a
            fingerprint that is no str.
    """

    traits: Traits = Traits(decode="none", items=True)
    rows: NDArray[np.int64] | None = None
    """The items of the dataset that are samples; ``None``: all."""

    def __init__(
        self,
        dataset: MapDataset[Any],
        threads: int | Literal["auto"] = 1,
        *,
        setup: Callable[[Any], object] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        if is_iterable_dataset(dataset):
            raise TypeError(
                f"{type(dataset).__name__} is an IterableDataset, which has no indices: pass it, or "
                f"aiofeed.Stream(dataset), to Feeder"
            )
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(f"a Dataset needs __getitem__ and __len__, got {type(dataset).__name__}")
        self.dataset = self._whole = dataset
        # 0: any number.
        self.threads: int = 0 if threads == "auto" else check_positive_int("FromDataset(threads=...)", threads)
        if fingerprint is not None and (not isinstance(fingerprint, str) or not fingerprint):
            raise TypeError(f"FromDataset(fingerprint=...) must be a non-empty str, got {fingerprint!r}")
        self._fingerprint = fingerprint
        self._setup = check_callable("FromDataset(setup=...)", setup)
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out which threads have called ``setup``: the copy's dataset is another one."""
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _local=threading.local())

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    @property
    def given(self) -> Any:
        """The dataset."""
        return self.dataset

    def __repr__(self) -> str:
        return f"FromDataset({type(self.dataset).__name__}, threads={self.threads or 'auto'!r})"

    def fingerprint(self) -> str | None:
        """Return the user-specified fingerprint."""
        return self._fingerprint

    def structure(self) -> Mapping[int, Sequence[int]] | None:
        """Return the shapes of the parts of an item of a ``TensorDataset``, or of a ``Subset`` of one."""
        dataset: Any = self._whole
        data = sys.modules.get("torch.utils.data")
        while data is not None and type(dataset) is data.Subset:
            dataset = dataset.dataset
        known = data is not None and type(dataset) is data.TensorDataset
        return {at: tuple(tensor.shape[1:]) for at, tensor in enumerate(dataset.tensors)} if known else None

    def key(self, index: int, /) -> str:
        """Return the type's name and the index, because a Dataset has no names for samples."""
        return f"{type(self._whole).__name__}[{self.named(index)}]"

    def named(self, index: int, /) -> int:
        """Return the index in the whole dataset."""
        return index if self.rows is None else int(self.rows[index])

    def _part(self, rows: NDArray[np.int64]) -> Self:
        from torch.utils.data import Subset

        part = copy.copy(self)
        part.rows = rows if self.rows is None else self.rows[rows]
        part.dataset = Subset(self._whole, part.rows.tolist())  # type: ignore[arg-type]
        part._fingerprint = self._fingerprint and part_fingerprint(self._fingerprint, rows)
        return part

    def set_up(self) -> None:
        """Call the ``setup`` hook if the calling thread has not done so."""
        if self._setup is not None and not hasattr(self._local, "ready"):
            try:
                self._setup(self._whole)
            except BaseException as error:  # the user's function may raise anything
                add_note(error, "in FromDataset(setup=...)")
                raise
            self._local.ready = True

    def items(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples, from one call if the dataset has ``__getitems__``."""
        many: Callable[[list[int]], Sequence[Any]] | None = getattr(self.dataset, "__getitems__", None)
        if many is None:
            dataset = self.dataset  # small items take a microsecond each
            return [dataset[index] for index in indices]
        found = list(many(list(indices)))
        if len(found) != len(indices):
            name = type(self.dataset).__name__
            raise ValueError(f"{name}.__getitems__ returned {counted(len(found), 'sample')} instead of {len(indices)}")
        return found


def is_iterable_dataset(value: object) -> bool:
    """Return whether ``value`` is a torch ``IterableDataset``. Does not import torch."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.IterableDataset)


def is_map_dataset(value: object) -> bool:
    """Return whether ``value`` has the two methods of a Dataset and no ``read``."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not hasattr(value, "read")


def has_getitems(dataset: Any) -> bool:
    """Whether a dataset makes several items in one call; the ``__getitems__`` of ``Subset`` may just call its whole."""
    data = sys.modules.get("torch.utils.data")
    while data is not None and type(dataset) is data.Subset:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def check_parts(dataset: Any) -> None:
    """Raise ``TypeError`` for torch's ``Subset`` or ``ConcatDataset`` of sources, which have no items."""
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return
    # A subclass with its own __getitem__ may read a source in its own way.
    kind = type(dataset)
    if isinstance(dataset, data.Subset) and kind.__getitem__ is data.Subset.__getitem__:
        parts = [dataset.dataset]
        way = 'pass source[indices], or in place of random_split source.split({"train": 0.9, "validation": 0.1})'
    elif isinstance(dataset, data.ConcatDataset) and kind.__getitem__ is data.ConcatDataset.__getitem__:
        parts, way = dataset.datasets, "pass one source, e.g. aiofeed.Files(paths + more_paths, targets)"
    else:
        return
    for part in parts:
        if isinstance(part, IndexedSource) or (isinstance(part, Source) and not hasattr(part, "__getitem__")):
            raise TypeError(f"a {kind.__name__} needs items, which {type(part).__name__} does not have: {way}")
        check_parts(part)
