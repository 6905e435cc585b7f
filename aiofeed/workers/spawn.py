"""The configuration of a worker process: the user's source, decoder and ``collate_fn``, pickled once, at its start.

These are the user's own objects, sent from the user's process to its child; no later message is pickled. The worker
imports the user's script only if one of the objects is defined in it: a training script imports torch, and without a
guard it would run from its first line.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed.ipc.shared_memory import anonymous_memory
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.engine.tuning.reads import READS_MOST

if TYPE_CHECKING:
    from aiofeed.kernel.core.faces import CacheStore

_OR_THREADS = 'or use engine="thread"'

# Whether this process is a worker that is loading its configuration, which may import the script.
starting: bool = False


@dataclass(frozen=True, eq=False)
class WorkerConfig:
    """The configuration of a worker process.

    Args:
        source, decode, collate_fn: Those of the feeder.
        length: Length of the source when the feeder was made.
        engines: Number of workers, which share the limits.
        read_concurrency, decode_threads: Limits of all workers together.
        keep: Free segments that are kept for later batches.
        in_order: Whether batches have to be in order.
        policy: What to do about samples that fail.
        cache: The store of decoded samples.
        reads_given, threads_given: Whether the user specified the number; else ``read_concurrency`` is where the
            tuning of reads starts.
    """

    source: Any
    decode: Callable[..., Any] | None
    collate_fn: Any
    length: int
    engines: int
    read_concurrency: int
    decode_threads: int
    keep: int
    in_order: bool
    policy: FailurePolicy
    cache: CacheStore | None = None
    reads_given: bool = True
    threads_given: bool = False

    def share(self, total: int, number: int) -> int:
        """Return the share of worker ``number`` of a limit; at least 1."""
        return max(1, total // self.engines + (number < total % self.engines))

    def most_reads(self, number: int) -> int:
        """Return how many samples worker ``number`` may read at a time after tuning."""
        reads = self.share(self.read_concurrency, number)
        return reads if self.reads_given else max(reads, self.share(READS_MOST, number))


class _Pickler(pickle.Pickler):
    """Notes whether an object is defined in the script itself."""

    of_main: str | None = None

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
            self.of_main = value.__qualname__
        return NotImplemented


def check_picklable(kind: str, **arguments: Any) -> None:
    """Check that arguments can be sent to a worker of ``engine=kind``.

    Raises:
        TypeError: One cannot; the message has its name, the reason and what to do.
    """
    for name, value in arguments.items():
        if kind == "ray":
            _check_ray_pickles(name, value)
            continue
        try:
            with open(os.devnull, "wb") as discarded:
                _dump(value, discarded, name)
        except TypeError as error:
            if _cloudpickle() is None:
                raise TypeError(f"{error}, or install cloudpickle, which can pickle it") from error.__cause__
            try:
                _cloudpickle().dumps(value)
            except Exception as second:  # the user's objects may raise anything when they are pickled
                raise TypeError(str(error)) from second


def _dump(value: Any, file: Any, name: str) -> bool:
    """Pickle a value into a file; return whether the worker has to import the script."""
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(value)
    except Exception as error:  # the user's objects may raise anything when they are pickled
        raise TypeError(
            f'{name}={value!r} cannot be sent to a worker process of engine="process": {type(error).__name__}: '
            f"{error}; define it at the top level of a module (no lambda, no class or function inside a function) "
            f"and create locks, open files and connections when they are first used, {_OR_THREADS}"
        ) from error
    if pickler.of_main is not None:
        _check_main(name, pickler.of_main)
    return pickler.of_main is not None


def _check_ray_pickles(name: str, value: Any) -> None:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:  # the user's objects may raise anything when they are pickled
        raise TypeError(
            f'{name}={value!r} cannot be sent to an actor of engine="ray": {type(error).__name__}: {error}; create '
            f"locks, open files and connections when they are first used, {_OR_THREADS}"
        ) from error


def _cloudpickle() -> Any:
    """Return the package that pickles lambdas and classes of a notebook by value; ``None`` if it is not installed."""
    try:
        return import_module("cloudpickle")
    except ImportError:
        return None


def _check_main(name: str, what: str) -> None:
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not os.path.isfile(path):
        raise TypeError(
            f"{name}= uses {what}, which is defined in an interactive session: a new process cannot import it; "
            f"define it in a module and import it from there, {_OR_THREADS}"
        )
    try:
        guarded = "__name__" in Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        guarded = True  # the worker reports it
    if not guarded:
        raise TypeError(
            f'{name}= uses {what}, which is defined in the script {path}: the worker processes of engine="process" '
            f'import the script, and without `if __name__ == "__main__":` around its statements those would all run '
            f"again; add the guard, or define {what} in a module of its own, {_OR_THREADS}"
        )


def check_not_starting() -> None:
    """Refuse to start workers from a process that is importing the script for its own start.

    Raises:
        RuntimeError: The script has no guard; the message says what to add.
    """
    process = sys.modules.get("multiprocessing.process")
    inheriting = process is not None and getattr(process.current_process(), "_inheriting", False)
    if starting or inheriting:
        raise RuntimeError(
            'the script iterates a feeder with engine="process" while one of that feeder\'s worker processes imports '
            'it: put the statements of the script below `if __name__ == "__main__":`, '
            "or define what the feeder uses in a module of its own"
        )


def write_config(worker_config: WorkerConfig) -> int:
    """Pickle a configuration into shared memory; returns its descriptor, which workers inherit."""
    buffer = io.BytesIO()
    try:
        imports_script = _dump(worker_config, buffer, "the feeder")
    except TypeError:
        # `check_picklable` has found that cloudpickle can.
        buffer, imports_script = io.BytesIO(_cloudpickle().dumps(worker_config)), False
    preparation = {}
    if imports_script:
        from multiprocessing import spawn

        names = ("sys_argv", "init_main_from_name", "init_main_from_path")
        preparation = {name: value for name, value in spawn.get_preparation_data("aiofeed").items() if name in names}
    data = pickle.dumps((preparation, buffer.getvalue()))
    descriptor = anonymous_memory(len(data))
    with mmap.mmap(descriptor, len(data)) as memory:
        memory[:] = data
    return descriptor


def unpickle_config(data: bytes) -> WorkerConfig:
    """Unpickle the configuration that the trainer has pickled."""
    worker_config: WorkerConfig = pickle.loads(data)
    return worker_config


def read_config(descriptor: int) -> WorkerConfig:
    """Unpickle what ``write_config`` has written; imports the script first if an object is defined in it."""
    global starting
    try:
        size = os.fstat(descriptor).st_size
        starting = True
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as data:
            preparation, worker_config = pickle.loads(data)
        if preparation:
            from multiprocessing import spawn

            spawn.prepare(preparation)
        return unpickle_config(worker_config)
    finally:
        starting = False
        os.close(descriptor)
