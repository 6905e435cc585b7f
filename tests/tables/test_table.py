"""``Table``: batches, rows and options, over every kind of table."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import DecodeImage, Feeder, Mixture, Table, pad_collate
from aiofeed.errors import CollateError, ReadError, StateError
from aiofeed.tables.memory import MemoryTable
from tests.support.tables import NUMBERS, ROWS, TABLES, TEXTS, TOKENS, arrow_table, dataset, in_chunks, parquet

pytestmark = pytest.mark.integration
pytest.importorskip("pyarrow")


@pytest.fixture(params=["in memory", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the consumer's thread gathers batches, or threads make them ahead."""
    if request.param == "threads":
        monkeypatch.setattr(MemoryTable, "in_memory", False)
    return str(request.param)


def as_arrays(feeder: Any) -> dict[str, Any]:
    """The columns of an epoch."""
    batches = list(feeder)
    return {name: np.concatenate([batch[name].cpu().numpy() for batch in batches]) for name in batches[0]}


def assert_rows(found: dict[str, Any], rows: Any = slice(None), names: Any = NUMBERS) -> None:
    assert list(found) == list(names)
    for name, column in found.items():
        assert column.dtype == NUMBERS[name].dtype
        np.testing.assert_array_equal(column, NUMBERS[name][rows])


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_every_table_gives_the_same_batches(name: str, way: str, tmp_path: Path) -> None:
    """A batch is a dict of tensors with the values and dtypes of the columns, in the order of the epoch."""
    source = TABLES[name](tmp_path)
    with Feeder(Table(source), batch_size=7) as feeder:
        first = next(iter(feeder))
        assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in first.values())
        assert [list(tensor.shape) for tensor in first.values()] == [[7, 4], [7], [7], [7]]
        assert_rows(as_arrays(feeder))
        resident = name == "Parquet" or (way == "in memory" and name != "Lance")
        assert type(feeder._session.pipeline).__name__.startswith("Resident" if resident else "Streaming")
    with Feeder(Table(source, ["y", "x"]), batch_size=7, shuffle=True) as feeder:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).numpy()
        assert_rows(as_arrays(feeder), order, ["y", "x"])


def test_pandas(way: str) -> None:
    """Columns of a DataFrame are found by position, numbers with their values: NaN is no null."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [0.5, float("nan"), 2.5], "b": [1, 2, 3], "c": ["u", "v", "w"]}, index=[5, 5, 7])
    [batch] = Feeder(Table(frame, ["a", "b"]), batch_size=3)
    assert batch["b"].tolist() == [1, 2, 3]
    assert batch["a"].isnan().tolist() == [False, True, False]
    nullable = pandas.DataFrame({"a": pandas.array([1, 2], dtype="Int64")})
    assert next(iter(Feeder(Table(nullable), batch_size=2)))["a"].tolist() == [1, 2]
    [rows] = Feeder(Table(frame), batch_size=3, collate_fn=list)
    assert rows[2] == {"a": 2.5, "b": 3, "c": "w"}


def test_byte_order(way: str) -> None:
    """Numbers in the other byte order arrive with their values, and texts of numpy as rows."""
    table = np.array([(1, "a"), (2, "b")], [("n", ">i4"), ("text", "U3")])
    assert next(iter(Feeder(Table(table, ["n"]), batch_size=2)))["n"].tolist() == [1, 2]
    [rows] = Feeder(Table(table), batch_size=2, collate_fn=list)
    assert rows == [{"n": 1, "text": "a"}, {"n": 2, "text": "b"}]


def test_window_shuffle_mixes_pieces(way: str) -> None:
    """``shuffle="window:2"`` mixes the rows of two pieces of an Arrow table at a time."""
    feeder: Feeder[Any] = Feeder(Table(in_chunks()), batch_size=8, shuffle="window:2")
    pieces = [set((batch["y"] // 28).tolist()) for batch in feeder]
    assert all(len(each) == 2 for each in pieces[:-1])
    assert len(set().union(*pieces)) == 25


def test_shapes_and_types(way: str) -> None:
    """Nested lists, tensors of fixed shape, large lists, unsigned and half-precision numbers become tensors."""
    arrow = pytest.importorskip("pyarrow")
    flat = np.arange(24, dtype=np.float32)
    tensors = arrow.ExtensionArray.from_storage(
        arrow.fixed_shape_tensor(arrow.float32(), [2, 3]), arrow.FixedSizeListArray.from_arrays(flat, 6)
    )
    table = arrow.table(
        {
            "tensor": tensors,
            "nested": arrow.array(flat.reshape(4, 3, 2).tolist()),
            "large": arrow.array(list(map(list, flat.reshape(4, 6).astype("f2"))), arrow.large_list(arrow.float16())),
            "unsigned": arrow.array([0, 1, 2, 65535], arrow.uint16()),
            "flags": arrow.array([[True, False]] * 4, arrow.list_(arrow.bool_(), 2)),
        }
    )
    table = arrow.concat_tables([table.slice(1, 2), table.slice(3), table.slice(0, 1)])
    [batch] = Feeder(Table(table), batch_size=4)
    order = [1, 2, 3, 0]
    np.testing.assert_array_equal(batch["tensor"], flat.reshape(4, 2, 3)[order])
    np.testing.assert_array_equal(batch["nested"], flat.reshape(4, 3, 2)[order])
    np.testing.assert_array_equal(batch["large"], flat.reshape(4, 6)[order])
    assert batch["large"].dtype == torch.float16
    assert batch["unsigned"].tolist() == [1, 2, 65535, 0]
    assert batch["flags"].tolist() == [[True, False]] * 4


def test_array2d_of_datasets(way: str, tmp_path: Path) -> None:
    """Hugging Face's ``Array2D`` has its shape."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"m": datasets.Array2D((2, 3), "int32")})
    data = datasets.Dataset.from_dict({"m": np.arange(60).reshape(10, 2, 3)}, features=features)
    [batch] = Feeder(Table(data), batch_size=10)
    assert batch["m"].tolist() == np.arange(60).reshape(10, 2, 3).tolist()


# --- rows -------------------------------------------------------------------------------------------------------------

WITH_TEXT = {
    "Arrow": lambda folder: in_chunks(others=True),
    "datasets": lambda folder: dataset(folder, others=True),
    "Parquet": lambda folder: parquet(folder, others=True),
    "Lance": lambda folder: pytest.importorskip("lance").write_dataset(arrow_table(others=True), folder / "t.lance"),
}


@pytest.mark.parametrize("name", WITH_TEXT)
def test_collate_fn_gets_rows(name: str, tmp_path: Path) -> None:
    """With ``collate_fn`` samples are dicts of Python values; lists of numbers are arrays that can be written to."""
    feeder: Feeder[Any] = Feeder(Table(WITH_TEXT[name](tmp_path)), batch_size=30, shuffle=True, collate_fn=list)
    rows = sorted((row for batch in feeder for row in batch), key=lambda row: row["y"])
    assert [row["text"] for row in rows] == TEXTS
    assert [row["tokens"].tolist() for row in rows] == TOKENS
    assert [row["x"].tolist() for row in rows] == NUMBERS["x"].tolist()
    assert {type(row["y"]) for row in rows} == {int}
    assert {type(row["flag"]) for row in rows} == {bool}
    rows[0]["tokens"][0] = rows[0]["x"][0] = 9
    feeder.close()


@pytest.mark.parametrize("name", WITH_TEXT)
def test_variable_lengths_are_padded(name: str, tmp_path: Path) -> None:
    """``pad_collate`` makes tensors of lists of different lengths."""
    table = Table(WITH_TEXT[name](tmp_path), ["tokens", "y"])
    with Feeder(table, batch_size=10, collate_fn=pad_collate(-1)) as feeder:
        batch = next(iter(feeder))
    assert batch["tokens"].tolist() == [each + [-1] * (5 - len(each)) for each in TOKENS[:10]]
    assert batch["attention_mask"].sum(1).tolist() == [1, 2, 3, 4, 5] * 2
    assert batch["y"].tolist() == NUMBERS["y"][:10].tolist()


def test_decode_gets_rows(tmp_path: Path) -> None:
    """With ``decode`` and without ``data`` the decoder gets a row, and its result is collated as usual."""
    with Feeder(Table(in_chunks(others=True)), decode=lambda row: (len(row["text"]), row["x"]), batch_size=9) as feeder:
        lengths, x = next(iter(feeder))
    assert lengths.tolist() == list(map(len, TEXTS[:9]))
    np.testing.assert_array_equal(x, NUMBERS["x"][:9])


@pytest.mark.parametrize("name", WITH_TEXT)
def test_one_column_as_the_sample(name: str, tmp_path: Path) -> None:
    """``data`` is the sample, ``target`` a value, or a dict of several."""
    source = WITH_TEXT[name](tmp_path)
    with Feeder(Table(source, data="text", target="y"), decode=len, batch_size=9, shuffle=True) as feeder:
        pairs = {int(y): int(length) for lengths, ys in feeder for length, y in zip(lengths, ys, strict=True)}
    assert pairs == {row * 7: len(text) for row, text in enumerate(TEXTS)}
    with Feeder(Table(source, data="x", target=["text", "y"]), batch_size=9) as feeder:
        x, targets = next(iter(feeder))
    np.testing.assert_array_equal(x, NUMBERS["x"][:9])
    assert targets["text"] == TEXTS[:9]
    assert targets["y"].tolist() == NUMBERS["y"][:9].tolist()


def pictures() -> list[Any]:
    image = pytest.importorskip("PIL.Image")
    return [image.new("RGB", (40 + row, 30), (row * 20, 0, 0)) for row in range(6)]


def image_dataset(folder: Path) -> Any:
    """Images of Hugging Face: four embedded ones, two as paths."""
    datasets = pytest.importorskip("datasets")
    encoded = []
    for row, picture in enumerate(pictures()):
        data = io.BytesIO()
        picture.save(data, "PNG")
        (folder / f"{row}.png").write_bytes(data.getvalue())
        encoded.append({"bytes": data.getvalue() if row < 4 else None, "path": str(folder / f"{row}.png")})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcdef"))})
    data = datasets.Dataset.from_dict({"image": encoded, "label": list(range(6))}, features=features)
    data.save_to_disk(folder / "images")
    return datasets.load_from_disk(folder / "images")


@pytest.mark.parametrize("kind", ["datasets", "Parquet"])
@pytest.mark.parametrize("cache", [None, "host", "device"])
def test_images_of_datasets(kind: str, cache: Any, tmp_path: Path) -> None:
    """Images are decoded from their bytes or paths, not by ``datasets``, into batches as those of image files."""
    data: Any = image_dataset(tmp_path)
    if kind == "Parquet":
        data.to_parquet(tmp_path / "images.parquet")
        data = tmp_path / "images.parquet"
    table = Table(data, data="image", target="label")
    with Feeder(table, decode=DecodeImage(size=16), batch_size=6, cache=cache) as feeder:
        for _ in range(2):
            [(images, labels)] = list(feeder)
            assert images.shape == (6, 3, 16, 16)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert images[:, 0, 8, 8].tolist() == [0, 20, 40, 60, 80, 100]
            assert labels.tolist() == list(range(6))


def test_encoded_files_in_rows(tmp_path: Path) -> None:
    """A row has the bytes of an image, for a decoder that returns a dict."""
    decoder = DecodeImage(size=16)
    table = Table(image_dataset(tmp_path))
    with Feeder(table, decode=lambda row: {**row, "image": decoder(row["image"])}, batch_size=6) as feeder:
        batch = next(iter(feeder))
    assert batch["image"].shape == (6, 3, 16, 16)
    assert batch["label"].tolist() == list(range(6))


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["host", "device"])
@pytest.mark.parametrize("options", [{}, {"data": "x"}])
def test_a_cache_of_columns_is_refused(options: Any, cache: Any) -> None:
    """Without ``decode`` there is nothing to cache."""
    with pytest.raises(TypeError, match="decoded already: leave it out"):
        Feeder(Table(arrow_table(), **options), batch_size=4, cache=cache)


def test_a_stream_is_read_once() -> None:
    """A ``RecordBatchReader`` becomes a table; a table that is passed without ``Table`` is refused with the way."""
    assert_rows(as_arrays(Feeder(Table(arrow_table().to_reader()), batch_size=7)))
    with pytest.raises(TypeError, match=r"pass aiofeed\.Table\(table\)"):
        Feeder(arrow_table(), batch_size=7)


def test_documents_are_packed() -> None:
    """A column of tokens fits ``Pack``."""
    plan = aiofeed.Pack(list(map(len, TOKENS)), context=15, rows=2)
    with Feeder(Table(in_chunks(others=True), data="tokens"), batch_size=plan) as feeder:
        found = [token for batch in feeder for row in batch["tokens"] for token in row.tolist()]
    assert sum(found) == sum(map(sum, TOKENS))


def test_repr() -> None:
    """A feeder shows its columns."""
    assert repr(Feeder(Table(arrow_table()), batch_size=7)).startswith("Feeder(Table(100 rows of x, y, flag, small), b")


def test_a_mixture_of_tables(tmp_path: Path) -> None:
    """Tables of different kinds mix row by row."""
    mixture = Mixture({"a": Table(arrow_table()), "b": Table(parquet(tmp_path))}, weights={"a": 3, "b": 1}, until=40)
    with Feeder(mixture, batch_size=8, decode=lambda row: row) as feeder:
        assert {tuple(batch["x"].shape) for batch in feeder} == {(8, 4)}
    assert feeder.statistics().by_source == {"a": 30, "b": 10}


# --- order and state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["datasets", "Parquet"])
def test_resume_at_every_position(kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state saved after any batch goes on with the next one, in memory and in threads alike."""
    table = Table(TABLES[kind](tmp_path))

    def feeder() -> Feeder[Any]:
        return Feeder(table, batch_size=9, shuffle=True)

    with feeder() as whole:
        expected = [batch["y"].tolist() for _ in range(2) for batch in whole]
    for position in range(13):
        with feeder() as stopped:
            for _ in islice(stopped, position):
                pass
            state = json.loads(json.dumps(stopped.state_dict()))
        with monkeypatch.context() as patch, feeder() as resumed:
            if position % 2:
                patch.setattr(MemoryTable, "in_memory", way == "threads")
            resumed.load_state_dict(state)
            assert [batch["y"].tolist() for batch in resumed.steps(5)] == expected[position : position + 5]


def test_the_state_of_another_table_is_refused() -> None:
    """A state belongs to the same rows and columns."""
    state = Feeder(Table(arrow_table()), batch_size=4).state_dict()
    Feeder(Table(in_chunks()), batch_size=4).load_state_dict(state)
    changed = arrow_table().set_column(1, "y", [np.zeros(ROWS, np.int64)])
    for other in (Table(arrow_table(), ["x"]), Table(arrow_table().slice(1)), Table(changed)):
        with pytest.raises(StateError):
            Feeder(other, batch_size=4).load_state_dict(state)


@pytest.mark.parametrize("kind", ["Arrow, file", "datasets", "Parquet", "Lance"])
def test_pickles_name_the_files(kind: str, tmp_path: Path) -> None:
    """A table in files is opened again where it is unpickled."""
    table = Table(TABLES[kind](tmp_path))
    copied = pickle.loads(pickle.dumps(table))
    assert type(copied) is type(table)
    assert copied.fingerprint() == table.fingerprint()
    with Feeder(copied, batch_size=10) as feeder:
        assert_rows(as_arrays(feeder))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Arrow", "Arrow, file", "datasets", "NumPy", "Parquet", "Lance"])
def test_a_missing_column(kind: str, tmp_path: Path) -> None:
    """The error names the file, the column and those that exist."""
    source = TABLES[kind](tmp_path)
    name = {"Arrow, file": "table.arrow", "Parquet": "0.parquet", "Lance": "table.lance"}.get(kind, "Table")
    message = rf"{name}.*there is no column 'z'; there are \['x', 'y', 'flag', 'small'\]"
    for options in ({"columns": ["x", "z"]}, {"data": "z"}, {"data": "x", "target": "z"}):
        with pytest.raises(ValueError, match=message):
            Table(source, **options)
    with pytest.raises(ValueError, match=message):
        Table(source, data="x", target=["y", "z"])


@pytest.mark.parametrize("kind", WITH_TEXT)
@pytest.mark.parametrize(("column", "why"), [("text", "has the type"), ("tokens", "has lists of different")])
def test_columns_without_tensors(kind: str, column: str, why: str, tmp_path: Path) -> None:
    """The error names the column, why it has no tensors and what to do."""
    table = Table(WITH_TEXT[kind](tmp_path), ["x", column])
    if column == "tokens" and kind in ("Parquet", "Lance"):  # known when rows are read
        message = r"column 'tokens' has .*different.*columns=.*collate_fn="
        with Feeder(table, batch_size=9) as feeder, pytest.raises(CollateError, match=message):
            list(feeder)
        return
    with pytest.raises(TypeError, match=rf"column '{column}' {why}.*columns=.*collate_fn="):
        Feeder(table, batch_size=9)


@pytest.mark.usefixtures("obstore_started")
def test_a_table_at_a_url_names_no_files(object_server: Any, tmp_path: Path) -> None:
    """Rows of a Parquet file at a URL do not lead to files of this machine; those of a local one do."""
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "secret").write_bytes(b"SECRET")
    column = [{"bytes": b"own", "path": "secret"}, {"bytes": None, "path": str(tmp_path / "secret")}]
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    writer.write_table(arrow.table({"image": arrow.array(column, kind)}), tmp_path / "x.parquet")
    object_server.objects["bucket/x.parquet"] = (tmp_path / "x.parquet").read_bytes()
    source = Table("s3://bucket/x.parquet", data="image", options=object_server.options)
    assert asyncio.run(source.read_many([0])) == [b"own"]
    [found] = asyncio.run(source.read_many([1]))
    assert str(found) == "s3://bucket/x.parquet: column 'image' names a file, and a file at a URL may name none"
    assert asyncio.run(Table(tmp_path / "x.parquet", data="image").read_many([1])) == [b"SECRET"]


def test_images_without_a_decoder(tmp_path: Path) -> None:
    """The error names the column and what decodes it."""
    with pytest.raises(TypeError, match=r"column 'image' has encoded files.*data='image' for a decoder"):
        Feeder(Table(image_dataset(tmp_path)), batch_size=2)


@pytest.mark.parametrize("kind", ["Parquet", "Lance"])
def test_null_values_fail_their_rows(kind: str, tmp_path: Path) -> None:
    """In files, a row with a null fails by its name, and the others of its batch do not."""
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"a": [None if row == 5 else row for row in range(20)]})
    if kind == "Parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "t.parquet")
        source: Any = tmp_path / "t.parquet"
    else:
        source = pytest.importorskip("lance").write_dataset(table, tmp_path / "t.lance")
    with Feeder(Table(source), batch_size=10, on_error="skip") as feeder:
        assert [batch["a"].tolist() for batch in feeder] == [[0, 1, 2, 3, 4, 6, 7, 8, 9], list(range(10, 20))]
        assert feeder.failures[0].key.endswith(f"{'t.parquet' if kind == 'Parquet' else 't.lance'}[5]")
    with Feeder(Table(source), batch_size=10) as feeder, pytest.raises(ReadError, match="'a' is null"):
        list(feeder)


def test_null_values_in_memory() -> None:
    """In memory, nulls are found when the feeder is made; as ``data`` they fail their rows."""
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"a": [1, None, 3]})
    with pytest.raises(TypeError, match="column 'a' has null values"):
        Feeder(Table(table), batch_size=2)
    with Feeder(Table(table, data="a"), batch_size=3, on_error="skip") as feeder:
        assert next(iter(feeder)).tolist() == [1, 3]
        assert feeder.failures[0].key == "Table[1]"


def bad_file(folder: Path, kind: str) -> Any:
    arrow = pytest.importorskip("pyarrow")
    path = folder / ("t.arrow" if kind.startswith("Arrow") else "t.txt" if kind.startswith("CSV") else "t.parquet")
    match kind:
        case "Arrow, truncated":
            path = TABLES["Arrow, file"](folder)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "Arrow, other" | "CSV in a file of another name" | "Parquet, other":
            path.write_text("a,b\n1,2\n")
        case "Arrow, empty file":
            path.touch()
        case "Arrow, no rows" | "Parquet, no rows":
            empty = arrow_table(slice(0, 0))
            if kind.startswith("Parquet"):
                pytest.importorskip("pyarrow.parquet").write_table(empty, path)
            else:
                with arrow.ipc.new_file(path, empty.schema) as writer:
                    writer.write_table(empty)
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Arrow, truncated", "no Arrow file, or a truncated one"),
        ("Arrow, other", "no Arrow file"),
        ("Arrow, empty file", "no Arrow file"),
        ("Arrow, no rows", "no rows"),
        ("Parquet, no rows", "without samples"),
        ("Parquet, other", "not a Parquet file"),
        ("CSV in a file of another name", "not a Parquet file"),
    ],
)
def test_files_that_are_no_tables(kind: str, message: str, tmp_path: Path) -> None:
    """The error names the file and says what is wrong with it."""
    path = bad_file(tmp_path, kind)
    with pytest.raises(ValueError, match=message) as caught:
        Table(path)
    assert str(path) in str(caught.value)


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    """The error names load_from_disk; the Arrow files in it are a table by a glob, braces or a list, and pickled."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0, 4.0]})
    data.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "dict")
    for name, way in (("one", r"load_from_disk\('.*one'\)$"), ("dict", r"load_from_disk\('.*dict'\)\['train'\]")):
        with pytest.raises(IsADirectoryError, match=way):
            Table(tmp_path / name)
    files = [tmp_path / f"one/data-0000{number}-of-00002.arrow" for number in range(2)]
    for paths in (f"{tmp_path}/one/*.arrow", f"{tmp_path}/one/data-0000{{0..1}}-of-00002.arrow", files, files[1:]):
        table = pickle.loads(pickle.dumps(Table(paths)))
        [batch] = Feeder(table, batch_size=4)
        assert batch["x"].tolist() == [1.0, 2.0, 3.0, 4.0][-len(table) :]
    with pytest.raises(FileNotFoundError, match="no shard matches"):
        Table(f"{tmp_path}/none*.arrow")
    datasets.Dataset.from_dict({"y": [1]}).save_to_disk(tmp_path / "other")
    with pytest.raises(ValueError, match="other files differ in their columns"):
        Table([*files, *(tmp_path / "other").glob("*.arrow")])


@pytest.mark.parametrize("name", ["none.parquet", "none.arrow"])
def test_a_missing_file(name: str, tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(FileNotFoundError, match=name):
        Table(tmp_path / name)


def test_a_missing_lance_dataset(tmp_path: Path) -> None:
    """The error names the dataset."""
    pytest.importorskip("lance")
    with pytest.raises(ValueError, match=r"none\.lance"):
        Table(tmp_path / "none.lance")


def test_files_of_different_columns(tmp_path: Path) -> None:
    """The error names both files and the types."""
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, table in enumerate(({"a": [1]}, {"a": [1.0]})):
        writer.write_table(arrow.table(table), tmp_path / f"{number}.parquet")
    with pytest.raises(ValueError, match=r"1\.parquet: column 'a' has the type double, and int64 in .*0\.parquet"):
        Feeder(Table(tmp_path / "*.parquet"), batch_size=1)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (lambda: {"a": [1]}, TypeError, r"values \['a'\] of the builtins.dict, or pyarrow\.table"),
        (lambda: np.zeros(3), TypeError, r"aiofeed\.Tensors"),
        (lambda: np.zeros((2, 2), [("a", "i4")]), TypeError, "has no columns"),
        (lambda: 7, TypeError, r"got builtins\.int"),
        (lambda: [], TypeError, "got an empty list"),
        (lambda: pytest.importorskip("pandas").Series([1, 2]), TypeError, r"got pandas\..*Series"),
        (lambda: torch.zeros(2, 2), TypeError, r"got torch\.Tensor"),
        (lambda: np.zeros(0, [("a", "i4")]), ValueError, "no rows"),
        (lambda: np.array([(1,), ("a",)], [("a", object)]), ValueError, "column 'a' cannot be converted to Arrow"),
    ],
)
def test_what_is_no_table(table: Any, error: type[Exception], message: str) -> None:
    """The error says what to pass instead."""
    with pytest.raises(error, match=message):
        Feeder(Table(table()), batch_size=1)


def test_datasets_that_are_no_table(tmp_path: Path) -> None:
    """Several splits and a transform are refused with what to do instead."""
    datasets = pytest.importorskip("datasets")
    data = dataset(tmp_path)
    with pytest.raises(TypeError, match=r"pass one of the values \['train', 'test'\]"):
        Table(datasets.DatasetDict({"train": data, "test": data}))
    with pytest.raises(TypeError, match=r"pass one of the values \['train'\]"):
        Table(datasets.IterableDatasetDict({"train": data.to_iterable_dataset()}))
    with pytest.raises(TypeError, match=r"its transform.*decode="):
        Table(data.with_transform(lambda rows: rows))
    assert list(next(iter(Feeder(Table(data.with_format("numpy", columns=["y"])), batch_size=2)))) == ["y"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"columns": "x"}, TypeError, "must be a list of names, got 'x'"),
        ({"columns": []}, TypeError, "must be a list of names"),
        ({"columns": ["x"], "data": "x"}, ValueError, "pass one of them"),
        ({"target": "z"}, ValueError, "there is no column 'z'"),
        ({"data": 3}, ValueError, "there is no column 3"),
        ({"rows_per_read": 8}, TypeError, "row groups"),
        ({"store": object()}, ValueError, "Parquet"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The error names the argument and its value."""
    with pytest.raises(error, match=message):
        Table(arrow_table(), **options)


def test_columns_of_one_name() -> None:
    """Columns that share a name are refused."""
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="2 columns have the name 'a'"):
        Table(arrow.table([[1], [2]], names=["a", "a"]))
