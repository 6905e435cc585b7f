"""The copier on a simulated device: right bytes, whatever the streams do, and mistakes that the check would see."""

import dataclasses
import functools
import gc
import typing
import weakref

import numpy as np
import pytest
import torch

from aiofeed.core.errors import DeviceCopyError
from aiofeed.core.pytree import leaves
from aiofeed.core.types import HostTensor
from aiofeed.devices.copier import Copier, PendingCopy
from aiofeed.testing import SimulatedDevice, WrongBytesError, check_copier


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: object


@dataclasses.dataclass(frozen=True)
class Sample:
    image: object
    key: str


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: two threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(simulated, **options):
    """The check with three streams of the consumer, the default one among them."""
    streams = [simulated.current_stream(), simulated.new_stream(), simulated.new_stream()]
    check_copier(simulated, streams, slow=simulated.sleep, **options)


def fetch(copier, batch):
    """Issue and deliver at once."""
    return copier.deliver(copier.issue(batch))


# The classic mistakes, each the copier with one thing left out or done at the wrong place.


class NoWait(Copier):
    """The consumer's stream never waits."""

    def deliver(self, in_flight):
        for leaf in leaves(in_flight.batch):
            if isinstance(leaf, torch.Tensor):
                self.backend.record_stream(leaf, self.backend.current_stream())
        return in_flight.batch


class WaitForCopyAlone(Copier):
    """The consumer's stream waits for the copy and not for the transform."""

    def deliver(self, in_flight):
        return super().deliver(dataclasses.replace(in_flight, ready=in_flight.copied))


class WaitTooEarly(Copier):
    """The event that the consumer's stream waits for is recorded before the copies."""

    def issue(self, batch):
        before = self.backend.record(self.backend.side_stream())
        return dataclasses.replace(super().issue(batch), ready=before)


class StreamOfTheFirstBatch(Copier):
    """The consumer's stream is read once, not at each delivery."""

    stream = None

    def deliver(self, in_flight):
        self.stream = self.stream or self.backend.current_stream()
        with self.backend.use_stream(self.stream):
            return super().deliver(in_flight)


class SlotReusedBeforeCopied(Copier):
    """The event that frees the host memory is recorded before the copies."""

    def issue(self, batch):
        before = self.backend.record(self.backend.side_stream())
        return dataclasses.replace(super().issue(batch), copied=before)


class NoHold(Copier):
    """No record_stream."""

    def deliver(self, in_flight):
        self.backend.wait(self.backend.current_stream(), in_flight.ready)
        return in_flight.batch


class HoldForTheSideStream(Copier):
    """record_stream names the stream that owns the memory anyway."""

    def deliver(self, in_flight):
        self.backend.wait(self.backend.current_stream(), in_flight.ready)
        for leaf in leaves(in_flight.batch):
            if isinstance(leaf, torch.Tensor):
                self.backend.record_stream(leaf, self.backend.side_stream())
        return in_flight.batch


class HoldTheTopLevelAlone(Copier):
    """record_stream does not look into containers."""

    def deliver(self, in_flight):
        NoHold.deliver(self, in_flight)
        for leaf in in_flight.batch:
            if isinstance(leaf, torch.Tensor):
                self.backend.record_stream(leaf, self.backend.current_stream())
        return in_flight.batch


class HostTensorsDropped(Copier):
    """Nobody keeps the plain host tensors while they are being copied."""

    def issue(self, batch):
        in_flight = super().issue(batch)
        self._sources.clear()
        return in_flight


class TransformElsewhere(Copier):
    """The transform runs on the calling thread's stream instead of the side stream."""

    def __init__(self, backend, transform):
        super().__init__(backend)
        self.late_transform = transform

    def issue(self, batch):
        in_flight = super().issue(batch)
        return dataclasses.replace(in_flight, batch=self.late_transform(in_flight.batch))


MISTAKES = [
    NoWait, WaitForCopyAlone, WaitTooEarly, StreamOfTheFirstBatch, SlotReusedBeforeCopied, NoHold,
    HoldForTheSideStream, HoldTheTopLevelAlone, HostTensorsDropped, TransformElsewhere,
]  # fmt: skip


class TestStreams:
    @pytest.mark.parametrize("latency", ["random", "late", "early"])
    def test_no_wrong_byte(self, latency):
        """Slow kernels, three streams taken in turn, tensors dropped at once: every batch arrives as it was."""
        simulated = SimulatedDevice(latency=latency)
        check(simulated, batches=2_000 if latency == "random" else 500)
        gc.collect()
        assert simulated.allocated_bytes == 0
        assert simulated.pinned_bytes == 0
        assert simulated.streams_made == 3

    @pytest.mark.parametrize("mistake", MISTAKES)
    def test_the_check_sees_each_mistake(self, mistake):
        """The copier with one thing wrong fails the check that the real one passes."""
        with pytest.raises(WrongBytesError):
            check(SimulatedDevice(), copier=mistake, batches=400)

    def test_memory_in_use_is_flat(self):
        """The device memory reserved does not grow with the number of batches."""
        reserved = []
        for batches in (400, 1200):
            simulated = SimulatedDevice(latency="late")
            check(simulated, batches=batches)
            # The sums, one row for each batch, are the check's own.
            reserved.append(simulated.reserved_bytes - batches * 3 * 8)
        assert reserved[1] <= reserved[0] * 1.1

    def test_pageable_memory_is_as_right(self):
        """Where memory cannot be pinned, copies from pageable memory pass the same check."""
        check(SimulatedDevice(pin_fails=True), batches=200)

    def test_one_side_stream_for_all_copiers(self):
        """Copiers come and go, the stream stays."""
        simulated = SimulatedDevice()
        for _ in range(5):
            fetch(Copier(simulated), torch.ones(2))
        assert simulated.streams_made == 1

    def test_deliver_does_not_block(self):
        """Handing over makes the stream wait, not the host."""
        simulated = SimulatedDevice(latency="late")
        copier = Copier(simulated)
        in_flight = copier.issue(source := torch.ones(2))
        batch = copier.deliver(in_flight)
        assert not in_flight.copied.done
        assert torch.equal(batch, source)
        assert in_flight.copied.done

    def test_the_calling_thread_s_stream_is_restored(self):
        """Neither issuing, nor a transform that raises, leaves the side stream current."""
        simulated = SimulatedDevice()
        stream = simulated.new_stream()
        with simulated.use_stream(stream):
            Copier(simulated).issue(torch.ones(2))
            assert simulated.current_stream() is stream
            with pytest.raises(DeviceCopyError):
                Copier(simulated, lambda batch: 1 / 0).issue(torch.ones(2))
            assert simulated.current_stream() is stream

    def test_follow_orders_constants_before_the_transform(self):
        """What the user's thread has queued is there before a transform uses it."""
        simulated = SimulatedDevice(latency="late")
        mean = simulated.copy(host := torch.full((3,), 2.0))
        copier = Copier(simulated, lambda batch: batch - mean)
        copier.wait_for_caller()
        source = torch.ones(3)
        assert fetch(copier, source).tolist() == [-1.0, -1.0, -1.0]
        del host


class TestBatches:
    def test_nested(self):
        """Tuples, lists, dicts, named tuples and dataclasses keep their types; what is no tensor passes through."""
        marker = object()
        batch = (
            [torch.arange(3), {"a": HostTensor(np.arange(4))}],
            Pair(torch.tensor(1.5), marker),
            Sample(torch.ones(2, 2), "key"),
            None,
        )
        (listed, named), pair, sample, nothing = fetch(Copier(simulated := SimulatedDevice()), batch)
        assert listed.tolist() == [0, 1, 2]
        assert named["a"].tolist() == [0, 1, 2, 3]
        assert type(pair) is Pair
        assert pair.second is marker
        assert pair.first.item() == 1.5
        assert type(sample) is Sample
        assert sample.key == "key"
        assert sample.image.tolist() == [[1, 1], [1, 1]]
        assert nothing is None
        assert simulated.copies == 4

    def test_memory_is_copied_as_it_lies(self):
        """Axes make an [N, 3, H, W] view in channels_last memory of a flat copy, and nothing is transposed."""
        memory = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
        images = fetch(Copier(SimulatedDevice()), HostTensor(memory, axes=(0, 3, 1, 2)))
        assert images.shape == (2, 3, 4, 5)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images.cpu(), torch.from_numpy(memory).permute(0, 3, 1, 2))

    def test_dtypes_that_numpy_lacks(self):
        """Memory may hold elements of a torch dtype."""
        values = torch.tensor([[1.0, -2.5], [3.0, 0.125]], dtype=torch.bfloat16)
        leaf = HostTensor(values.view(torch.int16).numpy(), axes=(1, 0), torch_dtype="bfloat16")
        found = fetch(Copier(SimulatedDevice()), leaf)
        assert found.dtype is torch.bfloat16
        assert torch.equal(found.cpu(), values.t())

    def test_dense_strides_are_kept(self):
        """A channels_last host tensor arrives channels_last."""
        source = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
        found = fetch(Copier(SimulatedDevice()), source)
        assert found.stride() == source.stride()
        assert torch.equal(found, source)

    def test_a_tensor_on_the_device_stays(self):
        """What is there already comes back itself, and a transform sees it complete."""
        simulated = SimulatedDevice(latency="late")
        there = simulated.copy(host := torch.arange(3))
        found = fetch(Copier(simulated), [there])
        assert found[0] is there
        copier = Copier(simulated, lambda batch: batch[0] + batch[1])
        assert fetch(copier, [there, torch.ones(3)]).tolist() == [1.0, 2.0, 3.0]
        assert simulated.copies == 2
        del host

    def test_transform(self):
        """A transform gets the batch on the device and gives what is handed out, of any structure."""
        simulated = SimulatedDevice()
        copier = Copier(simulated, lambda batch: {"x": (batch[0].float() / 255 - 0.5, batch[1])})
        images = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
        found = fetch(copier, (HostTensor(images, axes=(0, 3, 1, 2)), "key"))
        assert found["x"][1] == "key"
        assert found["x"][0].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found["x"][0].cpu(), torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - 0.5)

    def test_host_tensors_are_let_go_once_copied(self):
        """A plain tensor lives until its copy has run, and no longer than the next batch."""
        simulated = SimulatedDevice(latency="late")
        copier = Copier(simulated)
        source = torch.ones(3)
        alive = weakref.ref(source)
        in_flight = copier.issue(source)
        del source
        gc.collect()
        assert alive() is not None
        in_flight.copied.synchronize()
        copier.release()
        assert alive() is None

    def test_host_tensors_outlive_the_copier(self):
        """A copier that is dropped with copies on their way leaves their sources where they are."""
        simulated = SimulatedDevice(latency="late")
        copier = Copier(simulated)
        source = torch.ones(3)
        alive = weakref.ref(source)
        batch = copier.deliver(copier.issue(source))
        del source, copier
        gc.collect()
        assert batch.tolist() == [1.0, 1.0, 1.0]
        Copier(simulated).release()
        assert alive() is None


class TestErrors:
    def test_a_failing_copy_is_named(self):
        """The error gives device, shape and dtype, and chains the cause."""
        copier = Copier(SimulatedDevice(copy_fails_at=2))
        leaf = HostTensor(np.zeros((2, 3), np.float32))
        with pytest.raises(DeviceCopyError, match=r"shape \[2, 3\] and dtype torch.float32 to simulated:0") as caught:
            copier.issue([torch.ones(1), leaf])
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert "copy 2" in str(caught.value)

    def test_a_full_device_is_named(self):
        """Out of memory is a failed copy, with the figures."""
        with pytest.raises(DeviceCopyError, match=r"OutOfMemoryError.*4096 bytes asked for") as caught:
            Copier(SimulatedDevice(memory_bytes=1024)).issue(torch.zeros(1024))
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)

    def test_a_failing_transform_is_named(self):
        """The error says what the transform was given, and chains what it raised."""
        copier = Copier(SimulatedDevice(), lambda batch: batch["missing"])
        match = r"transform raised KeyError on simulated:0, given torch.uint8 \[4\]"
        with pytest.raises(DeviceCopyError, match=match) as caught:
            copier.issue({"x": torch.zeros(4, dtype=torch.uint8)})
        assert isinstance(caught.value.__cause__, KeyError)

    @pytest.mark.parametrize("copy_fails_at", [2, None])
    def test_host_memory_is_free_when_the_error_is_seen(self, copy_fails_at):
        """The copies issued before an error have run by the time it is raised."""
        simulated = SimulatedDevice(latency="late", copy_fails_at=copy_fails_at)
        copier = Copier(simulated, functools.partial(int, "no number"))
        with pytest.raises(DeviceCopyError):
            copier.issue([torch.ones(2), torch.ones(2)])
        assert simulated.queued <= 1  # poisoning of what was dropped since

    def test_a_failure_leaves_nothing_behind(self):
        """After an error the copier goes on, and no device memory is lost."""
        simulated = SimulatedDevice(copy_fails_at=2)
        copier = Copier(simulated)
        with pytest.raises(DeviceCopyError):
            copier.issue([torch.ones(2), torch.ones(2)])
        gc.collect()
        assert simulated.allocated_bytes == 0
        source = torch.ones(2)
        assert fetch(copier, source).tolist() == [1, 1]


def test_in_flight_says_when_host_memory_is_free():
    """``copied`` is a separate event, complete before a slow transform is."""
    simulated = SimulatedDevice(latency="late")
    in_flight = Copier(simulated, lambda batch: (simulated.sleep(), batch)[1]).issue(torch.ones(2))
    assert isinstance(in_flight, PendingCopy)
    in_flight.copied.synchronize()
    assert not in_flight.ready.done
