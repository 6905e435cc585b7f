"""The engine within an engine process: it assembles in slots, and tells the trainer instead of queueing."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiofeed.core.errors import SampleError
from aiofeed.core.limits import ResolvedLimits
from aiofeed.core.types import BatchPlan
from aiofeed.engine.admission import MemoryBudget
from aiofeed.engine.batch import Batch, ReorderBuffer
from aiofeed.engine.engine import Engine
from aiofeed.engine.fetch.collate import BatchBuilder
from aiofeed.engine.fetch.factory import NewBuilder, builder_factory, new_fetcher
from aiofeed.engine.tuning.tuner import Tuner
from aiofeed.processes.ipc.batch_codec import encode_batch
from aiofeed.processes.ipc.error_codec import describe
from aiofeed.processes.ipc.ring import Slot, SlotMemory
from aiofeed.processes.ipc.schema import (
    BatchFailed,
    BatchReady,
    BatchStats,
    FromEngine,
    ReadReport,
    ReleaseSlot,
    StartDecoding,
    WorkerEnded,
)
from aiofeed.processes.workers.spawn import WorkerConfig
from aiofeed.runtime.buffers import BufferLease
from aiofeed.runtime.queue import BatchQueue
from aiofeed.runtime.thread_pool import ThreadPool
from aiofeed.sampling.epochs import Step

_UNBOUNDED = 1 << 30


@dataclass(frozen=True, eq=False)
class WorkerPlan(BatchPlan):
    """A plan, and the number by which the trainer knows it."""

    serial: int = 0


@dataclass(frozen=True, eq=False)
class RequestedOrder:
    """The epoch's order, which the trainer's side has.

    Args:
        length: how many positions it has.
        ask: the index at a position.
    """

    length: int
    ask: Callable[[int], Awaitable[int]]

    def index_at(self, position: int) -> Awaitable[int]:
        """The index at a position, once it has been said."""
        return self.ask(position)


class PermittedBuffer(ReorderBuffer):
    """Batches that may be decoded once the trainer says so. Finished ones leave at once: it puts them in order.

    Args:
        tell: is told which have been read; ``None`` where nobody wants to know.
    """

    def __init__(self, tell: Callable[[FromEngine, Sequence[int]], None] | None) -> None:
        super().__init__(in_order=False, prefetch_batches=_UNBOUNDED)
        self._tell = tell
        # By their serials: batches that were opened and are not met yet, and those that were told of.
        self.may_decode: set[int] = set()
        self.told_read: set[int] = set()

    def open_gates(self) -> None:
        """Let those be decoded that the trainer has opened, and tell which have been read."""
        for entry in self.line:
            batch: Any = entry
            serial = batch.plan.serial
            if serial in self.may_decode:
                self.may_decode.discard(serial)
                batch.gate.set()
                self.opened += 1
            if self._tell is not None and batch.unaccounted and not batch.unread and serial not in self.told_read:
                self.told_read.add(serial)
                self._tell(ReadReport(serial), ())


class WorkerEngine(Engine):
    """The engine, which says what it has finished instead of queueing it, and decodes what the trainer has opened."""

    def __init__(
        self,
        steps: AsyncIterator[Step],
        *,
        worker_config: WorkerConfig,
        number: int,
        executor: ThreadPool,
        tell: Callable[[FromEngine, Sequence[int]], None],
    ) -> None:
        fetcher = new_fetcher(
            worker_config.source,
            worker_config.decode,
            worker_config.collate_fn,
            length=worker_config.length,
            policy=worker_config.policy,
            cache=worker_config.cache,
        )
        memory = SlotMemory(worker_config.keep)
        self.commissions = PermittedBuffer(None if worker_config.in_order else tell)
        limits = ResolvedLimits(
            read_concurrency=worker_config.share(worker_config.read_concurrency, number),
            decode_threads=worker_config.share(worker_config.decode_threads, number),
            # The trainer's side admits and opens batches; here only reads and threads are bounded.
            prefetch_batches=_UNBOUNDED,
            memory_bytes=_UNBOUNDED,
            device_batches=_UNBOUNDED,
        )
        tuner = Tuner(
            decode_threads=limits.decode_threads,
            threads_given=worker_config.threads_given,
            read_concurrency=limits.read_concurrency,
            reads_given=worker_config.reads_given,
            reads_most=worker_config.most_reads(number),
        )
        super().__init__(
            (),
            batch_size=1,
            fetcher=fetcher,
            new_builder=partial(_new_builder, builder_factory(fetcher, worker_config.collate_fn, staged=False)),
            wrap=_as_it_is,
            memory=memory,
            executor=executor,
            queue=BatchQueue(),
            limits=limits,
            budget=MemoryBudget(sys.maxsize),
            in_order=False,
            policy=worker_config.policy,
            length=worker_config.length,
            buffer=self.commissions,
            # Of reads alone: what jobs take is not measured here, where no consumer is seen to wait.
            tuner=tuner,
        )
        self._reads = tuner.reading
        self._arriving = steps
        self._tell = tell
        self._slots = memory
        self._lent: dict[int, Slot] = {}

    def told(self, message: StartDecoding | ReleaseSlot) -> None:
        """The trainer has opened a batch, or read one."""
        if isinstance(message, StartDecoding):
            self.commissions.may_decode.add(message.serial)
            self.commissions.open_gates()
        elif (slot := self._lent.pop(message.serial, None)) is not None:
            slot.give_back(message.again)

    def wants_plan(self) -> None:
        """There is no batch to read: it is not for reads to end that the plan waits."""
        self._admission.held_by_reads = False

    async def _plan(self) -> None:
        async for step in self._arriving:
            await self._plan_step(step)
            if self._admission.closed:
                return

    def _hand_over(self, batch: Batch) -> None:
        self._budget.release(batch.reserved)
        assert isinstance(batch.plan, WorkerPlan)
        serial = batch.plan.serial
        self.commissions.told_read.discard(serial)
        counters = batch.counters
        spent = BatchStats(
            counters.bytes_read, counters.read_s, counters.decode_s, counters.collate_s, counters.retries
        )
        failures = [describe(error) for error in batch.failures]
        slot = batch.lease
        assert slot is None or isinstance(slot, Slot)
        if batch.error is not None:
            if slot is not None:
                slot.give_back()
            self._tell(BatchFailed(serial, describe(batch.error), failures, spent, batch.nbytes), ())
            return
        assert slot is not None
        segments, descriptors, retired = self._slots.introduce(slot.segments)
        self._lent[serial] = slot
        kept = None if batch.kept is None else list(batch.kept)
        reads = self._reads.concurrency
        filled = BatchReady(
            serial, batch.result, spent, batch.nbytes, self.chunk_size, segments, retired, kept, failures, reads
        )
        self._tell(filled, descriptors)

    def _deliver_failure(
        self, error: BaseException, number: int | None = None, failures: tuple[SampleError, ...] = ()
    ) -> None:
        if not self._admission.closed:
            self._admission.closed = True
            self._tell(WorkerEnded(describe(error)), ())


def _as_it_is(batch: Any) -> Any:
    return batch


def _new_builder(new_builder: NewBuilder, samples: int, lease: BufferLease) -> BatchBuilder:
    """A builder whose finished batch is encoded in its slot."""
    assert isinstance(lease, Slot)
    builder = new_builder(samples, lease)
    builder.encode = partial(encode_batch, slot=lease)
    return builder
