"""Reads the versions of packages, the machine's cores, memory and limits, and describes and measures its accelerators.

Changes nothing and imports no decoders. ``find_accelerators`` initializes the accelerators, so the process can no
longer fork.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed.kernel.core.validation import local_ranks
from aiofeed.kernel.devices.resolve import resolve_device
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.sources.file_io import group_reader
from aiofeed.reports.machine.report import AcceleratorReport, Environment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiofeed.kernel.core.faces import BaseDevice

# Bytes of each measured copy, and how long a kind of copy is measured.
COPY_BYTES = 32 << 20
MEASURE_S = 0.1

# Modules that decode images, and the packages that install them.
_DECODERS = {
    "simplejpeg": ("simplejpeg",),
    "imagecodecs": ("imagecodecs",),
    "cv2": ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python"),
    "torchvision": ("torchvision",),
}
# Image formats, and the features of Pillow that read them.
_FORMATS = {"WebP": "webp", "compressed TIFF": "libtiff", "JPEG 2000": "jpg_2000"}
_DEV = Path("/dev")
_DRIVER = Path("/proc/driver/nvidia/version")


def inspect_environment() -> Environment:
    """Read the facts of the running process and its machine."""
    import torch

    # The module's version, not the metadata's: both packages may be installed, and the later one is active.
    pillow: str | None = _attempt(lambda: importlib.import_module("PIL").__version__)
    native_problem, native_decoder = _attempt(_native_decoder) or ("", {})
    shm = _attempt(lambda: os.statvfs(_DEV / "shm"))
    files = sorted(path for path in _DEV.glob("nvidia*") if not path.is_dir())
    untyped: Any = torch.cuda
    if torch.version.cuda is not None:
        built = f"CUDA {torch.version.cuda}"
    else:
        built = "built without CUDA" if torch.version.hip is None else f"ROCm {torch.version.hip}"
    return Environment(
        aiofeed=_version(("aiofeed",)),
        python=f"Python {platform.python_version()}, {sys.platform} {platform.machine()}",
        torch=f"{torch.__version__}, {built}",
        torch_threads=torch.get_num_threads(),
        pillow=pillow,
        # Pillow-SIMD's versions are Pillow's followed by ".post" and a number.
        pillow_simd=pillow is not None and ".post" in pillow,
        pillow_simd_hidden=pillow is not None and ".post" not in pillow and _version(("pillow-simd",)) != "",
        x86=platform.machine().lower() in ("x86_64", "amd64"),
        missing_formats=_attempt(_missing_formats) or (),
        native_problem=native_problem,
        decoders=native_decoder
        | {name: _version(packages) for name, packages in _DECODERS.items() if _importable(name)},
        small_files=group_reader() is not None,
        uvloop=_version(("uvloop",)) if _importable("uvloop") else None,
        affinity=machine.affinity(),
        cpu_quota=machine.cpu_quota(),
        cores=machine.rank_cpus(),
        memory_limit_bytes=machine.memory_limit(),
        free_memory_bytes=machine.free_memory(),
        open_files=_attempt(partial(_limit, "RLIMIT_NOFILE")),
        locked_bytes=_attempt(partial(_limit, "RLIMIT_MEMLOCK")),
        shm_bytes=None if shm is None else shm.f_frsize * shm.f_blocks,
        nvidia_driver=_attempt(_driver),
        nvidia_files=bool(files),
        nvidia_refused=tuple(str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)),
        forked=bool(untyped._is_in_bad_fork()),
        ranks=local_ranks(),
        machine_cores=machine.cpus(),
        rank_memory_bytes=machine.rank_memory(),
    )


def _attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:  # noqa: BLE001 - the report leaves out what this system, its packages or a full device cannot tell
        return None


def _native_decoder() -> tuple[str, dict[str, str]]:
    """Why there is no native JPEG library, or the library with the version of its libjpeg-turbo."""
    from aiofeed.kernel.decoders import native_jpeg  # needs Pillow

    problem, decoder = native_jpeg.load_native_decoder()
    if decoder is None:
        return f"{problem}: {native_jpeg.INSTALL}", {}
    return "", {"native library with libjpeg-turbo": decoder.version}


def _missing_formats() -> tuple[str, ...]:
    """Return the image formats that the installed Pillow cannot read."""
    features: Any = importlib.import_module("PIL.features")
    return tuple(name for name, feature in _FORMATS.items() if not features.check(feature))


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # in sys.modules, without a spec
        return True


def _version(packages: tuple[str, ...]) -> str:
    return next((found for package in packages if (found := _attempt(partial(version, package)))), "")


def _limit(name: str) -> tuple[int, int]:
    resource: Any = importlib.import_module("resource")  # Windows lacks it, and some systems a limit
    soft, hard = resource.getrlimit(getattr(resource, name))
    soft, hard = (-1 if limit == resource.RLIM_INFINITY else int(limit) for limit in (soft, hard))
    return soft, hard


def _driver() -> str:
    words = _DRIVER.read_text().split()
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan ...", or "Open Kernel Module for x86_64".
    return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), "")


# --- accelerators


def find_accelerators(*, measure: bool) -> tuple[AcceleratorReport, ...]:
    """Every accelerator that torch sees. To ``measure`` copy rates takes about 0.3 s and 64 MiB of memory of each."""
    import torch

    if not torch.accelerator.is_available():
        return ()
    reports = []
    for index in range(torch.accelerator.device_count()):
        backend = resolve_device(index)
        assert backend is not None
        report = describe_accelerator(backend)
        reports.append(measure_copies(report, backend, COPY_BYTES) if measure else report)
    return tuple(reports)


def describe_accelerator(backend: BaseDevice) -> AcceleratorReport:
    """Name and memory of one accelerator; ``None`` for values that torch does not report."""
    import torch

    device = backend.device
    # torch.cuda, torch.xpu, ... have some of these functions, and torch.accelerator has some for all devices.
    module: Any = getattr(torch, device.type, None)
    common: Any = torch.accelerator

    def ask(name: str) -> Any:
        functions = [function for each in (module, common) if (function := getattr(each, name, None)) is not None]
        values = (_attempt(partial(function, device)) for function in functions)
        return next((value for value in values if value is not None), None)

    free, total = ask("mem_get_info") or ask("get_memory_info") or (None, None)
    return AcceleratorReport(
        device=backend.name,
        name=ask("get_device_name") or device.type,
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=ask("memory_allocated"),
        reserved_bytes=ask("memory_reserved"),
        own_stream=device.type != "mps",
    )


def measure_copies(report: AcceleratorReport, backend: BaseDevice, nbytes: int) -> AcceleratorReport:
    """Return the report of a device with the rates of pinned and pageable copies of ``nbytes`` each."""
    import numpy as np

    from aiofeed.kernel.runtime.buffers import release_unused

    pageable = _attempt(lambda: copy_rate(backend, np.ones(nbytes, np.uint8), MEASURE_S))
    pinned = pin_error = None
    try:
        memory = backend.pin(nbytes)
    except Exception as error:  # noqa: BLE001 - the driver's error, of any type, belongs into the report
        pin_error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    else:
        memory[:] = 1
        pinned = _attempt(lambda: copy_rate(backend, memory, MEASURE_S))
        del memory
        release_unused()
    return replace(report, pinned_bytes_per_s=pinned, pageable_bytes_per_s=pageable, pin_error=pin_error)


def copy_rate(backend: BaseDevice, memory: NDArray[np.uint8], seconds: float) -> float:
    """Bytes per second of copies from host memory on the side stream, measured for a number of seconds.

    At least three copies are made; the first is not counted.
    """
    import torch

    source, side = torch.from_numpy(memory), backend.side_stream()
    with backend.use_stream(side):
        backend.copy(source)
        backend.record(side).synchronize()
        copies, started = 0, time.perf_counter()
        while True:
            # Two copies at a time: the second is queued before the first ends.
            for _ in range(2):
                backend.copy(source)
            backend.record(side).synchronize()
            copies += 2
            elapsed = time.perf_counter() - started
            if elapsed >= seconds:
                return copies * memory.nbytes / elapsed
