"""Plans without ``lengths=`` over every source that has an order of its own: the same batches, or the line to write."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import Balanced, Buckets, Feeder, Pack, Stream, Table, TokenBudget, pad_collate
from aiofeed.errors import ReadError

datasets = pytest.importorskip("datasets")
arrow = pytest.importorskip("pyarrow")
pandas = pytest.importorskip("pandas")

ROWS = [{"text": f"{n}", "id": n, "tokens": [n] * (3 + 7 * n % 20)} for n in range(1, 41)]


def streaming(rows: Any = ROWS) -> Any:
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)


def of_file(kind: str, folder: Path) -> Any:
    """A streaming data set of a file."""
    table, path = arrow.Table.from_pylist(ROWS), str(folder / f"rows.{kind}")
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=9)
    elif kind == "json":
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        with arrow.OSFile(path, "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return datasets.load_dataset(kind, data_files=path, streaming=True, split="train", cache_dir=str(folder / "c"))


async def items() -> AsyncIterator[Any]:
    for row in ROWS:
        yield row


class Iterable(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ({"tokens": np.array(row["tokens"])} for row in ROWS)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: Stream(ROWS),
    "async": lambda _: Stream(items),
    "series": lambda _: Stream(lambda: (np.array(row["tokens"]) for row in ROWS)),
    "IterableDataset": lambda _: Iterable(),
    "JSON lines": lambda _: Stream(lambda: (json.loads(json.dumps(row)) for row in ROWS)),
    "Hugging Face": lambda _: streaming(),
    "of torch": lambda _: streaming().with_format("torch"),
    "of NumPy": lambda _: Stream(streaming().with_format("numpy")),
    "mapped": lambda _: Table(streaming().map(lambda row: {**row, "more": 1}).select_columns(["more", "tokens"])),
    "Table": lambda _: Table(streaming()),
    "column": lambda _: Table(streaming(), ["tokens"]),
    "data": lambda _: Table(streaming(), data="tokens"),
    "Parquet": lambda folder: Table(of_file("parquet", folder)),
    "JSON": lambda folder: Table(of_file("json", folder)),
    "Arrow": lambda folder: Table(of_file("arrow", folder), ["id", "tokens"]),
}
PLANS: dict[str, Callable[..., Any]] = {
    "budget": lambda **how: TokenBudget(max_tokens=64, window=16, **how),
    "buckets": lambda **how: Buckets(boundaries=[8, 16], batch_sizes=[5, 4, 2], **how),
    "pack": lambda **how: Pack(context=32, rows=2, **how),
    "whole": lambda **how: Pack(context=32, rows=2, split=False, window=9, **how),
}


def tokens_of(sample: Any) -> Any:
    return torch.as_tensor(sample["tokens"] if isinstance(sample, dict) else sample)


def read(source: Any, plan: Any, **options: Any) -> list[list[list[int]]]:
    if not isinstance(plan, Pack):
        options["collate_fn"] = pad_collate()
    with Feeder(source, batch_size=plan, decode=tokens_of, **options) as feeder:
        return [batch["tokens"].tolist() if isinstance(batch, dict) else batch[0].tolist() for batch in feeder]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_same_batches_of_every_source(source: str, plan: str, tmp_path: Path) -> None:
    """Rows of any kind are measured by their first list, by a name and by a function as plain tensors are."""
    expected = read(Stream([torch.tensor(row["tokens"]) for row in ROWS]), PLANS[plan]())
    assert len(expected) > 4
    assert read(SOURCES[source](tmp_path), PLANS[plan]()) == expected
    if source not in ("series", "data"):
        assert read(SOURCES[source](tmp_path), PLANS[plan](length="tokens")) == expected
    assert read(SOURCES[source](tmp_path), PLANS[plan](length=lambda sample: len(tokens_of(sample)))) == expected
    if plan == "budget":
        assert read(SOURCES[source](tmp_path), PLANS[plan](), shard=(1, 2)) == (expected + expected[-1:])[1::2]


UNKNOWN: dict[str, tuple[Any, Any, str]] = {
    "Arrow rows": (lambda: Stream(streaming().with_format("arrow")), None, r"len\(sample\['tokens'\]\[0\]\)"),
    "pandas rows": (lambda: Stream(streaming().with_format("pandas")), "tokens", r"len\(sample\['tokens'\]\[0\]\)"),
    "record batches": (lambda: Stream(arrow.Table.from_pylist(ROWS).to_batches), None, "RecordBatch of 40 rows"),
    "rows of a frame": (lambda: Stream(lambda: (row for _, row in pandas.DataFrame(ROWS).iterrows())), None, "Series"),
    "texts": (lambda: Stream(["a", "b"]), None, r"len\(sample\)"),
    "words": (lambda: Stream([{"words": np.array(["a", "b"])}]), None, r"len\(sample\['words'\]\)"),
    "numbers": (lambda: Stream([{"id": 1}]), None, r"sample\['id'\]"),
    "no such name": (lambda: Stream(ROWS), "token", r"len\(sample\['text'\]\)"),
    "a number by name": (lambda: Stream(ROWS), "id", r"sample\['id'\]"),
    "bytes by name": (lambda: Stream([b"a"]), "tokens", r"len\(sample\)"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_length_that_is_not_known(kind: str, plan: str) -> None:
    """The first item is an error that shows the line to write, and is never measured as 1."""
    source, how, line = UNKNOWN[kind]
    with pytest.raises(ReadError, match=rf"no length in sample 0.*{line}"):
        read(source(), PLANS[plan](length=how))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("options", "how", "line"),
    [
        ({"columns": ["text", "id"]}, None, r"len\(sample\['text'\]\)"),
        ({}, "id", r"length=lambda sample: sample\['id'\]"),
        ({}, "token", "length="),
        ({"data": "text"}, None, r"len\(sample\)"),
        ({"data": "tokens"}, "tokens", "length="),
    ],
)
def test_columns_without_a_length_are_found_when_the_feeder_is_made(
    options: Any, how: Any, line: str, plan: str
) -> None:
    """The types of the columns say so before anything is read; a pack takes columns of tokens only."""
    with pytest.raises(ValueError, match=rf"no length in sample 0.*{line}|'id'\] cannot be packed, is not possible"):
        Feeder(Table(streaming(), **options), batch_size=PLANS[plan](length=how))


def test_null_rows_and_plans_with_lengths_are_refused() -> None:
    """A null row has no length, and a stream no list of lengths."""
    rows = [{"tokens": [1, 2]}, {"tokens": None}, {"tokens": [3]}]
    for data, message in (("tokens", "'tokens' is null"), (None, "no length in sample 1")):
        with pytest.raises(ReadError, match=rf"Table\[1\].*{message}"):
            read(Table(streaming(rows), data=data), TokenBudget(max_tokens=9))
    with pytest.raises(ValueError, match="without lengths="):
        Feeder(Table(streaming()), batch_size=Balanced("measure", 64))
