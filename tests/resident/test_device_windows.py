"""A consumer that never synchronises with its device: its device memory is bounded, and nothing hangs."""

import asyncio
import gc
import threading
import time

import pytest
import torch
from torch.utils.data import TensorDataset

import aiofeed
from aiofeed.kernel.core.limits import DEVICE_BATCHES
from aiofeed.kernel.devices.copier import Copier
from aiofeed.kernel.devices.copy_thread import QUEUED_BATCHES, CopyThread
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.queue import BatchQueue, ReadyBatch
from aiofeed.resident import device_windows
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_streams import SimulatedEvent
from tests.support.waiting import until

BOUND = DEVICE_BATCHES + QUEUED_BATCHES
BLOCK = 512  # bytes, the least that the simulated device gives for a batch
LATENCIES = ["late", "random", "early"]
# Batches that a device that runs nothing can return: until its backlog is full, and those copied by then.
UNSYNCHRONISED = QUEUED_BATCHES - 1 + DEVICE_BATCHES


pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small


@pytest.fixture
def stuck(monkeypatch):
    """Make every event of a simulated device incomplete."""
    monkeypatch.setattr(SimulatedEvent, "query", lambda event: False)


class Steps:
    """Counts the batches whose copy is issued and whose step has not run."""

    def __init__(self, device, streams=1):
        self.device = device
        self.streams = [device.current_stream(), *(device.new_stream() for _ in range(streams - 1))]
        self.issued = self.done = self.launched = self.most = 0

    def issue(self):
        """Count a copy; called in the copy thread."""
        self.issued += 1
        self.most = max(self.most, self.issued - self.done)

    def use_stream(self):
        """Make the stream of the next step current; the streams alternate."""
        return self.device.use_stream(self.streams[self.launched % len(self.streams)])

    def launch(self):
        """Queue a slow step on the current stream."""
        self.launched += 1
        self.device.sleep()
        self.device.launch(self._run)

    def _run(self):
        self.done += 1


def feeder_of(batches, device, **options):
    return aiofeed.Feeder(
        TensorDataset(torch.arange(4.0 * batches)), batch_size=4, drop_last=True, device=device, **options
    )


def raises_closed(batches):
    with pytest.raises(aiofeed.errors.IteratorClosedError):
        next(batches)


def copy_threads():
    return [thread for thread in threading.enumerate() if thread.name == "aiofeed-copy"]


def blocks(device):
    return device.reserved_bytes // BLOCK


class TestBound:
    @pytest.mark.parametrize("latency", LATENCIES)
    @pytest.mark.parametrize("static", [False, True])
    @pytest.mark.parametrize("streams", [1, 3])
    def test_feeder(self, latency, static, streams):
        """Over epochs and on one or several streams, the batches in use never exceed the two limits."""
        device = SimulatedDevice(latency=latency)
        steps = Steps(device, streams)

        def transform(batch):
            steps.issue()
            return batch

        with feeder_of(40, device, static_batches=static, transform=transform) as feeder:
            for _ in feeder.epochs(3):
                batches = iter(feeder)
                while True:
                    with steps.use_stream():
                        if next(batches, None) is None:
                            break
                        steps.launch()
        assert steps.launched == 120
        assert QUEUED_BATCHES <= steps.most <= BOUND
        # The memory of one more dropped batch may not be free yet, three on a free-threaded build; static batches have
        # their own.
        assert blocks(device) <= BOUND + 1 + static + 2 * machine.FREE_THREADED

    @pytest.mark.parametrize("latency", LATENCIES)
    @pytest.mark.parametrize("static", [False, True])
    def test_two_devices(self, latency, static):
        """The limits hold for each device, also if only one has a backlog."""
        devices = [SimulatedDevice(1, latency=latency), SimulatedDevice(2, latency=latency, index=1)]
        both = [Steps(device) for device in devices]
        calls = []

        def transform(part):
            both[len(calls) % 2].issue()
            calls.append(None)
            return part

        with feeder_of(60, devices, static_batches=static, transform=transform) as feeder:
            for number, _ in enumerate(feeder):
                for steps in both:
                    steps.launch()
                if number >= 30:
                    devices[1].synchronize()
        assert [steps.issued for steps in both] == [60, 60]
        assert QUEUED_BATCHES <= both[0].most <= BOUND
        assert both[1].most <= BOUND
        assert max(map(blocks, devices)) <= BOUND + 1 + static + 2 * machine.FREE_THREADED

    @pytest.mark.parametrize("latency", LATENCIES)
    def test_repeated_prefetch(self, latency):
        """In repeated short iterations of ``prefetch``, copies wait for work queued before their iteration."""
        device = SimulatedDevice(latency=latency)
        steps = Steps(device)
        prefetched = aiofeed.prefetch([torch.ones(2), torch.ones(2)], device=device)
        for _ in range(20):
            for _ in prefetched:
                steps.launch()
        assert steps.launched == 40
        assert blocks(device) <= BOUND + 1 + DEVICE_BATCHES

    def test_breaks(self):
        """The limits hold for a feeder whose epochs end by ``break``."""
        device = SimulatedDevice(latency="late")
        steps = Steps(device)
        with feeder_of(8, device) as feeder:
            for _ in range(12):
                for number, _ in enumerate(feeder):
                    steps.launch()
                    if number == 2:
                        break
        assert blocks(device) <= BOUND + 1 + DEVICE_BATCHES

    def test_a_stuck_device(self, stuck):
        """With a device that completes nothing, the limits allow an exact number of batches, and copies stop there."""
        device = SimulatedDevice(latency="late")
        with feeder_of(40, device) as feeder:
            batches = iter(feeder)
            for _ in range(UNSYNCHRONISED):
                next(batches)
            waiting = threading.Thread(target=raises_closed, args=(batches,), daemon=True)
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive()
            assert device.copies == UNSYNCHRONISED
            feeder.close()
            waiting.join(5)
            assert not waiting.is_alive()

    def test_bursts(self, stuck):
        """Batches that may be copied but are not copied yet do not count."""
        device, go_on = SimulatedDevice(latency="late"), threading.Event()
        calls = []

        def transform(batch):
            calls.append(None)
            if len(calls) == 9:
                go_on.wait(10)
            return batch

        limits = aiofeed.Limits(device_batches=8)
        with feeder_of(40, device, limits=limits, transform=transform) as feeder:
            batches = iter(feeder)
            for _ in range(8):
                next(batches)
            go_on.set()
            for _ in range(QUEUED_BATCHES - 1):
                next(batches)

    def test_a_repeated_take(self, stuck):
        """An interrupted take that is repeated makes room once."""
        device = SimulatedDevice(latency="late")
        with feeder_of(40, device) as feeder:
            batches = iter(feeder)
            delivery = feeder._session.delivery
            item = delivery.queue.peek()
            for _ in range(5):
                delivery.take(item)
            next(batches)
            next(batches)
            # The batches that are copied, and those that may be.
            until(lambda: device.copies + delivery._copy_thread._room.qsize() == 2 + DEVICE_BATCHES)


class TestEnds:
    def test_the_end_is_not_waited_for(self, stuck):
        """After its last batch an epoch ends without waiting for the device."""
        with feeder_of(UNSYNCHRONISED, SimulatedDevice(latency="late")) as feeder:
            assert len(list(feeder)) == UNSYNCHRONISED

    def test_close(self, stuck):
        """close() ends the copy thread without waiting for the device."""
        feeder = feeder_of(40, SimulatedDevice(latency="late"))
        batches = iter(feeder)
        for _ in range(UNSYNCHRONISED):
            next(batches)
        feeder.close()
        assert not copy_threads()

    def test_drop(self, stuck):
        """Dropping the iterator ends the copy thread."""
        batches = iter(aiofeed.prefetch((torch.ones(2) for _ in range(40)), device=SimulatedDevice(latency="late")))
        for _ in range(UNSYNCHRONISED):
            next(batches)
        del batches
        gc.collect()
        for thread in copy_threads():
            thread.join(5)
            assert not thread.is_alive()

    @pytest.mark.parametrize("end", ["stop", "drop"])
    def test_thread(self, stuck, end):
        """The copy thread ends at once while it waits for the device."""
        incoming, outgoing, owner = BatchQueue(), BatchQueue(), Steps(SimulatedDevice(latency="late"))
        for number in range(10):
            incoming.put(ReadyBatch(number, 1, torch.ones(1)))
        thread = CopyThread(Copier(owner.device), incoming, outgoing, room=2, issued=lambda item: None)
        thread.watch(owner)
        thread.start()
        for _ in range(UNSYNCHRONISED):
            thread.take(outgoing.get())
        assert not thread.join(0.1)
        if end == "stop":
            thread.stop()
        del owner
        assert thread.join(5)

    def test_failed_step(self):
        """A step that fails on the device is raised as a failure of earlier work."""
        device = SimulatedDevice(latency="late")

        def boom():
            raise RuntimeError("an illegal step")

        with feeder_of(40, device) as feeder:
            batches = iter(feeder)
            next(batches)
            device.launch(boom)
            with pytest.raises(aiofeed.errors.DeviceCopyError, match=r"failed in work queued before: .* illegal step"):
                list(batches)


def test_waiting_for_the_device_is_not_a_stall(monkeypatch):
    """Time in which ``next`` waits for the device counts as idle time of the engine, not as a stall."""
    now = free_at = 100.0
    device = SimulatedDevice()

    class Step:
        """An event that is complete 20 ms after the previous one.

        The clock advances with each query while the engine's queue is full, and near the end; otherwise it stands
        still.
        """

        def __init__(self):
            nonlocal free_at
            self.at = free_at = max(free_at, now) + 0.02

        def query(self):
            nonlocal now
            if device.copies > 45 or feeder._session.pipeline._engine._full_since is not None:
                now += 0.001
            return now >= self.at

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(Copier, "last_use_event", lambda copier: Step())
    with feeder_of(60, device) as feeder:
        list(feeder)
    statistics = feeder.statistics()
    assert statistics.wall_s > 60 * 0.02 / 2
    assert statistics.stall_s < statistics.wall_s / 2
    assert statistics.idle_s > statistics.wall_s / 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_waiting_for_the_device_with_resident_data_is_not_a_stall(monkeypatch, asynchronous):
    """Time in which the consumer waits for the device to make a window counts neither as stall nor as copying."""
    free_at = time.perf_counter()
    waited_s = 0.0

    class Used:
        """An event that is complete 100 ms after the previous window; counts the time of waiting for it."""

        def __init__(self, event):
            nonlocal free_at
            self.event = event
            self.at = free_at = max(free_at, time.perf_counter()) + 0.1
            self.polled = None

        def query(self):
            nonlocal waited_s
            now = time.perf_counter()
            if now < self.at:
                self.polled = self.polled or now
                return False
            if self.polled is not None:
                waited_s += self.at - self.polled
                self.polled = None
            return True

    class Device(SimulatedDevice):
        def record(self, stream):
            event = super().record(stream)
            return event if stream is self.side_stream() else Used(event)

        def wait(self, stream, event):
            super().wait(stream, getattr(event, "event", event))

    monkeypatch.setattr(device_windows, "DEVICE_WINDOW_BYTES", 1)  # windows of one batch
    data = aiofeed.Tensors(torch.arange(80.0))

    async def count(feeder):
        return sum([len(numbers) async for [numbers] in feeder])

    with aiofeed.Feeder(data, batch_size=4, device=Device()) as feeder:
        if asynchronous:
            assert asyncio.run(count(feeder)) == 80
        else:
            assert sum(len(numbers) for [numbers] in feeder) == 80
    statistics = feeder.statistics()
    assert waited_s > 0.2
    assert statistics.stall_s < statistics.wall_s - 0.9 * waited_s
    assert statistics.copy_s < statistics.wall_s - 0.9 * waited_s


def test_a_host_that_is_slower_than_its_device_is_a_stall(monkeypatch):
    """If the device has no backlog, the consumer's wait counts as a stall."""

    class Done:
        def query(self):
            return True

    class Slow:
        def __len__(self):
            return 80

        def __getitem__(self, index):
            time.sleep(0.005)
            return torch.tensor(index)

    monkeypatch.setattr(Copier, "last_use_event", lambda copier: Done())
    with aiofeed.Feeder(Slow(), batch_size=4, device=SimulatedDevice()) as feeder:
        list(feeder)
    statistics = feeder.statistics()
    assert statistics.stall_s > statistics.wall_s / 2
    assert statistics.idle_s < statistics.wall_s / 4
