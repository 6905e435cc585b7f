"""The torch backend and the copier on a device that is neither CUDA's nor simulated by this project."""

import threading

import numpy as np
import pytest
import torch

from aiofeed.core.errors import DeviceCopyError
from aiofeed.core.types import HostTensor
from aiofeed.devices.backend import TorchBackend
from aiofeed.devices.copier import Copier
from aiofeed.devices.resolve import resolve_device, resolve_devices
from aiofeed.devices.static_copier import StaticCopier
from aiofeed.testing import check_copier


def in_turn(backend):
    """The default stream and two others."""
    return [backend.current_stream(), torch.Stream(backend.device), torch.Stream(backend.device)]


class TestResolve:
    @pytest.mark.parametrize(
        ("given", "name"),
        [("openreg", "openreg:0"), ("openreg:1", "openreg:1"), ("auto", "openreg:0"), (1, "openreg:1")],
    )
    def test_names(self, given, name):
        """The device goes by torch's name for it, by an index, and by "auto"."""
        backend = resolve_device(given)
        assert isinstance(backend, TorchBackend)
        assert (backend.name, backend.device) == (name, torch.device(name))

    def test_several(self):
        """Two of them can share a batch, each once."""
        assert resolve_devices(["openreg:0", "openreg:1"]).name == "openreg:0, openreg:1"
        with pytest.raises(ValueError, match="openreg:0 is there twice"):
            resolve_devices(["openreg:0", "openreg:0"])

    @pytest.mark.parametrize("given", ["openreg:2", "cuda", "cuda:0"])
    def test_absent(self, given):
        """What there is not is refused, with what there is."""
        with pytest.raises(ValueError, match="present: openreg:0, openreg:1"):
            resolve_device(given)

    def test_the_current_one(self):
        """Without an index the calling thread's current device is meant."""
        torch.accelerator.set_device_index(1)
        try:
            assert [resolve_device(given).name for given in ("openreg", "auto")] == ["openreg:1"] * 2
        finally:
            torch.accelerator.set_device_index(0)


class TestBackend:
    def test_pinned_memory(self, backend):
        """Pinned bytes are known to torch as such, in slices too, and stay while anything refers to them."""
        part = torch.from_numpy(backend.pin(4096)[512:1024].view(np.int64))
        part.fill_(3)
        assert backend.is_pinned(part)
        assert not backend.is_pinned(torch.ones(4))
        assert part.tolist() == [3] * 64
        assert backend.pin(0).shape == (0,)

    def test_one_side_stream(self, backend):
        """The side stream is one per device, and not the default one."""
        other = resolve_device("openreg:1")
        assert backend.side_stream() == resolve_device(backend.device).side_stream()
        assert backend.side_stream() != backend.current_stream()
        assert other.side_stream().device == other.device

    def test_streams_of_the_user_are_seen(self, backend):
        """A stream that the user makes current is what the backend calls current, and ``on`` nests in it."""
        with torch.Stream(backend.device) as before:
            assert backend.current_stream() == before
            with (
                pytest.raises(KeyError),
                backend.use_stream(backend.side_stream()),
                backend.use_stream(backend.side_stream()),
            ):
                assert torch.accelerator.current_stream(backend.device) == backend.side_stream()
                raise KeyError
            assert torch.accelerator.current_stream(backend.device) == before

    def test_events(self, backend):
        """An event is complete once waited for, and another stream can wait for it."""
        event = backend.record(backend.side_stream())
        backend.wait(backend.current_stream(), event)
        event.synchronize()
        assert event.query()
        backend.record(backend.current_stream()).synchronize()

    def test_the_current_device_is_left_as_it_was(self, backend):
        """Copies to one device leave the calling thread's current device alone."""
        other = resolve_device("openreg:1")
        moved = Copier(other).issue(torch.ones(3))
        assert torch.accelerator.current_device_index() == 0
        assert moved.batch.device == other.device

    def test_memory_is_unknown_or_sound(self, backend):
        """The device's allocator may not say; that is no error."""
        memory = backend.memory()
        assert memory is None or 0 < memory[0] <= memory[1]

    def test_hold(self, backend, record_stream):
        """Every tensor that is delivered is recorded on the stream it is delivered to."""
        copier = Copier(backend)
        stream = torch.Stream(backend.device)
        with backend.use_stream(stream):
            batch = copier.deliver(copier.issue({"x": torch.arange(4), "y": [torch.ones(2), "z"]}))
        if record_stream:
            wanted = [batch["x"], batch["y"][0]]
            assert record_stream == [(tensor.untyped_storage().data_ptr(), stream) for tensor in wanted]
        assert (batch["x"].tolist(), batch["y"][0].tolist()) == ([0, 1, 2, 3], [1.0, 1.0])

    def test_no_record_stream(self, monkeypatch):
        """Where torch cannot record streams, nothing is delivered."""

        def lacking(tensor, stream):
            raise NotImplementedError("Could not run 'aten::record_stream'")

        monkeypatch.setattr(torch.Tensor, "record_stream", lacking)
        copier = Copier(resolve_device("openreg:0"))
        with pytest.raises(DeviceCopyError, match="no record_stream for openreg:0"):
            copier.deliver(copier.issue(torch.ones(2)))


class TestCopier:
    @pytest.mark.parametrize("index", [0, 1])
    @pytest.mark.parametrize("copier", [Copier, StaticCopier])
    def test_no_wrong_byte(self, backend, copier, index):
        """Streams taken in turn, memory written again as soon as its event is complete."""
        backend = resolve_device(f"openreg:{index}")
        check_copier(backend, in_turn(backend), copier=copier, batches=1_000)

    def test_no_wrong_byte_in_larger_batches(self, backend):
        """Copies that take a while are as right as those that are done at once."""
        check_copier(backend, in_turn(backend), batches=60, shape=(16, 64, 64, 3))

    def test_layout_and_transform(self, backend):
        """uint8 images arrive [N, 3, H, W] in channels_last memory and leave the transform as bfloat16."""
        memory = backend.pin(2 * 4 * 5 * 3)
        memory[:] = np.arange(len(memory)) % 256
        copier = Copier(backend, lambda images: [images, images.to(torch.bfloat16)])
        leaf = HostTensor(memory.reshape(2, 4, 5, 3), axes=(0, 3, 1, 2), pinned=True)
        images, found = copier.deliver(copier.issue(leaf))
        expected = torch.from_numpy(memory.reshape(2, 4, 5, 3)).permute(0, 3, 1, 2)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images.cpu(), expected)
        assert torch.equal(found.cpu(), expected.to(torch.bfloat16))

    def test_issued_in_a_thread(self, backend):
        """A thread of its own issues, another takes, and the side stream is nobody's current one."""
        before = backend.current_stream()
        copier = Copier(backend)
        issued = []

        def issue():
            backend.enter_thread()
            issued.append(copier.issue({"x": torch.arange(1000)}))

        thread = threading.Thread(target=issue)
        thread.start()
        thread.join()
        assert copier.deliver(issued[0])["x"].sum().item() == 499_500
        assert backend.current_stream() == before

    def test_a_copy_that_fails(self, backend):
        """A batch that cannot be had is a failed copy with its shape, and the next one works."""
        copier = Copier(backend)
        huge = torch.zeros(1, dtype=torch.uint8).expand(1 << 60)
        with pytest.raises(DeviceCopyError, match=r"shape \[1152921504606846976\] .* to openreg:0 failed"):
            copier.issue(huge)
        assert copier.deliver(copier.issue(torch.ones(2))).tolist() == [1.0, 1.0]
