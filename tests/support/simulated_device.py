"""A device on the CPU that runs its operations as late, as early or as irregularly as a real device may."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from aiofeed.kernel.devices.pinned import pinned_mapping
from tests.support.simulated_memory import POISON, Allocator, PinnedRange
from tests.support.simulated_streams import Latency, Queued, SimulatedEvent, SimulatedStream, StreamSchedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.support.simulated_memory import BlockHandle


class SimulatedDevice:
    """A device backend on the CPU whose wrong use gives wrong data. Pass it as ``device=``.

    Copies and operations are queued. They run when something waits for them, or when the simulation decides. A copy
    reads host memory when it runs, and reads poison if its source tensor is gone by then, or if its pinned memory has
    been unregistered. Device memory comes from a
    caching allocator like CUDA's: once the last tensor that shares a block is dropped, the block is reused for the next
    allocation on its stream, unless ``record_stream`` named streams with outstanding work. Freed memory is overwritten
    with poison (bytes of 0xDB). The error of an operation is raised by the call that waits for it.

    Safe to use from several threads; deterministic for a seed in one thread. Ctrl-C can interrupt its calls, unlike
    those of a real device: an interrupted copy runs again, but an operation that changes a tensor may run twice.

    Args:
        seed: seeds the random order of operations.
        latency: "random"; "late": operations run only when something waits for them; "early": copies run at once and
            the consumer's streams lag behind. Late copies reveal missing waits, early copies reveal memory that is
            freed too soon, and random order reveals both.
        memory_bytes: capacity; an allocation beyond it raises ``torch.OutOfMemoryError``.
        pin_fails: ``pin`` raises.
        copy_fails_at: number of the copy that fails, from 1.
        allocation_fails_at: number of the allocation of device memory that raises ``torch.OutOfMemoryError``, from 1.
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
        allocation_fails_at: int | None = None,
        index: int = 0,
    ) -> None:
        self.name: str = f"simulated:{index}"
        self.device: torch.device = torch.device("cpu")
        self._schedule = StreamSchedule(seed, latency)
        self._memory = Allocator(memory_bytes, self._schedule)
        self._local = threading.local()
        self._pin_fails = pin_fails
        self._copy_fails_at = copy_fails_at
        self._allocation_fails_at = allocation_fails_at
        self._allocations = 0
        self._pinned: dict[int, PinnedRange] = {}
        self._pinned_at_failure: set[int] = set()
        self.copies: int = 0
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
            self.enqueue(_copy(weakref.ref(tensor), target.raw, target.handle.block.poison, self._pinned_range(tensor)))
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
        """Memory in whole pages that is registered as long as something refers to it."""
        memory = pinned_mapping(nbytes, self.register, self.unregister)
        memory.fill(POISON)
        return memory

    def register(self, memory: NDArray[np.uint8], /) -> None:
        """Count existing memory as page-locked."""
        if self._pin_fails:
            raise RuntimeError(f"simulated device error: {memory.nbytes} bytes cannot be pinned")
        with self._schedule.lock:
            self._pinned[memory.ctypes.data] = PinnedRange(memory.nbytes)

    def unregister(self, memory: NDArray[np.uint8], /) -> None:
        """Undo ``register``. Queued copies from the memory then read poison.

        Raises:
            RuntimeError: Copies from the memory are queued.
        """
        with self._schedule.lock:
            found = self._pinned.pop(memory.ctypes.data)
            found.registered = False
            if found.reads:
                raise RuntimeError(f"pinned memory was unregistered before {found.reads} copies from it had run")

    def _pinned_range(self, tensor: torch.Tensor) -> PinnedRange | None:
        address = tensor.data_ptr()
        with self._schedule.lock:
            ranges = self._pinned.items()
            return next((found for start, found in ranges if start <= address < start + found.nbytes), None)

    def is_pinned(self, tensor: torch.Tensor, /) -> bool:
        """Whether the tensor is in page-locked memory."""
        return self._pinned_range(tensor) is not None

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

    def fail(self) -> None:
        """Let every later call fail, as after an illegal memory access. See ``freed_after_failure``."""
        with self._host_call():
            self._schedule.failed = True
        self._pinned_at_failure = set(self._pinned)

    @property
    def freed_after_failure(self) -> int:
        """How many blocks of device or page-locked memory were freed after ``fail``: CUDA would end the process."""
        return self._memory.returned + len(self._pinned_at_failure - set(self._pinned))

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
        """Page-locked memory, in whole pages."""
        with self._schedule.lock:
            return sum(found.nbytes for found in self._pinned.values())

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
                self._allocations += 1
                if self._allocations == self._allocation_fails_at:
                    raise torch.OutOfMemoryError(f"simulated device out of memory at allocation {self._allocations}")
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


def _copy(
    source: weakref.ref[torch.Tensor], target: torch.Tensor, poison: Callable[[], None], pinned: PinnedRange | None
) -> Callable[[], None]:
    if pinned is not None:
        pinned.reads += 1

    def run() -> None:
        tensor = source()
        if tensor is None or not (pinned is None or pinned.registered):
            poison()
        else:
            target.copy_(tensor.detach())
        if pinned is not None:
            pinned.reads -= 1

    return run


class SimulatedTensor(torch.Tensor):
    """A tensor in a simulated device's memory, created by ``SimulatedDevice.copy`` and by operations on such tensors.

    Operations return at once and run later, in stream order. Views share memory and its lifetime. Reading values
    (``item``, ``tolist``, ``numpy``, ``cpu``, ``to("cpu")``, ``print``, ``bool``, ``torch.equal``, a boolean mask)
    waits for the calling thread's current stream only. ``device`` is the CPU, so operations may mix simulated tensors
    with tensors and modules of the host.
    """

    simulated: SimulatedDevice
    raw: torch.Tensor
    handle: BlockHandle

    @staticmethod
    def __new__(cls, raw: torch.Tensor, handle: BlockHandle, simulated: SimulatedDevice) -> SimulatedTensor:
        """A tensor over the plain tensor ``raw``, whose memory is not reused while ``handle`` exists."""
        make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
        tensor = make(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=raw.device,
        )
        tensor.raw, tensor.handle, tensor.simulated = raw, handle, simulated
        return cast("SimulatedTensor", tensor)

    def record_stream(self, s: Any) -> None:
        """Call ``SimulatedDevice.record_stream``; torch's method accepts only torch's streams."""
        self.simulated.record_stream(self, s)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Redirect functions that read memory without the dispatcher; call all others unchanged."""
        if func in _host_reads and isinstance(args[0], SimulatedTensor):
            return _host_reads[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Queue the operation."""
        return _Operation(func, args, kwargs or {}).queue()


def _to_host(tensor: SimulatedTensor) -> torch.Tensor:
    tensor.simulated.synchronize_current()
    return tensor.raw.detach().clone()


def _to(tensor: SimulatedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # A torch.device may come from a simulated tensor and then means the simulated device; "cpu" means the host.
    if "cpu" in (args[:1] or (kwargs.get("device"),)):
        return _to_host(tensor).to(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.to(tensor, *args, **kwargs)


_host_reads: dict[Any, Callable[..., Any]] = {
    torch.Tensor.cpu: lambda tensor, *args, **kwargs: _to_host(tensor),
    torch.Tensor.to: _to,
    torch.Tensor.numpy: lambda tensor, **kwargs: _to_host(tensor).numpy(),
    torch.Tensor.tolist: lambda tensor: _to_host(tensor).tolist(),
    torch.Tensor.__array__: lambda tensor, *args, **kwargs: np.asarray(_to_host(tensor).numpy(), *args, **kwargs),
    torch.Tensor.__repr__: lambda tensor, **kwargs: f"simulated {_to_host(tensor)!r}",
    torch.Tensor.__format__: lambda tensor, spec: format(_to_host(tensor), spec),
    torch.Tensor.data_ptr: lambda tensor: tensor.raw.data_ptr(),
}


class _Operation:
    """One call of torch's dispatcher with simulated tensors among its arguments."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.returns = func._schema.returns
        self.inputs = [tensor for tensor in _tensors((*args, *kwargs.values())) if isinstance(tensor, SimulatedTensor)]
        self.simulated = self.inputs[0].simulated
        if any(tensor.simulated is not self.simulated for tensor in self.inputs):
            raise RuntimeError(f"{func}: tensors of two simulated devices in one operation")
        self.written = [
            tensor
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors((args[position] if position < len(args) else kwargs.get(argument.name),))
        ]
        self.args = _map(_raw, args)
        self.kwargs = {name: _map(_raw, value) for name, value in kwargs.items()}
        self.call = functools.partial(func, *self.args, **self.kwargs)

    def queue(self) -> Any:
        if torch.Tag.inplace_view in self.func.tags:
            raise NotImplementedError(f"simulated tensors cannot change their shape in place ({self.func})")
        if any(value.alias_info is not None and not value.alias_info.is_write for value in self.returns):
            # Views do not access memory, so they are created at once.
            handle, simulated = self.inputs[0].handle, self.simulated
            return _map(lambda raw: SimulatedTensor(raw, handle, simulated), self.call())
        if any("Tensor" not in str(value.type) for value in self.returns):
            self.simulated.synchronize_current()  # a number for the host
            return self.call()
        if any(not isinstance(tensor, SimulatedTensor) for tensor in self.written):
            # Writes host memory (an optimizer's parameters, say), which the host may read without waiting.
            return self._run_now()
        try:
            like = self._shapes()
        except Exception:
            return self._run_now()
        value, outputs = self._allocate(like)
        # The queued function refers to plain memory, not to simulated tensors: a kernel keeps no tensor alive.
        call, returns = self.call, self.returns
        self.simulated.enqueue(lambda: _fill(outputs, _new_tensors(returns, call())))
        return value

    def _run_now(self) -> Any:
        self.simulated.synchronize_current()
        result = self.call()
        value, outputs = self._allocate(result)
        computed = _new_tensors(self.returns, result)
        self.simulated.enqueue(lambda: _fill(outputs, computed))
        return value

    def _shapes(self) -> Any:
        """The result as tensors without memory."""
        if all(value.alias_info is not None for value in self.returns):
            return None if len(self.returns) == 1 else (None,) * len(self.returns)
        key = (self.func, _signature(self.args), _signature(tuple(self.kwargs.items())))
        if key not in _shapes:
            kwargs = {name: _map(_meta, value) for name, value in self.kwargs.items()}
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
            if len(_shapes) > 10_000:
                _shapes.clear()
            _shapes[key] = self.func(*_map(_meta, self.args), **kwargs)
        return _shapes[key]

    def _allocate(self, like: Any) -> tuple[Any, list[torch.Tensor]]:
        """The result as simulated tensors, and the plain memory of its new ones."""
        outputs: list[torch.Tensor] = []
        written = iter(self.written)

        def new(tensor: torch.Tensor) -> SimulatedTensor:
            output = self.simulated.empty(tensor.size(), tensor.stride(), tensor.dtype)
            outputs.append(output.raw)
            return output

        values = [
            _map(new, item) if value.alias_info is None else next(written)
            for value, item in zip(self.returns, _items(self.returns, like), strict=True)
        ]
        return (values[0] if len(values) == 1 else tuple(values) or None), outputs


# Without these, `check_copier` takes 1.5 times as much CPU time.
_shapes: dict[Any, Any] = {}


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    # The dispatcher's arguments and results nest only in lists and tuples; torch's pytree is slower.
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([_map(function, item) for item in value])
    return value


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_signature(item) for item in value])
    return type(value), value


def _items(returns: Sequence[Any], result: Any) -> tuple[Any, ...]:
    if not returns:
        return ()
    return (result,) if len(returns) == 1 else tuple(result)


def _new_tensors(returns: Sequence[Any], result: Any) -> list[torch.Tensor]:
    """The tensors of a result that are not aliases of arguments."""
    pairs = zip(returns, _items(returns, result), strict=True)
    return _tensors(item for value, item in pairs if value.alias_info is None)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.raw if isinstance(tensor, SimulatedTensor) else tensor.detach()


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _fill(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
