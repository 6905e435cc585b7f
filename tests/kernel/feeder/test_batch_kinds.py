"""Every kind of batches with every way to use a feeder: loops, devices, servers, epochs, ranks, state."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aiofeed import Feeder, Limits, attach, serve
from aiofeed.errors import StateError
from tests.support.batch_kinds import KINDS, all_tokens, tensor, tokens
from tests.support.simulated_device import SimulatedDevice

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.parametrize("kind", KINDS)]

EPOCHS = 3


@pytest.fixture
def expected(kind: str) -> Iterator[list[list[int]]]:
    """The batches of three epochs, one after the other."""
    with KINDS[kind](shard=None) as feeder:
        yield [batch for _ in range(EPOCHS) for batch in all_tokens(feeder)]


def three_epochs(feeder: Feeder[Any]) -> list[list[int]]:
    with feeder:
        return [batch for _ in feeder.epochs(EPOCHS) for batch in all_tokens(feeder)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device": SimulatedDevice()},
        {"device": [SimulatedDevice()]},
        {"engine": "process:2"},
        {"on_error": "skip"},
        {"on_error": "replace"},
        {"limits": Limits(read_concurrency=1, decode_threads=1, prefetch_batches=1)},
        {"transform": lambda batch: batch},
    ],
    ids=lambda options: "-".join(f"{name}={type(value).__name__}" for name, value in options.items()),
)
def test_the_same_batches_with_any_option(kind: str, options: dict[str, Any], expected: list[list[int]]) -> None:
    """In three epochs, of which the next is read ahead; or the option is refused with the reason."""
    if kind.startswith("samples") and "engine" in options:
        with pytest.raises(ValueError, match=r'^in_order="samples" is not possible with engine='):
            KINDS[kind](shard=None, **options)
        return
    if kind == "stream" and ("engine" in options or "on_error" in options):
        with pytest.raises(ValueError, match=r"is not possible with Stream\(documents"):
            KINDS[kind](shard=None, **options)
        return
    if "packed" in kind and (options.get("on_error") == "replace" or isinstance(options.get("device"), list)):
        with pytest.raises(ValueError, match=r"with Pack: (it plans the place of every token|cu_seqlens is one)"):
            KINDS[kind](shard=None, **options)
        return
    feeder = KINDS[kind](shard=None, **options)
    if isinstance(options.get("device"), list):
        with feeder:
            found = [tokens(part) for _ in feeder.epochs(EPOCHS) for [part] in feeder]
    else:
        found = three_epochs(feeder)
    assert found == expected


def test_async_for_gives_the_same_batches(kind: str, expected: list[list[int]]) -> None:
    """In three epochs."""

    async def collect() -> list[list[int]]:
        async with KINDS[kind](shard=None) as feeder:
            return [tokens(batch) for _ in feeder.epochs(EPOCHS) async for batch in feeder]

    assert asyncio.run(collect()) == expected


def test_out_of_order_every_batch_comes_once(kind: str, expected: list[list[int]]) -> None:
    """In any order."""
    assert sorted(three_epochs(KINDS[kind](shard=None, in_order=False))) == sorted(expected)


def test_a_resume_after_any_batch_is_exact(kind: str, expected: list[list[int]]) -> None:
    """The state survives JSON; one feeder is resumed again and again."""
    with KINDS[kind](shard=None) as feeder, KINDS[kind](shard=None) as resumed:
        for handed_out, _ in enumerate(feeder.steps(len(expected) - 2), 1):
            state = json.loads(json.dumps(feeder.state_dict()))
            if handed_out % 3 == 0:
                resumed.load_state_dict(state)
                left = resumed.steps(min(3, len(expected) - handed_out))
                assert all_tokens(left) == expected[handed_out : handed_out + 3]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_have_equally_many_batches_that_are_those_of_one_process(
    kind: str, world_size: int, drop_last: bool
) -> None:
    """From the start, and after the state of one process in the middle of the epoch."""
    with KINDS[kind](shard=None, drop_last=drop_last) as whole:
        complete = all_tokens(whole)
        whole.set_epoch(0)
        list(itertools.islice(whole.steps(7), 4))
        state = json.loads(json.dumps(whole.state_dict()))
        rest = all_tokens(whole.steps(len(complete) - 4))
    starts = [(None, complete), (state, rest)]
    if kind.startswith("samples"):  # each rank has returned other samples
        with (
            KINDS[kind](shard=(0, world_size), drop_last=drop_last) as part,
            pytest.raises(StateError, match="world_size"),
        ):
            part.load_state_dict(state)
        starts.pop()
    for start, wanted in starts:
        ranks = []
        for rank in range(world_size):
            with KINDS[kind](shard=(rank, world_size), drop_last=drop_last) as part:
                if start is not None:
                    part.load_state_dict(start)
                ranks.append(all_tokens(part))
                assert kind == "stream" or start is not None or len(part) == len(ranks[-1])
        assert len(set(map(len, ranks))) == 1
        together = {token for batches in ranks for batch in batches for token in batch}
        needed = {token for batch in wanted for token in batch}
        if drop_last and kind != "batch sampler":  # which has no drop_last=
            assert together <= needed
        else:
            # Padding repeats the head of the epoch.
            assert needed <= together <= {token for batch in complete for token in batch}


def test_consumers_of_a_server_get_the_batches(kind: str, expected: list[list[int]], tmp_path: Path) -> None:
    """Each of two consumers gets every batch of an epoch."""
    address = tmp_path / "feed"
    with KINDS[kind](shard=None) as feeder:
        first = len(all_tokens(feeder))
        feeder.set_epoch(0)

        def consume() -> list[list[int]]:
            with attach(address) as feed:
                return all_tokens(feed)

        with serve(feeder, address, min_consumers=2), ThreadPoolExecutor() as pool:
            consumers = [pool.submit(consume) for _ in range(2)]
            for consumer in consumers:
                assert consumer.result(30) == expected[:first]


def test_a_break_stops_the_feed_and_the_next_loop_is_the_next_epoch(kind: str, expected: list[list[int]]) -> None:
    """Many times in a row."""
    with KINDS[kind](shard=None) as feeder:
        for _ in range(20):
            feeder.set_epoch(0)
            for batch in feeder:
                assert tokens(batch) == expected[0]
                break
        state = feeder.state_dict()
        feeder.load_state_dict(state)
        assert tokens(next(iter(feeder))) == expected[1]


def test_a_kept_batch_is_never_overwritten(kind: str, expected: list[list[int]]) -> None:
    """Batches that are kept stay as they are, whatever is written into others; so does the source."""
    with KINDS[kind](shard=None) as feeder:
        kept = [batch for _ in feeder.epochs(EPOCHS) for batch in feeder]
        tensor(kept[0]).zero_()
        assert all_tokens(kept[1:]) == expected[1:]
        feeder.set_epoch(0)
        assert all_tokens(feeder.steps(3)) == expected[:3]
