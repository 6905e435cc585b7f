"""Tests that need PyTorch's simulated accelerator; they are skipped without it."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def skip_reason() -> str | None:
    """Return the reason why these tests cannot run; ``None`` if they can."""
    if importlib.util.find_spec("torch_openreg") is None:
        return "torch_openreg, PyTorch's simulated accelerator, is not installed"
    import torch

    kind = torch.accelerator.current_accelerator()
    return None if kind is not None and kind.type == "openreg" else f"torch's accelerator is {kind}, not openreg"


def pytest_collection_modifyitems(items):
    """Skip the tests of this folder if they cannot run."""
    reason = skip_reason()
    for item in items:
        if reason is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def one_thread():
    """Use one torch thread: the tensors are small."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def record_stream():
    """Return the list of record_stream calls, (address of the storage, stream). The device has no record_stream."""
    import torch

    calls = []
    with torch.library._scoped_library("aten", "IMPL") as library:
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::record_stream", "PrivateUse1"):
            record = lambda tensor, stream: calls.append((tensor.untyped_storage().data_ptr(), stream))  # noqa: E731
            library.impl("record_stream", record, "PrivateUse1")
        yield calls


@pytest.fixture
def backend(record_stream):
    """Return the backend of the first of the two devices, with record_stream."""
    from aiofeed.devices.resolve import resolve_device

    record_stream.clear()
    return resolve_device("openreg:0")
