"""One device or several: what ``device=`` means where a list will do too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from aiofeed.device import DeviceBackend, resolve_device
from aiofeed.host_backend import HostBackend

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Device: TypeAlias = "str | int | torch.device | DeviceBackend | None"
"""What names one device."""


class DeviceGroup:
    """Several devices that share each batch.

    Args:
        backends: in the order of a batch's parts.
    """

    def __init__(self, backends: Sequence[DeviceBackend]) -> None:
        self.backends = tuple(backends)
        self.name = ", ".join(backend.name for backend in self.backends)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def enter_thread(self) -> None:
        """Make the first device current in the calling thread; each operation names its own."""
        self.backends[0].enter_thread()

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Page-locked memory; what one device's driver has locked, all of its kind copy from."""
        return self.backends[0].pin(nbytes)


def resolve_devices(device: Any) -> DeviceBackend | DeviceGroup | None:
    """The backend of a device, or the backends of a list of devices; ``None`` for host tensors.

    Args:
        device: what ``resolve_device`` takes, or a list or tuple of it: all accelerators of one kind, or all "cpu".

    Raises:
        TypeError: nothing of the kind, or ``None`` in a list.
        ValueError: no such device, an empty list, a device twice, or kinds that do not go together.
    """
    if not isinstance(device, list | tuple):
        return resolve_device(device)
    if not device:
        raise ValueError(f"device={device!r}: a list of devices needs at least one; device=None gives host tensors")
    if any(entry is None for entry in device):
        raise TypeError(
            f"device={device!r}: None is no device in a list; for parts of a batch in host memory say 'cpu'"
        )
    backends = [resolve_device(entry) for entry in device]
    found = [backend for backend in backends if backend is not None]
    if not found:
        return DeviceGroup([HostBackend() for _ in device])
    if len(found) < len(backends):
        raise ValueError(f"device={device!r}: host and accelerators do not go together; leave 'cpu' out")
    kinds = {type(backend) for backend in found} | {backend.device.type for backend in found}
    if len(kinds) > 2:
        raise ValueError(f"device={device!r}: devices of one kind can share batches, these are of several")
    for number, backend in enumerate(found):
        if any(_same(backend, other) for other in found[:number]):
            raise ValueError(
                f"device={device!r}: {backend.name} is there twice; for smaller parts on one device, split them there"
            )
    return DeviceGroup(found)


def _same(one: DeviceBackend, other: DeviceBackend) -> bool:
    # Backends of the caller's own are told apart as objects: simulated devices all call themselves the CPU.
    return one is other or (one.device == other.device and one.device.type != "cpu")
