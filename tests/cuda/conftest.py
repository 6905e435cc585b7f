"""Tests that need a CUDA device; they are skipped without one."""

import contextlib
import gc
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.paths import environment

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Add the marker "cuda", which skips the tests of this folder without a device."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)


SHARE = """
import sys
import torch
from aiofeed.serving.shared_tensors.api import share
with share({"x": torch.zeros(1 << 20, device="cuda")}, sys.argv[1]):
    print("shared", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="session", autouse=True)
def opened_by_cuda(tmp_path_factory):
    """Open memory of another process: CUDA keeps the descriptors that this opens first."""
    import torch

    from aiofeed.serving.shared_tensors.api import attach_tensors

    if not torch.cuda.is_available():
        return
    # What the driver or the container does not support opens nothing.
    with contextlib.suppress(RuntimeError):
        torch.cuda.Event(interprocess=True).ipc_handle()
    with tempfile.TemporaryDirectory(prefix="af", dir="/tmp") as folder:
        address = f"{folder}/warm"
        command = [sys.executable, "-c", SHARE, address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, encoding="utf-8", env=environment(), **pipes) as owner:
            assert owner.stdout.readline() == "shared\n"
            assert attach_tensors(address)["x"].sum().item() == 0
            gc.collect()
            torch.cuda.ipc_collect()
            owner.communicate("\n", timeout=60)


@pytest.fixture(scope="session")
def compiler_started():
    """Compile a function: Triton keeps descriptors that its first compilation opens."""
    import torch

    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        # Without a pool of compiler processes, whose pipes would stay open.
        patch.setattr(pytest.importorskip("torch._inductor.config"), "compile_threads", 1)
        torch.compile(lambda x: x * 2 + 1)(torch.ones(64, device="cuda")).sum().item()


@pytest.fixture
def backend():
    """Return the backend of the current CUDA device, with no work queued by earlier tests."""
    import torch

    from aiofeed.kernel.devices.resolve import resolve_device

    torch.cuda.synchronize()
    yield resolve_device("cuda")
    torch.cuda.synchronize()
