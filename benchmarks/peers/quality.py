"""Measures the quality of a loader's pictures: the worst PSNR against Pillow at full scale."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.decoders import Decode, psnr

JUDGED = 48
"""Pictures of an epoch that are compared, evenly spaced, so that some of each photograph are."""


class Judge:
    """Collects some pictures of the batches of one epoch, and compares them afterwards.

    Args:
        paths: the files.
        targets: their class numbers.
        side: side of the pictures.
        ordered: whether the loader keeps the order of the files. If not, a picture is compared with the most similar
            one of its class.
    """

    def __init__(self, paths: list[str], targets: list[int], side: int, *, ordered: bool) -> None:
        self._paths, self._targets, self._ordered = paths, targets, ordered
        self._whole = Decode("pillow", side)
        self._stride = max(1, len(paths) // JUDGED)
        self._seen = 0
        self._pictures: list[tuple[int, Any, int]] = []

    def look(self, images: Any, labels: Any) -> None:
        """Add a batch: images [B, 3, side, side], and class numbers."""
        import numpy as np

        for position in range(self._seen, self._seen + len(labels)):
            if position % self._stride == 0:
                row = position - self._seen
                picture = np.array(np.asarray(images[row]).transpose(1, 2, 0))
                self._pictures.append((position, picture, int(labels[row])))
        self._seen += len(labels)

    def worst_db(self) -> float:
        """The worst PSNR of the collected pictures; about 10 dB if the loader mixes up the files."""
        return min(
            max(psnr(picture, original) for original in self._originals(position, label))
            for position, picture, label in self._pictures
        )

    def _originals(self, position: int, label: int) -> list[Any]:
        if self._ordered:
            assert label == self._targets[position], f"{self._paths[position]} has label {label}"
            return [self._whole.file(self._paths[position])]
        files = zip(self._paths, self._targets, strict=True)
        return [self._whole.file(path) for path, target in files if target == label]
