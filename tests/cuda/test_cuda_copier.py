"""The copier and the torch backend on a CUDA device: the same check as on the simulated one, and what only it shows."""

import dataclasses
import threading

import numpy as np
import pytest
import torch

from aiofeed.core.errors import DeviceCopyError
from aiofeed.core.pytree import leaves
from aiofeed.core.types import HostTensor
from aiofeed.devices.backend import TorchBackend
from aiofeed.devices.copier import Copier
from aiofeed.devices.resolve import resolve_device
from aiofeed.testing import WrongBytesError, check_copier


def slow():
    """About a millisecond on the current stream: some three times what the host takes for a batch."""
    torch.cuda._sleep(2_000_000)


def in_turn(backend):
    """The default stream and two others."""
    return [backend.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]


def check(backend, **options):
    """The check, behind slow kernels."""
    check_copier(backend, options.pop("streams", None) or in_turn(backend), slow=slow, **options)


class NoWait(Copier):
    """The consumer's stream never waits."""

    def deliver(self, in_flight):
        for leaf in leaves(in_flight.batch):
            if isinstance(leaf, torch.Tensor):
                self.backend.record_stream(leaf, self.backend.current_stream())
        return in_flight.batch


class NoHold(Copier):
    """No record_stream."""

    def deliver(self, in_flight):
        self.backend.wait(self.backend.current_stream(), in_flight.ready)
        return in_flight.batch


class SlotReusedBeforeCopied(Copier):
    """The host memory counts as free as soon as the copy is issued."""

    def __init__(self, backend, transform):
        super().__init__(backend, transform)
        self.idle = backend.record(torch.cuda.Stream())

    def issue(self, batch):
        return dataclasses.replace(super().issue(batch), copied=self.idle)


class TestCheck:
    @pytest.mark.timeout(300)
    def test_no_wrong_byte(self, backend):
        """10,000 batches on streams taken in turn behind slow kernels, with no synchronisation: all are right."""
        check(backend, batches=10_000)

    def test_no_wrong_byte_in_larger_batches(self, backend):
        """Copies that take a while are as right as those that are done at once."""
        check(backend, batches=200, shape=(64, 64, 64, 3))

    @pytest.mark.parametrize("mistake", [NoWait, NoHold, SlotReusedBeforeCopied])
    def test_the_check_sees_each_mistake(self, backend, mistake):
        """The copier with one thing left out fails."""
        with pytest.raises(WrongBytesError):
            check(backend, copier=mistake, batches=512)

    def test_generic_streams_and_events(self, backend, monkeypatch):
        """torch.Stream and torch.Event, which other accelerators get, pass the check too."""
        device = backend.device
        generic = TorchBackend(device)
        side = torch.Stream(device)
        monkeypatch.setattr(generic, "side_stream", lambda: side)
        monkeypatch.setattr(generic, "_new_event", lambda: torch.Event(device))
        monkeypatch.setattr(generic, "_current", lambda: torch.accelerator.current_stream(device))
        check_copier(generic, [generic.current_stream(), torch.Stream(device)], slow=slow, batches=512)

    def test_memory_in_use_is_flat(self, backend):
        """Once the cache has its size, more batches reserve no more."""
        reserved = []
        # The same streams each time: the allocator has a pool for each, and none for all.
        streams = in_turn(backend)
        for _ in range(4):
            check(backend, streams=streams, batches=512)
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved(backend.device))
        assert reserved[3] <= reserved[1] + (4 << 20)


class TestBackend:
    def test_copies_run_by_themselves(self, backend):
        """Issuing from pinned memory returns while the side stream is still busy with something else."""
        memory = backend.pin(1 << 20)
        memory[:] = 7
        copier = Copier(backend)
        # The device's memory is there from now on: to get it from the driver may take until the device idles.
        copier.deliver(copier.issue(HostTensor(memory, pinned=True)))
        torch.cuda.synchronize()
        with backend.use_stream(backend.side_stream()):
            torch.cuda._sleep(500_000_000)
        in_flight = copier.issue(HostTensor(memory, pinned=True))
        batch = copier.deliver(in_flight)
        assert not in_flight.copied.query()
        assert bool((batch == 7).all())
        assert in_flight.copied.query()

    def test_pinned_memory(self, backend):
        """Pinned bytes are known to torch as such, in slices too, and stay while anything refers to them."""
        part = torch.from_numpy(backend.pin(4096)[512:1024].view(np.int64))
        part.fill_(3)
        assert backend.is_pinned(part)
        assert not backend.is_pinned(torch.ones(4))
        assert part.tolist() == [3] * 64
        assert backend.pin(0).shape == (0,)

    def test_one_side_stream(self, backend):
        """The side stream is one, and not the default one."""
        assert backend.side_stream() == resolve_device(backend.device).side_stream()
        assert backend.side_stream() != backend.current_stream()

    def test_streams_of_the_user_are_seen(self, backend):
        """``torch.cuda.stream`` sets what the backend calls current, and ``on`` nests in it."""
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            before = torch.cuda.current_stream()
            assert backend.current_stream() == before
            with (
                pytest.raises(KeyError),
                backend.use_stream(backend.side_stream()),
                backend.use_stream(backend.side_stream()),
            ):
                assert torch.cuda.current_stream() == backend.side_stream()
                raise KeyError
            assert torch.cuda.current_stream() == before

    def test_events(self, backend):
        """An event is not complete before what it follows, and its waiting ends."""
        torch.cuda._sleep(100_000_000)
        event = backend.record(backend.current_stream())
        assert not event.query()
        event.synchronize()
        assert event.query()

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
    def test_the_current_device_is_left_as_it_was(self):
        """Copies to one device leave the calling thread's current device alone."""
        torch.cuda.set_device(0)
        other = resolve_device("cuda:1")
        moved = Copier(other).issue(torch.ones(3))
        assert torch.cuda.current_device() == 0
        assert moved.batch.device == other.device

    def test_no_such_device(self):
        """An index beyond the last names those that exist."""
        with pytest.raises(ValueError, match="present: cuda:0"):
            resolve_device("cuda:99")


class TestCopier:
    def test_layout_and_transform(self, backend):
        """uint8 images arrive [N, 3, H, W] in channels_last memory and leave the transform as normalised bfloat16."""
        memory = backend.pin(2 * 4 * 5 * 3)
        memory[:] = np.arange(len(memory)) % 256
        seen = []

        def normalise(images):
            seen.append((images.shape, images.dtype, images.is_contiguous(memory_format=torch.channels_last)))
            return images.to(torch.bfloat16) / 255

        copier = Copier(backend, normalise)
        leaf = HostTensor(memory.reshape(2, 4, 5, 3), axes=(0, 3, 1, 2), pinned=True)
        found = copier.deliver(copier.issue(leaf))
        assert seen == [((2, 3, 4, 5), torch.uint8, True)]
        expected = torch.from_numpy(memory.reshape(2, 4, 5, 3)).permute(0, 3, 1, 2).to(backend.device)
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found, expected.to(torch.bfloat16) / 255)

    def test_issued_in_a_thread(self, backend):
        """A thread of its own issues, another takes, and the side stream is nobody's current one."""
        copier = Copier(backend)
        issued = []

        def issue():
            backend.enter_thread()
            issued.append(copier.issue({"x": torch.arange(1000)}))

        thread = threading.Thread(target=issue)
        thread.start()
        thread.join()
        assert copier.deliver(issued[0])["x"].sum().item() == 499_500
        assert backend.current_stream() == torch.cuda.default_stream(backend.device)

    def test_follow(self, backend):
        """Constants that the user's stream is still computing are there before a transform uses them."""
        torch.cuda._sleep(100_000_000)
        mean = torch.full((3,), 2.0, device=backend.device)
        copier = Copier(backend, lambda batch: batch - mean)
        copier.wait_for_caller()
        assert copier.deliver(copier.issue(torch.ones(3))).tolist() == [-1.0, -1.0, -1.0]

    def test_out_of_memory(self, backend):
        """A batch that does not fit is a failed copy with its figures, and the next one works."""
        copier = Copier(backend)
        whole = torch.cuda.get_device_properties(backend.device).total_memory
        huge = torch.zeros(1, dtype=torch.uint8).expand(whole + 1)
        with pytest.raises(DeviceCopyError, match="OutOfMemoryError"):
            copier.issue(huge)
        assert copier.deliver(copier.issue(torch.ones(2))).tolist() == [1.0, 1.0]
