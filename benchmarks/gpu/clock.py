"""Measures steps in device time, between marks in the consumer's stream.

There is no synchronisation between the marks: as many batches are prefetched when the clock starts as when it stops,
and the host's work costs no more than in a training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from aiofeed.devices.backend import DeviceBackend

LEAD = 2
"""Steps by which the host may be ahead of the device, as in a training that reads its loss now and then."""


class Mark(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block until the device has reached the mark."""
        ...

    def since(self, earlier: Any) -> float:
        """Seconds between an earlier mark and this one; the device has reached both."""
        ...


class CudaMark:
    """A timing event on the current stream. The host sleeps while it waits, to leave the core to a decoder."""

    def __init__(self, backend: DeviceBackend) -> None:
        import torch

        cuda: Any = torch.cuda  # partly untyped
        self._event = cuda.Event(enable_timing=True, blocking=True)
        self._event.record(backend.current_stream())

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: CudaMark) -> float:
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


def marker(backend: DeviceBackend) -> Callable[[], Mark]:
    """A function that records marks on a device's current stream."""
    return (lambda: CudaMark(backend)) if backend.device.type == "cuda" else (lambda: HostMark(backend))


def drive(
    mark: Callable[[], Mark], batches: Iterator[Any], step: Callable[[Any], object], *, settle: int, steps: int
) -> Mapping[str, float]:
    """Run steps, and measure those after the first ``settle``.

    Args:
        mark: records a mark.
        batches: at least ``settle + steps`` batches.
        step: queues the work on a batch.
        settle: steps before the clock starts, at least 1.
        steps: steps that are measured.

    Returns:
        ``step_s``: mean time from the end of a step to the end of the next; ``gap_s``: the part of it between the end
        of a step and the start of the next, in which the device has no work; ``waited_s``: the part of it in which the
        host waited for a batch, which costs nothing while the device is busy.
    """
    started: list[Mark] = []
    ended: list[Mark] = []
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
    return {
        "step_s": ended[-1].since(ended[settle - 1]) / steps,
        "gap_s": gaps_s / steps,
        "waited_s": waited_s / steps,
    }
