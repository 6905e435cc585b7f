"""Fetches batches of a torch dataset as ``DataLoader`` does, and names the sample that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from torch.utils.data import Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _DatasetKind

from aiofeed.kernel.core.errors import StateError, add_note
from aiofeed.kernel.core.statistics import EpochStats
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.thread_pool import gil_wait_s

# If a batch takes less time, so many are not measured after one that is: measuring takes 5 us.
SHORT_BATCH_S = 0.002
UNMEASURED = 15
# In batches whose items take longer than this, so many probes find out how often the dataset holds the GIL, with a
# pause between them. It is free if it is obtained within this time; otherwise after up to the switch interval, 5 ms.
PROBED_BATCH_S = 0.005
GIL_PROBES = 40
PROBE_PAUSE_S = 0.001
GIL_FREE_S = 0.0005

_FETCH_FILE = _MapDatasetFetcher.fetch.__code__.co_filename
_SUBSET_FILE = Subset.__getitem__.__code__.co_filename


def fetcher_factory(iterator: Any) -> Callable[[Any], Any]:
    """Return a function that makes torch's fetcher of a dataset, with the options of torch's iterator."""
    return partial(
        _DatasetKind.create_fetcher,
        iterator._dataset_kind,
        auto_collation=iterator._auto_collation,
        collate_fn=iterator._collate_fn,
        drop_last=iterator._drop_last,
    )


def fetch(fetcher: Any, index: Any) -> Any:
    """Fetch a batch with torch's fetcher; an exception of the dataset gets a note with the sample's index and path.

    The path is that of a dataset with a list ``samples`` of tuples, as torchvision's ``ImageFolder`` has.
    """
    try:
        return fetcher.fetch(index)
    except StopIteration:
        raise
    except Exception as error:
        failed = _failed_sample(error, fetcher)
        if failed is not None:
            add_note(error, f"in {_name(*failed)}")
        raise


class BatchTimes:
    """Fetches batches, and measures where their time goes, for ``explain``: of each, or of some if they take no time.

    In some of the first batches that take long, a thread measures how often the dataset holds the GIL.
    """

    def __init__(self) -> None:
        self._collate_fn: Any = None
        self._began = self._cpu_s = self._dataset_s = self._collate_s = 0.0
        self._probes = self._held = 0
        self._ended = threading.Event()
        self.left: int = 0
        """Batches until the next one that is measured."""
        self._measured = False  # the last one

    def fetch(self, fetcher: Any, index: Any) -> Any:
        """Fetch a batch; see ``fetch``."""
        if self.left:
            self.left -= 1
            self._measured = False
            return fetch(fetcher, index)
        thread = None
        if self._dataset_s > PROBED_BATCH_S and self._probes < GIL_PROBES and machine.has_gil():
            self._ended.clear()
            thread = threading.Thread(target=self._probe, name="aiofeed-gil", daemon=True)
            thread.start()
        self._began, cpu_s = time.perf_counter(), time.thread_time()
        # No call lies between each of these and `try` or `finally`, so that Ctrl-C cannot leave the one in place.
        self._collate_fn, fetcher.collate_fn, self._collate_s = fetcher.collate_fn, self._collate, 0.0
        try:
            batch = fetch(fetcher, index)
        finally:
            fetcher.collate_fn = self._collate_fn
            self._dataset_s = time.perf_counter() - self._began - self._collate_s
            if thread is not None:
                self._ended.set()
                thread.join()
        self._cpu_s, self._measured = time.thread_time() - cpu_s, True
        self.left = UNMEASURED if self._dataset_s + self._collate_s < SHORT_BATCH_S else 0
        return batch

    def _collate(self, samples: Any) -> Any:
        began = time.perf_counter()
        batch = self._collate_fn(samples)
        self._collate_s += time.perf_counter() - began
        return batch

    def _probe(self) -> None:
        while not self._ended.wait(PROBE_PAUSE_S) and self._probes < GIL_PROBES:
            self._held += gil_wait_s() > GIL_FREE_S
            self._probes += 1

    def taken(self) -> tuple[float, ...]:
        """Return seconds of dataset, ``collate_fn``, the rest and processor; probes, and those that met a held GIL.

        Nothing if the last batch was not measured.
        """
        if not self._measured:
            return ()
        since_s = time.perf_counter() - self._began - self._dataset_s - self._collate_s
        return self._dataset_s, self._collate_s, since_s, self._cpu_s, self._probes, self._held


def count_times(stats: EpochStats, times: Sequence[float]) -> None:
    """Add the times of a batch, see ``BatchTimes.taken``, to those of its epoch."""
    dataset_s, collate_s, since_s, cpu_s, probes, held = times
    stats.decode_s += dataset_s
    stats.collate_s += collate_s
    stats.read_s += since_s
    stats.decode_cpu_s += cpu_s
    stats.jobs += 1
    stats.dataset_probes[:] = probes, held


def _failed_sample(error: Exception, fetcher: Any) -> tuple[Any, Any] | None:
    """Return the dataset and the index that failed, from torch's frames; ``None`` if another part failed."""
    if not isinstance(fetcher, _MapDatasetFetcher):
        return None
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        frame, called = trace.tb_frame, trace.tb_next.tb_frame
        if called.f_code.co_name == "__getitem__":
            variables = frame.f_locals
            if frame.f_code.co_filename == _FETCH_FILE:
                if "idx" in variables:
                    return fetcher.dataset, variables["idx"]
                return fetcher.dataset, _failed_index(called, variables.get("possibly_batched_index"))
            if frame.f_code.co_filename == _SUBSET_FILE:
                subset = variables.get("self")
                if "idx" in variables:
                    return subset, variables["idx"]
                if isinstance(subset, Subset):
                    return subset, _failed_index(called, variables.get("indices"), subset.indices)
        trace = trace.tb_next
    return None


def _failed_index(called: FrameType, indices: Any, passed: Sequence[Any] | None = None) -> Any:
    """Return the index of the sample that failed, from the frame of ``__getitem__``: torch's has it up to Python 3.11.

    All indices of the batch if it is none of them, because the method has changed the variable.

    Args:
        passed: What is passed to ``__getitem__`` for each index. Default: the index.
    """
    names = called.f_code.co_varnames[: called.f_code.co_argcount]
    index = called.f_locals.get(names[1]) if len(names) > 1 else None
    if not isinstance(indices, list):
        return indices
    return next((each for each in indices if (each if passed is None else passed[each]) is index), indices)


def _name(dataset: Any, index: Any) -> str:
    name = f"sample {index!r} of {type(dataset).__name__}"
    try:
        while isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        path = dataset.samples[index][0]
    except Exception:  # noqa: BLE001 - most datasets have no such list
        return name
    return f"{name} ({path})" if isinstance(path, str) else name


# --- the state of a dataset that saves its own, as torchdata's StatefulDataLoader does ---


def dataset_state(fetcher: Any, dataset: Any) -> Any:
    """Return the ``state_dict`` of an iterable dataset's iterator, or else of the dataset; ``None`` if it has none."""
    owner = first_stateful(getattr(fetcher, "dataset_iter", None), dataset)
    return None if owner is None else owner.state_dict()


def restore_dataset(fetcher: Any, dataset: Any, state: Any) -> bool:
    """Load a state that ``dataset_state`` returned; return whether the fetcher must be created again.

    A dataset that loads the state itself reads it in ``__iter__``.
    """
    iterator = getattr(fetcher, "dataset_iter", None)
    owner = first_stateful(iterator, dataset)
    if owner is None:
        raise StateError(f"the state has one of the dataset, and {type(dataset).__name__} has no load_state_dict")
    owner.load_state_dict(state)
    return owner is dataset and owner is not iterator


def first_stateful(*owners: Any) -> Any:
    """Return the first object that has ``state_dict`` and ``load_state_dict``; ``None`` if none has them."""
    for owner in owners:
        if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
            return owner
    return None
