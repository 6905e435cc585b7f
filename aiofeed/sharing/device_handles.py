"""Device memory that two processes have: CUDA's interprocess handles, as torch gives them. All that knows CUDA is here.

torch counts who has a storage open, in memory of its own, and keeps a storage that its owner has dropped until the
last one has let go; it also makes the event after which the memory may be read. What it cannot do is to keep the
memory of a process that has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from aiofeed.sharing.tensor_messages import Handle

if TYPE_CHECKING:
    import torch


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

    def export(self, tensor: torch.Tensor, /) -> Handle:
        """The handle of a tensor's storage, for one process to open; ``HandleError`` where there is none."""
        ...

    def open(self, handle: Handle, wanted: torch.device | None, /) -> torch.UntypedStorage:
        """The storage of a handle; ``HandleError`` where it cannot be opened, or is not on the wanted device."""
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

    def export(self, tensor: torch.Tensor) -> Handle:
        """A handle and one count. Expandable segments, some containers and some drivers have none."""
        identity = _uuid(tensor.device.index)
        storage: Any = tensor.untyped_storage()  # the method is there, but torch's stubs leave it out
        if storage.nbytes() == 0:
            return Handle(identity, b"", 0, 0, b"", 0, b"", False)
        try:
            _, allocation, nbytes, offset, counter, counter_offset, event, event_needed = storage._share_cuda_()
        except RuntimeError as error:
            raise HandleError(_first_line(error)) from error
        return Handle(identity, allocation, nbytes, offset, counter, counter_offset, event, event_needed)

    def open(self, handle: Handle, wanted: torch.device | None) -> torch.UntypedStorage:
        """Map the allocation; the current stream waits for the event."""
        import torch

        index = _index(handle.device)
        try:
            if index is None:
                raise HandleError(f"GPU {handle.device} is not visible to this process")
            if wanted is not None and wanted != torch.device("cuda", index):
                raise HandleError(f"the tensors lie on cuda:{index}, and {wanted} was asked for")
            untyped: Any = torch.UntypedStorage
            if handle.nbytes == 0:
                return cast("torch.UntypedStorage", untyped(0, device=torch.device("cuda", index)))
            torch.cuda.init()  # type: ignore[no-untyped-call]
            try:
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
            except RuntimeError as error:
                raise HandleError(_first_line(error)) from error
            return storage
        except HandleError:
            _uncount(handle)
            raise

    def find(self, identity: str) -> torch.device | None:
        """By UUID; else the current device."""
        import torch

        if not torch.cuda.is_available():
            return None
        index = _index(identity)
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _uuid(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def _index(uuid: str) -> int | None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((index for index in range(count) if _uuid(index) == uuid), None)


def _uncount(handle: Handle) -> None:
    """Tell the owner's torch that nobody opens this one, or it keeps the memory for good."""
    import torch

    if not handle.counter:
        return
    untyped: Any = torch.UntypedStorage
    try:
        untyped._release_ipc_counter_cuda(handle.counter, handle.counter_offset)
    except (RuntimeError, NotImplementedError, AttributeError):
        pass  # without CUDA there is no such call, and the owner's memory is kept until it ends


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
