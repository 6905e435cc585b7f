"""One feeder, several consumers in processes of their own: each sees what the feeder gives, whoever comes and goes."""

from __future__ import annotations

import asyncio
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
from aiofeed import CollateError, Feeder, FeedError, ReadError, StateError, WorkerDiedError
from aiofeed.processes.serving import hub
from aiofeed.processes.serving.published import SlotReaders
from aiofeed.testing import SimulatedDevice
from tests.support import process_parts as parts
from tests.support import serve_parts
from tests.support.serve_parts import Started
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiofeed.feeder.serve import Server


@pytest.fixture(scope="module", autouse=True)
def forking() -> Iterator[None]:
    yield from serve_parts.forking()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "feed.sock")


def numbers(n: int = 40, **options: Any) -> Feeder[Any]:
    options = {"decode": parts.number, "batch_size": 4, "shuffle": True} | options
    return Feeder(parts.Numbers(n), **options)


def joined(server: Server) -> int:
    """How many want to be fed, as the server has heard."""
    assert server._hub is not None
    return server._hub._joining()


def expected(epochs: int, n: int = 40, **options: Any) -> list[list[list[int]]]:
    with numbers(n, **options) as feeder:
        return [[batch.flatten().tolist() for batch in feeder] for _ in range(epochs)]


# --- what is seen -----------------------------------------------------------------------------------------------------


def test_each_consumer_sees_every_batch_in_the_feeders_order(address: str) -> None:
    with (
        numbers() as feeder,
        Started(serve_parts.epochs, address, 3) as first,
        Started(serve_parts.epochs, address, 3) as second,
    ):
        aiofeed.serve(feeder, address, min_consumers=2).run(epochs=3)
        for consumer in (first, second):
            assert [consumer.hear() for _ in range(3)] == list(enumerate(expected(3)))
            assert consumer.hear() == "done"
    assert not os.path.exists(address)


def test_shards_cover_each_batch_exactly_once(address: str) -> None:
    with (
        numbers() as feeder,
        Started(serve_parts.epochs, address, 2) as first,
        Started(serve_parts.epochs, address, 2) as second,
    ):
        aiofeed.serve(feeder, address, mode="shard", min_consumers=2).run(epochs=2)
        for epoch in expected(2):
            shares = [first.hear()[1], second.hear()[1]]
            assert sorted(shares) == sorted([epoch[::2], epoch[1::2]])


def test_batches_arrive_bit_for_bit_as_they_are_structured(address: str) -> None:
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
def test_large_batches_that_are_kept_are_never_overwritten(address: str, engine: str) -> None:
    with numbers(30, decode=parts.large, shuffle=False, engine=engine, batch_size=2) as feeder:
        with aiofeed.serve(feeder, address, lag=1), aiofeed.attach(address) as feed:
            assert len(feed) == 15
            kept = list(feed)
    assert [batch[:, 0].tolist() for batch in kept] == [[2 * at, 2 * at + 1] for at in range(15)]
    assert all((batch == batch[:, :1]).all() for batch in kept)


def test_slots_of_engine_processes_are_handed_on_as_they_are(address: str) -> None:
    """Nothing is copied into memory of the server's own, and slots come back: two engines need few."""
    with numbers(60, decode=parts.large, shuffle=False, engine="process:2", batch_size=2) as feeder:
        with aiofeed.serve(feeder, address, lag=2) as server, aiofeed.attach(address) as feed:
            for _ in range(2):
                for number, batch in enumerate(feed):
                    assert [int(row[0]) for row in batch] == [2 * number % 251, (2 * number + 1) % 251]
                    assert bool((batch == batch[:, :1]).all())
            assert server._hub is not None
            assert not server._hub._lots._memory._unsent
            passable = feeder._config.passable
            assert passable is not None
            assert 0 < len(passable.known()) <= 2 * (feeder._config.limits.prefetch_batches + 5)
        feeder.close()
        assert not passable.known()


def test_what_was_handed_on_outlives_the_process_that_made_it(address: str) -> None:
    """A consumer that is behind still reads what it was sent, bit for bit, then hears of the engine's end."""
    with (
        numbers(400, decode=parts.large, shuffle=False, engine="process", batch_size=2) as feeder,
        aiofeed.serve(feeder, address, lag=4),
        aiofeed.attach(address) as feed,
    ):
        iterator = iter(feed)
        seen = [next(iterator)]
        pipeline: Any = feeder._session.pipeline
        os.kill(pipeline._processes.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            seen += iterator
        assert caught.value.exit_status == -signal.SIGKILL
        for number, batch in enumerate(seen):
            assert [int(row[0]) for row in batch] == [2 * number, 2 * number + 1]
            assert bool((batch == batch[:, :1]).all())
        assert [int(row[0]) for row in next(iter(feed))] == [0, 1]  # from processes that were started anew


def test_batches_above_the_inline_size_are_copied_by_a_thread(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("published", "receiver"):
        monkeypatch.setattr(f"aiofeed.processes.serving.{module}.INLINE_BYTES", 0)
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        assert [[batch.tolist() for batch in feed] for _ in range(2)] == expected(2)


@pytest.mark.parametrize("registers", [True, False])
def test_batches_go_to_a_device_of_the_consumers(address: str, registers: bool) -> None:
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


async def test_async_for_sees_the_same(address: str) -> None:
    with numbers() as feeder, aiofeed.serve(feeder, address):
        async with aiofeed.attach(address) as feed:
            got = [[batch.tolist() async for batch in feed] for _ in range(2)]
            iterator = aiter(feed)
            waiting = asyncio.ensure_future(anext(iterator))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert (await anext(iterator)).tolist() == expected(3)[2][0]
            await iterator.aclose()
    assert got == expected(2)


async def test_async_code_attaches_in_a_thread_and_its_loop_goes_on(address: str) -> None:
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


def test_statistics_count_what_this_consumer_got(address: str) -> None:
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        for _ in range(2):
            list(feed)
        assert (feed.statistics().samples, feed.statistics(total=True).batches) == (40, 20)


def test_state_is_the_servers(address: str) -> None:
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        for refused in (feed.state_dict, lambda: feed.load_state_dict({}), lambda: feed.set_epoch(3)):
            with pytest.raises(StateError, match="the server"):
                refused()


# --- joining and leaving ----------------------------------------------------------------------------------------------


def test_an_iterator_that_took_nothing_leaves_its_epoch_to_the_next(address: str) -> None:
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        first = iter(feed)
        until(lambda: len(first._queue))
        assert [batch.tolist() for batch in feed] == expected(1)[0]
        with pytest.raises(aiofeed.IteratorClosedError):
            next(first)


def test_after_break_a_new_epoch_begins(address: str) -> None:
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        for _ in feed:
            break
        assert [batch.tolist() for batch in feed] == expected(2)[1]
        assert feed.epoch == 1


def test_one_who_comes_in_mid_epoch_begins_with_the_next(address: str) -> None:
    with numbers() as feeder, aiofeed.serve(feeder, address) as server, aiofeed.attach(address) as early:
        iterator = iter(early)
        seen = [next(iterator).tolist()]
        with Started(serve_parts.epochs, address, 1) as late:
            until(lambda: joined(server) == 2)
            seen += [batch.tolist() for batch in iterator]
            second = [batch.tolist() for batch in early]
            assert late.hear() == (1, expected(2)[1])
    assert [seen, second] == expected(2)


def test_one_may_come_in_at_the_next_batch(address: str) -> None:
    with numbers(400) as feeder, aiofeed.serve(feeder, address, join="batch") as server:
        with aiofeed.attach(address) as early:
            iterator = iter(early)
            next(iterator)
            with Started(serve_parts.epochs, address, 1) as late:
                until(lambda: joined(server) == 2)
                for _ in iterator:
                    pass
                epoch, seen = late.hear()
        whole = expected(1, 400)[0]
        assert epoch == 0
        assert 0 < len(seen) < 100
        assert seen == whole[-len(seen) :]


def test_a_closed_consumer_attaches_anew(address: str) -> None:
    with numbers() as feeder, aiofeed.serve(feeder, address) as server:
        feed = aiofeed.attach(address)
        assert len(list(feed)) == 10
        feed.close()
        feed.close()
        until(lambda: not server.consumers)
        assert len(list(feed)) == 10
        assert [each.pid for each in server.consumers] == [os.getpid()]
        feed.close()


# --- failures and ends ------------------------------------------------------------------------------------------------


def test_a_sample_that_fails_is_raised_with_its_name_at_the_for_line(address: str) -> None:
    feeder = Feeder(parts.Numbers(40, bad=(17,)), decode=parts.number, batch_size=4)
    with feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        for _ in range(2):
            seen: list[Any] = []
            with pytest.raises(ReadError, match="number 17") as caught:
                seen.extend(feed)
            assert len(seen) == 4
            assert (caught.value.key, caught.value.index, caught.value.stage) == ("number 17", 17, "read")
            assert isinstance(caught.value.__cause__, OSError)


def test_run_raises_what_the_feeder_raised(address: str) -> None:
    feeder = Feeder(parts.Numbers(40, bad=(17,)), decode=parts.number, batch_size=4)
    with feeder, Started(serve_parts.epochs, address, 1) as consumer:
        with pytest.raises(ReadError, match="number 17"):
            aiofeed.serve(feeder, address).run(epochs=2)
        assert consumer.hear()[0] == "ReadError"


def test_a_server_that_has_ended_says_so_after_its_last_batch(address: str) -> None:
    with numbers() as feeder:
        server = aiofeed.serve(feeder, address).start(epochs=1)
        with aiofeed.attach(address) as feed:
            assert [batch.tolist() for batch in feed] == expected(1)[0]
            with pytest.raises(FeedError, match="has fed all its epochs"):
                next(iter(feed))
        server.close()


def test_a_killed_server_is_heard_of_within_a_second(address: str) -> None:
    with Started(serve_parts.serves, address) as server:
        assert server.hear() == "serving"
        with aiofeed.attach(address) as feed:
            iterator = iter(feed)
            next(iterator)
            server.kill()
            killed = time.monotonic()
            with pytest.raises(WorkerDiedError, match="has died"):
                for _ in iterator:
                    pass
            assert time.monotonic() - killed < 15.0  # a second, where nobody else wants the cores
            with pytest.raises(WorkerDiedError):
                next(iter(feed))
    assert os.path.exists(address)  # what the dead leave behind is replaced
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        assert len(list(feed)) == 10
    assert not os.path.exists(address)


def test_consumers_killed_at_random_moments_hold_up_nobody(tmp_path: Path) -> None:
    serve_parts.kill_consumers_at_random_moments(5, 0, tmp_path)


def test_a_slow_consumer_holds_up_the_others_up_to_the_lag(address: str) -> None:
    with numbers(4000) as feeder, aiofeed.serve(feeder, address, min_consumers=2, lag=3) as server:
        with Started(serve_parts.stops, address) as slow, Started(serve_parts.for_ever, address, 0.0) as quick:
            assert slow.hear() == "stopping"
            count = 0
            while quick.told.poll(0.5):
                quick.hear()
                count += 1
            # The slow one's look-ahead, which gave its slots back, and the ring.
            assert count <= 1 + 2 + 3 + 1
            slow.kill()
            assert [quick.hear() for _ in range(20)]
            until(lambda: len(server.consumers) == 1)


def test_who_ends_an_epoch_stays_and_reads_nothing_is_named_on_both_sides(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aiofeed.processes.serving.hub.HELD_UP_S", 0.2)
    monkeypatch.setattr("aiofeed.processes.serving.epoch_feed.IDLE_S", 0.2)
    with numbers() as feeder, aiofeed.serve(feeder, address, min_consumers=2, lag=2):
        with aiofeed.attach(address) as idle, Started(serve_parts.for_ever, address, 0.0) as busy:
            assert len(list(idle)) == 10
            until(lambda: "holds up the others" in caplog.text and "has ended an epoch" in caplog.text)
            until(lambda: not busy.told.poll(0.5) or not busy.hear())
            lines = [record.getMessage() for record in caplog.records]
            assert len([line for line in lines if f"consumer {os.getpid()} holds up" in line]) == 1
            [consumer_says] = [line for line in lines if "has ended an epoch" in line]
            assert "2 batches wait for it" in consumer_says
            assert len(list(idle)) == 10


def test_a_slow_consumer_is_dropped_where_it_may_be(address: str, tmp_path: Path) -> None:
    begin = tmp_path / "begin"  # read on before, it could find the slow one without its first batch and have it dropped
    with numbers(4000) as feeder, aiofeed.serve(feeder, address, min_consumers=2, lag=8, slow="drop"):
        with (
            Started(serve_parts.stops, address) as slow,
            Started(serve_parts.for_ever, address, 0.0, str(begin)) as quick,
        ):
            assert slow.hear() == "stopping"
            begin.touch()
            assert [quick.hear() for _ in range(100)]
            os.kill(slow.pid, signal.SIGCONT)
            kind, text = slow.hear()
            assert kind == "FeedError"
            assert "it was dropped" in text


# --- the server -------------------------------------------------------------------------------------------------------


def test_a_second_server_is_refused_while_the_first_lives(address: str) -> None:
    with numbers() as feeder, numbers() as other, aiofeed.serve(feeder, address) as server:
        with pytest.raises(FeedError, match=f"listens at .* already .pid {os.getpid()}"):
            aiofeed.serve(other, address).start()
        with pytest.raises(RuntimeError, match="is running already"):
            server.start()
        assert stat.S_IMODE(os.stat(address).st_mode) == 0o600
    assert not os.path.exists(address)


def test_a_file_that_is_no_socket_is_left_alone(address: str) -> None:
    Path(address).write_text("precious")
    with numbers() as feeder, pytest.raises(FeedError, match="no socket"):
        aiofeed.serve(feeder, address).start()
    assert Path(address).read_text() == "precious"


def test_a_name_stands_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_makes_no_sense_is_refused(address: str) -> None:
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


def test_consumers_wait_for_a_server_to_come(address: str) -> None:
    feeder = numbers()
    server = aiofeed.serve(feeder, address)
    timer = threading.Timer(0.2, server.start)
    timer.start()
    with aiofeed.attach(address) as feed:
        assert len(list(feed)) == 10
    timer.join()
    server.close()
    feeder.close()


def test_a_sparse_tensor_is_refused_by_name(address: str) -> None:
    with numbers(collate_fn=lambda samples: torch.eye(2).to_sparse()) as feeder, aiofeed.serve(feeder, address):
        with aiofeed.attach(address) as feed, pytest.raises(CollateError, match=r"sparse_coo.*in the server's script"):
            next(iter(feed))


def test_one_that_lives_and_has_not_gone_when_the_server_closes_may_still_read(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, say; what it was given is not written again by whoever else has that memory."""
    gone: list[bool] = []

    def note(ledger: SlotReaders, reader: object, *, reading: bool = False) -> None:
        gone.append(reading)

    monkeypatch.setattr(hub, "FAREWELL_S", 0.1)
    monkeypatch.setattr(SlotReaders, "gone", note)
    with numbers() as feeder, Started(serve_parts.stops, address) as consumer:
        with aiofeed.serve(feeder, address):
            assert consumer.hear() == "stopping"
        assert gone == [True]
