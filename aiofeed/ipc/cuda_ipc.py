"""Device memory in several processes: CUDA's interprocess handles, through torch. Only this module calls CUDA's IPC.

torch keeps a reference count of each exported storage in shared memory, and keeps a storage that its owner has dropped
until the last process has closed it. It also creates the event after which the memory may be read. The memory of a
process that has ended is gone.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import torch

from aiofeed.ipc.schema import DeviceMemoryHandle
from aiofeed.kernel.core.faces import BaseDevice
from aiofeed.kernel.devices import cuda

if TYPE_CHECKING:
    from aiofeed.kernel.core.faces import Stream


# Size of cudaIpcEventHandle_t; to open anything else is undefined behaviour.
_EVENT_BYTES = 64
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# One stream per device for the whole process, never destroyed, like the streams of copies.
_streams: dict[torch.device, Any] = {}
_streams_lock = threading.Lock()


class HandleError(Exception):
    """Device memory cannot be exported or opened in this process; the message says why."""


class CudaHandles:
    """Exports and opens tensors' storages through CUDA IPC, for ``share`` and ``attach_tensors``."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on a CUDA device."""
        return tensor.device.type == "cuda"

    def identity(self, tensor: torch.Tensor) -> str:
        """Return the UUID of the device; its index depends on CUDA_VISIBLE_DEVICES."""
        return _uuid(tensor.device.index)

    def synchronize(self, tensor: torch.Tensor) -> None:
        """Wait for the device, so that processes that open the tensor need not wait."""
        torch.cuda.synchronize(tensor.device)

    def export(self, tensor: torch.Tensor) -> DeviceMemoryHandle:
        """Return a handle of a tensor's storage with one reference, for one process.

        Raises:
            HandleError: Expandable segments cannot be exported, nor some containers' and drivers' memory.
        """
        identity = _uuid(tensor.device.index)
        storage: Any = tensor.untyped_storage()  # torch's stubs lack the method
        if storage.nbytes() == 0:
            return DeviceMemoryHandle(identity, b"", 0, 0, b"", 0, b"", False)
        try:
            _, allocation, nbytes, offset, counter, counter_offset, event, event_needed = storage._share_cuda_()
        except RuntimeError as error:
            raise HandleError(first_line(error)) from error
        return DeviceMemoryHandle(identity, allocation, nbytes, offset, counter, counter_offset, event, event_needed)

    def open(self, handle: DeviceMemoryHandle, wanted: torch.device | None) -> torch.UntypedStorage:
        """Return the storage of a handle; the current stream waits for the event if that is needed.

        Raises:
            HandleError: It cannot be opened, or is not on the wanted device. The handle's reference is taken back.
        """
        try:
            return _open_storage(handle, wanted)
        except (HandleError, RuntimeError) as error:  # RuntimeError: in a fork of a process that used CUDA, for example
            self.forget(handle)
            raise HandleError(first_line(error)) from error

    def forget(self, handle: DeviceMemoryHandle) -> None:
        """Take back the export of a handle that no process has opened or will open.

        Once per handle: a second call would make torch's unsigned count wrap around.
        """
        if not handle.counter:
            return
        untyped: Any = torch.UntypedStorage
        try:
            untyped._release_ipc_counter_cuda(handle.counter, handle.counter_offset)
        except (RuntimeError, NotImplementedError, AttributeError):
            pass  # this torch has no CUDA: the memory stays until the process that owns it ends

    def find(self, identity: str) -> torch.device | None:
        """Return the device with that UUID, else the current one; ``None`` if this process can use none."""
        if not torch.cuda.is_available():
            return None
        try:
            index = _index(identity)
            return torch.device("cuda", torch.cuda.current_device() if index is None else index)
        except RuntimeError:
            return None  # a fork of a process that used CUDA cannot use it


class CudaSharedDevice:
    """CUDA memory and interprocess events, as ``SharedDevice`` describes them.

    Args:
        device: A CUDA device with an index.
    """

    def __init__(self, device: torch.device) -> None:

        self._device = device
        self._handles = CudaHandles()
        self._cuda: Any = torch.cuda  # in part without types

    def identity(self) -> str:
        """Return the UUID of the GPU."""
        return _uuid(self._device.index)

    def stream(self) -> Any:
        """Return one stream per device for the whole process."""
        with _streams_lock:
            if self._device not in _streams:
                _streams[self._device] = cuda.new_stream(self._device)
            return _streams[self._device]

    def holds(self, value: object) -> bool:
        """Return whether a value is a tensor on this GPU."""
        return isinstance(value, torch.Tensor) and value.device == self._device

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of torch's caching allocator, which CUDA can export."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def export(self, memory: torch.Tensor) -> DeviceMemoryHandle:
        """Return a handle with one reference, for one process."""
        if torch.version.hip is not None:
            # github.com/ROCm/hip/issues/3778: other processes see an event as complete as soon as it is recorded.
            raise HandleError("ROCm's events do not tell other processes when work is complete")
        if (name := _expandable_segments()) is not None:
            # Some versions of torch export them by descriptors, which not every container allows.
            raise HandleError(f"{name} sets expandable_segments, whose memory aiofeed does not export")
        return self._handles.export(memory)

    def open(self, handle: DeviceMemoryHandle) -> torch.Tensor:
        """Map the allocation without waiting for the event of the export."""
        if handle.nbytes < 1:
            raise HandleError(f"a handle of {handle.nbytes} bytes")
        # The event `filled` of a block tells when it may be read. A stream that waits for torch's event would never
        # continue if the server were killed before that is complete.
        storage = self._handles.open(msgspec.structs.replace(handle, event_needed=False), self._device)
        empty: Any = torch.empty(0, dtype=torch.uint8, device=self._device)
        return cast("torch.Tensor", empty.set_(storage, 0, (handle.nbytes,), (1,)))

    def forget(self, handle: DeviceMemoryHandle) -> None:
        """Take back the reference of one export."""
        self._handles.forget(handle)

    def event(self) -> Any:
        """Return an interprocess event of torch, without timing."""
        return self._cuda.Event(interprocess=True)

    def export_event(self, event: Any) -> bytes:
        """Return CUDA's handle. torch creates an unrecorded event on the current device, so this sets the device."""
        try:
            with self._cuda.device(self._device):
                return bytes(event.ipc_handle())
        except RuntimeError as error:
            raise HandleError(first_line(error)) from error

    def open_event(self, handle: bytes) -> Any:
        """Return the event of another process, which this process can record and query."""
        if len(handle) != _EVENT_BYTES:
            raise HandleError(f"an event's handle has {_EVENT_BYTES} bytes, this one {len(handle)}")
        try:
            return self._cuda.Event.from_ipc_handle(self._device, handle)
        except RuntimeError as error:
            raise HandleError(first_line(error)) from error

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        """Queue a copy on the current stream, to which its memory belongs."""
        return source.clone()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to host memory; waits for the current stream only."""
        return tensor.cpu()


def _expandable_segments() -> str | None:
    """Return the environment variable that sets expandable segments, whose memory has no handles."""
    for name in _ALLOCATOR_SETTINGS:
        if re.search(r"expandable_segments\s*:\s*true", os.environ.get(name, ""), re.IGNORECASE):
            return name
    return None


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index(uuid: str) -> int | None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((index for index in range(count) if _uuid(index) == uuid), None)


def _open_storage(handle: DeviceMemoryHandle, wanted: torch.device | None) -> torch.UntypedStorage:
    if handle.nbytes < 0 or handle.offset < 0 or handle.counter_offset < 0:
        raise HandleError(f"a handle of {handle.nbytes} bytes at {handle.offset}")
    if handle.event_needed and len(handle.event) != _EVENT_BYTES:
        raise HandleError(f"an event's handle has {_EVENT_BYTES} bytes, this one {len(handle.event)}")
    index = _index(handle.device)
    if index is None:
        raise HandleError(f"GPU {handle.device} is not visible to this process")
    if wanted is not None and wanted != torch.device("cuda", index):
        raise HandleError(f"the tensors are on cuda:{index}, and {wanted} was requested")
    untyped: Any = torch.UntypedStorage
    if handle.nbytes == 0:
        return cast("torch.UntypedStorage", untyped(0, device=torch.device("cuda", index)))
    torch.cuda.init()
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
    """Return the first line of an error's message; CUDA's errors continue with advice for debugging torch."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class SharedEvent(Protocol):
    """An event that several processes can use."""

    def record(self, stream: Stream, /) -> Any:
        """Mark the event to complete when everything queued on the stream so far has completed."""

    def query(self) -> bool:
        """Return whether it is complete. Does not block."""


class SharedDevice(Protocol):
    """A device backend's memory and events, as other processes of the machine can use them.

    A device backend of your own supports this by a method ``interprocess()`` that returns one.
    """

    def identity(self) -> str:
        """Return the device's name, the same in every process; at most 128 characters."""

    def stream(self) -> Stream:
        """Return the stream that fills blocks: one per process, and not the stream of copies from the host."""

    def holds(self, value: object, /) -> bool:
        """Return whether a value is a tensor in the device's memory."""

    def allocate(self, nbytes: int, /) -> torch.Tensor:
        """Allocate uint8 [nbytes] for work on the current stream; ``RuntimeError`` if there is not enough memory."""

    def export(self, memory: torch.Tensor, /) -> DeviceMemoryHandle:
        """Return a handle of memory from ``allocate``, for one process; ``HandleError`` if it cannot be exported."""

    def open(self, handle: DeviceMemoryHandle, /) -> torch.Tensor:
        """Another process's memory, uint8 [nbytes]; ``HandleError`` if it cannot be opened."""

    def forget(self, handle: DeviceMemoryHandle, /) -> None:
        """Take back the export of a handle that no process has opened or will open."""

    def event(self) -> SharedEvent:
        """Return a new event that can be exported."""

    def export_event(self, event: SharedEvent, /) -> bytes:
        """Return a handle of an event, for any process; ``HandleError`` if it cannot be exported."""

    def open_event(self, handle: bytes, /) -> SharedEvent:
        """Another process's event; ``HandleError`` if it cannot be opened."""

    def put(self, target: torch.Tensor, source: torch.Tensor, /) -> None:
        """Queue a copy between tensors of the device, of the same shape and dtype, on the current stream."""

    def clone(self, source: torch.Tensor, /) -> torch.Tensor:
        """Queue a copy to this process's own memory on the current stream; dense strides are preserved."""

    def to_host(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Return a copy in host memory, after the work of the current stream. Blocks."""


def shared_device(backend: BaseDevice) -> SharedDevice | None:
    """Return a backend's memory and events for other processes; ``None`` if its memory cannot be shared."""
    shared: SharedDevice | None = backend.interprocess()
    if shared is not None:
        return shared
    return CudaSharedDevice(backend.device) if backend.device.type == "cuda" else None
