"""Formats results as plain text, Markdown and a picture, with a description of the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.figures import RATIO, Figure, Target

HEADER = ("", "median", "min to max", "target", "")
README_HEADER = ("", "measured", "target", "")


@dataclass(frozen=True)
class Result:
    """The figures of one benchmark."""

    name: str
    title: str
    figures: Sequence[Figure]


def number(value: float, unit: str = RATIO) -> str:
    """A number with its unit, to three significant digits."""
    if unit == RATIO:
        return f"{value:.2f}" if value >= 0.995 or value == 0 else f"{value:.3f}"
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits}{'' if unit.startswith('/') else ' '}{unit}"


def bound(target: Target | None, unit: str = RATIO) -> str:
    if target is None:
        return ""
    sign = "≥" if target.at_least else "≤"
    return f"{sign} {target.bound:.2f}" if unit == RATIO else f"{sign} {target.bound:g} {unit}"


def row(figure: Figure) -> tuple[str, ...]:
    spread = f"{number(figure.low, figure.unit)} to {number(figure.high, figure.unit)}"
    target = bound(figure.target, figure.unit)
    return figure.what, number(figure.median, figure.unit), spread, target, figure.verdict


def plain(result: Result) -> str:
    """A table for the terminal."""
    rows = [HEADER, *map(row, result.figures)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADER))]
    lines = [f"{result.title}  [{result.name}]"]
    for cells in rows:
        first, *rest = (
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        lines.append("  " + "  ".join((first, *rest)).rstrip())
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def markdown(results: Sequence[Result], conditions: str) -> str:
    """All figures, benchmark by benchmark, for docs/benchmarks.md."""
    parts = [conditions, "![The ratios that have a target](benchmarks.png)", tally(results)]
    for result in results:
        parts += [f"### {result.title}", markdown_table(HEADER, [row(figure) for figure in result.figures])]
    return "\n\n".join(parts)


def readme_table(results: Sequence[Result], conditions: str) -> str:
    """The first figure with a target of each benchmark, and the targets of all that are not met."""
    rows = []
    for result in results:
        for figure in [figure for figure in result.figures if figure.target is not None][:1]:
            median, target = number(figure.median, figure.unit), bound(figure.target, figure.unit)
            rows.append((f"{result.title}: {figure.what}", median, target, figure.verdict))
    return "\n\n".join([markdown_table(README_HEADER, rows), tally(results), conditions])


def tally(results: Sequence[Result]) -> str:
    """The number of targets that are met, and the names of those that are not."""
    judged = [(result, figure) for result in results for figure in result.figures if figure.target is not None]
    short = [f"{result.name}: {figure.what}" for result, figure in judged if figure.verdict != "met"]
    line = f"{len(judged) - len(short)} of {len(judged)} targets met"
    return line + ("." if not short else "; short: " + "; ".join(short) + ".")


def picture(results: Sequence[Result], path: Path) -> None:
    """Draw the ratios with a target as bars with their spread; a line marks the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [
        (f"{figure.what}\n{result.title}", figure)
        for result in results
        for figure in result.figures
        if figure.target is not None and figure.unit == RATIO
    ]
    chart, axes = pyplot.subplots(figsize=(9, 1 + 0.55 * len(bars)), layout="constrained")
    for position, (_, figure) in enumerate(bars):
        assert figure.target is not None
        spread = [[figure.median - figure.low], [figure.high - figure.median]]
        colour = "#4878a8" if figure.verdict == "met" else "#c8553d"
        axes.barh(position, figure.median, 0.55, color=colour, xerr=spread, error_kw={"ecolor": "0.25", "capsize": 2})
        axes.plot([figure.target.bound] * 2, [position - 0.4, position + 0.4], color="black", linewidth=1.6)
        label = f"{number(figure.median)}  ({bound(figure.target)})"
        axes.annotate(
            label, (max(figure.high, figure.target.bound), position), (6, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(
        0, 1.25 * max((max(figure.high, figure.target.bound) for _, figure in bars if figure.target), default=1)
    )
    axes.set_xlabel("ratio: median and spread over the rounds; black line: target; blue: met, red: short")
    axes.spines[["top", "right"]].set_visible(False)
    chart.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(chart)


def replace_between(text: str, name: str, new: str) -> str:
    """``text`` with ``new`` between its ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected {begin} and {end}, once each and in this order")
    return text[: text.index(begin) + len(begin)] + "\n" + new.strip() + "\n" + text[text.index(end) :]


def write(results: Sequence[Result], conditions: str, project: Path) -> list[Path]:
    """Write the results into README.md and docs/benchmarks.md, and the picture; returns the paths written."""
    written = []
    for path, name, text in (
        (project / "docs/benchmarks.md", "results", markdown(results, conditions)),
        (project / "README.md", "bench", readme_table(results, conditions)),
    ):
        try:
            new = replace_between(path.read_text(), name, text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        path.write_text(new)
        written.append(path)
    picture(results, project / "docs/benchmarks.png")
    return [*written, project / "docs/benchmarks.png"]


def conditions(rounds: int) -> str:
    """The machine, the versions and the number of rounds, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    parts = [
        f"{cpu_model()}, {cores} cores, {memory_gib:.0f} GiB RAM",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        *[f"{name} {found}" for name in ("torch", "numpy", "uvloop") if (found := installed(name))],
        pillow(),
        f"medians of {rounds} rounds",
    ]
    return "; ".join(parts) + "."


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def pillow() -> str:
    """The active one of Pillow and Pillow-SIMD, and its version."""
    try:
        import PIL
    except ImportError:
        return "no Pillow"
    return f"{'Pillow-SIMD' if '.post' in PIL.__version__ else 'Pillow'} {PIL.__version__}"
