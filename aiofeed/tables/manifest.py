"""``Manifest``: samples that are listed in a CSV, JSON Lines or Parquet file, as arrays in place of Python objects."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.common.expanded import check_expanded
from aiofeed.common.foreign_names import check_foreign_name
from aiofeed.common.parts import in_order
from aiofeed.common.unreadable import naming_file
from aiofeed.kernel.core.formatting import redacted
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_callable, check_positive_int, explain_arguments
from aiofeed.kernel.sources.file_io import MAX_BYTES, Content, ReadRules, check_path, evenly, open_file, read_file
from aiofeed.kernel.sources.files import Files, path_of
from aiofeed.objects.keys import KeyPacker, PackedKeys
from aiofeed.objects.reader import ObjectReader, read_ranges, run_all
from aiofeed.objects.samples import ObjectList, objects_of
from aiofeed.objects.urls import scheme_of, split_url
from aiofeed.shards.arrow import arrow
from aiofeed.tables.columns import ValueColumn, is_list

# The usual names of the column of keys; Hugging Face's metadata files have "file_name".
KEYS = ("path", "file_name", "url", "key", "filename")
_FORMATS = {
    **{".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"},
    **{".parquet": "parquet", ".pq": "parquet"},
}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_URL = "^[a-zA-Z][a-zA-Z0-9+.-]+://"
# Entries that may lead out of a root.
_OUTWARD = rf"{_URL}|^$|\x00|%00|%2[eEfF]|%5[cC]|^[/\\]|^[a-zA-Z]:|(^|[/\\])\.\.([/\\]|$)"
# Floats have all whole numbers up to this one, and not those of 16 digits.
_EXACT = 1 << 53
# A field in quotation marks, in which these are doubled; one that is not closed ends with the bytes.
_QUOTED = rb'"(?<![^%b\r\n]")[^"]*(?:""[^"]*)*(?:"|\Z)'
_LARGE = re.compile(r"(?<![\w.])[-+]?\d{16,}(?![\w.])")
# The longest line of a file in bytes.
LINE_BYTES = 16 << 20
# Values of other types than numbers and texts that are Python objects at the same time.
_BLOCK = 1 << 16


class TableFile:
    """A CSV, JSON Lines or Parquet file at a path or URL.

    Args:
        path: Its path or URL.
        format: "csv", "tsv", "jsonl" or "parquet". Default: by its suffix.
        store: An obstore store that has it; a ``file://`` URL is a file in any case.
        options: Arguments of ``obstore.store.from_url``.

    Attributes:
        name: The path or URL, without credentials.
        folder: The folder that it is in.
        is_local: Whether it is a file of this machine.
        has_empty_cells: Whether a value that is missing is an empty text.
    """

    # Of a part of a file: the columns, if its first line has them not, and the rows and lines before it.
    _header: Sequence[str] | None = None
    _before: tuple[int, int] = (0, 0)
    _data: Any = None

    def __init__(
        self, path: str, format: str | None, store: Any, options: Mapping[str, Any] | None, whole: bool = True
    ) -> None:
        self.store: Any = store
        self.options: Mapping[str, Any] | None = options
        base, key = split_url(check_path(path))
        self.is_local: bool = not base and (store is None or scheme_of(path) == "file")
        stem, suffix = os.path.splitext(key.lower())
        self._compression = _COMPRESSIONS.get(suffix)
        by_suffix = _FORMATS.get(suffix if self._compression is None else os.path.splitext(stem)[1])
        self._format = by_suffix if format is None else format
        self.has_empty_cells: bool = self._format in ("csv", "tsv")
        self._delimiter = "\t" if self._format == "tsv" else ","
        if self._format not in _FORMATS.values():
            given = f"format={format!r}" if format is not None else f"the suffix of {redacted(path)!r}"
            raise ValueError(f"{given} is none of csv, tsv, jsonl and parquet: pass format= as one of these")
        if self.is_local:
            self.name: str = key
            self.folder: str = os.path.dirname(key)
            in_parts = not whole or (self._format == "parquet" and self._compression is None)
            with naming_file(key):
                data = None if in_parts else read_file(key, ReadRules(sys.maxsize))
        else:
            reader = ObjectReader(base, store=store, options=options)
            self.name, self.folder = reader.url(key), _parent(path)
            data = run_blocking(lambda: reader.read(key, max_bytes=sys.maxsize))
        if data is not None and self._compression is not None:
            with self._errors():
                data = self._unpacked(data, self._compression)
        self._data = data

    def part(self, data: Any, header: Sequence[str] | None, rows: int = 0, lines: int = 0) -> TableFile:
        """Return the file with some of its rows only.

        Args:
            data: The bytes of these rows.
            header: The names of the columns, if the first line has them not.
            rows: The rows before them, for messages.
            lines: The lines before them.
        """
        found = copy(self)
        found.name, found._data, found._header, found._before = "", data, header, (rows, lines)
        return found

    def row_end(self, data: bytes) -> int:
        """Return where the last row ends that bytes from the beginning of a row have whole; 0 if none does."""
        if self.has_empty_cells and b'"' in data:
            data = re.sub(_QUOTED % self._delimiter.encode(), lambda field: b" " * len(field[0]), data)
        return data.rfind(b"\n") + 1

    def _unpacked(self, data: bytes, compression: str) -> bytes:
        stream, parts, nbytes = arrow().CompressedInputStream(arrow().BufferReader(data), compression), [], 0
        while part := stream.read(LINE_BYTES):
            nbytes += len(part)
            check_expanded("it", nbytes, len(data))
            parts.append(part)
        return b"".join(parts)

    def _open(self) -> Any:
        return io.FileIO(open_file(self.name)) if self._data is None else arrow().BufferReader(self._data)

    def names(self) -> list[str]:
        """Return the names of the columns; in JSON Lines those of the first line."""
        with self._errors(), self._open() as stream:
            if self._format == "parquet":
                return list(arrow("pyarrow.parquet").ParquetFile(stream).schema_arrow.names)
            if self._format == "jsonl":
                return list(next(_objects(stream), {}))
            return list(arrow("pyarrow.csv").open_csv(stream, *self._csv_options()).schema.names)

    def read(self, columns: list[str] | None, types: Mapping[str, Any]) -> Any:
        """Return an Arrow table of some columns, some of them as values of a type; ``None``: of all, with nulls.

        Raises:
            ValueError: The file is damaged, or a value is not of the type of its column.
        """
        with self._errors(), self._open() as stream:
            if self._format == "parquet":
                table = arrow("pyarrow.parquet").ParquetFile(stream).read(columns)
                kinds = [(each.name, types.get(each.name, each.type)) for each in table.schema]
                return table.cast(arrow().schema(kinds))
            if self._format == "jsonl":
                table = self._read_lines(stream, columns, types)
            else:
                reader = arrow("pyarrow.csv")
                nulls = {"strings_can_be_null": columns is None or not self.name}
                convert = reader.ConvertOptions(include_columns=columns, column_types=dict(types), **nulls)
                try:
                    threads = bool(self.name) or columns is None  # blocks are read in several threads
                    table = reader.read_csv(stream, *self._csv_options(threads), convert)
                except arrow().ArrowInvalid:  # in one thread, the message has the row
                    table = reader.read_csv(self._open(), *self._csv_options(threads=False), convert)
            if columns is None:
                self._check_texts(table)
        # A text that looks like a date is a text.
        if dates := {each.name: arrow().string() for each in table.schema if arrow().types.is_temporal(each.type)}:
            return self.read(columns, {**types, **dates})
        for at, name in enumerate(table.column_names):
            if _largest(table.column(at)) >= _EXACT:
                table = table.set_column(at, name, self._exact(name, table.column(at)))
        return table

    def _check_texts(self, table: Any) -> None:
        """Raise ``ValueError`` for texts that are not UTF-8, and for a quotation mark that is not closed."""
        table.validate(full=True)
        for name, column in zip(table.column_names, table.columns, strict=True):
            for row, value in enumerate(column if arrow().types.is_binary(column.type) else (), self._before[0]):
                if "\ufffd" in (text := (value.as_py() or b"").decode(errors="replace")):
                    raise ValueError(f"row {row} (the first is 0) of column {name!r} has {text!r:.80}, no utf-8")
        closed = bytes((self._data or b"")[-80:]).rstrip()[-1:] in (b"", b'"')
        if self.has_empty_cells and len(table) and "\n" in str(column[-1]) and not closed:
            raise ValueError(f"column {name!r} has {str(column[-1])!r:.80} in the last row, of an open quotation mark")

    def _read_lines(self, stream: Any, columns: list[str] | None, types: Mapping[str, Any]) -> Any:
        reader = arrow("pyarrow.json")
        # A column with values of several types is an error only if some type has to be inferred.
        others = "ignore" if columns is not None and types.keys() >= set(columns) else "infer"
        parsing = reader.ParseOptions(arrow().schema(types.items()), unexpected_field_behavior=others)
        blocks = reader.ReadOptions(block_size=LINE_BYTES)
        try:
            found = reader.read_json(stream, blocks, parsing)
            return found if columns is None else found.select(columns)
        except arrow().ArrowInvalid:  # it may be a column of which no type is needed here
            if columns is None:
                raise
            kept = [{name: row[name] for name in columns if name in row} for row in _objects(self._open())]
            lines = arrow().py_buffer("\n".join(map(json.dumps, kept)).encode())
            return reader.read_json(arrow().BufferReader(lines), blocks, parsing).select(columns)

    def _exact(self, name: str, floats: Any) -> Any:
        """A column with whole numbers that arrow has made floats; ``floats`` if these are exact, and not all whole.

        Raises:
            ValueError: No type has all values.
        """
        if self._format == "jsonl":
            cells = [row.get(name) for row in _objects(self._open())]
        else:
            cells = self.read([name], {name: arrow().string()}).column(0).to_pylist()
        large = [(row, text) for row, cell in enumerate(cells) for text in _LARGE.findall(str(cell))]
        if not large:
            return floats
        try:
            values = [None if cell in (None, "") else int(str(cell)) for cell in cells]
            return arrow().chunked_array([arrow().array(values, arrow().uint64())])
        except (OverflowError, TypeError, ValueError):
            row = next((row for row, text in large if float(text) != int(text)), None)
            if row is None:
                return floats
            raise ValueError(
                f"{self.name}{': ' * bool(self.name)}row {self._before[0] + row} (the first is 0) has {cells[row]} in "
                f"{name!r}, and no type of numbers holds this and the other values exactly: write them as texts"
            ) from None

    def _csv_options(self, threads: bool = True) -> tuple[Any, Any]:
        reader = arrow("pyarrow.csv")
        parsing = reader.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        return reader.ReadOptions(use_threads=threads, block_size=LINE_BYTES, column_names=self._header), parsing

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Name the file in errors; in those of JSON Lines also the line, which pyarrow does not know."""
        try:
            with naming_file(self.name):
                yield
        except (arrow().ArrowException, ValueError, EOFError, OSError) as error:
            if isinstance(error, OSError) and (error.errno or error.filename is not None):
                raise
            rows, lines = self._before
            reason = re.sub(r"(?<=Row #)\d+", lambda row: str(rows + bool(self._header) + int(row[0])), str(error))
            if "utf-8" in reason or bytes((self._data or b"")[:2]) in (b"\xff\xfe", b"\xfe\xff"):
                reason += '; of another encoding pass Table(pandas.read_csv(path, encoding="cp1252")), or "utf-16"'
            elif "Expected" in reason and self._format != "jsonl":
                reason += '; of another separator pass Table(pandas.read_csv(path, sep=";"))'
            if self._format == "jsonl" and isinstance(error, ValueError):
                try:
                    _check_kinds(_objects(self._open(), lines + 1), rows)
                except ValueError as wrong:
                    reason = str(wrong)
            raise ValueError(f"{self.name}: {reason}" if self.name else reason) from None


def _largest(column: Any) -> float:
    """Return the largest magnitude of the floats in a column, or in its lists and structs."""
    compute = arrow("pyarrow.compute")
    if arrow().types.is_struct(column.type):
        return max(map(_largest, column.flatten()), default=0.0)
    if is_list(column.type):
        return _largest(compute.list_flatten(column))
    return compute.max(compute.abs(column)).as_py() or 0.0 if arrow().types.is_floating(column.type) else 0.0


def _check_kinds(rows: Iterator[dict[str, Any]], first_row: int) -> None:
    """Raise ``ValueError`` for a line that is no JSON object, or has a value of another kind than the lines before."""
    kinds: dict[str, tuple[type, Any]] = {}
    for at, row in enumerate(rows, first_row):
        for name, value in row.items():
            kind = float if type(value) is int else type(value)
            if value is not None and (before := kinds.setdefault(name, (kind, value)))[0] is not kind:
                place = f"row {at} (the first is 0) of column {name!r}"
                raise ValueError(f"{place} has {value!r:.80}, and rows before {before[1]!r:.80}: write one type")


def _objects(stream: Any, first: int = 1) -> Iterator[dict[str, Any]]:
    with io.BufferedReader(stream) as lines:
        for number, line in enumerate(lines, first):
            try:
                found = json.loads(text) if (text := line.decode("utf-8-sig").strip()) else {}
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            if not isinstance(found, dict):
                raise ValueError(
                    f"line {number} is no JSON object; Table(pandas.read_json(path)) takes one array of these"
                )
            if text:
                yield found


@public
@explain_arguments({"targets": "target= names a column", "paths": "key= names a column"})
class Manifest(Files):
    """One sample per row of a CSV, JSON Lines or Parquet file: an object, a file, or a part of one.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.Manifest("photos.csv", target="age")  # columns: path, age
        feeder = aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=224), batch_size=32)
        for images, ages in feeder:
            print(images.shape, ages)
        ```

    A row takes the bytes of its key and 8 more, and 8 for each number. Entries are URLs, absolute paths, or paths
    relative to the manifest. Needs ``pip install "aiofeed[parquet]"``.

    Args:
        path: The path or URL of the manifest. The first line of a CSV file has the names of the columns.
        key: The column of paths or URLs. Default: "path", "file_name", "url", "key" or "filename", the first of these
            that there is.
        target: The column of the target, or several; a sample is then ``(decoded, target)`` or
            ``(decoded, (target, ...))``. Numbers are numpy scalars, lists of numbers numpy arrays, texts ``str``.
        start: The column of the first byte of a sample in its file. Default: whole files.
        end: The column of the byte after its last one.
        length: The column of its number of bytes, in place of ``end``.
        root: The folder or URL that entries are relative to; absolute paths, URLs and paths with ``..`` are refused.
            Default: the folder of the manifest.
        format: "csv", "tsv", "jsonl" or "parquet". Default: by the suffix, without ".gz", ".bz2" or ".zst".
        to_target: Makes a target of the value of its column, or of a tuple of the values.
        max_bytes: The maximum size of a sample; a larger file is an error before any of it is read.
        store: An obstore store that has the manifest and the samples; the manifest may be a ``file://`` URL.
        options: Arguments of ``obstore.store.from_url``, such as ``{"endpoint": ..., "region": ...}``.

    Raises:
        ImportError: pyarrow is not installed.
        FileNotFoundError: There is no manifest.
        ValueError: The manifest is empty or damaged, has not these columns, or a value is missing or not possible.
        OSError: The manifest cannot be read.
    """

    paths: ObjectList

    def __init__(
        self,
        path: str | os.PathLike[str],
        key: str | None = None,
        target: str | Sequence[str] | None = None,
        *,
        start: str | None = None,
        end: str | None = None,
        length: str | None = None,
        root: str | os.PathLike[str] | None = None,
        format: str | None = None,
        to_target: Callable[[Any], Any] | None = None,
        max_bytes: int = MAX_BYTES,
        store: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"""Manifest needs the path or URL of a file, got {path!r}; Files takes lists, or frame["path"]"""
            )
        plain = target is not None and (isinstance(target, str) or not isinstance(target, Sequence))
        targets: list[Any] = [target] if plain else list(target or ())
        ranges = [each for each in (start, end, length) if each is not None]
        for name in (*targets, *ranges, *(() if key is None else (key,))):
            if not isinstance(name, str):
                raise TypeError(f"Manifest needs names of columns as str, got {name!r}")
        if ranges and (start is None or len(ranges) != 2):
            raise ValueError("Manifest: parts of files need start= and one of end= and length=")
        check_callable("Manifest(to_target=)", to_target)
        check_positive_int("max_bytes", max_bytes)
        file = TableFile(os.fspath(path), format, store, options)
        key = _check_names(file, key, [*targets, *ranges])
        wanted = list(dict.fromkeys([key, *targets, *ranges]))
        table = file.read(wanted, {key: arrow().large_string(), **dict.fromkeys(ranges, arrow().int64())})
        if not len(table):
            raise ValueError(f"{file.name} lists no samples")
        columns = {name: _values(file, table.column(name), name, name == key) for name in table.column_names}
        paths = _located(file, table.column(key), columns[key], root)
        del table
        arrow().default_memory_pool().release_unused()  # else some 150 bytes per row
        self._bounds = _bounds(file, [columns[name] for name in ranges], length is not None, max_bytes)
        self._columns = [columns[name] for name in targets]
        labels: Any = None
        if targets:
            labels = self._columns[0]
            if not plain or to_target is not None or isinstance(labels, ValueColumn):
                labels = Targets(self._columns, len(paths), plain, to_target)
        super().__init__(paths, labels, max_bytes=max_bytes)
        self.root: str | None = None if root is None else redacted(os.fspath(root))

    def key(self, index: int, /) -> str:
        """Return the path of the file, or its URL without credentials; with the range, if there is one."""
        path: str = self.paths[index]
        if self._bounds is None:
            return path
        starts, ends = self._bounds
        return f"{path}[{starts[index]}:{ends[index]}]"

    async def read_many(self, indices: Sequence[int], /) -> list[bytes | OSError]:
        """The contents of samples, or the error of each that cannot be read. Close parts of an object are one read."""
        if self._objects is None or self._bounds is None:
            return await super().read_many(indices)
        objects, (starts, ends) = self._objects, self._bounds

        async def read_parts(chosen: list[int]) -> list[Any]:
            try:
                return list(await objects.read_ranges(chosen[0], starts[chosen].tolist(), ends[chosen].tolist()))
            except Exception as error:  # noqa: BLE001 - the error of each of these samples
                if len(chosen) == 1 or isinstance(error, FileNotFoundError | PermissionError):
                    return [error.with_traceback(None)] * len(chosen)
            parts = await run_all([read_parts([each]) for each in chosen])  # it may be the error of one sample
            return [part for [part] in parts]

        groups = objects.by_object(indices)
        found = await run_all([read_parts([indices[place] for place in places]) for places in groups])
        return in_order(len(indices), zip(groups, found, strict=True))

    def _contents(self, indices: Sequence[int]) -> list[bytes | OSError]:
        if self._bounds is None:
            return super()._contents(indices)
        starts, ends = self._bounds

        def read_parts(chosen: list[int]) -> list[Any]:
            try:
                ranges = zip(starts[chosen].tolist(), ends[chosen].tolist(), strict=True)
                return list(read_ranges(self.paths[chosen[0]], list(ranges)))
            except OSError as error:
                if len(chosen) == 1:
                    return [error.with_traceback(None)]
            return [read_parts([each])[0] for each in chosen]  # it may be the error of one sample

        groups = self.paths.by_object(indices)
        return in_order(len(indices), [(places, read_parts([indices[place] for place in places])) for places in groups])

    def content_parts(self) -> list[Content]:
        """Return some of the files, or parts of them."""
        if self._objects is not None or self._bounds is None:
            return super().content_parts()
        starts, ends = self._bounds
        return [Content(self.paths[at], int(starts[at]), int(ends[at])) for at in evenly(len(self))]

    def fingerprint(self) -> str:
        """Return a hash of all rows: of their keys without the root, their ranges and their targets."""
        digest = hashlib.sha256(b"Manifest")
        for column in [self.paths.stable_keys(), *(self._bounds or ()), *self._columns]:
            for part in _parts(column):
                digest.update(part)
        return digest.hexdigest()[:32]


class Targets(Sequence[Any]):
    """The targets of rows, made of the values of columns.

    Args:
        columns: The values of each column.
        length: The number of rows.
        single: Whether a target is the value of the only column, in place of a tuple.
        to_target: Makes a target of that.
    """

    def __init__(
        self, columns: Sequence[Any], length: int, single: bool, to_target: Callable[[Any], Any] | None
    ) -> None:
        self._columns, self._length, self._single, self._to_target = columns, length, single, to_target

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Return the target of a row."""
        values = [each.value(index) if isinstance(each, ValueColumn) else each[index] for each in self._columns]
        value = values[0] if self._single else tuple(values)
        return value if self._to_target is None else self._to_target(value)


def _parts(column: Any) -> Iterator[Any]:
    """Yield the bytes of a column."""
    if isinstance(column, PackedKeys):
        offsets = column.offsets
        yield column.data[offsets[0] : offsets[-1]]
        yield np.diff(offsets)
    elif isinstance(column, ValueColumn):
        for start in range(0, len(column.column), _BLOCK):
            yield repr(column.column.slice(start, _BLOCK).to_pylist()).encode("utf-8", "surrogatepass")
    else:
        yield np.ascontiguousarray(column)


def _parent(url: str) -> str:
    """Return the URL of the folder of an object; of one on a web server with its query."""
    path, mark, query = url.partition("?") if url.lower().startswith("http") else (url, "", "")
    return f"{path.rpartition('/')[0]}{mark}{query}"


def _check_names(file: TableFile, key: str | None, others: Sequence[str]) -> str:
    """Return the name of the column of keys; ``ValueError`` unless there is one column of each name."""
    names = file.names()
    if not names:
        raise ValueError(f"{file.name} lists no samples")
    if key is None:
        key = next((name for name in KEYS if name in names), None)
    if key is None:
        raise ValueError(f"{file.name} has no column {' or '.join(map(repr, KEYS))}; pass key= as one of {names}")
    for name in (key, *others):
        if names.count(name) != 1:
            number = "two columns" if name in names else "no column"
            raise ValueError(f"{file.name} has {number} {name!r}; the columns are {names}")
    return key


def _values(file: TableFile, column: Any, name: str, is_key: bool) -> Any:
    """Return the values of a column: packed texts, a numpy array, or an ``ArrowColumn``."""
    if arrow().types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    is_text = arrow().types.is_string(column.type) or arrow().types.is_large_string(column.type)
    missing = column.is_null().to_numpy() if column.null_count else np.zeros(len(column), np.bool_)
    if is_text:
        packed = _packed(column)
        if is_key or file.has_empty_cells:
            missing |= np.diff(packed.offsets) == 0
    if missing.any():
        raise ValueError(f"{file.name}: {_row(missing)} has no {name!r}")
    if is_text:
        return packed
    if arrow().types.is_primitive(column.type) and not arrow().types.is_temporal(column.type):
        return column.to_numpy()
    return ValueColumn(arrow().chunked_array([arrow().concat_arrays(column.chunks)]), "")


def _packed(column: Any) -> PackedKeys:
    """Return the texts of a column, in the memory of Arrow if they lie together there."""
    texts = arrow().concat_arrays([chunk.cast(arrow().large_string()) for chunk in column.chunks])
    _, offsets, data = texts.buffers()
    at = np.frombuffer(offsets, np.int64, len(texts) + 1, 8 * texts.offset)
    return PackedKeys(np.frombuffer(data or b"", np.uint8), at)


def _row(mask: Any) -> str:
    """Return the first row for which a mask is true."""
    return f"row {int(np.argmax(mask))} (the first is 0)"


def _bounds(file: TableFile, columns: Sequence[Any], is_length: bool, max_bytes: int) -> tuple[Any, Any] | None:
    """Return the first byte of each row and the byte after its last one."""
    if not columns:
        return None
    starts, ends = columns[0], columns[0] + columns[1] if is_length else columns[1]
    for wrong, problem in (
        ((starts < 0) | (ends < starts), "are no range"),
        (ends - starts > max_bytes, f"are more than max_bytes={max_bytes} allows"),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"{file.name}: {_row(wrong)}: bytes {starts[at]} to {ends[at]} {problem}")
    return starts, ends


def _located(file: TableFile, column: Any, keys: PackedKeys, root: str | os.PathLike[str] | None) -> ObjectList:
    """Return the objects of a column of entries."""
    compute, store = arrow("pyarrow.compute"), file.store

    def rows(pattern: str) -> Any:
        return np.flatnonzero(compute.match_substring_regex(column, pattern).to_numpy())

    urls = rows(_URL)
    # The entries of a manifest in a store, which may be of somebody else, name no files of this machine.
    if root is not None or not (file.is_local or len(urls)):
        base = file.name if root is None else os.fspath(root)
        for row in rows(_OUTWARD).tolist():
            check_foreign_name(f"{file.name}, row {row}", keys[row], base)
    try:
        if root is None and len(urls):
            found = _of_urls(file, column, keys, urls)
        else:
            folder = os.fspath(root) if root is not None else "" if file.is_local and store is not None else file.folder
            found = ObjectList(keys, [ObjectReader(folder, store=store, options=file.options)])
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None
    if file.is_local and found.is_local and file.options is not None:
        raise ValueError("options= are for the store of URLs, and these are files: leave it out")
    return found


def _of_urls(file: TableFile, column: Any, keys: PackedKeys, urls: Any) -> ObjectList:
    """Return the objects of a column of URLs."""
    if len(urls) != len(keys):
        other = int(np.setdiff1d(np.arange(len(keys)), urls)[0])
        raise ValueError(
            f"row {other}, {keys[other]!r}, is no URL, and row {urls[0]} is one; aiofeed.Mixture reads both kinds"
        )
    if scheme_of(keys[0]) == "file":
        if not file.is_local:
            raise ValueError(f"row 0, {keys[0]!r}, is a file, and the manifest is not: pass Files a list of paths")
        packer = KeyPacker()
        packer.add(path_of(url, row) for row, url in enumerate(keys))
        return ObjectList(packer.packed(), [ObjectReader("")])
    compute, base = arrow("pyarrow.compute"), split_url(keys[0])[0]
    # The keys of one bucket are plain text and need no loop, which takes a second for a million of them.
    in_bucket = file.store is None and not base.startswith("http")
    if in_bucket and compute.all(compute.starts_with(column, f"{base}/")).as_py():
        rest = compute.utf8_slice_codeunits(column, len(base) + 1)
        return ObjectList(_packed(rest), [ObjectReader(base, options=file.options)])
    return objects_of(keys, None, file.store, file.options)
