"""Do copies run in parallel with the step's kernels, in other streams?

The step and the batches of ``overlap``, in the middle of an epoch; all copies to the device and all kernels, as
recorded by torch's profiler.

Targets: at least 0.9 of the copies' time while kernels run; no copy in a stream with kernels; all from pinned memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiofeed
from aiofeed.devices.backend import DeviceBackend
from benchmarks.figures import Figure, at_least, at_most, column
from benchmarks.gpu.clock import drive, marker
from benchmarks.gpu.overlap import Blank, step_of
from benchmarks.gpu.setup import Setup, synchronize
from benchmarks.gpu.timeline import Overlap, overlap, spans

TITLE = "Copies during the step, by the profiler's trace"


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
            return figures_of(profiled(backend, iter(feeder), step, settle=settle, steps=steps))

    rounds = setup.interleave({"feeder": traced})["feeder"]
    return [
        Figure("share of the copies' time while kernels run", column(rounds, "hidden"), target=at_least(0.9)),
        Figure("copies in a stream with kernels", column(rounds, "beside_kernels"), "copies", at_most(0)),
        Figure("copies from pageable memory", column(rounds, "pageable"), "copies", at_most(0)),
        Figure("share of the time in which no kernel runs", column(rounds, "idle")),
        Figure("one copy", column(rounds, "copy_us"), "us"),
    ]


def figures_of(measured: Overlap) -> Mapping[str, float]:
    return {
        "hidden": measured.hidden,
        "beside_kernels": float(measured.beside_kernels),
        "pageable": float(measured.pageable),
        "idle": measured.idle,
        "copy_us": measured.copied_us / measured.copies,
    }


def profiled(
    backend: DeviceBackend, batches: Iterator[Any], step: Callable[[Any], object], *, settle: int, steps: int
) -> Overlap:
    """Profile ``steps`` steps, after ``settle`` steps that are not profiled; at least 2 of each."""
    drive(marker(backend), batches, step, settle=1, steps=settle - 1)
    return overlap(spans(recorded(backend, lambda: drive(marker(backend), batches, step, settle=1, steps=steps - 1))))


def recorded(backend: DeviceBackend, work: Callable[[], object]) -> dict[str, Any]:
    """The profiler's trace of the device during ``work``, in Chrome's format."""
    from torch.profiler import ProfilerActivity, profile

    synchronize(backend)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        synchronize(backend)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text(errors="replace"), strict=False)
    return trace
