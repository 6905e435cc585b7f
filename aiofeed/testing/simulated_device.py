"""A device that does everything as late, as early or as erratically as a real one may, on the CPU."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from aiofeed.testing.simulated_memory import POISON, Allocator
from aiofeed.testing.simulated_streams import Latency, Queued, SimulatedEvent, SimulatedStream, StreamSchedule
from aiofeed.testing.simulated_tensor import SimulatedTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SimulatedDevice:
    """A device backend on the CPU whose wrong use shows as wrong data: hand it to ``device=``.

    Copies and operations are queued, and run only when something waits for them or the simulation lets them. A copy
    reads the host's memory when it runs, and reads poison if the tensor it was given is gone by then. Device memory
    comes from a caching allocator as CUDA's: a tensor's memory serves its stream's next allocation as soon as the
    last tensor that shares it is dropped, unless ``hold`` named streams with work outstanding; what is freed is
    poisoned (bytes of 0xDB). An error in an operation is raised where the operation is waited for.

    Safe to use from several threads; repeatable for a seed where there is one.

    Args:
        seed: of what runs when.
        latency: "random"; "late": nothing runs before it is waited for; "early": copies run at once and the streams
            of the consumer lag behind. Missing waits show when copies are late, memory freed too soon when they are
            early, and everything at random.
        memory_bytes: capacity; beyond it ``torch.OutOfMemoryError``.
        pin_fails: ``pin`` raises.
        copy_fails_at: the copy that fails, counted from 1.
        index: how it is named: "simulated:0".
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        latency: Latency = "random",
        memory_bytes: int | None = None,
        pin_fails: bool = False,
        copy_fails_at: int | None = None,
        index: int = 0,
    ) -> None:
        self.name = f"simulated:{index}"
        self.device = torch.device("cpu")
        self._schedule = StreamSchedule(seed, latency)
        self._memory = Allocator(memory_bytes, self._schedule)
        self._local = threading.local()
        self._pin_fails = pin_fails
        self._copy_fails_at = copy_fails_at
        self._pinned: dict[int, int] = {}
        self.copies = 0
        """Copies queued so far."""
        self.threads: set[int] = set()
        """Identifiers of the threads that called ``enter_thread``."""

    # What DeviceBackend asks for

    def enter_thread(self) -> None:
        """Note the calling thread."""
        self.threads.add(threading.get_ident())

    def side_stream(self) -> SimulatedStream:
        """The stream of copies, always the same."""
        with self._schedule.lock:
            if self._schedule.side is None:
                self._schedule.side = self.new_stream("side")
            return self._schedule.side

    def current_stream(self) -> SimulatedStream:
        """The calling thread's current stream."""
        stream: SimulatedStream = getattr(self._local, "stream", self._schedule.default)
        return stream

    @contextmanager
    def use_stream(self, stream: SimulatedStream, /) -> Iterator[None]:
        """Make a stream current in the calling thread."""
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Queue a copy; the tensor must be kept, and its memory unchanged, until the copy has run."""
        if isinstance(tensor, SimulatedTensor):
            if tensor.simulated is not self:
                raise RuntimeError("this tensor is on another simulated device")
            return tensor
        with self._schedule.lock:
            self.copies += 1
            if self.copies == self._copy_fails_at:
                raise RuntimeError(f"simulated device error at copy {self.copies}")
            like = torch.empty_like(tensor, device="meta", requires_grad=False)
            made = self.empty(like.size(), like.stride(), like.dtype)
            self.enqueue(_copy(weakref.ref(tensor), made.raw, made.handle.block.poison))
        return made

    def record(self, stream: SimulatedStream, /) -> SimulatedEvent:
        """An event after everything queued on a stream so far."""
        with self._turn():
            return self._schedule.mark(stream)

    def wait(self, stream: SimulatedStream, event: SimulatedEvent, /) -> None:
        """Let later work on a stream wait for an event."""
        with self._turn():
            self._schedule.push(stream, Queued(None, after=event))

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream, /) -> None:
        """Keep the memory, once it is dropped, until the work queued on a stream by then has run."""
        if isinstance(tensor, SimulatedTensor) and tensor.simulated is self:
            with self._schedule.lock:
                tensor.handle.block.held.add(stream)

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Memory that counts as page-locked while anything refers to it."""
        if self._pin_fails:
            raise RuntimeError(f"simulated device error: {nbytes} bytes cannot be pinned")
        memory = np.full(nbytes, POISON, np.uint8)
        start = memory.ctypes.data
        self._pinned[start] = nbytes
        weakref.finalize(memory, self._pinned.pop, start, None).atexit = False
        return memory

    def register(self, memory: NDArray[np.uint8], /) -> None:
        """Count memory that is there already as page-locked."""
        if self._pin_fails:
            raise RuntimeError(f"simulated device error: {memory.nbytes} bytes cannot be registered")
        self._pinned[memory.ctypes.data] = memory.nbytes

    def unregister(self, memory: NDArray[np.uint8], /) -> None:
        """Undo ``register``."""
        del self._pinned[memory.ctypes.data]

    def is_pinned(self, tensor: torch.Tensor, /) -> bool:
        """Whether the tensor lies in memory from ``pin``."""
        address = tensor.data_ptr()
        return any(start <= address < start + nbytes for start, nbytes in self._pinned.copy().items())

    def memory(self) -> tuple[int, int] | None:
        """Bytes that can still be had, and the capacity; ``None`` without one."""
        with self._turn():
            limit = self._memory.limit_bytes
            return None if limit is None else (limit - self._memory.allocated_bytes, limit)

    # What tests use

    def new_stream(self, name: str | None = None) -> SimulatedStream:
        """Another stream, for work of the consumer."""
        with self._schedule.lock:
            streams = self._schedule.streams
            streams.append(SimulatedStream(name or f"stream {len(streams)}"))
            return streams[-1]

    def launch(self, function: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Queue ``function(*plain tensors over the same memory)`` on the current stream; keeps no memory from reuse."""
        raw = [tensor.raw if isinstance(tensor, SimulatedTensor) else tensor for tensor in tensors]
        self.enqueue(lambda: function(*raw))

    def sleep(self, turns: int = 20) -> None:
        """Queue a slow kernel on the current stream: the simulation comes by so many times before it lets it end."""
        with self._turn():
            self._schedule.push(self.current_stream(), Queued(None, turns=turns))

    def synchronize(self) -> None:
        """Run everything that is queued."""
        with self._turn():
            for stream in self._schedule.streams:
                self._schedule.force(self._schedule.mark(stream))

    @property
    def streams_made(self) -> int:
        """Streams made so far, the default one not counted."""
        return len(self._schedule.streams) - 1

    @property
    def allocated_bytes(self) -> int:
        """Device memory of tensors that are alive."""
        with self._turn():
            return self._memory.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Device memory in use or kept for reuse."""
        return self._memory.reserved_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory that is alive."""
        return sum(self._pinned.copy().values())

    @property
    def queued(self) -> int:
        """Operations that have not run yet."""
        with self._schedule.lock:
            return sum(len(stream.queue) for stream in self._schedule.streams)

    # What simulated tensors use

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> SimulatedTensor:
        """A tensor allocated on the current stream."""
        if any(step == 0 and length > 1 for length, step in zip(size, stride, strict=True)):
            stride = torch.empty(size, device="meta").stride()
        extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        # It is written when its work runs, wherever that may be.
        with torch.inference_mode(False):
            with self._turn():
                handle = self._memory.allocate(extent * dtype.itemsize, self.current_stream())
            raw = torch.empty(0, dtype=dtype, device="cpu")
            raw.set_(handle.block.bytes.untyped_storage(), 0, tuple(size), tuple(stride))
        return SimulatedTensor(raw, handle, self)

    def enqueue(self, function: Callable[[], object]) -> None:
        """Queue work on the current stream."""
        with self._turn():
            self._schedule.append(self.current_stream(), function)

    def synchronize_current(self) -> None:
        """Run what the calling thread's current stream has queued, and what that waits for."""
        with self._turn():
            self._schedule.force(self._schedule.mark(self.current_stream()))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        # What was dropped is taken back before anything new is queued, so that "at that time" means what it says.
        with self._schedule.turn():
            self._memory.collect()
            yield


def _copy(source: weakref.ref[torch.Tensor], target: torch.Tensor, poison: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        tensor = source()
        if tensor is None:
            poison()
        else:
            target.copy_(tensor.detach())

    return run
