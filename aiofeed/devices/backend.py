"""The seam to a device: streams, events, copies and page-locked memory. Imports without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, runtime_checkable

from aiofeed.core.errors import DeviceCopyError
from aiofeed.devices import cuda

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Stream: TypeAlias = Any
"""A queue of work on a device, first in first out. Only the backend that made it looks inside."""


# Streams are for good. A stream made per epoch would leave a pool of device memory behind each time.
_side_streams: dict[torch.device, Stream] = {}
_side_streams_lock = threading.Lock()


class Event(Protocol):
    """A mark in a stream: complete once everything queued before it is."""

    def query(self) -> bool:
        """Whether it is complete. Does not block."""
        ...

    def synchronize(self) -> Any:
        """Block the calling thread until it is complete."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """What aiofeed asks of a device. ``device=`` takes any object that has these.

    Optional: ``memory() -> (free, total)``, in bytes, or ``None`` where it is not known; ``interprocess()``, for memory
    that other processes use (``aiofeed.processes.ipc.cuda_ipc.SharedDevice``).
    """

    name: str
    """How errors and reports name the device: ``"cuda:0"``."""
    device: torch.device
    """What tensors on it give as their ``device``."""

    def enter_thread(self) -> None:
        """Make the device current in the calling thread: current device and current stream are thread-local."""
        ...

    def side_stream(self) -> Stream:
        """The stream of copies: one per device for the whole process, because each stream has its own memory pool."""
        ...

    def current_stream(self) -> Stream:
        """The stream to which the calling thread's work on this device goes."""
        ...

    def use_stream(self, stream: Stream, /) -> AbstractContextManager[None]:
        """Make a stream current in the calling thread, and restore what was current at exit. Nests."""
        ...

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Queue a copy to the device on the current stream; dtype and, where dense, strides are kept.

        A tensor that is there already comes back itself. The host's memory is read when the copy runs: it must be
        kept, and kept unchanged, until an event recorded after the copy is complete.
        """
        ...

    def record(self, stream: Stream, /) -> Event:
        """An event after everything queued on a stream so far."""
        ...

    def wait(self, stream: Stream, event: Event, /) -> None:
        """Let later work on a stream wait for an event. The host does not wait."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: Stream, /) -> None:
        """Keep a tensor's memory, once it is dropped, until the work that is queued on a stream by then is done.

        Nothing happens for tensors that are not on this device.
        """
        ...

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Page-locked host memory, uint8 [nbytes], contents undefined.

        Raises:
            RuntimeError: memory cannot be pinned here.
        """
        ...

    def is_pinned(self, tensor: torch.Tensor, /) -> bool:
        """Whether a host tensor is in page-locked memory."""
        ...


class TorchBackend:
    """An accelerator as torch sees it. Made by ``devices.resolve_device``.

    Args:
        device: with an index, e.g. ``torch.device("cuda", 0)``.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self.name = str(device)
        self._new_stream: Callable[[], Any] = lambda: torch.Stream(device)
        self._new_event: Callable[[], Any] = lambda: torch.Event(device)
        self._current: Callable[[], Any] = lambda: torch.accelerator.current_stream(device)
        self._here: Callable[[], AbstractContextManager[object]] = partial(_device_current, device.index)
        if device.type == "cuda":
            # torch.Event cannot wait without spinning, which would take a core from the decoders while a copy runs;
            # CUDA's own can, and it records CUDA's own streams only.
            module: Any = torch.cuda  # in part without types
            self._new_stream = lambda: module.Stream(device)
            self._new_event = lambda: module.Event(blocking=True)
            self._current = lambda: module.current_stream(device)
            # Setting a device starts it and takes half a gigabyte of its memory. Going back to one that is current by
            # default alone, every rank would do so to the first; this context only remembers it.
            self._here = lambda: module.device(device)
            # What else a backend may have: shared memory is page-locked by these, once, and copied from directly.
            # Without them it is copied to memory from `pin` first.
            self.register: Callable[[NDArray[np.uint8]], None] = partial(cuda.register, device)
            self.unregister: Callable[[NDArray[np.uint8]], None] = partial(cuda.unregister, device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def enter_thread(self) -> None:
        """Make the device current in the calling thread, which is ours: graphs may be captured in others meanwhile."""
        _set_device_index(self.device.index)
        if self.device.type == "cuda":
            cuda.set_capture_mode(cuda.THREAD_LOCAL)

    def side_stream(self) -> Stream:
        """The process-wide stream of copies; the current stream where the device has only one."""
        with _side_streams_lock:
            if self.device not in _side_streams:
                # Metal has one stream, and copies and work take turns on it.
                one_stream = self.device.type == "mps"
                _side_streams[self.device] = self._current() if one_stream else self._new_stream()
            return _side_streams[self.device]

    def current_stream(self) -> Stream:
        """The calling thread's current stream of this device."""
        return self._current()

    @contextmanager
    def use_stream(self, stream: Stream, /) -> Iterator[None]:
        """Make a stream current. Setting it by hand nests, which torch's own context manager long did not."""
        import torch

        # set_stream also makes the stream's device current, so that one is restored last.
        with self._here():
            before = self._current()
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Queue a copy on the current stream."""
        return tensor.to(self.device, non_blocking=True)

    def record(self, stream: Stream, /) -> Event:
        """An event after everything queued on a stream so far."""
        event = self._new_event()
        event.record(stream)
        return cast("Event", event)

    def wait(self, stream: Stream, event: Event, /) -> None:
        """Let later work on a stream wait for an event."""
        stream.wait_event(event)

    def record_stream(self, tensor: torch.Tensor, stream: Stream, /) -> None:
        """``record_stream``, for every part of a sparse tensor too.

        Raises:
            DeviceCopyError: this kind of device has none, and without it memory would be used again too early.
        """
        if tensor.device != self.device or self.device.type == "mps":  # Metal has one stream, and no record_stream.
            return
        try:
            for part in _strided_parts(tensor):
                part.record_stream(stream)
        except NotImplementedError as error:
            raise DeviceCopyError(
                f"torch has no record_stream for {self.name}: memory of a batch that is dropped would be used again "
                f"while work on it is still queued. Use device=None, and batch.to({self.name!r}) in the step"
            ) from error

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Memory from torch's own pinned allocator, which is the only one whose copies torch knows to be safe."""
        import torch

        with cuda.allocating(self.device) if self.device.type == "cuda" else nullcontext():
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if nbytes and not tensor.is_pinned():
            raise RuntimeError(f"torch gave pageable memory where {nbytes} pinned bytes were asked for")
        return tensor.numpy()

    def is_pinned(self, tensor: torch.Tensor, /) -> bool:
        """Whether torch knows the tensor's memory as page-locked."""
        return tensor.is_pinned()

    def memory(self) -> tuple[int, int] | None:
        """Bytes that can still be had, what torch keeps for later included, and all there are; ``None``: unknown."""
        import torch

        if self.device.type != "cuda":
            ask = getattr(torch.accelerator, "get_memory_info", None)
            try:
                return None if ask is None else ask(self.device)
            except RuntimeError:  # allocators that cannot tell: Metal's had no such function for long
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
        return [tensor]  # a jagged one sees to its parts itself
    indices = [tensor.crow_indices(), tensor.col_indices()] if by_row else [tensor.ccol_indices(), tensor.row_indices()]
    return [*indices, tensor.values()]


@contextmanager
def _device_current(index: int) -> Iterator[None]:
    before = current_device_index()
    _set_device_index(index)
    try:
        yield
    finally:
        _set_device_index(before)


def current_device_index() -> int:
    """Of the accelerator that is current in the calling thread."""
    from torch import accelerator

    # torch 2.6 has only the older names, which later versions deprecate.
    get = getattr(accelerator, "current_device_index", None) or accelerator.current_device_idx
    return int(get())


def _set_device_index(index: int) -> None:
    from torch import accelerator

    (getattr(accelerator, "set_device_index", None) or accelerator.set_device_idx)(index)


class _CompletedEvent:
    """An event that is complete: nothing is ever queued on the host."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""


class CpuBackend:
    """A device backend of the host: copies are made at once, there are no streams, and nothing is page-locked."""

    name = "cpu"

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def enter_thread(self) -> None:
        """Nothing to do."""

    def side_stream(self) -> None:
        """``None``, as every stream here."""
        return None

    def current_stream(self) -> None:
        """``None``."""
        return None

    @contextmanager
    def use_stream(self, stream: object, /) -> Iterator[None]:
        """Nothing changes."""
        yield

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """A copy, always: the memory it is read from is used again. Strides are kept where dense."""
        return tensor.clone()

    def record(self, stream: object, /) -> _CompletedEvent:
        """An event that is complete."""
        return _CompletedEvent()

    def wait(self, stream: object, event: object, /) -> None:
        """Nothing to wait for."""

    def record_stream(self, tensor: torch.Tensor, stream: object, /) -> None:
        """Nothing to do: the host frees memory when nobody uses it."""

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Pageable memory, which is as good where nothing is copied by itself."""
        import numpy as np

        return np.empty(nbytes, np.uint8)

    def is_pinned(self, tensor: torch.Tensor, /) -> bool:
        """False."""
        return False
