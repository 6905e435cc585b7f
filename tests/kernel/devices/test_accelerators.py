"""What torch's accelerators have in common: CUDA, and PyTorch's simulated accelerator."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import aiofeed
from aiofeed import Feeder, Limits, Tensors
from aiofeed.kernel.core.errors import DeviceCopyError
from aiofeed.kernel.devices.backend import TorchBackend
from aiofeed.kernel.devices.copier import Copier
from aiofeed.kernel.devices.resolve import resolve_device, resolve_devices
from aiofeed.testing import check_feeder
from tests.support.device_cases import ACCELERATORS, EVERY_DEVICE, OPENREG, on
from tests.support.number_decoders import CountedNumbers


def data(n, width):
    """Return rows whose values identify them, and labels."""
    y = torch.arange(n)
    return y.unsqueeze(1).expand(n, width).contiguous().float(), y


def assert_alike(there, here, backend):
    """Check that batches on the device equal those on the host."""
    for found, wanted in zip(there, here, strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert a.device == backend.device
            assert a.dtype == b.dtype
            assert torch.equal(a.cpu(), b)


class TestResolve:
    @on(*ACCELERATORS)
    def test_names(self, device):
        """The device resolves by torch's name, by an index, and by "auto"."""
        name = f"{device.kind}:0"
        for given in (device.kind, name, 0, "auto", torch.device(name)):
            backend = resolve_device(given)
            assert isinstance(backend, TorchBackend)
            assert (backend.name, backend.device) == (name, torch.device(name))

    @on(*ACCELERATORS)
    def test_several(self, device):
        """Two devices can share a batch; one device twice is refused."""
        first, second = (backend.name for backend in device.two())
        assert resolve_devices([first, second]).name == f"{first}, {second}"
        with pytest.raises(ValueError, match=f"{first} is listed twice"):
            resolve_devices([first, first])

    @on(*ACCELERATORS)
    def test_absent(self, device):
        """The error for a missing device lists the present devices."""
        for given in (f"{device.kind}:99", "xpu"):
            with pytest.raises(ValueError, match=f"present: {device.kind}:0"):
                resolve_device(given)

    @on(*ACCELERATORS)
    def test_the_current_one(self, device):
        """A name without an index means the calling thread's current device."""
        device.two()
        device.set_current(1)
        try:
            assert [resolve_device(given).name for given in (device.kind, "auto")] == [f"{device.kind}:1"] * 2
        finally:
            device.set_current(0)


class TestBackend:
    @on(*ACCELERATORS)
    def test_pinned_memory(self, device):
        """torch recognises pinned memory, also of slices, and it is kept while anything refers to it."""
        part = torch.from_numpy(device.backend.pin(4096)[512:1024].view(np.int64))
        part.fill_(3)
        assert part.is_pinned()
        assert part.tolist() == [3] * 64
        assert device.backend.pin(0).shape == (0,)

    @on(*ACCELERATORS)
    def test_one_side_stream(self, device):
        """All backends of a device share one side stream, which is not the default stream."""
        backend = device.backend
        assert backend.side_stream() == resolve_device(backend.device).side_stream()
        assert backend.side_stream() != backend.current_stream()
        for index in range(device.count):
            assert device.at(index).side_stream().device == device.at(index).device

    @on(*EVERY_DEVICE)
    def test_streams_of_the_user_are_seen(self, device):
        """The backend's current stream is the user's, and ``use_stream`` can be nested in it."""
        backend = device.backend
        stream = device.new_stream(backend)
        with device.use_stream(backend, stream):
            assert backend.current_stream() == stream
            with (
                pytest.raises(KeyError),
                backend.use_stream(backend.side_stream()),
                backend.use_stream(backend.side_stream()),
            ):
                assert backend.current_stream() == backend.side_stream()
                raise KeyError
            assert backend.current_stream() == stream

    @on(*EVERY_DEVICE)
    def test_events(self, device):
        """An event is complete when the work before it is, and another stream can wait for it."""
        backend = device.backend
        device.slow(backend, 50)
        event = backend.record(backend.current_stream())
        assert device.kind != "cuda" or not event.query()
        backend.wait(backend.side_stream(), event)
        event.synchronize()
        assert event.query()
        backend.record(backend.side_stream()).synchronize()

    @on(*ACCELERATORS)
    def test_the_current_device_is_left_as_it_was(self, device):
        """Copies to another device do not change the calling thread's current device."""
        _, other = device.two()
        moved = Copier(other).issue(torch.ones(3))
        assert torch.accelerator.current_device_index() == 0
        assert moved.batch.device == other.device

    @on(*ACCELERATORS)
    def test_memory_is_unknown_or_sound(self, device):
        """``memory`` returns None if the allocator does not report it, and valid numbers otherwise."""
        memory = device.backend.memory()
        assert memory is None or 0 < memory[0] <= memory[1]

    @on(*OPENREG)
    def test_record_stream(self, device, openreg_calls):
        """deliver calls record_stream for every tensor, with the consumer's stream."""
        backend = device.backend
        copier = Copier(backend)
        stream = device.new_stream(backend)
        with backend.use_stream(stream):
            batch = copier.deliver(copier.issue({"x": torch.arange(4), "y": [torch.ones(2), "z"]}))
        if openreg_calls:
            wanted = [batch["x"], batch["y"][0]]
            assert openreg_calls == [(tensor.untyped_storage().data_ptr(), stream) for tensor in wanted]
        assert (batch["x"].tolist(), batch["y"][0].tolist()) == ([0, 1, 2, 3], [1.0, 1.0])

    @on(*OPENREG)
    def test_no_record_stream(self, device, monkeypatch):
        """If torch has no record_stream for the device, deliver raises."""

        def missing(tensor, stream):
            raise NotImplementedError("Could not run 'aten::record_stream'")

        monkeypatch.setattr(torch.Tensor, "record_stream", missing)
        copier = Copier(device.backend)
        with pytest.raises(DeviceCopyError, match="no record_stream for openreg:0"):
            copier.deliver(copier.issue(torch.ones(2)))


def row(data):
    return torch.full((3, 32), float(int(data)))


class TestResident:
    @on(*ACCELERATORS)
    @pytest.mark.parametrize("index", [0, 1])
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_tensors(self, device, index, shuffle):
        """Epochs of resident data in small windows equal those on the host."""
        backend = device.two()[1] if index else device.backend
        x, y = data(997, 33)
        limits = Limits(memory_bytes=1 << 16)
        there = Feeder(Tensors(x, y), batch_size=32, shuffle=shuffle, device=backend, limits=limits)
        here = Feeder(Tensors(x, y), batch_size=32, shuffle=shuffle)
        for _ in range(3):
            assert_alike(there, here, backend)

    @on(*ACCELERATORS)
    def test_data_on_the_device(self, device):
        """Data on the device give the same batches."""
        x, y = data(100, 8)
        there = Feeder(Tensors(x.to(device.backend.device), y), batch_size=16, shuffle=True, device=device.backend)
        assert_alike(there, Feeder(Tensors(x, y), batch_size=16, shuffle=True), device.backend)

    @on(*ACCELERATORS)
    @pytest.mark.parametrize("index", [0, 1])
    @pytest.mark.parametrize("shard", [(0, 1), (1, 3)])
    def test_cache(self, device, index, shard):
        """Streamed, mixed and resident epochs with a cache equal those on the host, and each sample is read once."""
        backend = device.two()[1] if index else device.backend
        options = {"decode": row, "batch_size": 16, "shuffle": True, "shard": shard}
        double = lambda batch: [batch[0] * 2, batch[1]]  # noqa: E731
        source = CountedNumbers(200)
        there = Feeder(source, cache="device", device=backend, transform=double, **options)
        here = Feeder(CountedNumbers(200), transform=double, **options)
        with there, here:
            for _ in range(15):
                device.slow(backend)
                assert_alike(there, here, backend)
        assert source.reads.total() <= 201 + 16


class TestFeeder:
    @on(*ACCELERATORS)
    def test_from_processes(self, device):
        """Batches from a worker process are right."""
        limits = Limits(decode_threads=1)
        check_feeder(device.backend, streams=device.in_turn, batches=200, engine="process", limits=limits)

    @on(*ACCELERATORS)
    def test_the_current_device_is_left_as_it_was(self, device):
        """Feeding two devices does not change the calling thread's current device."""
        devices = device.two()
        device.set_current(1)
        try:
            with Feeder(TensorDataset(torch.arange(8.0)), batch_size=4, device=devices) as feeder:
                for first, second in feeder:
                    assert (first[0].device.index, second[0].device.index) == (0, 1)
                    assert torch.accelerator.current_device_index() == 1
        finally:
            device.set_current(0)

    @on(*ACCELERATORS)
    def test_scatter(self, device):
        """``scatter`` works from pageable and pinned host memory, and from a device that still computes the batch."""
        devices = device.two()
        x = torch.arange(100_001)
        device.slow_here()
        for batch in (x, x.pin_memory(), x.to(devices[0].device) + 0, x.to(devices[1].device)):
            first, second = aiofeed.scatter({"x": batch}, devices)
            assert (first["x"].device.index, second["x"].device.index) == (0, 1)
            assert torch.equal(torch.cat([first["x"].cpu(), second["x"].cpu()]), x)

    @on(*ACCELERATORS)
    @pytest.mark.parametrize("pin_memory", [False, True])
    async def test_prefetch(self, device, pin_memory):
        """``prefetch`` copies the batches of a DataLoader, pinned or not, also with ``async for``."""
        loader = DataLoader(TensorDataset(*data(100, 5)), batch_size=8, pin_memory=pin_memory)
        assert_alike(aiofeed.prefetch(loader, device=device.backend), loader, device.backend)
        found = [batch async for batch in aiofeed.prefetch(loader, device=device.backend)]
        assert_alike(found, loader, device.backend)

    @on(*ACCELERATORS)
    def test_prefetch_on_two_devices(self, device):
        """``prefetch`` splits batches over both devices."""
        parts = list(aiofeed.prefetch([torch.arange(6)] * 3, device=device.two()))
        assert [(first.device.index, second.device.index) for first, second in parts] == [(0, 1)] * 3
        assert [(first.tolist(), second.tolist()) for first, second in parts] == [([0, 1, 2], [3, 4, 5])] * 3


class TestReport:
    @on(*ACCELERATORS)
    def test_every_device(self, device):
        """The report lists the devices with their copy rates."""
        report = aiofeed.device_report()
        assert report.absent is None
        assert [found.device for found in report.accelerators] == [device.at(n).name for n in range(device.count)]
        for found in report.accelerators:
            assert found.pin_error is None
            assert found.pinned_bytes_per_s > 0
            assert found.pageable_bytes_per_s > 0

    @on(*ACCELERATORS)
    def test_doctor(self, device):
        """The command prints the devices."""
        command = [sys.executable, "-m", "aiofeed", "doctor"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert all(device.at(number).name in done.stdout for number in range(device.count))
        assert done.stderr == ""
