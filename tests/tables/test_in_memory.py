"""Parquet files that are read whole by the first epoch: nothing but the time and the memory changes."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed.kernel.runtime import machine
from aiofeed.shards.parquet import ParquetRows
from tests.support.fault_server import FaultServer
from tests.support.simulated_device import SimulatedDevice

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, GROUP = 400, 30
SKIP = aiofeed.FailurePolicy("skip", max_failures=ROWS)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Two files of 14 row groups: numbers, lists, texts, bools, categories and nulls."""
    found = []
    for name, start, end in (("a", 0, 190), ("b", 190, ROWS)):
        rows = np.arange(start, end)
        table = pa.table(
            {
                "row": rows,
                "half": rows.astype(np.float16),
                "even": pa.array((rows % 2 == 0).tolist()),
                "kind": pa.array((rows % 3).tolist(), pa.int32()).dictionary_encode(),
                "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(rows, 3), pa.float32()), 3),
                "list": pa.array([[row] * (row % 4) for row in rows.tolist()], pa.list_(pa.int16())),
                "text": pa.array([f"text {row}" for row in rows.tolist()]),
                "maybe": pa.array([None if row % 7 == 0 else row for row in rows.tolist()]),
            }
        )
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=GROUP)
        found.append(str(tmp_path / f"{name}.parquet"))
    return found


NUMBERS = ["vector", "row", "half", "even", "kind"]


def plain(value: Any) -> Any:
    """A batch or row as Python values that compare by ``==``; names in their order."""
    if isinstance(value, dict):
        return [(name, plain(each)) for name, each in value.items()]
    if isinstance(value, torch.Tensor | np.ndarray):
        return (str(value.dtype), list(value.shape), value.tolist())
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def is_resident(feeder: Any) -> bool:
    return type(feeder._session.pipeline).__name__.startswith("Resident")


# Parts of the data, options of the feeder: batches in memory and from row groups are compared.
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"shuffle={each}": {"shuffle": each} for each in (True, False, "keyed", "replacement", "window", "window:2")},
    "drop_last": {"shuffle": True, "drop_last": True},
    "sampler": {"sampler": list(range(399, 0, -2)) * 2},
    "weights": {"weights": np.arange(ROWS) + 1.0},
    "batch_sampler": {"batch_size": None, "batch_sampler": [[5, 3], [399, 0, 1], [7]] * 40},
    "exclude": {"shuffle": True, "exclude": [3, 17, 250]},
    "rows": {"shuffle": True, "collate_fn": list},
    "decode": {"shuffle": "window:2", "decode": lambda row: dict(row)},
    "retries": {"shuffle": True, "on_error": aiofeed.FailurePolicy("skip", retries=2, read_timeout_s=20)},
}


def new_feeder(paths: Any, way: bool | None, name: str, columns: Any = NUMBERS, **more: Any) -> aiofeed.Feeder[Any]:
    options = {"batch_size": 16, "seed": 3, **OPTIONS[name], **more}
    return aiofeed.Feeder(aiofeed.Table(paths, columns, in_memory=way), **options)


@pytest.mark.parametrize("shard", [None, (1, 3)])
@pytest.mark.parametrize("name", OPTIONS)
def test_order_and_values_are_those_of_row_groups(paths: list[str], name: str, shard: Any) -> None:
    """Of each order, on one rank and on several, over two epochs; so are keys and fingerprint."""
    if shard is not None and name in ("sampler", "weights", "batch_sampler"):
        name, shard = "shuffle=True", (0, 2)
    found = []
    for way in (None, True, False):
        with new_feeder(paths, way, name, shard=shard) as feeder:
            source = feeder._session.source
            epochs = [plain(list(feeder)) for _ in range(2)]
            found.append((epochs, source.fingerprint(), [source.key(at) for at in (0, 250)], feeder.state_dict()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["shuffle=True", "shuffle=False", "shuffle=window:2", "keyed", "rows"])
@pytest.mark.parametrize("first", [True, False])
def test_a_resume_may_change_the_way(paths: list[str], name: str, first: bool) -> None:
    """From row groups into memory and back, also on another number of ranks."""
    name = name if name in OPTIONS else f"shuffle={name}"
    with new_feeder(paths, first, name) as feeder:
        steps = iter(feeder)
        for _ in range(9):
            next(steps)
        state = feeder.state_dict()
        rest = plain(list(steps))
    with new_feeder(paths, not first, name) as feeder:
        feeder.load_state_dict(state)
        assert plain(list(feeder)) == rest
    parts = []
    for way in (first, not first):
        with new_feeder(paths, way, name, shard=(1, 2)) as feeder:
            feeder.load_state_dict(state)
            parts.append(plain(list(feeder)))
    assert parts[0] == parts[1]


@pytest.mark.parametrize("columns", [["text", "row"], ["list", "maybe"], ["maybe", "even", "vector"], ["kind", "half"]])
def test_rows_are_those_of_row_groups(paths: list[str], columns: list[str]) -> None:
    """With texts, lists of different lengths and nulls."""
    found = []
    for way in (True, False):
        with new_feeder(paths, way, "rows", columns) as feeder:
            found.append(plain(list(feeder)))
    assert found[0] == found[1]


@pytest.mark.parametrize("column", ["text", "list", "row", "maybe"])
def test_one_column_and_targets(paths: list[str], column: str) -> None:
    """With ``data=`` a null fails its row, and targets stay those of the row."""
    found = []
    for way in (True, False):
        table = aiofeed.Table(paths, data=column, target=["row", "text"], in_memory=way)
        with aiofeed.Feeder(
            table, decode=lambda value: value, batch_size=8, shuffle=True, on_error=SKIP, collate_fn=list
        ) as feeder:
            found.append((plain(list(feeder)), [str(each) for each in feeder.failures]))
    assert found[0] == found[1]
    assert len(found[0][1]) == (58 if column == "maybe" else 0)


def test_nulls_and_damaged_row_groups_keep_their_errors(paths: list[str]) -> None:
    """A row without a value, and all of a row group that cannot be read, are skipped or raised as ever."""
    data = bytearray(Path(paths[0]).read_bytes())
    chunk = pq.read_metadata(paths[0]).row_group(2).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start : start + 20] = b"\xff" * 20
    Path(paths[0]).write_bytes(data)
    for columns in (["row", "maybe"], ["row", "half"], ["text", "row"]):
        found = []
        for way in (None, True, False):
            name = "rows" if "text" in columns else "shuffle=True"
            with new_feeder(paths, way, name, columns, on_error=SKIP) as feeder:
                epochs = [plain(list(feeder)) for _ in range(2)]
                found.append((epochs, sorted(str(each) for each in feeder.failures)))
            with (
                new_feeder(paths, way, name, columns, shuffle=False) as feeder,
                pytest.raises(aiofeed.errors.ReadError) as error,
            ):
                list(feeder)
            found[-1] += (str(error.value),)
        assert found[0] == found[1] == found[2]
        assert any("a.parquet: row group 2" in each for each in found[0][1])


def test_the_default_decides_by_size(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a quarter of the memory budget, by ``Limits`` or of this rank, is read into memory."""
    nbytes = ROWS * 8
    for budget, resident in ((4 * nbytes, False), (4 * nbytes + 8, True)):
        with new_feeder(paths, None, "shuffle=True", ["row"], limits=aiofeed.Limits(memory_bytes=budget)) as feeder:
            next(iter(feeder))
            assert is_resident(feeder) is resident
    monkeypatch.setattr(machine, "rank_memory", lambda: 4 << 20)
    with new_feeder(paths, None, "shuffle=True", ["row"]) as feeder:
        next(iter(feeder))
        assert is_resident(feeder)
    monkeypatch.setattr(machine, "rank_memory", lambda: 5_000)
    with pytest.raises(ValueError, match=r"in_memory=True needs .*3.* and half of the free memory .* is "):
        aiofeed.Table(paths, ["row"], in_memory=True)


@pytest.mark.parametrize(("shuffle", "resident"), [(True, True), ("keyed", True), ("window", False), (False, False)])
def test_a_rank_that_reads_a_part_reads_no_more(paths: list[str], shuffle: Any, resident: bool) -> None:
    """Of 3 ranks each needs all row groups of 30 rows under shuffle, and not in windows, or in large batches."""
    options: dict[str, Any] = {"shuffle": shuffle, "batch_size": 100, "shard": (0, 3)}
    with new_feeder(paths, None, "shuffle=True", **options) as feeder:
        next(iter(feeder))
        assert is_resident(feeder) is resident


def test_parts_share_what_was_read(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and validation parts of a table read it once; a part of some row groups stays with these."""
    decoded: list[int] = []
    decode: Callable[..., Any] = ParquetRows._decode_rows
    monkeypatch.setattr(
        ParquetRows,
        "_decode_rows",
        lambda self, shard, group, *more: decoded.append(group) or decode(self, shard, group, *more),
    )
    table = aiofeed.Table(paths, NUMBERS)
    parts = table.split({"train": 0.8, "validation": 0.2})
    for part in parts.values():
        with aiofeed.Feeder(part, batch_size=16, shuffle=True) as feeder:
            assert sum(len(batch["row"]) for batch in feeder) == len(part)
            assert is_resident(feeder)
    assert len(decoded) == 7 + 7
    with aiofeed.Feeder(aiofeed.Table(paths, NUMBERS)[:50], batch_size=16) as feeder:
        assert torch.cat([batch["row"] for batch in feeder]).tolist() == list(range(50))
        assert not is_resident(feeder)


@pytest.mark.parametrize(
    "options", [{"device": None}, {"collate_fn": list}, pytest.param({"engine": "process:2"}, marks=pytest.mark.slow)]
)
def test_other_ways_of_batches(paths: list[str], options: dict[str, Any]) -> None:
    """Threads and processes make the batches that row groups make."""
    if "device" in options:  # made here, as it has threads
        options = {"device": SimulatedDevice()}
    found = []
    for way in (True, False):
        with new_feeder(paths, way, "shuffle=True", **options) as feeder:
            found.append(plain(list(feeder)))
    assert found[0] == found[1]


def test_a_copy_has_no_columns_in_memory(paths: list[str]) -> None:
    """So that a worker process gets no copy of the table."""
    table = aiofeed.Table(paths, NUMBERS)
    before = len(pickle.dumps(table))
    with aiofeed.Feeder(table, batch_size=16) as feeder:
        list(feeder)
    assert math.isclose(len(pickle.dumps(table)), before, rel_tol=0.05)


def test_an_event_loop_does_not_wait(paths: list[str]) -> None:
    """With ``async for``, the first epoch reads the table ahead in threads, and later ones are gathered."""

    async def rows(feeder: Any) -> Any:
        return plain([batch async for batch in feeder])

    async def epochs(feeder: Any) -> Any:
        found = [await rows(feeder)]
        assert not is_resident(feeder)
        found.append(await rows(feeder))
        assert is_resident(feeder)
        return found

    with new_feeder(paths, False, "shuffle=True") as feeder:
        expected = [plain(list(feeder)) for _ in range(2)]
    with new_feeder(paths, None, "shuffle=True") as feeder:
        assert asyncio.run(epochs(feeder)) == expected


def test_files_at_urls_are_read_once(paths: list[str], object_server: FaultServer) -> None:
    """By the first epoch."""
    object_server.objects = {f"bucket/{Path(path).name}": Path(path).read_bytes() for path in paths}
    urls = [f"s3://bucket/{Path(path).name}" for path in paths]
    table = aiofeed.Table(urls, NUMBERS, options=object_server.options)
    with new_feeder(paths, False, "shuffle=True") as feeder:
        expected = [plain(list(feeder)) for _ in range(2)]
    with aiofeed.Feeder(table, batch_size=16, seed=3, shuffle=True) as feeder:
        assert plain(list(feeder)) == expected[0]
        object_server.objects = {}
        assert plain(list(feeder)) == expected[1]


def test_other_tables(tmp_path: Path) -> None:
    """A mapped file can be copied into memory; of a table in memory nothing is to be decided."""
    table = pa.table({"row": np.arange(50)})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    mapped = aiofeed.Table(str(tmp_path / "x.arrow"), in_memory=True)
    (tmp_path / "x.arrow").write_bytes(b"")
    with aiofeed.Feeder(mapped, batch_size=50) as feeder:
        assert next(iter(feeder))["row"].tolist() == list(range(50))
    with pytest.raises(ValueError, match="in_memory=False"):
        aiofeed.Table(table, in_memory=False)
    with pytest.raises(TypeError, match="in_memory"):
        aiofeed.Table(table, in_memory=1)  # type: ignore[arg-type]
