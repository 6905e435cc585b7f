"""The report: its data, its text, and its advice, one line for each problem with the solution. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.types import public_in

# A feeder has up to a few hundred files and sockets open, and so has a training program.
FEW_FILES = 1024
# Docker's default is 64 MiB.
SMALL_SHM = 1 << 30
HEADERS = "Debian and Ubuntu: libwebp-dev libtiff-dev libopenjp2-7-dev"
LITTLE_MEMORY = 1 << 30
LITTLE_DEVICE_MEMORY = 0.1
# PCIe 3.0 x16 copies 12 GB/s; less than half of that means a slot with fewer lanes, or a busy one.
SLOW_COPIES = 6e9


@dataclass(frozen=True)
class AcceleratorReport:
    """One accelerator. Memory is ``None`` if torch does not report it.

    Args:
        device: "cuda:0".
        name: the vendor's name.
        total_bytes: its memory.
        free_bytes: memory that no process uses.
        allocated_bytes: memory in tensors of this process.
        reserved_bytes: memory that this process's allocator holds.
        pinned_bytes_per_s: rate of copies from page-locked memory; ``None`` if not measured or not possible.
        pageable_bytes_per_s: rate of copies from ordinary memory; ``None`` if not measured.
        own_stream: whether copies run on a separate stream, in parallel with kernels.
        pin_error: why memory could not be pinned.
    """

    device: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    pinned_bytes_per_s: float | None = None
    pageable_bytes_per_s: float | None = None
    own_stream: bool = True
    pin_error: str | None = None


@dataclass(frozen=True)
class Environment:
    """Packages, cores, memory and limits. ``None`` if the system does not report a value.

    Args:
        aiofeed: its version; "" if it is not installed.
        python: version of the interpreter, and the system.
        torch: version of torch, and what it was built for: "2.9.0, CUDA 12.8".
        torch_threads: threads that torch's own kernels use.
        pillow: version of the active package PIL; ``None`` if there is none.
        pillow_simd: whether that is Pillow-SIMD.
        pillow_simd_hidden: whether Pillow was installed over Pillow-SIMD.
        x86: whether Pillow-SIMD supports the processor.
        missing_formats: image formats that the active Pillow cannot read.
        native_problem: why the native JPEG library cannot be used, and what to do; "" if it can.
        decoders: other packages that decode images, with their versions.
        small_files: whether the native library that reads small files is available.
        uvloop: its version.
        affinity: cores that this process may run on.
        cpu_quota: cores' worth of time that the cgroup allows.
        cores: cores that aiofeed uses, by affinity, quota and the number of ranks.
        memory_limit_bytes: the cgroup's limit.
        free_memory_bytes: memory that can be allocated without swapping.
        open_files: soft and hard limit on open files; -1 for no limit.
        locked_bytes: soft and hard limit on locked memory; -1 for no limit.
        shm_bytes: size of /dev/shm.
        nvidia_driver: version of the kernel's NVIDIA driver; "" if it is unknown.
        nvidia_files: whether there are device files such as /dev/nvidia0.
        nvidia_refused: device files that this user may not open.
        forked: whether this process was forked from one that had initialized CUDA.
        ranks: ranks of the program on this machine.
        machine_cores: cores for all ranks, as far as this process may run on them.
        rank_memory_bytes: the part of the free memory from which defaults follow.
    """

    aiofeed: str
    python: str
    torch: str
    torch_threads: int
    pillow: str | None
    pillow_simd: bool
    pillow_simd_hidden: bool
    x86: bool
    missing_formats: tuple[str, ...]
    native_problem: str
    decoders: Mapping[str, str]
    small_files: bool
    uvloop: str | None
    affinity: int
    cpu_quota: float | None
    cores: int
    memory_limit_bytes: int | None
    free_memory_bytes: int
    open_files: tuple[int, int] | None
    locked_bytes: tuple[int, int] | None
    shm_bytes: int | None
    nvidia_driver: str | None
    nvidia_files: bool
    nvidia_refused: tuple[str, ...]
    forked: bool
    ranks: int = 1
    machine_cores: int = 0
    rank_memory_bytes: int = 0


@public_in("aiofeed.reports")
@dataclass(frozen=True)
class DeviceReport:
    """The result of ``device_report``; ``str`` formats it.

    Example:
        ```python
        import aiofeed

        report = aiofeed.device_report(measure=False)
        print(report.accelerators or report.absent)
        for line in report.advice:
            print(line)
        ```

    Args:
        accelerators: the accelerators that torch sees, with name, memory and copy rates.
        absent: why torch sees no accelerator; ``None`` if it sees one.
        surroundings: versions, cores, memory, limits.
        advice: one line for each problem, with its solution.
    """

    accelerators: tuple[AcceleratorReport, ...]
    absent: str | None
    surroundings: Environment
    advice: tuple[str, ...]

    def __str__(self) -> str:
        """The report as text, one fact per line."""
        if self.accelerators:
            rows = [(accelerator.device, _describe(accelerator)) for accelerator in self.accelerators]
        else:
            rows = [("accelerator", f"none: {self.absent}")]
        rows += _environment_rows(self.surroundings)
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        lines += ["", *(f"- {line}" for line in self.advice)] if self.advice else ["", "No problems found."]
        return "\n".join(lines)


def _describe(accelerator: AcceleratorReport) -> str:
    parts = [accelerator.name]
    if accelerator.total_bytes is not None and accelerator.free_bytes is not None:
        parts.append(f"{format_bytes(accelerator.free_bytes)} of {format_bytes(accelerator.total_bytes)} free")
    if accelerator.allocated_bytes is not None and accelerator.reserved_bytes is not None:
        allocated, reserved = format_bytes(accelerator.allocated_bytes), format_bytes(accelerator.reserved_bytes)
        parts.append(f"{allocated} allocated and {reserved} reserved by this process")
    rates = ("pinned", accelerator.pinned_bytes_per_s), ("pageable", accelerator.pageable_bytes_per_s)
    parts += [f"{memory} copies {rate / 1e9:.1f} GB/s" for memory, rate in rates if rate is not None]
    parts.append("copies on a separate stream" if accelerator.own_stream else "one stream for copies and kernels")
    return "; ".join(parts)


def _environment_rows(found: Environment) -> list[tuple[str, str]]:
    pillow = "none" if found.pillow is None else f"{'Pillow-SIMD' if found.pillow_simd else 'Pillow'} {found.pillow}"
    others = ", ".join(f"{name} {version}".rstrip() for name, version in found.decoders.items()) or "none"
    quota = "no quota" if found.cpu_quota is None else f"quota {found.cpu_quota:g}"
    limit = "no limit" if found.memory_limit_bytes is None else f"limit {format_bytes(found.memory_limit_bytes)}"
    rows = [
        ("aiofeed", f"{found.aiofeed or 'not installed'}; {found.python}"),
        ("torch", f"{found.torch}; {found.torch_threads} threads"),
        ("images", f"{pillow}; other decoders: {others}"),
        ("small files", "read in groups, without the GIL" if found.small_files else "read one by one"),
        ("event loop", f"uvloop {found.uvloop}" if found.uvloop else "asyncio"),
        ("cores", f"{found.cores} (affinity {found.affinity}, {quota})"),
        ("memory", f"{format_bytes(found.free_memory_bytes)} free ({limit})"),
    ]
    if found.ranks > 1:
        memory = f"{format_bytes(found.rank_memory_bytes)} of {format_bytes(found.free_memory_bytes)}"
        part = f"{found.cores} of {found.machine_cores} cores and {memory} of free memory"
        rows.append(("ranks", f"{found.ranks} ranks share this machine: {part} for this one"))
    if found.open_files is not None:
        rows.append(("open files", _format_limits(found.open_files, str)))
    if found.locked_bytes is not None:
        rows.append(("locked memory", _format_limits(found.locked_bytes, format_bytes)))
    if found.shm_bytes is not None:
        rows.append(("/dev/shm", format_bytes(found.shm_bytes)))
    return rows


def _format_limits(limits: tuple[int, int], format_limit: Callable[[int], str]) -> str:
    soft, hard = ("no limit" if limit < 0 else format_limit(limit) for limit in limits)
    return soft if soft == hard else f"{soft} (may be raised to {hard})"


# --- advice


def advise(accelerators: Sequence[AcceleratorReport], absent: str | None, environment: Environment) -> tuple[str, ...]:
    """Return one line for each problem; ``absent`` tells why torch sees no accelerators."""
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
        yield f"{found.torch} finds no driver: install it, or nothing if there is no GPU; containers need `--gpus all`"
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
        yield (
            f"images are decoded by Pillow {found.pillow}; Pillow-SIMD is faster: first install the headers of the "
            f"formats that you read besides JPEG and PNG ({HEADERS}), then {install_simd}"
        )
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
