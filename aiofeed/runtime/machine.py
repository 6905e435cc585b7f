"""Cores and memory available to this process, by affinity and cgroup instead of hardware."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNKNOWN_MEMORY = 8 << 30


def cpus() -> int:
    """The number of cores available to this process: its affinity, limited by the cgroup's quota (v2, then v1)."""
    count = affinity()
    quota = cpu_quota()
    return max(1, min(count, int(quota + 0.5))) if quota is not None else count


def affinity() -> int:
    """The number of cores in this process's affinity; of all cores if the system has no affinity."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def free_memory() -> int:
    """Bytes available without swapping, by the kernel's estimate and the cgroup's limit."""
    available = _meminfo_available()
    limit, used = memory_limit(), _read_int(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        # The page cache counts as used, but the kernel reclaims it when memory is needed.
        reclaimable = _read_field(_CGROUP / "memory.stat", "inactive_file") or 0
        available = min(available, max(limit - used + reclaimable, 0))
    return available


def memory_limit() -> int | None:
    """The cgroup's limit in bytes; ``None`` without a limit."""
    return _read_int(_CGROUP / "memory.max")


def cpu_quota() -> float | None:
    """The cgroup's CPU quota in cores (v2, then v1); ``None`` without a limit."""
    text = _read(_CGROUP / "cpu.max")
    if text:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota_us, period_us = _read_int(_CGROUP / "cpu/cpu.cfs_quota_us"), _read_int(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota_us is None or period_us is None or quota_us <= 0 or period_us <= 0:
        return None
    return quota_us / period_us


def _meminfo_available() -> int:
    if (available := _read_field(Path("/proc/meminfo"), "MemAvailable:")) is not None:
        return available * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN_MEMORY


def _read_field(path: Path, name: str) -> int | None:
    """Return the number after a name at the start of a line."""
    for line in (_read(path) or "").splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None
