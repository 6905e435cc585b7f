"""Device memory that two processes have: CUDA's interprocess handles, as torch gives them. All that knows CUDA is here.

torch counts who has a storage open, in memory of its own, and keeps a storage that its owner has dropped until the
last one has let go; it also makes the event after which the memory may be read. What it cannot do is to keep the
memory of a process that has ended.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from aiofeed.processes.ipc.schema import DeviceMemoryHandle

if TYPE_CHECKING:
    import torch

    from aiofeed.devices.backend import DeviceBackend, Stream


# cudaIpcEventHandle_t; opening what is no handle is not defined.
_EVENT_BYTES = 64
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


# Streams are for good, as those of copies are.
_streams: dict[torch.device, Any] = {}
_streams_lock = threading.Lock()


class HandleError(Exception):
    """Device memory cannot be handed on, or opened, here; the message says why."""


class DeviceHandles(Protocol):
    """What is asked of a device whose memory is shared."""

    def holds(self, tensor: torch.Tensor, /) -> bool:
        """Whether a tensor lies in memory of this kind."""
        ...

    def identity(self, tensor: torch.Tensor, /) -> str:
        """What the device of a tensor is called in every process."""
        ...

    def settle(self, tensor: torch.Tensor, /) -> None:
        """Wait until what is queued on a tensor's device is done."""
        ...

    def export(self, tensor: torch.Tensor, /) -> DeviceMemoryHandle:
        """The handle of a tensor's storage, for one process to open; ``HandleError`` where there is none."""
        ...

    def open(self, handle: DeviceMemoryHandle, wanted: torch.device | None, /) -> torch.UntypedStorage:
        """The storage of a handle; ``HandleError`` where it cannot be opened, or is not on the wanted device."""
        ...

    def forget(self, handle: DeviceMemoryHandle, /) -> None:
        """Nobody has opened, or will open, what ``export`` gave this handle for: it is not kept for that. Once."""
        ...

    def find(self, identity: str, /) -> torch.device | None:
        """The device of that identity, or else any of its kind; ``None`` where there is none."""
        ...


class CudaHandles:
    """CUDA IPC."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is a CUDA tensor."""
        return tensor.device.type == "cuda"

    def identity(self, tensor: torch.Tensor) -> str:
        """The UUID of its device: indices depend on CUDA_VISIBLE_DEVICES."""
        return _uuid(tensor.device.index)

    def settle(self, tensor: torch.Tensor) -> None:
        """Whoever opens it then waits for nothing."""
        import torch

        torch.cuda.synchronize(tensor.device)

    def export(self, tensor: torch.Tensor) -> DeviceMemoryHandle:
        """A handle and one count. Expandable segments, some containers and some drivers have none."""
        identity = _uuid(tensor.device.index)
        storage: Any = tensor.untyped_storage()  # the method is there, but torch's stubs leave it out
        if storage.nbytes() == 0:
            return DeviceMemoryHandle(identity, b"", 0, 0, b"", 0, b"", False)
        try:
            _, allocation, nbytes, offset, counter, counter_offset, event, event_needed = storage._share_cuda_()
        except RuntimeError as error:
            raise HandleError(first_line(error)) from error
        return DeviceMemoryHandle(identity, allocation, nbytes, offset, counter, counter_offset, event, event_needed)

    def open(self, handle: DeviceMemoryHandle, wanted: torch.device | None) -> torch.UntypedStorage:
        """Map the allocation; the current stream waits for the event, where that is needed."""
        try:
            return _opened(handle, wanted)
        except HandleError:
            self.forget(handle)
            raise
        except RuntimeError as error:  # in a fork of a process that had begun to use CUDA, for one
            self.forget(handle)
            raise HandleError(first_line(error)) from error

    def forget(self, handle: DeviceMemoryHandle) -> None:
        """Take back the count of one export. Once: torch takes one below zero for a large one, and keeps the memory."""
        import torch

        if not handle.counter:
            return
        untyped: Any = torch.UntypedStorage
        try:
            untyped._release_ipc_counter_cuda(handle.counter, handle.counter_offset)
        except (RuntimeError, NotImplementedError, AttributeError):
            pass  # without CUDA there is no such call, and the owner's memory is kept until it ends

    def find(self, identity: str) -> torch.device | None:
        """By UUID; else the current device."""
        import torch

        if not torch.cuda.is_available():
            return None
        try:
            index = _index(identity)
            return torch.device("cuda", torch.cuda.current_device() if index is None else index)
        except RuntimeError:
            return None  # there is one, but not for this process, which is a fork


class CudaSlots:
    """CUDA's memory and interprocess events for slots of a ring; see ``SharedDevice``.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handles = CudaHandles()

    def identity(self) -> str:
        """The UUID of the GPU."""
        return _uuid(self._device.index)

    def stream(self) -> Any:
        """One per device for the process."""
        import torch

        cuda: Any = torch.cuda  # in part without types
        with _streams_lock:
            if self._device not in _streams:
                _streams[self._device] = cuda.Stream(self._device)
            return _streams[self._device]

    def holds(self, value: object) -> bool:
        """Whether it is a tensor on this GPU."""
        import torch

        return isinstance(value, torch.Tensor) and value.device == self._device

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of torch's allocator, whose blocks CUDA exports."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def export(self, memory: torch.Tensor) -> DeviceMemoryHandle:
        """A handle and one count, for one process."""
        import torch

        if torch.version.hip is not None:
            # github.com/ROCm/hip/issues/3778: they count as complete once they are recorded.
            raise HandleError("ROCm's events do not tell other processes when work is complete")
        if (name := _expandable()) is not None:
            # Some versions of torch export these by descriptors, which not every container lets through.
            raise HandleError(f"{name} sets expandable_segments, whose memory is not exported here")
        return self._handles.export(memory)

    def open(self, handle: DeviceMemoryHandle) -> torch.Tensor:
        """Map the allocation. Nothing waits: not for the event of the export either."""
        import torch

        if handle.nbytes < 1:
            raise HandleError(f"a handle of {handle.nbytes} bytes")
        # `filled` tells when it may be read. A stream that waits for torch's event would wait for ever if the server
        # were killed before that is complete.
        storage = self._handles.open(msgspec.structs.replace(handle, event_needed=False), self._device)
        empty: Any = torch.empty(0, dtype=torch.uint8, device=self._device)
        return cast("torch.Tensor", empty.set_(storage, 0, (handle.nbytes,), (1,)))

    def forget(self, handle: DeviceMemoryHandle) -> None:
        """Take back the count of one export."""
        self._handles.forget(handle)

    def event(self) -> Any:
        """An event of torch's own class, interprocess and without timing."""
        import torch

        cuda: Any = torch.cuda
        return cuda.Event(interprocess=True)

    def export_event(self, event: Any) -> bytes:
        """CUDA's handle. An event that was never recorded is made on the current device, so that is set."""
        import torch

        cuda: Any = torch.cuda
        try:
            with cuda.device(self._device):
                return bytes(event.ipc_handle())
        except RuntimeError as error:
            raise HandleError(first_line(error)) from error

    def open_event(self, handle: bytes) -> Any:
        """The event of another process, to be recorded and waited for as one of this process's."""
        import torch

        if len(handle) != _EVENT_BYTES:
            raise HandleError(f"an event's handle has {_EVENT_BYTES} bytes, this one {len(handle)}")
        cuda: Any = torch.cuda
        try:
            return cuda.Event.from_ipc_handle(self._device, handle)
        except RuntimeError as error:
            raise HandleError(first_line(error)) from error

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A kernel or a copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        """The memory belongs to the current stream."""
        return source.clone()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """torch waits for the current stream, and for no other."""
        return tensor.cpu()


def _expandable() -> str | None:
    """The variable that asks for memory without handles."""
    for name in _ALLOCATOR_SETTINGS:
        if re.search(r"expandable_segments\s*:\s*true", os.environ.get(name, ""), re.IGNORECASE):
            return name
    return None


def _uuid(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def _index(uuid: str) -> int | None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((index for index in range(count) if _uuid(index) == uuid), None)


def _opened(handle: DeviceMemoryHandle, wanted: torch.device | None) -> torch.UntypedStorage:
    import torch

    if handle.nbytes < 0 or handle.offset < 0 or handle.counter_offset < 0:
        raise HandleError(f"a handle of {handle.nbytes} bytes at {handle.offset}")
    if handle.event_needed and len(handle.event) != _EVENT_BYTES:
        raise HandleError(f"an event's handle has {_EVENT_BYTES} bytes, this one {len(handle.event)}")
    index = _index(handle.device)
    if index is None:
        raise HandleError(f"GPU {handle.device} is not visible to this process")
    if wanted is not None and wanted != torch.device("cuda", index):
        raise HandleError(f"the tensors lie on cuda:{index}, and {wanted} was asked for")
    untyped: Any = torch.UntypedStorage
    if handle.nbytes == 0:
        return cast("torch.UntypedStorage", untyped(0, device=torch.device("cuda", index)))
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage: torch.UntypedStorage = untyped._new_shared_cuda(
        index,
        handle.allocation,
        handle.nbytes,
        handle.offset,
        handle.counter,
        handle.counter_offset,
        handle.event,
        handle.event_needed,
    )
    return storage


def first_line(error: Exception) -> str:
    """What is said of an error; CUDA's go on with advice for whoever debugs torch."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class SharedEvent(Protocol):
    """An event that two processes know."""

    def record(self, stream: Stream, /) -> Any:
        """Complete once everything queued on the stream so far is."""
        ...

    def query(self) -> bool:
        """Whether it is complete. Does not block."""
        ...


class SharedDevice(Protocol):
    """A device backend's memory and events, as other processes of the machine may use them.

    A device backend of your own has them by a method ``interprocess()`` that returns one of these.
    """

    def identity(self) -> str:
        """What the device is called in every process, at most 128 letters."""
        ...

    def stream(self) -> Stream:
        """A stream for filling slots: one for the whole process, and not the one of copies from the host."""
        ...

    def holds(self, value: object, /) -> bool:
        """Whether a value is a tensor in the device's memory."""
        ...

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        """uint8 [nbytes] of device memory, for work on the current stream; ``RuntimeError`` where there is no more."""
        ...

    def export(self, memory: torch.Tensor, /) -> DeviceMemoryHandle:
        """The handle of what ``allocate`` gave, for one process; ``HandleError`` where there is none."""
        ...

    def open(self, handle: DeviceMemoryHandle, /) -> torch.Tensor:
        """Another process's memory, uint8 [nbytes]; ``HandleError`` where it cannot be opened."""
        ...

    def forget(self, handle: DeviceMemoryHandle, /) -> None:
        """Nobody has opened, or will open, what ``export`` gave this handle for: it is not kept for that."""
        ...

    def event(self) -> SharedEvent:
        """An event to be exported."""
        ...

    def export_event(self, event: SharedEvent, /) -> bytes:
        """Its handle, for any process; ``HandleError`` where there is none."""
        ...

    def open_event(self, handle: bytes, /) -> SharedEvent:
        """Another process's event; ``HandleError`` where it cannot be opened."""
        ...

    def put(self, target: torch.Tensor, source: torch.Tensor, /) -> None:
        """Queue a copy between tensors of the device, of the same shape and dtype, on the current stream."""
        ...

    def clone(self, source: torch.Tensor, /) -> torch.Tensor:
        """Queue a copy to memory of this process's own on the current stream; strides are kept where dense."""
        ...

    def to_host(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """A copy in host memory, after what the current stream has queued. Blocks."""
        ...


def shared_device(backend: DeviceBackend) -> SharedDevice | None:
    """What of a backend other processes can use; ``None`` for one whose memory stays its process's."""
    interprocess = getattr(backend, "interprocess", None)
    if interprocess is not None:
        shared: SharedDevice = interprocess()
        return shared
    return CudaSlots(backend.device) if backend.device.type == "cuda" else None
