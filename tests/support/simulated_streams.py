"""The streams of a simulated device, and the schedule that decides when their operations run."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

Latency: TypeAlias = Literal["random", "late", "early"]

_QUEUE_DEPTH = 1024  # operations that a stream holds before the host has to wait, as with CUDA

_MAX_DOUBLINGS = 8  # of the operations that run when the host queries an event again

# A random choice of streams runs while the others stall, for at most this many host calls: long enough for batches to
# pile up.
_MAX_STALL_CALLS = 400


class SimulatedEvent:
    """An event in a stream of a ``SimulatedDevice``."""

    def __init__(self, schedule: StreamSchedule, stream: SimulatedStream) -> None:
        self._schedule = schedule
        self.stream = stream
        self.done: bool = False
        self.queries: int = 0

    def query(self) -> bool:
        """Whether the event is complete. Each call runs a few operations before it, sometimes none.

        A repeated call means that time has passed: it runs up to twice as many operations as the one before.
        """
        schedule = self._schedule
        with schedule.host_call():
            for _ in range(schedule.random.randrange(4) << min(self.queries, _MAX_DOUBLINGS)):
                if not self.done:
                    schedule.advance(self.stream)
            self.queries += 1
            return self.done

    def synchronize(self) -> None:
        """Run all operations before the event, as one call of the host."""
        with self._schedule.host_call():
            self._schedule.run_until(self)

    def complete(self) -> None:
        """Mark the event as complete."""
        self.done = True


class SimulatedStream:
    """A queue of operations of a ``SimulatedDevice``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Queued] = deque()

    def __repr__(self) -> str:
        return f"<stream {self.name}, {len(self.queue)} queued>"


@dataclass(slots=True, eq=False)
class Queued:
    """One operation of a stream.

    Args:
        run: the work; ``None`` for an operation that only waits.
        after: an event that must be complete first.
        delay: number of times that the schedule skips the operation before it runs.
    """

    run: Callable[[], object] | None
    after: SimulatedEvent | None = None
    delay: int = 0


class StreamSchedule:
    """The streams of a device; runs some of their operations at each call of the host.

    Arguments as for ``SimulatedDevice``.
    """

    def __init__(self, seed: int, latency: Latency) -> None:
        if latency not in get_args(Latency):
            raise ValueError(f"latency={latency!r}: expected 'random', 'late' or 'early'")
        self.lock: threading.RLock = threading.RLock()
        self.default: SimulatedStream = SimulatedStream("default")
        self.side: SimulatedStream | None = None
        self.streams: list[SimulatedStream] = [self.default]
        self._latency = latency
        self.random: random.Random = random.Random(seed)
        self._running = False
        self._active: list[SimulatedStream] = []
        self._calls_left = 0
        self.failed = False

    @contextmanager
    def host_call(self) -> Iterator[None]:
        """Hold the lock during one call of the host; afterwards some queued operations run."""
        with self.lock:
            if self._running:
                raise RuntimeError("a kernel of the simulated device used the device")
            if self.failed:
                raise RuntimeError("simulated device error: an illegal memory access was encountered")
            yield
            self._run_others(None)

    def append(self, stream: SimulatedStream, run: Callable[[], object]) -> None:
        """Queue work."""
        self.push(stream, Queued(run))

    def push(self, stream: SimulatedStream, operation: Queued) -> None:
        """Queue an operation."""
        stream.queue.append(operation)
        if len(stream.queue) > _QUEUE_DEPTH:
            self.advance(stream)

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        """An event after everything that is queued on a stream."""
        event = SimulatedEvent(self, stream)
        self.append(stream, event.complete)
        return event

    def run_until(self, event: SimulatedEvent) -> None:
        """Run all operations before an event; the other streams run some of theirs meanwhile."""
        while not event.done:
            self._run_others(event.stream)
            if not event.done:
                self.advance(event.stream)

    def advance(self, stream: SimulatedStream) -> None:
        """Run the operation that the head of a stream needs next: itself, or the head of the stream it waits for."""
        while (after := stream.queue[0].after) is not None and not after.done:
            stream = after.stream
        self._step(stream, force=True)

    def _run_others(self, busy: SimulatedStream | None) -> None:
        """Run some operations of other streams than ``busy``, which the host waits for."""
        if self._latency == "early" and self.side is not None and self.side is not busy:
            while self._step(self.side, force=True):
                pass
        elif self._latency == "random":
            if self._calls_left == 0:
                self._calls_left = 1 + self.random.randrange(_MAX_STALL_CALLS)
                self._active = [stream for stream in self.streams if self.random.random() < 0.5]
            self._calls_left -= 1
            for stream in self._active:
                for _ in range(self.random.choice((0, 1, 4))):
                    if not self._step(stream, force=False):
                        break

    def _step(self, stream: SimulatedStream, *, force: bool) -> bool:
        """Run the first operation of a stream if it may run; ``force`` ignores its delay. Returns whether it ran."""
        if not stream.queue:
            return False
        operation = stream.queue[0]
        if operation.after is not None and not operation.after.done:
            return False
        if operation.delay > 0 and not force:
            operation.delay -= 1
            return False
        if operation.run is not None:
            self._running = True
            try:
                # The operation was queued below autograd and autocast. Run it without them, whatever the modes of the
                # thread that waits.
                with torch.no_grad(), _no_autocast():
                    operation.run()
            except Exception:
                stream.queue.popleft()
                raise
            finally:
                self._running = False
        # Afterwards: an operation that Ctrl-C interrupts is run again, and not lost.
        stream.queue.popleft()
        return True


def _no_autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
