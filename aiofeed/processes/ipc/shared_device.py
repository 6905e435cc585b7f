"""The seam to a device whose memory several processes use: what a server's ring and its consumers ask of it.

The rules of events between processes, which the ring keeps:

- The server makes every event, so that none goes with the consumer that records it.
- An event is recorded before word of it is sent, and looked at once that word has come; it is recorded again only
  after the other side has said that it is done with the slot. One that was never recorded is complete.
- Work is queued behind an event of another process only once that is complete. A stream that waits for one whose
  process has died may wait for ever, and with it all that is queued there: one killed consumer would stop the server.
  So the host looks, where it blocks nobody, and the device has nothing to wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from aiofeed.processes.ipc.cuda_ipc import CudaSlots

if TYPE_CHECKING:
    import torch

    from aiofeed.devices.backend import DeviceBackend, Stream
    from aiofeed.processes.ipc.schema import Handle


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

    def export(self, memory: torch.Tensor, /) -> Handle:
        """The handle of what ``allocate`` gave, for one process; ``HandleError`` where there is none."""
        ...

    def open(self, handle: Handle, /) -> torch.Tensor:
        """Another process's memory, uint8 [nbytes]; ``HandleError`` where it cannot be opened."""
        ...

    def forget(self, handle: Handle, /) -> None:
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
