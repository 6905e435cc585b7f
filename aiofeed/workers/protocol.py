"""Messages between the trainer and a worker process, in the order in which a batch causes them.

Trainer (``pool.py``, ``remote_assembly.py``)          Worker (``main.py``, ``worker_engine.py``)

    PlanBatch        ->    reads the samples
                     <-    ReadReport, if batches may be finished out of order
    StartDecoding    ->    decodes them into a slot, unless ``PlanBatch`` has allowed that
                     <-    BatchFinished: the batch is in the slot, or it failed
    ReleaseSlot      ->    reuses the slot
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, Union

from aiofeed.ipc.schema import ErrorMessage, NewSegment, Node, Struct, decoder
from aiofeed.kernel.core.statistics import Event

# The fields of ``EpochStats`` that a worker counts.
BATCH_STATS = (
    *("bytes_read", "read_s", "decode_s", "collate_s", "retries", "samples_read", "reading_s", "reading_square_s"),
    *("samples_read_apart", "reading_apart_s", "samples_decoded", "samples_cached", "decode_cpu_s", "collate_cpu_s"),
    *("gil_probe_s", "gil_probes"),
)

# --- from the trainer to a worker ---


class PlanBatch(Struct, frozen=True):
    """Read a batch; decode it when ``StartDecoding`` arrives, or at once if ``may_decode``.

    Args:
        serial: Identifies the batch in all messages about it.
        number: Its position among this rank's batches of the epoch.
        epoch_seed: Seeds the samples' random generators.
        indices, positions: int64, in the order of the batch.
        may_decode: Whether it may be decoded at once.
        order_length: Length of the epoch's order, of which samples can be requested; 0 for none.
        pieces: See ``BatchPlan``; empty for none.
    """

    serial: int
    number: int
    epoch_seed: int
    indices: bytes
    positions: bytes
    may_decode: bool
    order_length: int = 0
    pieces: bytes = b""


class StartDecoding(Struct, frozen=True):
    """Decode a batch."""

    serial: int


class ReleaseSlot(Struct, frozen=True):
    """The trainer no longer uses the slot of a batch. Not ``reusable``: a fork of the trainer may still read it."""

    serial: int
    reusable: bool = True


class ReplacementAnswer(Struct, frozen=True):
    """The answer to ``ReplacementRequest``: the index at the position; ``None`` if the epoch has no order."""

    ticket: int
    index: int | None = None


class StopWorker(Struct, frozen=True):
    """Close the source and exit."""


# --- from a worker to the trainer ---


class WorkerReady(Struct, frozen=True):
    """The source is open; the worker takes plans."""


class ReadReport(Struct, frozen=True):
    """All samples of a batch have been read. Sent only if batches may be finished out of order."""

    serial: int


class BatchFinished(Struct, frozen=True):
    """A finished batch, or one that failed. The slot of a batch belongs to the trainer until ``ReleaseSlot``.

    Args:
        serial: Serial number of the batch.
        stats: Its part of the statistics of the epoch, see ``BATCH_STATS``.
        nbytes: Encoded and decoded bytes, for the memory budget.
        failures: Errors of the samples that were skipped or replaced.
        error: The error to raise in place of the batch; the fields below are then not set.
        batch: Its description.
        chunk_size: Samples per decode job.
        segments: Memory that is new to the trainer.
        retired: Numbers of segments that will not be used again.
        indices: The indices of its samples; ``None``: those of the plan.
        reads: How many samples the worker reads at a time.
        events: What took place for this batch, see ``EpochStats``. All processes have the same clock.
    """

    serial: int
    stats: list[int | float]
    nbytes: int
    failures: list[ErrorMessage]
    error: ErrorMessage | None = None
    batch: Node = None
    chunk_size: int = 0
    segments: Sequence[NewSegment] = ()
    retired: Sequence[int] = ()
    indices: Sequence[int] | None = None
    reads: int = 0
    events: Sequence[Event] = ()


class ReplacementRequest(Struct, frozen=True):
    """Which sample is at a position of the epoch's order? It is to replace one that failed."""

    ticket: int
    serial: int
    position: int


class WorkerEnded(Struct, frozen=True):
    """The worker cannot continue."""

    error: ErrorMessage


# msgspec cannot resolve a forward reference in the form `X | Y`.
ToWorker: TypeAlias = Union[PlanBatch, StartDecoding, ReleaseSlot, ReplacementAnswer, StopWorker]  # noqa: UP007
FromWorker: TypeAlias = Union[WorkerReady, ReadReport, BatchFinished, ReplacementRequest, WorkerEnded]  # noqa: UP007

decode_to_worker: Callable[[bytes], ToWorker] = decoder(ToWorker)
decode_from_worker: Callable[[bytes], FromWorker] = decoder(FromWorker)
