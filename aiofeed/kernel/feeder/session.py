"""Runs the epochs of one feeder: where each epoch starts, and the effect of its end, of a ``break`` and of an error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.faces import BaseSource, BuildsBatches, knows_content
from aiofeed.kernel.core.failures import LOGGED_MOST, FailureLog
from aiofeed.kernel.core.statistics import EpochStats, FeedStatistics
from aiofeed.kernel.core.validation import counted
from aiofeed.kernel.feeder.arguments import FeederConfig
from aiofeed.kernel.feeder.delivery import Delivery
from aiofeed.kernel.feeder.iterator import EpochObserver, EpochStartLock, FeedIterator, clocks, take_end
from aiofeed.kernel.feeder.pipeline import BatchPipeline, InlineBatches, StreamingPipeline
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.queue import FeedFailure, ReadyBatch
from aiofeed.kernel.sampling.epochs import EpochStart, EpochStream
from aiofeed.kernel.sampling.feed_order import FeedOrder
from aiofeed.kernel.sampling.order import BatchLists
from aiofeed.kernel.sampling.progress import Checkpoint, EpochProgress, order_digest
from aiofeed.kernel.sampling.schedule import Position
from aiofeed.kernel.sources.subset import fingerprint_of

BatchT = TypeVar("BatchT")

log: logging.Logger = logging.getLogger("aiofeed.feeder")

# A wait this long, for this share of the time and so long for each batch, is worth a hint.
HINT_AFTER_S, HINT_STALL, HINT_BATCH_S = 3.0, 0.5, 0.001
# Fewer probes do not show how often the GIL is held.
HINT_PROBES = 10


class ProgressBar(Protocol):
    """Shows the progress of an epoch, or of all epochs of ``epochs``."""

    def close(self) -> None:
        """Draw the bar no more. Idempotent; must not raise."""


@dataclass(eq=False, repr=False)
class FeederSession(Generic[BatchT]):
    """Runs the epochs of one feeder, one iterator at a time, on a pipeline that is reused while possible.

    - *Start*: ``begin`` asks the checkpoint for the position (a loaded state, a chosen epoch or the next epoch) and the
      order for the batches from there on. ``EpochProgress`` counts the batches returned; ``state_dict`` is computed
      from it.
    - *End*: the pipeline keeps running for the next epoch. After a complete epoch, and inside ``epochs``, the next
      epoch is read while this one is consumed.
    - *Break*: the delivery watches the iterator. When the last reference to it is dropped, the threads end, and the
      next ``begin`` creates a new pipeline. The same happens after ``close`` and after an error.

    The feeder and the open iterator keep the session alive. The pipeline ends when the session is dropped.

    Args:
        checkpoint: The user's position; updated as batches are returned.
        failures: Receives the samples that failed.
        earlier_stats: Receives the statistics of ended epochs.
        source: The user's source, without a cache.
    """

    config: FeederConfig
    order: FeedOrder
    checkpoint: Checkpoint
    failures: FailureLog
    earlier_stats: EpochStats
    source: BaseSource

    def __post_init__(self) -> None:
        config = self.config
        self.stats: EpochStats = EpochStats()
        self.pipeline: BatchPipeline | None = None
        self.delivery: Delivery | None = None
        # The latest streaming pipeline and its delivery. They may still be ending after resident data replaced them.
        self._streaming: tuple[StreamingPipeline, Delivery] | None = None
        self._stream: EpochStream | None = None
        self._iterator: weakref.ref[FeedIterator[BatchT]] | None = None
        self._epoch: EpochProgress | None = None
        self._first: EpochStart | None = None
        # Epochs completed one after the other, and of a running `epochs` its last epoch and the first one of its bar.
        self._completed_in_a_row = 0
        self._last_epoch: int | None = None
        self._bar_from = 0
        # Whether no epoch so far was chosen, and of none more than a batch was taken, to look at it.
        self._only_looks = self.checkpoint.next_position() == Position()
        # The batches that running steps will take from the next iterator on.
        self._steps_left = 0
        self._hinted = False
        # Which other options ``explain`` may advise, once it is known.
        self.answers: dict[str, bool] = {}
        # Decides whether batches are made without a streaming pipeline.
        self.inline: InlineBatches | None = _new_memory(config)
        self.bar: ProgressBar | None = None
        self._start_lock = EpochStartLock()
        if config.cache is not None:
            config.cache.free_with(self)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the data."""
        return fingerprint_of(self.source, self.config.length)

    @property
    def live(self) -> bool:
        """Whether an iterator is open."""
        return self._live_iterator() is not None

    def statistics(self, total: bool) -> FeedStatistics:
        """Return the statistics of the current or last epoch, or with ``total`` of all epochs."""
        stats = EpochStats()
        if total:
            stats.add(self.earlier_stats)
        stats.add(self.stats)
        limits, pipeline = self.config.limits, self.pipeline
        tuner = pipeline.tuner if pipeline is not None else None
        storage = None if self.config.engines else self.config.source.storage_statistics()
        position, inner = self.checkpoint.position, self.config.source.feeder
        return FeedStatistics(
            **stats.totals(),  # type: ignore[arg-type]
            queue_depth=len(self.delivery.queue) if self.delivery is not None else 0,
            read_concurrency=limits.read_concurrency if tuner is None else tuner.reading.concurrency,
            decode_threads=limits.decode_threads if tuner is None else tuner.max_running,
            chunk_size=pipeline.chunk_size if pipeline is not None else 0,
            by_source=self.order.lister.counts(position) if inner is None else inner.statistics().by_source,
            tokens_by_source=self.order.lister.tokens(position),
            storage=storage,
        )

    def explain(self, *, ranks: bool) -> Any:
        """Return the ``Explanation`` of the current or last epoch; with ``ranks`` compare all ranks."""
        return load_addon("explain_feeder", "feeder.explain()")(self, ranks=ranks)

    @property
    def first_epoch(self) -> bool:
        """Whether no epoch before the current or last one has started the threads and filled a cache."""
        return not self.earlier_stats.samples

    def epochs(self, last: int) -> Iterator[int]:
        """Yield the numbers of the epochs up to ``last``; meanwhile each next epoch is read ahead."""
        chosen = self.checkpoint.chosen
        if self._only_looks and not chosen and self._epoch is not None and self._epoch.looked_at:
            self.checkpoint.set_epoch(0, live=self.live)
        epoch = self.order.normalize(self.checkpoint.next_position()).epoch
        if epoch > last or (epoch and not chosen):
            n, left = last + 1, "no epoch" if epoch > last else counted(last + 1 - epoch, "epoch")
            log.warning(
                "feeder.epochs(%d) yields %s: it counts from epoch 0, and the next epoch of this feeder is %d. For %d "
                "more write feeder.epochs(%d); to begin again, call feeder.set_epoch(0) before it",
                *(n, left, epoch, n, epoch + n),
            )
        # A bar begins where a state was saved. Another run in the same process begins at 0.
        self._bar_from = 0 if chosen else epoch
        try:
            while epoch <= last:
                self._last_epoch = last
                yield epoch
                epoch += 1
                if self.checkpoint.next_position().epoch != epoch:
                    self.checkpoint.set_epoch(epoch, live=self.live)
        finally:
            self._last_epoch = None
            self.close_bar()

    def running_epoch(self) -> tuple[int, int, int, int | None]:
        """Return the running epoch, its batches before this iterator, and the first and last epoch of a bar."""
        assert self._epoch is not None
        assert self._stream is not None
        start, schedule = self._epoch.start, self._stream.schedule
        return start.epoch, max(schedule.batches() - schedule.batches_left(start), 0), self._bar_from, self._last_epoch

    @property
    def rank(self) -> int:
        """The rank of the feeder."""
        return self.order.rank

    def close_bar(self) -> None:
        """Close the progress bar if there is one."""
        bar, self.bar = self.bar, None
        if bar is not None:
            bar.close()

    def in_progress(self, iterator: FeedIterator[BatchT], epoch: EpochProgress) -> bool:
        """Return whether the rest of an epoch can be taken from its iterator, and is what comes next."""
        return iterator is self._live_iterator() and not epoch.complete and not self.checkpoint.chosen

    def begin_steps(self, batches: int) -> tuple[FeedIterator[BatchT], EpochProgress]:
        """Begin the epoch of the next ``batches`` steps: the rest of the one before, or the next one."""
        with self._start_lock.lock():
            epoch = self._epoch
            if epoch is not None and epoch.started and not (epoch.complete or self.checkpoint.chosen):
                self.go_to(self.checkpoint.position)  # of an iterator that was closed, or is now
            self._steps_left = batches
            try:
                iterator = self.begin()
            finally:
                self._steps_left = 0
            assert self._epoch is not None
            return iterator, self._epoch

    def go_to(self, position: Position) -> None:
        """Make the next ``begin`` start at a position."""
        if state := self.order.sampler_state(position):
            self.order.load_sampler_state(state)
        self.checkpoint.load(position)

    def begin(self) -> FeedIterator[BatchT]:
        """Return an iterator over the next epoch; close the open iterator.

        Another thread waits here until this call returns. ``stop`` does not wait: it closes the iterator returned.
        """
        return self._start_lock.run(self._begin_or_stop, self.stop)

    def _begin_or_stop(self) -> FeedIterator[BatchT]:
        try:
            return self._begin()
        except BaseException:  # Ctrl-C, for example: stop the threads, as the caller gets no iterator
            self.stop("its epoch did not begin")
            raise

    def _begin(self) -> FeedIterator[BatchT]:
        asked = clocks()
        if self.config.source.traits.items and not self.config.engines:
            from aiofeed.kernel.sources.dataset_slots import check_iteration

            check_iteration(cast("Any", self.config.source))
        if knows_content(self.source):
            with contextlib.suppress(Exception):  # of damaged data: their samples have the error
                _ = self.fingerprint  # of the data that are read now: later there may be others
        completed = self._finish_complete_epoch()
        if self._last_epoch is None:
            self.close_bar()
        if not completed:
            self._close_iterator(
                "a newer iterator of the same feeder was started: a feeder has one iterator at a time; for two, as for "
                "training and validation, create two feeders, or an aiofeed.DataLoader without cache=, engine=, "
                "on_error= and threads="
            )
        listing = time.perf_counter()
        planned = self.order.plan_epoch(self.checkpoint.next_position())
        order_s = time.perf_counter() - listing
        schedule, first = planned.schedule, planned.first
        start = first.position
        stats, stream = None, self._stream
        streams = None if self.pipeline is None else self.pipeline.streams
        # Take over the epoch that was read ahead, if it is the one that begins now.
        if completed and stream is not None and first.followed and self._may_read_ahead(streams):
            stats = stream.take_over(schedule, start)
        if stats is None or stream is None:
            stats, stream = first.counters, planned
        if first.followed and self._may_read_ahead(None):
            # Before the stream is fed: a short epoch is planned at once, and the engine then ends.
            self._read_ahead(stream, start)
        # Before the stream is fed, because the engine may see the end of a short epoch at once.
        epoch = stream.new_progress(start, self.config.in_order)
        epoch.order_digest = order_digest(schedule, self.config.in_order, self.order.lister.identity())
        delivery = self._start(stream)
        # In this order, a thread that reads the totals meanwhile counts no epoch twice.
        ended, self.stats = self.stats, stats
        self.earlier_stats.add(ended)
        self._only_looks &= not self.checkpoint.chosen and (self._epoch is None or self._epoch.looked_at)
        self.checkpoint.on_iter(start.epoch)
        self.failures.begin()
        self._epoch, self._first = epoch, replace(first, counters=stats)
        stats.order_s = order_s
        iterator: FeedIterator[BatchT] = FeedIterator(delivery, stats, _SessionObserver(self, delivery, epoch), asked)
        self._iterator = weakref.ref(iterator)
        delivery.watch(iterator)
        return iterator

    def _start(self, stream: EpochStream) -> Delivery:
        """Feed a stream if it is new, on the running pipeline or a new one; return the delivery."""
        old_stream, self._stream = self._stream, stream
        if stream is not old_stream and not self._can_feed(stream, old_stream):
            # Batches that were read ahead belong to an epoch that is not wanted any more.
            if self.delivery is not None and self.pipeline is not None and not self.pipeline.inherited:
                self.delivery.stop()
            self._replace_pipeline(stream)
        assert self.delivery is not None
        assert self.pipeline is not None
        self.delivery.start()
        if stream is not old_stream:
            self.pipeline.feed(stream)
        config, logged = self.config, log.isEnabledFor(logging.DEBUG)
        alone = logged or config.keys or config.transform is not None or self.bar is not None
        self.delivery.queue.runs = config.in_order is True and not alone
        return self.delivery

    def cut(self) -> None:
        """Let the running pipeline make no more batches, except those of a list, which threads make."""
        if self._stream is not None and self._first is not None and not isinstance(self._first.sampled, BatchLists):
            self._stream.cut()

    def go_on(self, delivery: Delivery, number: int) -> Delivery:
        """Let another pipeline make the rest of the epoch, from batch ``number`` on; return its delivery.

        Returns the same one if it was closed meanwhile.
        """
        with self._start_lock.lock():
            if delivery.closed is not None:
                return delivery
            assert self._stream is not None
            assert self._first is not None
            rest = self._start(EpochStream(self._stream.schedule, replace(self._first, first_batch=number)))
            rest.watch(self._live_iterator() or self)
            if (reason := delivery.closed) is not None:  # by another thread, which did not know the rest
                rest.stop(reason)
            return rest

    def _can_feed(self, stream: EpochStream, old_stream: EpochStream | None) -> bool:
        """Return whether the running pipeline can feed a new stream, and no other kind of pipeline is faster."""
        pipeline = self.pipeline
        if pipeline is None or not pipeline.reusable() or old_stream is None or not old_stream.drained():
            return False
        return self._inline_for(stream) is None if pipeline.streams else self._may_read_ahead(False)

    def _may_read_ahead(self, streams: bool | None) -> bool:
        """Return whether the next epoch may be read ahead, see ``InlineBatches``."""
        return self.inline is None or self.inline.may_read_ahead(streams)

    def _inline_for(self, stream: EpochStream) -> InlineBatches | None:
        """Return what makes the batches of a stream in the consumer's thread."""
        inline, listed = self.inline, isinstance(stream.first.sampled, BatchLists)
        return None if inline is None or listed != inline.planned or not inline.ready(stream) else inline

    def _replace_pipeline(self, stream: EpochStream) -> None:
        """Create the pipeline for a stream, and its delivery."""
        config, backend, transform = self.config, self.config.backend, self.config.transform
        inline = self._inline_for(stream)
        if inline is not None:
            resident = inline.new_pipeline(config, self.pipeline)
            self.pipeline, self.delivery = resident, Delivery(resident, None, resident.consumer_transform(transform))
        else:
            copier = None
            if backend is not None:
                from aiofeed.kernel.devices.copier import copier_for

                copier, transform = copier_for(backend, transform, config.static_outputs), None
            if not config.engines:
                config.source.load(stream.schedule.places(config.length))
            streaming = StreamingPipeline(config, after=None if self._streaming is None else self._streaming[0])
            self.pipeline = streaming
            self.delivery = Delivery(streaming, copier, transform, config.limits.device_batches)
            self._streaming = streaming, self.delivery
        self.delivery.watch(self)

    def _finish_complete_epoch(self) -> bool:
        """Finish an epoch whose last batch was returned if its consumer, counting batches, never asked for the end.

        Returns whether the epoch is complete and its pipeline runs, so that batches read ahead can be used.
        """
        epoch, pipeline, delivery = self._epoch, self.pipeline, self.delivery
        if epoch is None or pipeline is None or delivery is None or not epoch.complete or not pipeline.reusable():
            return False
        if (iterator := self._live_iterator()) is not None:
            ended = iterator.finish_if_ended()
        else:
            ended = epoch.ended or take_end(delivery.queue)
        if ended and not epoch.ended:
            self._epoch_ended(epoch)
        return ended

    def _epoch_ended(self, epoch: EpochProgress) -> None:
        epoch.ended = True
        if not epoch.started:  # it had no batch for this rank, or nothing was left of it
            self._on_first_batch(epoch)
        self.failures.summarise(epoch.start.epoch, self.stats)
        self.look_for_hint()
        if epoch is self._epoch:  # another thread may have begun a new one
            # Dropping the iterator after its end is not a break.
            self._iterator = None
            self._completed_in_a_row += 1
            if self.delivery is not None:
                self.delivery.watch(self)

    def _on_first_batch(self, epoch: EpochProgress) -> None:
        """Let the next ``begin`` start the epoch after this one, which returns its first batch or ends without one."""
        self.checkpoint.on_first_batch(epoch)
        self.order.on_first_batch()

    def look_for_hint(self) -> None:
        """Log a hint, if it was not logged and the training has waited for long."""
        # A wait is counted before its batch is.
        if self.stats.batches and not self._hinted and self.stats.stall_s + self.earlier_stats.stall_s > HINT_AFTER_S:
            self._hint_at_threads()

    def _hint_at_threads(self) -> None:
        """Log once, if training mainly waits for a ``Dataset`` that one thread calls, how to use more, and the gain."""
        config, stats = self.config, EpochStats()
        stats.add(self.earlier_stats)
        stats.add(self.stats)
        order_s = self.earlier_stats.order_s + self.stats.order_s
        wall_s, waited_s = stats.wall_s - order_s, stats.stall_s - order_s
        # Processes take some tenths of a millisecond to hand a batch over.
        slow = waited_s > max(HINT_AFTER_S, HINT_STALL * wall_s, HINT_BATCH_S * stats.batches)
        if not slow or config.source.threads != 1 or config.engines or (cores := machine.rank_cpus()) == 1:
            return
        self._hinted = True
        cpu_s = self.earlier_stats.decode_cpu_s + self.stats.decode_cpu_s
        computes = min(cpu_s / stats.decode_s, 1.0) if stats.decode_s else 1.0
        pipeline = None if self._streaming is None else self._streaming[0]
        probes, held = (0, 0) if pipeline is None else (pipeline.gil_probes, pipeline.gil_held)
        # The step takes as long as before, and several cores do at most so many times as much.
        gain = min(cores, wall_s / max(wall_s - waited_s, 1e-9))
        known = probes >= HINT_PROBES or not machine.has_gil()
        threads_gain = min(gain, probes / held) if held else gain
        by_threads = f"{threads_gain:.1f}" if known else f"unknown, up to {gain:.1f}"
        log.warning(
            "the training waited %.0f of %.0f s for %s, which is called by one thread at a time. That thread is on the "
            "processor for %.0f %% of a call, and waits in the rest: for reads, a lock, the GIL or a core%s. What may "
            "help, with at most so many times as many samples/s if the %d cores are free:\n"
            "  FromDataset(dataset, threads=%d), if several threads may call it: %s\n"
            '  engine="process:%d", which starts processes with a copy each: %.1f\n'
            "  aiofeed.DataLoader(dataset, batch_size=%d, num_workers=%d), with the order and random numbers of "
            "torch's: %.1f",
            *(waited_s, wall_s, type(cast("Any", config.source).dataset).__name__, 100 * computes),
            f"; it held the GIL in {held} of {probes} probes" if probes >= HINT_PROBES else "",
            *(cores, cores, by_threads, cores, gain, config.batch_size, cores, gain),
        )

    def _read_ahead(self, stream: EpochStream, start: Position) -> None:
        """Allow the stream to go on with the next epochs if they are certain or likely to be iterated."""
        if not stream.schedule.batches():
            return  # nothing limits how many empty epochs would be planned at once
        if self._last_epoch is not None:
            stream.permit_until(self._last_epoch)
        elif self._completed_in_a_row or self._steps_left > stream.schedule.batches(start.consumed):
            stream.permit_until(start.epoch + 1)

    def stop(self, reason: str) -> list[Delivery]:
        """Close the open iterator and tell the threads to end; never blocks. Returns the deliveries to wait for."""
        self._start_lock.stopped = reason
        self._close_iterator(reason)
        pipeline, delivery = self.pipeline, self.delivery
        if pipeline is None or delivery is None or pipeline.inherited:
            return []
        delivery.stop(reason)
        if self._streaming is None or self._streaming[1] is delivery or self._streaming[0].inherited:
            return [delivery]
        return [delivery, self._streaming[1]]

    def close(self, limit_s: float) -> None:
        """Stop the threads and wait up to ``limit_s`` for each pipeline to end."""
        for delivery in self.stop("the feeder was closed"):
            if not delivery.join(limit_s):
                log.warning("a read or decode did not end within %.0f s of close() and is left behind", limit_s)

    async def aclose(self, limit_s: float) -> None:
        """Like ``close``, without blocking the caller's event loop."""
        for delivery in self.stop("the feeder was closed"):
            try:
                # Not wait_for: before Python 3.12 it loses a cancellation that arrives just as the threads have ended.
                async with asyncio.timeout(limit_s):
                    await delivery.stopped()
            except TimeoutError:
                log.warning("a read or decode did not end within %.0f s of aclose() and is left behind", limit_s)

    def _close_iterator(self, reason: str) -> None:
        self.close_bar()
        if (iterator := self._live_iterator()) is not None:
            iterator.close(reason)
        if self._iterator is not None and (iterator is not None or self._iterator() is None):
            self._completed_in_a_row = 0
        self._iterator = None

    def _live_iterator(self) -> FeedIterator[BatchT] | None:
        reference = self._iterator
        iterator = reference() if reference is not None else None
        return iterator if iterator is not None and iterator.live else None


OpenEpoch: TypeAlias = tuple[FeedIterator[Any], EpochProgress]
_END: Any = object()


@dataclass(eq=False, repr=False)
class Steps(Generic[BatchT]):
    """The next batches of a feeder, a fixed number, over as many epochs as it takes.

    Args:
        session: Runs the epochs.
        kept: The iterator of the steps before and its progress, in a list that the feeder owns: a session that referred
            to its iterator would be freed by the garbage collector only.
        batches: The number of batches.
    """

    session: FeederSession[BatchT]
    kept: list[OpenEpoch]
    batches: int

    def __len__(self) -> int:
        """Return the number of batches."""
        return self.batches

    def __iter__(self) -> Iterator[BatchT]:
        """Go on with the epoch that the last steps left, or with the next one."""
        left = self.batches
        while left:
            iterator, epoch = self._open_epoch(left)
            before = iterator.batches
            # Neither this generator nor islice refers to a batch, and no signal handler runs between them and the user.
            yield from itertools.islice(iterator, left)
            left -= self._returned(iterator, epoch, before)

    async def __aiter__(self) -> AsyncIterator[BatchT]:
        """Go on with the epoch that the last steps left, or with the next one."""
        left = self.batches
        while left:
            iterator, epoch = self._open_epoch(left)
            before = iterator.batches
            for _ in range(left):
                batch = [await anext(iterator, _END)]
                if batch[0] is _END:
                    break
                yield batch.pop()
            left -= self._returned(iterator, epoch, before)

    def _open_epoch(self, batches: int) -> OpenEpoch:
        """Return the iterator for the next batches, and the progress of its epoch."""
        kept = self.kept
        if not kept or not self.session.in_progress(*kept[0]):
            kept[:] = [self.session.begin_steps(batches)]
        return kept[0]

    def _returned(self, iterator: FeedIterator[BatchT], epoch: EpochProgress, before: int) -> int:
        if not iterator.batches and epoch.start.at_start:
            raise FeedError("an epoch has no batches, so it has no steps either")
        return iterator.batches - before


class _SessionObserver(EpochObserver):
    """Updates the session as its iterator returns batches. Keeps the session alive."""

    def __init__(self, session: FeederSession[Any], delivery: Delivery, epoch: EpochProgress) -> None:
        super().__init__(delivery)
        self._session = session
        self._epoch = epoch
        self.resumed = not epoch.start.at_start

    def leaves_out(self, item: ReadyBatch) -> bool:
        session, epoch = self._session, self._epoch.start.epoch
        alone = self._epoch.one_left and not session.stats.batches and not self.resumed
        if alone or not session.order.may_differ():
            return False
        if item.lease is not None:
            item.lease.give_back()
        self._delivery.producer.take(item)
        self.returning(item)
        if session.stats.batches_left_out < LOGGED_MOST:
            log.warning("epoch %d: batch %d is left out: all its samples were skipped", epoch, item.number)
        return True

    def returning(self, item: ReadyBatch) -> None:
        session, epoch = self._session, self._epoch
        if (inline := session.inline) is not None and inline.changes(item, session.stats, session.pipeline):
            session.cut()
        session.look_for_hint()
        if item.failures:
            session.stats.failures += session.failures.add(item.failures, epoch.start.epoch)
        if not epoch.started:
            session._on_first_batch(epoch)
        if epoch.one_left:
            # Dropping the iterator after its last batch is not a break.
            self._delivery.watch(session)

    def keys(self, item: ReadyBatch) -> list[Any] | None:
        config = self._session.config
        if not config.keys:
            return None
        assert item.indices is not None
        # The number of an item of a stream refers to the item.
        keys = [config.source.named(at if isinstance(at, int) else int(at)) for at in item.indices]
        grouped = isinstance(config.collate_fn, BuildsBatches) and item.plan is not None
        return config.collate_fn.by_row(item.plan, item.indices, keys) if grouped else keys

    def continued(self, number: int) -> Delivery:
        self._delivery = self._session.go_on(self._delivery, number)
        return self._delivery

    def returned(self, item: ReadyBatch) -> None:
        self._epoch.record(item.number, item.returned_samples, item.following, item.followers)

    def failed(self, item: FeedFailure) -> None:
        session = self._session
        session.stats.failures += session.failures.add(item.failures, self._epoch.start.epoch)
        session.checkpoint.on_failure(self._epoch)
        session._completed_in_a_row = 0

    def ended(self) -> None:
        self._session._epoch_ended(self._epoch)


def _new_memory(config: FeederConfig) -> InlineBatches | None:
    """Return what makes the batches of a cache or source in the consumer's thread, if no option needs threads."""
    source, cache, policy = config.source, config.cache, config.policy
    if cache is not None and (memory := cache.new_memory(config)) is not None:
        found: InlineBatches = memory
        return found
    traits = source.traits
    threads = config.backend or config.engines
    others = threads or config.collate_fn is not source.collate
    # For a device, threads gather into pinned memory, unless the tokens are kept on the device.
    gathered = traits.rows and not others and source.in_memory
    if traits.in_memory or config.kept_on_device or gathered:
        data: InlineBatches = load_addon("InlineData", type(source).__name__)(source, config.length)
        return data
    recovers = policy.action != "raise" or policy.retries or policy.read_timeout_s or policy.decode_timeout_s
    if threads or cache or recovers or config.in_order == "samples" or config.user_limits.prefetch_batches is not None:
        return None
    if isinstance(config.collate_fn, BuildsBatches) and source.in_memory:
        plans: InlineBatches = load_addon("InlinePlans", type(source).__name__)(source, config.length)
        return plans
    if source.threads != 1 or config.collate_fn is not None:
        return None
    from aiofeed.kernel.feeder.small_items import SmallItems

    return SmallItems()
