"""Tests of the simulated device: the order of its operations, its memory, and its tensors."""

import gc
import mmap
import threading

import numpy as np
import pytest
import torch

from aiofeed.devices.backend import DeviceBackend
from aiofeed.runtime.buffers import release_unused
from tests.support.simulated_device import SimulatedDevice

POISON = 0xDB


def on_device(simulated, values):
    """A tensor whose copy has run."""
    tensor = simulated.copy(values)
    simulated.synchronize()
    return tensor


@pytest.fixture
def late():
    return SimulatedDevice(latency="late")


def test_is_a_backend():
    """The simulated device implements DeviceBackend."""
    assert isinstance(SimulatedDevice(), DeviceBackend)


def test_unknown_latency():
    """An unknown latency is refused with the allowed ones."""
    with pytest.raises(ValueError, match=r"'soon'.*'random', 'late' or 'early'"):
        SimulatedDevice(latency="soon")


class TestOrder:
    def test_a_copy_has_not_run_when_copy_returns(self, late):
        """A stream that does not wait for the copy reads poison."""
        source = torch.arange(4, dtype=torch.uint8)
        with late.use_stream(late.side_stream()):
            copy = late.copy(source)
        assert copy.tolist() == [POISON] * 4
        with late.use_stream(late.side_stream()):
            assert copy.tolist() == [0, 1, 2, 3]

    def test_wait_orders_two_streams(self, late):
        """Work queued after a wait runs after the event; the host does not wait."""
        source = torch.arange(4, dtype=torch.uint8)
        with late.use_stream(late.side_stream()):
            copy = late.copy(source)
        event = late.record(late.side_stream())
        late.wait(late.current_stream(), event)
        assert not event.done
        assert copy.tolist() == [0, 1, 2, 3]
        assert event.done

    def test_the_source_is_read_when_the_copy_runs(self, late):
        """A copy reads what was written to host memory after it was issued."""
        source = torch.zeros(4)
        copy = late.copy(source)
        source.fill_(7)
        assert copy.tolist() == [7, 7, 7, 7]

    def test_a_copy_from_a_dropped_tensor_reads_poison(self, late):
        """A host tensor that is dropped before its copy has run reads as poison."""
        copy = late.copy(torch.zeros(4, dtype=torch.uint8))
        assert copy.tolist() == [POISON] * 4

    def test_operations_run_late_on_the_current_stream(self, late):
        """An operation returns at once, with the right shape, and runs when something waits for it."""
        ran = []
        x = on_device(late, torch.arange(6.0).reshape(2, 3))
        late.launch(lambda raw: (ran.append(1), raw.mul_(10)), x)
        y = (x + 1).sum(dim=1)
        assert y.shape == (2,)
        assert not ran
        assert y.tolist() == [33.0, 123.0]
        assert ran == [1]

    def test_an_interrupted_operation_runs_later(self, late):
        """An operation that Ctrl-C interrupts stays in its stream and runs when something waits again."""
        interrupts = [KeyboardInterrupt]

        def add_one(raw):
            if interrupts:
                raise interrupts.pop()
            raw.add_(1)

        x = on_device(late, torch.zeros(2))
        late.launch(add_one, x)
        with pytest.raises(KeyboardInterrupt):
            late.synchronize()
        assert x.tolist() == [1, 1]

    def test_results_of_another_stream_are_poison_without_a_wait(self, late):
        """A result computed on the side stream is poison on another stream until that stream waits."""
        x = on_device(late, torch.ones(2, dtype=torch.uint8))
        with late.use_stream(late.side_stream()):
            y = x + 1
        assert y.tolist() == [POISON, POISON]
        late.wait(late.current_stream(), late.record(late.side_stream()))
        assert y.tolist() == [2, 2]

    @pytest.mark.parametrize("latency", ["random", "late", "early"])
    def test_query_becomes_true(self, latency):
        """Repeated queries complete an event."""
        simulated = SimulatedDevice(latency=latency)
        with simulated.use_stream(simulated.side_stream()):
            simulated.sleep()
            copy = simulated.copy(source := torch.ones(3))
            event = simulated.record(simulated.side_stream())
        polls = next(number for number in range(1000) if event.query())
        assert polls < 100
        simulated.wait(simulated.current_stream(), event)
        assert torch.equal(copy, source)

    def test_early_copies_run_before_the_consumer(self):
        """With early latency a copy runs at once and the consumer's kernels do not."""
        simulated = SimulatedDevice(latency="early")
        ran = []
        simulated.launch(lambda: ran.append("kernel"))
        with simulated.use_stream(simulated.side_stream()):
            simulated.launch(lambda: ran.append("copy"))
        assert ran == ["copy"]

    def test_the_same_seed_does_the_same(self):
        """In one thread the order of operations depends on the seed only."""

        def trace(seed):
            simulated = SimulatedDevice(seed)
            ran = []
            streams = [simulated.new_stream() for _ in range(3)]
            for number in range(200):
                with simulated.use_stream(streams[number % 3]):
                    simulated.launch(lambda number=number: ran.append(number))
            return ran

        assert trace(3) == trace(3)
        assert trace(3) != trace(4)

    def test_a_full_queue_makes_the_host_wait(self, late):
        """A stream queues about a thousand operations; the next one runs the first."""
        for _ in range(1500):
            late.launch(lambda: None)
        assert 1000 <= late.queued <= 1100

    def test_current_stream_is_a_thread_s_own(self, late):
        """A stream that is current in one thread is not current in another, and is reset after an error."""
        seen = []
        stream = late.new_stream()
        with pytest.raises(KeyError), late.use_stream(stream), late.use_stream(late.side_stream()):
            with late.use_stream(stream):
                pass
            assert late.current_stream() is late.side_stream()
            thread = threading.Thread(target=lambda: (late.enter_thread(), seen.append(late.current_stream())))
            thread.start()
            thread.join()
            raise KeyError
        assert seen == [late.current_stream()]
        assert late.current_stream() is not stream
        assert len(late.threads) == 1

    def test_one_side_stream(self, late):
        """The side stream is always the same."""
        assert late.side_stream() is late.side_stream()
        assert late.streams_made == 1

    def test_a_kernel_cannot_use_the_device(self, late):
        """A launched function that uses the device raises."""
        x = on_device(late, torch.ones(2))
        late.launch(lambda: x + 1)
        with pytest.raises(RuntimeError, match="kernel"):
            late.synchronize()


class TestMemory:
    def test_dropped_memory_is_reused_for_the_next_allocation(self, late):
        """The next tensor of the same size on the same stream reuses a dropped block."""
        first = on_device(late, torch.ones(4))
        address = first.data_ptr()
        del first
        assert late.copy(torch.ones(4)).data_ptr() == address
        assert late.reserved_bytes == 512

    def test_dropped_memory_is_poisoned_for_late_kernels(self, late):
        """A kernel queued on another stream reads poison once the tensor is dropped without record_stream."""
        with late.use_stream(late.side_stream()):
            x = on_device(late, torch.ones(4, dtype=torch.uint8))
        y = x + 1
        del x
        assert late.allocated_bytes == 512
        late.record(late.side_stream()).synchronize()
        assert y.tolist() == [POISON + 1] * 4

    def test_record_stream_delays_the_reuse_of_memory(self, late):
        """Recorded memory is reused only after the stream's queued work has run."""
        with late.use_stream(late.side_stream()):
            x = on_device(late, torch.ones(4, dtype=torch.uint8))
        address = x.data_ptr()
        late.record_stream(x, late.current_stream())
        y = x + 1
        del x
        with late.use_stream(late.side_stream()):
            assert late.copy(torch.zeros(4, dtype=torch.uint8)).data_ptr() != address
        late.record(late.side_stream()).synchronize()
        assert y.tolist() == [2] * 4
        with late.use_stream(late.side_stream()):
            assert late.copy(torch.zeros(4, dtype=torch.uint8)).data_ptr() == address

    def test_record_stream_of_a_tensor(self, late):
        """``Tensor.record_stream`` has the effect of the device's record_stream."""
        with late.use_stream(late.side_stream()):
            x = on_device(late, torch.ones(4, dtype=torch.uint8))
        x.record_stream(late.current_stream())
        y = x + 1
        del x
        late.record(late.side_stream()).synchronize()
        assert y.tolist() == [2] * 4

    def test_work_on_the_owning_stream_needs_no_record_stream(self, late):
        """Dropped memory is poisoned after the work that its own stream has queued."""
        x = late.copy(source := torch.ones(4, dtype=torch.uint8))
        y = x + 1
        del x
        z = late.copy(source)
        assert y.tolist() == [2] * 4
        assert z.tolist() == [1] * 4

    def test_queued_work_keeps_no_tensor_alive(self, late):
        """Like a real kernel, a queued operation keeps neither its arguments nor its result alive."""
        x = on_device(late, torch.ones(1000))
        x.add_(1)
        (x * 2).sum()
        x[1:].copy_(x[:-1])
        del x
        gc.collect()
        assert late.queued > 0
        assert late.allocated_bytes == 0

    def test_views_keep_memory(self, late):
        """A view of a view keeps the block; dropping the last view frees it."""
        x = on_device(late, torch.arange(24).reshape(2, 3, 4))
        view = x.permute(2, 0, 1)[1:].detach()
        address = x.data_ptr()
        del x
        assert late.copy(torch.zeros(24, dtype=torch.int64)).data_ptr() != address
        assert view.tolist() == torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)[1:].tolist()
        del view
        assert late.allocated_bytes == 0

    def test_out_of_memory(self):
        """A full device raises torch.OutOfMemoryError with the numbers of bytes; dropping a tensor frees memory."""
        simulated = SimulatedDevice(memory_bytes=1024)
        x = on_device(simulated, torch.ones(256))
        with pytest.raises(torch.OutOfMemoryError, match="512 bytes requested, 1024 of 1024 in use"):
            simulated.copy(torch.ones(1))
        del x
        assert simulated.copy(torch.ones(1)).shape == (1,)

    def test_a_full_device_waits_for_recorded_streams(self):
        """Like CUDA, a full device waits for blocks that other streams still use before it raises."""
        simulated = SimulatedDevice(latency="late", memory_bytes=512)
        with simulated.use_stream(simulated.side_stream()):
            x = on_device(simulated, torch.ones(4))
        ran = []
        simulated.launch(lambda: ran.append(1))
        simulated.record_stream(x, simulated.current_stream())
        del x
        with simulated.use_stream(simulated.side_stream()):
            simulated.copy(torch.ones(4))
        assert ran == [1]

    def test_pinned_memory(self):
        """Pinned memory counts in pages until nothing refers to it, and slices of it are pinned."""
        simulated = SimulatedDevice()
        memory = simulated.pin(1000)
        assert memory.nbytes == 1000
        part = torch.from_numpy(memory[100:200])
        assert simulated.is_pinned(part)
        assert not simulated.is_pinned(torch.ones(4))
        assert simulated.pinned_bytes == mmap.PAGESIZE
        del memory
        release_unused()
        assert simulated.pinned_bytes == mmap.PAGESIZE
        del part
        release_unused()
        assert simulated.pinned_bytes == 0

    def test_memory_unregistered_before_its_copy_has_run(self, late):
        """It is an error to unregister memory that a queued copy reads, and the copy reads poison."""
        memory = np.ones(8, np.uint8)
        late.register(memory)
        early, copied = late.copy(source := torch.from_numpy(memory)), late.record(late.current_stream())
        with pytest.raises(RuntimeError, match="unregistered before 1 copies from it had run"):
            late.unregister(memory)
        assert early.tolist() == [POISON] * 8
        late.register(memory)
        again = late.copy(source)
        late.synchronize()
        assert copied.query()
        late.unregister(memory)
        assert again.tolist() == [1] * 8
        assert late.pinned_bytes == 0

    def test_faults(self):
        """``pin_fails`` and ``copy_fails_at`` make pinning and the n-th copy fail."""
        simulated = SimulatedDevice(pin_fails=True, copy_fails_at=2)
        with pytest.raises(RuntimeError, match="bytes cannot be pinned"):
            simulated.pin(8)
        simulated.copy(torch.ones(1))
        with pytest.raises(RuntimeError, match="copy 2"):
            simulated.copy(torch.ones(1))
        simulated.copy(torch.ones(1))

    def test_tensors_of_two_devices(self, late):
        """An operation with tensors of two devices raises."""
        other = SimulatedDevice()
        x, y = on_device(late, torch.ones(2)), on_device(other, torch.ones(2))
        with pytest.raises(RuntimeError, match="two simulated devices"):
            x + y
        with pytest.raises(RuntimeError, match="another simulated device"):
            other.copy(x)
        assert late.copy(x) is x


class TestTensors:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x[x > 2],
            lambda x: x.nonzero(),
            lambda x: x.max(dim=1).indices,
            lambda x: torch.stack([x, x * 2]),
            lambda x: torch.cat(x.split(1)),
            lambda x: x.t().contiguous(),
            lambda x: x.clone().mul_(3).clamp_(max=9),
            lambda x: x.expand(2, 3, 4) * 1,
            lambda x: x.to(torch.float16, memory_format=torch.contiguous_format),
            lambda x: torch.nn.functional.layer_norm(x, (4,)),
            lambda x: torch.zeros_like(x),
            lambda x: x.view(torch.int32),
            lambda x: x[torch.tensor([2, 0])],
            lambda x: torch.as_strided(x, (2, 2), (4, 1), 1),
            lambda x: torch.nn.functional.one_hot(x[0].long(), 12),
            lambda x: x.to(x.device).softmax(-1),
        ],
    )
    def test_operations_equal_those_on_the_host(self, function):
        """Values, shape, dtype and strides equal those of the same operation on a plain tensor."""
        simulated = SimulatedDevice()
        plain = torch.arange(12.0).reshape(3, 4)
        expected = function(plain)
        found = function(simulated.copy(plain))
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert torch.equal(found.cpu(), expected)

    def test_reading(self):
        """Each way to read values waits for the current stream and returns a copy in host memory."""
        simulated = SimulatedDevice(latency="late")
        source = torch.arange(3)
        ways = [
            lambda x: x.tolist(),
            lambda x: x.numpy().tolist(),
            lambda x: np.asarray(x).tolist(),
            lambda x: x.cpu().tolist(),
            lambda x: x.to("cpu", torch.float32).tolist(),
            lambda x: [value.item() for value in x],
        ]
        for way in ways:
            assert way(simulated.copy(source)) == [0, 1, 2]
        assert "tensor([0, 1, 2])" in repr(simulated.copy(source))
        assert f"{simulated.copy(source)[2]:03d}" == "002"
        assert type(simulated.copy(source).cpu()) is torch.Tensor
        assert not torch.equal(simulated.copy(source), source + 1)

    def test_writing_to_host_memory_waits(self, late):
        """An operation that writes to a plain tensor runs before it returns."""
        host = torch.zeros(3)
        host.add_(late.copy(source := torch.ones(3)))
        assert torch.equal(host, source)

    def test_errors_of_an_operation(self):
        """A wrong shape raises at the call; a bad index raises where something waits for the stream."""
        simulated = SimulatedDevice(latency="late")
        x = on_device(simulated, torch.ones(3, 4))
        with pytest.raises(RuntimeError, match="size"):
            x + torch.ones(5)
        bad = x.index_select(0, torch.tensor([9]))
        with pytest.raises(IndexError):
            bad.tolist()
        with pytest.raises(NotImplementedError, match="in place"):
            x.t_()

    @pytest.mark.parametrize("latency", ["random", "late"])
    def test_training(self, latency):
        """A host model trains on simulated tensors as on plain ones, with autocast and batch norm."""

        def train(to_device):
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
                torch.nn.Linear(4 * 36, 2),
            )  # fmt: skip
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            generator = torch.Generator().manual_seed(1)
            losses = []
            for _ in range(4):
                images = torch.randn(5, 3, 8, 8, generator=generator)
                labels = torch.randint(0, 2, (5,), generator=generator)
                with torch.autocast("cpu", torch.bfloat16, enabled=latency == "late"):
                    loss = torch.nn.functional.cross_entropy(model(to_device(images)), to_device(labels))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        simulated = SimulatedDevice(latency=latency)
        assert train(simulated.copy) == pytest.approx(train(lambda tensor: tensor), abs=1e-6)
        gc.collect()
        assert simulated.allocated_bytes == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")])
def test_operations_queued_under_a_mode_may_run_outside_it(mode):
    """Device memory is neither an inference tensor nor on the user's default device."""
    backend = SimulatedDevice(latency="late")
    source = torch.arange(4)
    with mode():
        copied = backend.copy(source)
        doubled = copied * 2
    backend.synchronize()
    assert copied.tolist() == [0, 1, 2, 3]
    assert doubled.tolist() == [0, 2, 4, 6]
    del copied, doubled
    assert backend.copy(source).tolist() == [0, 1, 2, 3]
