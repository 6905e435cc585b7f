"""Data sets as LeRobot lays them out, in versions 3.0, 2.1 and 2.0: what they contain, and their columns of numbers.

The layout: https://huggingface.co/docs/lerobot/lerobot-dataset-v3. Versions 2.1 and 2.0, which differ in statistics
only, have one file of rows and one video per camera for each episode, and their metadata as JSON Lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.common.expanded import check_expanded
from aiofeed.common.foreign_names import check_foreign_name
from aiofeed.kernel.core.validation import check_int_from, check_positive_int
from aiofeed.objects.reader import ObjectReader, run_all
from aiofeed.shards.arrow import arrow
from aiofeed.tables.columns import Columns, NumberColumn

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Files of rows that are read at the same time.
FILES = 16
_EPISODES = "meta/episodes/chunk-{:03d}/file-{:03d}.parquet"
# The duration of an episode may differ by this share from that of the rate that is described.
RATE_SHARE = 0.1
# What templates of paths have in the place of names and numbers. `str.format` has attributes, and widths of gigabytes.
_FIELD = re.compile(r"\{(\w+)(?::(0\d)d)?\}")


@dataclass(frozen=True, eq=False)
class Camera:
    """The videos of a camera.

    Args:
        size: Height and width.
        group: Frames from a key frame to the next; 1 if it is not stated.
        keys: The files.
        files: The file of each episode; -1 if it has none.
        starts: Where each episode begins in its file, in seconds.
    """

    size: tuple[int, int]
    group: int
    keys: list[str]
    files: NDArray[np.int64]
    starts: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LeRobotData:
    """What a data set contains.

    Args:
        reader: Reads its files.
        fps: Rows per second.
        shapes: The shape of each column of numbers in a row, and its dtype, in the order of the description.
        others: Why each other feature that is not a camera has no tensors.
        cameras: The cameras.
        lengths: The rows of each episode.
        keys: The files of rows.
        files: The file of rows of each episode.
        tasks: The texts of tasks, by number.
    """

    reader: ObjectReader
    fps: float
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    others: dict[str, str]
    cameras: dict[str, Camera]
    lengths: NDArray[np.int64]
    keys: list[str]
    files: NDArray[np.int64]
    tasks: dict[int, str]

    async def load(self, names: Sequence[str], episodes: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Read columns of some episodes, ascending: rows of one episode after the other.

        Raises:
            OSError: A file cannot be read.
            ValueError: A file has other rows or columns than described, or a column has no tensors.
        """
        turn, wanted = asyncio.Semaphore(FILES), [*names, "episode_index", "frame_index"]

        async def load_file(number: int) -> dict[str, NDArray[Any]]:
            key = self.keys[number]
            async with turn:
                table = await _read_table(self.reader, key, sorted(set(wanted)))
            with _naming(self.reader.url(key)):
                return await asyncio.to_thread(self._columns, table, episodes)

        named = np.unique(self.files[episodes])
        parts = await run_all([load_file(number) for number in named.tolist()])
        if sum(len(part["episode_index"]) for part in parts) < self.lengths[episodes].sum():
            # LeRobot 0.4.0 names another file for the first episode of a file; LeRobot itself looks in all.
            others = np.setdiff1d(np.arange(len(self.keys)), named)
            parts += await run_all([load_file(number) for number in others.tolist()])
        found = {name: np.concatenate([part.pop(name) for part in parts]) for name in dict.fromkeys(wanted)}
        with _naming(self.reader.url("data")):
            return self._in_order(found, episodes, names)

    def _columns(self, table: Any, episodes: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the rows of some episodes in a file."""
        columns = dict[str, NumberColumn]()
        for name, column in Columns.of(table).columns.items():
            if not isinstance(column, NumberColumn):
                raise ValueError(f"column {name!r} {column.problem}: leave it out with features=")
            columns[name] = column
        chosen = np.flatnonzero(np.isin(columns["episode_index"].take(np.arange(len(table))).reshape(-1), episodes))
        found: dict[str, NDArray[Any]] = {name: column.take(chosen) for name, column in columns.items()}
        for name, values in found.items():
            shape, kind = self.shapes[name]
            if values.shape[1:] not in (shape, (math.prod(shape),)) or not np.can_cast(values.dtype, kind, "same_kind"):
                what = f"{values.dtype} {list(values.shape[1:])}"
                raise ValueError(f"column {name!r} has {what} in a row, and info.json describes {kind} {list(shape)}")
            found[name] = as_lerobot(values.reshape(len(values), *shape).astype(kind, copy=False))
        return found

    def _in_order(
        self, found: dict[str, NDArray[Any]], episodes: NDArray[np.int64], names: Sequence[str]
    ) -> dict[str, NDArray[Any]]:
        """Return the rows by episode and frame, wherever they were, and check that each is there once."""
        order, lengths = np.lexsort((found["frame_index"], found["episode_index"])), self.lengths[episodes]
        if (order[1:] < order[:-1]).any():
            found = {name: values[order] for name, values in found.items()}
        counts = np.diff(np.searchsorted(found["episode_index"], [*episodes, len(self.lengths)]))
        for episode, count in zip(episodes[counts != lengths], counts[counts != lengths], strict=True):
            key, length = self.keys[self.files[episode]], self.lengths[episode]
            raise ValueError(f"{key}: episode {episode} has {count} rows, and its length is {length}")
        ends = np.cumsum(lengths)
        frames, starts = found["frame_index"], np.repeat(ends - lengths, lengths)
        if not np.array_equal(frames - frames[starts], np.arange(len(frames)) - starts):
            raise ValueError("column 'frame_index' lacks the number of a row, or has one twice")
        last = ends[lengths > 0] - 1
        steps, times = lengths[lengths > 0] - 1, found["timestamp"].astype(np.float64)
        seconds = times[last] - times[last - steps]
        # At another rate windows, which are in seconds, would have other rows. A NaN is not small.
        wrong = ~(np.abs(seconds * self.fps - steps) <= np.maximum(RATE_SHARE * steps, 0.5))
        if wrong.any():
            rate = steps[wrong].sum() / (seconds[wrong].sum() or math.nan)
            raise ValueError(f"column 'timestamp' has {rate:g} rows per second, and info.json describes {self.fps:g}")
        return {name: found[name] for name in names}


def as_lerobot(values: NDArray[Any]) -> NDArray[Any]:
    """Numbers in the dtypes of LeRobot's items: bool, float32 and int64."""
    kind = {"b": np.bool_, "f": np.float32}.get(values.dtype.kind, np.int64)
    return np.asarray(values, kind, order="C")


async def describe(reader: ObjectReader) -> LeRobotData:
    """Read the description of a data set.

    Raises:
        FileNotFoundError: A file of the description is missing.
        OSError: It cannot be read.
        ValueError: It is of another version, or inconsistent.
    """
    with _naming(url := reader.url("meta/info.json")):
        info = json.loads(await reader.read("meta/info.json"))
        version = str(info.get("codebase_version"))
        if not version.startswith(("v2.", "v3.")):
            raise ValueError(f"it has version {version} of LeRobot; Episodes reads v3.0, v2.1 and v2.0")
        old, total = version.startswith("v2"), check_int_from(0, "total_episodes", info["total_episodes"])
        fps, size = info["fps"], check_positive_int("chunks_size", info.get("chunks_size", 1000))
        if isinstance(fps, bool) or not 0 < fps < math.inf:
            raise ValueError(f"fps must be a positive number, got {fps!r}")
    episodes = await (_lines_of_episodes(reader) if old else _table_of_episodes(reader, total, size))
    with _naming(reader.url("meta/episodes.jsonl" if old else "meta/episodes")):
        if len(episodes["length"]) != total:
            raise ValueError(f"it describes {len(episodes['length'])} episodes, and info.json names {total}")
        if list(episodes.get("episode_index", range(total))) != list(range(total)):
            raise ValueError("the episodes are in another order than their numbers, or some are missing")
        lengths = np.array([check_int_from(0, "length", length) for length in episodes["length"]], np.int64)
    shapes, others, cameras = dict[str, tuple[tuple[int, ...], np.dtype[Any]]](), dict[str, str](), dict[str, Camera]()
    with _naming(url):
        for name, feature in info["features"].items():
            kind, details = feature.get("dtype"), feature.get("info") or feature.get("video_info") or {}
            is_depth = kind == "video" and details.get("is_depth_map", details.get("video.is_depth_map"))
            if is_depth or kind in ("image", "string", "language"):
                others[name] = "a depth camera" if is_depth else "images in the rows" if kind == "image" else "text"
                continue
            try:
                shape, dtype = _layout_of(kind, feature["shape"])
            except (LookupError, SyntaxError, TypeError, ValueError) as error:
                others[name] = f"neither a camera nor numbers: {error}"  # it is an error only if it is chosen
                continue
            if kind == "video":
                place = "data" if old else f"videos/{name}"
                keys, files = _files_of(url, info["video_path"], episodes, place, size, video_key=name)
                starts = [start or 0.0 for start in episodes.get(f"{place}/from_timestamp", [0.0] * total)]
                group = check_positive_int("video.g", details.get("video.g") or 1)
                cameras[name] = Camera((shape[0], shape[1]), group, keys, files, np.array(starts, np.float64))
            else:
                shapes[name] = () if shape == (1,) else shape, dtype
        keys, files = _files_of(url, info["data_path"], episodes, "data", size)
        if missing := {"timestamp", "episode_index", "frame_index", "task_index"}.difference(shapes):
            found = {name: others.get(name, "missing") for name in sorted(missing)}
            raise ValueError(f"features that are always needed have no numbers: {found}")
        if (files < 0).any():
            raise ValueError(f"episode {int(np.argmin(files))} has no file of rows")
    tasks = await _tasks_of(reader, old=old)
    return LeRobotData(reader, fps, shapes, others, cameras, lengths, keys, files, tasks)


@contextlib.contextmanager
def _naming(url: str) -> Iterator[None]:
    """Raise what is wrong with a file as a ``ValueError`` that names it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = f"{error}" if type(error) is ValueError else f"it is no description of LeRobot's: {error!r}"
        raise ValueError(what if what.startswith(url) else f"{url}: {what}") from error


def _layout_of(kind: Any, sides: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a value: of a camera height, width and channels."""
    dtype = np.dtype("uint8" if kind == "video" else str(kind))
    if dtype.kind not in "biuf":
        raise ValueError(f"the dtype is {kind!r}")
    shape = tuple(check_positive_int("a side of its shape", side) for side in sides)
    check_expanded("a value", 8 * math.prod(shape), 0)
    if kind == "video":
        height, width, channels = shape if shape[-1] in (1, 3) else (*shape[1:], shape[0])
        shape = height, width, channels
    return shape, dtype


def _files_of(
    url: str, template: str, episodes: Mapping[str, Sequence[Any]], place: str, size: int, **names: str
) -> tuple[list[str], NDArray[np.int64]]:
    """Return the files of episodes by a template of ``url``, and the number of each episode's; -1 for none."""
    chunks, files = (episodes[f"{place}/{name}_index"] for name in ("chunk", "file"))
    numbers, found = dict[str, int](), np.full(len(episodes["length"]), -1)
    for at, (chunk, file) in enumerate(zip(chunks, files, strict=True)):
        if file is not None and not math.isnan(file):
            fields = {"chunk_index": int(chunk), "file_index": int(file), "episode_chunk": at // size}
            key = _filled(template, {**fields, "episode_index": at, **names})
            if (number := numbers.setdefault(key, len(numbers))) == len(numbers) - 1:
                check_foreign_name(url, key, url)
            found[at] = number
    return list(numbers), found


def _filled(template: str, fields: Mapping[str, Any]) -> str:
    """Return a template of a path with the values of its fields."""
    if "{" in _FIELD.sub("", template):
        raise ValueError(f"the path {template[:200]!r} must have fields such as {{name}} and {{name:03d}} only")
    return _FIELD.sub(lambda found: format(fields[found[1]], f"{found[2]}d" if found[2] else ""), template)


async def _table_of_episodes(reader: ObjectReader, total: int, size: int) -> dict[str, list[Any]]:
    """Return the columns of ``meta/episodes`` without statistics. Its files are numbered: a web server has no lists."""
    tables, rows = list[Any](), 0
    while not tables or (rows < total and len(tables[-1])):
        try:
            tables.append(await _read_table(reader, _EPISODES.format(*divmod(len(tables), size))))
        except (FileNotFoundError, PermissionError):
            if not tables:
                raise
            break
        rows += len(tables[-1])
    names = [name for name in tables[0].column_names if not name.startswith("stats/")]
    with _naming(reader.url("meta/episodes")):
        return {name: [value for table in tables for value in table.column(name).to_pylist()] for name in names}


async def _lines_of_episodes(reader: ObjectReader) -> dict[str, list[Any]]:
    """Return the same of version 2.1, where the file of an episode has its number."""
    lines = sorted(await _read_lines(reader, "meta/episodes.jsonl", "episode_index", "length"))
    zeros = [0] * len(lines)
    numbers, lengths = ([line[at] for line in lines] for at in range(2))
    return {"episode_index": numbers, "length": lengths, "data/chunk_index": zeros, "data/file_index": zeros}


async def _tasks_of(reader: ObjectReader, *, old: bool) -> dict[int, str]:
    """Return the texts of tasks: in version 3.0 the number of a task is its row."""
    if old:
        tasks = dict(await _read_lines(reader, "meta/tasks.jsonl", "task_index", "task"))
    else:
        table = await _read_table(reader, "meta/tasks.parquet")
        with _naming(reader.url("meta/tasks.parquet")):
            # The text is the index of a table of pandas, which names it.
            described = json.loads((table.schema.metadata or {}).get(b"pandas", b"{}")).get("index_columns") or []
            names = [name for name in table.column_names if name != "task_index"]
            text, *_ = [name for name in (*described, "task", *names) if name in names]
            tasks = dict(enumerate(table.column(text).to_pylist()))
            if "task_index" in table.column_names and table.column("task_index").to_pylist() != list(tasks):
                raise ValueError("column 'task_index' must have the numbers of the rows")
    if wrong := [text for text in tasks.values() if not isinstance(text, str)]:
        raise ValueError(f"{reader.url('meta')}: a task must be a text, got {wrong[0]!r}")
    return tasks


async def _read_lines(reader: ObjectReader, key: str, *names: str) -> list[tuple[Any, ...]]:
    """Some fields of each line, of which the first is a number."""
    with _naming(reader.url(key)):
        lines = [json.loads(line) for line in (await reader.read(key)).splitlines() if line.strip()]
        return [(check_int_from(0, names[0], line[names[0]]), *[line[name] for name in names[1:]]) for line in lines]


async def _read_table(reader: ObjectReader, key: str, columns: Sequence[str] | None = None) -> Any:
    """Read a Parquet file, or some of its columns."""
    file: Any = reader.url(key) if reader.is_local else arrow().BufferReader(await reader.read(key))

    def read() -> Any:
        try:
            with arrow("pyarrow.parquet").ParquetFile(file) as opened:
                known = opened.schema_arrow.names
                if missing := [name for name in columns or () if name not in known]:
                    raise ValueError(f"there is no column {missing[0]!r}; there are {known}")
                size = os.path.getsize(file) if reader.is_local else file.size()
                count = opened.metadata.num_rows * (len(columns) if columns else opened.metadata.num_columns)
                check_expanded("the file", 8 * count, size)
                table = opened.read(columns)
                return table if columns is None else table.select(columns)  # a name may be the prefix of another
        except (arrow().ArrowException, OSError, ValueError) as error:
            raise (type(error) if isinstance(error, OSError) else ValueError)(f"{reader.url(key)}: {error}") from error

    return await asyncio.to_thread(read)
