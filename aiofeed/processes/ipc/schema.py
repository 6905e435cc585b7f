"""What engine processes and trainers say to each other: plain typed structs, in MessagePack.

Whatever does not fit these types is refused; nothing that arrives is ever run or unpickled. Texts are bytes where they
may hold what UTF-8 cannot (paths with undecodable names).
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar, Union

import msgspec

from aiofeed.processes.ipc.framing import ProtocolError

Scalar: TypeAlias = bool | int | float | str | None
"""What crosses as it is."""


class Struct(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What every message is: fields in order, under its name."""


# --- a batch: its structure, and where its arrays lie ---


class Leaf(Struct, frozen=True):
    """An array in the ring.

    Args:
        kind: "tensor", "array" or "scalar" (one of numpy's): what the user gets; "device": a tensor in device memory.
        segment: which segment, or block of device memory; -1 for an array of no bytes.
        offset: where in it, in bytes.
        shape: of the memory, C order.
        dtype: numpy's string for it.
        axes: permutation from memory to what the user sees; ``None`` for none.
        torch_dtype: name of a torch dtype that numpy lacks.
    """

    kind: str
    segment: int
    offset: int
    shape: list[int]
    dtype: str
    axes: list[int] | None = None
    torch_dtype: str | None = None


class Plain(Struct, frozen=True):
    """One Python value."""

    value: Scalar


class Raw(Struct, frozen=True):
    """Bytes ("bytes"), or a text that UTF-8 cannot hold ("text", encoded with "surrogatepass")."""

    kind: str
    raw: bytes


class Plains(Struct, frozen=True):
    """A list, or tuple, of Python values."""

    kind: str
    values: list[Scalar]


class Items(Struct, frozen=True):
    """A list, or tuple, of anything."""

    kind: str
    items: list[Node]


class Named(Struct, frozen=True):
    """A namedtuple or a dataclass instance: the class's name, and its fields."""

    kind: str
    module: str
    name: str
    fields: list[str]
    items: list[Node]


class Table(Struct, frozen=True):
    """A dict, or OrderedDict."""

    kind: str
    keys: list[Scalar]
    items: list[Node]


Node: TypeAlias = Union[Leaf, Plain, Raw, Plains, Items, Named, Table]  # noqa: UP007 - msgspec wants it resolvable


# --- an error ---


class ErrorMessage(Struct, frozen=True):
    """An exception: its type by name, its arguments or else its message, its traceback as text.

    Args:
        kind: the type's module and qualified name.
        message: ``str(error)``.
        arguments: where all of them are plain, so that an ``OSError`` keeps its number.
        key, index, stage: of a ``SampleError``.
        notes: its notes.
        traceback: the lines of its traceback.
        cause: what it was raised from.
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


# --- from the trainer to an engine process ---


class WorkerPlanMessage(Struct, frozen=True):
    """Assemble a batch: read it, and decode it where ``opened``, else once an ``StartDecoding`` says so.

    Args:
        serial: names the batch from here on.
        number: its position among this rank's batches of the epoch.
        epoch_seed: of the samples' own random numbers.
        indices, positions: int64, in the order in which they stand in the batch.
        opened: whether it may be decoded at once.
        order_length: of the epoch's order, in which samples can be asked for; 0 for none.
    """

    serial: int
    number: int
    epoch_seed: int
    indices: bytes
    positions: bytes
    opened: bool
    order_length: int = 0


class StartDecoding(Struct, frozen=True):
    """A batch may be decoded."""

    serial: int


class ReleaseSlot(Struct, frozen=True):
    """The slot of a batch has been read and belongs to the engine process again.

    Args:
        serial: the plan's.
        again: whether it may be written; where not (a fork of the trainer's has it, too) it is let go of.
    """

    serial: int
    again: bool = True


class ReplacementAnswer(Struct, frozen=True):
    """To an ``ReplacementRequest``: the index at a position; ``None`` where there is no order to ask."""

    ticket: int
    index: int | None = None


class StopWorker(Struct, frozen=True):
    """Clean up and end."""


# --- from an engine process to the trainer ---


class WorkerReady(Struct, frozen=True):
    """The engine process has what it needs and takes plans."""

    pid: int


class ReadReport(Struct, frozen=True):
    """All samples of a batch have been read; sent only where batches need not be in order."""

    serial: int


class NewSegment(Struct, frozen=True):
    """Memory that the trainer does not know yet; its descriptor comes with the message, in this order."""

    number: int
    nbytes: int


class BatchStats(Struct, frozen=True):
    """What one batch took."""

    bytes_read: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    collate_s: float = 0.0
    retries: int = 0


class BatchReady(Struct, frozen=True):
    """A batch stands in the ring; its slot is the trainer's until ``ReleaseSlot``.

    Args:
        serial: the plan's.
        batch: the structure.
        spent: what it took.
        nbytes: encoded and decoded bytes, for the budget.
        chunk_size: samples per executor job.
        segments: memory that is new.
        retired: numbers of segments that will not be used again.
        kept: positions of the samples that are left; ``None``: all.
        failures: of samples that were skipped or replaced.
        reads: samples that the process reads at a time.
    """

    serial: int
    batch: Node
    spent: BatchStats
    nbytes: int
    chunk_size: int
    segments: list[NewSegment] = []
    retired: list[int] = []
    kept: list[int] | None = None
    failures: list[ErrorMessage] = []
    reads: int = 0


class BatchFailed(Struct, frozen=True):
    """A batch failed: the error to raise in its turn, and the failures of its samples."""

    serial: int
    error: ErrorMessage
    failures: list[ErrorMessage]
    spent: BatchStats
    nbytes: int


class ReplacementRequest(Struct, frozen=True):
    """Which sample is at a position of the epoch's order? For one that is to take another's place."""

    ticket: int
    serial: int
    position: int


class WorkerEnded(Struct, frozen=True):
    """The engine process cannot go on."""

    error: ErrorMessage


ToEngine: TypeAlias = Union[WorkerPlanMessage, StartDecoding, ReleaseSlot, ReplacementAnswer, StopWorker]  # noqa: UP007 - as above
FromEngine: TypeAlias = Union[WorkerReady, ReadReport, BatchReady, BatchFailed, ReplacementRequest, WorkerEnded]  # noqa: UP007 - as above

MessageT = TypeVar("MessageT")

encode = msgspec.msgpack.Encoder().encode
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def decode_to_engine(payload: bytes) -> ToEngine:
    """A message to an engine process; ``ProtocolError`` where it is none."""
    return decode(_to_engine, payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    """A message from an engine process; ``ProtocolError`` where it is none."""
    return decode(_from_engine, payload)


def decode(decoder: msgspec.msgpack.Decoder[MessageT], payload: bytes) -> MessageT:
    """A message of a decoder's types; ``ProtocolError`` where it is none."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(payload)} bytes that are no message: {type(error).__name__}: {error}") from None


class DeviceMemoryHandle(Struct, frozen=True):
    """Device memory of another process: what CUDA and torch need to open it.

    Args:
        device: the device's UUID, because its index differs from process to process.
        allocation: CUDA's handle of the allocation.
        nbytes: of the storage.
        offset: of the storage, in the allocation.
        counter, counter_offset: where torch counts who has it open.
        event: CUDA's handle of the event after which it may be read.
        event_needed: whether that has to be waited for.
    """

    device: str
    allocation: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool
