"""The actors of a feeder: started in the cluster, given batches, replaced when they die, and stopped.

A batch whose actor has died is given to another one, up to ``RayEngine.retries`` times. A new actor then takes the
place of the dead one, on any node with room: Ray starts pending actors as nodes join, and its autoscaler counts them as
demand. Samples are the same wherever they are decoded, so a batch may be decoded twice, and the first result counts.

More are added, up to ``RayEngine.max_actors``, by the measured demand. Those that are pending are the only request:
Ray's ``request_resources`` is one setting for the whole cluster, which each call of any program replaces.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from aiofeed.kernel.core.errors import FeedError, WorkerDiedError
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.workers.handle import AssignedBatch
from aiofeed.workers.pool import GRACE_S, WorkerPool
from aiofeed.workers.protocol import BatchFinished, FromWorker
from aiofeed.workers.ray.actor import FeedActor
from aiofeed.workers.ray.actor_handle import ActorHandle
from aiofeed.workers.ray.cluster import ClusterConnection, RayEngine, check_cluster, one_line
from aiofeed.workers.spawn import WorkerConfig

log: logging.Logger = logging.getLogger("aiofeed.processes")

# A start that takes longer is logged.
SLOW_START_S = 10.0
# Late batches are noticed after this many batches, and take at least this long.
_KNOWN_AFTER = 8
_LATE_S = 1.0
# Batches that the user keeps beyond these are copied, because Ray's object store has a fixed size.
_MOST_BORROWED = 8
# A measurement of the demand for actors has at least so many batches and seconds. From this share of waiting on, actors
# are added.
_DEMAND_BATCHES, _DEMAND_S, _DEMAND_SHARE = 16, 1.0, 0.1


class ActorPool(WorkerPool[ActorHandle]):
    """The actors of a feeder.

    Args:
        worker_config: Pickled by this constructor, which also connects to the cluster.
        engine: The options.
    """

    most_borrowed: float = _MOST_BORROWED

    def __init__(self, worker_config: WorkerConfig, engine: RayEngine) -> None:
        super().__init__(worker_config)
        import ray
        from ray import cloudpickle

        check_cluster(engine)
        self._engine = engine
        self._most = engine.max_actors or engine.actors
        self._demand = ActorDemand()
        self._connection = ClusterConnection()
        self._config = ray.put(cloudpickle.dumps(worker_config))
        options = {"num_cpus": engine.cpus_per_actor, "scheduling_strategy": "SPREAD", **engine.options}
        self._actors: Any = ray.remote(FeedActor).options(**options)
        # Batches that no actor can take until one is ready.
        self._waiting: list[AssignedBatch] = []
        # Seconds that the latest batches took from their permit to decode.
        self._seconds: deque[float] = deque(maxlen=64)
        # Actors that died since a batch was finished, the last of them, and since when none is ready.
        self._deaths = 0
        self._last_death = ""
        self._none_ready_since = 0.0
        self._warned = False

    def _start_workers(self) -> None:
        self._none_ready_since = time.monotonic()
        for number in range(self._count):
            self._add(number)

    def _add(self, number: int) -> None:
        actor = self._actors.remote(number)
        self._workers.append(
            ActorHandle(
                number,
                self._count,
                actor,
                self._config,
                connection=self._connection,
                received=self.received,
                lost=self._lost,
            )
        )

    @property
    def more_batches(self) -> int:
        """One more per actor than for processes, to decode while the batch before it is on its way."""
        return 2 * self._count - 1

    def taken(self, stats: EpochStats) -> int:
        """Start more actors if the training waits for batches while all are busy, and none is pending."""
        if self._count == self._most or not all(worker.ready for worker in self._workers):
            self._demand = ActorDemand()
            return 0
        first, wanted = self._count, self._demand.wanted(self._count, stats, busy=self.busy)
        if wanted == first or self._stopping or self._error is not None or not self._connection.alive():
            return 0
        self._count = min(wanted, self._most)
        log.info("the training waits although all actors are busy: %d actors in place of %d", self._count, first)
        for number in range(first, self._count):
            self._reads.append(self._reads[-1])
            self._add(number)
        return 2 * (self._count - first)

    def _dispatch(self, batch: AssignedBatch, workers: Sequence[ActorHandle]) -> None:
        """Give a batch to that of some actors that has the fewest; keep it until one is ready."""
        if ready := [worker for worker in workers if worker.ready]:
            super()._dispatch(batch, ready)
        else:
            self._waiting.append(batch)

    def received(self, worker: ActorHandle, message: FromWorker) -> None:
        """Process a message of an actor."""
        if isinstance(message, BatchFinished):
            self._deaths = 0
            batch = worker.assigned[message.serial]
            if not batch.reply.done():
                self._seconds.append(time.monotonic() - batch.permitted_at)
        super().received(worker, message)

    def _worker_ready(self, worker: ActorHandle) -> None:
        """Give an actor the batches that wait for one. The feeder starts with the first actor."""
        log.info("%s is ready", worker.name)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self._dispatch(batch, self._workers)

    def _lost(self, worker: ActorHandle, error: Exception) -> None:
        """Replace an actor that has died or cannot be reached, and give its batches to others."""
        if self._stopping or self._error is not None:
            return
        if not self._connection.alive():
            self._fail_disconnected()
            return
        self._workers.remove(worker)
        worker.close()
        self._deaths += 1
        self._last_death = f"{worker.name} died: {one_line(error)}"
        batches = [batch for batch in worker.assigned.values() if not batch.reply.done()]
        log.warning("%s; %d batches are given to other actors", self._last_death, len(batches))
        for batch in batches:
            batch.losses += 1
        if (failure := self._failure_after_death(batches)) is not None:
            self._fail(failure)
            return
        self._add(worker.number)
        for batch in batches:
            batch.copies = [(each, serial) for each, serial in batch.copies if each is not worker]
            batch.permitted_at = time.monotonic()
            if not batch.copies:
                self._dispatch(batch, self._workers)

    def _failure_after_death(self, batches: Sequence[AssignedBatch]) -> FeedError | None:
        """Return the error if the actor that had these batches may not be replaced."""
        last, retries = self._last_death, self._engine.retries
        if "ModuleNotFoundError" in last:
            return FeedError(
                f"{last}; every node needs aiofeed, and the same version: install it there, or pass "
                f'RayEngine(options={{"runtime_env": {{"pip": ["aiofeed"]}}}})'
            )
        if lost := next((each for each in batches if each.losses > retries), None):
            number, losses = lost.plan.number, lost.losses
            return WorkerDiedError(f"batch {number} was given to {losses} actors, and all died; the last: {last}")
        if self._deaths > retries + self._count:
            return WorkerDiedError(f"{self._deaths} actors died, and none of them finished a batch; the last: {last}")
        return None

    def _check(self) -> None:
        """Look for late batches, and for actors that do not start."""
        if not self._connection.alive():
            self._fail_disconnected()
            return
        now = time.monotonic()
        ready = [worker for worker in self._workers if worker.ready]
        if ready:
            self._none_ready_since = now
            self._duplicate_late(ready, now)
        elif now - self._none_ready_since > min(SLOW_START_S, self._engine.start_timeout_s):
            self._report_none_ready(now - self._none_ready_since)

    def _fail_disconnected(self) -> None:
        self._fail(FeedError('ray.shutdown() was called while engine="ray" was in use: close the feeder before'))

    def _report_none_ready(self, seconds: float) -> None:
        import ray

        if self._warned and seconds <= self._engine.start_timeout_s:
            return
        free, total = ray.available_resources().get("CPU", 0), ray.cluster_resources().get("CPU", 0)
        wanted = f"{self._engine.cpus_per_actor} CPUs"
        if self._engine.options:
            wanted += f" and {self._engine.options}"
        what = (
            f'no actor of engine="ray" is ready after {seconds:.0f} s: each reserves {wanted}, and {free:g} of the Ray '
            f"cluster's {total:g} CPUs are free"
        )
        if self._last_death:
            what += f"; {self._last_death}"
        if seconds > self._engine.start_timeout_s:
            self._fail(WorkerDiedError(what) if self._last_death else FeedError(what))
        self._warned = True
        log.warning("%s", what)

    def _duplicate_late(self, ready: list[ActorHandle], now: float) -> None:
        """Give batches that take much longer than usual to a second actor."""
        if len(self._seconds) < _KNOWN_AFTER:
            return
        late_s = max(self._engine.straggler_factor * statistics.median(self._seconds), _LATE_S)
        for worker in ready:
            for batch in list(worker.assigned.values()):
                late = batch.may_decode and not batch.reply.done() and now - batch.permitted_at > late_s
                others = [each for each in ready if each is not worker]
                if late and others and len(batch.copies) == 1:
                    log.info("batch %d is late at %s: another actor also gets it", batch.plan.number, worker.name)
                    self._dispatch(batch, others)

    async def aclose(self) -> None:
        """Have the actors close their sources, within ``GRACE_S``, and end them."""
        self._stopping = True
        if self._connection.alive():
            stops = [asyncio.ensure_future(worker.stop()) for worker in self._workers if worker.ready]
            if stops:
                _, running = await asyncio.wait(stops, timeout=GRACE_S)
                if running:
                    log.warning('ending %d actors of engine="ray" that did not stop in %.0f s', len(running), GRACE_S)
                for stop in stops:
                    stop.cancel()
            for worker in self._workers:
                worker.close()
        self._config = self._on_error = None


class ActorDemand:
    """Measures the share of the time for which the training waits for batches while all actors are busy."""

    def __init__(self) -> None:
        self._batches, self._waited_s, self._wall_s = 0, 0.0, 0.0
        self._last: tuple[EpochStats | None, float, float] = None, 0.0, 0.0

    def wanted(self, actors: int, stats: EpochStats, *, busy: bool) -> int:
        """Add a batch that was taken from the epoch with these totals; return how many actors are wanted.

        At most twice as many as there are, and as many until a measurement is complete. The first batch of an epoch
        does not count, because more actors would not make it come sooner.
        """
        (epoch, stall_s, wall_s), self._last = self._last, (stats, stats.stall_s, stats.wall_s)
        if stats is epoch:
            self._batches += 1
            self._waited_s += busy * (self._last[1] - stall_s)
            self._wall_s += self._last[2] - wall_s
        if self._batches < _DEMAND_BATCHES or self._wall_s < _DEMAND_S:
            return actors
        waiting = self._waited_s / self._wall_s
        self._batches, self._waited_s, self._wall_s = 0, 0.0, 0.0
        # With enough actors, the training is faster by 1 / (1 - waiting).
        return math.ceil(actors / (1 - min(waiting, 0.5))) if waiting > _DEMAND_SHARE else actors
