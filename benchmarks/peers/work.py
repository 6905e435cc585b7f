"""The work that every loader does, and how an adapter describes its loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.data import files_below
from benchmarks.peers.decoders import Decode

WORKERS = 2

Batches = Iterable[tuple[Any, Any]]
"""Images, uint8 [B, side, side, 3] or [B, 3, side, side], as tensor or array, and as many class numbers, int64."""
Epoch = Callable[[], Batches]
"""Called once per epoch."""


@dataclass(frozen=True)
class Work:
    """The work of a case.

    Args:
        folder: folder of JPEG files, one sub-folder per class.
        side: side of the decoded squares in pixels.
        decoder: a name of ``benchmarks.peers.decoders``; loaders with their own decoder ignore it.
        batch: samples per batch; the last one may be shorter.
        workers: threads or processes that decode.
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
        ways: names of the ways of using it.
        imports: modules to import before the measurement.
        needs: modules that must be installed.
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
