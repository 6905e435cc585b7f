"""What the results are of: the device, its driver and its bus, the versions, the host."""

from __future__ import annotations

import platform
import subprocess

from aiofeed.devices.backend import DeviceBackend
from benchmarks import report

ASKED_S = 20.0


def conditions(backend: DeviceBackend, rounds: int) -> str:
    """All of it and the number of rounds, in one line."""
    from aiofeed.diagnostics.accelerators import describe_accelerator

    accelerator = describe_accelerator(backend)
    memory = "" if accelerator.total_bytes is None else f", {accelerator.total_bytes / 2**30:.0f} GiB"
    parts = [
        f"{accelerator.name} ({accelerator.device}{memory}{bus(backend)})",
        f"driver {driver()}",
        *versions(),
        report.conditions(rounds).rstrip("."),
        f"JPEGs by {decoder()}",
    ]
    return "; ".join(parts) + "."


def versions() -> list[str]:
    """Of CUDA and cuDNN, as torch was built with them."""
    import torch

    found = []
    if torch.version.cuda is not None:
        found.append(f"CUDA {torch.version.cuda}")
        cudnn = torch.backends.cudnn.version()
        if cudnn is not None:  # 91002 is 9.10.2, and before 9 it was 8902
            major, rest = divmod(cudnn, 10_000) if cudnn >= 90_000 else divmod(cudnn, 1_000)
            found.append(f"cuDNN {major}.{rest // 100}.{rest % 100}")
    return found


def driver() -> str:
    """The driver's version."""
    from aiofeed.diagnostics.environment import inspect_environment

    return inspect_environment().nvidia_driver or asked("driver_version") or f"unknown ({platform.system()})"


def bus(backend: DeviceBackend) -> str:
    """The bus that copies go over, where the driver says; with a comma before it."""
    if backend.device.type != "cuda":
        return ""
    found = asked("pcie.link.gen.max,pcie.link.width.max", backend.device.index or 0)
    generation, _, width = found.partition(",")
    return f", PCIe {generation.strip()} x{width.strip()}" if width.strip().isdigit() else ""


def asked(fields: str, index: int = 0) -> str:
    """What ``nvidia-smi`` says of a device; empty where it is not there or does not know."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={index}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASKED_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def decoder() -> str:
    """What decodes plain JPEGs: aiofeed's own library, simplejpeg, or Pillow."""
    from aiofeed.diagnostics.environment import inspect_environment

    around = inspect_environment()
    if around.pillow is None:
        return "nobody"
    found = around.decoders
    own = next((name for name in found if name.startswith("aiofeed")), None)
    if own is not None:
        return f"{own} {found[own]}".strip()
    return f"simplejpeg {found['simplejpeg']} and Pillow" if "simplejpeg" in found else "Pillow"
