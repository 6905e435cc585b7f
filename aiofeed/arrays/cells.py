"""Matrices of single cells: columns of other names over files, matrices in compressed columns, and missing values."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.arrays.chunked import Chunk, ChunkedArray, opened
from aiofeed.common.progress_bar import log
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.runtime.machine import free_memory
from aiofeed.kernel.sources.file_io import Content

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(eq=False)
class SparseMatrix:
    """A CSR matrix: values, their columns, and where each row begins in these."""

    name: str
    width: int
    values: ChunkedArray
    columns: ChunkedArray
    starts: NDArray[np.int64]


@dataclass(eq=False, kw_only=True)
class PlacedColumns(ChunkedArray):
    """Columns of an array at other places; a chunk has all columns of some rows, and zeros where there is none.

    Args:
        inner: The array.
        to: By column of the array, its place; those behind the end are left out.
    """

    inner: ChunkedArray
    to: NDArray[np.int32]

    def _within(self, chunk: Chunk) -> list[Chunk]:
        return [(chunk[0], at) for at in range(-(-self.inner.shape[1] // max(self.inner.chunks[1], 1)))]

    async def read(self, chunk: Chunk) -> Any:
        """Return the encoded bytes of the chunks in some rows."""
        return await asyncio.gather(*map(self.inner.read, self._within(chunk)))

    def read_now(self, chunk: Chunk) -> Any:
        """``read`` in the calling thread."""
        return [self.inner.read_now(each) for each in self._within(chunk)]

    def decode(self, data: Any, chunk: Chunk) -> Any:
        """Return the values of a chunk."""
        out = np.zeros((self.chunks[0], self.shape[1] + 1), self.dtype)
        for part, (_, at) in zip(data, self._within(chunk), strict=True):
            to = self.to[at * self.inner.chunks[1] :][: self.inner.chunks[1]]
            values = np.broadcast_to(found := self.inner.decode(part, (chunk[0], at)), found.shape or self.inner.chunks)
            out[: len(values), to] = values[:, : len(to)]
        return out[:, :-1]

    def unpack(self, data: Any, nbytes: int, chunk: Chunk) -> Any:
        """Return the values of a chunk."""
        raise NotImplementedError

    def content_parts(self, most: int) -> list[Content]:
        """Return those of the array."""
        return self.inner.content_parts(most)


def place_columns(
    field: str, parts: list[Any], known: Sequence[list[str] | None], join: str | None, chosen: Any
) -> list[str]:
    """Put the columns of matrices to the places that their names have in all; return these names.

    Args:
        field: Names the matrices in messages.
        parts: The matrices, which are replaced.
        known: The names of the columns of each; ``None``: it has none.
        join: Whether names that some lack are left out, ``"inner"``, or filled with zeros, ``"outer"``.
        chosen: The names that are wanted, in their order.

    Raises:
        TypeError: What is chosen is no list.
        ValueError: Names differ, are missing, or occur twice.
    """
    if chosen is not None and (isinstance(chosen, str | slice | int) or not len(chosen)):
        raise TypeError(f'Arrays(select=): "var" is a list of names of columns, got {chosen!r}')
    names: list[Any] = [each for each in known if each is not None]
    if len(names) < len(parts) and (join or chosen is not None):
        raise ValueError(f"Arrays: {parts[known.index(None)].name} has no names of columns for join= or select=")
    wanted: list[str] = names[0]
    everywhere, anywhere = {*wanted}.intersection(*names), set(itertools.chain(*names))
    if other := [part for part, each in zip(parts, known, strict=True) if each not in (None, wanted)]:
        if join is None and chosen is None:
            hint = 'pass join="inner" or "outer", select={"var": names}, or write them alike, adata[:, names]'
            what = f"other names, by var, or in another order than other parts of {field!r}"
            raise ValueError(f"{other[0].name} has columns of {what}: {hint}")
        wanted = sorted(anywhere) if join == "outer" else [name for name in wanted if name in everywhere]
    if chosen is not None:
        wanted = [*map(str, chosen)]
    if missing := [name for name in wanted if name not in everywhere] if join != "outer" else []:
        raise ValueError(f'Arrays(select=): {missing[0]!r} is not in all parts of {field!r}; join="outer" fills zeros')
    if anywhere.isdisjoint(wanted):
        raise ValueError(f"Arrays: the parts of {field!r} have no column in common, or none that is chosen")
    is_sparse = isinstance(parts[0], SparseMatrix)
    mixed = is_sparse and len({part.columns.dtype for part in parts}) > 1
    if all(each == wanted for each in names) and not mixed:
        return wanted
    if twice := [
        name for each in (wanted, *names) if len({*each}) < len(each) for name in each if each.count(name) > 1
    ]:
        raise ValueError(f"Arrays: {field!r} has several columns {twice[0]!r}: adata.var_names_make_unique()")
    at = {name: number for number, name in enumerate(wanted)}
    for number, (part, each) in enumerate(zip(parts, known, strict=True)):
        to = np.array([at.get(name, len(wanted)) for name in each or wanted], np.int32)
        if is_sparse:
            part.width, part.columns.places = len(wanted), to
        else:
            shape, chunks = [(rows, len(wanted)) for rows in (part.shape[0], part.chunks[0])]
            same = {name: getattr(part, name) for name in ("name", "dims", "reader", "metadata")}
            sizes: Any = {"shape": shape, "chunks": chunks, "dtype": part.sample_dtype}
            parts[number] = PlacedColumns(inner=part, to=to, **sizes, **same)
    return wanted


def place_categories(field: str, parts: Sequence[Any], known: Sequence[list[str] | None]) -> list[str]:
    """Number categories as in their union, in the order in which they occur, as pandas does; return it.

    Raises:
        ValueError: Some parts have categories and others have none.
    """
    if None in known:
        raise ValueError(f"Arrays: {parts[known.index(None)].name} has no categories, unlike other parts of {field!r}")
    union = list(dict.fromkeys(name for names in known for name in names or ()))
    if any(names != union for names in known):
        at = {name: number for number, name in enumerate(union)}
        dtype = np.min_scalar_type(-max(len(union), 1))
        for part, names in zip(parts, known, strict=True):
            part.places = np.array([*map(at.__getitem__, names or ()), -1], dtype)  # -1: it is missing
    return union


def check_memory(name: str, *arrays: ChunkedArray) -> None:
    """Raise ``ValueError`` if a matrix in compressed columns does not fit into memory while its rows are made."""
    # Both orders, and the order of values.
    needed, most = arrays[0].shape[0] * (2 * sum(each.dtype.itemsize for each in arrays) + 8), free_memory()
    if needed > most:
        sizes = f"{format_bytes(needed)} to be turned into rows, and {format_bytes(most)} are free"
        raise ValueError(f"{name} is a csc_matrix, which needs {sizes}: write X.tocsr()")
    log.info("%s is a csc_matrix: sorting its values into rows takes %s", name, format_bytes(needed))


def rows_of_columns(name: str, shape: Sequence[int], starts: NDArray[Any], places: Any, values: Any) -> SparseMatrix:
    """Return a matrix in compressed columns, ``csc_matrix``, as one in compressed rows."""
    columns, order = np.repeat(np.arange(shape[1], dtype=np.int32), np.diff(starts)), np.argsort(places, kind="stable")
    parts = [opened(each[order], f"{name}/{what}") for what, each in (("data", values), ("indices", columns))]
    ends = np.cumsum(np.bincount(places, minlength=shape[0]))
    return SparseMatrix(name, shape[1], parts[0], parts[1], np.append(0, ends))


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names of which those that occur again get a number, as ``var_names_make_unique`` of anndata does."""
    found, counts, taken = [*names], Counter[str](), {*names}
    firsts = {name: at for at, name in reversed([*enumerate(names)])}
    for at, name in enumerate(names):
        while at != firsts[name] and found[at] in taken:
            counts[name] += 1
            found[at] = f"{name}-{counts[name]}"
        taken.add(found[at])
    return found


def filled(values: NDArray[Any], missing: NDArray[Any]) -> NDArray[Any]:
    """Return values, as float64 with NaN if some are missing."""
    return np.where(missing, np.nan, values.astype(np.float64)) if missing.any() else values
