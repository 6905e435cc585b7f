"""Opens what users pass to ``Arrays``: paths, URLs, globs, lists, and arrays that are opened already."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.arrays import cells
from aiofeed.arrays.cells import SparseMatrix
from aiofeed.arrays.chunked import ChunkedArray, opened, scaling_of, text, times
from aiofeed.arrays.hdf5 import attributes_of, open_hdf5
from aiofeed.arrays.zarr_files import described, open_zarr
from aiofeed.common.blocking import run_blocking
from aiofeed.common.expanded import check_expanded
from aiofeed.common.progress_bar import LoadProgress
from aiofeed.common.unreadable import naming_file
from aiofeed.kernel.sources.file_io import check_path
from aiofeed.objects.reader import ObjectReader, run_all
from aiofeed.objects.urls import is_remote
from aiofeed.shards.urls import ShardFinder, expand_braces

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A chunk that is not stored counts as so many bytes at least: to look for it takes time.
UNSTORED_BYTES = 16 << 10

# At URLs; on disk, each file is one of HDF5.
HDF5_FILES = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4", ".h5ad", ".h5mu", ".loom", ".mat", ".nwb")
# Matrices of AnnData whose columns have the names in "var" beside them.
_MATRIX = re.compile(r"(/|::)(?:X|layers/[^/]+)$")


class Opener:
    """Opens arrays.

    Args:
        decode_cf: Whether packed values are unpacked.
        scale: The number of the scale of an image of OME-Zarr.
        join: How columns of other names are joined.
        store: An obstore store in place of those of the URLs.
        options: Arguments of ``obstore.store.from_url``.
    """

    def __init__(self, decode_cf: bool, scale: int, join: str | None, store: Any, options: Any) -> None:
        self.categories: dict[str, list[str]] = {}
        self.columns: dict[str, list[str]] = {}
        # By array or matrix, while a field is opened.
        self._categories_of, self._columns_of = dict[Any, list[str]](), dict[Any, list[str]]()
        self._decode_cf, self._scale, self._join = decode_cf, scale, join
        self._storage: dict[str, Any] = {"store": store, "options": options}
        self._finder = ShardFinder(store, options)

    def open(self, field: str, given: Any, axis: Any, chosen: Any = None) -> list[Any]:
        """Return the parts of a field, which are joined along an axis: arrays, matrices, or columns of categories.

        Of matrices whose columns have names, those that are chosen.

        Raises:
            TypeError: It is no array.
            FileNotFoundError: There is none.
            ValueError: It is damaged, or packed in a way that is unknown.
        """
        several = given if isinstance(given, list | tuple) else [given]
        if not several:
            raise ValueError(f"Arrays: {field!r} is a list without arrays")
        parts = run_blocking(lambda: self._open_all(field, several, axis))
        for part in parts:
            if isinstance(part, list) or isinstance(part, SparseMatrix) != isinstance(parts[0], SparseMatrix):
                hint = 'adata.obs[name].astype("category")'
                raise ValueError(
                    f"Arrays: {field!r} has matrices beside arrays, or texts, which need categories: {hint}"
                )
            if self._decode_cf and isinstance(part, ChunkedArray):
                part.scaling = scaling_of(part)
        if any(part in self._categories_of for part in parts):
            self.categories[field] = cells.place_categories(field, parts, [*map(self._categories_of.get, parts)])
        if any(part in self._columns_of for part in parts):
            names = [*map(self._columns_of.get, parts)]
            self.columns[field] = cells.place_columns(field, parts, names, self._join, chosen)
        self._categories_of, self._columns_of = {}, {}  # a source is pickled
        return parts

    def coordinate(self, parts: Sequence[Any], axis: Any) -> list[NDArray[Any]] | None:
        """Return the coordinate of an axis, by name or number, of each of some arrays; ``None`` if it has none.

        Raises:
            ValueError: It is damaged, or has another length than the axis.
        """
        dims = getattr(parts[0], "dims", None) or ()
        number = dims.index(axis) if axis in dims else axis
        if number not in range(len(dims)):
            return None
        found = run_blocking(lambda: run_all([self._coordinate(part, number) for part in parts]))
        return None if any(values is None for values in found) else found  # type: ignore[return-value]

    async def _coordinate(self, part: ChunkedArray, number: int) -> NDArray[Any] | None:
        axis, size = (part.dims or ())[number], part.shape[number]
        values = path = part.coordinates.get(axis)
        if isinstance(path, str):
            # Of most stores nobody can list what there is.
            unknown = [ValueError] * (not part.local and "::" not in path)
            values = None
            with contextlib.suppress(FileNotFoundError, *unknown):
                values = (await self._nodes(path))[""]
            if isinstance(values, ChunkedArray):
                values.scaling = scaling_of(values)
                values = times(await read_all(values), values.attributes)
            if values is not None and getattr(values, "dtype", np.dtype(object)).kind in "OS":
                values = np.array([text(each) for each in values])
        if values is not None and values.shape != (size,):
            raise ValueError(f"{path} has the shape {values.shape}, and {part.name} {size} places along {axis!r}")
        return values

    def sort(self, fields: Mapping[str, list[Any]], arrays: Mapping[str, Any], axis: Any) -> None:
        """Put the files of globs in the order of a coordinate that ascends, if all joined fields are such files."""
        joined = [name for name, parts in fields.items() if len(parts) > 1]
        if any(isinstance(arrays[name], list | tuple) or "*" not in os.fspath(arrays[name]) for name in joined):
            return
        with contextlib.suppress(IndexError, OSError, ValueError):  # nobody needs a coordinate for the order of names
            found = [self.coordinate(fields[name], axis) or [] for name in joined]
            firsts = [[each[0] for each in values if each[0] <= each[-1]] for values in found]
            if all(len(each) == len(fields[name]) for name, each in zip(joined, firsts, strict=True)):
                for name, each in zip(joined, firsts, strict=True):
                    fields[name][:] = [fields[name][at] for at in np.argsort(np.array(each), kind="stable")]

    async def _open_all(self, field: str, several: Sequence[Any], axis: Any) -> list[Any]:
        found = [each for given in several for each in (_expand(given) if _is_path(given) else [given])]
        total = len(found)
        progress = LoadProgress("opening arrays", "arrays", total, lambda done: f"opened {done} of {total} arrays")

        async def open_one(each: Any) -> Any:
            opened_one = await self._open(field, each)
            var = _MATRIX.sub(r"\1var", path := getattr(opened_one, "name", ""))
            if var != path and axis != 1 and opened_one not in self._columns_of:
                await self._name_columns(field, opened_one, var)
            progress.add()
            return opened_one

        with progress:
            parts = await run_all(map(open_one, found))
        return [part for each in parts for part in (each if isinstance(each, tuple) else (each,))]

    async def _open(self, field: str, given: Any) -> Any:
        """Return an array, a matrix, a list of texts, or a tuple of the images of a plate or a well."""
        if not _is_path(given):
            return await self._adopt(field, given)
        nodes = await self._nodes(os.fspath(given))
        node = nodes[""]
        if not isinstance(node, dict):
            return node

        async def child(name: str) -> Any:
            known = nodes.get(name)
            return await self._open(field, f"{str(given).rstrip('/')}/{name}") if known is None else known

        kind = node.get("encoding-type")
        if "matrix::" in node:  # of a whole file
            return await self._open(field, f"{str(given).removesuffix('::')}::{node['matrix::']}")
        if kind in (inner := {"anndata": "X", "nullable-string-array": "values"}):
            return await child(inner[kind])
        if kind in ("nullable-integer", "nullable-boolean"):
            values, missing = [await read_all(await child(name)) for name in ("values", "mask")]
            return opened(cells.filled(values, missing), str(given))
        is_10x = {"barcodes", "indptr", "shape"} <= nodes.keys()
        if is_10x or kind in ("csr_matrix", "csc_matrix"):
            shape = (await read_all(nodes["shape"]))[::-1] if is_10x else node.get("shape", ())
            parts = [await child(name) for name in ("indptr", "data", "indices")]
            found = await self._matrix(str(given), np.asarray(shape).tolist(), kind == "csc_matrix", *parts)
            if is_10x:
                names = await child("gene_names" if "gene_names" in nodes else "features/name")
                self._columns_of[found] = cells.unique_names(await _texts(names))
            return found
        if kind == "categorical":
            names, codes = await _texts(await child("categories")), await child("codes")
            self._categories_of[codes] = names
            return codes
        image = node.get("ome", node)
        if groups := {"plate", "well"} & image.keys():
            return await self._images(given, image, child, *groups)
        if "multiscales" in image:
            try:
                scales = image["multiscales"][0]
                path, dims = scales["datasets"][self._scale]["path"], tuple(axis["name"] for axis in scales["axes"])
            except (IndexError, KeyError, TypeError):
                raise ValueError(f"{given} has no scale {self._scale!r}, only {image['multiscales']}") from None
            found = await child(path)
            found.dims = found.dims or dims
            return found
        inside = sorted(name for name in nodes if name and not name.startswith((".", "zarr.json")))
        raise ValueError(f"{given} is {f'a {kind}' if kind else 'a group'}: name an array in it; there are {inside}")

    async def _matrix(self, name: str, shape: Any, by_column: bool, starts: Any, values: Any, columns: Any) -> Any:
        """Return a matrix of a file by its parts, which are those of rows or of columns."""
        try:
            lines, across = shape[::-1] if by_column else shape
            starts = (await read_all(starts)).astype(np.int64, casting="same_kind")
            fits = len(starts) == lines + 1 and not starts[0] and not (np.diff(starts) < 0).any() and across >= 0
            fits &= values.shape == columns.shape == (starts[-1],) and columns.dtype.kind in "iu"
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(f"{name}: its rows do not fit its values: it is damaged")
        columns.limit = across
        if not by_column:
            return SparseMatrix(name, across, values, columns, starts)
        cells.check_memory(name, values, columns)
        read = [await read_all(each) for each in (columns, values)]
        return await asyncio.to_thread(cells.rows_of_columns, name, shape, starts, *read)

    async def _images(self, given: Any, attributes: Any, child: Any, kind: str) -> tuple[Any, ...]:
        """Return the images of a plate or a well, in the order of its metadata."""
        try:
            paths = [each["path"].strip("/") for each in attributes[kind]["wells" if kind == "plate" else "images"]]
        except (AttributeError, KeyError, TypeError):
            paths = []
        if not paths:
            raise ValueError(f"{given} is a {kind} without images, or with damaged metadata: {attributes[kind]!r}")
        found = list[Any]()
        for path, inner in zip(paths, await run_all(map(child, paths)), strict=True):
            for part in inner if isinstance(inner, tuple) else [inner]:
                part.label = f"{path}/{part.label}".rstrip("/")
                found.append(part)
        return tuple(found)

    async def _nodes(self, path: str) -> dict[str, Any]:
        """Return the array at a path, under the name ""; or the attributes of the group there, and what is in it."""
        file, two_colons, inner = path.partition("::")
        is_hdf5 = two_colons or PurePath(file.partition("?")[0]).suffix.lower() in HDF5_FILES
        if is_hdf5 or await asyncio.to_thread(os.path.isfile, file):
            return await open_hdf5(self._finder.shard(file), inner.strip("/"))
        with naming_file(file):
            nodes = await open_zarr(ObjectReader(file.rstrip("/"), **self._storage))
        is_folder = isinstance(nodes[""], dict) and await asyncio.to_thread(os.path.isdir, file)
        return {**dict.fromkeys(await asyncio.to_thread(os.listdir, file) if is_folder else ()), **nodes}

    async def _name_columns(self, field: str, part: Any, var: str) -> None:
        """Find the names of the columns of a matrix in the layout of AnnData."""
        try:
            nodes = await self._nodes(var)
            index = nodes[""]["_index"]
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            return  # the columns have no names
        names = await _texts(nodes.get(index) or await self._open(field, f"{var}/{index}"))
        if [len(names)] == ([part.width] if isinstance(part, SparseMatrix) else [*part.shape[1:]]):
            self._columns_of[part] = names

    async def _adopt(self, field: str, given: Any) -> Any:
        values, kinds = given, _kinds_of(given)
        if {"anndata.AnnData", "anndata.Raw"} & {*kinds}:
            part = await self._adopt(field, given.X)
            self._columns_of[part] = [*map(str, given.var_names)]
            return part
        if "anndata.BaseCompressedSparseDataset" in kinds:  # of a file that is opened
            group = given.group
            is_hdf5 = "h5py.Group" in _kinds_of(group)
            path = f"{group.file.filename}::{group.name}" if is_hdf5 else os.path.join(group.store.root, group.path)
            return await self._open(field, path)
        if {"scipy.spmatrix", "scipy.sparray"} & {*kinds}:
            rows = given.tocsr()
            data, columns = (opened(each[: rows.indptr[-1]], kinds[0]) for each in (rows.data, rows.indices))
            columns.limit = rows.shape[1]
            return SparseMatrix(kinds[0], rows.shape[1], data, columns, rows.indptr.astype(np.int64))
        if "pandas.Categorical" in kinds or ("pandas.Series" in kinds and hasattr(given, "cat")):
            codes = getattr(given, "cat", given)
            part = opened(np.asarray(codes.codes), str(getattr(given, "name", None) or kinds[0]))
            self._categories_of[part] = codes.categories.tolist()
            return part
        if "pandas.Series" in kinds and (stored := getattr(given.dtype, "numpy_dtype", None)):
            given = values = cells.filled(given.to_numpy(stored, na_value=0), given.isna().to_numpy())
        if {"xarray.DataArray", "xarray.Variable"} & {*kinds}:  # of lazy ones, data would read all
            values = (given if given.chunks else given[(slice(0),) * given.ndim]).data
        values = getattr(values, "_meta", values)  # what chunks of dask are
        is_plain = isinstance(values, np.ndarray | np.generic) and not isinstance(values, np.ma.MaskedArray)
        if not is_plain and not {"h5py.Dataset", "h5py.AsTypeView", "zarr.Array", "pandas.Series"} & {*kinds}:
            known = "paths, URLs and arrays of zarr, h5py, xarray, dask, scipy, AnnData, pandas and NumPy without masks"
            hint = "pass its path, 'file.nc::x', a column, obs[name], or make it one of NumPy, as x.filled(...) does"
            raise TypeError(f"Arrays takes {known}, not {_kinds_of(values)[0]}: {hint}")
        if "h5py.Dataset" in kinds:
            if given.file.driver != "sec2":  # in memory, for example
                return opened(given, given.name, given.chunks, attributes=attributes_of(given))
            if given.file.mode != "r":
                given.file.flush()
            return await self._open(field, f"{given.file.filename}::{given.name}")
        if "zarr.Array" in kinds:
            store, kind = given.store, type(given.store).__name__
            if kind == "LocalStore":
                return await self._open(field, os.path.join(store.root, given.path))
            if kind == "ObjectStore":
                return (await open_zarr(ObjectReader(given.path, store=store.store)))[""]
            return opened(given, given.name or kind, given.chunks, **described(given.metadata))
        array, coords = np.asarray(given) if "pandas.Series" in kinds else given, getattr(given, "coords", {})
        found = {str(axis): np.asarray(coords[axis]) for axis in getattr(given, "dims", ()) if axis in coords}
        return opened(array, str(getattr(given, "name", None) or kinds[0]), coordinates=found)


def _kinds_of(given: Any) -> list[str]:
    """Return the package and the name of the class of an object, and of the classes that it derives from."""
    return [f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(given).__mro__]


async def _texts(given: Any) -> list[str]:
    """Return the texts of an array, or of a list."""
    return [text(each) for each in (given if isinstance(given, list) else (await read_all(given)).tolist())]


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
        # Beside the arrays of a group are its metadata.
        matches = sorted(each for each in glob.glob(file, recursive=True) if not each.endswith("zarr.json"))
        if not matches:
            raise FileNotFoundError(f"no array matches {file!r}")
        found += [f"{match}{two_colons}{inner}" for match in matches]
    return found
