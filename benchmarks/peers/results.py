"""Formats the cases as tables in text, as results to keep, and as a picture with one panel per case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.figures import Figure
from benchmarks.peers.contest import BARE, OURS, CaseResult
from benchmarks.peers.install import REQUIREMENTS, lines

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
    for label, figures in case.columns.items():
        first, *rest = [report.number(figure.median, figure.unit) for figure in figures]
        filled = [label, first, report.spread(figures[0]), *rest]
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
