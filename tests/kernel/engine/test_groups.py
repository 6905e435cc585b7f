"""Small batches of a ``Dataset`` that one decode job makes together: the same batches, failures and states as alone."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import FailurePolicy, Feeder, FromDataset, Limits, Table
from aiofeed.errors import ReadError
from aiofeed.kernel.engine import chunks
from aiofeed.tables.memory import MemoryTable

LENGTH = 2_000
SIZE = 4


class Small(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Small items, which are counted; those of ``broken`` fail, and those from ``slow`` on wait for ``go_on``."""

    slow = LENGTH

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.go_on = threading.Semaphore(0)
        self.items = torch.arange(8.0 * LENGTH).reshape(LENGTH, 8)
        self.broken = broken
        self.calls: Counter[int] = Counter()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.calls[index] += 1
        if index in self.broken:
            raise ValueError(f"item {index} is broken")
        if index >= self.slow:
            self.go_on.acquire()
        return self.items[index], index


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches each job makes; large groups also on a slow machine."""
    monkeypatch.setattr(chunks, "GROUP_S", 1.0)
    made: list[int] = []
    together = chunks.ChunkAssembly._make_together

    async def counted(assembly: Any, first: Any) -> None:
        made.append(1 + len(first.grouped))
        await together(assembly, first)

    monkeypatch.setattr(chunks.ChunkAssembly, "_make_together", counted)
    return made


def alone(dataset: Small, **options: Any) -> Feeder[Any]:
    """A feeder of which each job makes one batch, because the user limits finished batches."""
    return Feeder(dataset, batch_size=SIZE, limits=Limits(prefetch_batches=2), **options)


def labels(batches: Any) -> list[list[int]]:
    return [numbers.tolist() for _, numbers in batches]


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}, {"drop_last": True}, {"in_order": False}])
def test_the_batches_are_the_same_as_alone(options: dict[str, Any], sizes: list[int]) -> None:
    """Several epochs, in groups, equal those made one by one, up to their order with in_order=False; each item is
    requested once an epoch.
    """
    dataset, in_order = Small(), options.get("in_order", True)
    with Feeder(dataset, batch_size=SIZE, **options) as feeder, alone(Small(), **options) as single:
        for _ in range(3):
            found, expected = labels(feeder), labels(single)
            assert found == expected if in_order else sorted(found) == sorted(expected)
            assert feeder.statistics().batches == single.statistics().batches
            assert feeder.statistics().samples == single.statistics().samples
    assert set(dataset.calls.values()) == {3}
    assert max(sizes) == chunks.TOGETHER_MOST


def test_items_of_a_collate_function(sizes: list[int]) -> None:
    """``collate_fn`` gets the samples of one batch."""
    with Feeder(Small(), batch_size=SIZE, collate_fn=lambda samples: [number for _, number in samples]) as feeder:
        assert [number for batch in feeder for number in batch] == list(range(LENGTH))
    assert max(sizes) > 1


def test_a_failure_ends_the_epoch_after_the_batches_before_it() -> None:
    """The error names the first broken item; the batches before its batch are delivered, and nothing after it."""
    dataset, got = Small(frozenset({1_001, 1_002, 1_500})), []
    with Feeder(dataset, batch_size=SIZE) as feeder, pytest.raises(ReadError, match=r"Small\[1001\]"):
        got += (numbers.tolist() for _, numbers in feeder)
    assert [number for batch in got for number in batch] == list(range(1_000))
    assert dataset.calls[1_001] == 1
    assert not dataset.calls[1_002]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_failures_are_skipped_and_replaced_as_alone(on_error: str) -> None:
    """Batches, failures and their order are the same; a batch without samples is left out."""
    broken = frozenset({0, 5, 6, 801, 802, 803, 804, 1_999})
    options: dict[str, Any] = {"on_error": FailurePolicy(on_error, max_failures=100), "shuffle": True, "seed": 1}
    with Feeder(Small(broken), batch_size=SIZE, **options) as feeder, alone(Small(broken), **options) as single:
        for _ in range(2):
            assert labels(feeder) == labels(single)
            assert [each.key for each in feeder.failures] == [each.key for each in single.failures]
    dataset, policy = Small(frozenset(range(400, 404))), FailurePolicy("skip", max_failures=100)
    with Feeder(dataset, batch_size=SIZE, on_error=policy) as feeder:
        assert len(labels(feeder)) == len(feeder) - 1
        assert feeder.statistics().batches_left_out == 1


@pytest.mark.parametrize("taken", [1, 2, 37, 250])
def test_a_state_between_the_batches_of_a_group(taken: int) -> None:
    """A state goes on after the last batch that was returned, whatever was made with it."""
    with Feeder(Small(), batch_size=SIZE, shuffle=True) as whole:
        expected = labels(whole)
    with Feeder(Small(), batch_size=SIZE, shuffle=True) as feeder:
        iterator = iter(feeder)
        got = [next(iterator)[1].tolist() for _ in range(taken)]
        state = feeder.state_dict()
        iterator.close()
    with Feeder(Small(), batch_size=SIZE, shuffle=True) as feeder:
        feeder.load_state_dict(state)
        assert got + labels(feeder) == expected


def test_a_break_and_an_error_of_collate_fn() -> None:
    """After ``break`` in a group the next epoch is whole; an error of ``collate_fn`` comes at its place."""

    def collate(samples: list[Any]) -> list[int]:
        numbers = [number for _, number in samples]
        if 1_600 in numbers and broken:
            raise RuntimeError("not these")
        return numbers

    broken = False
    with Feeder(Small(), batch_size=SIZE, collate_fn=collate) as feeder:
        for number, _ in enumerate(feeder):
            if number == 301:
                break
        assert sum(map(len, feeder)) == LENGTH
        broken, got = True, []
        with pytest.raises(Exception, match="not these"):
            got += feeder
        assert len(got) == 1_600 // SIZE


def test_a_dataset_that_becomes_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are made are delivered while their job waits for a slow item."""
    monkeypatch.setattr(chunks, "GROUP_S", 0.001)
    monkeypatch.setattr(chunks.ChunkAssembly, "_choose_group", lambda self, *_: setattr(self, "together", 32))
    dataset = Small()
    dataset.slow = 1_000
    with Feeder(dataset, batch_size=SIZE) as feeder:
        iterator = iter(feeder)
        for first in range(0, LENGTH, SIZE):
            if first >= 1_000:
                dataset.go_on.release(SIZE)
            assert next(iterator)[1].tolist() == [*range(first, first + SIZE)]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_limit_on_memory_holds(in_order: bool, sizes: list[int]) -> None:
    """A job makes no more batches than fit into a quarter of the limit, and none waits for room forever."""
    nbytes = SIZE * (8 * 4 + 8)
    for batches, most in ((20, 5), (2, 1)):
        sizes.clear()
        with Feeder(
            Small(), batch_size=SIZE, limits=Limits(memory_bytes=batches * nbytes), in_order=in_order
        ) as feeder:
            for _ in range(2):
                assert sorted(number for batch in labels(feeder) for number in batch) == list(range(LENGTH))
        assert max(sizes, default=1) <= most


def test_a_limit_on_finished_batches_holds(sizes: list[int]) -> None:
    """With ``prefetch_batches`` jobs make one batch, so that no more items are requested than it allows."""
    dataset = Small()
    with Feeder(FromDataset(dataset), batch_size=SIZE, limits=Limits(prefetch_batches=2)) as feeder:
        for number, _ in enumerate(feeder):
            assert len(dataset.calls) <= (number + 1 + 4) * SIZE
    assert not sizes


def test_batches_of_a_table_made_together_are_those_made_alone(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryTable, "in_memory", False)
    rows = np.zeros(LENGTH, [("x", "f4", 3), ("y", "i8")])
    rows["x"], rows["y"] = np.arange(3.0 * LENGTH).reshape(LENGTH, 3), np.arange(LENGTH)

    def epochs(**options: Any) -> list[Any]:
        with Feeder(Table(rows), batch_size=SIZE, shuffle=True, **options) as feeder:
            return [batch for _ in range(2) for batch in feeder]

    together, single = epochs(), epochs(limits=Limits(prefetch_batches=2))
    for ours, theirs in zip(together, single, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert max(sizes) > 1


class Stored:
    """A source whose samples decode threads read; ``calls`` has what was requested, those of ``broken`` fail.

    From sample ``slow`` on it is no longer as fast as memory, and its ``read`` and ``read_many`` are called.
    """

    def __init__(self, broken: frozenset[int] = frozenset(), slow: int = LENGTH) -> None:
        self.broken, self.slow = broken, slow
        self.calls: Counter[int] = Counter()
        self.answers_at_once = True
        self.now = 0

    def __len__(self) -> int:
        return LENGTH

    def key(self, index: int) -> str:
        return f"sample-{index}.bin"

    def read_now(self, indices: Any) -> list[Any]:
        self.answers_at_once = self.answers_at_once and max(indices) < self.slow
        self.now += len(indices)
        return [self._sample(index) for index in indices]

    async def read(self, index: int) -> bytes:
        if isinstance(sample := self._sample(index), OSError):
            raise sample
        return sample

    def _sample(self, index: int) -> Any:
        self.calls[index] += 1
        return OSError(f"no {index}") if index in self.broken else index.to_bytes(4, "little")


def in_rows(data: bytes) -> Any:
    return np.frombuffer(data, "i4")


def numbers(batches: Any) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}, {"drop_last": True}, {"in_order": False}])
@pytest.mark.parametrize("slow", [LENGTH, 1_000])
def test_samples_that_jobs_read_are_those_of_batches_alone(
    options: dict[str, Any], slow: int, sizes: list[int]
) -> None:
    """Batches of a source that decode jobs read are the same in groups, also if its reads become slow meanwhile; each
    sample is read once an epoch.
    """
    source, options = Stored(slow=slow), {"decode": in_rows, "batch_size": SIZE, **options}
    with Feeder(source, **options) as feeder:
        found = [numbers(feeder) for _ in feeder.epochs(2)]
    with Feeder(Stored(), limits=Limits(prefetch_batches=2), **options) as single:
        expected = [numbers(single) for _ in range(2)]
    assert found == expected if options.get("in_order", True) else [*map(sorted, found)] == [*map(sorted, expected)]
    assert set(source.calls.values()) == {2}
    assert max(sizes) > 1
    assert source.answers_at_once == (slow == LENGTH)
    if slow < LENGTH and not options.get("shuffle"):
        # At most the jobs that were running when reads became slow have read on.
        assert source.now < LENGTH


def test_a_failed_read_in_a_group_names_the_sample(sizes: list[int]) -> None:
    """The batches before it come, then the error of the first broken sample by its key; nothing after it is read."""
    source, got = Stored(frozenset({1_001, 1_002})), []
    with Feeder(source, decode=in_rows, batch_size=SIZE) as feeder, pytest.raises(ReadError, match=r"sample-1001\.bin"):
        got += feeder
    assert [number for batch in numbers(got) for number in batch] == list(range(1_000))
    assert max(sizes) > 1


@pytest.mark.parametrize("slow", [LENGTH, 1_000])
def test_failed_reads_in_groups_are_skipped_and_replaced_as_alone(slow: int) -> None:
    """Batches, failures and their order are the same in groups, also if reads become slow."""
    broken = frozenset({0, 5, 801, 802, 803, 804, 1_999})
    for on_error in ("skip", "replace"):
        options: dict[str, Any] = {"on_error": FailurePolicy(on_error, max_failures=100), "shuffle": True, "seed": 1}
        options |= {"decode": in_rows, "batch_size": SIZE}
        with (
            Feeder(Stored(broken, slow), **options) as feeder,
            Feeder(Stored(broken), limits=Limits(prefetch_batches=2), **options) as single,
        ):
            assert numbers(feeder) == numbers(single)
            assert [each.key for each in feeder.failures] == [each.key for each in single.failures]


def test_a_limit_on_memory_holds_where_groups_are_split() -> None:
    """Batches whose reads become slow in a group neither wait for each other's memory nor for that of the group."""
    nbytes = SIZE * (4 + 4)
    limits = Limits(memory_bytes=24 * nbytes)
    with Feeder(Stored(slow=400), decode=in_rows, batch_size=SIZE, limits=limits) as feeder:
        assert [number for batch in numbers(feeder) for number in batch] == list(range(LENGTH))
