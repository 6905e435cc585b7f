"""Episodes in which samples fail and the epoch goes on: skipped, replaced, tried again, or too many in the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from aiofeed import BatchFailedError, FailurePolicy, TooManyFailures
from tests.soak.configurations import Configuration, Pass, Rig, ViolationError
from tests.soak.episodes import Episode


class Foreseen:
    """What an epoch should give by the rules alone.

    Args:
        configuration: the feeder's arguments.
        policy: what becomes of failures.
        bad: the samples that fail.
        epoch: which epoch.
    """

    def __init__(self, configuration: Configuration, policy: FailurePolicy, bad: frozenset[int], epoch: int) -> None:
        whole = configuration.expected(epoch)
        order = [index for batch in Configuration.expected(_undropped(configuration), epoch) for index in batch]
        self.batches: list[list[int]] = []
        self.met: list[int] = []
        self.fails = False
        position = 0
        for batch in whole:
            made: list[int] = []
            for index in batch:
                if index not in bad:
                    made.append(index)
                else:
                    self.met.append(index)
                    if policy.action == "replace":
                        self._replace(order, position, bad, made)
                position += 1
            self.fails |= not made or len(set(self.met)) > policy.allowed(configuration.length)
            self.batches.append(made)

    def _replace(self, order: list[int], position: int, bad: frozenset[int], made: list[int]) -> None:
        for step in range(1, len(order)):
            candidate = order[(position + step) % len(order)]
            if candidate not in bad:
                made.append(candidate)
                return
            self.met.append(candidate)
        self.fails = True


def _undropped(configuration: Configuration) -> Configuration:
    return replace(configuration, drop_last=False)


def policy(episode: Episode) -> None:
    """Skip or replace, within or beyond `max_failures`; then a whole epoch without failures."""
    random = episode.random
    asked = FailurePolicy(
        random.choice(("skip", "replace")),
        retries=random.choice((0, 0, 1)),
        read_timeout_s=random.choice((None, None, 30.0)),
        decode_timeout_s=random.choice((None, None, 30.0)),
        max_failures=random.choice((0.05, 0.3, 1.0, 1, 5)),
    )
    rig = episode.rig(fixed={"source": random.choice(("coroutine", "many", "dataset"))}, on_error=asked)
    episode.allowed += ["skipped: cannot", "replaced: cannot", "samples failed"]
    length = rig.configuration.length
    for _ in range(random.randint(1, 3)):
        bad = frozenset(random.sample(range(length), random.randint(0, max(1, length // random.choice((3, 8))))))
        # Too few bytes fail to decode at once; a read that fails may pass, and is tried again after a pause.
        kind = "unread" if rig.configuration.source == "dataset" or not asked.retries else "short"
        setattr(rig.faults, kind, bad)
        if random.random() < 0.3:
            _leave_early(rig, random.randint(0, 3))
        else:
            _epoch(episode, rig, asked, bad)
        rig.feeder.close()  # the next epoch may have been begun, with the same failures
        rig.faults.clear()
    iterator = iter(rig.feeder)
    seen = rig.begin()
    for batch in iterator:
        seen.take(batch)
    seen.complete()


def _leave_early(rig: Rig, batches: int) -> None:
    iterator = iter(rig.feeder)
    try:
        for _ in range(batches):
            next(iterator)
    except (StopIteration, TooManyFailures, BatchFailedError):
        pass


def _epoch(episode: Episode, rig: Rig, asked: FailurePolicy, bad: frozenset[int]) -> None:
    asynchronous = episode.random.random() < 0.4
    known = len(rig.feeder.failures)
    seen: list[Pass] = []
    foreseen: list[Foreseen] = []

    def begin() -> None:
        seen.append(rig.begin())
        foreseen.append(Foreseen(rig.configuration, asked, bad, rig.feeder.epoch))
        seen[0].wanted = foreseen[0].batches

    def ordinary() -> None:
        iterator = iter(rig.feeder)
        begin()
        for batch in iterator:
            seen[0].take(batch)

    async def in_a_loop() -> None:
        iterator = aiter(rig.feeder)
        begin()
        async for batch in iterator:
            seen[0].take(batch)

    error: Any = None
    try:
        if asynchronous:
            asyncio.run(in_a_loop())
        else:
            ordinary()
    except (TooManyFailures, BatchFailedError) as raised:
        error = raised
        episode.tally[f"raised {type(raised).__name__}"] += 1
    if (error is not None) != foreseen[0].fails:
        raise ViolationError(f"{asked}, {bad} of {rig.configuration}: foreseen {foreseen[0].fails}, raised {error!r}")
    if error is not None:
        return
    seen[0].complete()
    episode.tally["failures"] += len(set(foreseen[0].met))
    listed = [failure.index for failure in rig.feeder.failures[known:]]
    if sorted(listed) != sorted(set(foreseen[0].met)):
        raise ViolationError(f"{asked}: {sorted(set(foreseen[0].met))} failed, {sorted(listed)} are listed")
