"""A server's side of the ring, on its loop: it takes a feeder's batches and gives them to whoever is attached.

One task feeds: it waits for room in the ring, takes a batch, puts it into a slot and tells those who are to read it.
All else happens in calls of the loop: consumers come, join, read, leave and die. Nothing is locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from aiofeed.core.errors import as_exception
from aiofeed.processes.ipc.address import Listener
from aiofeed.processes.ipc.error_codec import describe
from aiofeed.processes.ipc.passing import Passable
from aiofeed.processes.serving.consumers import Consumer, ConsumerRegistry
from aiofeed.processes.serving.protocol import EpochEnded, EpochFailed, EpochStarted, Probe, ServerClosed
from aiofeed.processes.serving.published import BatchPublisher, ServedMemory, SlotReaders
from aiofeed.runtime.thread_pool import ThreadPool

if TYPE_CHECKING:
    from aiofeed.processes.serving.device_ring import DeviceRing

log = logging.getLogger("aiofeed.processes")

Mode = Literal["broadcast", "shard"]
Slow = Literal["wait", "drop"]
When = Literal["epoch", "batch"]

# What those who are still attached may take to hear that the server was closed.
FAREWELL_S = 2.0
# Who reads nothing for so long while others wait is named in the log.
HELD_UP_S = 10.0


class Epochs(Protocol):
    """A feeder, as far as it is served."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Any: ...

    def epochs(self, n: int) -> Iterator[int]:
        """The numbers of the epochs that are left of ``n``."""
        ...


@dataclass(frozen=True)
class ServeOptions:
    """How a feeder is served; see ``aiofeed.serve``."""

    mode: Mode = "broadcast"
    lag: int = 4
    slow: Slow = "wait"
    join: When = "epoch"
    min_consumers: int = 1


class Hub:
    """Serves one feeder.

    Args:
        feeder: iterated here alone; asked for an epoch's iterator in a thread of the executor.
        listener: where consumers come; closed with the hub.
        terms: how it is served.
        executor: copies large batches, and begins epochs.
        passable: memory of the feeder's that consumers may be given as it is.
        ring: slots on the device of the feeder's batches; ``None`` for batches in host memory.
    """

    def __init__(
        self,
        feeder: Epochs,
        listener: Listener,
        terms: ServeOptions,
        executor: ThreadPool,
        passable: Passable,
        ring: DeviceRing | None = None,
    ) -> None:
        self._feeder = feeder
        self._terms = terms
        self._executor = executor
        self._lots = BatchPublisher(ServedMemory(keep=terms.lag + 1, passable=passable), ring, executor)
        self._ledger = SlotReaders()
        self._changed = asyncio.Event()
        self._members: list[Consumer] = []
        self._blamed: set[Consumer] = set()
        self._turn = 0
        self._epoch = -1
        self._reception = ConsumerRegistry(listener, self, batches=self._share(0, terms.min_consumers))

    @property
    def consumers(self) -> list[Consumer]:
        """Those who are attached; a snapshot, for any thread."""
        return list(self._reception.consumers)

    async def run(self, epochs: int, *, go_on: bool) -> None:
        """Feed so many epochs, then say goodbye.

        Args:
            epochs: up to which one, as ``Feeder.epochs`` has it.
            go_on: whether a failure, which everybody is told of, ends an epoch only.

        Raises:
            Exception: what the feeder raised.
        """
        with self._lots.entered():
            await self._run(epochs, go_on=go_on)

    async def _run(self, epochs: int, *, go_on: bool) -> None:
        reason = "it was closed"
        try:
            self._reception.open()
            await self._until(lambda: self._joining() >= self._terms.min_consumers)
            for epoch in self._feeder.epochs(epochs):
                await self._until(lambda: self._joining() > 0)
                try:
                    await self._feed(epoch)
                except Exception as error:
                    self._fail(error)
                    if not go_on:
                        reason = f"its feeder failed: {type(error).__name__}: {error}"
                        raise
                    log.error("epoch %d failed, and those who were fed were told: %s", epoch, error)
            reason = "it has fed all its epochs"
        finally:
            await self._close(reason)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _joining(self) -> int:
        return sum(consumer.ticket is not None for consumer in self._reception.consumers)

    async def _feed(self, epoch: int) -> None:
        """One epoch, for those who have joined by now; it is left when none of them is there any more."""
        self._epoch = epoch
        self._members = []
        self._turn = 0
        self._admit(0)
        iterator = await asyncio.get_running_loop().run_in_executor(self._executor, iter, self._feeder)
        try:
            number = 0
            while await self._room():
                try:
                    batch = await anext(iterator)
                except StopAsyncIteration:
                    for consumer in self._members:
                        consumer.send(EpochEnded(consumer.joined))
                    return
                await self._publish(number, batch)
                del batch
                number += 1
                if self._terms.join == "batch":
                    self._admit(number)
        finally:
            iterator.close()

    def _admit(self, number: int) -> None:
        """Those who wait to be fed are, from batch ``number`` of the epoch on."""
        new = [each for each in self._reception.consumers if each.ticket is not None and each not in self._members]
        self._members.extend(new)
        for consumer in new if number else self._members:
            assert consumer.ticket is not None
            consumer.joined = consumer.ticket
            place = (self._members.index(consumer) - self._turn) % len(self._members)
            consumer.send(EpochStarted(consumer.joined, self._epoch, self._share(number, len(self._members), place)))

    def _share(self, number: int, members: int, place: int = 0) -> int:
        left = len(self._feeder) - number
        if self._terms.mode == "broadcast":
            return left
        return max(0, -(-(left - place) // members))

    async def _room(self) -> bool:
        """Wait for a free slot; whether anybody is there to be fed."""
        while self._members and len(self._ledger) >= self._terms.lag:
            if self._terms.slow == "drop":
                self._drop_slow()
                if len(self._ledger) < self._terms.lag:
                    break
            await self._wait_for_readers()
        return bool(self._members)

    async def _wait_for_readers(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(HELD_UP_S):
                await self._changed.wait()
        except TimeoutError:
            for consumer, slots in self._slow().items():
                if consumer not in self._blamed:
                    self._blamed.add(consumer)
                    log.warning(
                        "consumer %d holds up the others: it has read none of its %d batches for %.0f s. One that is "
                        'not iterated any more is to be closed; slow="drop" lets such a one go',
                        consumer.pid,
                        slots,
                        HELD_UP_S,
                    )

    def _drop_slow(self) -> None:
        for consumer, slots in self._slow().items():
            log.warning("consumer %d is dropped: it is %d batches behind", consumer.pid, slots)
            consumer.dismiss(
                f'it was dropped: it fell {slots} batches behind another consumer, and the server has slow="drop" '
                f"and lag={self._terms.lag}"
            )

    def _slow(self) -> dict[Consumer, int]:
        """Those who have every slot of the ring, and how many, while somebody waits who has read all of its own."""
        held = {consumer: self._ledger.held_by(consumer) for consumer in self._members}
        return {each: slots for each, slots in held.items() if slots >= self._terms.lag and 0 in held.values()}

    async def _publish(self, number: int, batch: Any) -> None:
        lot = await self._lots.fill(batch, self._next_readers)
        readers = self._readers()
        serial = self._ledger.publish(lot, readers)
        for consumer in readers:
            try:
                given, descriptors = self._lots.given(lot, consumer, serial, number)
            except OSError as error:
                consumer.dismiss(f"the server can pass on no memory: {error.strerror} (raise `ulimit -n` there)")
                continue
            consumer.send(given, descriptors)
            consumer.batches += 1

    def _next_readers(self) -> list[Consumer]:
        if self._terms.mode == "broadcast" or not self._members:
            return list(self._members)
        return [self._members[self._turn % len(self._members)]]

    def _readers(self) -> list[Consumer]:
        readers = self._next_readers()
        if self._terms.mode == "shard" and readers:
            self._turn = self._turn % len(self._members) + 1
        return readers

    def _fail(self, error: BaseException) -> None:
        failure = describe(as_exception(error))
        members, self._members = self._members, []
        for consumer in members:
            consumer.ticket = None
            consumer.send(EpochFailed(consumer.joined, failure))

    async def _close(self, reason: str) -> None:
        self._reception.close_door()
        for consumer in self.consumers:
            consumer.send(ServerClosed(reason))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FAREWELL_S
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            while self._reception.consumers and loop.time() < deadline:
                self._changed.clear()
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
        self._reception.close()
        self._lots.close()

    # --- what consumers say, on the loop ---

    def device(self) -> str:
        """What the device of the batches is called; "" for host memory."""
        return self._lots.device

    def trial(self, consumer: Consumer) -> Probe:
        """A consumer is on that device."""
        return self._lots.trial(consumer)

    def joined(self, consumer: Consumer) -> None:
        """A consumer wants to be fed."""
        self._changed.set()

    def left(self, consumer: Consumer) -> None:
        """A consumer wants no more, or is gone."""
        if consumer in self._members:
            at = self._members.index(consumer)
            del self._members[at]
            # The turn stays with whoever has it.
            self._turn -= at < self._turn
        self._changed.set()

    def gone(self, consumer: Consumer, *, reading: bool) -> None:
        """A consumer is gone, with all that it had; one that was let go may still be ``reading`` that."""
        self._blamed.discard(consumer)
        self._lots.gone(consumer, reading=reading)
        self._ledger.gone(consumer, reading=reading)
        self.left(consumer)

    def read(self, consumer: Consumer, serial: int) -> None:
        """A consumer has read a slot."""
        self._ledger.read(consumer, serial)
        self._blamed.discard(consumer)
        self._changed.set()
