"""Files that Git LFS has not fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiofeed

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"

USES: dict[str, Callable[[str], Any]] = {
    "a.jpg": lambda path: [*aiofeed.Feeder(aiofeed.Files([path]), decode=aiofeed.DecodeImage(64), batch_size=1)],
    "a.npy": lambda path: [*aiofeed.Feeder(aiofeed.Files([path]), decode=aiofeed.DecodeNumpy(), batch_size=1)],
    "a.tar": aiofeed.TarShards,
    "a.zip": aiofeed.ZipShards,
    "a.tfrecord": aiofeed.TFRecordShards,
    "a.parquet": aiofeed.ParquetRows,
    "a.arrow": aiofeed.Table,
    "a.bin": lambda path: aiofeed.Tokens(path, 4, dtype="uint16"),
}


@pytest.mark.parametrize("name", USES)
def test_a_pointer_of_git_lfs_is_named_as_such(tmp_path: Path, name: str) -> None:
    """The error says which file is a pointer, and the command that fetches its contents."""
    path = tmp_path / name
    path.write_bytes(POINTER)
    with pytest.raises((ValueError, aiofeed.FeedError), match=rf"{name}.*pointer of Git LFS.*git lfs pull"):
        USES[name](str(path))
