"""``scatter``: splits an existing batch over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from aiofeed.core.types import public
from aiofeed.devices.copier import copier_for
from aiofeed.devices.resolve import DeviceGroup, resolve_devices

if TYPE_CHECKING:
    import torch

    from aiofeed.devices.backend import DeviceBackend

BatchT = TypeVar("BatchT")


@public
def scatter(batch: BatchT, devices: Sequence[str | int | torch.device | DeviceBackend]) -> tuple[BatchT, ...]:
    """Split a batch into one part per device, as ``Feeder(..., device=[...])`` does.

    When it returns, the batch's host memory may be overwritten, and each part may be used on its device's current
    stream. If that memory is pinned, the copies to the devices run in parallel.

    Args:
        batch: Tensors on the host or on a device, nested in tuple, list, dict, namedtuple or dataclass. They are split
            along dimension 0 as ``torch.tensor_split`` does. Lists with one entry per sample are split alike; other
            leaves are repeated in every part.
        devices: The devices, in the order of the parts.

    Returns:
        One part per device, of the batch's structure. The last parts are empty if there are fewer samples than devices.

    Raises:
        TypeError, ValueError: ``devices`` is not a list of devices that can share a batch.
        DeviceCopyError: Tensors differ in size along dimension 0, or a copy failed; the message names the device.
    """
    if not isinstance(devices, list | tuple):
        raise TypeError(f"scatter takes a list of devices, got {devices!r}")
    group = cast("DeviceGroup", resolve_devices(devices))
    copier: Any = copier_for(group)
    copier.wait_for_caller()
    pending = copier.issue(batch)
    parts: tuple[BatchT, ...] = copier.deliver(pending)
    pending.copied.synchronize()
    copier.release()
    return parts
