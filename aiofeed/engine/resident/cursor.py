"""The batches of resident data as items, made when they are asked for by whoever asks: a handoff without a producer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from aiofeed.core.statistics import EpochStats
from aiofeed.engine.resident.host_windows import FIRST_LOOK_S, LOOK_S, Made, Window, Windows
from aiofeed.runtime.queue import BatchQueue, EndOfEpoch, FeedFailure, QueueItem, ReadyBatch, Stopped
from aiofeed.sampling.epochs import EpochStart, EpochStream
from aiofeed.sampling.order import BatchRange

log = logging.getLogger("aiofeed.engine")


class WindowItems(deque[QueueItem]):
    """The items of a window, and where to go on behind them: one assignment puts both in place."""

    after: Walk | None = None


class Pulled(BatchQueue[QueueItem]):
    """A handoff into which nobody puts: the next items are made when they are asked for.

    The queue is replaced whole, so that Ctrl-C anywhere in the making of a window loses nothing: it is made again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.items: WindowItems = WindowItems()

    def begin(self, walk: Walk | None) -> None:
        """Give the items of a walk from now on."""
        items = WindowItems()
        items.after = walk
        self.items = items

    def put(self, item: QueueItem) -> None:
        """Nobody waits here, so that nobody has to be told that it was closed."""

    def peek(self, timeout_s: float | None = None) -> QueueItem:
        """The next item, made now and kept until it is deleted; a failure as one."""
        if not self.items:
            self._make()
        return self.items[0]

    async def peek_async(self) -> QueueItem:
        """The same. Between windows it lets other tasks run, and can be cancelled, which loses nothing.

        A device that is behind is waited for without blocking the caller's loop.
        """
        pause_s = 0.0
        since: float | None = None
        while not self.items:
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, FIRST_LOOK_S), LOOK_S)
            if not self._behind():
                break
            since = since or time.perf_counter()
        until = time.perf_counter()
        item = self.peek()
        if since is not None and isinstance(item, ReadyBatch):
            item.device_backlog = since, until if item.device_backlog is None else item.device_backlog[1]
        return item

    def _behind(self) -> bool:
        walk = self.items.after
        try:
            return walk is not None and walk.behind()
        except Exception:  # noqa: BLE001 - who makes the window meets it again, and raises it at the consumer's line
            return False

    def _make(self) -> None:
        now = self.items
        items = WindowItems()
        try:
            if now.after is not None:
                items = now.after.items()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised at the consumer's line
            items.append(FeedFailure(error))
        if not items:
            items.append(Stopped())
        self.items = items


class _Epoch:
    """An epoch of a stream, to be cut into windows."""

    def __init__(self, stream: EpochStream, start: EpochStart) -> None:
        self.start = start
        self.counters = start.counters
        self.batch_ranges = stream.schedule.batch_ranges(start.position, start.permutation)


class Walk:
    """Where a stream stands: what was made ahead, and what is to be made next. It does not change.

    Args:
        windows: opens the data.
        stream: the epochs.
        ahead: windows that were made but not asked for, and ends of epochs between them.
        epoch: what is to be made next is of this; ``None``: nothing was made yet, or with ``over`` nothing is left.
        number: the batch that is made next.
        over: whether the stream has ended.
    """

    __slots__ = ("ahead", "epoch", "number", "over", "stream", "windows")

    def __init__(
        self,
        windows: Callable[[], Windows],
        stream: EpochStream,
        ahead: tuple[tuple[_Epoch, Made | None], ...] = (),
        epoch: _Epoch | None = None,
        number: int = 0,
        over: bool = False,
    ) -> None:
        self.windows = windows
        self.stream = stream
        self.ahead = ahead
        self.epoch = epoch
        self.number = number
        self.over = over

    def items(self) -> WindowItems:
        """The next window's items, or an epoch's end; none behind the last."""
        windows = self.windows()
        walk, waited = self, None
        # The end of an epoch is passed on at once.
        while not walk.over and not (walk.ahead and walk.ahead[0][1] is None) and walk._made <= windows.ahead:
            walk = walk._further(windows)
            waited = windows.waited or waited
        items = WindowItems()
        if walk.ahead:
            (epoch, made), rest = walk.ahead[0], walk.ahead[1:]
            items.after = Walk(walk.windows, walk.stream, rest, walk.epoch, walk.number, walk.over)
            if made is None:
                items.append(EndOfEpoch())
            else:
                items.extend(_batches(*made, epoch.counters, waited))
        return items

    def behind(self) -> bool:
        """Whether a window is to be made next for which the device has no room yet."""
        if self.epoch is None:
            return False
        windows = self.windows()
        ends = bool(self.ahead) and self.ahead[0][1] is None
        return not ends and self._made <= windows.ahead and windows.behind()

    @property
    def _made(self) -> int:
        return sum(made is not None for _, made in self.ahead)

    def _further(self, windows: Windows) -> Walk:
        epoch = self.epoch or _Epoch(self.stream, self.stream.first)
        began = time.perf_counter()
        batch_range = epoch.batch_ranges.at(self.number, windows.most)
        if batch_range is None:
            following = self.stream.after(epoch.start)
            upcoming = None if following is None else _Epoch(self.stream, following)
            return Walk(self.windows, self.stream, (*self.ahead, (epoch, None)), upcoming, over=following is None)
        made = windows.make(batch_range)
        ended, first, last = time.perf_counter(), made[0].numbers[0], made[0].numbers[-1]
        if windows.waited is not None:
            began = windows.waited[1]
        if windows.stage == "copy":
            epoch.counters.copy_s += ended - began
        else:
            epoch.counters.collate_s += ended - began
        if log.isEnabledFor(logging.DEBUG):
            log.debug("batches %d to %d: window made in %.1f ms", first, last, (ended - began) * 1e3)
        return Walk(self.windows, self.stream, (*self.ahead, (epoch, made)), epoch, last + 1)


def _batches(
    batch_range: BatchRange, window: Window, counters: EpochStats, waited: tuple[float, float] | None
) -> list[QueueItem]:
    """Its batches; whoever asks for the first waits for what is made ahead."""
    samples, size = len(batch_range.indices), batch_range.batch_size
    items: list[QueueItem] = []
    for at, number in enumerate(batch_range.numbers):
        first, last = at * size, min((at + 1) * size, samples)
        ready = ReadyBatch(number, last - first, (window, first, last), None, 0, None, counters)
        ready.device_backlog = None if items else waited
        items.append(ready)
    return items
