"""The work that every loader does, and the contender that runs an adapter.

An adapter is a module of ``benchmarks.peers.adapters`` with

- ``NAME``: the loader's name in the tables,
- ``NEEDS``: modules that must be installed,
- ``IMPORTS``: modules to import before the measurement,
- ``WAYS``: names of the ways of using it,
- ``prepare(work)``, if it needs the files in another format: writes them once,
- ``ORDERED = False``, if it does not keep the order of the files; no loader shuffles,
- ``loader(work, way)``: a context manager that gives a function, called once per epoch, which returns the batches:
  images, uint8 [B, 3, side, side] in any memory order, as tensor or array, and as many class numbers, int64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.data import files_below
from benchmarks.harness import Contender, Measure
from benchmarks.peers.decoders import IMPORTS as DECODER_IMPORTS
from benchmarks.peers.decoders import Decode, quiet_helpers
from benchmarks.peers.quality import Judge

WORKERS = 2

Batches = Iterable[tuple[Any, Any]]
Epoch = Callable[[], Batches]


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


def adapter(name: str) -> Any:
    return import_module(f"benchmarks.peers.adapters.{name}")


def missing(name: str) -> list[str]:
    """The modules that an adapter needs and that are missing."""
    return [module for module in adapter(name).NEEDS if not installed(module)]


def installed(module: str) -> bool:
    """Whether a module can be found; imports only its parent packages."""
    parent = module.rpartition(".")[0]
    return (not parent or installed(parent)) and find_spec(module) is not None


def label_of(name: str, way: str) -> str:
    """The label of a loader and one of its ways."""
    return f"{adapter(name).NAME}, {way}" if way else adapter(name).NAME


def contender(name: str, way: str, work: Mapping[str, Any], *, judged: bool = False) -> Contender:
    """The contender of a loader.

    Args:
        name: its adapter.
        way: one of the adapter's ways.
        work: the arguments of ``Work``.
        judged: also measure the quality of its pictures.
    """
    imports = (*adapter(name).IMPORTS, *DECODER_IMPORTS[str(work["decoder"])])
    if judged:
        imports = (*imports, *DECODER_IMPORTS["pillow"])
    options = {"adapter_name": name, "way": way, "work": dict(work)}
    return Contender(label_of(name, way), feed, options | ({"judged": True} if judged else {}), imports)


@contextmanager
def feed(adapter_name: str, way: str, work: Mapping[str, Any], judged: bool = False) -> Iterator[Measure]:
    """Warm up with one epoch, which gives the time of the first batch and the quality; then measure single epochs."""
    task = Work(**work)
    quiet_helpers()
    warm_up: dict[str, float] = {}
    expected, shape = len(task.paths), (3, task.side, task.side)
    loader = adapter(adapter_name)
    getattr(loader, "prepare", lambda work: None)(task)
    judge = Judge(task.paths, task.targets, task.side, ordered=getattr(loader, "ORDERED", True))
    started = time.perf_counter()
    with loader.loader(task, way) as epoch:
        items = 0
        for images, labels in epoch():
            warm_up.setdefault("first_s", time.perf_counter() - started)
            items += checked(images, labels, shape)
            if judged:
                judge.look(images, labels)
        assert items == expected, f"{items} of {expected} images"
        if judged:
            warm_up["worst_db"] = judge.worst_db()

        def measure() -> Mapping[str, float]:
            items = counted(epoch(), shape)
            assert items == expected, f"{items} of {expected} images"
            return {"items": items, **warm_up}

        yield measure


def counted(batches: Batches, shape: tuple[int, ...]) -> int:
    """The number of samples in ``batches``, which all must have ``shape``."""
    return sum(checked(images, labels, shape) for images, labels in batches)


def checked(images: Any, labels: Any, shape: tuple[int, ...]) -> int:
    """Check a batch's shapes and dtypes; returns the number of its samples."""
    assert tuple(images.shape) == (len(labels), *shape), f"a batch of {tuple(images.shape)}, {len(labels)} labels"
    assert str(images.dtype).endswith("uint8"), f"images of {images.dtype}"
    assert str(labels.dtype).endswith("int64"), f"labels of {labels.dtype}"
    return len(labels)


def channels_first(images: Any) -> Any:
    """A [B, 3, H, W] view of [B, H, W, 3]."""
    return images.permute(0, 3, 1, 2) if hasattr(images, "permute") else images.transpose(0, 3, 1, 2)
