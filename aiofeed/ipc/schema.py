"""Typed messages between processes, in MessagePack: the description of a batch, of an error, and of memory.

A message that does not fit its types is refused; nothing that is received is executed or unpickled, except by a feeder
from its own worker processes (``PickledNode``). Text that UTF-8
may not be able to encode (paths with undecodable names) is sent as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, Union

import msgspec
import numpy as np

from aiofeed.ipc.framing import ProtocolError

Scalar: TypeAlias = bool | int | float | str | None
"""A Python value that MessagePack carries unchanged."""

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


def decoder(messages: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes one message of a type, or of a union of types.

    It raises ``ProtocolError`` if the payload is no such message.
    """
    decode = msgspec.msgpack.Decoder(messages).decode

    def decode_message(payload: bytes) -> Any:
        try:
            return decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            what = f"{len(payload)} bytes are not a valid message"
            raise ProtocolError(f"{what}: {type(error).__name__}: {error}") from None

    return decode_message


class Struct(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base class of every message: its name, followed by its fields in order."""


# --- a batch: a tree of nodes; arrays lie in shared or device memory ---


class ArrayNode(Struct, frozen=True):
    """An array or tensor in shared or device memory.

    Args:
        kind: What the receiver makes of it: "tensor", "array", "scalar" (a NumPy scalar) or "device" (a tensor that
            is in device memory).
        segment: Number of the segment, or of the block of device memory; -1 for an array of 0 bytes.
        offset: Bytes from the start of the segment.
        shape: Shape of the memory, C order.
        dtype: NumPy's string for the dtype of the memory.
        axes: Permutation from the memory's axes to those of the array; ``None`` for none.
        torch_dtype: Name of the tensor's dtype if NumPy has no such dtype.
    """

    kind: str
    segment: int
    offset: int
    shape: list[int]
    dtype: str
    axes: list[int] | None = None
    torch_dtype: str | None = None


class BytesNode(Struct, frozen=True):
    """Bytes ("bytes"), or a string that UTF-8 cannot encode ("text", encoded with "surrogatepass")."""

    kind: Literal["bytes", "text"]
    data: bytes


class ContainerNode(Struct, frozen=True):
    """A list, tuple or mapping, or an instance of a namedtuple or dataclass.

    Args:
        kind: Which of them.
        items: Its values.
        keys: The keys of a mapping, or the names of fields.
        module, name: The class of a namedtuple or dataclass.
    """

    kind: Literal["list", "tuple", "dict", "OrderedDict", "namedtuple", "dataclass"]
    items: list[Node]
    keys: list[Scalar] = []
    module: str = ""
    name: str = ""


class PickledNode(Struct, frozen=True):
    """A value of any other type, from a feeder's own worker process; refused from any other process.

    Args:
        data: Its pickle.
        buffers: The memory of its tensors and arrays, as arrays of bytes.
    """

    data: bytes
    buffers: list[ArrayNode]


# msgspec cannot resolve a forward reference in the form `X | Y`.
Node: TypeAlias = Union[ArrayNode, BytesNode, ContainerNode, PickledNode, bool, int, float, str, None]  # noqa: UP007


# --- memory ---


class NewSegment(Struct, frozen=True):
    """A shared-memory segment that the receiver has not mapped yet. Its descriptor is sent with the message."""

    number: int
    nbytes: int


class DeviceMemoryHandle(Struct, frozen=True):
    """CUDA memory of another process: the arguments with which torch opens it.

    Args:
        device: UUID of the device; its index differs from process to process.
        allocation: CUDA's handle of the allocation.
        nbytes: Size of the storage.
        offset: Offset of the storage in the allocation, in bytes.
        counter, counter_offset: Location of torch's reference count of the export.
        event: CUDA's handle of the event after which the memory may be read.
        event_needed: Whether the reader has to wait for that event.
    """

    device: str
    allocation: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


# --- an error ---


class ErrorMessage(Struct, frozen=True):
    """An exception: its type by name, its arguments or else its message, its traceback as text.

    Args:
        kind: The type's module and qualified name.
        message: ``str(error)``.
        arguments: ``error.args`` if all of them are plain values, so that an ``OSError`` keeps its number.
        key, index, stage: Attributes of a ``SampleError``.
        notes: The first of its notes.
        traceback: Its formatted traceback.
        cause: Its ``__cause__``.
    """

    kind: str
    message: bytes
    arguments: list[Scalar] | None = None
    key: bytes | None = None
    index: int | None = None
    stage: str | None = None
    notes: list[bytes] = []
    traceback: bytes = b""
    cause: ErrorMessage | None = None


_DTYPE_KINDS = "biufcSUMm"


_MAX_DIMENSIONS = 32


def dtype_and_nbytes(node: ArrayNode) -> tuple[np.dtype[Any], int]:
    """Return dtype and size in bytes of an array's memory; ``ProtocolError`` if dtype or shape are not valid."""
    dtype = plain_dtype(node.dtype)
    if len(node.shape) > _MAX_DIMENSIONS or any(not 0 <= size < 1 << 48 for size in node.shape):
        raise ProtocolError(f"an array of shape {node.shape}")
    return dtype, math.prod(node.shape) * dtype.itemsize


def plain_dtype(text: str) -> np.dtype[Any]:
    """Return the dtype of a string; ``ProtocolError`` if it is no dtype of plain bytes."""
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ProtocolError(f"{text!r} is no dtype: {error}") from None
    if dtype.kind not in _DTYPE_KINDS or dtype.hasobject or dtype.fields or dtype.subdtype or not dtype.itemsize:
        raise ProtocolError(f"{text!r} is no dtype of plain bytes")
    return dtype
