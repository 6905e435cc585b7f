"""How fast are batches of a table?

100,000 rows of a Hugging Face dataset that is saved and mapped, as ``datasets`` writes it: 16 floats, an integer and a
double per row; shuffled batches of 256, no step. ``Table`` is compared with ``DataLoader`` over the dataset with
``with_format("torch")``, with two workers and without; and with the same columns as ``Tensors``, which are copied into
memory before. "threads" is ``Table`` when a thread makes batches ahead, as for a device or a table that memory cannot
hold; "rows" makes a dict of Python values of each row, as for ``collate_fn``. Parquet has row groups of 1,000 rows, in
order and shuffled by "window".

Target: at least 10 times ``DataLoader`` with workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, at_least, column, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

TITLE = "rows of 3 columns of numbers from a Hugging Face dataset, batch 256, shuffled"

BATCH = 256


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
    samples = interleave(contenders, settings)
    batches = -(-rows // BATCH)
    wall = {label: column(rounds, "wall_s", 1e6 / batches) for label, rounds in samples.items()}
    cpu = {label: column(rounds, "cpu_s", 1e6 / batches) for label, rounds in samples.items()}
    theirs = wall["DataLoader, 2 workers"]
    return [
        Figure("speed / DataLoader, 2 workers", per(theirs, wall["Table"]), target=at_least(10)),
        Figure("threads: speed / DataLoader, 2 workers", per(theirs, wall["Table, threads"]), target=at_least(10)),
        Figure("rows: speed / DataLoader, 2 workers", per(theirs, wall["Table, rows"])),
        Figure("Parquet: speed / DataLoader, 2 workers", per(theirs, wall["Table, Parquet"])),
        Figure("speed / DataLoader, no workers", per(wall["DataLoader, no workers"], wall["Table"])),
        Figure("speed / Tensors", per(wall["Tensors"], wall["Table"])),
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
