"""Convert samples to the arrays that a cache stores, and back.

The interface, the codecs of decoders, and the codec of a ``Dataset``'s items, which splits an item into arrays, and
builds items and batches of such arrays.
"""

from __future__ import annotations

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from aiofeed.cache.layout import (
    MAPPINGS,
    RECORDS,
    ItemLayout,
    Layout,
    NotCacheableError,
    Parts,
    describe,
    layout_from_file,
    namedtuple_class,
    unpack_record,
)
from aiofeed.kernel.core.faces import bind_decoder
from aiofeed.kernel.core.pytree import is_namedtuple, map_leaves
from aiofeed.kernel.core.types import HostTensor, Row
from aiofeed.kernel.runtime.tensors import NUMBER_DTYPES, as_array, as_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMBERS = {kind.__name__: kind for kind in NUMBER_DTYPES}


class SampleCodec(ABC):
    """Converts what a source gives to the arrays that are cached (parts), and these to a sample."""

    layout: Layout | None = None
    """Layout of a cached sample, if it is known before the first sample."""
    random = False
    """Whether random augmentation turns the cached arrays into the sample."""
    advice = "let the decoder return one array or tensor, of the same shape and dtype for every sample"
    """The way out in the error message about a sample that cannot be cached."""

    def decode(self, value: Any) -> Any:
        """Return what ``encode`` takes, given encoded bytes or an item."""
        return value

    @abstractmethod
    def encode(self, decoded: Any, layout: Layout | None, out: Parts | None = None) -> tuple[Parts, Layout]:
        """Return the arrays to cache of a sample, and their layout.

        Args:
            decoded: What ``decode`` returns.
            layout: Layout of the cached samples; ``None`` before the first.
            out: The sample's memory in a batch; returned if the sample is decoded into it.

        Raises:
            NotCacheableError: The sample has another layout, or none.
        """

    @abstractmethod
    def sample(self, parts: Parts, layout: Layout, rng: Callable[[], Any]) -> Any:
        """Return the sample of cached arrays, in memory of its own; ``rng`` returns its ``torch.Generator``."""

    def sample_with_target(self, parts: Parts, layout: Layout, rng: Callable[[], Any], target: Any) -> Any:
        """Return the sample with its target."""
        return self.sample(parts, layout, rng), target

    def fill(self, parts: Parts, out: Parts, seed: int | None) -> None:
        """Write the sample into its memory in a batch."""
        for array, memory in zip(parts, out, strict=True):
            memory[...] = array

    def row(self, layout: Layout) -> Row:
        """Return the row of a batch that the first array of a sample fills."""
        return Row(layout.parts[0].shape, layout.parts[0].dtype)

    def batch(self, columns: list[Any], layout: Layout) -> Any:
        """Return the decoded part of a batch, given one tensor for each part."""
        return columns[0]


class RowCodec(SampleCodec):
    """Codec of a decoder that fills rows. It caches the row, or what ``augment_into`` takes."""

    def __init__(self, decoder: Any) -> None:
        self._decoder: Any = decoder
        self._row: Row = decoder.row
        cached: Row = getattr(decoder, "cached_row", decoder.row)
        self.layout: Layout = Layout(cached.shape, cached.dtype)
        self.random: bool = bool(decoder.takes_seed)
        self._decode_into: Callable[[Any, Any], None] = getattr(decoder, "decode_cached_into", decoder.decode_into)

    def encode(self, decoded: Any, layout: Layout | None, out: Parts | None = None) -> tuple[Parts, Layout]:
        """Decode into ``out`` if the row itself is cached, otherwise into new memory."""
        if out is not None and not self.random:
            self._decoder.decode_into(decoded, out[0], None)
            return out, self.layout
        array = np.empty(self.layout.shape, self.layout.dtype)
        self._decode_into(decoded, array)
        return [_read_only(array) if self.random else array], self.layout

    def sample(self, parts: Parts, layout: Layout, rng: Callable[[], Any]) -> Any:
        """Return the tensor that calling the decoder returns."""
        import torch

        # The same number that the decoder draws from a generator.
        seed = int(torch.randint(2**63 - 1, (), generator=rng(), device="cpu")) if self.random else None
        out = np.empty(self._row.shape, self._row.dtype)
        self.fill(parts, [out], seed)
        return as_tensor(HostTensor(out, self._row.axes))

    def fill(self, parts: Parts, out: Parts, seed: int | None) -> None:
        """Copy or augment."""
        if self.random:
            self._decoder.augment_into(parts[0], out[0], seed)
        else:
            out[0][...] = parts[0]

    def row(self, layout: Layout) -> Row:
        """Return the decoder's row."""
        return self._row


class ValueCodec(SampleCodec):
    """Codec of a decoder that returns one array or tensor.

    Args:
        decode: Returns what is cached, without random numbers.
        augment: Turns a cached array or tensor into the sample; ``None`` if it is the sample.
        takes_target: Whether ``augment`` has a keyword ``target``, and returns the sample with it.
    """

    def __init__(
        self, decode: Callable[[Any], Any], augment: Callable[..., Any] | None = None, *, takes_target: bool = False
    ) -> None:
        self._decode = decode
        self._augment = augment
        self._takes_target = takes_target
        self.random: bool = augment is not None

    def decode(self, value: Any) -> Any:
        """Return what the decoder returns."""
        return self._decode(value)

    def encode(self, decoded: Any, layout: Layout | None, out: Parts | None = None) -> tuple[Parts, Layout]:
        """Return the memory of a decoded array or tensor."""
        array, torch_dtype = as_array(decoded)
        if array is None:
            raise NotCacheableError(f"the decoder returned {describe(decoded)}, not one plain CPU tensor or array")
        if not array.size:
            raise NotCacheableError(f"it has no elements: its shape is {list(array.shape)}")
        found = Layout(array.shape, array.dtype.name, torch_dtype, tensor=not isinstance(decoded, np.ndarray))
        if layout is not None and found != layout:
            raise NotCacheableError(f"the others are each a {layout}, this one is a {found}")
        return [_read_only(array) if self.random else array], layout or found

    def sample(self, parts: Parts, layout: Layout, rng: Callable[[], Any]) -> Any:
        """Return a copy, or what ``augment`` returns."""
        value = self._cached(parts, layout)
        return value if self._augment is None else self._augment(value, rng=rng())

    def sample_with_target(self, parts: Parts, layout: Layout, rng: Callable[[], Any], target: Any) -> Any:
        """Return the sample with its target, by ``augment`` if it takes that."""
        if not self._takes_target:
            return super().sample_with_target(parts, layout, rng, target)
        assert self._augment is not None
        return self._augment(self._cached(parts, layout), rng=rng(), target=target)

    def _cached(self, parts: Parts, layout: Layout) -> Any:
        if layout is RECORDS:
            value = unpack_record(parts[0])
            return _read_only(value) if self.random and isinstance(value, np.ndarray) else value
        # ``augment`` gets an array that it cannot write to. torch has no read-only memory.
        return parts[0] if self.random and not layout.tensor else plain_value(parts[0], layout)


def plain_value(array: NDArray[Any], layout: Layout) -> Any:
    """Return a copy of a cached array, as the array or tensor that it was."""
    copied = array.copy()
    return as_tensor(HostTensor(copied, torch_dtype=layout.torch_dtype)) if layout.tensor else copied


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that the user's augmentation cannot write to: the array is cached afterwards."""
    view = array.view()
    view.flags.writeable = False
    return view


def new_codec(decoder: Any) -> SampleCodec:
    """Return the codec of a user's decoder; without one that of a ``Dataset``'s items.

    Raises:
        TypeError: It is random and lacks separate methods for decoding and augmentation.
    """
    if decoder is None:
        return ItemCodec()
    bound = bind_decoder(decoder)
    if bound.row is not None:
        if not bound.takes_seed or hasattr(decoder, "augment_into"):
            return RowCodec(decoder)
    elif callable(getattr(decoder, "augment_cached", None)):  # augment= of DecodePair is an argument
        return ValueCodec(decoder.decode_cached, decoder.augment_cached, takes_target=bound.takes_target)
    elif callable(getattr(decoder, "decode_cached", None)) and callable(getattr(decoder, "augment", None)):
        return ValueCodec(decoder.decode_cached, decoder.augment)
    elif not bound.takes_rng:
        return ValueCodec(decoder)
    advice = getattr(
        decoder,
        "cache_advice",
        "Give it two methods: decode_cached(data), which returns what is cached, without random numbers, and "
        "augment(cached, *, rng), which returns the sample",
    )
    raise TypeError(
        f"cache= with decode={decoder!r}: the decoder is random, so every epoch would show the same cached samples. "
        f"{advice}"
    )


# --- items of a Dataset


class ItemCodec(SampleCodec):
    """Caches the numbers, arrays and tensors of an item."""

    advice = "let the Dataset return the same structure, shapes and dtypes at every index"

    def encode(self, decoded: Any, layout: Layout | None, out: Parts | None = None) -> tuple[Parts, Layout]:
        """Return the arrays of an item; views of the item's own memory."""
        if layout is None:
            layout = item_layout(decoded)
            if not layout.nbytes:
                raise NotCacheableError(f"it has no elements: it is {describe(decoded)}")
        assert isinstance(layout, ItemLayout)
        return item_parts(decoded, layout), layout

    def sample(self, parts: Parts, layout: Layout, rng: Callable[[], Any]) -> Any:
        """Return the item as the ``Dataset`` returned it."""
        return value_of(parts, layout)

    def batch(self, columns: list[Any], layout: Layout) -> Any:
        """Return the batch as ``default_collate`` builds it."""
        assert isinstance(layout, ItemLayout)
        return _collated(layout.template, columns)


class ItemPart(msgspec.Struct):
    """A number, an array or a tensor of an item. Not a dataclass, because dataclasses are nodes of an item.

    Args:
        index: Its index among the parts of an item, depth first.
        kind: Type of a number; ``None`` for an array or a tensor.
        layout: Layout of the cached array.
    """

    index: int
    kind: type | None
    layout: Layout

    def __repr__(self) -> str:
        return str(self.layout) if self.kind is None else self.kind.__name__

    def array_of(self, value: Any) -> NDArray[Any] | None:
        """Return the array to cache of another item's part; ``None`` if its type, shape or dtype differs.

        Raises:
            OverflowError: The number is too large for a tensor.
        """
        layout = self.layout
        if self.kind is not None:
            return np.asarray(value, layout.dtype) if _number_type(value) is self.kind else None
        array, torch_dtype = _plain_array(value)
        alike = (
            array is not None
            and array.shape == layout.shape
            and array.dtype.name == layout.dtype
            and torch_dtype == layout.torch_dtype
            and isinstance(value, np.ndarray) != layout.tensor
        )
        return array if alike else None

    def value_of(self, array: NDArray[Any]) -> Any:
        """Return the part that ``array_of`` was given, in memory of its own."""
        if self.kind is not None:
            return array.item() if self.kind in NUMBER_DTYPES else array[()]
        return plain_value(array, self.layout)


def item_layout(item: Any) -> ItemLayout:
    """Return the layout of items like this one.

    Raises:
        NotCacheableError: The item has parts that cannot be cached.
    """
    parts: list[Layout] = []
    template = _template(item, "", parts)
    text = str(template)
    nbytes = sum(part.nbytes for part in parts)
    return ItemLayout((nbytes,), "uint8", form=text, description=text, parts=tuple(parts), template=template)


def item_parts(item: Any, layout: ItemLayout) -> list[NDArray[Any]]:
    """Return the arrays of an item; views of the item's memory where possible.

    Raises:
        NotCacheableError: The item has another layout.
    """
    parts: list[NDArray[Any]] = []
    _collect(layout.template, item, "", parts)
    return parts


def value_of(parts: Parts, layout: Layout) -> Any:
    """Return the cached value, in memory of its own."""
    if layout is RECORDS:
        return unpack_record(parts[0])
    return build_item(parts, layout) if isinstance(layout, ItemLayout) else plain_value(parts[0], layout)


def build_item(parts: Parts, layout: ItemLayout) -> Any:
    """Return an item as the ``Dataset`` returned it, in memory of its own."""
    return map_leaves(lambda part: part.value_of(parts[part.index]), layout.template)


def _template(value: Any, path: str, parts: list[Layout]) -> Any:
    kind = type(value)
    if kind in MAPPINGS.values():
        return kind([(name, _template(part, f"{path}[{name!r}]", parts)) for name, part in value.items()])
    if kind is tuple or kind is list or is_namedtuple(value):
        found = [_template(part, f"{path}[{at}]", parts) for at, part in enumerate(value)]
        return kind._make(found) if is_namedtuple(value) else kind(found)
    number = _number_type(value)
    layout = _array_layout(value) if number is None else _number_layout(value)
    if layout is None:
        raise NotCacheableError(
            f"item{path} is {describe(value)}; a cache stores plain CPU tensors and arrays, numbers, and tuples, "
            f"lists and dicts of these"
        )
    parts.append(layout)
    return ItemPart(len(parts) - 1, number, layout)


def _number_type(value: Any) -> type | None:
    """The type of a number, ``None`` for other values; the same for numpy types that are equal (``longlong``)."""
    if isinstance(value, np.generic) and type(value) not in NUMBER_DTYPES:
        return np.dtype(value.dtype.str).type
    return type(value) if type(value) in NUMBER_DTYPES else None


def _plain_array(value: Any) -> tuple[NDArray[Any] | None, str | None]:
    # A row of a memmap is a memmap, too; default_collate takes it as an array.
    return as_array(np.asarray(value) if type(value) is np.memmap else value)


def _array_layout(value: Any) -> Layout | None:
    import torch

    array, torch_dtype = _plain_array(value)
    if array is None:
        return None
    if isinstance(value, np.ndarray):
        try:
            torch.from_numpy(np.empty(0, array.dtype))
        except TypeError:  # torch lacks the dtype, so no batch can be built
            return None
    return Layout(array.shape, array.dtype.name, torch_dtype, tensor=not isinstance(value, np.ndarray))


def _number_layout(value: Any) -> Layout | None:
    if (dtype := NUMBER_DTYPES.get(type(value))) is not None:
        return Layout((), dtype.name)
    import torch
    from torch.utils.data import default_collate

    try:
        as_torch = torch.from_numpy(np.empty(0, value.dtype)).dtype
        return Layout((), value.dtype.name) if default_collate([value]).dtype is as_torch else None
    except TypeError:  # not a number, or torch lacks the dtype
        return None


def _collect(node: Any, value: Any, path: str, parts: list[NDArray[Any]]) -> None:
    if type(node) is ItemPart:
        try:
            array = node.array_of(value)
        except OverflowError as error:
            raise NotCacheableError(f"item{path} is {describe(value)}: {error}") from None
        if array is None:
            raise _difference(node, value, path)
        parts.append(array)
    elif type(value) is not type(node) or len(value) != len(node):
        raise _difference(node, value, path)
    elif isinstance(node, dict):
        # The order of an OrderedDict's keys is part of its value.
        alike = value.keys() == node.keys() if type(node) is dict else list(value) == list(node)
        if not alike:
            raise _difference(node, value, path)
        for name, part in node.items():
            _collect(part, value[name], f"{path}[{name!r}]", parts)
    else:
        for at, part in enumerate(node):
            _collect(part, value[at], f"{path}[{at}]", parts)


def _difference(node: Any, value: Any, path: str) -> NotCacheableError:
    others = repr(node) if type(node) is ItemPart else describe(node)
    return NotCacheableError(f"item{path} is {describe(value)}, and that of the others is {others}")


def _collated(node: Any, columns: list[Any]) -> Any:
    if type(node) is ItemPart:
        return columns[node.index]
    if isinstance(node, dict):
        return type(node)([(name, _collated(part, columns)) for name, part in node.items()])
    found = [_collated(part, columns) for part in node]
    return type(node)._make(found) if is_namedtuple(node) else found


def serialized(layout: ItemLayout) -> ItemLayout:
    """Return the layout with its form as JSON and the classes of its namedtuples, to be written to a file.

    Raises:
        NotCacheableError: The item has keys that a file cannot name.
    """
    types: list[str] = []
    form = json.dumps(_to_json(layout.template, "", types))
    return replace(layout, form=form, types=tuple(types))


def deserialized(layout: ItemLayout) -> ItemLayout | None:
    """Return the layout with parts and template, given the form from a file; ``None`` if the form is not enough.

    It is not if it is invalid, or names a namedtuple whose class is not loaded: a file must not cause imports.
    """
    parts: list[Layout] = []
    try:
        template = _from_json(json.loads(layout.form), iter(layout.types), parts)
        valid = sum(part.nbytes for part in parts) == layout.nbytes
    except (LookupError, ValueError, TypeError, AttributeError, SyntaxError, StopIteration, RecursionError):
        return None
    return replace(layout, parts=tuple(parts), template=template) if valid else None


def _to_json(node: Any, path: str, types: list[str]) -> list[Any]:
    if type(node) is ItemPart:
        layout = node.layout
        if node.kind is not None:
            return ["number", node.kind.__name__] if node.kind in NUMBER_DTYPES else ["scalar", layout.dtype]
        if not layout.tensor:
            return ["array", layout.dtype, layout.shape]
        return ["tensor", layout.dtype, layout.shape, layout.torch_dtype]
    kind = type(node)
    if isinstance(node, dict):
        named = [[_key_text(key, path), _to_json(part, f"{path}[{key!r}]", types)] for key, part in node.items()]
        return [kind.__name__, named]
    if is_namedtuple(node):
        types.append(f"{kind.__module__}:{kind.__qualname__}")
    found = [_to_json(part, f"{path}[{at}]", types) for at, part in enumerate(node)]
    # A namedtuple's module is not part of the form: a script has another module name when it is imported.
    return ["namedtuple", kind.__name__, list(kind._fields), found] if is_namedtuple(node) else [kind.__name__, found]


def _key_text(key: Any, path: str) -> str:
    text = repr(key)
    try:
        same = repr(ast.literal_eval(text)) == text
    except (ValueError, SyntaxError, RecursionError):
        same = False
    if not same:
        raise NotCacheableError(f"item{path} has the key {text}; a file can name strings, numbers, and tuples of these")
    return text


def _from_json(node: list[Any], types: Iterator[str], parts: list[Layout]) -> Any:
    kind, *rest = node
    if kind in MAPPINGS:
        return MAPPINGS[kind]([(ast.literal_eval(key), _from_json(part, types, parts)) for key, part in rest[0]])
    if kind in ("list", "tuple"):
        found = [_from_json(part, types, parts) for part in rest[0]]
        return found if kind == "list" else tuple(found)
    if kind == "namedtuple":
        made = namedtuple_class(next(types), rest[1])
        return made._make([_from_json(part, types, parts) for part in rest[2]])
    number: type | None = None
    if kind == "number":
        number = _NUMBERS[rest[0]]
        layout = Layout((), NUMBER_DTYPES[number].name)
    elif kind == "scalar":
        number, layout = np.dtype(rest[0]).type, Layout((), rest[0])
    else:
        dtype, shape, *torch_dtype = rest
        layout = layout_from_file(shape, dtype, torch_dtype[0] if torch_dtype else None, tensor=kind == "tensor")
    parts.append(layout)
    return ItemPart(len(parts) - 1, number, layout)
