"""What is asked of torch for CUDA's memory of other processes, and what its refusals become: without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiofeed.processes.ipc import cuda_ipc as device_handles
from aiofeed.processes.ipc.cuda_ipc import CudaHandles, CudaSlots, HandleError
from aiofeed.processes.ipc.schema import DeviceMemoryHandle

GPU = torch.device("cuda", 0)
HANDLE = DeviceMemoryHandle("GPU-7", b"allocation", 64, 512, b"/torch_1_2_0", 3, b"e" * 64, True)


class Torch:
    """What stands in for torch's two calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.released: list[tuple[Any, ...]] = []

    def open(self, *asked: Any) -> torch.UntypedStorage:
        self.asked.append(asked)
        raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be asynchronously reported")

    def release(self, *released: Any) -> None:
        self.released.append(released)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Torch:
    """A GPU that is visible, and opens nothing."""
    made = Torch()
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", made.open, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", made.release, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device_handles, "_uuid", lambda index: "GPU-7")
    return made


def test_shared_tensors_are_opened_behind_the_event_of_their_export(calls: Torch) -> None:
    """In torch's order."""
    with pytest.raises(HandleError):
        CudaHandles().open(HANDLE, None)
    assert calls.asked == [(0, b"allocation", 64, 512, b"/torch_1_2_0", 3, b"e" * 64, True)]


def test_a_slot_is_opened_behind_no_event(calls: Torch) -> None:
    """A stream that waits for the event of a server that was killed may wait for ever."""
    with pytest.raises(HandleError):
        CudaSlots(GPU).open(HANDLE)
    assert calls.asked == [(0, b"allocation", 64, 512, b"/torch_1_2_0", 3, b"e" * 64, False)]


def test_what_cannot_be_opened_is_counted_no_more(calls: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whatever it is that fails; the reason is one line."""
    with pytest.raises(HandleError, match=r"^CUDA error: invalid argument$"):
        CudaHandles().open(HANDLE, None)
    assert len(calls.released) == 1
    with pytest.raises(HandleError, match="lie on cuda:0, and cuda:1 was asked for"):
        CudaHandles().open(HANDLE, torch.device("cuda", 1))
    assert len(calls.released) == 2
    monkeypatch.setattr(device_handles, "_uuid", lambda index: "GPU-8")
    with pytest.raises(HandleError, match="GPU GPU-7 is not visible"):
        CudaHandles().open(HANDLE, None)
    assert calls.released == [(b"/torch_1_2_0", 3)] * 3
    assert len(calls.asked) == 1


def test_a_fork_of_a_process_that_uses_cuda_opens_nothing(calls: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """There every call fails; tensors stay in host memory."""

    def refuse(index: int) -> str:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(device_handles, "_uuid", refuse)
    with pytest.raises(HandleError, match="Cannot re-initialize CUDA in forked subprocess"):
        CudaHandles().open(HANDLE, None)
    assert len(calls.released) == 1
    assert CudaHandles().find("GPU-7") is None


def test_handles_that_are_none_are_refused_before_cuda_sees_them(calls: Torch) -> None:
    """Opening them is not defined."""
    for handle in (
        DeviceMemoryHandle("GPU-7", b"a", 64, 0, b"", 0, b"short", True),
        DeviceMemoryHandle("GPU-7", b"a", 64, -1, b"", 0, b"", False),
        DeviceMemoryHandle("GPU-7", b"a", 64, 0, b"", -1, b"", False),
        DeviceMemoryHandle("GPU-7", b"a", -64, 0, b"", 0, b"", False),
    ):
        with pytest.raises(HandleError):
            CudaHandles().open(handle, None)
    assert calls.asked == []
