"""Copies to several devices: a batch is split on the host, and each part goes its own way.

From device to device it would be simpler and slower: such a copy puts a barrier on the streams of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiofeed.core.errors import DeviceCopyError
from aiofeed.devices.backend import DeviceBackend, Event
from aiofeed.devices.copier import Copier, PendingCopy
from aiofeed.devices.resolve import DeviceGroup
from aiofeed.devices.split import split
from aiofeed.devices.static_copier import StaticBatch, StaticCopier


class _AllEvents:
    """Complete once every one of several events is."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def query(self) -> bool:
        """Whether all are complete."""
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        """Wait for one after the other."""
        for event in self._events:
            event.synchronize()


class MultiDeviceCopier:
    """A ``Copier`` of several devices: gives each batch as a tuple with one part per device.

    Args:
        group: the devices.
        copiers: one per device.
    """

    def __init__(self, group: DeviceGroup, copiers: Sequence[Copier]) -> None:
        self.backend = group
        self._copiers = tuple(copiers)

    def follow(self) -> None:
        """Let every side stream wait for what the calling thread has queued on that device."""
        for copier in self._copiers:
            copier.follow()

    def issue(self, batch: Any) -> PendingCopy:
        """Split a batch and queue the copies of its parts, each on its device's side stream.

        Raises:
            DeviceCopyError: of the device where it happened. Host memory is no longer read by then.
        """
        try:
            parts = split(batch, len(self._copiers))
        except Exception as error:
            raise DeviceCopyError(f"a batch for {self.backend.name} cannot be split: {error}") from error
        issued: list[PendingCopy] = []
        try:
            for copier, part in zip(self._copiers, parts, strict=True):
                issued.append(copier.issue(part))
        except BaseException:
            # The copier that failed has seen to its own copies.
            for copier in self._copiers[: len(issued)]:
                copier.settle()
            raise
        return PendingCopy(
            tuple(issued), _AllEvents([part.copied for part in issued]), _AllEvents([part.ready for part in issued])
        )

    def deliver(self, in_flight: PendingCopy) -> tuple[Any, ...]:
        """The parts, each for work on the calling thread's current stream of its device. Never blocks."""
        return tuple([copier.deliver(part) for copier, part in zip(self._copiers, in_flight.batch, strict=True)])

    def used(self) -> Event:
        """An event after what has been queued by now on each device's stream of the last ``deliver``."""
        return _AllEvents([copier.used() for copier in self._copiers])

    def release(self) -> None:
        """Let go of host memory whose copies are complete. Not for two threads at once."""
        for copier in self._copiers:
            copier.release()


def copier_for(
    backend: DeviceBackend | DeviceGroup,
    transform: Callable[[Any], Any] | None = None,
    statics: Sequence[StaticBatch] = (),
) -> Copier | MultiDeviceCopier:
    """What copies to a device, or to each of several.

    Args:
        backend: as ``resolve_devices`` gives it.
        transform: called with each batch, or each part of it, on its device's side stream.
        statics: per device, the tensors that every batch is handed out in; none: each batch is in its own.
    """
    if not isinstance(backend, DeviceGroup):
        return StaticCopier(backend, transform, statics[0]) if statics else Copier(backend, transform)
    if statics:
        pairs = zip(backend.backends, statics, strict=True)
        return MultiDeviceCopier(backend, [StaticCopier(each, transform, static) for each, static in pairs])
    return MultiDeviceCopier(backend, [Copier(each, transform) for each in backend.backends])
