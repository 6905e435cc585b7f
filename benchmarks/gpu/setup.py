"""What every GPU benchmark is given: the device, sizes, and ways to take the time of what a device does later."""

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
"""Does the work once; returns what else there is to say beside ``wall_s``."""


@dataclass(frozen=True)
class Setup:
    """What a benchmark was told.

    Args:
        device: what a feeder gets: "cuda", or a device backend.
        rounds: how often every contender has its turn.
        quick: tiny inputs: shows that everything runs, measures nothing.
        data: the folder that generated inputs are kept in.
        say: told of progress.
        note: told what belongs beside the figures: who was left out, say.
        until: by ``clock``; no round begins that would most likely end later, the first excepted.
        clock: seconds.
    """

    device: Any
    rounds: int
    quick: bool
    data: Path
    say: Callable[[str], None] = field(default=lambda line: None)
    note: Callable[[str], None] = field(default=lambda line: None)
    until: float = math.inf
    clock: Callable[[], float] = time.perf_counter

    @property
    def backend(self) -> DeviceBackend:
        """The device's backend; the host's where there is no other."""
        return cast("DeviceBackend", resolve_devices(self.device) or CpuBackend())

    @property
    def on_cuda(self) -> bool:
        return self.backend.device.type == "cuda"

    def size(self, full: int, quick: int) -> int:
        """One number for real runs, another for quick ones."""
        return quick if self.quick else full

    def interleave(self, contenders: Mapping[str, Work]) -> dict[str, list[Mapping[str, float]]]:
        """Measure every contender once per round, taking turns, after one turn each that does not count."""
        samples: dict[str, list[Mapping[str, float]]] = {label: [] for label in contenders}
        for label, work in contenders.items():
            self.say(f"warming up: {label}")
            work()
        labels = list(samples)
        longest = 0.0
        for number in range(self.rounds):
            began = self.clock()
            if number and began + longest > self.until:
                self.note(f"{number} rounds instead of {self.rounds}: the time was up.")
                break
            for position in turns(len(labels), number):
                label = labels[position]
                self.say(f"round {number + 1} of {self.rounds}: {label}")
                samples[label].append(self.timed(contenders[label]))
            longest = max(longest, self.clock() - began)
        return samples

    def timed(self, work: Work) -> Mapping[str, float]:
        """What ``work`` returns, and the seconds until the device had done it too."""
        synchronize(self.backend)
        started = time.perf_counter()
        found = work()
        synchronize(self.backend)
        return {**found, "wall_s": time.perf_counter() - started}


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
    """Device memory that the allocator holds; ``None`` where nobody counts it."""
    import torch

    if backend.device.type == "cuda":
        return torch.cuda.memory_reserved(backend.device)
    return getattr(backend, "reserved_bytes", None)
