"""Formats results as plain text, Markdown and a picture, with a description of the machine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.figures import RATIO, Figure, Target

HEADER = ("", "median", "min to max", "target", "")
PAGE, CHART = "docs/benchmarks.md", "docs/readme-chart.svg"
SUMMARY_HEADER = ("workload", "speed / `DataLoader`", "min to max")
SUMMARY_ROWS = (
    ("Reads of 20 ms, 128 in flight", "Reads of 20 ms, 128 and 512 in flight, batch 64", "/ DataLoader, 2 workers"),
    ("Samples in memory", "60,000 samples in memory, batch 64, shuffled", "uint8: speed / DataLoader, no workers"),
    ("Three trainings, one server", "Three trainings on one host", "three attached / three DataLoaders"),
    (
        "JPEG 3000x2000, native / Pillow",
        "Backends for JPEGs, batch 64, second epoch",
        "3000x2000 to 224: speed, native / DataLoader, Pillow",
    ),
    (
        "JPEG 3000x2000, native / simplejpeg",
        "JPEG 3000x2000 to 224, batch 16, second epoch",
        "native / DataLoader, persistent, turbo",
    ),
    ("Files of 2 KB", "20,000 files of 2 KB, trivial decoder, batch 64", "speed / DataLoader, 2 workers"),
    (
        "JPEG 500x400, native / OpenCV",
        "JPEG 500x400 to 224, each with its fastest decoder, batch 64, second epoch",
        "/ DataLoader, persistent",
    ),
    ("JPEG 500x400, Pillow / Pillow", "JPEG 500x400 to 224, batch 64, second epoch", "speed / DataLoader, 2 workers"),
    (
        "JPEG 64x64, simplejpeg / simplejpeg",
        "20,000 JPEGs of 2 KB, 64x64, simplejpeg, batch 64, second epoch",
        "process:2 / DataLoader, persistent",
    ),
    (
        "JPEG 64x64, Pillow / Pillow",
        "20,000 JPEGs of 2 KB, 64x64, Pillow decode, batch 64, second epoch",
        "process:2 / DataLoader, persistent",
    ),
)
"""The rows of the summary: a label, a title in docs/benchmarks.md, and how the figure's name there ends."""


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


def section(result: Result, note: str = "") -> str:
    """All figures of a benchmark, for docs/benchmarks.md; ``note`` comes first."""
    return "\n\n".join(filter(None, [f"### {result.title}", note, markdown_table(HEADER, map(row, result.figures))]))


def markdown(sections: Sequence[str], conditions: str) -> str:
    """The results in docs/benchmarks.md."""
    return "\n\n".join([conditions, "![The ratios that have a target](benchmarks.png)", tally(sections), *sections])


def updated(old: str, results: Sequence[Result], conditions: str) -> str:
    """The results ``old`` of docs/benchmarks.md, with new sections for some benchmarks, which note their conditions."""
    head, *sections = old.strip().split("\n\n### ")
    found = {text.partition("\n")[0]: f"### {text}" for text in sections}
    found |= {result.title: section(result, conditions) for result in results}
    return markdown([*found.values()], head.partition("\n")[0])


_RATIO = re.compile(r"\| (.+?) \| ([\d.,]+) \| ([\d.,]+) to ([\d.,]+) \| (?:([≥≤]) ([\d.,]+))? *\|.*")


def ratios_in(text: str) -> list[tuple[str, Figure]]:
    """The ratios in the sections of docs/benchmarks.md, each with the title of its section."""
    found: list[tuple[str, Figure]] = []
    title = ""
    for line in text.splitlines():
        if line.startswith("### "):
            title = line.removeprefix("### ")
        if ratio := _RATIO.fullmatch(line):
            median, low, high = (float(ratio[group].replace(",", "")) for group in (2, 3, 4))
            target = Target(float(ratio[6].replace(",", "")), at_least=ratio[5] == "≥") if ratio[5] else None
            found.append((title, Figure(ratio[1], (low, median, high), target=target)))
    return found


def ratios_of_page(page: str) -> list[tuple[str, Figure]]:
    """The figures of ``SUMMARY_ROWS`` in the text of docs/benchmarks.md, by label: lowest, median and highest round.

    A figure that the page lacks is left out: its benchmark may need a library that the machine does not have.
    """
    rows = []
    for label, wanted, ending in SUMMARY_ROWS:
        rows += [
            (label, figure)
            for title, figure in ratios_in(page)
            if title == wanted and figure.what.endswith(ending) and " / " in figure.what
        ][:1]
    return rows


def summary_table(page: str) -> str:
    """The speed of aiofeed divided by that of ``DataLoader``, for each of ``SUMMARY_ROWS``; then the machine."""
    rows = [
        (label, f"**{number(figure.median)}**", f"{number(figure.low)} to {number(figure.high)}")
        for label, figure in ratios_of_page(page)
    ]
    machine = between(page, "results").partition("\n")[0]
    return "\n\n".join([markdown_table(SUMMARY_HEADER, rows), machine])


def tally(sections: Iterable[str]) -> str:
    """The number of targets that are met, and a list of those that are not."""
    met, title, short = 0, "", []
    for line in "\n".join(sections).splitlines():
        if line.startswith("### "):
            title = line.removeprefix("### ")
        met += line.endswith("| met |")
        if line.endswith("| SHORT |"):
            short.append(f"{title}: {line.split('|')[1].strip()}")
    counted = f"{met} of {met + len(short)} targets met"
    return counted + ("." if not short else "; short:\n\n" + "\n".join(f"- {name}" for name in short))


def picture(ratios: Sequence[tuple[str, Figure]], path: Path) -> None:
    """Draw the ratios with a target as bars with their spread; a line marks the target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [(f"{figure.what}\n{title}", figure) for title, figure in ratios if figure.target is not None]
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


def readme_chart(ratios: Sequence[tuple[str, Figure]], path: Path) -> None:
    """Bars from 1, the speed of ``DataLoader``, on a logarithmic scale; text stays text, so that the file is small."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"svg.fonttype": "none", "svg.hashsalt": "aiofeed", "font.family": "sans-serif", "font.size": 9}
    with pyplot.rc_context(style):
        chart, axes = pyplot.subplots(figsize=(7.5, 0.6 + 0.27 * len(ratios)), layout="constrained")
        for position, (_, figure) in enumerate(ratios):
            colour = "#4878a8" if figure.median >= 1 else "#c8553d"
            spread = [[figure.median - figure.low], [figure.high - figure.median]]
            bars = {"color": colour, "xerr": spread, "error_kw": {"ecolor": "0.3", "capsize": 2}}
            axes.barh(position, figure.median - 1, 0.62, left=1, **bars)
            at = (max(figure.high, 1), position)
            axes.annotate(f"{number(figure.median)}x", at, (5, 0), textcoords="offset points", va="center")
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(ratios)), [label for label, _ in ratios])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(0.5, 1.8 * max((figure.high for _, figure in ratios), default=1))
        ticks = [0.5, 1, 2, 5, 10, 20, 50]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("speed of aiofeed / speed of DataLoader (1)")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        chart.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(chart)


def between(text: str, name: str) -> str:
    """What is between ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    return text.partition(f"<!-- {name}:begin -->")[2].partition(f"<!-- {name}:end -->")[0].strip()


def replace_between(text: str, name: str, new: str) -> str:
    """``text`` with ``new`` between its ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected {begin} and {end}, once each and in this order")
    return text[: text.index(begin) + len(begin)] + "\n" + new.strip() + "\n" + text[text.index(end) :]


def write(results: Sequence[Result], conditions: str, project: Path, *, some: bool = False) -> list[Path]:
    """Put the results into docs/benchmarks.md, draw them beside it, and update its summary; returns the files.

    Args:
        results: Results.
        conditions: The machine and the number of rounds.
        project: The root of the project.
        some: Keep the results of other benchmarks.
    """
    page, image = project / PAGE, project / "docs/benchmarks.png"
    text = markdown([section(result) for result in results], conditions)
    if some:
        text = updated(between(page.read_text(encoding="utf-8"), "results"), results, conditions)
    _replace_in(page, "results", text)
    picture(ratios_in(text), image)
    return [page, image, write_summary(project)]


def write_summary(project: Path) -> Path:
    """Copy the ratios to ``DataLoader`` to the page's summary, and draw README.md's chart; returns the chart."""
    page = (project / PAGE).read_text(encoding="utf-8")
    _replace_in(project / PAGE, "summary", summary_table(page))
    readme_chart(ratios_of_page(page), project / CHART)
    return project / CHART


def _replace_in(path: Path, name: str, text: str) -> None:
    try:
        new = replace_between(path.read_text(encoding="utf-8"), name, text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    path.write_text(new, encoding="utf-8")


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


if __name__ == "__main__":
    print(f"wrote {write_summary(Path(__file__).parents[1])}")
