"""engine="ray" behaves as engine="thread" on a cluster of several raylets, also while actors and nodes end."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aiofeed import (
    DecodeImage,
    DiskCache,
    EncodedCache,
    FailurePolicy,
    Feeder,
    FeedError,
    ImageFolder,
    Stream,
    prefetch,
)
from aiofeed.errors import DecodeError, ReadError, WorkerDiedError
from aiofeed.processes import RayEngine
from tests.support import process_parts as parts
from tests.support import ray_parts
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ray = pytest.importorskip("ray")
pytestmark = ray_parts.MARKS

STORE = ray_parts.STORE


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_parts.local_cluster(2) as cluster:
        yield cluster


def alive() -> list[Any]:
    """The actors of feeders that have not ended."""
    found = ray._private.state.actors().values()
    return [each for each in found if each["ActorClassName"] == "FeedActor" and each["State"] != "DEAD"]


@pytest.fixture(autouse=True)
def nothing_left_behind(cluster: Any) -> Iterator[None]:
    """Fail a test after which an actor or a thread of aiofeed runs. Ray opens descriptors at any time."""
    yield
    until(lambda: (gc.collect(), not alive())[-1])
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("aiofeed-e")])


def numbers(feeder: Feeder[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in feeder]


def test_images_state_and_statistics_equal_those_of_threads(jpeg_folder: Path) -> None:
    """Bit for bit over two epochs; the rest of a third one from a state of threads; each actor has its lanes."""

    def feeder(engine: Any) -> Feeder[Any]:
        decode = DecodeImage(24, crop="random", flip=True)
        return Feeder(ImageFolder(jpeg_folder), decode=decode, batch_size=3, shuffle=True, seed=3, engine=engine)

    with feeder("thread") as threads, feeder(RayEngine(2)) as cluster:
        for epoch in range(3):
            if epoch == 2:
                expected = list(itertools.islice(threads, 5))
                cluster.load_state_dict(json.loads(json.dumps(threads.state_dict())))
                threads.load_state_dict(threads.state_dict())
            expected, got = list(threads), list(cluster)
            assert len(got) == (12 if epoch < 2 else 7)
            for (images, targets), (others, other_targets) in zip(expected, got, strict=True):
                assert torch.equal(images, others)
                assert torch.equal(targets, other_targets)
                assert images.stride() == others.stride()
        found = cluster.statistics(total=True)
        assert (found.samples, found.failures, found.decode_threads) == (93, 0, 2)
        assert min(found.read_s, found.decode_s, found.bytes_read) > 0
        lanes: set[str] = set()
        while not {"actor 1", "actor 2"} <= lanes:  # the second one joins when it is ready
            list(cluster)
            lanes |= {lane.partition(":")[0] for _, lane, *_ in cluster._session.stats.events}


def test_batches_are_views_of_the_object_store_and_may_be_written() -> None:
    """A batch that the user keeps is never overwritten, and writing into it changes no other; many are copied."""
    with Feeder(parts.Numbers(60), decode=parts.large, batch_size=4, engine=RayEngine(1)) as feeder:
        kept = list(feeder)
    kept[3].fill_(255)
    for number, batch in enumerate(kept):
        if number != 3:
            assert [int(row[0]) for row in batch] == [number * 4 + at for at in range(4)]
            assert bool((batch == batch[:, :1]).all())
    address = kept[0].data_ptr()
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [(line, [int(each, 16) for each in line.split()[0].split("-")]) for line in lines]
    [home] = [line for line, (begin, end) in ranges if begin <= address < end]
    assert "plasma" in home


def test_failures_are_replaced_as_by_threads() -> None:
    """The same batches and the same failures, out of order, too."""
    seen = []
    for engine in ("thread", RayEngine(2)):
        with Feeder(
            parts.Numbers(60, bad=(7, 8, 9, 31)),
            decode=parts.fails_at_seventeen,
            batch_size=6,
            shuffle=True,
            seed=4,
            in_order=False,
            on_error=FailurePolicy("replace", max_failures=10),
            engine=engine,
        ) as feeder:
            batches = [sorted(numbers(feeder)) for _ in range(2)]
            failures = sorted(
                (each.key, each.index, each.stage, each.epoch, str(each.error)) for each in feeder.failures
            )
            seen.append((batches, failures, feeder.statistics().failures, feeder.statistics().samples))
    assert seen[0] == seen[1]


def test_errors_are_raised_in_order_and_a_broken_loop_ends_the_actors(tmp_path: Path) -> None:
    """Key, index, stage and cause are those of threads; after ``break`` the source is closed."""
    feeder = Feeder(parts.Numbers(40, bad=(17, 30)), decode=parts.number, batch_size=4, engine=RayEngine(1))
    seen: list[int] = []
    with pytest.raises(ReadError, match=r"cannot read 'number 17'.*input/output error") as caught:
        for batch in feeder:
            seen += batch.tolist()
    assert seen == list(range(16))
    assert (caught.value.key, caught.value.index, caught.value.stage) == ("number 17", 17, "read")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == 5

    notes = tmp_path / "notes"
    for _ in Feeder(parts.LoggedSource(40, str(notes)), decode=parts.number, batch_size=4, engine="ray:1"):
        break
    until(lambda: len(notes.read_text().split("\n")) == 3)
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["open", "close"]


def test_actors_and_nodes_that_end_lose_no_batch(cluster: Any, tmp_path: Path) -> None:
    """Actors are killed, and a node with its actors: batches, state and order are those of an undisturbed epoch."""
    node = cluster.add_node(num_cpus=1, **STORE)
    random.seed(2)
    source, decode = parts.Numbers(900), ray_parts.Logged(str(tmp_path / "notes"))
    with Feeder(source, decode=decode, batch_size=3, shuffle=True, engine=RayEngine(3, retries=20)) as feeder:
        wanted = [plan.indices for plan in feeder._order.schedule().plans(feeder._checkpoint.next_position())]
        iterator = iter(feeder)
        for number, indices in enumerate(wanted):
            if number == 100:
                cluster.remove_node(node)
            elif number in (40, 200):
                os.kill(ray_parts.pid_of(random.choice(ray_parts.actors(feeder))), signal.SIGKILL)
            batch = next(iterator)
            assert batch[:, 0].tolist() == indices
            assert bool((batch == batch[:, :1]).all())
        assert next(iterator, None) is None
        assert feeder.statistics().samples == 900


def test_a_batch_that_kills_its_actors_is_an_error_that_names_actor_and_node() -> None:
    """After the allowed number of further attempts."""
    engine = RayEngine(1, retries=1)
    with Feeder(parts.Numbers(40), decode=ray_parts.kills_at_nine, batch_size=2, engine=engine) as feeder:
        message = r"batch \d+ was given to 2 actors.*actor 1 of 1 \(engine=\"ray\", node [\d.]+ \[\w+\], pid \d+\) died"
        with pytest.raises(WorkerDiedError, match=message):
            list(feeder)


def test_a_late_batch_is_given_to_a_second_actor(tmp_path: Path) -> None:
    """The first result counts; no batch comes twice."""
    gate = tmp_path / "gate"
    source, decode = parts.Numbers(40), ray_parts.Late(30, str(gate))
    with Feeder(source, decode=decode, batch_size=2, engine=RayEngine(2, straggler_factor=2.0)) as feeder:
        iterator = iter(feeder)
        seen = [next(iterator).tolist()]
        until(lambda: len(ray_parts.actors(feeder)) == 2)
        seen += [batch.tolist() for batch in iterator]
        gate.touch()
    assert seen == [[at, at + 1] for at in range(0, 40, 2)]


def test_actors_are_added_while_the_training_waits(cluster: Any) -> None:
    """Up to ``max_actors``; that for which the cluster has no room is pending, and is used on a node that joins. The
    batches are those of any number of actors."""
    nodes: list[Any] = []
    source, engine = parts.Numbers(100_000), RayEngine(1, max_actors=3)
    try:
        with Feeder(source, decode=ray_parts.in_ten_ms, batch_size=4, shuffle=True, engine=engine) as feeder:
            wanted = (plan.indices for plan in feeder._order.schedule().plans(feeder._checkpoint.next_position()))
            iterator, used, counts = iter(feeder), set(), {1}
            while "actor 3" not in used:
                assert next(iterator).tolist() == next(wanted)
                handles = feeder._session.pipeline._pool._workers
                counts.add(len(handles))
                if len(handles) == 3 and not nodes:
                    until(lambda: [each["State"] for each in alive()].count("PENDING_CREATION") == 1)
                    nodes.append(cluster.add_node(num_cpus=1, **STORE))
                used |= {lane.partition(":")[0] for _, lane, *_ in feeder._session.stats.events.copy()}
            assert counts == {1, 2, 3}
            assert len({handle.name.partition("node ")[2].partition(",")[0] for handle in handles}) == 3
    finally:
        for node in nodes:
            cluster.remove_node(node)


def test_copies_to_a_device_are_correct(jpeg_folder: Path) -> None:
    """Batches are copied to pinned memory, and from there to the device."""
    source, decode = ImageFolder(jpeg_folder), DecodeImage(16)
    expected = list(Feeder(source, decode=decode, batch_size=4))
    device = SimulatedDevice(7, latency="late")
    with Feeder(source, decode=decode, batch_size=4, device=device, engine=RayEngine(1)) as feeder:
        for (images, targets), (wanted, labels) in zip(feeder, expected, strict=True):
            assert torch.equal(images.cpu(), wanted)
            assert torch.equal(targets.cpu(), labels)


async def test_async_for_of_a_lambda_and_a_dropped_feeder() -> None:
    """Ray pickles lambdas and local classes; a feeder that is dropped ends its actor."""
    feeder = Feeder(parts.Numbers(12), decode=lambda data: torch.tensor(int(data) + 1), batch_size=4, engine="ray:1")
    iterator = aiter(feeder)
    assert (await anext(iterator)).tolist() == [1, 2, 3, 4]
    del feeder, iterator


@pytest.fixture
def ordered_rows(cluster: Any) -> Iterator[Any]:
    """A Ray dataset of 44 rows in blocks of 11, of which the first takes the longest; it keeps their order."""
    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = True
    yield ray.data.range(44, override_num_blocks=4).map_batches(ray_parts.slow_first_block)
    options.preserve_order = False


def test_batches_of_ray_data_are_prefetched(ordered_rows: Any) -> None:
    """The batches of ``iter_torch_batches``, in order, on the device, for each of two epochs."""
    device = SimulatedDevice(3, latency="late")
    feed = prefetch(ordered_rows.iter_torch_batches(batch_size=11, device="cpu"), device=device)
    for _ in range(2):
        assert [batch["x"].cpu().tolist() for batch in feed] == [list(range(at, at + 22, 2)) for at in range(0, 88, 22)]


def test_rows_of_ray_data_are_a_source(ordered_rows: Any) -> None:
    """In order, in each epoch, with the random numbers of their positions; resumed exactly from every position."""
    options: dict[str, Any] = {"decode": ray_parts.with_random_number, "batch_size": 8}
    with Feeder(Stream(ordered_rows.iter_rows), **options) as feeder:
        whole = [[batch.tolist() for batch in feeder] for _ in feeder.epochs(2)]
        assert [[int(row[0]) for batch in epoch for row in batch] for epoch in whole] == [list(range(0, 88, 2))] * 2
        assert whole[0] != whole[1]
        for position in range(1, 6):
            feeder.set_epoch(0)
            iterator = iter(feeder)
            taken = [next(iterator).tolist() for _ in range(position)]
            feeder.load_state_dict(json.loads(json.dumps(feeder.state_dict())))
            assert taken + [batch.tolist() for batch in feeder] == whole[0]


def test_parts_of_ray_data_are_sources_of_ranks(ordered_rows: Any) -> None:
    """Each rank gets its part, the same one in each epoch, and resumes it; together the parts are the dataset."""
    parts_of_ranks = ordered_rows.streaming_split(2, equal=True)

    def feed(rank: int) -> list[list[list[int]]]:
        stream = Stream(parts_of_ranks[rank].iter_rows, sharded=True)
        with Feeder(stream, decode=ray_parts.number_of, batch_size=4, shard=(rank, 2)) as feeder:
            epochs = [numbers(feeder)]
            iterator = iter(feeder)
            taken = [next(iterator).tolist() for _ in range(2)]
            feeder.load_state_dict(feeder.state_dict())
            return [*epochs, taken + numbers(feeder)]

    with ThreadPoolExecutor() as threads:
        ranks = list(threads.map(feed, range(2)))
    for whole, resumed in ranks:
        assert whole == resumed
        assert len(whole) == 6
    assert sorted(number for whole, _ in ranks for batch in whole for number in batch) == list(range(0, 88, 2))


def test_an_error_of_ray_data_is_a_read_error(ordered_rows: Any) -> None:
    """Ray's error is its cause; the batches before it are the first of the dataset."""
    seen: list[int] = []
    failing = ordered_rows.map_batches(ray_parts.fails_at_sixty)
    with (
        Feeder(Stream(failing.iter_rows), batch_size=4) as feeder,
        pytest.raises(ReadError, match=r"cannot read 'iter_rows\[\d+\]'") as caught,
    ):
        for batch in feeder:
            seen += batch["x"].tolist()
    assert seen == list(range(0, 2 * len(seen), 2))
    assert len(seen) <= 20  # Ray stops when a task has failed, and may not give all rows before it
    assert "sixty" in str(caught.value.__cause__)


# --- refused ---


def test_a_cluster_that_is_not_there_or_too_small_is_an_error_of_iter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first batch; the message has the address or the number of CPUs, and what to do."""
    with pytest.raises(FeedError, match=r"cpus_per_actor=64.*the largest has 1: pass cpus_per_actor=1"):
        iter(Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine=RayEngine(1, 64)))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("refused")))
    with pytest.raises(FeedError, match=r"no cluster at '192.0.2.9:6379': refused; start one with `ray start --head`"):
        iter(Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine=RayEngine(1, address="192.0.2.9:6379")))


def test_no_room_in_the_cluster_is_an_error_after_the_time_limit() -> None:
    """The message has what an actor reserves and what is free."""
    engine = RayEngine(1, start_timeout_s=0.5, options={"resources": {"decoder": 1}})
    with pytest.raises(
        FeedError, match=r"no actor .* is ready after .*1 CPUs and .*decoder.* of the Ray cluster's 2 CPUs"
    ):
        list(Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine=engine))


def test_another_version_on_a_node_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the node and both versions."""
    monkeypatch.setattr("aiofeed.workers.ray.actor_handle.versions", lambda: {"aiofeed": "9.9"})
    with pytest.raises(
        FeedError, match=r"node [\d.]+ has aiofeed .*, and the trainer has aiofeed 9.9: install the same"
    ):
        list(Feeder(parts.Numbers(4), decode=parts.number, batch_size=2, engine="ray:1"))


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (parts.Unopenable(4), ConnectionError, "no route"),
        (
            ray_parts.Unloadable(4),
            FeedError,
            r"on node .* could not start: ImportError: no module named 'secret'.*runtime_env",
        ),
    ],
)
def test_an_actor_that_cannot_start_is_an_error(source: Any, kind: Any, message: str) -> None:
    """Its source cannot be loaded or opened; the source's own error is raised."""
    with pytest.raises(kind, match=message):
        list(Feeder(source, decode=parts.number, batch_size=2, engine="ray:1"))


# --- long ---


@pytest.mark.timeout(1200)
def test_a_hundred_kills_lose_no_batch(cluster: Any, tmp_path: Path) -> None:
    """Actors at random, and every tenth time a node: nothing is lost, doubled or wrong."""
    random.seed(int(os.environ.get("AIOFEED_SEED", "1")))
    kills = 0
    node = cluster.add_node(num_cpus=1, **STORE)
    decode = ray_parts.Logged(str(tmp_path / "notes"))
    engine = RayEngine(3, retries=50)
    with Feeder(parts.Numbers(600), decode=decode, batch_size=3, shuffle=True, engine=engine) as feeder:
        while kills < 100:
            wanted = [plan.indices for plan in feeder._order.schedule().plans(feeder._checkpoint.next_position())]
            iterator = iter(feeder)
            for indices in wanted:
                ready = ray_parts.actors(feeder)
                if ready and random.random() < 0.05:
                    kills += 1
                    if kills % 10 == 0:
                        cluster.remove_node(node)
                        node = cluster.add_node(num_cpus=1, **STORE)
                    else:
                        with contextlib.suppress(ProcessLookupError):  # it has ended with its node meanwhile
                            os.kill(ray_parts.pid_of(random.choice(ready)), signal.SIGKILL)
                assert next(iterator)[:, 0].tolist() == indices
            assert next(iterator, None) is None
            assert feeder.statistics().samples == 600
    cluster.remove_node(node)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"decode": parts.random_numbers, "seed": 5}, None),
        ({"decode": parts.number, "collate_fn": parts.collate_structure}, None),
        ({"decode": parts.growing, "batch_size": 1, "shuffle": True}, None),
        ({"decode": parts.number, "in_order": False, "shuffle": "keyed"}, None),
        ({"decode": parts.fails_at_seventeen, "on_error": FailurePolicy("skip", max_failures=5)}, None),
        ({"decode": parts.fails_at_seventeen}, DecodeError),
        ({"decode": parts.number, "shard": (1, 2), "drop_last": True}, None),
    ],
)
def test_equality_with_threads(options: dict[str, Any], error: Any) -> None:
    """Every kind of batch and of failure, over two epochs."""
    from tests.workers.test_parent_engine import assert_same

    seen = []
    for engine in ("thread", RayEngine(2)):
        with Feeder(parts.Numbers(41), engine=engine, **{"batch_size": 4, **options}) as feeder:
            batches: list[Any] = []
            for _ in range(2):
                with pytest.raises(error) if error else contextlib.nullcontext() as caught:
                    for batch in feeder:
                        batches.append(batch)  # noqa: PERF402 - those before the error count
                if error:
                    batches.append((str(caught.value), type(caught.value.__cause__).__name__))
            if options.get("in_order") is False:
                batches.sort(key=lambda batch: batch.tolist())
            seen.append([*batches, [str(each.error) for each in feeder.failures]])
    assert_same(*seen)


@pytest.mark.parametrize("cache", [DiskCache, lambda path: EncodedCache(path, 1 << 20)])
def test_caches_are_filled_and_used_by_actors(cache: Any, tmp_path: Path) -> None:
    """Two epochs of two actors that share a file."""
    options = {"decode": parts.number, "batch_size": 4, "engine": RayEngine(2), "cache": cache(tmp_path / "cache")}
    with Feeder(parts.Numbers(24), **options) as feeder:
        for _ in range(2):
            assert numbers(feeder) == [list(range(at, at + 4)) for at in range(0, 24, 4)]


def test_a_state_of_every_position_is_resumed_and_epochs_are_read_ahead() -> None:
    """The rest of the epoch is the same from every position; ``epochs`` gives those of threads."""
    options: dict[str, Any] = {"decode": parts.number, "batch_size": 4, "shuffle": True}
    with (
        Feeder(parts.Numbers(22), **options) as threads,
        Feeder(parts.Numbers(22), engine="ray:1", **options) as actors,
    ):
        assert [numbers(actors) for _ in actors.epochs(3)] == [numbers(threads) for _ in threads.epochs(3)]
        threads.set_epoch(3)
        whole = numbers(threads)
        for position in range(7):
            actors.set_epoch(3)
            iterator = iter(actors)
            taken = [next(iterator).tolist() for _ in range(min(position, 6))]
            actors.load_state_dict(actors.state_dict())
            assert taken + (numbers(actors) if position < 6 else []) == whole


def test_an_actor_reuses_its_memory() -> None:
    """Slots are written again after Ray has copied them: batches of 4 MiB, 200 of them."""
    with Feeder(parts.Numbers(800), decode=parts.large, batch_size=4, engine="ray:1") as feeder:
        for _ in feeder:
            [actor] = ray_parts.actors(feeder)
        mapped = Path(f"/proc/{ray_parts.pid_of(actor)}/maps").read_text().count("memfd:aiofeed")
    assert 1 <= mapped <= 30


def test_a_fork_keeps_the_batch_that_its_parent_drops() -> None:
    """Ray does not use its memory again."""
    with Feeder(parts.Numbers(80), decode=parts.large, batch_size=4, engine="ray:1") as feeder:
        iterator = iter(feeder)
        batch = next(iterator)
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(write)
            os.read(read, 1)  # until the parent has taken all batches
            rows = batch.numpy()  # torch's threads are not in this process
            os._exit(0 if rows[:, 0].tolist() == [0, 1, 2, 3] and bool((rows == rows[:, :1]).all()) else 3)
        os.close(read)
        del batch
        assert sum(1 for _ in iterator) == 19
        os.close(write)
        assert os.waitpid(pid, 0)[1] == 0


# Last: in a process that has shut Ray 2.60 down with calls in flight, new actors of any kind may end at once.
def test_the_end_of_rays_connection_is_an_error(cluster: Any) -> None:
    """The message says what to do, and the feeder ends."""
    with Feeder(parts.Numbers(8000), decode=parts.number, batch_size=4, engine="ray:1") as feeder:
        iterator = iter(feeder)
        next(iterator)
        ray.shutdown()
        try:
            with pytest.raises(FeedError, match=r"ray.shutdown\(\) was called"):
                list(iterator)
        finally:
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
