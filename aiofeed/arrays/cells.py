"""Matrices of single cells: columns of other names over files, matrices in compressed columns, and missing values."""

from __future__ import annotations

import asyncio
import itertools
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
        return self.decode(data, chunk)

    def content_parts(self, most: int) -> list[Content]:
        """Return those of the array."""
        return self.inner.content_parts(most)


def place_columns(
    field: str, parts: list[Any], known: Sequence[list[str] | None], join: str | None, chosen: Any
) -> list[str] | None:
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
    names: list[Any] = [each for each in known if each is not None]
    if not names:
        return None
    if chosen is not None and (isinstance(chosen, str | slice | int) or not len(chosen)):
        raise TypeError(f'Arrays(select=): "var" is a list of names of columns, got {chosen!r}')
    if len(names) < len(parts) and (join or chosen is not None):
        lacking = next(part for part, each in zip(parts, known, strict=True) if each is None)
        raise ValueError(f"Arrays: {lacking.name} has no names of columns, which join= and select= need")
    wanted, other = names[0], next((at for at, each in enumerate(known) if each not in (None, names[0])), None)
    if other is not None and join is None and chosen is None:
        hint = 'pass join="inner" or "outer", select={"var": names}, or write them alike, adata[:, names]'
        raise ValueError(
            f"{parts[other].name} has columns of other names, by var, or in another order than other parts of "
            f"{field!r}: {hint}"
        )
    if other is not None and join == "inner":
        common = set(names[0]).intersection(*names)
        wanted = [name for name in names[0] if name in common]
    elif other is not None and join == "outer":
        wanted = sorted(set(itertools.chain(*names)))
    if chosen is not None:
        for part, each in zip(parts, names, strict=True):
            if join != "outer" and (missing := sorted({*map(str, chosen)} - {*each})):
                hint = 'or in another file; join="outer" fills zeros'
                raise ValueError(f"Arrays(select=): {part.name} has no column {missing[0]!r}, {hint}")
        wanted = [*map(str, chosen)]
    if not wanted or not {*wanted} & {*itertools.chain(*names)}:
        raise ValueError(f"Arrays(join={join!r}): the parts of {field!r} have no column in common")
    is_sparse = isinstance(parts[0], SparseMatrix)
    mixed = is_sparse and len({part.columns.dtype for part in parts}) > 1
    if all(each == wanted for each in names) and not mixed:
        return wanted
    for each in [wanted, *names]:
        if len({*each}) < len(each):
            twice = next(name for name in each if each.count(name) > 1)
            raise ValueError(f"Arrays: {field!r} has several columns {twice!r}: adata.var_names_make_unique()")
    at = {name: number for number, name in enumerate(wanted)}
    for number, (part, each) in enumerate(zip(parts, known, strict=True)):
        to = np.array([at.get(name, len(wanted)) for name in (wanted if each is None else each)], np.int32)
        if is_sparse:
            part.width, part.columns.places = len(wanted), to
        else:
            shape, rows = (part.shape[0], len(wanted)), part.chunks[0]
            same: Any = {"dims": part.dims, "reader": part.reader, "metadata": part.metadata, "to": to, "inner": part}
            dtype = part.sample_dtype
            parts[number] = PlacedColumns(name=part.name, shape=shape, chunks=(rows, shape[1]), dtype=dtype, **same)
    return wanted


def place_categories(field: str, parts: Sequence[Any], known: Sequence[list[str] | None]) -> list[str]:
    """Number categories as in their union, in the order in which they occur, as pandas does; return it.

    Raises:
        ValueError: Some parts have categories and others have none.
    """
    for part, names in zip(parts, known, strict=True):
        if names is None:
            raise ValueError(f"Arrays: {part.name} has no categories, unlike other parts of {field!r}")
    union = list(dict.fromkeys(name for names in known for name in names or ()))
    if any(names != union for names in known):
        at = {name: number for number, name in enumerate(union)}
        dtype = np.min_scalar_type(-max(len(union), 1))
        for part, names in zip(parts, known, strict=True):
            part.places = np.array([*map(at.__getitem__, names or ()), -1], dtype)  # -1: it is missing
    return union


def rows_of_columns(name: str, width: int, rows: int, starts: NDArray[Any], columns: Any, values: Any) -> SparseMatrix:
    """Return a matrix in compressed columns, ``csc_matrix``, as one in compressed rows."""
    of_values = np.repeat(np.arange(width, dtype=np.int32), np.diff(starts))
    order = np.argsort(columns, kind="stable")
    ends = np.cumsum(np.bincount(columns, minlength=rows))
    parts = [opened(each[order], f"{name}/{what}") for what, each in (("data", values), ("indices", of_values))]
    return SparseMatrix(name, width, parts[0], parts[1], np.append(0, ends))


def check_memory(name: str, *arrays: ChunkedArray) -> None:
    """Raise ``ValueError`` if a matrix in compressed columns does not fit into memory while its rows are made."""
    # Both orders, and the order of values.
    needed = arrays[0].shape[0] * (2 * sum(each.dtype.itemsize for each in arrays) + 8)
    if needed > (most := free_memory()):
        sizes = f"{format_bytes(needed)} to be turned into rows, and {format_bytes(most)} are free"
        raise ValueError(f"{name} is a csc_matrix, which needs {sizes}: write X.tocsr()")
    log.info("%s is a csc_matrix: sorting its values into rows takes %s", name, format_bytes(needed))


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names of which those that occur again get a number, as ``var_names_make_unique`` of anndata does."""
    found, counts, taken = list[str](), dict[str, int](), {*names}
    for name in names:
        new = name
        while name in counts and new in taken:
            counts[name] += 1
            new = f"{name}-{counts[name]}"
        counts.setdefault(name, 0)
        taken.add(new)
        found.append(new)
    return found


def filled(values: NDArray[Any], missing: NDArray[Any]) -> NDArray[Any]:
    """Return values, as float64 with NaN if some are missing."""
    return np.where(missing, np.nan, values.astype(np.float64)) if missing.any() else values
