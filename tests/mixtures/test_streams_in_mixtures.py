"""Tests of mixtures with streams: shares, the end of a source, resume and ranks, against a plain model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.utils.data

import aiofeed
from aiofeed import Feeder, Mixture, Stream


def letters(count: int, letter: str = "a", epoch: int = 0) -> Iterator[str]:
    for number in range(count):
        yield f"{letter}{epoch}.{number}"


class Stateful:
    """An iterable with a state of its own, which counts the items that it has made."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch, self.at, self.made = count, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[str]:
        while self.at < self.count:
            self.at += 1
            self.made += 1
            yield f"s{self.epoch}.{self.at - 1}"
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def table(values: Any) -> aiofeed.Table:
    return aiofeed.Table(pa.table({"x": values}), data="x")


def texts(source: Any, **options: Any) -> list[str]:
    """Return the samples of one epoch."""
    with Feeder(source, batch_size=3, collate_fn=list, **options) as feeder:
        return [sample for batch in feeder for sample in batch]


def mixed(count: int = 9, **options: Any) -> Mixture:
    streams = {"a": Stream(partial(letters, count)), "b": Stream(partial(letters, 4, "b"))}
    return Mixture(streams, **{"weights": {"a": 2, "b": 1}, **options})


def model(at_end: str, until: int | None, counts: Mapping[str, int], weights: Mapping[str, int]) -> list[str]:
    """Draw the source with the earliest deadline, as the page of mixtures says; weights of 2 and 1."""
    found: list[str] = []
    left, drawn, taken, passes = dict(weights), Counter[str](), Counter[str](), Counter[str]()
    while left and len(found) != until:
        place, total = sum(drawn.values()), sum(left.values())
        ready = [name for name in left if drawn[name] * total <= place * left[name] + left[name] - 1]
        name = min(ready, key=lambda each: -(-(drawn[each] + 1) * total // left[each]))
        if taken[name] == counts[name]:
            if at_end == "stop":
                break
            if at_end == "leave out":
                del left[name]
                drawn.clear()
                continue
            if until is None and all(passes[other] for other in counts if other != name):
                break
            passes[name], taken[name] = passes[name] + 1, 0
        found.append(f"{name}{passes[name]}.{taken[name]}")
        drawn[name] += 1
        taken[name] += 1
    return found


@pytest.mark.parametrize("count", [1, 5, 9, 20])
@pytest.mark.parametrize("until", [None, 7, 30])
@pytest.mark.parametrize("at_end", ["restart", "stop", "leave out"])
def test_samples_come_by_weight_until_the_end(count: int, until: int | None, at_end: str) -> None:
    """An epoch has the samples of the model, for each way to go on when a source ends."""
    expected = model(at_end, until, {"a": count, "b": 4}, {"a": 2, "b": 1})
    options = {} if until is None else {"until": until}
    if until is not None and len(expected) < until:
        with pytest.raises(aiofeed.FeedError, match=f"ended after {len(expected)} items? .* its length is {until}"):
            texts(mixed(count, at_end=at_end, **options))
    else:
        assert texts(mixed(count, at_end=at_end, **options)) == expected


def test_shares_hold_at_every_place() -> None:
    """After any number of samples each source differs from its share by less than one."""
    streams = {name: Stream(partial(letters, 10**9, name)) for name in "abc"}
    weights = {"a": 0.6, "b": 0.3, "c": 0.1}
    found = texts(Mixture(streams, weights, until=2_500))
    for place in range(1, len(found) + 1, 7):
        counts = Counter(each[0] for each in found[:place])
        assert all(abs(counts[name] - place * weight) < 1 for name, weight in weights.items())


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("at_end", ["restart", "leave out"])
def test_a_state_goes_on_exactly(stateful: bool, world: int, at_end: str) -> None:
    """At any batch a state continues with the samples of an epoch that was not interrupted, on each rank."""

    def source() -> Mixture:
        stream = Stream(Stateful(9)) if stateful else Stream(partial(letters, 9))
        numbers = table(np.arange(5))
        return Mixture({"a": stream, "x": numbers}, {"a": 2, "x": 1}, at_end=at_end)

    for rank in range(world):
        options: dict[str, Any] = {"batch_size": 2, "collate_fn": list, "shuffle": True, "shard": (rank, world)}
        with Feeder(source(), **options) as feeder:
            expected = [[str(sample) for sample in batch] for batch in feeder]
        for taken in range(1, len(expected)):
            with Feeder(source(), **options) as feeder:
                iterator = iter(feeder)
                for _ in range(taken):
                    next(iterator)
                state = json.dumps(feeder.state_dict())
            with Feeder(source(), **options) as feeder:
                feeder.load_state_dict(json.loads(state))
                assert [[str(sample) for sample in batch] for batch in feeder] == expected[taken:]


def test_a_stream_with_a_state_is_not_read_again() -> None:
    """A resume loads the state of a stream in the mixture and reads no item before it."""
    stream = Stateful(1000)
    with Feeder(Mixture({"s": Stream(stream)}, [1]), batch_size=10, collate_fn=list) as feeder:
        for number, _ in enumerate(feeder):
            if number == 60:
                state = feeder.state_dict()
    other = Stateful(1000)
    with Feeder(Mixture({"s": Stream(other)}, [1]), batch_size=10, collate_fn=list) as feeder:
        feeder.load_state_dict(state)
        assert next(iter(feeder))[0] == "s0.610"
        assert other.made < 100 or other.at < 1000


def test_streams_mix_with_files_tables_and_datasets(tmp_path: Any) -> None:
    """Sources of all kinds are read, decoded by their own functions, and named."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(str(100 + number))
    sources = {
        "lines": Stream(lambda: iter(range(4))),
        "files": aiofeed.Files(sorted(tmp_path.iterdir())),
        "table": table(np.arange(200, 203)),
        "items": torch.utils.data.TensorDataset(torch.arange(300, 303)),
    }
    decode: dict[str, Callable[..., Any]] = {
        "lines": int,
        "files": lambda data: int(bytes(data)),
        "items": lambda item: item[0],
    }
    mixture = Mixture(sources, [1, 1, 1, 1], decode=decode, names=True, until="first")
    with Feeder(mixture, batch_size=4, keys=True) as feeder:
        batches = [(values.tolist(), names, list(keys)) for (values, names), keys in feeder]
    assert batches[0][0] == [0, 100, 200, 300]
    assert list(batches[0][1]) == ["lines", "files", "table", "items"]
    assert batches[0][2][1].endswith("0.txt")
    assert [len(values) for values, _, _ in batches] == [4, 4, 4, 1]


def test_other_sources_are_shuffled_anew_in_each_pass() -> None:
    """With ``shuffle=True`` a source with indices is shuffled, in another order in each pass and epoch."""
    numbers = table(np.arange(50))
    mixture = Mixture({"s": Stream(partial(letters, 10**6)), "x": numbers}, [1, 1], until=200)
    with Feeder(mixture, batch_size=200, shuffle=True, collate_fn=list) as feeder:
        epochs = [[int(each) for each in next(iter(feeder)) if not isinstance(each, str)] for _ in range(2)]
    passes = [epoch[first : first + 50] for epoch in epochs for first in (0, 50)]
    assert all(sorted(each) == list(range(50)) for each in passes)
    assert passes[0] != list(range(50))
    assert passes[0] != passes[1] != passes[3]


def test_ranks_share_the_samples() -> None:
    """The ranks together have each sample of the mixture once."""
    found = [texts(mixed(8, until="first"), shard=(rank, 2), drop_last=True) for rank in range(2)]
    whole = texts(mixed(8, until="first"))
    assert sorted([*found[0], *found[1]]) == sorted(whole[:12])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": None}, "pass weights="),
        ({"weights": lambda samples: [1, 1]}, "weights that change is not possible with streams"),
        ({"random": True}, "random=True is not possible"),
        ({"unit": "tokens"}, 'unit="tokens" is not possible'),
        ({"until": "first", "at_end": "leave out"}, 'until="first"'),
        ({"at_end": "never"}, 'must be "restart", "stop" or "leave out"'),
        ({"until": 0}, "until"),
    ],
)
def test_what_streams_exclude(options: dict[str, Any], words: str) -> None:
    """An argument that streams cannot have is refused with a sentence."""
    with pytest.raises((TypeError, ValueError), match=words):
        mixed(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shuffle": "window"}, "streams have orders of their own"),
        ({"batch_size": aiofeed.Pack(context=8, rows=1)}, 'pass lengths="decoded"'),
        ({"cache": "host"}, "a cache finds samples"),
        ({"engine": "process:2"}, "read in this process"),
    ],
)
def test_what_a_feeder_refuses(options: dict[str, Any], words: str) -> None:
    """An option that needs indices is refused with a sentence."""
    with pytest.raises((TypeError, ValueError), match=words):
        Feeder(mixed(), **{"batch_size": 2, **options})


def test_at_end_needs_streams() -> None:
    """``at_end=`` is refused where ``until=`` decides."""
    with pytest.raises(ValueError, match="is for streams"):
        Mixture({"x": table(np.arange(5))}, at_end="stop")


def test_max_repeats_limits_passes() -> None:
    """A source that would be passed through more often is an error that names it, after the samples before it."""
    with pytest.raises(aiofeed.FeedError, match="source 'b' has been passed through 2 times"):
        texts(mixed(1000, max_repeats={"b": 2}))


def test_a_stream_without_items_is_named() -> None:
    """A stream that has no items cannot be restarted."""
    streams = {"a": Stream(partial(letters, 3)), "b": Stream(partial(letters, 0))}
    with pytest.raises(aiofeed.FeedError, match="stream 'b' has no items"):
        texts(Mixture(streams, [1, 1]))


def test_an_error_of_a_stream_names_the_stream() -> None:
    """The error of a stream is raised after the batches before it, with its name and the number of the item."""

    def broken() -> Iterator[str]:
        yield from letters(4)
        raise RuntimeError("line 5 is damaged")

    with Feeder(Mixture({"a": Stream(broken)}, [1]), batch_size=2, collate_fn=list) as feeder:
        iterator = iter(feeder)
        assert [next(iterator), next(iterator)] == [["a0.0", "a0.1"], ["a0.2", "a0.3"]]
        with pytest.raises(aiofeed.FeedError, match=r"cannot read 'a: broken\[4\]': RuntimeError: line 5 is damaged"):
            next(iterator)


def test_an_iterable_dataset_is_a_stream() -> None:
    """A torch ``IterableDataset`` mixes as a stream."""

    class Lines(torch.utils.data.IterableDataset[str]):
        def __iter__(self) -> Iterator[str]:
            return letters(3)

    assert texts(Mixture({"a": Lines(), "b": Stream(partial(letters, 3, "b"))}, [1, 1], until="first")) == [
        f"{name}0.{number}" for number in range(3) for name in "ab"
    ]


def test_a_mixture_of_streams_in_a_mixture() -> None:
    """A mixture with streams counts as its sources in another one."""
    inner = mixed(100)
    found = texts(Mixture({"in": inner, "x": Stream(partial(letters, 1000, "x"))}, [3, 3], until=60))
    assert Counter(each[0] for each in found) == {"a": 20, "b": 10, "x": 30}


@pytest.mark.parametrize("stream", [False, True])
def test_lists_of_tokens_stay_lists(stream: bool) -> None:
    """``Mixture(decode=)`` may return lists of numbers, which plans measure and pack."""
    texts = ["a bc", "def"] * 20
    given: Any = Stream(lambda: iter(texts)) if stream else texts
    mixture = Mixture({"a": given, "b": [*texts]}, [1, 1], decode={"a": tokenized, "b": tokenized})
    with Feeder(mixture, batch_size=aiofeed.Pack("decoded", context=16, rows=1)) as feeder:
        batch = next(iter(feeder))
    assert batch["ids"].shape == (1, 16)


def tokenized(text: str) -> dict[str, list[int]]:
    return {"ids": [*text.encode()]}


def test_a_sample_that_fails_is_named_and_replaced(tmp_path: Any) -> None:
    """Read errors of a source beside a stream are skipped or replaced, and keys stay those of the samples."""
    paths = [tmp_path / f"{number}.txt" for number in range(4)]
    for path in paths[:2] + paths[3:]:
        path.write_text(path.stem)
    decode: dict[str, Any] = {"a": int, "files": lambda data: int(bytes(data))}
    for action in ("skip", "replace"):
        policy = aiofeed.FailurePolicy(action, max_failures=9)
        files = aiofeed.Files([*paths])
        mixture = Mixture({"a": Stream(lambda: iter(range(100, 104))), "files": files}, [1, 1], decode=decode, until=8)
        with Feeder(mixture, batch_size=8, on_error=policy, keys=True) as feeder:
            [(values, keys)] = list(feeder)
        assert len(values) == len(keys) == (7 if action == "skip" else 8)
        assert all(key.startswith(("a: ", "files: ")) for key in keys)
        assert [failure.key for failure in feeder.failures] == [f"files: {paths[2]}"]


def test_a_source_that_was_left_out_is_not_read_again() -> None:
    """A state of an epoch from which a stream was left out does not open that stream."""
    opened = []

    def short() -> Iterator[str]:
        opened.append("short")
        return letters(2)

    def source() -> Mixture:
        return Mixture({"a": Stream(short), "b": Stream(partial(letters, 90, "b"))}, [1, 1], at_end="leave out")

    with Feeder(source(), batch_size=4, collate_fn=list) as feeder:
        for number, _ in enumerate(feeder):
            if number == 15:
                break
        state = feeder.state_dict()
    opened.clear()
    with Feeder(source(), batch_size=4, collate_fn=list) as feeder:
        feeder.load_state_dict(state)
        iterator = iter(feeder)
        assert next(iterator) == [f"b0.{number}" for number in range(62, 66)]
    assert opened == []
