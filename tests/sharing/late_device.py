"""A device of several processes, on the CPU: work is done late, by a thread per stream, and missing waits show.

Memory that processes share is a memfd, and so is each of their events: how often it was recorded, and how often that
record was reached. What is written is poisoned first, stays so for a while, and only then has its content: whoever
reads without waiting, or is overwritten while reading, sees poison.
"""

from __future__ import annotations

import mmap
import os
import queue
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from aiofeed.sharing.device_handles import HandleError
from aiofeed.sharing.tensor_messages import Handle

POISON = 0xDB


class LateStream:
    """Runs what it is given in turn, in a thread."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._main, name="late", daemon=True).start()

    def push(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def _main(self) -> None:
        while not self._device.closed:
            try:
                work = self._work.get(timeout=0.2)
            except queue.Empty:
                continue
            work()
            del work


class HostStream:
    """The consumer's own: what it waits for has happened when the call returns."""

    def push(self, work: Callable[[], object]) -> None:
        work()


class LateEvent:
    """A mark in a stream, of one process or of several."""

    def __init__(self, device: LateDevice, memory: Any = None, handle: bytes = b"") -> None:
        self.device = device
        self.shared = memory is not None
        self.handle = handle
        self._counts = np.zeros(2, np.int64) if memory is None else np.frombuffer(memory, np.int64, 2)

    def record(self, stream: Any) -> None:
        if self.shared and self.device.mute:
            return
        count = int(self._counts[0]) + 1
        self._counts[0] = count
        stream.push(lambda: self._counts.__setitem__(1, count))

    def wait(self, stream: Any) -> None:
        if self.shared and self.device.deaf:
            return
        count = int(self._counts[0])

        def wait() -> None:
            while self._counts[1] < count and not self.device.closed:
                time.sleep(0.0002)

        stream.push(wait)

    def query(self) -> bool:
        return bool(self._counts[1] >= self._counts[0])

    def synchronize(self) -> None:
        while not self.query() and not self.device.closed:
            time.sleep(0.0002)

    def lie(self) -> None:
        self._counts[1] = self._counts[0]


class LateDevice:
    """A device backend, and what of it several processes share.

    Args:
        identity: what it is called in every process.
        late_s: how long a copy takes, at most.
        deaf: it does not wait for other processes' events.
        mute: it does not record events for other processes.
        refuses: "export" or "open": that fails.
        stalls_at: its copy to shared memory of that number never ends.
        dies_at: with its copy of that number the process is killed, and its events say that all is done.
    """

    name = "late:0"

    def __init__(
        self,
        identity: str = "late",
        *,
        late_s: float = 0.001,
        deaf: bool = False,
        mute: bool = False,
        refuses: str = "",
        stalls_at: int = 0,
        dies_at: int = 0,
    ) -> None:
        self.device = torch.device("cpu")
        self.closed = False
        self.deaf, self.mute, self.refuses = deaf, mute, refuses
        self.exports = self.puts = 0
        self._identity = identity
        self._late_s = late_s
        self._random = random.Random(0)
        self._stalls_at, self._dies_at = stalls_at, dies_at
        self._local = threading.local()
        self._host = HostStream()
        self._side, self._slots = LateStream(self), LateStream(self)
        self._own: dict[int, weakref.ref[torch.Tensor]] = {}
        self._files: dict[int, int] = {}
        self._events: list[LateEvent] = []

    # --- a device backend ---

    def enter_thread(self) -> None:
        pass

    def side_stream(self) -> Any:
        return self._side

    def current_stream(self) -> Any:
        return getattr(self._local, "stream", self._host)

    @contextmanager
    def on(self, stream: Any, /) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        return tensor if self.holds(tensor) else self.clone(tensor)

    def record(self, stream: Any) -> LateEvent:
        event = LateEvent(self)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: LateEvent, /) -> None:
        event.wait(stream)

    def hold(self, tensor: torch.Tensor, stream: Any, /) -> None:
        pass  # what is queued refers to its tensors

    def pin(self, nbytes: int, /) -> Any:
        return np.empty(nbytes, np.uint8)

    def is_pinned(self, tensor: torch.Tensor, /) -> bool:
        return False

    def interprocess(self) -> LateDevice:
        return self

    # --- what several processes share ---

    def identity(self) -> str:
        return self._identity

    def stream(self) -> Any:
        return self._slots

    def holds(self, value: object, /) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        reference = self._own.get(value.untyped_storage().data_ptr())
        return reference is not None and reference() is not None

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        descriptor = os.memfd_create("late")
        os.ftruncate(descriptor, nbytes)
        memory = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
        self._files[memory.data_ptr()] = descriptor
        weakref.finalize(memory, os.close, descriptor).atexit = False
        return memory

    def export(self, memory: torch.Tensor, /) -> Handle:
        if self.refuses == "export":
            raise HandleError("this device exports nothing")
        self.exports += 1
        return Handle(self._identity, _name(self._files[memory.data_ptr()]), memory.nbytes, 0, b"", 0, b"", False)

    def open(self, handle: Handle, /) -> torch.Tensor:
        if self.refuses == "open":
            raise HandleError("this device opens nothing")
        return torch.frombuffer(_open(handle.allocation, handle.nbytes), dtype=torch.uint8)

    def event(self) -> LateEvent:
        descriptor = os.memfd_create("late")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        event = LateEvent(self, mmap.mmap(descriptor, mmap.PAGESIZE), _name(descriptor))
        weakref.finalize(event, os.close, descriptor).atexit = False
        if self._dies_at:
            self._events.append(event)
        return event

    def export_event(self, event: LateEvent, /) -> bytes:
        return event.handle

    def open_event(self, handle: bytes, /) -> LateEvent:
        return LateEvent(self, _open(handle, mmap.PAGESIZE), handle)

    def put(self, target: torch.Tensor, source: torch.Tensor, /) -> None:
        self.puts += 1
        number, late_s = self.puts, self._late()

        def put() -> None:
            target.view(torch.uint8).fill_(POISON) if target.is_contiguous() else None
            if number == self._dies_at:
                for event in self._events:
                    event.lie()
                os.kill(os.getpid(), signal.SIGKILL)
            while number == self._stalls_at and not self.closed:
                time.sleep(0.01)
            time.sleep(late_s)
            target.copy_(source)

        self.current_stream().push(put)

    def clone(self, source: torch.Tensor, /) -> torch.Tensor:
        made = torch.empty_like(source)
        made.untyped_storage().fill_(POISON)
        self._own[made.untyped_storage().data_ptr()] = weakref.ref(made)
        late_s = self._late()

        def clone() -> None:
            time.sleep(late_s)
            made.copy_(source)

        self.current_stream().push(clone)
        return made

    def to_host(self, tensor: torch.Tensor, /) -> torch.Tensor:
        self.record(self.current_stream()).synchronize()
        return tensor.detach().clone()

    # --- for tests ---

    def close(self) -> None:
        """End the threads, whatever they wait for."""
        self.closed = True

    def _late(self) -> float:
        return self._random.random() * self._late_s


def _name(descriptor: int) -> bytes:
    return b"/proc/%d/fd/%d" % (os.getpid(), descriptor)


def _open(path: bytes, nbytes: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise HandleError(str(error)) from error
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
