"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a random number generator with 64 bits of state."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MASK64 = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15


def finalize64(value: int) -> int:
    """SplitMix64's finalizer: every bit of the result depends on every bit of the 64-bit ``value``."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def mix64(value: int) -> int:
    """Return one step of SplitMix64 from the state ``value``."""
    return finalize64((value + INCREMENT) & MASK64)


class SplitMix64:
    """The random numbers of one sample.

    The seed is finalized first: otherwise seeds that differ by the increment would give the same stream, shifted. The
    numbers for a random crop and a flip take 4 us; ``random.Random(seed)`` takes as long before its first number.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        # Finalized, because seeds that differ by the increment would give the same stream, shifted.
        self._state = finalize64(seed & MASK64)

    def random(self) -> float:
        """Return the next number, uniform in [0, 1), 53 bits."""
        self._state = state = (self._state + INCREMENT) & MASK64
        return (finalize64(state) >> 11) * 2.0**-53


def seed_from(rng: torch.Generator | None, decoder: object) -> int:
    """Return the 64-bit seed that a random decoder draws from ``rng``; ``ValueError`` if that is ``None``."""
    if rng is None:
        raise ValueError(f"{decoder!r} is random: it needs rng, a torch.Generator")
    import torch

    return int(torch.randint(2**63 - 1, (), generator=rng, device="cpu"))
