"""CPU time and memory of a process and all its descendants."""

from __future__ import annotations

import resource
import sys
import time
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


def tree_memory(pid: int) -> int:
    """Memory in bytes of a process and its descendants.

    That is memory without mapped files, in which a page that n processes share counts 1/n in each, plus the mapped
    files (libraries, mostly) of the process with the most of them, since the other processes map the same ones. PSS of
    files is not used: it rises whenever another program that maps them ends. RSS if the system does not report parts.
    """
    try:
        root = psutil.Process(pid)
        parts = [_memory(process) for process in (root, *root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    return sum(unmapped for unmapped, _ in parts) + max(mapped for _, mapped in parts)


def _memory(process: psutil.Process) -> tuple[int, int]:
    """Memory without mapped files, and mapped files."""
    try:
        sizes = _sizes(f"/proc/{process.pid}/smaps_rollup") | _sizes(f"/proc/{process.pid}/status")
        return sizes["Pss_Anon"] + sizes["Pss_Shmem"], sizes["RssFile"]
    except (OSError, KeyError):
        pass  # another system, an older kernel, or the process has just ended
    try:
        return int(process.memory_info().rss), 0
    except psutil.Error:
        return 0, 0


def _sizes(path: str) -> dict[str, int]:
    """The lines of a file in /proc that are in kB, in bytes."""
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[2:] == ["kB"]}
