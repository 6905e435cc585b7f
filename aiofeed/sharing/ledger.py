"""Who still reads which slot of a server's ring. A slot is free once everybody who was sent it has read it or is gone.

free ── lease ──> being filled ── published ──> the readers' ── the last Read, or end ──> free
          server                                consumers: copy
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiofeed.sharing.messages import NewSegment
from aiofeed.sharing.segments import Segment
from aiofeed.sharing.slots import SlotMemory
from aiofeed.sharing.wire import WireError


class ServedMemory(SlotMemory):
    """Shared memory whose descriptors are kept for whoever attaches later."""

    advice = "in the server's script, make collate_fn (or the decoder) return those"

    def segments_for(
        self, segments: Sequence[Segment], known: set[int]
    ) -> tuple[list[NewSegment], list[int], list[int]]:
        """What a consumer that has ``known`` is to learn, with descriptors of its own, and to forget."""
        with self._lock:
            new = [segment for segment in segments if segment.number not in known]
            retired = sorted(known - self._unsent.keys())
            descriptors: list[int] = []
            try:
                descriptors.extend(os.dup(self._unsent[segment.number]) for segment in new)
            except OSError:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise
        known.difference_update(retired)
        known.update(segment.number for segment in new)
        return [NewSegment(segment.number, segment.nbytes) for segment in new], descriptors, retired

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
