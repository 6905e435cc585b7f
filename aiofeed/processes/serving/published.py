"""Where a served batch stands: in shared memory, in device memory, or in both where its readers are of both kinds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aiofeed.core.errors import FeedError
from aiofeed.core.pytree import total_nbytes
from aiofeed.processes.ipc.batch_codec import encode_batch
from aiofeed.processes.ipc.cuda_ipc import HandleError
from aiofeed.processes.ipc.framing import MAX_DESCRIPTORS, ProtocolError
from aiofeed.processes.ipc.passing import Passable
from aiofeed.processes.ipc.ring import INLINE_BYTES, Slot, SlotMemory
from aiofeed.processes.ipc.schema import NewSegment, Node
from aiofeed.processes.serving.consumers import Consumer
from aiofeed.processes.serving.protocol import MAX_REASON_LETTERS, BatchAvailable, Probe
from aiofeed.runtime.thread_pool import ThreadPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.processes.serving.device_ring import DeviceRing, DeviceSlot

log = logging.getLogger("aiofeed.processes")

# How often it is looked whether a slot whose readers say that they have queued their copies is free.
_LOOK_S = 5e-4


class PublishedBatch:
    """One batch, and the slots in which it stands.

    Attributes:
        nbytes: of its arrays and tensors.
        host: as it stands in shared memory; ``None``: it does not.
        device: as it stands in device memory, what stays on the host beside it, and where.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.host: tuple[Node, ServedSlot] | None = None
        self.device: tuple[Node, ServedSlot, DeviceSlot] | None = None

    def give_back(self) -> None:
        """All its slots are free."""
        for slot in self._slots():
            slot.give_back()

    def discard(self) -> None:
        """Somebody may still read them."""
        for slot in self._slots():
            slot.discard()

    def _slots(self) -> Iterator[ServedSlot | DeviceSlot]:
        if self.host is not None:
            yield self.host[1]
        if self.device is not None:
            yield from self.device[1:]


class BatchPublisher:
    """Puts batches into slots, and says where they stand.

    Args:
        memory: the slots in shared memory.
        ring: those on the device of the feeder's batches; ``None`` for a feeder of host batches.
        executor: copies what is large.
    """

    def __init__(self, memory: ServedMemory, ring: DeviceRing | None, executor: ThreadPool) -> None:
        self._memory = memory
        self._ring = ring
        self._executor = executor
        self._refusal = ""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Make the device's stream for slots current in the server's thread."""
        return contextlib.nullcontext() if self._ring is None else self._ring.entered()

    @property
    def device(self) -> str:
        """What the device of the batches is called; "" for host memory."""
        return "" if self._ring is None else self._ring.identity

    def trial(self, consumer: Consumer) -> Probe:
        """Memory for a consumer on that device to try, or why there is none."""
        if self._ring is None:
            return Probe(None, refusal="the server's batches are in host memory")
        if consumer.pid in (0, os.getpid()):
            if consumer.pid:
                return Probe(None, refusal="the process that has device memory cannot open it a second time")
            return Probe(None, refusal="the server cannot see this process: one of them is in a container")
        if not self._refusal:
            try:
                return self._ring.trial(consumer)
            except HandleError as error:
                self._refuse(str(error)[:MAX_REASON_LETTERS])
        return Probe(None, refusal=self._refusal)

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        log.warning(
            "device memory cannot be shared (%s): consumers are fed through host memory; without device= in the served "
            "feeder that takes fewer copies",
            reason,
        )

    async def fill(self, batch: Any, readers: Callable[[], list[Consumer]]) -> PublishedBatch:
        """Put a batch where its readers can have it.

        Args:
            batch: of the feeder.
            readers: who they are, as things stand; asked again after every wait.

        Raises:
            CollateError: it cannot be described.
            FeedError: there is no room for it.
        """
        lot = PublishedBatch(total_nbytes(batch))
        try:
            while True:
                expected = readers()
                if lot.device is None and any(each.on_device for each in expected) and await self._place(lot, batch):
                    continue
                for consumer in expected:
                    self._share(lot, consumer)
                if lot.host is not None or all(self._has(lot, each) for each in expected):
                    return lot
                host = batch
                if self._ring is not None:
                    host = await self._in_executor(partial(self._ring.to_host, batch))
                lot.host = await self._pack(host, lot.nbytes)
        except BaseException:
            lot.give_back()
            raise

    def _has(self, lot: PublishedBatch, consumer: Consumer) -> bool:
        return lot.device is not None and consumer.on_device

    async def _place(self, lot: PublishedBatch, batch: Any) -> bool:
        """Onto the device; whether that took a while."""
        if self._ring is None or self._refusal:
            return False
        while not self._ring.room():  # noqa: ASYNC110 - a device tells nobody when it is done
            await asyncio.sleep(_LOOK_S)
        try:
            placed = self._ring.place(batch, self._memory.advice)
        except HandleError as error:
            self._refuse(str(error))
            return False
        if placed is None:
            return False
        rest, slot = placed
        try:
            node, beside = await self._pack(rest, total_nbytes(rest))
        except BaseException:
            slot.give_back()
            raise
        lot.device = node, beside, slot
        return True

    def _share(self, lot: PublishedBatch, consumer: Consumer) -> None:
        if self._ring is None or lot.device is None or not consumer.on_device:
            return
        try:
            self._ring.share(lot.device[2], consumer)
        except HandleError as error:
            consumer.on_device = False
            log.warning("consumer %d is fed through host memory from here on: %s", consumer.pid, error)

    async def _pack(self, batch: Any, nbytes: int) -> tuple[Node, ServedSlot]:
        slot = self._memory.lease()
        job: Future[Node] | None = None
        try:
            if nbytes <= INLINE_BYTES:
                node = encode_batch(batch, slot)
            else:
                job = self._executor.submit(encode_batch, batch, slot)
                node = await asyncio.wrap_future(job)
            if (pieces := len(slot.segments) + len(slot.passed)) > MAX_DESCRIPTORS:
                raise FeedError(f"a batch in {pieces} pieces; at most {MAX_DESCRIPTORS} can be passed on")
        except BaseException:
            if job is None:
                slot.give_back()
            else:  # whoever waited for it may have been cancelled, and it is at work still
                job.add_done_callback(lambda _: slot.give_back())
            raise
        if slot.passed:
            slot.batch = batch  # the memory it lies in is used again once nothing refers to it
        return node, slot

    async def _in_executor(self, job: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)

    def given(
        self, lot: PublishedBatch, consumer: Consumer, serial: int, number: int
    ) -> tuple[BatchAvailable, list[int]]:
        """What tells a consumer of a batch, and the descriptors that go with it.

        Raises:
            OSError: there are none left.
        """
        if self._has(lot, consumer):
            assert self._ring is not None
            assert lot.device is not None
            node, slot, on_device = lot.device
            new, descriptors, retired = self._memory.segments_for(slot, consumer.known)
            where = self._ring.introduce(on_device, consumer)
            return BatchAvailable(consumer.joined, serial, number, node, lot.nbytes, new, retired, *where), descriptors
        assert lot.host is not None
        node, slot = lot.host
        new, descriptors, retired = self._memory.segments_for(slot, consumer.known)
        return BatchAvailable(consumer.joined, serial, number, node, lot.nbytes, new, retired), descriptors

    def gone(self, consumer: Consumer, *, reading: bool) -> None:
        """A consumer is gone; it may still be ``reading``."""
        if self._ring is not None:
            self._ring.gone(consumer, reading=reading)

    def close(self) -> None:
        """Let go of all memory; whoever has it open keeps it."""
        self._memory.close()
        if self._ring is not None:
            self._ring.close()


class ServedSlot(Slot):
    """The memory of one batch: the server's own, and where it lies in memory that may be passed on, that.

    Attributes:
        batch: kept until the slot is free, where it lies in memory of others.
    """

    def __init__(self, memory: ServedMemory, passable: Passable) -> None:
        super().__init__(memory)
        self._passable = passable
        self.passed: list[int] = []
        self.batch: Any = None

    def locate(self, memory: NDArray[Any]) -> tuple[int, int] | None:
        """Segment and offset of a C-contiguous array; ``None`` where no consumer could be given its memory."""
        found = super().locate(memory) or self._passable.hold(memory)
        if found is None or any(found[0] == segment.number for segment in self.segments):
            return found
        if found[0] in self.passed:
            self._passable.drop(found[0])
        else:
            self.passed.append(found[0])
        return found

    def give_back(self, again: bool = True) -> None:
        """Nobody reads it any more; where that is not sure, it may not be used ``again``. Idempotent."""
        passed, self.passed = self.passed, []
        for number in passed:
            self._passable.drop(number, again)
        self.batch = None
        super().give_back(again)


class ServedMemory(SlotMemory):
    """Shared memory whose descriptors are kept for whoever attaches later.

    Args:
        keep: free segments kept.
        passable: memory that is not copied from.
    """

    advice = "in the server's script, make collate_fn (or the decoder) return those"

    def __init__(self, keep: int, passable: Passable) -> None:
        super().__init__(keep)
        self._passable = passable
        self._numbers = passable.numbers

    def lease(self) -> ServedSlot:
        """The slot of one batch."""
        return ServedSlot(self, self._passable)

    def segments_for(self, slot: ServedSlot, known: set[int]) -> tuple[list[NewSegment], list[int], list[int]]:
        """What a consumer that has ``known`` is to learn, with descriptors of its own, and to forget."""
        new: list[NewSegment] = []
        descriptors: list[int] = []
        with self._lock:
            retired = sorted(known - self._unsent.keys() - self._passable.known())
            try:
                for segment in slot.segments:
                    if segment.number not in known:
                        descriptors.append(os.dup(self._unsent[segment.number]))
                        new.append(NewSegment(segment.number, segment.nbytes))
                for number in slot.passed:
                    if number not in known:
                        nbytes, descriptor = self._passable.descriptor(number)
                        descriptors.append(descriptor)
                        new.append(NewSegment(number, nbytes))
            except OSError:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise
        known.difference_update(retired)
        known.update(segment.number for segment in new)
        return new, descriptors, retired

    def close(self) -> None:
        """Close the descriptors; whoever has mapped the memory keeps it."""
        with self._lock:
            self._free.clear()
            while self._unsent:
                os.close(self._unsent.popitem()[1])


class Lendable(Protocol):
    """What a batch stands in."""

    def give_back(self) -> None:
        """Nobody reads it any more."""
        ...

    def discard(self) -> None:
        """Somebody may still read it, of whom nothing more is heard: it must not be written again."""
        ...


@dataclass(eq=False)
class _Lent:
    slot: Lendable
    readers: set[Hashable]
    spoiled: bool = False


class SlotReaders:
    """The slots that are out. Not for several threads."""

    def __init__(self) -> None:
        self._serials = itertools.count()
        self._lent: dict[int, _Lent] = {}

    def __len__(self) -> int:
        """Slots that somebody reads."""
        return len(self._lent)

    def publish(self, slot: Lendable, readers: Iterable[Hashable]) -> int:
        """A slot is the readers' from now on; its serial number."""
        serial = next(self._serials)
        self._lent[serial] = _Lent(slot, set(readers))
        self._settle(serial)
        return serial

    def read(self, reader: Hashable, serial: int) -> None:
        """A reader has read a slot.

        Raises:
            WireError: it does not have it.
        """
        lent = self._lent.get(serial)
        if lent is None or reader not in lent.readers:
            raise ProtocolError(f"word of slot {serial}, which it does not have")
        lent.readers.discard(reader)
        self._settle(serial)

    def gone(self, reader: Hashable, *, reading: bool = False) -> None:
        """A reader is gone; what it was ``reading``, because it was let go and still hands that out, is not reused."""
        for serial, lent in list(self._lent.items()):
            if reader in lent.readers:
                lent.readers.discard(reader)
                lent.spoiled = lent.spoiled or reading
                self._settle(serial)

    def held_by(self, reader: Hashable) -> int:
        """Slots that a reader has."""
        return sum(reader in lent.readers for lent in self._lent.values())

    def _settle(self, serial: int) -> None:
        if not self._lent[serial].readers:
            lent = self._lent.pop(serial)
            if lent.spoiled:
                lent.slot.discard()
            else:
                lent.slot.give_back()
