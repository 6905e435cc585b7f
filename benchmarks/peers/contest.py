"""The parts of a case: its participants, their samples, and the figures with targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.figures import Figure, Sample, Target, at_least, cpu_us_per_item, per, rates
from benchmarks.harness import BenchmarkError, Contender, Settings, interleave
from benchmarks.peers import work

Way = tuple[str, str]
"""An adapter's module and one of its ways."""

OURS = "aiofeed"
BARE = " bare "


@dataclass(frozen=True)
class CaseResult:
    """The result of one case.

    Args:
        title: description of the work.
        unit: counted items, "images" or "reads".
        columns: figures by label, in the order of the table; the picture shows the first figure of each.
        targets: figures with targets.
        absent: participants that did not run, with the reason.
    """

    title: str
    unit: str
    columns: Mapping[str, Sequence[Figure]]
    targets: Sequence[Figure]
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Participants:
    """The participants of a run.

    Args:
        only: names of peers; empty: all. aiofeed and the bare contenders always take part.
        failures: why peers could not be installed, by name.
    """

    only: frozenset[str] = frozenset()
    failures: Mapping[str, str] = field(default_factory=dict)

    def divide(self, ways: Iterable[Way]) -> tuple[list[Way], dict[str, str]]:
        """The ways that can run, and the others with the reason; peers that are not in ``only`` are left out."""
        present: list[Way] = []
        absent: dict[str, str] = {}
        for name, way in ways:
            adapter = work.adapter(name)
            if self.only and adapter.NAME not in self.only and adapter.NAME != OURS:
                continue
            if gone := work.missing(name):
                why = self.failures.get(adapter.NAME) or f"{', '.join(gone)} is not installed"
                absent[work.label_of(name, way)] = why
            else:
                present.append((name, way))
        return present, absent


@dataclass(frozen=True)
class Race:
    """The samples of one race, by label, and the reasons of contenders that did not finish."""

    samples: Mapping[str, Sequence[Sample]]
    absent: Mapping[str, str]

    def rate(self, label: str) -> tuple[float, ...]:
        return rates(self.samples[label])

    def cpu_us(self, label: str) -> tuple[float, ...]:
        return cpu_us_per_item(self.samples[label])

    def median(self, label: str) -> float:
        return Figure(label, self.rate(label)).median

    def ours(self) -> list[str]:
        return [label for label in self.samples if label.startswith(OURS)]

    def peers(self) -> list[str]:
        return [label for label in self.samples if not label.startswith(OURS) and BARE not in label]

    def best(self, labels: Iterable[str]) -> str:
        """The fastest of ``labels``, by the median."""
        return max(labels, key=self.median)

    def speed(self, label: str, other: str, least: float | None = None) -> list[Figure]:
        """Speed of ``label`` relative to ``other``; empty if one of them is missing."""
        if label not in self.samples or other not in self.samples:
            return []
        target = None if least is None else at_least(least)
        return [Figure(f"speed: {label} / {other}", per(self.rate(label), self.rate(other)), target=target)]

    def cpu(self, label: str, other: str, target: Target) -> list[Figure]:
        """CPU time per item of ``label`` relative to ``other``; empty if one of them is missing."""
        if label not in self.samples or other not in self.samples:
            return []
        ratio = per(self.cpu_us(label), self.cpu_us(other))
        return [Figure(f"CPU per item: {label} / {other}", ratio, target=target)]

    def first(self, label: str, others: Sequence[str], what: str) -> list[Figure]:
        """Speed of ``label`` relative to the fastest of ``others``, which ``what`` describes; the target is 1."""
        if not others:
            return []
        best = self.best(others)
        ratio = per(self.rate(label), self.rate(best))
        return [Figure(f"speed: {label} / first of {what} ({best})", ratio, target=at_least(1.0))]

    def db(self, label: str) -> float:
        """Worst PSNR against Pillow at full scale, in dB; 0 if it was not measured."""
        return self.samples[label][0].get("worst_db", 0.0)

    def columns(self) -> dict[str, list[Figure]]:
        """Rate, CPU time and quality, label by label, the fastest first."""
        columns = {}
        for label in sorted(self.samples, key=self.median, reverse=True):
            figures = [Figure("rate", self.rate(label), "/s"), Figure("CPU per item", self.cpu_us(label), "us")]
            if self.db(label):
                figures.append(Figure("worst PSNR", (self.db(label),), "dB"))
            columns[label] = figures
        return columns


def race(contenders: Sequence[Contender], settings: Settings, absent: Mapping[str, str]) -> Race:
    """Measure the contenders in interleaved rounds. A peer that fails is left out, with the reason.

    Raises:
        BenchmarkError: aiofeed or a bare contender failed.
    """
    dropped: dict[str, str] = {}
    samples = interleave(contenders, settings, dropped)
    check(dropped)
    return Race(samples, {**absent, **dropped})


def check(dropped: Mapping[str, str]) -> None:
    """Raise ``BenchmarkError`` if aiofeed or a bare contender failed, which the others are compared with."""
    for label, why in dropped.items():
        if label.startswith(OURS) or BARE in label:
            raise BenchmarkError(f"{label}: {why}")
