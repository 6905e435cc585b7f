"""How fast are batches of a table?

100,000 rows of a Hugging Face dataset that is saved and mapped: 16 floats, an integer and a double; shuffled batches of
256. ``Table``, also by threads as for a device, is compared with ``DataLoader`` over the dataset with two workers.
"bytes" are rows of 20 KB of bytes and an integer, without decoding, in batches of 64. JSON Lines: ``Stream`` of a
generator that parses 100,000 lines of 12 fields, batches of 256 dicts, beside a bare loop that only parses them. Token
lists: ``Pack`` over a table of 20,000 lists, rows of 2,048, batch 8, beside a ``DataLoader`` of rows packed before.
"narrow": Parquet of 24 MB, rows of 8 bytes, batches of 64, first in memory, as by default, then by row groups. Raw
text: ``Pack("decoded")`` over texts of 80 characters with a decoder that sleeps 2 ms, as a tokenizer computes without
the GIL, beside a pool of 16 threads that only decodes.

Targets: 10 times ``DataLoader``, also by threads; for bytes the speed of ``DataLoader`` without workers; for JSON Lines
0.6 of parsing; for token lists at most 5 times the processor time of ``DataLoader``, some 10 ns a token; for narrow
rows the first batch after 0.5 s, then 40 us for each; for raw text 0.9 of the pool.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import aiofeed
from aiofeed.tables.memory import MemoryTable
from benchmarks.contenders import epochs, fed, loaded
from benchmarks.data import generate
from benchmarks.figures import Figure, at_most
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "Rows of tables, shuffled: numbers, bytes of 20 KB, JSON Lines, token lists, narrow Parquet"

BATCH = 256
BYTES_BATCH = 64
LOADER, BYTES_LOADER = "DataLoader, 2 workers", "DataLoader, no workers"
PACKED_LOADER = "DataLoader of packed rows"
WHOLE, GROUPS = "Table", "Table, row groups"


def run(settings: Settings) -> list[Figure]:
    options = {"path": str(numbers(settings))}
    contenders = [
        Contender("Table", table, options),
        Contender("Table, threads", table, {**options, "in_memory": False}),
        Contender(LOADER, data_loader, {**options, "workers": 2}),
    ]
    race = interleave(contenders, settings)
    options = {"path": str(rows_of_bytes(settings))}
    contenders = [
        Contender(kind, bytes_rows, {**options, "kind": kind}) for kind in ("Table", "Dataset", "ParquetRows")
    ]
    of_bytes = interleave([*contenders, Contender(BYTES_LOADER, bytes_loader, options)], settings)
    path = str(json_lines(settings))
    of_lines = interleave(
        [Contender("Stream", line_stream, {"path": path}), Contender("parsing", parsing, {"path": path})], settings
    )
    documents = settings.size(20_000, 200)
    of_lists = interleave(
        [Contender(each, packed, {"documents": documents, "kind": each}) for each in ("Pack", PACKED_LOADER)], settings
    )
    options = {"path": str(narrow(settings))}
    of_narrow = interleave(
        [Contender(each, narrow_rows, {**options, "whole": each == WHOLE}) for each in (WHOLE, GROUPS)], settings
    )
    batch_us = tuple(1e6 * 64 / rate for rate in of_narrow.rate(WHOLE))
    texts = [Contender(each, raw_text, {"path": path, "kind": each}) for each in ("Pack, decoded", "pool")]
    of_texts = interleave(texts, settings)
    return [
        race.speed("Table", LOADER, 10),
        race.speed("Table, threads", LOADER, 10, "threads"),
        *[of_bytes.speed(each.label, BYTES_LOADER, 1, f"bytes, {each.label}") for each in contenders],
        *race.rates("rows"),
        *of_bytes.rates("rows", "bytes"),
        of_lines.speed("Stream", "parsing", 0.6, "JSON Lines"),
        of_lines.cpu("Stream", "parsing", None, "JSON Lines"),
        *of_lines.rates("lines", "JSON Lines"),
        of_lists.cpu("Pack", PACKED_LOADER, 5, "token lists"),
        *of_lists.rates("tokens", "token lists"),
        Figure("narrow: first batch", of_narrow.column(WHOLE, "first_s", 1000), "ms", at_most(500)),
        Figure("narrow: a batch", batch_us, "us", at_most(40)),
        of_narrow.speed(WHOLE, GROUPS, None, "narrow"),
        *of_narrow.rates("rows", "narrow"),
        of_texts.speed("Pack, decoded", "pool", 0.9, "raw text"),
        *of_texts.rates("tokens", "raw text"),
    ]


def numbers(settings: Settings) -> Path:
    """The folder of rows of numbers."""
    rows = settings.size(100_000, 3_000)
    random = np.random.default_rng(0)

    def columns() -> dict[str, Any]:
        x, y, z = random.random((rows, 16), np.float32), random.integers(10, size=rows), random.random(rows)
        return {"x": x, "y": y, "z": z}

    return written(settings.data / f"table-{rows}", columns, {"y": "int64", "z": "float64"}, x=16)


def rows_of_bytes(settings: Settings) -> Path:
    """The folder of rows of 20 KB of bytes and an integer."""
    rows = settings.size(4_000, 200)
    random = np.random.default_rng(0)

    def columns() -> dict[str, Any]:
        return {"image": [random.bytes(20_000) for _ in range(rows)], "y": list(range(rows))}

    return written(settings.data / f"table-bytes-{rows}", columns, {"image": "binary", "y": "int64"})


def narrow(settings: Settings) -> Path:
    """A Parquet file of an integer and a float in each row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = settings.size(3_000_000, 30_000)

    def write(folder: Path) -> None:
        columns = {"row": np.arange(rows, dtype=np.int32), "y": np.zeros(rows, np.float32)}
        pq.write_table(pa.table(columns), folder / "rows.parquet")

    return generate(settings.data / f"narrow-{rows}", write) / "rows.parquet"


@contextmanager
def narrow_rows(path: str, whole: bool) -> Iterator[Measure]:
    """Measures batches of the first epoch, without the first one."""
    batches = 4_000 if whole else 400

    def measure() -> Mapping[str, float]:
        started = time.perf_counter()
        source = aiofeed.Table(path, in_memory=whole)
        with aiofeed.Feeder(source, batch_size=64, shuffle=True) as feeder:
            iterator = iter(feeder)
            next(iterator)
            first = time.perf_counter()
            items = sum(len(batch["row"]) for batch in islice(iterator, batches))
            return {"items": items, "wall_s": time.perf_counter() - first, "first_s": first - started}

    yield measure


def written(folder: Path, columns: Any, kinds: dict[str, str], **vectors: int) -> Path:
    """The folder of a dataset, and beside it the same table as Parquet; written once."""
    if not folder.exists():
        import datasets

        datasets.disable_progress_bars()
        features = {name: datasets.Sequence(datasets.Value("float32"), size) for name, size in vectors.items()}
        features |= {name: datasets.Value(kind) for name, kind in kinds.items()}
        dataset = datasets.Dataset.from_dict(columns(), features=datasets.Features(features))
        dataset.to_parquet(folder.with_suffix(".parquet"), batch_size=1000)
        dataset.save_to_disk(folder)
    return folder


def with_label(batch: Any) -> int:
    return len(batch["y"])


def labels(rows: list[dict[str, Any]]) -> Any:
    return torch.tensor([row["y"] for row in rows])


def unchanged(row: Any) -> Any:
    return row


def table(path: str, in_memory: bool | None = None) -> AbstractContextManager[Measure]:
    import datasets

    if in_memory is not None:
        MemoryTable.in_memory = in_memory  # type: ignore[method-assign, assignment]
    source = aiofeed.Table(datasets.load_from_disk(path))
    return fed(aiofeed.Feeder(source, batch_size=BATCH, shuffle=True), with_label)


def data_loader(path: str, workers: int) -> AbstractContextManager[Measure]:
    import datasets

    return loaded(datasets.load_from_disk(path).with_format("torch"), BATCH, workers, with_label, shuffle=True)


def bytes_rows(path: str, kind: str) -> AbstractContextManager[Measure]:
    import datasets

    dataset: Any = datasets.load_from_disk(path)
    options: dict[str, Any] = {"batch_size": BYTES_BATCH, "shuffle": True, "collate_fn": labels}
    source: Any = aiofeed.Table(dataset) if kind == "Table" else dataset
    if kind == "ParquetRows":
        source, options = aiofeed.ParquetRows(f"{path}.parquet"), {**options, "decode": unchanged, "shuffle": "window"}
    return fed(aiofeed.Feeder(source, **options))


def bytes_loader(path: str) -> AbstractContextManager[Measure]:
    import datasets

    return loaded(datasets.load_from_disk(path), BYTES_BATCH, shuffle=True, collate_fn=labels)


def json_lines(settings: Settings) -> Path:
    """The file of JSON Lines, written once."""
    count = settings.size(100_000, 1_000)

    def write(folder: Path) -> None:
        random = Random(0)
        rows = (
            {"id": number, "text": random.randbytes(40).hex(), **{f"x{each}": random.random() for each in range(10)}}
            for number in range(count)
        )
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    return generate(settings.data / f"lines-{count}", write) / "rows.jsonl"


def parsed(path: str) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as lines:
        for line in lines:
            yield json.loads(line)


def line_stream(path: str) -> AbstractContextManager[Measure]:
    return fed(aiofeed.Feeder(aiofeed.Stream(partial(parsed, path)), batch_size=BATCH, collate_fn=list))


def parsing(path: str) -> AbstractContextManager[Measure]:
    return epochs(lambda: [sum(1 for _ in parsed(path))], int)


def packed(documents: int, kind: str) -> AbstractContextManager[Measure]:
    import pyarrow as pa

    random = np.random.default_rng(0)
    offsets = np.cumsum([0, *random.lognormal(5.6, 0.8, documents).clip(8, 4000).astype(int)]).astype(np.int32)
    tokens = random.integers(50_000, size=offsets[-1], dtype=np.int32)
    if kind == PACKED_LOADER:
        rows = torch.from_numpy(tokens[: len(tokens) // 2048 * 2048].reshape(-1, 2048))
        return loaded(torch.utils.data.TensorDataset(rows), 8, 0, lambda batch: batch[0].numel(), shuffle=True)
    table = aiofeed.Table(pa.table({"ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))}))
    plan = aiofeed.Pack(context=2048, rows=8)
    return fed(aiofeed.Feeder(table, batch_size=plan, shuffle=True), lambda batch: batch["ids"].numel())


def tokenized(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.002)
    return {"ids": np.frombuffer(row["text"].encode(), np.uint8)}


def raw_text(path: str, kind: str) -> AbstractContextManager[Measure]:
    rows, threads = list(islice(parsed(path), 10_000)), 16
    if kind == "pool":
        pool = ThreadPoolExecutor(threads)
        return epochs(lambda: pool.map(tokenized, rows), lambda sample: len(sample["ids"]))
    import pyarrow as pa

    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        aiofeed.Table(pa.Table.from_pylist([{"text": row["text"]} for row in rows])),
        decode=tokenized,
        batch_size=aiofeed.Pack("decoded", context=2048, rows=8),
        shuffle=True,
        limits=aiofeed.Limits(decode_threads=threads),
    )
    return fed(feeder, lambda batch: int((batch["document_ids"] >= 0).sum()))
