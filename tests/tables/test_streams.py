"""``Table`` over streaming datasets of Hugging Face: batches of columns, and their state."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from aiofeed import FailurePolicy, Feeder, Table
from aiofeed.errors import DecodeError, ReadError

datasets = pytest.importorskip("datasets")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets`` sleeps at the end of interleaved Parquet files."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


def streaming(folder: Path) -> Any:
    """60 rows of three Parquet files, which are read by record batches."""
    for number in range(3):
        x = range(20 * number, 20 * number + 20)
        columns = {"x": arrow.array(x, arrow.int32()), "ids": [[each, -each] for each in x], "text": list(map(str, x))}
        parquet.write_table(arrow.table(columns), folder / f"{number}.parquet", row_group_size=6)
    files = sorted(map(str, folder.glob("*.parquet")))
    return datasets.load_dataset(
        "parquet", data_files=files, streaming=True, split="train", cache_dir=str(folder / "c")
    )


def plus_one(rows: dict[str, Any]) -> dict[str, Any]:
    return {"x": [each + 1 for each in rows["x"]]}


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda data: data,
    "mapped": lambda data: data.map(plus_one, batched=True, batch_size=4).filter(lambda row: row["x"] % 3 > 0),
    "shuffled shards": lambda data: data.shuffle(seed=5, buffer_size=1),
    "interleaved": lambda data: datasets.interleave_datasets([data.take(13), data.skip(30)]),
    "formatted": lambda data: data.with_format("numpy").skip(2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_resumes_exactly(kind: str, tmp_path: Path) -> None:
    """After each batch of three epochs the state continues with the batches of an uninterrupted run."""
    data = KINDS[kind](streaming(tmp_path))
    columns = ["x", "ids"]

    def read(feeder: Any) -> list[Any]:
        return [(batch["x"].tolist(), batch["ids"].tolist()) for batch in feeder]

    with Feeder(Table(data, columns), batch_size=7) as feeder:
        epochs, states = [], []
        for _ in range(3):
            epochs.append([])
            for batch in feeder:
                epochs[-1] += read([batch])
                states.append(json.loads(json.dumps(feeder.state_dict())))
    assert [len(x) for x, _ in epochs[0]][:-1] == [7] * (len(epochs[0]) - 1)
    for at, state in list(enumerate(states[:-1]))[::2]:
        with Feeder(Table(data, columns), batch_size=7) as resumed:
            resumed.load_state_dict(state)
            epoch, batches = divmod(at + 1, len(epochs[0]))
            assert read(resumed) == epochs[epoch][batches:]


def test_batches_have_the_types_of_their_columns(tmp_path: Path) -> None:
    """A batch is a dict of tensors of the dtypes of the columns, as from the same rows in a table."""
    data = streaming(tmp_path)
    with Feeder(Table(data, ["x", "ids"]), batch_size=8) as feeder:
        found = next(iter(feeder))
    [expected] = islice(Feeder(Table(str(tmp_path / "0.parquet"), ["x", "ids"]), batch_size=8), 1)
    assert list(found) == list(expected)
    assert all(bool((found[name] == expected[name]).all()) for name in found)
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in expected.items()}


def test_rows_samples_and_targets(tmp_path: Path) -> None:
    """``collate_fn=`` and ``decode=`` get rows, ``data`` is a sample and ``target`` its target; ranks take turns."""
    data = streaming(tmp_path)
    with Feeder(Table(data), batch_size=2, collate_fn=lambda rows: rows) as feeder:
        [first, second] = next(iter(feeder))
    assert (first["text"], second["x"], second["ids"].tolist()) == ("0", 1, [1, -1])
    source = Table(data, data="text", target="x")
    with Feeder(source, decode=len, batch_size=12, shard=(1, 2)) as feeder:
        sizes, targets = next(iter(feeder))
    assert targets.tolist() == list(range(1, 24, 2))
    assert sizes.tolist() == [1] * 5 + [2] * 7
    several = Table(data, data="text", target=["x", "ids"])
    with Feeder(several, decode=len, batch_size=2) as feeder:
        _, named = next(iter(feeder))
    assert named["x"].tolist() == [0, 1]


def test_null_rows_are_errors(tmp_path: Path) -> None:
    """A row with a null is the error of that row, which ``on_error`` may skip."""
    parquet.write_table(arrow.table({"x": [1, None, 3]}), tmp_path / "null.parquet")
    data = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "null.parquet"), streaming=True, split="train", cache_dir=str(tmp_path)
    )
    with (
        pytest.raises((ReadError, DecodeError), match=r"Table\[1\].*'x' is null"),
        Feeder(Table(data), batch_size=3) as feeder,
    ):
        next(iter(feeder))
    with Feeder(Table(data), batch_size=3, on_error=FailurePolicy("skip", max_failures=5)) as feeder:
        assert next(iter(feeder))["x"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            lambda data: data.shuffle(buffer_size=9).map(plus_one),
            {},
            ValueError,
            r"9 rows of its shuffle buffer.*Stream\(",
        ),
        (lambda data: datasets.interleave_datasets([data, data.shuffle(buffer_size=5)]), {}, ValueError, "5 rows"),
        (lambda data: split_dataset_by_node(data, 0, 2), {}, ValueError, "split_dataset_by_node"),
        (lambda data: data, {"columns": ["absent"]}, ValueError, "no column 'absent'; there are"),
        (lambda data: data, {"options": {}}, ValueError, "store= and options="),
    ],
)
def test_what_cannot_be_exact_is_refused(
    change: Callable[[Any], Any], options: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    """Datasets whose state is not exact, and wrong columns, are refused when the table is made."""
    with pytest.raises(error, match=message):
        Table(change(streaming(tmp_path)), **options)


def test_a_column_of_texts_is_refused(tmp_path: Path) -> None:
    """It has no tensors."""
    with pytest.raises(TypeError, match="column 'text' has the type string"):
        Feeder(Table(streaming(tmp_path)), batch_size=2)
