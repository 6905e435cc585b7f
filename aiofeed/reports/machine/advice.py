"""Advice: one line for each problem, with its solution. Pure functions of the report's data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from aiofeed.core.formatting import format_bytes
from aiofeed.reports.machine.report import AcceleratorReport, Environment

# A feeder has up to a few hundred files and sockets open, and so has a training program.
FEW_FILES = 1024
# Docker's default is 64 MiB.
SMALL_SHM = 1 << 30
HEADERS = "Debian and Ubuntu: libwebp-dev libtiff-dev libopenjp2-7-dev"
LITTLE_MEMORY = 1 << 30
LITTLE_DEVICE_MEMORY = 0.1
# PCIe 3.0 x16 copies 12 GB/s; less than half of that means a slot with fewer lanes, or a busy one.
SLOW_COPIES = 6e9


def advise(accelerators: Sequence[AcceleratorReport], absent: str | None, environment: Environment) -> tuple[str, ...]:
    """One line for each problem; ``absent`` tells why torch sees no accelerators."""
    lines: list[str] = []
    if not accelerators and absent is not None:
        lines += _missing_accelerator_advice(absent, environment)
    for accelerator in accelerators:
        lines += _accelerator_advice(accelerator)
    return (*lines, *_package_advice(environment), *_limit_advice(environment))


def _missing_accelerator_advice(absent: str, found: Environment) -> Iterator[str]:
    driver = found.nvidia_driver is not None or found.nvidia_files
    if found.forked:
        yield (
            "this process was forked from one that had initialized CUDA, which does not survive a fork: start "
            "processes with multiprocessing's 'spawn' or 'forkserver', or initialize CUDA only in the children"
        )
    elif found.torch.endswith("built without CUDA"):
        if driver:
            yield (
                f"there is an NVIDIA driver ({found.nvidia_driver or 'of unknown version'}), but this torch is built "
                f"without CUDA: install a CUDA build (https://pytorch.org/get-started/locally)"
            )
    elif hidden := re.search(r"(CUDA|HIP)_VISIBLE_DEVICES=('[^']*'|\"[^\"]*\")", absent):
        yield f"{hidden[0]} hides devices: unset it, or list devices that exist"
    elif found.nvidia_refused:
        yield (
            f"this user may not open {', '.join(found.nvidia_refused)}: join the group that owns them (`ls -l "
            f"/dev/nvidia*`), or start the container with its GPUs"
        )
    elif "too old" in absent or "insufficient" in absent:
        yield f"the NVIDIA driver is too old for {found.torch}: update it, or install a torch built for an older CUDA"
    elif found.nvidia_driver is not None and not found.nvidia_files:
        yield "the NVIDIA driver is loaded, but there are no device files: start the container with `--gpus all`"
    elif not driver:
        yield f"{found.torch} finds no driver: install the accelerator's, or start the container with `--gpus all`"
    else:
        yield f"{absent}: run `nvidia-smi`"


def _accelerator_advice(found: AcceleratorReport) -> Iterator[str]:
    if found.pin_error is not None:
        yield (
            f"memory cannot be pinned for {found.device} ({found.pin_error}), so copies are slower and do not overlap: "
            f"raise `ulimit -l`, or the container's limit of locked memory"
        )
    elif (
        found.device.startswith("cuda")
        and found.pinned_bytes_per_s is not None
        and found.pinned_bytes_per_s < SLOW_COPIES
    ):
        yield (
            f"{found.device} copies {found.pinned_bytes_per_s / 1e9:.1f} GB/s from pinned memory, a PCIe 3.0 x16 slot "
            f"copies 12: check the link with `nvidia-smi -q -d PCIE`, and other users of the bus"
        )
    if found.free_bytes is not None and found.total_bytes and found.reserved_bytes is not None:
        others = found.total_bytes - found.free_bytes - found.reserved_bytes
        if found.free_bytes < LITTLE_DEVICE_MEMORY * found.total_bytes and others > found.total_bytes / 2:
            yield (
                f"{found.device} has {format_bytes(found.free_bytes)} of {format_bytes(found.total_bytes)} free, and "
                f"other processes use the rest: `nvidia-smi` lists them"
            )


def _package_advice(found: Environment) -> Iterator[str]:
    install_simd = "pip install --force-reinstall --no-deps --no-binary pillow-simd pillow-simd"
    if found.pillow is None:
        yield "Pillow is missing, so DecodeImage cannot be used: pip install 'aiofeed[simd]' or 'aiofeed[pillow]'"
    elif found.pillow_simd_hidden:
        yield f"Pillow {found.pillow} was installed over Pillow-SIMD and decodes slower: {install_simd}"
    elif not found.pillow_simd and found.x86:
        headers = ""
        if found.formats_without_headers:
            lost = " and ".join(found.formats_without_headers)
            headers = f"first install the headers that reading {lost} needs ({HEADERS}), then "
        yield f"images are decoded by Pillow {found.pillow}; Pillow-SIMD is faster: {headers}{install_simd}"
    if found.missing_formats:
        yield (
            f"this Pillow reads no {' and no '.join(found.missing_formats)}, and such files are errors: install the "
            f"headers ({HEADERS}) and build it again, {install_simd}; or pip install --force-reinstall pillow"
        )
    if found.native_problem:
        yield f"the native JPEG library {found.native_problem}"
    if not found.small_files:
        yield (
            "the native library for small files was not built: wheels for Linux and macOS have it; to build it, "
            "install a C compiler, then pip install --force-reinstall --no-deps --no-cache-dir --no-binary aiofeed "
            "aiofeed, or in a checkout python hatch_build.py"
        )
    if found.uvloop is None:
        yield "uvloop is missing, so small reads are slower: pip install uvloop (not available for Windows)"


def _limit_advice(found: Environment) -> Iterator[str]:
    if found.torch_threads > found.cores:
        yield (
            f"torch uses {found.torch_threads} threads on {found.cores} core{'s' if found.cores > 1 else ''}: set "
            f"OMP_NUM_THREADS={found.cores}"
        )
    if found.open_files is not None and 0 <= found.open_files[0] < FEW_FILES:
        soft, hard = found.open_files
        most = "" if soft == hard else f" (up to {hard} without privileges)" if hard > 0 else " (without a hard limit)"
        yield f"only {soft} files may be open at a time: raise the limit with `ulimit -n`{most}"
    if found.shm_bytes is not None and found.shm_bytes < SMALL_SHM:
        yield (
            f"/dev/shm has {format_bytes(found.shm_bytes)}; aiofeed does not use it, but worker processes of torch's "
            f"DataLoader and share_memory_() do: start the container with `--shm-size=8g` or `--ipc=host`"
        )
    if found.free_memory_bytes < LITTLE_MEMORY:
        limit = (
            "" if found.memory_limit_bytes is None else f" (the cgroup allows {format_bytes(found.memory_limit_bytes)})"
        )
        yield f"only {format_bytes(found.free_memory_bytes)} of memory are free{limit}: limit the feeder with `Limits`"
