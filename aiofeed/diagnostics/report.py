"""What a report holds, and how it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiofeed.core.formatting import format_bytes
from aiofeed.core.types import public


@dataclass(frozen=True)
class AcceleratorReport:
    """One accelerator.

    Args:
        device: "cuda:0".
        name: the vendor's.
        total_bytes: its memory; ``None`` for this and the next where torch does not say.
        free_bytes: what no process uses.
        allocated_bytes: in tensors of this process.
        reserved_bytes: held by this process's allocator.
        pinned_bytes_per_s: copies from page-locked memory; ``None``: not measured, or not possible.
        pageable_bytes_per_s: copies from ordinary memory; ``None``: not measured.
        own_stream: whether copies run on a stream of their own, beside the work.
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
    """What is around torch: packages, cores, memory, limits. ``None`` means that the system does not say.

    Args:
        aiofeed: its own version; "" where it was not installed.
        python: version of the interpreter, and the system.
        torch: version of torch, and what it was built for: "2.9.0, CUDA 12.8".
        torch_threads: threads that torch's own kernels use.
        pillow: version of the package PIL that is active; ``None``: there is none.
        pillow_simd: whether that is Pillow-SIMD.
        pillow_simd_hidden: whether Pillow-SIMD was installed, and then Pillow over it.
        x86: whether the processor is one that Pillow-SIMD is for.
        decoders: other packages that decode images, with their versions.
        small_files: whether the library is there that reads them in groups.
        uvloop: its version.
        affinity: cores that this process may run on.
        cpu_quota: cores' worth of time that the cgroup allows.
        cores: what aiofeed counts with: the lesser.
        memory_limit_bytes: what the cgroup allows.
        free_memory_bytes: what can be taken without swapping.
        open_files: limit on open files, soft and hard; -1: none.
        locked_bytes: limit on locked memory, soft and hard; -1: none.
        shm_bytes: size of /dev/shm.
        nvidia_driver: version of the kernel's NVIDIA driver; "" where it does not say.
        nvidia_files: whether there are device files /dev/nvidia0 and the like.
        nvidia_refused: those of them that this user may not open.
        forked: whether this process was forked from one that had started CUDA.
    """

    aiofeed: str
    python: str
    torch: str
    torch_threads: int
    pillow: str | None
    pillow_simd: bool
    pillow_simd_hidden: bool
    x86: bool
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
    """What ``device_report`` found; ``str`` makes it readable.

    Args:
        accelerators: those that torch sees, with name, memory, and speed of copies.
        absent: why torch sees none; ``None`` where it sees one.
        surroundings: versions, cores, memory, limits.
        advice: for each thing that is amiss, one line on how to mend it.
    """

    accelerators: tuple[AcceleratorReport, ...]
    absent: str | None
    surroundings: Environment
    advice: tuple[str, ...]

    def __str__(self) -> str:
        """The report as text, one fact per line."""
        rows = [*self._device_rows(), *_surroundings_rows(self.surroundings)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        lines += ["", *(f"- {line}" for line in self.advice)] if self.advice else ["", "Nothing is amiss."]
        return "\n".join(lines)

    def _device_rows(self) -> list[tuple[str, str]]:
        if not self.accelerators:
            return [("accelerator", f"none: {self.absent}")]
        return [(accelerator.device, _accelerator(accelerator)) for accelerator in self.accelerators]


def _accelerator(found: AcceleratorReport) -> str:
    parts = [found.name]
    if found.total_bytes is not None and found.free_bytes is not None:
        parts.append(f"{format_bytes(found.free_bytes)} of {format_bytes(found.total_bytes)} free")
    if found.allocated_bytes is not None and found.reserved_bytes is not None:
        parts.append(
            f"{format_bytes(found.allocated_bytes)} allocated and {format_bytes(found.reserved_bytes)} reserved here"
        )
    for what, rate in (("pinned", found.pinned_bytes_per_s), ("pageable", found.pageable_bytes_per_s)):
        if rate is not None:
            parts.append(f"{what} copies {rate / 1e9:.1f} GB/s")
    parts.append("copies on a stream of their own" if found.own_stream else "one stream for copies and work")
    return "; ".join(parts)


def _surroundings_rows(found: Environment) -> list[tuple[str, str]]:
    pillow = "none" if found.pillow is None else f"{'Pillow-SIMD' if found.pillow_simd else 'Pillow'} {found.pillow}"
    others = ", ".join(f"{name} {version}".rstrip() for name, version in found.decoders.items()) or "none"
    cores = f"{found.cores} (affinity {found.affinity}, "
    cores += "no quota)" if found.cpu_quota is None else f"quota {found.cpu_quota:g})"
    limit = "no limit" if found.memory_limit_bytes is None else f"limit {format_bytes(found.memory_limit_bytes)}"
    rows = [
        ("aiofeed", f"{found.aiofeed or 'not installed'}; {found.python}"),
        ("torch", f"{found.torch}; {found.torch_threads} threads"),
        ("images", f"{pillow}; other decoders: {others}"),
        ("small files", "read in groups, without the GIL" if found.small_files else "read one by one"),
        ("event loop", f"uvloop {found.uvloop}" if found.uvloop else "asyncio's own"),
        ("cores", cores),
        ("memory", f"{format_bytes(found.free_memory_bytes)} free ({limit})"),
    ]
    if found.open_files is not None:
        rows.append(("open files", _limits(found.open_files, str)))
    if found.locked_bytes is not None:
        rows.append(("locked memory", _limits(found.locked_bytes, format_bytes)))
    if found.shm_bytes is not None:
        rows.append(("/dev/shm", format_bytes(found.shm_bytes)))
    return rows


def _limits(limits: tuple[int, int], show: object) -> str:
    assert callable(show)
    soft, hard = ("no limit" if limit < 0 else show(limit) for limit in limits)
    return str(soft) if soft == hard else f"{soft} (may be raised to {hard})"
