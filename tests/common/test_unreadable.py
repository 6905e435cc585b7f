"""Errors of a disk or of a file server while a file is opened."""

from __future__ import annotations

import builtins
import errno
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiofeed
from aiofeed.errors import ReadError

CODES = [errno.EIO, errno.ESTALE]
MADE: dict[str, Callable[[str], Any]] = {
    "a.bin": lambda path: aiofeed.Tokens(path, 8),
    "a.npy": lambda path: aiofeed.Tokens(path, 8),
    "a.csv": lambda path: aiofeed.Manifest(path, "x"),
    "a.jsonl": lambda path: aiofeed.Manifest(path, "x"),
    "a.tar": lambda path: aiofeed.TarShards(path),
    "a.tfrecord": lambda path: aiofeed.TFRecordShards(path),
    "a.zip": lambda path: aiofeed.ZipShards(path),
    "a.parquet": lambda path: aiofeed.Table(path),
    "a.zarr": lambda path: aiofeed.Arrays({"x": path}),
}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", MADE)
def test_a_file_that_cannot_be_read(name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a ``ReadError`` that names the file, and still an ``OSError`` with its number."""
    path = tmp_path / name
    if name == "a.zarr":
        path.mkdir()
    else:
        path.write_bytes(bytes(100))
    really = {os: os.open, io: io.open, builtins: open}

    def broken(opened: Any, *arguments: Any, **options: Any) -> Any:
        if name in str(opened):
            raise OSError(code, os.strerror(code))
        return really[io](opened, *arguments, **options)

    def broken_descriptor(opened: Any, *arguments: Any, **options: Any) -> Any:
        if name in str(opened):
            raise OSError(code, os.strerror(code))
        return really[os](opened, *arguments, **options)

    monkeypatch.setattr(io, "open", broken)
    monkeypatch.setattr(builtins, "open", broken)
    monkeypatch.setattr(os, "open", broken_descriptor)
    with pytest.raises(ReadError) as caught:
        MADE[name](str(path))
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == code
    assert str(path) in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="there is no file whose reads fail")
def test_hdf5_that_cannot_be_read(tmp_path: Path) -> None:
    """An error of a read by HDF5's library is no damaged file, and has one line."""
    pytest.importorskip("h5py")
    (tmp_path / "a.h5").symlink_to("/proc/self/mem")
    with pytest.raises(ReadError) as caught:
        aiofeed.Arrays({"x": f"{tmp_path}/a.h5::x"})
    assert str(caught.value) == f"cannot read {str(tmp_path / 'a.h5')!r}: [Errno 5] Input/output error"


def test_missing_files_stay_missing(tmp_path: Path) -> None:
    """A file that does not exist is a ``FileNotFoundError``, as before."""
    for name, make in MADE.items():
        with pytest.raises(FileNotFoundError, match=name):
            make(str(tmp_path / name))
