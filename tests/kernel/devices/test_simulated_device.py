"""The simulated device shows missing waits and memory that is freed too soon; test_copier.py has typical mistakes."""

import gc

import numpy as np
import pytest
import torch

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
        """A copy reads what was written to host memory after it was issued, and poison if the tensor is gone."""
        source = torch.zeros(4)
        copy = late.copy(source)
        source.fill_(7)
        assert copy.tolist() == [7, 7, 7, 7]
        dropped = late.copy(torch.zeros(4, dtype=torch.uint8))
        assert dropped.tolist() == [POISON] * 4

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


class TestMemory:
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
