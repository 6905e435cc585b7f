"""MosaicML Streaming: the same files in MDS shards on the local disk, ``StreamingDataset`` in two persistent workers.

The JPEG bytes are stored as "bytes" and decoded by the shared decoder in ``__getitem__``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.data import generate
from benchmarks.peers.work import Epoch, Work, channels_first

NAME = "MosaicML"
NEEDS = ("streaming",)
IMPORTS = ("torch.utils.data", "benchmarks.peers.adapters.mosaicml_package")
WAYS = ("MDS",)


def prepare(work: Work) -> Path:
    return generate(work.converted / "mds", lambda folder: write(folder, work))


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    from torch.utils.data import DataLoader

    from benchmarks.peers.adapters.mosaicml_package import streaming

    shards = prepare(work)
    decode = work.decode
    streaming.base.util.clean_stale_shared_memory()

    class Images(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return decode(sample["image"]), int(sample["label"])

    dataset: Any = Images(local=str(shards), batch_size=work.batch, shuffle=False)
    batches: Any = DataLoader(dataset, work.batch, num_workers=work.workers, persistent_workers=True)
    yield lambda: ((channels_first(images), labels) for images, labels in batches)


def write(folder: Path, work: Work) -> None:
    from benchmarks.peers.adapters.mosaicml_package import streaming

    columns = {"image": "bytes", "label": "int"}
    with streaming.MDSWriter(out=str(folder / "shards"), columns=columns) as writer:
        for path, target in zip(work.paths, work.targets, strict=True):
            writer.write({"image": Path(path).read_bytes(), "label": target})
    for path in (folder / "shards").iterdir():
        path.rename(folder / path.name)
    (folder / "shards").rmdir()
