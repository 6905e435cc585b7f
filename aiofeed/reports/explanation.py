"""What ``Feeder.explain`` returns, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from aiofeed.kernel.core.types import public_in


@dataclass(frozen=True)
class StageTimes:
    """The time that one stage takes for a sample.

    Args:
        name: "read", "decode", "collate", "copy", "hand-over" or "step".
        time_s: Seconds per sample, of one thread or one read.
        cpu_s: Seconds of it on a processor; ``None`` if not measured.
        samples_per_s: The most samples per second that this stage can process with its threads or reads; ``None`` if
            it took no time.
        resource: The resource that limits the stage, for example "cores".
    """

    name: str
    time_s: float
    cpu_s: float | None
    samples_per_s: float | None
    resource: str


@dataclass(frozen=True)
class Advice:
    """One change that helps.

    Args:
        text: The change.
        gain: The predicted number of times as many samples per second; ``None`` if it cannot be predicted.
        at_most: Why ``gain`` is an upper bound; "" if it is a prediction.
    """

    text: str
    gain: float | None = None
    at_most: str = ""

    def __str__(self) -> str:
        if self.gain is None:
            return f"{self.text} (gain not predictable)"
        kind, reason = ("at most", f": {self.at_most}") if self.at_most else ("predicted:", "")
        return f"{self.text} ({kind} {self.gain:.2f} times as many samples/s{reason})"


@dataclass(frozen=True)
class RankTimes:
    """The figures of one rank.

    Args:
        rank: Its number.
        samples_per_s: Samples per second of this rank.
        waiting: The share of its time in which its training waits for batches.
        step_s: Seconds of one of its steps, without that wait.
        stage, resource: Its limit, as of ``Explanation``.
        possible: The most samples per second that its stage ``stage`` can process.
    """

    rank: int
    samples_per_s: float
    waiting: float
    step_s: float
    stage: str
    resource: str
    possible: float


@public_in("aiofeed.reports")
@dataclass(frozen=True)
class Explanation:
    """Where the time of an epoch went: the limit with its evidence, a table of stages, and advice. ``print`` it.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        feeder = aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=224), batch_size=2)
        for images, labels in feeder:
            pass
        explanation = feeder.explain()
        print(explanation.stage, explanation.advice)
        print(explanation)  # all, as a table
        ```

    Args:
        verdict: The limit and its evidence, in one sentence.
        stage: The stage that limits training: "sampler", "read", "decode", "collate", "copy", "hand-over", "step", or
            "first batch" for the time before it; "" if there were too few batches to tell.
        resource: The resource that limits the stage: "cores", "GIL", "storage latency", "memory_bytes" and others.
        samples_per_s: Samples per second, without the first batch.
        waiting: The share of the time in which training waits for batches, without the first one.
        stages: The times of each stage. Stages that took no time are left out.
        advice: Changes that help, the simplest one first. Empty if the step is the limit.
        ranks: With ``explain(ranks=True)`` the figures of each rank.
        unit: What the figures are of: "samples", or "batches" of unknown size.
    """

    verdict: str
    stage: str
    resource: str
    samples_per_s: float = 0.0
    waiting: float = 0.0
    stages: tuple[StageTimes, ...] = ()
    advice: tuple[Advice, ...] = ()
    ranks: tuple[RankTimes, ...] = ()
    unit: str = "samples"

    def __str__(self) -> str:
        lines = [self.verdict]
        for table in self._tables():
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines.append("")
            for row in table:
                cells = (cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True))
                lines.append("  ".join((row[0].ljust(widths[0]), *cells, row[-1])).rstrip())
        lines += ["", *(f"- {advice}" for advice in self.advice)] if self.advice else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the same report for a notebook."""
        parts = [f"<p><b>{escape(self.verdict)}</b></p>"]
        for head, *rows in self._tables():
            body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
            parts.append(f"<table><thead><tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table>")
        if self.advice:
            parts.append(f"<ul>{''.join(f'<li>{escape(str(advice))}</li>' for advice in self.advice)}</ul>")
        return "".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain numbers, strings, lists and dicts, for example for a log."""
        fields = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def _tables(self) -> list[list[tuple[str, ...]]]:
        tables: list[list[tuple[str, ...]]] = []
        if self.stages:
            one = "sample" if self.unit == "samples" else "batch"
            head = ("stage", f"CPU/{one}", f"waits/{one}", f"{self.unit}/s now", "possible", "runs into")
            tables.append([head, *(self._row(stage) for stage in self.stages)])
        if self.ranks:
            head = ("rank", "samples/s", "waits", "step", "possible", "limit")
            rows = [
                (
                    str(rank.rank),
                    f"{rank.samples_per_s:,.0f}",
                    f"{rank.waiting:.0%}",
                    format_seconds(rank.step_s),
                    f"{rank.possible:,.0f}",
                    f"{rank.stage}: {rank.resource}",
                )
                for rank in self.ranks
            ]
            tables.append([head, *rows])
        return tables

    def _row(self, stage: StageTimes) -> tuple[str, ...]:
        waits_s = stage.time_s if stage.cpu_s is None else max(stage.time_s - stage.cpu_s, 0.0)
        return (
            stage.name,
            "-" if stage.cpu_s is None else format_seconds(stage.cpu_s),
            # A step is not taken apart: its time is that of the user's code.
            format_seconds(waits_s) if stage.name != "step" else f"{format_seconds(waits_s)} in all",
            f"{self.samples_per_s:,.0f}",
            "-" if stage.samples_per_s is None else f"{stage.samples_per_s:,.0f}",
            stage.resource,
        )


def _cells(tag: str, row: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)


def format_seconds(seconds: float) -> str:
    """Return a duration: ``"12 us"``, ``"3.4 ms"``, ``"1.2 s"``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"
