"""Columns of a table in memory: rows of numbers are gathered as arrays, other rows become Python values."""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aiofeed.kernel.core.types import Gathered, HostTensor, Located
from aiofeed.kernel.runtime.buffers import BufferLease, HostBufferPool, array
from aiofeed.shards.arrow import arrow, load_pandas

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class NoTensorsError(ValueError):
    """A column has no tensors; the message says why."""


def no_tensors(name: str, problem: str) -> str:
    """Return the message for a column without tensors."""
    return (
        f"column {name!r} {problem}, so it has no tensors: leave it out with columns=[...], pass collate_fn= or "
        f"decode=, which get rows as dicts, or data={name!r} for a decoder of this column"
    )


class NumberColumn:
    """Numbers, or arrays of numbers of one shape.

    Args:
        pieces: The rows, in one or several pieces of memory: arrays [n, ...]. Several must be contiguous.

    Raises:
        NoTensorsError: The pieces differ in shape.
    """

    def __init__(self, pieces: Sequence[NDArray[Any]]) -> None:
        pieces = [piece for piece in pieces if len(piece)] or list(pieces[:1])
        self.shape: tuple[int, ...] = pieces[0].shape[1:]
        self.dtype: np.dtype[Any] = pieces[0].dtype
        for piece in pieces:
            if piece.shape[1:] != self.shape:
                raise NoTensorsError(f"has arrays of different shapes, {list(self.shape)} and {list(piece.shape[1:])}")
        self._pieces = pieces  # the owners of the memory
        self._ends = list(accumulate(map(len, pieces)))
        self._width = int(np.prod(self.shape, dtype=np.int64))
        self.row_bytes: int = self._width * self.dtype.itemsize
        self._starts: NDArray[np.int64] | None = None
        if len(pieces) == 1:
            self._data = pieces[0]
        elif (spanned := _span(pieces, self._width)) is None:
            self._data = np.concatenate(pieces)
        else:
            self._data, self._starts = spanned
            self._firsts = np.array([0, *self._ends])

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """The shape of a row; ``None`` if that is not known, as of an empty column of lists."""
        return None if 0 in self.shape else self.shape

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the length of each row, if rows are arrays."""
        return np.full(len(rows), self.shape[0]) if self.shape else None

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return rows in memory of their own."""
        if self._starts is None:
            # For 20,000 rows of 16 floats twice as fast as indexing; of an array with gaps it would copy all.
            return np.take(self._data, rows, axis=0) if self._data.flags.c_contiguous else self._data[rows]
        numbers = np.searchsorted(self._firsts, rows, side="right") - 1
        places = self._starts[numbers] + (rows - self._firsts[numbers]) * self._width
        taken: NDArray[Any] = self._data[places]
        return taken.reshape(len(rows), *self.shape)

    def take_into(self, out: NDArray[Any], rows: NDArray[np.int64]) -> None:
        """Write rows into ``out``."""
        if self._starts is None and self._data.flags.c_contiguous:
            np.take(self._data, rows, axis=0, out=out, mode="clip")  # "raise" would make a copy first
        else:
            out[...] = self.take(rows)

    def value(self, row: int) -> Any:
        """Return a row as a Python number or an array, in a fifth of the time of ``values``."""
        number = bisect_right(self._ends, row)
        found = self._pieces[number][row - self._ends[number]]  # counted from the end of the piece
        return found.copy() if self.shape else found.item()

    def values(self, rows: NDArray[np.int64]) -> list[Any]:
        """Return rows as Python numbers or arrays."""
        taken = self.take(rows)
        return list(taken) if self.shape else taken.tolist()


def _span(pieces: Sequence[NDArray[Any]], width: int) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Return one array over the memory of all pieces, of windows of ``width`` numbers, and where each piece starts.

    A batch is then one gather, however many pieces a table has: Hugging Face's have one per 1,000 rows. 256 rows of 16
    floats of 1,000 pieces take 15 us; pyarrow's ``take``, which joins the pieces, 26 ms. Memory between the pieces may
    belong to others or not exist, and is never read. Returns ``None`` if the pieces have no common alignment.
    """
    itemsize = pieces[0].dtype.itemsize
    addresses = np.array([piece.__array_interface__["data"][0] for piece in pieces])
    low = int(addresses.min())
    nbytes = max(int(address) + piece.nbytes for address, piece in zip(addresses, pieces, strict=True)) - low
    if not width or ((addresses - low) % itemsize).any() or not all(piece.flags.c_contiguous for piece in pieces):
        return None
    memory = np.frombuffer(memoryview((ctypes.c_byte * nbytes).from_address(low)), pieces[0].dtype)
    memory.flags.writeable = False
    return np.lib.stride_tricks.sliding_window_view(memory, width), (addresses - low) // itemsize


def joined_memory(pieces: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Return one array over the memory of arrays of numbers, and where each begins; ``None`` if they do not fit."""
    if len(pieces) == 1:
        return pieces[0], np.zeros(1, np.int64)
    if len({piece.dtype for piece in pieces}) > 1 or (spanned := _span(pieces, 1)) is None:
        return None
    return spanned[0][:, 0], spanned[1]


class ValueColumn:
    """A column of an Arrow table whose rows are Python values.

    A list becomes an array if its own numbers have a shape, whatever other rows are, and a column of Hugging Face's
    ``Image`` or ``Audio`` the bytes of its files.

    Args:
        column: An arrow ``ChunkedArray``.
        problem: Why it has no tensors.
    """

    def __init__(self, column: Any, problem: str) -> None:
        self.problem = problem
        self.column = column
        self._ends = list(accumulate(map(len, column.chunks)))
        self._checked: set[int] = set()
        self._value = _as_python
        if is_encoded(column.type):
            self._value = _file
        elif is_list(column.type) or isinstance(column.type, arrow().BaseExtensionType):
            self._value = _as_array

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """The shape of a row; ``None`` if it varies or has parts."""
        return None if example_of(self.column.type) == [0] else ()

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return ``None``: only decoding tells."""
        return None

    def value(self, row: int) -> Any:
        """Return a row; ``None`` for null."""
        number = bisect_right(self._ends, row)
        if number not in self._checked:
            # Of a damaged file, arrow would read beyond the memory of the column.
            self.column.chunk(number).validate(full=True)
            self._checked.add(number)
        return self._value(self.column, int(row))

    def values(self, rows: NDArray[np.int64]) -> list[Any]:
        """Return rows; ``None`` for null."""
        return [self.value(row) for row in rows.tolist()]


class ListColumn(ValueColumn):
    """A column of lists of numbers, of which rows are parts of one array.

    Args:
        column: An arrow ``ChunkedArray`` of lists.
        problem: Why it has no tensors.

    Raises:
        NoTensorsError: It has other values, nulls, or is damaged.
    """

    def __init__(self, column: Any, problem: str) -> None:
        super().__init__(column, problem)
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        varying = is_list(column.type) and not arrow().types.is_fixed_size_list(column.type)
        if not varying or not chunks or column.null_count:
            raise NoTensorsError(problem)
        for chunk in chunks:
            chunk.validate(full=True)  # arrow would read beyond the memory of the column
        offsets, numbers = [chunk.offsets.to_numpy() for chunk in chunks], [_array(chunk.flatten()) for chunk in chunks]
        if numbers[0].ndim > 1:
            raise NoTensorsError(problem)
        self._firsts = NumberColumn([each[:-1] for each in offsets])
        self._stops = NumberColumn([each[1:] for each in offsets])
        self._chunk_ends = np.cumsum(list(map(len, chunks)))
        # Where each chunk's numbers begin.
        starts = np.cumsum([0, *map(len, numbers[:-1])])
        self.flat: NDArray[Any]
        self.flat, starts = joined_memory(numbers) or (np.concatenate(numbers), starts)
        self.dtype: np.dtype[Any] = self.flat.dtype
        self._owners = numbers
        self.nbytes: int = sum(each.nbytes for each in numbers)
        self._moves = starts - np.array([each[0] for each in offsets])

    def bounds(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where rows begin in ``flat``, and how many numbers they have."""
        starts = self._firsts.take(rows).astype(np.int64)
        counts = self._stops.take(rows) - starts
        return starts + self._moves[np.searchsorted(self._chunk_ends, rows, side="right")], counts

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of rows."""
        return self.bounds(rows)[1]

    def values(self, rows: NDArray[np.int64]) -> list[Any]:
        """Return rows as arrays."""
        starts, counts = self.bounds(rows)
        pairs = zip(starts.tolist(), (starts + counts).tolist(), strict=True)
        return [self.flat[start:stop].copy() for start, stop in pairs]


def _as_python(column: Any, row: int) -> Any:
    value = column[row].as_py()
    # Before version 21, arrow gives half-precision numbers as numpy's.
    return float(value) if isinstance(value, np.float16) else value


def _as_array(column: Any, row: int) -> Any:
    try:
        found = _array(column.slice(row, 1).chunk(0))[0]
        return found.copy() if found.shape else found.item()
    except NoTensorsError:
        return column[row].as_py()


def _file(column: Any, row: int) -> bytes | None:
    scalar = column[row]
    if not scalar.is_valid:
        return None
    if (data := scalar["bytes"].as_py()) is not None:
        return data  # type: ignore[no-any-return]
    path = scalar["path"].as_py()
    return None if path is None else Path(path).read_bytes()


class Columns:
    """Columns of rows in memory.

    Args:
        columns: By name, an arrow ``ChunkedArray``, or a numpy array of numbers.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns: dict[str, NumberColumn | ValueColumn] = {
            name: _column(column) for name, column in columns.items()
        }

        self.has_values: bool = any(isinstance(column, ValueColumn) for column in self.columns.values())

    @classmethod
    def of(cls, table: Any) -> Columns:
        """Return the columns of an Arrow table."""
        return cls(dict(zip(table.column_names, table.columns, strict=True)))

    def take(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return rows of all columns as arrays.

        Raises:
            NoTensorsError: A column has none.
        """
        return {name: column.take(rows) for name, column in self._numbers()}

    def _numbers(self) -> Iterator[tuple[str, NumberColumn]]:
        for name, column in self.columns.items():
            if isinstance(column, ValueColumn):
                raise NoTensorsError(no_tensors(name, column.problem))
            yield name, column

    def blocks(self, rows: NDArray[np.int64]) -> Blocks:
        """Return rows of all columns, those of one dtype and shape together, which one call copies later.

        Raises:
            NoTensorsError: A column has none.
        """
        alike: dict[Any, dict[str, NumberColumn]] = {}
        for name, column in self._numbers():
            alike.setdefault((column.dtype, column.shape), {})[name] = column
        blocks = []
        for (dtype, shape), columns in alike.items():
            block = np.empty((len(columns), len(rows), *shape), dtype)
            for part, column in zip(block, columns.values(), strict=True):
                column.take_into(part, rows)
            blocks.append((list(columns), block))
        return blocks

    def rows(self, rows: NDArray[np.int64], without: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return rows as dicts, without some columns."""
        names = [name for name in self.columns if name not in without]
        columns = [self.columns[name].values(rows) for name in names]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


Blocks: TypeAlias = "list[tuple[list[str], NDArray[Any]]]"
"""Rows of columns of one dtype and shape: their names, and an array [columns, rows, ...]."""


class GatheredRows(Gathered):
    """The rows of a batch, which are written into arrays of its columns, those of one dtype and shape in one array.

    They are written in the order in which they come: to put them into their places at the end, by one gather of all
    columns, takes a fifth of the time that it takes to scatter some rows of each row group.

    Args:
        names: The columns, in the order of the batch.
        count: The number of rows.
        memory: Where the arrays are, until the batch is made.
    """

    def __init__(self, names: Sequence[str], count: int, memory: BufferLease) -> None:
        super().__init__(count)
        self.nbytes: int = 0
        self.seconds: float = 0.0
        self.cpu_seconds: float = 0.0
        self._names = names
        self._memory = memory
        self._lock = threading.Lock()
        self._blocks: Blocks = []
        self._places = np.empty(count, np.int64)  # of the rows that have come
        self._written = 0

    def __iter__(self) -> Iterator[Any]:
        batch, _ = self.batch(HostBufferPool(0))
        columns = Columns({name: tensor.memory for name, tensor in batch.items()})
        return iter([(columns, row) for row in range(self._count)])

    def put(
        self, places: NDArray[np.int64], blocks: Blocks, nbytes: float = 0, seconds: float = 0, cpu_s: float = 0
    ) -> None:
        """Write rows of all columns that have the given places; from any thread.

        ``nbytes``, ``seconds`` and ``cpu_s``: what was read for them, the time that it took, and on the processor.

        Raises:
            NoTensorsError: They differ in shape from rows that came before.
        """
        with self._lock:
            self._blocks = self._blocks or _like(blocks, self._count, self._memory)
            at = slice(self._written, self._written + len(places))
            self._written = at.stop
            self.nbytes += int(nbytes)
            self.seconds += seconds
            self.cpu_seconds += cpu_s
        self._places[at] = places
        outs = self._blocks
        if [names for names, _ in outs] != [names for names, _ in blocks]:
            # Of a file with its columns in another order, or rows of other shapes or dtypes.
            found = _by_name(blocks)
            outs = [([name], out[None]) for name, out in _by_name(outs).items()]
            blocks = [(names, found[names[0]][None]) for names, _ in outs]
        for (names, out), (_, block) in zip(outs, blocks, strict=True):
            if out.shape[2:] != block.shape[2:]:
                shapes = f"{list(out.shape[2:])} and {list(block.shape[2:])}"
                raise NoTensorsError(no_tensors(names[0], f"has arrays of different shapes, {shapes}"))
            out[:, at] = block

    def batch(self, lease: BufferLease) -> tuple[dict[str, HostTensor], int]:
        """Return the tensors of the columns, and their bytes."""
        rows = np.empty_like(self._places)
        rows[self._places] = np.arange(self._count)
        batch, nbytes, columns = {}, 0, _by_name(self._blocks)
        for name in self._names:
            # Arrays of their own: one that the user keeps does not keep the others.
            out = array(lease, columns[name].shape, columns[name].dtype)
            batch[name] = HostTensor(np.take(columns[name], rows, axis=0, out=out, mode="clip"), pinned=lease.pinned)
            nbytes += out.nbytes
        return batch, nbytes


def _by_name(blocks: Blocks) -> dict[str, NDArray[Any]]:
    return {name: column for names, block in blocks for name, column in zip(names, block, strict=True)}


def _like(blocks: Blocks, count: int, memory: BufferLease) -> Blocks:
    """Return empty blocks for ``count`` rows."""
    return [(names, array(memory, (len(names), count, *block.shape[2:]), block.dtype)) for names, block in blocks]


class GatheredLists(Gathered):
    """Rows of columns of lists of numbers, of which parts are gathered.

    Args:
        columns: By the names that they have in a batch, columns or others with ``flat``, ``dtype`` and ``bounds``.
        rows: The rows.
        samples: Returns the rows as samples.
    """

    def __init__(
        self, columns: Mapping[Any, Any], rows: NDArray[np.int64], samples: Callable[[], Sequence[Any]]
    ) -> None:
        super().__init__(len(rows))
        self._columns, self._rows, self._samples = columns, rows, samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples())

    def located(self, pieces: NDArray[np.int64], /) -> dict[Any, Located] | None:
        """Return for each column where parts of rows begin; ``None`` if a row has another length than planned."""
        found, rows = {}, self._rows[pieces[:, 0]]
        for name, column in self._columns.items():
            starts, lengths = column.bounds(rows)
            if (lengths != pieces[:, 4]).any():
                return None
            found[name] = column.flat, starts + pieces[:, 2], column.dtype
        return found


def collate_rows(samples: Sequence[tuple[Columns, int]]) -> dict[str, torch.Tensor]:
    """Return a batch of rows, each given as its columns and its number in them.

    Raises:
        NoTensorsError: A column has none, or its rows differ in shape.
    """
    import torch

    found, numbers = zip(*samples, strict=True)
    if found.count(found[0]) == len(found):  # rows of a table in memory
        taken: dict[str, Any] = found[0].take(np.array(numbers))  # with texts as lists
        return {name: torch.from_numpy(part) if isinstance(part, np.ndarray) else part for name, part in taken.items()}
    groups: dict[Columns, tuple[list[int], list[int]]] = {}
    for place, (columns, row) in enumerate(samples):
        places, rows = groups.setdefault(columns, ([], []))
        places.append(place)
        rows.append(row)
    memory = HostBufferPool(0)
    gathered = GatheredRows(list(found[0].columns), len(samples), memory)
    for columns, (places, rows) in groups.items():
        gathered.put(np.array(places), columns.blocks(np.array(rows)))
    batch, _ = gathered.batch(memory)
    return {name: torch.from_numpy(column.memory) for name, column in batch.items()}


def _column(column: Any) -> NumberColumn | ValueColumn:
    if isinstance(column, np.ndarray):
        return NumberColumn([column])
    try:
        # Not array([], type), which some types lack.
        return NumberColumn([_array(chunk) for chunk in column.chunks or [arrow().nulls(0, column.type)]])
    except NoTensorsError as error:
        # Of a damaged column, each row has its error.
        with suppress(NoTensorsError, arrow().ArrowException):
            return ListColumn(column, str(error))
        return ValueColumn(column, str(error))


def empty_column(kind: Any) -> NumberColumn | ValueColumn:
    """Return a column of an Arrow type without rows."""
    return _column(arrow().chunked_array([], kind))


def _array(chunk: Any) -> NDArray[Any]:
    """Return an Arrow array as [n, ...], in the same memory unless it is bools.

    Raises:
        NoTensorsError: It is not possible.
    """
    types, shape = arrow().types, None
    if types.is_dictionary(chunk.type) and types.is_primitive(chunk.type.value_type):
        chunk = chunk.dictionary_decode()
    kind = chunk.type
    if chunk.null_count:
        raise NoTensorsError("has null values")
    if isinstance(kind, arrow().FixedShapeTensorType):
        # Not to_numpy_ndarray(), which has no bools, and gives other values for some permutations.
        axes = list(kind.permutation or range(len(kind.shape)))
        if [axes[axis] for axis in axes] != sorted(axes):
            # Arrow's specification and pyarrow's from_numpy_ndarray() mean inverse permutations.
            raise NoTensorsError(f"has tensors whose axes {axes} other programs take for their inverse")
        return _array(chunk.storage).reshape(len(chunk), *kind.shape).transpose(0, *(1 + axis for axis in axes))
    if str(kind) == "extension<arrow.bool8>":
        return chunk.storage.to_numpy() != 0  # type: ignore[no-any-return]
    if isinstance(kind, arrow().BaseExtensionType):
        # Hugging Face's Array2D has a shape, of which the first size may be unknown.
        shape = getattr(kind, "shape", None)
        chunk = chunk.storage
    is_bits = types.is_boolean(chunk.type)
    if is_bits or types.is_integer(chunk.type) or types.is_floating(chunk.type):
        load_pandas()
        return chunk.to_numpy(zero_copy_only=not is_bits)  # type: ignore[no-any-return]
    if not is_list(chunk.type):
        what = "has encoded files" if is_encoded(kind) else f"has the type {kind}"
        raise NoTensorsError(what)
    values = _array(chunk.flatten())
    if types.is_fixed_size_list(chunk.type):
        lengths = [chunk.type.list_size]
    else:
        each = np.diff(chunk.offsets.to_numpy())
        lengths = sorted({int(each.min()), int(each.max())}) if len(each) else [0]
    if len(lengths) > 1:
        raise NoTensorsError(f"has lists of different lengths, {lengths[0]} and {lengths[1]}")
    return values.reshape(len(chunk), *(shape if shape and None not in shape else (lengths[0], *values.shape[1:])))


def take_rows(table: Any, rows: Any) -> Any:
    """Return rows of an Arrow table, also of types that arrow's ``take`` does not know, such as views of texts."""
    try:
        return table.take(rows)
    except arrow().ArrowNotImplementedError:
        return arrow().concat_tables([table.slice(row, 1) for row in rows])


def is_list(kind: Any) -> bool:
    """Return whether a type is one of lists."""
    types = arrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def example_of(kind: Any) -> Any:
    """Return an example of values of a type: ``[0]`` if they may be or have lists of numbers, a number or a text."""
    types = arrow().types
    if (types.is_nested(kind) or isinstance(kind, arrow().BaseExtensionType)) and not is_encoded(kind):
        return [0]
    return 0 if types.is_primitive(kind) else ""


def list_lengths(column: Any) -> NDArray[np.int64] | None:
    """Return the lengths of the lists of numbers in an Arrow column; ``None`` for others, or if there are nulls."""
    return _column(column).lengths(np.arange(len(column)))


def is_encoded(kind: Any) -> bool:
    """Return whether a type is the one of Hugging Face's ``Image`` and ``Audio``: encoded bytes, or a path."""
    types = arrow().types
    return types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}
