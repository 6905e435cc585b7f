"""Look-ahead: samples of a shard that are in the order soon are read together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiofeed
from aiofeed.kernel.core.faces import AdaptedSource
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.objects.look_ahead import LookAhead
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("forked_workers")

SHARD = 50
SAMPLES = 500
SAMPLE_BYTES = 1000


class Sharded:
    """Ten shards of fifty samples of 1,000 bytes; records the groups that are read."""

    looks_ahead = True

    def __init__(self, samples: int = SAMPLES) -> None:
        self.shard_starts = range(0, samples + 1, SHARD)
        self.groups: list[list[int]] = []
        self.single: list[int] = []
        self.failing: set[int] = set()
        self.held_back: asyncio.Event | None = None
        self.taken = self.most = self.read_samples = 0

    def __len__(self) -> int:
        return self.shard_starts[-1]

    def key(self, index: int) -> str:
        return f"sample {index}"

    def nbytes(self, index: int) -> int:
        return SAMPLE_BYTES

    async def read(self, index: int) -> bytes:
        self.single.append(index)
        if index in self.failing:
            raise OSError(f"no sample {index}")
        return index.to_bytes(2, "little") * (SAMPLE_BYTES // 2)

    async def read_many(self, indices: Sequence[int]) -> list[Any]:
        self.groups.append(list(indices))
        self.read_samples += len(indices)
        self.most = max(self.most, self.read_samples - self.taken)
        await asyncio.sleep(0)
        if self.held_back is not None:
            await self.held_back.wait()
        return await asyncio.gather(*[Sharded.read(self, index) for index in indices], return_exceptions=True)

    def decode(self, data: bytes) -> torch.Tensor:
        self.taken += 1
        return torch.tensor(int.from_bytes(data[:2], "little"))


def new_feeder(source: Sharded, nbytes: int = 200 * SAMPLE_BYTES, **arguments: Any) -> aiofeed.Feeder[Any]:
    limits = aiofeed.Limits(lookahead_bytes=nbytes, read_concurrency=arguments.pop("read_concurrency", 16))
    chosen = {"batch_size": 8, "shuffle": True, "seed": 1, "limits": limits, **arguments}
    return aiofeed.Feeder(source, decode=source.decode, **chosen)


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


def test_the_order_is_unchanged_and_reads_are_joined() -> None:
    """A shuffled epoch reads each sample once, many of a shard together, and none of two shards."""
    joined, plain = Sharded(), Sharded()
    plain.looks_ahead = False
    with new_feeder(joined) as feeder, new_feeder(plain) as other:
        assert numbers(feeder) == numbers(other)
    assert sorted(index for group in joined.groups for index in group) == list(range(SAMPLES))
    assert all(len({index // SHARD for index in group}) == 1 for group in joined.groups)
    assert len(joined.groups) < SAMPLES / 4


def test_the_look_ahead_is_bounded_in_bytes() -> None:
    """No more samples are read ahead than its bytes, beside those of the engine's own batches."""
    source = Sharded()
    with new_feeder(
        source,
        100 * SAMPLE_BYTES,
        limits=aiofeed.Limits(
            lookahead_bytes=100 * SAMPLE_BYTES, read_concurrency=8, prefetch_batches=1, decode_threads=1
        ),
    ) as feeder:
        assert len(numbers(feeder)) == SAMPLES
    assert source.most <= 100 + 8 * 6


def test_the_first_batch_waits_for_its_own_samples_only() -> None:
    """The look-ahead grows with what was read."""
    source = Sharded()
    with new_feeder(source, 1 << 40, read_concurrency=8) as feeder:
        next(iter(feeder))
        assert sum(map(len, source.groups[:8])) <= 16


def test_reads_of_the_next_epoch_begin_before_this_one_ends() -> None:
    """With `epochs`, the order of the next epoch is known."""
    source = Sharded()
    with new_feeder(source) as feeder:
        for _ in feeder.epochs(2):
            assert len(numbers(feeder)) == SAMPLES
            until(lambda: source.read_samples > SAMPLES)
            break


@pytest.mark.parametrize("action", ["skip", "replace"])
def test_failures_are_those_of_their_samples(action: Any) -> None:
    """A sample that cannot be read does not fail the others of its group."""
    source = Sharded()
    source.failing = {3, 77, 78}
    with new_feeder(source, on_error=action) as feeder:
        seen = numbers(feeder)
        assert feeder.statistics().failures == 3
    assert set(seen) == set(range(SAMPLES)) - source.failing
    assert len(seen) == SAMPLES - 3 * (action == "skip")


def test_an_error_names_its_sample() -> None:
    """Also if the whole group raises."""
    source = Sharded()

    async def broken(indices: Sequence[int]) -> list[Any]:
        raise OSError("the shard is gone")

    source.read_many = broken  # type: ignore[method-assign]
    source.failing = set(range(SAMPLES))
    with new_feeder(source) as feeder, pytest.raises(aiofeed.errors.ReadError, match="sample"):
        next(iter(feeder))


@pytest.mark.parametrize(
    "raised", [OSError("gone"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr
)
def test_groups_that_raise_are_read_again_with_their_batch(raised: type[BaseException]) -> None:
    """Whatever the source raises while it reads ahead, the samples are read when their batches begin."""
    source = Sharded()
    read_many, calls = source.read_many, 0

    async def fails_first(indices: Sequence[int]) -> list[Any]:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise raised
        return await read_many(indices)

    source.read_many = fails_first  # type: ignore[method-assign]
    with new_feeder(source) as feeder:
        assert sorted(numbers(feeder)) == list(range(SAMPLES))


def test_samples_that_are_noted_and_not_begun_are_read_at_once() -> None:
    """A replacement may be a sample of a later batch, whose group is not being read."""

    async def check() -> None:
        source = Sharded()
        ahead = LookAhead(AdaptedSource(source), 1 << 20)
        plans = [BatchPlan(at, [at * SHARD], [at], 0) for at in range(10)]
        with ahead.reading_ahead(plans, asyncio.to_thread, 1) as steps:
            for _ in range(2):
                next(steps)
            values = await ahead.read([9 * SHARD, 0], BatchPlan(10, [], [], 0), 0)
            assert [int.from_bytes(value[:2], "little") for value in values] == [9 * SHARD, 0]
            rest = [await ahead.read(plan.indices, plan, 0) for plan in [plans[1], *steps]]
        assert [int.from_bytes(value[:2], "little") for [value] in rest] == list(range(SHARD, SAMPLES, SHARD))

    asyncio.run(check())


def test_a_break_ends_reads_that_were_begun() -> None:
    """Nothing is read after `close`, and reads that wait are cancelled."""
    source = Sharded()
    with new_feeder(source) as feeder:
        iterator = iter(feeder)
        next(iterator)
        source.held_back = asyncio.Event()
        del iterator
    read = source.read_samples
    with new_feeder(Sharded()) as feeder:
        assert len(numbers(feeder)) == SAMPLES
    assert source.read_samples == read


def test_reads_over_their_time_limit_fail_alone() -> None:
    """The group goes on; samples are then read one by one."""
    source = Sharded()
    source.held_back = asyncio.Event()
    policy = aiofeed.FailurePolicy(read_timeout_s=0.05)
    with new_feeder(source, on_error=policy) as feeder:
        assert len(next(iter(feeder))) == 8


def test_a_read_that_is_given_up_keeps_no_samples() -> None:
    """A read over its time limit is cancelled, and the samples of its batch go."""

    async def check() -> None:
        source = Sharded()
        source.held_back = asyncio.Event()
        ahead = LookAhead(AdaptedSource(source), 1 << 20)
        plans = [BatchPlan(at, [at * SHARD], [at], 0) for at in range(3)]
        with ahead.reading_ahead(plans, asyncio.to_thread, 1) as steps:
            for plan in steps:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0):
                        await ahead.read(plan.indices, plan, 0)
            assert not ahead._upcoming.noted

    asyncio.run(check())


def test_samples_that_come_several_times_are_read_for_each_window() -> None:
    """Draws with replacement may have a sample twice among those that are needed soon."""
    source = Sharded()
    with new_feeder(source, shuffle="replacement") as feeder:
        first = numbers(feeder)
    plain = Sharded()
    plain.looks_ahead = False
    with new_feeder(plain, shuffle="replacement") as feeder:
        assert numbers(feeder) == first
    assert len(set(first)) < SAMPLES


@pytest.mark.parametrize(
    "arguments",
    [
        {"in_order": False},
        {"in_order": "samples"},
        {"device": "simulated"},
        {"cache": "host"},
        {"shuffle": "window:2"},
        {"weights": [1.0] * SAMPLES},
        {"sampler": range(SAMPLES)},
        {"batch_sampler": [[0, 50, 100], [499, 1]], "batch_size": None, "shuffle": False},
        {"engine": "process"},
    ],
    ids=str,
)
def test_it_goes_with(arguments: dict[str, Any]) -> None:
    """The same batches as without look-ahead, in two epochs."""
    if "weights" in arguments or "sampler" in arguments:
        arguments = {**arguments, "shuffle": False}
    found = []
    for looks_ahead in (True, False):
        source = Sharded()
        source.looks_ahead = looks_ahead
        chosen = {**arguments, "device": SimulatedDevice()} if "device" in arguments else arguments
        with new_feeder(source, **chosen) as feeder:
            orders = [numbers(feeder) for _ in range(2)]
        found.append([sorted(order) for order in orders] if "in_order" in arguments else orders)
    assert found[0] == found[1]


def test_async_loops_and_steps() -> None:
    """`async for`, and `steps` over the ends of epochs."""
    source = Sharded()

    async def all_numbers(feeder: aiofeed.Feeder[Any]) -> list[int]:
        return [number async for batch in feeder for number in batch.tolist()]

    with new_feeder(source) as feeder:
        assert sorted(asyncio.run(all_numbers(feeder))) == list(range(SAMPLES))
        assert len(numbers(feeder.steps(100))) >= 100 * 7


@hypothesis.settings(max_examples=6, deadline=None)
@given(position=st.integers(0, 62), nbytes=st.integers(1, SAMPLES * SAMPLE_BYTES))
def test_resume_is_exact(position: int, nbytes: int) -> None:
    """The rest of an epoch after a saved state is the same as without a break, whatever the look-ahead."""
    with new_feeder(Sharded()) as feeder:
        whole = numbers(feeder)
    with new_feeder(Sharded(), nbytes) as feeder:
        iterator: Iterator[Any] = iter(feeder)
        done = [number for _ in range(position) for number in next(iterator).tolist()]
        state = feeder.state_dict()
    with new_feeder(Sharded(), nbytes) as feeder:
        feeder.load_state_dict(state)
        assert [*done, *numbers(feeder)] == whole
