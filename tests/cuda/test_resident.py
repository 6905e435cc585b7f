"""Resident data on a CUDA device."""

import gc

import pytest
import torch

from aiofeed import Feeder, Limits, Tensors
from aiofeed.errors import CacheError, DeviceCopyError


def data(n, width):
    """Return rows whose values identify them, and labels."""
    y = torch.arange(n)
    return y.unsqueeze(1).expand(n, width).contiguous().float(), y


def slow():
    """Queue a kernel of about half a millisecond on the current stream."""
    torch.cuda._sleep(1_000_000)


@pytest.mark.parametrize("n", [997, 4096])
def test_batches_equal_those_on_the_host(backend, n):
    """Batches equal those on the host bit for bit, over epochs with small windows."""
    x, y = data(n, 33)
    there = Feeder(Tensors(x, y), batch_size=32, shuffle=True, device=backend, limits=Limits(memory_bytes=1 << 16))
    here = Feeder(Tensors(x, y), batch_size=32, shuffle=True)
    for _ in range(3):
        for (a, b), (c, d) in zip(there, here, strict=True):
            assert a.device == b.device == backend.device
            assert torch.equal(a.cpu(), c)
            assert torch.equal(b.cpu(), d)


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


def test_kept_batches_are_never_overwritten(backend):
    """Batches that are kept over epochs do not change, also if others of their window are overwritten."""
    x, y = data(1024, 512)
    limits = Limits(memory_bytes=1 << 20)
    feeder = Feeder(Tensors(x, y), batch_size=32, shuffle=True, device=backend, limits=limits)
    kept = []
    for epoch in feeder.epochs(6):
        for number, (rows, labels) in enumerate(feeder):
            if (number + epoch) % 2:
                rows.fill_(-1)
            else:
                kept.append((rows.detach(), labels.clone()))
    for rows, labels in kept:
        assert bool((rows == labels.unsqueeze(1)).all())


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


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.complex128])
def test_odd_dtypes(backend, dtype):
    """dtypes that index_select does not support on this device work."""
    x = torch.randint(0, 2, (64, dtype.itemsize * 3), dtype=torch.uint8).view(dtype)
    for shuffle in (False, True):
        there = torch.cat(
            [b.cpu().view(torch.uint8) for [b] in Feeder(Tensors(x), batch_size=7, shuffle=shuffle, device=backend)]
        )
        here = torch.cat([b.view(torch.uint8) for [b] in Feeder(Tensors(x), batch_size=7, shuffle=shuffle)])
        assert torch.equal(there, here)


class Rows:
    """A source of n samples whose values identify them."""

    def __init__(self, n):
        self.n = n
        self.reads = 0

    def __len__(self):
        return self.n

    def key(self, index):
        return str(index)

    def target(self, index):
        return index

    async def read(self, index):
        self.reads += 1
        return index


def row(index):
    return torch.full((3, 32), float(index))


@pytest.mark.parametrize("shard", [(0, 1), (1, 3)])
def test_a_cache_on_the_device_equals_streaming(backend, shard):
    """Streamed, mixed and resident epochs give the batches of streaming, and each sample is read once."""
    options = {"decode": row, "batch_size": 16, "shuffle": True, "shard": shard}
    source = Rows(500)
    there = Feeder(source, cache="device", device=backend, transform=lambda batch: [batch[0] * 2, batch[1]], **options)
    here = Feeder(Rows(500), transform=lambda batch: [batch[0] * 2, batch[1]], **options)
    with there, here:
        for _ in range(15):
            for (a, b), (c, d) in zip(there, here, strict=True):
                slow()
                assert a.device == b.device == backend.device
                assert torch.equal(a.cpu(), c)
                assert torch.equal(b.cpu(), d)
        assert source.reads <= 501 + 16


def test_a_cache_that_does_not_fit_on_the_device_is_refused_with_the_figures(backend):
    """A cache that does not fit is refused before the first batch."""
    free, _ = backend.memory()
    feeder = Feeder(
        Rows((free >> 20) + 1),
        decode=lambda index: torch.zeros(1 << 18),
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
    feeder = Feeder(Rows(4096), decode=row, batch_size=64, cache="device", device=backend)
    with feeder:
        for _ in range(3):
            for batch in feeder:
                del batch  # a view of a window
    assert torch.cuda.memory_allocated(backend.device) >= before + 4096 * 384
    del feeder
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(backend.device) <= before + 65536
