"""Everything here needs a CUDA device, and is skipped where there is none."""

import contextlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark the tests of this folder; the marker is what skips them."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)


@pytest.fixture(scope="session", autouse=True)
def interprocess():
    """Have CUDA open what it keeps, once, for events that other processes know: no test of it leaves that behind."""
    import torch

    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # a driver without, or a container
            torch.cuda.Event(interprocess=True).ipc_handle()


@pytest.fixture
def backend():
    """The current CUDA device, with nothing queued by an earlier test."""
    import torch

    from aiofeed.devices.resolve import resolve_device

    torch.cuda.synchronize()
    yield resolve_device("cuda")
    torch.cuda.synchronize()
