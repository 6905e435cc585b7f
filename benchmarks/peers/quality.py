"""How far a loader's pictures are from those of Pillow at full scale: the worst PSNR over the files."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.decoders import Decode, psnr

JUDGED = 48
"""Pictures of an epoch that are looked at, evenly spaced: some of each photograph."""


class Judge:
    """Is shown the batches of one epoch, and keeps some of the pictures; looks at them when all have been seen.

    Args:
        paths: the files.
        targets: their class numbers.
        side: of the pictures.
        ordered: whether they come in the order of the files. If not, each is held against the nearest of its class.
    """

    def __init__(self, paths: list[str], targets: list[int], side: int, *, ordered: bool) -> None:
        self._paths, self._targets, self._ordered = paths, targets, ordered
        self._whole = Decode("pillow", side)
        self._stride = max(1, len(paths) // JUDGED)
        self._seen = 0
        self._kept: list[tuple[int, Any, int]] = []

    def look(self, images: Any, labels: Any) -> None:
        """A batch: images [B, 3, side, side], and class numbers."""
        import numpy as np

        for position in range(self._seen, self._seen + len(labels)):
            if position % self._stride == 0:
                row = position - self._seen
                picture = np.array(np.asarray(images[row]).transpose(1, 2, 0))
                self._kept.append((position, picture, int(labels[row])))
        self._seen += len(labels)

    def worst_db(self) -> float:
        """The worst PSNR of those kept; a loader that mixes up the files has one of some 10 dB."""
        return min(
            max(psnr(picture, original) for original in self._originals(position, label))
            for position, picture, label in self._kept
        )

    def _originals(self, position: int, label: int) -> list[Any]:
        if self._ordered:
            assert label == self._targets[position], f"{self._paths[position]} came as {label}"
            return [self._whole.file(self._paths[position])]
        files = zip(self._paths, self._targets, strict=True)
        return [self._whole.file(path) for path, target in files if target == label]
