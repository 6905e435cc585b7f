"""Whole feeders on CUDA devices: run-ahead, CUDA graphs, and compiled steps."""

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch.utils.data import TensorDataset

import aiofeed
from aiofeed.kernel.core.limits import DEVICE_BATCHES
from aiofeed.kernel.devices import cuda
from aiofeed.kernel.devices.copier import Copier
from aiofeed.kernel.devices.copy_thread import QUEUED_BATCHES

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")


def in_turn(backend):
    """Return the default stream and two others."""
    return [backend.current_stream(), torch.cuda.Stream(backend.device), torch.cuda.Stream(backend.device)]


class TestHostMemory:
    @pytest.mark.parametrize("source", [TensorDataset, aiofeed.Tensors])
    def test_another_default_device(self, backend, source, caplog):
        """If torch's default device is the GPU, the feeder's host buffers are still pinned host memory."""
        x = torch.arange(256)
        with (
            torch.device(backend.device),
            aiofeed.Feeder(source(x), batch_size=8, shuffle=True, device="cuda") as feeder,
        ):
            seen = torch.cat([batch for [batch] in feeder])
            again = torch.cat([batch for [batch] in feeder])
        assert torch.equal(seen.sort().values.cpu(), x)
        assert torch.equal(again.sort().values.cpu(), x)
        assert "pinned" not in caplog.text


class TestGraphs:
    @pytest.mark.parametrize("mode", ["global", "thread_local"])
    def test_captured_graph(self, backend, mode):
        """A graph captured on the first batch, while the feeder runs, gets each batch when it is replayed."""
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
            with torch.cuda.graph(graph, capture_error_mode=mode):
                step(batch)
            graph.replay()
            for [again] in batches:
                assert again is batch
                graph.replay()
        assert torch.equal(sums.cpu(), x.view(len(feeder), -1).sum(1) * 2)

    def test_allocations_during_a_capture(self, backend):
        """Allocations of aiofeed's threads during a "global" capture neither fail nor break the capture."""
        errors, modes = [], []

        def copy():
            try:
                backend.enter_thread()
                modes.append(cuda.set_capture_mode(cuda.THREAD_LOCAL))
                copier = Copier(backend, lambda batch: batch.float())
                # Sizes of host and device memory that were not allocated before.
                pending = copier.issue(torch.from_numpy(backend.pin(37 << 20)))
                pending.ready.synchronize()
                copier.release()
            except Exception as error:  # checked below
                errors.append(error)

        def allocate():
            try:
                backend.pin(41 << 20)
            except Exception as error:
                errors.append(error)

        x = torch.zeros(8, device=backend.device)
        # Load the kernels before the capture.
        x.add_(1)
        torch.zeros(8, dtype=torch.uint8, device=backend.device).float()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for work in (copy, allocate):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
                x.add_(1)
        graph.replay()
        assert errors == []
        assert modes == [cuda.THREAD_LOCAL]
        assert x.tolist() == [3.0] * 8

    @pytest.mark.timeout(300)
    @pytest.mark.filterwarnings("default")
    @pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
    def test_compiled_step(self, compiler_started, backend, mode, monkeypatch):
        """A compiled step, also with torch's CUDA graphs, works on static batches."""
        # Without a pool of compiler processes, whose pipes would stay open.
        monkeypatch.setattr(pytest.importorskip("torch._inductor.config"), "compile_threads", 1)
        x = torch.arange(6_400.0).view(-1, 4)
        step = torch.compile(lambda batch: (batch * 2 + 1).sum(), mode=mode)
        with aiofeed.Feeder(
            TensorDataset(x), batch_size=16, drop_last=True, static_batches=True, device="cuda"
        ) as feeder:
            found = [step(batch).clone() for [batch] in feeder]
        expected = (x.view(len(found), -1) * 2 + 1).sum(1)
        torch.testing.assert_close(torch.stack(found).cpu(), expected)


class TestRunAhead:
    @pytest.mark.parametrize("static", [False, True])
    @pytest.mark.parametrize("streams", [None, in_turn])
    def test_memory_is_bounded(self, backend, static, streams):
        """With slow kernels and without synchronisation, memory holds no more batches than the limits allow."""
        x = torch.zeros(60 * 8, 1 << 16)
        batch_bytes = 8 * x[0].nbytes
        taken = streams(backend) if streams else [backend.current_stream()]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # memory_allocated does not count dropped memory that is still in use by a stream.
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
        with aiofeed.Feeder(TensorDataset(x), batch_size=8, static_batches=static, device="cuda") as feeder:
            batches = iter(feeder)
            for number in range(len(feeder)):
                with backend.use_stream(taken[number % len(taken)]):
                    next(batches)
                    torch.cuda._sleep(20_000_000)
            ahead = not backend.record(taken[number % len(taken)]).query()
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
        assert ahead
        # The memory of the last dropped batch may not be free yet; static batches have their own.
        assert peak - before <= (DEVICE_BATCHES + QUEUED_BATCHES + 1 + static) * batch_bytes


class TestSeveral:
    @two_devices
    def test_no_other_device_is_initialised(self):
        """Feeding the second device does not initialise the first, which is the thread's current device."""
        finished = run("""
            import torch
            from aiofeed import Feeder, Tensors
            from torch.utils.data import TensorDataset

            x = torch.arange(4096.0)
            for data in (TensorDataset(x), Tensors(x)):
                with Feeder(data, batch_size=8, shuffle=True, device="cuda:1") as feeder:
                    for _ in feeder.epochs(2):
                        for [batch] in feeder:
                            assert batch.device.index == 1
            assert torch.cuda.current_device() == 0
            assert torch._C._cuda_hasPrimaryContext(1)
            assert not torch._C._cuda_hasPrimaryContext(0)
        """)
        assert finished.returncode == 0, finished.stderr


FORK = """
    import os, sys, traceback
    import torch
    from aiofeed import Feeder, Tensors

    def feeder():
        return Feeder(Tensors(torch.arange(8.0)), batch_size=4, device="cuda")

    {named}
    child = os.fork()
    if child == 0:
        try:
            assert sum(float(batch.sum()) for [batch] in feeder()) == 28.0
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_can_fork_before_the_first_iteration():
    """A feeder that was not iterated has not initialised CUDA, so a forked child can use CUDA."""
    if run(FORK.format(named="torch.cuda.device_count()")).returncode:
        pytest.skip("counting devices initialises CUDA on this machine")
    finished = run(FORK.format(named="kept = feeder()"))
    assert finished.returncode == 0, finished.stderr


def run(code):
    """Run a program in a new process."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
