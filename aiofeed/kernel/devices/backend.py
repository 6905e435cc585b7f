"""The interface to a device: streams, events, copies and page-locked memory. Does not import torch at import time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from aiofeed.kernel.core.errors import DeviceCopyError
from aiofeed.kernel.core.faces import BaseDevice, Event, Stream
from aiofeed.kernel.devices import cuda
from aiofeed.kernel.runtime.buffers import pinned_mapping

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

log: logging.Logger = logging.getLogger("aiofeed.devices")

# One side stream per device for the whole process: each stream has a memory pool of its own, so a new stream per epoch
# would leak one pool per epoch.
_side_streams: dict[torch.device, Stream] = {}
_side_streams_lock = threading.Lock()


class AllEvents:
    """An event that is complete when several events are; without events, always."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def query(self) -> bool:
        """Return whether all events are complete."""
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        """Block until all events are complete."""
        for event in self._events:
            event.synchronize()


def poll_pauses() -> Iterator[float]:
    """Yield the pauses between polls of an event, in seconds: 20 us, doubled each time up to 1 ms."""
    pause_s = 20e-6
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, 1e-3)


def poll(ready: Callable[[], bool]) -> tuple[float, float] | None:
    """Block the calling thread until ``ready()`` returns true; pause between calls as ``poll_pauses`` says.

    A signal handler can raise out of it, and ``ready`` may raise. ``Event.synchronize`` allows neither, and the device
    may have minutes of queued work.

    Returns:
        When the wait began and ended, in ``time.perf_counter`` seconds; ``None`` if ``ready()`` was true at once.
    """
    if ready():
        return None
    began = time.perf_counter()
    for pause_s in poll_pauses():
        time.sleep(pause_s)
        if ready():
            break
    return began, time.perf_counter()


def is_complete(event: Event, device: str) -> bool:
    """Return whether an event is complete; ``device`` is the name for the error.

    Raises:
        DeviceCopyError: Work that was queued before the event has failed.
    """
    try:
        return event.query()
    except Exception as error:
        raise DeviceCopyError(f"{device} failed in work queued before: {type(error).__name__}: {error}") from error


def is_out_of_memory(error: BaseException | None) -> TypeGuard[torch.OutOfMemoryError]:
    """Return whether an error is torch's for a device without enough free memory."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)


class TorchBackend(BaseDevice):
    """An accelerator that torch supports. Made by ``resolve_device``, which gives every device an index."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self.name: str = str(device)
        self._new_stream: Callable[[], Any] = lambda: torch.Stream(device)
        self._new_event: Callable[[], Any] = lambda: torch.Event(device)
        self._current: Callable[[], Any] = lambda: torch.accelerator.current_stream(device)
        self._here: Callable[[], AbstractContextManager[object]] = partial(_device_current, device.index)
        if device.type == "cuda":
            # torch.Event.synchronize spins and takes a core from the decoders while a copy runs. CUDA's own event can
            # block instead, but it records only CUDA's own streams.
            module: Any = torch.cuda  # in part without types
            self._new_stream = partial(cuda.new_stream, device)
            self._new_event = lambda: module.Event(blocking=True)
            self._current = lambda: module.current_stream(device)
            # Setting a device initialises it and takes half a gigabyte of its memory. Restoring the default device,
            # cuda:0, with set_device would initialise it on every rank; this context manager does not.
            self._here = lambda: module.device(device)
            # Optional members: they page-lock shared memory once, so that copies read it directly. Without them,
            # batches are first copied from shared memory to memory from `pin`.
            self.register: Callable[[NDArray[np.uint8]], None] = partial(cuda.register, device)
            self.unregister: Callable[[NDArray[np.uint8]], None] = partial(cuda.unregister, device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def enter_thread(self) -> None:
        """Make the device current in the calling thread, a thread of aiofeed; other threads may capture CUDA graphs."""
        _set_device_index(self.device.index)
        if self.device.type == "cuda":
            cuda.set_capture_mode(cuda.THREAD_LOCAL)

    def side_stream(self) -> Stream:
        """Return the process-wide stream for copies; on a device with a single stream, the current stream."""
        with _side_streams_lock:
            if self.device not in _side_streams:
                # Metal has a single stream for copies and other work.
                one_stream = self.device.type == "mps"
                _side_streams[self.device] = self._current() if one_stream else self._new_stream()
            return _side_streams[self.device]

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream of this device."""
        return self._current()

    @contextmanager
    def use_stream(self, stream: Stream, /) -> Iterator[None]:
        """Make a stream current. Can be nested; torch's own context manager could not be in older versions."""
        import torch

        # set_stream also makes the stream's device current, so restore the device last.
        with self._here():
            before = self._current()
            try:  # before the stream is set: Ctrl-C may come at any line
                torch.accelerator.set_stream(stream)
                yield
            finally:
                torch.accelerator.set_stream(before)

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Queue a copy on the current stream."""
        return tensor.to(self.device, non_blocking=True)

    def record(self, stream: Stream, /) -> Event:
        """Return an event after all work queued on a stream so far."""
        event = self._new_event()
        event.record(stream)
        return cast("Event", event)

    def wait(self, stream: Stream, event: Event, /) -> None:
        """Make later work on a stream wait for an event."""
        stream.wait_event(event)

    def record_stream(self, tensor: torch.Tensor, stream: Stream, /) -> None:
        """Call ``record_stream`` of the tensor, or of each part of a sparse tensor.

        Raises:
            DeviceCopyError: torch has no ``record_stream`` for this device, so memory would be reused too early.
        """
        if tensor.device != self.device or self.device.type == "mps":  # Metal has a single stream and no record_stream.
            return
        try:
            for part in _strided_parts(tensor):
                part.record_stream(stream)
        except NotImplementedError as error:
            raise DeviceCopyError(
                f"torch has no record_stream for {self.name}: the memory of a dropped batch would be reused while work "
                f"on it is still queued. Use device=None, and batch.to({self.name!r}) in the training step"
            ) from error

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Return memory registered with CUDA; on other devices, and if CUDA refuses, memory of torch's allocator.

        torch does not track copies from registered memory: keep a reference to it until they have completed.
        """
        import torch

        if self.device.type == "cuda" and cuda.REGISTERS_PINNED_MEMORY:
            try:
                return pinned_mapping(nbytes, self.register, self.unregister)
            except RuntimeError as error:  # Jetson boards, for example, may not support it
                log.debug("%d bytes cannot be registered with %s: %s", nbytes, self.name, error)
        with cuda.allocating(self.device):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if nbytes and not tensor.is_pinned():
            raise RuntimeError(f"torch returned pageable memory for a request of {nbytes} pinned bytes")
        return tensor.numpy()

    def memory(self) -> tuple[int, int] | None:
        """Return the free bytes, including torch's cached blocks, and the total; ``None`` if unknown."""
        import torch

        if self.device.type != "cuda":
            ask = getattr(torch.accelerator, "get_memory_info", None)
            try:
                return None if ask is None else ask(self.device)
            except RuntimeError:  # not implemented by this allocator; Metal's lacked it in older versions
                return None
        module: Any = torch.cuda  # in part without types
        free, total = module.mem_get_info(self.device)
        return free + module.memory_reserved(self.device) - module.memory_allocated(self.device), total


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    import torch

    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    if not by_row and tensor.layout not in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor]  # a jagged tensor's own record_stream handles its parts
    indices = [tensor.crow_indices(), tensor.col_indices()] if by_row else [tensor.ccol_indices(), tensor.row_indices()]
    return [*indices, tensor.values()]


@contextmanager
def _device_current(index: int) -> Iterator[None]:
    before = current_device_index()
    try:
        _set_device_index(index)
        yield
    finally:
        _set_device_index(before)


def current_device_index() -> int:
    """Return the index of the calling thread's current accelerator."""
    from torch import accelerator

    # torch 2.6 has only the older name; later versions deprecate it.
    get = getattr(accelerator, "current_device_index", None) or accelerator.current_device_idx
    return int(get())


def _set_device_index(index: int) -> None:
    from torch import accelerator

    (getattr(accelerator, "set_device_index", None) or accelerator.set_device_idx)(index)


class CpuBackend(BaseDevice):
    """The host as a device: copies run at once, there are no streams, and memory is pageable."""

    name = "cpu"

    def __init__(self) -> None:
        import torch

        self.device: torch.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def enter_thread(self) -> None:
        """Do nothing."""

    def side_stream(self) -> None:
        """Return ``None``, which stands for every stream of the host."""
        return None

    def current_stream(self) -> None:
        """Return ``None``."""
        return None

    @contextmanager
    def use_stream(self, stream: object, /) -> Iterator[None]:
        """Do nothing."""
        yield

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Return a copy, always, because the source memory is reused. Keeps the strides of dense tensors."""
        return tensor.clone()

    def record(self, stream: object, /) -> AllEvents:
        """Return a completed event: no work is ever queued on the host."""
        return AllEvents(())

    def wait(self, stream: object, event: object, /) -> None:
        """Do nothing: there is no queued work."""

    def record_stream(self, tensor: torch.Tensor, stream: object, /) -> None:
        """Do nothing: reference counting frees host memory."""

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Return pageable memory: no copy runs asynchronously, so pinned memory would not be faster."""
        import numpy as np

        return np.empty(nbytes, np.uint8)
