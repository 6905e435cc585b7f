"""CPU time and memory of a process and all its descendants."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


def tree_cpu_s() -> float:
    """User and system time of this process and its descendants, including those that have ended."""
    waited_for = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(map(_cpu_s, psutil.Process().children(recursive=True)))
    return time.process_time() + waited_for.ru_utime + waited_for.ru_stime + living


def _cpu_s(process: psutil.Process) -> float:
    try:
        if sys.platform == "linux":
            # The clock id of another process, see clock_getcpuclockid(3): in nanoseconds; /proc has hundredths.
            return time.clock_gettime((~process.pid << 3) | 2)
        times = process.cpu_times()
        return times.user + times.system
    except (psutil.NoSuchProcess, OSError):
        return 0.0


@dataclass(frozen=True)
class Memory:
    """Memory in bytes.

    Args:
        total: ``unmapped`` plus mapped files (libraries, mostly): those of the process with the most of them, since the
            other processes of the tree map the same ones. PSS of files is not used: it rises whenever another program
            that maps them ends. RSS if the system does not report the parts.
        unmapped: memory without mapped files; a page that n processes share counts 1/n in each.
    """

    total: int
    unmapped: int

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.total - other.total, self.unmapped - other.unmapped)


def peak(first: Memory, second: Memory) -> Memory:
    return Memory(max(first.total, second.total), max(first.unmapped, second.unmapped))


def tree_memory(pid: int) -> Memory:
    """Memory of a process and its descendants."""
    try:
        root = psutil.Process(pid)
        parts = [_memory(process) for process in (root, *root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return Memory(0, 0)
    unmapped = sum(memory.unmapped for memory in parts)
    return Memory(unmapped + max(memory.total - memory.unmapped for memory in parts), unmapped)


def _memory(process: psutil.Process) -> Memory:
    try:
        sizes = _sizes(f"/proc/{process.pid}/smaps_rollup") | _sizes(f"/proc/{process.pid}/status")
        unmapped = sizes["Pss_Anon"] + sizes["Pss_Shmem"]
        return Memory(unmapped + sizes["RssFile"], unmapped)
    except (OSError, KeyError):
        pass  # another system, an older kernel, or the process has just ended
    try:
        resident = int(process.memory_info().rss)
    except psutil.Error:
        return Memory(0, 0)
    return Memory(resident, resident)


def _sizes(path: str) -> dict[str, int]:
    """The lines of a file in /proc that are in kB, in bytes."""
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[2:] == ["kB"]}
