"""Time as the device sees it: marks in the consumer's stream, and steps driven between them.

Between marks there is no synchronisation that would stop what is measured: the look-ahead is as full when the clock
starts as when it stops, and what the host does while the device works costs nothing that it does not cost a training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from aiofeed.devices.backend import DeviceBackend

LEAD = 2
"""Steps that the host may be ahead of the device, as in a training that looks at its loss now and then."""


class Mark(Protocol):
    """A moment in a stream."""

    def wait(self) -> None:
        """Block until the device has come there."""
        ...

    def since(self, earlier: Any) -> float:
        """Seconds from another moment to this one; both have come."""
        ...


class CudaMark:
    """A timing event on the current stream. The host waits for it asleep: a core that spins would be a decoder's."""

    def __init__(self, backend: DeviceBackend) -> None:
        import torch

        cuda: Any = torch.cuda  # in part without types
        self._event = cuda.Event(enable_timing=True, blocking=True)
        self._event.record(backend.current_stream())

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: CudaMark) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostMark:
    """The host's clock once the device has done what was queued: where events have no times."""

    def __init__(self, backend: DeviceBackend) -> None:
        backend.record(backend.current_stream()).synchronize()
        self._at = time.perf_counter()

    def wait(self) -> None:
        """It has come."""

    def since(self, earlier: HostMark) -> float:
        return self._at - earlier._at


def marker(backend: DeviceBackend) -> Callable[[], Mark]:
    """What makes marks on a device's current stream."""
    return (lambda: CudaMark(backend)) if backend.device.type == "cuda" else (lambda: HostMark(backend))


def drive(
    mark: Callable[[], Mark], batches: Iterator[Any], step: Callable[[Any], object], *, settle: int, steps: int
) -> Mapping[str, float]:
    """Take batches and work on them, and look at the steps behind the first ``settle``.

    Args:
        mark: makes a mark of now.
        batches: ``settle + steps`` of them at least.
        step: queues the work on a batch.
        settle: steps before the clock starts, 1 at least.
        steps: those that count.

    Returns:
        ``step_s``: from the end of one step to the end of the next, on average; ``gap_s``: the part of it from the end
        of one to the beginning of the next, in which the device has no work; ``waited_s``: the part of it for which the
        host waited for a batch, which costs nothing while the device is busy.
    """
    began: list[Mark] = []
    ended: list[Mark] = []
    waited_s = 0.0
    for number in range(settle + steps):
        asked = time.perf_counter()
        batch = next(batches)
        if number >= settle:
            waited_s += time.perf_counter() - asked
        began.append(mark())
        step(batch)
        ended.append(mark())
        if number >= LEAD:
            ended[number - LEAD].wait()
    ended[-1].wait()
    behind = range(settle, settle + steps)
    gaps_s = sum(began[number].since(ended[number - 1]) for number in behind)
    return {
        "step_s": ended[-1].since(ended[settle - 1]) / steps,
        "gap_s": gaps_s / steps,
        "waited_s": waited_s / steps,
    }
