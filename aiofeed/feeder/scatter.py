"""``scatter``: a batch that exists already, in parts on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from aiofeed.core.types import public
from aiofeed.devices.group_copier import copier_for
from aiofeed.devices.resolve import DeviceGroup, resolve_devices

if TYPE_CHECKING:
    import torch

    from aiofeed.devices.backend import DeviceBackend

BatchT = TypeVar("BatchT")


@public
def scatter(batch: BatchT, devices: Sequence[str | int | torch.device | DeviceBackend]) -> tuple[BatchT, ...]:
    """A batch in parts, one per device, as ``Feeder(..., device=[...])`` gives them.

    What comes back may be used on each device's current stream, and the batch's host memory may be written again.
    Copies to the devices run at the same time where that memory is pinned.

    Args:
        batch: tensors on the host or on a device, nested in tuple, list, dict, namedtuple or dataclass. They are split
            along dimension 0 as ``torch.tensor_split`` does it; lists with one entry per sample are split alike, and
            what has no samples is in every part.
        devices: in the order of the parts.

    Returns:
        One part per device, of the batch's structure. A part may be empty: where there are fewer samples than devices.

    Raises:
        TypeError, ValueError: no list of devices that can share a batch.
        DeviceCopyError: tensors differ along dimension 0, or a copy failed; it names the device.
    """
    if not isinstance(devices, list | tuple):
        raise TypeError(f"scatter takes a list of devices, got {devices!r}")
    group = cast("DeviceGroup", resolve_devices(devices))
    copier: Any = copier_for(group)
    copier.follow()
    in_flight = copier.issue(batch)
    parts: tuple[BatchT, ...] = copier.deliver(in_flight)
    in_flight.copied.synchronize()
    copier.release()
    return parts
