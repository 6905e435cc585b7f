"""Whole feeders on simulated devices: every batch is right for any streams of the training. See also tests/cuda."""

import asyncio
import gc

import pytest
import torch
from torch.utils.data import TensorDataset

import aiofeed
from aiofeed.devices.copier import Copier
from aiofeed.testing import WrongBytesError, check_feeder
from tests.support.simulated_device import SimulatedDevice


@pytest.fixture(autouse=True)
def one_thread():
    """Use one torch thread: the tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BATCHES = 50
"""So many show each mistake; ten thousand are tested, too."""


def in_turn(simulated):
    """Return the default stream and two others."""
    return [simulated.current_stream(), simulated.new_stream(), simulated.new_stream()]


def another(simulated):
    """Return a stream other than the default stream."""
    return [simulated.new_stream()]


def slow(simulated):
    simulated.sleep()


@pytest.mark.parametrize("latency", ["random", "late", "early"])
@pytest.mark.parametrize("streams", [None, another, in_turn])
@pytest.mark.parametrize("static", [False, True])
def test_no_wrong_byte(latency, streams, static):
    """Batches are right on one or several streams, after slow kernels, if dropped or overwritten at once."""
    device = SimulatedDevice(latency=latency)
    check_feeder(device, streams=streams, slow=slow, batches=BATCHES, static_batches=static)
    gc.collect()
    assert device.allocated_bytes == 0
    assert device.pinned_bytes == 0


@pytest.mark.parametrize("latency", ["random", "late", "early"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", ["dataset", "tensors", "prefetch"])
def test_pinned_memory_goes_back_when_a_feeder_is_closed(latency, left, kind):
    """All of it, without the garbage collector, after complete epochs and after one that was left."""
    device = SimulatedDevice(latency=latency)
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("static", [False, True])
def test_no_wrong_byte_in_ten_thousand(static):
    """10,000 batches without synchronisation are right."""
    check_feeder(SimulatedDevice(), streams=in_turn, slow=slow, batches=10_000, static_batches=static)


@pytest.mark.parametrize("device", [None, "cpu", ["cpu", "cpu"], ["cpu"] * 3])
@pytest.mark.parametrize("static", [False, True])
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


@pytest.mark.parametrize("mistake", [NoWait, NoRecordStream])
def test_the_check_sees_mistakes(mistake, monkeypatch):
    """A feeder whose copier has a mistake fails the check."""
    monkeypatch.setattr(Copier, "deliver", mistake.deliver)
    with pytest.raises(WrongBytesError):
        check_feeder(SimulatedDevice(), streams=in_turn, slow=slow, batches=BATCHES)


@pytest.mark.parametrize("latency", ["random", "late", "early"])
def test_work_on_the_first_batchs_tensors(latency):
    """Work on the tensors of the first batch, as in a CUDA graph, gets each static batch in turn."""
    device = SimulatedDevice(latency=latency)
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
