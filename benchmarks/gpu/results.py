"""The results of the parts, as JSON and as the page. Needs no device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.figures import Figure, Target
from benchmarks.gpu import MODULES

PAGE = "docs/benchmarks-gpu.md"


@dataclass(frozen=True)
class Part:
    """The result of one benchmark.

    Args:
        name: name of its module.
        title: heading of its table.
        figures: empty if it failed or does not apply.
        notes: sentences to print below the figures.
        failed: the error; empty if it did not fail.
        machine: the hardware, the versions, and the number of rounds.
        duration_s: duration of the run.
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
    parts = []
    for fields in json.loads(text):
        figures = tuple(_figure(figure) for figure in fields["figures"])
        parts.append(Part(**{**fields, "figures": figures, "notes": tuple(fields["notes"])}))
    return parts


def _figure(fields: dict[str, object]) -> Figure:
    target = fields["target"]
    return Figure(
        **{  # type: ignore[arg-type]
            **fields,
            "values": tuple(fields["values"]),  # type: ignore[arg-type]
            "target": None if target is None else Target(**target),  # type: ignore[arg-type]
        }
    )


def merged(before: Iterable[Part], later: Iterable[Part]) -> list[Part]:
    """One part per name, the last one, in the order of the modules."""
    by_name = {part.name: part for part in (*before, *later)}
    return [by_name[name] for name in MODULES if name in by_name]


def plain(part: Part) -> str:
    """A part for the terminal."""
    lines = [report.plain(part.result) if part.figures else f"{part.title}  [{part.name}]"]
    if not part.figures and not part.failed:
        lines.append("  does not apply here")
    if part.failed:
        lines.append(f"  FAILED: {part.failed}")
    lines += [f"  {note}" for note in part.notes]
    return "\n".join(lines)


def tally(parts: Sequence[Part]) -> str:
    """The number of targets that are met, the names of those that are not, and of the parts that failed."""
    line = report.tally(report.section(part.result) for part in parts)
    failed = [part.name for part in parts if part.failed]
    return line + (f"\n\nFailed: {', '.join(failed)}." if failed else "")


def markdown(parts: Sequence[Part]) -> str:
    """All parts, for the page. If all are of one machine, it is described once."""
    machines = {part.machine for part in parts if part.machine}
    text = [*machines] if len(machines) == 1 else []
    text.append(tally(parts))
    for part in parts:
        if not (part.figures or part.failed):
            continue
        text.append(f"### {part.title}")
        if len(machines) > 1 and part.machine:
            text.append(part.machine)
        if part.figures:
            text.append(report.markdown_table(report.HEADER, [report.row(figure) for figure in part.figures]))
        if part.failed:
            text.append(f"Failed: {part.failed}")
        text += part.notes
    return "\n\n".join(text)


def write(parts: Sequence[Part], project: Path) -> Path:
    """Write the parts into the page."""
    path = project / PAGE
    path.write_text(report.replace_between(path.read_text(), "results", markdown(parts)))
    return path
