"""Fixtures of all tests: generated images, a time limit for async tests, and a check for leaked threads and files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hypothesis
import pytest

from aiofeed.kernel.core.validation import LAUNCHERS
from tests.support.fault_server import FaultServer, start_obstore
from tests.support.processor_time import ProcessorTime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator, Iterator

    from tests.support.device_cases import DeviceCase
    from tests.support.fork_server import ForkServer

ASYNC_TIMEOUT_S = 100.0
"""An async test is cancelled after this time, so that it can clean up before pytest-timeout interrupts it."""

THREAD_GRACE_S = 30.0
"""Time that threads have to end after a test; it takes milliseconds, or longer on a busy machine."""

# No deadlines per example, which would measure the machine. On CI the examples are the same in every run.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# --- time -------------------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Wrap every async test in a time limit."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("timeout")
            limit_s = 0.9 * float(marker.args[0]) if marker and marker.args else ASYNC_TIMEOUT_S
            item.obj = within(limit_s, item.obj)


def within(limit_s: float, test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The test, cancelled and failed after `limit_s`; a `TimeoutError` of the test itself passes through."""

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


def pytest_configure(config: pytest.Config) -> None:
    """Judge the processor time of tests, and set up their process.

    It and its children handle SIGINT, although a shell ignores it for background commands.
    Tests are no ranks, also if a job of a cluster starts them: the variables of its launcher are removed.
    Workers of a ``DataLoader`` are forked, also where Python 3.14 has another default: the datasets of many tests are
    local classes. Tests of the other start methods pass ``multiprocessing_context=``.
    """
    config.pluginmanager.register(ProcessorTime())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *LAUNCHERS):
        os.environ.pop(name, None)
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# --- leaks ------------------------------------------------------------------------------------------------------------


def feed_threads() -> set[threading.Thread]:
    """The running threads of aiofeed that end with a feeder; the thread of a dataset ends with that."""
    running = {thread for thread in threading.enumerate() if thread.name.startswith("aiofeed")}
    return {thread for thread in running if thread.name != "aiofeed-decode-dataset"}


def open_descriptors() -> dict[int, str]:
    """The open file descriptors with their targets; empty if the system does not list them.

    A GPU's driver opens its device files at any time and keeps them, so they are left out. Fixtures of `tests/cuda`
    open what the driver and Triton keep otherwise: `start_cuda`, `opened_by_cuda` and `compiler_started`.
    """
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        folder = Path("/dev/fd")
    descriptors = {}
    for name in os.listdir(folder) if folder.is_dir() else ():
        try:
            os.fstat(int(name))  # The listing's own descriptor is closed by now.
            target = os.readlink(folder / name) if folder.parts[1] == "proc" else "open"
            if not target.startswith("/dev/nvidia"):
                descriptors[int(name)] = target
        except OSError:
            continue
    return descriptors


@pytest.fixture(scope="session", autouse=True)
def opened_once() -> None:
    """Create an event loop, for which libuv opens a pipe for signals and keeps it."""
    from aiofeed.kernel.runtime.event_loop import new_event_loop

    new_event_loop().close()


@pytest.fixture(scope="session")
def arrow_started() -> None:
    """Have pyarrow, if there is one, read a CSV file: it opens a pipe for signals and keeps it."""
    with contextlib.suppress(ImportError):
        from pyarrow import csv

        csv.read_csv(io.BytesIO(b"a\n1\n"))


@pytest.fixture(scope="session")
def zarr_started() -> None:
    """Have zarr, if there is one, make an array: it starts an event loop in a thread and keeps it."""
    with contextlib.suppress(ImportError):
        import zarr

        zarr.create_array({}, shape=(1,), dtype="int8")


LeftT = TypeVar("LeftT", bound=Sized)


def settled(find: Callable[[], LeftT]) -> LeftT:
    """Wait until `find()` finds nothing, up to `THREAD_GRACE_S`; returns what it found last.

    A feeder in a reference cycle stops when it is collected. A collection takes up to a second of processor time, so
    pauses between collections grow.
    """
    deadline, pause_s = time.monotonic() + THREAD_GRACE_S, 0.005
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(pause_s)
        if pause_s > 0.02:
            gc.collect()
        pause_s = min(2 * pause_s, 1.0)
    return left


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> None:
    """Leave the objects that live now, such as torch's, out of garbage collections."""
    gc.collect()
    gc.freeze()


passed_key = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record for the fixture below whether the test itself passed."""
    report = yield
    if report.when == "call":
        item.stash[passed_key] = report.passed
    return report


@pytest.fixture(autouse=True)
def nothing_left_behind(opened_once: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which threads of aiofeed still run, or more files are open than before."""
    if request.node.get_closest_marker("cuda") is not None:
        start_cuda()  # opens descriptors, and keeps them
    threads_before = feed_threads()
    descriptors_before = open_descriptors()
    yield
    if not request.node.stash.get(passed_key, False):
        return  # the traceback keeps the test's objects alive
    left = settled(lambda: feed_threads() - threads_before)
    if left:
        pytest.fail("threads still run after the test: " + ", ".join(sorted(thread.name for thread in left)))
    descriptors = settled(lambda: found if len(found := open_descriptors()) > len(descriptors_before) else {})
    if descriptors:
        opened = {fd: target for fd, target in descriptors.items() if descriptors_before.get(fd) != target}
        pytest.fail(f"file descriptors still open after the test: {opened}")


# --- worker processes -------------------------------------------------------------------------------------------------


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of ``engine="process"`` from this process, in which torch is imported; on Linux only."""
    if sys.platform == "linux":
        from tests.support.forked_workers import FORKING

        monkeypatch.setattr("aiofeed.workers.handle.subprocess", FORKING)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Runs Python programs in forks of a process in which torch and aiofeed are imported; needs a system that forks."""
    from tests.support.fork_server import ForkServer

    if not hasattr(os, "fork"):
        pytest.skip("no fork")
    with ForkServer() as server:
        yield server


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one torch thread: the tensors are small."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def openreg_calls() -> Iterator[list[tuple[int, Any]]]:
    """The calls of record_stream on torch_openreg, which has none, as (address of the storage, stream)."""
    import torch

    calls: list[tuple[int, Any]] = []
    with torch.library._scoped_library("aten", "IMPL") as library:
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::record_stream", "PrivateUse1"):
            record = lambda tensor, stream: calls.append((tensor.untyped_storage().data_ptr(), stream))  # noqa: E731
            library.impl("record_stream", record, "PrivateUse1")
        yield calls


@pytest.fixture
def device(request: pytest.FixtureRequest, one_thread: None) -> Iterator[DeviceCase]:
    """A device for the test, with no work queued by earlier tests; `on(...)` of `device_cases` says which."""
    from tests.support.device_cases import DeviceCase

    case = DeviceCase(request.param)
    if case.kind == "openreg":
        request.getfixturevalue("openreg_calls").clear()
    case.synchronize()
    yield case
    case.synchronize()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests marked `cuda` on a machine without CUDA."""
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@functools.cache
def start_cuda() -> None:
    """Initialize CUDA, registered and pinned memory, streams and events, once per process."""
    import numpy as np
    import torch

    from aiofeed.kernel.devices import cuda

    # What the driver or the container does not support opens nothing.
    with contextlib.suppress(RuntimeError):
        device, memory = torch.device("cuda", torch.cuda.current_device()), np.zeros(1 << 20, np.uint8)
        torch.cuda.init()
        cuda.register(device, memory)
        cuda.unregister(device, memory)
    pinned = torch.zeros(1, pin_memory=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        pinned.to("cuda", non_blocking=True).cpu()
        event = torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()


@pytest.fixture(scope="module")
def accelerator_started() -> None:
    """Initialize the accelerator, if there is one, before tests that may use it."""
    import torch

    if torch.cuda.is_available():
        start_cuda()


# --- images -----------------------------------------------------------------------------------------------------------

CLASSES = ("ant", "bee", "cat")
SIZES = ((64, 48), (48, 64), (80, 80), (33, 65), (120, 90), (97, 41))
"""(width, height) of the generated images, in rotation: landscape, portrait, square, odd."""


def write_image_folder(root: Path, per_class: int, *, seed: int = 0) -> Path:
    """Write smooth random pictures as `root/<class>/<number>.jpg` in three classes, the same for the same seed."""
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
    """36 small JPEGs of various sizes in three classes. All tests share the folder, so it must not be changed."""
    return write_image_folder(tmp_path_factory.mktemp("images") / "jpeg", per_class=12)


@pytest.fixture(autouse=True)
def _no_failed_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free pinned memory again after a test in which a device failed."""
    monkeypatch.setattr("aiofeed.kernel.runtime.buffers._kept", None)


@pytest.fixture(autouse=True)
def _no_gil_warning(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop the warning of GIL-bound decoding, which the tests' tiny decoders cause on some machines."""
    log = logging.getLogger("aiofeed.feeder")

    def is_other(record: logging.LogRecord) -> bool:
        return "GIL-bound" not in str(record.msg)

    if "tuning" in request.module.__name__ or "test_concurrency" in request.module.__name__:
        yield
        return
    log.addFilter(is_other)
    yield
    log.removeFilter(is_other)


# --- object storage ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def obstore_started() -> None:
    """Start obstore's threads, which keep their descriptors."""
    pytest.importorskip("obstore")
    start_obstore()


@pytest.fixture
def object_server(obstore_started: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultServer]:
    """A server without objects, and an empty folder for caches of listings."""
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "aiofeed-cache"))
    with FaultServer() as running:
        yield running
