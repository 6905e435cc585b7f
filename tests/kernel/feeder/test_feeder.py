"""``Feeder``: synchronous and asynchronous iteration, epochs, arguments and the contents of batches."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import pickle
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import aiofeed
from aiofeed import DecodeImage, Feeder, Files, FromDataset, ImageFolder, Limits
from aiofeed.errors import IteratorClosedError
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.core.types import Row
from tests.support import process_parts as parts


class Numbers(parts.Numbers):
    """Sample i is i as text; its target is i squared."""

    def target(self, index: int) -> int:
        return index * index


def number(data: bytes) -> torch.Tensor:
    return torch.tensor([int(data)])


def feeder_of(n: int = 10, **options: Any) -> Feeder[Any]:
    return Feeder(Numbers(n), decode=number, **{"batch_size": 4, **options})


def values(batches: Any) -> list[list[int]]:
    return [x.flatten().tolist() for x, _ in batches]


def test_batches_come_in_order_with_the_last_partial() -> None:
    """Ten samples with batch size 4 give two full batches and a partial one, with their targets."""
    feeder = feeder_of()
    batches = list(feeder)
    assert values(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [y.tolist() for _, y in batches] == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    assert len(feeder) == 3
    assert all(isinstance(batch, list) for batch in batches)


@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_short_and_empty_sources(n: int) -> None:
    """An empty source gives no batch and no error; len() equals the number of batches."""
    feeder = feeder_of(n)
    assert [x for batch in values(feeder) for x in batch] == list(range(n))
    assert len(feeder) == len(list(feeder)) == -(-n // 4)


def test_nothing_is_drawn_from_the_global_generators() -> None:
    """Creating and iterating a feeder does not change the global random state of torch, numpy and Python."""
    import random

    before = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    list(feeder_of(shuffle=True))
    after = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    assert before == after


async def test_async_iteration_gives_the_same_batches() -> None:
    """`async for` gives the same batches as `for`, repeatedly."""
    feeder = feeder_of()
    for _ in range(2):
        async with feeder:
            assert len([batch async for batch in feeder]) == 3
            assert values([batch async for batch in feeder]) == values(list(feeder))


async def test_an_async_consumer_that_blocks_its_loop_still_gets_batches() -> None:
    """The engine has its own event loop, so a step that blocks the consumer's loop does not stop it."""
    read = threading.Event()

    class Watched(Numbers):
        async def read(self, index: int) -> bytes:
            if index == 7:
                read.set()
            return await super().read(index)

    feeder = Feeder(Watched(12), decode=number, batch_size=4)
    async with feeder:
        async for _ in feeder:
            # A blocking step: the second batch must be read during it.
            assert read.wait(10)
            break


async def test_many_async_consumers_share_a_loop() -> None:
    """Feeders iterated by several tasks of one loop each give their own samples."""

    async def consume(n: int) -> list[list[int]]:
        feeder = feeder_of(n)
        got = values([batch async for batch in feeder])
        await feeder.aclose()
        return got

    results = await asyncio.gather(*[consume(n) for n in range(1, 12)])
    for n, result in enumerate(results, 1):
        assert sum(result, []) == list(range(n))


def test_iteration_in_a_thread_that_is_not_the_main_one() -> None:
    """Two threads can iterate two feeders at the same time."""
    results: dict[int, list[int]] = {}

    def consume(n: int) -> None:
        with feeder_of(n) as feeder:
            for _ in range(3):
                results[n] = sum(values(feeder), [])

    threads = [threading.Thread(target=consume, args=(n,)) for n in (50, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {50: list(range(50)), 60: list(range(60))}


def test_iteration_inside_a_running_loop_without_await() -> None:
    """A plain `for` works inside a coroutine, as in Jupyter, where an event loop is always running."""

    async def cell() -> list[list[int]]:
        return values(feeder_of())

    assert sum(asyncio.run(cell()), []) == list(range(10))


def test_a_second_iterator_closes_the_first() -> None:
    """The older iterator raises IteratorClosedError, not StopIteration; the newer one gives all batches."""
    feeder = feeder_of(40)
    first = iter(feeder)
    next(first)
    second = iter(feeder)
    with pytest.raises(IteratorClosedError, match="newer"):
        next(first)
    assert len(list(second)) == 10
    with pytest.raises(IteratorClosedError):
        next(first)


def test_an_ended_iterator_stays_ended() -> None:
    """next() after the end raises StopIteration again."""
    iterator = iter(feeder_of())
    assert len(list(iterator)) == 3
    assert list(iterator) == []


def test_an_epoch_without_a_batch_handed_out_is_not_counted() -> None:
    """iter() twice in a row, as Lightning calls it, starts the same epoch."""
    feeder = feeder_of(40, shuffle=True)
    iter(feeder)
    wanted = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(values(feeder), []) == wanted


def test_close_is_idempotent_and_not_terminal() -> None:
    """close() can be repeated, before and after use; the next iter() starts new threads."""
    feeder = feeder_of()
    feeder.close()
    for _ in range(2):
        assert len(list(feeder)) == 3
        feeder.close()
        feeder.close()


def test_a_feeder_without_another_reference_can_be_iterated() -> None:
    """`for batch in Feeder(...)` keeps the feeder alive while the loop runs."""
    assert sum(values(iter(feeder_of(30))), []) == list(range(30))


def test_kept_batches_are_never_overwritten(jpeg_folder: Path) -> None:
    """Batches that are kept over several epochs do not change, and no two share memory."""
    feeder = Feeder(ImageFolder(jpeg_folder), decode=DecodeImage((128, 128)), batch_size=4)
    kept, copies = [], []
    for _ in range(3):
        for images, _ in feeder:
            kept.append(images)
            copies.append(images.clone())
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
    assert len({images.data_ptr() for images in kept}) == len(kept)
    feeder.close()


def test_images_are_channels_last_uint8(jpeg_folder: Path) -> None:
    """With DecodeImage a batch is [N, 3, H, W] uint8 in channels_last memory, with int64 labels."""
    folder = ImageFolder(jpeg_folder)
    feeder = Feeder(folder, decode=DecodeImage((20, 30)), batch_size=8)
    images, labels = next(iter(feeder))
    assert images.shape == (8, 3, 20, 30)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == folder.targets[:8]
    assert labels.dtype == torch.int64


def test_images_without_targets_are_a_tensor(jpeg_folder: Path) -> None:
    """A source without targets gives batches that are the image tensor itself."""
    feeder = Feeder(Files(ImageFolder(jpeg_folder).paths), decode=DecodeImage(24), batch_size=36)
    [images] = list(feeder)
    assert images.shape == (36, 3, 24, 24)


def test_decode_image_with_collate_fn(jpeg_folder: Path) -> None:
    """collate_fn gets the list of decoded samples and returns the batch."""
    feeder = Feeder(
        ImageFolder(jpeg_folder),
        decode=DecodeImage(16),
        batch_size=6,
        collate_fn=lambda samples: {"x": torch.stack([x for x, _ in samples]).float(), "n": len(samples)},
    )
    plain = list(Feeder(ImageFolder(jpeg_folder), decode=DecodeImage(16), batch_size=6))
    for batch, (images, _) in zip(feeder, plain, strict=True):
        assert batch["n"] == 6
        assert torch.equal(batch["x"], images.float())


class Several:
    """A source whose samples have several files: read returns a dict of bytes."""

    def __len__(self) -> int:
        return 5

    def key(self, index: int) -> str:
        return f"pair {index}"

    async def read(self, index: int) -> dict[str, bytes]:
        return {"image": b"%d" % index, "mask": b"%d" % (index + 100)}


def test_a_source_of_several_files_per_sample() -> None:
    """The decoder gets the value of read; dicts of tensors are collated by key."""

    def decode(data: dict[str, bytes]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(int(content)) for name, content in data.items()}

    [batch] = list(Feeder(Several(), decode=decode, batch_size=5))
    assert batch["image"].tolist() == [0, 1, 2, 3, 4]
    assert batch["mask"].tolist() == [100, 101, 102, 103, 104]


def test_open_and_aclose_run_on_the_engines_loop() -> None:
    """A source is opened once before the first read and closed once after the last, on the loop that reads."""
    events: list[tuple[str, int]] = []

    class Session(Numbers):
        async def open(self) -> None:
            events.append(("open", id(asyncio.get_running_loop())))

        async def aclose(self) -> None:
            events.append(("close", id(asyncio.get_running_loop())))

        async def read(self, index: int) -> bytes:
            events.append(("read", id(asyncio.get_running_loop())))
            return await super().read(index)

    feeder = Feeder(Session(4), decode=number, batch_size=2)
    list(feeder)
    list(feeder)
    feeder.close()
    names = [name for name, _ in events]
    # The third epoch may have been started ahead.
    assert names[0] == "open"
    assert names[-1] == "close"
    assert set(names[1:-1]) == {"read"}
    assert 8 <= len(names) - 2 <= 12
    assert len({loop for _, loop in events}) == 1


def test_read_many_is_used_if_the_source_has_it() -> None:
    """read_many gets the indices of a chunk; its results are decoded."""

    class Many(Numbers):
        async def read_many(self, indices: list[int]) -> list[bytes]:
            return [b"%d" % (index + 1000) for index in indices]

    assert sum(values(Feeder(Many(6), decode=number, batch_size=3)), []) == list(range(1000, 1006))


def test_a_decoder_gets_the_samples_own_generator() -> None:
    """The keyword argument rng is a torch.Generator that depends only on seed, epoch and position."""

    def noisy(data: bytes, *, rng: torch.Generator) -> torch.Tensor:
        return torch.rand(3, generator=rng)

    def run(**options: Any) -> list[torch.Tensor]:
        feeder = Feeder(Numbers(20), decode=noisy, seed=3, **{"batch_size": 4, **options})
        return [torch.cat([x for x, _ in feeder]) for _ in range(2)]

    one = run(limits=Limits(decode_threads=1))
    other = run(batch_size=10, limits=Limits(decode_threads=4, read_concurrency=3))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[1])
    assert len({tuple(row.tolist()) for row in one[0]}) == 20


class Squares(Dataset):  # type: ignore[type-arg]
    """A Dataset as written for DataLoader."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        return {"x": torch.full((3,), index), "y": index**2, "name": f"n{index}", "z": np.float32(index)}


def test_a_dataset_is_called_by_one_thread_by_default() -> None:
    """A Dataset has one decode thread by default, and as many as FromDataset(threads=) allows."""
    dataset = Squares()
    list(Feeder(dataset, batch_size=5))
    assert len(dataset.threads) == 1
    assert Feeder(FromDataset(dataset, threads=3), batch_size=5).statistics().decode_threads == 3


def test_getitems_gets_whole_batches() -> None:
    """__getitems__ is called with a batch's indices, as DataLoader does."""
    calls: list[list[int]] = []

    class Batched(Squares):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            calls.append(indices)
            return [self[index] for index in indices]

    list(Feeder(Batched(), batch_size=20))
    assert calls == [list(range(20)), list(range(20, 37))]


def test_statistics_add_up() -> None:
    """Samples, batches and bytes are counted per epoch and in total; str() is one line."""
    feeder = feeder_of(10)
    for _ in range(3):
        list(feeder)
    epoch, total = feeder.statistics(), feeder.statistics(total=True)
    assert (epoch.samples, epoch.batches, epoch.bytes_read) == (10, 3, 10)
    assert (total.samples, total.batches, total.bytes_read) == (30, 9, 30)
    assert 0 < epoch.first_batch_s <= epoch.wall_s
    assert epoch.decode_s > 0
    assert epoch.queue_depth == 0
    assert epoch.chunk_size >= 1
    assert "\n" not in str(epoch)
    assert "10 samples in 3 batches" in str(epoch)


def test_transform_runs_on_the_batch() -> None:
    """On the host, transform= runs in the consumer's thread; its error gets a note with the batch number."""
    feeder = feeder_of(transform=lambda batch: (batch[0].float() / 2, threading.current_thread()))
    for x, thread in feeder:
        assert x.dtype == torch.float32
        assert thread is threading.current_thread()

    def broken(batch: Any) -> Any:
        raise ZeroDivisionError("oops")

    with pytest.raises(ZeroDivisionError, match="oops") as caught:
        next(iter(feeder_of(transform=broken)))
    assert "transform= of batch 0" in str(caught.value.__notes__)


async def coroutine(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an int, got 2.0"),
        ({"num_workers": 4}, TypeError, "num_workers.*threads"),
        ({"pin_memory": True}, TypeError, "pin_memory.*device="),
        ({"batch_sampler": []}, ValueError, "leave out batch_size="),
        ({"prefetch_factor": 3}, TypeError, r"Limits\(prefetch_batches=3\)"),
        ({"num_workers": 0}, TypeError, "num_workers=0.*leave it out"),
        ({"flavour": 3}, TypeError, "unexpected keyword argument 'flavour'$"),
        ({"wrokers": 3}, TypeError, r"no argument 'wrokers'; did you mean num_workers=3\? aiofeed.DataLoader takes it"),
        ({"prefetch_batches": 3}, TypeError, r"pass limits=Limits\(prefetch_batches=3\)"),
        ({"prefetch_batch": 3}, TypeError, r"mean prefetch_batches=3\? pass limits=Limits\(prefetch_batches=3\)"),
        ({"num_threads": 3}, TypeError, r"pass limits=Limits\(decode_threads=3\)"),
        ({"retries": 3}, TypeError, r"pass on_error=FailurePolicy\(retries=3\)"),
        ({"world_size": 3}, TypeError, r"pass shard=\(rank, world_size\)"),
        ({"shufle": True}, TypeError, r"no argument 'shufle'; did you mean shuffle=\?"),
        ({"batchsize": 8}, TypeError, r"no argument 'batchsize'; did you mean batch_size=\?"),
        ({"cache": "/tmp/a.cache"}, TypeError, r"did you mean aiofeed.DiskCache\('/tmp/a.cache'\)\?"),
        ({"decode": coroutine}, TypeError, "decode must be an ordinary function.*async read"),
        ({"collate_fn": coroutine}, TypeError, "collate_fn must be an ordinary function"),
        ({"transform": coroutine}, TypeError, "transform must be an ordinary function"),
        ({"seed": "x"}, TypeError, "seed must be an int"),
        ({"seed": 1 << 70}, ValueError, "seed must be between"),
        ({"shuffle": 1}, TypeError, "shuffle must be"),
        ({"shuffle": "window:0"}, ValueError, r"window of N shards, at least 1, got 'window:0'"),
        ({"decode": None}, TypeError, "decode=None .*samples as they are stored.*DecodeImage"),
        ({"decode": DecodeImage}, TypeError, "the class DecodeImage; pass an instance"),
        ({"decode": 3}, TypeError, "decode must be callable"),
        ({"collate_fn": 3}, TypeError, "collate_fn must be callable"),
        ({"limits": {"decode_threads": 1}}, TypeError, "limits must be"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The message names the argument and its value, and says what to write instead."""
    with pytest.raises(error, match=message):
        Feeder(Numbers(4), **{"decode": number, "batch_size": 2, **options})


class StructuredRows:
    """A decoder whose rows have a dtype that torch lacks."""

    takes_seed = False

    def __init__(self, dtype: Any) -> None:
        self.row = Row((3,), dtype)

    def __call__(self, data: bytes, /) -> Any: ...

    def decode_into(self, data: bytes, out: Any, seed: int | None = None) -> None: ...


@pytest.mark.parametrize("dtype", [">i4", "datetime64[s]", "U3", [("a", "i4")], "O"])
def test_rows_of_a_dtype_that_torch_lacks_are_refused(dtype: Any) -> None:
    """When the feeder is made, with the decoder and the dtype."""
    with pytest.raises(TypeError, match=r"StructuredRows.*torch has no tensors"):
        Feeder(Numbers(4), decode=StructuredRows(dtype), batch_size=2)


@pytest.mark.parametrize("free_mib", [24, 25])
def test_batches_larger_than_the_free_memory(
    free_mib: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning with both figures when the feeder is made, if two batches do not fit."""
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.free_memory", lambda: free_mib << 20)
    Feeder(Files(["a"] * 16), decode=DecodeImage(512), batch_size=17)  # 12.75 MiB
    Feeder(Files(["a"] * 16), decode=DecodeImage(512), batch_size=16)
    [record] = caplog.records
    assert "two batches of 17 samples, one in use and the next one, take 25.5 MiB" in record.getMessage()
    assert f"has {free_mib}.0 MiB left" in record.getMessage()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    Feeder(Files(["a"] * 16), decode=DecodeImage(512), batch_size=9)
    assert "take 13.5 MiB" in caplog.records[1].getMessage()
    assert f"has {free_mib / 2:.1f} MiB left for this process" in caplog.records[1].getMessage()


@pytest.fixture
def eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 128 cores and 16 GiB, on which this process is one of 8 ranks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.cpu_quota", lambda *_: None)
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.free_memory", lambda: 16 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")


@pytest.mark.parametrize("options", [{}, {"engine": "process:2"}, {"cache": "host"}], ids=str)
def test_the_defaults_of_all_ranks_fit_into_the_machine(eight_ranks: None, options: dict[str, Any]) -> None:
    """Cores and reads as many as there are, and memory, look-ahead and caches less than is free, all ranks together."""
    feeders = [Feeder(Numbers(64), decode=number, batch_size=4, shard=(rank, 8), **options) for rank in range(8)]
    limits = [feeder._config.limits for feeder in feeders]
    assert sum(each.decode_threads for each in limits) == 128
    assert sum(each.read_concurrency for each in limits) == 64
    stores: Any = [feeder._config.cache for feeder in feeders if "cache" in options]
    cached = sum(store._room() for store in stores)
    assert cached == (8 << 30 if stores else 0)
    assert sum(each.memory_bytes + each.lookahead_bytes for each in limits) + cached <= 16 << 30


def test_limits_of_the_user_are_those_of_each_rank(eight_ranks: None) -> None:
    """They are not divided; nor are the threads of a Dataset."""
    given = Limits(decode_threads=128, read_concurrency=512, memory_bytes=16 << 30, lookahead_bytes=1 << 30)
    limits = Feeder(Numbers(64), decode=number, batch_size=4, limits=given)._config.limits
    assert (limits.decode_threads, limits.read_concurrency, limits.memory_bytes) == (128, 512, 16 << 30)
    assert limits.lookahead_bytes == 1 << 30
    assert Feeder(FromDataset(Squares(), threads=40), batch_size=4)._config.limits.decode_threads == 40


@pytest.mark.parametrize(("limits", "threads"), [(None, 64), (Limits(read_concurrency=5), 5)], ids=str)
def test_there_are_threads_for_more_reads_than_a_rank_begins_with(
    eight_ranks: None, limits: Limits | None, threads: int
) -> None:
    """Reads become more while that pays, also beyond the part of a rank; not if the user gave their number."""
    with Feeder(Numbers(64), decode=number, batch_size=4, limits=limits) as feeder:
        next(iter(feeder))
        pipeline: Any = feeder._session.pipeline
        assert pipeline.loop_thread.read_pool.max_threads == threads


def test_advice_is_for_the_part_of_a_rank(eight_ranks: None) -> None:
    """Of cores and of free memory."""
    from aiofeed.reports.bottleneck import FeedMeasurements

    found = FeedMeasurements.of_run(EpochStats(), None, threads=1, reads=1)
    assert (found.cores, found.free_memory) == (16, 2 << 30)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: aiofeed.ImageFolder("train", transform=str), r"no argument 'transform'.*DecodeImage"),
        (lambda: aiofeed.ImageFolder("train", follow_symlink=True), "did you mean follow_symlinks="),
        (lambda: DecodeImage(224, mean=(0.5,)), r"no argument 'mean' \(mean=\(0.5,\)\).*transform= of Feeder"),
        (lambda: Limits(num_workers=4), r"no argument 'num_workers' .*decode_threads="),
        (lambda: Files(["a"], target=[1]), r"Files has no argument 'target'; did you mean targets=\?"),
        (lambda: FromDataset([1], thread=2), "did you mean threads="),
        (lambda: aiofeed.FailurePolicy("skip", maxfailures=3), "did you mean max_failures="),
        (lambda: aiofeed.HostCache(maxbytes=3), "did you mean max_bytes="),
        (lambda: aiofeed.DiskCache("a", maxbytes=3), "did you mean max_bytes="),
        (lambda: aiofeed.prefetch([1], devise="cpu"), r"prefetch has no argument 'devise'; did you mean device=\?"),
        (lambda: aiofeed.serve(feeder_of(), "a", min_consumer=1), "did you mean min_consumers="),
        (lambda: aiofeed.attach("a", wait=1), "did you mean wait_s="),
        (lambda: Feeder(Numbers, decode=number, batch_size=4), "got the class Numbers; pass an instance"),
        (lambda: Feeder(Path("train"), decode=number, batch_size=4), r"mean aiofeed.ImageFolder\('train'\)\?"),
        (lambda: Feeder("train", decode=number, batch_size=4), r"mean aiofeed.ImageFolder\('train'\)\?"),
        (lambda: Feeder((torch.zeros(8, 2), np.zeros(8)), batch_size=4), r"aiofeed.Tensors\(x, y"),
    ],
)
def test_arguments_that_do_not_exist_are_explained(function: Any, message: str) -> None:
    """The message names what to use instead."""
    with pytest.raises(TypeError, match=message):
        function()


@pytest.mark.parametrize(
    ("epoch", "message"), [(-1, "at least 0, got -1"), (1 << 32, r"below 2\*\*32, got 4294967296")]
)
def test_an_epoch_out_of_range_is_refused(epoch: int, message: str) -> None:
    """An epoch is a number from 0 to 2**32 - 1."""
    with pytest.raises(ValueError, match=f"epoch must be {message}"):
        Feeder(Numbers(4), decode=number, batch_size=2).set_epoch(epoch)


@pytest.mark.parametrize("kind", [bytes, int])
def test_a_type_decodes_as_a_function(kind: type[Any]) -> None:
    """A class whose instances cannot be called is a function of the encoded sample."""
    feeder: Feeder[Any] = Feeder(Numbers(4), decode=kind, batch_size=4, shard=None)
    [[batch, _]] = feeder
    assert list(batch) == [kind(b"%d" % index) for index in range(4)]


class EndlessSampler:
    """A sampler that never ends, as training loops that count steps use it."""

    def __iter__(self) -> Any:
        return itertools.cycle(range(4))


def test_an_endless_sampler_is_refused() -> None:
    """The error says that a sampler has to end."""
    feeder: Feeder[Any] = Feeder(Numbers(4), decode=number, batch_size=2, sampler=EndlessSampler())
    with pytest.raises(ValueError, match=r"EndlessSampler gave more than 1,048,576 indices for 4 samples"):
        iter(feeder)


class Claimed(list[Any]):
    """A sampler with a length that it claims, or raises."""

    def __init__(self, items: list[Any], length: Any) -> None:
        super().__init__(items)
        self.length = length

    def __len__(self) -> int:
        if isinstance(self.length, int):
            return self.length
        raise self.length("not known before they are made")


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, RuntimeError, TypeError])
@pytest.mark.parametrize(("argument", "items"), [("sampler", [3, 1, 2]), ("batch_sampler", [[3, 1], [2]])])
def test_a_sampler_whose_length_is_not_known(argument: str, items: Any, error: type[Exception]) -> None:
    """Whatever its ``__len__`` raises, a sampler is used as one without a length, also for a resume."""

    def new_feeder() -> Feeder[Any]:
        size = {"batch_size": 2} if argument == "sampler" else {}
        return Feeder(Numbers(4), decode=number, **{argument: Claimed(items, error)}, **size)

    feeder = new_feeder()
    with pytest.raises(TypeError, match="has no len"):
        len(feeder)
    batches = iter(feeder)
    assert next(batches)[0].flatten().tolist() == [3, 1]
    resumed = new_feeder()
    resumed.load_state_dict(feeder.state_dict())
    assert [batch[0].flatten().tolist() for batch in resumed] == [[2]]


@pytest.mark.parametrize("argument", ["sampler", "batch_sampler"])
def test_a_sampler_too_long_to_list_is_refused(argument: str) -> None:
    """A length that no list can have is refused before the sampler is read, with what to use instead."""
    size = {"batch_size": 2} if argument == "sampler" else {}
    feeder = Feeder(Numbers(4), decode=number, **{argument: Claimed([], 10**10)}, **size)
    with pytest.raises(ValueError, match=r'a length of 10,000,000,000 for 4 samples.*shuffle="replacement"'):
        iter(feeder)


class SlowItems(Dataset[int]):
    """A Dataset whose items take a while."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


@pytest.mark.parametrize("threads", [1, 2])
def test_training_that_waits_for_one_thread_gets_a_hint(
    threads: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once per feeder, within the epoch, with all ways to use more cores; not if several threads call the Dataset."""
    monkeypatch.setattr("aiofeed.kernel.feeder.session.HINT_AFTER_S", 0.05)
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.cpus", lambda: 6)
    with Feeder(FromDataset(SlowItems(), threads=threads), batch_size=2) as feeder:
        batches = iter(feeder)
        for _ in range(4):
            next(batches)
        assert ("called by one thread" in caplog.text) == (threads == 1)
        for _ in range(2):
            list(feeder)
    hints = [record.getMessage() for record in caplog.records if "called by one thread" in record.getMessage()]
    assert len(hints) == (threads == 1)
    for hint in hints:
        assert "FromDataset(dataset, threads=6)" in hint
        assert 'engine="process:6"' in hint
        assert "aiofeed.DataLoader(dataset, batch_size=2, num_workers=6)" in hint
        assert re.search(r"on the processor for \d+ % of a call", hint)


@pytest.mark.parametrize(
    ("held", "computes", "by_threads"),
    [(0, 0.02, "6.0"), (32, 0.9, "2.0"), (64, 1.0, "1.0"), (None, 0.5, "unknown, up to 6.0")],
    ids=["waits", "half with the GIL", "pure Python", "not probed"],
)
def test_the_hint_has_the_gain_of_each_way(
    held: int | None,
    computes: float,
    by_threads: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Threads gain at most what the GIL leaves, processes what the cores and the step do."""
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.cpus", lambda: 6)
    with Feeder([*range(40)], batch_size=4) as feeder:
        list(feeder)
        session = feeder._session
        session._streaming[0].gil_probes = 0 if held is None else 64  # type: ignore[index]
        session._streaming[0].gil_held = held or 0  # type: ignore[index]
        session.stats = EpochStats(wall_s=40.0, stall_s=38.0, decode_s=20.0, decode_cpu_s=20 * computes, batches=100)
        session.look_for_hint()
    assert f"processor for {computes:.0%}".replace("%", " %") in caplog.text
    assert f"may call it: {by_threads}\n" in caplog.text
    assert "copy each: 6.0\n" in caplog.text
    assert caplog.text.rstrip().endswith("torch's: 6.0")


@pytest.mark.parametrize(
    "stats",
    [
        EpochStats(wall_s=40.0, stall_s=2.9, batches=9),
        EpochStats(wall_s=40.0, stall_s=19.0, batches=9),
        EpochStats(wall_s=40.0, stall_s=38.0, batches=90_000),
        EpochStats(stall_s=4.0),
    ],
    ids=["short", "long steps", "tiny batches", "the first batch is not counted yet"],
)
def test_no_hint_where_more_threads_would_not_help(
    stats: EpochStats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the training waits for a short time, for a small share of it, or for batches that take no time."""
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.cpus", lambda: 6)
    with Feeder([*range(40)], batch_size=4) as feeder:
        feeder._session.stats = stats
        feeder._session.look_for_hint()
    assert "called by one thread" not in caplog.text


@pytest.mark.parametrize("given", [None, 3])
def test_the_tuner_chooses_the_threads_of_a_thread_safe_dataset(
    given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``threads="auto"``, unless ``Limits`` say how many."""
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.cpus", lambda: 6)
    inside, most, lock = [0], [0], threading.Lock()

    class Safe(SlowItems):
        def __getitem__(self, index: int) -> int:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            item = super().__getitem__(index)
            with lock:
                inside[0] -= 1
            return item

    source = FromDataset(Safe(), threads="auto")
    assert repr(source) == "FromDataset(Safe, threads='auto')"
    with Feeder(source, batch_size=2, limits=Limits(decode_threads=given)) as feeder:
        assert [batch.tolist() for batch in feeder] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        tuner = feeder._session.pipeline.tuner.decoding  # type: ignore[union-attr]
        assert (tuner.most, tuner.given) == (given or 6, given is not None)
    assert 1 < most[0] <= (given or 6)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("train/", "did you mean aiofeed.ImageFolder"),
        (iter(range(3)), r"generator function pass aiofeed\.Stream"),
        (DataLoader(Squares()), "pass its dataset"),
        (3, "a source has __len__, key and async read"),
        ({"train": Squares()}, r"has the keys \['train'\]: pass one of its values"),
        (["a.jpg", "b.jpg"], r"a list is used as a Dataset; for files pass aiofeed.Files"),
    ],
)
def test_other_objects_are_refused_as_a_source(source: Any, message: str) -> None:
    """The message says what a source is and what to use instead."""
    with pytest.raises(TypeError, match=message):
        Feeder(source, decode=number, batch_size=2)


def test_a_dataset_takes_no_decoder() -> None:
    """decode= is refused for a Dataset, whose items are decoded."""
    with pytest.raises(TypeError, match="are decoded"):
        Feeder(Squares(), decode=number, batch_size=2)


def test_numpy_integers_are_accepted() -> None:
    """batch_size and seed may be numpy integers; the saved state contains plain ints."""
    feeder = Feeder(Numbers(8), decode=number, batch_size=np.int64(4), seed=np.int32(3))  # type: ignore[arg-type]
    state = feeder.state_dict()
    assert (type(state["batch_size"]), type(state["seed"])) == (int, int)
    assert values(feeder) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_dict_of_numbers_is_a_dataset() -> None:
    """A dict with the keys 0, 1, ... is a Dataset."""
    assert [batch.tolist() for batch in Feeder({0: 5, 1: 6}, batch_size=2)] == [[5, 6]]


class ReadsAtOnce(Numbers):
    def read(self, index: int) -> bytes:  # type: ignore[override]
        return b""


def test_a_read_that_is_not_a_coroutine_is_an_error() -> None:
    """The error says that read must be `async def`."""
    with pytest.raises(aiofeed.errors.ReadError, match=r"ReadsAtOnce\.read is not an `async def`"):
        list(Feeder(ReadsAtOnce(4), decode=number, batch_size=2))


@pytest.mark.parametrize(
    ("n", "options", "reason"),
    [
        (0, {}, "there are no samples"),
        (3, {"drop_last": True}, "3 samples do not fill a batch of 4, and drop_last=True"),
        (
            7,
            {"drop_last": True, "shard": (1, 2)},
            "7 samples do not fill a batch of 4 on each of 2 ranks, and drop_last=True",
        ),
        (3, {"pad": False, "shard": (3, 4)}, "3 samples are fewer than 4 ranks, and pad=False"),
        (3, {"drop_last": True, "shard": (0, 4)}, "3 samples are fewer than 4 ranks, and drop_last=True"),
        (
            3,
            {"batch_size": None, "batch_sampler": [[0, 1], [2]], "pad": False, "shard": (2, 3)},
            "2 batches are fewer than 3 ranks, and pad=False",
        ),
    ],
)
def test_epochs_without_a_batch_are_logged_once(
    n: int, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop over no batches is not an error; one log line gives the reason."""
    feeder = feeder_of(n, **options)
    assert [len(list(feeder)) for _ in range(3)] == [0, 0, 0]
    where = f" on rank {options['shard'][0]}" if "fewer" in reason else ""
    # len() of a feeder logs a hint in a process that has imported Accelerate.
    logged = [text for record in caplog.records if "Accelerate" not in (text := record.getMessage())]
    assert logged == [f"an epoch has no batches{where}: {reason}"]
    assert feeder.epoch == 2


def test_the_repr_of_an_iterator() -> None:
    """The repr gives the status and the number of batches."""
    feeder = feeder_of(8)
    iterator = iter(feeder)
    assert repr(iterator) == "FeedIterator(open, batches returned: 0)"
    list(iterator)
    assert repr(iterator) == "FeedIterator(ended, batches returned: 2)"
    iterator = iter(feeder)
    feeder.close()
    assert repr(iterator) == "FeedIterator(closed, batches returned: 0)"


@pytest.mark.parametrize("batches", range(4))
def test_an_iterator_cannot_be_copied_and_the_way_that_the_error_names_works(batches: int) -> None:
    """A copy of the feeder with the state of the feeder gives the batches that the iterator would give next."""
    feeder = feeder_of(12)
    iterator = iter(feeder)
    for _ in range(batches):
        next(iterator)
    for copied in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save the feeder's state_dict\(\), and pass it to load_state_dict\(\)"):
            copied(iterator)
    other = pickle.loads(pickle.dumps(feeder))
    other.load_state_dict(feeder.state_dict())
    rest = iterator if batches < 3 else feeder
    assert values(other) == values(rest)


def test_repr_and_len() -> None:
    """A feeder has a repr with its main arguments and its epoch, a length and a read-only batch size."""
    feeder = feeder_of()
    text = repr(Feeder(Files(["a"]), decode=DecodeImage(8), batch_size=4, shuffle=True, seed=3, engine="process:2"))
    assert text.startswith("Feeder(Files(1 file), decode=DecodeImage(size=8")
    assert text.endswith("batch_size=4, shuffle=True, seed=3, device=None, engine='process:2', epoch=0)")
    assert "sampler=EndlessSampler" in repr(feeder_of(sampler=EndlessSampler()))
    assert feeder.batch_size == 4
    with pytest.raises(AttributeError):
        feeder.batch_size = 8  # type: ignore[misc]
    assert len(feeder_of()) == 3
    assert aiofeed.Feeder is Feeder


def test_dataset_is_the_given_object() -> None:
    """As with DataLoader, ``dataset`` is the Dataset itself, wrapped or not, or the source."""
    dataset = TensorDataset(torch.arange(10))
    source = Numbers(10)
    assert Feeder(dataset, batch_size=4).dataset is dataset
    assert Feeder(FromDataset(dataset, threads=2), batch_size=4).dataset is dataset
    assert Feeder(source, decode=number, batch_size=4).dataset is source
    assert len(Feeder(dataset, batch_size=4).dataset) == 10


@pytest.mark.parametrize("drop", [False, True], ids=["iterator kept", "iterator dropped"])
@pytest.mark.parametrize("in_order", [True, False, "samples"])
def test_a_consumer_that_counts_batches_completes_its_epochs(drop: bool, in_order: Any) -> None:
    """A consumer that takes len() batches and never asks for the end, like Lightning, keeps its threads."""
    feeder = feeder_of(40, shuffle=True, in_order=in_order)
    threads = set()
    epochs = []
    for _ in range(5):
        iterator = iter(feeder)
        threads.add(feeder._session.pipeline.loop_thread)  # type: ignore[union-attr]
        epochs.append(sorted(x for _ in range(len(feeder)) for x in next(iterator)[0].flatten().tolist()))
        if drop:
            del iterator
    assert epochs == [list(range(40))] * 5
    assert len(threads) == 1
    assert feeder.epoch == 4
    assert feeder._session._completed_in_a_row == 4
    feeder.close()


def test_the_older_iterator_of_a_counting_consumer_has_ended() -> None:
    """An iterator whose batches were all returned ends with StopIteration, also after a newer one was started."""
    feeder = feeder_of(8)
    first = iter(feeder)
    for _ in range(2):
        next(first)
    second = iter(feeder)
    assert list(first) == []
    assert len(list(second)) == 2


def test_idle_time_ends_when_the_batch_is_taken() -> None:
    """idle_s counts until a batch is taken, not until the busy event loop learns of it."""
    entered, released = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        released.wait(20)

    with feeder_of(8, limits=Limits(prefetch_batches=2)) as feeder:
        iterator = iter(feeder)
        while feeder.statistics().queue_depth < 2:
            threading.Event().wait(0.001)
        feeder._session.pipeline.loop_thread.call(block)  # type: ignore[union-attr]
        assert entered.wait(20)
        assert len([next(iterator), next(iterator)]) == 2
        taken = feeder.statistics()
        threading.Event().wait(2 * taken.wall_s)
        released.set()
        while feeder.statistics().idle_s == 0:
            threading.Event().wait(0.001)
        assert feeder.statistics().idle_s <= taken.wall_s


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_just_as_the_threads_end_is_not_lost(turns: int) -> None:
    """`aclose` is cancelled at any moment before it ends."""
    feeder = feeder_of()
    list(feeder)
    pipeline: Any = feeder._session.pipeline
    ended = asyncio.Event()
    pipeline.stopped = ended.wait
    closing = asyncio.create_task(feeder.aclose())
    for _ in range(5):
        await asyncio.sleep(0)
    ended.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    asked = closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled() == asked
    feeder.close()


def test_a_pause_between_epochs_is_not_idle_time() -> None:
    """A pause between two epochs counts as idle time of neither."""
    feeder = feeder_of(40)
    for _ in range(4):
        list(feeder)
        feeder._session.pipeline.loop_thread.decode_pool.submit(threading.Event().wait, 0.05).result(5)  # type: ignore[union-attr]
        statistics = feeder.statistics()
        assert statistics.idle_s <= statistics.wall_s
    feeder.close()
