"""The samples of any step, and receipts, which say whether two runs have seen the same samples."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from aiofeed import Balanced, Buckets, Feeder, FromDataset, Mixture, Stream
from aiofeed.errors import StateError
from aiofeed.kernel.sampling.order import epoch_seed, sample_seed
from aiofeed.reports import StepSample

N = 23
ITEMS = list(range(N))
LENGTHS = [1 + 5 * index % 7 for index in ITEMS]


def items(source: Any = ITEMS, **options: Any) -> Feeder[Any]:
    return Feeder(source, **{"batch_size": 2, "shard": None, **options})


def mixture(**options: Any) -> Feeder[Any]:
    source = Mixture({"a": ITEMS, "b": [100 + item for item in ITEMS]}, [2, 1], until=20)
    return items(source, shuffle=True, **options)


def buckets(**options: Any) -> Feeder[Any]:
    options["batch_size"] = Buckets(LENGTHS, [4], [4, 3])
    return items(shuffle=True, **options)


ORDERS: dict[str, Callable[..., Feeder[Any]]] = {
    "sequential": items,
    "shuffled": lambda **options: items(shuffle=True, **options),
    "keyed": lambda **options: items(shuffle="keyed", **options),
    "drawn": lambda **options: items(shuffle="replacement", **options),
    "weights": lambda **options: items(weights=[1.0, 2.0] * 11 + [0.0], **options),
    "mixture": mixture,
    "plan": buckets,
    "exclude": lambda **options: items(shuffle="keyed", exclude=[3, 5, 21], **options),
    "balanced": lambda **options: items(**{**options, "shuffle": True, "batch_size": Balanced(LENGTHS, 14, groups=6)}),
    "excluding plan": lambda **options: buckets(exclude=[3, 5, 21], **options),
}


def run(feeder: Feeder[Any], batches: int) -> Feeder[Any]:
    """The feeder after so many batches."""
    for _ in feeder.steps(batches):
        pass
    return feeder


# --- samples ---


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"pad": False}], ids=str)
def test_the_samples_of_a_step_are_those_of_its_batch(order: str, options: dict[str, Any]) -> None:
    """On each of three ranks, `samples(step)` has the indices of that batch, also in later epochs and of others."""
    ranks = [ORDERS[order](shard=(rank, 3), **options) for rank in range(3)]
    for rank, feeder in enumerate(ranks):
        for step, batch in enumerate(feeder.steps(2 * len(feeder) + 1)):
            for asked in ranks:
                named = asked.samples(step, rank=rank)
                assert [sample.index % N for sample in named] == [value % 100 for value in batch.tolist()]
        feeder.close()


def test_a_sample_has_its_names() -> None:
    """A sample has index, key, source, epoch, position and seed."""
    feeder = mixture(seed=5, shard=(1, 2))
    first, second = feeder.samples(7)
    assert isinstance(first, StepSample)
    assert (first.epoch, first.position, second.position) == (1, 9, 11)
    assert first.seed == sample_seed(epoch_seed(5, 1), 9)
    assert first.source == ("a" if first.index < N else "b")
    assert first.key == f"{first.source}: list[{first.index % N}]"
    assert items().samples(3)[0].source is None


def test_steps_count_from_an_epoch() -> None:
    """`epoch=` says from which epoch on steps are counted."""
    feeder = items(shuffle=True)
    assert feeder.samples(3, epoch=2) == feeder.samples(2 * len(feeder) + 3)


class Large:
    """A dataset of a thousand million items."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        raise AssertionError


def test_a_step_of_a_large_source_needs_no_list() -> None:
    """With `shuffle="keyed"` a step of 10^9 samples, or of a later epoch, takes a few megabytes and no reading."""
    with items(FromDataset(Large(), fingerprint="large"), shuffle="keyed", batch_size=256, shard=(3, 8)) as feeder:
        tracemalloc.start()
        named = [feeder.samples(step) for step in (0, 480_000, 10**12)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        receipt = feeder.receipt()
    assert peak < 20 << 20
    assert [len(samples) for samples in named] == [256] * 3
    assert named[2][0].epoch == 10**12 // len(feeder)
    assert receipt


@pytest.mark.parametrize(
    ("feeder", "message"),
    [
        (lambda: items(Stream(ITEMS)), "not known with Stream.*: its items have no names"),
        (lambda: items(sampler=RandomSampler(ITEMS)), "not known with batch_size=.*, sampler=RandomSampler"),
        (lambda: items(batch_sampler=[[0, 1]], batch_size=None), "not known with batch_sampler="),
        (lambda: items(drop_last=True, batch_size=100), "an epoch has no batches"),
    ],
)
def test_samples_that_no_function_knows_are_an_error(feeder: Callable[[], Feeder[Any]], message: str) -> None:
    """The error says why the samples are not known."""
    with pytest.raises(ValueError, match=message):
        feeder().samples(0)


@pytest.mark.parametrize("arguments", [{"step": -1}, {"step": 0, "epoch": -1}, {"step": 0, "rank": 1}])
def test_other_numbers_are_refused(arguments: dict[str, int]) -> None:
    """A step, an epoch or a rank that cannot be is an error."""
    with pytest.raises(ValueError, match="must be"):
        items().samples(**arguments)


# --- receipts ---


@pytest.mark.parametrize("order", [*ORDERS, "sampler"])
@pytest.mark.parametrize("stops", [[5], [1, 13], [12, 12, 30]], ids=str)
def test_an_interrupted_run_has_the_receipt_of_an_uninterrupted_one(order: str, stops: list[int]) -> None:
    """Resumed runs, within an epoch and at its end, have the receipt of one run, at every stop."""

    def new() -> Feeder[Any]:
        if order == "sampler":
            return items(sampler=RandomSampler(ITEMS, generator=torch.Generator().manual_seed(1)))
        return ORDERS[order]()

    state, done = None, 0
    for stop in [*stops, 40]:
        feeder = new()
        if state is not None:
            feeder.load_state_dict(json.loads(json.dumps(state)))
            assert feeder.receipt() == state["receipt"]
        if stop > done:
            run(feeder, stop - done)
        state, done = feeder.state_dict(), stop
        assert feeder.receipt() == state["receipt"] == run(new(), stop).receipt()
        feeder.close()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("skipped", [1, 3, 4, 17])
def test_skipping_on_ranks_leaves_out_the_same_batches(order: str, skipped: int) -> None:
    """On each rank, over ends of epochs, too, the batches after the skipped ones come; the receipt says so."""

    def new(rank: int) -> Feeder[Any]:
        return ORDERS[order](shard=(rank, 3))

    receipts = set()
    for rank in range(3):
        with new(rank) as whole, new(rank) as feeder, new(rank) as resumed:
            wanted = [batch.tolist() for batch in whole.steps(skipped + 8)]
            run(feeder, 2)
            feeder.skip(skipped)
            resumed.load_state_dict(json.loads(json.dumps(feeder.state_dict())))
            for each in (feeder, resumed):
                assert [batch.tolist() for batch in each.steps(6)] == wanted[-6:]
                receipts.add(each.receipt())
            assert whole.receipt() not in receipts
    assert len(receipts) == 1


def test_batch_size_and_world_size_do_not_count() -> None:
    """Runs with the same samples in batches of another size, or on another number of ranks, have one receipt."""
    receipts = {
        run(items(shuffle=True, batch_size=size, shard=(rank, ranks)), 12 // size // ranks).receipt()
        for size, rank, ranks in [(2, 0, 1), (3, 0, 1), (2, 0, 3), (2, 2, 3), (1, 1, 2)]
    }
    assert len(receipts) == 1
    resumed = items(shuffle=True, batch_size=1, shard=(0, 4))
    resumed.load_state_dict(run(items(shuffle=True), 4).state_dict())
    assert run(resumed, 1).receipt() in receipts


def test_other_samples_have_another_receipt() -> None:
    """Runs that saw others, more, fewer, in another order or with another seed have another receipt."""

    def skipped(feeder: Feeder[Any], n: int) -> Feeder[Any]:
        feeder.skip(n)
        return feeder

    def left(feeder: Feeder[Any]) -> Feeder[Any]:
        for _ in feeder:
            break
        return feeder

    runs = [
        items(),
        run(items(), 4),
        run(items(), 5),
        run(items(shuffle=True), 4),
        run(items(shuffle=True, seed=1), 4),
        run(items(shuffle="keyed"), 4),
        run(skipped(items(), 1), 4),
        run(skipped(run(items(), 1), 1), 3),
        left(left(items())),
        run(items(shard=(0, 3)), 4),  # with a sample of padding
        run(items(drop_last=True), 11),
        run(items(), 12),
        run(items(), 11),
        run(items(list(range(N + 1))), 4),
        run(mixture(), 4),
        run(buckets(), 4),
        run(items(sampler=ITEMS), 4),
        run(items(sampler=ITEMS[::-1]), 4),
        run(items(in_order=False), 4),
    ]
    receipts = [feeder.receipt() for feeder in runs]
    assert receipts[11] != receipts[12]
    assert receipts[10] == receipts[12]  # 22 samples in order, and the last one left out or yet to come
    assert len(set(receipts)) == len(receipts) - 1


def test_a_stream_has_no_receipt() -> None:
    """The receipt of a stream is an error that says why, and its state has an empty one."""
    feeder = run(items(Stream(ITEMS)), 3)
    assert feeder.state_dict()["receipt"] == ""
    with pytest.raises(StateError, match="has no receipt: the items of a stream have no names"):
        feeder.receipt()


def test_a_state_without_a_receipt_is_loaded() -> None:
    """A state of an older version resumes; the receipt is then not that of a run without a past."""
    state = run(items(), 4).state_dict()
    old = {name: value for name, value in state.items() if name not in ("receipt", "trail")}
    feeder, fresh = items(), items()
    feeder.load_state_dict(old)
    fresh.skip(4)
    assert [batch.tolist() for batch in feeder.steps(1)] == [batch.tolist() for batch in fresh.steps(1)] == [[8, 9]]
    assert feeder.receipt() not in (fresh.receipt(), run(items(), 5).receipt())


@pytest.mark.parametrize(
    "change", [{"position": 6}, {"epoch": 1}, {"receipt": "0"}, {"trail": ["", "", 0]}, {"trail": [1]}, {"trail": None}]
)
def test_a_receipt_is_checked(change: dict[str, Any]) -> None:
    """A state whose receipt is not that of its position is refused."""
    state = run(items(), 4).state_dict()
    with pytest.raises(StateError, match=r"damaged: (its receipt is not that of its epoch, position|trail must be)"):
        items().load_state_dict({**state, **change})
