"""The setup of the GPU benchmarks: the device, sizes, and timing of asynchronous work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from aiofeed.devices.backend import CpuBackend, DeviceBackend
from aiofeed.devices.resolve import resolve_devices
from benchmarks.figures import turns

Work = Callable[[], Mapping[str, float]]
"""Does the work once; returns measurements in addition to ``wall_s``."""


@dataclass(frozen=True)
class Setup:
    """Settings of a benchmark.

    Args:
        device: "cuda", or a device backend; passed to feeders.
        rounds: measurements of every contender.
        quick: tiny inputs, to check that everything runs.
        data: folder of generated inputs.
        progress: called with a line of progress.
        note: called with a sentence to print below the figures.
        until: time of ``clock``; no round except the first starts that would probably end later.
        clock: time in seconds.
    """

    device: Any
    rounds: int
    quick: bool
    data: Path
    progress: Callable[[str], None] = field(default=lambda line: None)
    note: Callable[[str], None] = field(default=lambda line: None)
    until: float = math.inf
    clock: Callable[[], float] = time.perf_counter

    @property
    def backend(self) -> DeviceBackend:
        """The device's backend, or the host's."""
        return cast("DeviceBackend", resolve_devices(self.device) or CpuBackend())

    @property
    def on_cuda(self) -> bool:
        return self.backend.device.type == "cuda"

    def size(self, full: int, quick: int) -> int:
        """``full`` for real runs, ``quick`` for quick ones."""
        return quick if self.quick else full

    def interleave(self, contenders: Mapping[str, Work]) -> dict[str, list[Mapping[str, float]]]:
        """Measure every contender once per round, in rotating order, after one warm-up each."""
        samples: dict[str, list[Mapping[str, float]]] = {label: [] for label in contenders}
        for label, work in contenders.items():
            self.progress(f"warming up: {label}")
            work()
        labels = list(samples)
        longest = 0.0
        for number in range(self.rounds):
            started = self.clock()
            if number and started + longest > self.until:
                self.note(f"{number} rounds instead of {self.rounds}: the time was over.")
                break
            for position in turns(len(labels), number):
                label = labels[position]
                self.progress(f"round {number + 1} of {self.rounds}: {label}")
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


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def synchronize(backend: DeviceBackend) -> None:
    """Wait for the current stream and the side stream."""
    for stream in (backend.side_stream(), backend.current_stream()):
        backend.record(stream).synchronize()


def pinned(backend: DeviceBackend, nbytes: int) -> Any:
    """A uint8 tensor in page-locked memory, filled."""
    import torch

    memory = torch.from_numpy(backend.pin(nbytes))
    memory.fill_(1)
    return memory


def reserved_bytes(backend: DeviceBackend) -> int | None:
    """Device memory that the allocator has reserved; ``None`` if the backend does not report it."""
    import torch

    if backend.device.type == "cuda":
        return torch.cuda.memory_reserved(backend.device)
    return getattr(backend, "reserved_bytes", None)
