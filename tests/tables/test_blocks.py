"""CSV and JSON Lines files that are read in blocks, at their offsets: they are as the tables in memory."""

from __future__ import annotations

import csv
import io
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from aiofeed import Feeder, Table
from aiofeed.kernel.runtime import machine
from aiofeed.tables import parsed as blocks
from tests.support.fault_server import FaultServer

pytest.importorskip("pyarrow")

TEXTS = ["a", "b c", "x, y", 'q"uo"te', "multi\nline", "", 'he said ""hi""\n,', '5" pipe', "\t"]


def rows_of(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Rows whose types differ from block to block: whole numbers and fractions, nulls, large numbers, texts."""
    late = rng.choice([count, count - 4])
    return [
        {
            "n": at,
            "f": rng.choice([1, 2.5, None, -1e9]) if at > late else at,
            "t": rng.choice(TEXTS),
            "big": 2**63 if at == late else 3,
            "m": rng.choice(["1", "x"]) if at > late else "1",
            "e": None,
        }
        for at in range(count)
    ]


def written(path: Path, rng: random.Random, count: int) -> Path:
    rows = rows_of(rng, count)
    if path.suffix == ".jsonl":
        lines = [json.dumps({**row, "l": list(range(row["n"] % 3)), "d": {"k": row["f"]}}) for row in rows]
        path.write_text("\n".join(lines) + rng.choice(["", "\n", "\n\n"]))
        return path
    text, delimiter = io.StringIO(newline=""), "\t" if path.suffix == ".tsv" else ","
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator=rng.choice(["\n", "\r\n"]))
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes((text.getvalue() + rng.choice(["", "\n" * 300])).encode(rng.choice(["utf-8", "utf-8-sig"])))
    return path


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 240)


def samples(table: Table, **options: Any) -> str:
    with Feeder(table, batch_size=4, collate_fn=list, **options) as feeder:
        return repr([sample for batch in feeder for sample in batch])


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_blocks_are_the_table_in_memory(tmp_path: Path, suffix: str, seed: int) -> None:
    """In order, shuffled, and on each rank, with all values and types."""
    path = written(tmp_path / f"x.{suffix}", random.Random(seed), 5 + 9 * seed)
    whole, parts = Table(path), Table(path, in_memory=False)
    assert len(whole) == len(parts) == 5 + 9 * seed
    for options in ({}, {"shuffle": True}, {"shuffle": "keyed"}, {"shard": (1, 3), "shuffle": True}):
        assert samples(parts, **options) == samples(whole, **options)
    window = samples(parts, shuffle="window")
    assert sorted(window) == sorted(samples(whole))
    again = Table(path, data="t", target=["n", "f"], in_memory=False)
    assert [again.target(at) for at in range(5)] == [
        Table(path, data="t", target=["n", "f"]).target(at) for at in range(5)
    ]
    assert samples(pickle.loads(pickle.dumps(parts))) == samples(whole)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_batches_of_blocks(tmp_path: Path, suffix: str, object_server: FaultServer) -> None:
    """Of tensors, of files by a glob and at URLs, whose columns are whole numbers in one and fractions in another."""
    for number in range(3):
        values = [{"x": row + number / 2, "y": row, "text": "t" * row} for row in range(40)]
        lines = [json.dumps(each) for each in values]
        if suffix == "csv":
            lines = ["x,y,text", *(",".join(map(str, each.values())) for each in values)]
            lines = [line.replace(".0,", ",") for line in lines] if number == 0 else lines
        (tmp_path / f"{number}.{suffix}").write_text("\n".join(lines))
    object_server.objects = {f"bucket/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    whole = Table(f"{tmp_path}/*.{suffix}", ["x", "y"])
    local = Table(f"{tmp_path}/*.{suffix}", ["x", "y"], in_memory=False)
    remote = Table(f"s3://bucket/*.{suffix}", ["x", "y"], in_memory=False, options=object_server.options)
    for options in ({}, {"shuffle": True, "seed": 3}):
        for table in (local, remote):
            pairs = zip(Feeder(table, batch_size=7, **options), Feeder(whole, batch_size=7, **options), strict=True)
            for found, expected in pairs:
                assert {name: each.dtype for name, each in found.items()} == {n: e.dtype for n, e in expected.items()}
                assert {name: each.tolist() for name, each in found.items()} == {
                    n: e.tolist() for n, e in expected.items()
                }


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_a_resume_is_exact(tmp_path: Path, shuffle: Any) -> None:
    """Also on other ranks."""
    path = written(tmp_path / "x.csv", random.Random(3), 60)

    def feeder(rank: int, ranks: int) -> Feeder[Any]:
        return Feeder(Table(path, in_memory=False), batch_size=2, shuffle=shuffle, collate_fn=list, shard=(rank, ranks))

    before = [feeder(rank, 2) for rank in range(2)]
    seen = []
    for each in before:
        batches = iter(each)
        seen += [next(batches) for _ in range(3)]
    after = []
    for rank in range(3):
        resumed = feeder(rank, 3)
        resumed.load_state_dict(before[0].state_dict())
        after += list(resumed)
    assert sorted(row["n"] for batch in seen + after for row in batch) == list(range(60))


def test_the_pass_over_a_file_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the next program, until the file changes; a file that does not fit is read so without an argument."""
    path = written(tmp_path / "x.csv", random.Random(5), 50)
    expected = samples(Table(path))
    monkeypatch.setattr(machine, "rank_memory", lambda: 100)
    table = Table(path)
    assert type(table) is blocks.BlockTable
    assert len(table.shard_starts) > 5
    scan = blocks._scan
    monkeypatch.setattr(blocks, "_scan", lambda *_: pytest.fail("a second pass"))
    assert samples(Table(path)) == expected
    monkeypatch.setattr(blocks, "_scan", scan)
    path.write_text("n\n7\n")
    assert samples(Table(path)) == "[{'n': 7}]"
    with pytest.raises(Exception, match=r"x\.csv.*changed"):
        samples(table)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("x.csv", ["a,b"] + ["1,2"] * 500 + ["3"], "x.csv: CSV parse error: Row #502: Expected 2 columns, got 1: 3"),
        ("x.csv", ["a,b"] + ["1,2"] * 500 + ["1,\udce9"] * 9, "x.csv: row 500 .*'b'.*utf-8"),
        ("x.jsonl", ['{"a": 1}'] * 500 + ['{"a": '], "x.jsonl: line 501: "),
        ("x.jsonl", ['{"a": 1}'] * 500 + ['{"a": "x"}'], "x.jsonl: row 500 .*'a' has 'x'"),
        (
            "x.jsonl",
            ['{"a": 1}'] * 26 + ['{"a": "x"}'] * 99,
            r"column 'a' has int64 in the rows from 0 on and string in the rows from \d+ on",
        ),
        ("x.csv", ["a,b", '1,"x'] + ["1,2"] * 500, "row 0 .*quotation mark or a line not closed"),
    ],
)
def test_errors_of_later_blocks(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    """Count the rows and lines of the file."""
    (tmp_path / name).write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        Table(tmp_path / name, in_memory=False)


def test_a_text_among_numbers(tmp_path: Path) -> None:
    """The rows of its block are named."""
    (tmp_path / "x.csv").write_text("a,b\n" + "1,2\n" * 100 + 'none,"12,5"\n')
    with pytest.raises(
        TypeError, match=r"'a' has the type string.*int64 in the rows from 0 on and string in the rows from \d+ on"
    ):
        Feeder(Table(tmp_path / "x.csv", in_memory=False), batch_size=2)


def test_a_text_among_the_numbers_of_one_block(tmp_path: Path) -> None:
    """A number that is written as a text is named by its row, if the first block has it."""
    path = tmp_path / "train.csv"
    path.write_text("x\n1\n2\n1,5\n".replace("1,5", '"1,5"'))
    with pytest.raises(TypeError, match=r"row 2 \(the first is 0\) has '1,5' among numbers"):
        Feeder(Table(path, in_memory=False), batch_size=2)


@pytest.mark.parametrize("options", [{"columns": ["b", "c"]}, {"data": "c"}, {"data": "a", "target": "c"}])
def test_a_column_that_there_is_not(tmp_path: Path, options: dict[str, Any]) -> None:
    """Is an error that names those that there are."""
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"x\.csv: there is no column 'c'; there are \['a', 'b'\]"):
        Table(tmp_path / "x.csv", in_memory=False, **options)
