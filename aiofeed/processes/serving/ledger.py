"""Who still reads which slot of a server's ring. A slot is free once everybody who was sent it has read it or is gone.

free ── lease ──> being filled ── published ──> the readers' ── the last Read, or end ──> free
          server                                consumers: copy
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aiofeed.processes.ipc.framing import WireError
from aiofeed.processes.ipc.passing import Passable
from aiofeed.processes.ipc.schema import NewSegment
from aiofeed.processes.ipc.slots import Slot, SlotMemory

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


class Ledger:
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
            raise WireError(f"word of slot {serial}, which it does not have")
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
