"""``serve`` and ``attach`` in a Ray cluster of three raylets: as on one host, and when processes and nodes end."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import FeedError, WorkerDiedError
from tests.processes.serving.test_hub import (  # noqa: F401 - the tests of one host, with an address of the cluster
    numbers,
    test_a_batch_that_cannot_be_sent_is_a_collate_error,
    test_a_closed_consumer_attaches_again,
    test_a_consumer_has_no_state,
    test_a_late_consumer_may_start_with_the_next_batch,
    test_a_late_consumer_starts_with_the_next_epoch,
    test_a_live_consumer_may_still_read_after_the_server_has_closed,
    test_a_new_epoch_begins_after_break,
    test_a_server_that_has_served_all_epochs_is_an_error_after_the_last_batch,
    test_a_slow_consumer_holds_up_the_others_after_lag_batches,
    test_a_slow_consumer_is_dropped,
    test_an_idle_consumer_is_named_in_both_logs,
    test_an_iterator_without_a_batch_leaves_its_epoch_to_the_next,
    test_async_for_gives_the_same_batches,
    test_attach_waits_for_a_server,
    test_attaching_in_a_thread_does_not_block_the_event_loop,
    test_batches_go_to_the_consumers_device,
    test_batches_in_the_ring_outlive_the_worker_that_made_them,
    test_batches_keep_their_structure_and_every_bit,
    test_each_consumer_gets_every_batch_in_order,
    test_kept_batches_are_never_overwritten,
    test_killed_consumers_do_not_hold_up_the_others,
    test_large_batches_are_copied_in_a_thread,
    test_run_raises_the_error_of_the_feeder,
    test_shards_cover_each_batch_exactly_once,
    test_statistics_are_those_of_the_consumer,
    test_the_error_of_a_sample_is_raised_in_the_consumer,
)
from tests.support import process_parts as parts
from tests.support import ray_parts, ring_parts, serve_parts
from tests.support.late_device import LateDevice
from tests.support.serve_parts import Started
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

ray = pytest.importorskip("ray")
pytestmark = ray_parts.MARKS

NAMES = (f"ray:test-{number}" for number in itertools.count())


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """The cluster, and a fork server whose processes find it."""
    with ray_parts.local_cluster(3) as cluster:
        yield from forking(cluster)


def forking(cluster: Any) -> Iterator[Any]:
    processes = serve_parts.forking()
    next(processes)
    yield cluster
    next(processes, None)


@pytest.fixture
def address() -> str:
    return next(NAMES)


def mailboxes() -> list[Any]:
    """The mailboxes that have not ended."""
    found = ray._private.state.actors().values()
    return [each for each in found if each["ActorClassName"] == "Mailbox" and each["State"] != "DEAD"]


@pytest.fixture(autouse=True)
def nothing_left_behind(cluster: Any) -> Iterator[None]:
    """Fail a test after which a mailbox or a thread of aiofeed runs."""
    yield
    until(lambda: (gc.collect(), not mailboxes())[-1])
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("aiofeed-e")])


class Trainer:
    """A consumer in an actor. Its feed stays attached between calls."""

    def __init__(self, address: str) -> None:
        self.feed = aiofeed.attach(address, wait_s=60.0)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def epochs(self, count: int) -> list[list[list[int]]]:
        return [[batch.flatten().tolist() for batch in self.feed] for _ in range(count)]

    def begin(self) -> int:
        self.iterator = iter(self.feed)
        return len(next(self.iterator))

    def sums(self, batches: int) -> list[float]:
        """Sums of so many batches, over as many epochs as it takes."""
        endless = itertools.chain.from_iterable(itertools.repeat(self.feed))
        return [float(batch.sum()) for batch in itertools.islice(endless, batches)]


class Host:
    """A server in an actor."""

    def __init__(self, address: str) -> None:
        self.server = aiofeed.serve(numbers(4000), address).start()

    def pid(self) -> int:
        return os.getpid()


def actor(kind: type, address: str, node: int) -> Any:
    return ray.remote(kind).options(num_cpus=0, resources={f"node {node}": 1}).remote(address)


def large(data: bytes) -> Any:
    return np.full(1 << 18, int(data) % 256, np.uint8)


def stored_bytes(what: str = "object_store_bytes_used") -> int:
    """Bytes in the object stores of all nodes. Ray removes copies on other nodes once a second."""
    from ray._private.internal_api import node_stats

    used = 0
    for node in ray.nodes():
        if node["Alive"]:
            stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False)
            used += getattr(stats.store_stats, what)
    return used


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1 << 18])
@pytest.mark.parametrize("mode", ["broadcast", "shard"])
def test_consumers_on_three_nodes_get_the_batches_of_the_feeder(address: str, mode: Any, size: int) -> None:
    """Over two epochs, in both modes, with batches in messages and in the object store."""
    decode = parts.number if size == 1 else large
    with numbers(decode=decode) as feeder, numbers(decode=decode) as alone:
        wanted = [[batch.flatten().tolist()[:: max(1, size // 4)] for batch in alone] for _ in range(2)]
        server = aiofeed.serve(feeder, address, mode=mode, min_consumers=3)
        server.start(epochs=2)
        trainers = [actor(Trainer, address, node) for node in range(3)]
        assert len(set(ray.get([each.node.remote() for each in trainers]))) == 3
        seen = ray.get([each.epochs.remote(2) for each in trainers])
        for epoch in range(2):
            shares = [[batch[:: max(1, size // 4)] for batch in each[epoch]] for each in seen]
            if mode == "broadcast":
                assert shares == [wanted[epoch]] * 3
            else:
                assert sorted(shares) == sorted(wanted[epoch][at::3] for at in range(3))
        for each in trainers:
            ray.kill(each)
        server.close()


def test_a_batch_is_stored_once_and_freed(address: str) -> None:
    """The stores have at most lag + 1 batches at any time, beside copies, and none after 200 batches."""
    before = stored_bytes()
    with numbers(400, decode=large, batch_size=8) as feeder, aiofeed.serve(feeder, address, min_consumers=3, lag=3):
        trainers = [actor(Trainer, address, node) for node in (1, 1, 2)]
        running = [each.sums.remote(200) for each in trainers]
        most = 0
        while len(ray.wait(running, num_returns=3, timeout=0.05)[0]) < 3:
            most = max(most, stored_bytes("object_store_bytes_primary_copy"))
        sums = ray.get(running)
        assert sums[0] == sums[1] == sums[2]
        assert 0 < most <= (3 + 1) * 8 * ((1 << 18) + 4096)
        for each in trainers:
            ray.kill(each)
    until(lambda: stored_bytes() <= before)


def test_break_frees_the_batches_of_a_consumer(address: str) -> None:
    """The store has none while it is attached and does not iterate."""
    with numbers(400, decode=large) as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        for _ in range(5):
            for number, _ in enumerate(feed):
                if number == 3:
                    break
        until(lambda: stored_bytes() == 0)
        assert feed.epoch == 4


def test_a_served_feeder_may_use_a_device(address: str) -> None:
    """Its batches come through host memory to a consumer on the same device; a log line says why."""
    device = LateDevice()
    with ring_parts.feeder(device=device) as feeder, Started(ring_parts.epochs, address, 2, {}) as consumer:
        aiofeed.serve(feeder, address).run(epochs=2)
        assert [consumer.receive() for _ in range(2)] == [(ring_parts.expected(), [])] * 2
        on_device, lines = consumer.receive()
        assert not on_device
        assert any("it is on another host" in line for line in lines)
    device.close()


def test_memory_of_all_dtypes_is_the_same(address: str) -> None:
    """Also a batch that is not contiguous, above and below the size of a message."""

    def collate(samples: list[Any]) -> Any:
        made = {str(dtype): torch.arange(30000).to(dtype) for dtype in (torch.bfloat16, torch.uint8, torch.complex64)}
        return made | {"small": torch.ones(3, dtype=torch.bool), "t": torch.arange(600).reshape(20, 30).t()[::2]}

    for count in (None, 2):  # all of it, and the small ones

        def some(samples: list[Any], count: Any = count) -> Any:
            return dict(list(collate(samples).items())[-count if count else 0 :])

        with numbers(8, collate_fn=some) as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
            wanted = some([])
            for got in feed:
                assert list(got) == list(wanted)
                assert all(got[each].dtype == wanted[each].dtype for each in got)
                assert all(torch.equal(got[each], wanted[each]) for each in got)
        address = next(NAMES)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_killed_server_is_a_worker_died_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next server gets the name, and the same feed attaches to it."""
    monkeypatch.setattr("aiofeed.processes.actors.mailbox._WATCH_S", 0.01)
    with Started(serve_parts.serves, address) as server:
        assert server.receive() == "serving"
        with aiofeed.attach(address) as feed:
            iterator = iter(feed)
            next(iterator)
            server.kill()
            with pytest.raises(WorkerDiedError, match=rf"the server at {address} has died"):
                list(iterator)
            with pytest.raises(WorkerDiedError):
                next(iter(feed))
            feed.close()
            with numbers() as feeder, aiofeed.serve(feeder, address):
                assert len(list(feed)) == 10
                feed.close()


def test_twenty_killed_consumers_rejoin(address: str) -> None:
    """At random moments; another one gets every batch in order."""
    serve_parts.kill_consumers_at_random_moments(20, int(os.environ.get("AIOFEED_SEED", "1")), address, within_s=4.0)


def test_a_killed_node_ends_its_consumers_and_its_servers(cluster: Any, address: str) -> None:
    """The server frees the batches of a consumer on it; a consumer gets the error of a killed server."""
    node = cluster.add_node(num_cpus=1, resources={"node 8": 9}, **ray_parts.STORE)
    other = next(NAMES)
    with numbers(4000, decode=large) as feeder, aiofeed.serve(feeder, address, min_consumers=2, lag=2) as server:
        lost, host = actor(Trainer, address, 8), actor(Host, other, 8)
        ray.get([lost.node.remote(), host.pid.remote()])
        with aiofeed.attach(address) as feed, aiofeed.attach(other) as orphan:
            begun = lost.begin.remote()
            iterator, orphaned = iter(feed), iter(orphan)
            first = [next(iterator), next(orphaned)]
            assert len(first[0]) == len(first[1]) == 4
            ray.get(begun)
            cluster.remove_node(node)
            for _ in range(50):
                next(iterator)
            assert [each.pid for each in server.consumers] == [os.getpid()]
            with pytest.raises(WorkerDiedError, match=rf"the server at {other} has died"):
                list(orphaned)
    # Copies of the dead server's batches are removed when the store is full.
    until(lambda: (gc.collect(), stored_bytes("object_store_bytes_primary_copy") == 0)[-1])


def test_a_mailbox_that_dies_is_an_error_of_its_consumer(address: str) -> None:
    """The server drops the consumer, which attaches again."""
    with numbers(4000) as feeder, aiofeed.serve(feeder, address) as server, aiofeed.attach(address) as feed:
        iterator = iter(feed)
        next(iterator)
        ray.kill(feed._subscription._link._mailbox)
        with pytest.raises(FeedError, match=r"lost the connection .* its actor on this node has died"):
            list(iterator)
        until(lambda: not server.consumers)
        feed.close()
        assert len(next(iter(feed))) == 4


def test_an_invalid_message_closes_the_connection(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of either side; other consumers are not affected."""
    with numbers(4000) as feeder, aiofeed.serve(feeder, address) as server:
        with aiofeed.attach(address) as feed, aiofeed.attach(address) as other:
            iterator = iter(feed)
            next(iterator)
            feed._subscription._link.tell(b"garbage")
            with pytest.raises(WorkerDiedError):
                list(iterator)
            assert "refused a message" in caplog.text
            iterator = iter(other)
            next(iterator)
            ray.get(other._subscription._link._mailbox.put.remote("consumer", [(b"garbage", [])]))
            with pytest.raises(FeedError, match="refused a message of the server"):
                list(iterator)
            until(lambda: not server.consumers)


def shuts_ray_down(address: str, pipe: Connection, role: str) -> None:
    """Call ``ray.shutdown()`` while a feed is attached or served; send the error, and whether Ray runs then."""
    try:
        if role == "attached":
            with aiofeed.attach(address) as feed:
                iterator = iter(feed)
                next(iterator)
                ray.shutdown()
                list(iterator)
        else:
            feeder = numbers(4000)
            server = aiofeed.serve(feeder, address)
            threading.Timer(1.0, ray.shutdown).start()
            server.run()
    except Exception as error:
        pipe.send((type(error).__name__, str(error), ray.is_initialized()))


def test_the_end_of_rays_connection_is_an_error(address: str) -> None:
    """In the consumer and in the server; no new cluster is started."""
    with numbers(4000) as feeder, aiofeed.serve(feeder, address) as server:
        with Started(shuts_ray_down, address, "attached") as consumer:
            kind, text, running = consumer.receive(60.0)
        assert (kind, running) == ("FeedError", False)
        assert "ray.shutdown() was called" in text
        until(lambda: not server.consumers)
    with Started(shuts_ray_down, next(NAMES), "serving") as other:
        kind, text, running = other.receive(60.0)
    assert (kind, running) == ("FeedError", False)
    assert "can serve no more" in text
    assert "ray.shutdown() was called" in text


def test_the_child_of_a_fork_is_refused(address: str) -> None:
    """It has no connection to the cluster."""
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        assert len(list(feed)) == 10
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                iter(feed)
            except FeedError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert b"a forked process has no connection" in os.read(read, 1000)
        os.close(read)
        os.close(write)
        assert len(list(feed)) == 10


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_name_is_used_by_one_server(address: str) -> None:
    """A second one is refused, and does not affect the first; close frees the name at once."""
    with numbers() as feeder, numbers() as other:
        with aiofeed.serve(feeder, address) as server:
            assert server.address == address
            with pytest.raises(
                FeedError, match=rf"a server listens at {address} already \(node [\d.]+, pid {os.getpid()}\)"
            ):
                aiofeed.serve(other, address).start()
            with aiofeed.attach(address) as feed:
                assert len(list(feed)) == 10
        for _ in range(3):
            with aiofeed.serve(other, address), aiofeed.attach(address) as feed:
                assert len(list(feed)) == 10


def test_no_server_is_an_error_after_wait_s(address: str) -> None:
    """The message says how to start one."""
    started = time.monotonic()
    with pytest.raises(
        FeedError, match=rf"no server listens at {address} .*waited 0.2 s.*aiofeed.serve\(feeder, '{address}'\)"
    ):
        aiofeed.attach(address, wait_s=0.2)
    assert time.monotonic() - started < 20.0


def test_other_versions_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of aiofeed, and of the protocol; the message has both."""
    with numbers() as feeder, aiofeed.serve(feeder, address):
        monkeypatch.setattr("aiofeed.processes.actors.serving.versions", lambda: {"aiofeed": "9.9"})
        with pytest.raises(FeedError, match=r"has aiofeed \S+, and this process has aiofeed 9.9: install the same"):
            aiofeed.attach(address)
        monkeypatch.undo()
        monkeypatch.setattr("aiofeed.processes.serving.connect.VERSION", 99)
        with pytest.raises(FeedError, match=r"uses protocol version .* and this process version 99: install the same"):
            aiofeed.attach(address)


def test_too_many_connections_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer gets an error."""
    monkeypatch.setattr("aiofeed.processes.ipc.address.MAX_CONNECTIONS", 1)
    monkeypatch.setattr("aiofeed.processes.serving.connect.ANSWER_S", 0.5)
    with numbers() as feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        with pytest.raises(FeedError, match="did not answer within"):
            aiofeed.attach(address)
        assert len(list(feed)) == 10


def test_no_cluster_is_an_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attach, and of the start of a server."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(ConnectionError("refused")))
    with pytest.raises(FeedError, match=r"in no Ray cluster.*refused; start one with `ray start --head`, and connect"):
        aiofeed.attach(address)
    with pytest.raises(FeedError, match="in no Ray cluster"):
        aiofeed.serve(numbers(), address).start()
    monkeypatch.undo()
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(FeedError, match=f"address='{address}' needs a process on a node of the cluster"):
        aiofeed.attach(address)
