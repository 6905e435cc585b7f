"""Users' programs for `mypy --strict` and pyright in strict mode (`make lint`). None of this code runs.

A mistake has a comment for each type checker, which complains about a comment that it does not need.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
import torch

import aiofeed
from aiofeed.kernel.devices.backend import CpuBackend
from aiofeed.lightning import FeederMonitor

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Store:
    """A user's source."""

    def __len__(self) -> int:
        return 1

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> bytes:
        return b""

    def target(self, index: int) -> int:
        return 0


class Pairs(Store):
    """A user's source of samples of two files."""

    async def read(self, index: int) -> tuple[bytes, bytes]:  # type: ignore[override]  # pyright: ignore
        return b"", b""


class Decoder:
    """A user's decoder."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, data: bytes) -> torch.Tensor:
        return torch.zeros(self.size)


class Lines(torch.utils.data.IterableDataset[str]):
    """An IterableDataset."""

    def __iter__(self) -> Iterator[str]:
        yield ""


async def lines(epoch: int) -> AsyncIterator[str]:
    """An async generator function."""
    yield ""


def stacked_lines(lines: list[str]) -> int:
    """A collate_fn."""
    return len(lines)


def decode_pair(data: tuple[bytes, bytes]) -> int:
    """A decoder of samples of two files."""
    return len(data)


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A Dataset."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1), index


class Photos(aiofeed.Feeder[list[torch.Tensor]]):
    """A feeder with a declared batch type."""

    def __init__(self, root: str, batch_size: int) -> None:
        super().__init__(aiofeed.ImageFolder(root), decode=aiofeed.DecodeImage(224), batch_size=batch_size)


def noisy(data: bytes, *, rng: torch.Generator) -> torch.Tensor:
    """A decoder that draws random numbers."""
    return torch.rand(len(data), generator=rng)


class Labelled:
    """A decoder that gets the sample's target."""

    takes_target = True

    def __call__(self, data: bytes, *, target: int = 0) -> tuple[NDArray[np.uint8], int]:
        return np.frombuffer(data, np.uint8), target


def normalised(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``transform``."""
    images, labels = batch
    return images.float() / 255, labels


def stacked(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """A ``collate_fn``."""
    return {"x": torch.stack([x for x, _ in samples])}


def untyped(source: Any, decode: Any, items: Any) -> None:
    """Arguments of unknown types are no errors."""
    aiofeed.Feeder(source, decode=decode, batch_size=2)
    aiofeed.Feeder(Store(), decode=decode, batch_size=2)
    aiofeed.Feeder(source, decode=Decoder(3), batch_size=2)
    aiofeed.Feeder(items, batch_size=2)
    assert_type(next(iter(aiofeed.Feeder(items, batch_size=2, collate_fn=stacked))), dict[str, torch.Tensor])


async def train() -> None:
    """Without a declared batch type no annotation is needed; the batch type is the return type of ``collate_fn``."""
    folder = aiofeed.ImageFolder("train")
    feeder = aiofeed.Feeder(folder, decode=aiofeed.DecodeImage(224), batch_size=4, shuffle=True, device="auto")
    assert_type(next(iter(feeder)), list[torch.Tensor])
    for images, labels in feeder:
        print(images.shape, labels.shape)
    async with feeder:
        async for batch in feeder:
            print(batch)

    random = aiofeed.Feeder(Store(), decode=noisy, batch_size=4, cache="host")
    plain = aiofeed.Feeder(Store(), decode=lambda data: len(data), batch_size=4, engine="process:2")
    resident = aiofeed.Feeder(aiofeed.Tensors(torch.zeros(3)), batch_size=3, device=["cpu", "cpu"])
    listed = aiofeed.Feeder([1, 2, 3], batch_size=1, sampler=[0, 1])
    iterated = aiofeed.Feeder(Lines(), batch_size=2)
    decoded = aiofeed.Feeder(Lines(), decode=len, batch_size=2)
    streamed = aiofeed.Feeder(aiofeed.Stream(Lines(), shuffle_buffer=8), decode=len, batch_size=2)
    generated = aiofeed.Feeder(aiofeed.Stream(lines, length=1), batch_size=2, collate_fn=stacked_lines)
    assert_type(next(iter(generated)), int)
    texts = aiofeed.Feeder(["a", "b"], batch_size=1, collate_fn=lambda texts: texts)
    pairs = aiofeed.Feeder(Pairs(), decode=decode_pair, batch_size=2)
    mine = aiofeed.Feeder(folder, decode=Decoder(3), batch_size=2, engine="process")
    files = aiofeed.Feeder(aiofeed.Files(["a"]), decode=len, batch_size=2, engine="process:16")
    print(random, plain, resident, listed, iterated, decoded, streamed, texts, pairs, mine, files)
    aiofeed.Feeder(aiofeed.Clips(aiofeed.Files(["a.mp4"]), frames=8), batch_size=3)
    aiofeed.Feeder(aiofeed.Files(["a.wav"]), decode=aiofeed.DecodeAudio(16_000, 1.0), batch_size=3)
    one = aiofeed.Feeder(aiofeed.Tensors(torch.zeros(3)), batch_size=3, shuffle=True)
    assert_type(next(iter(one)), list[torch.Tensor])
    aiofeed.Files(["a"], np.zeros(1))
    aiofeed.Files(["a"], torch.zeros(1))
    aiofeed.Feeder(aiofeed.Manifest("m.csv", target=("label", "box"), to_target=len), decode=len, batch_size=2)

    collated = aiofeed.Feeder(Rows(), batch_size=2, collate_fn=stacked)
    assert_type(next(iter(collated)), dict[str, torch.Tensor])
    assert_type(next(iter(Photos("train", 4))), list[torch.Tensor])


def choose_sources() -> None:
    """Every kind of source, and what decodes its samples."""
    files = aiofeed.Files([Path("a"), Path("b")], targets=[0, 1], root=Path("."))
    aiofeed.Feeder(files, decode=Labelled(), batch_size=2, weights=np.ones(2))
    aiofeed.Feeder(files, decode=aiofeed.DecodeNumpy(), batch_size=2, shuffle="window:8")
    aiofeed.Feeder(files, decode=aiofeed.DecodeTensor("x"), batch_size=2, sampler=range(2))
    aiofeed.Feeder(files, decode=aiofeed.DecodeJSON(), batch_sampler=[[0, 1]], collate_fn=aiofeed.pad_collate(-100))
    pair = aiofeed.DecodePair(aiofeed.DecodeImage(224, crop="random", flip=True))
    aiofeed.Feeder(aiofeed.FolderPairs("images", "masks"), decode=pair, batch_size=2)
    shards = aiofeed.TarShards("s3://bucket/{00..99}.tar", "jpg", "cls", to_target=int)
    aiofeed.Feeder(
        shards, decode=aiofeed.DecodeImage((192, 256)), batch_size=2, cache=aiofeed.EncodedCache("c", 1 << 30)
    )
    aiofeed.Feeder(aiofeed.ZipShards(["a.zip"]), decode=len, batch_size=2)
    aiofeed.Feeder(aiofeed.MDSShards("mds", "image", "label"), decode=len, batch_size=2)
    aiofeed.Feeder(aiofeed.TFRecordShards("a.tfrecord"), decode=len, batch_size=2)
    aiofeed.Feeder(aiofeed.ParquetRows("a.parquet", ["image"]), decode=len, batch_size=2)
    aiofeed.Feeder(aiofeed.FromDataset(Rows(), threads=4, setup=print), batch_size=2, cache="host")
    aiofeed.Feeder(aiofeed.Table("rows.parquet", ["x"], target="y"), batch_size=2, cache="device")
    tokens = aiofeed.Tokens(["a.bin"], 1024, targets=True)
    aiofeed.Feeder(tokens, batch_size=aiofeed.TokenBudget([1, 2], max_tokens=8), drop_last=True, static_batches=True)
    aiofeed.Feeder(tokens, batch_size=aiofeed.Pack(np.ones(2, np.int64), context=1024, separator={"ids": 0}))
    aiofeed.Feeder(Rows(), batch_size=aiofeed.Buckets([1, 2], boundaries=[1], batch_sizes=[4, 2]))
    mixed = aiofeed.Mixture({"a": files, "b": aiofeed.ImageFolder("b")}, {"a": 0.7, "b": 0.3}, until="first")
    aiofeed.Feeder(mixed, decode=aiofeed.DecodeImage(224), batch_size=2)
    aiofeed.Feeder(aiofeed.Mixture({"rows": aiofeed.FromDataset(Rows())}, lambda samples: [1.0]), batch_size=2)
    clips = aiofeed.Clips(files, frames=8, per_video=2, size=(112, 112))
    aiofeed.Feeder(clips, batch_size=2, on_error=aiofeed.FailurePolicy("replace", retries=2, retry_on=(OSError,)))
    assert_type(aiofeed.DecodeImage(224)(b""), torch.Tensor)
    assert_type(aiofeed.ImageFolder("train").class_to_idx, dict[str, int])
    assert_type(files.paths[0], str)


def choose_batches() -> None:
    """``transform`` and several devices change the type of batches."""
    folder, image = aiofeed.ImageFolder("train"), aiofeed.DecodeImage(224)
    changed = aiofeed.Feeder(folder, decode=image, batch_size=4, transform=normalised, device="cuda")
    assert_type(changed, aiofeed.Feeder[tuple[torch.Tensor, torch.Tensor]])
    rows = aiofeed.Feeder(Rows(), batch_size=2, collate_fn=stacked, transform=lambda batch: batch["x"])
    assert_type(next(iter(rows)), Any)
    counted = aiofeed.Feeder(Rows(), batch_size=2, collate_fn=stacked, transform=len)
    assert_type(next(iter(counted)), int)
    parts = aiofeed.Feeder(folder, decode=image, batch_size=4, device=["cuda:0", "cuda:1"])
    assert_type(next(iter(parts)), tuple[Any, ...])
    resident = aiofeed.Feeder(aiofeed.Tensors(torch.zeros(3)), batch_size=3, device=[torch.device("cpu"), "cpu"])
    assert_type(next(iter(resident)), tuple[Any, ...])

    batches = [[torch.zeros(2)]]
    assert_type(next(iter(aiofeed.prefetch(batches))), list[torch.Tensor])
    assert_type(next(iter(aiofeed.prefetch(batches, "cuda", prefetch_batches=4))), list[torch.Tensor])
    assert_type(next(iter(aiofeed.prefetch(batches, transform=len))), int)
    assert_type(next(iter(aiofeed.prefetch(batches, ["cuda:0", "cuda:1"]))), tuple[list[torch.Tensor], ...])
    assert_type(next(iter(aiofeed.prefetch(batches, [0, 1], transform=len))), tuple[int, ...])
    assert_type(next(iter(aiofeed.prefetch(lines(0)))), str)
    assert_type(aiofeed.scatter(batches[0], ["cuda:0", "cuda:1"]), tuple[list[torch.Tensor], ...])


async def choose_loops(feeder: aiofeed.Feeder[list[torch.Tensor]]) -> None:
    """Every way to iterate gives the feeder's batches."""
    for epoch in feeder.epochs(3):
        assert_type(epoch, int)
        for batch in feeder.progress("train"):
            assert_type(batch, list[torch.Tensor])
    async for batch in feeder.steps(100):
        assert_type(batch, list[torch.Tensor])
    for batch in feeder.headroom(10):
        assert_type(batch, list[torch.Tensor])
    iterator = aiter(feeder)
    assert_type(await anext(iterator), list[torch.Tensor])
    with feeder as entered:
        assert_type(entered, aiofeed.Feeder[list[torch.Tensor]])
    feeder.close()
    await feeder.aclose()

    loader = aiofeed.DataLoader(Rows(), 4, True, num_workers=2, collate_fn=stacked, device="cuda", cache="host")
    assert_type(loader, aiofeed.DataLoader[tuple[torch.Tensor, int]])
    loader.load_state_dict(loader.state_dict())
    for batch in loader:
        print(batch["x"])
    async for batch in loader:
        print(batch["x"])


def read_reports(feeder: aiofeed.Feeder[Any]) -> Mapping[str, float]:
    """States, statistics and reports."""
    state = feeder.state_dict()
    assert_type(state, dict[str, Any])
    feeder.load_state_dict(state)
    feeder.set_epoch(3)
    feeder.skip(2)
    statistics = feeder.statistics(total=True)
    assert_type(statistics, aiofeed.reports.FeedStatistics)
    assert_type(statistics.storage, aiofeed.reports.StorageStatistics | None)
    assert_type(statistics.samples, int)
    assert_type(feeder.failures, tuple[aiofeed.reports.Failure, ...])
    assert_type([failure.error for failure in feeder.failures], list[aiofeed.errors.SampleError])
    explanation = feeder.explain(ranks=True)
    assert_type(explanation, aiofeed.reports.Explanation)
    assert_type(explanation.verdict, str)
    assert_type([stage.name for stage in explanation.stages], list[str])
    assert_type(feeder.timeline(Path("epoch.json"), seconds=5), aiofeed.reports.Timeline)
    aiofeed.exporters.PrometheusCollector({"train": feeder})
    aiofeed.exporters.OpenTelemetryMetrics(feeder)
    FeederMonitor(feeder)
    assert_type(aiofeed.device_report(), aiofeed.reports.DeviceReport)
    try:
        next(iter(feeder))
    except aiofeed.errors.SampleError as error:
        assert_type(error.index, int)
    return feeder.scalars()


async def share_a_feeder(feeder: aiofeed.Feeder[Any]) -> None:
    """Several processes, on one machine or on many."""
    with aiofeed.serve(feeder, "imagenet", mode="shard", slow="drop") as server:
        assert_type([consumer.pid for consumer in server.consumers], list[int])
    with aiofeed.attach("imagenet", "cuda", transform=normalised) as batches:
        for images, labels in batches:
            print(images, labels)
        async for images, labels in batches:
            print(images, labels)
        assert_type(batches.statistics(), aiofeed.reports.FeedStatistics)
    with aiofeed.processes.share({"x": torch.zeros(3)}, "tensors") as shared:
        assert_type(shared, aiofeed.processes.SharedTensors)
    print(aiofeed.processes.attach_tensors("tensors", "cuda")["x"])
    for number in (1, 3):
        aiofeed.Feeder(Store(), decode=len, batch_size=2, engine=aiofeed.Processes(number))
        aiofeed.DataLoader(Rows(), batch_size=2, engine=aiofeed.Processes(number))
    ray = aiofeed.processes.RayEngine(actors=8, options={"num_gpus": 0})
    limits = aiofeed.Limits(read_concurrency=64, memory_bytes=1 << 30)
    aiofeed.Feeder(Store(), decode=len, batch_size=2, engine=ray, limits=limits, shard=(0, 8), in_order=False)
    aiofeed.Feeder(Store(), decode=len, batch_size=2, cache=aiofeed.HostCache(1 << 30), in_order="samples")
    aiofeed.Feeder(Store(), decode=len, batch_size=2, cache=aiofeed.DiskCache("c"), on_error="skip")
    aiofeed.Feeder(Store(), decode=len, batch_size=2, device=CpuBackend())
    assert_type(aiofeed.__version__, str)


def make_mistakes() -> None:
    """Each statement is a type error, and an error at run time."""
    rows, folder, decode = Rows(), aiofeed.ImageFolder("train"), aiofeed.DecodeImage(224)
    aiofeed.Feeder(rows, batch_size=2, shufle=True)  # type: ignore[call-overload]  # pyright: ignore
    aiofeed.Feeder(rows, batch_size=2, num_workers=4)  # type: ignore[call-overload]  # pyright: ignore
    aiofeed.Feeder(rows, decode=decode, batch_size=2)  # type: ignore[call-overload]  # pyright: ignore
    aiofeed.Feeder("train", decode=decode, batch_size=2)  # type: ignore[call-overload]  # pyright: ignore
    aiofeed.Feeder(aiofeed.ImageFolder, decode=decode, batch_size=2)  # type: ignore[call-overload]  # pyright: ignore
    aiofeed.Feeder(folder, decode=aiofeed.DecodeImage, batch_size=2)  # type: ignore[misc]  # pyright: ignore
    aiofeed.Feeder(folder, decode=Decoder, batch_size=2)  # type: ignore[misc]  # pyright: ignore
    aiofeed.Feeder(Pairs(), decode=decode, batch_size=2)  # type: ignore[misc]  # pyright: ignore
    aiofeed.Feeder(rows, batch_size=2, engine="processes")  # type: ignore[call-overload]  # pyright: ignore
    aiofeed.ImageFolder("train", transform=decode)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    aiofeed.DecodeImage(224, mean=0.5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    aiofeed.Limits(num_workers=4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    aiofeed.Manifest("m.csv", targets="label")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    aiofeed.Files(["a"], target=[1])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    aiofeed.prefetch([rows], devise="cpu")  # type: ignore[call-overload]  # pyright: ignore
    image_batches = aiofeed.Feeder(folder, decode=decode, batch_size=2)
    image_batches.timeline(merge=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    image_batches.progress(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    print(next(iter(image_batches)).shape)  # type: ignore[attr-defined]  # pyright: ignore
    aiofeed.Feeder(folder, decode=decode, transform=3)  # type: ignore[call-overload]  # pyright: ignore
    aiofeed.Feeder(rows, batch_size=2, cache="disk")  # type: ignore[call-overload]  # pyright: ignore
    aiofeed.DataLoader(rows, cache="disk")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    aiofeed.prefetch([1], transform=stacked)  # type: ignore[arg-type]  # pyright: ignore
    aiofeed.serve(rows, "rows")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    aiofeed.Mixture({"a": 1})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    aiofeed.Clips(3, frames=8)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
