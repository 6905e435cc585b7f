"""Builders of batches: rows that a decoder fills, the rules of ``default_collate``, or the user's ``collate_fn``.

Decode threads fill different rows of one builder at the same time. By the rules of ``default_collate``, arrays and
tensors are copied into their rows as samples arrive. Numbers, strings, and arrays of another shape or dtype than the
first sample's are collated at the end.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from aiofeed.kernel.core.errors import CollateError
from aiofeed.kernel.core.formatting import format_error, kind_of
from aiofeed.kernel.core.pytree import is_flat_plain, is_namedtuple, like_list, like_mapping, map_leaves, total_nbytes
from aiofeed.kernel.core.types import Collate, Gathered, HostTensor, Row
from aiofeed.kernel.runtime.buffers import BufferLease, array
from aiofeed.kernel.runtime.tensors import NUMBER_DTYPES, as_array, as_tensor, as_tensors, is_tensor, stage

if TYPE_CHECKING:
    from numpy.typing import NDArray

ItemT = TypeVar("ItemT")

# Samples with tensors of up to this size are collated by torch at the end: 64 pairs of an image of 3 KB and a number
# take 60 us, and 300 us if each is copied as it arrives. That pays for larger ones, because several threads copy.
TOGETHER_BYTES = 16 * 1024

Positions: TypeAlias = Sequence[int] | None
"""Positions of the samples that make up the batch, in order; ``None``: all."""


class BatchBuilder(ABC):
    """Collects the samples of a batch: ``put`` from any thread, ``finish`` once after all samples."""

    kept: list[Any] | None = None
    """The samples by position, if ``put`` does nothing but store them here."""
    encode: Callable[[Any], Any] | None = None
    """What ``finish`` applies to the batch; a worker process encodes it for the trainer."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the batch's memory."""

    @abstractmethod
    def put(self, position: int, sample: Any) -> None:
        """Store one sample; of a sample whose row is filled already, its target."""

    def put_gathered(self, samples: Gathered) -> bool:
        """Store all samples of the batch, if they may be stored so; return whether they are."""
        return False

    def rows_of(self, layout: Any, *, targets: bool) -> tuple[NDArray[Any], Callable[[int, Any], None]] | None:
        """The rows that arrays of a ``Layout`` are copied to, and what stores their targets; ``None`` without rows."""
        return None

    def finish(self, keys: Sequence[str], positions: Positions = None) -> Any:
        """Return the batch of the samples at ``positions``; ``None``: of all.

        Raises:
            CollateError: The samples do not fit together; the message names some of ``keys``.
        """
        batch = self._build(keys, positions)
        return batch if self.encode is None else self.encode(batch)

    @abstractmethod
    def _build(self, keys: Sequence[str], positions: Positions) -> Any:
        """Return the batch before ``encode``."""

    def take_over(self, chunk: ChunkBuilder, positions: Sequence[int], first: int, keys: Sequence[str]) -> None:
        """Store samples of a chunk at ``first``, ``first + 1``, ...

        Raises:
            CollateError: A sample does not fit to those before it; the message names some of ``keys``.
        """
        try:
            for at, position in enumerate(positions, first):
                self.put(at, chunk.sample(position))
        except MisfitError as misfit:
            raise CollateError(misfit.explain([keys[at] for at in misfit.positions])) from misfit.__cause__


class DefaultCollateBuilder(BatchBuilder):
    """Builder of a batch by the rules of torch's ``default_collate``.

    A tuple becomes a list, numbers become tensors, strings stay a list.

    Args:
        samples: Number of samples.
        lease: The memory of the batch.
        may_keep: Whether samples do not change after ``put``, so that torch can collate small ones together.
        target: Which part of a sample is its target; "all": the whole.
    """

    def __init__(self, samples: int, lease: BufferLease, *, may_keep: bool = False, target: object = None) -> None:
        self._samples = samples
        self._target = target
        self._lease = lease
        self.may_keep = may_keep
        # One of both, from the first sample on.
        self._root: _Node | None = None
        self.kept: list[Any] | None = None
        self._kept_bytes = 0
        # Samples of another structure than the first that arrived, which need not be the first of the batch.
        self._misfits: dict[int, Any] = {}
        self._lock = threading.Lock()

    def put(self, position: int, sample: Any) -> None:
        """Copy a sample's arrays into their rows, and store its other parts; or keep a small sample."""
        if self.kept is not None:
            self.kept[position] = sample
            return
        root = self._root
        if root is None:
            with self._lock:
                if self.kept is None and self._root is None:
                    if self.may_keep and (is_flat_plain(sample) or _has_small_tensor(sample)):
                        self.kept = [None] * self._samples
                    else:
                        self._root = _node(sample, self._samples, self._lease)
                root = self._root
        if root is None:
            self.put(position, sample)
            return
        try:
            root.put(position, sample)
        except MisfitError:
            self._misfits[position] = map_leaves(_copied, sample)

    def rows_of(self, layout: Any, *, targets: bool) -> tuple[NDArray[Any], Callable[[int, Any], None]] | None:
        """As ``BatchBuilder.rows_of``; ``None`` if the first sample has another layout."""
        root = self._root
        node, target, *_ = root.children if targets and isinstance(root, _TupleNode) else (root, self)
        return (node.rows, target.put) if isinstance(node, _ArrayNode) and node.takes(layout) else None

    def _build(self, keys: Sequence[str], positions: Positions) -> Any:
        kept, self.kept = self.kept, None
        try:
            if kept is not None:
                return self._collate(pick(kept, positions))
            root, misfits = self._root, self._misfits
            assert root is not None, "a builder without samples"
            if misfits:
                every = range(self._samples) if positions is None else positions
                return self._collate([misfits[at] if at in misfits else root.sample(at) for at in every])
            return root.finish(positions)
        except MisfitError as misfit:
            named = [keys[positions[position] if positions else position] for position in misfit.positions]
            if str(misfit) == _NONE and self._target in ("all", getattr(self._root, "at", "")):
                raise CollateError(
                    f"the target of {named[0]!r} is None: set it, or pass collate_fn="
                ) from misfit.__cause__
            raise CollateError(misfit.explain(named)) from misfit.__cause__

    def _collate(self, samples: list[Any]) -> Any:
        try:
            batch = collate_plain(samples)
        except Exception:  # noqa: BLE001 - of any kind; one by one, the error gets a name
            self._root = _node(samples[0], len(samples), self._lease)
            for position, sample in enumerate(samples):
                self._root.put(position, sample)
            return self._root.finish(None)
        self._kept_bytes = total_nbytes(batch)
        return stage(batch, self._lease)[0] if self.encode is not None or self._lease.pinned else batch

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's memory."""
        return self._kept_bytes if self._root is None else self._root.nbytes


def collate_plain(samples: list[Any]) -> Any:
    """``default_collate``; the usual samples, tuples of tensors and numbers, take half of its time."""
    import torch

    if set(map(type, samples)) != {tuple}:
        return torch.utils.data.default_collate(samples)
    batch, columns = [], list[Any](zip(*samples, strict=True))
    for column in columns:
        (kind, *others) = set(map(type, column))
        if kind is torch.Tensor and not others:
            batch.append(torch.stack(column))
        elif (kind is int or kind is float) and not others:
            batch.append(torch.from_numpy(np.array(column, NUMBER_DTYPES[kind])))
        else:
            batch.append(torch.utils.data.default_collate(column))
    return batch


def _has_small_tensor(sample: Any) -> bool:
    """Whether a sample, or a part of one that is a tuple, list or dict, is a tensor, and all of it is small."""
    parts = sample if type(sample) in (tuple, list) else sample.values() if type(sample) is dict else (sample,)
    return any(map(is_tensor, parts)) and total_nbytes(sample) <= TOGETHER_BYTES


_NONE = "one is None"
_NO_RETURN = "; is a `return` missing? Or pass collate_fn=, which may leave it out"
_WAY = "; make the decoder return one structure and shape, or pass collate_fn=, such as aiofeed.pad_collate()"


class MisfitError(Exception):
    """Samples do not fit together. The message says how they differ; ``positions`` are those to name.

    ``way`` says what to do.
    """

    def __init__(self, problem: str, positions: Sequence[int], way: str = _WAY) -> None:
        super().__init__(problem)
        self.positions = positions
        self.way = way

    def explain(self, keys: Sequence[str]) -> str:
        """Return the message for the user; ``keys`` are those of the samples at ``positions``."""
        names = f" ({' and '.join(map(repr, keys))})" if keys else ""
        return f"the samples of a batch do not fit together: {self}{names}{self.way}"


class _ArrayNode:
    """Arrays of one shape and dtype in their rows; others are stored separately."""

    def __init__(self, first: Any, samples: int, lease: BufferLease) -> None:
        memory, self._torch_dtype = as_array(first)
        self._of_numpy = isinstance(first, np.ndarray)
        assert memory is not None
        self._shape, self._dtype = memory.shape, memory.dtype
        # numpy has one dtype object per plain number type, so that ``is`` compares them. ``None`` if torch's dtype
        # differs from numpy's.
        self._plain = memory.dtype if self._torch_dtype is None else None
        self.rows = array(lease, (samples, *memory.shape), memory.dtype)
        self._pinned = lease.pinned
        self._others: dict[int, Any] = {}
        self.nbytes = self.rows.nbytes

    def put(self, position: int, value: Any) -> None:
        if type(value) is np.ndarray and value.dtype is self._plain and value.shape == self._shape:
            self.rows[position] = value  # the usual case of what follows
            return
        memory, torch_dtype = as_array(value)
        if (
            memory is not None
            and memory.shape == self._shape
            and memory.dtype == self._dtype
            and torch_dtype == self._torch_dtype
        ):
            self.rows[position] = memory
        else:
            self._others[position] = value

    def takes(self, layout: Any) -> bool:
        return (self._shape, self._dtype.name, self._torch_dtype) == (layout.shape, layout.dtype, layout.torch_dtype)

    def sample(self, position: int) -> Any:
        # Arrays stay arrays: then it does not matter which sample arrived first.
        if position in self._others:
            return self._others[position]
        row = self.rows[position, ...]
        return row if self._of_numpy else as_tensor(HostTensor(row, torch_dtype=self._torch_dtype))

    def finish(self, positions: Positions) -> Any:
        if not self._others:
            return HostTensor(compact(self.rows, positions), torch_dtype=self._torch_dtype, pinned=self._pinned)
        return _default_collate([self.sample(at) for at in (range(len(self.rows)) if positions is None else positions)])


class _ListNode:
    """Numbers, strings and all other values, collated at the end."""

    def __init__(self, samples: int, lease: BufferLease, texts: Callable[[list[Any]], Any]) -> None:
        self._texts = texts
        self._values: list[Any] = [None] * samples
        self._lease = lease
        self.nbytes = 0

    def put(self, position: int, value: Any) -> None:
        self._values[position] = value

    def sample(self, position: int) -> Any:
        return self._values[position]

    def finish(self, positions: Positions) -> Any:
        values, self._values = pick(self._values, positions), []
        kinds = set(map(type, values))
        if len(kinds) == 1:
            kind = kinds.pop()
            if kind is str or kind is bytes:
                return self._texts(values)
            dtype = NUMBER_DTYPES.get(kind)
            if dtype is not None:
                rows = array(self._lease, (len(values),), dtype)
                try:
                    rows[:] = values
                except OverflowError as error:
                    raise MisfitError(f"a number does not fit into {dtype.name}: {error}", ()) from error
                return HostTensor(rows, pinned=self._lease.pinned)
        return _default_collate(self._texts(values))


class _TupleNode:
    def __init__(self, first: Any, samples: int, lease: BufferLease) -> None:
        self._kind: Any = type(first)
        self._make = self._kind._make if is_namedtuple(first) else list
        self._remake: Any = tuple if self._make is list and isinstance(first, tuple) else self._make
        # default_collate transposes tuples and lists with zip, and returns strings in zip's tuples.
        self.children: list[Any] = [_node(item, samples, lease, texts=tuple) for item in first]
        # Lists of a subclass: the batch is of the same class, with the first sample's attributes.
        self._models: dict[int, list[Any]] = {}

    @property
    def nbytes(self) -> int:
        return sum(child.nbytes for child in self.children)

    def put(self, position: int, value: Any) -> None:
        if type(value) is not self._kind or len(value) != len(self.children):
            got = f"{len(value)}" if isinstance(value, tuple | list) else kind_of(value)
            raise MisfitError(f"one has {len(self.children)} parts, another {got}", (position,))
        if self._kind is not list and isinstance(value, list):
            self._models[position] = value
        for child, item in zip(self.children, value, strict=True):
            child.put(position, item)

    def sample(self, position: int) -> Any:
        parts = [child.sample(position) for child in self.children]
        return like_list(self._models.get(position, []), self._remake(parts))

    def finish(self, positions: Positions) -> Any:
        model = self._models.get(positions[0] if positions else 0, [])
        # An error is that of the part ``at``.
        return like_list(model, self._make([child.finish(positions) for self.at, child in enumerate(self.children)]))


class _DictNode:
    def __init__(self, first: Mapping[Any, Any], samples: int, lease: BufferLease) -> None:
        self._kind = type(first)
        self._children = {name: _node(item, samples, lease) for name, item in first.items()}
        # Mappings of other classes: as for lists.
        self._models: dict[int, Mapping[Any, Any]] = {}

    @property
    def nbytes(self) -> int:
        return sum(child.nbytes for child in self._children.values())

    def put(self, position: int, value: Any) -> None:
        if type(value) is not self._kind:
            raise MisfitError(f"one is a {self._kind.__name__}, another {kind_of(value)}", (position,))
        if len(value) != len(self._children):
            raise MisfitError(f"one has the keys {list(self._children)}, another {list(value)}", (position,))
        if self._kind is not dict:
            self._models[position] = value
        for name, child in self._children.items():
            try:
                item = value[name]
            except KeyError:
                raise MisfitError(f"one has the key {name!r}, another has only {list(value)}", (position,)) from None
            child.put(position, item)

    def sample(self, position: int) -> Any:
        return like_mapping(
            self._models.get(position, {}), {name: child.sample(position) for name, child in self._children.items()}
        )

    def finish(self, positions: Positions) -> Any:
        model = self._models.get(positions[0] if positions else 0, {})
        return like_mapping(model, {name: child.finish(positions) for name, child in self._children.items()})


_Node: TypeAlias = _ArrayNode | _ListNode | _TupleNode | _DictNode


def _node(first: Any, samples: int, lease: BufferLease, texts: Callable[[list[Any]], Any] = list) -> _Node:
    if isinstance(first, Mapping):
        return _DictNode(first, samples, lease)
    if isinstance(first, tuple | list):
        return _TupleNode(first, samples, lease)
    if as_array(first)[0] is not None:
        return _ArrayNode(first, samples, lease)
    return _ListNode(samples, lease, texts)


class RowBatchBuilder(BatchBuilder):
    """Builder of a batch whose samples fill rows: ``rows[position]`` is the memory of a sample.

    ``targets``: whether samples have targets.
    """

    def __init__(self, row: Row, samples: int, lease: BufferLease, *, targets: bool) -> None:
        dtype: np.dtype[Any] = np.dtype(row.dtype)
        self._parts: list[HostTensor] | None = None
        if row.parts:
            memory = array(lease, (row.shape[0], samples, *row.shape[1:]), dtype)
            self._parts = [HostTensor(part, pinned=lease.pinned) for part in memory]
            self.rows: NDArray[Any] = memory.swapaxes(0, 1)
        else:
            self.rows = array(lease, (samples, *row.shape), dtype)
        self._leaf = HostTensor(
            self.rows,
            axes=None if row.axes is None else (0, *[axis + 1 for axis in row.axes]),
            pinned=lease.pinned,
        )
        self._targets: DefaultCollateBuilder | SampleList | None = None
        if targets:
            self._targets = DefaultCollateBuilder(samples, lease, target="all")

    def keep_targets(self) -> None:
        """Keep targets separate, for ``take_over``."""
        if self._targets is not None:
            self._targets = SampleList(len(self.rows), copies=True)

    def sample(self, position: int) -> Any:
        """Return a sample as a view of its row, with its target, after ``keep_targets``."""
        row = as_tensor(HostTensor(self.rows[position : position + 1], self._leaf.axes))[0]
        return row if self._targets is None else (row, self._separate_targets().sample(position))

    def _separate_targets(self) -> SampleList:
        assert isinstance(self._targets, SampleList)
        return self._targets

    def take_over(self, chunk: ChunkBuilder, positions: Sequence[int], first: int, keys: Sequence[str]) -> None:
        """Copy the rows of a chunk, and store its targets."""
        assert isinstance(chunk, RowBatchBuilder)
        for at, position in enumerate(positions, first):
            for own, row in zip(self.arrays(at), chunk.arrays(position), strict=True):
                own[...] = row
        if self._targets is not None:
            self._targets.take_over(chunk._separate_targets(), positions, first, keys)

    def arrays(self, position: int) -> list[NDArray[Any]]:
        """Return the memory of a sample."""
        return [self.rows[position, ...]]

    def rows_of(self, layout: Any, *, targets: bool) -> tuple[NDArray[Any], Callable[[int, Any], None]]:
        """As ``BatchBuilder.rows_of``."""
        return self.rows, self.put

    def put(self, position: int, sample: Any) -> None:
        """Store a sample's target; its row is filled already."""
        if self._targets is not None:
            self._targets.put(position, sample)

    def _build(self, keys: Sequence[str], positions: Positions) -> Any:
        leaves = self._parts or [self._leaf]
        for leaf in leaves if positions is not None else ():
            leaf.memory = compact(leaf.memory, positions)
        if self._targets is not None:
            return [*leaves, self._targets.finish(keys, positions)]
        return leaves if self._parts else leaves[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's memory."""
        return self.rows.nbytes + (self._targets.nbytes if self._targets is not None else 0)


class SampleList(BatchBuilder):
    """Collects samples in a list. ``copies``: copy arrays, because the decoder may use their memory again."""

    nbytes: int = 0

    def __init__(self, samples: int, *, copies: bool = False) -> None:
        self.samples: list[Any] = [None] * samples
        self._copies = copies
        self.kept: list[Any] | None = None if copies else self.samples

    def put(self, position: int, sample: Any) -> None:
        """Store one sample."""
        self.samples[position] = map_leaves(_copied, sample) if self._copies else sample

    def sample(self, position: int) -> Any:
        """Return the sample at a position."""
        return self.samples[position]

    def _build(self, keys: Sequence[str], positions: Positions) -> Any:
        return pick(self.samples, positions)


def _copied(leaf: Any) -> Any:
    """Return a copy of a plain array or tensor; other values as they are."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return leaf.clone() if is_tensor(leaf) and as_array(leaf)[0] is not None else leaf


ChunkBuilder: TypeAlias = SampleList | RowBatchBuilder
"""A builder of samples that batches take over."""


class CollateBatchBuilder(SampleList):
    """Builder of a batch by the user's ``collate_fn``.

    ``staged``: whether its tensors are copied into memory of the lease.
    """

    def __init__(self, samples: int, collate_fn: Collate, lease: BufferLease, *, staged: bool) -> None:
        super().__init__(samples)
        self._collate_fn = collate_fn
        self._lease = lease
        self._staged = staged
        self.nbytes: int = 0
        self._gathered: Gathered | None = None

    def put_gathered(self, samples: Gathered) -> bool:
        """Store all samples of the batch."""
        self._gathered = samples if len(samples) == len(self.samples) else None
        return self._gathered is not None

    def _build(self, keys: Sequence[str], positions: Positions) -> Any:
        if (gathered := self._gathered) is not None:
            self._gathered = None
            batch, self.nbytes = gathered.batch(self._lease)
            return batch if self._staged else as_tensors(batch)
        samples = pick(self.samples, positions)
        self.samples: list[Any] = []
        self.kept: list[Any] | None = None
        try:
            batch = self._collate_fn(samples)
        except BaseException as error:  # the user's function may raise anything; it is chained and named
            raise CollateError(f"collate_fn raised {format_error(error)} ({_span(keys, positions)})") from error
        if batch is None:
            raise CollateError(f"collate_fn returned None ({_span(keys, positions)}): return the batch")
        batch, self.nbytes = stage(batch, self._lease) if self._staged else (batch, total_nbytes(batch))
        return batch


def _span(keys: Sequence[str], positions: Positions) -> str:
    named = pick(keys, positions)
    return f"samples {named[0]!r}" if len(named) == 1 else f"samples {named[0]!r} to {named[-1]!r}"


def misfit_error(error: BaseException, key: str) -> CollateError | None:
    """Return the user's error for a sample whose structure differs from the first one's; ``None`` for other errors."""
    return CollateError(error.explain([key])) if isinstance(error, MisfitError) else None


def _default_collate(values: Any) -> Any:
    from torch.utils.data import default_collate

    try:
        return default_collate(values)
    except Exception as error:  # torch and the samples' own classes raise any: each is one that names the samples
        from aiofeed.kernel.engine.fetch.misfits import find_misfit

        if (nothing := next((at for at, value in enumerate(values) if value is None), None)) is not None:
            raise MisfitError(_NONE, (nothing,), _NO_RETURN) from error
        problem, positions, way = find_misfit(values, error)
        raise MisfitError(problem, positions, _WAY if way is None else way) from error


def compact(rows: NDArray[Any], positions: Positions) -> NDArray[Any]:
    """Return the rows at ``positions``, moved to the beginning of the same memory."""
    if positions is None:
        return rows
    for to, position in enumerate(positions):
        if to != position:
            rows[to] = rows[position]
    return rows[: len(positions)]


def pick(items: Sequence[ItemT], positions: Positions) -> list[ItemT]:
    """Return the items at ``positions``."""
    return list(items) if positions is None else [items[position] for position in positions]
