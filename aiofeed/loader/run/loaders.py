"""The loaders of a script under ``aiofeed run``: their iterators, and one line for each at the end."""

from __future__ import annotations

import multiprocessing.util
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from aiofeed.kernel.core.validation import number_from_environment
from aiofeed.kernel.runtime import machine
from aiofeed.loader.dataloader import DataLoader, LoaderIterator, _Epochs, _in_torch


@dataclass
class LoaderRecord:
    """Counts what the loaders that one line of the script made did in this process.

    Args:
        rank: The rank of the process; -1 in a worker of a loader.
        name: The line, the class of the loader, that of the dataset and the number of workers.
        note: Why the loaders, or an option of ``aiofeed run``, were left alone.
        batches: The number of batches that aiofeed's iterators returned.
        waited_s: Time in ``next``, in seconds.
        loader: The loader that began an epoch last, for its explanation.
    """

    rank: int
    name: str
    note: str = ""
    batches: int = 0
    waited_s: float = 0.0
    loader: Any = None

    def __str__(self) -> str:
        line = f"aiofeed: {self.name}: {self.note or f'{self.batches} batches, waited {self.waited_s:.1f} s'}"
        return line if self.loader is None else f"{line}\n{cast('Any', DataLoader).explain(self.loader)}\n"


# Of this process, by name.
_records: dict[str, LoaderRecord] = {}
multiprocessing.util.register_after_fork(LoaderRecord, lambda _: _records.clear())


class _EpochsOfTorch(_Epochs):
    """The part beyond torch's of a loader of torch's class. Copies of the loader get their own."""

    def __init__(self, loader: Any, options: dict[str, Any]) -> None:
        self.loader, self.record = weakref.ref(loader), _record(loader)
        self.record.loader = loader if options.get("explain") else None
        auto = options.get("device") == "auto" and not torch.accelerator.is_available()
        device, threads = None if auto else options.get("device"), options.get("threads")
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None or loader.worker_init_fn:
            threads = None
        feeder = {"on_error": "raise", "cache": None, "engine": None, "threads": threads}
        super().__init__(loader, device=device, transform=None, limits=None, **feeder)

    def __reduce__(self) -> Any:
        return type(None), ()


class _CountedIterator(LoaderIterator):
    """Counts batches and waiting."""

    def _next_data(self) -> Any:
        began = time.perf_counter()
        batch = super()._next_data()
        record = self._epochs.record  # type: ignore[attr-defined]
        record.batches += 1
        record.waited_s += time.perf_counter() - began
        return batch


def new_iterator(loader: Any, options: dict[str, Any], of_torch: Any) -> Any:
    """Return an iterator of aiofeed for a loader of torch's class; torch's, if this system has none with workers."""
    if loader.num_workers and not machine.passes_descriptors():
        return of_torch(loader)
    epochs = vars(loader).get("_aiofeed")
    if epochs is None or epochs.loader() is not loader:
        vars(loader)["_aiofeed"] = _EpochsOfTorch(loader, options)
    _in_torch(loader.check_worker_number_rationality)
    return _CountedIterator(loader)


def note_iterator(iterator: Any, loader: Any) -> None:
    """Say why an iterator that begins an epoch is not one of aiofeed's."""
    if not isinstance(iterator, LoaderIterator):
        _record(loader).note = f"left alone: its class, or this system, needs {type(iterator).__name__}"


def _record(loader: Any) -> LoaderRecord:
    if not _records:
        # Unlike atexit, this runs in processes that multiprocessing has forked, too.
        multiprocessing.util.Finalize(None, report, exitpriority=100)
    kind = f"{type(loader).__name__} of {type(loader.dataset).__name__}"
    name = f"{vars(loader).get('_aiofeed_place', '')}{kind}, num_workers={loader.num_workers}"
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else number_from_environment("RANK", 0)
    return _records.setdefault(name, LoaderRecord(-1 if get_worker_info() else rank, name))


def report() -> None:
    """Print one line for each line of the script that made loaders, in rank 0."""
    print(end="".join(f"{each}\n" for each in _records.values() if each.rank == 0), file=sys.stderr, flush=True)
