"""A batch between two processes: its arrays in a slot, the rest as a typed description. No pickle."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aiofeed.core.errors import CollateError
from aiofeed.core.pytree import is_dataclass_instance, is_namedtuple
from aiofeed.core.types import HostTensor
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.processes.ipc.schema import Items, Leaf, Named, Node, Plain, Plains, Raw, Table
from aiofeed.runtime.buffers import BufferLease, Bytes, HostBufferPool, array
from aiofeed.runtime.tensors import INTEGER_OF_SIZE, in_memory_order, view_as_integers

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCALARS = (type(None), bool, int, float, str)
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}
_TABLES: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict"}
# The module that a script is, in the process that runs it and in one that only imports it.
_MAIN = ("__main__", "__mp_main__")
# It keeps nothing.
_private = HostBufferPool(0)


_DTYPE_KINDS = "biufcSUMm"
_MOST_DIMENSIONS = 32


class Place(Protocol):
    """Where arrays go: a slot."""

    @property
    def advice(self) -> str:
        """The way out for whoever has a batch that cannot be packed."""
        ...

    def take(self, nbytes: int) -> Bytes:
        """Memory of the slot."""
        ...

    def locate(self, memory: NDArray[Any]) -> tuple[int, int] | None:
        """Segment and offset of what lies in it already."""
        ...


def encode_batch(batch: Any, slot: Place) -> Node:
    """The description of a batch, whose arrays stand in the slot afterwards.

    Raises:
        CollateError: something in it cannot be described; the message says what, where, and the way out.
    """
    return _pack(batch, slot, "")


def _pack(value: Any, slot: Place, path: str) -> Node:
    kind = type(value)
    if isinstance(value, Leaf):
        return value  # it lies in device memory already
    if kind is HostTensor:
        return _leaf("tensor", value.memory, value.axes, value.torch_dtype, slot, path)
    if kind in _SEQUENCES:
        if all(_crosses(item) for item in value):
            return Plains(_SEQUENCES[kind], list(value))
        return Items(_SEQUENCES[kind], [_pack(item, slot, f"{path}[{at}]") for at, item in enumerate(value)])
    if kind in _TABLES:
        for key in value:
            if not _crosses(key):
                raise refusal(f"a dict with the key {key!r}", path, slot.advice)
        items = [_pack(item, slot, f"{path}[{key!r}]") for key, item in value.items()]
        return Table(_TABLES[kind], list(value), items)
    if _crosses(value):
        return Plain(value)
    if kind is bytes:
        return Raw("bytes", value)
    if kind is str:
        return Raw("text", value.encode("utf-8", "surrogatepass"))
    if is_namedtuple(value):
        return _named("namedtuple", value, list(value._fields), list(value), slot, path)
    if is_dataclass_instance(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return _named("dataclass", value, fields, [getattr(value, name) for name in fields], slot, path)
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _leaf("array" if kind is np.ndarray else "scalar", np.asarray(value), None, None, slot, path)
    if hasattr(value, "__torch_function__") and not isinstance(value, type):
        memory, torch_dtype = _tensor_memory(value, slot, path)
        return _leaf("tensor", memory, None, torch_dtype, slot, path)
    raise refusal(f"a {kind.__module__}.{kind.__qualname__}", path, slot.advice)


def _named(kind: str, value: Any, fields: list[str], items: list[Any], slot: Place, path: str) -> Named:
    of = type(value)
    packed = [_pack(item, slot, f"{path}.{name}") for name, item in zip(fields, items, strict=True)]
    return Named(kind, of.__module__, of.__qualname__, fields, packed)


def _crosses(value: Any) -> bool:
    kind: type = type(value)
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 64)
    if kind is str:
        return bool(value.isascii()) or not any("\ud800" <= letter <= "\udfff" for letter in value)
    return kind in _SCALARS


def refusal(what: str, path: str, advice: str) -> CollateError:
    """The error of what cannot be described, with the way out."""
    at = f" (at batch{path})" if path else ""
    return CollateError(
        f"{what}{at} cannot be handed from one process to another: what can are tensors, arrays, numbers, texts, bytes "
        f"and None in lists, tuples, dicts, namedtuples and dataclasses; {advice}"
    )


def _tensor_memory(value: Any, slot: Place, path: str) -> tuple[NDArray[Any], str | None]:
    import torch

    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        raise refusal(f"a {type(value).__name__} with layout {value.layout} on {value.device}", path, slot.advice)
    if value.requires_grad or value.is_quantized:
        raise refusal("a tensor that requires grad or is quantized", path, slot.advice)
    tensor = value.resolve_conj().resolve_neg()
    try:
        return tensor.numpy(), None
    except (TypeError, RuntimeError):
        pass  # a dtype that numpy lacks: its bytes cross under its name
    if tensor.itemsize not in INTEGER_OF_SIZE:
        raise refusal(f"a tensor of {tensor.dtype}", path, slot.advice)
    return view_as_integers(tensor).numpy(), str(tensor.dtype).removeprefix("torch.")


def _leaf(
    kind: str, memory: NDArray[Any], axes: Sequence[int] | None, torch_dtype: str | None, slot: Place, path: str
) -> Leaf:
    try:
        plain_dtype(memory.dtype.str)
    except ProtocolError:
        raise refusal(f"an array of {memory.dtype}", path, slot.advice) from None
    if memory.nbytes == 0:
        return Leaf(
            kind, -1, 0, list(memory.shape), memory.dtype.str, None if axes is None else list(axes), torch_dtype
        )
    memory, order = in_memory_order(memory)
    if order is not None:
        axes = order
    place = slot.locate(memory) if memory.flags.c_contiguous else None
    if place is None:
        rows = slot.take(memory.nbytes).view(memory.dtype).reshape(memory.shape)
        np.copyto(rows, memory)
        place = slot.locate(rows)
        assert place is not None
        memory = rows
    return Leaf(kind, *place, list(memory.shape), memory.dtype.str, None if axes is None else list(axes), torch_dtype)


def decode_batch(node: Node, take: Callable[[Leaf], Any]) -> Any:
    """The batch of a description; ``take`` gives what stands for an array.

    Raises:
        WireError: it describes nothing that ``encode_batch`` makes.
    """
    if isinstance(node, Leaf):
        return take(node)
    if isinstance(node, Plain):
        return node.value
    if isinstance(node, Raw):
        return node.raw if node.kind == "bytes" else _text(node.raw)
    if isinstance(node, Plains):
        return node.values if node.kind == "list" else tuple(node.values)
    items = [decode_batch(item, take) for item in node.items]
    if isinstance(node, Items):
        return items if node.kind == "list" else tuple(items)
    if isinstance(node, Table):
        if len(node.keys) != len(items):
            raise ProtocolError(f"{len(node.keys)} keys for {len(items)} values")
        pairs = dict(zip(node.keys, items, strict=True))
        return pairs if node.kind == "dict" else OrderedDict(pairs)
    if len(node.fields) != len(items):
        raise ProtocolError(f"{len(node.fields)} fields for {len(items)} values")
    return _rebuild(node, items)


def _rebuild(node: Named, items: list[Any]) -> Any:
    kind: Any = _known_class(node)
    if node.kind == "dataclass":
        if kind is None or {field.name for field in dataclasses.fields(kind)} != set(node.fields):
            raise ProtocolError(f"{node.module}.{node.name} is no dataclass of this process with fields {node.fields}")
        made = object.__new__(kind)
        for name, item in zip(node.fields, items, strict=True):
            # Past __init__ and __post_init__: they ran when the batch was made.
            object.__setattr__(made, name, item)
        return made
    if kind is None or list(kind._fields) != node.fields:
        kind = _namedtuple(node)
    return kind._make(items)


def _namedtuple(node: Named) -> Any:
    try:
        return namedtuple(node.name.rpartition(".")[2], node.fields)
    except ValueError as error:
        raise ProtocolError(f"no namedtuple: {error}") from None


def _known_class(node: Named) -> type | None:
    """The class of that name, where this process has it; nothing is imported because a message says so."""
    for module in _MAIN if node.module in _MAIN else (node.module,):
        found: Any = sys.modules.get(module)
        for name in node.name.split("."):
            found = getattr(found, name, None)
        if isinstance(found, type):
            fits = dataclasses.is_dataclass(found) if node.kind == "dataclass" else issubclass(found, tuple)
            if fits and (node.kind == "dataclass" or hasattr(found, "_fields")):
                return found
    return None


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"no text: {error}") from None


def leaves_of(node: Node) -> Iterator[Leaf]:
    """The arrays of a description."""
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, Items | Table | Named):
        for item in node.items:
            yield from leaves_of(item)


def in_place(view: NDArray[Any], leaf: Leaf, *, pinned: bool, lease: BufferLease) -> Any:
    """What stands for an array that a device copies straight from the ring; what stays on the host is copied."""
    if leaf.kind != "tensor":
        return copied(view, leaf, lease)
    return HostTensor(view, axes_of(leaf), _torch_dtype(leaf), pinned=pinned)


def copied(view: NDArray[Any], leaf: Leaf, lease: BufferLease) -> Any:
    """What stands for an array once the ring is left behind: a copy in memory of the lease."""
    if leaf.kind == "scalar":
        return view[()]
    # Pinned memory is used again once the device has copied from it; what stays on the host is the user's for good.
    place: BufferLease = lease if leaf.kind == "tensor" or isinstance(lease, HostBufferPool) else _private
    own = array(place, view.shape, view.dtype) if view.nbytes else np.empty(view.shape, view.dtype)
    np.copyto(own, view)
    return as_it_is(own, leaf, pinned=lease.pinned)


def as_it_is(memory: NDArray[Any], leaf: Leaf, *, pinned: bool = False) -> Any:
    """What stands for an array or tensor whose memory it is handed over with."""
    if leaf.kind == "array":
        axes = axes_of(leaf)
        return memory if axes is None else memory.transpose(axes)
    return HostTensor(memory, axes_of(leaf), _torch_dtype(leaf), pinned=pinned)


def axes_of(leaf: Leaf) -> tuple[int, ...] | None:
    """The permutation from memory to what the user sees; ``None`` for none.

    Raises:
        WireError: it is no permutation of the dimensions.
    """
    if leaf.axes is None:
        return None
    if sorted(leaf.axes) != list(range(len(leaf.shape))):
        raise ProtocolError(f"axes {leaf.axes} of an array with {len(leaf.shape)} dimensions")
    return tuple(leaf.axes)


def _torch_dtype(leaf: Leaf) -> str | None:
    name = leaf.torch_dtype
    if name is None:
        return None
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != np.dtype(leaf.dtype).itemsize:
        raise ProtocolError(f"torch_dtype {name!r} for {leaf.dtype}")
    return name


def extent(leaf: Leaf) -> tuple[np.dtype[Any], int]:
    """The dtype of an array's memory, and its size in bytes.

    Raises:
        WireError: it is no plain array.
    """
    dtype = plain_dtype(leaf.dtype)
    if len(leaf.shape) > _MOST_DIMENSIONS or any(not 0 <= size < 1 << 48 for size in leaf.shape):
        raise ProtocolError(f"an array of shape {leaf.shape}")
    count = 1
    for size in leaf.shape:
        count *= size
    return dtype, count * dtype.itemsize


def empty_array(shape: list[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of no bytes.

    Raises:
        WireError: there is none of this shape.
    """
    try:
        return np.empty(shape, dtype)
    except ValueError as error:  # though it has no bytes, its other dimensions may be too many
        raise ProtocolError(f"an array of shape {shape}: {error}") from None


def plain_dtype(text: str) -> np.dtype[Any]:
    """A dtype of plain bytes; ``ProtocolError`` for any other."""
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ProtocolError(f"{text!r} is no dtype: {error}") from None
    if dtype.kind not in _DTYPE_KINDS or dtype.hasobject or dtype.fields or dtype.subdtype or not dtype.itemsize:
        raise ProtocolError(f"{text!r} is no dtype of plain bytes")
    return dtype
