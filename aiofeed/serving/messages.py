"""Messages between a server and its consumers, in the order in which they are sent.

Consumer (``connect.py``, ``subscription.py``)        Server (``hub.py``)

    Hello            ->
                     <-    Welcome
    ProbeRequest     ->    only if both are on the same device
                     <-    Probe: device memory with known content
    ProbeResult      ->
    Join             ->    from the next epoch (or batch) on:
                     <-    EpochStarted, BatchAvailable..., EpochEnded; the same for each further epoch
    Read             ->    for each batch
    Leave            ->

Instead of any message the server may send Disconnected; an epoch that fails ends at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, Union

from aiofeed.ipc.schema import DeviceMemoryHandle, ErrorMessage, NewSegment, Node, Struct, decoder

# Of these messages. A server refuses consumers of another version.
VERSION = 3
# A consumer's messages are a few numbers.
MAX_CONSUMER_BYTES = 1024
# Texts about a device: its name, and why its memory cannot be opened.
MAX_DEVICE_LETTERS = 128
MAX_REASON_LETTERS = 200
# A probe has the handles of a block of device memory and of two events.
MAX_HANDSHAKE_BYTES = 16 * 1024


# --- from a consumer to the server ---


class Hello(Struct, frozen=True):
    """The first message."""

    version: int


class ProbeRequest(Struct, frozen=True):
    """The consumer is on the server's device and requests memory to try; once, before its first ``Join``."""


class ProbeResult(Struct, frozen=True):
    """Why the consumer could not read the memory; "" if it could."""

    reason: str = ""


class Join(Struct, frozen=True):
    """Subscribe from the next epoch (or batch) on. Every message of the subscription carries ``ticket``."""

    ticket: int


class Leave(Struct, frozen=True):
    """End the subscription with this ticket."""

    ticket: int


class Read(Struct, frozen=True):
    """The consumer has read a batch and no longer uses its slot."""

    serial: int


# --- from the server to a consumer ---


class DeviceBlockHandle(Struct, frozen=True):
    """A block of the server's device memory, for one consumer to open. The server created the events.

    Args:
        number: The server's number for it.
        handle: Handle of the memory.
        filled: Handle of the event that the server records after it has written the block.
        read: Handle of the event that this consumer records after it has read the block.
    """

    number: int
    handle: DeviceMemoryHandle
    filled: bytes
    read: bytes


class Probe(Struct, frozen=True):
    """Device memory for the consumer to try.

    Args:
        block: The memory; ``None`` if the server cannot share any.
        content: The bytes in it.
        refusal: Why there is none.
    """

    block: DeviceBlockHandle | None
    content: bytes = b""
    refusal: str = ""


class Welcome(Struct, frozen=True):
    """The answer to ``Hello``.

    Args:
        batches: Per epoch and consumer; with ``mode="shard"`` an estimate until an epoch has started. ``None`` if the
            feeder has no length.
        device: Name of the device of the server's batches; "" for host memory.
    """

    batches: int | None
    device: str = ""


class Disconnected(Struct, frozen=True):
    """The server closes the connection, at the handshake or later."""

    reason: str


class EpochStarted(Struct, frozen=True):
    """An epoch starts. This consumer gets that many batches (``None``: unknown) if no consumer joins or leaves."""

    ticket: int
    epoch: int
    batches: int | None


class BatchAvailable(Struct, frozen=True):
    """A batch is in the ring. Its slot is not written again before ``Read``.

    Args:
        ticket: Ticket of the subscription.
        serial: Identifies the batch in ``Read``.
        number: Its position in the epoch of the feeder.
        batch: Its description.
        nbytes: Size of its arrays.
        segments: Memory that is new to this consumer.
        retired: Numbers of segments that will not be used again.
        block: Number of the block of device memory that its device tensors are in; -1 for none.
        new_block: That block, if it is new to this consumer.
        retired_blocks: Numbers of blocks that will not be used again.
    """

    ticket: int
    serial: int
    number: int
    batch: Node
    nbytes: int
    segments: list[NewSegment]
    retired: list[int]
    block: int = -1
    new_block: DeviceBlockHandle | None = None
    retired_blocks: tuple[int, ...] = ()


class EpochEnded(Struct, frozen=True):
    """The epoch is complete, and the subscription continues with the next one; an ``error`` ends the subscription."""

    ticket: int
    error: ErrorMessage | None = None


FromConsumer: TypeAlias = Union[Hello, ProbeRequest, ProbeResult, Join, Leave, Read]  # noqa: UP007 - for msgspec
EpochMessage: TypeAlias = EpochStarted | BatchAvailable | EpochEnded
"""The messages of a subscription, in the order in which the server sends them."""

FromServer: TypeAlias = Welcome | Probe | Disconnected | EpochMessage

decode_from_consumer: Callable[[bytes], FromConsumer] = decoder(FromConsumer)
decode_from_server: Callable[[bytes], FromServer] = decoder(FromServer)
