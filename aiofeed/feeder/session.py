"""One pass after another over a feeder's batches: the open iterator, and the threads that go on between them."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from aiofeed.core.failures import FailureLog
from aiofeed.core.statistics import EpochStats, FeedStatistics
from aiofeed.feeder.backing import BatchPipeline, goes_on, new_pipeline, serves, tie_memory
from aiofeed.feeder.config import FeederConfig
from aiofeed.feeder.iterator import FeedIterator, see_end
from aiofeed.runtime.queue import FeedFailure, ReadyBatch
from aiofeed.sampling.epochs import EpochStream
from aiofeed.sampling.feed_order import FeedOrder
from aiofeed.sampling.state import Checkpoint, EpochProgress
from aiofeed.sources.dataset import FromDataset
from aiofeed.sources.dataset_slots import refuse_nested_iteration

BatchT = TypeVar("BatchT")

log = logging.getLogger("aiofeed.feeder")


class FeederSession(Generic[BatchT]):
    """The passes of one feeder. What stands behind them is begun at the first, and used again while it can be.

    It is kept alive by its feeder and by the open iterator; once both are gone, the threads end.

    Args:
        config: what to run.
        order: the feeder's.
        progress: where its user stands; advanced as batches are handed out.
        failures: the samples that failed.
        past: the counters of passes that are over.
    """

    def __init__(
        self, config: FeederConfig, *, order: FeedOrder, progress: Checkpoint, failures: FailureLog, past: EpochStats
    ) -> None:
        self.config = config
        self._order = order
        self._progress = progress
        self._failures = failures
        self._past = past
        self.pipeline: BatchPipeline | None = None
        self._stream: EpochStream | None = None
        self._iterator: weakref.ref[FeedIterator[BatchT]] | None = None
        self._account: EpochProgress | None = None
        self.counters = EpochStats()
        # Epochs that were finished one after the other, and the last one that is sure to be asked for.
        self._in_a_row = 0
        self._last_epoch: int | None = None
        tie_memory(self, config)

    @property
    def live(self) -> bool:
        """Whether an iterator is open."""
        return self._live_iterator() is not None

    def statistics(self, total: bool) -> FeedStatistics:
        """Of the current or last pass, or with ``total`` of all of them."""
        counters = EpochStats()
        if total:
            counters.add(self._past)
        counters.add(self.counters)
        limits, pipeline = self.config.limits, self.pipeline
        tuner = pipeline.tuner if pipeline is not None else None
        gil = tuner.decoding.gil if tuner is not None else None
        return FeedStatistics(
            **counters.totals(),  # type: ignore[arg-type]
            queue_depth=pipeline.queue_depth if pipeline is not None else 0,
            read_concurrency=limits.read_concurrency if tuner is None else tuner.reading.concurrency,
            decode_threads=limits.decode_threads if tuner is None else tuner.max_running,
            gil_us=gil.held_s * 1e6 if gil is not None else 0.0,
            chunk_size=pipeline.chunk_size if pipeline is not None else 0,
        )

    def epochs(self, last: int) -> Iterator[int]:
        """The numbers of the epochs up to ``last``; while they are iterated, the next is begun ahead."""
        epoch = self._order.normalize(self._progress.next_position()).epoch
        try:
            while epoch <= last:
                self._last_epoch = last
                yield epoch
                epoch += 1
                if self._progress.next_position().epoch != epoch:
                    self._progress.set_epoch(epoch, live=self.live)
        finally:
            self._last_epoch = None

    def begin(self) -> FeedIterator[BatchT]:
        """An iterator of the coming epoch; one that is still open is closed."""
        try:
            return self._begin()
        except BaseException:  # Ctrl-C, say: nobody gets an iterator, so what was started for it ends
            self.stop("its epoch did not begin")
            raise

    def _begin(self) -> FeedIterator[BatchT]:
        if isinstance(self.config.source, FromDataset) and not self.config.engines:
            refuse_nested_iteration(self.config.source)
        if not self._conclude():
            self._close_iterator("a newer iterator of the same feeder was started")
        begun = self._order.plan_epoch(self._progress.next_position())
        start = begun.start
        claimed, stream = None, self._stream
        if self.pipeline is not None and self.pipeline.reusable() and stream is not None:
            follows = begun.permutation is None and goes_on(self.config, self.pipeline)
            claimed = stream.take_over(begun.schedule, start) if follows else None
        if claimed is None or stream is None:
            claimed = EpochStats()
            stream = EpochStream(begun.schedule, start, claimed, begun.permutation)
        if begun.permutation is None and goes_on(self.config, None):
            # Before it starts: a short epoch is planned at once, and then it is too late.
            self._look_ahead(stream, start.epoch)
        if stream is not self._stream:
            self._start_stream(stream)
        assert self.pipeline is not None
        self.pipeline.delivery.begin()
        self._past.add(self.counters)
        self.counters = claimed
        self._progress.on_iter(start.epoch)
        self._failures.begin()
        self._account = EpochProgress(begun.schedule, start, self.config.in_order)
        iterator: FeedIterator[BatchT] = FeedIterator(
            self.pipeline.delivery, claimed, observer=_SessionObserver(self, self._account)
        )
        self._iterator = weakref.ref(iterator)
        self.pipeline.watch(iterator)
        return iterator

    def _conclude(self) -> bool:
        """See the end of a pass that handed out its last batch to one who counts to ``len()`` and never asked for more.

        Whether the pass is over in good order, so that what was read ahead may be used.
        """
        account, pipeline = self._account, self.pipeline
        if account is None or pipeline is None or not account.complete or not pipeline.reusable():
            return False
        if (iterator := self._live_iterator()) is not None:
            ended = iterator.conclude()
        else:
            ended = account.ended or see_end(pipeline.delivery.queue)
        if ended and not account.ended:
            self._ended(account)
        return ended

    def _ended(self, account: EpochProgress) -> None:
        """The end of a pass was seen."""
        account.ended = True
        self._failures.summarise(account.start.epoch, self.counters)
        # Done with: that it is dropped after its end says nothing.
        self._iterator = None
        self._in_a_row += 1

    def _start_stream(self, stream: EpochStream) -> None:
        old = self.pipeline
        drained = self._stream is not None and self._stream.drained()
        if old is not None and old.reusable() and drained and serves(self.config, old, stream):
            self.pipeline = old
        else:
            # Whatever was read ahead belongs to an epoch that is not wanted any more.
            if old is not None and not old.inherited:
                old.stop()
            self.pipeline = new_pipeline(self.config, stream, after=old)
            self.pipeline.watch(self)
        self._stream = stream
        self.pipeline.start(stream)

    def _look_ahead(self, stream: EpochStream, epoch: int) -> None:
        """Allow the next epochs to be begun while this one is consumed, where they are sure or likely to come."""
        if not stream.schedule.shard().batches:
            return  # planning epochs without a batch waits for nothing: all of them would be, at once
        if self._last_epoch is not None:
            stream.permit_until(self._last_epoch)
        elif self._in_a_row:
            stream.permit_until(epoch + 1)

    def stop(self, reason: str) -> BatchPipeline | None:
        """Close the open iterator and signal the threads to end; never blocks. Returns what is to be waited for."""
        self._close_iterator(reason)
        pipeline = self.pipeline
        if pipeline is None or pipeline.inherited:
            return None
        pipeline.stop()
        return pipeline

    def close(self, limit_s: float) -> None:
        """Stop, and wait so long for the threads to end."""
        if (pipeline := self.stop("the feeder was closed")) is not None and not pipeline.join(limit_s):
            log.warning("a read or decode did not end within %.0f s of close() and is left behind", limit_s)

    async def aclose(self, limit_s: float) -> None:
        """``close``, without blocking the caller's loop."""
        if (pipeline := self.stop("the feeder was closed")) is not None:
            try:
                # Before Python 3.12 wait_for loses a cancellation, Ctrl-C's say, that comes as the threads have ended.
                async with asyncio.timeout(limit_s):
                    await pipeline.stopped()
            except TimeoutError:
                log.warning("a read or decode did not end within %.0f s of aclose() and is left behind", limit_s)

    def _close_iterator(self, reason: str) -> None:
        if (iterator := self._live_iterator()) is not None:
            iterator.close(reason)
        if self._iterator is not None and (iterator is not None or self._iterator() is None):
            self._in_a_row = 0
        self._iterator = None

    def _live_iterator(self) -> FeedIterator[BatchT] | None:
        iterator = self._iterator() if self._iterator is not None else None
        return iterator if iterator is not None and iterator.live else None


class _SessionObserver:
    """What is learnt from an iterator. Keeps the passes alive while one iterates."""

    def __init__(self, session: FeederSession[Any], account: EpochProgress) -> None:
        self._session = session
        self._account = account

    def handing_out(self, item: ReadyBatch) -> None:
        session = self._session
        if item.failures:
            session.counters.failures += session._failures.add(item.failures, self._account.start.epoch)
        if not self._account.started:
            session._progress.on_first_batch(self._account)
            session._order.on_first_batch()
        if self._account.one_left and session.pipeline is not None:
            # The iterator may be dropped then: all it could still give is the end.
            session.pipeline.watch(session)

    def handed_out(self, item: ReadyBatch) -> None:
        self._account.record(item.number)

    def failed(self, item: FeedFailure) -> None:
        self._session.counters.failures += self._session._failures.add(item.failures, self._account.start.epoch)
        self._session._progress.on_failure(self._account)
        self._session._in_a_row = 0

    def ended(self) -> None:
        session = self._session
        session._ended(self._account)
        if session.pipeline is not None:
            session.pipeline.watch(session)
