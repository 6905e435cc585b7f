"""`read_timeout_s` and `decode_timeout_s`: errors name the sample, and late results are discarded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import Dataset

from aiofeed import FailurePolicy, Feeder, FeedError, Limits
from aiofeed.errors import DecodeError, ReadError
from aiofeed.kernel.core.types import Row
from aiofeed.kernel.runtime.thread_pool import ABANDONED_MOST
from tests.support.simulated_device import SimulatedDevice

if TYPE_CHECKING:
    import numpy as np

LIMIT_S = 0.1


class Numbers:
    """A source of n numbers. Reads of those in `slow` do not end before `gate` is set; `how` is the way they wait."""

    def __init__(self, n: int = 12, slow: tuple[int, ...] = (), how: str = "await") -> None:
        self.n = n
        self.slow = slow
        self.how = how
        self.gate = threading.Event()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"number {index}"

    async def read(self, index: int) -> bytes:
        self.asked.append(index)
        if index in self.slow:
            await {"await": self._wait, "resist": self._resist, "block": self._block}[self.how]()
        return b"%d" % index

    async def _wait(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def _resist(self) -> None:
        """Swallow the first cancellation, like badly written clients."""
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(2 * LIMIT_S)

    async def _block(self) -> None:
        await asyncio.to_thread(self.gate.wait)


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


class Stuck:
    """A decoder that is stuck at some numbers until `gate` is set."""

    def __init__(self, *stuck: int) -> None:
        self.stuck = stuck
        self.gate = threading.Event()

    def __call__(self, data: bytes) -> torch.Tensor:
        self.wait(int(data))
        return torch.full((4,), float(data))

    def wait(self, value: int) -> None:
        if value in self.stuck:
            self.gate.wait()


class StuckInPlace(Stuck):
    """The same, decoding in place."""

    row = Row((4, 8), "float32")
    takes_seed = False

    def decode_into(self, data: bytes, out: np.ndarray[Any, Any], seed: int | None = None) -> None:
        out[...] = -1.0
        self.wait(int(data))
        out[...] = float(data)


@pytest.fixture
def stuck() -> Iterator[list[Stuck]]:
    """Decoders whose gates are set at the end of the test, so that their threads end."""
    decoders: list[Stuck] = []
    yield decoders
    for decoder in decoders:
        decoder.gate.set()


# --- reads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["await", "resist", "block"])
def test_a_read_that_exceeds_the_limit_is_an_error_with_its_key(how: str) -> None:
    """The read may await, resist cancellation or block a thread; other samples are not affected."""
    source = Numbers(slow=(5,), how=how)
    feeder = Feeder(source, decode=number, batch_size=4, on_error=FailurePolicy(read_timeout_s=LIMIT_S))
    iterator = iter(feeder)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(ReadError, match=r"'number 5': TimeoutError: no answer within read_timeout_s=0\.1") as caught:
        next(iterator)
    assert (caught.value.key, caught.value.index, caught.value.stage) == ("number 5", 5, "read")
    assert isinstance(caught.value.__cause__, TimeoutError)
    source.gate.set()
    feeder.close()


def test_reads_that_block_threads_do_not_delay_others() -> None:
    """More reads hang than may run at a time; each is abandoned, and the next one runs."""
    source = Numbers(n=160, slow=tuple(range(0, 160, 2)), how="block")
    on_error = FailurePolicy("skip", read_timeout_s=0.05, max_failures=80)
    feeder = Feeder(source, decode=number, batch_size=40, on_error=on_error)
    got = [value for batch in feeder for value in batch.tolist()]
    assert got == list(range(1, 160, 2))
    assert feeder.statistics().failures == 80
    source.gate.set()
    feeder.close()


def test_a_read_that_exceeds_the_limit_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is a transient error."""
    monkeypatch.setattr("aiofeed.kernel.core.failures.BACKOFF_S", 0.001)

    class Once(Numbers):
        async def _wait(self) -> None:
            if self.asked.count(5) == 1:
                await super()._wait()

    feeder = Feeder(
        Once(slow=(5,)), decode=number, batch_size=4, on_error=FailurePolicy(retries=1, read_timeout_s=LIMIT_S)
    )
    assert [value for batch in feeder for value in batch.tolist()] == list(range(12))
    assert feeder.statistics().retries == 1


class Many(Numbers):
    """Reads several samples in one call, which hangs if one of them does."""

    async def read_many(self, indices: list[int]) -> list[bytes]:
        return [await self.read(index) for index in indices]


def test_read_many_has_the_limit_of_one_read() -> None:
    """If read_many exceeds the limit, samples are read one by one, and the one that hangs fails."""
    on_error = FailurePolicy("skip", read_timeout_s=LIMIT_S)
    feeder = Feeder(Many(slow=(5,)), decode=number, batch_size=4, on_error=on_error)
    assert [batch.tolist() for batch in feeder] == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]


def test_without_a_limit_a_read_takes_any_time() -> None:
    """By default there is no limit."""
    source = Numbers(slow=(1,), how="block")
    feeder = Feeder(source, decode=number, batch_size=4)
    threading.Timer(3 * LIMIT_S, source.gate.set).start()
    assert [value for batch in feeder for value in batch.tolist()] == list(range(12))


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Stuck, StuckInPlace])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_decode_that_exceeds_the_limit_is_an_error(stuck: list[Stuck], kind: type[Stuck], threads: int) -> None:
    """The error is raised in the order of batches, while the decoder is still running."""
    decoder = kind(5)
    stuck.append(decoder)
    on_error = FailurePolicy(decode_timeout_s=LIMIT_S)
    limits = Limits(decode_threads=threads)
    feeder = Feeder(Numbers(), decode=decoder, batch_size=4, on_error=on_error, limits=limits)
    iterator = iter(feeder)
    assert [row.flatten()[0].item() for row in next(iterator)] == [0, 1, 2, 3]
    with pytest.raises(DecodeError, match=r"'number 5': TimeoutError: not decoded within decode_timeout_s=0\.1"):
        next(iterator)
    assert not decoder.gate.is_set()
    decoder.gate.set()
    feeder.close()


@pytest.mark.parametrize("kind", [Stuck, StuckInPlace])
@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_late_result_never_reaches_a_batch(stuck: list[Stuck], kind: type[Stuck], action: Any, threads: int) -> None:
    """When the stuck decoder returns, no batch changes."""
    decoder = kind(1, 5, 6)
    stuck.append(decoder)
    on_error = FailurePolicy(action, decode_timeout_s=LIMIT_S, max_failures=3)
    limits = Limits(decode_threads=threads)
    feeder = Feeder(Numbers(), decode=decoder, batch_size=4, on_error=on_error, limits=limits)
    batches = list(feeder)
    expected = {
        "skip": [[0, 2, 3], [4, 7], [8, 9, 10, 11]],
        "replace": [[0, 2, 2, 3], [4, 7, 7, 7], [8, 9, 10, 11]],
    }[action]
    shape = (4, 8) if kind is StuckInPlace else (4,)
    wanted = [torch.stack([torch.full(shape, float(value)) for value in batch]) for batch in expected]
    assert all(torch.equal(got, want) for got, want in zip(batches, wanted, strict=True))
    assert {failure.index for failure in feeder.failures} == {1, 5, 6}
    decoder.gate.set()
    feeder.close()
    assert all(torch.equal(got, want) for got, want in zip(batches, wanted, strict=True))


@pytest.mark.parametrize("kind", [Stuck, StuckInPlace])
def test_a_late_result_is_not_copied_to_a_device(stuck: list[Stuck], kind: type[Stuck]) -> None:
    """A stuck decoder does not write into a buffer that has gone back to the pool."""
    decoder = kind(1)
    stuck.append(decoder)
    on_error = FailurePolicy("skip", decode_timeout_s=LIMIT_S, max_failures=40)
    feeder = Feeder(Numbers(n=40), decode=decoder, batch_size=4, on_error=on_error, device=SimulatedDevice(seed=1))
    values: list[float] = []
    for number_, batch in enumerate(feeder):
        if number_ == 5:
            decoder.gate.set()
        values += [row.flatten()[0].item() for row in batch.cpu()]
    assert values == [value for value in range(40) if value != 1]
    feeder.close()


def test_an_epoch_of_stuck_decodes_ends_with_an_error(stuck: list[Stuck]) -> None:
    """Each stuck decode holds a thread; too many of them are an error instead of an endless wait."""
    n = ABANDONED_MOST + 20
    decoder = Stuck(*range(n))
    stuck.append(decoder)
    on_error = FailurePolicy("skip", decode_timeout_s=0.01, max_failures=n)
    feeder = Feeder(Numbers(n=n), decode=decoder, batch_size=n, on_error=on_error)
    with pytest.raises(FeedError, match=f"{ABANDONED_MOST} samples exceeded the limit of 0.01 s"):
        list(feeder)
    decoder.gate.set()
    feeder.close()


class StuckItems(Dataset[int]):
    """A Dataset that is stuck at some items until `gate` is set."""

    def __init__(self, *stuck: int) -> None:
        self.stuck = stuck
        self.gate = threading.Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index in self.stuck:
            self.gate.wait()
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("limits", [{"read_timeout_s": LIMIT_S}, {"decode_timeout_s": LIMIT_S}])
def test_an_item_of_a_dataset_has_a_limit(limits: dict[str, float]) -> None:
    """Either limit applies to a Dataset, which reads and decodes in one call."""
    dataset = StuckItems(5)
    feeder = Feeder(dataset, batch_size=4, on_error=FailurePolicy("skip", **limits))
    assert [batch.tolist() for batch in feeder] == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
    dataset.gate.set()
    feeder.close()
    assert feeder.failures[0].error.args == ("cannot read 'StuckItems[5]': TimeoutError: no item within 0.1 s",)


def test_a_limit_does_not_change_the_samples(jpeg_folder: Path) -> None:
    """With a limit samples are decoded one by one, into the same bytes."""
    from aiofeed import DecodeImage, ImageFolder

    arguments: dict[str, Any] = {
        "decode": DecodeImage(size=32, crop="random", flip=True),
        "batch_size": 5,
        "shuffle": True,
    }
    plain = list(Feeder(ImageFolder(jpeg_folder), **arguments))
    limited = Feeder(
        ImageFolder(jpeg_folder), on_error=FailurePolicy(read_timeout_s=30.0, decode_timeout_s=30.0), **arguments
    )
    for (x, y), (other_x, other_y) in zip(plain, limited, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


async def test_leaving_while_a_decode_is_stuck_is_prompt(stuck: list[Stuck]) -> None:
    """`aclose` of a feeder whose decoder hangs returns within its limit and leaves the thread behind."""
    decoder = Stuck(0)
    stuck.append(decoder)
    feeder = Feeder(Numbers(), decode=decoder, batch_size=4, on_error=FailurePolicy("skip", decode_timeout_s=LIMIT_S))
    iterator = aiter(feeder)
    first = await anext(iterator)
    assert first[:, 0].tolist() == [1, 2, 3]
    async with asyncio.timeout(60.0):
        await feeder.aclose()
