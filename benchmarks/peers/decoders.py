"""The decoders that loaders share: bytes of a JPEG to uint8 [side, side, 3]; and the quality of a loader's pictures."""

from __future__ import annotations

import functools
import io
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Decode:
    """A decoder by name, and the side of its result; picklable.

    Args:
        name: "pillow": Pillow or Pillow-SIMD at full scale, antialiased bilinear, with the usual calls.
            "draft": the same from Pillow's ``draft``, at the smallest scale of at least twice the side.
            "turbo": ``aiofeed.DecodeImage(backend="turbo")``: simplejpeg at that scale and Pillow's resize.
            "native": ``aiofeed.DecodeImage(backend="native")``, one image at a time.
            "linear": simplejpeg at full scale and OpenCV's ``INTER_LINEAR``, which does not antialias.
        side: side of the result in pixels.
    """

    name: str
    side: int

    def __call__(self, data: bytes) -> NDArray[np.uint8]:
        return _FUNCTIONS[self.name](data, self.side)

    def file(self, path: str) -> NDArray[np.uint8]:
        """Read and decode a file."""
        with open(path, "rb", buffering=0) as file:
            return self(file.read())


def pillow(data: bytes, side: int, *, draft: bool = False) -> NDArray[np.uint8]:
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        if draft:
            image.draft("RGB", (2 * side, 2 * side))
        return np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))


def linear(data: bytes, side: int) -> NDArray[np.uint8]:
    import cv2
    import simplejpeg

    pixels: Any = simplejpeg.decode_jpeg(data, "RGB")
    return cv2.resize(pixels, (side, side), interpolation=cv2.INTER_LINEAR)  # type: ignore[return-value]


def own(data: bytes, side: int, *, backend: Any) -> NDArray[np.uint8]:
    import numpy as np

    out = np.empty((side, side, 3), np.uint8)
    _own(side, backend).decode_into(data, out)
    return out


@functools.cache
def _own(side: int, backend: Any) -> Any:
    import aiofeed

    return aiofeed.DecodeImage((side, side), backend=backend)


_FUNCTIONS: dict[str, Callable[[bytes, int], NDArray[np.uint8]]] = {
    "pillow": pillow,
    "draft": functools.partial(pillow, draft=True),
    "linear": linear,
    "turbo": functools.partial(own, backend="turbo"),
    "native": functools.partial(own, backend="native"),
}

IMPORTS = {
    "pillow": ("numpy", "PIL.Image"),
    "draft": ("numpy", "PIL.Image"),
    "turbo": ("numpy", "PIL.Image", "simplejpeg", "aiofeed:DecodeImage"),
    "native": ("numpy", "PIL.Image", "aiofeed:DecodeImage"),
    "linear": ("numpy", "simplejpeg", "cv2"),
}
"""The imports of each decoder, done before the measurement."""


def quiet_helpers() -> None:
    """Ignore a warning of collation, and disable OpenCV's threads, which would compete with the loaders' threads."""
    # Pillow's arrays are read-only; collation only copies them.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")

    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def psnr(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in dB of two 8-bit pictures; at most 99, if they are equal."""
    import numpy as np

    error = float(np.mean((first.astype(np.float64) - second.astype(np.float64)) ** 2))
    return 99.0 if error == 0 else float(min(99.0, 10 * np.log10(255**2 / error)))


JUDGED = 48
"""Pictures of an epoch that are compared, evenly spaced, so that some of each photograph are."""


class Judge:
    """Collects some pictures of an epoch in the order of the files, and compares them with Pillow's at full scale."""

    def __init__(self, paths: list[str], targets: list[int], side: int) -> None:
        self._paths, self._targets = paths, targets
        self._whole = Decode("pillow", side)
        self._stride = max(1, len(paths) // JUDGED)
        self._seen = 0
        self._pictures: list[tuple[str, Any]] = []

    def look(self, images: Any, labels: Any) -> None:
        """Add a batch: images [B, 3, side, side], and class numbers."""
        import numpy as np

        for position in range(self._seen, self._seen + len(labels)):
            if position % self._stride == 0:
                path, row = self._paths[position], position - self._seen
                assert int(labels[row]) == self._targets[position], f"{path} has label {int(labels[row])}"
                self._pictures.append((path, np.array(np.asarray(images[row]).transpose(1, 2, 0))))
        self._seen += len(labels)

    def worst_db(self) -> float:
        """The worst PSNR of the collected pictures; about 10 dB if the loader mixes up the files."""
        return min(psnr(picture, self._whole.file(path)) for path, picture in self._pictures)
