"""The report's data, and its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiofeed.core.formatting import format_bytes
from aiofeed.core.types import public


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
        formats_without_headers: formats that it reads, and that a Pillow-SIMD built on this machine would not.
        native_problem: why the native JPEG library cannot be used, and what to do; "" if it can.
        decoders: other packages that decode images, with their versions.
        small_files: whether the native library that reads small files is available.
        uvloop: its version.
        affinity: cores that this process may run on.
        cpu_quota: cores' worth of time that the cgroup allows.
        cores: cores that aiofeed uses, by affinity and quota.
        memory_limit_bytes: the cgroup's limit.
        free_memory_bytes: memory that can be allocated without swapping.
        open_files: soft and hard limit on open files; -1 for no limit.
        locked_bytes: soft and hard limit on locked memory; -1 for no limit.
        shm_bytes: size of /dev/shm.
        nvidia_driver: version of the kernel's NVIDIA driver; "" if it is unknown.
        nvidia_files: whether there are device files such as /dev/nvidia0.
        nvidia_refused: device files that this user may not open.
        forked: whether this process was forked from one that had initialized CUDA.
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
    formats_without_headers: tuple[str, ...]
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


@public
@dataclass(frozen=True)
class DeviceReport:
    """The result of ``device_report``; ``str`` formats it.

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
