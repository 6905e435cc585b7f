"""Overlap of copies and kernels, measured with torch's profiler."""

import itertools

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed.kernel.devices.resolve import resolve_device
from benchmarks.gpu.trace import profiled, recorded

# In some torch versions the profiler warns of future changes.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

BATCHES = 24
SETTLE = 4


@pytest.fixture(scope="module", autouse=True)
def _started():
    """Run the profiler once, because it opens descriptors that stay open."""
    if torch.cuda.is_available():
        backend = resolve_device("cuda")
        recorded(backend, lambda: torch.zeros(8, device="cuda").add_(1))


class Large:
    """A source of few large samples: the host needs little time per batch compared with the step."""

    def __len__(self):
        return 4 * (BATCHES + SETTLE)

    def key(self, index):
        return str(index)

    async def read(self, index):
        return b""

    def decode(self, data):
        return np.ones((1024, 1024, 3), np.uint8)


def a_step(backend):
    """Return a step of matrix products that takes some milliseconds and reads the batch."""
    matrix = torch.randn(8192, 8192, device=backend.device, dtype=torch.bfloat16) / 90
    total = torch.zeros((), device=backend.device)

    def step(batch):
        result = matrix
        for _ in range(6):
            result = result @ matrix
        total.add_(batch.sum(dtype=torch.float32))

    return step


def fed(backend):
    images = Large()
    return aiofeed.Feeder(images, decode=images.decode, batch_size=4, device=backend)


def test_copies_run_under_the_step(backend):
    """Copies run from pinned memory, on a stream without kernels, and mostly while kernels run."""
    with fed(backend) as feeder:
        found = profiled(backend, iter(feeder), a_step(backend), settle=SETTLE, steps=BATCHES)
    # Copies issued before the profiler started are not in its trace.
    assert found.copies >= BATCHES // 2
    assert found.beside_kernels == 0
    assert found.pageable == 0
    assert found.hidden > 0.5


def test_copies_on_the_steps_stream_are_detected(backend, monkeypatch):
    """If the side stream is the step's stream, no copy overlaps with kernels."""
    monkeypatch.setattr(backend, "side_stream", lambda: torch.cuda.default_stream(backend.device))
    with fed(backend) as feeder:
        found = profiled(backend, iter(feeder), a_step(backend), settle=SETTLE, steps=BATCHES)
    assert found.beside_kernels == found.copies > 0
    assert found.hidden < 0.5


def test_pageable_copies_are_detected(backend):
    """Copies from pageable memory on the step's stream are counted as such."""
    batches = (torch.ones(4, 1024, 1024, 3, dtype=torch.uint8).to(backend.device) for _ in itertools.count())
    found = profiled(backend, batches, a_step(backend), settle=SETTLE, steps=BATCHES)
    # A driver that copies through buffers of its own records several copies for each batch.
    assert found.pageable == found.beside_kernels == found.copies >= BATCHES
    assert found.hidden < 0.5
