"""What CUDA is asked beside torch, as torch and the driver would answer: no device is needed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aiofeed.devices import cuda
from aiofeed.devices.backend import TorchBackend


class Devices:
    """What torch makes of CUDA's current device: to set one starts it, to go back to one need not."""

    def __init__(self):
        self.current = 0
        self.started = set()

    def set(self, index):
        self.started.add(index)
        self.current = index

    def exchange(self, index):
        before = self.current
        self.set(index)
        return before

    def maybe_exchange(self, index):
        before, self.current = self.current, index
        return before


@pytest.fixture
def cuda_devices(monkeypatch):
    devices = Devices()
    monkeypatch.setattr(torch.cuda, "_exchange_device", devices.exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", devices.maybe_exchange)
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.set, raising=False)
    return devices


class Driver:
    """A thread's capture mode, as CUDA's driver exchanges it: where the runtime has given the thread a context."""

    def __init__(self):
        self.mode = 0
        self.status = 201

    def call(self):
        self.status = 0

    def exchange(self, reference):
        if self.status == 0:
            self.mode, reference._obj.value = reference._obj.value, self.mode
        return self.status


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(cuda, "_exchange_mode", lambda: found.exchange)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", found.call)
    return found


class TestDevices:
    def test_on_starts_no_other_device(self, monkeypatch, cuda_devices):
        """On CUDA, what was current by default alone comes back without being set, which would start it."""
        monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: cuda_devices.set(1))
        backend = TorchBackend(torch.device("cuda", 1))
        monkeypatch.setattr(backend, "_current", lambda: "before")
        with pytest.raises(KeyError), backend.use_stream("side"), backend.use_stream("side"):
            assert cuda_devices.current == 1
            raise KeyError
        assert cuda_devices.current == 0
        assert cuda_devices.started == {1}


class TestCaptures:
    def test_threads_of_ours_go_on_beside_them(self, driver, cuda_devices):
        """A thread that a backend enters no longer looks at captures of other threads."""
        TorchBackend(torch.device("cuda", 1)).enter_thread()
        assert driver.mode == cuda.THREAD_LOCAL
        assert cuda_devices.current == 1

    def test_other_threads_do_while_they_allocate(self, driver, cuda_devices):
        """Device and mode of a thread that allocates are what they were afterwards, and no other device is started."""
        with pytest.raises(KeyError), cuda.allocating(torch.device("cuda", 1)):
            assert (driver.mode, cuda_devices.current) == (cuda.THREAD_LOCAL, 1)
            raise KeyError
        assert (driver.mode, cuda_devices.current) == (0, 0)
        assert cuda_devices.started == {1}

    def test_a_driver_that_refuses(self, driver, cuda_devices, monkeypatch):
        """Nothing is restored that was not changed, and nobody hears of it."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        driver.mode = 2
        with cuda.allocating(torch.device("cuda", 0)):
            driver.status = 0
        assert driver.mode == 2

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
    def test_no_driver(self, cuda_devices):
        """Where there is none, threads allocate as ever."""
        assert cuda.set_capture_mode(cuda.THREAD_LOCAL) is None
        with cuda.allocating(torch.device("cuda", 0)):
            pass


class TestRegister:
    def test_a_failure_is_not_left_for_others(self, monkeypatch, cuda_devices):
        """CUDA keeps a thread's last error, and the next kernel raises it: a kernel of ours is that one."""
        launched = []

        def ones(*size, device):
            launched.append(device)
            raise RuntimeError("CUDA error: already registered")

        def check_error(status):
            raise RuntimeError(f"status {status}")

        loop_thread = SimpleNamespace(cudaError=SimpleNamespace(success=0), cudaHostRegister=lambda *given: 712)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: loop_thread)
        monkeypatch.setattr(torch.cuda, "check_error", check_error)
        monkeypatch.setattr(torch, "ones", ones)
        with pytest.raises(RuntimeError, match="status 712"):
            TorchBackend(torch.device("cuda", 0)).register(np.zeros(8, np.uint8))
        assert launched == [torch.device("cuda", 0)]
