"""Random mixtures against a model in plain Python that is written from the pages of the docs alone.

Sources of several kinds, weights, units, ends, plans, ranks, sources left out, and a resume on another number of ranks.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import aiofeed
from aiofeed import Feeder, Mixture

THOUSAND, SEED = 1000, 5


def numbers(source: int, count: int) -> np.ndarray:
    """The samples of a source: numbers that say which one they are."""
    return np.arange(source * THOUSAND, source * THOUSAND + count)


def made(kind: str, source: int, count: int, folder: Path) -> tuple[Any, Any]:
    """A source of a kind with so many samples, and its decoder."""
    values = numbers(source, count)
    if kind == "Files":
        paths = [folder / f"{source}-{number}" for number in range(count)]
        for path, value in zip(paths, values, strict=True):
            path.write_text(f"{value}")
        return aiofeed.Files(paths), lambda data: torch.tensor(int(bytes(data)))
    if kind == "Tokens":
        path = folder / f"{source}.bin"
        values.astype(np.uint16).tofile(path)
        return aiofeed.Tokens(path, block=1), lambda window: window[0]
    if kind == "Table":
        return aiofeed.Table(pa.table({"x": values}), data="x"), None
    if kind == "Tensors":
        return aiofeed.Tensors(torch.from_numpy(values)), lambda row: row[0]
    if kind == "part":
        return aiofeed.Table(pa.table({"x": numbers(source, count + 3)}), data="x")[:count], None
    return [torch.tensor(value) for value in values], None


KINDS = ("Files", "Tokens", "Table", "Tensors", "part", "Dataset")


@dataclass
class Configuration:
    """A mixture and how it is fed, drawn from a seed."""

    seed: int
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        self.kinds = draw.choices(KINDS, k=draw.randint(1, 5))
        self.counts = [draw.choice([1, 2, 5, 13, 40]) for _ in self.kinds]
        self.weights = [Fraction(draw.randint(1, 9)) for _ in self.kinds]
        self.unit = draw.choice(["samples", "samples", "tokens"])
        self.tokens = [[draw.randint(1, 30) for _ in range(count)] for count in self.counts]
        ends = ["all", "first", 17, 64, 200] if self.unit == "samples" else [17, 64, 200]
        self.until = draw.choice(ends)
        self.shuffle = draw.random() < 0.5
        self.world, self.later = draw.choice([1, 2, 4]), draw.choice([1, 2, 4])
        self.batch = draw.choice([1, 3, 8])
        self.plan = draw.random() < 0.25
        self.drop_last = draw.random() < 0.3
        left_out = self.until not in ("all", "first") and not self.plan and draw.random() < 0.3
        self.left_out = {source for source, count in enumerate(self.counts) if left_out and count > 1}

    def mixture(self, folder: Path) -> Mixture:
        sources = {f"s{source}": made(*each, folder) for source, *each in self._numbered()}
        decode = {name: decoder for name, (_, decoder) in sources.items() if decoder is not None}
        lengths = {f"s{source}": each for source, each in enumerate(self.tokens)}
        options: dict[str, Any] = {"unit": "tokens", "lengths": lengths} if self.unit == "tokens" else {}
        return Mixture(
            {name: source for name, (source, _) in sources.items()},
            [int(weight) for weight in self.weights],
            until=self.until,
            decode=decode,
            **options,
        )

    def _numbered(self) -> Iterator[tuple[int, str, int, int]]:
        for source, (kind, count) in enumerate(zip(self.kinds, self.counts, strict=True)):
            yield source, kind, source, count

    # --- the model ---

    def kept(self, source: int) -> list[int]:
        """The numbers of the samples of a source, without the first one if it is left out."""
        return [*range(int(source in self.left_out), self.counts[source])]

    def length(self) -> int:
        """The samples of an epoch, by the page: until all sources have been passed through, or the first one."""
        if not isinstance(self.until, str):
            return int(self.until)
        total = sum(self.weights)
        ends = [len(self.kept(source)) * total / weight for source, weight in enumerate(self.weights)]
        return math.ceil(max(ends)) if self.until == "all" else math.floor(min(ends))

    def drawn(self) -> Iterator[int]:
        """The source of each sample: of those whose share has begun, the one whose share ends first."""
        total, counts, sizes = sum(self.weights), Counter[int](), Counter[int]()
        while True:
            place, ends = sum(sizes.values()), {}
            for source, weight in enumerate(self.weights):
                kept = self.kept(source)
                at = kept[counts[source] % len(kept)]
                size = 1 if self.unit == "samples" else self.tokens[source][at]
                if math.floor(Fraction(sizes[source]) * total / weight) <= place:
                    ends[math.ceil((sizes[source] + size) * total / weight), source] = size
            _, source = found = min(ends)
            counts[source] += 1
            sizes[source] += ends[found]
            yield source

    def epoch(self) -> list[int]:
        """The samples of the first epoch without shuffling."""
        taken, found = Counter[int](), []
        for _, source in zip(range(self.length()), self.drawn(), strict=False):
            kept = self.kept(source)
            found.append(source * THOUSAND + kept[taken[source] % len(kept)])
            taken[source] += 1
        return found

    # --- the feeder ---

    def feed(self, mixture: Mixture, rank: int, world: int) -> Feeder[Any]:
        options: dict[str, Any] = {"batch_size": self.batch}
        if self.plan:
            lengths = [each for tokens in self.tokens for each in tokens]
            options["batch_size"] = aiofeed.TokenBudget(lengths, max_tokens=90)
        if self.left_out:
            bounds = np.cumsum([0, *self.counts])
            options["exclude"] = [int(bounds[source]) for source in self.left_out]
        return Feeder(
            mixture, shuffle=self.shuffle, drop_last=self.drop_last, shard=(rank, world), seed=SEED, **options
        )


def rows(batch: Any) -> list[int]:
    return [int(value) for value in batch]


def check(seed: int, folder: Path) -> None:
    """Compare the batches of all ranks of an epoch, and of its rest on other ranks, with the model."""
    config = Configuration(seed)
    if config.until == "first" and any(config.length() * weight < sum(config.weights) for weight in config.weights):
        with pytest.raises(ValueError, match="too short for a sample of"):
            config.mixture(folder)
        return
    mixture = config.mixture(folder)
    expected = config.epoch()
    assert len(mixture) == len(expected)
    batches, states = [], []
    for rank in range(config.world):
        with config.feed(mixture, rank, config.world) as feeder:
            batches.append([])
            for batch in feeder:
                batches[-1].append(rows(batch))
                states += [json.dumps(feeder.state_dict())] if rank == 0 else []
    assert len({len(each) for each in batches}) == 1, "ranks have different numbers of batches"
    steps = [*zip(*batches, strict=True)]
    found = [value for step in steps for value in in_turn(step, config)]
    compare(config, found, expected)
    if not steps:
        return
    before = config.draw.randrange(len(steps))
    rest = []
    for rank in range(config.later):
        with config.feed(mixture, rank, config.later) as feeder:
            feeder.load_state_dict(json.loads(states[before]))
            rest.append([rows(batch) for batch in feeder])
    taken = [value for step in steps[: before + 1] for value in in_turn(step, config)]
    later = [value for step in zip(*rest, strict=True) for value in in_turn(step, config)]
    both = [*taken, *later]
    if config.plan and not config.drop_last:  # padding repeats batches, which may be others after the resume
        with Feeder(mixture, batch_size=1, shuffle=config.shuffle, seed=SEED) as feeder:
            samples = Counter(value for batch in feeder for value in rows(batch))
        assert not samples - Counter(both), "a sample is lost"
    elif not config.drop_last:
        assert both[: len(expected)] == found[: len(expected)], "the resumed epoch has another order"


def in_turn(step: Any, config: Configuration) -> list[int]:
    """The samples of a step of all ranks in the order of the epoch: ranks take turns."""
    if config.plan:
        return [value for batch in step for value in batch]
    longest = max(map(len, step))
    return [batch[place] for place in range(longest) for batch in step if place < len(batch)]


def compare(config: Configuration, found: list[int], expected: list[int]) -> None:
    """Compare the samples of an epoch of all ranks with those of the model."""
    whole = len(expected)
    if config.drop_last:
        assert len(found) <= whole or config.plan
    else:
        assert len(found) >= whole
    if config.plan:  # batches are formed within windows of samples; padding repeats whole batches
        assert {*found} <= {
            source * THOUSAND + at for source in range(len(config.counts)) for at in config.kept(source)
        }
        if not config.drop_last and not config.shuffle:
            assert not Counter(expected) - Counter(found)
        return
    found = found[:whole]
    if not config.shuffle:
        assert found == expected[: len(found)]
        return
    if config.unit == "samples":
        assert [value // THOUSAND for value in found] == [value // THOUSAND for value in expected[: len(found)]]
    for source in range(len(config.counts)):
        own, kept = [value % THOUSAND for value in found if value // THOUSAND == source], config.kept(source)
        for first in range(0, len(own) - len(kept) + 1, len(kept)):
            assert sorted(own[first : first + len(kept)]) == kept, "a pass has a sample twice"
    if config.unit == "tokens":
        shares_of_tokens(config, found)


def shares_of_tokens(config: Configuration, found: list[int]) -> None:
    """At every place the tokens of a source differ from its share by at most the longest sample."""
    longest, total = max(max(each) for each in config.tokens), sum(config.weights)
    drawn = Counter[int]()
    for value in found:
        source, at = divmod(value, THOUSAND)
        drawn[source] += config.tokens[source][at]
        everything = sum(drawn.values())
        for each, weight in enumerate(config.weights):
            assert abs(drawn[each] - everything * weight / total) <= longest


@pytest.mark.parametrize("seed", range(24))
def test_a_mixture_is_as_the_pages_say(seed: int, tmp_path: Path) -> None:
    """Order, shares, ranks and a resume of random mixtures are those of the model."""
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 2100, 100))
def test_two_thousand_mixtures(first: int, tmp_path: Path) -> None:
    """The same of two thousand configurations."""
    for seed in range(first, first + 100):
        (folder := tmp_path / f"{seed}").mkdir()
        try:
            check(seed, folder)
        except BaseException as error:
            error.add_note(f"configuration {seed}: {vars(Configuration(seed))}")
            raise
