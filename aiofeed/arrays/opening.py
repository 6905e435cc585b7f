"""Opens what users pass to ``Arrays``: paths, URLs, globs, lists, and arrays that are opened already."""

from __future__ import annotations

import asyncio
import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.arrays.chunked import ChunkedArray, opened, scaling_of
from aiofeed.arrays.hdf5 import open_hdf5
from aiofeed.arrays.zarr_files import open_zarr
from aiofeed.common.blocking import run_blocking
from aiofeed.common.progress_bar import LoadProgress
from aiofeed.common.unreadable import naming_file
from aiofeed.kernel.core.validation import check_expanded
from aiofeed.kernel.sources.file_io import check_path
from aiofeed.objects.reader import ObjectReader, run_all
from aiofeed.objects.urls import is_remote
from aiofeed.shards.urls import ShardFinder, expand_braces

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A chunk that is not stored counts as so many bytes at least: to look for it takes time.
UNSTORED_BYTES = 16 << 10

HDF5_FILES = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4", ".h5ad", ".mat")


@dataclass(eq=False)
class SparseMatrix:
    """A CSR matrix: values, their columns, and where each row begins in these."""

    name: str
    width: int
    values: ChunkedArray
    columns: ChunkedArray
    starts: NDArray[np.int64]


class Opener:
    """Opens arrays.

    Args:
        decode_cf: Whether packed values are unpacked.
        store: An obstore store in place of those of the URLs.
        options: Arguments of ``obstore.store.from_url``.
    """

    categories: dict[str, list[str]]

    def __init__(self, decode_cf: bool, store: Any, options: Mapping[str, Any] | None) -> None:
        self.categories = {}
        self._decode_cf = decode_cf
        self._storage: dict[str, Any] = {"store": store, "options": options}
        self._finder = ShardFinder(store, options)

    def open(self, field: str, given: Any) -> list[Any]:
        """Return the parts of a field: arrays, matrices, or columns of categories.

        Raises:
            TypeError: It is no array.
            FileNotFoundError: There is none.
            ValueError: It is damaged, or packed in a way that is unknown.
        """
        several = given if isinstance(given, list | tuple) else [given]
        if not several:
            raise ValueError(f"Arrays: {field!r} is a list without arrays")
        parts = run_blocking(lambda: self._open_all(field, several))
        for part in parts:
            if isinstance(part, list) or isinstance(part, SparseMatrix) != isinstance(parts[0], SparseMatrix):
                raise ValueError(
                    f"Arrays: {field!r} has texts, or sparse matrices beside arrays: torch has no such tensors"
                )
            if self._decode_cf and isinstance(part, ChunkedArray):
                part.scaling = scaling_of(part)
        return parts

    async def _open_all(self, field: str, several: Sequence[Any]) -> list[Any]:
        found = [each for given in several for each in (_expand(given) if _is_path(given) else [given])]
        total = len(found)
        progress = LoadProgress("opening arrays", "arrays", total, lambda done: f"opened {done} of {total} arrays")

        async def open_one(each: Any) -> Any:
            opened_one = await self._open(field, each)
            progress.add()
            return opened_one

        with progress:
            return await run_all(map(open_one, found))

    async def _open(self, field: str, given: Any) -> Any:
        if not _is_path(given):
            return await self._adopt(field, given)
        file, two_colons, inner = os.fspath(given).partition("::")
        is_hdf5 = two_colons or PurePath(file.partition("?")[0]).suffix.lower() in HDF5_FILES
        if is_hdf5:
            nodes = await open_hdf5(self._finder.shard(file), inner.strip("/"))
        else:
            with naming_file(file):
                nodes = await open_zarr(ObjectReader(file.rstrip("/"), **self._storage))
        node = nodes[""]
        if not isinstance(node, dict):
            return node

        async def child(name: str) -> Any:
            return nodes[name] if name in nodes else await self._open(field, f"{str(given).rstrip('/')}/{name}")

        kind = node.get("encoding-type")
        if kind == "nullable-string-array":
            return await child("values")
        if kind == "csr_matrix":
            starts, values, columns = [await child(name) for name in ("indptr", "data", "indices")]
            try:
                rows, width = np.asarray(node["shape"]).tolist()
                starts = (await read_all(starts)).astype(np.int64, casting="same_kind")
                fits = len(starts) == rows + 1 and not starts[0] and not (np.diff(starts) < 0).any() and width >= 0
                fits &= values.shape == columns.shape == (starts[-1],) and columns.dtype.kind in "iu"
            except (KeyError, TypeError, ValueError):
                fits = False
            if not fits:
                raise ValueError(f"{given}: its rows do not fit its values: it is damaged")
            return SparseMatrix(str(given), width, values, columns, starts)
        if kind == "categorical":
            names = await child("categories")
            names = names if isinstance(names, list) else (await read_all(names)).tolist()
            if self.categories.setdefault(field, names) != names:
                raise ValueError(f"{given} has other categories than other parts of {field!r}")
            return await child("codes")
        is_folder = await asyncio.to_thread(os.path.isdir, file)
        names = nodes if is_hdf5 or not is_folder else await asyncio.to_thread(os.listdir, file)
        inside = sorted(name for name in names if name and not name.startswith((".", "zarr.json")))
        raise ValueError(f"{given} is {f'a {kind}' if kind else 'a group'}: name an array in it; there are {inside}")

    async def _adopt(self, field: str, given: Any) -> Any:
        kind = f"{type(given).__module__.partition('.')[0]}.{type(given).__name__}"
        if kind == "h5py.Dataset":
            if given.file.driver != "sec2":  # in memory, for example
                return opened(given, given.name, given.chunks, attributes=dict(given.attrs))
            if given.file.mode != "r":
                given.file.flush()
            return await self._open(field, f"{given.file.filename}::{given.name}")
        if kind == "zarr.Array":
            store, kind = given.store, type(given.store).__name__
            if kind == "LocalStore":
                return await self._open(field, os.path.join(store.root, given.path))
            if kind == "ObjectStore":
                return (await open_zarr(ObjectReader(given.path, store=store.store)))[""]
            return opened(given, given.name or kind, given.chunks, attributes=dict(given.attrs))
        if isinstance(given, np.ma.MaskedArray):
            raise TypeError("Arrays: torch has no masked tensors: fill the array, array.filled(...)")
        if not (hasattr(given, "shape") and hasattr(given, "dtype")):
            raise TypeError(f"Arrays takes paths, URLs and arrays of zarr, h5py, xarray, dask and NumPy, not {kind}")
        return opened(given, str(getattr(given, "name", None) or kind))


async def read_all(array: ChunkedArray) -> NDArray[Any]:
    """Return an array with one axis."""
    found, unstored = [], 0
    for at in range(-(-array.shape[0] // max(array.chunks[0], 1))):
        data = await asyncio.to_thread(array.read_now, (at,)) if array.local else await array.read((at,))
        if data is None:  # a file may claim any number of values that it does not have
            unstored = check_expanded(array.name, unstored + max(array.chunk_bytes, UNSTORED_BYTES), 0)
        left = array.shape[0] - at * array.chunks[0]
        values = array.decode(data, (at,))
        found.append(np.broadcast_to(values, array.chunks) if values.ndim == 0 else values[:left])
    return np.concatenate(found)[: array.shape[0]] if found else np.empty(0, array.dtype)


def _is_path(given: Any) -> bool:
    return isinstance(given, str | os.PathLike)


def _expand(given: Any) -> list[str]:
    """Return the arrays that braces and stars in a path name."""
    found: list[str] = []
    for each in expand_braces(os.fspath(given)):
        file, two_colons, inner = each.partition("::")
        check_path(file)
        if "*" not in file:
            found.append(each)
            continue
        if is_remote(file):
            raise ValueError(f"{each!r}: a glob is for paths; name arrays at URLs with {{00..11}} or a list")
        matches = sorted(glob.glob(file, recursive=True))
        if not matches:
            raise FileNotFoundError(f"no array matches {file!r}")
        found += [f"{match}{two_colons}{inner}" for match in matches]
    return found
