"""``Copier`` and ``TorchBackend`` on a CUDA device: the check of the simulated device, and CUDA's own behaviour."""

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
from aiofeed.processes.ipc.cuda_ipc import CudaSharedDevice
from aiofeed.runtime.buffers import release_unused
from aiofeed.testing import WrongBytesError, check_copier


def slow():
    """Queue a kernel of about a millisecond, three times as long as the host takes for a batch."""
    torch.cuda._sleep(2_000_000)


def in_turn(backend):
    """Return the default stream and two others."""
    return [backend.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]


def check(backend, **options):
    """Run the check with slow kernels."""
    check_copier(backend, options.pop("streams", None) or in_turn(backend), slow=slow, **options)


class NoWait(Copier):
    """The consumer's stream never waits."""

    def deliver(self, pending):
        for leaf in leaves(pending.batch):
            if isinstance(leaf, torch.Tensor):
                self.backend.record_stream(leaf, self.backend.current_stream())
        return pending.batch


class NoRecordStream(Copier):
    """record_stream is not called."""

    def deliver(self, pending):
        self.backend.wait(self.backend.current_stream(), pending.ready)
        return pending.batch


class BufferReusedBeforeCopied(Copier):
    """The host memory counts as free as soon as the copy is issued."""

    def __init__(self, backend, transform):
        super().__init__(backend, transform)
        self.idle = backend.record(torch.cuda.Stream())

    def issue(self, batch):
        return dataclasses.replace(super().issue(batch), copied=self.idle)


class TestCheck:
    @pytest.mark.timeout(300)
    def test_no_wrong_byte(self, backend):
        """10,000 batches on alternating streams with slow kernels and without synchronisation are right."""
        check(backend, batches=10_000)

    def test_no_wrong_byte_in_larger_batches(self, backend):
        """Larger batches, whose copies take longer, are right."""
        check(backend, batches=200, shape=(64, 64, 64, 3))

    @pytest.mark.parametrize("mistake", [NoWait, NoRecordStream, BufferReusedBeforeCopied])
    def test_the_check_sees_each_mistake(self, backend, mistake):
        """A copier with a mistake fails the check."""
        # A driver may read copies of a few hundred bytes at the call, which hides a buffer that is reused too early.
        options = {"shape": (16, 64, 64, 3)} if mistake is BufferReusedBeforeCopied else {}
        with pytest.raises(WrongBytesError):
            check(backend, copier=mistake, batches=512, **options)

    def test_generic_streams_and_events(self, backend, monkeypatch):
        """torch.Stream and torch.Event, which other accelerators use, pass the check."""
        device = backend.device
        generic = TorchBackend(device)
        side = torch.Stream(device)
        monkeypatch.setattr(generic, "side_stream", lambda: side)
        monkeypatch.setattr(generic, "_new_event", lambda: torch.Event(device))
        monkeypatch.setattr(generic, "_current", lambda: torch.accelerator.current_stream(device))
        check_copier(generic, [generic.current_stream(), torch.Stream(device)], slow=slow, batches=512)

    def test_memory_in_use_is_flat(self, backend):
        """After the first batches, the allocator reserves no more memory."""
        reserved = []
        # Use the same streams each time: the allocator has one pool per stream.
        streams = in_turn(backend)
        for _ in range(4):
            check(backend, streams=streams, batches=512)
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved(backend.device))
        assert reserved[3] <= reserved[1] + (4 << 20)


class TestBackend:
    def test_copies_are_asynchronous(self, backend):
        """issue returns while the side stream is still busy."""
        memory = backend.pin(1 << 20)
        memory[:] = 7
        copier = Copier(backend)
        # Allocate the device memory now: getting it from the driver may wait until the device is idle.
        copier.deliver(copier.issue(HostTensor(memory, pinned=True)))
        torch.cuda.synchronize()
        with backend.use_stream(backend.side_stream()):
            torch.cuda._sleep(500_000_000)
        pending = copier.issue(HostTensor(memory, pinned=True))
        batch = copier.deliver(pending)
        assert not pending.copied.query()
        assert bool((batch == 7).all())
        assert pending.copied.query()

    def test_pinned_memory(self, backend):
        """torch recognises pinned memory, also of slices, and it is kept while anything refers to it."""
        part = torch.from_numpy(backend.pin(4096)[512:1024].view(np.int64))
        part.fill_(3)
        assert part.is_pinned()
        assert part.tolist() == [3] * 64
        assert backend.pin(0).shape == (0,)

    def test_pinned_memory_is_aiofeeds_own(self, backend):
        """torch's pinned allocator is not used, and the memory is unlocked when nothing refers to it."""
        stats = torch.cuda.host_memory_stats()
        memory = backend.pin(37 << 20)
        assert torch.from_numpy(memory).is_pinned()
        assert torch.cuda.host_memory_stats() == stats
        mapping = memory.base
        del memory
        release_unused()
        assert not torch.frombuffer(mapping, dtype=torch.uint8).is_pinned()

    def test_errors_of_register_are_cleared(self, backend):
        """A failed ``register`` or ``unregister`` leaves no error that the next kernel raises."""
        memory = backend.pin(1 << 16)
        with pytest.raises(RuntimeError):
            backend.register(memory)
        with pytest.raises(RuntimeError):
            backend.unregister(np.zeros(1 << 16, np.uint8))
        assert torch.ones(2, device=backend.device).sum().item() == 2.0

    def test_one_side_stream(self, backend):
        """All backends of a device share one side stream, which is not the default stream."""
        assert backend.side_stream() == resolve_device(backend.device).side_stream()
        assert backend.side_stream() != backend.current_stream()

    def test_no_stream_of_torch_is_the_side_stream(self, backend):
        """None of the streams that torch returns in rotation is the side stream or the stream of a server's ring."""
        streams = {torch.cuda.Stream(priority=priority).cuda_stream for priority in (0, -1) for _ in range(64)}
        assert backend.side_stream().cuda_stream not in streams
        assert CudaSharedDevice(backend.device).stream().cuda_stream not in streams
        assert CudaSharedDevice(backend.device).stream() != backend.side_stream()

    def test_copies_beside_a_capture_on_any_stream(self, backend):
        """A CUDA graph captured on a stream of the user's, in the default mode, does not capture the copies."""
        copier = Copier(backend)
        total = torch.zeros(4, device=backend.device)
        found = []

        def copy():
            backend.enter_thread()
            found.extend(copier.issue(torch.full((4,), float(number))) for number in range(40))

        for _ in range(33):
            stream, graph, thread = torch.cuda.Stream(), torch.cuda.CUDAGraph(), threading.Thread(target=copy)
            with torch.cuda.graph(graph, stream=stream):
                total.add_(1)
                thread.start()
                thread.join()
            graph.replay()
        assert [copier.deliver(pending).tolist() for pending in found] == [[float(n % 40)] * 4 for n in range(33 * 40)]
        assert total.tolist() == [33.0] * 4

    def test_streams_of_the_user_are_seen(self, backend):
        """``torch.cuda.stream`` sets the backend's current stream, and ``use_stream`` can be nested in it."""
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
        """An event is incomplete until the work before it has run, and synchronize waits for that."""
        torch.cuda._sleep(100_000_000)
        event = backend.record(backend.current_stream())
        assert not event.query()
        event.synchronize()
        assert event.query()

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
    def test_the_current_device_is_left_as_it_was(self):
        """Copies to another device do not change the calling thread's current device."""
        torch.cuda.set_device(0)
        other = resolve_device("cuda:1")
        moved = Copier(other).issue(torch.ones(3))
        assert torch.cuda.current_device() == 0
        assert moved.batch.device == other.device

    def test_no_such_device(self):
        """The error for an index out of range lists the present devices."""
        with pytest.raises(ValueError, match="present: cuda:0"):
            resolve_device("cuda:99")


class TestCopier:
    def test_layout_and_transform(self, backend):
        """uint8 images arrive as [N, 3, H, W] in channels_last memory, and the transform returns bfloat16."""
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
        """One thread issues and another takes, and the side stream is not current in either."""
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

    def test_wait_for_caller(self, backend):
        """A transform can use constants that the calling thread's stream is still computing."""
        torch.cuda._sleep(100_000_000)
        mean = torch.full((3,), 2.0, device=backend.device)
        copier = Copier(backend, lambda batch: batch - mean)
        copier.wait_for_caller()
        assert copier.deliver(copier.issue(torch.ones(3))).tolist() == [-1.0, -1.0, -1.0]

    def test_out_of_memory(self, backend):
        """A batch that does not fit is a failed copy, and the next one works."""
        copier = Copier(backend)
        whole = torch.cuda.get_device_properties(backend.device).total_memory
        huge = torch.zeros(1, dtype=torch.uint8).expand(whole + 1)
        with pytest.raises(DeviceCopyError, match="OutOfMemoryError"):
            copier.issue(huge)
        assert copier.deliver(copier.issue(torch.ones(2))).tolist() == [1.0, 1.0]
