"""Small batches of a ``Dataset``, made in the consumer's thread: nothing is handed over."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.fetch.collate import collate_plain
from aiofeed.kernel.engine.fetch.dataset import DatasetFetcher
from aiofeed.kernel.engine.fetch.fetcher import UNREAD
from aiofeed.kernel.engine.fetch.user_errors import suggest_policy
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.tensors import as_tensors
from aiofeed.kernel.runtime.time_limits import JobControl
from aiofeed.kernel.sources.dataset_slots import DatasetSlot
from aiofeed.resident.batch_ranges import BatchRange
from aiofeed.resident.host_windows import HostWindows, default_modes
from aiofeed.resident.pipeline import ResidentData, ResidentPipeline

if TYPE_CHECKING:
    from aiofeed.kernel.sources.dataset import FromDataset

log: logging.Logger = logging.getLogger("aiofeed.engine")

# A window takes about this long: beside it, one call of the dataset's slot counts nothing.
WINDOW_S = 0.0005


class DatasetWindows(HostWindows):
    """Makes windows of batches of a ``Dataset``, in the consumer's thread.

    A call that fails is repeated in the dataset's own thread, where all calls of earlier epochs were made: objects such
    as an SQLite connection work only there. Then all further calls are made there. If it fails there, too, it is the
    error of the sample.

    Args:
        source: The dataset, which one thread at a time may call.
        batch_s: Seconds that a batch takes.
    """

    def __init__(self, source: FromDataset, batch_s: float) -> None:
        self.max_batches: int = max(int(WINDOW_S / max(batch_s, 1e-6)), 1)
        self._source = source
        self._fetcher = DatasetFetcher(source)
        self._control = JobControl(threading.Event())
        self._in_consumer_thread = True

    def make(self, batch_range: BatchRange) -> tuple[BatchRange, list[Any]]:
        """Make a window of a batch range, or of the batches before one that fails.

        Raises:
            FeedError: The first batch failed.
        """
        size, indices = batch_range.batch_size, batch_range.indices.tolist()
        pieces = [indices[first : first + size] for first in range(0, len(indices), size)]
        batches: list[Any] = []
        if self._in_consumer_thread and not _has_modes():
            try:
                self._make_batches(pieces, batches)
            except Exception as error:  # noqa: BLE001 - the user's Dataset may raise anything; its own thread is asked again
                self._in_consumer_thread = bool(batches)  # the batch that failed is the first one of the next window
                if not batches:
                    log.info("batches are made in the Dataset's own thread again, after %s", format_error(error))
        if not batches:
            batches.append(self._make_in_its_thread(batch_range.numbers[0], pieces[0]))
        return batch_range.head(len(batches)), batches

    def _make_batches(self, pieces: list[list[int]], batches: list[Any]) -> None:
        slot = DatasetSlot(self._fetcher.calls, pieces[0][0], self._control)
        try:
            with slot, default_modes("cpu"):
                slot.thread = threading.get_ident()
                self._source.set_up()
                for piece in pieces:
                    batches.append(collate_plain(self._source.items(piece)))  # noqa: PERF401 - they stay after an error
        except BaseException:
            slot.__exit__()  # Ctrl-C may have interrupted the first call of it
            raise

    def _make_in_its_thread(self, number: int, indices: list[int]) -> Any:
        """Make a batch in the dataset's thread.

        Raises:
            FeedError: A sample failed, or the samples do not fit together; the error names them.
        """
        fetcher, plan = self._fetcher, BatchPlan(number, indices, indices, 0)
        builder = fetcher.new_builder(len(indices), HostBufferPool(0).lease())
        outcome = fetcher.decode(plan, 0, [UNREAD] * len(indices), builder, self._control)
        if outcome.errors:
            raise suggest_policy(min(outcome.errors, key=lambda entry: entry[0])[1])
        return as_tensors(builder.finish([fetcher.key(index) for index in indices]))


def dataset_pipeline(config: Any, batch_s: float) -> ResidentPipeline:
    """Return a pipeline that calls the ``Dataset`` of a feeder in the consumer's thread."""
    data = ResidentData(
        config.source, batch_size=config.batch_size, backend=None, memory_bytes=config.limits.memory_bytes
    )
    data.windows = DatasetWindows(config.source, batch_s)
    return ResidentPipeline(data)


def _has_modes() -> bool:
    """Return whether the user has set a mode, such as a default device, for all tensors made in this thread."""
    import torch

    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())
