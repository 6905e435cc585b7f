"""Rows of CSR matrices in the layout of AnnData, in HDF5 and Zarr, beside scipy."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiofeed
from aiofeed.errors import ReadError
from tests.support.arrays import assert_same
from tests.support.examples import examples
from tests.support.simulated_device import SimulatedDevice

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr", minversion="3")
sparse = pytest.importorskip("scipy.sparse")

ROWS, WIDTH = 40, 7
TYPES = ["B cell", "T cell", "monocyte"]


def cells(
    rows: int = ROWS, *, seed: int = 0, density: float = 0.3, dtype: str = "float32", index: str = "int32"
) -> Any:
    """A matrix, some rows of which are empty."""
    random = np.random.default_rng(seed)
    values = random.integers(1, 99, (rows, WIDTH)) * (random.random((rows, WIDTH)) < density)
    values[::5] = 0
    matrix = sparse.csr_matrix(values.astype(dtype))
    matrix.indices, matrix.indptr = matrix.indices.astype(index), matrix.indptr.astype(index)
    return matrix


def write_group(file: Any, matrix: Any, types: Any, create: Callable[..., Any], chunk: int) -> None:
    """Write the groups ``X`` and ``obs``, as anndata does: https://anndata.readthedocs.io/en/stable/fileformat-prose.html."""
    group = file.create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(matrix.shape)})
    for name in ("data", "indices", "indptr"):
        create(group, name, getattr(matrix, name), chunk)
    obs = file.create_group("obs")
    obs.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "name"})
    create(obs, "row", np.arange(len(types)), chunk)
    column = obs.create_group("cell_type")
    column.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
    create(column, "codes", np.asarray(types, "int8"), chunk)
    create(column, "categories", TYPES, chunk)


def in_hdf5(group: Any, name: str, values: Any, chunk: int) -> None:
    chunks = (
        {}
        if isinstance(values, list) or not len(values)
        else {"chunks": (min(chunk, len(values)),), "compression": "gzip"}
    )
    group.create_dataset(name, data=values, maxshape=(None,) if chunks else None, **chunks)


def in_zarr(group: Any, name: str, values: Any, chunk: int) -> None:
    if isinstance(values, list):
        group.create_array(name, shape=len(values), dtype=str)[:] = np.array(values, object)
    else:
        array = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=(chunk,))
        if len(values):
            array[:] = values


def save(path: Path, matrix: Any, types: Any = None, chunk: int = 16) -> str:
    """Write cells by h5py or zarr; returns what comes before the names of arrays."""
    types = np.arange(matrix.shape[0]) % len(TYPES) if types is None else types
    if path.suffix == ".h5ad":
        with h5py.File(path, "w") as file:
            write_group(file, matrix, types, in_hdf5, chunk)
        return f"{path}::"
    write_group(zarr.create_group(path, zarr_format=2 if "2" in path.stem else 3), matrix, types, in_zarr, chunk)
    return f"{path}/"


def save_anndata(path: Path, matrix: Any) -> str:
    """Write cells by anndata."""
    anndata, pandas = pytest.importorskip("anndata"), pytest.importorskip("pandas")
    kinds = pandas.Categorical.from_codes(np.arange(matrix.shape[0]) % len(TYPES), TYPES)
    index = [f"cell {row}" for row in range(matrix.shape[0])]
    obs = pandas.DataFrame({"cell_type": kinds, "row": np.arange(matrix.shape[0])}, index=index)
    data = anndata.AnnData(matrix, obs)
    if path.suffix == ".h5ad":
        data.write_h5ad(path)
        return f"{path}::"
    data.write_zarr(path)
    return f"{path}/"


def fields(*files: str) -> dict[str, Any]:
    named = {"x": "X", "y": "obs/cell_type", "row": "obs/row"}
    return {name: [f"{file}{inner}" for file in files] for name, inner in named.items()}


FILES = ["cells.h5ad", "cells.zarr", "cells2.zarr"]

pytestmark = pytest.mark.filterwarnings(
    "ignore::zarr.errors.UnstableSpecificationWarning", "ignore:.*Zarr V3:UserWarning", "ignore:Sparse:UserWarning"
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("writer", ["here", "anndata"])
def test_rows_and_columns(name: str, writer: str, tmp_path: Path) -> None:
    """Dense rows, codes of categories and numbers of a file."""
    matrix = cells()
    file = (save if writer == "here" else save_anndata)(tmp_path / name, matrix)
    source = aiofeed.Arrays(fields(file))
    assert source.categories == {"y": TYPES}
    assert len(source) == ROWS
    with aiofeed.Feeder(source, batch_size=9, shuffle=True) as feeder:
        rows = []
        for batch in feeder:
            row = batch["row"]
            assert_same(batch["x"].numpy(), matrix[row.numpy()].toarray())
            assert batch["y"].dtype == torch.int8
            assert torch.equal(batch["y"], (row % 3).to(torch.int8))
            rows += row.tolist()
    assert sorted(rows) == list(range(ROWS))


@settings(max_examples=examples(12), report_multiple_bugs=False)
@given(st.data())
def test_rows_equal_scipy(data: Any) -> None:
    """Of several files of any lengths, dtypes and chunks, in windows of rows and any order."""
    dtype, index = (
        data.draw(st.sampled_from(["float32", "float64", "int32", "uint8"])),
        data.draw(st.sampled_from(["i4", "i8"])),
    )
    name = data.draw(st.sampled_from(FILES))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    density, chunk = data.draw(st.sampled_from([0, 0.1, 0.6, 1])), data.draw(st.integers(1, 20))
    parts = [cells(rows, seed=at, density=density, dtype=dtype, index=index) for at, rows in enumerate(lengths)]
    whole = sparse.vstack(parts).toarray()
    low = -data.draw(st.integers(0, 2))
    high = data.draw(st.integers(0, 2))
    layout = data.draw(st.sampled_from(["dense", "csr"]))
    window = data.draw(st.sampled_from([None, low, range(low, high + 1)])) if layout == "dense" else None
    offsets = window if isinstance(window, range) else [window or 0]
    places = [
        row for row in range(len(whole)) if row + min(0, *offsets, 0) >= 0 and row + max(0, *offsets, 0) < len(whole)
    ]
    if not places:
        return
    with tempfile.TemporaryDirectory() as folder:
        files = [save(Path(folder, f"{at}{name}"), part, chunk=chunk) for at, part in enumerate(parts)]
        given_arrays = {"x": [f"{file}X" for file in files], "row": np.arange(len(whole))}
        source = aiofeed.Arrays(given_arrays, window={"x": window} if window is not None else None, sparse=layout)
        with aiofeed.Feeder(
            source, batch_size=4, shuffle=data.draw(st.sampled_from([False, True, "window"]))
        ) as feeder:
            rows = []
            for batch in feeder:
                x = batch["x"]
                assert x.layout == (torch.strided if layout == "dense" else torch.sparse_csr)
                for sample, row in zip(
                    (x if layout == "dense" else x.to_dense()).numpy(), batch["row"].tolist(), strict=True
                ):
                    expected = whole[[row + offset for offset in offsets]]
                    assert_same(sample, expected if isinstance(window, range) else expected[0])
                    rows.append(row)
    assert sorted(rows) == places


OPTIONS: dict[str, dict[str, Any]] = {
    "processes": {"engine": "process:2"},
    "device": {"device": SimulatedDevice()},
    "samples": {"in_order": "samples"},
    "skip": {"on_error": "skip"},
    "one thread": {"limits": aiofeed.Limits(decode_threads=1, prefetch_batches=1)},
}


# The simulated device has no sparse tensors.
@pytest.mark.parametrize(
    ("name", "layout"), [(n, kind) for n in OPTIONS for kind in ("dense", "csr") if (n, kind) != ("device", "csr")]
)
@pytest.mark.usefixtures("forked_workers")
def test_options_of_the_feeder(name: str, layout: str, tmp_path: Path) -> None:
    """With other engines and policies an epoch has every row once."""
    matrix = cells()
    source = aiofeed.Arrays(fields(save(tmp_path / "c.h5ad", matrix)), sparse=layout)
    with aiofeed.Feeder(source, batch_size=6, shuffle=True, **OPTIONS[name]) as feeder:
        rows = []
        for batch in feeder:
            x, row = batch["x"].cpu(), batch["row"].cpu()
            assert_same((x.to_dense() if layout == "csr" else x).numpy(), matrix[row.numpy()].toarray())
            rows += row.tolist()
    assert sorted(rows) == list(range(ROWS))


def test_ranks_and_a_resume_with_csr(tmp_path: Path) -> None:
    """Each rank has its rows, and goes on where it was."""
    source = aiofeed.Arrays(fields(save(tmp_path / "c.zarr", cells())), sparse="csr")
    whole = []
    for rank in range(2):
        with aiofeed.Feeder(source, batch_size=3, shuffle="window", shard=(rank, 2)) as feeder:
            rows = [batch["row"].tolist() for batch in feeder]
        with aiofeed.Feeder(source, batch_size=3, shuffle="window", shard=(rank, 2)) as feeder:
            first = [batch["row"].tolist() for batch in itertools.islice(feeder, 3)]
            state = feeder.state_dict()
        with aiofeed.Feeder(source, batch_size=3, shuffle="window", shard=(rank, 2)) as feeder:
            feeder.load_state_dict(state)
            assert first + [batch["row"].tolist() for batch in feeder] == rows
        whole += sum(rows, [])
    assert sorted(whole) == list(range(ROWS))


def damaged(folder: Path, change: Callable[[Any], Any]) -> str:
    """A file whose group of the matrix was changed."""
    path = folder / "bad.h5ad"
    save(path, cells())
    with h5py.File(path, "r+") as file:
        change(file["X"])
    return f"{path}::X"


def put(group: Any, name: str, at: int, value: int) -> None:
    group[name][at] = value


def replaced(group: Any, name: str, change: Callable[[Any], Any]) -> None:
    values = group[name][...]
    del group[name]
    group[name] = change(values)


BAD: dict[str, Callable[[Any], Any]] = {
    "does not begin at 0": lambda group: put(group, "indptr", 0, 1),
    "goes back": lambda group: put(group, "indptr", 3, 99_999),
    "negative": lambda group: put(group, "indptr", 3, -1),
    "ends too late": lambda group: put(group, "indptr", ROWS, 99_999),
    "too short": lambda group: replaced(group, "indptr", lambda values: values[:-1]),
    "too few values": lambda group: replaced(group, "data", lambda values: values[:-1]),
    "too few columns": lambda group: replaced(group, "indices", lambda values: values[:-1]),
    "no shape": lambda group: group.attrs.__delitem__("shape"),
    "another shape": lambda group: group.attrs.update({"shape": [ROWS + 1, WIDTH]}),
    "a shape of one": lambda group: group.attrs.update({"shape": [ROWS]}),
    "no columns": lambda group: group.__delitem__("indices"),
    "no values": lambda group: group.__delitem__("data"),
    "no rows": lambda group: group.__delitem__("indptr"),
    "floats as columns": lambda group: replaced(group, "indices", lambda values: values.astype("f4")),
    "floats as rows": lambda group: replaced(group, "indptr", lambda values: values + 0.5),
    "columns as rows": lambda group: group.attrs.update({"encoding-type": "csc_matrix"}),
    "values in two axes": lambda group: replaced(group, "data", lambda values: values[:, None]),
}


@pytest.mark.parametrize("kind", BAD)
def test_matrices_that_do_not_fit(kind: str, tmp_path: Path) -> None:
    """An error that names the file, when the source is made."""
    path = damaged(tmp_path, BAD[kind])
    with pytest.raises(ValueError, match=r"bad\.h5ad"):
        aiofeed.Arrays({"x": path})


@pytest.mark.parametrize("column", [WIDTH, -1, 1 << 30])
def test_columns_out_of_range(column: int, tmp_path: Path) -> None:
    """They fail the samples of their chunk, and are named; other samples come."""
    matrix = cells()
    path = damaged(tmp_path, lambda group: put(group, "indices", 20, column))
    row = int(np.searchsorted(matrix.indptr, 20, side="right")) - 1
    for layout in ("dense", "csr"):
        source = aiofeed.Arrays({"x": path, "row": np.arange(ROWS)}, sparse=layout)
        with (
            aiofeed.Feeder(source, batch_size=3) as feeder,
            pytest.raises(ReadError, match=r"bad\.h5ad.*chunk 1.*columns"),
        ):
            list(feeder)
        policy = aiofeed.FailurePolicy("skip", max_failures=ROWS)
        with aiofeed.Feeder(source, batch_size=ROWS, on_error=policy) as feeder:
            [batch] = list(feeder)
        rows = batch["row"].tolist()
        assert row not in rows
        assert {0, 1, 2, ROWS - 1} <= {*rows}
        x = batch["x"] if layout == "dense" else batch["x"].to_dense()
        assert_same(x.numpy(), matrix[rows].toarray())


def test_what_sparse_rows_lack(tmp_path: Path) -> None:
    """Windows with gaps, windows of CSR batches and other widths are refused by name."""
    path = f"{save(tmp_path / 'c.h5ad', cells())}X"
    for arguments in ({"window": [0, 2]}, {"window": [-1, 0], "sparse": "csr"}):
        with pytest.raises(ValueError, match=r"'x' is sparse: its window is a range of step 1"):
            aiofeed.Arrays({"x": path}, **arguments)
    with pytest.raises(ValueError, match="'x' is sparse, and pad= is for other arrays"):
        aiofeed.Arrays({"x": path}, pad=0)
    narrow = save(tmp_path / "n.h5ad", cells()[:, :5])
    with pytest.raises(ValueError, match=r"n\.h5ad::X has 5 columns, and .*c\.h5ad::X 7"):
        aiofeed.Arrays({"x": [path, f"{narrow}X"]})


def test_statistics_of_rows(tmp_path: Path) -> None:
    """Zeros count."""
    matrix = cells()
    file = save(tmp_path / "c.h5ad", matrix)
    for layout in ("dense", "csr"):
        found = aiofeed.Arrays({"x": f"{file}X"}, sparse=layout).statistics()["x"]
        assert float(found["mean"]) == pytest.approx(matrix.toarray().mean())
        assert float(found["std"]) == pytest.approx(matrix.toarray().std())
        assert (float(found["min"]), float(found["max"])) == (0, matrix.max())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8"])
def test_entries_that_occur_twice_are_added(name: str, dtype: str, tmp_path: Path) -> None:
    """As scipy does, in any order, across chunks and with equal values; CSR batches keep them, and torch adds them."""
    random = np.random.default_rng(0)
    counts = random.integers(0, 9, ROWS)
    starts = np.append(0, np.cumsum(counts))
    columns, values = random.integers(0, WIDTH, starts[-1]), random.integers(1, 4, starts[-1]).astype(dtype)
    matrix = sparse.csr_matrix((values, columns.astype("i4"), starts), (ROWS, WIDTH))
    assert not matrix.has_canonical_format
    file = save(tmp_path / name, matrix, chunk=5)
    for layout, window in (("dense", None), ("csr", None), ("dense", range(-1, 2))):
        source = aiofeed.Arrays({"x": f"{file}X", "row": np.arange(ROWS)}, sparse=layout, window={"x": window})
        with aiofeed.Feeder(source, batch_size=7, shuffle=True) as feeder:
            for batch in feeder:
                x = (batch["x"] if layout == "dense" else batch["x"].to_dense()).numpy()
                for sample, row in zip(x, batch["row"].tolist(), strict=True):
                    wanted = [row - 1, row, row + 1] if window else row
                    assert_same(sample, matrix.toarray()[wanted])
    with aiofeed.Feeder(aiofeed.Arrays({"x": f"{file}X"}), decode=dict, batch_size=ROWS) as feeder:
        assert_same(next(iter(feeder))["x"].numpy(), matrix.toarray())


def test_rows_whose_chunk_fails_change_no_others(tmp_path: Path) -> None:
    """Their columns are those of no other batch."""
    matrix = cells(density=1)
    path = damaged(tmp_path, lambda group: None)
    save(tmp_path / "bad.h5ad", matrix, chunk=16)
    with h5py.File(tmp_path / "bad.h5ad", "r+") as file:
        put(file["X"], "indices", 20, WIDTH)
    source = aiofeed.Arrays({"x": path, "row": np.arange(ROWS)})
    policy = aiofeed.FailurePolicy("skip", max_failures=9 * ROWS)
    with aiofeed.Feeder(source, batch_size=ROWS, shuffle=True, on_error=policy) as feeder:
        for _ in feeder.epochs(3):
            for batch in feeder:
                assert_same(batch["x"].numpy(), matrix[batch["row"].numpy()].toarray())


# --- the names of columns ---------------------------------------------------------------------------------------------


def save_genes(path: Path, inner: str, genes: Any, *, index: Any = "_index", dense: bool = False) -> str:
    """Write a matrix and the names of its columns; returns its path."""
    root = h5py.File(path, "w") if path.suffix == ".h5ad" else zarr.create_group(path, zarr_format=3)
    is_hdf5 = path.suffix == ".h5ad"
    folder = "raw/" if inner.startswith("raw/") else ""
    values = sparse.csr_matrix(np.arange(1.0, len(genes) + 1, dtype="f4")[None])
    create = in_hdf5 if is_hdf5 else in_zarr
    if dense:
        (root.create_dataset if is_hdf5 else root.create_array)(inner, data=values.toarray())
    else:
        group = root.create_group(inner)
        group.attrs.update({"encoding-type": "csr_matrix", "shape": list(values.shape)})
        for name in ("data", "indices", "indptr"):
            create(group, name, getattr(values, name), 2)
    if index is not None:
        var = root.create_group(f"{folder}var")
        var.attrs.update({"encoding-type": "dataframe", "_index": index})
        name = str(np.asarray(index).astype(str))
        if name == "nullable":
            group = var.create_group(name)
            group.attrs["encoding-type"] = "nullable-string-array"
            create(group, "values", genes, 2)
        else:
            create(var, name, genes, 2)
        create(var, "number", np.arange(len(genes)), 2)
    if is_hdf5:
        root.close()
    return f"{path}{'::' if is_hdf5 else '/'}{inner}"


@pytest.mark.parametrize("suffix", [".h5ad", ".zarr"])
@pytest.mark.parametrize("inner", ["X", "layers/counts", "raw/X"])
@pytest.mark.parametrize("dense", [False, True])
def test_columns_of_other_names_are_refused(suffix: str, inner: str, dense: bool, tmp_path: Path) -> None:
    """Also in another order; the same ones, and those of files without names, are joined."""
    genes = ["A", "B", "C"]
    others = {"same": genes, "order": ["C", "B", "A"], "others": ["A", "B", "D"], "none": genes}
    paths = {
        name: save_genes(
            tmp_path / f"{name}{suffix}", inner, given, dense=dense, index=None if name == "none" else "_index"
        )
        for name, given in {"first": genes, **others}.items()
    }
    for name in ("same", "none"):
        assert len(aiofeed.Arrays({"x": [paths["first"], paths[name]]})) == 2
    for name in ("order", "others"):
        assert len(aiofeed.Arrays({"x": paths["first"], "y": paths[name]})) == 1
        with pytest.raises(ValueError, match=r"var, or in another order than other parts of 'x'.*adata\[:, names\]"):
            aiofeed.Arrays({"x": [paths["first"], paths["same"], paths[name]]})


@pytest.mark.parametrize("index", ["gene", np.bytes_("gene"), "nullable"])
def test_the_names_of_columns_in_other_places(index: Any, tmp_path: Path) -> None:
    """The index has any name, as text or bytes, and new files of pandas have it in a group."""
    for name, genes in (("a", ["A", "B"]), ("b", ["A", "B"]), ("c", ["B", "A"])):
        save_genes(tmp_path / f"{name}.h5ad", "X", genes, index=index)
    path = str(tmp_path / "{}.h5ad::X")
    assert len(aiofeed.Arrays({"x": path.format("{a,b}")})) == 2
    with pytest.raises(ValueError, match="in another order"):
        aiofeed.Arrays({"x": path.format("*")})


def test_columns_of_opened_matrices(tmp_path: Path) -> None:
    """Those of h5py and zarr on disk are compared; along the columns, names differ as they should."""
    for suffix in (".h5ad", ".zarr"):
        names = (("a", ["A", "B"]), ("b", ["B", "A"]))
        paths = [save_genes(tmp_path / f"{name}{suffix}", "X", genes, dense=True) for name, genes in names]
        if suffix == ".h5ad":
            files = [h5py.File(tmp_path / f"{name}.h5ad") for name in "ab"]
            given = [file["X"] for file in files]
        else:
            files, given = [], [zarr.open_array(path, mode="r") for path in paths]
        with pytest.raises(ValueError, match="in another order"):
            aiofeed.Arrays({"x": given})
        assert len(aiofeed.Arrays({"x": paths}, sample=1)) == 4
        for file in files:
            file.close()


@pytest.mark.parametrize("kind", [np.bytes_("csr_matrix"), np.array(["csr_matrix"], object)])
def test_encodings_as_bytes(kind: Any, tmp_path: Path) -> None:
    """They are texts."""
    path = damaged(tmp_path, lambda group: group.attrs.update({"encoding-type": kind}))
    assert len(aiofeed.Arrays({"x": path})) == ROWS


def test_categories_as_bytes_and_missing_ones(tmp_path: Path) -> None:
    """The names are texts; rows without a category have the number -1."""
    column = zarr.create_group(tmp_path / "c.zarr").create_group("kind")
    column.attrs["encoding-type"] = ["categorical"]
    column.create_array("codes", data=np.array([1, -1, 0], "i1"))
    column.create_array("categories", data=np.array([b"B cell", b"T cell"]))
    source = aiofeed.Arrays({"y": str(tmp_path / "c.zarr" / "kind")})
    assert source.categories == {"y": ["B cell", "T cell"]}
    with aiofeed.Feeder(source, batch_size=3) as feeder:
        assert next(iter(feeder))["y"].tolist() == [1, -1, 0]
