"""Do copies run in parallel with the step's kernels, in other streams?

The step and the batches of ``overlap``; all copies and all kernels, as torch's profiler records them in Chrome's
format: ``ts`` and ``dur`` in microseconds, ``cat`` "kernel" or "gpu_memcpy", ``args`` with ``device`` and ``stream``.

Targets: at least 0.9 of the copies' time while kernels run; no copy in a stream with kernels; all from pinned memory.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

import aiofeed
from aiofeed.kernel.core.faces import DeviceBackend
from benchmarks.figures import Figure, at_least, at_most, column, per
from benchmarks.gpu.overlap import Blank, step_of
from benchmarks.gpu.setup import Setup, drive, marker, synchronize

TITLE = "Copies during the step, by the profiler's trace"

Event = Mapping[str, Any]


def run(setup: Setup) -> list[Figure]:
    backend = setup.backend
    if not setup.on_cuda:
        return []
    batch_size, side = setup.size(64, 2), setup.size(224, 64)
    settle, steps = setup.size(40, 2), setup.size(40, 4)
    images = Blank((settle + steps + 10) * batch_size, side)
    step = step_of(setup)
    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        images, decode=images.decode, batch_size=batch_size, device=setup.device
    )

    def traced() -> Mapping[str, float]:
        with feeder:
            return asdict(profiled(backend, iter(feeder), step, settle=settle, steps=steps))

    rounds = setup.interleave({"feeder": traced})["feeder"]
    return [
        Figure("share of the copies' time while kernels run", column(rounds, "hidden"), target=at_least(0.9)),
        Figure("copies in a stream with kernels", column(rounds, "beside_kernels"), "copies", at_most(0)),
        Figure("copies from pageable memory", column(rounds, "pageable"), "copies", at_most(0)),
        Figure("share of the time in which no kernel runs", column(rounds, "idle")),
        Figure("one copy", per(column(rounds, "copied_us"), column(rounds, "copies")), "us"),
    ]


def profiled(
    backend: DeviceBackend, batches: Iterator[Any], step: Callable[[Any], object], *, settle: int, steps: int
) -> Overlap:
    """Profile ``steps`` steps, after ``settle`` steps that are not profiled; at least 2 of each."""
    drive(marker(backend), batches, step, settle=1, steps=settle - 1)
    return overlap(recorded(backend, lambda: drive(marker(backend), batches, step, settle=1, steps=steps - 1)))


def recorded(backend: DeviceBackend, work: Callable[[], object]) -> dict[str, Any]:
    """The profiler's trace of the device during ``work``, in Chrome's format."""
    synchronize(backend)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        synchronize(backend)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text(errors="replace"), strict=False)
    return trace


@dataclass(frozen=True)
class Overlap:
    """Copies to the device, and their overlap with kernels.

    Args:
        copies, beside_kernels, pageable: all copies; those on a stream that has kernels; those not page-locked.
        copied_us, hidden: time in which copies ran, and the share of it in which kernels ran too.
        idle: share of the time from the first kernel to the last in which none ran.
    """

    copies: int
    beside_kernels: int
    pageable: int
    copied_us: float
    hidden: float
    idle: float


def overlap(trace: Mapping[str, Any]) -> Overlap:
    """The overlap of copies to the device with kernels.

    Raises:
        ValueError: there is no copy to the device, or no kernel.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    # The profiler names a copy "Memcpy HtoD (Pinned -> Device)".
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "htod" in event["name"].lower()]
    if not kernels or not copies:
        raise ValueError(f"the trace has {len(kernels)} kernels and {len(copies)} copies to the device")
    computing = {stream_of(event) for event in kernels}
    busy_us, copied_us = running_us(kernels), running_us(copies)
    both_us = busy_us + copied_us - running_us([*kernels, *copies])
    whole_us = max(event["ts"] + event["dur"] for event in kernels) - min(event["ts"] for event in kernels)
    return Overlap(
        copies=len(copies),
        beside_kernels=sum(stream_of(event) in computing for event in copies),
        pageable=sum("pinned" not in event["name"].lower() for event in copies),
        copied_us=copied_us,
        hidden=both_us / copied_us,
        idle=1 - busy_us / whole_us,
    )


def stream_of(event: Event) -> tuple[int, int]:
    """Device and stream. Each stream is a line of the trace, so pid and tid identify it too."""
    args = event.get("args", {})
    return int(args.get("device", event["pid"])), int(args.get("stream", event["tid"]))


def running_us(events: Sequence[Event]) -> float:
    """The time in which at least one of the events ran."""
    total, ended = 0.0, -math.inf
    for start, end in sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events):
        total += max(0.0, end - max(start, ended))
        ended = max(ended, end)
    return total
