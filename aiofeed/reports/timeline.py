"""Timelines: what a feeder did in the last seconds, as a trace for Perfetto, or as a picture that needs no viewer."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from aiofeed.kernel.core.statistics import Event
from aiofeed.kernel.core.types import public_in
from aiofeed.kernel.core.validation import counted
from aiofeed.reports.explanation import format_seconds

# The colours of what is in the lanes, from top to bottom, and their meaning.
COLOURS = {
    "read": "#4c78a8",
    "decode": "#f58518",
    "collate": "#b279a2",
    "copy": "#54a24b",
    "wait": "#e45756",
    "step": "#bab0ac",
}
MEANINGS = {
    "read": "reads from storage",
    "decode": "samples are decoded, or a Dataset is called",
    "collate": "samples become a batch",
    "copy": "a batch goes to the device",
    "wait": "the training waits for a batch",
    "step": "the training uses a batch",
}
# Added to the number of this process, which torch's profiler uses for its lanes.
PROCESSES = 1_000_000_000
PICTURE_WIDTH = 1800
LANE_HEIGHT = 18
MARGIN, TOP = 190, 40


@dataclass(frozen=True)
class Lane:
    """Events of one thread, or of reads that do not overlap, in order."""

    name: str
    events: Sequence[Event]


@public_in("aiofeed.reports")
class Timeline:
    """What a feeder did in the last seconds, of ``Feeder.timeline``. A notebook shows it as a picture that zooms.

    Example:
        ```python
        import aiofeed

        with aiofeed.Feeder(aiofeed.ImageFolder("photos"), decode=aiofeed.DecodeImage(size=64), batch_size=4) as feeder:
            batches = list(feeder)
            print(feeder.timeline())
        ```
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes

    def __repr__(self) -> str:
        return f"<Timeline: {title_of(self._lanes)}>"

    def _repr_html_(self) -> str:
        """Return a frame with the page, so that its styles and scripts are its own."""
        page = as_html(self._lanes).replace("&", "&amp;").replace('"', "&quot;")
        height = min(170 + len(self._lanes) * LANE_HEIGHT, 700)
        return f'<iframe title="aiofeed" style="width: 100%; height: {height}px; border: 0" srcdoc="{page}"></iframe>'


def write_timeline(
    events: deque[Event],
    path: str | os.PathLike[str] | None,
    *,
    seconds: float,
    merge: str | os.PathLike[str] | None = None,
) -> Timeline:
    """Write the events of the last seconds, and return them.

    Args:
        events: All events.
        path: ``.json`` for a trace, ``.html`` or ``.png`` for a picture; ``None`` writes nothing.
        seconds: How far it goes back from the last event.
        merge: A trace of ``torch.profiler`` that the events are added to.

    Raises:
        ValueError: ``path`` has another suffix, ``merge`` is no trace, or there are no events.
        ImportError: A ``.png`` needs Pillow.
    """
    path, merge = None if path is None else Path(path), None if merge is None else Path(merge)
    latest = sorted(events.copy(), key=lambda event: event[2])
    if not latest:
        raise ValueError("there is nothing to show: no batch was read, or the feeder was made with timeline=False")
    since = max(event[3] for event in latest) - seconds
    lanes = lanes_of([event for event in latest if event[3] >= since])
    if path is not None and path.suffix == ".json":
        trace = new_trace(lanes) if merge is None else merged(json.loads(merge.read_text()), lanes, merge)
        path.write_text(json.dumps(trace))
    elif merge is not None:
        got = "no path" if path is None else repr(str(path))
        raise ValueError(f"merge= makes a trace for Perfetto, so the path must end in .json, got {got}")
    elif path is None:
        pass
    elif path.suffix == ".html":
        path.write_text(as_html(lanes), encoding="utf-8")
    elif path.suffix == ".png":
        draw_png(lanes, path)
    else:
        raise ValueError(f"a timeline is .json for Perfetto, .html or .png for a picture, got {str(path)!r}")
    return Timeline(lanes)


def lanes_of(events: Sequence[Event]) -> list[Lane]:
    """Return the lanes of events that are sorted by their begin. Reads that overlap get lanes of their own."""

    def name_of(event: Event) -> tuple[int, int, str]:
        # Batches are put together in decode threads; waits and steps alternate in one lane.
        what = {"collate": "decode", "wait": "step"}.get(event[0], event[0])
        name = event[1].replace("aiofeed-", "")
        return [*COLOURS].index(what), len(name), name  # decode-2 before decode-10

    lanes: list[Lane] = []
    for (_, _, name), grouped in groupby(sorted(events, key=lambda event: (name_of(event), event[2])), name_of):
        rows: list[list[Event]] = []
        for event in grouped:
            # Within the same lane a collate may lie at the end of its decode job.
            row = next((row for row in rows if row[-1][3] <= event[2] or event[0] == "collate"), None)
            if row is None:
                row = []
                rows.append(row)
            row.append(event)
        lanes += [Lane(name if len(rows) == 1 else f"{name} {number}", row) for number, row in enumerate(rows, 1)]
    return lanes


# --- traces


def new_trace(lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return a trace of the lanes alone, with times since their first event."""
    first = min(lane.events[0][2] for lane in lanes)
    base_ns = time.time_ns() - int((time.perf_counter() - first) * 1e9)
    return {
        "traceEvents": trace_events(lanes, lambda seconds: (seconds - first) * 1e6),
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
    }


def merged(trace: Any, lanes: Sequence[Lane], path: Path) -> dict[str, Any]:
    """Return a trace of torch's profiler with the lanes on its clock.

    Raises:
        ValueError: It is no such trace.
    """
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{str(path)!r} is no trace of torch.profiler: it has no list of traceEvents")
    # torch counts microseconds of the wall clock since baseTimeNanoseconds.
    shift_ns = time.time_ns() - int(time.perf_counter() * 1e9) - int(trace.get("baseTimeNanoseconds", 0))
    added = trace_events(lanes, lambda seconds: seconds * 1e6 + shift_ns / 1e3)
    return {**trace, "traceEvents": [*trace["traceEvents"], *added]}


def trace_events(lanes: Sequence[Lane], us: Callable[[float], float]) -> list[dict[str, Any]]:
    """Return the events in the format of Chrome's traces, with arrows from reads over decode jobs and copies to steps.

    Args:
        lanes: The lanes.
        us: Converts seconds of ``perf_counter`` to the trace's microseconds.
    """
    found: list[dict[str, Any]] = [_metadata("process_name", 0, "aiofeed")]
    # For each batch that is not returned the threads and middles of its events in the order of their ends.
    ways: dict[int, list[tuple[int, float]]] = {}
    arrows = 0
    every = [(event, number) for number, lane in enumerate(lanes, 1) for event in lane.events]
    for number, lane in enumerate(lanes, 1):
        found += [
            _metadata("thread_name", number, lane.name),
            _metadata("thread_sort_index", number, number, "sort_index"),
        ]
    for (what, _, began, ended, batch, samples, nbytes), thread in sorted(every, key=lambda each: each[0][3]):
        event = {"ph": "X", "cat": "aiofeed", "name": f"{what} {batch}", "pid": PROCESSES + os.getpid(), "tid": thread}
        event |= {"ts": us(began), "dur": (ended - began) * 1e6}
        found.append(event | {"args": {"batch": batch, "samples": samples, "bytes": nbytes}})
        way = ways.setdefault(batch, [])
        way.append((thread, us((began + ended) / 2)))
        if what == "step":
            arrows += 1
            found += _arrow(arrows, ways.pop(batch))
    return found


def _metadata(name: str, thread: int, value: Any, argument: str = "name") -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": PROCESSES + os.getpid(), "tid": thread, "args": {argument: value}}


def _arrow(number: int, way: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Return the flow through the events of one batch."""
    phases = ["s", *["t"] * (len(way) - 2), "f"] if len(way) > 1 else []
    flow = {"id": number, "cat": "aiofeed", "name": "batch", "pid": PROCESSES + os.getpid(), "bp": "e"}
    return [flow | {"ph": phase, "tid": thread, "ts": at} for phase, (thread, at) in zip(phases, way, strict=False)]


# --- pictures


@dataclass(frozen=True)
class Box:
    """A rectangle of a picture, in pixels, and its text."""

    left: float
    top: float
    width: float
    height: float
    what: str
    text: str


def span_of(lanes: Sequence[Lane]) -> tuple[float, float]:
    """Return the begin of the first event, and the seconds to the end of the last one."""
    first = min(lane.events[0][2] for lane in lanes)
    return first, max(max(event[3] for lane in lanes for event in lane.events) - first, 1e-9)


def boxes_of(lanes: Sequence[Lane]) -> list[Box]:
    """Return the rectangles of all events."""
    first, seconds = span_of(lanes)
    scale = (PICTURE_WIDTH - MARGIN - 10) / seconds
    boxes = []
    for number, lane in enumerate(lanes):
        for what, _, began, ended, batch, samples, nbytes in lane.events:
            text = f"{what} of batch {batch}: {(ended - began) * 1e3:.2f} ms, {samples} samples"
            text += f", {nbytes / 1e6:.2f} MB" if nbytes else ""
            left, width = MARGIN + (began - first) * scale, (ended - began) * scale
            boxes.append(Box(left, TOP + number * LANE_HEIGHT, width, LANE_HEIGHT - 3, what, text))
    return boxes


def ticks_of(lanes: Sequence[Lane]) -> list[tuple[float, str]]:
    """Return the positions and texts of the time axis: five to ten of a round number of seconds."""
    seconds = span_of(lanes)[1]
    step = 10.0 ** len(str(int(seconds))) if seconds >= 1 else 1.0
    while seconds / step < 5:
        step /= 2 if str(step).lstrip("0.").startswith(("1", "2")) else 2.5
    scale = (PICTURE_WIDTH - MARGIN - 10) / seconds
    return [(MARGIN + at * step * scale, f"{at * step:g} s") for at in range(int(seconds / step) + 1)]


def title_of(lanes: Sequence[Lane]) -> str:
    """Return the batches that a training took, the time of all events, and the share that the training waited."""
    took: dict[str, list[float]] = {what: [] for what in COLOURS}
    for lane in lanes:
        for what, _, began, ended, *_ in lane.events:
            took[what].append(ended - began)
    waiting = sum(took["wait"]) / max(sum(took["wait"]) + sum(took["step"]), 1e-9)
    return f"{counted(len(took['wait']), 'batch')} in {format_seconds(span_of(lanes)[1])}, waiting {waiting:.0%}"


def as_html(lanes: Sequence[Lane]) -> str:
    """Return the page: timeline.html with the picture as SVG, the same pixels as of the image, without the margins."""
    events = [
        f"<rect class={box.what} x={box.left:.4f} y={box.top - TOP:g} width={box.width:.4f} height={box.height:g}>"
        f"<title>{escape(box.text)}</title></rect>"
        for box in boxes_of(lanes)
    ]
    parts = {
        "title": title_of(lanes),
        "colours": "\n".join(f".{what} {{ --colour: {colour}; }}" for what, colour in COLOURS.items()),
        "legend": "".join(f"<li class={what}>{what}: {MEANINGS[what]}" for what in COLOURS),
        "names": "".join(f"<div>{escape(lane.name)}</div>" for lane in lanes),
        "left": MARGIN,
        "width": PICTURE_WIDTH - MARGIN - 10,
        "height": len(lanes) * LANE_HEIGHT,
        "seconds": span_of(lanes)[1],
        "events": "".join(events),
    }
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return re.sub(r"\[(\w+)\]", lambda part: str(parts.get(part[1], part[0])), page)


def draw_png(lanes: Sequence[Lane], path: Path) -> None:
    """Draw the picture with Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ImportError('a .png needs Pillow: pip install "aiofeed[pillow]"; .html does not') from None
    image = Image.new("RGB", (PICTURE_WIDTH, 60 + len(lanes) * LANE_HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    left = MARGIN
    for what, colour in COLOURS.items():
        draw.rectangle((left, 6, left + 10, 16), fill=colour)
        draw.text((left + 14, 5), what, fill="black")
        left += 80
    for at, text in ticks_of(lanes):
        draw.line((at, 34, at, image.height), fill="#dddddd")
        draw.text((at, 22), text, fill="black")
    for number, lane in enumerate(lanes):
        draw.text((8, TOP + number * LANE_HEIGHT + 2), lane.name, fill="black")
    for box in boxes_of(lanes):
        draw.rectangle((box.left, box.top, box.left + box.width, box.top + box.height), fill=COLOURS[box.what])
    image.save(path)
