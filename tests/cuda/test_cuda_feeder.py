"""Whole feeders on CUDA devices: the checks that the simulated ones pass, CUDA graphs, and compiled steps."""

import pytest
import torch
from torch.utils.data import TensorDataset

import aiofeed
from aiofeed.copier import Copier
from aiofeed.static_copier import StaticCopier
from aiofeed.testing import WrongBytesError, check_copier, check_feeder

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")


def in_turn(backend):
    """The default stream and two others."""
    return [backend.current_stream(), torch.cuda.Stream(backend.device), torch.cuda.Stream(backend.device)]


def another(backend):
    """One that is not the default one."""
    return [torch.cuda.Stream(backend.device)]


def slow(backend):
    """About half a millisecond on the current stream of a device: longer than the host takes for a batch."""
    with torch.cuda.device(backend.device):
        torch.cuda._sleep(1_000_000)


def slow_here():
    torch.cuda._sleep(1_000_000)


class NoGuard(StaticCopier):
    """Refilled without a look at what the last batch is used for."""

    def _guard(self, stream):
        pass


class TestBytes:
    @pytest.mark.parametrize("streams", [None, another, in_turn])
    @pytest.mark.parametrize("static", [False, True])
    def test_no_wrong_byte(self, backend, streams, static):
        """On the default stream, another, several in turn; behind slow kernels; dropped or overwritten at once."""
        check_feeder("cuda", streams=streams, slow=slow, batches=1_000, static_batches=static)

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("static", [False, True])
    def test_no_wrong_byte_in_ten_thousand(self, backend, static):
        """10,000 batches with no synchronisation in between."""
        check_feeder("cuda", streams=in_turn, slow=slow, batches=10_000, static_batches=static)

    def test_larger_batches(self, backend):
        """Copies that take a while."""
        check_feeder("cuda", streams=in_turn, slow=slow, batches=60, batch_size=2_048)

    def test_the_check_sees_mistakes(self, backend, monkeypatch):
        """A feeder whose copier never waits fails the check."""
        monkeypatch.setattr(Copier, "deliver", lambda copier, in_flight: in_flight.batch)
        with pytest.raises(WrongBytesError):
            check_feeder("cuda", streams=in_turn, slow=slow, batches=512)

    def test_static_copier(self, backend):
        """Fixed addresses pass the copier's own check, and fail it without their guard."""
        check_copier(backend, in_turn(backend), slow=slow_here, copier=StaticCopier, batches=2_000)
        with pytest.raises(WrongBytesError):
            check_copier(backend, in_turn(backend), slow=slow_here, copier=NoGuard, batches=512)


class TestGraphs:
    def test_captured_graph(self, backend):
        """A graph captured on the first batch, while the feeder runs, sees each batch when it is replayed."""
        x = torch.arange(40_000.0, dtype=torch.float64).view(-1, 4)
        feeder = aiofeed.Feeder(
            TensorDataset(x), batch_size=8, drop_last=True, static_batches=True, device="cuda",
            transform=lambda batch: [batch[0] * 2],
        )  # fmt: skip
        sums = torch.zeros(len(feeder), dtype=torch.float64, device=backend.device)
        number = torch.full((1,), -1, device=backend.device)

        def step(batch):
            number.add_(1)
            torch.cuda._sleep(100_000)
            sums.index_copy_(0, number, batch.sum().unsqueeze(0))

        with feeder:
            batches = iter(feeder)
            [batch] = next(batches)
            warm = torch.cuda.Stream()
            warm.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm):
                step(batch)
            torch.cuda.current_stream().wait_stream(warm)
            number.fill_(-1)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step(batch)
            graph.replay()
            for [again] in batches:
                assert again is batch
                graph.replay()
        assert torch.equal(sums.cpu(), x.view(len(feeder), -1).sum(1) * 2)

    def test_addresses_outlive_close(self, backend):
        """After ``close`` the next pass fills the same memory."""
        x = torch.arange(64.0)
        feeder = aiofeed.Feeder(TensorDataset(x), batch_size=8, static_batches=True, device="cuda")
        addresses = set()
        for _ in range(2):
            with feeder:
                addresses |= {batch.data_ptr() for [batch] in feeder}
        assert len(addresses) == 1

    @pytest.mark.timeout(300)
    @pytest.mark.filterwarnings("default")
    @pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
    def test_compiled_step(self, backend, mode, monkeypatch):
        """A compiled step, with CUDA graphs of torch's own too, takes the batches."""
        pytest.importorskip("triton")
        # No pool of compiling processes, whose pipes would stay open.
        monkeypatch.setattr(pytest.importorskip("torch._inductor.config"), "compile_threads", 1)
        x = torch.arange(6_400.0).view(-1, 4)
        step = torch.compile(lambda batch: (batch * 2 + 1).sum(), mode=mode)
        with aiofeed.Feeder(
            TensorDataset(x), batch_size=16, drop_last=True, static_batches=True, device="cuda"
        ) as feeder:
            found = [step(batch).clone() for [batch] in feeder]
        expected = (x.view(len(found), -1) * 2 + 1).sum(1)
        torch.testing.assert_close(torch.stack(found).cpu(), expected)


class TestSeveral:
    @two_devices
    @pytest.mark.parametrize("static", [False, True])
    def test_no_wrong_byte(self, backend, static):
        """Slow kernels on either device's streams, taken in turn: every part is right."""
        check_feeder(["cuda:0", "cuda:1"], streams=in_turn, slow=slow, batches=2_000, static_batches=static)

    @two_devices
    def test_the_current_device_is_left_as_it_was(self, backend):
        """Feeding two devices leaves the calling thread's current device and streams alone."""
        torch.cuda.set_device(1)
        try:
            x = torch.arange(8.0)
            with aiofeed.Feeder(TensorDataset(x), batch_size=4, device=["cuda:0", "cuda:1"]) as feeder:
                for first, second in feeder:
                    assert (first[0].device.index, second[0].device.index) == (0, 1)
                    assert torch.cuda.current_device() == 1
        finally:
            torch.cuda.set_device(0)

    @two_devices
    def test_scatter(self, backend):
        """From the host, and from a device where the batch is still being computed."""
        x = torch.arange(1_000_000)
        slow_here()
        for batch in (x, x.pin_memory(), x.cuda() + 0):
            first, second = aiofeed.scatter(batch, ["cuda:0", "cuda:1"])
            assert (first.device.index, second.device.index) == (0, 1)
            assert torch.equal(torch.cat([first.cpu(), second.cpu()]), x)

    def test_one_in_a_list(self, backend):
        """A list of one device gives tuples of one part."""
        [part] = aiofeed.scatter({"x": torch.arange(4)}, ["cuda:0"])
        assert part["x"].tolist() == [0, 1, 2, 3]
        check_feeder(["cuda:0"], streams=in_turn, slow=slow, batches=500)


def test_report(backend):
    """The report has the device's name, memory, and both rates."""
    report = aiofeed.device_report()
    assert report.absent is None
    found = report.accelerators[torch.cuda.current_device()]
    assert found.name == torch.cuda.get_device_name()
    assert found.total_bytes >= found.free_bytes > 0
    assert found.pinned_bytes_per_s > 1e8
    assert found.pageable_bytes_per_s > 1e8
    assert found.own_stream
