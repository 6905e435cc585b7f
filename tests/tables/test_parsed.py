"""Tables as people have them: CSV and JSON Lines files, categories, nulls, and a column that is the target."""

from __future__ import annotations

import bz2
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiofeed import Feeder, Table
from aiofeed.kernel.runtime import machine
from tests.support.fault_server import FaultServer

pa = pytest.importorskip("pyarrow")
pandas = pytest.importorskip("pandas")

CITIES = ["Rome", "Berlin", None, "Oslo"]
ROWS: list[dict[str, Any]] = [
    {"age": None if row % 3 == 0 else row, "city": CITIES[row % 4], "price": row / 2, "n": row} for row in range(40)
]
OPTIONS: dict[str, Any] = {"categories": "codes", "fill": {"age": 0, "city": -1}, "target": "price"}
LINES = "\n".join(map(json.dumps, ROWS))
CSV = pandas.DataFrame(ROWS).to_csv(index=False)


def plain(batch: Any) -> Any:
    columns, target = batch
    target = {name: each.tolist() for name, each in target.items()} if isinstance(target, dict) else target.tolist()
    return {name: each.tolist() for name, each in columns.items()}, target


EXPECTED = (
    {
        "age": [row["age"] or 0 for row in ROWS],
        "city": [-1 if row["city"] is None else ["Berlin", "Oslo", "Rome"].index(row["city"]) for row in ROWS],
        "n": [row["n"] for row in ROWS],
    },
    [row["price"] for row in ROWS],
)

FILES: dict[str, bytes] = {
    "x.csv": CSV.encode(),
    "X.CSV": CSV.encode(),
    "x.csv.gz": gzip.compress(CSV.encode()),
    "x.csv.bz2": bz2.compress(CSV.encode()),
    "x.tsv": CSV.replace(",", "\t").encode(),
    "x.jsonl": LINES.encode(),
    "x.ndjson": LINES.encode(),
    "x.json": LINES.encode(),
    "x.json.gz": gzip.compress(LINES.encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_parsed(tmp_path: Path, name: str, object_server: FaultServer) -> None:
    """By their suffix, at a path, in a list, by a glob and at a URL; each feeder of them gets the same batches."""
    (tmp_path / name).write_bytes(FILES[name])
    object_server.objects = {f"bucket/{name}": FILES[name]}
    tables = [
        Table(source, **OPTIONS) for source in (tmp_path / name, [str(tmp_path / name)], f"{tmp_path}/*{name[1:]}")
    ]
    tables.append(Table(f"s3://bucket/{name}", options=object_server.options, **OPTIONS))
    for table in tables:
        assert table.categories == {"city": ["Berlin", "Oslo", "Rome"]}
        for _ in range(2):
            assert plain(next(iter(Feeder(table, batch_size=40)))) == EXPECTED
    assert tables[0].key(3) == f"{tmp_path / name}[3]"


def test_several_files_are_one_table(tmp_path: Path) -> None:
    """In the order of their names; a column may be whole numbers in one and fractions in another."""
    (tmp_path / "a.csv").write_text("x,y\n1,u\n2,v\n")
    (tmp_path / "b.csv").write_text("y,x\nw,0.5\n")
    [rows] = Feeder(Table(f"{tmp_path}/*.csv"), batch_size=3, collate_fn=list)
    assert rows == [{"x": 1, "y": "u"}, {"x": 2, "y": "v"}, {"x": 0.5, "y": "w"}]
    (tmp_path / "c.csv").write_text("x,y\ntext,3\n")
    with pytest.raises(ValueError, match=r"a\.csv and other files differ"):
        Table(f"{tmp_path}/*.csv")


@pytest.mark.parametrize("kind", ["DataFrame", "category", "Arrow", "dictionary", "views", "NumPy", "Dataset"])
def test_other_tables_have_the_same(kind: str) -> None:
    """Whatever type its texts have."""
    frame = pandas.DataFrame(ROWS)
    table: Any = frame
    if kind == "category":
        table = frame.astype({"city": "category"})
    elif kind in ("Arrow", "dictionary", "views"):
        table = pa.Table.from_pandas(frame, preserve_index=False)
        text = {"dictionary": pa.dictionary(pa.int8(), pa.string()), "views": pa.string_view()}.get(kind, pa.string())
        table = table.set_column(1, "city", table.column("city").cast(pa.string()).cast(text))
        table = pa.concat_tables([table.slice(0, 13), table.slice(13)])
    elif kind == "NumPy":
        table = np.array([(row["age"] or np.nan, row["city"] or "", row["price"], row["n"]) for row in ROWS],
                         [("age", "f8"), ("city", "U6"), ("price", "f8"), ("n", "i8")])  # fmt: skip
    elif kind == "Dataset":
        table = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    [batch] = Feeder(Table(table, **OPTIONS), batch_size=40)
    if kind == "NumPy":  # which has no nulls of texts
        expected = [(code or 0) + 1 for code in EXPECTED[0]["city"]]
        assert plain(batch)[0]["city"] == [each if each else 0 for each in expected]
    elif kind == "dictionary":  # in its order
        codes = {"Rome": 0, "Berlin": 1, "Oslo": 2, None: -1}
        assert plain(batch)[0]["city"] == [codes[row["city"]] for row in ROWS]
    else:
        assert plain(batch) == EXPECTED


@pytest.mark.parametrize(
    "options", [{}, {"on_error": "skip"}, pytest.param({"engine": "process:1"}, marks=pytest.mark.slow)]
)
def test_targets_beside_the_columns(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of batches of threads and processes, of rows, and of several columns."""
    monkeypatch.setattr("aiofeed.tables.memory.free_memory", lambda: 0 if options else 1 << 30)
    frame = pandas.DataFrame(ROWS)
    assert plain(next(iter(Feeder(Table(frame, **OPTIONS), batch_size=40, **options)))) == EXPECTED
    several = Table(frame, ["n"], **OPTIONS | {"target": ["price", "city"]})
    batch = plain(next(iter(Feeder(several, batch_size=3, **options))))
    assert batch == ({"n": [0, 1, 2]}, {"price": [0.0, 0.5, 1.0], "city": [2, 0, -1]})
    rows = next(iter(Feeder(Table(frame, **OPTIONS), batch_size=2, collate_fn=list, **options)))
    assert rows == [({"age": 0.0, "city": 2, "n": 0}, 0.0), ({"age": 1.0, "city": 0, "n": 1}, 0.5)]


def test_categories_are_kept() -> None:
    """They are saved as JSON, and make the same numbers of other rows; a copy in another process has them, too."""
    frame = pandas.DataFrame(ROWS)
    table = Table(frame, **OPTIONS)
    saved = json.loads(json.dumps(table.categories))
    assert pickle.loads(pickle.dumps(table)).categories == saved
    other = pandas.DataFrame({"city": ["Oslo", "Paris", None], "n": [3, 4, 5]})
    with pytest.raises(ValueError, match=r"row 1 .*'city' has 'Paris', which is none of its 3 categories"):
        Table(other, categories=saved)
    [batch] = Feeder(Table(other, categories=saved, fill={"city": 9}), batch_size=3)
    assert batch["city"].tolist() == [1, 9, 9]
    [batch] = Feeder(Table(other[::2], categories=saved, fill={"city": "Rome"}), batch_size=3)
    assert batch["city"].tolist() == [1, 2]
    one = pandas.DataFrame([{"city": None, "n": None}])  # as a server gets it
    [batch] = Feeder(Table(one, categories=saved, fill={"city": 9, "n": 0.5}), batch_size=1)
    assert (batch["city"].tolist(), batch["n"].tolist()) == ([9], [0.5])
    with pytest.raises(ValueError, match=r"row 2 .*'city' has None"):
        Table(pandas.DataFrame(ROWS), categories="codes")
    [batch] = Feeder(Table(frame, ["n"], categories={"n": list(range(40))[::-1]}), batch_size=40)
    assert batch["n"].tolist() == list(range(40))[::-1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"a": 1}\n{"a":\n', "line 2"),
        ("x.jsonl", '{"a": 1}\n{"a": "x"}\n', "row 1 .*column .a. has .x."),
        ("x.csv", "a,b\n1,2\n3\n", "Row #3: Expected 2 columns, got 1"),
        ("x.csv", "", "Empty CSV file"),
        ("x.csv", "a,b\n", "no rows"),
        ("x.csv", "a,a\n1,2\n", "2 columns have the name 'a'"),
        ("x.csv", "a,b\n1,2\n3,4,5\n", "Row #3: Expected 2 columns, got 3: 3,4,5.*separator"),
        ("x.csv", "a;b\n1;2,5\n", "Row #2: Expected 1 columns.*sep="),
        ("x.csv", "a,b\n1,x\n2,caf\xe9\n", "row 1 .*column 'b' has .*caf.*utf-8.*encoding="),
        ("x.csv", "a,caf\xe9\n1,2\n", "utf-8.*encoding="),
        ("x.csv", "\xff\xfea\0,\0b\0\n\x001\0,\x002\0\n\0", "encoding="),
        ("x.csv", 'a,b\n1,"x\n2,y\n3,z\n', "'b' has .*open quotation mark"),
        ("x.csv", "a\n123456789012345678901234567890\n1\n", "row 0 .*'a'.*no type of numbers"),
        ("x.jsonl", '{"a": "x"}\n{"a": "\xe9"}\n', "line 2.*utf-8"),
        ("x.jsonl", '{"a": 1}\n{"a": [2]}\n', r"row 1 .*'a' has \[2\], and rows before 1"),
        ("x.json", '[{"a": 1}, {"a": 2}]', r"line 1 is no JSON object.*read_json\(path\)"),
        ("x.json", "1\n2\n", "line 1 is no JSON object"),
        ("x.jsonl", '{"a": 1, "a": 2}\n', "a.* twice in row 0"),
    ],
)
@pytest.mark.parametrize("in_memory", [None, False])
def test_errors_name_file_and_row(tmp_path: Path, name: str, text: str, message: str, in_memory: bool | None) -> None:
    """Of files that cannot be parsed, also in a block."""
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    message = "without samples" if in_memory is False and text in ("", "a,b\n") else message
    with pytest.raises(ValueError, match=message) as error:
        Table(tmp_path / name, in_memory=in_memory)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n" * 400 + '"12,5"\n', "row 400 .*'12,5'"),
        ('"1,234.5"\n"2,345.5"\n', "row 0 .*'1,234.5'.*thousands="),
        ("1\n2\nabc\n4\n", "row 2 .*'abc'"),
        ("yes\nno\n", 'categories="codes" makes numbers of texts$'),
        ("2020-01-01\n2020-01-02\n", 'categories="codes" makes numbers of texts$'),
    ],
)
def test_a_text_among_numbers(tmp_path: Path, text: str, message: str) -> None:
    """It is named with its row, if most rows are numbers."""
    (tmp_path / "x.csv").write_text(f"price\n{text}")
    with pytest.raises(TypeError, match=rf"x\.csv: column 'price' .*{message}"):
        Feeder(Table(tmp_path / "x.csv"), batch_size=2)
    (tmp_path / "y.csv").write_text("a;b\n1;2\n")
    with pytest.raises(TypeError, match=r"'a;b' has a separator.*sep="):
        Feeder(Table(tmp_path / "y.csv"), batch_size=2)


def test_a_file_without_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whose first line has numbers only is read, with a warning."""
    (tmp_path / "x.csv").write_text("1,2.5\n3,4.5\n")
    assert len(Table(tmp_path / "x.csv")) == 1
    assert "x.csv: the first line has numbers and no names" in caplog.text


CORRECT: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "BOM": ("\ufeffa,b\n1,2\n", {"a": [1], "b": [2]}),
    "Windows": ("a,b\r\n1,2\r\n3,4\r\n", {"a": [1, 3], "b": [2, 4]}),
    "Mac": ("a,b\r1,2\r3,4\r", {"a": [1, 3], "b": [2, 4]}),
    "blank lines": ("a,b\n1,2\n\n3,4\n\n\n", {"a": [1, 3], "b": [2, 4]}),
    "bools": ("a,b\ntrue,1\nFalse,0\n", {"a": [True, False], "b": [1, 0]}),
    "quotes": ('a,b\n"x, ""y""\nz",2\n5" pipe,3\n', {"a": ['x, "y"\nz', '5" pipe'], "b": [2, 3]}),
    "a quote at the end": ('a\n"x\ny"\n"x\nz"' + "\n" * 99, {"a": ["x\ny", "x\nz"]}),
    "missing": ("a,b\n,x\nNA,\n1,NA\n", {"a": [None, None, 1], "b": ["x", None, None]}),
    "dates": ("a\n2020-01-01\n2020-01-02\n", {"a": ["2020-01-01", "2020-01-02"]}),
    "large": ("a\n9223372036854775808\n1\n", {"a": [9223372036854775808, 1]}),
    "index": (",a\n0,1\n1,2\n", {"": [0, 1], "a": [1, 2]}),
}


@pytest.mark.parametrize("in_memory", [None, False])
@pytest.mark.parametrize("kind", CORRECT)
def test_files_as_programs_write_them(tmp_path: Path, kind: str, in_memory: bool | None) -> None:
    """Have the values that they show."""
    text, columns = CORRECT[kind]
    (tmp_path / "x.csv").write_bytes(text.encode())
    [rows] = Feeder(Table(tmp_path / "x.csv", in_memory=in_memory), batch_size=3, collate_fn=list)
    assert {name: [row[name] for row in rows] for name in rows[0]} == columns


def test_wrong_arguments_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the row of a null, the column and the way out."""
    (tmp_path / "x.csv").write_text(CSV)
    with pytest.raises(TypeError, match=r"'age' has null values.*first null is in row 0 .*fill="):
        Feeder(Table(tmp_path / "x.csv"), batch_size=2)
    nulls = r"columns with nulls: \['age', 'city'\]"
    with pytest.raises(TypeError, match=rf"'age' has null values.*{nulls}"):
        Feeder(Table(tmp_path / "x.csv"), batch_size=2)
    with pytest.raises(ValueError, match=rf"row 2 .*'city' has None.*fill=.*{nulls}"):
        Table(tmp_path / "x.csv", categories="codes")
    with pytest.raises(TypeError, match=r"'city' has .*categories=\"codes\""):
        Feeder(Table(pa.table({"city": ["a", "b"]})), batch_size=2)
    with pytest.raises(ValueError, match=r"x\.csv: fill= of column 'age'"):
        Table(tmp_path / "x.csv", fill={"age": "none"})
    with pytest.raises(TypeError, match=r"fill=. must be a dict"):
        Table(tmp_path / "x.csv", fill=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"sep=';'.*read_csv"):
        Table(tmp_path / "x.csv", sep=";")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"there is no column 'ages'"):
        Table(tmp_path / "x.csv", fill={"ages": 1})
    with pytest.raises(TypeError, match=r"categories=.* \"codes\""):
        Table(tmp_path / "x.csv", categories="onehot")  # type: ignore[arg-type]
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(CSV.encode()))
    with pytest.raises(ValueError, match=r"in_memory=False.*decompress it, or write Parquet"):
        Table(tmp_path / "x.csv.gz", in_memory=False)
    with pytest.raises(FileNotFoundError):
        Table(tmp_path / "missing.csv")
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"read_parquet\(path, .*decode="):
        Table(tmp_path / "x.parquet", target="b")
    monkeypatch.setattr(machine, "rank_memory", lambda: 100)
    with pytest.raises(ValueError, match=r"to parse it needs .* is 50 .*write_dataset"):
        Table(tmp_path / "x.csv.gz")
    with pytest.raises(ValueError, match=r"to parse it needs .* is 50 .*Leave in_memory= out"):
        Table(tmp_path / "x.csv", in_memory=True)
    assert len(Table(tmp_path / "x.csv")) == len(ROWS)
    with pytest.raises(ValueError, match=r"decode="):
        Table(tmp_path / "x.csv", fill={"age": 0})
