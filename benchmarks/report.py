"""Formats results for the terminal, keeps them in docs/benchmarks.json, and fills in the page and its chart.

``python -m benchmarks.report`` fills in the page and draws the chart again, without measuring.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.figures import RATIO, Figure, Target

HEADER = ("", "median", "min to max", "target", "")
DATA, PAGE, CHART = "docs/benchmarks.json", "docs/benchmarks.md", "docs/readme-chart.svg"
FRONT = "docs/index.md"
_ANSWER = re.compile(r"^\| ([^|]+) \| <!-- ([^:]+): (.+?) -->[^|]*\|[^|]*\|", re.MULTILINE)
"""A row of the page: its label, in a comment a benchmark and one of its figures, then that figure and its spread."""
_NUMBER = re.compile(r"<!-- ([^:]+): (.+?) --> \*\*[^*]*\*\*")
"""The same on the first page of the documentation, without label and spread."""


@dataclass(frozen=True)
class Result:
    """The figures of one benchmark, with the machine, the versions and the number of rounds."""

    name: str
    title: str
    figures: Sequence[Figure]
    conditions: str = ""


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


def spread(figure: Figure) -> str:
    return f"{number(figure.low, figure.unit)} to {number(figure.high, figure.unit)}"


def row(figure: Figure) -> tuple[str, ...]:
    middle, target = number(figure.median, figure.unit), bound(figure.target, figure.unit)
    return figure.what, middle, spread(figure), target, figure.verdict


def plain(result: Result) -> str:
    """A table for the terminal."""
    return aligned(f"{result.title}  [{result.name}]", [HEADER, *map(row, result.figures)])


def aligned(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A table in text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [title]
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  " + "  ".join((first.ljust(widths[0]), *cells)).rstrip())
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def load(path: Path) -> dict[str, Result]:
    """The results in a file, by name."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Result(name, fields["title"], [figure_of(**each) for each in fields["figures"]], fields["conditions"])
        for name, fields in found.items()
    }


def figure_of(what: str, values: list[float], unit: str = RATIO, target: dict[str, Any] | None = None) -> Figure:
    return Figure(what, tuple(values), unit, None if target is None else Target(**target))


def save(results: Mapping[str, Result], path: Path) -> None:
    """Write results; one line per figure, so that a difference can be read."""
    parts = []
    for name, result in results.items():
        fields = [{key: value for key, value in asdict(figure).items() if value} for figure in result.figures]
        figures = ",\n".join(json.dumps(each, ensure_ascii=False) for each in fields)
        title, conditions = (json.dumps(text, ensure_ascii=False) for text in (result.title, result.conditions))
        parts.append(f'"{name}": {{"title": {title}, "conditions": {conditions}, "figures": [\n{figures}]}}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def write(results: Iterable[Result], project: Path) -> list[Path]:
    """Replace the results of the same names in docs/benchmarks.json; fill in the page, and draw the chart."""
    save(load(project / DATA) | {result.name: result for result in results}, project / DATA)
    return [project / DATA, *draw(project)]


def draw(project: Path) -> list[Path]:
    """Fill in the figures on the page, and draw README.md's chart of them, from docs/benchmarks.json."""
    page, chart, results = project / PAGE, project / CHART, load(project / DATA)
    text, answers = answered(page.read_text(encoding="utf-8"), results)
    page.write_text(text, encoding="utf-8")
    readme_chart(answers, chart)
    front = project / FRONT
    if front.exists():
        front.write_text(front_page(front.read_text(encoding="utf-8"), results), encoding="utf-8")
    from benchmarks import cores  # which formats by this module

    return [page, chart, *cores.fill(project, results)]


def answered(page: str, results: Mapping[str, Result]) -> tuple[str, list[tuple[str, Figure]]]:
    """The page with the figures that its rows name, and these figures by label; those without a result stay."""
    answers: list[tuple[str, Figure]] = []

    def fill(row: re.Match[str]) -> str:
        label, name, what = row.groups()
        for figure in results[name].figures if name in results else ():
            if figure.what == what:
                answers.append((label, figure))
                return (
                    f"| {label} | <!-- {name}: {what} --> **{number(figure.median, figure.unit)}** | {spread(figure)} |"
                )
        return row[0]

    return _ANSWER.sub(fill, page), answers


def front_page(page: str, results: Mapping[str, Result]) -> str:
    """The first page of the documentation with the figures that it names."""

    def fill(found: re.Match[str]) -> str:
        name, what = found.groups()
        [figure] = [each for each in results[name].figures if each.what == what]
        return f"<!-- {name}: {what} --> **{number(figure.median, figure.unit)}**"

    return _NUMBER.sub(fill, page)


def tally(results: Iterable[Result]) -> str:
    """The number of targets that are met, and a list of those that are not."""
    judged = [(result.title, figure) for result in results for figure in result.figures if figure.target]
    short = [f"- {title}: {figure.what}" for title, figure in judged if figure.verdict == "SHORT"]
    counted = f"{len(judged) - len(short)} of {len(judged)} targets met"
    return "\n".join([f"{counted}; short:\n", *short]) if short else f"{counted}."


def readme_chart(ratios: Sequence[tuple[str, Figure]], path: Path) -> None:
    """Bars from 1, the speed of ``DataLoader``, on a logarithmic scale, fastest first.

    The text can be read at a width of 400 pixels, and the colours follow the reader's light or dark scheme.
    """
    ordered = sorted(ratios, key=lambda each: -each[1].median)
    most = max((figure.high for _, figure in ratios), default=1)
    left, wide, top, row = 206, 196, 56, 24
    low, bottom = math.log(0.7), top + row * len(ordered)

    def at(value: float) -> float:
        return round(left + wide * (math.log(max(value, 0.7)) - low) / (math.log(max(most, 2)) - low), 1)

    shapes = []
    for tick in (1, 2, 5, 10, 20, 50):
        if tick <= max(most, 2):
            shapes.append(f'<path class="{"one" if tick == 1 else "grid"}" d="M{at(tick):g} {top - 4}V{bottom + 4}"/>')
            shapes.append(f'<text class="small" x="{at(tick):g}" y="{bottom + 19}" text-anchor="middle">{tick}x</text>')
    for number_of, (label, figure) in enumerate(ordered):
        y, (begin, end) = top + row * number_of, sorted((at(1), at(figure.median)))
        kind = "faster" if figure.median >= 1 else "slower"
        beside = max(at(figure.high), at(1)) + 6
        shapes += [
            f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>',
            f'<rect class="{kind}" x="{begin:g}" y="{y + 5}" width="{end - begin:g}" height="14"/>',
            f'<path class="spread" d="M{at(figure.low):g} {y + 12}H{at(figure.high):g}"/>',
            f'<text class="{kind}" x="{beside:g}" y="{y + 16}">{figure.median:.2g}x</text>',
        ]
    subtitle = "1x is the speed of DataLoader; longer is faster; two cores, no GPU"
    text = svg("Samples per second, compared with DataLoader", subtitle, bottom + 32, _CHART_STYLE, shapes)
    path.write_text(text, encoding="utf-8", newline="\n")


def svg(title: str, subtitle: str, height: int, style: str, shapes: Sequence[str]) -> str:
    """A picture of 460 x ``height`` with a title on a card."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 460 {height}" width="600" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{title}</title>",
        f"<style>{style}</style>",
        f'<rect class="card" width="460" height="{height}" rx="6"/>',
        f'<text x="14" y="22" font-weight="bold">{title}</text>',
        f'<text class="small" x="14" y="40">{subtitle}</text>',
    )
    return "\n".join([*head, *shapes, "</svg>", ""])


_CHART_STYLE = (
    "text{fill:#1f2328}.small{fill:#59636e;font-size:12px}.card{fill:#fff}.grid{stroke:#d1d9e0}"
    ".one,.spread{stroke:#1f2328;stroke-width:1.5}rect.faster{fill:#4c8ed9}rect.slower{fill:#e0703a}"
    "text.faster,text.slower{font-weight:bold}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9aa4b0}.card{fill:#161b22}.grid{stroke:#30363d}"
    ".one,.spread{stroke:#e6edf3}rect.faster{fill:#3f7fc8}rect.slower{fill:#d0632f}}"
)


def replace_between(text: str, name: str, new: str) -> str:
    """``text`` with ``new`` between its ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected {begin} and {end}, once each and in this order")
    return text[: text.index(begin) + len(begin)] + "\n" + new.strip() + "\n" + text[text.index(end) :]


def conditions(rounds: int) -> str:
    """The machine, the versions and the number of rounds, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    parts = [
        f"{cpu_model()}, {cores} cores, {memory_gib:.0f} GiB RAM",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        *[f"{name} {found}" for name in ("torch", "numpy", "uvloop") if (found := installed(name))],
        *(pillow(), f"medians of {rounds} rounds"),
    ]
    return "; ".join(parts) + "."


def cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def pillow() -> str:
    """The active one of Pillow and Pillow-SIMD, and its version."""
    try:
        import PIL
    except ImportError:
        return "no Pillow"
    return f"{'Pillow-SIMD' if '.post' in PIL.__version__ else 'Pillow'} {PIL.__version__}"


if __name__ == "__main__":
    for written in draw(Path(__file__).parents[1]):
        print(f"wrote {written}")
