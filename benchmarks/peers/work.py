"""What every loader is asked for, and the one contender that they all are.

An adapter is a module of ``benchmarks.peers.adapters`` with

- ``NAME``: what it is called in the tables,
- ``NEEDS``: the modules without which it does not take part,
- ``IMPORTS``: what is imported before anything is measured,
- ``WAYS``: the ways of using it, by name,
- ``prepare(work)`` where it needs the files in another format: makes them, once,
- ``ORDERED = False`` where samples do not come in the order of the files; nobody shuffles,
- ``loader(work, way)``: a context manager; what it gives is called once per epoch and gives the batches: images, uint8
  [B, 3, side, side] in any memory order, as a tensor or an array, and as many class numbers, int64.
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
    """One task for all.

    Args:
        folder: of JPEG files, one sub-folder per class.
        side: of the square that they become, in pixels.
        decoder: a name of ``benchmarks.peers.decoders``; loaders that decode by themselves are told nothing by it.
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
        """Where the same files are kept in another format, for loaders that want one."""
        return Path(self.folder).with_name(f"{Path(self.folder).name}-as")


def adapter(name: str) -> Any:
    return import_module(f"benchmarks.peers.adapters.{name}")


def missing(name: str) -> list[str]:
    """The modules that an adapter needs and that are not installed."""
    return [module for module in adapter(name).NEEDS if not installed(module)]


def installed(module: str) -> bool:
    """Whether a module can be found, without importing more than the packages it is in."""
    parent = module.rpartition(".")[0]
    return (not parent or installed(parent)) and find_spec(module) is not None


def label_of(name: str, way: str) -> str:
    """What a loader, used in one of its ways, is called."""
    return f"{adapter(name).NAME}, {way}" if way else adapter(name).NAME


def contender(name: str, way: str, work: Mapping[str, Any], *, judged: bool = False) -> Contender:
    """A loader as the harness wants it; ``work`` holds the arguments of ``Work``, ``judged`` asks for its quality."""
    imports = (*adapter(name).IMPORTS, *DECODER_IMPORTS[str(work["decoder"])])
    if judged:
        imports = (*imports, *DECODER_IMPORTS["pillow"])
    options = {"adapter_name": name, "way": way, "work": dict(work)}
    return Contender(label_of(name, way), feed, options | ({"judged": True} if judged else {}), imports)


@contextmanager
def feed(adapter_name: str, way: str, work: Mapping[str, Any], judged: bool = False) -> Iterator[Measure]:
    """One epoch to warm up, whose first batch is timed from before the loader is made; then one epoch per measure."""
    task = Work(**work)
    quiet_helpers()
    found: dict[str, float] = {}
    expected, shape = len(task.paths), (3, task.side, task.side)
    loader = adapter(adapter_name)
    getattr(loader, "prepare", lambda work: None)(task)
    judge = Judge(task.paths, task.targets, task.side, ordered=getattr(loader, "ORDERED", True))
    started = time.perf_counter()
    with loader.loader(task, way) as epoch:
        items = 0
        for images, labels in epoch():
            found.setdefault("first_s", time.perf_counter() - started)
            items += checked(images, labels, shape)
            if judged:
                judge.look(images, labels)
        assert items == expected, f"{items} of {expected} images"
        if judged:
            found["worst_db"] = judge.worst_db()

        def measure() -> Mapping[str, float]:
            items = counted(epoch(), shape)
            assert items == expected, f"{items} of {expected} images"
            return {"items": items, **found}

        yield measure


def counted(batches: Batches, shape: tuple[int, ...]) -> int:
    """How many samples there are in ``batches``, all of ``shape``."""
    return sum(checked(images, labels, shape) for images, labels in batches)


def checked(images: Any, labels: Any, shape: tuple[int, ...]) -> int:
    """The samples of a batch, which is what everybody owes."""
    assert tuple(images.shape) == (len(labels), *shape), f"a batch of {tuple(images.shape)}, {len(labels)} labels"
    assert str(images.dtype).endswith("uint8"), f"images of {images.dtype}"
    assert str(labels.dtype).endswith("int64"), f"labels of {labels.dtype}"
    return len(labels)


def channels_first(images: Any) -> Any:
    """[B, H, W, 3] as [B, 3, H, W], where it lies."""
    return images.permute(0, 3, 1, 2) if hasattr(images, "permute") else images.transpose(0, 3, 1, 2)
