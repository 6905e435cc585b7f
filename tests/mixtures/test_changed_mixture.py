"""Mixtures that are changed after a checkpoint: other weights, and sources that come, go or grow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiofeed import Feeder, Mixture, TokenBudget
from aiofeed.errors import StateError
from aiofeed.mixtures.mixture_order import SourceCourse
from tests.support.examples import examples

EPOCH = 3000
SIZES = {"a": 50, "b": 1700, "c": 400}


def feeder(weights: Mapping[str, float], rank: int = 0, ranks: int = 1, **options: Any) -> Feeder[Any]:
    sizes = {**SIZES, **options.pop("sizes", {})}
    # Samples are numbered within their source.
    first = {"a": 0, "b": 10_000, "c": 20_000, "d": 30_000}
    sources = {name: list(range(first[name], first[name] + sizes.get(name, 300))) for name in weights}
    source = Mixture(sources, weights, until=options.pop("until", EPOCH), random=options.pop("random", False))
    return Feeder(source, **{"batch_size": 10, "shuffle": True, "shard": (rank, ranks), **options})


def take(one: Feeder[Any], batches: int) -> list[int]:
    return [value for batch in (one.steps(batches) if batches else ()) for value in batch.tolist()]


def counts(values: list[int]) -> dict[str, int]:
    found = Counter("abcd"[value // 10_000] for value in values)
    return dict(sorted(found.items()))


CHANGES: list[tuple[dict[str, float], dict[str, Any]]] = [
    ({"a": 1, "b": 5, "c": 4}, {}),
    ({"b": 1, "c": 1}, {}),
    ({"d": 1, "b": 2, "a": 1, "c": 2}, {}),
    ({"a": 1, "b": 2, "c": 1}, {"sizes": {"b": 2500, "c": 401}}),
    ({"c": 3, "d": 1}, {"sizes": {"c": 900}}),
]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("done", [0, 1, 137, 300, 437])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_was_consumed_of_a_source_stays_consumed(
    change: tuple[dict[str, float], dict[str, Any]], done: int, shuffle: bool
) -> None:
    """After a change, within an epoch or between two, each source is passed through before a sample comes again."""
    one = feeder({"a": 1, "b": 5, "c": 4}, shuffle=shuffle)
    before = take(one, done)
    weights, options = change
    other = feeder(weights, shuffle=shuffle, **options)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    after = take(other, 500)
    for name in set(SIZES) & set(weights):
        size = {**SIZES, **options.get("sizes", {})}[name]
        mine = [value for value in before if value // 10_000 == "abcd".index(name)]
        passed = len(mine) % SIZES[name]
        rest = [value for value in after if value // 10_000 == "abcd".index(name)][: size - passed]
        current = [*mine[len(mine) - passed :], *rest]
        assert len(set(current)) == len(current)
        if len(rest) == size - passed:
            assert set(current) == set(range(min(current), min(current) + size))
    total = sum(weights.values())
    for name, count in counts(after).items():
        assert abs(count - 5000 * weights[name] / total) <= 2
    assert {name: count for name, count in other.statistics().by_source.items() if count} == counts(before + after)
    one.close()
    other.close()


@pytest.mark.parametrize("random", [False, True])
def test_changes_are_exact_on_any_ranks_and_over_resumes(random: bool) -> None:
    """After several changes the samples are those of one rank, on three ranks and over resumes, with one receipt."""

    def run(stops: tuple[int, ...], ranks: int) -> tuple[list[list[int]], str]:
        seen: list[list[int]] = []
        states: Any = None
        plans: list[tuple[dict[str, float], dict[str, Any]]] = [({"a": 1, "b": 5}, {}), *CHANGES[2:]]
        for weights, options in plans:
            for stop in stops:
                parts = [feeder(weights, rank, ranks, random=random, **options) for rank in range(ranks)]
                for part in parts:
                    if states is not None:
                        part.load_state_dict(states)
                found = [take(part, stop // ranks) for part in parts]
                seen.append([value for group in zip(*found, strict=True) for value in group])
                states = parts[0].state_dict()
                receipts = {part.receipt() for part in parts}
                for part in parts:
                    part.close()
        [receipt] = receipts
        return seen, receipt

    whole, receipt = run((216,), 1)
    split, split_receipt = run((60, 156), 3)
    assert [value for part in split for value in part] == [value for part in whole for value in part]
    assert receipt == split_receipt


def test_a_source_that_was_taken_out_comes_back_where_it_was() -> None:
    """A source goes on where it was when it was taken out, also over another change."""
    state, seen = None, []
    for weights in ({"a": 1, "b": 1}, {"a": 1}, {"a": 1, "c": 1}, {"b": 1, "c": 1}):
        one = feeder(weights, sizes={"a": 5000})
        if state is not None:
            one.load_state_dict(state)
        seen += take(one, 20)
        state = one.state_dict()
        one.close()
    of_b = [value for value in seen if value // 10_000 == 1]
    assert len(of_b) == len(set(of_b)) == 200
    assert one.statistics().by_source == counts(seen)


def test_steps_after_a_change_are_named() -> None:
    """Of a changed mixture the samples of later steps are known; earlier ones are an error that names the change."""
    one, other = feeder({"a": 1, "b": 5}), feeder({"b": 1, "c": 2})
    take(one, 310)
    other.load_state_dict(one.state_dict())
    seen = take(other, 5)
    named = [sample for step in range(310, 315) for sample in other.samples(step)]
    assert [("bc".index(sample.source or "") + 1) * 10_000 for sample in named] == [
        value // 10_000 * 10_000 for value in seen
    ]
    for step in (0, 299, 309):
        with pytest.raises(ValueError, match="before the mixture was changed, after 100 samples of epoch 1"):
            other.samples(step)
    one.close()
    other.close()


def test_the_receipt_depends_on_the_change() -> None:
    """Another change, or the same at another place, gives another receipt."""
    receipts = set()
    for done, (weights, options) in [(7, CHANGES[1]), (8, CHANGES[1]), (7, CHANGES[2]), (7, CHANGES[3])]:
        one, other = feeder({"a": 1, "b": 5, "c": 4}), feeder(weights, **options)
        take(one, done)
        other.load_state_dict(one.state_dict())
        take(other, 20 - done)
        receipts.add(other.receipt())
        one.close()
        other.close()
    assert len(receipts) == 4


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
def test_a_pass_that_grows_has_each_sample_once(growth: list[int], data: st.DataObject) -> None:
    """However often a source grows within a pass, the pass keeps what was drawn, and has each sample once."""
    course, drawn, before = SourceCourse(data.draw(st.integers(1, 30))), 0, np.empty(0, np.int64)
    for more in growth:
        drawn = data.draw(st.integers(drawn, course.length - 1))
        order = course.permutation(5, 0)(np.arange(course.length))
        assert sorted(order) == list(range(course.length))
        assert (order[: len(before)] == before).all()
        before = order[:drawn]
        course = course.changed("a", course.length + more, drawn, 0)


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        (lambda: feeder({"a": 1, "b": 1}), lambda: feeder({"a": 1, "b": 1}, sizes={"b": 20}), "it may only grow"),
        (lambda: feeder({"a": 1, "b": 1}), lambda: feeder({"a": 2, "b": 1}, until="all"), "with until=, a number"),
        (
            lambda: feeder({"a": 1, "b": 1}),
            lambda: feeder({"a": 2, "b": 1}, until=100),
            "100 samples of|and it has 100",
        ),
        (
            lambda: feeder({"a": 1, "b": 1}, batch_size=TokenBudget([1] * 1750, 10)),
            lambda: feeder({"a": 2, "b": 1}, batch_size=TokenBudget([1] * 1750, 10)),
            "without a plan",
        ),
        (
            lambda: Feeder(Mixture({"a": [1], "b": [2]}, lambda _: [1, 1], until=900), batch_size=1),
            lambda: Feeder(Mixture({"a": [1], "b": [2]}, [1, 1], until=900), batch_size=1),
            "a function as weights",
        ),
    ],
)
def test_other_changes_are_refused(
    there: Callable[[], Feeder[Any]], here: Callable[[], Feeder[Any]], message: str
) -> None:
    """The error says what may change, and the feeder stays as it was."""
    one, other = there(), here()
    take(one, 20)
    before = other.state_dict()
    with pytest.raises(StateError, match=message):
        other.load_state_dict(one.state_dict())
    assert other.state_dict() == before
    one.close()


def test_a_state_of_an_older_version_is_loaded() -> None:
    """A state without a course goes on in the same mixture, and not in another one."""
    one = feeder({"a": 1, "b": 5})
    take(one, 30)
    state = one.state_dict()
    wanted = take(one, 30)
    sampler = {name: value for name, value in json.loads(state["sampler"]).items() if name != "course"}
    old = {**state, "sampler": json.dumps(sampler)}
    again = feeder({"a": 1, "b": 5})
    again.load_state_dict(old)
    assert take(again, 30) == wanted
    with pytest.raises(StateError, match="another order"):
        feeder({"a": 1, "b": 6}).load_state_dict(old)
    one.close()
    again.close()


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.integers(1, 200),
)
def test_after_a_change_counts_differ_by_less_than_two(before: list[int], after: list[int], done: int) -> None:
    """Counted from the change on, each source is less than two samples from its share of the new weights."""
    one, other = feeder(dict(zip("abcd", before, strict=False))), feeder(dict(zip("dcba", after, strict=False)))
    take(one, done)
    other.load_state_dict(one.state_dict())
    seen = take(other, 30)
    for number in range(1, len(seen) + 1):
        found = counts(seen[:number])
        for name, weight in zip("dcba", after, strict=False):
            assert abs(found.get(name, 0) - number * weight / sum(after)) < 2
    one.close()
    other.close()
