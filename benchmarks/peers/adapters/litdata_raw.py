"""LitData: its ``StreamingRawDataset`` over the folder of files, in a ``DataLoader`` with two persistent workers.

It reads batches with its own event loop; files are decoded in ``collate_fn``, as its documentation recommends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.work import Epoch, Work, channels_first

NAME = "LitData"
NEEDS = ("litdata",)
IMPORTS = ("torch.utils.data", "litdata", "numpy")
WAYS = ("raw",)


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    import numpy as np
    import torch
    from litdata import StreamingRawDataset
    from torch.utils.data import DataLoader

    decode, folder = work.decode, work.folder

    class Raw(StreamingRawDataset):  # type: ignore[misc]
        def setup(self, files: list[Any]) -> list[Any]:
            return sorted((file for file in files if file.path.endswith(".jpg")), key=lambda file: file.path)

    dataset: Any = Raw(folder)
    assert [item.path for item in dataset.items] == work.paths
    numbers = np.array(work.targets)

    class Labelled:
        """Adds the class numbers."""

        def __len__(self) -> int:
            return len(dataset)

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return list(zip(dataset.__getitems__(indices), numbers[indices].tolist(), strict=True))

    def collate(samples: list[tuple[bytes, int]]) -> tuple[Any, Any]:
        data, labels = zip(*samples, strict=True)
        return torch.from_numpy(np.stack([decode(each) for each in data])), torch.tensor(labels)

    labelled: Any = Labelled()
    batches: Any = DataLoader(
        labelled, work.batch, num_workers=work.workers, persistent_workers=True, collate_fn=collate
    )
    yield lambda: ((channels_first(images), labels) for images, labels in batches)
