"""Figures: values by round, their median and spread, and their targets. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RATIO = ""
"""The unit of a ratio."""


@dataclass(frozen=True)
class Target:
    """The least or the most that a figure should be, in its unit; a figure equal to the bound meets it."""

    bound: float
    at_least: bool

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def at_least(bound: float) -> Target:
    return Target(bound, at_least=True)


def at_most(bound: float) -> Target:
    return Target(bound, at_least=False)


@dataclass(frozen=True)
class Figure:
    """One line of the results: a quantity with a value per round, its unit, such as "us" or "/s", and a target."""

    what: str
    values: tuple[float, ...]
    unit: str = RATIO
    target: Target | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"figure {self.what!r} has no values")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def verdict(self) -> str:
        """ "met" or "SHORT", by the median; empty without a target."""
        if self.target is None:
            return ""
        return "met" if self.target.met(self.median) else "SHORT"


Sample = Mapping[str, float]
"""The measurements of one contender in one round."""


def column(samples: Sequence[Sample], name: str, scale: float = 1.0) -> tuple[float, ...]:
    """One quantity, round by round, times ``scale``."""
    return tuple(sample[name] * scale for sample in samples)


def per(values: Sequence[float], divisors: Sequence[float]) -> tuple[float, ...]:
    """The ratio within each round, since a disturbance of a round affects both sides."""
    return tuple(value / divisor for value, divisor in zip(values, divisors, strict=True))


class Race(dict[str, list[Sample]]):
    """The samples of contenders by label, round by round, and figures of them."""

    def column(self, label: str, name: str, scale: float = 1.0) -> tuple[float, ...]:
        """One quantity of a contender, round by round, times ``scale``."""
        return column(self[label], name, scale)

    def rate(self, label: str) -> tuple[float, ...]:
        """Items per second, round by round."""
        return per(self.column(label, "items"), self.column(label, "wall_s"))

    def cpu_us(self, label: str) -> tuple[float, ...]:
        """CPU time of the process tree per item, in microseconds, round by round."""
        return per(self.column(label, "cpu_s", 1e6), self.column(label, "items"))

    def speed(self, label: str, other: str, least: float | None = None, name: str = "") -> Figure:
        """Items per second of ``label`` divided by those of ``other``: "NAME: speed / OTHER"."""
        target = None if least is None else at_least(least)
        return Figure(f"{prefix(name)}speed / {other}", per(self.rate(label), self.rate(other)), target=target)

    def cpu(self, label: str, other: str, most: float | None = None, name: str = "") -> Figure:
        """CPU time per item of ``label`` divided by that of ``other``: "NAME: CPU / OTHER"."""
        target = None if most is None else at_most(most)
        return Figure(f"{prefix(name)}CPU / {other}", per(self.cpu_us(label), self.cpu_us(other)), target=target)

    def rates(self, items: str, name: str = "") -> list[Figure]:
        """The items per second of each contender: "NAME: ITEMS, LABEL"."""
        return [Figure(f"{prefix(name)}{items}, {label}", self.rate(label), "/s") for label in self]


def prefix(name: str) -> str:
    return f"{name}: " if name else ""


def turns(count: int, round_number: int) -> list[int]:
    """The order of ``count`` contenders in a round: each round begins with the next one."""
    return [(position + round_number) % count for position in range(count)]
