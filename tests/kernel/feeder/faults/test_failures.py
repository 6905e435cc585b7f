"""Failures are raised at the `for` line, after all earlier batches, and name the sample."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from aiofeed import DataLoader, DecodeImage, Feeder, FeedError, Files, ImageFolder, Limits, prefetch
from aiofeed.errors import CollateError, DecodeError, DeviceCopyError, ReadError, SampleError, TooManyFailures
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.core.types import Row
from aiofeed.kernel.engine.fetch.fetcher import ChunkOutcome
from aiofeed.kernel.engine.fetch.source import BlockingReader
from tests.support import process_parts as parts
from tests.support.process_parts import Numbers
from tests.support.simulated_device import SimulatedDevice


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


def seen_before_the_error(feeder: Feeder[Any]) -> tuple[list[int], BaseException]:
    seen: list[int] = []
    iterator = iter(feeder)
    with pytest.raises(FeedError) as caught:
        for batch in iterator:
            seen += batch.tolist()
    assert list(iterator) == []  # finished
    return seen, caught.value


@pytest.mark.parametrize("limits", [Limits(), Limits(decode_threads=1, read_concurrency=1), Limits(decode_threads=4)])
def test_a_read_error_is_raised_after_earlier_batches(limits: Limits) -> None:
    """All batches before the failing one come first; the error has key, index, stage and cause."""
    seen, error = seen_before_the_error(Feeder(Numbers(40, bad=(17,)), decode=number, batch_size=4, limits=limits))
    assert seen == list(range(16))
    assert isinstance(error, ReadError)
    assert (error.key, error.index, error.stage) == ("number 17", 17, "read")
    assert isinstance(error.__cause__, OSError)
    assert "number 17" in str(error)
    assert "input/output error" in str(error)


def test_the_earliest_of_several_failures_is_raised() -> None:
    """The error raised does not depend on timing: it is the first failing sample in order."""
    for _ in range(20):
        feeder = Feeder(Numbers(64, bad=(50, 23, 21, 47)), decode=number, batch_size=8)
        seen, error = seen_before_the_error(feeder)
        assert seen == list(range(16))
        assert isinstance(error, SampleError)
        assert error.index == 21


def test_a_decode_error_names_the_file(tmp_path: Path, jpeg_folder: Path) -> None:
    """A file that is not an image is a DecodeError with its path; the feeder can be iterated again."""
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not an image")
    paths = [*ImageFolder(jpeg_folder).paths[:5], str(broken)]
    feeder = Feeder(Files(paths), decode=DecodeImage((8, 8)), batch_size=2)
    for _ in range(2):
        with pytest.raises(DecodeError, match="cannot decode") as caught:
            list(feeder)
        assert caught.value.key == str(broken)
        assert (caught.value.index, caught.value.stage) == (5, "decode")
        assert caught.value.__cause__ is not None
        assert feeder.statistics().failures == 1


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("kind", [ReadError, DecodeError])
def test_the_error_of_a_sample_names_the_way_to_go_on_without_it(engine: Any, kind: type[SampleError]) -> None:
    """A note of the error names `on_error=`, once, however often the epoch is iterated."""
    source = parts.Numbers(6, bad=(4,) if kind is ReadError else ())
    decode = parts.number if kind is ReadError else parts.fails_at_three
    with Feeder(source, decode=decode, batch_size=2, engine=engine) as feeder:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                list(feeder)
            assert "".join(caught.value.__notes__).count('on_error="skip"') == 1


def test_a_source_that_shrinks_is_an_error() -> None:
    """An index that no longer exists is a ReadError that gives both lengths."""

    class Shrinking(Numbers):
        async def read(self, index: int) -> bytes:
            self.n = 10
            return [b"%d" % number for number in range(10)][index]

    with pytest.raises(ReadError, match="had 20 samples when the feeder was made, now 10"):
        list(Feeder(Shrinking(20), decode=number, batch_size=20))


def test_a_source_that_shrank_before_the_iteration_is_an_error() -> None:
    """The length is taken when the feeder is created, not when it is first iterated."""
    source = Numbers(10)
    feeder = Feeder(source, decode=number, batch_size=4)
    source.bad, source.n = (7,), 5
    source.error = IndexError()
    with pytest.raises(ReadError, match="had 10 samples when the feeder was made, now 5"):
        list(feeder)


def test_shapes_that_differ_are_a_collate_error() -> None:
    """Samples of different shapes without collate_fn: the error names both shapes, two keys, and collate_fn=."""
    feeder = Feeder(Numbers(6), decode=lambda data: torch.zeros(1 + int(data) // 4), batch_size=6)
    with pytest.raises(CollateError, match=r"shapes \[1\] and \[2\].*'number 0' and 'number 4'.*collate_fn="):
        list(feeder)


def test_structures_that_differ_are_a_collate_error() -> None:
    """The sample whose structure differs is named."""
    feeder = Feeder(Numbers(6), decode=lambda data: (1, 2) if int(data) < 3 else (1, 2, 3), batch_size=6)
    with pytest.raises(CollateError, match="one has"):
        list(feeder)


def test_a_collate_fn_that_raises_is_a_collate_error() -> None:
    """An error of collate_fn is a CollateError with the error as its cause."""

    def broken(samples: list[Any]) -> Any:
        raise KeyError("nothing")

    with pytest.raises(CollateError, match="collate_fn raised KeyError") as caught:
        list(Feeder(Numbers(6), decode=number, batch_size=3, collate_fn=broken))
    assert isinstance(caught.value.__cause__, KeyError)


def test_errors_of_a_dataset_name_index_and_dataset() -> None:
    """An error of __getitem__ is a ReadError with the dataset's name and the index."""

    class Broken(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise RuntimeError("no such row")
            return index

    seen, error = seen_before_the_error(Feeder(Broken(), batch_size=2))
    assert seen == [0, 1, 2, 3]
    assert isinstance(error, ReadError)
    assert (error.key, error.index) == ("Broken[5]", 5)


def test_an_error_of_open_is_raised_at_the_for_line() -> None:
    """An error of open() is raised unchanged, with a note."""

    class Closed(Numbers):
        async def open(self) -> None:
            raise ConnectionError("no route")

    with pytest.raises(ConnectionError, match="no route") as caught:
        list(Feeder(Closed(4), decode=number, batch_size=2))
    assert "Closed.open()" in str(caught.value.__notes__)


def test_a_failing_read_many_is_repeated_by_single_reads() -> None:
    """If read_many raises, its samples are read one by one, and the error names the sample."""

    class Many(Numbers):
        async def read_many(self, indices: list[int]) -> list[bytes]:
            raise OSError("one of them")

    seen, error = seen_before_the_error(Feeder(Many(8, bad=(6,)), decode=number, batch_size=2))
    assert seen == [0, 1, 2, 3, 4, 5]
    assert isinstance(error, ReadError)
    assert error.index == 6


def test_a_read_many_that_returns_too_few_is_an_error() -> None:
    """The message gives the number of samples returned and requested."""

    class Few(Numbers):
        async def read_many(self, indices: list[int]) -> list[bytes]:
            return [b"1"]

    with pytest.raises(ReadError, match="returned 1 samples for 2 indices"):
        list(Feeder(Few(8), decode=number, batch_size=4))


def test_a_target_that_raises_is_a_decode_error() -> None:
    """An error of target() is a DecodeError with the key of its sample."""

    class Labelled(Numbers):
        def target(self, index: int) -> int:
            return [0, 1, 2][index]

    with pytest.raises(DecodeError, match="number 3"):
        list(Feeder(Labelled(4), decode=number, batch_size=2))


def test_an_error_keeps_nothing_alive() -> None:
    """After the error was handled, reference counting frees the feeder: the traceback is in no reference cycle."""

    def train() -> weakref.ref[Feeder[Any]]:
        feeder = Feeder(Numbers(20, bad=(7,)), decode=number, batch_size=4)
        try:
            for _ in feeder:
                pass
        except ReadError:
            pass
        feeder.close()
        return weakref.ref(feeder)

    gc.collect()
    gc.disable()
    try:
        gone = train()
        deadline = time.monotonic() + 5.0
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()


class Chunks:
    """A decoder of chunks; sample 7 fails with the rows in its traceback, or with ``leaves`` the whole chunk."""

    row = Row((1000,), "uint8")
    takes_seed = False

    def __init__(self, leaves: bool) -> None:
        self.leaves = leaves
        self.memory: list[weakref.ref[Any]] = []

    def __call__(self, data: bytes, /) -> Any:
        raise NotImplementedError

    def decode_into(self, data: bytes, out: Any, seed: int | None = None) -> None:
        if data == b"7":
            raise ValueError("no number")
        out[:] = int(data)

    def decode_many_into(self, data: Any, out: Any, seeds: Any = None) -> list[Exception | None]:
        if self.leaves:
            raise BaseExceptionGroup("of a panic, say", [GeneratorExit()])
        self.memory.append(weakref.ref(out.base))
        faults: list[Exception | None] = []
        for file, row in zip(data, out, strict=True):
            try:
                self.decode_into(file, row)
                faults.append(None)
            except ValueError as error:
                faults.append(error)
        return faults


@pytest.mark.parametrize("leaves", [False, True])
def test_an_error_in_a_chunk_is_that_of_its_sample(leaves: bool) -> None:
    """A failure in a chunk names its sample and keeps neither the chunk nor its batch alive."""
    decoder = Chunks(leaves)
    gc.collect()
    gc.disable()
    try:
        feeder = Feeder(Numbers(20), decode=decoder, batch_size=10)
        with pytest.raises(DecodeError, match="no number") as caught:
            list(feeder)
        assert caught.value.index == 7
        feeder.close()
        kept = caught.value
        del feeder, caught
        deadline = time.monotonic() + 5.0
        while any(each() is not None for each in decoder.memory) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(each() is not None for each in decoder.memory)
        assert decoder.memory or leaves
        del kept
    finally:
        gc.enable()


def test_sample_errors_survive_pickling() -> None:
    """A pickled SampleError keeps key, index and stage."""
    error = pickle.loads(pickle.dumps(ReadError("text", key="k", index=3, stage="read")))
    assert isinstance(error, ReadError)
    assert (str(error), error.key, error.index, error.stage) == ("text", "k", 3, "read")


async def test_errors_reach_async_consumers() -> None:
    """`async for` raises the same errors, and the iterator is finished."""
    feeder = Feeder(Numbers(12, bad=(6,)), decode=number, batch_size=4)
    async with feeder:
        iterator = aiter(feeder)
        seen = []
        with pytest.raises(ReadError, match="number 6"):
            async for batch in iterator:
                seen += batch.tolist()
        assert seen == [0, 1, 2, 3]
        assert [batch async for batch in iterator] == []


@pytest.mark.parametrize("error", [asyncio.CancelledError("gone"), SystemExit(3)])
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("open", FeedError),
        ("read", ReadError),
        ("decode", DecodeError),
        ("collate", CollateError),
        ("transform", DeviceCopyError),
    ],
)
def test_a_base_exception_becomes_an_error(where: str, kind: type[FeedError], error: BaseException) -> None:
    """SystemExit or CancelledError in user code is raised in the consumer as the cause of a FeedError."""

    def fails(here: str) -> None:
        if where == here:
            raise error

    class Source(Numbers):
        async def open(self) -> None:
            fails("open")

        async def read(self, index: int) -> bytes:
            if index == 5:
                fails("read")
            return b"%d" % index

    def decode(data: bytes) -> torch.Tensor:
        if data == b"5":
            fails("decode")
        return number(data)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        fails("collate")
        return torch.stack(samples)

    def transform(batch: torch.Tensor) -> torch.Tensor:
        fails("transform")
        return batch

    feeder = Feeder(
        Source(8), decode=decode, batch_size=4, collate_fn=collate, transform=transform, device=SimulatedDevice()
    )
    with pytest.raises(kind) as caught:
        list(feeder)
    assert caught.value.__cause__ is error


class OwnReadError(ReadError):
    """A user's error with another constructor."""

    def __init__(self, index: int) -> None:
        super().__init__("gone", key=f"number {index}", index=index, stage="read")


class UnreadableTypeError(TypeError):
    """Raises SystemExit when it is formatted."""

    def __str__(self) -> str:
        raise SystemExit(3)


class ErrorWithoutArguments(Exception):
    """Its arguments raise an error."""

    @property
    def args(self) -> tuple[Any, ...]:  # type: ignore[override]
        raise RuntimeError("no arguments")


class Failing(Numbers):
    """Raises `kind(5)` for number 5."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__(8)
        self.kind = kind

    async def read(self, index: int) -> bytes:
        if index == 5:
            raise self.kind(index)
        return await super().read(index)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        (OwnReadError, "thread"),
        (OwnReadError, "process"),
        (UnreadableTypeError, "thread"),
        (ErrorWithoutArguments, "thread"),
    ],
)
def test_an_error_of_an_unusual_class_is_one_failed_sample(kind: type[Exception], engine: str) -> None:
    """A subclass of ReadError with another constructor, or an error that cannot be formatted, fails its sample only."""
    policy = FailurePolicy("skip", max_failures=1)
    with Feeder(Failing(kind), decode=number, batch_size=4, on_error=policy, engine=engine) as feeder:
        assert [batch.tolist() for batch in feeder] == [[0, 1, 2, 3], [4, 6, 7]]
        [failure] = feeder.failures
    assert (type(failure.error), failure.key, failure.index) == (ReadError, "number 5", 5)


def test_an_error_of_a_feeder_within_a_dataset_is_its_cause() -> None:
    """If the inner sample has the same index, the error still names the outer sample."""
    inner = Feeder(Numbers(6, bad=(5,)), decode=number, batch_size=6)

    class Outer(Dataset[int]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            if index == 5:
                list(inner)
            return index

    seen, error = seen_before_the_error(Feeder(Outer(), batch_size=5))
    assert seen == [0, 1, 2, 3, 4]
    assert isinstance(error, ReadError)
    assert error.key == "Outer[5]"
    assert isinstance(error.__cause__, ReadError)
    assert error.__cause__.key == "number 5"


def test_an_error_of_a_blocking_read_is_that_of_its_file(tmp_path: Path) -> None:
    """An error that is not an OSError is assigned to its own file, not to the first of its group."""
    for index in range(8):
        (tmp_path / f"{index}").write_bytes(b"%d" % index)
    source = Files([*sorted(tmp_path.iterdir()), "no\0path"])
    read = BlockingReader(source.read_now, FailurePolicy()).read(range(9), ChunkOutcome(), threading.Event())
    assert read[:8] == [b"%d" % index for index in range(8)]
    assert isinstance(read[8], OSError)


class QueriedItems:
    """A Dataset whose two methods differ: ``many`` makes its batches, and ``one`` its single items."""

    def __init__(self, one: Callable[[int], Any], many: Callable[[list[int]], Any]) -> None:
        self._one, self._many = one, many

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self._one(index)

    def __getitems__(self, indices: list[int]) -> Any:
        return self._many(indices)


def _no_query(indices: list[int]) -> Any:
    raise KeyError("the query failed")


def _no_item(index: int) -> Any:
    raise NotImplementedError("use __getitems__")


QUERIES = [
    (lambda index: -1, _no_query, "the query failed"),
    (lambda index: -1, lambda indices: [index for index in indices if index % 4], "3 samples instead of 4"),
    (_no_item, _no_query, "the query failed"),
]


@pytest.mark.parametrize("options", [{}, {"cache": "host"}, {"in_order": "samples"}], ids=str)
@pytest.mark.parametrize(("one", "many", "text"), QUERIES)
def test_an_error_of_getitems_is_raised(one: Any, many: Any, text: str, options: dict[str, Any]) -> None:
    """It is not replaced by the items, or by another error, of ``__getitem__``, and no such item is cached."""
    feeder = Feeder(QueriedItems(one, many), batch_size=4, **options)
    for _ in range(2):
        with pytest.raises(ReadError, match=text) as caught:
            list(feeder)
        assert caught.value.key == "QueriedItems[0]"


@pytest.mark.parametrize(("one", "many", "text"), QUERIES)
def test_a_skipped_error_of_getitems_is_logged(
    one: Any, many: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If failures are skipped, a log line says that the items are those of ``__getitem__``."""
    with contextlib.suppress(TooManyFailures):
        list(Feeder(QueriedItems(one, many), batch_size=4, on_error="skip"))
    assert text in caplog.text
    assert "requested one by one" in caplog.text


def test_a_transient_error_of_getitems_is_retried() -> None:
    """``retries=`` repeats the call of ``__getitems__``; ``__getitem__`` is not asked."""
    failed: list[int] = []

    def many(indices: list[int]) -> list[int]:
        if not failed:
            failed.append(indices[0])
            raise ConnectionError
        return indices

    policy = FailurePolicy(retries=1)
    batches = [batch.tolist() for batch in Feeder(QueriedItems(_no_item, many), batch_size=4, on_error=policy)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_error_of_getitems_that_items_have_is_named_by_the_item() -> None:
    """The item that fails alone, in the same way, is the one that the error names."""

    def one(index: int) -> int:
        if index == 5:
            raise ValueError("damaged")
        return index

    dataset = QueriedItems(one, lambda indices: [one(index) for index in indices])
    with pytest.raises(ReadError, match="damaged") as caught:
        list(Feeder(dataset, batch_size=4))
    assert (caught.value.index, str(caught.value)) == (5, "cannot read 'QueriedItems[5]': ValueError: damaged")


FORGETS = [
    pytest.param(lambda data, forgets: Feeder(data, batch_size=4, transform=forgets), id="resident"),
    pytest.param(lambda data, forgets: Feeder(list(data), batch_size=4, transform=forgets), id="thread"),
    pytest.param(
        lambda data, forgets: Feeder(list(data), batch_size=4, transform=forgets, device=SimulatedDevice()), id="device"
    ),
    pytest.param(
        lambda data, forgets: Feeder(data, batch_size=4, transform=forgets, device=SimulatedDevice()),
        id="resident on a device",
    ),
    pytest.param(lambda data, forgets: prefetch([torch.zeros(4)], transform=forgets), id="prefetch"),
    pytest.param(
        lambda data, forgets: prefetch([torch.zeros(4)], SimulatedDevice(), transform=forgets),
        id="prefetch to a device",
    ),
    pytest.param(lambda data, forgets: DataLoader(data, batch_size=4, transform=forgets), id="DataLoader"),
    pytest.param(lambda data, forgets: DataLoader(data, batch_size=4, threads=1, transform=forgets), id="its threads"),
]


@pytest.mark.parametrize("make", FORGETS)
def test_a_transform_without_return_is_an_error(make: Callable[..., Any]) -> None:
    """The batch would be ``None``; the error names the argument and says what to do."""
    data = TensorDataset(torch.zeros(8, 2))
    with pytest.raises((TypeError, DeviceCopyError), match=r"transform= returned None.*return the batch"):
        next(iter(make(data, lambda batch: None)))


def test_a_collate_fn_without_return_is_an_error() -> None:
    """The error names the samples."""
    with pytest.raises(CollateError, match=r"collate_fn returned None.* \(samples 'list\[0\]' to 'list\[3\]'\)"):
        next(iter(Feeder(list(range(8)), batch_size=4, collate_fn=lambda samples: None)))
