"""The setup of the GPU benchmarks: the device, sizes, interleaved rounds, and timing of asynchronous work."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from aiofeed.kernel.core.faces import DeviceBackend
from aiofeed.kernel.devices.backend import CpuBackend
from aiofeed.kernel.devices.resolve import resolve_devices
from aiofeed.reports.machine.environment import describe_accelerator, inspect_environment
from benchmarks import report
from benchmarks.command_line import print_progress
from benchmarks.figures import turns

Work = Callable[[], Mapping[str, float]]
"""Does the work once; returns measurements in addition to ``wall_s``."""

LEAD = 2
"""Steps by which the host may be ahead of the device, as in a training that reads its loss now and then."""


@dataclass
class Setup:
    """Settings of a benchmark.

    Args:
        device: "cuda", or a device backend; passed to feeders.
        rounds, quick, data: see ``benchmarks.harness.Settings``.
        limit_s: no round except the first starts that would probably end later than this after the creation.
        notes: sentences to print below the figures.
    """

    device: Any
    rounds: int
    quick: bool
    data: str | Path
    limit_s: float = math.inf
    clock: Callable[[], float] = time.perf_counter
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._until = self.clock() + self.limit_s

    @property
    def backend(self) -> DeviceBackend:
        """The device's backend, or the host's."""
        return cast("DeviceBackend", resolve_devices(self.device) or CpuBackend())

    @property
    def on_cuda(self) -> bool:
        return self.backend.device.type == "cuda"

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def interleave(self, contenders: Mapping[str, Work]) -> dict[str, list[Mapping[str, float]]]:
        """Measure every contender once per round, in rotating order, after one warm-up each."""
        samples: dict[str, list[Mapping[str, float]]] = {label: [] for label in contenders}
        for label, work in contenders.items():
            print_progress(f"warming up: {label}")
            work()
        labels = list(samples)
        longest = 0.0
        for number in range(self.rounds):
            started = self.clock()
            if number and started + longest > self._until:
                self.notes.append(f"{number} rounds instead of {self.rounds}: the time was over.")
                break
            for label in (labels[position] for position in turns(len(labels), number)):
                print_progress(f"round {number + 1} of {self.rounds}: {label}")
                samples[label].append(self.timed(contenders[label]))
            longest = max(longest, self.clock() - started)
        return samples

    def timed(self, work: Work) -> Mapping[str, float]:
        """Do ``work``; adds ``wall_s``, the seconds until the device has done it."""
        synchronize(self.backend)
        started = time.perf_counter()
        sample = work()
        synchronize(self.backend)
        return {**sample, "wall_s": time.perf_counter() - started}

    def conditions(self) -> str:
        """The device, its driver and bus, the versions, the host and the number of rounds, in one line."""
        accelerator, environment = describe_accelerator(self.backend), inspect_environment()
        memory = "" if accelerator.total_bytes is None else f", {accelerator.total_bytes / 2**30:.0f} GiB"
        parts = [
            f"{accelerator.name} ({accelerator.device}{memory})",
            f"driver {environment.nvidia_driver or 'unknown'}",
            *([f"PCIe {bus(self.backend.device.index or 0)}"] if self.on_cuda else []),
            *([f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"] if torch.version.cuda else []),
            report.conditions(self.rounds).rstrip("."),
            *[f"{name} {version}" for name, version in environment.decoders.items()],
        ]
        return "; ".join(parts) + "."


def bus(index: int) -> str:
    """The generation and the lanes of a device's bus, as reported by ``nvidia-smi``; "unknown" if that fails."""
    command = ["nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([*command, f"--id={index}"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().replace(", ", " x")


def synchronize(backend: DeviceBackend) -> None:
    """Wait for the current stream and the side stream."""
    for stream in (backend.side_stream(), backend.current_stream()):
        backend.record(stream).synchronize()


class CudaMark:
    """A timing event on the current stream. The host sleeps while it waits, to leave the core to a decoder."""

    def __init__(self, backend: DeviceBackend) -> None:
        cuda: Any = torch.cuda  # partly untyped
        self._event = cuda.Event(enable_timing=True, blocking=True)
        self._event.record(backend.current_stream())

    def wait(self) -> None:
        """Block until the device has reached the mark."""
        self._event.synchronize()

    def since(self, earlier: CudaMark) -> float:
        """Seconds between an earlier mark and this one; the device has reached both."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostMark:
    """The host's clock after the device has done the queued work, for devices whose events have no times."""

    def __init__(self, backend: DeviceBackend) -> None:
        backend.record(backend.current_stream()).synchronize()
        self._at = time.perf_counter()

    def wait(self) -> None:
        """Return at once, since the constructor has waited."""

    def since(self, earlier: HostMark) -> float:
        return self._at - earlier._at


def marker(backend: DeviceBackend) -> Callable[[], CudaMark | HostMark]:
    """A function that records marks on a device's current stream."""
    return (lambda: CudaMark(backend)) if backend.device.type == "cuda" else (lambda: HostMark(backend))


def drive(
    mark: Callable[[], Any], batches: Iterator[Any], step: Callable[[Any], object], *, settle: int, steps: int
) -> Mapping[str, float]:
    """Run steps, and measure those after the first ``settle``, in device time between marks in the consumer's stream.

    There is no synchronisation between the marks: as many batches are prefetched when the clock starts as when it
    stops, and the host's work costs no more than in a training. ``batches`` has at least ``settle + steps``, and
    ``settle`` is at least 1.

    Returns:
        ``step_s``: mean time from the end of a step to the end of the next; ``gap_s``: the part of it between the end
        of a step and the start of the next, in which the device has no work; ``waited_s``: the part of it in which the
        host waited for a batch, which costs nothing while the device is busy.
    """
    started: list[Any] = []
    ended: list[Any] = []
    waited_s = 0.0
    for number in range(settle + steps):
        requested = time.perf_counter()
        batch = next(batches)
        if number >= settle:
            waited_s += time.perf_counter() - requested
        started.append(mark())
        step(batch)
        ended.append(mark())
        if number >= LEAD:
            ended[number - LEAD].wait()
    ended[-1].wait()
    gaps_s = sum(started[number].since(ended[number - 1]) for number in range(settle, settle + steps))
    step_s = ended[-1].since(ended[settle - 1]) / steps
    return {"step_s": step_s, "gap_s": gaps_s / steps, "waited_s": waited_s / steps}


def steps_of(setup: Setup, feeder: Any, step: Callable[[Any], object], *, settle: int, steps: int) -> Work:
    """Work that runs ``drive`` on the batches of a feeder's epoch, with its start and its end outside the clock."""

    def work() -> Mapping[str, float]:
        with feeder:
            return drive(marker(setup.backend), iter(feeder), step, settle=settle, steps=steps)

    return work
