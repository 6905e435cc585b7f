"""The results of the parts, as JSON and as the page. Needs no device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.figures import Figure
from benchmarks.gpu import MODULES

PAGE = "docs/benchmarks-gpu.md"


@dataclass(frozen=True)
class Part:
    """The result of one benchmark.

    Args:
        figures: empty if it failed or does not apply.
        notes: sentences to print below the figures.
        failed: the error; empty if it did not fail.
        machine: the hardware, the versions, and the number of rounds.
        real: whether it ran on a GPU with real inputs.
    """

    name: str
    title: str
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    failed: str = ""
    machine: str = ""
    duration_s: float = 0.0
    real: bool = True

    @property
    def result(self) -> report.Result:
        return report.Result(self.name, self.title, self.figures)


def to_json(parts: Iterable[Part]) -> str:
    return json.dumps([asdict(part) for part in parts], indent=1)


def from_json(text: str) -> list[Part]:
    """Parse the text of ``to_json``."""
    found = []
    for fields in json.loads(text):
        figures = tuple(report.figure_of(**each) for each in fields["figures"])
        found.append(Part(**{**fields, "figures": figures, "notes": tuple(fields["notes"])}))
    return found


def merged(before: Iterable[Part], later: Iterable[Part]) -> list[Part]:
    """One part per name, the last one, in the order of the modules."""
    by_name = {part.name: part for part in (*before, *later)}
    return [by_name[name] for name in MODULES if name in by_name]


def plain(part: Part) -> str:
    """A part for the terminal."""
    lines = [report.plain(part.result) if part.figures else f"{part.title}  [{part.name}]"]
    if part.failed or not part.figures:
        lines.append(f"  FAILED: {part.failed}" if part.failed else "  does not apply here")
    return "\n".join([*lines, *(f"  {note}" for note in part.notes)])


def tally(parts: Sequence[Part]) -> str:
    """The number of targets that are met, the names of those that are not, and of the parts that failed."""
    line = report.tally(part.result for part in parts)
    failed = [part.name for part in parts if part.failed]
    return line + (f"\n\nFailed: {', '.join(failed)}." if failed else "")


def markdown(parts: Sequence[Part]) -> str:
    """All parts, for the page: figures without targets. If all are of one machine, it is described once."""
    machines = {part.machine for part in parts if part.machine}
    text = [*(machines if len(machines) == 1 else ())]
    for part in parts:
        if part.figures or part.failed:
            rows = [report.row(figure)[:3] for figure in part.figures]
            text += [f"### {part.title}", part.machine if len(machines) > 1 else ""]
            text.append(report.markdown_table(report.HEADER[:3], rows) if rows else "")
            text += [f"Failed: {part.failed}" if part.failed else "", *part.notes]
    return "\n\n".join(filter(None, text))


def write(parts: Sequence[Part], project: Path) -> Path:
    """Write the parts into the page."""
    path = project / PAGE
    path.write_text(report.replace_between(path.read_text(), "results", markdown(parts)))
    return path
