"""Batches of samples of different lengths: ``pad_collate`` pads them; ``Pack`` puts them into rows of one length.

``measure_lengths`` finds the lengths for a plan that does not have them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aiofeed.kernel.core.faces import BaseSource, BuildsBatches
from aiofeed.kernel.core.formatting import brief
from aiofeed.kernel.core.types import BatchPlan, Gathered, HostTensor, Located, public
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
SOURCE_IDS = "source_ids"
PACK_NAMES = ("position_ids", "document_ids", "cu_seqlens", "max_seqlen")


@public
def pad_collate(
    value: float | Mapping[str, float] | Sequence[float] = 0,
    *,
    parts: Sequence[str] | Sequence[int] | None = None,
    side: Literal["right", "left"] = "right",
    multiple_of: int | None = None,
    dim: Literal[0, -1] | None = None,
) -> PadCollate:
    """Return a ``collate_fn`` that pads the sequences of a batch, each to its longest, and adds attention masks.

    Example:
        ```python
        import torch

        import aiofeed

        collate = aiofeed.pad_collate(value=-1)
        tokens, mask = collate([torch.tensor([1, 2, 3]), torch.tensor([4])])
        print(tokens)  # [[1, 2, 3], [4, -1, -1]]
        print(mask)  # [[1, 1, 1], [1, 0, 0]]
        ```

    A sequence is a tensor, an array or a list of numbers. It is padded along dimension 0, or ``dim``, and stacked to
    [N, T, ...]. Other parts are collated as by ``default_collate``.

    Without ``parts``, each sequence of one dimension is padded, and those that are as long as the first one. The mask
    is that of the first one; if ``value`` is a dict, of the first one that it names. Lists beside tensors or arrays are
    not padded. An error shows the ``parts`` to write if a batch does not fit this, if the first one has more dimensions
    than another one of other lengths, and for ``multiple_of`` with several sequences of which ``value`` names none.

    Args:
        value: The padding; for samples that are dicts, also a value per key (0 for keys without one); for tuples and
            lists, also a value per place.
        parts: The sequences to pad, each by its own length: keys of samples that are dicts, places in tuples and lists.
        side: Where the padding goes.
        multiple_of: Pad to a multiple of this length, as tensor cores like it. Default: to the longest sample.
        dim: The dimension that is padded: 0, or -1, the last one, which makes [N, channels, T] of sounds [channels, T].
            Default: -1 for whole recordings of ``DecodeAudio``, otherwise 0.

    Returns:
        A function, which can be pickled. A batch of dicts is a dict with the mask as ``"attention_mask"``, or with
        several ``parts`` one for each, as ``"<part>_mask"``; none if samples have an ``"attention_mask"``, which is
        padded with 0. A batch of tuples or lists is a list with the masks as its last items, in the order of ``parts``;
        of single sequences, a list of the tensor and the mask. A mask is int64 [N, T]: 1 for a token, 0 for padding.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else [value]
    if isinstance(value, str) or not all(isinstance(each, Real) or getattr(each, "ndim", 1) == 0 for each in values):
        raise TypeError(f"pad_collate(value=) must be one or several numbers, got {brief(value)}; {_CALLED}")
    if side not in ("right", "left"):
        raise ValueError(f'pad_collate(side=) must be "right" or "left", got {side!r}')
    if multiple_of is not None:
        multiple_of = check_positive_int("pad_collate(multiple_of=)", multiple_of)
    if parts is not None:
        if isinstance(parts, str) or not isinstance(parts, Sequence) or not 0 < len(parts) == len(set(parts)):
            raise TypeError(f'pad_collate(parts=) must be different names, as in parts=("input_ids",), got {parts!r}')
        if isinstance(value, Mapping) and not value.keys() <= {*parts}:
            raise ValueError(f"pad_collate(value=) has {list(value)}, and parts={parts!r}: name them in both")
    if dim not in (None, 0, -1):
        raise ValueError(f"pad_collate(dim=) must be 0, the first dimension, or -1, the last one, got {dim!r}")
    return PadCollate(value, side == "left", multiple_of or 1, None if parts is None else tuple(parts), dim)


pad_collate.makes_collate_fn = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class PadCollate:
    """The function that ``pad_collate`` returns."""

    value: float | Mapping[str, float] | Sequence[float]
    left: bool
    multiple_of: int
    parts: tuple[Any, ...] | None = None
    dim: int | None = None

    def along(self, axis: int) -> PadCollate:
        """Return the function for samples whose length is another dimension, unless ``dim=`` says which."""
        return self if self.dim is not None else replace(self, dim=axis)

    def __call__(self, samples: list[Any]) -> Any:
        """Collate samples of one kind: dicts, tuples, lists, tensors or arrays."""
        first = samples[0]
        if isinstance(first, Mapping):
            batch, masks = self._collate({name: [sample[name] for sample in samples] for name in first})
            if MASK in batch:
                return batch
            return batch | {MASK if len(masks) == 1 else f"{name}_mask": mask for name, mask in masks.items()}
        if isinstance(first, tuple) or (isinstance(first, list) and not all(isinstance(each, Real) for each in first)):
            batch, masks = self._collate(dict(enumerate(map(list, zip(*samples, strict=True)))))
        else:
            batch, masks = self._collate({0: samples})
        return [*batch.values(), *masks.values()]

    def _value_of(self, name: Any) -> float:
        if name == MASK:
            return 0
        if isinstance(self.value, Mapping):
            return self.value.get(name, 0)
        if isinstance(self.value, Sequence):
            return float(self.value[name])
        return self.value

    def _collate(self, columns: dict[Any, list[Any]]) -> tuple[dict[Any, Any], dict[Any, torch.Tensor]]:
        """Return the parts of a batch by name, and the masks by the names of their parts."""
        from torch.utils.data import default_collate

        whole = {name: each for name, parts in columns.items() if (each := _sequences(parts)) is not None}
        found = whole
        if self.dim:
            found = {name: [part.movedim(-1, 0) for part in parts] for name, parts in whole.items()}
        lengths = {name: [len(part) for part in parts] for name, parts in found.items()}
        padded, masked = self._decide(columns, found, lengths)
        totals = {name: -(-max(lengths[name]) // self.multiple_of) * self.multiple_of for name in padded}
        batch = {}
        for name, parts in columns.items():
            if name in padded:
                batch[name] = self._padded(name, found[name], totals[name])
            else:  # arrays may stand beside tensors, and lists are transposed
                batch[name] = default_collate(parts if isinstance(parts[0], list) else whole.get(name, parts))
        return batch, {name: self._mask(lengths[name], totals[name]) for name in masked}

    def _decide(
        self, columns: dict[Any, list[Any]], found: dict[Any, list[torch.Tensor]], lengths: dict[Any, list[int]]
    ) -> tuple[set[Any], Sequence[Any]]:
        """Return the parts to pad, and those with a mask: by names and dimensions, never by the sizes of a batch.

        Raises:
            TypeError: There are no such parts, or the sizes of this batch show that they are others.
        """
        named = self.parts or [name for name in found if isinstance(self.value, Mapping) and name in self.value]
        # Lists beside tensors, such as a size, are collated as by default_collate.
        solid = [name for name in found if not isinstance(columns[name][0], list)]
        known = [name for name in found if name in named or name in solid or not solid]
        arrays = [name for name in known if name != MASK] or known
        if not arrays or not set(named) <= found.keys():
            raise TypeError(
                f"pad_collate(parts={self.parts!r}) needs samples with such tensors, arrays or lists of numbers; of "
                f"{list(columns)}, these are {list(found)}: leave collate_fn= out for samples without one"
            )
        sure = [*named] or (arrays if len(arrays) == 1 else [])
        first, ragged = (sure or arrays)[0], [name for name in found if len(set(lengths[name])) > 1]
        dims = {name: max(part.ndim for part in found[name]) for name in known}
        others = [name for name in known if lengths[name] != lengths[first]]
        flat = [name for name in known if name == MASK or (self.multiple_of == 1 and dims[name] == 1)]
        alike = [name for name in known if self.multiple_of == 1 and name not in others]
        padded = {*sure} if self.parts else {*sure, *flat, *alike}
        # An image has more dimensions than a text or boxes, so its mask would be one of channels.
        unsure = self.multiple_of > 1 or (ragged and first not in ragged) or any(dims[n] < dims[first] for n in others)
        if (unsure and not sure) or not padded.issuperset(ragged):
            names = [name for name in found if name in sure or name in ragged]
            names = names or [name for name in arrays if dims[name] == min(dims.values())]
            raise TypeError(
                f"pad_collate cannot know which of the parts {list(found)} are sequences to pad: name them, as in "
                f"pad_collate(parts={tuple(names)!r}, ...)"
            )
        return padded, self.parts or [first]

    def _padded(self, name: Any, parts: list[torch.Tensor], total: int) -> torch.Tensor:
        import torch

        # A sample without items may have another dtype: torch makes float32 of an empty list.
        # Nor has it the other dimensions.
        filled = [part for part in parts if len(part)] or parts[:1]
        if len(shapes := {part.shape[1:]: [*part.movedim(0, self.dim or 0).shape] for part in filled}) > 1:
            known, way = [*shapes.values()], "" if self.dim else "; dim=-1 pads the last one"
            raise TypeError(
                f"pad_collate pads dimension {self.dim or 0} only, and {name!r} has the shapes {known}{way}"
            )
        dtype = functools.reduce(torch.promote_types, [part.dtype for part in filled])
        rest = filled[0].shape[1:]
        size = (*rest, total) if self.dim else (total, *rest)
        padded = parts[0].new_full((len(parts), *size), self._value_of(name), dtype=dtype)
        for row, part in zip(padded.movedim(self.dim or 1, 1), parts, strict=True):
            start = total - len(part) if self.left else 0
            if len(part):
                row[start : start + len(part)] = part
        return padded

    def _mask(self, lengths: list[int], total: int) -> torch.Tensor:
        import torch

        places = torch.arange(total)
        return ((places.flip(0) if self.left else places) < torch.tensor(lengths)[:, None]).long()


def _sequences(parts: list[Any]) -> list[torch.Tensor] | None:
    """Return a column of tensors, arrays or lists of numbers as tensors; ``None`` if it has other parts."""
    import torch

    if not all(isinstance(part, torch.Tensor | np.ndarray | list) for part in parts):
        return None
    try:
        found = [
            torch.as_tensor(part, dtype=torch.int64 if isinstance(part, list) and not part else None) for part in parts
        ]
    except (TypeError, ValueError):  # no numbers, or lists of lists of different lengths
        return None
    return found if all(part.ndim for part in found) else None


@dataclass(frozen=True)
class PackCollate(BuildsBatches):
    """Makes the batches of ``Pack``; its arguments are those of ``Pack``, and the names of sources in samples."""

    rows: int
    context: int
    separator: Fill | None
    pad: Fill
    names: Sequence[str] = ()

    def for_source(self, source: BaseSource, /) -> PackCollate:
        """Return the one that knows the names which a source adds to samples."""
        return replace(self, names=source.source_names)

    def new_builder(self, plan: BatchPlan, lease: BufferLease) -> BatchBuilder:
        """Return the builder of a planned batch, in memory of the lease."""
        return PackBatchBuilder(self, plan, lease)

    def by_row(self, plan: BatchPlan, indices: Sequence[int], keys: list[Any]) -> list[Any]:
        """Return the keys of the documents of each row, without those that were skipped."""
        assert plan.pieces is not None
        names = dict(zip(map(int, indices), keys, strict=True))
        rows: list[list[Any]] = [[] for _ in range(self.rows)]
        for sample, place in plan.pieces[:, :2].tolist():
            if (index := int(plan.indices[sample])) in names:
                rows[place // self.context].append(names[index])
        return rows


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
        self._samples = len(plan.indices)
        # The flattened rows, the separator and the padding of each column, from the first document on.
        self._columns: dict[Any, tuple[NDArray[Any], Any, Any]] = {}
        self._located: Mapping[Any, Located] = {}
        self._lock = threading.Lock()

    @cached_property
    def _pieces_of(self) -> list[list[list[int]]]:
        found: list[list[list[int]]] = [[] for _ in range(self._samples)]
        for sample, *piece in self._pieces.tolist():
            found[sample].append(piece)
        return found

    def put(self, position: int, sample: Any) -> None:
        """Copy the pieces of a document.

        Raises:
            MisfitError: It cannot be packed, or has another length than planned.
        """
        columns = _columns_of(sample, self._pack.names)
        with self._lock:
            if not self._columns:
                self._columns = {name: self._new_column(name, memory) for name, memory in columns.items()}
        if columns.keys() != self._columns.keys():
            raise _DocumentError(f"has the columns {list(columns)}, and another one {list(self._columns)}")
        pieces = self._pieces_of[position]
        for name, memory in columns.items():
            rows, separator, _ = self._columns[name]
            planned = pieces[0][-1]
            if len(memory) != planned:
                raise _DocumentError(f"has {len(memory)} {name}, and Pack(lengths=) has {planned}")
            if memory.dtype != rows.dtype or memory.shape[1:] != rows.shape[1:]:
                found, expected = ([str(each.dtype), *each.shape[1:]] for each in (memory, rows))
                raise _DocumentError(f"has {name} of {found}, and another one of {expected}")
            for place, start, stop, _ in pieces:
                rows[place : place + min(stop, planned) - start] = memory[start:stop]
                if stop > planned:
                    rows[place + planned - start] = memory[-1] if name == SOURCE_IDS else separator

    def put_gathered(self, samples: Gathered) -> bool:
        """Note where the pieces of all documents are, if they fit; otherwise ``put`` tells which one does not."""
        if len(samples) != self._samples or (located := samples.located(self._pieces)) is None:
            return False
        try:
            self._columns = {name: self._new_column(name, np.empty(0, dtype)) for name, (*_, dtype) in located.items()}
        except _DocumentError:
            return False
        self._located = located
        return True

    def _new_column(self, name: Any, first: NDArray[Any]) -> tuple[NDArray[Any], Any, Any]:
        rows = self._array((self._pack.rows * self._pack.context, *first.shape[1:]), first.dtype)
        pad, separator = self._pack.pad, self._pack.separator
        if name == SOURCE_IDS and self._pack.names:
            pad, separator = -1, None
        padding = _value("pad", pad.get(name, 0) if isinstance(pad, Mapping) else pad, first.dtype)
        rows[:] = padding
        if isinstance(separator, Mapping) and name not in separator:
            raise _DocumentError(f"has {name}, for which Pack(separator=) has no token")
        token = separator[name] if isinstance(separator, Mapping) else separator
        return rows, None if token is None else _value("separator", token, first.dtype), padding

    def _gather(self, at: Any, ids: NDArray[np.int64], places: NDArray[np.int64], padding: Any) -> None:
        """Copy the pieces that are located. Behind documents, and in padding, there may be no memory to copy."""
        _, begins, starts, stops, lengths = self._pieces.T
        counts = np.minimum(stops, lengths) - starts
        longest, ends = counts.argmax(), (begins + counts)[stops > lengths]
        holes = ends if padding is None else np.append(ends, np.flatnonzero(padding))
        for name, (memory, firsts, dtype) in self._located.items():
            rows, separator, pad = self._columns[name]
            moves = np.zeros(ids[-1] + 1, np.int64)
            moves[at] = firsts - begins
            np.add(np.take(moves, ids, out=places, mode="clip"), _numbers(len(ids)), out=places)
            if len(holes):
                places[holes] = firsts[longest]
            if counts[longest]:
                found = np.take(memory, places, out=rows if memory.dtype == dtype else None, mode="clip")
                if found is not rows:
                    rows[:] = found
            if len(holes):
                rows[holes] = pad
            if len(ends):
                rows[ends] = separator

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
        edges = np.concatenate([starts, starts + pieces[:, 3] - pieces[:, 2], np.arange(rows + 1) * context])
        edges.sort()
        sizes = np.diff(edges)
        edges, sizes = np.append(edges[:-1][sizes > 0], edges[-1]), sizes[sizes > 0]
        at = np.searchsorted(edges, starts)
        numbers = np.full(len(sizes), -1)
        numbers[at] = np.arange(len(starts))
        # In memory that is used again: fresh pages cost several times what is computed.
        places, ids = self._array((2, rows * context), np.dtype(np.int64))
        ids[:] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        padding = None if len(starts) == len(sizes) else np.repeat(numbers < 0, sizes)
        self._gather(at, ids, places, padding)
        np.subtract(_numbers(len(ids)), np.take(edges, ids, out=places, mode="clip"), out=places)
        if padding is not None:
            ids[:] = np.repeat(numbers, sizes)
        batch = {name: column for name, (column, *_) in self._columns.items()}
        batch |= {"position_ids": places, "document_ids": ids}
        cu_seqlens = self._array(edges.shape, np.dtype(np.int32))
        cu_seqlens[:] = edges
        batch = {name: column.reshape(rows, context, *column.shape[1:]) for name, column in batch.items()}
        batch["cu_seqlens"] = cu_seqlens
        leaves = {name: HostTensor(memory, pinned=self._lease.pinned) for name, memory in batch.items()}
        return {**leaves, "max_seqlen": int(sizes.max())}


@lru_cache(maxsize=1)
def _numbers(count: int) -> NDArray[np.int64]:
    return np.arange(count)


class _DocumentError(MisfitError):
    """A document cannot be packed."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, ())

    def explain(self, keys: Sequence[str]) -> str:
        return f"the document {keys[0]!r} {self}"


def _columns_of(sample: Any, names: Sequence[str]) -> dict[Any, NDArray[Any]]:
    """Return the columns of a document; if it has the name of its source, with the number of that for each token."""
    columns = {}
    sample, source = _without_name(sample) if names else (sample, None)
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
    if names:
        if source not in names or SOURCE_IDS in columns:
            raise _DocumentError(f"has a target beside the name of its source, or {SOURCE_IDS!r}, which Pack makes")
        columns[SOURCE_IDS] = np.full(len(next(iter(columns.values()))), names.index(source))
    return columns


def _without_name(sample: Any) -> tuple[Any, Any]:
    """Return a sample of ``Mixture(names=True)`` without the name that it adds, and the name."""
    if isinstance(sample, Mapping):
        return {name: part for name, part in sample.items() if name != "source"}, sample.get("source")
    *rest, name = sample
    return (rest if isinstance(rest[0], int) else rest[0]), name


def _value(argument: str, value: float, dtype: np.dtype[Any]) -> Any:
    """Return the value as an element of a column."""
    element = np.array(value).astype(dtype)
    if dtype.kind in "biu" and element != value:
        raise _DocumentError(f"has {dtype}, which cannot hold Pack({argument}={value!r})")
    return element


def measure_lengths(plan: LengthPlan, a: Any, new_feeder: Any) -> None:
    """Give a plan the lengths of all samples: those in the cache folder if some samples still have them, or found once.

    A plan without lengths gets those that the source knows without decoding, if it does.

    Args:
        plan: The plan.
        a: The ``Arguments`` of a feeder.
        new_feeder: ``Feeder``.
    """
    from aiofeed.common.cache_folder import cache_path, write_cached
    from aiofeed.common.fingerprint import dataset_identity, identity
    from aiofeed.common.progress_bar import LoadProgress

    source, samples, name = a.adopted, a.length, f"measuring {a.adopted!r}"
    if plan.streams:
        plan.forget()  # those of another feeder
        return None if (found := plan.known_lengths(a)) is None else plan.use(found)

    def measure(indices: range) -> NDArray[np.int64]:
        feeder = new_feeder(source, decode=a.decode, batch_size=32, sampler=indices, collate_fn=list, limits=a.limits)
        lengths: list[int] = []
        with feeder, LoadProgress(name, "samples", len(indices), lambda done: f"{name}: {done:,} samples") as progress:
            for index, sample in zip(indices, chain.from_iterable(feeder), strict=True):
                lengths.append(plan.measure(index, sample))
                progress.add()
        return np.array(lengths, np.int64)

    named = dataset_identity(source.given if source.traits.items else None)
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
    if (lengths := plan.known_lengths(a)) is None:
        lengths = measure(range(samples))
    if path is not None:
        write_cached(path, [lengths.tobytes()], f"the lengths of {source!r} are not cached")
    plan.use(lengths)
