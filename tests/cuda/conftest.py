"""Everything here needs a CUDA device, and is skipped where there is none."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark the tests of this folder; the marker is what skips them."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)


@pytest.fixture
def backend():
    """The current CUDA device, with nothing queued by an earlier test."""
    import torch

    from aiofeed.device import resolve_device

    torch.cuda.synchronize()
    yield resolve_device("cuda")
    torch.cuda.synchronize()
