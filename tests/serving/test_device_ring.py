"""Batches in device memory that several processes share, on a simulated device that exposes missing waits."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
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
from aiofeed import FeedError
from aiofeed.errors import WorkerDiedError
from aiofeed.ipc.batch_codec import TensorInBlock
from aiofeed.ipc.cuda_ipc import CudaSharedDevice, HandleError
from aiofeed.ipc.framing import ProtocolError
from aiofeed.ipc.peers import ProcessMonitor
from aiofeed.ipc.schema import ArrayNode, ContainerNode, DeviceMemoryHandle
from aiofeed.serving.connect import server_died
from aiofeed.serving.device_memory import device_reader, device_ring
from aiofeed.serving.device_memory.device_reader import BlockCopier, DeviceReader, UncopiedBatch
from aiofeed.serving.device_memory.device_ring import DeviceBlock, DeviceRing
from aiofeed.serving.messages import BatchAvailable
from tests.support import ring_parts, serve_parts
from tests.support.late_device import LateDevice
from tests.support.ring_parts import expected, feeder, wrong_parts
from tests.support.serve_parts import Started
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="devices are simulated by memfd"),
    pytest.mark.usefixtures("forking"),
]


@pytest.fixture
def device() -> Iterator[LateDevice]:
    made = LateDevice()
    yield made
    made.close()


# --- batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 3])
def test_each_consumer_on_the_device_gets_every_batch(address: str, lag: int) -> None:
    """Correct at once and later, however late the device writes."""
    device = LateDevice(late_s=0.01)  # writing takes longer than the message
    with (
        feeder(device=device) as feeding,
        Started(ring_parts.epochs, address, 2, {}) as first,
        Started(ring_parts.epochs, address, 2, {}, 0.005) as second,
    ):
        server = aiofeed.serve(feeding, address, min_consumers=2, lag=lag)
        server.run(epochs=2)
        for consumer in (first, second):
            assert [consumer.receive() for _ in range(2)] == [(expected(), [])] * 2
            assert consumer.receive() == (True, [])
    device.close()


def test_memory_is_exported_once_to_each_consumer(
    address: str, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are reused, and replaced only if a batch is larger."""
    monkeypatch.setattr(device_ring, "_GRAIN_BYTES", 512)
    with (
        feeder(240, device=device) as feeding,
        Started(ring_parts.epochs, address, 2, {}) as first,
        Started(ring_parts.epochs, address, 2, {}) as second,
    ):
        aiofeed.serve(feeding, address, min_consumers=2, lag=2).run(epochs=2)
        for consumer in (first, second):
            assert [consumer.receive() for _ in range(2)] == [(expected(240), [])] * 2
    # The probe, the ring, and blocks replaced by larger ones, for each of two consumers.
    assert device.exports <= 2 * (1 + 2 + 2 * 2)


def test_shards_go_to_consumers_on_the_device_and_on_the_host(address: str, device: LateDevice) -> None:
    """Each batch to one of them."""
    with (
        feeder(device=device) as feeding,
        Started(ring_parts.epochs, address, 2, {}) as first,
        Started(ring_parts.epochs, address, 2, None) as second,
    ):
        aiofeed.serve(feeding, address, mode="shard", min_consumers=2).run(epochs=2)
        for _ in range(2):
            shares = [first.receive(), second.receive()]
            assert [bad for _, bad in shares] == [[], []]
            assert sorted(seen for seen, _ in shares) == sorted([expected()[::2], expected()[1::2]])
        assert first.receive() == (True, [])
        assert second.receive()[0] is False


def test_consumers_on_different_devices_are_served_together(address: str, device: LateDevice) -> None:
    """On the server's device, on another one, and on the host; a log line says why one uses host memory."""
    with (
        feeder(device=device) as feeding,
        Started(ring_parts.epochs, address, 2, {}) as same,
        Started(ring_parts.epochs, address, 2, {"identity": "another"}) as other,
        Started(ring_parts.epochs, address, 2, None) as host,
    ):
        aiofeed.serve(feeding, address, min_consumers=3, lag=2).run(epochs=2)
        for consumer in (same, other, host):
            assert [consumer.receive() for _ in range(2)] == [(expected(), [])] * 2
        assert same.receive() == (True, [])
        on_device, lines = other.receive()
        assert not on_device
        assert len(lines) == 1
        assert "the server is on device late, and this process on another" in lines[0]
        assert host.receive()[0] is False


@pytest.mark.parametrize("how", ["export", "open"])
def test_batches_come_through_the_host_if_memory_cannot_be_shared(
    address: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be exported, or not opened; each side logs one line with the reason."""
    device = LateDevice(refuses="export" if how == "export" else "")
    theirs = {"refuses": "open"} if how == "open" else {}
    with feeder(device=device) as feeding, Started(ring_parts.epochs, address, 2, theirs) as consumer:
        aiofeed.serve(feeding, address).run(epochs=2)
        assert [consumer.receive() for _ in range(2)] == [(expected(), [])] * 2
        on_device, lines = consumer.receive()
    device.close()
    assert not on_device
    assert len(lines) == 1
    assert "come through host memory" in lines[0]
    assert f"this device {how}s nothing" in lines[0]
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"this device {how}s nothing" in line


def test_a_consumer_in_the_servers_process_gets_host_memory(
    address: str, device: LateDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """A process cannot open its own device memory."""
    other = LateDevice()
    with feeder(device=device) as feeding, aiofeed.serve(feeding, address):
        with aiofeed.attach(address, device=other) as feed:
            assert [wrong_parts(batch) for batch in feed] == [[]] * 12
    other.close()
    assert caplog.text.count("come through host memory") == 1
    assert "cannot open it a second time" in caplog.text


def test_batches_come_through_the_host_if_there_is_no_memory_for_the_probe(
    address: str, device: LateDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Each side logs one line with the reason."""
    copy = device.copy

    def refuse(tensor: torch.Tensor, /) -> torch.Tensor:
        if tensor.nbytes == 64:
            raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation.")
        return copy(tensor)

    device.copy = refuse  # type: ignore[method-assign]
    with feeder(device=device) as feeding, Started(ring_parts.epochs, address, 1, {}) as consumer:
        aiofeed.serve(feeding, address).run(epochs=1)
        assert consumer.receive() == (expected(), [])
        on_device, [line] = consumer.receive()
    assert not on_device
    assert line.endswith("64 bytes cannot be copied to late:0: CUDA out of memory.")
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "64 bytes cannot be copied to late:0: CUDA out of memory.)" in line


def test_batches_come_through_the_host_once_no_block_can_be_allocated(address: str, device: LateDevice) -> None:
    """From that batch on, without an error."""
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
        assert [consumer.receive() for _ in range(2)] == [(expected(), [])] * 2


def test_batches_come_through_the_host_once_a_block_cannot_be_exported(
    address: str, device: LateDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """From that batch on, with one log line."""
    with feeder(device=device) as feeding, Started(ring_parts.epochs, address, 2, {}) as consumer:
        export = device.export

        def refuse_later(memory: torch.Tensor) -> Any:
            if device.exports == 2:
                raise HandleError("no more handles")
            return export(memory)

        device.export = refuse_later  # type: ignore[method-assign]
        aiofeed.serve(feeding, address).run(epochs=2)
        assert [consumer.receive() for _ in range(2)] == [(expected(), [])] * 2
    assert caplog.text.count("gets batches through host memory from now on: no more handles") == 1


def test_a_block_that_cannot_be_opened_is_an_error(address: str, device: LateDevice) -> None:
    """After close() the next epoch comes through the host."""
    with feeder(device=device) as feeding, aiofeed.serve(feeding, address):
        with Started(ring_parts.cannot_open_later, address) as consumer:
            kind, text, batches, on_device = consumer.receive()
            assert kind == "FeedError"
            assert "cannot be opened (this device opens nothing): after close(), iterate again" in text
            assert (batches, on_device) == (12, False)


def test_transforms_of_the_server_and_of_the_consumer_are_applied(address: str, device: LateDevice) -> None:
    """In that order."""

    def plain(samples: list[Any]) -> torch.Tensor:
        return torch.tensor([int(sample) for sample in samples])

    # The simulated device's operators act at once, so these transforms read no tensor.
    with feeder(
        device=device, collate_fn=plain, transform=lambda batch: {"array": batch, "there": "server"}
    ) as feeding:
        with aiofeed.serve(feeding, address), Started(ring_parts.transformed, address, {}) as consumer:
            assert consumer.receive() == [("server", "consumer")] * 12


def test_a_batch_that_cannot_be_sent_is_an_error_with_advice_for_the_server(address: str, device: LateDevice) -> None:
    """On the device and on the host."""

    def impossible(samples: list[Any]) -> Any:
        return {"tensor": torch.zeros(3), "object": object()}

    for on in (device, None):
        with feeder(device=on, collate_fn=impossible) as feeding, aiofeed.serve(feeding, address):
            with Started(ring_parts.epochs, address, 1, {}) as consumer:
                kind, text = consumer.receive()
                assert kind == "CollateError"
                assert "in the server's script" in text
                assert "engine=" not in text


def test_a_feeder_whose_device_cannot_be_shared_is_refused(address: str) -> None:
    """When the server is made."""
    with pytest.raises(ValueError, match="device="):
        aiofeed.serve(feeder(device=SimulatedDevice()), address)
    with pytest.raises(ValueError, match="several devices"):
        aiofeed.serve(feeder(device=["cpu", "cpu"]), address)


# --- missing waits -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "consumer"),
    [
        ({"hasty": True}, {"late_s": 0.02}),
        ({"late_s": 0.02}, {"hasty": True, "late_s": 0.0}),
        ({"mute": True, "late_s": 0.02}, {"late_s": 0.0}),
        ({}, {"mute": True, "late_s": 0.02}),
    ],
    ids=["server does not wait", "consumer does not wait", "server does not record", "consumer does not record"],
)
def test_a_device_that_ignores_an_event_gives_wrong_batches(
    address: str, server: dict[str, Any], consumer: dict[str, Any]
) -> None:
    """This shows that the other tests detect a missing wait."""
    device = LateDevice(**server)
    with feeder(200, device=device) as feeding, aiofeed.serve(feeding, address, lag=1):
        with Started(ring_parts.epochs, address, 1, consumer) as child:
            _, bad = child.receive(40.0)
    device.close()
    assert bad


# --- falling behind, leaving, dying -----------------------------------------------------------------------------------


def test_killed_consumers_do_not_hold_up_the_others(address: str, device: LateDevice) -> None:
    """They are killed at random moments; another one gets every batch."""
    with feeder(400, device=device) as feeding:
        seen = serve_parts.kill_consumers(6, 0, address, feeding, ring_parts.endlessly, {}, lag=2)
    assert [bad for _, bad in seen] == [[]] * len(seen)
    assert [numbers for numbers, _ in seen] == [expected(400)[at % 100] for at in range(len(seen))]


@pytest.mark.parametrize("on_device", [True, False])
def test_a_dropped_consumer_gets_the_batches_sent_to_it_and_then_the_error(
    address: str, device: LateDevice, tmp_path: Path, on_device: bool
) -> None:
    """They are correct, although the server continues: neither blocks nor slots sent to it are written again."""
    # The quick one starts when the slow one has its first batch, or that could be dropped before.
    begin, there = tmp_path / "begin", {} if on_device else None
    with feeder(4000, device=device if on_device else None) as feeding:
        with (
            aiofeed.serve(feeding, address, min_consumers=2, lag=6, slow="drop"),
            Started(ring_parts.stops, address, there) as slow,
            Started(ring_parts.endlessly, address, there, 0.0, str(begin)) as quick,
        ):
            assert slow.receive() == "stopping"
            begin.touch()
            assert [quick.receive()[1] for _ in range(60)] == [[]] * 60
            os.kill(slow.pid, signal.SIGCONT)
            kind, text, bad = slow.receive()
            assert (kind, bad) == ("FeedError", [])
            assert "this process was dropped" in text


def test_consumers_get_all_batches_of_a_server_that_has_served_its_epochs(address: str, device: LateDevice) -> None:
    """Although most of them wait in its device memory when it ends."""
    with Started(ring_parts.serves_epochs, address, {"late_s": 0.01}, 1, 48) as server:
        assert server.receive() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            iterator = iter(feed)
            seen = [next(iterator)]
            seen += iterator
            assert [wrong_parts(batch) for batch in seen] == [[]] * 12
            with pytest.raises(FeedError, match="has served all its epochs"):
                next(iter(feed))
        assert server.receive() == "done"


def test_waiting_batches_are_copied_when_the_server_closes(address: str, device: LateDevice) -> None:
    """Out of its device memory, which ends with its process."""
    with Started(ring_parts.closes_at_signal, address, {"late_s": 0.01}) as server:
        assert server.receive() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            iterator = iter(feed)
            seen = [next(iterator)]
            assert feed._subscription is not None
            until(lambda: len(feed._subscription._in_blocks) >= 4)  # type: ignore[union-attr]
            os.kill(server.pid, signal.SIGUSR1)
            assert server.receive() == "closed"
            server.process.join()  # its device memory is gone
            with pytest.raises(FeedError, match="the server was closed"):
                seen.extend(iterator)
    assert len(seen) >= 4
    assert [wrong_parts(batch) for batch in seen] == [[]] * len(seen)
    assert [batch["array"].tolist() for batch in seen] == expected()[: len(seen)]


def test_a_killed_server_is_an_error_after_correct_batches(address: str, device: LateDevice) -> None:
    """WorkerDiedError."""
    with Started(ring_parts.serves, address, {"late_s": 0.005}, {}) as server:
        assert server.receive() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            iterator = iter(feed)
            seen = [next(iterator) for _ in range(3)]
            server.kill()
            with pytest.raises(WorkerDiedError, match="has died"):
                seen.extend(iterator)
            with pytest.raises(WorkerDiedError, match="has died"):
                next(iter(feed))
    assert [wrong_parts(batch) for batch in seen] == [[]] * len(seen)


def test_a_batch_that_the_server_was_writing_when_it_died_is_not_handed_out(address: str, device: LateDevice) -> None:
    """The consumer gets the error within seconds; the next server works."""
    # After one probe and four tensors per batch, in the middle of the fifth batch.
    with Started(ring_parts.serves, address, {"stalls_at": 1 + 4 * 4 + 3}, {"lag": 3}) as server:
        assert server.receive() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            iterator = iter(feed)
            seen = [next(iterator) for _ in range(4)]
            server.kill()
            with pytest.raises(WorkerDiedError, match="has died"):
                seen.append(next(iterator))
            started = time.monotonic()
        assert time.monotonic() - started < 5.0
    assert [wrong_parts(batch) for batch in seen] == [[]] * 4
    with Started(ring_parts.serves, address, {}, {}) as server:
        assert server.receive() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            assert wrong_parts(next(iter(feed))) == []


class Complete:
    """An event that a driver completes for a process that has died."""

    completes = True

    def query(self) -> bool:
        return True


class Failing:
    """An event of a device that has failed."""

    completes = False

    def query(self) -> bool:
        raise RuntimeError("CUDA error: invalid resource handle")


class CountingLease:
    """A lease that counts how often it was given back."""

    pinned = False

    def __init__(self) -> None:
        self.given_back = 0

    def take(self, nbytes: int) -> Any:
        raise NotImplementedError

    def give_back(self) -> None:
        self.given_back += 1


@contextlib.contextmanager
def reader_of(pid: int, device: LateDevice | None = None) -> Iterator[DeviceReader]:
    """A reader of the device memory of a process."""
    mine, server = device or LateDevice(), ProcessMonitor(pid)
    try:
        yield DeviceReader(mine, mine, server, died=lambda: server_died("there", pid))
    finally:
        server.close()
        mine.close()


def place(ring: DeviceRing, batch: torch.Tensor) -> tuple[Any, DeviceBlock]:
    """Write a batch into a block."""
    placed = ring.place({"x": batch}, "")
    assert placed is not None
    return placed


def published(ring: DeviceRing, device: LateDevice) -> BatchAvailable:
    """The message that gives the consumer "me" a batch in a block."""
    with ring.entered():
        tree, block = place(ring, device.clone(torch.arange(4)))
        ring.export(block, "me")
        number, handle, retired = ring.introduce(block, "me")
    return BatchAvailable(0, 0, 0, ContainerNode("dict", [tree["x"]], ["x"]), 32, [], [], number, handle, retired)


def received(reader: DeviceReader, message: BatchAvailable, lease: CountingLease) -> UncopiedBatch:
    """The batch of a message, as the copy thread gets it."""
    reader.open_blocks(message)
    batch = reader.batch(message)
    return UncopiedBatch(batch, batch.tree(message.batch, lambda node: node), lease)


@pytest.mark.parametrize("event", [Complete(), Failing()])
def test_an_event_of_a_dead_server_is_an_error(event: Any) -> None:
    """A driver completes the events of a dead process, or they fail. It counts as dead before it is reaped."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process, reader_of(process.pid) as reader:
        with contextlib.nullcontext() if event.completes else pytest.raises(RuntimeError, match="invalid resource"):
            reader.wait(event)
        process.kill()
        until(lambda: not reader._server.alive())
        with pytest.raises(WorkerDiedError, match=f"the server at there .pid {process.pid}. has died"):
            reader.wait(event)
        late = ProcessMonitor(process.pid)
        assert not late.alive()
        late.close()


def test_after_the_last_copies_the_server_may_end() -> None:
    """Once ``save`` has returned, every copy is valid, whether the server is alive or not."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process, reader_of(process.pid) as reader:
        reader.save([])
        process.kill()
        until(lambda: not reader._server.alive())
        reader.wait(Complete())


def test_a_copy_that_fails_because_the_server_has_died_raises_that(device: LateDevice) -> None:
    """``WorkerDiedError`` instead of ``DeviceCopyError``."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process, reader_of(process.pid) as reader:
        ring = DeviceRing(device, device, 2)  # its memory ends with it
        batch = received(reader, published(ring, device), CountingLease())
        batch.batch.wait()

        def refuse(source: torch.Tensor, /) -> torch.Tensor:
            process.kill()
            until(lambda: not reader._server.alive())
            raise RuntimeError("CUDA error: invalid resource handle")

        reader.shared.clone = refuse  # type: ignore[method-assign]
        with pytest.raises(WorkerDiedError, match="has died"):
            BlockCopier(reader, None).issue(batch)


def test_memory_stays_open_if_the_device_has_failed(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """``close`` raises nothing, so that the rest is closed, too."""
    left: list[object] = []
    monkeypatch.setattr(device_reader, "_left_open", left)
    mine = LateDevice()
    with reader_of(os.getpid(), mine) as reader:
        ring = DeviceRing(device, device, 2)  # its memory ends with it
        reader.open_blocks(published(ring, device))
        monkeypatch.setattr(mine, "record", lambda stream: Failing())
        reader.close()
    assert len(left) == 1


def test_memory_of_a_failed_device_is_never_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when nothing refers to it, as at interpreter exit. Memory whose copies were only late is closed then."""

    class Memory:
        pass

    memory, other = Memory(), Memory()
    failed, late = weakref.ref(memory), weakref.ref(other)
    left: list[object] = []
    monkeypatch.setattr(device_reader, "_left_open", left)
    device_reader._leave_open([memory], RuntimeError())  # type: ignore[list-item]
    device_reader._leave_open([other], TimeoutError())  # type: ignore[list-item]
    del memory, other
    gc.collect()
    assert late() is not None
    left.clear()
    gc.collect()
    assert late() is None
    assert failed() is not None


def test_a_consumer_is_dropped_although_the_device_has_failed(device: LateDevice) -> None:
    """The block that it may still read is not written again."""
    ring = DeviceRing(device, device, 2)
    published(ring, device)
    [block] = ring._blocks
    block.read["me"] = Failing()  # type: ignore[assignment]
    ring.gone("me", reading=True)
    assert not block.reusable


def test_a_batch_is_handed_out_only_once_its_copy_is_complete(device: LateDevice) -> None:
    """Before that the server may die and the copy be wrong."""
    lease = CountingLease()
    with reader_of(os.getpid(), LateDevice(late_s=0.5)) as reader:
        ring = DeviceRing(device, device, 2)  # its memory ends with it
        batch = received(reader, published(ring, device), lease)
        pending = BlockCopier(reader, None).issue(batch)
        assert pending.copied.query()
        assert pending.batch["x"].tolist() == [0, 1, 2, 3]
        assert lease.given_back == 1


def test_a_dropped_consumer_can_still_open_a_block_that_it_was_sent(device: LateDevice) -> None:
    """Its events and its memory exist as long as the ring."""
    mine = LateDevice()
    ring = DeviceRing(device, device, 2)
    with ring.entered():
        _, block = place(ring, device.clone(torch.arange(4)))
        ring.export(block, "me")
        _, handle, _ = ring.introduce(block, "me")
        assert handle is not None
        device.record(device.stream()).synchronize()
        ring.gone("me", reading=True)
        ring.give_back(block, reusable=False)
        del block
        gc.collect()
        assert mine.open_event(handle.filled).query()
        assert mine.open_event(handle.read).query()
        assert mine.open(handle.handle)[:8].view(torch.int64).tolist() == [0]
    mine.close()


def place_and_read(ring: DeviceRing, device: LateDevice, nbytes: int) -> DeviceBlock:
    """A block to which a batch was written, given back."""
    _, block = place(ring, device.clone(torch.zeros(nbytes, dtype=torch.uint8)))
    ring.give_back(block)
    return block


def test_batches_of_varying_size_soon_fit(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block is as large as its batch; one for a larger batch is a quarter larger. Both are whole grains."""
    monkeypatch.setattr(device_ring, "_GRAIN_BYTES", 1 << 12)
    ring = DeviceRing(device, device, 1)
    with ring.entered():
        assert place_and_read(ring, device, 40_000).memory.nbytes == 10 << 12
        blocks = [place_and_read(ring, device, 40_000 + 500 * step).memory.nbytes for step in range(30)]
    assert blocks == [10 << 12] * 2 + [13 << 12] * 25 + [17 << 12] * 3
    ring.close()


def test_a_block_is_replaced_before_it_was_exported_a_thousand_times(device: LateDevice) -> None:
    """Blocks and probe are exported about a hundred times to consumers that end; a consumer that stays gets each."""
    exported: dict[int, list[torch.Tensor]] = {}
    export = device.export

    def counted(memory: torch.Tensor, /) -> DeviceMemoryHandle:
        exported.setdefault(memory.data_ptr(), []).append(memory)  # referred to, so that no address is used twice
        return export(memory)

    device.export = counted  # type: ignore[method-assign]
    ring = DeviceRing(device, device, 1)
    opened, retired = [], []
    with ring.entered():
        for number in range(250):
            assert ring.probe(number).block is not None
            _, block = place(ring, device.clone(torch.arange(4)))
            for consumer in ("stays", number):
                ring.export(block, consumer)
                _, handle, old = ring.introduce(block, consumer)
                if consumer == "stays":
                    opened += [] if handle is None else [handle.number]
                    retired += old
                block.read[consumer].record(device.stream())
            device.record(device.stream()).synchronize()
            ring.gone(number, reading=False)
            ring.give_back(block)
    assert len(exported) == 6
    assert max(map(len, exported.values())) <= 101
    assert len(opened) == 3
    assert retired == opened[:2]
    ring.close()


def test_handles_of_a_retired_block_that_were_never_sent_are_taken_back(device: LateDevice) -> None:
    """Otherwise the device would keep the memory for a consumer that never opens it."""
    ring = DeviceRing(device, device, 1)
    with ring.entered():
        _, block = place(ring, device.clone(torch.arange(4)))
        ring.export(block, "me")
        unsent = block.unsent["me"]
        ring.give_back(block, reusable=False)
    assert device.forgotten == [unsent.handle]
    ring.gone("me", reading=False)
    assert device.forgotten == [unsent.handle]
    ring.close()


@pytest.mark.parametrize("reading", [False, True])
def test_an_export_that_was_never_sent_is_taken_back(device: LateDevice, reading: bool) -> None:
    """A consumer that was sent a handle may have opened it, and takes its own reference back."""
    ring = DeviceRing(device, device, 2)
    with ring.entered():
        _, block = place(ring, device.clone(torch.arange(4)))
        for consumer in ("sent", "not sent"):
            assert ring.probe(consumer).block is not None
            ring.export(block, consumer)
        _, handle, _ = ring.introduce(block, "sent")
        assert handle is not None
        unsent = block.unsent["not sent"]
        ring.gone("sent", reading=reading)
        assert device.forgotten == []
        ring.gone("not sent", reading=reading)
        assert device.forgotten == [unsent.handle]
        ring.close()


def test_the_socket_exists_only_when_the_device_is_ready(address: str, device: LateDevice) -> None:
    """A process's first use of a GPU takes seconds, and a consumer does not wait that long for an answer."""
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


def test_threads_that_open_memory_and_query_events_have_entered_the_device(address: str) -> None:
    """In other threads, such calls could fail beside a CUDA graph capture, and the capture with them."""
    entered, opened = set(), set()

    class Watched(LateDevice):
        def enter_thread(self) -> None:
            entered.add(threading.get_ident())

        def open(self, handle: DeviceMemoryHandle, /) -> torch.Tensor:
            opened.add(threading.get_ident())
            return super().open(handle)

    device = Watched()
    with Started(ring_parts.serves, address, {}, {}) as server:
        assert server.receive() == "serving"
        with aiofeed.attach(address, device=device) as feed:
            assert wrong_parts(next(iter(feed))) == []
    device.close()
    opened.discard(threading.get_ident())  # the probe is opened in the user's thread
    assert opened
    assert opened <= entered


def test_batches_are_correct_after_epochs_were_left(address: str, device: LateDevice) -> None:
    """At different points, before and after the first batch."""
    with feeder(48, device=device) as feeding, aiofeed.serve(feeding, address, lag=2):
        with Started(ring_parts.leaves, address, 30) as consumer:
            assert consumer.receive(40.0) == (True, [])


# --- invalid messages and memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "node",
    [
        ArrayNode("device", 0, -8, [1], "<u8", None, "int64"),
        ArrayNode("device", 0, 1024, [1], "<u8", None, "int64"),
        ArrayNode("device", 0, 0, [129], "<u8", None, "int64"),
        ArrayNode("device", 0, 4, [1], "<u8", None, "int64"),
        ArrayNode("device", 0, 0, [-1], "<u8", None, "int64"),
        ArrayNode("device", 0, 0, [1 << 40, 1 << 40], "<u8", None, "int64"),
        ArrayNode("device", 0, 0, [2], "<u8", None, "int32"),
        ArrayNode("device", 0, 0, [2], "<u8", None, "save"),
        ArrayNode("device", 0, 0, [2], "<u8"),
        ArrayNode("device", 0, 0, [2], "|O", None, "int64"),
        ArrayNode("device", 0, 0, [2, 2], "<u8", [0, 0], "int64"),
    ],
)
def test_a_tensor_outside_its_block_is_refused(node: ArrayNode) -> None:
    """Or with an invalid dtype or permutation."""
    with pytest.raises(ProtocolError):
        TensorInBlock(node, 1024)


def test_nothing_is_exported_on_rocm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its events are complete for other processes as soon as they are recorded."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(HandleError, match="ROCm"):
        CudaSharedDevice(torch.device("cuda", 0)).export(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_not_exported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set by either of torch's environment variables."""
    monkeypatch.setenv(name, "max_split_size_mb:64, Expandable_Segments : True")
    with pytest.raises(HandleError, match=name):
        CudaSharedDevice(torch.device("cuda", 0)).export(torch.zeros(3, dtype=torch.uint8))
