"""Kinds of episodes without a fault: epochs opened, left in some way, and followed by one that is whole."""

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

from aiofeed import IteratorClosedError
from tests.soak.configurations import Configuration, Pass, Rig, ViolationError, draw, draw_limits


@dataclass
class Episode:
    """What an episode works with.

    Args:
        random: all its choices.
        folder: where real files are.
        tally: what is counted.
        rigs: the feeders it made, to be looked at afterwards.
        allowed: what log lines may contain.
        after: called once its threads are gone.
    """

    random: random.Random
    folder: Path
    tally: Counter[str]
    rigs: list[Rig] = field(default_factory=list)
    # Some are drawn too short for a batch, which is told of.
    allowed: list[str] = field(default_factory=lambda: ["an epoch has no batches"])
    after: list[Callable[[], None]] = field(default_factory=list)

    def rig(
        self, configuration: Configuration | None = None, *, fixed: dict[str, Any] | None = None, **more: Any
    ) -> Rig:
        """A feeder of a drawn configuration."""
        drawn = configuration or draw(self.random, self.folder, **(fixed or {}))
        self.rigs.append(Rig(drawn, self.folder, self.tally, **more))
        return self.rigs[-1]


def whole_epoch(rig: Rig) -> None:
    """One epoch from its first batch to its end, right in every sample."""
    iterator = iter(rig.feeder)
    seen = rig.begin()
    for batch in iterator:
        seen.take(batch)
    seen.complete()


async def whole_epoch_async(rig: Rig) -> None:
    """The same, asynchronously."""
    iterator = aiter(rig.feeder)
    seen = rig.begin()
    async for batch in iterator:
        seen.take(batch)
    seen.complete()


def refused(iterator: Any, seen: Pass) -> None:
    """An iterator that was closed says so; one that had handed out everything may say that."""
    try:
        next(iterator)
    except IteratorClosedError:
        return
    except StopIteration:
        if len(seen.got) == len(seen.wanted):
            return
        raise ViolationError("a closed iterator raised StopIteration") from None
    raise ViolationError("a closed iterator gave a batch")


# --- ways to leave, for an ordinary loop: each gets a live iterator ---------------------------------------------------


def _drop(rig: Rig, iterator: Any, seen: Pass) -> None:
    del iterator


def _close(rig: Rig, iterator: Any, seen: Pass) -> None:
    rig.feeder.close()
    refused(iterator, seen)


def _close_iterator(rig: Rig, iterator: Any, seen: Pass) -> None:
    iterator.close()
    refused(iterator, seen)


def _close_from_a_thread(rig: Rig, iterator: Any, seen: Pass) -> None:
    thread = threading.Thread(target=rig.feeder.close)
    thread.start()
    try:
        # Until it is closed; a batch that was finished before may come still.
        while True:
            next(iterator)
    except (IteratorClosedError, StopIteration):
        pass
    thread.join()


def _second(rig: Rig, iterator: Any, seen: Pass) -> None:
    other = iter(rig.feeder)
    refused(iterator, seen)
    next(other, None)


def _collect(rig: Rig, iterator: Any, seen: Pass) -> None:
    del iterator
    gc.collect()


WAYS: dict[str, Callable[[Rig, Any, Pass], None]] = {
    "dropped": _drop,
    "close": _close,
    "close from a thread": _close_from_a_thread,
    "iterator closed": _close_iterator,
    "a second iterator": _second,
    "collected": _collect,
}


def _some(episode: Episode, rig: Rig, seen: Pass) -> int:
    return episode.random.choice((0, 1, 2, episode.random.randint(0, len(seen.wanted) + 1)))


def leave(episode: Episode) -> None:
    """An ordinary loop that is left in one way after another."""
    rig = episode.rig()
    for _ in range(episode.random.randint(1, 5)):
        way = episode.random.choice(("break", "exception", *WAYS))
        iterator = iter(rig.feeder)
        seen = rig.begin()
        steps = _some(episode, rig, seen)
        episode.tally[f"left by {way}"] += 1
        if way in ("break", "exception"):
            try:
                for batch in iterator:
                    seen.take(batch)
                    if len(seen.got) >= steps:
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
            seen.take(batch)
        else:
            WAYS[way](rig, iterator, seen)
        del iterator
    whole_epoch(rig)


# --- ways to leave, for asynchronous code -----------------------------------------------------------------------------


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _leave_async(episode: Episode, rig: Rig, way: str) -> None:
    iterator = aiter(rig.feeder)
    seen = rig.begin()
    for _ in range(_some(episode, rig, seen)):
        batch = await anext(iterator, None)
        if batch is None:
            return
        seen.take(batch)
    if way == "cancel":
        task = asyncio.ensure_future(anext(iterator, None))
        await _turns(episode.random.randrange(6))
        task.cancel()
        await asyncio.wait([task])
    elif way == "timeout":
        try:
            async with asyncio.timeout(0):
                await anext(iterator, None)
        except TimeoutError:
            episode.tally["timeouts"] += 1
    elif way == "aclose":
        await rig.feeder.aclose()
        refused(iterator, seen)
    elif way == "iterator aclose":
        await iterator.aclose()
    elif way == "second":
        other = aiter(rig.feeder)
        refused(iterator, seen)
        await anext(other, None)


def leave_async(episode: Episode) -> None:
    """The same for a loop of asynchronous code."""
    rig = episode.rig()

    async def body() -> None:
        for _ in range(episode.random.randint(1, 5)):
            way = episode.random.choice(("break", "cancel", "timeout", "aclose", "iterator aclose", "second"))
            episode.tally[f"left by async {way}"] += 1
            await _leave_async(episode, rig, way)
        await whole_epoch_async(rig)
        if episode.random.random() < 0.5:
            await rig.feeder.aclose()

    asyncio.run(body())


def cancel_points(episode: Episode) -> None:
    """A consumer that is cancelled at its wait after a random number of turns, again and again, loses no batch."""
    source = episode.random.choice(("coroutine", "many", "files"))
    fixed = {"source": source, "length": 96, "batch_size": episode.random.choice((1, 1, 2, 3)), "drop_last": False}
    rig = episode.rig(fixed=fixed)

    async def ask(iterator: Any) -> Any:
        return await anext(iterator, None)

    async def body() -> None:
        iterator = aiter(rig.feeder)
        seen = rig.begin()
        while True:
            if episode.random.random() < 0.1:
                try:
                    async with asyncio.timeout(episode.random.choice((0, 0.0001, 0.0005))):
                        batch = await anext(iterator, None)
                except TimeoutError:
                    episode.tally["timeouts"] += 1
                    continue
            else:
                task = asyncio.ensure_future(ask(iterator))
                await _turns(episode.random.randrange(8))
                task.cancel()
                await asyncio.wait([task])
                if task.cancelled():
                    episode.tally["cancellations"] += 1
                    continue
                batch = task.result()
            if batch is None:
                break
            seen.take(batch)
        seen.complete()

    asyncio.run(body())


# --- several, elsewhere, later ----------------------------------------------------------------------------------------


def two_feeders(episode: Episode) -> None:
    """Two feeders iterated at once by two threads do not disturb each other."""
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
    """`epochs(n)`: as many as were asked for, each whole, with the next read ahead."""
    rig = episode.rig()
    count = episode.random.randint(1, 5)
    numbers = []
    for number in rig.feeder.epochs(count):
        numbers.append(number)
        whole_epoch(rig)
        if rig.feeder.epoch != number:
            raise ViolationError(f"epoch {rig.feeder.epoch} where {number} was announced")
    if numbers != list(range(count)):
        raise ViolationError(f"epochs({count}) gave {numbers}")


def pickled(episode: Episode) -> None:
    """A feeder that travels, in the middle of an epoch or between epochs, works where it arrives."""
    rig = episode.rig(fixed={"latency": None})
    iterator = iter(rig.feeder)
    for _ in range(_some(episode, rig, rig.begin())):
        next(iterator, None)
    rig.feeder = pickle.loads(pickle.dumps(rig.feeder))
    del iterator
    if hasattr(rig.source, "opened"):
        rig.source = rig.feeder._source
        rig.source.opened = rig.source.closed = 0
    whole_epoch(rig)


def resume(episode: Episode) -> None:
    """A state saved at a random point and loaded by another feeder: together one epoch, no more and no less."""
    first = episode.rig()
    if episode.random.random() < 0.3:
        whole_epoch(first)
    iterator = iter(first.feeder)
    before = first.begin()
    for _ in range(episode.random.randint(0, max(len(before.wanted) - 1, 0))):
        before.take(next(iterator))
    state = json.loads(json.dumps(first.feeder.state_dict()))
    for _ in range(episode.random.randrange(3)):
        next(iterator, None)
    if episode.random.random() < 0.5:
        first.feeder.close()
    del iterator
    other = replace(first.configuration, limits=draw_limits(episode.random))
    if first.configuration.source in ("coroutine", "files"):
        other = replace(other, weather=episode.random.choice(("calm", "turns", "tail")))
    second = episode.rig(other)
    second.feeder.load_state_dict(state)
    iterator = iter(second.feeder)
    after = Pass(second, before.epoch, before.got)
    if len(before.wanted) == 0:
        return
    for batch in iterator:
        after.take(batch)
    after.complete()
    episode.tally["resumes"] += 1
    whole_epoch(second)


def feeder_dropped(episode: Episode) -> None:
    """A feeder and its iterator that are simply forgotten."""
    rig = episode.rig()
    iterator = iter(rig.feeder)
    for _ in range(_some(episode, rig, rig.begin())):
        next(iterator, None)
    rig.feeder = episode.rig(rig.configuration).feeder
    del iterator
