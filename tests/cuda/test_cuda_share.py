"""CUDA tensors shared by two processes."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch

from aiofeed.serving.shared_tensors.api import attach_tensors, share
from tests.support.paths import environment

pytestmark = pytest.mark.cuda

CHILD = """
import gc, logging, sys
import torch
from aiofeed.serving.shared_tensors.api import attach_tensors
logging.basicConfig(stream=sys.stdout)
data = attach_tensors(sys.argv[1], *sys.argv[2:])
x, part = data["x"], data["part"]
torch.cuda.synchronize()
print(x.device.type, x.dtype, int(x.sum()), part.tolist(), list(data["empty"].shape), data["host"].tolist(), flush=True)
x[0] = 1000
torch.cuda.synchronize()
print("written", flush=True)
sys.stdin.readline()
del data, x, part  # the exit of an interpreter destroys no objects for certain, and the owner waits for these
gc.collect()
torch.cuda.synchronize()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the test and its processes a private folder for addresses."""
    tmp_path_factory.getbasetemp()  # creates pytest's folder outside of the private one
    with tempfile.TemporaryDirectory(prefix="af", dir="/tmp") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        monkeypatch.setenv("TMPDIR", made)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield


def allocate_by(settings: str) -> None:
    """Set torch's allocator settings and drop its cached memory."""
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (set_settings or torch.cuda.memory._set_allocator_settings)(settings)  # newer versions deprecate the latter
    torch.cuda.empty_cache()


def tensors() -> dict[str, torch.Tensor]:
    x = torch.arange(100_000, device="cuda")
    return {
        "x": x,
        "part": x[10:14].view(2, 2),
        "empty": torch.empty(0, 3, device="cuda"),
        "host": torch.arange(3),
    }


def child(address: str, *arguments: str, **more: str) -> tuple[str, subprocess.Popen[str]]:
    """Start a process that attaches and writes; return its output and the process, which still uses the tensors."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, address, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=environment(**more),
    )
    assert process.stdout is not None
    output = ""
    while not output.endswith("written\n"):
        line = process.stdout.readline()
        assert line, output
        output += line
    return output, process


SEEN = f"cuda torch.int64 {sum(range(100_000))} [[10, 11], [12, 13]] [0, 3] [0, 1, 2]"


@pytest.mark.timeout(180)
def test_another_process_has_the_same_device_memory() -> None:
    """Writes of another process are visible here; when all processes have ended, the memory is freed."""
    shared = share(tensors(), "gpu")
    for _ in range(2):
        output, process = child("gpu")
        assert output == f"{SEEN}\nwritten\n"
        assert shared.tensors["x"][0].item() == 1000
        shared.tensors["x"][0] = 0
        torch.cuda.synchronize()
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    before = torch.cuda.memory_allocated()
    shared.close()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() < before


FEEDING = """
import sys, torch, aiofeed
from aiofeed.resident.device_windows import _is_torchs
x = aiofeed.processes.attach_tensors(sys.argv[1])
print(x.device.type, _is_torchs(x), _is_torchs(x.clone()))
feeder = aiofeed.Feeder(aiofeed.Tensors(x), batch_size=len(x), shuffle=True, device="cuda")
wanted = torch.arange(len(x), dtype=x.dtype, device=x.device)
for _ in range(20):
    torch.cuda._sleep(20_000_000)
    [rows] = next(iter(feeder))
del feeder, x
torch.cuda.synchronize()
print(torch.equal(rows.sort().values, wanted), flush=True)
"""


@pytest.mark.timeout(180)
def test_tensors_of_another_process_are_fed() -> None:
    """They are recognised as memory that torch does not own, and kept until the windows of them are gathered."""
    with share(torch.arange(1 << 22, dtype=torch.float32, device="cuda"), "feed"):
        done = subprocess.run(
            [sys.executable, "-c", FEEDING, "feed"],
            capture_output=True,
            encoding="utf-8",
            env=environment(),
            timeout=150,
        )
    assert done.stdout == "cuda False True\nTrue\n", done.stderr


def test_failed_sharing_leaks_no_memory() -> None:
    """In the process that owns the memory CUDA cannot open it; the copy leaks nothing."""
    before = torch.cuda.memory_allocated()
    with share(tensors(), "copy"):
        assert attach_tensors("copy")["part"].tolist() == [[10, 11], [12, 13]]
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", ["cpu", "expandable", "same process"])
def test_without_ipc_there_is_a_copy(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without CUDA IPC (host memory, an allocator without handles, the same process) the tensors are copied."""
    if way == "expandable":
        allocate_by("expandable_segments:True")
    try:
        with share(tensors(), "copy") as shared:
            if way == "same process":
                attached = attach_tensors("copy")
                assert torch.equal(attached["x"], shared.tensors["x"])
                assert attached["x"].data_ptr() != shared.tensors["x"].data_ptr()
                assert "copy of its own" in caplog.text
                return
            output, process = child("copy", *(["cpu"] if way == "cpu" else []))
            process.communicate("\n", timeout=60)
            assert process.returncode == 0
            device = "cpu" if way == "cpu" else "cuda"
            assert SEEN.replace("cuda", device) in output
            if way == "cpu":
                assert shared.tensors["x"][0].item() == 0
    finally:
        if way == "expandable":
            allocate_by("expandable_segments:False")
