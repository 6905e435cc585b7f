"""What an engine process starts from: the user's source, decoder and ``collate_fn``, by pickle, once, at its start.

These are the user's own objects on their way from the user's process to its own child; what is said afterwards is
never pickled. A script is imported by the child only where one of them is defined in it: a training script imports
torch, and runs from its first line where it has no guard.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiofeed.cache.store import SampleStore
from aiofeed.core.failure_policy import FailurePolicy
from aiofeed.engine.tuning.reads import READS_MOST

_WAY_OUT = 'or use engine="thread"'

# Whether this process is one that is being started, and imports what it needs.
starting = False


@dataclass(frozen=True, eq=False)
class WorkerConfig:
    """What an engine process works with.

    Args:
        source, decode, collate_fn: as the feeder has them.
        length: of the source when the feeder was made.
        engines: how many processes share the limits.
        read_concurrency, decode_threads: of all of them together.
        keep: free segments kept for later batches.
        in_order: whether batches have to be in order.
        policy: what becomes of samples that fail.
        cache: what keeps decoded samples.
        reads_given, threads_given: whether the user said so many; if not, ``read_concurrency`` is what is begun with.
    """

    source: Any
    decode: Callable[..., Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    length: int
    engines: int
    read_concurrency: int
    decode_threads: int
    keep: int
    in_order: bool
    policy: FailurePolicy
    cache: SampleStore | None = None
    reads_given: bool = True
    threads_given: bool = False

    def share(self, total: int, number: int) -> int:
        """What process ``number`` has of a limit; all have something."""
        return max(1, total // self.engines + (number < total % self.engines))

    def most_reads(self, number: int) -> int:
        """How many samples process ``number`` may come to read at a time."""
        reads = self.share(self.read_concurrency, number)
        return reads if self.reads_given else max(reads, self.share(READS_MOST, number))


class _Pickler(pickle.Pickler):
    """Notes whether anything is defined in the script itself."""

    of_main: str | None = None

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
            self.of_main = value.__qualname__
        return NotImplemented


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def check_travels(**arguments: Any) -> None:
    """See to it that the arguments can be sent to a process.

    Raises:
        TypeError: one cannot; the message names it, the reason and the way out.
    """
    for name, value in arguments.items():
        pickler = _Pickler(_Nowhere(), pickle.HIGHEST_PROTOCOL)
        try:
            pickler.dump(value)
        except Exception as error:  # the user's objects may raise anything when they are pickled
            raise TypeError(
                f'{name}={value!r} cannot travel to the process of engine="process": {type(error).__name__}: {error}; '
                f"define it at the top level of a module (no lambda, no class or function inside a function) and keep "
                f"what cannot be pickled (locks, open files, connections) out of it until it is used, {_WAY_OUT}"
            ) from error
        if pickler.of_main is not None:
            _check_main(name, pickler.of_main)


def _check_main(name: str, what: str) -> None:
    path = _main_path()
    if path is None:
        raise TypeError(
            f"{name}= uses {what}, which is defined in an interactive session: a new process cannot import it; "
            f"put it into a module of its own and import it from there, {_WAY_OUT}"
        )
    try:
        guarded = "__name__" in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        guarded = True  # the child will see
    if not guarded:
        raise TypeError(f"{name}= uses {what}, {_without_guard(str(path))}")


def _without_guard(path: str) -> str:
    return (
        f'which is defined in the script {path}: the process of engine="process" imports that, and without '
        f'`if __name__ == "__main__":` around what it runs it would all run again; add the guard, '
        f"or put what is used into a module of its own, {_WAY_OUT}"
    )


def check_not_starting() -> None:
    """Refuse to start a process from one that is only being started.

    Raises:
        RuntimeError: the script lacks its guard; the message says what to add.
    """
    process = sys.modules.get("multiprocessing.process")
    inheriting = process is not None and getattr(process.current_process(), "_inheriting", False)
    if starting or inheriting:
        raise RuntimeError(
            'a feeder with engine="process" is iterated while a process that was started by it imports the script: '
            'put what the script runs below `if __name__ == "__main__":`, '
            "or define what the feeder uses in a module of its own"
        )


def _main_path() -> Path | None:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return Path(path) if path is not None and Path(path).is_file() else None


def write_config(worker_config: WorkerConfig) -> int:
    """Cargo in a file without a name; its descriptor, for the process to inherit."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump(worker_config)
    preparation = _preparation() if pickler.of_main is not None else {}
    head = pickle.dumps(preparation)
    data = len(head).to_bytes(8, "little") + head + buffer.getbuffer()
    return _unnamed_file(data)


def _preparation() -> dict[str, Any]:
    from multiprocessing import spawn

    kept = ("sys_argv", "init_main_from_name", "init_main_from_path")
    return {name: value for name, value in spawn.get_preparation_data("aiofeed").items() if name in kept}


def _unnamed_file(data: bytes) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("aiofeed-start", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def read_config(descriptor: int) -> WorkerConfig:
    """What ``write_config`` has put into the file; the script is imported first where something is defined there."""
    global starting
    try:
        size = os.fstat(descriptor).st_size
        starting = True
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as data:
            end = 8 + int.from_bytes(data[:8], "little")
            preparation = pickle.loads(data[8:end])
            if preparation:
                from multiprocessing import spawn

                spawn.prepare(preparation)
            worker_config: WorkerConfig = pickle.loads(data[end:])
            return worker_config
    finally:
        starting = False
        os.close(descriptor)
