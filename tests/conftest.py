"""What every test gets: small images, a limit on its time, and a look at what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator

ASYNC_TIMEOUT_S = 100.0
"""Ends an async test by cancelling it, so that it can clean up, before pytest-timeout interrupts it."""

THREAD_GRACE_S = 30.0
"""How long threads may take to end after a test: milliseconds, and a busy machine takes what it wants."""

# Deadlines per example measure the machine. On CI the examples are the same each time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# --- time -------------------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put a limit on every async test."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("timeout")
            limit_s = 0.9 * float(marker.args[0]) if marker and marker.args else ASYNC_TIMEOUT_S
            item.obj = within(limit_s, item.obj)


def within(limit_s: float, test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The test, cancelled and failed after `limit_s`; a `TimeoutError` of the test's own passes through."""

    @functools.wraps(test)
    async def limited(*args: Any, **kwargs: Any) -> None:
        scope = asyncio.timeout(limit_s)
        try:
            async with scope:
                await test(*args, **kwargs)
        except TimeoutError:
            if scope.expired():
                pytest.fail(f"the test did not end within {limit_s:g} s")
            raise

    return limited


# --- signals ----------------------------------------------------------------------------------------------------------


def pytest_configure() -> None:
    """Hear Ctrl-C, and let child processes hear it, though a shell that starts this in the background masks it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# --- what a test leaves behind ----------------------------------------------------------------------------------------


def join_threads(threads: Iterable[threading.Thread], grace_s: float = THREAD_GRACE_S) -> list[threading.Thread]:
    """Wait until all have ended, `grace_s` together at most; returns those that have not."""
    deadline = time.monotonic() + grace_s
    threads = list(threads)
    for thread in threads:
        with contextlib.suppress(RuntimeError):  # one that is just being started cannot be joined
            thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def feed_threads() -> set[threading.Thread]:
    """The threads of aiofeed that run now."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("aiofeed")}


def open_descriptors() -> dict[int, str]:
    """The open file descriptors and what they stand for; empty where the system does not list them.

    The driver of a GPU opens more of its own as it is used in new ways, and keeps them: they are left out.
    """
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        folder = Path("/dev/fd")
    descriptors = {}
    for name in os.listdir(folder) if folder.is_dir() else ():
        try:
            os.fstat(int(name))  # The listing's own descriptor is closed by now.
            what = os.readlink(folder / name) if folder.parts[1] == "proc" else "open"
            if not what.startswith("/dev/nvidia"):
                descriptors[int(name)] = what
        except OSError:
            continue
    return descriptors


@pytest.fixture(scope="session", autouse=True)
def opened_once() -> None:
    """Have libuv open the pipe for signals that it keeps for the life of the process."""
    from aiofeed.runtime.event_loop import new_event_loop

    new_event_loop().close()


passed_key = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note for the fixture below whether the test itself passed."""
    report = yield
    if report.when == "call":
        item.stash[passed_key] = report.passed
    return report


@pytest.fixture(autouse=True)
def nothing_left_behind(opened_once: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which threads of aiofeed still run, or more files are open than before."""
    if request.node.get_closest_marker("cuda"):
        start_cuda()  # Opens descriptors that stay.
    threads_before = feed_threads()
    descriptors_before = open_descriptors()
    yield
    if not request.node.stash.get(passed_key, False):
        return  # The traceback keeps what the test made alive.
    deadline = time.monotonic() + THREAD_GRACE_S
    while (left := feed_threads() - threads_before) and time.monotonic() < deadline:
        # A feeder that was dropped within a reference cycle has not been told yet. More than once: what an earlier
        # thread still held the first time is within reach the next.
        gc.collect()
        join_threads(left, 0.2)
    if left:
        pytest.fail("threads still run after the test: " + ", ".join(sorted(thread.name for thread in left)))
    if len(open_descriptors()) > len(descriptors_before):
        gc.collect()
    descriptors = open_descriptors()
    if len(descriptors) > len(descriptors_before):
        opened = {fd: what for fd, what in descriptors.items() if descriptors_before.get(fd) != what}
        pytest.fail(f"file descriptors still open after the test: {opened}")


# --- CUDA -------------------------------------------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests marked `cuda` where there is no such device."""
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@functools.cache
def start_cuda() -> None:
    """Make torch's context, once, and use what else has threads and pipes of its own."""
    import torch

    pinned = torch.zeros(1, pin_memory=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        pinned.to("cuda", non_blocking=True).cpu()
        event = torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()


@pytest.fixture(scope="module")
def accelerator_started() -> None:
    """For tests that take what accelerator there is: its driver has opened what it keeps before they begin."""
    import torch

    if torch.cuda.is_available():
        start_cuda()


# --- images -----------------------------------------------------------------------------------------------------------

CLASSES = ("ant", "bee", "cat")
SIZES = ((64, 48), (48, 64), (80, 80), (33, 65), (120, 90), (97, 41))
"""(width, height) of the generated images, in turn: landscape, portrait, square, odd."""


def write_image_folder(root: Path, per_class: int, *, seed: int = 0) -> Path:
    """`root/<class>/<number>.jpg`: smooth random pictures in three classes, the same for the same seed."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(seed)
    for name in CLASSES:
        folder = root / name
        folder.mkdir(parents=True)
        for number in range(per_class):
            coarse = random.integers(0, 256, size=(6, 6, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize(SIZES[number % len(SIZES)], Image.Resampling.BICUBIC)
            image.save(folder / f"{number:03d}.jpg", quality=90)
    return root


@pytest.fixture(scope="session")
def make_image_folder() -> Callable[..., Path]:
    """`make_image_folder(root, per_class, seed=0)` writes small JPEGs in three classes below `root`."""
    return write_image_folder


@pytest.fixture(scope="session")
def jpeg_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 small JPEGs in the classes ant, bee and cat, of various sizes. Shared by all tests: read only."""
    return write_image_folder(tmp_path_factory.mktemp("images") / "jpeg", per_class=12)


@pytest.fixture(autouse=True)
def _silent_about_the_gil(request: pytest.FixtureRequest) -> Iterator[None]:
    """Decoders as small as the tests' are Python alone: whether a machine lets that be noticed is not their matter."""
    log = logging.getLogger("aiofeed.feeder")

    def other(record: logging.LogRecord) -> bool:
        return "GIL-bound" not in str(record.msg)

    if "tuning" in request.module.__name__ or "test_concurrency" in request.module.__name__:
        yield
        return
    log.addFilter(other)
    yield
    log.removeFilter(other)
