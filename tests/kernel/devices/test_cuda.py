"""CUDA calls beside torch, with replaced torch and driver functions; no device is needed."""

import ctypes
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aiofeed.ipc import cuda_ipc
from aiofeed.kernel.devices import backend as backend_module
from aiofeed.kernel.devices import cuda
from aiofeed.kernel.devices.backend import TorchBackend
from aiofeed.kernel.devices.pinned import release_unused


class Devices:
    """CUDA's current device as torch handles it: set_device initialises a device; ``maybe_exchange`` does not."""

    def __init__(self):
        self.current = 0
        self.initialised = set()

    def set(self, index):
        self.initialised.add(index)
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
    """A thread's capture mode in CUDA's driver, which fails until the runtime has created a context."""

    def __init__(self):
        self.mode = 0
        self.status = 201
        self.functions = {"cuThreadExchangeStreamCaptureMode": self.exchange}

    def call(self):
        self.status = 0

    def exchange(self, reference):
        if self.status == 0:
            self.mode, reference._obj.value = reference._obj.value, self.mode
        return self.status


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(cuda, "_driver_function", lambda name: found.functions.get(name))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", found.call)
    return found


class TestDevices:
    def test_use_stream_initialises_no_other_device(self, monkeypatch, cuda_devices):
        """use_stream restores the default device without initialising it."""
        monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: cuda_devices.set(1))
        backend = TorchBackend(torch.device("cuda", 1))
        monkeypatch.setattr(backend, "_current", lambda: "before")
        with pytest.raises(KeyError), backend.use_stream("side"), backend.use_stream("side"):
            assert cuda_devices.current == 1
            raise KeyError
        assert cuda_devices.current == 0
        assert cuda_devices.initialised == {1}


class TestCaptures:
    def test_enter_thread_sets_the_capture_mode(self, driver, cuda_devices):
        """enter_thread sets the capture mode in which captures of other threads do not restrict the thread."""
        TorchBackend(torch.device("cuda", 1)).enter_thread()
        assert driver.mode == cuda.THREAD_LOCAL
        assert cuda_devices.current == 1

    def test_allocating_restores_device_and_mode(self, driver, cuda_devices):
        """``allocating`` restores device and capture mode and initialises no other device."""
        with pytest.raises(KeyError), cuda.allocating(torch.device("cuda", 1)):
            assert (driver.mode, cuda_devices.current) == (cuda.THREAD_LOCAL, 1)
            raise KeyError
        assert (driver.mode, cuda_devices.current) == (0, 0)
        assert cuda_devices.initialised == {1}

    def test_a_driver_that_refuses(self, driver, cuda_devices, monkeypatch):
        """If the driver refuses the mode, ``allocating`` does not restore it and raises nothing."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        driver.mode = 2
        with cuda.allocating(torch.device("cuda", 0)):
            driver.status = 0
        assert driver.mode == 2

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
    def test_no_driver(self, cuda_devices):
        """Without a driver, ``allocating`` does nothing."""
        assert cuda.set_capture_mode(cuda.THREAD_LOCAL) is None
        with cuda.allocating(torch.device("cuda", 0)):
            pass


class DriverLibrary:
    """CUDA's driver library; creates streams in the context of the current device."""

    def __init__(self, devices, driver):
        self.cuThreadExchangeStreamCaptureMode = driver.exchange
        self.cuStreamCreateWithPriority = self.create_stream
        self.streams = []
        self.status = 0
        self._devices = devices
        self._driver = driver

    def create_stream(self, reference, flags, priority):
        assert self._driver.status == 0, "no context"
        self.streams.append((self._devices.current, flags.value, priority.value, self._driver.mode))
        reference._obj.value = 0x1000 * len(self.streams)
        return self.status


@pytest.fixture
def library(monkeypatch, cuda_devices):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", driver.call)
    found = DriverLibrary(cuda_devices, driver)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: ("external", pointer, device))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("pooled", device))
    monkeypatch.setattr(backend_module, "_side_streams", {})
    monkeypatch.setattr(cuda_ipc, "_streams", {})
    cuda._driver_function.cache_clear()
    yield found
    cuda._driver_function.cache_clear()


class TestStreams:
    def test_one_stream_of_its_own_per_device(self, library):
        """The side stream of a device is created once, non-blocking, in the device's context, beside any capture."""
        first, second = torch.device("cuda", 1), torch.device("cuda", 2)
        streams = [TorchBackend(device).side_stream() for device in (first, first, second)]
        assert streams == [("external", 0x1000, first), ("external", 0x1000, first), ("external", 0x2000, second)]
        assert library.streams == [(1, 1, 0, cuda.THREAD_LOCAL), (2, 1, 0, cuda.THREAD_LOCAL)]

    def test_the_rings_stream(self, library):
        """The stream that fills a server's blocks is created once per device, beside the side stream."""
        device = torch.device("cuda", 1)
        side = TorchBackend(device).side_stream()
        rings = [cuda_ipc.CudaSharedDevice(device).stream() for _ in range(2)]
        assert rings == [("external", 0x2000, device)] * 2
        assert side not in rings

    def test_a_driver_that_refuses_a_stream(self, library):
        """An error of the driver is a RuntimeError with the device and the status; the next call tries again."""
        library.status = 2
        backend = TorchBackend(torch.device("cuda", 0))
        with pytest.raises(RuntimeError, match=r"cannot create a stream on cuda:0.*returned 2"):
            backend.side_stream()
        library.status = 0
        assert backend.side_stream() == ("external", 0x2000, backend.device)

    def test_rocm(self, library, monkeypatch):
        """With ROCm the side stream is one of torch's, even if CUDA's driver is installed."""
        monkeypatch.setattr(torch.version, "hip", "6.0")
        device = torch.device("cuda", 0)
        assert TorchBackend(device).side_stream() == ("pooled", device)
        assert library.streams == []


class Runtime:
    """CUDA's runtime: the ranges that are registered. A call that fails is the thread's last error until it is read."""

    def __init__(self):
        self.cudaError = SimpleNamespace(success=0)
        self.cudaHostRegister, self.cudaHostUnregister = self.host_register, self.host_unregister
        self.registered = {}
        self.refuses = False
        self.last_error = 0

    def host_register(self, address, nbytes, flags):
        if self.refuses or address in self.registered:
            self.last_error = 712
            return 712
        self.registered[address] = nbytes
        return 0

    def host_unregister(self, address):
        if self.registered.pop(address, None) is None:
            self.last_error = 713
            return 713
        return 0

    def ones(self, *size, device):
        """Launch a kernel, which raises the last error."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")

    def check_error(self, status):
        if status:
            raise RuntimeError(f"status {status}")


@pytest.fixture
def runtime(monkeypatch, cuda_devices):
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "check_error", found.check_error)
    monkeypatch.setattr(torch, "ones", found.ones)
    return found


class TestRegister:
    def test_a_failure_clears_the_error(self, runtime):
        """Failed calls leave no last error behind, so no kernel of the user raises it."""
        backend = TorchBackend(torch.device("cuda", 0))
        memory = np.zeros(8, np.uint8)
        with pytest.raises(RuntimeError, match="status 713"):
            backend.unregister(memory)
        assert runtime.last_error == 0
        backend.register(memory)
        with pytest.raises(RuntimeError, match="status 712"):
            backend.register(memory)
        assert runtime.last_error == 0
        backend.unregister(memory)
        assert runtime.registered == {}

    def test_pinned_memory_is_registered(self, runtime):
        """``pin`` registers whole pages of a new mapping, and unregisters them when nothing refers to the memory."""
        memory = TorchBackend(torch.device("cuda", 0)).pin(3 * mmap.PAGESIZE + 1)
        assert memory.nbytes == 3 * mmap.PAGESIZE + 1
        assert runtime.registered == {memory.ctypes.data: 4 * mmap.PAGESIZE}
        part = torch.from_numpy(memory[8:16])
        del memory
        release_unused()
        assert len(runtime.registered) == 1
        del part
        release_unused()
        assert runtime.registered == {}

    @pytest.mark.parametrize("refuses", [True, False])
    def test_memory_that_cuda_does_not_register(self, runtime, monkeypatch, refuses):
        """If CUDA refuses, or if the constant says so, ``pin`` asks torch's pinned allocator."""
        asked = []
        empty = torch.empty

        def pinned(nbytes, *, pin_memory, **options):
            asked.append((nbytes, pin_memory))
            return empty(nbytes, **options)

        runtime.refuses = refuses
        monkeypatch.setattr(cuda, "REGISTERS_PINNED_MEMORY", refuses)
        monkeypatch.setattr(torch, "empty", pinned)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
        assert TorchBackend(torch.device("cuda", 0)).pin(100).nbytes == 100
        assert asked == [(100, True)]
        assert runtime.registered == {}
