"""How fast are Parquet files, beside pyarrow alone, and how much memory do they take?

``Table`` of 400,000 rows of 60 float32 columns in row groups of 20,000, in batches of 4,096, in the page cache.
"pyarrow" reads one row group after the other with its threads, makes a tensor of each column and cuts these into
batches. The same file in a store that answers after 20 ms, and the same rows in ten files. Memory is the peak above the
imports, in decoded row groups, for each thread. ``ParquetRows`` of 3,000 JPEGs of 256 x 256 in row groups of 100.

Targets: 0.8 of pyarrow in order, 0.7 within windows and 0.3 shuffled; four row groups for each thread in order and
within windows; in the store and in ten files 0.8 of the local file; pictures shuffled at 0.95 of those in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aiofeed
from benchmarks.contenders import epochs, fed, labelled
from benchmarks.data import files_below, generate, jpeg_folder
from benchmarks.figures import Figure, at_most
from benchmarks.harness import Contender, Measure, Settings, interleave, measure_memory
from benchmarks.objects import DELAY_S, options_of, server

TITLE = "Parquet: rows of 60 columns, batch 4,096; JPEGs of 20 KB, batch 64"

COLUMNS, BATCH, FILES, SIDE = 60, 4096, 10, 256
ORDERS = {"in order": (False, 0.8), "window": ("window", 0.7), "shuffled": (True, 0.3)}
"""The argument ``shuffle=``, and the least speed beside pyarrow."""
IMPORTS = (
    "torch",
    "pyarrow.parquet",
    "uvloop",
    "aiofeed:Feeder",
    "aiofeed:Table",
    *(["pandas"] if find_spec("pandas") else []),
)


def run(settings: Settings) -> list[Figure]:
    rows, group = settings.size(400_000, 2_000), settings.size(20_000, 100)
    folder = generate(settings.data / f"parquet-{rows}", lambda made: write_rows(made, rows, group))
    one, ten = [str(folder / "one.parquet")], [str(folder / f"ten/{number}.parquet") for number in range(FILES)]
    base = {"batch": settings.size(BATCH, 64), "least_s": settings.size(1, 0) / 2}
    threads = len(os.sched_getaffinity(0))
    with server("--folder", str(folder), "--delay", str(DELAY_S)) as port:
        local = [
            Contender(name, table, {**base, "paths": one, "shuffle": shuffle}, IMPORTS)
            for name, (shuffle, _) in ORDERS.items()
        ]
        stored = {**base, "paths": ["s3://bucket/one.parquet"], "port": port}
        contenders = [
            *local,
            Contender("pyarrow", scan, {**base, "path": one[0]}, IMPORTS),
            *[
                Contender(f"20 ms, {name}", table, {**stored, "shuffle": ORDERS[name][0]}, IMPORTS)
                for name in ("in order", "window")
            ],
            Contender("ten files", table, {**base, "paths": ten, "shuffle": False}, IMPORTS),
        ]
        race = interleave(contenders, settings)
        figures = [race.speed(name, "pyarrow", least, name) for name, (_, least) in ORDERS.items()]
        figures += [race.speed(f"20 ms, {name}", name, 0.8, "20 ms") for name in ("in order", "window")]
        figures += [race.speed("ten files", "in order", 0.8, "ten files"), *race.rates("rows")]
    for contender in contenders:
        if contender.label in (*ORDERS, "pyarrow"):
            peaks = [measure_memory(contender, settings, (1,))[0][0] for _ in range(min(2, settings.rounds))]
            groups = tuple(peak / (threads * group * COLUMNS * 4) for peak in peaks)
            target = at_most(4) if contender.label in ("in order", "window") else None
            figures.append(Figure(f"memory / row groups of the threads, {contender.label}", groups, target=target))
    return figures + pictures(settings)


def write_rows(folder: Path, rows: int, group: int) -> None:
    """Write the table to one file and to ten."""
    import pyarrow as pa
    from pyarrow import parquet

    random = np.random.default_rng(0)
    made = pa.table({f"x{number}": random.random(rows, np.float32) for number in range(COLUMNS)})
    parquet.write_table(made, folder / "one.parquet", row_group_size=group)
    (folder / "ten").mkdir()
    for number in range(FILES):
        part = made.slice(number * rows // FILES, rows // FILES)
        parquet.write_table(part, folder / f"ten/{number}.parquet", row_group_size=group)


def rows_in(batch: dict[str, Any]) -> int:
    return len(batch["x0"])


def table(
    paths: list[str], shuffle: Any, batch: int, least_s: float, port: int | None = None
) -> AbstractContextManager[Measure]:
    # Row groups are the question: so small a table would be read into memory.
    source = aiofeed.Table(paths, in_memory=False, options=None if port is None else options_of(port))
    return fed(aiofeed.Feeder(source, batch_size=batch, shuffle=shuffle), rows_in, least_s=least_s)


@contextmanager
def scan(path: str, batch: int, least_s: float) -> Iterator[Measure]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(file.num_row_groups):
            read = file.read_row_group(number)
            columns = {name: torch.from_dlpack(read[name].chunk(0)) for name in read.column_names}
            for start in range(0, len(read), batch):
                yield {name: column[start : start + batch] for name, column in columns.items()}

    with epochs(batches, rows_in, least_s=least_s) as measure:
        yield measure


def pictures(settings: Settings) -> list[Figure]:
    count = settings.size(3_000, 96)
    folder = generate(settings.data / f"parquet-pictures-{count}", lambda made: write_pictures(settings, made, count))
    path = str(folder / "pictures.parquet")
    contenders = [
        Contender(name, picture_rows, {"path": path, "shuffle": shuffle})
        for name, shuffle in (("in order", False), ("shuffled", True))
    ]
    race = interleave(contenders, settings)
    return [
        race.speed("shuffled", "in order", 0.95, "pictures"),
        race.cpu("shuffled", "in order", None, "pictures"),
        *race.rates("pictures", "pictures"),
    ]


def write_pictures(settings: Settings, folder: Path, count: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    files = files_below(jpeg_folder(settings.data, count, SIDE, SIDE))
    made = pa.table({"image": [Path(path).read_bytes() for path in files], "label": list(range(count))})
    parquet.write_table(made, folder / "pictures.parquet", row_group_size=100)


def picture_rows(path: str, shuffle: bool) -> AbstractContextManager[Measure]:
    source = aiofeed.ParquetRows(path, data="image", target="label")
    return fed(aiofeed.Feeder(source, decode=aiofeed.DecodeImage(SIDE), batch_size=64, shuffle=shuffle), labelled)
