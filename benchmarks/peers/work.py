"""The work that every loader does, the decoders that loaders share, the quality of their pictures, and adapters."""

from __future__ import annotations

import functools
import io
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.data import files_below

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


WORKERS = 2

Batches = Iterable[tuple[Any, Any]]
"""Images, uint8 [B, side, side, 3] or [B, 3, side, side], as tensor or array, and as many class numbers, int64."""
Epoch = Callable[[], Batches]
"""Called once per epoch."""


@dataclass(frozen=True)
class Work:
    """The work of a case: squares of ``side`` pixels of the JPEG files of a folder, one sub-folder per class.

    ``decoder`` is the name of a ``Decode``; loaders with their own decoder ignore it. The last batch may be shorter.
    """

    folder: str
    side: int
    decoder: str
    batch: int = 64
    workers: int = WORKERS

    @property
    def decode(self) -> Decode:
        return Decode(self.decoder, self.side)

    @cached_property
    def paths(self) -> list[str]:
        return files_below(self.folder)

    @cached_property
    def targets(self) -> list[int]:
        names = [Path(path).parent.name for path in self.paths]
        numbers = {name: number for number, name in enumerate(sorted(set(names)))}
        return [numbers[name] for name in names]

    @property
    def converted(self) -> Path:
        """Folder of the same files in other formats."""
        return Path(self.folder).with_name(f"{Path(self.folder).name}-as")


@dataclass(frozen=True)
class Adapter:
    """How a loader is used.

    Args:
        loader: ``loader(work, way)``, a context manager that gives the epochs, in the order of the files; its docstring
            says how it uses the loader.
        imports, needs: modules to import before the measurement; those that must be installed.
        prepare: writes the files in another format, once.
    """

    loader: Callable[[Work, str], AbstractContextManager[Epoch]]
    ways: tuple[str, ...]
    imports: tuple[str, ...]
    needs: tuple[str, ...] = ()
    prepare: Callable[[Work], object] = lambda work: None

    def missing(self) -> list[str]:
        """The modules that it needs and that are missing."""
        return [module for module in self.needs if not installed(module)]


def installed(module: str) -> bool:
    """Whether a module can be found; imports only its parent packages."""
    parent = module.rpartition(".")[0]
    return (not parent or installed(parent)) and find_spec(module) is not None


def checked(images: Any, labels: Any, shape: tuple[int, ...]) -> int:
    """Check a batch's shapes and dtypes; returns the number of its samples."""
    assert tuple(images.shape) == (len(labels), *shape), f"a batch of {tuple(images.shape)}, {len(labels)} labels"
    assert str(images.dtype).endswith("uint8"), f"images of {images.dtype}"
    assert str(labels.dtype).endswith("int64"), f"labels of {labels.dtype}"
    return len(labels)


def channels_first(images: Any) -> Any:
    """A [B, 3, H, W] view of [B, H, W, 3], or images that have this shape already."""
    if images.shape[1] == 3:
        return images
    return images.permute(0, 3, 1, 2) if hasattr(images, "permute") else images.transpose(0, 3, 1, 2)
