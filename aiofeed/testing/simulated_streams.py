"""What runs when on a simulated device."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, TypeAlias, get_args

import torch

Latency: TypeAlias = Literal["random", "late", "early"]

_QUEUE_DEPTH = 1024  # operations a stream takes before its host has to wait, as CUDA's does

_MOST_DOUBLINGS = 8  # of what runs while the host looks at an event again and again

# How long, at most, the same streams are stalled while the others get on. Long enough for batches to pile up.
_WEATHER_TURNS = 400


class SimulatedEvent:
    """A mark in a stream of a ``SimulatedDevice``."""

    def __init__(self, schedule: StreamSchedule, stream: SimulatedStream) -> None:
        self._schedule = schedule
        self.stream = stream
        self.done = False
        self.asked = 0

    def query(self) -> bool:
        """Whether it is complete. Each call lets a little of what it waits for run, now and then nothing.

        Who asks again has let time pass: from one call to the next it is twice as much.
        """
        return self._schedule.query(self)

    def synchronize(self) -> None:
        """Run what it waits for."""
        self._schedule.synchronize(self)

    def complete(self) -> None:
        """The stream has come here."""
        self.done = True


class SimulatedStream:
    """A queue of operations of a ``SimulatedDevice``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Queued] = deque()

    def __repr__(self) -> str:
        return f"<stream {self.name}, {len(self.queue)} queued>"


class Queued:
    """One operation: what to run, after which event, and how many turns it lets pass first."""

    __slots__ = ("after", "run", "turns")

    def __init__(self, run: Callable[[], object] | None, after: SimulatedEvent | None = None, turns: int = 0) -> None:
        self.run = run
        self.after = after
        self.turns = turns


class StreamSchedule:
    """The streams of a device, and who gets on with its work while the host does something.

    Args:
        seed: of what runs when.
        latency: see ``SimulatedDevice``.
    """

    def __init__(self, seed: int, latency: Latency) -> None:
        if latency not in get_args(Latency):
            raise ValueError(f"latency={latency!r}: expected 'random', 'late' or 'early'")
        self.lock = threading.RLock()
        self.default = SimulatedStream("default")
        self.side: SimulatedStream | None = None
        self.streams = [self.default]
        self._latency = latency
        self._random = random.Random(seed)
        self._running = False
        self._awake: list[SimulatedStream] = []
        self._until_weather = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The lock, for one thing that the host does; the device gets on a little afterwards."""
        with self.lock:
            if self._running:
                raise RuntimeError("a kernel of the simulated device used the device")
            yield
            self._meanwhile(None)

    def append(self, stream: SimulatedStream, run: Callable[[], object]) -> None:
        """Queue work."""
        self.push(stream, Queued(run))

    def push(self, stream: SimulatedStream, operation: Queued) -> None:
        """Queue an operation."""
        stream.queue.append(operation)
        if len(stream.queue) > _QUEUE_DEPTH:
            self._advance(stream)

    def mark(self, stream: SimulatedStream) -> SimulatedEvent:
        """An event after everything queued on a stream so far."""
        event = SimulatedEvent(self, stream)
        self.append(stream, event.complete)
        return event

    def query(self, event: SimulatedEvent) -> bool:
        """Whether an event is complete, after a few operations of those it waits for, or none."""
        with self.turn():
            for _ in range(self._random.randrange(4) << min(event.asked, _MOST_DOUBLINGS)):
                if not event.done:
                    self._advance(event.stream)
            event.asked += 1
            return event.done

    def synchronize(self, event: SimulatedEvent) -> None:
        """Run what an event waits for."""
        with self.turn():
            self.force(event)

    def force(self, event: SimulatedEvent) -> None:
        """Run what an event waits for; the other streams get on as they please."""
        while not event.done:
            self._meanwhile(event.stream)
            if not event.done:
                self._advance(event.stream)

    def _advance(self, stream: SimulatedStream) -> None:
        # The one operation that the head of the stream needs next: itself, or the head of what it waits for.
        while (after := stream.queue[0].after) is not None and not after.done:
            stream = after.stream
        self._step(stream, force=True)

    def _meanwhile(self, busy: SimulatedStream | None) -> None:
        """What streams get done beside ``busy``, for which the host waits."""
        if self._latency == "early" and self.side is not None and self.side is not busy:
            while self._step(self.side, force=True):
                pass
        elif self._latency == "random":
            if self._until_weather == 0:
                self._until_weather = 1 + self._random.randrange(_WEATHER_TURNS)
                self._awake = [stream for stream in self.streams if self._random.random() < 0.5]
            self._until_weather -= 1
            for stream in self._awake:
                for _ in range(self._random.choice((0, 1, 4))):
                    if not self._step(stream, force=False):
                        break

    def _step(self, stream: SimulatedStream, *, force: bool) -> bool:
        if not stream.queue:
            return False
        operation = stream.queue[0]
        if operation.after is not None and not operation.after.done:
            return False
        if operation.turns > 0 and not force:
            operation.turns -= 1
            return False
        stream.queue.popleft()
        if operation.run is not None:
            self._running = True
            try:
                # Queued below autograd and autocast, and to be run there wherever the wait happens.
                with torch.no_grad(), _no_autocast():
                    operation.run()
            finally:
                self._running = False
        return True


def _no_autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
