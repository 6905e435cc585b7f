"""Batches for several devices: tensors are split along dimension 0, as ``torch.tensor_split`` does, one part each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aiofeed.kernel.core.errors import DeviceCopyError
from aiofeed.kernel.core.faces import BaseDevice
from aiofeed.kernel.core.pytree import is_namedtuple, leaves, like_list, map_leaves
from aiofeed.kernel.core.types import HostTensor, Transform, public
from aiofeed.kernel.devices.backend import AllEvents, CpuBackend
from aiofeed.kernel.devices.copier import Copier, PendingCopy
from aiofeed.kernel.devices.resolve import resolve_device
from aiofeed.kernel.runtime.tensors import is_tensor

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from aiofeed.kernel.core.faces import Event, Stream

BatchT = TypeVar("BatchT")


@public
def scatter(batch: BatchT, devices: Sequence[str | int | torch.device | BaseDevice]) -> tuple[BatchT, ...]:
    """Split a batch into one part per device, as ``Feeder(..., device=[...])`` does.

    Example:
        ```python
        import torch

        import aiofeed

        batch = torch.rand(32, 8), torch.arange(32)
        for x, y in aiofeed.scatter(batch, ["cpu"]):  # or ["cuda:0", "cuda:1"]: 16 samples for each
            print(x.shape, y.device)
        ```

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
    copier = MultiDeviceCopier(DeviceGroup.of(devices))
    copier.wait_for_caller()
    pending = copier.issue(batch)
    parts: tuple[BatchT, ...] = copier.deliver(pending)
    pending.copied.synchronize()
    copier.release()
    return parts


class MultiDeviceCopier(Copier):
    """A ``Copier`` for several devices: returns each batch as a tuple with one part per device.

    It splits the batch on the host. A copy from one device to another would put a barrier on the streams of both.
    """

    def __init__(
        self, backend: Any, transform: Transform | None = None, *outputs: Callable[[Any, Stream], Any]
    ) -> None:
        self.backend: Any = backend
        each = zip(backend.backends, outputs or [None] * len(backend.backends), strict=True)
        self._copiers: tuple[Copier, ...] = tuple([Copier(one, transform, output) for one, output in each])

    def wait_for_caller(self) -> None:
        """Make each side stream wait for the work that the calling thread has queued on its device."""
        for copier in self._copiers:
            copier.wait_for_caller()

    def issue(self, batch: Any) -> PendingCopy:
        """Split a batch and queue the copies of its parts, each on its device's side stream.

        Raises:
            DeviceCopyError: The batch cannot be split, or a copy failed; the message names the device. The host memory
                is then no longer read.
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
            # The copier that failed has waited for its own copies.
            for copier in self._copiers[: len(issued)]:
                copier.wait_for_copies()
            raise
        return PendingCopy(
            tuple(issued), AllEvents([part.copied for part in issued]), AllEvents([part.ready for part in issued])
        )

    def deliver(self, pending: PendingCopy) -> tuple[Any, ...]:
        """Return the parts, each for work on the calling thread's current stream of its device. Never blocks."""
        return tuple([copier.deliver(part) for copier, part in zip(self._copiers, pending.batch, strict=True)])

    def last_use_event(self) -> Event:
        """Return an event after all work queued so far on each device's stream of the last ``deliver``."""
        return AllEvents([copier.last_use_event() for copier in self._copiers])

    def release(self) -> None:
        """Drop the host tensors whose copies are complete. Not thread-safe."""
        for copier in self._copiers:
            copier.release()


class DeviceGroup(BaseDevice):
    """Several devices that share each batch, in the order of its parts.

    Attributes:
        batch_copier: Makes the copier of a group.
    """

    batch_copier: Callable[..., Any] | None = MultiDeviceCopier
    splits: bool = True

    def __init__(self, backends: Sequence[BaseDevice]) -> None:
        self.backends: tuple[BaseDevice, ...] = tuple(backends)
        self.name: str = ", ".join(backend.name for backend in self.backends)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def enter_thread(self) -> None:
        """Make the first device current in the calling thread; each copier selects its own device."""
        self.backends[0].enter_thread()

    def pin(self, nbytes: int, /) -> NDArray[np.uint8]:
        """Return page-locked memory, from which all devices of this kind can copy."""
        return self.backends[0].pin(nbytes)

    @classmethod
    def of(cls, device: Sequence[Any]) -> Self:
        """Return the group of a list of devices.

        Raises:
            TypeError, ValueError: As for ``resolve_devices``.
        """
        if not device:
            raise ValueError(f"device={device!r}: a list of devices needs at least one; device=None gives host tensors")
        if any(entry is None for entry in device):
            raise TypeError(
                f"device={device!r}: a list cannot contain None; use 'cpu' for parts of a batch in host memory"
            )
        backends = [resolve_device(entry) for entry in device]
        found = [backend for backend in backends if backend is not None]
        if not found:
            return cls([CpuBackend() for _ in device])
        if len(found) < len(backends):
            raise ValueError(f"device={device!r}: a list cannot mix the host and accelerators; leave 'cpu' out")
        kinds = {type(backend.given) for backend in found} | {backend.device.type for backend in found}
        if len(kinds) > 2:
            raise ValueError(f"device={device!r}: devices in a list must be of one kind")
        for number, backend in enumerate(found):
            if any(_same(backend, other) for other in found[:number]):
                twice = f"{backend.name} is listed twice; for smaller parts on one device, split its part"
                raise ValueError(f"device={device!r}: {twice}")
        return cls(found)


def _same(one: BaseDevice, other: BaseDevice) -> bool:
    # Compare custom backends by identity: all simulated devices have the device "cpu".
    return one.given is other.given or (one.device == other.device and one.device.type != "cpu")


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch into parts of the same structure. The parts are views; nothing is copied.

    The number of samples N is the size of the first tensor along dimension 0. Tensors, arrays of N rows, and lists and
    tuples of length N without tensors (texts, keys) are split alike. As with ``torch.tensor_split``, the first
    ``N % parts`` parts get one sample more, and the last parts are empty if there are fewer samples than parts. Other
    leaves, including tensors without dimensions, are repeated in every part. In a list of lists of length N, the inner
    lists are split.

    Raises:
        ValueError: Tensors differ in size along dimension 0.
    """
    samples = _samples(batch)
    if samples is None:
        return [batch] * parts
    is_rows = partial(_is_rows, samples=samples)
    each, larger = divmod(samples, parts)
    found, start = [], 0
    for number in range(parts):
        stop = start + each + (number < larger)
        found.append(map_leaves(partial(_slice, samples=samples, start=start, stop=stop), batch, is_rows))
        start = stop
    return found


def _samples(batch: Any) -> int | None:
    samples = None
    for leaf in leaves(batch):
        shape = _shape(leaf)
        if not shape:
            continue
        if samples is None:
            samples = shape[0]
        elif shape[0] != samples:
            raise ValueError(
                f"for several devices the tensors of a batch are split along dimension 0 and must have equal sizes "
                f"there; the first has {samples} rows; found shape {list(shape)}. Create tensors that belong to the "
                f"whole batch in transform=, and pad or stack tensors that differ from sample to sample"
            )
    return samples


def _shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of a leaf that is or becomes a tensor, as the user sees it; empty for other leaves."""
    if type(leaf) is HostTensor:
        shape = leaf.memory.shape
        return shape if leaf.axes is None else tuple(shape[axis] for axis in leaf.axes)
    return tuple(leaf.shape) if is_tensor(leaf) else ()


def _is_rows(tree: Any, samples: int) -> bool:
    """Return whether a tree is a list or tuple with one entry per sample."""
    if not isinstance(tree, list | tuple) or is_namedtuple(tree) or len(tree) != samples:
        return False
    if tree and all(isinstance(item, list | tuple) and len(item) == samples for item in tree):
        return False
    return not any(type(leaf) is HostTensor or is_tensor(leaf) for leaf in leaves(tree))


def _slice(leaf: Any, samples: int, start: int, stop: int) -> Any:
    if type(leaf) is HostTensor:
        if leaf.memory.ndim == 0:
            return leaf
        axis = 0 if leaf.axes is None else leaf.axes[0]
        rows = leaf.memory[(slice(None),) * axis + (slice(start, stop),)]
        return HostTensor(rows, leaf.axes, leaf.torch_dtype, leaf.pinned)
    if is_tensor(leaf):
        return leaf.narrow(0, start, stop - start) if leaf.ndim else leaf
    if isinstance(leaf, list):
        return like_list(leaf, leaf[start:stop])
    if isinstance(leaf, tuple):
        return leaf[start:stop] if _is_rows(leaf, samples) else leaf
    shape = getattr(leaf, "shape", None)
    return leaf[start:stop] if isinstance(shape, tuple) and shape[:1] == (samples,) else leaf
