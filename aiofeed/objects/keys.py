"""Keys of objects in one buffer of bytes: 8 bytes beside its text for each key, and no Python object."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ValueT = TypeVar("ValueT")

# Keys that are examined at once: bounds the temporary arrays.
_BLOCK = 1 << 18
_SLASH = ord("/")


class PackedSequence(Sequence[ValueT]):
    """Values that are stored as bytes, one after the other.

    Args:
        data: The bytes of all values.
        offsets: Where each begins, and where the last one ends.
    """

    def __init__(self, data: NDArray[np.uint8], offsets: NDArray[np.integer[Any]]) -> None:
        self.data = data
        self.offsets = offsets
        # Indexing these takes a fifth of the time of indexing the arrays.
        self._bytes, self._at = memoryview(data), memoryview(offsets)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arrays."""
        return type(self), (np.asarray(self.data), np.asarray(self.offsets))

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._at) - 1

    def __getitem__(self, index: Any, /) -> Any:
        """Return a value, or a list of values."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self._at) - 1:  # without a call of __len__
            raise IndexError(f"there are {len(self)} values")
        return self._value(self._bytes[self._at[index] : self._at[index + 1]])

    @abstractmethod
    def _value(self, data: memoryview) -> ValueT:
        """Return the value of its bytes."""


class PackedKeys(PackedSequence[str]):
    """Texts, as UTF-8; their offsets are 64-bit integers."""

    def _value(self, data: memoryview) -> str:
        return str(data, "utf-8", "surrogateescape")

    def take(self, selected: NDArray[np.int64]) -> PackedKeys:
        """Return the keys at these positions."""
        lengths = np.diff(self.offsets)[selected]
        offsets = np.zeros(len(selected) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        data = np.empty(int(offsets[-1]), np.uint8)
        for start in range(0, len(selected), _BLOCK):
            stop = min(start + _BLOCK, len(selected))
            first = int(offsets[start])
            inside = np.arange(int(offsets[stop]) - first)
            shift = self.offsets[selected[start:stop]] - (offsets[start:stop] - first)
            data[first : int(offsets[stop])] = self.data[inside + np.repeat(shift, lengths[start:stop])]
        return PackedKeys(data, offsets)

    def ends_with(self, endings: Sequence[str]) -> NDArray[np.bool_]:
        """Return whether each key ends with one of these texts of up to 7 ASCII letters and dots, in any case.

        A key must be longer than the text.
        """
        found = np.zeros(len(self), np.bool_)
        padded = np.concatenate([np.zeros(8, np.uint8), self.data[:8]])
        for start in range(0, len(self), _BLOCK):
            ends = self.offsets[start + 1 : start + _BLOCK + 1]
            at = ends[:, None] + np.arange(-8, 0)
            # The first eight bytes of the buffer have nothing before them.
            tails = np.where(at < 0, padded[np.minimum(at + 8, 15)], self.data[np.maximum(at, 0)])
            # Sets the bit by which small letters differ from large ones; a dot has it.
            words = (tails | np.uint8(0x20)).view(">u8")[:, 0]
            block = found[start : start + len(ends)]
            for ending in endings:
                mask = np.uint64((1 << 8 * len(ending)) - 1)
                block |= (words & mask) == np.uint64(int.from_bytes(ending.encode(), "big"))
        return found

    def slashes(self) -> NDArray[np.int64]:
        """Return the number of slashes in each key."""
        counts = np.empty(len(self), np.int64)
        for start in range(0, len(self), _BLOCK):
            offsets = self.offsets[start : start + _BLOCK + 1]
            places = np.flatnonzero(self.data[offsets[0] : offsets[-1]] == _SLASH) + offsets[0]
            counts[start : start + len(offsets) - 1] = np.diff(np.searchsorted(places, offsets))
        return counts


class KeyPacker:
    """Collects keys."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._offsets = array("q", [0])

    def add(self, keys: Iterable[str]) -> None:
        """Add keys at the end."""
        data, offsets = self._data, self._offsets
        for key in keys:
            data += key.encode("utf-8", "surrogateescape")
            offsets.append(len(data))

    def packed(self) -> PackedKeys:
        """Return the keys; nothing can be added afterwards."""
        return PackedKeys(np.frombuffer(self._data, np.uint8), np.frombuffer(self._offsets, np.int64))
