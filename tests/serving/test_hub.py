"""One feeder, several consumers in other processes: each gets the feeder's batches while others come and go."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiofeed
from aiofeed import Feeder, FeedError
from aiofeed.errors import CollateError, ReadError, StateError, WorkerDiedError
from aiofeed.processes import share
from aiofeed.serving import hub
from aiofeed.serving.published import BatchPublisher
from tests.support import process_parts as parts
from tests.support import serve_parts
from tests.support.interrupts import Interrupt
from tests.support.serve_parts import Started
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import until

if TYPE_CHECKING:
    from aiofeed.serving.serve import Server


pytestmark = pytest.mark.usefixtures("forking")


def numbers(n: int = 40, **options: Any) -> Feeder[Any]:
    options = {"decode": parts.number, "batch_size": 4, "shuffle": True} | options
    return Feeder(parts.Numbers(n), **options)


def subscribed(server: Server) -> int:
    """How many consumers have subscribed."""
    assert server._hub is not None
    return server._hub._subscribed()


def expected(epochs: int, n: int = 40, **options: Any) -> list[list[list[int]]]:
    with numbers(n, **options) as feeder:
        return [[batch.flatten().tolist() for batch in feeder] for _ in range(epochs)]


# --- batches -----------------------------------------------------------------------------------------------------


def test_each_consumer_gets_every_batch_in_order(address: str) -> None:
    """In the feeder's order, over several epochs; the socket is removed at the end."""
    with (
        numbers() as feeder,
        Started(serve_parts.epochs, address, 3) as first,
        Started(serve_parts.epochs, address, 3) as second,
    ):
        aiofeed.serve(feeder, address, min_consumers=2).run(epochs=3)
        for consumer in (first, second):
            assert [consumer.receive() for _ in range(3)] == list(enumerate(expected(3)))
            assert consumer.receive() == "done"
    assert not os.path.exists(address)


def test_shards_cover_each_batch_exactly_once(address: str) -> None:
    """With mode="shard" two consumers take turns."""
    with (
        numbers() as feeder,
        Started(serve_parts.epochs, address, 2) as first,
        Started(serve_parts.epochs, address, 2) as second,
    ):
        aiofeed.serve(feeder, address, mode="shard", min_consumers=2).run(epochs=2)
        for epoch in expected(2):
            shares = [first.receive()[1], second.receive()[1]]
            assert sorted(shares) == sorted([epoch[::2], epoch[1::2]])


def test_batches_keep_their_structure_and_every_bit(address: str) -> None:
    """Types, dtypes and memory orders."""
    options = {"collate_fn": parts.collate_structure, "shuffle": False}
    with numbers(8, **options) as feeder, aiofeed.serve(numbers(8, **options), address):
        with aiofeed.attach(address) as feed:
            for got, want in zip(feed, feeder, strict=True):
                assert torch.equal(got["pair"].right, want["pair"].right)
                assert type(got["pair"]) is type(want["pair"])
                assert got["plain"] == want["plain"]
                assert torch.equal(got["last"], want["last"])
                assert got["last"].stride() == want["last"].stride()
                assert torch.equal(got["mirrored"], want["mirrored"])


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_kept_batches_are_never_overwritten(address: str, engine: str) -> None:
    """Each batch that a consumer keeps has its own memory, even if the ring has one slot."""
    with numbers(30, decode=parts.large, shuffle=False, engine=engine, batch_size=2) as feeder:
        with aiofeed.serve(feeder, address, lag=1), aiofeed.attach(address) as feed:
            assert len(feed) == 15
            kept = list(feed)
    assert [batch[:, 0].tolist() for batch in kept] == [[2 * at, 2 * at + 1] for at in range(15)]
    assert all((batch == batch[:, :1]).all() for batch in kept)


def test_batches_in_the_ring_outlive_the_worker_that_made_them(address: str) -> None:
    """A consumer that is behind gets them unchanged, then the error of the worker; the next epoch has new workers."""
    with (
        numbers(400, decode=parts.large, shuffle=False, engine="process", batch_size=2) as feeder,
        aiofeed.serve(feeder, address, lag=4),
        aiofeed.attach(address) as feed,
    ):
        iterator = iter(feed)
        seen = [next(iterator)]
        os.kill(parts.worker_pids(feeder)[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            seen += iterator
        assert caught.value.exit_status == -signal.SIGKILL
        for number, batch in enumerate(seen):
            assert [int(row[0]) for row in batch] == [2 * number, 2 * number + 1]
            assert bool((batch == batch[:, :1]).all())
        assert [int(row[0]) for row in next(iter(feed))] == [0, 1]  # from new workers


def test_large_batches_are_copied_in_a_thread(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above INLINE_BYTES, by the server and by the consumer."""
    monkeypatch.setattr("aiofeed.serving.published.INLINE_BYTES", 0)
    monkeypatch.setattr("aiofeed.serving.subscription.INLINE_BYTES", 0)
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        assert [[batch.tolist() for batch in feed] for _ in range(2)] == expected(2)


@pytest.mark.parametrize("registers", [True, False])
def test_batches_go_to_the_consumers_device(address: str, registers: bool) -> None:
    """From the ring if the device registers its memory, else through pinned memory of the consumer."""
    device = SimulatedDevice()
    if registers:
        device.register = device.unregister = lambda memory: None  # type: ignore[attr-defined]
    with numbers() as feeder, aiofeed.serve(feeder, address):
        with aiofeed.attach(address, device=device, transform=lambda batch: batch * 2) as feed:
            got = [[(batch.cpu() // 2).tolist() for batch in feed] for _ in range(2)]
            iterator = iter(feed)
            next(iterator)
            del iterator
            assert len(list(feed)) == 10
    assert got == expected(2)


async def test_async_for_gives_the_same_batches(address: str) -> None:
    """A cancelled `anext` loses none."""
    with numbers() as feeder, aiofeed.serve(feeder, address):
        async with aiofeed.attach(address) as feed:
            got = [[batch.tolist() async for batch in feed] for _ in range(2)]
            iterator = aiter(feed)
            waiting = asyncio.ensure_future(anext(iterator))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            # On a busy machine the batch may have arrived before the cancellation.
            first = await anext(iterator) if waiting.cancelled() else waiting.result()
            assert first.tolist() == expected(3)[2][0]
            await iterator.aclose()
    assert got == expected(2)


async def test_attaching_in_a_thread_does_not_block_the_event_loop(address: str) -> None:
    """`await asyncio.to_thread(aiofeed.attach, address)` waits for the server."""
    feeder = numbers()
    server = aiofeed.serve(feeder, address)
    attaching = asyncio.create_task(asyncio.to_thread(aiofeed.attach, address))
    turns = 0
    while not attaching.done():
        await asyncio.sleep(0)
        turns += 1
        if turns == 100:
            server.start()
    async with attaching.result() as feed:
        assert [batch.tolist() async for batch in feed] == expected(1)[0]
    assert turns > 100
    await asyncio.to_thread(server.close)
    feeder.close()


def test_statistics_are_those_of_the_consumer(address: str) -> None:
    """Samples of the last epoch, batches of all."""
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        for _ in range(2):
            list(feed)
        assert (feed.statistics().samples, feed.statistics(total=True).batches) == (40, 20)


def test_a_consumer_has_no_state(address: str) -> None:
    """state_dict, load_state_dict and set_epoch refer to the server."""
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        for refused in (feed.state_dict, lambda: feed.load_state_dict({}), lambda: feed.set_epoch(3)):
            with pytest.raises(StateError, match="the server"):
                refused()


# --- joining and leaving ----------------------------------------------------------------------------------------------


def test_an_iterator_without_a_batch_leaves_its_epoch_to_the_next(address: str) -> None:
    """Its batches, which it had received already, go to the next iterator."""
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        first = iter(feed)
        until(lambda: len(first._queue))
        assert [batch.tolist() for batch in feed] == expected(1)[0]
        with pytest.raises(aiofeed.errors.IteratorClosedError):
            next(first)


def test_a_new_epoch_begins_after_break(address: str) -> None:
    """The next iterator gets the next epoch of the server."""
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        for _ in feed:
            break
        assert [batch.tolist() for batch in feed] == expected(2)[1]
        assert feed.epoch == 1


def test_a_late_consumer_starts_with_the_next_epoch(address: str) -> None:
    """With join="epoch"."""
    with numbers() as feeder, aiofeed.serve(feeder, address) as server, aiofeed.attach(address) as early:
        iterator = iter(early)
        seen = [next(iterator).tolist()]
        with Started(serve_parts.epochs, address, 1) as late:
            until(lambda: subscribed(server) == 2)
            seen += [batch.tolist() for batch in iterator]
            second = [batch.tolist() for batch in early]
            assert late.receive() == (1, expected(2)[1])
    assert [seen, second] == expected(2)


def test_a_late_consumer_may_start_with_the_next_batch(address: str) -> None:
    """With join="batch" it gets the rest of the epoch."""
    with numbers(400) as feeder, aiofeed.serve(feeder, address, join="batch") as server:
        with aiofeed.attach(address) as early:
            iterator = iter(early)
            next(iterator)
            with Started(serve_parts.epochs, address, 1) as late:
                until(lambda: subscribed(server) == 2)
                for _ in iterator:
                    pass
                epoch, seen = late.receive()
        whole = expected(1, 400)[0]
        assert epoch == 0
        assert 0 < len(seen) < 100
        assert seen == whole[-len(seen) :]


def test_a_closed_consumer_attaches_again(address: str) -> None:
    """By the next iter(); close is idempotent."""
    with numbers() as feeder, aiofeed.serve(feeder, address) as server:
        feed = aiofeed.attach(address)
        assert len(list(feed)) == 10
        feed.close()
        feed.close()
        until(lambda: not server.consumers)
        assert len(list(feed)) == 10
        assert [each.pid for each in server.consumers] == [os.getpid()]
        feed.close()


def test_a_consumer_closed_by_another_thread_during_iter(address: str) -> None:
    """The iterator is then closed, or `close` came before `iter`, which connects again."""
    closed = 0
    with numbers(4) as feeder, aiofeed.serve(feeder, address):
        for place in range(0, 1000, 9):
            feed = aiofeed.attach(address)
            with Interrupt(place, feed._stop) as meanwhile:
                iterator = iter(feed)
            if not iterator.live:
                with pytest.raises(aiofeed.errors.IteratorClosedError, match="the consumer was closed"):
                    next(iterator)
                closed += 1
                iterator = iter(feed)
            assert len(next(iterator)) == 4
            feed.close()
            if meanwhile.left >= 0:
                break
    assert closed > 3


# --- failures and ends ------------------------------------------------------------------------------------------------


def test_the_error_of_a_sample_is_raised_in_the_consumer(address: str) -> None:
    """With key, index, stage and cause, after the batches before it; the next epoch starts."""
    feeder = Feeder(parts.Numbers(40, bad=(17,)), decode=parts.number, batch_size=4)
    with feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        for _ in range(2):
            seen: list[Any] = []
            with pytest.raises(ReadError, match="number 17") as caught:
                seen.extend(feed)
            assert len(seen) == 4
            assert (caught.value.key, caught.value.index, caught.value.stage) == ("number 17", 17, "read")
            assert isinstance(caught.value.__cause__, OSError)


def test_run_raises_the_error_of_the_feeder(address: str) -> None:
    """The consumer gets it, too."""
    feeder = Feeder(parts.Numbers(40, bad=(17,)), decode=parts.number, batch_size=4)
    with feeder, Started(serve_parts.epochs, address, 1) as consumer:
        with pytest.raises(ReadError, match="number 17"):
            aiofeed.serve(feeder, address).run(epochs=2)
        assert consumer.receive()[0] == "ReadError"


def test_a_server_that_has_served_all_epochs_is_an_error_after_the_last_batch(address: str) -> None:
    """The message says that it has served all its epochs."""
    with numbers() as feeder:
        server = aiofeed.serve(feeder, address).start(epochs=1)
        with aiofeed.attach(address) as feed:
            assert [batch.tolist() for batch in feed] == expected(1)[0]
            with pytest.raises(FeedError, match="has served all its epochs"):
                next(iter(feed))
        server.close()


def test_a_killed_server_is_a_worker_died_error_within_a_second(address: str) -> None:
    """The next server replaces the socket that it leaves behind."""
    with Started(serve_parts.serves, address) as server:
        assert server.receive() == "serving"
        with aiofeed.attach(address) as feed:
            iterator = iter(feed)
            next(iterator)
            server.kill()
            killed = time.monotonic()
            with pytest.raises(WorkerDiedError, match="has died"):
                for _ in iterator:
                    pass
            assert time.monotonic() - killed < 15.0  # a second on a machine that is not busy
            with pytest.raises(WorkerDiedError):
                next(iter(feed))
    assert os.path.exists(address)  # replaced by the next server
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        assert len(list(feed)) == 10
    assert not os.path.exists(address)


def test_killed_consumers_do_not_hold_up_the_others(address: str) -> None:
    """They are killed at random moments; another consumer gets every batch."""
    with numbers(4000, shuffle=False) as feeder:
        seen = serve_parts.kill_consumers(5, 0, address, feeder, serve_parts.endlessly)
    assert [batch[0] for batch in seen] == [4 * (at % 1000) for at in range(len(seen))]
    assert all(batch == list(range(batch[0], batch[0] + 4)) for batch in seen)


def test_a_slow_consumer_holds_up_the_others_after_lag_batches(address: str) -> None:
    """With slow="wait"; when it is killed, the others continue."""
    with numbers(4000) as feeder, aiofeed.serve(feeder, address, min_consumers=2, lag=3) as server:
        with Started(serve_parts.stops, address) as slow, Started(serve_parts.endlessly, address, 0.0) as quick:
            assert slow.receive() == "stopping"
            count = 0
            while quick.pipe.poll(0.5):
                quick.receive()
                count += 1
            # What the slow one has taken ahead, and the ring.
            assert count <= 1 + 2 + 3 + 1
            slow.kill()
            assert [quick.receive() for _ in range(20)]
            until(lambda: len(server.consumers) == 1)


def test_an_idle_consumer_is_named_in_both_logs(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has ended an epoch and neither iterates nor closes; each side logs it once."""
    monkeypatch.setattr("aiofeed.serving.hub.STALLED_S", 0.2)
    monkeypatch.setattr("aiofeed.serving.subscription.IDLE_S", 0.2)
    with numbers() as feeder, aiofeed.serve(feeder, address, min_consumers=2, lag=2):
        with aiofeed.attach(address) as idle, Started(serve_parts.endlessly, address, 0.0) as busy:
            assert len(list(idle)) == 10
            until(lambda: "holds up the others" in caplog.text and "has ended an epoch" in caplog.text)
            until(lambda: not busy.pipe.poll(0.5) or not busy.receive())
            lines = [record.getMessage() for record in caplog.records]
            assert len([line for line in lines if f"consumer {os.getpid()} holds up" in line]) == 1
            [line] = [line for line in lines if "has ended an epoch" in line]
            assert "2 batches wait for it" in line
            assert len(list(idle)) == 10


# --- the server -------------------------------------------------------------------------------------------------------


def test_a_second_server_at_an_address_is_refused(address: str) -> None:
    """While the first lives, which is not affected; the socket is open to this user alone."""
    with numbers() as feeder, numbers() as other, aiofeed.serve(feeder, address) as server:
        with pytest.raises(FeedError, match=f"listens at .* already .pid {os.getpid()}"):
            aiofeed.serve(other, address).start()
        with pytest.raises(RuntimeError, match="is running already"):
            server.start()
        assert stat.S_IMODE(os.stat(address).st_mode) == 0o600
    assert not os.path.exists(address)


@pytest.mark.parametrize("what", ["feeder", "tensors"])
def test_a_folder_that_is_locked_is_an_error(what: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process that may read the folder can lock it; the wait has a limit, and the error names the process."""
    monkeypatch.setattr("aiofeed.ipc.address.LOCK_LIMIT_S", 0.05)
    folder = os.open(os.path.dirname(address), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)
        with numbers() as feeder, pytest.raises(FeedError, match=r"cannot be locked: .*process .* has locked it"):
            aiofeed.serve(feeder, address).start() if what == "feeder" else share({"a": torch.ones(3)}, address)
    finally:
        os.close(folder)
    with numbers() as feeder, aiofeed.serve(feeder, address):
        pass


def test_a_file_that_is_no_socket_is_left_alone(address: str) -> None:
    """The server is refused."""
    Path(address).write_text("precious")
    with numbers() as feeder, pytest.raises(FeedError, match="is not a socket"):
        aiofeed.serve(feeder, address).start()
    assert Path(address).read_text() == "precious"


def test_a_name_is_a_socket_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is open to others is refused."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with numbers() as feeder, aiofeed.serve(feeder, "imagenet") as server:
        assert server.address == str(tmp_path / "aiofeed" / "imagenet.sock")
        assert stat.S_IMODE((tmp_path / "aiofeed").stat().st_mode) == 0o700
        with aiofeed.attach("imagenet") as feed:
            assert len(list(feed)) == 10
    (tmp_path / "aiofeed").chmod(0o755)
    with pytest.raises(FeedError, match="chmod 700"):
        aiofeed.serve(feeder, "imagenet")


def test_wrong_arguments_are_refused(address: str) -> None:
    """By type and value, with what is allowed."""
    with numbers() as feeder:
        for options in ({"mode": "all"}, {"slow": "kill"}, {"join": "now"}, {"lag": 0}, {"min_consumers": 0}):
            with pytest.raises(ValueError, match=next(iter(options))):
                aiofeed.serve(feeder, address, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a name has letters"):
            aiofeed.serve(feeder, "..")
        with pytest.raises(ValueError, match=r"has \d+ bytes, and a socket's path at most 10[37]"):
            aiofeed.serve(feeder, "/" + "a" * 120)
    with pytest.raises(TypeError, match="takes a Feeder"):
        aiofeed.serve([1, 2], address)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device="):
        aiofeed.serve(numbers(device=SimulatedDevice()), address)
    with pytest.raises(ValueError, match="transform="):
        aiofeed.serve(numbers(transform=abs), address)
    with pytest.raises(FeedError, match="no server listens"):
        aiofeed.attach(address, wait_s=0)


def test_attach_waits_for_a_server(address: str) -> None:
    """For `wait_s` at most."""
    feeder = numbers()
    server = aiofeed.serve(feeder, address)
    timer = threading.Timer(0.2, server.start)
    timer.start()
    with aiofeed.attach(address) as feed:
        assert len(list(feed)) == 10
    timer.join()
    server.close()
    feeder.close()


def test_a_batch_that_cannot_be_sent_is_a_collate_error(address: str) -> None:
    """With the type of the value, and what to change in the server's script."""
    with numbers(collate_fn=lambda samples: torch.eye(2).to_sparse()) as feeder, aiofeed.serve(feeder, address):
        with aiofeed.attach(address) as feed, pytest.raises(CollateError, match=r"sparse_coo.*in the server's script"):
            next(iter(feed))


def test_a_live_consumer_may_still_read_after_the_server_has_closed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped one, for example: its slots are not written again."""
    gone: list[bool] = []

    def note(publisher: BatchPublisher, reader: object, *, reading: bool) -> None:
        gone.append(reading)

    monkeypatch.setattr(hub, "CLOSE_S", 0.1)
    monkeypatch.setattr(BatchPublisher, "gone", note)
    with numbers() as feeder, Started(serve_parts.stops, address) as consumer:
        with aiofeed.serve(feeder, address):
            assert consumer.receive() == "stopping"
        assert gone == [True]
