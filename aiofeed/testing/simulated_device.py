"""A device on the CPU that runs its operations as late, as early or as irregularly as a real device may."""

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
    """A device backend on the CPU whose wrong use gives wrong data. Pass it as ``device=``.

    Copies and operations are queued. They run when something waits for them, or when the simulation decides. A copy
    reads host memory when it runs, and reads poison if its source tensor is gone by then. Device memory comes from a
    caching allocator like CUDA's: once the last tensor that shares a block is dropped, the block is reused for the next
    allocation on its stream, unless ``record_stream`` named streams with outstanding work. Freed memory is overwritten
    with poison (bytes of 0xDB). The error of an operation is raised by the call that waits for it.

    Safe to use from several threads; deterministic for a seed in one thread.

    Args:
        seed: seeds the random order of operations.
        latency: "random"; "late": operations run only when something waits for them; "early": copies run at once and
            the consumer's streams lag behind. Late copies reveal missing waits, early copies reveal memory that is
            freed too soon, and random order reveals both.
        memory_bytes: capacity; an allocation beyond it raises ``torch.OutOfMemoryError``.
        pin_fails: ``pin`` raises.
        copy_fails_at: number of the copy that fails, from 1.
        index: index in the name, "simulated:0".
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

    # --- methods of DeviceBackend

    def enter_thread(self) -> None:
        """Add the calling thread to ``threads``."""
        self.threads.add(threading.get_ident())

    def side_stream(self) -> SimulatedStream:
        """The stream for copies, always the same."""
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
        previous = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = previous

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Queue a copy to the device; the caller keeps the tensor, and its memory unchanged, until the copy has run."""
        if isinstance(tensor, SimulatedTensor):
            if tensor.simulated is not self:
                raise RuntimeError("this tensor is on another simulated device")
            return tensor
        with self._schedule.lock:
            self.copies += 1
            if self.copies == self._copy_fails_at:
                raise RuntimeError(f"simulated device error at copy {self.copies}")
            like = torch.empty_like(tensor, device="meta", requires_grad=False)
            target = self.empty(like.size(), like.stride(), like.dtype)
            self.enqueue(_copy(weakref.ref(tensor), target.raw, target.handle.block.poison))
        return target

    def record(self, stream: SimulatedStream, /) -> SimulatedEvent:
        """An event after everything that is queued on a stream."""
        with self._host_call():
            return self._schedule.record(stream)

    def wait(self, stream: SimulatedStream, event: SimulatedEvent, /) -> None:
        """Make later work on a stream wait for an event."""
        with self._host_call():
            self._schedule.push(stream, Queued(None, after=event))

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream, /) -> None:
        """Once the tensor is dropped, reuse its memory only after the work then queued on ``stream`` has run."""
        if isinstance(tensor, SimulatedTensor) and tensor.simulated is self:
            with self._schedule.lock:
                tensor.handle.block.recorded.add(stream)

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Memory that counts as page-locked as long as it exists."""
        if self._pin_fails:
            raise RuntimeError(f"simulated device error: {nbytes} bytes cannot be pinned")
        memory = np.full(nbytes, POISON, np.uint8)
        start = memory.ctypes.data
        self._pinned[start] = nbytes
        weakref.finalize(memory, self._pinned.pop, start, None).atexit = False
        return memory

    def register(self, memory: NDArray[np.uint8], /) -> None:
        """Count existing memory as page-locked."""
        if self._pin_fails:
            raise RuntimeError(f"simulated device error: {memory.nbytes} bytes cannot be registered")
        self._pinned[memory.ctypes.data] = memory.nbytes

    def unregister(self, memory: NDArray[np.uint8], /) -> None:
        """Undo ``register``."""
        del self._pinned[memory.ctypes.data]

    def is_pinned(self, tensor: torch.Tensor, /) -> bool:
        """Whether the tensor is in page-locked memory."""
        address = tensor.data_ptr()
        return any(start <= address < start + nbytes for start, nbytes in self._pinned.copy().items())

    def memory(self) -> tuple[int, int] | None:
        """Free bytes and capacity; ``None`` without a capacity."""
        with self._host_call():
            limit = self._memory.limit_bytes
            return None if limit is None else (limit - self._memory.allocated_bytes, limit)

    # --- methods for tests

    def new_stream(self, name: str | None = None) -> SimulatedStream:
        """A new stream for the consumer's work."""
        with self._schedule.lock:
            streams = self._schedule.streams
            streams.append(SimulatedStream(name or f"stream {len(streams)}"))
            return streams[-1]

    def launch(self, function: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Queue ``function(*plain_tensors)``, over the same memory, on the current stream; does not keep the memory."""
        raw = [tensor.raw if isinstance(tensor, SimulatedTensor) else tensor for tensor in tensors]
        self.enqueue(lambda: function(*raw))

    def sleep(self, turns: int = 20) -> None:
        """Queue a slow kernel on the current stream: the simulation skips it ``turns`` times before it ends."""
        with self._host_call():
            self._schedule.push(self.current_stream(), Queued(None, delay=turns))

    def synchronize(self) -> None:
        """Run everything that is queued."""
        with self._host_call():
            for stream in self._schedule.streams:
                self._schedule.run_until(self._schedule.record(stream))

    @property
    def streams_made(self) -> int:
        """Number of streams, without the default one."""
        return len(self._schedule.streams) - 1

    @property
    def allocated_bytes(self) -> int:
        """Device memory of existing tensors."""
        with self._host_call():
            return self._memory.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Device memory in use or cached for reuse."""
        return self._memory.reserved_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory that exists."""
        return sum(self._pinned.copy().values())

    @property
    def queued(self) -> int:
        """Number of operations that have not run yet."""
        with self._schedule.lock:
            return sum(len(stream.queue) for stream in self._schedule.streams)

    # --- methods for simulated tensors

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> SimulatedTensor:
        """A tensor allocated on the current stream."""
        if any(step == 0 and length > 1 for length, step in zip(size, stride, strict=True)):
            stride = torch.empty(size, device="meta").stride()
        extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        # No inference tensor: queued work may write to it outside of inference mode.
        with torch.inference_mode(False):
            with self._host_call():
                handle = self._memory.allocate(extent * dtype.itemsize, self.current_stream())
            raw = torch.empty(0, dtype=dtype, device="cpu")
            raw.set_(handle.block.bytes.untyped_storage(), 0, tuple(size), tuple(stride))
        return SimulatedTensor(raw, handle, self)

    def enqueue(self, function: Callable[[], object]) -> None:
        """Queue work on the current stream."""
        with self._host_call():
            self._schedule.append(self.current_stream(), function)

    def synchronize_current(self) -> None:
        """Run the work queued on the calling thread's current stream, and the work that it waits for."""
        with self._host_call():
            self._schedule.run_until(self._schedule.record(self.current_stream()))

    @contextmanager
    def _host_call(self) -> Iterator[None]:
        # Dropped blocks are collected first: record_stream delays their reuse by the work queued up to the drop.
        with self._schedule.host_call():
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
