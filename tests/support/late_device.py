"""A device of several processes, on the CPU: work is done late, by a thread per stream, and missing waits show.

Memory that processes share is a memfd, and so is each of their events: how often it was recorded, and how often that
record was reached. What is written is poisoned first, stays so for a while, and only then has its content: whoever
reads without waiting, or is overwritten while reading, sees poison.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from aiofeed.processes.ipc.cuda_ipc import HandleError
from aiofeed.processes.ipc.schema import DeviceMemoryHandle

POISON = 0xDB
_TRIALS_EVENTS = 2
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


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
        device.events += self.shared
        self.honest = device.events <= _TRIALS_EVENTS
        self.handle = handle
        self._counts = np.zeros(2, np.int64) if memory is None else np.frombuffer(memory, np.int64, 2)

    def record(self, stream: Any) -> None:
        if self.shared and self.device.mute and not self.honest:
            return
        count = int(self._counts[0]) + 1
        self._counts[0] = count
        stream.push(lambda: self._counts.__setitem__(1, count))

    def wait(self, stream: Any) -> None:
        assert not self.shared, "work is queued behind an event of another process, which may have died"
        count = int(self._counts[0])

        def wait() -> None:
            while self._counts[1] < count and not self.device.closed:
                time.sleep(0.0002)

        stream.push(wait)

    def query(self) -> bool:
        return bool(self._counts[1] >= self._counts[0]) or (self.shared and self.device.hasty and not self.honest)

    def synchronize(self) -> None:
        while not self.query() and not self.device.closed:
            time.sleep(0.0002)


class LateDevice:
    """A device backend, and what of it several processes share.

    Args:
        identity: what it is called in every process.
        late_s: how long a copy takes, at most.
        hasty: it takes events that processes share for complete, but for those of the trial.
        mute: it does not record events for other processes, but for those of the trial.
        refuses: "export" or "open": that fails.
        stalls_at: its copy to shared memory of that number never ends.
    """

    name = "late:0"

    def __init__(
        self,
        identity: str = "late",
        *,
        late_s: float = 0.001,
        hasty: bool = False,
        mute: bool = False,
        refuses: str = "",
        stalls_at: int = 0,
    ) -> None:
        self.device = torch.device("cpu")
        self.closed = False
        self.hasty, self.mute, self.refuses = hasty, mute, refuses
        self.exports = self.puts = 0
        self.forgotten: list[DeviceMemoryHandle] = []
        self._identity = identity
        self._late_s = late_s
        self._random = random.Random(0)
        self._stalls_at = stalls_at
        self._local = threading.local()
        self._host = HostStream()
        self._side, self._slots = LateStream(self), LateStream(self)
        self._own: dict[int, weakref.ref[torch.Tensor]] = {}
        self._files: dict[int, int] = {}
        self._open: list[weakref.finalize[..., Any]] = []
        self.events = 0

    # --- a device backend ---

    def enter_thread(self) -> None:
        pass

    def side_stream(self) -> Any:
        return self._side

    def current_stream(self) -> Any:
        return getattr(self._local, "stream", self._host)

    @contextmanager
    def use_stream(self, stream: Any, /) -> Iterator[None]:
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

    def record_stream(self, tensor: torch.Tensor, stream: Any, /) -> None:
        pass  # what is queued refers to its tensors

    def pin(self, nbytes: int, /) -> Any:
        return np.empty(nbytes, np.uint8)

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
        memory = torch.frombuffer(_map(descriptor, nbytes), dtype=torch.uint8)
        # As torch does: what is exported is kept for those who have not opened it yet, whatever becomes of it here.
        self._files[memory.data_ptr()] = descriptor
        self._open.append(weakref.finalize(self, os.close, descriptor))
        return memory

    def export(self, memory: torch.Tensor, /) -> DeviceMemoryHandle:
        if self.refuses == "export":
            raise HandleError("this device exports nothing")
        self.exports += 1
        return DeviceMemoryHandle(
            self._identity, _name(self._files[memory.data_ptr()]), memory.nbytes, 0, b"", 0, b"", False
        )

    def open(self, handle: DeviceMemoryHandle, /) -> torch.Tensor:
        if self.refuses == "open":
            raise HandleError("this device opens nothing")
        return torch.frombuffer(_open(handle.allocation, handle.nbytes), dtype=torch.uint8)

    def forget(self, handle: DeviceMemoryHandle, /) -> None:
        self.forgotten.append(handle)

    def event(self) -> LateEvent:
        descriptor = os.memfd_create("late")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        event = LateEvent(self, _map(descriptor, mmap.PAGESIZE), _name(descriptor))
        # As CUDA does: an event is gone for everybody with the one who made it.
        self._open.append(weakref.finalize(event, os.close, descriptor))
        return event

    def export_event(self, event: LateEvent, /) -> bytes:
        return event.handle

    def open_event(self, handle: bytes, /) -> LateEvent:
        return LateEvent(self, _open(handle, mmap.PAGESIZE), handle)

    def put(self, target: torch.Tensor, source: torch.Tensor, /) -> None:
        assert self.current_stream() is self._slots, "a slot is filled on the training's stream"
        self.puts += 1
        number, late_s = self.puts, self._late()

        def put() -> None:
            target.view(torch.uint8).fill_(POISON) if target.is_contiguous() else None
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
        """End the threads, whatever they wait for, and close the files."""
        self.closed = True
        for close in self._open:
            close()

    def _late(self) -> float:
        return self._random.random() * self._late_s


def _name(descriptor: int) -> bytes:
    return b"/proc/%d/fd/%d" % (os.getpid(), descriptor)


def _map(descriptor: int, nbytes: int) -> Any:
    """Shared memory, mapped for good; Python's own keeps a descriptor, which a failure's traceback would keep open."""
    size = os.fstat(descriptor).st_size
    assert size >= nbytes, f"{size} bytes where {nbytes} are expected: it is some other memory by now"
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    assert address != ctypes.c_void_p(-1).value
    return (ctypes.c_ubyte * nbytes).from_address(address)


def _open(path: bytes, nbytes: int) -> Any:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise HandleError(str(error)) from error
    try:
        return _map(descriptor, nbytes)
    finally:
        os.close(descriptor)
