"""What a device did, by the profiler's trace: which copies ran on which stream, and under how much work. Pure.

The trace is Chrome's, as ``torch.profiler`` exports it: ``ts`` and ``dur`` in microseconds, ``cat`` "kernel" or
"gpu_memcpy", and ``args`` with ``device`` and ``stream``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Something that a device did.

    Args:
        name: as the profiler has it: "Memcpy HtoD (Pinned -> Device)", a kernel's name.
        kernel: whether it was a kernel; otherwise a copy.
        stream: device and stream.
        start_us: when it began.
        end_us: when it had ended.
    """

    name: str
    kernel: bool
    stream: tuple[int, int]
    start_us: float
    end_us: float

    @property
    def to_device(self) -> bool:
        """Whether it was a copy from the host to the device."""
        return not self.kernel and "htod" in self.name.lower()


@dataclass(frozen=True)
class Overlap:
    """Copies to the device beside kernels.

    Args:
        copies: how many there were.
        kernels: how many there were.
        beside_kernels: of the copies, those on a stream on which kernels ran too.
        pageable: of the copies, those that were not from page-locked memory.
        copied_us: time in which copies ran.
        hidden_us: of it, the part in which kernels ran too.
        busy_us: time in which kernels ran.
        whole_us: from the beginning of the first kernel to the end of the last.
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
        """Share of the copies' time that was under kernels."""
        return self.hidden_us / self.copied_us

    @property
    def idle(self) -> float:
        """Share of the time in which no kernel ran."""
        return 1 - self.busy_us / self.whole_us


def spans(trace: Mapping[str, Any]) -> list[Span]:
    """The kernels and copies of a trace, in the order of their beginning."""
    found = []
    for event in trace["traceEvents"]:
        kind = event.get("cat")
        if event.get("ph") != "X" or kind not in ("kernel", "gpu_memcpy"):
            continue
        # Each stream has a line of its own, so that what names the line would do as well.
        args, start_us = event.get("args", {}), float(event["ts"])
        stream = int(args.get("device", event["pid"])), int(args.get("stream", event["tid"]))
        found.append(Span(event["name"], kind == "kernel", stream, start_us, start_us + float(event["dur"])))
    return sorted(found, key=lambda span: span.start_us)


def overlap(found: Iterable[Span]) -> Overlap:
    """How much of the copies to the device ran under kernels.

    Raises:
        ValueError: there is no copy to the device, or no kernel.
    """
    found = list(found)
    kernels = [span for span in found if span.kernel]
    copies = [span for span in found if span.to_device]
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


def union(found: Iterable[Span]) -> list[Interval]:
    """The times in which at least one of them ran, in order, apart from one another."""
    merged: list[Interval] = []
    for start, end in sorted((span.start_us, span.end_us) for span in found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The times that are in both; each is in order, and apart from one another."""
    found = []
    at = other = 0
    while at < len(first) and other < len(second):
        start, end = max(first[at][0], second[other][0]), min(first[at][1], second[other][1])
        if start < end:
            found.append((start, end))
        if first[at][1] < second[other][1]:
            at += 1
        else:
            other += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
