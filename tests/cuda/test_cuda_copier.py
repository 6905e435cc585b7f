"""CUDA's own behaviour beneath ``Copier``: streams, registered memory and captures. See also tests/devices."""

import threading

import numpy as np
import pytest
import torch

from aiofeed.ipc.cuda_ipc import CudaSharedDevice
from aiofeed.kernel.core.types import HostTensor
from aiofeed.kernel.devices.backend import TorchBackend
from aiofeed.kernel.devices.copier import Copier
from aiofeed.kernel.devices.pinned import release_unused
from aiofeed.testing import check_copier


def slow():
    """Queue a kernel of about a millisecond, three times as long as the host takes for a batch."""
    torch.cuda._sleep(2_000_000)


def in_turn(backend):
    """Return the default stream and two others."""
    return [backend.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]


def check(backend, **options):
    """Run the check with slow kernels."""
    check_copier(backend, options.pop("streams", None) or in_turn(backend), slow=slow, **options)


class TestCheck:
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
