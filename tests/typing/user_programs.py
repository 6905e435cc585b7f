"""Users' programs for `mypy --strict` (`make lint`) and pyright (`test_user_programs.py`). None of this code runs.

A mistake has a comment for each type checker, which complains about a comment that it does not need.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import numpy as np
import torch

import aiofeed


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
    changed = aiofeed.Feeder(folder, decode=aiofeed.DecodeImage(224), batch_size=4, transform=lambda batch: batch[0])
    assert_type(next(iter(changed)), Any)
    aiofeed.Files(["a"], np.zeros(1))
    aiofeed.Files(["a"], torch.zeros(1))
    aiofeed.Feeder(aiofeed.Manifest("m.csv", target=("label", "box"), to_target=len), decode=len, batch_size=2)

    collated = aiofeed.Feeder(Rows(), batch_size=2, collate_fn=stacked)
    assert_type(next(iter(collated)), dict[str, torch.Tensor])
    assert_type(next(iter(aiofeed.prefetch(collated, device="cpu"))), dict[str, torch.Tensor])
    assert_type(next(iter(Photos("train", 4))), list[torch.Tensor])


def make_mistakes() -> None:
    """Each statement is a type error, and an error at run time."""
    rows, folder, decode = Rows(), aiofeed.ImageFolder("train"), aiofeed.DecodeImage(224)
    aiofeed.Feeder(rows, batch_size=2, shufle=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    aiofeed.Feeder(rows, batch_size=2, num_workers=4)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
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
    aiofeed.prefetch([rows], devise="cpu")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
