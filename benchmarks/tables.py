"""How fast are batches of a table?

100,000 rows of a Hugging Face dataset that is saved and mapped, as ``datasets`` writes it: 16 floats, an integer and a
double per row; shuffled batches of 256, no step. ``Table`` is compared with ``DataLoader`` over the dataset with
``with_format("torch")``, with two workers and without; and with the same columns as ``Tensors``, which are copied into
memory before. "threads" is ``Table`` when a thread makes batches ahead, as for a device or a table that memory cannot
hold; "rows" makes a dict of Python values of each row, as for ``collate_fn``. Parquet has row groups of 1,000 rows, in
order and shuffled by "window".

"bytes" are rows of 20 KB of bytes and an integer, as of a data set of images, without decoding, in batches of 64.

Target: at least 10 times ``DataLoader`` with workers; for bytes the speed of ``DataLoader`` without workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, at_least, column, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

TITLE = "rows of a Hugging Face dataset, shuffled: 3 columns of numbers, batch 256; 20 KB of bytes, batch 64"

BATCH = 256
BYTES_BATCH = 64


def run(settings: Settings) -> list[Figure]:
    rows = settings.size(100_000, 3_000)
    folder = settings.data / f"table-{rows}"
    if not folder.exists():
        write(folder, rows)
    options = {"path": str(folder)}
    ours, torchs = ("torch", "aiofeed:Feeder", "aiofeed:Table", "datasets"), ("torch.utils.data", "datasets")
    contenders = [
        Contender("Table", table, options, ours),
        Contender("Table, threads", table, {**options, "in_memory": False}, ours),
        Contender("Table, rows", table, {**options, "each": True}, ours),
        Contender("Table, Parquet", table, {**options, "parquet": True, "shuffle": False}, ours),
        Contender("Table, Parquet, window", table, {**options, "parquet": True, "shuffle": "window"}, ours),
        Contender("Tensors", tensors, options, ours),
        Contender("DataLoader, no workers", data_loader, options, torchs),
        Contender("DataLoader, 2 workers", data_loader, {**options, "workers": 2}, torchs),
    ]
    options = {"path": str(bytes_folder(settings))}
    of_bytes = [
        Contender("Table", bytes_rows, {**options, "kind": "Table"}, ours),
        Contender("Feeder(dataset)", bytes_rows, {**options, "kind": "Dataset"}, ours),
        Contender("ParquetRows, window", bytes_rows, {**options, "kind": "Parquet"}, ours),
        Contender("DataLoader", bytes_loader, options, torchs),
    ]
    samples = interleave(contenders, settings)
    batches = -(-rows // BATCH)
    wall = {label: column(rounds, "wall_s", 1e6 / batches) for label, rounds in samples.items()}
    cpu = {label: column(rounds, "cpu_s", 1e6 / batches) for label, rounds in samples.items()}
    rates_of_bytes = {label: rates(rounds) for label, rounds in interleave(of_bytes, settings).items()}
    theirs = wall["DataLoader, 2 workers"]
    return [
        Figure("speed / DataLoader, 2 workers", per(theirs, wall["Table"]), target=at_least(10)),
        Figure("threads: speed / DataLoader, 2 workers", per(theirs, wall["Table, threads"]), target=at_least(10)),
        Figure("rows: speed / DataLoader, 2 workers", per(theirs, wall["Table, rows"])),
        Figure("Parquet: speed / DataLoader, 2 workers", per(theirs, wall["Table, Parquet"])),
        Figure("speed / DataLoader, no workers", per(wall["DataLoader, no workers"], wall["Table"])),
        Figure("speed / Tensors", per(wall["Tensors"], wall["Table"])),
        *[
            Figure(f"bytes: {label}: speed / DataLoader", per(values, rates_of_bytes["DataLoader"]), target=at_least(1))
            for label, values in rates_of_bytes.items()
            if label != "DataLoader"
        ],
        *[Figure(f"bytes: {label}", values, "/s") for label, values in rates_of_bytes.items()],
        *[Figure(f"batch: {label}", values, "us") for label, values in wall.items()],
        *[Figure(f"CPU per batch: {label}", cpu[label], "us") for label in ("Table", "Table, threads", "Tensors")],
    ]


def write(folder: Path, rows: int) -> None:
    """Write the dataset, and the same table as Parquet."""
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    random = np.random.default_rng(0)
    x, y, z = random.random((rows, 16), np.float32), random.integers(10, size=rows), random.random(rows)
    kinds = {"y": datasets.Value("int64"), "z": datasets.Value("float64")}
    features = datasets.Features({"x": datasets.Sequence(datasets.Value("float32"), 16), **kinds})
    dataset = datasets.Dataset.from_dict({"x": x, "y": y, "z": z}, features=features)
    dataset.to_parquet(folder.with_suffix(".parquet"), batch_size=1000)
    dataset.save_to_disk(folder)


def bytes_folder(settings: Settings) -> Path:
    """The folder of rows of 20 KB of bytes and an integer, and beside it the same table as Parquet; written once."""
    import datasets
    import numpy as np

    rows = settings.size(4_000, 200)
    folder = settings.data / f"table-bytes-{rows}"
    if folder.exists():
        return folder
    datasets.disable_progress_bars()
    random = np.random.default_rng(0)
    features = datasets.Features({"image": datasets.Value("binary"), "y": datasets.Value("int64")})
    columns = {"image": [random.bytes(20_000) for _ in range(rows)], "y": list(range(rows))}
    dataset = datasets.Dataset.from_dict(columns, features=features)
    dataset.to_parquet(folder.with_suffix(".parquet"), batch_size=1000)
    dataset.save_to_disk(folder)
    return folder


def labels(rows: list[dict[str, Any]]) -> Any:
    import torch

    return torch.tensor([row["y"] for row in rows])


def unchanged(row: Any) -> Any:
    return row


@contextmanager
def bytes_rows(path: str, kind: str) -> Iterator[Measure]:
    import datasets

    import aiofeed

    dataset: Any = datasets.load_from_disk(path)
    options: dict[str, Any] = {"shuffle": True, "collate_fn": labels}
    source: Any = aiofeed.Table(dataset) if kind == "Table" else dataset
    if kind == "Parquet":
        source, options = aiofeed.ParquetRows(f"{path}.parquet"), {**options, "decode": unchanged, "shuffle": "window"}
    with aiofeed.Feeder(source, batch_size=BYTES_BATCH, **options) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(len(batch) for batch in one_epoch())}

        epoch()
        yield epoch


@contextmanager
def bytes_loader(path: str) -> Iterator[Measure]:
    import datasets
    from torch.utils.data import DataLoader

    dataset: Any = datasets.load_from_disk(path)
    loader = DataLoader(dataset, BYTES_BATCH, shuffle=True, collate_fn=labels)

    def epoch() -> Mapping[str, float]:
        return {"items": sum(len(batch) for batch in loader)}

    epoch()
    yield epoch


@contextmanager
def table(
    path: str, in_memory: bool | None = None, each: bool = False, parquet: bool = False, shuffle: bool | str = True
) -> Iterator[Measure]:
    import datasets

    import aiofeed
    from aiofeed.sources.tables.memory import MemoryTable

    if in_memory is not None:
        MemoryTable.in_memory = in_memory  # type: ignore[method-assign, assignment]
    source = aiofeed.Table(f"{path}.parquet" if parquet else datasets.load_from_disk(path))
    options: dict[str, Any] = {"collate_fn": len} if each else {}
    with aiofeed.Feeder(source, batch_size=BATCH, shuffle=shuffle, **options) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(batch if each else len(batch["y"]) for batch in one_epoch())}

        epoch()
        yield epoch


@contextmanager
def tensors(path: str) -> Iterator[Measure]:
    import datasets

    import aiofeed

    columns = datasets.load_from_disk(path).with_format("numpy")[:]
    with aiofeed.Feeder(aiofeed.Tensors(*columns.values()), batch_size=BATCH, shuffle=True) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(len(batch[1]) for batch in one_epoch())}

        epoch()
        yield epoch


@contextmanager
def data_loader(path: str, workers: int = 0) -> Iterator[Measure]:
    import datasets
    from torch.utils.data import DataLoader

    dataset: Any = datasets.load_from_disk(path).with_format("torch")
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)

    def epoch() -> Mapping[str, float]:
        return {"items": sum(len(batch["y"]) for batch in loader)}

    epoch()
    yield epoch
