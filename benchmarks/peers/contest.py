"""The parts of a case: its participants, their contenders and samples, figures, tables, and a picture of all cases."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import figures, jpeg, report
from benchmarks.figures import Figure, Target, at_least, per
from benchmarks.harness import KEEP_FREED_MEMORY, BenchmarkError, Contender, Measure, Settings, interleave
from benchmarks.peers.adapters import ADAPTERS
from benchmarks.peers.install import REQUIREMENTS, lines
from benchmarks.peers.work import IMPORTS, Decode, Epoch, Judge, Work, channels_first, checked, quiet_helpers

OURS = "aiofeed"
BARE = " bare "


@dataclass(frozen=True)
class CaseResult:
    """The result of one case.

    Args:
        unit: counted items, "images" or "reads".
        columns: figures by label, in the order of the table; the picture shows the first figure of each.
        absent: participants that did not run, with the reason.
    """

    title: str
    unit: str
    columns: Mapping[str, Sequence[Figure]]
    targets: Sequence[Figure]
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Participants:
    """The peers that take part (``only``; empty: all), and why some could not be installed, by name."""

    only: frozenset[str] = frozenset()
    failures: Mapping[str, str] = field(default_factory=dict)

    def divide(self, labels: Iterable[str]) -> tuple[list[str], dict[str, str]]:
        """The labels that can run, and the others with the reason; peers that are not in ``only`` are left out."""
        present: list[str] = []
        absent: dict[str, str] = {}
        for label in labels:
            name = label.partition(", ")[0]
            if self.only and name not in self.only and name != OURS:
                continue
            if gone := ADAPTERS[name].missing():
                absent[label] = self.failures.get(name) or f"{', '.join(gone)} is not installed"
            else:
                present.append(label)
        return present, absent


def contender(label: str, work: Mapping[str, Any], *, judged: bool = False) -> Contender:
    """The contender of a loader, the name of its adapter and one of its ways, with a comma; ``work`` is for ``Work``.

    ``judged``: also measure the quality of its pictures.
    """
    imports = (*ADAPTERS[label.partition(", ")[0]].imports, *IMPORTS[str(work["decoder"])])
    if judged:
        imports = (*imports, *IMPORTS["pillow"])
    return Contender(label, feed, {"label": label, "work": dict(work), "judged": judged}, imports)


@contextmanager
def epochs_of(label: str, work: Work) -> Iterator[Epoch]:
    """The epochs of a loader, with views [B, 3, H, W] of its images."""
    name, _, way = label.partition(", ")
    with ADAPTERS[name].loader(work, way) as epoch:
        yield lambda: ((channels_first(images), labels) for images, labels in epoch())


@contextmanager
def feed(label: str, work: Mapping[str, Any], judged: bool = False) -> Iterator[Measure]:
    """Warm up with one epoch, which gives the time of the first batch and the quality; then measure single epochs."""
    task = Work(**work)
    quiet_helpers()
    warm_up: dict[str, float] = {}
    shape = (3, task.side, task.side)
    ADAPTERS[label.partition(", ")[0]].prepare(task)
    judge = Judge(task.paths, task.targets, task.side)
    started = time.perf_counter()
    with epochs_of(label, task) as epoch:

        def measure() -> Mapping[str, float]:
            items = sum(checked(images, labels, shape) for images, labels in epoch())
            assert items == len(task.paths), f"{items} of {len(task.paths)} images"
            return {"items": items, **warm_up}

        for images, labels in epoch():
            warm_up.setdefault("first_s", time.perf_counter() - started)
            checked(images, labels, shape)
            if judged:
                judge.look(images, labels)
        if judged:
            warm_up["worst_db"] = judge.worst_db()
        yield measure


def bare(kind: str, work: Mapping[str, Any], workers: int = 2) -> Contender:
    """Bare "threads" or "processes" that only read and decode, 16 files at a time, without batches and labels."""
    options = {key: work[key] for key in ("folder", "side", "decoder")} | {"kind": kind, "workers": workers}
    label = f"two bare {kind}" if workers == 2 else f"one bare {kind.rstrip('s')}"
    return Contender(label, decode_only, options, IMPORTS[str(work["decoder"])])


@contextmanager
def decode_only(folder: str, side: int, decoder: str, kind: str, workers: int) -> Iterator[Measure]:
    quiet_helpers()
    way = jpeg.bare_threads if kind == "threads" else jpeg.bare_processes
    pieces = partial(jpeg.one_by_one, decode=Decode(decoder, side).file)
    with way(folder, pieces, side, workers) as measure:
        yield measure


class Race(figures.Race):
    """The samples of one race, by label, and the reasons of contenders that did not finish."""

    def __init__(self, samples: figures.Race, absent: Mapping[str, str]) -> None:
        super().__init__(samples)
        self.absent = absent

    def median(self, label: str) -> float:
        return Figure(label, self.rate(label)).median

    def ours(self) -> list[str]:
        return [label for label in self if label.startswith(OURS)]

    def peers(self) -> list[str]:
        return [label for label in self if not label.startswith(OURS) and BARE not in label]

    def best(self, labels: Iterable[str]) -> str:
        """The fastest of ``labels``, by the median."""
        return max(labels, key=self.median)

    def faster(self, label: str, other: str, least: float | None = None) -> list[Figure]:
        """Speed of ``label`` relative to ``other``; empty if one of them is missing."""
        if label not in self or other not in self:
            return []
        target = None if least is None else at_least(least)
        return [Figure(f"speed: {label} / {other}", per(self.rate(label), self.rate(other)), target=target)]

    def cheaper(self, label: str, other: str, target: Target) -> list[Figure]:
        """CPU time per item of ``label`` relative to ``other``; empty if one of them is missing."""
        if label not in self or other not in self:
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
        return self[label][0].get("worst_db", 0.0)

    def columns(self) -> dict[str, list[Figure]]:
        """Rate, CPU time and quality, label by label, the fastest first."""
        columns = {}
        for label in sorted(self, key=self.median, reverse=True):
            figures = [Figure("rate", self.rate(label), "/s"), Figure("CPU per item", self.cpu_us(label), "us")]
            if self.db(label):
                figures.append(Figure("worst PSNR", (self.db(label),), "dB"))
            columns[label] = figures
        return columns


def race(contenders: Sequence[Contender], settings: Settings, absent: Mapping[str, str]) -> Race:
    """Measure the contenders in interleaved rounds. A peer that fails is left out, with the reason; others raise.

    All processes keep freed memory: otherwise a bare process returns the pages of each image to the system and takes
    new ones for the next, and a loader that keeps its memory is faster than this bound.
    """
    dropped: dict[str, str] = {}
    with mock.patch.dict(os.environ, KEEP_FREED_MEMORY):
        samples = interleave(contenders, settings, dropped)
    check(dropped)
    return Race(samples, {**absent, **dropped})


def check(dropped: Mapping[str, str]) -> None:
    """Raise ``BenchmarkError`` if aiofeed or a bare contender failed, which the others are compared with."""
    for label, why in dropped.items():
        if label.startswith(OURS) or BARE in label:
            raise BenchmarkError(f"{label}: {why}")


PICTURE = "docs/benchmarks-peers.png"

COLOURS = {"ours": "#c8553d", "bare": "#b8b8b8", "peer": "#4878a8"}


def result(name: str, case: CaseResult) -> report.Result:
    """The figures with targets, in the form of the other benchmarks."""
    return report.Result(name, case.title, case.targets)


def header(case: CaseResult) -> list[str]:
    """The columns of the table; the first one is followed by its spread."""
    most = max(case.columns.values(), key=len)
    names = [figure.what if figure.what != "rate" else case.unit for figure in most]
    return ["", names[0], "min to max", *names[1:]]


def rows(case: CaseResult) -> Iterator[list[str]]:
    width = len(header(case))
    for label, found in case.columns.items():
        first, *rest = [report.number(figure.median, figure.unit) for figure in found]
        filled = [label, first, report.spread(found[0]), *rest]
        yield filled + [""] * (width - len(filled))


def plain(name: str, case: CaseResult) -> str:
    """For the terminal."""
    text = [report.aligned(f"{case.title}  [{name}]", [header(case), *rows(case)])]
    text += ["", *report.plain(result(name, case)).splitlines()[1:]]
    text += [f"  absent: {label}: {why}" for label, why in case.absent.items()]
    return "\n".join(text)


def picture(results: Sequence[tuple[str, CaseResult]], path: Path) -> None:
    """Draw one panel per case: the first column of its table as bars with their spread, aiofeed's in red."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [1.1 + 0.24 * len(case.columns) for _, case in results]
    chart, panels = pyplot.subplots(
        len(results), 1, figsize=(9, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for panel, (_, case) in zip(panels[:, 0], results, strict=True):
        draw(panel, case)
    chart.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(chart)


def draw(panel: Any, case: CaseResult) -> None:
    labels = list(case.columns)
    figures: list[Figure] = [case.columns[label][0] for label in labels]
    unit = figures[0].unit
    for position, (label, figure) in enumerate(zip(labels, figures, strict=True)):
        kind = "ours" if label.startswith(OURS) else "bare" if BARE in label else "peer"
        spread = [[figure.median - figure.low], [figure.high - figure.median]]
        style = {"color": COLOURS[kind], "xerr": spread, "error_kw": {"ecolor": "0.25", "capsize": 2}}
        panel.barh(position, figure.median, 0.7, **style)
        text = report.number(figure.median, figure.unit)
        panel.annotate(text, (figure.high, position), (5, 0), textcoords="offset points", va="center", fontsize=8)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.18 * max(figure.high for figure in figures))
    more = "more is better" if unit.startswith("/") else "less is better"
    what = f"{case.unit or figures[0].what}{unit if unit.startswith('/') else f', {unit}'}; {more}"
    panel.set_xlabel(what, fontsize=8)
    panel.set_title(case.title, fontsize=9, loc="left")
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def write(results: Sequence[tuple[str, CaseResult]], conditions: str, project: Path) -> list[Path]:
    """Put the results into docs/benchmarks.json, make the page of it, and draw the cases; returns the files."""
    picture(results, project / PICTURE)
    kept = [kept_result(name, case, conditions) for name, case in results]
    return [*report.write(kept, project), project / PICTURE]


def kept_result(name: str, case: CaseResult, conditions: str) -> report.Result:
    """All figures of a case, and the loaders that are absent, with the reason."""
    columns = [
        replace(figure, what=f"{figure.what if at else case.unit or figure.what}: {label}")
        for label, figures in case.columns.items()
        for at, figure in enumerate(figures)
    ]
    absent = "".join(f" Absent: {label} ({why})." for label, why in case.absent.items())
    return report.Result(f"peers {name}", case.title, [*columns, *case.targets], conditions + absent)


def conditions(rounds: int) -> str:
    """The machine and the versions, with those of the peers."""
    peers = [line.requirement.partition("==")[0] for line in lines(REQUIREMENTS.read_text()) if line.peer]
    versions = [
        f"{name} {version}"
        for name in ("simplejpeg", "opencv-python-headless", *peers)
        if (version := report.installed(name))
    ]
    return f"{report.conditions(rounds)} {', '.join(versions)}." if versions else report.conditions(rounds)
