"""Processor time of tests: an unmarked one that takes too much fails, and is to become smaller or `slow`.

It counts processor time of setup, call and teardown, of this process and of the children that ended meanwhile, as load
changes wall time more. It leaves out fixtures that several tests share, and does not judge a test during which this
process imported a library: in another order another test would do both.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Generator
from typing import Any

import pytest

from tests.support import fork_server

LIMIT_S = 1.0
"""What a test that is not marked `slow` may take on the machine of the benchmarks."""

MARGIN = 3.0
"""A test fails above so many times the limit: its processor time varies, with the load of caches and cores, too."""

REFERENCE_S = 0.009
"""Processor time of `fixed_work` on that machine when it is quiet."""

PAGES_S = 0.004
"""Processor time of touching the pages of `new_memory` on that machine."""

LIBRARY_MODULES = 50
"""An import of so many modules is one of a library."""


def processor_s() -> float:
    """Return the processor time of this process, of its children that have ended, and of the fork server's."""
    multiprocessing.active_children()  # waits for those that have ended
    children = os.times()
    return time.process_time() + children.children_user + children.children_system + fork_server.spent_s


def fixed_work() -> float:
    """Return the processor time of a fixed piece of work, half of it Python's and half a library's; least of three."""
    least = float("inf")
    for _ in range(3):
        start = time.process_time()
        sum(number % 7 for number in range(120_000))
        hashlib.blake2b(bytes(4 << 20)).digest()
        least = min(least, time.process_time() - start)
    return least


def new_memory() -> float:
    """Return the processor time of touching 4,096 new pages: the host of a virtual machine may have to find them."""
    start = time.process_time()
    with mmap.mmap(-1, 16 << 20) as memory:
        for at in range(0, len(memory), 4096):
            memory[at] = 1
    return time.process_time() - start


def slowness() -> float:
    """Return how many times as long as on the machine of the benchmarks computing or new memory takes; at least 1."""
    return max(1.0, fixed_work() / REFERENCE_S, new_memory() / PAGES_S)


class ProcessorTime:
    """The plugin that measures every test, judges those that passed, and prints the sum of all."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._shared_s = 0.0
        self._in_shared_fixture = False
        self._start: tuple[float, int] | None = None
        self._sum_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Add up the time of fixtures that several tests share, with the fixtures that those ask for."""
        if fixturedef.scope == "function" or self._in_shared_fixture:
            return (yield)
        self._in_shared_fixture, start_s = True, processor_s()
        try:
            return (yield)
        finally:
            self._in_shared_fixture = False
            self._shared_s += processor_s() - start_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Start the measurement of a test."""
        self._shared_s, self._start = 0.0, (processor_s(), len(sys.modules))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
        """Leave out the teardown of a module's last test, which ends what its tests shared, too."""
        start_s = processor_s()
        yield
        if nextitem is None or nextitem.path != item.path:
            self._shared_s += processor_s() - start_s

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail a test after its teardown if it took too long and is not marked `slow`."""
        report = yield
        if report.when != "teardown" or self._start is None:
            return report
        start_s, modules = self._start
        spent_s = processor_s() - start_s - self._shared_s
        report.user_properties = [*report.user_properties, ("processor_s", spent_s + self._shared_s)]
        limit_s = MARGIN * self._limit_s
        if judged(item, report) and len(sys.modules) - modules < LIBRARY_MODULES and spent_s > limit_s:
            limit_s *= slowness()
            if spent_s > limit_s:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {spent_s:.2f} s of processor time, more than {limit_s:.2f} s: make it smaller"
                    f" (it should take less than {self._limit_s:g} s on a quiet machine), or mark it `slow`"
                )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of a test to the sum, in the process that prints."""
        if report.when == "teardown":
            self._sum_s += dict(report.user_properties).get("processor_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the processor time of all tests."""
        terminalreporter.write_line(f"processor time of the tests: {self._sum_s / 60:.1f} min")


def judged(item: pytest.Item, report: pytest.TestReport) -> bool:
    """Return whether a test has to keep to the limit: not if more examples are asked for, or where CUDA starts.

    On other systems than Linux tests start new interpreters in place of forks.
    """
    free = "AIOFEED_EXAMPLES" in os.environ or any(map(item.get_closest_marker, ("slow", "cuda")))
    return report.passed and not free and sys.platform == "linux"
