"""Tests of `on_error`: failed samples are skipped, replaced or raised, counted, listed, logged; reads are retried."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from aiofeed import DecodeImage, FailurePolicy, Feeder, FeedError, Files, ImageFolder, Limits
from aiofeed.errors import BatchFailedError, CollateError, DecodeError, ReadError, TooManyFailures
from tests.support import process_parts as parts
from tests.support.simulated_device import SimulatedDevice

BAD = frozenset({3, 4, 11, 18, 19})
MAX_FAILURES = 0.5
"""Five of twenty-two samples fail in these tests."""


class Numbers:
    """A source of n numbers as bytes; reading those in `bad` always fails."""

    def __init__(self, n: int = 22, bad: frozenset[int] = BAD) -> None:
        self.n = n
        self.bad = bad
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"number {index}"

    def target(self, index: int) -> int:
        return -index

    async def read(self, index: int) -> bytes:
        self.reads[index] += 1
        if index in self.bad:
            raise FileNotFoundError(2, "no such file")
        return b"%d" % index


class Bytes(Numbers):
    """The same numbers; all can be read, and decoding those in `bad` fails."""

    async def read(self, index: int) -> bytes:
        return b"bad" if index in self.bad else b"%d" % index


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


def drawn(data: bytes, *, rng: torch.Generator) -> dict[str, Any]:
    """The number, and a random number of its position."""
    return {"index": int(data), "drawn": torch.rand((), generator=rng), "text": data.decode()}


def epoch_of(feeder: Feeder[Any]) -> list[list[int]]:
    """The numbers of each batch; checks that the labels belong to them."""
    batches = []
    for numbers, targets in feeder:
        assert targets.tolist() == [-value for value in numbers.tolist()]
        batches.append(numbers.tolist())
    return batches


def policy(action: Any, **more: Any) -> FailurePolicy:
    return FailurePolicy(action, **{"max_failures": MAX_FAILURES} | more)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("source", [Numbers, Bytes])
def test_skip_shortens_only_the_batch_of_the_failed_sample(source: type[Numbers], threads: int) -> None:
    """All other samples stay in their batch and in their order."""
    limits = Limits(decode_threads=threads)
    arguments: dict[str, Any] = {"decode": number, "batch_size": 4, "shuffle": True, "seed": 5, "limits": limits}
    whole = epoch_of(Feeder(source(bad=frozenset()), **arguments))
    feeder = Feeder(source(), on_error=policy("skip"), **arguments)
    for _ in range(3):
        feeder.set_epoch(0)
        assert epoch_of(feeder) == [[value for value in batch if value not in BAD] for batch in whole]
    assert len(feeder) == len(whole)
    assert feeder.statistics().failures == len(BAD)
    assert feeder.statistics().samples == 22 - len(BAD)


@pytest.mark.parametrize("shuffle", [False, True, "keyed"])
@pytest.mark.parametrize("threads", [1, 3])
def test_replace_uses_the_next_good_sample_with_the_position_s_random_numbers(shuffle: Any, threads: int) -> None:
    """Batches keep their size; the next good sample in the epoch's order replaces a failed one."""
    arguments: dict[str, Any] = {"decode": drawn, "batch_size": 4, "shuffle": shuffle, "seed": 2}
    arguments["limits"] = Limits(decode_threads=threads)
    reference = Numbers(bad=frozenset())
    whole = [batch for batch, _ in Feeder(reference, **arguments)]
    order = [index for batch in whole for index in batch["index"].tolist()]
    draws = [value for batch in whole for value in batch["drawn"].tolist()]
    got = [batch for batch, _ in Feeder(Numbers(), on_error=policy("replace"), **arguments)]

    def good_from(position: int) -> int:
        while order[position % len(order)] in BAD:
            position += 1
        return order[position % len(order)]

    expected = [good_from(position) for position in range(len(order))]
    assert [index for batch in got for index in batch["index"].tolist()] == expected
    assert [value for batch in got for value in batch["drawn"].tolist()] == draws
    assert [text for batch in got for text in batch["text"]] == list(map(str, expected))
    assert [len(batch["text"]) for batch in got] == [len(batch["text"]) for batch in whole]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("action", ["skip", "replace"])
def test_failures_do_not_change_the_number_of_batches(action: Any, rank: int) -> None:
    """Every rank has as many batches as without failures; replacements come from the global order."""
    feeder = Feeder(Numbers(40), decode=number, batch_size=3, shuffle=True, shard=(rank, 3), on_error=policy(action))
    batches = epoch_of(feeder)
    assert len(batches) == len(feeder) == 5
    if action == "replace":
        assert [len(batch) for batch in batches] == [3, 3, 3, 3, 2]
    assert not BAD & {value for batch in batches for value in batch}


@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("device", [False, True])
def test_images_and_their_labels_stay_together(
    tmp_path: Path, make_image_folder: Any, action: Any, device: bool
) -> None:
    """Rows decoded in place are compacted or replaced together with their labels, on the host and on a device."""
    images = ImageFolder(make_image_folder(tmp_path / "images", 8))
    decode = DecodeImage(size=32, crop="random", flip=True)
    arguments: dict[str, Any] = {"decode": decode, "batch_size": 4, "shuffle": True, "seed": 3}
    good = [(x.clone(), y.clone()) for x, y in Feeder(images, **arguments)]
    order = [
        index
        for batch in Feeder(parts.Numbers(len(images)), decode=number, batch_size=4, shuffle=True, seed=3)
        for index in batch.tolist()
    ]
    bad = {order[1], order[6], order[7]}
    for index in bad:
        path = Path(images.paths[index])
        path.write_bytes(path.read_bytes()[:200])
    backend = SimulatedDevice() if device else None
    feeder = Feeder(images, on_error=policy(action), device=backend, **arguments)
    got = [(x.cpu(), y.cpu()) for x, y in feeder]
    assert len(got) == len(good)
    for number_, ((x, y), (whole_x, whole_y)) in enumerate(zip(got, good, strict=True)):
        indices = order[4 * number_ : 4 * number_ + 4]
        kept = [at for at, index in enumerate(indices) if index not in bad]
        if action == "skip":
            assert torch.equal(x, whole_x[kept])
            assert torch.equal(y, whole_y[kept])
        else:
            assert torch.equal(x[kept], whole_x[kept])
            assert len(x) == len(whole_x)
    assert {failure.index for failure in feeder.failures} == bad
    assert all(failure.stage == "decode" and failure.key in images.paths for failure in feeder.failures)


def test_collate_fn_gets_the_remaining_samples() -> None:
    """A `collate_fn` gets a shorter list, or one with replacements."""

    def as_list(samples: list[Any]) -> list[int]:
        return [int(sample[0]) for sample in samples]

    arguments: dict[str, Any] = {"decode": number, "batch_size": 5, "collate_fn": as_list}
    assert list(Feeder(Numbers(10), on_error=policy("skip"), **arguments)) == [[0, 1, 2], [5, 6, 7, 8, 9]]
    assert list(Feeder(Numbers(10), on_error=policy("replace"), **arguments)) == [[0, 1, 2, 5, 5], [5, 6, 7, 8, 9]]


class Items(Dataset[int]):
    """A Dataset of n numbers, some of which fail."""

    def __init__(self, n: int = 22) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index in BAD:
            raise ValueError("broken item")
        return index


class ManyItems(Items):
    """A Dataset that returns several items in one call, or fails altogether."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("dataset", [Items, ManyItems])
def test_a_dataset_has_the_same_policies(dataset: type[Items]) -> None:
    """Items of a Dataset that fail are skipped or replaced; "raise" names the failed item."""
    flat = [value for batch in Feeder(dataset(), batch_size=4, on_error=policy("skip")) for value in batch.tolist()]
    assert flat == [value for value in range(22) if value not in BAD]
    flat = [value for batch in Feeder(dataset(), batch_size=4, on_error=policy("replace")) for value in batch.tolist()]
    assert flat == [{3: 5, 4: 5, 11: 12, 18: 20, 19: 20}.get(value, value) for value in range(22)]
    with pytest.raises(ReadError, match=r"\[3\].*broken item") as caught:
        list(Feeder(dataset(), batch_size=4))
    assert caught.value.index == 3


def test_skip_out_of_order_delivers_every_good_sample_once() -> None:
    """With `in_order=False` and "skip" every good sample is delivered once."""
    feeder = Feeder(Numbers(), decode=number, batch_size=4, in_order=False, on_error=policy("skip"))
    assert sorted(value for batch in epoch_of(feeder) for value in batch) == sorted(set(range(22)) - BAD)


def test_resuming_with_the_same_failures_is_exact() -> None:
    """The rest of an epoch after a resume equals that of an uninterrupted run, replacements included."""
    arguments: dict[str, Any] = {"decode": number, "batch_size": 4, "shuffle": True, "on_error": policy("replace")}
    whole = epoch_of(Feeder(Numbers(), **arguments))
    for stop in range(len(whole)):
        first = Feeder(Numbers(), **arguments)
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        second = Feeder(Numbers(), limits=Limits(decode_threads=3, read_concurrency=2), **arguments)
        second.load_state_dict(first.state_dict())
        assert epoch_of(second) == whole[stop:]
        first.close()


# --- too many failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("most", [3, 0.1])
def test_one_more_than_max_failures_stops_the_epoch(action: Any, most: float) -> None:
    """The batch that exceeds max_failures, a number or a share of the source, raises with the count and last key."""
    source = Numbers(30, bad=frozenset({2, 9, 16, 23}))
    feeder = Feeder(source, decode=number, batch_size=4, on_error=FailurePolicy(action, max_failures=most))
    seen = []
    with pytest.raises(TooManyFailures, match=r"4 samples failed.*number 23") as caught:
        for numbers, _ in feeder:
            seen += numbers.tolist()
    assert seen[-1] == 19
    assert isinstance(caught.value.__cause__, ReadError)
    assert [failure.index for failure in feeder.failures] == [2, 9, 16, 23]
    with pytest.raises(TooManyFailures):
        list(feeder)  # each epoch counts from 0
    source.bad = frozenset({2, 9, 16})
    assert len(list(feeder)) == 8


def test_the_error_gives_the_share_as_a_number() -> None:
    """By default one of up to 100 samples may fail; the error gives the number, and how to allow more."""
    feeder = Feeder(Numbers(30, bad=frozenset({2, 9})), decode=number, batch_size=4, on_error="skip")
    with pytest.raises(TooManyFailures, match=r"max_failures=0.01 allows: 1 of 30; .*number of samples or a fraction"):
        list(feeder)


@pytest.mark.parametrize("action", ["raise", "skip", "replace"])
def test_an_epoch_without_good_samples_raises_under_every_policy(action: Any) -> None:
    """If all samples fail, every policy raises instead of delivering an empty epoch."""
    source = Numbers(12, bad=frozenset(range(12)))
    feeder = Feeder(source, decode=number, batch_size=4, on_error=FailurePolicy(action, max_failures=1.0))
    expected = {"raise": ReadError, "skip": BatchFailedError, "replace": BatchFailedError}[action]
    with pytest.raises(expected, match=r"number|all 4 samples of batch 0|no sample was found"):
        list(feeder)
    assert feeder.failures


def test_a_batch_without_good_samples_raises() -> None:
    """With "skip" on several ranks such a batch raises: leaving it out would change the number of batches of one."""
    source = Numbers(24, bad=frozenset({8, 10, 12, 14}))
    feeder = Feeder(source, decode=number, batch_size=4, on_error=FailurePolicy("skip", max_failures=8), shard=(0, 2))
    iterator = iter(feeder)
    assert len(next(iterator)[0]) == 4
    with pytest.raises(BatchFailedError, match=r"all 4 samples of batch 1 failed.*number 14"):
        next(iterator)
    assert list(iterator) == []
    assert feeder.state_dict()["position"] == 8


def test_samples_that_do_not_fit_together_raise_under_every_policy() -> None:
    """A CollateError is not one sample's failure, so it is raised under every policy."""

    def uneven(data: bytes) -> Any:
        return {"a": 1} if data == b"6" else [1, 2]

    for action in ("raise", "skip", "replace"):
        with pytest.raises(CollateError, match="number 6"):
            list(Feeder(Numbers(12, bad=frozenset()), decode=uneven, batch_size=4, on_error=policy(action)))


def test_a_repeated_sample_counts_once() -> None:
    """A failed sample that occurs twice in an epoch is one failure."""
    source = Numbers(5, bad=frozenset({0}))
    feeder = Feeder(
        source, decode=number, batch_size=2, shard=(0, 1), sampler=[0, 1, 2, 0, 3, 0, 4], on_error=policy("skip")
    )
    assert [value for numbers, _ in feeder for value in numbers.tolist()] == [1, 2, 3, 4]
    assert feeder.statistics().failures == 1
    assert [failure.index for failure in feeder.failures] == [0]


# --- failures and the log ---------------------------------------------------------------------------------------------


def test_failures_are_listed_and_logged_once_per_key(caplog: pytest.LogCaptureFixture) -> None:
    """`feeder.failures` has every failure with its epoch; the log has one line per key and one per epoch."""
    feeder = Feeder(Numbers(), decode=number, batch_size=4, on_error=policy("skip"))
    with caplog.at_level(logging.WARNING, logger="aiofeed"):
        for _ in range(3):
            list(feeder)
    assert [(failure.epoch, failure.index) for failure in feeder.failures] == [
        (epoch, index) for epoch in range(3) for index in sorted(BAD)
    ]
    failure = feeder.failures[0]
    assert (failure.key, failure.stage) == ("number 3", "read")
    assert isinstance(failure.error, ReadError)
    assert isinstance(failure.error.__cause__, FileNotFoundError)
    assert failure.error.__traceback__ is None
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("skipped: ")] == [
        f"skipped: cannot read 'number {index}': FileNotFoundError: [Errno 2] no such file" for index in sorted(BAD)
    ]
    summaries = [line for line in lines if line.startswith("epoch ")]
    assert [line[:8] for line in summaries] == ["epoch 0:", "epoch 1:", "epoch 2:"]
    assert "5 samples failed (5 to read) and were skipped, 17 returned" in summaries[0]
    assert len(lines) == 8


def test_the_log_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    """After a hundred lines failures are only counted."""
    bad = frozenset(range(0, 1000, 2))
    feeder = Feeder(Numbers(1000, bad), decode=number, batch_size=10, on_error=policy("skip"))
    with caplog.at_level(logging.WARNING, logger="aiofeed"):
        list(feeder)
    assert len(caplog.records) == 101
    assert len(feeder.failures) == feeder.statistics().failures == 500


def test_only_failures_of_delivered_batches_are_listed() -> None:
    """Failures of prefetched batches are listed when their batch is delivered."""
    feeder = Feeder(Numbers(), decode=number, batch_size=4, on_error=policy("skip"))
    iterator = iter(feeder)
    next(iterator)
    assert [failure.index for failure in feeder.failures] == [3]
    feeder.close()


def test_a_raised_failure_is_listed_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With "raise" the raised error is in `feeder.failures` and not in the log."""
    feeder = Feeder(Numbers(), decode=number, batch_size=4)
    with caplog.at_level(logging.WARNING, logger="aiofeed"), pytest.raises(ReadError):
        list(feeder)
    assert [failure.index for failure in feeder.failures] == [3]
    assert caplog.records == []


def test_a_feeder_with_a_policy_pickles() -> None:
    """A pickled feeder keeps its policy and failures."""
    feeder = Feeder(Numbers(), decode=number, batch_size=4, on_error=policy("skip", retries=2))
    list(feeder)
    copied = pickle.loads(pickle.dumps(feeder))
    assert [failure.index for failure in copied.failures] == sorted(BAD)
    assert isinstance(copied.failures[0].error, ReadError)
    assert len(list(copied)) == 6


# --- retries ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiofeed.kernel.core.failures.BACKOFF_S", 0.001)


class Flaky(Numbers):
    """The first `times` reads of each sample in `bad` fail."""

    def __init__(self, n: int, bad: frozenset[int], times: int, error: Exception | None = None) -> None:
        super().__init__(n, bad)
        self.times = times
        self.error = error or OSError(5, "input/output error")

    async def read(self, index: int) -> bytes:
        self.reads[index] += 1
        if index in self.bad and self.reads[index] <= self.times:
            raise self.error
        return b"%d" % index


@pytest.mark.usefixtures("quick")
def test_transient_read_errors_are_retried() -> None:
    """Reads with transient errors are retried up to `retries` times, and counted; no sample fails."""
    source = Flaky(20, frozenset({2, 9}), times=3)
    feeder = Feeder(source, decode=number, batch_size=4, on_error=FailurePolicy(retries=3))
    assert epoch_of(feeder) == [list(range(at, at + 4)) for at in range(0, 20, 4)]
    assert feeder.statistics().retries == 6
    assert feeder.statistics().failures == 0
    assert feeder.failures == ()


@pytest.mark.usefixtures("quick")
def test_the_error_after_the_last_retry_is_raised() -> None:
    """If all retries fail, the error of the last attempt is raised."""
    source = Flaky(20, frozenset({2}), times=4)
    with pytest.raises(ReadError, match="input/output error"):
        list(Feeder(source, decode=number, batch_size=4, on_error=FailurePolicy(retries=3)))
    assert source.reads[2] == 4


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no"), PermissionError(13, "no"), ValueError("no")])
def test_permanent_errors_are_not_retried(error: Exception) -> None:
    """Errors that are not transient, such as a missing file, are raised at once."""
    source = Flaky(20, frozenset({2}), times=1, error=error)
    with pytest.raises(ReadError):
        list(Feeder(source, decode=number, batch_size=4, on_error=FailurePolicy(retries=3)))
    assert source.reads[2] == 1


@pytest.mark.usefixtures("quick")
def test_retry_on_adds_a_clients_own_errors() -> None:
    """Error types in `retry_on` are retried."""
    source = Flaky(20, frozenset({2}), times=1, error=LookupError("slow down"))
    on_error = FailurePolicy(retries=1, retry_on=(LookupError,))
    assert len(list(Feeder(source, decode=number, batch_size=4, on_error=on_error))) == 5


class FlakyMany(Flaky):
    """Reads several samples in one call; returns errors in place of samples that fail."""

    async def read_many(self, indices: list[int]) -> list[Any]:
        return await asyncio.gather(*[self.read(index) for index in indices], return_exceptions=True)


@pytest.mark.usefixtures("quick")
def test_errors_of_read_many_are_retried_with_read() -> None:
    """Samples that `read_many` returns as transient errors are retried one by one."""
    source = FlakyMany(20, frozenset({2, 9}), times=2)
    feeder = Feeder(source, decode=number, batch_size=4, on_error=FailurePolicy(retries=2))
    assert len(epoch_of(feeder)) == 5
    assert feeder.statistics().retries == 4
    assert source.reads[2] == 3
    assert source.reads[3] == 1


@pytest.mark.usefixtures("quick")
def test_files_read_in_the_decode_thread_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of small files in the decode thread are retried too."""
    import aiofeed.kernel.sources.files as module

    paths = [tmp_path / f"{number}.txt" for number in range(600)]
    for at, path in enumerate(paths):
        path.write_bytes(b"%d" % at)
    failing = Counter({str(paths[550]): 2})
    real = module.read_file

    def read(path: str, *rest: Any) -> bytes:
        if failing[path] > 0:
            failing[path] -= 1
            raise OSError(5, "input/output error", path)
        return real(path, *rest)

    monkeypatch.setattr(module, "read_file", read)
    monkeypatch.setattr(module, "group_reader", lambda: None)  # the native library does not call `read_file`
    feeder = Feeder(Files(paths), decode=number, batch_size=10, on_error=FailurePolicy(retries=2))
    assert [value for batch in feeder for value in batch.tolist()] == list(range(600))
    assert feeder.statistics().retries == 2


class FlakyItems(Items):
    """A Dataset whose items each fail once."""

    def __init__(self) -> None:
        super().__init__(8)
        self.requests: Counter[int] = Counter()

    def __getitem__(self, index: int) -> int:
        self.requests[index] += 1
        if self.requests[index] == 1:
            raise ConnectionResetError(104, "reset by peer")
        return index


@pytest.mark.usefixtures("quick")
def test_items_of_a_dataset_are_retried() -> None:
    """Items of a Dataset that fail with a transient error are retried."""
    feeder = Feeder(FlakyItems(), batch_size=4, on_error=FailurePolicy(retries=1))
    assert [batch.tolist() for batch in feeder] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert feeder.statistics().retries == 8


async def test_closing_ends_a_wait_for_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing the feeder ends the pause before a retry at once."""
    for name in ("BACKOFF_S", "BACKOFF_MOST_S"):
        monkeypatch.setattr(f"aiofeed.kernel.core.failures.{name}", 600.0)
    source = Flaky(20, frozenset({0}), times=1000)
    feeder = Feeder(source, decode=number, batch_size=4, on_error=FailurePolicy(retries=1000))
    iterator = aiter(feeder)
    while not source.reads[0]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(iterator)
    await feeder.aclose()
    assert source.reads[0] == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_errors_with_a_policy_have_all_attributes() -> None:
    """With a policy, raised errors still have key, index, stage and cause."""
    with pytest.raises(DecodeError, match="number 3") as caught:
        list(Feeder(Bytes(), decode=number, batch_size=4, on_error=FailurePolicy(retries=2)))
    assert (caught.value.key, caught.value.index, caught.value.stage) == ("number 3", 3, "decode")
    assert isinstance(caught.value.__cause__, ValueError)
    assert isinstance(caught.value, FeedError)
