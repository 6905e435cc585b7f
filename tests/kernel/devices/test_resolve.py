"""Resolving ``device=``, the errors for missing devices, and the parts of TorchBackend that need no device."""

import subprocess
import sys
from functools import partial

import pytest
import torch

from aiofeed.kernel.core.errors import DeviceCopyError
from aiofeed.kernel.core.faces import DeviceBackend
from aiofeed.kernel.devices import backend as device_module
from aiofeed.kernel.devices.backend import TorchBackend
from aiofeed.kernel.devices.resolve import resolve_device
from tests.support.interrupts import Interrupt
from tests.support.simulated_device import SimulatedDevice


@pytest.fixture
def machine(monkeypatch):
    """Give torch the accelerators of another machine."""

    def pretend(kind, count, *, index=0, built="12.8"):
        present = kind is not None and count > 0
        accelerator = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: present)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: index, raising=False)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: kind == "cuda")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: index > 0)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.version, "hip", None)

    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return pretend


def test_imports_without_torch():
    """The device modules do not import torch."""
    modules = "aiofeed.kernel.devices.cuda, aiofeed.kernel.devices.resolve, aiofeed.kernel.devices.copier"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestResolve:
    @pytest.mark.parametrize("given", [None, "cpu", "cpu:0", torch.device("cpu"), "auto"])
    def test_host(self, machine, given):
        """None, the CPU, and "auto" without an accelerator mean host tensors."""
        machine(None, 0)
        assert resolve_device(given) is None

    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ("auto", "cuda:0"),
            ("cuda", "cuda:0"),
            ("cuda:1", "cuda:1"),
            (1, "cuda:1"),
            (torch.device("cuda", 1), "cuda:1"),
            (torch.device("cuda"), "cuda:0"),
        ],
    )
    def test_accelerator(self, machine, given, name):
        """A device may be a name, an index or a torch.device."""
        machine("cuda", 2)
        backend = resolve_device(given)
        assert isinstance(backend, TorchBackend)
        assert isinstance(backend, DeviceBackend)
        assert backend.name == name
        assert backend.device == torch.device(name)
        assert name in repr(backend)

    @pytest.mark.parametrize("given", ["auto", "cuda"])
    def test_no_index_is_the_current_one(self, machine, given):
        """A name without an index means the calling thread's current device."""
        machine("cuda", 2, index=1)
        assert resolve_device(given).name == "cuda:1"

    @pytest.mark.parametrize("given", ["cuda", "cuda:0", 0])
    def test_resolving_does_not_start_cuda(self, machine, monkeypatch, given):
        """Resolving a device does not initialise CUDA, so that the process can fork."""
        machine("cuda", 1)
        for name in ("current_device_index", "is_available", "current_accelerator", "device_count"):
            monkeypatch.setattr(torch.accelerator, name, lambda: pytest.fail("initialised CUDA"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("initialised CUDA"))
        assert resolve_device(given).name == "cuda:0"

    def test_auto_ignores_a_device_that_does_not_work(self, machine, monkeypatch):
        """If the driver cannot run a present device with this torch, "auto" means the host."""
        machine("cuda", 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert resolve_device("auto") is None

    def test_other_accelerators(self, machine):
        """Other accelerators of torch resolve like CUDA."""
        machine("xpu", 1)
        assert resolve_device("auto").name == "xpu:0"
        assert resolve_device(0).name == "xpu:0"

    def test_backend(self):
        """A backend resolves to itself."""
        simulated = SimulatedDevice()
        assert resolve_device(simulated).given is simulated

    @pytest.mark.parametrize("given", [True, 1.5, object(), {"cuda"}, SimulatedDevice])
    def test_wrong_type(self, given):
        """An object that is not a device is a TypeError that names its type."""
        with pytest.raises(TypeError, match=f"torch.device or a device backend, not {type(given).__name__}"):
            resolve_device(given)

    @pytest.mark.parametrize("given", [["cuda:0", "cuda:1"], ("cuda",)])
    def test_several(self, given):
        """A list is refused."""
        with pytest.raises(TypeError, match="expected one device, not several"):
            resolve_device(given)


class TestAbsent:
    def test_no_device_of_that_name(self):
        """A name that torch does not know is an error that lists what is allowed."""
        with pytest.raises(ValueError, match="'gpu' is not a device that torch knows: expected None, 'auto'"):
            resolve_device("gpu")

    @pytest.mark.parametrize(
        ("given", "meant"),
        [("gpu", "cuda"), ("GPU:1", "cuda:1"), ("nvidia", "cuda"), ("Cuda", "cuda"), ("cude:0", "cuda:0")],
    )
    def test_what_was_meant(self, machine, given, meant):
        """The error names the device that was meant, and not all that torch has names for."""
        machine(None, 0)
        with pytest.raises(ValueError, match=f"did you mean '{meant}'") as caught:
            resolve_device(given)
        assert "vulkan" not in str(caught.value)

    @pytest.mark.parametrize("given", ["banana", "cuda:x"])
    def test_nothing_near(self, given):
        """Without one that is near, or with a wrong index, none is proposed."""
        with pytest.raises(ValueError, match="or similar") as caught:
            resolve_device(given)
        assert "did you mean" not in str(caught.value)

    @pytest.mark.parametrize("given", ["cuda", "cuda:1", 0])
    def test_build_without_cuda(self, machine, given):
        """If torch is built without CUDA, the error says so and links to the installation page."""
        machine(None, 0, built=None)
        with pytest.raises(ValueError, match=r"build without CUDA.*get-started") as caught:
            resolve_device(given)
        assert f"device={given!r}" in str(caught.value)
        assert 'device="auto"' in str(caught.value)

    def test_no_driver(self, machine, monkeypatch):
        """The error quotes the first sentence of the driver's error."""
        machine("cuda", 0)

        def init():
            raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one.")

        monkeypatch.setattr(torch.cuda, "init", init)
        with pytest.raises(ValueError, match="sees no accelerator: Found no NVIDIA driver on your system; device=None"):
            resolve_device("cuda")

    def test_hidden(self, machine, monkeypatch):
        """The error names an empty CUDA_VISIBLE_DEVICES as the reason."""
        machine("cuda", 0)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES='' limits what is visible"):
            resolve_device("cuda")

    @pytest.mark.parametrize("given", ["cuda:2", 2, -1])
    def test_no_such_index(self, machine, given):
        """The error for an index out of range lists the present devices."""
        machine("cuda", 2)
        with pytest.raises(ValueError, match=r"there is no index -?[0-9]; present: cuda:0, cuda:1$"):
            resolve_device(given)

    def test_no_such_index_because_hidden(self, machine, monkeypatch):
        """If CUDA_VISIBLE_DEVICES is set, the error shows it beside the present devices."""
        machine("cuda", 1)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        with pytest.raises(ValueError, match=r"present: cuda:0 .CUDA_VISIBLE_DEVICES='3'"):
            resolve_device("cuda:3")

    def test_another_accelerator(self, machine):
        """The error for a missing kind of device names the present accelerator."""
        machine("mps", 1)
        with pytest.raises(ValueError, match="device='cuda': present: mps:0"):
            resolve_device("cuda")

    def test_a_device_torch_knows_and_lacks(self, machine):
        """A device type that torch knows but does not have is refused."""
        machine(None, 0)
        with pytest.raises(ValueError, match=r"device='xpu:0': .*sees no such device"):
            resolve_device("xpu:0")


class TestTorchBackend:
    def test_copy_keeps_dtype_and_strides(self):
        """A copy keeps dtype and strides, and a tensor that is on the device already is returned itself."""
        backend = TorchBackend(torch.device("meta"))
        source = torch.zeros(2, 3, 4, 5, dtype=torch.uint8).to(memory_format=torch.channels_last)
        copy = backend.copy(source)
        assert (copy.device.type, copy.dtype, copy.stride()) == ("meta", source.dtype, source.stride())
        assert backend.copy(copy) is copy

    def test_record_stream_ignores_other_devices(self):
        """torch's record_stream, which raises for CPU tensors, is not called for them."""
        TorchBackend(torch.device("cuda", 0)).record_stream(torch.ones(1), object())

    @pytest.mark.parametrize("layout", ["strided", "sparse_coo", "sparse_csr", "sparse_csc"])
    @pytest.mark.filterwarnings("ignore:Sparse")
    def test_record_stream_of_sparse_tensors(self, monkeypatch, layout):
        """record_stream is called for the indices and values of a sparse tensor."""
        recorded = []
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor.layout, stream))
        )
        tensor = torch.eye(3).to_sparse(layout=getattr(torch, layout)) if layout != "strided" else torch.eye(3)
        TorchBackend(torch.device("cpu")).record_stream(tensor, "stream")
        parts = {"strided": 1, "sparse_coo": 2}.get(layout, 3)
        assert recorded == [(torch.strided, "stream")] * parts

    def test_a_device_without_record_stream(self):
        """A device without record_stream is an error that names the alternative."""
        with pytest.raises(DeviceCopyError, match=r"no record_stream for cpu: .* device=None, and batch.to\('cpu'\)"):
            TorchBackend(torch.device("cpu")).record_stream(torch.ones(1), torch.Stream(device="cpu"))

    @pytest.mark.parametrize("error", [NotImplementedError, RuntimeError])
    def test_memory_of_a_device_without_the_function_is_unknown(self, monkeypatch, error):
        """If the allocator does not implement get_memory_info, ``memory`` returns None."""

        def ask(device):
            raise error("getMemoryInfo is not implemented for this allocator yet.")

        monkeypatch.setattr(torch.accelerator, "get_memory_info", ask, raising=False)
        assert TorchBackend(torch.device("mps", 0)).memory() is None

    def test_memory(self, monkeypatch):
        """``memory`` returns free and total bytes of the device, or None without torch's function."""
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (device.index, 8), raising=False)
        assert TorchBackend(torch.device("xpu", 1)).memory() == (1, 8)
        monkeypatch.delattr(torch.accelerator, "get_memory_info")
        assert TorchBackend(torch.device("xpu", 1)).memory() is None

    def test_record_stream_of_a_jagged_tensor(self, monkeypatch):
        """For a jagged tensor its own record_stream is called once."""
        recorded = []
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
        tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        TorchBackend(torch.device("cpu")).record_stream(tensor, "stream")
        assert [(found is tensor, stream) for found, stream in recorded] == [(True, "stream")]

    def test_one_side_stream_per_device(self, monkeypatch):
        """All backends of a device have the same side stream."""
        monkeypatch.setattr(device_module, "_side_streams", {})
        backends = [TorchBackend(torch.device("cuda", index)) for index in (0, 0, 1)]
        for backend in backends:
            monkeypatch.setattr(backend, "_new_stream", object)
        first, again, other = (backend.side_stream() for backend in backends)
        assert first is again
        assert first is not other

    @pytest.mark.parametrize("names", ["index", "idx"])
    def test_use_stream_restores_stream_and_device(self, monkeypatch, names):
        """use_stream restores stream and current device after an error and when nested, with either torch version."""
        current = {"device": 1, "stream": "before"}

        def set_stream(stream):
            current.update(stream=stream, device=0)

        for suffix in ("index", "idx"):
            monkeypatch.delattr(torch.accelerator, f"set_device_{suffix}", raising=False)
            monkeypatch.delattr(torch.accelerator, f"current_device_{suffix}", raising=False)
        set_device = lambda index: current.update(device=index)  # noqa: E731
        monkeypatch.setattr(torch.accelerator, f"set_device_{names}", set_device, raising=False)
        monkeypatch.setattr(torch.accelerator, f"current_device_{names}", lambda: current["device"], raising=False)
        monkeypatch.setattr(torch.accelerator, "set_stream", set_stream)
        backend = TorchBackend(torch.device("xpu", 0))
        monkeypatch.setattr(backend, "_current", lambda: current["stream"])
        with pytest.raises(KeyError), backend.use_stream("side"):
            assert current == {"device": 0, "stream": "side"}
            with backend.use_stream("side"):
                pass
            assert current["stream"] == "side"
            raise KeyError
        assert current == {"device": 1, "stream": "before"}
        backend.enter_thread()
        assert current["device"] == 0

    def test_an_interrupted_use_stream_restores_the_stream(self, monkeypatch):
        """After Ctrl-C anywhere in use_stream the previous stream and device are current."""
        current = {"device": 1, "stream": "before"}
        # C functions, as those of torch are: signal handlers run after them.
        monkeypatch.setattr(torch.accelerator, "set_stream", partial(current.__setitem__, "stream"))
        monkeypatch.setattr(device_module, "_set_device_index", partial(current.__setitem__, "device"))
        monkeypatch.setattr(device_module, "current_device_index", partial(current.__getitem__, "device"))
        backend = TorchBackend(torch.device("xpu", 0))
        monkeypatch.setattr(backend, "_current", partial(current.__getitem__, "stream"))
        for place in range(100):
            with Interrupt(place) as interrupt:
                try:
                    with backend.use_stream("side"):
                        pass
                except KeyboardInterrupt:
                    interrupt.left = -1
            assert current == {"device": 1, "stream": "before"}, place
            if interrupt.left >= 0:
                break
        assert place > 3

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator can pin")
    def test_pin_fails_without_an_accelerator(self):
        """If memory cannot be pinned, ``pin`` raises instead of returning pageable memory."""
        with pytest.raises(RuntimeError):
            TorchBackend(torch.device("cuda", 0)).pin(8)
