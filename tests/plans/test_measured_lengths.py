"""Feeders with plans whose lengths are measured: over a ``Stream`` as items come, over a ``Dataset`` once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiofeed import Balanced, Buckets, Feeder, FromDataset, Pack, Stream, TokenBudget
from aiofeed.errors import ReadError, StateError
from aiofeed.plans.length_plans import LengthPlan
from tests.support.packed import PAD, SEPARATOR, Documents, all_tokens, document, lognormal, pieces_of, tokens_of

LENGTHS = lognormal(120, 12).tolist()


def documents(lengths: list[int]) -> Callable[[], Iterator[torch.Tensor]]:
    def docs() -> Iterator[torch.Tensor]:
        yield from (document(index, length) for index, length in enumerate(lengths))

    return docs


def new_feeder(plan: LengthPlan, lengths: list[int] = LENGTHS, buffer: int = 0, **options: Any) -> Feeder[Any]:
    options = options if isinstance(plan, Pack) else {"collate_fn": list, **options}
    return Feeder(Stream(documents(lengths), shuffle_buffer=buffer), batch_size=plan, **options)


def error_of(one: Feeder[Any]) -> tuple[int, Exception]:
    """The number of batches before the error of an epoch, and the error."""
    with one:
        number = 0
        with pytest.raises((ReadError, StateError)) as raised:
            for number, _ in enumerate(one, 1):  # noqa: B007
                pass
    return number, raised.value


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [True, False])
def test_tokens_of_a_stream_once_with_other_ranks_in_mid_epoch(tmp_path: Path, split: bool) -> None:
    """Three ranks save a state after five steps; two others return the rest."""

    def packed(shard: tuple[int, int]) -> Feeder[Any]:
        plan = Pack(context=32, rows=3, separator=SEPARATOR, pad=PAD, split=split, window=20, on_oversize=oversize)
        return new_feeder(plan, buffer=8, seed=3, shard=shard)

    oversize: Any = "error" if split else "truncate"
    batches: list[Any] = []
    for rank in range(3):
        with packed((rank, 3)) as one:
            batches += itertools.islice(iter(one), 3)
            torch.save(one.state_dict(), tmp_path / "state")
    state = json.loads(json.dumps(torch.load(tmp_path / "state", weights_only=True)))
    rest: list[list[Any]] = []
    for rank in range(2):
        with packed((rank, 2)) as one:
            one.load_state_dict(state)
            rest.append(list(one))
    assert len(rest[0]) == len(rest[1])
    batches += itertools.chain.from_iterable(zip(*rest, strict=True))
    if torch.equal(batches[-1]["tokens"], batches[-2]["tokens"]):
        batches.pop()  # the padding of the last step
    found = tokens_of(piece for batch in batches for piece in pieces_of(batch, 3, 32))
    assert found == all_tokens(LENGTHS, separated=True, most=None if split else 32)


@pytest.mark.parametrize(
    "plan",
    [Buckets(boundaries=[10, 20], batch_sizes=[4, 3, 2]), TokenBudget(max_tokens=60, window=30)],
    ids=["buckets", "budget"],
)
def test_batches_in_any_order_and_resumed(plan: LengthPlan) -> None:
    """With in_order=False, too, every item comes exactly once; epochs follow each other."""

    def items(one: Feeder[Any], count: int | None = None) -> list[int]:
        return [int(sample[0]) // 1000 for batch in itertools.islice(iter(one), count) for sample in batch]

    options: dict[str, Any] = {"in_order": False, "buffer": 5}
    with new_feeder(plan, **options) as one:
        seen = items(one, 7)
        state = one.state_dict()
    with new_feeder(plan, **options) as one:
        one.load_state_dict(state)
        assert sorted(seen + items(one)) == list(range(120))
        assert sorted(second := items(one)) == list(range(120))
        assert second != list(range(120))


def test_how_items_are_measured() -> None:
    """By the first tensor, array or list of numbers; by a key; by a function."""
    samples = [{"name": "x", "long": [0] * (2 * size), "short": torch.zeros(size, 3)} for size in (5, 1, 5, 1)]

    def batches(length: Any) -> list[list[int]]:
        plan = TokenBudget(max_tokens=10, length=length)
        with Feeder(Stream(samples), batch_size=plan, collate_fn=list) as one:
            return [[len(sample["short"]) for sample in batch] for batch in one]

    assert batches(None) == [[1, 1], [5], [5]]
    assert batches("long") == [[1, 1], [5], [5]]
    assert batches("short") == batches(lambda sample: len(sample["short"])) == [[1, 1], [5, 5]]


@pytest.mark.parametrize("length", [-1, 0, 1.5, None, "7", True])
def test_lengths_that_are_none(length: Any) -> None:
    """The error comes after the batches before it, and names the item and the value."""
    plan = TokenBudget(max_tokens=10, max_samples=1, window=1, length=lambda item: length if item[0] == 3000 else 2)
    before, error = error_of(new_feeder(plan))
    assert before == 3
    assert "'docs[3]'" in str(error)
    assert "TokenBudget(length=)" in str(error)
    assert repr(length) in str(error)


@pytest.mark.parametrize("plan", [TokenBudget(max_tokens=9), Pack(context=9, split=False)])
def test_an_item_longer_than_the_budget(plan: LengthPlan) -> None:
    """With on_oversize="error" the error names the item and both numbers."""
    _, error = error_of(new_feeder(plan, [3, 9, 10]))
    assert "cannot read 'docs[2]'" in str(error)
    assert "has 10 tokens, more than" in str(error)


def test_a_length_function_that_fails() -> None:
    """Its error is the cause of a ReadError that names the item."""
    _, error = error_of(new_feeder(TokenBudget(max_tokens=10, length=lambda item: [2][len(item) - 9]), [9, 3]))
    assert "cannot read 'docs[1]'" in str(error)
    assert isinstance(error.__cause__, IndexError)


def test_a_sharded_stream() -> None:
    """Each rank has a plan, an end and a state of its own."""
    for rank, length in ((0, 4), (1, 6)):

        def new(rank: int = rank, length: int = length) -> Feeder[Any]:
            stream = Stream(documents([length] * 20), sharded=True)
            return Feeder(stream, batch_size=Pack(context=8, rows=1), shard=(rank, 2))

        with new() as one:
            whole = [batch["tokens"].tolist() for batch in one]
        assert len(whole) == 20 * length / 8
        with new() as one, new() as other:
            list(itertools.islice(iter(one), 3))
            other.load_state_dict(state := one.state_dict())
            assert [batch["tokens"].tolist() for batch in other] == whole[3:]
            with pytest.raises(StateError, match=r"\(rank, world size\)"):
                Feeder(
                    Stream(documents([4] * 20), sharded=True), batch_size=Pack(context=8, rows=1), shard=(1 - rank, 2)
                ).load_state_dict(state)


def test_items_without_a_length() -> None:
    """The message says what to pass."""
    for length in (None, "text"):
        one = Feeder(Stream([{"text": "abc"}]), batch_size=Pack(context=8, length=length))
        with (
            one,
            pytest.raises(
                ReadError, match=r"'list\[0\]'.*no length in sample 0.*length=lambda sample: len\(sample\['text'\]\)"
            ),
        ):
            next(iter(one))


@pytest.mark.parametrize(
    "plan", [Pack(context=40, rows=2, split=False, window=10), TokenBudget(max_tokens=40, window=10)]
)
def test_other_lengths_after_a_resume(plan: LengthPlan) -> None:
    """An item whose length has changed, among those that are read again, is named; an end before them, too."""
    lengths = [5 + index % 7 for index in range(100)]
    with new_feeder(plan, lengths) as one:
        iterator = iter(one)
        for _ in range(7):
            next(iterator)
        state = one.state_dict()
    point = json.loads(state["sampler"])["point"]
    waiting = [entry[0] for row in point["waiting"] for entry in row]
    for item in [*waiting, *range(point["items"], point["items"] + len(point["lengths"]))]:
        changed = [length + (index == item) for index, length in enumerate(lengths)]
        for other, message in ((changed, f"item {item} has the length"), (lengths[:item], "has ended after")):
            with new_feeder(plan, other) as one, pytest.raises(StateError, match=message):
                one.load_state_dict(state)
                list(one)
    with new_feeder(plan, lengths) as one:
        one.load_state_dict(state)
        assert len(list(one)) > 2


def test_states_that_are_not_of_this_plan() -> None:
    """Another plan, no plan and a damaged point are refused."""
    plan = Pack(context=40, rows=2)
    with new_feeder(plan) as one:
        next(iter(one))
        state = one.state_dict()
    with pytest.raises(StateError, match=r"another plan: Pack\(context=40, rows=2.*Pack\(context=41"):
        new_feeder(Pack(context=41, rows=2)).load_state_dict(state)
    with pytest.raises(StateError, match="order: a plan over a Stream in the state, a Stream here"):
        Feeder(Stream(documents(LENGTHS)), batch_size=2).load_state_dict(state)
    loaded = json.loads(state["sampler"])
    for change in ({"items": -1}, {"waiting": [[[1, 2, 3]]]}, {"waiting": [[]]}, {"lengths": ["a"]}, {"more": 1}):
        damaged = json.dumps({**loaded, "point": {**loaded["point"], **change}})
        with pytest.raises(StateError, match="state of the stream is damaged"):
            new_feeder(plan).load_state_dict({**state, "sampler": damaged})


def test_what_a_plan_over_a_stream_does_not_have() -> None:
    """A length of the feeder, a list of lengths, and an end that skip() finds."""
    plan = TokenBudget(max_tokens=1000, window=50)
    with pytest.raises(TypeError, match=r"TokenBudget\(.*has no len\(\)"):
        len(new_feeder(plan))
    with pytest.raises(ValueError, match=r"a stream has no list of lengths.*without lengths="):
        new_feeder(TokenBudget(LENGTHS, 1000))
    with pytest.raises(ValueError, match=r"Pack\(.*measures the items of a Stream: pass lengths="):
        Feeder(Documents(LENGTHS), batch_size=Pack(context=8))
    with pytest.raises(ValueError, match=r"Pack\(length=\) measures samples: pass no lengths="):
        Pack(LENGTHS, 8, length=len)
    for balanced in (lambda: Balanced(None, 8), lambda: Pack(context=8, cost=lambda lengths: lengths)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="balances samples whose lengths are known: pass lengths="):
            balanced()
    with new_feeder(plan) as one:
        one.skip(1)
        first = len(list(one))
        one.skip(100)
        with pytest.raises(StateError, match=rf"batch 100 of epoch 1, which ends after {first + 1} batches: skip"):
            list(one)


def test_the_last_incomplete_batches() -> None:
    """Padding fills them if a stream ends inside a row; drop_last leaves out such rows, and rows that fill no batch."""
    for split, padding in ((True, 80 - 63), (False, 100 - 63)):
        with new_feeder(Pack(context=10, rows=2, split=split, pad=PAD), [7] * 9) as one:
            assert sum(int((batch["tokens"] == PAD).sum()) for batch in one) == padding
    for split, tokens in ((True, 60), (False, 56)):
        with new_feeder(Pack(context=10, rows=2, split=split), [7] * 9, drop_last=True) as one:
            assert sum(int((batch["document_ids"] >= 0).sum()) for batch in one) == tokens


# --- datasets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_dataset_is_measured_once(cache: Path) -> None:
    """The batches are those of a list of its lengths; the next feeder reads some samples only."""

    def batches(lengths: Any, source: Documents) -> list[list[int]]:
        plan = TokenBudget(lengths, 60)
        with Feeder(source, batch_size=plan, shuffle=True, seed=1, collate_fn=list) as one:
            return [[int(sample[0]) for sample in batch] for batch in one]

    expected = batches(LENGTHS, Documents(LENGTHS))
    first, second = Documents(LENGTHS), Documents(LENGTHS)
    assert batches("measure", first) == expected
    assert sorted(Counter(first.asked).values()) == [2] * 120
    assert len(list(cache.iterdir())) == 1
    assert batches("measure", second) == expected
    assert len(second.asked) <= 120 + 20


@pytest.mark.parametrize("plan", [Balanced, Pack])
def test_costs_of_measured_lengths(cache: Path, plan: Any) -> None:
    """The batches of plans that balance costs are those of a list of the lengths, too."""

    def batches(lengths: Any) -> list[Any]:
        options: dict[str, Any] = {} if plan is Pack else {"collate_fn": lambda batch: {"tokens": torch.cat(batch)}}
        balanced = plan(lengths, 64, cost=lambda numbers: numbers**2, groups=2)
        with Feeder(Documents(LENGTHS), batch_size=balanced, shuffle=True, seed=1, **options) as one:
            return [batch["tokens"].tolist() for batch in one]

    assert batches("measure") == batches("measure") == batches(LENGTHS)


def test_a_changed_dataset_is_measured_again(cache: Path) -> None:
    """Other items, another length function and a damaged file."""

    def lengths(source: Any, length: Any = None) -> list[int]:
        plan = Pack("measure", 100, length=length)
        Feeder(source, batch_size=plan).close()
        found: list[int] = plan.lengths.tolist()
        return found

    assert lengths(Documents(LENGTHS)) == LENGTHS
    assert lengths(Documents(LENGTHS[:60])) == LENGTHS[:60]
    longer = [length + 1 for length in LENGTHS]
    assert lengths(Documents(longer)) == longer
    assert lengths(Documents(longer), lambda tokens: len(tokens) * 2) == [2 * length for length in longer]
    assert lengths(FromDataset(Documents(LENGTHS), fingerprint="a")) == LENGTHS
    for path in cache.iterdir():
        path.write_bytes(b"damaged!")
    assert lengths(Documents(longer)) == longer


def test_samples_of_a_dataset_that_have_no_length(cache: Path) -> None:
    """The error names the sample, and nothing is cached; what excludes each other is found before anything is read."""
    source = Documents([3, 3])
    with pytest.raises(ValueError, match=r"sample 0, .*Pack\(length=\), must be at least 1, got -3"):
        Feeder(source, batch_size=Pack("measure", 8, length=lambda tokens: -3))
    source.asked.clear()
    with pytest.raises(ValueError, match="collate_fn="):
        Feeder(source, batch_size=Pack("measure", 8), collate_fn=list)
    assert source.asked == []
    assert not cache.exists()
