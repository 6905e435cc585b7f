"""Analyses a profiler's trace: the streams of copies, and how much of them ran in parallel with kernels. Pure.

The trace has Chrome's format, as exported by ``torch.profiler``: ``ts`` and ``dur`` in microseconds, ``cat`` "kernel"
or "gpu_memcpy", and ``args`` with ``device`` and ``stream``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """One kernel or copy.

    Args:
        name: the profiler's name: "Memcpy HtoD (Pinned -> Device)", or a kernel's name.
        kernel: whether it is a kernel; otherwise a copy.
        stream: device and stream.
        start_us: time of its start.
        end_us: time of its end.
    """

    name: str
    kernel: bool
    stream: tuple[int, int]
    start_us: float
    end_us: float

    @property
    def to_device(self) -> bool:
        """Whether it is a copy from the host to the device."""
        return not self.kernel and "htod" in self.name.lower()


@dataclass(frozen=True)
class Overlap:
    """Copies to the device, and their overlap with kernels.

    Args:
        copies: number of copies.
        kernels: number of kernels.
        beside_kernels: copies on a stream that has kernels too.
        pageable: copies that are not from page-locked memory.
        copied_us: time in which copies ran.
        hidden_us: time in which copies and kernels ran.
        busy_us: time in which kernels ran.
        whole_us: time from the start of the first kernel to the end of the last.
    """

    copies: int
    kernels: int
    beside_kernels: int
    pageable: int
    copied_us: float
    hidden_us: float
    busy_us: float
    whole_us: float

    @property
    def hidden(self) -> float:
        """Share of the copies' time in which kernels ran too."""
        return self.hidden_us / self.copied_us

    @property
    def idle(self) -> float:
        """Share of the time in which no kernel ran."""
        return 1 - self.busy_us / self.whole_us


def spans(trace: Mapping[str, Any]) -> list[Span]:
    """The kernels and copies of a trace, in the order of their start."""
    parsed = []
    for event in trace["traceEvents"]:
        kind = event.get("cat")
        if event.get("ph") != "X" or kind not in ("kernel", "gpu_memcpy"):
            continue
        # Each stream is a line of the trace, so pid and tid identify it too.
        args, start_us = event.get("args", {}), float(event["ts"])
        stream = int(args.get("device", event["pid"])), int(args.get("stream", event["tid"]))
        parsed.append(Span(event["name"], kind == "kernel", stream, start_us, start_us + float(event["dur"])))
    return sorted(parsed, key=lambda span: span.start_us)


def overlap(trace: Iterable[Span]) -> Overlap:
    """The overlap of copies to the device with kernels.

    Raises:
        ValueError: there is no copy to the device, or no kernel.
    """
    trace = list(trace)
    kernels = [span for span in trace if span.kernel]
    copies = [span for span in trace if span.to_device]
    if not kernels or not copies:
        raise ValueError(f"the trace has {len(kernels)} kernels and {len(copies)} copies to the device")
    computing = {span.stream for span in kernels}
    busy, copied = union(kernels), union(copies)
    return Overlap(
        copies=len(copies),
        kernels=len(kernels),
        beside_kernels=sum(span.stream in computing for span in copies),
        pageable=sum("pinned" not in span.name.lower() for span in copies),
        copied_us=length(copied),
        hidden_us=length(common(busy, copied)),
        busy_us=length(busy),
        whole_us=busy[-1][1] - busy[0][0],
    )


def union(running: Iterable[Span]) -> list[Interval]:
    """The disjoint intervals in which at least one of the spans ran, in order."""
    merged: list[Interval] = []
    for start, end in sorted((span.start_us, span.end_us) for span in running):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The intersection of two lists of disjoint intervals in order."""
    intersections = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            intersections.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return intersections


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
