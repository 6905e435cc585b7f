"""aiofeed itself: a ``Feeder``, with its engine in threads or in two processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.work import Epoch, Work
from benchmarks.single_epochs import single_epochs

NAME = "aiofeed"
NEEDS = ()
IMPORTS = ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage")
WAYS = ("thread", "process:2")


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    import aiofeed

    size = (work.side, work.side)
    decode: Any
    if work.decoder == "linear":
        decode = work.decode
    elif work.decoder == "pillow":
        decode = aiofeed.DecodeImage(size, backend="pillow", scaled=False)
    else:
        decode = aiofeed.DecodeImage(size, backend=work.decoder if work.decoder in ("turbo", "native") else "pillow")  # type: ignore[arg-type]
    source = aiofeed.ImageFolder(work.folder)
    feeder: Any = aiofeed.Feeder(source, decode=decode, batch_size=work.batch, engine=way)  # type: ignore[arg-type]
    with feeder:
        one_epoch = single_epochs(feeder)
        yield one_epoch if work.decoder != "linear" else lambda: permuted(one_epoch())


def permuted(batches: Any) -> Any:
    """[B, 3, H, W] views of batches of a custom decoder, which are [B, H, W, 3]."""
    for images, labels in batches:
        yield images.permute(0, 3, 1, 2), labels
