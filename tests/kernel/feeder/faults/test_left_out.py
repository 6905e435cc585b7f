"""A batch all of whose samples are skipped: left out on one rank, an error on several."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from aiofeed import DataLoader, FailurePolicy, Feeder, Stream, TokenBudget
from aiofeed.errors import BatchFailedError
from tests.support.interrupts import Interrupt
from tests.support.simulated_device import SimulatedDevice

SKIP = FailurePolicy("skip", max_failures=24)
LENGTH, SIZE = 24, 4

FIRST, MIDDLE, LAST = range(4), range(8, 12), range(20, 24)
PLACES = [FIRST, MIDDLE, LAST, [*FIRST, *MIDDLE, *LAST], range(8, 20)]


class Numbers(Dataset[int]):
    """The numbers below 24; those in `bad` fail."""

    def __init__(self, bad: Iterable[int] = ()) -> None:
        self.bad = frozenset(bad)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"{index} is bad")
        return index


class Items(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(LENGTH))


def decoder(bad: Iterable[int]) -> Callable[[int], int]:
    return Numbers(bad).__getitem__


def on_device(bad: Iterable[int], **options: Any) -> Feeder[Any]:
    return Feeder(Numbers(bad), batch_size=SIZE, on_error=SKIP, device=SimulatedDevice(), **options)


def of_plan(bad: Iterable[int], **options: Any) -> Feeder[Any]:
    plan = TokenBudget([1] * LENGTH, max_tokens=SIZE)
    return Feeder(Numbers(bad), batch_size=plan, on_error=SKIP, **options)


def of_stream(bad: Iterable[int], **options: Any) -> Feeder[Any]:
    return Feeder(Stream(Items()), decode=decoder(bad), batch_size=SIZE, on_error=SKIP, **options)


def in_samples(bad: Iterable[int], **options: Any) -> Feeder[Any]:
    # Chunks and batches are the same here: one thread takes the samples in order.
    return Feeder(Numbers(bad), batch_size=SIZE, on_error=SKIP, in_order="samples", **options)


KINDS: dict[str, Callable[..., Feeder[Any]]] = {
    "dataset": lambda bad, **options: Feeder(Numbers(bad), batch_size=SIZE, on_error=SKIP, **options),
    "device": on_device,
    "plan": of_plan,
    "stream": of_stream,
    "as finished": lambda bad, **options: Feeder(
        Numbers(bad), batch_size=SIZE, on_error=SKIP, in_order=False, **options
    ),
    "samples": in_samples,
    "cache": lambda bad, **options: Feeder(Numbers(bad), batch_size=SIZE, on_error=SKIP, cache="host", **options),
}


def values(batches: Iterable[torch.Tensor]) -> list[int]:
    return [value for batch in batches for value in batch.cpu().tolist()]


def good(bad: Iterable[int]) -> list[int]:
    return sorted(set(range(LENGTH)) - set(bad))


@pytest.mark.parametrize("bad", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_which_nothing_is_left_is_left_out(kind: str, bad: Iterable[int]) -> None:
    """The other batches come, in each epoch; the statistics count those that were left out."""
    with KINDS[kind](bad) as feeder:
        for epoch in range(2):
            assert sorted(values(feeder)) == good(bad)
            found = feeder.statistics()
            assert found.batches_left_out == LENGTH // SIZE - found.batches == len(set(bad)) // SIZE
            assert (found.failures, found.samples) == (len(set(bad)), LENGTH - len(set(bad)))
            assert feeder.state_dict()["epoch"] == epoch + 1
        if kind != "stream":
            assert len(feeder) == LENGTH // SIZE


@pytest.mark.usefixtures("forked_workers")
def test_processes_leave_it_out_too() -> None:
    """With `engine="process"` the batches, the counts and the states are the same."""
    with Feeder(Numbers(MIDDLE), batch_size=SIZE, on_error=SKIP, engine="process:2") as feeder:
        assert values(feeder) == good(MIDDLE)
        assert feeder.statistics().batches_left_out == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [MIDDLE, [*FIRST, *MIDDLE, *LAST]])
def test_a_resumed_epoch_goes_on_behind_it(kind: str, bad: Iterable[int]) -> None:
    """A state after each batch: no sample comes twice and none is missing, also if only the left-out batch remains."""
    with KINDS[kind](bad) as feeder:
        got: list[int] = []
        for batch in feeder:
            got += values([batch])
            state = json.loads(json.dumps(feeder.state_dict()))
            with KINDS[kind](bad) as resumed:
                resumed.load_state_dict(state)
                # Behind the last batch of an epoch the next one begins.
                rest = values(resumed) if state["epoch"] == 0 else []
            assert sorted(got + rest) == good(bad)
        assert sorted(got) == good(bad)


def test_the_state_counts_it() -> None:
    """Its samples, which cannot be read, are not asked for again."""
    with KINDS["dataset"](FIRST) as feeder:
        iterator = iter(feeder)
        next(iterator)
        assert feeder.state_dict()["position"] == 2 * SIZE


def test_steps_are_batches_that_came() -> None:
    """`feeder.steps(n)` gives n batches, whatever was left out between."""
    with KINDS["dataset"]([*FIRST, *LAST]) as feeder:
        assert [len(list(feeder.steps(n))) for n in (4, 1, 3, 6)] == [4, 1, 3, 6]
        assert len(list(feeder.steps(5))) == 5


@pytest.mark.parametrize("kind", ["dataset", "device"])
async def test_async_for_leaves_it_out_too(kind: str) -> None:
    """`anext` goes on to the next batch."""
    with KINDS[kind](MIDDLE) as feeder:
        assert values([batch async for batch in feeder]) == good(MIDDLE)


def test_it_is_logged_and_counted_in_words(caplog: pytest.LogCaptureFixture) -> None:
    """A line names the batch, and the statistics have their number."""
    with KINDS["dataset"](MIDDLE) as feeder, caplog.at_level(logging.WARNING, logger="aiofeed"):
        list(feeder)
        lines = [record.getMessage() for record in caplog.records]
        assert "epoch 0: batch 2 is left out: all its samples were skipped" in lines
        assert "; 4 failed, 0 retried, 1 batch left out" in str(feeder.statistics())


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_without_any_batch_is_an_error(kind: str) -> None:
    """It is that of the last batch, behind which nothing is left."""
    with KINDS[kind](range(LENGTH)) as feeder:
        with pytest.raises(BatchFailedError, match=r"all 4 samples of batch \d failed.*is bad.*nothing else is left"):
            list(feeder)
        assert feeder.statistics().failures == LENGTH


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"shard": (0, 2)}, {}),
        ({"shard": None}, {"RANK": "0", "WORLD_SIZE": "2"}),
        ({"shard": (0, 1)}, {"RANK": "1", "WORLD_SIZE": "4"}),
        ({"sampler": DistributedSampler(Numbers(), 2, 0, shuffle=False)}, {}),
    ],
)
def test_on_several_ranks_it_is_an_error(
    options: dict[str, Any], ranks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would wait for the step on it; the error names "replace". With `pad=False` numbers may differ."""
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    bad = values(Feeder(Numbers(), batch_size=SIZE, **options))[SIZE : 2 * SIZE]
    for kind in ("dataset", "device"):
        with KINDS[kind](bad, **options) as feeder:
            iterator = iter(feeder)
            next(iterator)
            state = feeder.state_dict()
            with pytest.raises(BatchFailedError, match=r'all 4 samples of batch 1 failed.*on_error="replace"'):
                next(iterator)
            assert list(iterator) == []
            assert feeder.state_dict() == state
        with KINDS[kind](bad, pad=False, **options) as feeder:
            assert not set(bad) & set(values(feeder))
            assert feeder.statistics().batches_left_out == 1


@pytest.mark.parametrize("sharded", [True, False])
def test_the_ranks_of_a_stream_that_shards_itself_may_differ(sharded: bool) -> None:
    """They do already, so a batch is left out; those of other streams have equal numbers."""
    bad, stream = [*FIRST, *range(4, 8)], Stream(Items(), sharded=sharded)
    feeder = Feeder(stream, decode=decoder(bad), batch_size=SIZE, on_error=SKIP, shard=(0, 2))
    with feeder:
        if sharded:
            assert values(feeder) == good(bad)
            return
        with pytest.raises(BatchFailedError, match='on_error="replace"'):
            next(iter(feeder))


class Endless(Sampler[int]):
    def __iter__(self) -> Any:
        while True:
            yield from range(LENGTH)


@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"shuffle": True}])
def test_a_loader_leaves_it_out_and_resumes(options: dict[str, Any]) -> None:
    """`DataLoader(on_error="skip")` too, at each of its states."""
    torch.manual_seed(0)
    order = values(DataLoader(Numbers(), SIZE, **options))
    bad = [*order[:SIZE], *order[8:12]]
    torch.manual_seed(0)
    loader: Any = DataLoader(Numbers(bad), SIZE, on_error=SKIP, **options)
    got: list[int] = []
    for batch in loader:
        got += batch.tolist()
        resumed: Any = DataLoader(Numbers(bad), SIZE, on_error=SKIP, **options)
        resumed.load_state_dict(loader.state_dict())
        # Behind the last batch of an epoch the next one begins.
        assert len(got) == LENGTH - len(bad) or sorted(got + values(resumed)) == good(bad)
    assert sorted(got) == good(bad)


def test_a_loader_that_has_only_such_batches_left_begins_the_next_epoch() -> None:
    """As one does that is resumed after its last batch."""
    loader: Any = DataLoader(Numbers(LAST), SIZE, on_error=SKIP)
    for batch in loader:
        if 19 in batch:
            state = loader.state_dict()
    loader.load_state_dict(state)
    assert values(loader) == good(LAST)


def test_a_loader_goes_on_with_its_sampler_behind_it() -> None:
    """The next part of a sampler follows one with batches that were left out."""
    loader = DataLoader(Numbers(MIDDLE), SIZE, sampler=Endless(), on_error=SKIP)
    assert sum(1 for _, _ in zip(range(1500), loader, strict=False)) == 1500


def test_a_loader_of_one_of_several_ranks_raises() -> None:
    """As `DistributedSampler` gives as many batches to each."""
    sampler: Any = DistributedSampler(Numbers(), 2, 0, shuffle=False)
    loader = DataLoader(Numbers(range(0, 8, 2)), SIZE, sampler=sampler, on_error=SKIP)
    with pytest.raises(BatchFailedError, match='on_error="replace"'):
        next(iter(loader))


def test_an_interrupted_next_leaves_it_out_once() -> None:
    """After Ctrl-C anywhere in the `next` that leaves a batch out, the other batches come, and it counts once."""
    for place in range(random.randrange(2), 2000, 2):
        feeder = KINDS["dataset"](MIDDLE)
        iterator = iter(feeder)
        got = values(next(iterator) for _ in range(2))
        iterator._queue.peek(30)
        with Interrupt(place) as interrupt:
            try:
                got += values([next(iterator)])
            except KeyboardInterrupt:
                interrupt.left = -1
        got += values(iterator)
        assert got == good(MIDDLE), place
        assert feeder.statistics().batches_left_out == 1, place
        feeder.close()
        if interrupt.left >= 0:
            break
    assert place > 20
