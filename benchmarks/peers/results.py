"""The cases on paper: tables in text and Markdown, and a picture with one panel per case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.figures import Figure
from benchmarks.peers.contest import BARE, OURS, Found
from benchmarks.peers.install import REQUIREMENTS, lines

PAGE, PICTURE, MARKERS = "docs/benchmarks.md", "docs/benchmarks-peers.png", "peers"

COLOURS = {"ours": "#c8553d", "bare": "#b8b8b8", "peer": "#4878a8"}


def result(name: str, found: Found) -> report.Result:
    """What is held against targets, as the other benchmarks have it."""
    return report.Result(name, found.title, found.targets)


def header(found: Found) -> list[str]:
    """The columns of the table, the spread beside the first of them."""
    most = max(found.columns.values(), key=len)
    names = [figure.what if figure.what != "rate" else found.unit for figure in most]
    return ["", names[0], "min to max", *names[1:]]


def rows(found: Found) -> Iterator[list[str]]:
    width = len(header(found))
    for label, figures in found.columns.items():
        cells = [report.number(figure.median, figure.unit) for figure in figures]
        first = figures[0]
        spread = f"{report.number(first.low, first.unit)} to {report.number(first.high, first.unit)}"
        filled = [label, cells[0], spread, *cells[1:]]
        yield filled + [""] * (width - len(filled))


def plain(name: str, found: Found) -> str:
    """For the terminal."""
    table = [header(found), *rows(found)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    text = [f"{found.title}  [{name}]"]
    for first, *rest in table:
        aligned = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        text.append("  " + "  ".join((first.ljust(widths[0]), *aligned)).rstrip())
    text += ["", *report.plain(result(name, found)).splitlines()[1:]]
    text += [f"  absent: {label}: {why}" for label, why in found.absent.items()]
    return "\n".join(text)


def markdown(results: Sequence[tuple[str, Found]], conditions: str) -> str:
    """Everything, case by case, for docs/benchmarks.md."""
    parts = [conditions, f"![What each loader does]({Path(PICTURE).name})"]
    parts.append(report.tally([result(name, found) for name, found in results]))
    for _, found in results:
        parts += [f"### {found.title}", report.markdown_table(header(found), list(rows(found)))]
        parts.append(report.markdown_table(report.HEADER, [report.row(figure) for figure in found.targets]))
        if found.absent:
            parts.append(
                "Absent: " + "; ".join(f"{label} ({escaped(why)})" for label, why in found.absent.items()) + "."
            )
    return "\n\n".join(parts)


def escaped(text: str) -> str:
    """``text`` without what Markdown would take for its own."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def picture(results: Sequence[tuple[str, Found]], path: Path) -> None:
    """One panel per case: the first column of its table as bars with their spread, aiofeed's in a colour of its own."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [1.1 + 0.24 * len(found.columns) for _, found in results]
    chart, panels = pyplot.subplots(
        len(results), 1, figsize=(9, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for panel, (_, found) in zip(panels[:, 0], results, strict=True):
        draw(panel, found)
    chart.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(chart)


def draw(panel: Any, found: Found) -> None:
    labels = list(found.columns)
    figures: list[Figure] = [found.columns[label][0] for label in labels]
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
    what = f"{found.unit or figures[0].what}{unit if unit.startswith('/') else f', {unit}'}; {more}"
    panel.set_xlabel(what, fontsize=8)
    panel.set_title(found.title, fontsize=9, loc="left")
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def write(results: Sequence[tuple[str, Found]], conditions: str, project: Path) -> list[Path]:
    """Put the results into docs/benchmarks.md, draw them beside it, and update README.md; returns the files."""
    page, image = project / PAGE, project / PICTURE
    page.write_text(report.replace_between(page.read_text(), MARKERS, markdown(results, conditions)))
    picture(results, image)
    return [page, image, *report.write_readme(project)]


def conditions(rounds: int) -> str:
    """The machine and the versions, the peers' included."""
    peers = [line.requirement.partition("==")[0] for line in lines(REQUIREMENTS.read_text()) if line.peer]
    found = [
        f"{name} {version}"
        for name in ("simplejpeg", "opencv-python-headless", *peers)
        if (version := report.installed(name))
    ]
    return f"{report.conditions(rounds)} {', '.join(found)}." if found else report.conditions(rounds)
