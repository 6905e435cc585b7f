"""Whole feeders on every device: all batches are right for any streams of the training. See also tests/cuda."""

import asyncio
import gc

import pytest
import torch
from torch.utils.data import TensorDataset

import aiofeed
from aiofeed.kernel.devices.copier import Copier
from aiofeed.testing import WrongBytesError, check_feeder
from tests.support.device_cases import ACCELERATORS, CUDA, EVERY_DEVICE, SIMULATED, on

BATCHES = 50
"""So many show each mistake on a simulated device; ten thousand are tested, too."""

STATIC = pytest.mark.parametrize("static", [False, True])


@on(*EVERY_DEVICE)
@pytest.mark.parametrize("streams", [None, pytest.param("another", marks=pytest.mark.slow), "in_turn"])
@STATIC
def test_no_wrong_byte(device, streams, static):
    """Batches are right on one or several streams, after slow kernels, if dropped or overwritten at once."""
    check_feeder(
        device.backend,
        streams=streams and getattr(device, streams),
        slow=device.slow,
        batches=device.number(BATCHES, openreg=500, cuda=1_000),
        static_batches=static,
    )
    device.assert_released()


@pytest.mark.slow
@pytest.mark.timeout(300)
@on("random", *CUDA)
@STATIC
def test_no_wrong_byte_in_ten_thousand(device, static):
    """10,000 batches without synchronisation are right."""
    check_feeder(device.backend, streams=device.in_turn, slow=device.slow, batches=10_000, static_batches=static)


@on(*ACCELERATORS)
def test_no_wrong_byte_in_larger_batches(device):
    """Larger batches, whose copies take longer, are right."""
    check_feeder(device.backend, streams=device.in_turn, slow=device.slow, batches=60, batch_size=2_048)


@on(*EVERY_DEVICE)
@STATIC
def test_no_wrong_byte_on_several_devices(device, static):
    """With slow kernels on alternating streams of two devices, every part is right."""
    devices = device.two()
    check_feeder(
        devices,
        streams=device.in_turn,
        slow=device.slow,
        batches=device.number(100, openreg=500, cuda=2_000),
        batch_size=5,
        static_batches=static,
    )
    device.assert_released()
    if device.is_simulated:
        assert [each.streams_made for each in devices] == [3, 3]


@pytest.mark.slow
@on(*SIMULATED)
def test_no_wrong_byte_on_several_devices_in_many_batches(device):
    """Hundreds of batches on two devices are right."""
    check_feeder(device.two(), streams=device.in_turn, slow=device.slow, batches=600, batch_size=5)


@pytest.mark.parametrize("device", [None, "cpu", ["cpu", "cpu"], ["cpu"] * 3])
@STATIC
def test_host(device, static):
    """Batches on the host are right, in one part or several."""
    check_feeder(device, batches=300, static_batches=static)


class NoWait(Copier):
    def deliver(self, pending):
        return pending.batch


class NoRecordStream(Copier):
    def deliver(self, pending):
        self.backend.wait(self.backend.current_stream(), pending.ready)
        return pending.batch


@pytest.mark.parametrize(
    ("device", "mistake"),
    [("random", NoWait), ("random", NoRecordStream), pytest.param("cuda", NoWait, marks=pytest.mark.cuda)],
    indirect=["device"],
)
def test_the_check_sees_mistakes(device, mistake, monkeypatch):
    """A feeder whose copier has a mistake fails the check."""
    monkeypatch.setattr(Copier, "deliver", mistake.deliver)
    batches = device.number(BATCHES, cuda=512)
    with pytest.raises(WrongBytesError):
        check_feeder(device.backend, streams=device.in_turn, slow=device.slow, batches=batches)


@on(*SIMULATED)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["dataset", "tensors", "prefetch"])
def test_pinned_memory_goes_back_when_a_feeder_is_closed(device, left, kind):
    """All of it, without the garbage collector, after complete epochs and after one that was left."""
    device = device.backend
    x = torch.arange(80_000.0).view(100, 800)
    data = aiofeed.Tensors(x) if kind == "tensors" else TensorDataset(x)
    gc.disable()
    try:
        if kind == "prefetch":
            batches = iter(aiofeed.prefetch([[x[n : n + 8].clone()] for n in range(0, 96, 8)], device=device))
            next(batches)
            assert device.pinned_bytes > 0
            for _ in batches:
                if left:
                    break
            asyncio.run(batches.aclose())
        else:
            with aiofeed.Feeder(data, batch_size=8, shuffle=True, device=device) as feeder:
                for _ in range(2):
                    for _ in feeder:
                        assert device.pinned_bytes > 0
                        if left:
                            break
                    device.synchronize()
        assert device.pinned_bytes == 0
    finally:
        gc.enable()


@on(*SIMULATED)
def test_work_on_the_first_batchs_tensors(device):
    """Work on the tensors of the first batch, as in a CUDA graph, gets each static batch in turn."""
    device = device.backend
    x = torch.arange(4_000.0).view(1_000, 4)
    with aiofeed.Feeder(TensorDataset(x), batch_size=8, drop_last=True, static_batches=True, device=device) as feeder:
        sums = device.copy(host := torch.zeros(len(feeder)))
        batches = iter(feeder)
        [captured] = next(batches)
        for number in range(len(feeder)):
            if number:
                next(batches)
            device.sleep()
            sums[number].copy_(captured.sum())
    assert sums.tolist() == x.view(len(feeder), -1).sum(1).tolist()
    del host


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_step():
    """A compiled step works on static batches and is compiled once."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    x = torch.arange(64.0).view(16, 4)
    step = torch.compile(lambda batch: (batch * 2 + 1).sum(), backend=backend)
    with aiofeed.Feeder(TensorDataset(x), batch_size=4, drop_last=True, static_batches=True) as feeder:
        found = [step(batch).item() for [batch] in feeder]
    assert found == (x.view(4, -1) * 2 + 1).sum(1).tolist()
    assert len(compiled) == 1
