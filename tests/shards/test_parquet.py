"""`ParquetRows`: rows, columns, targets and damaged files. Files are written by pyarrow."""

from __future__ import annotations

import asyncio
import base64
import pickle
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from aiofeed import Feeder, ParquetRows, Table
from aiofeed.common import expanded
from aiofeed.shards import base
from aiofeed.shards import parquet as parquet_module
from aiofeed.shards.arrow import arrow

pytestmark = pytest.mark.integration


@pytest.fixture
def table() -> Any:
    """100 rows of numbers, texts, nested values and null values."""
    arrow = pytest.importorskip("pyarrow")
    return arrow.table(
        {
            "n": list(range(100)),
            "text": [f"row {row}" * (row % 5) for row in range(100)],
            "image": [{"bytes": b"%d" % row * 50, "path": None} for row in range(100)],
            "tags": [[f"t{at}" for at in range(row % 4)] for row in range(100)],
            "rare": [None if row % 3 else row for row in range(100)],
        }
    )


@pytest.fixture
def files(table: Any, tmp_path: Path) -> Path:
    """Two files with 60 and 40 rows, in groups of 17."""
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(table.slice(0, 60), tmp_path / "0.parquet", row_group_size=17, compression="zstd")
    writer.write_table(table.slice(60), tmp_path / "1.parquet", row_group_size=17, use_dictionary=False)
    return tmp_path


def test_random_access_equals_sequential_content(files: Path, table: Any, read_all: Any) -> None:
    """Rows are dicts with the values of the table, in any order."""
    source = ParquetRows(files / "*.parquet")
    rows = table.to_pylist()
    assert read_all(source) == rows
    order = [99, 16, 17, 60, 59, 0, 60]
    assert asyncio.run(source.read_many(order)) == [rows[index] for index in order]
    assert source.key(61) == f"{files}/1.parquet[1]"
    assert read_all(ParquetRows(files / "*.parquet", ["n", "tags"]))[7] == {"n": 7, "tags": ["t0", "t1", "t2"]}


@pytest.mark.parametrize("count", [3, 100])
def test_numbers_of_many_rows(files: Path, table: Any, count: int) -> None:
    """Numbers and nulls are those of the table, however many rows of a row group are read together."""
    source = ParquetRows(files / "*.parquet", ["n", "rare"])
    assert asyncio.run(source.read_many(range(count))) == table.select(["n", "rare"]).slice(0, count).to_pylist()


def test_data_and_target(files: Path, read_all: Any) -> None:
    """`data` is a column or a field of one, for a decoder; `target` a column that is in memory."""
    source = ParquetRows(files / "*.parquet", data="image.bytes", target="n")
    assert read_all(source)[42] == b"42" * 50
    assert source.target(42) == 42
    assert type(source.target(42)) is int
    assert ParquetRows(files / "*.parquet", target="text").target(99) == "row 99" * 4
    rare = ParquetRows(files / "*.parquet", target="rare", to_target=lambda value: value or -1)
    assert [rare.target(index) for index in (99, 98)] == [99, -1]
    with Feeder(source, batch_size=50, decode=lambda data: len(data), shuffle=True, seed=1) as feeder:
        seen = sorted(label for _, labels in feeder for label in labels.tolist())
    assert seen == list(range(100))
    copy = pickle.loads(pickle.dumps(source))
    assert read_all(copy) == read_all(source)
    assert copy.fingerprint() == source.fingerprint() != ParquetRows(files / "*.parquet").fingerprint()


def test_null_values_fail_their_rows(files: Path, read_all: Any) -> None:
    """A row whose column for the decoder is null fails, and others do not."""
    found = read_all(ParquetRows(files / "1.parquet", data="rare"))
    assert found[0] == 60
    assert str(found[1]) == f"{files}/1.parquet: row 1 has no 'rare'"


def test_a_row_group_is_read_once(server: Any, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples of a row group, also of other reads at the same time, cost one request; only some groups are kept."""
    server.objects["bucket/0.parquet"] = (files / "0.parquet").read_bytes()
    source = ParquetRows("s3://bucket/0.parquet", ["n"], options=server.options)
    assert server.count == 2  # the size and the footer

    async def read_twice() -> Any:
        return await asyncio.gather(source.read_many([0, 16, 3]), source.read_many([5, 18]), source.read(2))

    first, second, third = asyncio.run(read_twice())
    assert [row["n"] for row in [*first, *second, third]] == [0, 16, 3, 5, 18, 2]
    assert server.count == 4
    monkeypatch.setattr(base, "CACHE_BYTES", 1)
    for index in (40, 41, 0):
        asyncio.run(source.read(index))
    assert server.count == 6
    assert len(source._tables._parts) == 1


def test_few_row_groups_are_read_at_the_same_time(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of row groups in reading is bounded, because each of them is large."""
    running, most = 0, 0

    class Counted(ParquetRows):
        async def _read_rows(self, *arguments: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await super()._read_rows(*arguments)
            finally:
                running -= 1

    monkeypatch.setattr(base, "PARTS", 2)
    asyncio.run(Counted(files / "*.parquet").read_many(range(100)))
    assert most == 2


def test_a_replaced_file(server: Any, files: Path) -> None:
    """A file with another etag fails its rows with its name."""
    server.objects["bucket/x.parquet"] = (files / "0.parquet").read_bytes()
    source = ParquetRows("s3://bucket/x.parquet", options=server.options)
    server.objects["bucket/x.parquet"] = (files / "1.parquet").read_bytes()
    found = asyncio.run(source.read_many([1, 2]))
    assert all("s3://bucket/x.parquet" in str(error) and "has changed" in str(error) for error in found)


def test_damaged_files(files: Path, read_all: Any) -> None:
    """Truncated and foreign files are errors with their name; a damaged row group fails its rows."""
    data = (files / "1.parquet").read_bytes()
    for damaged in (data[:-1], data[:20], b"", b"PAR1" * 3, data[:-200] + b"\xff" * 192 + data[-8:]):
        (files / "1.parquet").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"1\.parquet: "):
            ParquetRows(files / "*.parquet")
    (files / "1.parquet").write_bytes(data[:4] + bytes(30) + data[34:])
    found = read_all(ParquetRows(files / "*.parquet"))
    assert [at for at, row in enumerate(found) if isinstance(row, Exception)] == list(range(60, 77))
    assert "1.parquet: row group 0" in str(found[60])


@pytest.mark.parametrize("source", [ParquetRows, Table])
@pytest.mark.parametrize("lacking", ["0.parquet", "1.parquet"])
def test_files_with_other_columns(source: Any, lacking: str, files: Path, read_all: Any) -> None:
    """A column that only some of the files have is an error that names it, unless columns are chosen."""
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(writer.read_table(files / lacking).drop(["rare"]), files / lacking)
    with pytest.raises(ValueError, match=r"1\.parquet and .*0\.parquet: only one .* columns \['rare'\]"):
        source(files / "*.parquet")
    assert read_all(source(files / "*.parquet", ["n"])) == [{"n": row} for row in range(100)]
    assert read_all(source(files / "*.parquet", data="n")) == list(range(100))


def test_wrong_arguments(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that do not exist, arguments that exclude each other, and a missing pyarrow are errors that say so."""
    for options in ({"columns": ["x"]}, {"data": "image.x"}, {"data": "n.x"}, {"target": "x"}):
        with pytest.raises(ValueError, match=r"0\.parquet: there is no column '.*x'; there are \['n', 'text'"):
            ParquetRows(files / "0.parquet", **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a list of names"):
        ParquetRows(files / "0.parquet", "n")
    with pytest.raises(TypeError, match=r"ParquetRows\(data=\)"):
        ParquetRows(files / "0.parquet", data=["n"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass one of them"):
        ParquetRows(files / "0.parquet", ["n"], data="n")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    arrow.cache_clear()
    with pytest.raises(ImportError, match=r"aiofeed\[parquet\]"):
        ParquetRows(files / "0.parquet")


def test_rows_that_would_exhaust_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group that needs far more memory than it has bytes in the file is an error before it is read."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"x": np.zeros(1_000_000, np.int64)}), tmp_path / "x.parquet")
    source = ParquetRows(tmp_path / "x.parquet", target="x")
    assert source.target(0) == 0
    monkeypatch.setattr(expanded, "EXPANDED_BYTES", 1 << 20)
    found = asyncio.run(source.read_many([0]))[0]
    assert "x.parquet: row group 0 claims 7.6 MiB in memory" in str(found)


def test_a_row_group_with_other_rows_than_the_footer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_all: Any
) -> None:
    """A row group of fewer rows than its description is an error that names both numbers."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"x": [1, 2, 3]}), tmp_path / "x.parquet")
    source, read = ParquetRows(tmp_path / "x.parquet"), parquet_module._read_row_group
    monkeypatch.setattr(parquet_module, "_read_row_group", lambda *arguments: read(*arguments).slice(0, 2))
    assert {str(each) for each in read_all(source)} == {f"{tmp_path}/x.parquet: row group 0 has 2 rows of 3"}


# --- encrypted columns ------------------------------------------------------------------------------------------------


@pytest.fixture
def encrypted(tmp_path: Path) -> str:
    """A file with a plain footer, a plain column "x" and an encrypted one, "secret"."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Client(encryption.KmsClient):  # type: ignore[misc]
        def __init__(self, _: Any) -> None:
            super().__init__()

        def wrap_key(self, key: bytes, master: str) -> bytes:
            return base64.b64encode(master.encode() + key)

        def unwrap_key(self, wrapped: bytes, master: str) -> bytes:
            return base64.b64decode(wrapped)[len(master) :]

    how = encryption.EncryptionConfiguration(footer_key="f", column_keys={"c": ["secret"]}, plaintext_footer=True)
    factory = encryption.CryptoFactory(lambda _: Client(_))
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    table = arrow().table({"x": list(range(100)), "secret": [[1, 2, 3, 4]] * 100})
    path = str(tmp_path / "t.parquet")
    with arrow("pyarrow.parquet").ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    return path


USES: dict[str, Callable[[str], Any]] = {
    "Table": Table,
    "ParquetRows": ParquetRows,
    "data": lambda path: ParquetRows(path, data="secret"),
    "target": lambda path: ParquetRows(path, data="x", target="secret"),
    "Manifest": lambda path: aiofeed.Manifest(path, "secret"),
    "Tokens": lambda path: aiofeed.Tokens(path, 4, column="secret"),
}


@pytest.mark.parametrize("name", USES)
def test_an_encrypted_column_is_an_error_that_names_the_file(encrypted: str, name: str) -> None:
    """pyarrow ends the process if it is asked for the description of such a column."""
    with pytest.raises(ValueError, match=r"t\.parquet: .*[Dd]ecrypt"):
        USES[name](encrypted)


def test_plain_columns_beside_an_encrypted_one_are_read(encrypted: str) -> None:
    """The columns that are chosen decide."""
    [batch] = Feeder(Table(encrypted, ["x"]), batch_size=100)
    assert batch["x"].tolist() == list(range(100))


# --- files of several writers -----------------------------------------------------------------------------------------


def stored(name: str) -> list[Any]:
    """Types that Parquet stores in the same way, and writers name differently in Arrow's schema."""
    pa = pytest.importorskip("pyarrow")
    numbers = pa.int32()
    return {
        "list": [
            pa.list_(numbers),
            pa.large_list(numbers),
            pa.list_(numbers, 2),
            pa.list_(pa.field("element", numbers)),
        ],
        "text": [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())],
        "bytes": [pa.binary(), pa.large_binary()],
        "struct": [pa.struct([("a", pa.string())]), pa.struct([("a", pa.large_string())])],
        "map": [pa.map_(pa.string(), numbers), pa.map_(pa.large_string(), numbers)],
        "instant": [pa.timestamp("us", zone) for zone in ("UTC", "+00:00", "Europe/Berlin")],
        "decimal": [pa.decimal128(10, 2), pa.decimal256(10, 2)],
    }[name]


VALUES: dict[str, list[Any]] = {
    "list": [[1, 2], [3, 4]],
    "text": ["x", "y"],
    "bytes": [b"x", b"y"],
    "struct": [{"a": "x"}, {"a": "y"}],
    "map": [[("a", 1)], [("b", 2)]],
    "instant": [datetime(2020, 1, day, tzinfo=UTC) for day in (1, 2)],
    "decimal": [Decimal("1.50"), Decimal("-2.25")],
}


@pytest.mark.parametrize("name", VALUES)
def test_files_of_several_writers_are_one_table(tmp_path: Path, name: str) -> None:
    """Types of Arrow that Parquet stores alike may differ between the files of a table."""
    paths = []
    for number, kind in enumerate(stored(name)):
        paths.append(str(tmp_path / f"{number}.parquet"))
        is_dictionary = arrow().types.is_dictionary(kind)
        plain = arrow().array(VALUES[name], kind.value_type if is_dictionary else kind)
        column = plain.dictionary_encode() if is_dictionary else plain
        arrow("pyarrow.parquet").write_table(arrow().table({"v": column}), paths[-1])
    [rows] = Feeder(Table(paths), batch_size=100, collate_fn=list)
    values = [row["v"].tolist() if name == "list" else row["v"] for row in rows]
    assert values == VALUES[name] * len(paths)
    if name == "list":
        [batch] = Feeder(Table(paths), batch_size=100)
        assert batch["v"].tolist() == VALUES[name] * len(paths)


def test_other_numbers_in_another_file_are_refused(tmp_path: Path) -> None:
    """Parquet stores them differently."""
    for number, kind in enumerate(("int32", "float32")):
        arrow("pyarrow.parquet").write_table(arrow().table({"v": np.ones(2, kind)}), tmp_path / f"{number}.parquet")
    with pytest.raises(ValueError, match=r"1\.parquet: column 'v' has the type float, and int32 in"):
        Feeder(Table(f"{tmp_path}/*.parquet"), batch_size=2)


@pytest.mark.parametrize(
    ("version", "reads_on"), [("1.2.8", True), ("1.0.0", True), ("1.2.9", False), ("1.13.1", False)]
)
def test_column_chunks_of_old_writers_are_longer_than_they_say(tmp_path: Path, version: str, reads_on: bool) -> None:
    """pyarrow reads up to 100 bytes behind a column chunk of parquet-mr before 1.2.9."""
    path = tmp_path / "t.parquet"
    wanted = arrow().table({"x": list(range(300)), "y": list(range(300))})
    arrow("pyarrow.parquet").write_table(wanted, path, store_schema=False)
    name = arrow("pyarrow.parquet").read_metadata(path).created_by.encode()
    written = f"parquet-mr version {version} (build 0)"[: len(name)].ljust(len(name)).encode()
    path.write_bytes(path.read_bytes().replace(name, written))
    source = Table(str(path))
    ranges = source._chunks_of(source._shards[0], 0, [0])
    described = arrow("pyarrow.parquet").read_metadata(path).row_group(0).column(0)
    assert (ranges[0][1] - ranges[0][0] > described.total_compressed_size) == reads_on
    assert [row for rows in Feeder(source, batch_size=50, collate_fn=list) for row in rows] == wanted.to_pylist()


def test_times_of_96_bits_do_not_wrap_around(tmp_path: Path) -> None:
    """INT96 has years that 64 bits of nanoseconds do not have; they come as microseconds."""
    times = [datetime(1600, 1, 1), datetime(3000, 1, 2, 3, 4, 5, 678901), datetime(2020, 1, 1)]
    table = arrow().table({"t": arrow().array(times, arrow().timestamp("us"))})
    arrow("pyarrow.parquet").write_table(table, tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    [rows] = Feeder(Table(str(tmp_path / "t.parquet")), batch_size=4, collate_fn=list)
    assert [row["t"] for row in rows] == times


def test_folders_of_a_partition_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The values in names of folders are no columns; a log line, or the error of a missing one, says what has them."""
    for year in (1, 2):
        (tmp_path / f"y={year}").mkdir()
        arrow("pyarrow.parquet").write_table(arrow().table({"x": [year]}), tmp_path / f"y={year}" / "t.parquet")
    pattern = f"{tmp_path}/*/t.parquet"
    Table(pattern, ["x"])
    assert caplog.text == ""
    Table(pattern)
    assert "no column for ['y'], which its folders name: Table(pyarrow.dataset.dataset(" in caplog.text
    with pytest.raises(ValueError, match=r"there is no column 'y'; there are \['x'\]; Table\(pyarrow\.dataset"):
        Table(pattern, ["x", "y"])
    whole = arrow("pyarrow.dataset").dataset(str(tmp_path), partitioning="hive").to_table()
    [batch] = Feeder(Table(whole), batch_size=4)
    assert batch["y"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_pyarrow_gets_what_was_received(kind: type, tmp_path: Path) -> None:
    """A row group is decoded from the ranges in memory as from the file, and they are not copied before."""
    table = arrow().table({"x": np.arange(1000.0), "y": [str(number) for number in range(1000)]})
    path, parquet = tmp_path / "a.parquet", arrow("pyarrow.parquet")
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    data, metadata = path.read_bytes(), parquet.read_metadata(path)
    start = metadata.row_group(0).column(0).data_page_offset
    parts = {start: kind(data[start:])}
    file = parquet_module._PartsOfFile(len(data), parts)
    assert parquet.ParquetFile(file, metadata=metadata).read_row_group(0).equals(table)
    file.seek(start + 5)
    assert np.shares_memory(np.frombuffer(file.read_buffer(20), np.uint8), np.frombuffer(parts[start], np.uint8))
    assert file.read(3) == data[start + 25 : start + 28]
