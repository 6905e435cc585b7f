"""A batch by the rules of torch's ``default_collate``, written row by row into the batch's slot as samples arrive.

Arrays and tensors go straight into their rows; numbers, strings and whatever does not fit the first sample's shape are
kept aside and collated at the end.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from aiofeed.core.errors import CollateError
from aiofeed.core.pytree import is_namedtuple, like_list, like_mapping
from aiofeed.core.types import HostTensor
from aiofeed.runtime.buffers import BufferLease, array
from aiofeed.runtime.tensors import as_array, as_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

MISSING = object()
"""In the place of a sample that is not there yet."""

Kept: TypeAlias = Sequence[int] | None
"""Positions of the samples that make the batch, in order; ``None``: all of them."""


class DefaultCollateBuilder:
    """A batch by the rules of torch's ``default_collate``."""

    def __init__(self, samples: int, lease: BufferLease) -> None:
        self._samples = samples
        self._lease = lease
        self._root: _Node | None = None
        self._first = 0
        self._lock = threading.Lock()

    def put(self, position: int, sample: Any) -> None:
        """Store one sample, copying its arrays into their rows."""
        root = self._root
        if root is None:
            with self._lock:
                if self._root is None:
                    self._root = _node(sample, self._samples, self._lease)
                    self._first = position
                root = self._root
        root.put(position, sample)

    def finish(self, keys: Sequence[str], kept: Kept = None) -> Any:
        """The batch: a tuple becomes a list, numbers become tensors, strings stay a list."""
        assert self._root is not None, "an assembly without samples"
        try:
            return self._root.finish(kept)
        except _MisfitError as misfit:
            keys_named = [keys[kept[position] if kept else position] for position in misfit.positions]
            raise CollateError(misfit.explain(keys_named)) from misfit.__cause__

    @property
    def nbytes(self) -> int:
        """Bytes of slot memory."""
        return self._root.nbytes if self._root is not None else 0


class _MisfitError(Exception):
    def __init__(self, problem: str, positions: Sequence[int]) -> None:
        super().__init__(problem)
        self.positions = positions

    def explain(self, keys: Sequence[str]) -> str:
        named = " and ".join(repr(key) for key in keys)
        return (
            f"the samples of a batch do not fit together: {self}"
            + (f" ({named})" if named else "")
            + "; make the decoder return the same structure and shape for every sample, or pass collate_fn="
        )


class _Node(Protocol):
    @property
    def nbytes(self) -> int: ...

    def put(self, position: int, value: Any) -> None: ...

    def finish(self, kept: Kept) -> Any: ...


class _ArrayNode:
    """Arrays of one shape and dtype in rows of the slot; the odd ones are put aside."""

    def __init__(self, first: Any, samples: int, lease: BufferLease) -> None:
        memory, self._torch_dtype = as_array(first)
        assert memory is not None
        self._shape, self._dtype, self._type = memory.shape, memory.dtype, type(first)
        # Types of plain numbers are one object each; where torch says otherwise than numpy, none is plain.
        self._plain = memory.dtype if self._torch_dtype is None else None
        self._rows = array(lease, (samples, *memory.shape), memory.dtype)
        self._pinned = lease.pinned
        self._odd: dict[int, Any] = {}
        self.nbytes = self._rows.nbytes

    def put(self, position: int, value: Any) -> None:
        if type(value) is np.ndarray and value.dtype is self._plain and value.shape == self._shape:
            self._rows[position] = value  # what follows, for what comes nearly always
            return
        memory, torch_dtype = as_array(value)
        if (
            memory is not None
            and memory.shape == self._shape
            and memory.dtype == self._dtype
            and torch_dtype == self._torch_dtype
        ):
            self._rows[position] = memory
        else:
            self._odd[position] = value

    def finish(self, kept: Kept) -> Any:
        if not self._odd:
            return HostTensor(compact(self._rows, kept), torch_dtype=self._torch_dtype, pinned=self._pinned)
        rows = as_tensor(HostTensor(self._rows, torch_dtype=self._torch_dtype, pinned=self._pinned))
        positions = range(len(self._rows)) if kept is None else kept
        return _default_collate([self._odd.get(position, rows[position]) for position in positions])


class _ListNode:
    """Numbers, strings and everything else: collated at the end."""

    def __init__(self, samples: int, lease: BufferLease, texts: Callable[[list[Any]], Any]) -> None:
        self._texts = texts
        self._values: list[Any] = [MISSING] * samples
        self._lease = lease
        self.nbytes = 0

    def put(self, position: int, value: Any) -> None:
        self._values[position] = value

    def finish(self, kept: Kept) -> Any:
        values, self._values = pick(self._values, kept), []
        kinds = set(map(type, values))
        if len(kinds) == 1:
            kind = kinds.pop()
            if kind is str or kind is bytes:
                return self._texts(values)
            dtype = _NUMBERS.get(kind)
            if dtype is not None:
                rows = array(self._lease, (len(values),), dtype)
                try:
                    rows[:] = values
                except OverflowError as error:
                    raise _MisfitError(f"a number does not fit into {dtype.name}: {error}", ()) from error
                return HostTensor(rows, pinned=self._lease.pinned)
        return _default_collate(values)


_NUMBERS: dict[type, np.dtype[Any]] = {
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    bool: np.dtype(np.bool_),
}


class _TupleNode:
    def __init__(self, first: Any, samples: int, lease: BufferLease) -> None:
        self._make = type(first)._make if is_namedtuple(first) else list
        # default_collate transposes tuples and lists by zip, and leaves texts in the tuple that zip made.
        self._children = [_node(item, samples, lease, texts=tuple) for item in first]
        # A list of the user's own type: the batch is one too, with what the first sample's carries beside its items.
        self._models: dict[int, list[Any]] = {}

    @property
    def nbytes(self) -> int:
        return sum(child.nbytes for child in self._children)

    def put(self, position: int, value: Any) -> None:
        if not isinstance(value, tuple | list) or len(value) != len(self._children):
            got = f"{len(value)}" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
            raise _MisfitError(f"one has {len(self._children)} parts, another {got}", (position,))
        if isinstance(value, list) and type(value) is not list:
            self._models[position] = value
        for child, item in zip(self._children, value, strict=True):
            child.put(position, item)

    def finish(self, kept: Kept) -> Any:
        model = self._models.get(kept[0] if kept else 0, [])
        return like_list(model, self._make([child.finish(kept) for child in self._children]))


class _DictNode:
    def __init__(self, first: Mapping[Any, Any], samples: int, lease: BufferLease) -> None:
        self._children = {name: _node(item, samples, lease) for name, item in first.items()}
        # A mapping of the user's own type: as with lists.
        self._models: dict[int, Mapping[Any, Any]] = {}

    @property
    def nbytes(self) -> int:
        return sum(child.nbytes for child in self._children.values())

    def put(self, position: int, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise _MisfitError(f"one is a dict, another a {type(value).__name__}", (position,))
        if type(value) is not dict:
            self._models[position] = value
        for name, child in self._children.items():
            try:
                item = value[name]
            except KeyError:
                raise _MisfitError(f"one has the key {name!r}, another has only {list(value)}", (position,)) from None
            child.put(position, item)

    def finish(self, kept: Kept) -> Any:
        model = self._models.get(kept[0] if kept else 0, {})
        return like_mapping(model, {name: child.finish(kept) for name, child in self._children.items()})


def _node(first: Any, samples: int, lease: BufferLease, texts: Callable[[list[Any]], Any] = list) -> _Node:
    if isinstance(first, Mapping):
        return _DictNode(first, samples, lease)
    if isinstance(first, tuple | list):
        return _TupleNode(first, samples, lease)
    if as_array(first)[0] is not None:
        return _ArrayNode(first, samples, lease)
    return _ListNode(samples, lease, texts)


def misfit_error(error: BaseException, key: str) -> CollateError | None:
    """The error to raise where ``put`` found a sample of another structure than the batch's first."""
    return CollateError(error.explain([key])) if isinstance(error, _MisfitError) else None


def _default_collate(values: list[Any]) -> Any:
    from torch.utils.data import default_collate

    try:
        return default_collate(values)
    except (TypeError, RuntimeError, ValueError, KeyError) as error:
        for position, value in enumerate(values):
            if (odd := _unfit(value)) is not None:
                raise _MisfitError(odd, (position,)) from error
        shapes = [tuple(value.shape) if hasattr(value, "shape") else None for value in values]
        for position, shape in enumerate(shapes):
            if shape != shapes[0]:
                problem = f"shapes {list(shapes[0] or ())} and {list(shape or ())}"
                if shape is None or shapes[0] is None:
                    problem = f"one is a {type(values[0]).__name__}, another a {type(values[position]).__name__}"
                raise _MisfitError(problem, (0, position)) from error
        raise _MisfitError(str(error), ()) from error


def _unfit(value: Any) -> str | None:
    """What is wrong with a value by itself, where people often forget it."""
    if value is None:
        return "one is None"
    if inspect.iscoroutine(value):
        return "one is a coroutine: `async def` is for a source's read, not for decoders, datasets and targets"
    if type(value).__module__.startswith("PIL."):
        return f"one is a {type(value).__name__}, an image of PIL's, and no array: numpy.asarray(image) makes one"
    return None


def compact(rows: NDArray[Any], kept: Kept) -> NDArray[Any]:
    """The rows that are kept, moved up to the beginning of the same memory."""
    if kept is None:
        return rows
    for to, position in enumerate(kept):
        if to != position:
            rows[to] = rows[position]
    return rows[: len(kept)]


ItemT = TypeVar("ItemT")


def pick(items: Sequence[ItemT], kept: Kept) -> list[ItemT]:
    """The items that are kept."""
    return list(items) if kept is None else [items[position] for position in kept]
