"""Shared memory that may be passed on: rings of engine processes, whose slots a server hands to its consumers.

The rings add their segments and drop them; the server holds those that its consumers read. A segment is known for as
long as any of them has it, and its memory is mapped here as long.
"""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.processes.ipc.shared_memory import Segment


@dataclass(eq=False)
class _Entry:
    address: int
    nbytes: int
    descriptor: int
    holders: int = 1
    spoiled: bool = False


class Passable:
    """Segments and their descriptors, by numbers of this process's own. For any thread.

    Args:
        slots: how many slots a server may have out at a time.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.numbers = itertools.count()
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}

    def add(self, segment: Segment, descriptor: int) -> int:
        """A ring has mapped a segment; the number to drop it by. The descriptor is taken over."""
        with self._lock:
            number = next(self.numbers)
            self._entries[number] = _Entry(segment.address, segment.nbytes, descriptor)
        return number

    def hold(self, memory: NDArray[Any]) -> tuple[int, int] | None:
        """Number and offset of the segment that a C-contiguous array lies in, which stays until it is dropped."""
        address = memory.__array_interface__["data"][0]
        with self._lock:
            for number, entry in self._entries.items():
                if entry.address <= address and address + memory.nbytes <= entry.address + entry.nbytes:
                    entry.holders += 1
                    return number, address - entry.address
        return None

    def drop(self, number: int, again: bool = True) -> None:
        """One holder less; where it was passed to somebody who may still read it, it is not written ``again``."""
        with self._lock:
            entry = self._entries[number]
            entry.spoiled = entry.spoiled or not again
            entry.holders -= 1
            if not entry.holders:
                os.close(self._entries.pop(number).descriptor)

    def spoiled(self, number: int) -> bool:
        """Whether somebody may still read a segment of whom nothing more is heard."""
        with self._lock:
            return self._entries[number].spoiled

    def known(self) -> set[int]:
        """The numbers of all segments that somebody has."""
        with self._lock:
            return set(self._entries)

    def descriptor(self, number: int) -> tuple[int, int]:
        """Bytes, and a descriptor of the caller's own, of a segment that the caller holds.

        Raises:
            OSError: there is no room for another descriptor.
        """
        with self._lock:
            entry = self._entries[number]
            return entry.nbytes, os.dup(entry.descriptor)
