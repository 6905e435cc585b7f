"""A ring in GPU memory that a server and its consumers share through CUDA IPC."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import aiofeed
from aiofeed import FeedError
from aiofeed.errors import WorkerDiedError
from tests.support import process_parts as parts
from tests.support.paths import environment

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

SAMPLES, BATCH = 96, 4
HEAD = """
import logging, os, sys, time
import torch
import aiofeed
from tests.cuda.test_cuda_served import collate, wrong
from tests.support import process_parts as parts
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
"""
CONSUMER = (
    HEAD
    + """
address, device, epochs, slow = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
heavy = torch.zeros(4000, 4000, device="cuda") if slow else None
with aiofeed.attach(address, device=None if device == "cpu" else device, wait_s=60) as feed:
    for _ in range(epochs):
        seen, bad, kept = [], 0, []
        for batch in feed:
            if slow:
                torch.mm(heavy, heavy)  # make the stream slow
            seen.append(int(batch["names"][0]))
            kept.append(batch)
            if len(kept) > 6:
                bad += wrong(kept.pop(0))
        bad += sum(map(wrong, kept))
        print("epoch", seen == list(range(0, 96, 4)), bad, flush=True)
    reader = feed._subscription._device_reader
    print("on device" if reader is not None and reader._open else "on host", flush=True)
"""
)
SERVER = (
    HEAD
    + """
feeder = aiofeed.Feeder(parts.Numbers(10**6), decode=parts.number, batch_size=4, collate_fn=collate, device="cuda")
with aiofeed.serve(feeder, sys.argv[1]):
    print("serving", flush=True)
    sys.stdin.readline()
print("closed", flush=True)
"""
)


def collate(samples: list[Any]) -> dict[str, Any]:
    numbers = torch.tensor([int(sample) for sample in samples])
    images = numbers.view(-1, 1, 1, 1).expand(-1, 3, 128, 128).to(torch.float32)
    return {
        "numbers": numbers,
        "images": images.contiguous(memory_format=torch.channels_last),
        "names": [str(number) for number in numbers.tolist()],
    }


def wrong(batch: dict[str, Any]) -> bool:
    numbers = torch.tensor([int(name) for name in batch["names"]], device=batch["numbers"].device)
    same = (batch["images"] == numbers.view(-1, 1, 1, 1)).all() & (batch["numbers"] == numbers).all()
    return not bool(same) or not batch["images"].is_contiguous(memory_format=torch.channels_last)


def feeder(samples: int = SAMPLES) -> aiofeed.Feeder[Any]:
    return aiofeed.Feeder(
        parts.Numbers(samples), decode=parts.number, batch_size=BATCH, collate_fn=collate, device="cuda"
    )


def start(script: str, *arguments: object, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=environment(**more),
    )


def lines(process: subprocess.Popen[str]) -> list[str]:
    """Return the lines it prints until it ends."""
    output, _ = process.communicate(timeout=120)
    return output.splitlines()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    output = ""
    while text not in output:
        line = process.stdout.readline()
        assert line, output
        output += line


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "feed.sock")


def test_consumers_on_the_same_gpu_copy_from_the_servers_memory(address: str) -> None:
    """Two consumers, one with a slow stream, copy two epochs from device memory; kept batches are right, too."""
    with start(CONSUMER, address, "cuda", 2, 0) as quick, start(CONSUMER, address, "cuda", 2, 1) as slow:
        with feeder() as feeding:
            aiofeed.serve(feeding, address, min_consumers=2, lag=2).run(epochs=2)
        for process in (quick, slow):
            assert lines(process) == ["epoch True 0", "epoch True 0", "on device"]


def test_a_consumer_on_the_host_is_served_beside_one_on_the_gpu(address: str) -> None:
    """A consumer on the host and one on the GPU both get all batches."""
    with start(CONSUMER, address, "cuda", 2, 0) as on_device, start(CONSUMER, address, "cpu", 2, 0) as on_host:
        with feeder() as feeding:
            aiofeed.serve(feeding, address, min_consumers=2).run(epochs=2)
        assert lines(on_device) == ["epoch True 0", "epoch True 0", "on device"]
        assert lines(on_host) == ["epoch True 0", "epoch True 0", "on host"]


def test_with_expandable_segments_batches_come_through_the_host(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With expandable segments, which CUDA IPC does not support, batches come through host memory."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # read by aiofeed, no longer by torch
    with start(CONSUMER, address, "cuda", 1, 0, PYTORCH_CUDA_ALLOC_CONF="") as consumer:
        with feeder() as feeding:
            aiofeed.serve(feeding, address).run(epochs=1)
        message, *rest = lines(consumer)
    assert "come through host memory: PYTORCH_CUDA_ALLOC_CONF sets expandable_segments" in message
    assert rest == ["epoch True 0", "on host"]


def test_the_servers_own_process_gets_batches_through_the_host(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """CUDA IPC does not work within a process: a consumer in the server's process gets batches through host memory."""
    with feeder() as feeding, aiofeed.serve(feeding, address), aiofeed.attach(address, device="cuda") as feed:
        assert [wrong(batch) for batch in feed] == [False] * (SAMPLES // BATCH)
    assert "cannot open it a second time" in caplog.text


def test_killed_consumers_block_nothing(address: str) -> None:
    """Neither other consumers nor the server's stream wait for an event of a dead process."""
    with feeder(100_000) as feeding, aiofeed.serve(feeding, address, join="batch", lag=2) as server:
        for turn in range(4):
            with start(CONSUMER, address, "cuda", 1000, 1) as victim:
                while not any(each.batches > 10 * turn for each in server.consumers):
                    assert victim.poll() is None
                    time.sleep(0.001)
                victim.kill()
    with feeder() as feeding, start(CONSUMER, address, "cuda", 1, 0) as consumer:
        aiofeed.serve(feeding, address).run(epochs=1)
        assert lines(consumer) == ["epoch True 0", "on device"]


@pytest.mark.parametrize("way", ["killed", "closed"])
def test_a_server_that_ends_leaves_right_batches_and_an_error(address: str, way: str) -> None:
    """If the server ends, batches received before are right, and the next one raises."""
    with start(SERVER, address) as server:
        read_until(server, "serving")
        with aiofeed.attach(address, device="cuda", wait_s=60) as feed:
            iterator = iter(feed)
            seen = [next(iterator) for _ in range(5)]
            if way == "killed":
                server.kill()
            else:
                server.communicate("\n", timeout=60)
            with pytest.raises(WorkerDiedError if way == "killed" else FeedError):
                seen.extend(iterator)
            server.wait(60)
            assert [wrong(batch) for batch in seen] == [False] * len(seen)
    torch.cuda.synchronize()  # no stream waits for an event of the dead server
