"""Cores and memory available to this process, by affinity and cgroup instead of hardware; what its system can do.

Several ranks of a program on one machine share what the launcher has. ``rank_cpus`` and ``rank_memory`` are the parts
of this rank, from which all defaults follow.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from aiofeed.kernel.core.validation import launched_ranks

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_PROCESSES = Path("/proc")
# Version 1 reports a number near the largest one if there is no limit.
_NO_LIMIT = 1 << 60
_UNKNOWN_MEMORY = 8 << 30

# The niceness that a thread has more than the main one: of a core that both want it gets a tenth. A step of a small CNN
# on the CPU beside decoding took 1.46 times as long as alone, and 1.11 times with this; 1.08 times with 15, of which a
# thread would get a thirtieth of a core beside another program.
LOWER_BY = 10

# Whether this is a free-threaded build of Python, whose GIL is off unless an extension module or the user turns it on.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def has_gil() -> bool:
    """Return whether only one thread at a time runs Python code; on a free-threaded build an import may change it."""
    return not FREE_THREADED or sys._is_gil_enabled()  # type: ignore[attr-defined, unused-ignore]


def passes_descriptors() -> bool:
    """Return whether processes can pass file descriptors through Unix sockets; not on Windows."""
    return hasattr(socket, "send_fds") and hasattr(socket, "AF_UNIX")


def cpus() -> int:
    """The number of cores available to this process: its affinity, limited by the cgroup's quota (v2, then v1)."""
    return _limited(affinity(), cpu_quota())


def rank_cpus() -> int:
    """Return the number of cores for this rank: ``cpus()`` without other ranks, see ``_share``."""
    return max(_share(cpus(), lambda pid: _limited(len(os.sched_getaffinity(pid)), cpu_quota(pid))), 1)


def rank_memory() -> int:
    """Return the bytes of free memory for this rank: ``free_memory()`` without other ranks, see ``_share``."""
    return _share(free_memory(), free_memory)


def _share(own: int, amount_of: Callable[[int], int]) -> int:
    """Return the part of this rank: that of what the launcher has, at most what this process has.

    A launcher that has divided the cores, by an affinity or a cgroup for each rank, has more of them than a rank. A
    container's limits hold for its launcher, too, and are divided here. Ranks that share a NUMA node have more than
    their part.
    """
    (ranks, variable), most = launched_ranks(), own
    with contextlib.suppress(AttributeError, OSError):  # macOS, Windows; it has ended
        if ranks > 1 and (launcher := _launcher(variable)):
            most = max(own, amount_of(launcher))
    return min(own, most // ranks)


def _launcher(variable: str) -> int:
    """Return the process that started the ranks, if its cores or cgroups are others than those of this process; else 0.

    It is the nearest ancestor without the variable: a script that pins a rank and then starts it has the variable, too.
    """
    process = os.getppid()
    while process > 1 and f"\0{variable}=" in f"\0{_read(_PROCESSES / str(process) / 'environ')}":
        process = _read_field(_PROCESSES / str(process) / "status", "PPid:") or 0
    groups = _read(_PROCESSES / str(process) / "cgroup")  # None: of another user, or outside of the container
    same = os.sched_getaffinity(process) == os.sched_getaffinity(0) and groups in (None, _read(_OWN_CGROUPS))
    return 0 if same else process


def _limited(cores: int, quota: float | None) -> int:
    return cores if quota is None else max(1, min(cores, int(quota + 0.5)))


def affinity() -> int:
    """Return the number of cores in this process's affinity; of all cores if the system has no affinity."""
    # macOS and Windows have no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_wait_s(thread: int) -> float:
    """The seconds in which a thread of this process, by its native identifier, waited for a core; 0 if unknown."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * 1e-9
    except OSError:
        return 0.0


def lower_priority() -> None:
    """Let other threads of this process run before the calling one where cores are short; only Linux has this.

    Only a process with rights can undo it, and threads that this one starts inherit it.
    """
    if sys.platform == "linux":  # elsewhere this is the priority of the process
        with contextlib.suppress(OSError):  # a sandbox may refuse it
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getpid()) + LOWER_BY)


def threads_cpu_s(threads: Iterable[int]) -> float:
    """Return the seconds of threads of this process, by native identifier, on the processor together; 0 if unknown."""
    try:
        return sum(time.clock_gettime(~thread << 3 | 6) for thread in list(threads))  # Linux: each thread has a clock
    except (AttributeError, OSError, OverflowError):
        return 0.0


def free_memory(process: int = 0) -> int:
    """Bytes available without swapping to this or another process, by the kernel's estimate and the cgroups."""
    available = _meminfo_available()
    for group in _cgroups("memory", process):
        limit = _read_first(group, "memory.max", "memory.limit_in_bytes")
        used = _read_first(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            # The page cache counts as used, but the kernel reclaims it when memory is needed.
            fields = (_read_field(group / "memory.stat", name) for name in ("inactive_file", "total_inactive_file"))
            available = min(available, max(limit - used + max(field or 0 for field in fields), 0))
    return available


def memory_limit() -> int | None:
    """Return the lowest memory limit of the cgroups in bytes; ``None`` without a limit."""
    limits = [_read_first(group, "memory.max", "memory.limit_in_bytes") for group in _cgroups("memory")]
    return min([limit for limit in limits if limit is not None and limit < _NO_LIMIT], default=None)


def cpu_quota(process: int = 0) -> float | None:
    """Return the lowest CPU quota of the cgroups in cores, of this or another process; ``None`` without a limit."""
    quotas = []
    for group in _cgroups("cpu", process):
        version_1 = (_read(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        quota, _, period = (_read(group / "cpu.max") or " ".join(map(str, version_1))).partition(" ")
        if quota.isdigit():  # not "max" or -1
            quotas.append(int(quota) / int(period or 100_000))
    return min(quotas, default=None)


def _cgroups(controller: str, process: int = 0) -> Iterator[Path]:
    """Yield the folders of the cgroups of this or another process, version 2 and 1, from its own to the root."""
    roots = [_CGROUP, _CGROUP / controller]
    for line in (_read(_PROCESSES / str(process) / "cgroup" if process else _OWN_CGROUPS) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = roots[1] if controllers else roots[0]
            group = root / path.lstrip("/")
            while group != root and root in group.parents:
                yield group
                group = group.parent
    # Last: inside a container the path may be that of the host, which is not visible there.
    yield from roots


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
        if line.startswith((f"{name} ", f"{name}\t")):
            return int(line.split()[1])
    return None


def _read_first(folder: Path, *names: str) -> int | None:
    texts = (_read(folder / name) or "" for name in names)
    return next((int(text) for text in texts if text.isdigit()), None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
