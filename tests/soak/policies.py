"""Episodes with failing samples under `on_error`: skipped, replaced, retried, or too many."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from aiofeed import FailurePolicy
from aiofeed.errors import BatchFailedError, TooManyFailures
from tests.soak.configurations import Configuration, EpochRecord, Rig, ViolationError
from tests.soak.episodes import Episode, whole_epoch


class ExpectedEpoch:
    """An epoch's batches and failures, computed from the documented rules.

    Args:
        configuration: the feeder's arguments.
        policy: the feeder's policy for failed samples.
        bad: the samples that fail.
        epoch: the epoch's number.
    """

    def __init__(self, configuration: Configuration, policy: FailurePolicy, bad: frozenset[int], epoch: int) -> None:
        with_last = replace(configuration, drop_last=False)
        order = [index for batch in with_last.expected(epoch) for index in batch]
        self.batches: list[list[int]] = []
        self.failed: list[int] = []
        self.raises = False
        position = 0
        for planned in configuration.expected(epoch):
            batch: list[int] = []
            for index in planned:
                if index not in bad:
                    batch.append(index)
                else:
                    self.failed.append(index)
                    if policy.action == "replace":
                        self._replace(order, position, bad, batch)
                position += 1
            self.raises |= len(set(self.failed)) > policy.allowed(configuration.length)
            if batch:  # otherwise it is left out
                self.batches.append(batch)
        self.raises |= bool(self.failed) and not self.batches

    def _replace(self, order: list[int], position: int, bad: frozenset[int], batch: list[int]) -> None:
        for step in range(1, len(order)):
            candidate = order[(position + step) % len(order)]
            if candidate not in bad:
                batch.append(candidate)
                return
            self.failed.append(candidate)
        self.raises = True


def policy(episode: Episode) -> None:
    """Skip or replace failed samples, within or beyond `max_failures`; then a complete epoch without failures."""
    random = episode.random
    drawn = FailurePolicy(
        random.choice(("skip", "replace")),
        retries=random.choice((0, 0, 1)),
        read_timeout_s=random.choice((None, None, 30.0)),
        decode_timeout_s=random.choice((None, None, 30.0)),
        max_failures=random.choice((0.05, 0.3, 1.0, 1, 5)),
    )
    # With in_order="samples", which batch a failed sample is in differs from run to run.
    fixed = {"source": random.choice(("coroutine", "many", "dataset")), "in_order": random.choice((True, False))}
    rig = episode.rig(fixed=fixed, on_error=drawn)
    episode.allowed += ["skipped: cannot", "replaced: cannot", "failed (", "is left out"]
    length = rig.configuration.length
    for _ in range(random.randint(1, 3)):
        bad = frozenset(random.sample(range(length), random.randint(0, max(1, length // random.choice((3, 8))))))
        # A failed read is retried after a pause, truncated bytes are not: this keeps episodes with retries short.
        kind = "failing_reads" if rig.configuration.source == "dataset" or not drawn.retries else "truncated"
        setattr(rig.faults, kind, bad)
        if random.random() < 0.3:
            _stop_early(rig, random.randint(0, 3))
        else:
            _epoch(episode, rig, drawn, bad)
        rig.feeder.close()  # read-ahead of the next epoch may have started, with the same failures
        rig.faults.clear()
    whole_epoch(rig)


def _stop_early(rig: Rig, batches: int) -> None:
    iterator = iter(rig.feeder)
    try:
        for _ in range(batches):
            next(iterator)
    except (StopIteration, TooManyFailures, BatchFailedError):
        pass


def _epoch(episode: Episode, rig: Rig, policy: FailurePolicy, bad: frozenset[int]) -> None:
    record: EpochRecord
    expected: ExpectedEpoch
    asynchronous = episode.random.random() < 0.4
    failures_before = len(rig.feeder.failures)

    def start_record() -> None:
        nonlocal record, expected
        record = rig.start_record()
        expected = ExpectedEpoch(rig.configuration, policy, bad, rig.feeder.epoch)
        record.expected = expected.batches

    def iterate() -> None:
        iterator = iter(rig.feeder)
        start_record()
        for batch in iterator:
            record.add(batch)

    async def iterate_async() -> None:
        iterator = aiter(rig.feeder)
        start_record()
        async for batch in iterator:
            record.add(batch)

    error: Any = None
    try:
        if asynchronous:
            asyncio.run(iterate_async())
        else:
            iterate()
    except (TooManyFailures, BatchFailedError) as raised:
        error = raised
        episode.counts[f"raised {type(raised).__name__}"] += 1
    if (error is not None) != expected.raises:
        case = f"{policy}, {bad} of {rig.configuration}"
        raise ViolationError(f"{case}: an error is {'' if expected.raises else 'not '}expected, raised {error!r}")
    if error is not None:
        return
    record.check_complete()
    failed = sorted(set(expected.failed))
    episode.counts["failures"] += len(failed)
    listed = sorted(failure.index for failure in rig.feeder.failures[failures_before:])
    if listed != failed:
        raise ViolationError(f"{policy}: samples {failed} failed, {listed} are listed")
