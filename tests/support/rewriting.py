"""A file that a thread rewrites all the time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def rewritten(path: Path, states: Sequence[bytes]) -> Iterator[None]:
    """Run a thread that truncates and rewrites the file, with one state after the other, until the block ends."""
    path.write_bytes(states[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for state in states:
                path.write_bytes(state)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()
