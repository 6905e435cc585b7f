"""Errors of disks and file servers while a file is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from aiofeed.kernel.core.errors import ReadError


class UnreadableFileError(ReadError, OSError):
    """A file could not be read when it was opened."""


@contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Raise an error such as EIO or ESTALE, which names no file, as a ``ReadError`` and ``OSError`` that names it."""
    try:
        yield
    except OSError as error:
        if type(error) is not OSError or not error.errno:  # FileNotFoundError and others name it, as those of URLs do
            raise
        reason = (
            error if error.filename else f"[Errno {error.errno}] {os.strerror(error.errno)}"
        )  # without HDF5's lines
        named = UnreadableFileError(f"cannot read {path!r}: {reason}", key=path, index=-1, stage="read")
        named.errno = error.errno
        raise named from error
