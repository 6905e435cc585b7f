"""Resident data on a CUDA device."""

import gc

import pytest
import torch

from aiofeed import Feeder, Limits, Tensors
from aiofeed.errors import CacheError, DeviceCopyError
from tests.support.number_decoders import CountedNumbers


def data(n, width):
    """Return rows whose values identify them, and labels."""
    y = torch.arange(n)
    return y.unsqueeze(1).expand(n, width).contiguous().float(), y


def slow():
    """Queue a kernel of about half a millisecond on the current stream."""
    torch.cuda._sleep(1_000_000)


@pytest.mark.timeout(300)
def test_no_wrong_byte_behind_slow_kernels(backend):
    """With slow kernels on alternating streams and batches dropped at once, batches are right."""
    x, y = data(2048, 256)
    limits = Limits(memory_bytes=1 << 20)
    feeder = Feeder(Tensors(x, y), batch_size=64, shuffle=True, device=backend, limits=limits)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    wrong, seen = (torch.zeros(3, dtype=torch.int64, device=backend.device) for _ in range(2))
    wanted = 0
    torch.cuda.synchronize()
    for epoch in feeder.epochs(20):
        iterator = iter(feeder)
        order = torch.randperm(2048, generator=torch.Generator().manual_seed(epoch)).view(-1, 64)
        wanted += int((order.sum(1) * torch.arange(1, len(feeder) + 1)).sum())
        for number in range(len(feeder)):
            at = number % 3
            with torch.cuda.stream(streams[at]):
                rows, labels = next(iterator)
                if (number + epoch) % 4 == 0:
                    with backend.use_stream(backend.side_stream() if epoch % 2 else streams[at]):
                        slow()
                wrong[at] += (rows != labels.unsqueeze(1)).sum()
                seen[at] += labels.sum() * (number + 1)
                del rows, labels
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0, 0]
    assert seen.sum().item() == wanted


def test_memory_is_flat_and_comes_back(backend):
    """Hundreds of epochs reserve no more memory than the first ones, and close frees it."""
    gc.collect()
    before = torch.cuda.memory_allocated(backend.device)
    x, y = data(4096, 1024)
    limit = 8 << 20
    limits = Limits(memory_bytes=limit)
    feeder = Feeder(Tensors(x, y), batch_size=64, shuffle=True, device=backend, limits=limits)
    for epoch in feeder.epochs(300):
        for rows, _ in feeder:
            if epoch % 50 == 0:
                slow()
            rows.sum()
        if epoch == 10:
            torch.cuda.synchronize()
            reserved = torch.cuda.memory_reserved(backend.device)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved(backend.device) <= reserved + (4 << 20)
    assert torch.cuda.memory_allocated(backend.device) <= before + x.nbytes + y.nbytes + limit + (1 << 20)
    del rows
    feeder.close()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(backend.device) <= before + 4096


def test_what_does_not_fit_is_refused_with_the_figures(backend):
    """Data that do not fit are refused before any copy; the error gives the free memory."""
    free, _ = backend.memory()
    huge = torch.zeros(1, dtype=torch.uint8).expand(1 << 10, free >> 9)
    with pytest.raises(DeviceCopyError, match=r"does not fit on cuda:0, which has .* MiB free of .* MiB"):
        next(iter(Feeder(Tensors(huge), batch_size=1, device=backend)))


def row(data):
    return torch.full((3, 32), float(int(data)))


def test_a_cache_that_does_not_fit_on_the_device_is_refused_with_the_figures(backend):
    """A cache that does not fit is refused before the first batch."""
    free, _ = backend.memory()
    feeder = Feeder(
        CountedNumbers((free >> 20) + 1),
        decode=lambda data: torch.zeros(1 << 18),
        batch_size=16,
        cache="device",
        device=backend,
    )
    with feeder, pytest.raises(CacheError, match=r"does not fit on cuda:0 .* free: .* samples of 1\.0 MiB each"):
        next(iter(feeder))


def test_a_cache_on_the_device_is_freed_with_its_feeder(backend):
    """The cache survives close and is freed when the feeder is dropped."""
    gc.collect()
    before = torch.cuda.memory_allocated(backend.device)
    feeder = Feeder(CountedNumbers(4096), decode=row, batch_size=64, cache="device", device=backend)
    with feeder:
        for _ in range(3):
            for batch in feeder:
                del batch  # a view of a window
    assert torch.cuda.memory_allocated(backend.device) >= before + 4096 * 384
    del feeder
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(backend.device) <= before + 65536
