"""What is amiss, and how to mend it. Pure: facts in, lines out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aiofeed.core.formatting import format_bytes
from aiofeed.diagnostics.report import AcceleratorReport, Environment

# A feeder has up to a few hundred files and sockets open, and so has a training.
FEW_FILES = 1024
# Docker's default is 64 MiB; worker processes and trainings over several processes pass batches through it.
SMALL_SHM = 1 << 30
LITTLE_MEMORY = 1 << 30
LITTLE_DEVICE_MEMORY = 0.1
# PCIe 3.0 x16 gives 12 GB/s; half of that is a slot with fewer lanes, or a busy one.
SLOW_COPIES = 6e9


def advise(accelerators: Sequence[AcceleratorReport], absent: str | None, found: Environment) -> tuple[str, ...]:
    """One line for each thing that is amiss.

    Args:
        accelerators: what torch sees.
        absent: why it sees none.
        found: what is around it.
    """
    lines: list[str] = []
    if not accelerators and absent is not None:
        lines += _about_absence(absent, found)
    for accelerator in accelerators:
        lines += _about_accelerator(accelerator)
    return (*lines, *_about_packages(found), *_about_limits(found))


def _about_absence(absent: str, found: Environment) -> Iterator[str]:
    driver = found.nvidia_driver is not None or found.nvidia_files
    if found.forked:
        yield (
            "this process was forked from one that had started CUDA, which a fork does not copy: start processes with "
            "multiprocessing's 'spawn' or 'forkserver', or start CUDA only in the children"
        )
    elif found.torch.endswith("built without CUDA"):
        if driver:
            yield (
                f"there is an NVIDIA driver ({found.nvidia_driver or 'of unknown version'}), but this torch is built "
                f"without CUDA: install a CUDA build (https://pytorch.org/get-started/locally)"
            )
    elif "limits what is visible" in absent:
        yield f"{absent[absent.index('(') + 1 : absent.rindex(')')]}: unset it, or name devices that exist"
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
        yield f"{absent}: see what `nvidia-smi` says"


def _about_accelerator(found: AcceleratorReport) -> Iterator[str]:
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
            f"{found.device} copies {found.pinned_bytes_per_s / 1e9:.1f} GB/s from pinned memory, where a PCIe 3.0 x16 "
            f"slot gives 12: see the link in `nvidia-smi -q -d PCIE`, and what else uses it"
        )
    if found.free_bytes is not None and found.total_bytes and found.reserved_bytes is not None:
        others = found.total_bytes - found.free_bytes - found.reserved_bytes
        if found.free_bytes < LITTLE_DEVICE_MEMORY * found.total_bytes and others > found.total_bytes / 2:
            yield (
                f"{found.device} has {format_bytes(found.free_bytes)} of {format_bytes(found.total_bytes)} free, and "
                f"other processes hold the rest: see which by `nvidia-smi`"
            )


def _about_packages(found: Environment) -> Iterator[str]:
    again = "pip install --force-reinstall --no-deps --no-binary pillow-simd pillow-simd"
    if found.pillow is None:
        yield "there is no Pillow, so DecodeImage cannot be used: pip install 'aiofeed[simd]' or 'aiofeed[pillow]'"
    elif found.pillow_simd_hidden:
        yield f"Pillow {found.pillow} was installed over Pillow-SIMD and decodes slower: {again}"
    elif not found.pillow_simd and found.x86:
        yield f"images are decoded by Pillow {found.pillow}; Pillow-SIMD does it in less time: {again}"
    if found.uvloop is None:
        yield "uvloop is missing, so small reads cost more: pip install uvloop (there is none for Windows)"


def _about_limits(found: Environment) -> Iterator[str]:
    if found.torch_threads > found.cores:
        yield (
            f"torch uses {found.torch_threads} threads on {found.cores} core{'s' if found.cores > 1 else ''}: set "
            f"OMP_NUM_THREADS={found.cores}"
        )
    if found.open_files is not None and 0 <= found.open_files[0] < FEW_FILES:
        soft, hard = found.open_files
        most = (
            ""
            if soft == hard
            else f" (up to {hard} without further rights)"
            if hard > 0
            else " (there is no upper end)"
        )
        yield f"only {soft} files may be open at a time: raise it by `ulimit -n`{most}"
    if found.shm_bytes is not None and found.shm_bytes < SMALL_SHM:
        yield (
            f"/dev/shm has {format_bytes(found.shm_bytes)}, too little for batches that pass between processes: start "
            f"the container with `--shm-size=8g` or `--ipc=host`"
        )
    if found.free_memory_bytes < LITTLE_MEMORY:
        limit = (
            "" if found.memory_limit_bytes is None else f" (the cgroup allows {format_bytes(found.memory_limit_bytes)})"
        )
        yield f"only {format_bytes(found.free_memory_bytes)} of memory are free{limit}: bound the feeder by `Limits`"
