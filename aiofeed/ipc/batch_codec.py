"""A batch between two processes: arrays in a slot of shared memory, the rest as a tree of typed nodes.

Values of other types are pickled between a feeder and its own worker processes, and refused between others.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from aiofeed.ipc.framing import ProtocolError
from aiofeed.ipc.schema import (
    ArrayNode,
    BytesNode,
    ContainerNode,
    Node,
    PickledNode,
    Struct,
    dtype_and_nbytes,
    plain_dtype,
)
from aiofeed.kernel.core.errors import CollateError
from aiofeed.kernel.core.pytree import is_dataclass_instance, is_namedtuple, loaded_class
from aiofeed.kernel.core.types import HostTensor
from aiofeed.kernel.runtime.buffers import BufferLease, HostBufferPool, array
from aiofeed.kernel.runtime.tensors import in_memory_order, view_as_integers

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from aiofeed.ipc.ring import Ring, Slot

_SCALARS = (type(None), bool, int, float, str)
_SEQUENCES: dict[type, Literal["list", "tuple"]] = {list: "list", tuple: "tuple"}
_MAPPINGS: dict[type, Literal["dict", "OrderedDict"]] = {dict: "dict", OrderedDict: "OrderedDict"}
# The NumPy dtype of the description of a tensor on a device, by its item size; torch_dtype has the real one.
DEVICE_DTYPES = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


# --- encoding ---


def encode_batch(value: Any, slot: Slot, path: str = "") -> Node:
    """Describe a batch, or the part of it at a path. Arrays that are not in the slot yet are copied to it.

    Raises:
        CollateError: The batch has a value that cannot be described; the message has its type, its place in the batch
            and what to do.
    """
    kind = type(value)
    if isinstance(value, ArrayNode):
        return value  # in device memory, described by the caller
    if kind is HostTensor:
        return _encode_array("tensor", value.memory, value.axes, value.torch_dtype, slot, path)
    if _is_plain(value):
        return value  # type: ignore[no-any-return]
    if kind in _SEQUENCES:
        if all(map(_is_plain, value)):
            return ContainerNode(_SEQUENCES[kind], list(value))
        items = [encode_batch(item, slot, f"{path}[{at}]") for at, item in enumerate(value)]
        return ContainerNode(_SEQUENCES[kind], items)
    if kind in _MAPPINGS:
        for key in value:
            if not _is_plain(key):
                return _encode_other(value, f"a dict with the key {key!r}", slot, path)
        items = [encode_batch(item, slot, f"{path}[{key!r}]") for key, item in value.items()]
        return ContainerNode(_MAPPINGS[kind], items, list(value))
    if kind is bytes:
        return BytesNode("bytes", value)
    if kind is str:
        return BytesNode("text", value.encode("utf-8", "surrogatepass"))
    if is_namedtuple(value):
        return _encode_record("namedtuple", value, value._fields, slot, path)
    if is_dataclass_instance(value):
        return _encode_record("dataclass", value, [field.name for field in dataclasses.fields(value)], slot, path)
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _encode_array("array" if kind is np.ndarray else "scalar", np.asarray(value), None, None, slot, path)
    if hasattr(value, "__torch_function__") and not isinstance(value, type):
        if (odd := _odd_tensor(value)) is not None:
            return _encode_other(value, odd, slot, path)
        memory, torch_dtype = _tensor_memory(value)
        return _encode_array("tensor", memory, None, torch_dtype, slot, path)
    return _encode_other(value, f"a {kind.__module__}.{kind.__qualname__}", slot, path)


def _encode_other(value: Any, what: str, slot: Slot, path: str) -> PickledNode:
    if slot.dump is None:
        raise unsupported_value(what, path, slot.advice)
    try:
        data, extents = slot.dump(value, slot)
    except Exception as error:  # the user's objects may raise anything when they are pickled
        raise CollateError(
            f"{what}{_at(path)} cannot be pickled for another process: {type(error).__name__}: {error}; {slot.advice}"
        ) from error
    return PickledNode(data, [ArrayNode("array", each.segment, each.offset, [each.nbytes], "|u1") for each in extents])


def _at(path: str) -> str:
    return f" (at batch{path})" if path else ""


def _encode_record(
    kind: Literal["namedtuple", "dataclass"], value: Any, fields: Sequence[str], slot: Slot, path: str
) -> ContainerNode:
    items = [encode_batch(getattr(value, name), slot, f"{path}.{name}") for name in fields]
    return ContainerNode(kind, items, list(fields), type(value).__module__, type(value).__qualname__)


def _is_plain(value: Any) -> bool:
    """Return whether MessagePack carries a value unchanged."""
    kind: type = type(value)
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 64)
    if kind is str:
        return bool(value.isascii()) or not any("\ud800" <= letter <= "\udfff" for letter in value)
    return kind in _SCALARS


def unsupported_value(what: str, path: str, advice: str) -> CollateError:
    """Return the error for a value that cannot be described; ``advice`` says what to do."""
    return CollateError(
        f"{what}{_at(path)} cannot be sent to another process, which takes tensors, arrays, numbers, strings, bytes "
        f"and None in lists, tuples, dicts, namedtuples and dataclasses; {advice}"
    )


def _odd_tensor(value: Any) -> str | None:
    """Describe a tensor that has more than memory, shape and dtype; ``None`` for other tensors."""
    import torch

    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        return f"a {type(value).__name__} with layout {value.layout} on {value.device}"
    if value.requires_grad or value.is_quantized:
        return "a tensor that requires grad or is quantized"
    return None


def _tensor_memory(value: Any) -> tuple[NDArray[Any], str | None]:
    tensor = value.resolve_conj().resolve_neg()
    try:
        return tensor.numpy(), None
    except (TypeError, RuntimeError):
        pass  # NumPy has no such dtype: its bytes are sent as integers, with the dtype's name
    return view_as_integers(tensor).numpy(), str(tensor.dtype).removeprefix("torch.")


def _encode_array(
    kind: str, memory: NDArray[Any], axes: Sequence[int] | None, torch_dtype: str | None, slot: Slot, path: str
) -> ArrayNode | PickledNode:
    try:
        plain_dtype(memory.dtype.str)
    except ProtocolError:
        value = memory[()] if kind == "scalar" else memory
        return _encode_other(value, f"an array of {memory.dtype}", slot, path)
    segment, offset = -1, 0
    if memory.nbytes:
        memory, order = in_memory_order(memory)
        axes = order if order is not None else axes
        found = slot.locate(memory) if memory.flags.c_contiguous else None
        if found is None:
            rows = slot.take(memory.nbytes).view(memory.dtype).reshape(memory.shape)
            np.copyto(rows, memory)
            found = slot.locate(rows)
            assert found is not None
        segment, offset = found
    permutation = None if axes is None else list(axes)
    return ArrayNode(kind, segment, offset, list(memory.shape), memory.dtype.str, permutation, torch_dtype)


# --- decoding ---

Unpickle: TypeAlias = Callable[[bytes, Iterable[Any]], Any]
"""Rebuilds a value from its pickle and the memory of its buffers; see ``ipc/pickling.py``."""


def decode_batch(node: Node, make_array: Callable[[ArrayNode], Any], *, unpickle: Unpickle | None = None) -> Any:
    """Rebuild a batch; ``make_array`` gives the leaf of each array.

    Raises:
        ProtocolError: The description is invalid, or has a pickle without ``unpickle``, for a trusted sender.
    """
    if isinstance(node, ArrayNode):
        return make_array(node)
    if isinstance(node, PickledNode):
        if unpickle is None:
            raise ProtocolError("a pickled value")
        return unpickle(node.data, map(make_array, node.buffers))
    if isinstance(node, BytesNode):
        return node.data if node.kind == "bytes" else _decode_text(node.data)
    if not isinstance(node, ContainerNode):
        return node
    items = [
        decode_batch(item, make_array, unpickle=unpickle) if isinstance(item, Struct) else item for item in node.items
    ]
    if node.kind == "list":
        return items
    if node.kind == "tuple":
        return tuple(items)
    if len(node.keys) != len(items):
        raise ProtocolError(f"{len(node.keys)} keys for {len(items)} values")
    if node.kind == "namedtuple":
        return _decode_namedtuple(node, items)
    if node.kind == "dataclass":
        return _decode_dataclass(node, items)
    pairs = zip(node.keys, items, strict=True)
    return dict(pairs) if node.kind == "dict" else OrderedDict(pairs)


def decode_and_wrap(
    node: Node, make_array: Callable[[ArrayNode], Any], wrap: Callable[[Any], Any], *, unpickle: Unpickle | None = None
) -> tuple[Any, float]:
    """Decode and wrap a batch; also returns how many seconds that took. For any thread."""
    started = time.perf_counter()
    batch = wrap(decode_batch(node, make_array, unpickle=unpickle))
    return batch, time.perf_counter() - started


def _decode_namedtuple(node: ContainerNode, items: list[Any]) -> Any:
    cls: Any = loaded_class(node.module, node.name, lambda each: issubclass(each, tuple) and hasattr(each, "_fields"))
    if cls is None or list(cls._fields) != node.keys:
        try:
            return namedtuple(node.name.rpartition(".")[2], node.keys)(*items)  # type: ignore[arg-type]
        except ValueError as error:
            raise ProtocolError(f"an invalid namedtuple: {error}") from None
    return cls._make(items)


def _decode_dataclass(node: ContainerNode, items: list[Any]) -> Any:
    cls: Any = loaded_class(node.module, node.name, dataclasses.is_dataclass)
    if cls is None or {field.name for field in dataclasses.fields(cls)} != set(node.keys):
        raise ProtocolError(f"{node.module}.{node.name} is no dataclass of this process with fields {node.keys}")
    made = object.__new__(cls)
    for name, item in zip(node.keys, items, strict=True):
        # Without __init__ and __post_init__, which have run in the other process.
        object.__setattr__(made, name, item)  # type: ignore[arg-type]
    return made


def _decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"an invalid string: {error}") from None


def array_nodes(node: Node) -> Iterator[ArrayNode]:
    """Return the arrays of a description."""
    if isinstance(node, ArrayNode):
        yield node
    elif isinstance(node, PickledNode):
        yield from node.buffers
    elif isinstance(node, ContainerNode):
        for item in node.items:
            if isinstance(item, Struct):
                yield from array_nodes(item)


# --- the leaf of an array ---


def batch_in_ring(ring: Ring, batch: Node, *, unpickle: Unpickle | None = None) -> Any:
    """Return the batch with its tensors as they lie in the ring, which must be pinned, for a device to copy."""

    def leaf(node: ArrayNode) -> Any:
        view = ring.view(node)
        # An array stays on the host: it is copied.
        return leaf_of(view, node, pinned=True) if node.kind == "tensor" else copied_leaf(view, node, None)

    return decode_batch(batch, leaf, unpickle=unpickle)


def copied_leaf(view: NDArray[Any], node: ArrayNode, lease: BufferLease | None) -> Any:
    """Return a copy of an array or tensor, in memory of the lease; ``None``: in memory of its own."""
    if node.kind == "scalar":
        return view[()]
    # Pinned memory is reused once the device has copied from it; an array, which stays on the host, must not be there.
    if lease is None or not view.nbytes or (node.kind != "tensor" and not isinstance(lease, HostBufferPool)):
        copy = np.empty(view.shape, view.dtype)
    else:
        copy = array(lease, view.shape, view.dtype)
    np.copyto(copy, view)
    return leaf_of(copy, node, pinned=lease is not None and lease.pinned)


def leaf_of(memory: NDArray[Any], node: ArrayNode, *, pinned: bool = False) -> Any:
    """Return the array or tensor with the given memory, without a copy."""
    axes = permutation(node)
    if node.kind == "array":
        return memory if axes is None else memory.transpose(axes)
    if node.torch_dtype is not None:
        torch_dtype_of(node)  # checks the name
    return HostTensor(memory, axes, node.torch_dtype, pinned=pinned)


# --- validation ---


def permutation(node: ArrayNode) -> tuple[int, ...] | None:
    """Return the permutation from the memory's axes to those of the array, if any; ``ProtocolError`` if it is none."""
    if node.axes is None:
        return None
    if sorted(node.axes) != list(range(len(node.shape))):
        raise ProtocolError(f"axes {node.axes} of an array with {len(node.shape)} dimensions")
    return tuple(node.axes)


def torch_dtype_of(node: ArrayNode) -> torch.dtype:
    """Return the dtype of torch with the name in the node; ``ProtocolError`` if it does not fit the memory."""
    import torch

    dtype = getattr(torch, node.torch_dtype or "", None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != np.dtype(node.dtype).itemsize:
        raise ProtocolError(f"torch_dtype {node.torch_dtype!r} for {node.dtype}")
    return dtype


# --- tensors in device memory ---


class TensorInBlock:
    """A tensor in a block. No dataclass, which would be a node of the batch and not a leaf.

    Args:
        node: Its description.
        nbytes: Size of the block.

    Raises:
        ProtocolError: It does not lie in the block.
    """

    __slots__ = ("_axes", "_dtype", "_nbytes", "_node")

    def __init__(self, node: ArrayNode, nbytes: int) -> None:
        self._node = node
        self._axes = permutation(node)
        dtype, self._nbytes = dtype_and_nbytes(node)
        self._dtype = torch_dtype_of(node)
        if node.offset < 0 or node.offset % dtype.itemsize or node.offset + self._nbytes > nbytes:
            raise ProtocolError(f"{self._nbytes} bytes at {node.offset} do not lie in a block of {nbytes}")

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor, in the memory of the block or in a copy of it."""
        start = self._node.offset
        flat = memory[start : start + self._nbytes].view(self._dtype).view(self._node.shape)
        return flat if self._axes is None else flat.permute(self._axes)
