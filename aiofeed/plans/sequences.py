"""Batches of samples of different lengths: ``pad_collate`` pads them; ``Pack`` puts them into rows of one length.

``measure_lengths`` finds the lengths for a plan that does not have them.
"""

from __future__ import annotations

import functools
import logging
import reprlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aiofeed.kernel.core.types import BatchPlan, HostTensor, public
from aiofeed.kernel.core.validation import check_positive_int
from aiofeed.kernel.engine.fetch.collate import BatchBuilder, MisfitError, Positions
from aiofeed.kernel.runtime.buffers import BufferLease, array
from aiofeed.kernel.runtime.tensors import as_array
from aiofeed.kernel.sources.subset import fingerprint_of, names_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.plans.length_plans import LengthPlan
    from aiofeed.plans.packing import Fill

log: logging.Logger = logging.getLogger("aiofeed.sampling")

_CALLED = "call it: collate_fn=aiofeed.pad_collate()"
MASK = "attention_mask"
PACK_NAMES = ("position_ids", "document_ids", "cu_seqlens", "max_seqlen")


@public
def pad_collate(
    value: float | Mapping[str, float] | Sequence[float] = 0,
    *,
    side: Literal["right", "left"] = "right",
    multiple_of: int | None = None,
) -> PadCollate:
    """Return a ``collate_fn`` that pads the sequences of a batch to one length and adds an attention mask.

    The length of a sample is the size of dimension 0 of its first tensor or array. All its tensors and arrays of that
    length are padded along dimension 0 and stacked to [N, T, ...]; other parts are collated as by ``default_collate``.

    Args:
        value: The padding; for samples that are dicts, also a value per key (0 for keys without one); for tuples and
            lists, also a value per place.
        side: Where the padding goes.
        multiple_of: Pad to a multiple of this length, as tensor cores like it. Default: to the longest sample.

    Returns:
        A function, which can be pickled. A batch of dicts is a dict with the mask as ``"attention_mask"`` (unless
        samples have a part of that name, which is padded with 0); of tuples or lists, a list with the mask as its last
        item; of single tensors, a list of the tensor and the mask. The mask is int64 [N, T]: 1 for a token, 0 for
        padding.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else [value]
    if isinstance(value, str) or not all(isinstance(each, Real) or getattr(each, "ndim", 1) == 0 for each in values):
        raise TypeError(f"pad_collate(value=) must be one or several numbers, got {reprlib.repr(value)}; {_CALLED}")
    if side not in ("right", "left"):
        raise ValueError(f'pad_collate(side=) must be "right" or "left", got {side!r}')
    if multiple_of is not None:
        multiple_of = check_positive_int("pad_collate(multiple_of=)", multiple_of)
    return PadCollate(value, side == "left", multiple_of or 1)


pad_collate.makes_collate_fn = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class PadCollate:
    """The function that ``pad_collate`` returns."""

    value: float | Mapping[str, float] | Sequence[float]
    left: bool
    multiple_of: int

    def __call__(self, samples: list[Any]) -> Any:
        """Collate samples of one kind: dicts, tuples, lists, tensors or arrays."""
        first = samples[0]
        if isinstance(first, Mapping):
            columns = {name: [sample[name] for sample in samples] for name in first}
            values = {name: self._value_of(name) for name in columns} | {MASK: 0.0}
            batch, mask = self._collate(columns, values)
            return batch if MASK in batch else {**batch, MASK: mask}
        if isinstance(first, tuple | list):
            columns = dict(enumerate(map(list, zip(*samples, strict=True))))
            batch, mask = self._collate(columns, {place: self._value_of(place) for place in columns})
            return [*batch.values(), mask]
        batch, mask = self._collate({0: samples}, {0: self._value_of(0)})
        return [batch[0], mask]

    def _value_of(self, name: Any) -> float:
        if isinstance(self.value, Mapping):
            return self.value.get(name, 0)
        if isinstance(self.value, Sequence):
            return float(self.value[name])
        return self.value

    def _collate(self, columns: dict[Any, list[Any]], values: dict[Any, float]) -> tuple[dict[Any, Any], torch.Tensor]:
        import torch
        from torch.utils.data import default_collate

        columns = {name: [_as_tensor(part) for part in parts] for name, parts in columns.items()}
        lengths = next((found for parts in columns.values() if (found := _lengths(parts)) is not None), None)
        if lengths is None:
            raise TypeError(
                "pad_collate needs samples with a tensor or array of at least one dimension: leave collate_fn= out for "
                "samples without one"
            )
        total = -(-max(lengths) // self.multiple_of) * self.multiple_of
        batch = {
            name: self._padded(parts, values[name], total) if _lengths(parts) == lengths else default_collate(parts)
            for name, parts in columns.items()
        }
        ones = [torch.ones(length, dtype=torch.int64) for length in lengths]
        return batch, self._padded(ones, 0, total)

    def _padded(self, parts: list[torch.Tensor], value: float, total: int) -> torch.Tensor:
        import torch

        # A sample without items may have another dtype: torch makes float32 of an empty list.
        # Nor has it the other dimensions.
        filled = [part for part in parts if len(part)] or parts[:1]
        dtype = functools.reduce(torch.promote_types, [part.dtype for part in filled])
        padded = parts[0].new_full((len(parts), total, *filled[0].shape[1:]), value, dtype=dtype)
        for row, part in zip(padded, parts, strict=True):
            start = total - len(part) if self.left else 0
            if len(part):
                row[start : start + len(part)] = part
        return padded


def _as_tensor(part: Any) -> Any:
    import torch

    return torch.from_numpy(part) if isinstance(part, np.ndarray) and part.dtype.kind in "biufc" else part


def _lengths(parts: list[Any]) -> list[int] | None:
    """Return the sizes of dimension 0 of a column of tensors; ``None`` if it has other parts."""
    import torch

    if not all(isinstance(part, torch.Tensor) and part.ndim for part in parts):
        return None
    return [len(part) for part in parts]


@dataclass(frozen=True)
class PackCollate:
    """Makes the batches of ``Pack``; its arguments are those of ``Pack``."""

    rows: int
    context: int
    separator: Fill | None
    pad: Fill

    def new_builder(self, plan: BatchPlan, lease: BufferLease) -> BatchBuilder:
        """Return the builder of a planned batch, in memory of the lease."""
        return PackBatchBuilder(self, plan, lease)


class PackBatchBuilder(BatchBuilder):
    """Builder of a batch of ``Pack``: copies the pieces of each document to their places.

    A document that is skipped leaves padding.
    """

    nbytes: int = 0

    def __init__(self, pack: PackCollate, plan: BatchPlan, lease: BufferLease) -> None:
        assert plan.pieces is not None
        self._pack = pack
        self._lease = lease
        self._pieces = plan.pieces
        self._pieces_of: list[list[list[int]]] = [[] for _ in plan.indices]
        for sample, *piece in plan.pieces.tolist():
            self._pieces_of[sample].append(piece)
        # The flattened rows and the separator of each column, from the first document on.
        self._columns: dict[Any, tuple[NDArray[Any], Any]] = {}
        self._lock = threading.Lock()

    def put(self, position: int, sample: Any) -> None:
        """Copy the pieces of a document.

        Raises:
            MisfitError: It cannot be packed, or has another length than planned.
        """
        columns = _columns_of(sample)
        with self._lock:
            if not self._columns:
                self._columns = {name: self._new_column(name, memory) for name, memory in columns.items()}
        if columns.keys() != self._columns.keys():
            raise _DocumentError(f"has the columns {list(columns)}, and another one {list(self._columns)}")
        pieces = self._pieces_of[position]
        for name, memory in columns.items():
            rows, separator = self._columns[name]
            planned = pieces[0][-1]
            if len(memory) != planned:
                raise _DocumentError(f"has {len(memory)} {name}, and Pack(lengths=) has {planned}")
            if memory.dtype != rows.dtype or memory.shape[1:] != rows.shape[1:]:
                found, expected = ([str(each.dtype), *each.shape[1:]] for each in (memory, rows))
                raise _DocumentError(f"has {name} of {found}, and another one of {expected}")
            for place, start, stop, _ in pieces:
                rows[place : place + min(stop, planned) - start] = memory[start:stop]
                if stop > planned:
                    rows[place + planned - start] = separator

    def _new_column(self, name: Any, first: NDArray[Any]) -> tuple[NDArray[Any], Any]:
        rows = self._array((self._pack.rows * self._pack.context, *first.shape[1:]), first.dtype)
        pad, separator = self._pack.pad, self._pack.separator
        rows[:] = _value("pad", pad.get(name, 0) if isinstance(pad, Mapping) else pad, first.dtype)
        if isinstance(separator, Mapping) and name not in separator:
            raise _DocumentError(f"has {name}, for which Pack(separator=) has no token")
        token = separator[name] if isinstance(separator, Mapping) else separator
        return rows, None if token is None else _value("separator", token, first.dtype)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        memory = array(self._lease, shape, dtype)
        self.nbytes += memory.nbytes
        return memory

    def _build(self, keys: Sequence[str], positions: Positions) -> Any:
        rows, context, pieces = self._pack.rows, self._pack.context, self._pieces
        if positions is not None:
            pieces = pieces[np.isin(pieces[:, 0], positions)]
        starts = pieces[:, 1]
        # The padding at the end of a row is a piece of that row.
        edges = np.unique(np.concatenate([starts, starts + pieces[:, 3] - pieces[:, 2], np.arange(rows + 1) * context]))
        sizes = np.diff(edges)
        numbers = np.full(len(sizes), -1)
        numbers[np.searchsorted(edges, starts)] = np.arange(len(starts))
        batch = {name: column for name, (column, _) in self._columns.items()}
        for name, values in {
            "position_ids": np.arange(rows * context) - np.repeat(edges[:-1], sizes),
            "document_ids": np.repeat(numbers, sizes),
        }.items():
            batch[name] = self._array(values.shape, np.dtype(np.int64))
            batch[name][:] = values
        cu_seqlens = self._array(edges.shape, np.dtype(np.int32))
        cu_seqlens[:] = edges
        batch = {name: column.reshape(rows, context, *column.shape[1:]) for name, column in batch.items()}
        batch["cu_seqlens"] = cu_seqlens
        leaves = {name: HostTensor(memory, pinned=self._lease.pinned) for name, memory in batch.items()}
        return {**leaves, "max_seqlen": int(sizes.max())}


class _DocumentError(MisfitError):
    """A document cannot be packed."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, ())

    def explain(self, keys: Sequence[str]) -> str:
        return f"the document {keys[0]!r} {self}"


def _columns_of(sample: Any) -> dict[Any, NDArray[Any]]:
    """Return the columns of a document."""
    columns = {}
    for name, part in (sample if isinstance(sample, Mapping) else {"tokens": sample}).items():
        if name in PACK_NAMES:
            raise _DocumentError(f"has {name!r}, which Pack makes itself: leave it out")
        is_list = isinstance(part, list) and set(map(type, part)) <= {int}
        memory, torch_dtype = as_array(np.array(part, np.int64) if is_list else part)
        if memory is None or memory.ndim == 0 or torch_dtype is not None:
            kind = type(part).__name__ if torch_dtype is None else f"{torch_dtype} tensor"
            raise _DocumentError(
                f"has {name} in a {kind}: Pack takes a tensor, an array or a list of ints, or a dict of such columns"
            )
        columns[name] = memory
    if not columns:
        raise _DocumentError("has no columns")
    return columns


def _value(argument: str, value: float, dtype: np.dtype[Any]) -> Any:
    """Return the value as an element of a column."""
    element = np.array(value).astype(dtype)
    if dtype.kind in "biu" and element != value:
        raise _DocumentError(f"has {dtype}, which cannot hold Pack({argument}={value!r})")
    return element


def measure_lengths(plan: LengthPlan, a: Any, new_feeder: Any) -> None:
    """Give a plan the lengths of all samples: those in the cache folder if some samples still have them, or read once.

    Args:
        plan: The plan.
        a: The ``Arguments`` of a feeder.
        new_feeder: ``Feeder``.
    """
    from aiofeed.common.cache_folder import cache_path, write_cached
    from aiofeed.common.fingerprint import dataset_identity, identity
    from aiofeed.common.progress_bar import LoadProgress

    source, samples, name = a.adopted, a.length, f"measuring {a.adopted!r}"

    def measure(indices: range) -> NDArray[np.int64]:
        feeder = new_feeder(source, decode=a.decode, batch_size=32, sampler=indices, collate_fn=list, limits=a.limits)
        lengths: list[int] = []
        with feeder, LoadProgress(name, "samples", len(indices), lambda done: f"{name}: {done:,} samples") as progress:
            for index, sample in zip(indices, chain.from_iterable(feeder), strict=True):
                lengths.append(plan.measure(index, sample))
                progress.add()
        return np.array(lengths, np.int64)

    named = dataset_identity(getattr(source, "dataset", None))
    try:
        how = [identity(each) if callable(each) else repr(each) for each in (a.decode, plan.length)]
        # The second one is that of an earlier version.
        both = [
            cache_path(" ".join([of(source, samples), named, *how]), "lengths") for of in (fingerprint_of, names_of)
        ]
    except TypeError:  # a function with settings that are not known
        both = [None]
    some, path = range(0, samples, max(samples // 8, 1)), both[0]
    known = next((each for each in both if each is not None and each.exists()), None)
    cached = np.zeros(0, np.int64) if known is None else np.fromfile(known, np.int64)
    if len(cached) == samples and np.array_equal(measure(some), cached[some]):
        if path is not None and known != path:
            log.warning("%s: lengths of an earlier version are used, and only some could be compared: %s", name, known)
            write_cached(path, [cached.tobytes()], f"the lengths of {source!r} are not cached")
        return plan.use(cached)
    lengths = measure(range(samples))
    if path is not None:
        write_cached(path, [lengths.tobytes()], f"the lengths of {source!r} are not cached")
    plan.use(lengths)
