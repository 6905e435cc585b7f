"""Episodes without faults: epochs are started and ended in some way; then one complete epoch follows."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiofeed.errors import IteratorClosedError
from tests.soak.configurations import Configuration, EpochRecord, Rig, ViolationError, draw, draw_limits


@dataclass
class Episode:
    """An episode's inputs and the objects to check at its end.

    Args:
        random: draws all choices.
        folder: folder for real files.
        counts: counters of the run.
        rigs: the episode's feeders.
        allowed: log lines that contain one of these are expected.
        after: functions to call when the episode's threads have ended.
    """

    random: random.Random
    folder: Path
    counts: Counter[str]
    rigs: list[Rig] = field(default_factory=list)
    # Some configurations have fewer samples than a batch, and the feeder logs it.
    allowed: list[str] = field(default_factory=lambda: ["an epoch has no batches"])
    after: list[Callable[[], None]] = field(default_factory=list)

    def rig(
        self, configuration: Configuration | None = None, *, fixed: dict[str, Any] | None = None, **more: Any
    ) -> Rig:
        """Make a feeder of the given configuration, or of a drawn one."""
        drawn = configuration or draw(self.random, self.folder, **(fixed or {}))
        self.rigs.append(Rig(drawn, self.folder, self.counts, **more))
        return self.rigs[-1]


def whole_epoch(rig: Rig) -> None:
    """Iterate over a complete epoch and check every sample."""
    iterator = iter(rig.feeder)
    record = rig.start_record()
    for batch in iterator:
        record.add(batch)
    record.check_complete()


async def whole_epoch_async(rig: Rig) -> None:
    """Iterate over a complete epoch with `async for` and check every sample."""
    iterator = aiter(rig.feeder)
    record = rig.start_record()
    async for batch in iterator:
        record.add(batch)
    record.check_complete()


def check_closed(iterator: Any, record: EpochRecord) -> None:
    """Check that a closed iterator raises: `IteratorClosedError`, or `StopIteration` after its last batch."""
    try:
        next(iterator)
    except IteratorClosedError:
        return
    except StopIteration:
        if len(record.received) == len(record.expected):
            return
        raise ViolationError("a closed iterator raised StopIteration") from None
    raise ViolationError("a closed iterator gave a batch")


# --- ways to end a `for` loop early: each gets a live iterator --------------------------------------------------------


def _drop(rig: Rig, iterator: Any, record: EpochRecord) -> None:
    del iterator


def _close(rig: Rig, iterator: Any, record: EpochRecord) -> None:
    rig.feeder.close()
    check_closed(iterator, record)


def _close_iterator(rig: Rig, iterator: Any, record: EpochRecord) -> None:
    iterator.close()
    check_closed(iterator, record)


def _close_from_thread(rig: Rig, iterator: Any, record: EpochRecord) -> None:
    thread = threading.Thread(target=rig.feeder.close)
    thread.start()
    try:
        # Batches that were finished before the close may follow.
        while True:
            next(iterator)
    except (IteratorClosedError, StopIteration):
        pass
    thread.join()


def _second(rig: Rig, iterator: Any, record: EpochRecord) -> None:
    other = iter(rig.feeder)
    check_closed(iterator, record)
    next(other, None)


def _collect(rig: Rig, iterator: Any, record: EpochRecord) -> None:
    del iterator
    gc.collect()


ENDINGS: dict[str, Callable[[Rig, Any, EpochRecord], None]] = {
    "dropped": _drop,
    "close": _close,
    "close from a thread": _close_from_thread,
    "iterator closed": _close_iterator,
    "a second iterator": _second,
    "collected": _collect,
}


def _draw_steps(episode: Episode, rig: Rig, record: EpochRecord) -> int:
    return episode.random.choice((0, 1, 2, episode.random.randint(0, len(record.expected) + 1)))


def leave(episode: Episode) -> None:
    """End `for` loops early, each in another way; then iterate over a complete epoch."""
    rig = episode.rig()
    for _ in range(episode.random.randint(1, 5)):
        way = episode.random.choice(("break", "exception", *ENDINGS))
        iterator = iter(rig.feeder)
        record = rig.start_record()
        steps = _draw_steps(episode, rig, record)
        episode.counts[f"ended by {way}"] += 1
        if way in ("break", "exception"):
            try:
                for batch in iterator:
                    record.add(batch)
                    if len(record.received) >= steps:
                        if way == "exception":
                            raise ZeroDivisionError
                        break
            except ZeroDivisionError:
                pass
            del iterator
            continue
        for _ in range(steps):
            batch = next(iterator, None)
            if batch is None:
                break
            record.add(batch)
        else:
            ENDINGS[way](rig, iterator, record)
        del iterator
    whole_epoch(rig)


# --- ways to end an `async for` loop early ----------------------------------------------------------------------------


async def _yield_to_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _leave_async(episode: Episode, rig: Rig, way: str) -> None:
    iterator = aiter(rig.feeder)
    record = rig.start_record()
    for _ in range(_draw_steps(episode, rig, record)):
        batch = await anext(iterator, None)
        if batch is None:
            return
        record.add(batch)
    if way == "cancel":
        task = asyncio.ensure_future(anext(iterator, None))
        await _yield_to_loop(episode.random.randrange(6))
        task.cancel()
        await asyncio.wait([task])
    elif way == "timeout":
        try:
            async with asyncio.timeout(0):
                await anext(iterator, None)
        except TimeoutError:
            episode.counts["timeouts"] += 1
    elif way == "aclose":
        await rig.feeder.aclose()
        check_closed(iterator, record)
    elif way == "iterator aclose":
        await iterator.aclose()
    elif way == "second":
        other = aiter(rig.feeder)
        check_closed(iterator, record)
        await anext(other, None)


def leave_async(episode: Episode) -> None:
    """End `async for` loops early, each in another way; then iterate over a complete epoch."""
    rig = episode.rig()

    async def body() -> None:
        for _ in range(episode.random.randint(1, 5)):
            way = episode.random.choice(("break", "cancel", "timeout", "aclose", "iterator aclose", "second"))
            episode.counts[f"ended by async {way}"] += 1
            await _leave_async(episode, rig, way)
        await whole_epoch_async(rig)
        if episode.random.random() < 0.5:
            await rig.feeder.aclose()

    asyncio.run(body())


def cancel_points(episode: Episode) -> None:
    """Cancel the consumer's wait again and again, after a random number of loop iterations: no batch is lost."""
    source = episode.random.choice(("coroutine", "many", "files"))
    fixed = {"source": source, "length": 96, "batch_size": episode.random.choice((1, 1, 2, 3)), "drop_last": False}
    rig = episode.rig(fixed=fixed)

    async def next_batch(iterator: Any) -> Any:
        return await anext(iterator, None)

    async def body() -> None:
        iterator = aiter(rig.feeder)
        record = rig.start_record()
        while True:
            if episode.random.random() < 0.1:
                try:
                    async with asyncio.timeout(episode.random.choice((0, 0.0001, 0.0005))):
                        batch = await anext(iterator, None)
                except TimeoutError:
                    episode.counts["timeouts"] += 1
                    continue
            else:
                task = asyncio.ensure_future(next_batch(iterator))
                await _yield_to_loop(episode.random.randrange(8))
                task.cancel()
                await asyncio.wait([task])
                if task.cancelled():
                    episode.counts["cancellations"] += 1
                    continue
                batch = task.result()
            if batch is None:
                break
            record.add(batch)
        record.check_complete()

    asyncio.run(body())


# --- several feeders, several epochs, copies and saved states ---------------------------------------------------------


def two_feeders(episode: Episode) -> None:
    """Two threads iterate over two feeders at the same time; both receive complete epochs."""
    rigs = [episode.rig(), episode.rig()]
    errors: list[BaseException] = []

    def run(rig: Rig) -> None:
        try:
            for _ in range(2):
                whole_epoch(rig)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rig,)) for rig in rigs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def epochs_in_a_row(episode: Episode) -> None:
    """`epochs(n)` yields n numbers; each epoch is complete."""
    rig = episode.rig()
    count = episode.random.randint(1, 5)
    numbers = []
    for number in rig.feeder.epochs(count):
        numbers.append(number)
        whole_epoch(rig)
        if rig.feeder.epoch != number:
            raise ViolationError(f"epoch {rig.feeder.epoch}, expected {number}")
    if numbers != list(range(count)):
        raise ViolationError(f"epochs({count}) yielded {numbers}")


def pickled(episode: Episode) -> None:
    """A feeder pickled in the middle of an epoch or between epochs delivers a complete epoch after unpickling."""
    rig = episode.rig(fixed={"latency": None})
    iterator = iter(rig.feeder)
    for _ in range(_draw_steps(episode, rig, rig.start_record())):
        next(iterator, None)
    rig.feeder = pickle.loads(pickle.dumps(rig.feeder))
    del iterator
    if hasattr(rig.source, "opened"):
        rig.source = rig.feeder._source
        rig.source.opened = rig.source.closed = 0
    whole_epoch(rig)


def resume(episode: Episode) -> None:
    """Save a state at a random point and load it into another feeder: both together deliver the epoch once."""
    first = episode.rig()
    if episode.random.random() < 0.3:
        whole_epoch(first)
    iterator = iter(first.feeder)
    before = first.start_record()
    for _ in range(episode.random.randint(0, max(len(before.expected) - 1, 0))):
        before.add(next(iterator))
    state = json.loads(json.dumps(first.feeder.state_dict()))
    for _ in range(episode.random.randrange(3)):
        next(iterator, None)
    if episode.random.random() < 0.5:
        first.feeder.close()
    del iterator
    other = replace(first.configuration, limits=draw_limits(episode.random))
    if first.configuration.source in ("coroutine", "files"):
        other = replace(other, read_delay=episode.random.choice(("none", "yields", "tail")))
    second = episode.rig(other)
    second.feeder.load_state_dict(state)
    iterator = iter(second.feeder)
    after = EpochRecord(second, before.epoch, before.received)
    if len(before.expected) == 0:
        return
    for batch in iterator:
        after.add(batch)
    after.check_complete()
    episode.counts["resumes"] += 1
    whole_epoch(second)


def feeder_dropped(episode: Episode) -> None:
    """Drop a feeder and its iterator without closing them."""
    rig = episode.rig()
    iterator = iter(rig.feeder)
    for _ in range(_draw_steps(episode, rig, rig.start_record())):
        next(iterator, None)
    rig.feeder = episode.rig(rig.configuration).feeder
    del iterator
