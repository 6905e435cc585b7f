"""The calls of torch that open CUDA memory of other processes, and their errors. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiofeed.ipc import cuda_ipc
from aiofeed.ipc.cuda_ipc import CudaHandles, CudaSharedDevice, HandleError
from aiofeed.ipc.schema import DeviceMemoryHandle

GPU = torch.device("cuda", 0)
HANDLE = DeviceMemoryHandle("GPU-7", b"allocation", 64, 512, b"/torch_1_2_0", 3, b"e" * 64, True)


class FakeTorch:
    """Replaces two functions of torch and records their arguments."""

    def __init__(self) -> None:
        self.opened: list[tuple[Any, ...]] = []
        self.released: list[tuple[Any, ...]] = []

    def open(self, *arguments: Any) -> torch.UntypedStorage:
        self.opened.append(arguments)
        raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be asynchronously reported")

    def release(self, *arguments: Any) -> None:
        self.released.append(arguments)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """A visible GPU whose memory cannot be opened."""
    made = FakeTorch()
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", made.open, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", made.release, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_ipc, "_uuid", lambda index: "GPU-7")
    return made


def test_shared_tensors_are_opened_after_the_event_of_their_export(calls: FakeTorch) -> None:
    """The arguments are in torch's order."""
    with pytest.raises(HandleError):
        CudaHandles().open(HANDLE, None)
    assert calls.opened == [(0, b"allocation", 64, 512, b"/torch_1_2_0", 3, b"e" * 64, True)]


def test_a_block_is_opened_without_waiting_for_an_event(calls: FakeTorch) -> None:
    """A stream that waits for the event of a killed server may never continue."""
    with pytest.raises(HandleError):
        CudaSharedDevice(GPU).open(HANDLE)
    assert calls.opened == [(0, b"allocation", 64, 512, b"/torch_1_2_0", 3, b"e" * 64, False)]


def test_the_reference_of_a_handle_that_cannot_be_opened_is_taken_back(
    calls: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, whatever fails; the message is one line."""
    with pytest.raises(HandleError, match=r"^CUDA error: invalid argument$"):
        CudaHandles().open(HANDLE, None)
    assert len(calls.released) == 1
    with pytest.raises(HandleError, match="are on cuda:0, and cuda:1 was requested"):
        CudaHandles().open(HANDLE, torch.device("cuda", 1))
    assert len(calls.released) == 2
    monkeypatch.setattr(cuda_ipc, "_uuid", lambda index: "GPU-8")
    with pytest.raises(HandleError, match="GPU GPU-7 is not visible"):
        CudaHandles().open(HANDLE, None)
    assert calls.released == [(b"/torch_1_2_0", 3)] * 3
    assert len(calls.opened) == 1


def test_a_fork_of_a_process_that_uses_cuda_opens_nothing(calls: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of CUDA fails there; tensors stay in host memory."""

    def refuse(index: int) -> str:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(cuda_ipc, "_uuid", refuse)
    with pytest.raises(HandleError, match="Cannot re-initialize CUDA in forked subprocess"):
        CudaHandles().open(HANDLE, None)
    assert len(calls.released) == 1
    assert CudaHandles().find("GPU-7") is None


def opened_as_tensors(handle: DeviceMemoryHandle) -> None:
    CudaHandles().open(handle, None)


@pytest.mark.parametrize(
    ("open_", "nbytes", "offset", "counter_offset", "event"),
    [
        (opened_as_tensors, 64, 0, 0, b"short"),
        (opened_as_tensors, 64, -1, 0, b""),
        (opened_as_tensors, 64, 0, -1, b""),
        (opened_as_tensors, -64, 0, 0, b""),
        (CudaSharedDevice(GPU).open, 0, 0, 0, b""),
        (CudaSharedDevice(GPU).open, 1, -1, 0, b""),
    ],
)
def test_invalid_handles_are_refused_before_cuda_gets_them(
    calls: FakeTorch, open_: Any, nbytes: int, offset: int, counter_offset: int, event: bytes
) -> None:
    """To open them is undefined behaviour."""
    handle = DeviceMemoryHandle("GPU-7", b"a" * 64, nbytes, offset, b"", counter_offset, event, bool(event))
    with pytest.raises(HandleError):
        open_(handle)
    assert calls.opened == []


def test_an_event_handle_of_the_wrong_size_is_refused() -> None:
    """The message has both sizes."""
    with pytest.raises(HandleError, match="64 bytes, this one 3"):
        CudaSharedDevice(GPU).open_event(b"abc")
