"""Loaders that decode in the worker processes of a ``DataLoader``, with the same decoder."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.data import generate
from benchmarks.peers.work import WORKERS, Epoch, Work


@contextmanager
def data_loader(work: Work, way: str) -> Iterator[Epoch]:
    """torch's ``DataLoader``: a map-style Dataset of [H, W, 3] arrays, two worker processes, its own collation.

    "persistent" keeps the workers from epoch to epoch; "new workers" is its default, which starts them for each.
    """
    from torch.utils.data import DataLoader

    dataset: Any = Images(work)
    loader: Any = DataLoader(dataset, work.batch, num_workers=work.workers, persistent_workers=way == "persistent")
    yield lambda: loader


class Images:
    """A Dataset of pictures and class numbers."""

    def __init__(self, work: Work) -> None:
        self._paths, self._targets, self._decode = work.paths, work.targets, work.decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._decode.file(self._paths[index]), self._targets[index]


@contextmanager
def webdataset(work: Work, way: str) -> Iterator[Epoch]:
    """The same files in a tar shard for each of two workers, decoded and batched inside the workers.

    The loader is a ``WebLoader`` with ``batch_size=None``, as its documentation recommends.
    """
    import numpy as np
    import torch
    import webdataset

    decode = work.decode

    def collate(samples: list[tuple[bytes, bytes]]) -> tuple[Any, Any]:
        images = np.stack([decode(data) for data, _ in samples])
        return torch.from_numpy(images), torch.tensor([int(label) for _, label in samples])

    urls = sorted(map(str, tars(work).glob("*.tar")))
    dataset: Any = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=webdataset.single_node_only)
    dataset = dataset.to_tuple("jpg", "cls").batched(work.batch, collation_fn=collate, partial=True)
    loader: Any = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=work.workers, persistent_workers=True, multiprocessing_context="fork"
    )
    yield lambda: loader


def tars(work: Work) -> Path:
    """Shards with batch after batch in rotation, so that two workers give the files in their order."""

    def write(folder: Path) -> None:
        for shard in range(WORKERS):
            with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
                for number, path in enumerate(work.paths):
                    if number // work.batch % WORKERS == shard:
                        tar.add(path, f"{number:08d}.jpg")
                        label = str(work.targets[number]).encode()
                        member = tarfile.TarInfo(f"{number:08d}.cls")
                        member.size = len(label)
                        tar.addfile(member, io.BytesIO(label))

    return generate(work.converted / f"tars-{work.batch}", write)


@contextmanager
def litdata(work: Work, way: str) -> Iterator[Epoch]:
    """LitData's ``StreamingRawDataset`` over the folder of files, in a ``DataLoader`` with two persistent workers.

    It reads batches with its own event loop; files are decoded in ``collate_fn``, as its documentation recommends.
    """
    import numpy as np
    import torch
    from litdata import StreamingRawDataset
    from torch.utils.data import DataLoader

    decode, numbers = work.decode, work.targets

    class Raw(StreamingRawDataset):  # type: ignore[misc]
        def setup(self, files: list[Any]) -> list[Any]:
            return sorted((file for file in files if file.path.endswith(".jpg")), key=lambda file: file.path)

    dataset: Any = Raw(work.folder)
    assert [item.path for item in dataset.items] == work.paths

    class Labelled:
        """Adds the class numbers."""

        def __len__(self) -> int:
            return len(dataset)

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return list(zip(dataset.__getitems__(indices), [numbers[index] for index in indices], strict=True))

    def collate(samples: list[tuple[bytes, int]]) -> tuple[Any, Any]:
        data, labels = zip(*samples, strict=True)
        return torch.from_numpy(np.stack([decode(each) for each in data])), torch.tensor(labels)

    labelled: Any = Labelled()
    loader: Any = DataLoader(
        labelled, work.batch, num_workers=work.workers, persistent_workers=True, collate_fn=collate
    )
    yield lambda: loader


@contextmanager
def mosaicml(work: Work, way: str) -> Iterator[Epoch]:
    """MosaicML's ``StreamingDataset`` over the same files in MDS shards on the local disk, in two persistent workers.

    The JPEG bytes are stored as "bytes" and decoded by the shared decoder in ``__getitem__``.
    """
    from torch.utils.data import DataLoader

    from benchmarks.peers.adapters.mosaicml_package import streaming

    shards, decode = mds(work), work.decode
    streaming.base.util.clean_stale_shared_memory()

    class Stored(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return decode(sample["image"]), int(sample["label"])

    dataset: Any = Stored(local=str(shards), batch_size=work.batch, shuffle=False)
    loader: Any = DataLoader(dataset, work.batch, num_workers=work.workers, persistent_workers=True)
    yield lambda: loader


def mds(work: Work) -> Path:
    def write(folder: Path) -> None:
        from benchmarks.peers.adapters.mosaicml_package import streaming

        columns = {"image": "bytes", "label": "int"}
        with streaming.MDSWriter(out=str(folder / "shards"), columns=columns) as writer:
            for path, target in zip(work.paths, work.targets, strict=True):
                writer.write({"image": Path(path).read_bytes(), "label": target})
        for file in (folder / "shards").iterdir():
            file.rename(folder / file.name)
        (folder / "shards").rmdir()

    return generate(work.converted / "mds", write)
