"""``TorchBackend`` and ``Copier`` on PyTorch's simulated accelerator."""

import threading

import numpy as np
import pytest
import torch

from aiofeed.core.errors import DeviceCopyError
from aiofeed.core.types import HostTensor
from aiofeed.devices.backend import TorchBackend
from aiofeed.devices.copier import Copier
from aiofeed.devices.resolve import resolve_device, resolve_devices
from aiofeed.devices.static_output import StaticOutput
from aiofeed.testing import check_copier


def in_turn(backend):
    """Return the default stream and two others."""
    return [backend.current_stream(), torch.Stream(backend.device), torch.Stream(backend.device)]


class TestResolve:
    @pytest.mark.parametrize(
        ("given", "name"),
        [("openreg", "openreg:0"), ("openreg:1", "openreg:1"), ("auto", "openreg:0"), (1, "openreg:1")],
    )
    def test_names(self, given, name):
        """The device resolves by torch's name, by an index, and by "auto"."""
        backend = resolve_device(given)
        assert isinstance(backend, TorchBackend)
        assert (backend.name, backend.device) == (name, torch.device(name))

    def test_several(self):
        """The two devices can share a batch; one device twice is refused."""
        assert resolve_devices(["openreg:0", "openreg:1"]).name == "openreg:0, openreg:1"
        with pytest.raises(ValueError, match="openreg:0 is listed twice"):
            resolve_devices(["openreg:0", "openreg:0"])

    @pytest.mark.parametrize("given", ["openreg:2", "cuda", "cuda:0"])
    def test_absent(self, given):
        """The error for a missing device lists the present devices."""
        with pytest.raises(ValueError, match="present: openreg:0, openreg:1"):
            resolve_device(given)

    def test_the_current_one(self):
        """A name without an index means the calling thread's current device."""
        torch.accelerator.set_device_index(1)
        try:
            assert [resolve_device(given).name for given in ("openreg", "auto")] == ["openreg:1"] * 2
        finally:
            torch.accelerator.set_device_index(0)


class TestBackend:
    def test_pinned_memory(self, backend):
        """torch recognises pinned memory, also of slices, and it is kept while anything refers to it."""
        part = torch.from_numpy(backend.pin(4096)[512:1024].view(np.int64))
        part.fill_(3)
        assert part.is_pinned()
        assert part.tolist() == [3] * 64
        assert backend.pin(0).shape == (0,)

    def test_one_side_stream(self, backend):
        """There is one side stream per device, which is not the default stream."""
        other = resolve_device("openreg:1")
        assert backend.side_stream() == resolve_device(backend.device).side_stream()
        assert backend.side_stream() != backend.current_stream()
        assert other.side_stream().device == other.device

    def test_streams_of_the_user_are_seen(self, backend):
        """The backend's current stream is the user's, and ``use_stream`` can be nested in it."""
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
        """After synchronize an event is complete, and another stream can wait for an event."""
        event = backend.record(backend.side_stream())
        backend.wait(backend.current_stream(), event)
        event.synchronize()
        assert event.query()
        backend.record(backend.current_stream()).synchronize()

    def test_the_current_device_is_left_as_it_was(self, backend):
        """Copies to another device do not change the calling thread's current device."""
        other = resolve_device("openreg:1")
        moved = Copier(other).issue(torch.ones(3))
        assert torch.accelerator.current_device_index() == 0
        assert moved.batch.device == other.device

    def test_memory_is_unknown_or_sound(self, backend):
        """``memory`` returns None if the allocator does not report it, and valid numbers otherwise."""
        memory = backend.memory()
        assert memory is None or 0 < memory[0] <= memory[1]

    def test_record_stream(self, backend, record_stream):
        """deliver calls record_stream for every tensor, with the consumer's stream."""
        copier = Copier(backend)
        stream = torch.Stream(backend.device)
        with backend.use_stream(stream):
            batch = copier.deliver(copier.issue({"x": torch.arange(4), "y": [torch.ones(2), "z"]}))
        if record_stream:
            wanted = [batch["x"], batch["y"][0]]
            assert record_stream == [(tensor.untyped_storage().data_ptr(), stream) for tensor in wanted]
        assert (batch["x"].tolist(), batch["y"][0].tolist()) == ([0, 1, 2, 3], [1.0, 1.0])

    def test_no_record_stream(self, monkeypatch):
        """If torch has no record_stream for the device, deliver raises."""

        def missing(tensor, stream):
            raise NotImplementedError("Could not run 'aten::record_stream'")

        monkeypatch.setattr(torch.Tensor, "record_stream", missing)
        copier = Copier(resolve_device("openreg:0"))
        with pytest.raises(DeviceCopyError, match="no record_stream for openreg:0"):
            copier.deliver(copier.issue(torch.ones(2)))


class TestCopier:
    @pytest.mark.parametrize("index", [0, 1])
    @pytest.mark.parametrize("static", [False, True])
    def test_no_wrong_byte(self, backend, static, index):
        """On alternating streams, with memory reused as soon as its event is complete, batches are right."""

        def copier(backend, transform):
            return Copier(backend, transform, StaticOutput(backend) if static else None)

        backend = resolve_device(f"openreg:{index}")
        check_copier(backend, in_turn(backend), copier=copier, batches=1_000)

    def test_no_wrong_byte_in_larger_batches(self, backend):
        """Larger batches, whose copies take longer, are right."""
        check_copier(backend, in_turn(backend), batches=60, shape=(16, 64, 64, 3))

    def test_layout_and_transform(self, backend):
        """uint8 images arrive as [N, 3, H, W] in channels_last memory, and the transform returns bfloat16."""
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
        """One thread issues and another takes, and the side stream is not current in either."""
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
        """A batch that does not fit is a failed copy with its shape, and the next one works."""
        copier = Copier(backend)
        huge = torch.zeros(1, dtype=torch.uint8).expand(1 << 60)
        with pytest.raises(DeviceCopyError, match=r"shape \[1152921504606846976\] .* to openreg:0 failed"):
            copier.issue(huge)
        assert copier.deliver(copier.issue(torch.ones(2))).tolist() == [1.0, 1.0]
