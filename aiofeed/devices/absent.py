"""Why torch sees no such device, in words that lead to one. Imports without torch."""

from __future__ import annotations

import os
from collections.abc import Callable

_WAY_OUT = 'device=None gives host tensors, device="auto" takes what there is'


def why_absent(wanted: str | None, kind: str | None) -> str:
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
    return f"{why_none()}; {_WAY_OUT}"


def built_without_cuda() -> bool:
    """Whether this build of torch has neither CUDA nor ROCm."""
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def why_none() -> str:
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
