"""Tests that need a CUDA device; they are skipped without one."""

import contextlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Add the marker "cuda", which skips the tests of this folder without a device."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)


@pytest.fixture(scope="session", autouse=True)
def interprocess():
    """Create an interprocess event, so that CUDA opens the descriptors it keeps before the first test."""
    import torch

    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # not supported by the driver or the container
            torch.cuda.Event(interprocess=True).ipc_handle()


@pytest.fixture
def backend():
    """Return the backend of the current CUDA device, with no work queued by earlier tests."""
    import torch

    from aiofeed.devices.resolve import resolve_device

    torch.cuda.synchronize()
    yield resolve_device("cuda")
    torch.cuda.synchronize()
