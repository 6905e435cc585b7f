"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): random numbers that need no state beyond 64 bits."""

from __future__ import annotations

MASK64 = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15


def finalize64(value: int) -> int:
    """SplitMix64's finalizer: every bit of the result depends on every bit of ``value``, of 64 bits."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def mix64(value: int) -> int:
    """One step of SplitMix64 from the state ``value``."""
    return finalize64((value + INCREMENT) & MASK64)


class SplitMix64:
    """The random numbers of one sample: SplitMix64, seeded through its finalizer.

    Finalizing the seed keeps seeds that differ by the increment from giving one shifted stream. A random
    crop with its flip costs 4 microseconds in all; ``random.Random(seed)`` costs as much before its first number.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = finalize64(seed & MASK64)

    def random(self) -> float:
        """The next number, uniform in [0, 1), 53 bits."""
        self._state = state = (self._state + INCREMENT) & MASK64
        return (finalize64(state) >> 11) * 2.0**-53
