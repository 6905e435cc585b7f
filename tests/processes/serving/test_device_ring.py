"""A ring in the memory of a device that several processes share, whose missing waits show as wrong data."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiofeed
import aiofeed.testing
from aiofeed import FeedError, WorkerDiedError
from aiofeed.processes.ipc.cuda_ipc import CudaSlots, HandleError
from aiofeed.processes.ipc.framing import ProtocolError
from aiofeed.processes.ipc.peers import ProcessLiveness, died, exiting
from aiofeed.processes.ipc.schema import DeviceMemoryHandle, Leaf, Table
from aiofeed.processes.serving import device_reader as device_blocks
from aiofeed.processes.serving.device_reader import Blocks, Taken
from aiofeed.processes.serving.device_ring import DeviceRing, Place
from aiofeed.processes.serving.protocol import BatchAvailable
from tests.support import ring_parts, serve_parts
from tests.support.late_device import LateDevice
from tests.support.ring_parts import expected, feeder, wrong
from tests.support.serve_parts import Started
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="devices are simulated by memfd")


@pytest.fixture(scope="module", autouse=True)
def forking() -> Iterator[None]:
    yield from serve_parts.forking()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "feed.sock")


@pytest.fixture
def device() -> Iterator[LateDevice]:
    made = LateDevice()
    yield made
    made.close()


# --- what is seen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 3])
def test_each_consumer_on_the_device_sees_every_batch_and_keeps_what_it_keeps(address: str, lag: int) -> None:
    device = LateDevice(late_s=0.01)  # filling takes longer than word of it
    with (
        feeder(device=device) as feeding,
        Started(ring_parts.epochs, address, 2, {}) as first,
        Started(ring_parts.epochs, address, 2, {}, 0.005) as second,
    ):
        server = aiofeed.serve(feeding, address, min_consumers=2, lag=lag)
        server.run(epochs=2)
        for consumer in (first, second):
            assert [consumer.hear() for _ in range(2)] == [(expected(), [])] * 2
            assert consumer.hear() == (True, [])
    device.close()


def test_memory_is_exported_once_to_each_consumer(address: str, device: LateDevice) -> None:
    with (
        feeder(240, device=device) as feeding,
        Started(ring_parts.epochs, address, 2, {}) as first,
        Started(ring_parts.epochs, address, 2, {}) as second,
    ):
        aiofeed.serve(feeding, address, min_consumers=2, lag=2).run(epochs=2)
        for consumer in (first, second):
            assert [consumer.hear() for _ in range(2)] == [(expected(240), [])] * 2
    # The trial's, the ring's, and those that had to be larger, for each of two.
    assert device.exports <= 2 * (1 + 2 + 2 * 2)


def test_shards_go_to_consumers_on_the_device_and_on_the_host(address: str, device: LateDevice) -> None:
    with (
        feeder(device=device) as feeding,
        Started(ring_parts.epochs, address, 2, {}) as first,
        Started(ring_parts.epochs, address, 2, None) as second,
    ):
        aiofeed.serve(feeding, address, mode="shard", min_consumers=2).run(epochs=2)
        for _ in range(2):
            shares = [first.hear(), second.hear()]
            assert [bad for _, bad in shares] == [[], []]
            assert sorted(seen for seen, _ in shares) == sorted([expected()[::2], expected()[1::2]])
        assert first.hear() == (True, [])
        assert second.hear()[0] is False


def test_consumers_on_the_device_on_another_and_on_the_host_are_served_together(
    address: str, device: LateDevice
) -> None:
    with (
        feeder(device=device) as feeding,
        Started(ring_parts.epochs, address, 2, {}) as same,
        Started(ring_parts.epochs, address, 2, {"identity": "another"}) as other,
        Started(ring_parts.epochs, address, 2, None) as host,
    ):
        aiofeed.serve(feeding, address, min_consumers=3, lag=2).run(epochs=2)
        for consumer in (same, other, host):
            assert [consumer.hear() for _ in range(2)] == [(expected(), [])] * 2
        assert same.hear() == (True, [])
        on_device, lines = other.hear()
        assert not on_device
        assert len(lines) == 1
        assert "the server is on device late, and this process on another" in lines[0]
        assert host.hear()[0] is False


@pytest.mark.parametrize("how", ["export", "open"])
def test_where_memory_cannot_be_shared_batches_come_through_the_host(
    address: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = LateDevice(refuses="export" if how == "export" else "")
    theirs = {"refuses": "open"} if how == "open" else {}
    with feeder(device=device) as feeding, Started(ring_parts.epochs, address, 2, theirs) as consumer:
        aiofeed.serve(feeding, address).run(epochs=2)
        assert [consumer.hear() for _ in range(2)] == [(expected(), [])] * 2
        on_device, lines = consumer.hear()
    device.close()
    assert not on_device
    assert len(lines) == 1
    assert "come through host memory" in lines[0]
    assert f"this device {how}s nothing" in lines[0]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert f"this device {how}s nothing" in told[0]


def test_the_servers_own_process_has_batches_through_the_host(
    address: str, device: LateDevice, caplog: pytest.LogCaptureFixture
) -> None:
    other = LateDevice()
    with feeder(device=device) as feeding, aiofeed.serve(feeding, address):
        with aiofeed.attach(address, device=other) as feed:
            assert [wrong(batch) for batch in feed] == [[]] * 12
    other.close()
    assert caplog.text.count("come through host memory") == 1
    assert "cannot open it a second time" in caplog.text


def test_where_there_is_no_memory_for_a_trial_batches_come_through_the_host(
    address: str, device: LateDevice, caplog: pytest.LogCaptureFixture
) -> None:
    copy = device.copy

    def refuse(tensor: torch.Tensor, /) -> torch.Tensor:
        if tensor.nbytes == 64:
            raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation.")
        return copy(tensor)

    device.copy = refuse  # type: ignore[method-assign]
    with feeder(device=device) as feeding, Started(ring_parts.epochs, address, 1, {}) as consumer:
        aiofeed.serve(feeding, address).run(epochs=1)
        assert consumer.hear() == (expected(), [])
        on_device, [line] = consumer.hear()
    assert not on_device
    assert line.endswith("64 bytes cannot be copied to late:0: CUDA out of memory.")
    [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "64 bytes cannot be copied to late:0: CUDA out of memory.)" in told


def test_memory_that_is_refused_in_mid_epoch_is_the_hosts_from_there_on(address: str, device: LateDevice) -> None:
    with (
        feeder(device=device) as feeding,
        Started(ring_parts.epochs, address, 2, {}) as consumer,
    ):
        allocate, count = device.allocate, 0

        def refuse_later(nbytes: int) -> torch.Tensor:
            nonlocal count
            count += 1
            if count > 2:
                raise torch.OutOfMemoryError("no more device memory")
            return allocate(nbytes)

        device.allocate = refuse_later  # type: ignore[method-assign]
        aiofeed.serve(feeding, address).run(epochs=2)
        assert [consumer.hear() for _ in range(2)] == [(expected(), [])] * 2


def test_memory_that_is_not_exported_any_more_is_the_hosts_from_there_on(
    address: str, device: LateDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with feeder(device=device) as feeding, Started(ring_parts.epochs, address, 2, {}) as consumer:
        export = device.export

        def refuse_later(memory: torch.Tensor) -> Any:
            if device.exports == 2:
                raise HandleError("no more handles")
            return export(memory)

        device.export = refuse_later  # type: ignore[method-assign]
        aiofeed.serve(feeding, address).run(epochs=2)
        assert [consumer.hear() for _ in range(2)] == [(expected(), [])] * 2
    assert caplog.text.count("is fed through host memory from here on: no more handles") == 1


def test_memory_that_cannot_be_opened_any_more_is_an_error_and_then_the_hosts(address: str, device: LateDevice) -> None:
    with feeder(device=device) as feeding, aiofeed.serve(feeding, address):
        with Started(ring_parts.opens_no_more, address) as consumer:
            kind, text, batches, on_device = consumer.hear()
            assert kind == "FeedError"
            assert "cannot be opened (this device opens nothing): iterate again" in text
            assert (batches, on_device) == (12, False)


def test_transforms_are_applied_by_the_server_and_by_the_consumer(address: str, device: LateDevice) -> None:
    def plain(samples: list[Any]) -> torch.Tensor:
        return torch.tensor([int(sample) for sample in samples])

    # The fake's operators act at once, so a transform that reads nothing shows that it was called, and where.
    with feeder(device=device, collate_fn=plain, transform=lambda batch: {"array": batch, "said": "served"}) as feeding:
        with aiofeed.serve(feeding, address), Started(ring_parts.said, address, {}) as consumer:
            assert consumer.hear() == [("served", "transformed")] * 12


def test_a_batch_that_cannot_cross_is_an_error_with_advice_for_the_server(address: str, device: LateDevice) -> None:
    def impossible(samples: list[Any]) -> Any:
        return {"tensor": torch.zeros(3), "object": object()}

    for on in (device, None):
        with feeder(device=on, collate_fn=impossible) as feeding, aiofeed.serve(feeding, address):
            with Started(ring_parts.epochs, address, 1, {}) as consumer:
                kind, text = consumer.hear()
                assert kind == "CollateError"
                assert "in the server's script" in text
                assert "engine=" not in text


def test_a_feeder_whose_device_cannot_be_shared_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="device="):
        aiofeed.serve(feeder(device=aiofeed.testing.SimulatedDevice()), address)
    with pytest.raises(ValueError, match="several devices"):
        aiofeed.serve(feeder(device=["cpu", "cpu"]), address)


# --- waits that are left out show -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "consumer"),
    [
        ({"hasty": True}, {"late_s": 0.02}),
        ({"late_s": 0.02}, {"hasty": True, "late_s": 0.0}),
        ({"mute": True, "late_s": 0.02}, {"late_s": 0.0}),
        ({}, {"mute": True, "late_s": 0.02}),
    ],
    ids=["server does not look", "consumer does not look", "server does not record", "consumer does not record"],
)
def test_on_a_device_that_leaves_out_an_event_batches_are_wrong(
    address: str, server: dict[str, Any], consumer: dict[str, Any]
) -> None:
    """So the tests above would see one that is left out."""
    device = LateDevice(**server)
    with feeder(200, device=device) as feeding, aiofeed.serve(feeding, address, lag=1):
        with Started(ring_parts.epochs, address, 1, consumer) as child:
            _, told = child.hear(40.0)
    device.close()
    assert told


# --- falling behind, leaving, dying -----------------------------------------------------------------------------------


def test_consumers_killed_at_random_moments_hold_up_nobody(address: str, device: LateDevice) -> None:
    moments = random.Random(0)
    with (
        feeder(400, device=device) as feeding,
        aiofeed.serve(feeding, address, join="batch", lag=2) as server,
        Started(ring_parts.for_ever, address, {}, 0.001) as witness,
    ):
        seen = [witness.hear()]
        for _ in range(6):
            with Started(ring_parts.for_ever, address, {}, 0.0005) as victim:
                deadline = time.monotonic() + moments.random() ** 2 * 0.5
                while time.monotonic() < deadline:
                    while witness.told.poll():
                        seen.append(witness.hear())
                    time.sleep(0.005)
                victim.kill()
        seen += [witness.hear() for _ in range(20)]
        until(lambda: [each.pid for each in server.consumers] == [witness.pid])
    assert [bad for _, bad in seen] == [[]] * len(seen)
    assert [numbers for numbers, _ in seen] == [expected(400)[at % 100] for at in range(len(seen))]


def test_a_consumer_that_is_dropped_has_what_it_was_given_and_then_the_error(
    address: str, device: LateDevice, tmp_path: Path
) -> None:
    begin = tmp_path / "begin"  # read on before, it could find the slow one without its first batch and have it dropped
    with feeder(4000, device=device) as feeding:
        with aiofeed.serve(feeding, address, min_consumers=2, lag=6, slow="drop"):
            with (
                Started(ring_parts.stops, address, {}) as slow,
                Started(ring_parts.for_ever, address, {}, 0.0, str(begin)) as quick,
            ):
                assert slow.hear() == "stopping"
                begin.touch()
                assert [quick.hear()[1] for _ in range(60)] == [[]] * 60
                os.kill(slow.pid, signal.SIGCONT)
                kind, text, bad = slow.hear()
                assert (kind, bad) == ("FeedError", [])
                assert "it was dropped" in text


def test_a_dropped_consumers_slots_in_host_memory_are_not_written_again(address: str, tmp_path: Path) -> None:
    begin = tmp_path / "begin"
    with feeder(4000) as feeding, aiofeed.serve(feeding, address, min_consumers=2, lag=6, slow="drop"):
        with (
            Started(ring_parts.stops, address, {}) as slow,
            Started(ring_parts.for_ever, address, {}, 0.0, str(begin)) as quick,
        ):
            assert slow.hear() == "stopping"
            begin.touch()
            assert [quick.hear()[1] for _ in range(60)] == [[]] * 60
            os.kill(slow.pid, signal.SIGCONT)
            kind, _, bad = slow.hear()
            assert (kind, bad) == ("FeedError", [])


def test_a_server_that_ends_leaves_its_consumers_what_they_were_sent(address: str, device: LateDevice) -> None:
    with Started(ring_parts.serves_epochs, address, {"late_s": 0.01}, 1, 48) as server:
        assert server.hear() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            iterator = iter(feed)
            seen = [next(iterator)]
            # By the time the last batch is given, most of them wait here; the server ends when all have been read.
            seen += iterator
            assert [wrong(batch) for batch in seen] == [[]] * 12
            with pytest.raises(FeedError, match="has fed all its epochs"):
                next(iter(feed))
        assert server.hear() == "done"


def test_batches_that_wait_in_the_memory_of_a_server_that_ends_are_saved(address: str, device: LateDevice) -> None:
    with Started(ring_parts.closes_when_told, address, {"late_s": 0.01}) as server:
        assert server.hear() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            iterator = iter(feed)
            seen = [next(iterator)]
            assert feed._subscription is not None
            until(lambda: len(feed._subscription.taker._slots) >= 4)  # type: ignore[union-attr]
            os.kill(server.pid, signal.SIGUSR1)
            assert server.hear() == "closed"
            server.process.join()  # its memory is gone with it
            with pytest.raises(FeedError, match="it was closed"):
                seen.extend(iterator)
    assert len(seen) >= 4
    assert [wrong(batch) for batch in seen] == [[]] * len(seen)
    assert [batch["array"].tolist() for batch in seen] == expected()[: len(seen)]


def test_a_killed_server_leaves_right_batches_and_an_error(address: str, device: LateDevice) -> None:
    with Started(ring_parts.serves, address, {"late_s": 0.005}, {}) as server:
        assert server.hear() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            iterator = iter(feed)
            seen = [next(iterator) for _ in range(3)]
            server.kill()
            with pytest.raises(WorkerDiedError, match="has died"):
                seen.extend(iterator)
            with pytest.raises(WorkerDiedError, match="has died"):
                next(iter(feed))
    assert [wrong(batch) for batch in seen] == [[]] * len(seen)


def test_a_batch_that_the_server_died_filling_is_not_handed_out(address: str, device: LateDevice) -> None:
    # A trial and four tensors a batch: in the middle of the fifth.
    with Started(ring_parts.serves, address, {"stalls_at": 1 + 4 * 4 + 3}, {"lag": 3}) as server:
        assert server.hear() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            iterator = iter(feed)
            seen = [next(iterator) for _ in range(4)]
            server.kill()
            with pytest.raises(WorkerDiedError, match="has died"):
                seen.append(next(iterator))
            started = time.monotonic()
        assert time.monotonic() - started < 5.0
    assert [wrong(batch) for batch in seen] == [[]] * 4
    with Started(ring_parts.serves, address, {}, {}) as server:
        assert server.hear() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            assert wrong(next(iter(feed))) == []


class Complete:
    """An event that a driver completes for a process that has died."""

    def query(self) -> bool:
        return True


def test_a_complete_event_proves_nothing_once_its_server_has_died() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        liveness = ProcessLiveness(process.pid, lambda: died("there", process.pid))
        liveness.wait(Complete())
        process.kill()
        until(lambda: not liveness.alive())
        with pytest.raises(WorkerDiedError, match=f"the server at there .pid {process.pid}. has died"):
            liveness.wait(Complete())
        # It is not reaped yet, and counts as ended all the same, for one that only looks now.
        late = ProcessLiveness(process.pid, lambda: died("there", process.pid))
        assert not late.alive()
        late.close()
        liveness.settle()
        liveness.wait(Complete())
        liveness.close()


class Failing:
    """An event of a device that is beyond use."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: invalid resource handle")


def test_an_event_that_fails_because_its_server_has_died_tells_of_that() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        liveness = ProcessLiveness(process.pid, lambda: died("there", process.pid))
        with pytest.raises(RuntimeError, match="invalid resource handle"):
            liveness.wait(Failing())
        process.kill()
        until(lambda: not liveness.alive())
        with pytest.raises(WorkerDiedError, match="has died"):
            liveness.wait(Failing())
        liveness.close()


def test_a_copy_that_fails_because_the_server_has_died_tells_of_that(device: LateDevice) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        liveness = ProcessLiveness(process.pid, lambda: died("there", process.pid))
        mine, ring = LateDevice(), DeviceRing(device, device, 2)
        blocks, given = Blocks(mine, mine, liveness), given_from(ring, device)
        blocks.learn(given)
        waiting = blocks.slot(given)
        taken = Taken(waiting, waiting.tree(given.batch, lambda leaf: leaf), Noted())
        waiting.wait()

        def refuse(source: torch.Tensor, /) -> torch.Tensor:
            process.kill()
            until(lambda: not liveness.alive())
            raise RuntimeError("CUDA error: invalid resource handle")

        mine.clone = refuse  # type: ignore[method-assign]
        with pytest.raises(WorkerDiedError, match="has died"):
            blocks.copier(None).issue(taken)
        liveness.close()
        mine.close()


def test_memory_that_a_device_beyond_use_may_still_read_is_left_open(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is raised where the rest is still to be closed."""
    left: list[object] = []
    monkeypatch.setattr(device_blocks, "_abandoned", left)
    mine, liveness, ring = (
        LateDevice(),
        ProcessLiveness(os.getpid(), lambda: died("here", 0)),
        DeviceRing(device, device, 2),
    )
    blocks = Blocks(mine, mine, liveness)
    blocks.learn(given_from(ring, device))
    monkeypatch.setattr(mine, "record", lambda stream: Failing())
    blocks.close()
    assert len(left) == 1
    liveness.close()
    mine.close()


def test_what_a_device_beyond_use_has_is_left_open_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when all that referred to it is gone, as at the interpreter's end; what was only late is closed then."""

    class Memory:
        pass

    memory, other = Memory(), Memory()
    kept, dropped = weakref.ref(memory), weakref.ref(other)
    left: list[object] = []
    monkeypatch.setattr(device_blocks, "_abandoned", left)
    device_blocks._leave_open([memory], RuntimeError())  # type: ignore[list-item]
    device_blocks._leave_open([other], TimeoutError())  # type: ignore[list-item]
    del memory, other
    gc.collect()
    assert dropped() is not None
    left.clear()
    gc.collect()
    assert dropped() is None
    assert kept() is not None


def test_consumers_are_let_go_though_the_device_is_beyond_use(device: LateDevice) -> None:
    """What one of them may still read is not written again."""
    ring = DeviceRing(device, device, 2)
    given_from(ring, device)
    [block] = ring._blocks
    block.shared["me"].read = Failing()  # type: ignore[assignment]
    ring.gone("me", reading=True)
    assert block.spoiled


class Noted:
    """A lease that notes how often it was given back."""

    pinned = False

    def __init__(self) -> None:
        self.given_back = 0

    def take(self, nbytes: int) -> Any:
        raise NotImplementedError

    def give_back(self) -> None:
        self.given_back += 1


def given_from(ring: DeviceRing, device: LateDevice) -> BatchAvailable:
    """Word of a batch in a slot, as a consumer hears it."""
    with ring.entered():
        placed = ring.place({"x": device.clone(torch.arange(4))}, "")
        assert placed is not None
        tree, slot = placed
        ring.share(slot, "me")
        number, block, retired = ring.introduce(slot, "me")
    return BatchAvailable(0, 0, 0, Table("dict", ["x"], [tree["x"]]), 32, [], [], number, block, retired)


def test_a_batch_goes_on_once_its_copy_is_complete(device: LateDevice) -> None:
    """Until then nobody knows whether the server lived to the end of it."""
    mine, liveness, lease = LateDevice(late_s=0.5), ProcessLiveness(os.getpid(), lambda: died("here", 0)), Noted()
    ring = DeviceRing(device, device, 2)
    given = given_from(ring, device)
    blocks = Blocks(mine, mine, liveness)
    blocks.learn(given)
    waiting = blocks.slot(given)
    in_flight = blocks.copier(None).issue(Taken(waiting, waiting.tree(given.batch, lambda leaf: leaf), lease))
    assert in_flight.copied.query()
    assert in_flight.batch["x"].tolist() == [0, 1, 2, 3]
    assert lease.given_back == 1
    liveness.close()
    mine.close()


def test_what_one_that_was_let_go_has_not_opened_yet_can_still_be_opened(device: LateDevice) -> None:
    mine = LateDevice()
    ring = DeviceRing(device, device, 2)
    with ring.entered():
        placed = ring.place({"x": device.clone(torch.arange(4))}, "")
        assert placed is not None
        ring.share(placed[1], "me")
        _, block, _ = ring.introduce(placed[1], "me")
        assert block is not None
        device.record(device.stream()).synchronize()
        ring.gone("me", reading=True)
        placed[1].discard()
        del placed
        gc.collect()
        assert mine.open_event(block.filled).query()
        assert mine.open_event(block.read).query()
        assert mine.open(block.handle)[:8].view(torch.int64).tolist() == [0]
    mine.close()


@pytest.mark.parametrize("reading", [False, True])
def test_a_block_is_not_kept_for_one_that_went_before_it_was_told_of_it(device: LateDevice, reading: bool) -> None:
    """One that was told may have it open, and takes its own count back."""
    ring = DeviceRing(device, device, 2)
    with ring.entered():
        placed = ring.place({"x": device.clone(torch.arange(4))}, "")
        assert placed is not None
        _, slot = placed
        for consumer in ("told", "not told"):
            assert ring.trial(consumer).block is not None
            ring.share(slot, consumer)
        _, block, _ = ring.introduce(slot, "told")
        assert block is not None
        [untold] = [block.handle for block in [slot.block.shared["not told"].message] if block is not None]
        ring.gone("told", reading=reading)
        assert device.forgotten == []
        ring.gone("not told", reading=reading)
        assert device.forgotten == [untold]
        ring.close()


def test_nobody_can_connect_before_the_device_is_ready(address: str, device: LateDevice) -> None:
    """A process's first use of a GPU takes seconds, and a consumer does not wait for so long for a word."""
    found, stream = [], device.stream

    def first_use() -> Any:
        found.append(os.path.exists(address))
        return stream()

    device.stream = first_use  # type: ignore[method-assign]
    with feeder(device=device) as feeding, aiofeed.serve(feeding, address):
        assert os.path.exists(address)
        with pytest.raises(FeedError, match="a server listens"):
            aiofeed.serve(feeding, address).start()
    assert found == [False]


def test_the_threads_that_open_memory_and_look_at_events_have_entered_the_device(address: str) -> None:
    """Calls of a thread that has not could fail beside a graph that another one captures, and the graph with them."""
    entered, opened = set(), set()

    class Watched(LateDevice):
        def enter_thread(self) -> None:
            entered.add(threading.get_ident())

        def open(self, handle: DeviceMemoryHandle, /) -> torch.Tensor:
            opened.add(threading.get_ident())
            return super().open(handle)

    device = Watched()
    with Started(ring_parts.serves, address, {}, {}) as server:
        assert server.hear() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            assert wrong(next(iter(feed))) == []
    device.close()
    opened.discard(threading.get_ident())  # the trial's, in the user's own thread
    assert opened
    assert opened <= entered


def test_a_server_that_is_about_to_end_counts_as_dead() -> None:
    """A process lets go of its devices before it has ended: only its flags tell then."""
    assert not exiting(os.getpid())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert not exiting(process.pid)
        process.kill()
        until(lambda: exiting(process.pid))


def test_epochs_that_are_left_and_begun_again_are_right(address: str, device: LateDevice) -> None:
    with feeder(48, device=device) as feeding, aiofeed.serve(feeding, address, lag=2):
        with Started(ring_parts.leaves, address, 30) as consumer:
            assert consumer.hear(40.0) == (True, [])


# --- what is no block of a server's -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leaf",
    [
        Leaf("device", 0, -8, [1], "<u8", None, "int64"),
        Leaf("device", 0, 1024, [1], "<u8", None, "int64"),
        Leaf("device", 0, 0, [129], "<u8", None, "int64"),
        Leaf("device", 0, 4, [1], "<u8", None, "int64"),
        Leaf("device", 0, 0, [-1], "<u8", None, "int64"),
        Leaf("device", 0, 0, [1 << 40, 1 << 40], "<u8", None, "int64"),
        Leaf("device", 0, 0, [2], "<u8", None, "int32"),
        Leaf("device", 0, 0, [2], "<u8", None, "save"),
        Leaf("device", 0, 0, [2], "<u8"),
        Leaf("device", 0, 0, [2], "|O", None, "int64"),
        Leaf("device", 0, 0, [2, 2], "<u8", [0, 0], "int64"),
    ],
)
def test_a_place_that_does_not_lie_in_its_block_is_refused(leaf: Leaf) -> None:
    with pytest.raises(ProtocolError):
        Place(leaf, 1024)


def test_handles_of_the_wrong_size_are_refused_before_cuda_sees_them() -> None:
    slots = CudaSlots(torch.device("cuda", 0))
    with pytest.raises(HandleError, match="64 bytes, this one 3"):
        slots.open_event(b"abc")
    for handle in (
        DeviceMemoryHandle("GPU", b"a" * 64, 0, 0, b"", 0, b"", False),
        DeviceMemoryHandle("GPU", b"a" * 64, 1, -1, b"", 0, b"", False),
        DeviceMemoryHandle("GPU", b"a" * 64, 1, 0, b"", 0, b"short", True),
    ):
        with pytest.raises(HandleError):
            slots.open(handle)


def test_where_events_of_other_processes_are_always_complete_nothing_is_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(HandleError, match="ROCm"):
        CudaSlots(torch.device("cuda", 0)).export(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_not_exported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64, Expandable_Segments : True")
    with pytest.raises(HandleError, match=name):
        CudaSlots(torch.device("cuda", 0)).export(torch.zeros(3, dtype=torch.uint8))
