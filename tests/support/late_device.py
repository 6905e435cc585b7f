"""A device that several processes share, simulated on the CPU: its work runs late, so that missing waits show.

Each stream is a thread. Shared memory is a memfd, and so is each shared event, which counts how often it was recorded
and how often a stream has reached that record. A write fills its target with poison first, waits, and then writes the
content: a reader that does not wait, or is overwritten while it reads, gets poison.
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

from aiofeed.ipc.cuda_ipc import HandleError
from aiofeed.ipc.schema import DeviceMemoryHandle

POISON = 0xDB
_PROBE_EVENTS = 2
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


class LateStream:
    """Runs its work in order, in a thread."""

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
    """The consumer's stream: its work runs in the call."""

    def push(self, work: Callable[[], object]) -> None:
        work()


class LateEvent:
    """An event, of one process or of several."""

    def __init__(self, device: LateDevice, memory: Any = None, handle: bytes = b"") -> None:
        self.device = device
        self.shared = memory is not None
        device.events += self.shared
        self.honest = device.events <= _PROBE_EVENTS
        self.handle = handle
        self._counts = np.zeros(2, np.int64) if memory is None else np.frombuffer(memory, np.int64, 2)

    def record(self, stream: Any) -> None:
        if self.shared and self.device.mute and not self.honest:
            return
        count = int(self._counts[0]) + 1
        self._counts[0] = count
        stream.push(lambda: self._counts.__setitem__(1, count))

    def wait(self, stream: Any) -> None:
        assert not self.shared, "a stream waits for an event of another process, which may have died"
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
    """A device backend whose memory and events several processes share.

    Args:
        identity: Its name in every process.
        late_s: The longest time that a copy takes.
        hasty: Report shared events as complete at once, except those of the probe.
        mute: Do not record shared events, except those of the probe.
        refuses: "export" or "open": that fails.
        stalls_at: The copy to shared memory with this number never ends.
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
        pass  # queued work refers to its tensors

    def pin(self, nbytes: int, /) -> Any:
        return np.empty(nbytes, np.uint8)

    def interprocess(self) -> LateDevice:
        return self

    # --- shared memory and events ---

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
        # As in torch: exported memory is kept for processes that have not opened it yet.
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
        # As in CUDA: an event ends for all processes with the object that created it.
        self._open.append(weakref.finalize(event, os.close, descriptor))
        return event

    def export_event(self, event: LateEvent, /) -> bytes:
        return event.handle

    def open_event(self, handle: bytes, /) -> LateEvent:
        return LateEvent(self, _open(handle, mmap.PAGESIZE), handle)

    def put(self, target: torch.Tensor, source: torch.Tensor, /) -> None:
        assert self.current_stream() is self._slots, "a block is written on the stream of a training"
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
        """End the threads and close the files."""
        self.closed = True
        for close in self._open:
            close()

    def _late(self) -> float:
        return self._random.random() * self._late_s


def _name(descriptor: int) -> bytes:
    return b"/proc/%d/fd/%d" % (os.getpid(), descriptor)


def _map(descriptor: int, nbytes: int) -> Any:
    """Map shared memory for ever; Python's mmap would keep a descriptor open as long as a traceback refers to it."""
    size = os.fstat(descriptor).st_size
    assert size >= nbytes, f"{size} bytes instead of {nbytes}: the descriptor has been reused"
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
