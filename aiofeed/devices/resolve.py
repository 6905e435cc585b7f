"""What ``device=`` means: a device or, where a list will do too, several. Imports without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from aiofeed.devices.backend import CpuBackend, DeviceBackend, TorchBackend, current_device_index

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Device: TypeAlias = "str | int | torch.device | DeviceBackend | None"
"""What names one device."""


_WAY_OUT = 'device=None gives host tensors, device="auto" takes what there is'


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


def resolve_device(device: object) -> DeviceBackend | None:
    """The backend of a device; ``None`` for host tensors.

    Args:
        device: ``None`` or "cpu" for host tensors, "auto" for the accelerator if there is one, "cuda", "cuda:1", an
            index, a ``torch.device``, or an object with the methods of ``DeviceBackend``.

    Raises:
        TypeError: ``device`` is nothing of the kind.
        ValueError: there is no such device; the message says what there is, and why.
    """
    if device is None or (isinstance(device, str) and device == "cpu"):
        return None
    if isinstance(device, DeviceBackend) and not isinstance(device, type):
        return device
    if isinstance(device, list | tuple):
        raise TypeError(f"device={device!r}: one device is wanted here, not several")
    import torch

    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise TypeError(
            f"device={device!r}: expected None, 'auto', 'cpu', 'cuda', 'cuda:1', an index, a torch.device or a device "
            f"backend, not {type(device).__name__}"
        )
    kind = _accelerator_type(usable=device == "auto")
    if device == "auto":
        return None if kind is None else TorchBackend(torch.device(kind, _default_index(kind)))
    wanted_type, index = _parse(device, kind)
    if wanted_type == "cpu":
        return None
    if wanted_type is None or wanted_type != kind:
        raise ValueError(f"device={device!r}: {explain_missing_device(wanted_type, kind)}")
    count = torch.cuda.device_count() if kind == "cuda" else torch.accelerator.device_count()
    if index is None:
        index = _default_index(kind)
    if not 0 <= index < count:
        raise ValueError(f"device={device!r}: there is no index {index}; {present(kind, count)}{hidden_by(kind)}")
    return TorchBackend(torch.device(wanted_type, index))


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
        return DeviceGroup([CpuBackend() for _ in device])
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


def _accelerator_type(*, usable: bool) -> str | None:
    """The type of the machine's accelerator; ``usable``: of one that works, where a driver may be too old for it."""
    import torch

    # A build of torch has an accelerator even where the machine has none, so the machine is asked.
    if cast("Any", torch.backends.cuda).is_built():
        # Devices are counted without starting CUDA. Whether it works is asked by starting it, and forked processes can
        # then use it no more. In torch 2.6 torch.accelerator starts it for either.
        there = torch.cuda.is_available() if usable else torch.cuda.device_count() > 0
        return "cuda" if there else None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type


def _default_index(kind: str) -> int:
    import torch

    # Asking starts CUDA, and a process that has started it can no longer fork; before that, the index is 0.
    untyped = cast("Any", torch)
    return 0 if kind == "cuda" and not untyped.cuda.is_initialized() else current_device_index()


def _parse(device: str | int | torch.device, kind: str | None) -> tuple[str | None, int | None]:
    import torch

    if isinstance(device, int):
        return kind, device
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is no device that torch knows: expected None, 'auto', 'cpu', 'cuda', 'cuda:1' or the "
            f"like ({str(error).splitlines()[0]})"
        ) from error
    return parsed.type, parsed.index


def _same(one: DeviceBackend, other: DeviceBackend) -> bool:
    # Backends of the caller's own are told apart as objects: simulated devices all call themselves the CPU.
    return one is other or (one.device == other.device and one.device.type != "cpu")


def explain_missing_device(wanted: str | None, kind: str | None) -> str:
    """The reason, and the way out.

    Args:
        wanted: type of the device that was asked for, "cuda" say; ``None``: any accelerator.
        kind: type of the accelerator that torch sees; ``None``: none.
    """
    import torch

    if kind is not None:
        return f"{present(kind, torch.accelerator.device_count())}; {_WAY_OUT}"
    if wanted not in (None, "cuda"):
        return f"torch {torch.__version__} sees no such device; {_WAY_OUT}"
    return f"{explain_no_accelerator()}; {_WAY_OUT}"


def built_without_cuda() -> bool:
    """Whether this build of torch has neither CUDA nor ROCm."""
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def explain_no_accelerator() -> str:
    """Why torch sees no accelerator at all."""
    import torch

    if built_without_cuda():
        return (
            f"this torch ({torch.__version__}) is a build without CUDA, so it sees no accelerator; install a CUDA "
            f"build (https://pytorch.org/get-started/locally)"
        )
    if hidden := hidden_by("cuda"):
        return f"torch sees no accelerator{hidden}"
    return f"torch {torch.__version__} sees no accelerator: {driver_error()}"


def driver_error() -> str:
    """What the driver says when CUDA is started: its first sentence."""
    import torch

    start: Callable[[], object] = torch.cuda.init
    try:
        start()
    except Exception as error:  # noqa: BLE001 - the reason is what was asked for, in whatever type the driver gives it
        return str(error).strip().split(". ")[0].splitlines()[0].rstrip(".")
    return "the driver reports no device"


def present(kind: str, count: int) -> str:
    """The devices that there are."""
    names = ", ".join(f"{kind}:{index}" for index in range(count))
    return f"present: {names}" if names else f"no {kind} device is present"


def hidden_by(kind: str) -> str:
    """The variable that limits which devices are visible, as a remark in brackets; empty where there is none."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if kind == "cuda" else ():
        if variable in os.environ:
            return f" ({variable}={os.environ[variable]!r} limits what is visible)"
    return ""
