"""The bytes of cached samples: rows, which have one layout, and records, of any structure and shape.

A record is the length of a MessagePack value, 4 bytes, and the value: None, numbers, bytes and ASCII strings as they
are, others as a list of their type and what they consist of. Nothing in it is unpickled or imported.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from aiofeed.kernel.core.pytree import is_namedtuple, loaded_class
from aiofeed.kernel.runtime.tensors import is_tensor, tensor_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNIT = 64
"""Records begin at a multiple of so many bytes, and their length is one."""
# Other mappings may have attributes beside their items; default_collate copies those of the first sample.
MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict}
_LENGTH = struct.Struct("<I")
_NUMPY_DTYPES = {np.dtype(code).name for code in "?bhiqBHIQefdFD"}
# Characters of a value that an error message shows.
_SHOWN = 40
# The classes of namedtuples in records of this process, which may be local to a function.
_classes: dict[str, type] = {}

Parts: TypeAlias = "Sequence[NDArray[Any]]"
"""The arrays of one sample, in the order of its layout's ``parts``."""


class NotCacheableError(Exception):
    """A sample cannot be cached; the message says why."""


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of a sample that is one array.

    Args:
        shape: Shape of the array.
        dtype: numpy's name of the element type.
        torch_dtype: Name of a torch dtype that numpy lacks; ``dtype`` then has the same size.
        tensor: Whether the sample is a tensor rather than an array.
    """

    shape: tuple[int, ...]
    dtype: str
    torch_dtype: str | None = None
    tensor: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of a sample."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{'tensor' if self.tensor else 'array'} {self.torch_dtype or self.dtype} {list(self.shape)}"

    @property
    def parts(self) -> tuple[Layout, ...]:
        """Return the layout of each array of a sample."""
        return (self,)

    def view(self, row: NDArray[np.uint8]) -> NDArray[Any]:
        """Return a row of bytes as an array of this shape and dtype."""
        return row.view(self.dtype).reshape(self.shape)

    def split(self, row: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Return the arrays of a sample in its row of bytes: views, which may be unaligned."""
        return [self.view(row)]


RECORDS = Layout((0,), "uint8")
"""The layout of records, and that of a cache without rows. No row has it, because it has no elements."""


def layout_from_file(shape: Sequence[int], dtype: str, torch_dtype: str | None, *, tensor: bool) -> Layout:
    """Return the layout of an array, given its description in a file.

    Raises:
        TypeError, ValueError: There are no such arrays.
    """
    itemsize = np.dtype(dtype).itemsize
    if torch_dtype is not None:
        import torch

        known = getattr(torch, torch_dtype, None)
        if not isinstance(known, torch.dtype) or known.itemsize != itemsize:
            raise TypeError(f"torch has no dtype {torch_dtype} of {itemsize} bytes")
    return Layout(tuple(shape), dtype, torch_dtype, tensor)


@dataclass(frozen=True)
class ItemLayout(Layout):
    """Layout of a ``Dataset``'s item, whose arrays lie one behind the other: ``shape`` [bytes], ``dtype`` uint8.

    Args:
        form: Structure, shapes and dtypes as text. Two layouts with the same form are equal. In a file it is JSON.
        types: For a file, the classes of the item's namedtuples, "module:name" each, depth first.
        description: The layout as error messages show it.
        parts: The layout of each array.
        template: An item with an ``ItemPart`` in place of each number, array and tensor; ``None`` if only ``form`` is
            known.
    """

    form: str = ""
    types: tuple[str, ...] = field(default=(), compare=False)
    description: str = field(default="", compare=False)
    parts: tuple[Layout, ...] = field(default=(), compare=False)
    template: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.description

    @cached_property
    def _slices(self) -> list[tuple[Layout, slice]]:
        ends = accumulate((part.nbytes for part in self.parts), initial=0)
        return [(part, slice(*ends)) for part, ends in zip(self.parts, pairwise(ends), strict=True)]

    def split(self, row: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Return the arrays of an item in its row of bytes: views, which may be unaligned."""
        return [part.view(row[at]) for part, at in self._slices]


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return an array as a row of bytes; a view if the array is C-contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def pack(parts: Parts) -> NDArray[np.uint8]:
    """Return the arrays of a sample as one row of bytes; a view of a single C-contiguous array."""
    return as_bytes(parts[0]) if len(parts) == 1 else np.concatenate([as_bytes(part) for part in parts])


def pack_record(value: Any) -> NDArray[np.uint8]:
    """Return the record of a sample, read-only.

    Raises:
        NotCacheableError: The sample has a part that a record cannot describe.
    """
    text = msgspec.msgpack.encode(_node(value, ""))
    padding = bytes(-(_LENGTH.size + len(text)) % UNIT)
    return np.frombuffer(b"".join((_LENGTH.pack(len(text)), text, padding)), np.uint8)


def unpack_record(record: NDArray[np.uint8]) -> Any:
    """Return the sample of a record, in memory of its own.

    Raises:
        LookupError: It has a namedtuple whose class is not loaded.
        Exception: It is no record.
    """
    [length] = _LENGTH.unpack_from(record.data)
    text = record.data[_LENGTH.size :][:length]
    return _value(msgspec.msgpack.decode(text, ext_hook=lambda _, data: np.array(data, np.uint8)))


def _node(value: Any, path: str) -> Any:
    """Return the description of a value, with the memory of its arrays and tensors."""
    kind = type(value)
    if value is None or kind in (bool, float, bytes) or (kind is int and -(1 << 63) <= value < 1 << 63):
        return value
    if kind is str:
        # Paths that are no UTF-8 have surrogates.
        return value if value.isascii() else ["str", value.encode("utf-8", "surrogatepass")]
    if kind in MAPPINGS.values():
        keys = [_node(key, f"{path} has a key that") for key in value]
        return [kind.__name__, keys, *[_node(part, f"{path}[{key!r}]") for key, part in value.items()]]
    if kind in (list, tuple) or is_namedtuple(value):
        parts = [_node(part, f"{path}[{at}]") for at, part in enumerate(value)]
        if kind in (list, tuple):
            return [kind.__name__, None, *parts]
        names = [f"{kind.__module__}:{kind.__qualname__}", list(kind._fields)]
        _classes[str(names)] = kind
        return ["namedtuple", names, *parts]
    if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        if value.dtype.kind in "biufcSUMm" and value.dtype.itemsize:
            shape = None if isinstance(value, np.generic) else value.shape
            return ["array", value.dtype.str, shape, msgspec.msgpack.Ext(0, as_bytes(value).data)]
    elif is_tensor(value):
        import torch

        plain = kind is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
        if plain and not value.requires_grad and not value.is_quantized:
            data = value.resolve_conj().resolve_neg().contiguous()
            # Not reshape(-1), which leaves the stride 0 of a single element.
            data = data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy().data
            return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), msgspec.msgpack.Ext(0, data)]
    raise NotCacheableError(
        f"item{path} is {describe(value)}; a cache stores plain CPU tensors and arrays, numbers of 64 bits, strings, "
        f"bytes, None, and tuples, lists and dicts of these"
    )


def _value(node: Any) -> Any:
    if type(node) is not list:
        return node
    kind, about, *parts = node
    if kind == "array":
        array = parts[1].view(about)
        return array[0] if parts[0] is None else array.reshape(parts[0])
    if kind == "tensor":
        if about in _NUMPY_DTYPES:  # numpy is faster at views
            return tensor_of(parts[1].view(about).reshape(parts[0]))
        import torch

        dtype = getattr(torch, about)
        return tensor_of(parts[1].view(f"i{dtype.itemsize}").reshape(parts[0])).view(dtype)
    if kind == "str":
        return about.decode("utf-8", "surrogatepass")
    values = [_value(part) if type(part) is list else part for part in parts]
    if kind in MAPPINGS:
        keys = [_value(key) if type(key) is list else key for key in about]
        return MAPPINGS[kind](zip(keys, values, strict=True))
    if kind == "namedtuple":
        return namedtuple_class(*about)._make(values)
    return {"list": list, "tuple": tuple}[kind](values)


def namedtuple_class(path: str, fields: list[str]) -> Any:
    """Return the class of a namedtuple, by "module:name" and its fields.

    Raises:
        LookupError: This process has not loaded it.
    """
    module, _, qualname = path.partition(":")

    def matches(found: type) -> bool:
        name = qualname.rpartition(".")[2]
        return issubclass(found, tuple) and found.__name__ == name and list(getattr(found, "_fields", ())) == fields

    found = _classes.get(str([path, fields])) or loaded_class(module, qualname, matches)
    if found is None:
        raise LookupError(f"no namedtuple {path} is loaded")
    return found


def other_structure(cached: NDArray[np.uint8], record: NDArray[np.uint8]) -> str:
    """Return how the items of two records differ in more than values, lengths and shapes; empty if they do not."""
    one, other = unpack_record(cached), unpack_record(record)
    return "" if _are_alike(one, other) else f"{describe(one)} in the file, {describe(other)} here"


def _are_alike(one: Any, other: Any) -> bool:
    if one is None or other is None:  # which may stand for anything
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        lengths = isinstance(one, list) or len(one) == len(other)
        return lengths and all(map(_are_alike, one, other))
    dtypes = [getattr(each, "dtype", None) for each in (one, other)]
    alike = dtypes[0] == dtypes[1] or getattr(dtypes[0], "kind", "") in ("S", "U")
    return alike and getattr(one, "ndim", 0) == getattr(other, "ndim", 0)


def describe(value: Any) -> str:
    """Return a part of an item as error messages show it."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    if hasattr(value, "__torch_function__") and hasattr(value, "requires_grad"):
        unusual = [str(value.device)] if value.device.type != "cpu" else []
        unusual += ["requires grad"] if value.requires_grad else []
        unusual += [str(value.layout)] if str(value.layout) != "torch.strided" else []
        suffix = f" ({', '.join(unusual)})" if unusual else ""
        return f"{type(value).__name__.lower()} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}{suffix}"
    kind = type(value)
    if kind in (str, bytes, int, float, bool):
        text = repr(value)
        return f"a {kind.__name__}, {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"
    if isinstance(value, dict):
        return f"a {kind.__name__} with the keys {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {kind.__name__} of {len(value)}"
    return "None" if value is None else f"a {kind.__name__}"
