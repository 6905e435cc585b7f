"""torch's ``DataLoader``: a map-style Dataset of [H, W, 3] arrays, two worker processes, its own collation.

"persistent" keeps the workers from epoch to epoch; "new workers" is its default, which starts them for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.work import Epoch, Work, channels_first

NAME = "DataLoader"
NEEDS = ("torch",)
IMPORTS = ("torch.utils.data",)
WAYS = ("persistent", "new workers")


class Images:
    """A Dataset of pictures and class numbers."""

    def __init__(self, work: Work) -> None:
        self._paths, self._targets, self._decode = work.paths, work.targets, work.decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._decode.file(self._paths[index]), self._targets[index]


@contextmanager
def loader(work: Work, way: str) -> Iterator[Epoch]:
    from torch.utils.data import DataLoader

    dataset: Any = Images(work)
    batches: Any = DataLoader(dataset, work.batch, num_workers=work.workers, persistent_workers=way == "persistent")
    yield lambda: ((channels_first(images), labels) for images, labels in batches)
