"""Describes the device, its driver and bus, the versions, and the host."""

from __future__ import annotations

import platform
import subprocess

from aiofeed.devices.backend import DeviceBackend
from benchmarks import report

QUERY_TIMEOUT_S = 20.0


def conditions(backend: DeviceBackend, rounds: int) -> str:
    """The description with the number of rounds, in one line."""
    from aiofeed.reports.machine.environment import describe_accelerator

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
    """Versions of CUDA and cuDNN that torch was built with."""
    import torch

    names = []
    if torch.version.cuda is not None:
        names.append(f"CUDA {torch.version.cuda}")
        cudnn = torch.backends.cudnn.version()
        if cudnn is not None:  # 91002 is 9.10.2, and before 9 it was 8902
            major, rest = divmod(cudnn, 10_000) if cudnn >= 90_000 else divmod(cudnn, 1_000)
            names.append(f"cuDNN {major}.{rest // 100}.{rest % 100}")
    return names


def driver() -> str:
    """The driver's version."""
    from aiofeed.reports.machine.environment import inspect_environment

    return inspect_environment().nvidia_driver or query("driver_version") or f"unknown ({platform.system()})"


def bus(backend: DeviceBackend) -> str:
    """The bus, if the driver reports it, with a comma before it."""
    if backend.device.type != "cuda":
        return ""
    generation, _, width = query("pcie.link.gen.max,pcie.link.width.max", backend.device.index or 0).partition(",")
    return f", PCIe {generation.strip()} x{width.strip()}" if width.strip().isdigit() else ""


def query(fields: str, index: int = 0) -> str:
    """Fields that ``nvidia-smi`` reports of a device; empty if it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={index}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def decoder() -> str:
    """The decoder of plain JPEGs: the native library, simplejpeg, or Pillow."""
    from aiofeed.reports.machine.environment import inspect_environment

    environment = inspect_environment()
    if environment.pillow is None:
        return "none"
    decoders = environment.decoders
    native = next((name for name in decoders if name.startswith("native")), None)
    if native is not None:
        return f"{native} {decoders[native]}".strip()
    return f"simplejpeg {decoders['simplejpeg']} and Pillow" if "simplejpeg" in decoders else "Pillow"
