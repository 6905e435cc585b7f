"""Whole feeders on PyTorch's simulated accelerator: streamed, resident, cached, static, on one or two devices."""

import asyncio
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import aiofeed
from aiofeed import Feeder, Limits, Tensors
from aiofeed.testing import check_feeder

BOTH = ["openreg:0", "openreg:1"]


def in_turn(backend):
    """Return the default stream and two others."""
    return [backend.current_stream(), torch.Stream(backend.device), torch.Stream(backend.device)]


def data(n, width):
    """Return rows whose values identify them, and labels."""
    y = torch.arange(n)
    return y.unsqueeze(1).expand(n, width).contiguous().float(), y


def assert_alike(there, here, device):
    """Check that batches on the device equal those on the host."""
    for found, wanted in zip(there, here, strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert a.device == torch.device(device)
            assert a.dtype == b.dtype
            assert torch.equal(a.cpu(), b)


pytestmark = pytest.mark.usefixtures("backend")


class TestBytes:
    @pytest.mark.parametrize("device", ["openreg", "openreg:1", "auto", ["openreg:0"], BOTH])
    @pytest.mark.parametrize("static", [False, True])
    def test_no_wrong_byte(self, device, static):
        """On one or two devices and alternating streams, batches that are dropped or overwritten at once are right."""
        check_feeder(device, streams=in_turn, batches=500, static_batches=static)

    def test_from_processes(self):
        """Batches from a worker process are right."""
        check_feeder("openreg", streams=in_turn, batches=200, engine="process", limits=Limits(decode_threads=1))

    def test_static_addresses(self):
        """Static batches are in the same memory over epochs and after ``close``."""
        feeder = Feeder(TensorDataset(torch.arange(64.0)), batch_size=8, static_batches=True, device="openreg")
        addresses = set()
        for _ in range(2):
            with feeder:
                addresses |= {batch.data_ptr() for [batch] in feeder}
        assert len(addresses) == 1


class TestResident:
    @pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_tensors(self, device, shuffle):
        """Epochs of resident data in small windows equal those on the host."""
        x, y = data(997, 33)
        limits = Limits(memory_bytes=1 << 16)
        there = Feeder(Tensors(x, y), batch_size=32, shuffle=shuffle, device=device, limits=limits)
        here = Feeder(Tensors(x, y), batch_size=32, shuffle=shuffle)
        for _ in range(3):
            assert_alike(there, here, device)

    @pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.complex128])
    def test_odd_dtypes(self, dtype):
        """dtypes that the device does not support are gathered as integers."""
        x = torch.randint(0, 2, (64, dtype.itemsize * 3), dtype=torch.uint8).view(dtype)
        there = Feeder(Tensors(x), batch_size=7, shuffle=True, device="openreg")
        here = Feeder(Tensors(x), batch_size=7, shuffle=True)
        for [a], [b] in zip(there, here, strict=True):
            assert a.dtype == dtype
            assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))

    def test_kept_batches_are_never_overwritten(self):
        """Batches that are kept over epochs do not change, also if others of their window are overwritten."""
        x, y = data(256, 64)
        limits = Limits(memory_bytes=1 << 16)
        feeder = Feeder(Tensors(x, y), batch_size=32, shuffle=True, device="openreg", limits=limits)
        kept = []
        for epoch in feeder.epochs(4):
            for number, (rows, labels) in enumerate(feeder):
                if (number + epoch) % 2:
                    rows.fill_(-1)
                else:
                    kept.append((rows, labels))
        assert all(torch.equal(rows.cpu(), labels.cpu().unsqueeze(1).expand(-1, 64).float()) for rows, labels in kept)

    def test_data_on_the_device(self):
        """Data on the device give the same batches."""
        x, y = data(100, 8)
        there = Feeder(Tensors(x.to("openreg"), y), batch_size=16, shuffle=True, device="openreg")
        assert_alike(there, Feeder(Tensors(x, y), batch_size=16, shuffle=True), "openreg:0")

    @pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
    def test_cache(self, device):
        """Streamed and resident epochs with a cache equal those on the host, and each sample is read once."""
        options = {"decode": Rows.row, "batch_size": 16, "shuffle": True}
        double = lambda batch: [batch[0] * 2, batch[1]]  # noqa: E731
        source = Rows(200)
        there = Feeder(source, cache="device", device=device, transform=double, **options)
        here = Feeder(Rows(200), transform=double, **options)
        with there, here:
            for _ in range(4):
                assert_alike(there, here, device)
        assert source.reads <= 200 + 16


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

    @staticmethod
    def row(index):
        return torch.full((3, 32), float(index))


class TestPrefetch:
    @pytest.mark.parametrize("pin_memory", [False, True])
    def test_a_dataloaders_batches(self, pin_memory):
        """``prefetch`` copies the batches of a DataLoader, pinned or not."""
        loader = DataLoader(TensorDataset(*data(100, 5)), batch_size=8, pin_memory=pin_memory)
        assert_alike(aiofeed.prefetch(loader, device="openreg:1"), loader, "openreg:1")

    def test_async_for(self):
        """``prefetch`` works with `async for`."""

        async def labels():
            batches = aiofeed.prefetch(DataLoader(TensorDataset(*data(20, 5)), batch_size=8), device="openreg")
            return [y.tolist() async for _, y in batches]

        assert asyncio.run(labels()) == [list(range(8)), list(range(8, 16)), list(range(16, 20))]

    def test_both_devices(self):
        """``prefetch`` splits batches over both devices."""
        seen = 0
        for first, second in aiofeed.prefetch([torch.arange(6)] * 3, device=BOTH):
            seen += 1
            assert (first.device.index, second.device.index) == (0, 1)
            assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4, 5])
        assert seen == 3


class TestSeveral:
    def test_the_current_device_is_left_as_it_was(self):
        """Feeding two devices does not change the calling thread's current device."""
        torch.accelerator.set_device_index(1)
        try:
            with Feeder(TensorDataset(torch.arange(8.0)), batch_size=4, device=BOTH) as feeder:
                for first, second in feeder:
                    assert (first[0].device.index, second[0].device.index) == (0, 1)
                    assert torch.accelerator.current_device_index() == 1
        finally:
            torch.accelerator.set_device_index(0)

    def test_scatter(self):
        """``scatter`` works from pageable and pinned host memory and from a device."""
        x = torch.arange(100_001)
        for batch in (x, x.pin_memory(), x.to("openreg:1")):
            first, second = aiofeed.scatter({"x": batch}, BOTH)
            assert (first["x"].device.index, second["x"].device.index) == (0, 1)
            assert torch.equal(torch.cat([first["x"].cpu(), second["x"].cpu()]), x)


class TestReport:
    def test_both_devices(self):
        """The report lists both devices with their copy rates."""
        report = aiofeed.device_report()
        assert report.absent is None
        assert [found.device for found in report.accelerators] == BOTH
        for found in report.accelerators:
            assert found.pin_error is None
            assert found.pinned_bytes_per_s > 0
            assert found.pageable_bytes_per_s > 0

    def test_doctor(self):
        """The command prints both devices."""
        command = [sys.executable, "-m", "aiofeed", "doctor"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "openreg:0" in done.stdout
        assert "openreg:1" in done.stdout
        assert done.stderr == ""
