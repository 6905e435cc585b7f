"""Batches of a plan, such as packed documents, of data in memory: made in the consumer's thread."""

from __future__ import annotations

import threading
from typing import Any

from aiofeed.kernel.engine.batch import BatchKeys
from aiofeed.kernel.engine.fetch.fetcher import UNREAD
from aiofeed.kernel.engine.fetch.source import SourceFetcher
from aiofeed.kernel.engine.fetch.user_errors import suggest_policy
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.tensors import as_tensors
from aiofeed.kernel.runtime.time_limits import JobControl
from aiofeed.resident.batch_ranges import BatchRange
from aiofeed.resident.host_windows import HostWindows, default_modes
from aiofeed.resident.pipeline import InlineData, ResidentData, ResidentPipeline

# Blocks of memory that are used again: those of the batch in use and of the next one.
SPARE = 8


class PlannedWindows(HostWindows):
    """Makes the batches of a plan one by one."""

    def __init__(self, config: Any) -> None:
        self.max_batches: int = 1
        self._fetcher = SourceFetcher(
            config.source, config.decode, in_place=False, length=config.length, policy=config.policy
        )
        self._new_builder = config.collate_fn.new_builder
        self._memory = HostBufferPool(SPARE)
        self._control = JobControl(threading.Event())

    def make(self, batch_range: BatchRange) -> tuple[BatchRange, list[Any]]:
        """Make a batch.

        Raises:
            FeedError: A sample cannot be read, or does not fit.
        """
        plan = batch_range.plan
        assert plan is not None
        with default_modes("cpu"):
            builder = self._new_builder(plan, self._memory)
            outcome = self._fetcher.decode(plan, 0, [UNREAD] * len(plan.indices), builder, self._control)
            if outcome.errors:
                raise suggest_policy(min(outcome.errors, key=lambda entry: entry[0])[1])
            return batch_range, [as_tensors(builder.finish(BatchKeys(plan, self._fetcher)))]


class InlinePlans(InlineData):
    """The batches of a plan of data in memory."""

    planned = True

    def new_pipeline(self, config: Any, running: Any) -> ResidentPipeline:
        """Return a pipeline that makes batches in the consumer's thread."""
        data = ResidentData(config.source, batch_size=config.batch_size, backend=None, memory_bytes=0)
        data.windows = PlannedWindows(config)
        return ResidentPipeline(data)
