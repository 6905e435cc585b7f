"""Tables of Parquet files: a row group is decoded once for all batches that need it."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.objects import look_ahead
from aiofeed.shards.parquet import ParquetRows
from aiofeed.shards.urls import Shard
from aiofeed.tables.columns import GatheredRows
from tests.support.fault_server import FaultServer

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, GROUP, BATCH = 600, 40, 16


def columns(rows: int, start: int = 0) -> dict[str, Any]:
    """Columns of several types; ``row`` is the number of the row."""
    numbers = np.arange(start, start + rows)
    return {
        "row": numbers,
        "half": numbers.astype(np.float16),
        "float": pa.array(numbers / 2, pa.float32()),
        "even": pa.array((numbers % 2 == 0).tolist()),
        "kind": pa.array((numbers % 3).tolist(), pa.int32()).dictionary_encode(),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 4), pa.float32()), 4),
        "other": pa.array(numbers * 2, pa.float32()),
    }


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Two files whose last row group is smaller."""
    for name, start, end in (("a", 0, 290), ("b", 290, ROWS)):
        pq.write_table(pa.table(columns(end - start, start)), tmp_path / f"{name}.parquet", row_group_size=GROUP)
    return [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """How often each row group is decoded, by its file."""
    found: Counter[tuple[str, int]] = Counter()
    decode = ParquetRows._decode_rows

    def count(self: Any, shard: Any, group: int, *arguments: Any) -> Any:
        found[shard.key, group] += 1
        return decode(self, shard, group, *arguments)

    monkeypatch.setattr(ParquetRows, "_decode_rows", count)
    return found


def new_feeder(paths: list[str], **arguments: Any) -> aiofeed.Feeder[Any]:
    chosen = {"batch_size": BATCH, "seed": 2, **arguments}
    table = aiofeed.Table(paths, chosen.pop("columns", None), in_memory=False)
    return aiofeed.Feeder(table, **chosen)


def rows_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["row"].tolist()]


def check(batch: dict[str, torch.Tensor]) -> None:
    """All columns of a batch are of its rows, and contiguous."""
    row = batch["row"]
    expected = {
        "half": row.to(torch.float16),
        "float": row.float() / 2,
        "even": row % 2 == 0,
        "kind": (row % 3).int(),
        "vector": row.float()[:, None].expand(-1, 4),
        "other": row.float() * 2,
    }
    assert list(batch) == ["row", *expected]
    for name, column in expected.items():
        assert torch.equal(batch[name], column), name
        assert batch[name].is_contiguous(), name


@pytest.mark.parametrize("shuffle", [False, True, "window:3", "keyed"])
def test_each_row_group_is_decoded_once(paths: list[str], decoded: Counter[Any], shuffle: Any) -> None:
    """In whatever order: the look-ahead has room for the table."""
    with new_feeder(paths, shuffle=shuffle) as feeder:
        batches = list(feeder)
    for batch in batches:
        check(batch)
    assert sorted(rows_of(batches)) == list(range(ROWS))
    assert len(decoded) == 8 + 8
    assert set(decoded.values()) <= {1, 2}  # 2: the next epoch has begun
    if shuffle != "window:3":
        with aiofeed.Feeder(aiofeed.Table(pa.table(columns(ROWS))), batch_size=BATCH, seed=2, shuffle=shuffle) as same:
            assert rows_of(same) == rows_of(batches)


@pytest.mark.parametrize("shuffle", [False, True, "window:3", "keyed"])
@pytest.mark.parametrize("kind", [aiofeed.Table, aiofeed.ParquetRows])
def test_small_batches_are_not_all_prepared_before_the_first_one(
    tmp_path: Path,
    decoded: Counter[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
    shuffle: Any,
) -> None:
    """Of rows below one byte, few batches are noted first, then ever more, so that no group is decoded often."""
    monkeypatch.setattr(look_ahead, "BATCHES", 8)
    pq.write_table(pa.table({"row": np.zeros(3000)}), tmp_path / "x.parquet", row_group_size=500)
    noted: list[Any] = []
    note = look_ahead._UpcomingSamples.note
    monkeypatch.setattr(look_ahead._UpcomingSamples, "note", lambda *args: noted.append(args) or note(*args))
    decode = None if kind is aiofeed.Table else operator.itemgetter("row")
    source = kind(str(tmp_path / "x.parquet"), **({"in_memory": False} if kind is aiofeed.Table else {}))
    with aiofeed.Feeder(source, decode=decode, batch_size=4, seed=2, shuffle=shuffle) as feeder:
        steps = iter(feeder)
        next(steps)
        assert len(noted) < 3000 / 4 / 2
        assert sum(1 for _ in steps) == 3000 / 4 - 1
    assert len(decoded) == 6
    assert max(decoded.values()) <= 5
    assert "decoded several times" not in caplog.text


def test_a_small_look_ahead_decodes_more_often_and_says_so_once(
    paths: list[str], decoded: Counter[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Every batch of a shuffled epoch needs all row groups; the order is exact all the same."""
    with new_feeder(paths, shuffle=True) as feeder:
        expected = rows_of(feeder)
    decoded.clear()
    limits = aiofeed.Limits(lookahead_bytes=1_000)
    with caplog.at_level(logging.WARNING), new_feeder(paths, shuffle=True, limits=limits) as feeder:
        assert rows_of(feeder) == expected
        next(iter(feeder))
    assert max(decoded.values()) > 3
    assert [record.message for record in caplog.records if "decoded several times" in record.message] == [
        "Table(600 rows in 2 files): the order needs so many of its parts at a time that each is decoded "
        'several times in an epoch; shuffle="window" needs fewer, and a larger Limits(lookahead_bytes=...) than 0 MiB '
        "has room for more"
    ]


def test_ranks_decode_their_own_row_groups(tmp_path: Path, decoded: Counter[Any]) -> None:
    """With `shuffle="window"`, as far as they divide the window; the samples are those of one rank."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns(ROWS - 40)), path, row_group_size=GROUP // 2)
    with new_feeder([str(path)], shuffle="window:4") as feeder:
        whole = rows_of(feeder)
    groups = []
    for rank in range(2):
        decoded.clear()
        with new_feeder([str(path)], shuffle="window:4", shard=(rank, 2)) as feeder:
            assert rows_of(feeder) == whole[rank::2]
        groups.append(set(decoded))
    assert len(groups[0]) == len(groups[1]) == 14
    assert not groups[0] & groups[1]


def test_a_resume_is_exact(paths: list[str]) -> None:
    """After some batches, with another batch size."""
    with new_feeder(paths, shuffle="window:2") as feeder:
        whole = rows_of(feeder)
    with new_feeder(paths, shuffle="window:2") as feeder:
        iterator = iter(feeder)
        done = rows_of([next(iterator) for _ in range(7)])
        state = feeder.state_dict()
    with new_feeder(paths, shuffle="window:2", batch_size=10) as feeder:
        feeder.load_state_dict(state)
        assert done + rows_of(feeder) == whole


def test_parts_of_a_table(paths: list[str], decoded: Counter[Any]) -> None:
    """A part in the order of the file is read by row groups; so is one in another order."""
    table = aiofeed.Table(paths, in_memory=False)
    for part, expected in ((table[10:400:3], list(range(10, 400, 3))), (table[[70, 5, 599]], [70, 5, 599])):
        decoded.clear()
        with aiofeed.Feeder(part, batch_size=BATCH) as feeder:
            assert rows_of(feeder) == expected
    decoded.clear()
    with aiofeed.Feeder(table[10:400:3], batch_size=BATCH, shuffle="window:2") as feeder:
        assert sorted(rows_of(feeder)) == list(range(10, 400, 3))
    assert max(decoded.values()) <= 2


def test_columns_are_chosen(paths: list[str]) -> None:
    """Only their chunks are read."""
    with new_feeder(paths, columns=["row", "other"]) as feeder:
        batch = next(iter(feeder))
        read = feeder.statistics().bytes_read
    assert list(batch) == ["row", "other"]
    assert 0 < read < ROWS * 20


def test_a_null_fails_its_row(tmp_path: Path) -> None:
    """The others of its row group come."""
    numbers: list[int | None] = list(range(100))
    numbers[33] = None
    pq.write_table(pa.table({"row": numbers}), tmp_path / "x.parquet", row_group_size=20)
    with new_feeder([str(tmp_path / "x.parquet")], on_error="skip") as feeder:
        assert rows_of(feeder) == [number for number in numbers if number is not None]
        assert feeder.statistics().failures == 1
    with new_feeder([str(tmp_path / "x.parquet")]) as feeder, pytest.raises(aiofeed.errors.ReadError, match=r"\[33\]"):
        list(feeder)


def test_lists_of_different_lengths_are_named(tmp_path: Path) -> None:
    """Also if each row group has one length."""
    for name, lists in (("x", [[1, 2]] * 50 + [[1, 2, 3]] * 50), ("y", [[1], [2, 3]] * 50)):
        pq.write_table(pa.table({"v": lists}), tmp_path / f"{name}.parquet", row_group_size=50)
        with (
            new_feeder([str(tmp_path / f"{name}.parquet")], batch_size=100) as feeder,
            pytest.raises(aiofeed.errors.CollateError, match=r"'v' has (arrays|lists) of different"),
        ):
            list(feeder)


def test_a_batch_that_is_kept_stays(paths: list[str]) -> None:
    """Its memory is not used again, and writing into a column changes no other."""
    with new_feeder(paths) as feeder:
        batches = []
        for batch in feeder:
            batch["float"].zero_()
            batches.append(batch)
            assert torch.equal(batch["other"], batch["row"].float() * 2)
    assert rows_of(batches) == list(range(ROWS))
    assert all(not batch["float"].any() and torch.equal(batch["other"], batch["row"].float() * 2) for batch in batches)


def test_rows_that_are_gathered_are_a_sequence() -> None:
    """However often they are asked for, as by a time limit of the decoder."""
    gathered = GatheredRows(["a", "b"], 3, HostBufferPool(0))
    for places, values in (([2, 0], [20, 0]), ([1], [10])):
        gathered.put(np.array(places), [(["b", "a"], np.array([values, values]))])
    for _ in range(2):
        assert [(columns.columns["a"].value(row), row) for columns, row in gathered] == [(0, 0), (10, 1), (20, 2)]
        assert len(gathered[1:]) == 2
    batch, nbytes = gathered.batch(HostBufferPool(0))
    assert {name: column.memory.tolist() for name, column in batch.items()} == {"a": [0, 10, 20], "b": [0, 10, 20]}
    assert nbytes == 48


def test_columns_may_have_another_order_in_each_file(tmp_path: Path) -> None:
    """A batch has the order of the first file."""
    table = pa.table(columns(40))
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=10)
    pq.write_table(table.select(table.column_names[::-1]), tmp_path / "y.parquet", row_group_size=10)
    with new_feeder([str(tmp_path / "x.parquet"), str(tmp_path / "y.parquet")], shuffle=True) as feeder:
        batches = list(feeder)
    for batch in batches:
        check(batch)
    assert sorted(rows_of(batches)) == sorted([*range(40), *range(40)])


def test_samples_that_are_read_one_by_one_are_gathered_once(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With `in_order="samples"`, if reads are slow."""
    monkeypatch.setattr("aiofeed.sample_order.sample_assembly.SLOW_GROUP_S", 0.0)
    monkeypatch.setattr("aiofeed.sample_order.sample_assembly.FAST_READ_S", 0.0)
    reads = []
    read_many = ParquetRows.read_many
    monkeypatch.setattr(
        ParquetRows, "read_many", lambda self, indices: reads.append(indices) or read_many(self, indices)
    )
    with new_feeder(paths, shuffle=True, in_order="samples") as feeder:
        for _ in range(2):
            batches = list(feeder)
            assert sorted(rows_of(batches)) == list(range(ROWS))
            for batch in batches:
                check(batch)
    assert not reads


def test_row_groups_at_urls_are_read_no_faster_than_they_are_decoded(
    tmp_path: Path, object_server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if each batch needs all of them: those that were read are in memory."""
    pq.write_table(pa.table(columns(ROWS)), tmp_path / "x.parquet", row_group_size=10)
    object_server.objects = {"bucket/x.parquet": (tmp_path / "x.parquet").read_bytes()}
    table = aiofeed.Table("s3://bucket/x.parquet", options=object_server.options, in_memory=False)
    read, decode = Shard.read, ParquetRows._decode_rows
    begun = most = 0

    async def count(self: Any, ranges: Any) -> Any:
        nonlocal begun, most
        begun += 1
        most = max(most, begun)
        return await read(self, ranges)

    def count_down(self: Any, *arguments: Any) -> Any:
        nonlocal begun
        found = decode(self, *arguments)
        begun -= 1
        return found

    monkeypatch.setattr(Shard, "read", count)
    monkeypatch.setattr(ParquetRows, "_decode_rows", count_down)
    limits = aiofeed.Limits(decode_threads=1)
    with aiofeed.Feeder(table, batch_size=BATCH, shuffle=True, limits=limits) as feeder:
        assert sorted(rows_of(feeder)) == list(range(ROWS))
    assert 1 <= most <= 2
