"""Data sets as LeRobot lays them out, in versions 3.0 and 2.1: what they contain, and their columns of numbers.

The layout: https://huggingface.co/docs/lerobot/lerobot-dataset-v3. Version 2.1 has one file of rows and one video per
camera for each episode, and its metadata as JSON Lines.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.sources.objects.reader import ObjectReader, run_all
from aiofeed.sources.tables.columns import Columns, arrow

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Files of rows that are read at the same time.
FILES = 16
_EPISODES = "meta/episodes/chunk-{:03d}/file-{:03d}.parquet"


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
        info: The contents of ``meta/info.json``.
        shapes: The shape of each column of numbers in a row, in the order of the description.
        others: Why each other feature that is not a camera has no tensors.
        cameras: The cameras.
        lengths: The rows of each episode.
        keys: The files of rows.
        files: The file of rows of each episode.
        tasks: The texts of tasks, by number.
    """

    reader: ObjectReader
    info: Mapping[str, Any]
    shapes: dict[str, tuple[int, ...]]
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
        turn, order = asyncio.Semaphore(FILES), np.argsort(self.files, kind="stable")
        bounds = np.searchsorted(self.files[order], np.arange(len(self.keys) + 1))
        is_chosen = np.isin(np.arange(len(self.files)), episodes)

        async def load_file(number: int) -> dict[str, NDArray[Any]]:
            async with turn:
                table = await _read_table(self.reader, self.keys[number], names)
            within, url = order[bounds[number] : bounds[number + 1]], self.reader.url(self.keys[number])
            lengths = self.lengths[within]
            if len(table) != lengths.sum():
                raise ValueError(
                    f"{url}: it has {len(table)} rows, and its {len(within)} episodes have {lengths.sum()}"
                )
            rows = np.flatnonzero(np.repeat(is_chosen[within], lengths))
            try:
                found = await asyncio.to_thread(Columns.of(table).take, rows)
                return {name: as_lerobot(each.reshape(-1, *self.shapes[name])) for name, each in found.items()}
            except ValueError as error:
                raise ValueError(f"{url}: {error}") from error

        parts = await run_all([load_file(number) for number in np.unique(self.files[episodes]).tolist()])
        return {name: np.concatenate([part.pop(name) for part in parts]) for name in names}


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
    info = json.loads(await reader.read("meta/info.json"))
    version = str(info.get("codebase_version"))
    if not version.startswith(("v2.1", "v3.")):
        raise ValueError(f"{reader.url('')}: it has version {version} of LeRobot; Episodes reads v3.0 and v2.1")
    old, total = version.startswith("v2"), int(info["total_episodes"])
    episodes = await (_lines_of_episodes(reader) if old else _table_of_episodes(reader, info))
    if len(episodes["length"]) != total:
        described = len(episodes["length"])
        raise ValueError(f"{reader.url('meta')}: it describes {described} episodes, and info.json names {total}")
    shapes, others, cameras = dict[str, tuple[int, ...]](), dict[str, str](), dict[str, Camera]()
    for name, feature in info["features"].items():
        details = feature.get("info") or feature.get("video_info") or {}
        kind, shape = feature["dtype"], tuple(feature["shape"])
        if kind == "video" and not details.get("is_depth_map", details.get("video.is_depth_map")):
            place = "data" if old else f"videos/{name}"
            keys, files = _files_of(info, info["video_path"], episodes, place, video_key=name)
            starts = [start or 0.0 for start in episodes.get(f"{place}/from_timestamp", [0.0] * total)]
            size = shape[:2] if shape[-1] in (1, 3) else shape[1:]
            cameras[name] = Camera(size, int(details.get("video.g") or 1), keys, files, np.array(starts))
        elif kind in ("video", "image", "string", "language"):
            others[name] = {"video": "a depth camera", "image": "images in the rows"}.get(kind, "text")
        else:
            shapes[name] = () if shape == (1,) else shape
    keys, files = _files_of(info, info["data_path"], episodes, "data")
    lengths, tasks = np.array(episodes["length"], np.int64), await _tasks_of(reader, old=old)
    return LeRobotData(reader, info, shapes, others, cameras, lengths, keys, files, tasks)


def _files_of(
    info: Mapping[str, Any], template: str, episodes: Mapping[str, Sequence[Any]], place: str, **names: str
) -> tuple[list[str], NDArray[np.int64]]:
    """The files of episodes, and the number of each episode's; -1 for none."""
    count, size = len(episodes["length"]), info.get("chunks_size", 1000)
    chunks, files = (episodes.get(f"{place}/{name}_index", [None] * count) for name in ("chunk", "file"))
    numbers, found = dict[str, int](), np.full(count, -1)
    for at, (chunk, file) in enumerate(zip(chunks, files, strict=True)):
        if file is not None and not math.isnan(file):
            chunk_of = {"chunk_index": int(chunk), "file_index": int(file), "episode_chunk": at // size}
            key = template.format(**chunk_of, episode_index=at, **names)
            found[at] = numbers.setdefault(key, len(numbers))
    return list(numbers), found


async def _table_of_episodes(reader: ObjectReader, info: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The columns of ``meta/episodes`` without statistics. Its files are numbered: a web server has no lists."""
    tables, rows, size = list[Any](), 0, int(info.get("chunks_size", 1000))
    while not tables or rows < int(info["total_episodes"]):
        try:
            tables.append(await _read_table(reader, _EPISODES.format(*divmod(len(tables), size))))
        except (FileNotFoundError, PermissionError):
            if not tables:
                raise
            break
        rows += len(tables[-1])
    names = [name for name in tables[0].column_names if not name.startswith("stats/")]
    return {name: [value for table in tables for value in table.column(name).to_pylist()] for name in names}


async def _lines_of_episodes(reader: ObjectReader) -> dict[str, list[Any]]:
    """The same of version 2.1, where the file of an episode has its number."""
    lengths = [line["length"] for line in await _read_lines(reader, "meta/episodes.jsonl")]
    zeros = [0] * len(lengths)
    return {"length": lengths, "data/chunk_index": zeros, "data/file_index": zeros}


async def _tasks_of(reader: ObjectReader, *, old: bool) -> dict[int, str]:
    """The texts of tasks: in version 3.0 the number of a task is its row."""
    if old:
        return {line["task_index"]: line["task"] for line in await _read_lines(reader, "meta/tasks.jsonl")}
    table = await _read_table(reader, "meta/tasks.parquet")
    [text] = [name for name in table.column_names if name != "task_index"]
    return dict(enumerate(table.column(text).to_pylist()))


async def _read_lines(reader: ObjectReader, key: str) -> list[Any]:
    lines = [json.loads(line) for line in (await reader.read(key)).splitlines() if line.strip()]
    return sorted(lines, key=lambda line: line.get("episode_index", 0))


async def _read_table(reader: ObjectReader, key: str, columns: Sequence[str] | None = None) -> Any:
    """Read a Parquet file, or some of its columns."""
    parquet = importlib.import_module("pyarrow.parquet")
    file: Any = reader.url(key) if reader.is_local else arrow().BufferReader(await reader.read(key))

    def read() -> Any:
        try:
            with parquet.ParquetFile(file, memory_map=True) as opened:
                known = opened.schema_arrow.names
                if missing := [name for name in columns or () if name not in known]:
                    raise ValueError(f"there is no column {missing[0]!r}; there are {known}")
                table = opened.read(columns)
                return table if columns is None else table.select(columns)  # a name may be the prefix of another
        except (arrow().ArrowException, OSError, ValueError) as error:
            raise (type(error) if isinstance(error, OSError) else ValueError)(f"{reader.url(key)}: {error}") from error

    return await asyncio.to_thread(read)
