"""Resolves ``device=`` arguments to device backends. Does not import torch at import time."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from aiofeed import _load_addon
from aiofeed.kernel.core.faces import BaseDevice, DeviceBackend, adapt_device

if TYPE_CHECKING:
    import torch


Device: TypeAlias = "str | int | torch.device | DeviceBackend | None"
"""The types that name one device."""

_ALTERNATIVES = 'device=None gives host tensors, device="auto" uses the accelerator if there is one'


def resolve_device(device: object) -> BaseDevice | None:
    """Return the backend of a device, or ``None`` for host tensors.

    Args:
        device: ``None`` or "cpu" for host tensors, "auto" for the accelerator if there is one, "cuda", "cuda:1", an
            index, a ``torch.device``, or an object with the members of ``DeviceBackend``.

    Raises:
        TypeError: ``device`` has another type.
        ValueError: There is no such device; the message lists the devices and gives the reason.
    """
    if device is None or (isinstance(device, str) and device == "cpu"):
        return None
    # Host tensors need no module of devices.
    from aiofeed.kernel.devices.backend import TorchBackend

    if (adapted := adapt_device(device)) is not None:
        return adapted
    if isinstance(device, list | tuple):
        raise TypeError(f"device={device!r}: expected one device, not several")
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
        raise ValueError(
            f"device={device!r}: there is no index {index}; {format_present(kind, count)}{hidden_by(kind)}"
        )
    return TorchBackend(torch.device(wanted_type, index))


def resolve_devices(device: Any) -> BaseDevice | None:
    """Return the backend of a device, the group of a list of devices, or ``None`` for host tensors.

    Args:
        device: An argument of ``resolve_device``, or a list or tuple of them: accelerators of one kind, or all "cpu".

    Raises:
        TypeError: ``device`` has another type, or a list contains ``None``.
        ValueError: There is no such device, the list is empty, contains a device twice or mixes kinds.
    """
    if isinstance(device, list | tuple):
        return _load_addon("DeviceGroup", "device=[...]").of(device)  # type: ignore[no-any-return]
    return resolve_device(device)


def _accelerator_type(*, usable: bool) -> str | None:
    """Return the type of the machine's accelerator; with ``usable``, only if it works (a driver may be too old)."""
    import torch

    # torch.accelerator reports the accelerator of the build even if the machine has none, so check the machine.
    if cast("Any", torch.backends.cuda).is_built():
        # device_count does not initialise CUDA; is_available may. Once CUDA is initialised, forked processes cannot use
        # it. In torch 2.6 torch.accelerator initialises it for either.
        present = torch.cuda.is_available() if usable else torch.cuda.device_count() > 0
        return "cuda" if present else None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type


def _default_index(kind: str) -> int:
    import torch

    from aiofeed.kernel.devices.backend import current_device_index

    # current_device_index initialises CUDA, and a process with initialised CUDA cannot fork. Before that, the index is
    # 0.
    untyped = cast("Any", torch)
    return 0 if kind == "cuda" and not untyped.cuda.is_initialized() else current_device_index()


def _parse(device: str | int | torch.device, kind: str | None) -> tuple[str | None, int | None]:
    import torch

    if isinstance(device, int):
        return kind, device
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        name, colon, index = str(device).lower().partition(":")
        name = (kind or "cuda") if name in ("gpu", "nvidia", "rocm", "hip") else name
        near = difflib.get_close_matches(name, ("cuda", "cpu", "auto", "mps", "xpu"), 1, 0.5)
        # Torch's reason, if it is not a list of all that it has names for.
        reason = "" if "Expected one of" in str(error) else f" ({str(error).splitlines()[0]})"
        raise ValueError(
            f"device={device!r} is not a device that torch knows: expected None, 'auto', 'cpu', 'cuda', 'cuda:1' or "
            f"similar{f'; did you mean {near[0] + colon + index!r}?' if near and not reason else reason}"
        ) from error
    return parsed.type, parsed.index


def explain_missing_device(wanted: str | None, kind: str | None) -> str:
    """Return why there is no ``wanted`` device (``None``: any), and the alternatives; torch sees type ``kind``."""
    import torch

    if kind is not None:
        return f"{format_present(kind, torch.accelerator.device_count())}; {_ALTERNATIVES}"
    if wanted not in (None, "cuda"):
        return f"torch {torch.__version__} sees no such device; {_ALTERNATIVES}"
    return f"{explain_no_accelerator()}; {_ALTERNATIVES}"


def built_without_cuda() -> bool:
    """Return whether this build of torch has neither CUDA nor ROCm."""
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def explain_no_accelerator() -> str:
    """Return the reason why torch sees no accelerator."""
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
    """Initialise CUDA and return the first sentence of the driver's error message."""
    import torch

    start: Callable[[], object] = torch.cuda.init
    try:
        start()
    except Exception as error:  # noqa: BLE001 - the driver may raise any type, and its message is the result
        return str(error).strip().split(". ")[0].splitlines()[0].rstrip(".")
    return "the driver reports no device"


def format_present(kind: str, count: int) -> str:
    """Format the list of present devices."""
    names = ", ".join(f"{kind}:{index}" for index in range(count))
    return f"present: {names}" if names else f"no {kind} device is present"


def hidden_by(kind: str) -> str:
    """Format the environment variable that limits which devices are visible; empty if none is set."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if kind == "cuda" else ():
        if variable in os.environ:
            return f" ({variable}={os.environ[variable]!r} limits what is visible)"
    return ""
