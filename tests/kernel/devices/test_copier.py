"""``Copier`` on every device: data are right for every timing of streams, and the check detects mistakes."""

import dataclasses
import functools
import gc
import threading
import typing
import weakref

import numpy as np
import pytest
import torch

from aiofeed.device_groups.static_output import StaticOutput
from aiofeed.kernel.core.errors import DeviceCopyError
from aiofeed.kernel.core.pytree import leaves
from aiofeed.kernel.core.types import HostTensor
from aiofeed.kernel.devices.copier import Copier, PendingCopy
from aiofeed.testing import WrongBytesError, check_copier
from tests.support.device_cases import ACCELERATORS, CUDA, EVERY_DEVICE, SIMULATED, DeviceCase, on
from tests.support.dropping import python_calls_while_dropping
from tests.support.simulated_device import SimulatedDevice


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: object


@dataclasses.dataclass(frozen=True)
class Sample:
    image: object
    key: str


def check(device, backend=None, **options):
    """Run the check with slow kernels and three streams of the consumer, one of them the default stream."""
    backend = backend or device.backend
    check_copier(backend, device.in_turn(backend), slow=lambda: device.slow(backend), **options)


def fetch(copier, batch):
    """Issue and deliver at once."""
    return copier.deliver(copier.issue(batch))


# Copiers with one typical mistake each.


class NoWait(Copier):
    """The consumer's stream never waits."""

    def deliver(self, pending):
        for leaf in leaves(pending.batch):
            if isinstance(leaf, torch.Tensor):
                self.backend.record_stream(leaf, self.backend.current_stream())
        return pending.batch


class WaitForCopyAlone(Copier):
    """The consumer's stream waits for the copy but not for the transform."""

    def deliver(self, pending):
        return super().deliver(dataclasses.replace(pending, ready=pending.copied))


class WaitTooEarly(Copier):
    """The event that the consumer's stream waits for is recorded before the copies."""

    def issue(self, batch):
        before = self.backend.record(self.backend.side_stream())
        return dataclasses.replace(super().issue(batch), ready=before)


class StreamOfTheFirstBatch(Copier):
    """The consumer's stream is determined once, not at each delivery."""

    stream = None

    def deliver(self, pending):
        self.stream = self.stream or self.backend.current_stream()
        with self.backend.use_stream(self.stream):
            return super().deliver(pending)


class BufferReusedBeforeCopied(Copier):
    """The host memory counts as free as soon as the copy is issued."""

    def __init__(self, backend, transform):
        super().__init__(backend, transform)
        self.idle = backend.record(backend.side_stream())

    def issue(self, batch):
        return dataclasses.replace(super().issue(batch), copied=self.idle)


class NoRecordStream(Copier):
    """record_stream is not called."""

    def deliver(self, pending):
        self.backend.wait(self.backend.current_stream(), pending.ready)
        return pending.batch


class RecordTheSideStream(Copier):
    """record_stream gets the side stream, which owns the memory already."""

    def deliver(self, pending):
        self.backend.wait(self.backend.current_stream(), pending.ready)
        for leaf in leaves(pending.batch):
            if isinstance(leaf, torch.Tensor):
                self.backend.record_stream(leaf, self.backend.side_stream())
        return pending.batch


class RecordTheTopLevelOnly(Copier):
    """record_stream is not called for tensors in nested containers."""

    def deliver(self, pending):
        NoRecordStream.deliver(self, pending)
        for leaf in pending.batch:
            if isinstance(leaf, torch.Tensor):
                self.backend.record_stream(leaf, self.backend.current_stream())
        return pending.batch


class HostTensorsDropped(Copier):
    """No reference keeps the host tensors while they are copied."""

    def issue(self, batch):
        pending = super().issue(batch)
        self._sources.clear()
        return pending


class TransformElsewhere(Copier):
    """The transform runs on the calling thread's stream instead of the side stream."""

    def __init__(self, backend, transform):
        super().__init__(backend)
        self.late_transform = transform

    def issue(self, batch):
        pending = super().issue(batch)
        return dataclasses.replace(pending, batch=self.late_transform(pending.batch))


def static_copier(backend, transform, output=StaticOutput, copier=Copier):
    return copier(backend, transform, output(backend))


class NoGuard(StaticOutput):
    """Overwrites the tensors without waiting for the work that uses the previous batch."""

    def _wait_for_last_use(self, stream):
        pass


class GuardAtHandOver(StaticOutput):
    """Records the event that the next copy waits for before the consumer has queued its work."""

    handed_over = None

    def __call__(self, batch, stream):
        output = super().__call__(batch, stream)
        self.handed_over = self._backend.record(stream)
        return output

    def _wait_for_last_use(self, stream):
        self._backend.wait(stream, self.handed_over)


class EarlyStaticCopy(Copier):
    """Copies into the tensors before the batch has arrived on the device."""

    def deliver(self, pending):
        early = self.backend.record(self.backend.current_stream())
        return super().deliver(type(pending)(pending.batch, pending.copied, early))


class CopiedOnTheSideStream(StaticOutput):
    """Copies into the tensors on the side stream; the consumer's stream does not wait for it."""

    def __call__(self, batch, stream):
        side = self._backend.side_stream()
        with self._backend.use_stream(side):
            return super().__call__(batch, side)


MISTAKES = [
    NoWait, WaitForCopyAlone, WaitTooEarly, StreamOfTheFirstBatch, BufferReusedBeforeCopied, NoRecordStream,
    RecordTheSideStream, RecordTheTopLevelOnly, HostTensorsDropped, TransformElsewhere,
    functools.partial(static_copier, output=NoGuard),
    functools.partial(static_copier, output=GuardAtHandOver),
    functools.partial(static_copier, copier=EarlyStaticCopy),
    functools.partial(static_copier, output=CopiedOnTheSideStream),
]  # fmt: skip
# A driver may read copies of a few hundred bytes at the call, which hides a buffer that is reused too early.
MISTAKES_ON_CUDA = [
    (NoWait, {}),
    (NoRecordStream, {}),
    (BufferReusedBeforeCopied, {"shape": (16, 64, 64, 3)}),
    (functools.partial(static_copier, output=NoGuard), {}),
]


class TestStreams:
    @on(*EVERY_DEVICE)
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("copier", [Copier, static_copier])
    def test_no_wrong_byte(self, device, copier):
        """With slow kernels, three streams and tensors dropped or overwritten at once, batches are right."""
        check(device, copier=copier, batches=device.number(150, openreg=1_000, cuda=10_000))
        device.assert_released()
        if device.is_simulated:
            assert device.backend.streams_made == 3

    @pytest.mark.slow
    @on(*SIMULATED)
    @pytest.mark.parametrize("copier", [Copier, static_copier])
    def test_no_wrong_byte_in_many_batches(self, device, copier):
        """Thousands of batches are right, too."""
        check(device, copier=copier, batches=2_000)

    @on(*ACCELERATORS)
    def test_no_wrong_byte_in_larger_batches(self, device):
        """Larger batches, whose copies take longer, are right."""
        check(device, batches=device.number(60, cuda=200), shape=(16 if device.kind == "openreg" else 64, 64, 64, 3))

    @on(*ACCELERATORS)
    @pytest.mark.parametrize("copier", [Copier, static_copier])
    def test_no_wrong_byte_on_the_second_device(self, device, copier):
        """The device need not be the thread's current one."""
        check(device, device.two()[1], copier=copier, batches=1_000)

    @pytest.mark.parametrize("mistake", MISTAKES)
    @on("random")
    def test_the_check_sees_each_mistake(self, device, mistake):
        """A copier with a mistake fails the check that the real copier passes."""
        with pytest.raises(WrongBytesError):
            check(device, copier=mistake, batches=150 if isinstance(mistake, functools.partial) else 60)

    @pytest.mark.parametrize(("mistake", "options"), MISTAKES_ON_CUDA)
    @on(*CUDA)
    def test_the_check_sees_mistakes_on_cuda(self, device, mistake, options):
        """Where the hardware decides what runs when, the check sees the mistakes that matter most."""
        with pytest.raises(WrongBytesError):
            check(device, copier=mistake, batches=512, **options)

    @pytest.mark.slow
    def test_memory_in_use_is_flat(self):
        """The device memory reserved does not grow with the number of batches."""
        reserved = []
        for batches in (200, 600):
            device = DeviceCase("late")
            check(device, batches=batches)
            # Subtract the checksums of the check itself, one row per batch.
            reserved.append(device.backend.reserved_bytes - batches * 3 * 8)
        assert reserved[1] <= reserved[0] * 1.1

    def test_pageable_memory(self):
        """Copies from pageable memory pass the same check."""
        check(DeviceCase("random"), SimulatedDevice(pin_fails=True), batches=150)

    def test_one_side_stream_for_all_copiers(self):
        """All copiers of a device use one side stream."""
        simulated = SimulatedDevice()
        for _ in range(5):
            fetch(Copier(simulated), torch.ones(2))
        assert simulated.streams_made == 1

    def test_deliver_does_not_block(self):
        """deliver makes the consumer's stream wait, not the host."""
        simulated = SimulatedDevice(latency="late")
        copier = Copier(simulated)
        pending = copier.issue(source := torch.ones(2))
        batch = copier.deliver(pending)
        assert not pending.copied.done
        assert torch.equal(batch, source)
        assert pending.copied.done

    @on(*EVERY_DEVICE)
    def test_the_calling_threads_stream_is_restored(self, device):
        """After issue, and after a transform that raises, the calling thread's stream is current again."""
        backend = device.backend
        stream = device.new_stream(backend)
        with device.use_stream(backend, stream):
            Copier(backend).issue(source := torch.ones(2))
            assert backend.current_stream() == stream
            with pytest.raises(DeviceCopyError):
                Copier(backend, lambda batch: 1 / 0).issue(source)
            assert backend.current_stream() == stream

    @on(*EVERY_DEVICE)
    def test_wait_for_caller(self, device):
        """A transform can use constants that the calling thread's stream is still computing."""
        backend = device.backend
        there = backend.copy(host := torch.full((3,), 2.0))
        device.slow(backend, 50)
        mean = there * 1
        copier = Copier(backend, lambda batch: batch - mean)
        copier.wait_for_caller()
        assert fetch(copier, torch.ones(3)).tolist() == [-1.0, -1.0, -1.0]
        del host

    @on(*EVERY_DEVICE)
    def test_issued_in_a_thread(self, device):
        """One thread issues and another takes, and the side stream is not current in either."""
        backend = device.backend
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


class TestBatches:
    def test_nested(self):
        """Tuples, lists, dicts, named tuples and dataclasses keep their types; other leaves are unchanged."""
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

    @on(*EVERY_DEVICE)
    def test_layout_and_transform(self, device):
        """uint8 images arrive as [N, 3, H, W] in channels_last memory; a transform may return any structure."""
        backend = device.backend
        memory = backend.pin(2 * 4 * 5 * 3)
        memory[:] = np.arange(len(memory))
        copier = Copier(backend, lambda batch: {"x": (batch[0], batch[0].to(torch.bfloat16) / 255), "key": batch[1]})
        leaf = HostTensor(memory.reshape(2, 4, 5, 3), axes=(0, 3, 1, 2), pinned=True)
        found = fetch(copier, (leaf, "key"))
        images, scaled = found["x"]
        expected = torch.from_numpy(memory.reshape(2, 4, 5, 3)).permute(0, 3, 1, 2)
        assert found["key"] == "key"
        assert images.shape == (2, 3, 4, 5)
        for tensor in (images, scaled):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images.cpu(), expected)
        torch.testing.assert_close(scaled.cpu(), expected.to(torch.bfloat16) / 255)

    def test_dtypes_that_numpy_lacks(self):
        """A HostTensor may contain elements of a torch dtype that numpy lacks."""
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
        """A tensor on the device is returned itself, and a transform gets it after it is computed."""
        simulated = SimulatedDevice(latency="late")
        there = simulated.copy(host := torch.arange(3))
        found = fetch(Copier(simulated), [there])
        assert found[0] is there
        copier = Copier(simulated, lambda batch: batch[0] + batch[1])
        assert fetch(copier, [there, torch.ones(3)]).tolist() == [1.0, 2.0, 3.0]
        assert simulated.copies == 2
        del host

    def test_host_tensors_are_dropped_when_copied(self):
        """A host tensor is kept until its copy has run, and dropped with the next batch."""
        simulated = SimulatedDevice(latency="late")
        copier = Copier(simulated)
        source = torch.ones(3)
        alive = weakref.ref(source)
        pending = copier.issue(source)
        del source
        gc.collect()
        assert alive() is not None
        pending.copied.synchronize()
        copier.release()
        assert alive() is None

    def test_host_tensors_outlive_the_copier(self):
        """If a copier is dropped while copies are queued, their host tensors are kept until the copies have run."""
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

    @pytest.mark.parametrize("kept", [False, True])
    def test_tensors_on_the_device_outlive_transform(self, kept):
        """Tensors that are on the device already are kept until ``transform``, on the side stream, has read them."""
        simulated = SimulatedDevice(latency="late")
        copier = Copier(simulated, lambda batch: batch + 1)
        source = simulated.copy(host := torch.ones(3))
        simulated.synchronize()
        pending = copier.issue(source)
        pending.copied.synchronize()
        if not kept:
            del copier
        else:
            copier.release()
        del source
        # Memory of tensors that are gone is poisoned on their stream.
        simulated.record(simulated.current_stream()).synchronize()
        pending.ready.synchronize()
        assert pending.batch.tolist() == [2.0] * 3
        del host

    def test_no_python_code_runs_when_a_copier_is_dropped(self):
        """The collector may drop a copier in any thread; then only C functions run."""
        simulated = SimulatedDevice(latency="late")
        box = [Copier(simulated)]
        box[0].issue(torch.ones(3))
        gc.collect()
        assert python_calls_while_dropping(box) == []


class TestErrors:
    def test_out_of_memory_once(self):
        """A copy for which the device has no memory is tried once more, after the copies before it."""
        simulated = SimulatedDevice(latency="late", allocation_fails_at=3)
        copier = Copier(simulated)
        first, second = copier.issue(torch.ones(3)), copier.issue([torch.ones(2), torch.full((4,), 5.0)])
        assert first.copied.done
        assert [tensor.tolist() for tensor in copier.deliver(second)] == [[1.0] * 2, [5.0] * 4]

    def test_out_of_memory_twice(self):
        """The second failure is an error, whose cause is the device's error."""
        simulated = SimulatedDevice(memory_bytes=4096)
        copier = Copier(simulated)
        with pytest.raises(DeviceCopyError, match=r"shape \[4096\].*OutOfMemoryError.*16384 bytes requested") as caught:
            copier.issue(torch.ones(4096))
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert simulated.copies == 2
        assert copier.deliver(copier.issue(torch.ones(2))).tolist() == [1.0, 1.0]

    def test_a_failing_copy_is_named(self):
        """The error of a failed copy gives device, shape, dtype and cause."""
        copier = Copier(SimulatedDevice(copy_fails_at=2))
        leaf = HostTensor(np.zeros((2, 3), np.float32))
        with pytest.raises(DeviceCopyError, match=r"shape \[2, 3\] and dtype torch.float32 to simulated:0") as caught:
            copier.issue([torch.ones(1), leaf])
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert "copy 2" in str(caught.value)

    @on(*ACCELERATORS)
    def test_a_batch_that_does_not_fit(self, device):
        """It is a failed copy with its shape, and the next one works."""
        nbytes = 1 << 60
        if device.kind == "cuda":
            nbytes = torch.cuda.get_device_properties(device.backend.device).total_memory + 1
        copier = Copier(device.backend)
        with pytest.raises(DeviceCopyError, match=rf"shape \[{nbytes}\] .* to {device.kind}:0 failed"):
            copier.issue(torch.zeros(1, dtype=torch.uint8).expand(nbytes))
        assert fetch(copier, torch.ones(2)).tolist() == [1.0, 1.0]

    def test_a_failing_transform_is_named(self):
        """The error of a failed transform gives dtype and shape of its tensors, and the cause."""
        copier = Copier(SimulatedDevice(), lambda batch: batch["missing"])
        match = r"transform raised KeyError on simulated:0, given torch.uint8 \[4\]"
        with pytest.raises(DeviceCopyError, match=match) as caught:
            copier.issue({"x": torch.zeros(4, dtype=torch.uint8)})
        assert isinstance(caught.value.__cause__, KeyError)

    @pytest.mark.parametrize("copy_fails_at", [2, None])
    def test_host_memory_is_free_when_an_error_is_raised(self, copy_fails_at):
        """When an error is raised, the copies issued before have run."""
        simulated = SimulatedDevice(latency="late", copy_fails_at=copy_fails_at)
        copier = Copier(simulated, functools.partial(int, "no number"))
        with pytest.raises(DeviceCopyError):
            copier.issue([torch.ones(2), torch.ones(2)])
        assert simulated.queued <= 1  # the poisoning of dropped memory

    def test_a_failure_leaks_nothing(self):
        """After an error no device memory is leaked, and the copier works."""
        simulated = SimulatedDevice(copy_fails_at=2)
        copier = Copier(simulated)
        with pytest.raises(DeviceCopyError):
            copier.issue([torch.ones(2), torch.ones(2)])
        gc.collect()
        assert simulated.allocated_bytes == 0
        source = torch.ones(2)
        assert fetch(copier, source).tolist() == [1, 1]


def test_copied_is_complete_before_the_transform():
    """``copied`` is complete when the host memory is free, before a slow transform has run."""
    simulated = SimulatedDevice(latency="late")
    pending = Copier(simulated, lambda batch: (simulated.sleep(), batch)[1]).issue(torch.ones(2))
    assert isinstance(pending, PendingCopy)
    pending.copied.synchronize()
    assert not pending.ready.done
