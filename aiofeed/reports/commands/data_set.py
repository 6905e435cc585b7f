"""The data set that the paths of a command name."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiofeed.kernel.sources.files import Files
from aiofeed.kernel.sources.image_folder import EXTENSIONS, ImageFolder
from aiofeed.objects.urls import scheme_of
from aiofeed.shards.tar import TarShards
from aiofeed.shards.zip import ZipShards
from aiofeed.tables.manifest import Manifest

_IMAGES = ";".join(["jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff"])
_MANIFEST = re.compile(r"\.(csv|tsv|jsonl|ndjson|parquet|pq)(\.\w+)?$", re.IGNORECASE)
_SHARDS = re.compile(r"\.(tar|zip)$", re.IGNORECASE)


@dataclass(frozen=True)
class DataSet:
    """A data set: its source, the Python expression for it, and the order for a training."""

    source: Any
    code: str
    shuffle: bool | str = True


def open_data_set(paths: Sequence[str]) -> DataSet:
    """Return the data set at ``paths``: a folder of images, a manifest, or shards: paths or URLs, with braces or globs.

    Raises:
        OSError, ValueError, ImportError: There is none, or it needs a package that is not installed.
    """
    path = paths[0]
    if all(_SHARDS.search(each.partition("?")[0]) for each in paths):
        kind = ZipShards if path.lower().endswith(".zip") else TarShards
        urls = path if len(paths) == 1 else list(paths)
        code = f"aiofeed.{kind.__name__}({quoted(urls)}, {quoted(_IMAGES)})"
        return DataSet(kind(urls, _IMAGES), code, "window")
    if len(paths) > 1:
        raise ValueError(f"several paths are shards, which end in .tar or .zip, got {list(paths)}")
    if _MANIFEST.search(path):
        return DataSet(Manifest(path), f"aiofeed.Manifest({quoted(path)})")
    if scheme_of(path) is None and not os.path.isdir(path):
        raise FileNotFoundError(f"{path!r} is no folder of images, no .csv, .jsonl or .parquet, and no .tar or .zip")
    try:
        return DataSet(ImageFolder(path), f"aiofeed.ImageFolder({quoted(path)})")
    except FileNotFoundError:
        pattern = os.path.join(glob.escape(path), "**")
        files = sorted(each for each in glob.iglob(pattern, recursive=True) if each.lower().endswith(EXTENSIONS))
        if not files:
            raise
    suffix = os.path.splitext(files[0])[1]
    code = f"aiofeed.Files(sorted(glob.glob({quoted(pattern + '/*' + suffix)}, recursive=True)))"
    return DataSet(Files(files), code)


def quoted(value: str | list[str]) -> str:
    """Return a Python literal with double quotes."""
    return json.dumps(value, ensure_ascii=False)


def nothing(data: Any) -> int:
    """Do nothing: a decoder, to read alone."""
    return 0
