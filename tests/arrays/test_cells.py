"""Single cells: objects of AnnData, scipy and pandas, matrices of other layouts, genes of other names over files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed.arrays.cells import unique_names
from aiofeed.testing import check_source
from tests.support.arrays import assert_same

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr", minversion="3")
sparse = pytest.importorskip("scipy.sparse")
pd = pytest.importorskip("pandas")

GENES = [["g1", "g3", "g2", "g9"], ["g9", "g2", "g5", "g1", "g0"]]
# As anndata.concat has them.
JOINED = {"inner": ["g1", "g2", "g9"], "outer": ["g0", "g1", "g2", "g3", "g5", "g9"]}
KINDS = [["B", "T"], ["T", "NK"]]


def counts(number: int) -> Any:
    random, rows = np.random.default_rng(number), 30 - 7 * number
    shape = rows, len(GENES[number])
    return (random.integers(1, 99, shape) * (random.random(shape) < 0.4)).astype("f4")


def codes(number: int) -> Any:
    return np.random.default_rng(number).integers(-1, 2, len(counts(number))).astype("i1")


def expected(names: list[str]) -> Any:
    """The joined rows, by the names of columns."""
    frames = [pd.DataFrame(counts(number), columns=GENES[number]) for number in range(2)]
    return pd.concat(frames).reindex(columns=names).fillna(0).to_numpy()


class AnnData:
    """What is used of an object of anndata."""

    def __init__(self, matrix: Any, names: list[str]) -> None:
        self.X, self.var_names = matrix, pd.Index(names)


AnnData.__module__ = "anndata._core.anndata"


def put_sparse(group: Any, matrix: Any) -> None:
    create = group.create_dataset if isinstance(group, h5py.Group) else group.create_array
    for name in ("data", "indices", "indptr"):
        values = getattr(matrix, name)
        create(name, data=values, chunks=(min(7, len(values)),))


def write(folder: Path, number: int, layout: str, suffix: str) -> str:
    """Write a file as anndata does; returns its path."""
    path = folder / f"{number}{suffix}"
    root = h5py.File(path, "w") if suffix == ".h5ad" else zarr.create_group(path, zarr_format=2)
    root.attrs["encoding-type"] = "anndata"
    if layout == "dense":
        (root.create_dataset if suffix == ".h5ad" else root.create_array)("X", data=counts(number), chunks=(8, 3))
    else:
        group = root.create_group("X")
        group.attrs.update({"encoding-type": f"{layout}_matrix", "shape": counts(number).shape})
        put_sparse(group, getattr(sparse, f"{layout}_matrix")(counts(number)))
    root.create_group("var").attrs["_index"] = "_index"
    column = root.create_group("obs/kind")
    column.attrs["encoding-type"] = "categorical"
    if suffix == ".h5ad":
        root["var/_index"], column["codes"], column["categories"] = GENES[number], codes(number), KINDS[number]
        root.close()
    else:
        for group, name, texts in ((root["var"], "_index", GENES[number]), (column, "categories", KINDS[number])):
            group.create_array(name, shape=len(texts), dtype=str)[:] = np.array(texts, object)
        column.create_array("codes", data=codes(number))
    return str(path)


def rows_of(source: Any, field: str = "x", **options: Any) -> Any:
    with aiofeed.Feeder(source, batch_size=7, **options) as feeder:
        found = [batch[field] for batch in feeder]
    return torch.cat([each if each.layout == torch.strided else each.to_dense() for each in found]).numpy()


pytestmark = pytest.mark.filterwarnings(
    "ignore::zarr.errors.UnstableSpecificationWarning", "ignore:.*Zarr V3:UserWarning", "ignore:Sparse:UserWarning"
)


@pytest.mark.parametrize("layout", ["dense", "csr", "csc"])
@pytest.mark.parametrize("storage", [".h5ad", ".zarr", "AnnData"])
@pytest.mark.parametrize("batches", ["dense", "csr"])
def test_files_with_other_genes(layout: str, storage: str, batches: str, tmp_path: Path) -> None:
    """Columns are put by name, as by anndata.concat; a list of names chooses some, in its order."""
    if storage == "AnnData":
        make = np.asarray if layout == "dense" else getattr(sparse, f"{layout}_matrix")
        given: Any = [AnnData(make(counts(number)), GENES[number]) for number in range(2)]
    else:
        given = [write(tmp_path, number, layout, storage) for number in range(2)]
    with pytest.raises(ValueError, match=r'columns of other names.*pass join="inner" or "outer"'):
        aiofeed.Arrays({"x": given})
    digests = set()
    for join, names in JOINED.items():
        source = aiofeed.Arrays({"x": given}, join=join, sparse=batches)
        assert source.columns == {"x": names}
        assert_same(rows_of(source), expected(names))
        assert_same(rows_of(pickle.loads(pickle.dumps(source))), expected(names))
        digests.add(source.fingerprint())
    assert len(digests) == 2
    assert aiofeed.Arrays({"x": given[0]}).columns == {"x": GENES[0]}
    for chosen in (["g9", "g1"], pd.Index(["g2"])):
        source = aiofeed.Arrays({"x": given}, select={"var": chosen}, sparse=batches)
        assert_same(rows_of(source), expected([*chosen]))
        check_source(source)
    with pytest.raises(ValueError, match="'g5' is not in all parts of 'x'"):
        aiofeed.Arrays({"x": given}, select={"var": ["g1", "g5"]})
    source = aiofeed.Arrays({"x": given}, select={"x": {"var": ["g5", "g1", "new"]}}, join="outer", sparse=batches)
    assert_same(rows_of(source), expected(["g5", "g1", "new"]))
    for wrong in ("g1", slice("g1", "g3"), []):
        with pytest.raises(TypeError, match='"var" is a list of names'):
            aiofeed.Arrays({"x": given}, select={"var": wrong}, join="outer")


@pytest.mark.parametrize("shuffle", [True, "window"])
def test_ranks_have_each_row_once(shuffle: Any, tmp_path: Path) -> None:
    """Of joined files with other genes, in parts and in any order."""
    files = [write(tmp_path, number, "csr", ".h5ad") for number in range(2)]
    source = aiofeed.Arrays({"x": files, "row": np.arange(53)}, join="outer")
    seen = []
    for rank in range(2):
        with aiofeed.Feeder(source[3:], batch_size=4, shuffle=shuffle, shard=(rank, 2)) as feeder:
            for batch in feeder:
                assert_same(batch["x"].numpy(), expected(JOINED["outer"])[batch["row"].numpy()])
                seen += batch["row"].tolist()
    assert sorted(seen) == list(range(3, 53))


@pytest.mark.parametrize("storage", [".h5ad", ".zarr", "Series", "Categorical"])
def test_categories_of_joined_parts(storage: str, tmp_path: Path) -> None:
    """They are numbered as pandas.api.types.union_categoricals does, and -1 stays."""
    parts = [pd.Categorical.from_codes(codes(number), KINDS[number]) for number in range(2)]
    given: Any = [pd.Series(each) if storage == "Series" else each for each in parts]
    if storage.startswith("."):
        given = [f"{write(tmp_path, at, 'csr', storage)}{'::' if storage == '.h5ad' else '/'}obs/kind" for at in (0, 1)]
    union = pd.api.types.union_categoricals(parts)
    source = aiofeed.Arrays({"y": given})
    assert source.categories == {"y": [*union.categories]}
    assert_same(rows_of(source, "y"), union.codes)
    with pytest.raises(ValueError, match="has no categories, unlike"):
        aiofeed.Arrays({"y": [given[0], codes(1)]})


def test_more_categories_than_a_byte_has() -> None:
    """Numbers of the union are wider than those of the parts."""
    parts = [pd.Categorical([f"{number} {at}" for at in range(100)]) for number in range(2)]
    found = rows_of(aiofeed.Arrays({"y": parts}), "y")
    assert_same(found, pd.api.types.union_categoricals(parts).codes)
    assert found.dtype == np.int16


@pytest.mark.parametrize("kind", ["csr_matrix", "csc_matrix", "coo_matrix", "csr_array", "csc_array"])
def test_matrices_of_scipy(kind: str) -> None:
    """Any layout comes in rows."""
    source = aiofeed.Arrays({"x": getattr(sparse, kind)(counts(0))})
    assert_same(rows_of(source), counts(0))
    assert source.columns == {}


def write_10x(path: Path, number: int, *, new: bool, names: list[str] | None = None) -> str:
    """Write a matrix as Cell Ranger does: genes and barcodes in compressed columns, that is, cells in rows."""
    matrix, names = sparse.csc_matrix(counts(number).T.astype("i4")), names or GENES[number]
    with h5py.File(path, "w") as file:
        group = file.create_group("matrix" if new else "GRCh38")
        put_sparse(group, matrix)
        group["shape"], group["barcodes"] = np.array(matrix.shape, "i4"), [b"cell"] * matrix.shape[1]
        features = group.create_group("features") if new else group
        for name in ("id", "name") if new else ("genes", "gene_names"):
            features[name] = np.array([f"ENSG{at}" if name in ("id", "genes") else at for at in names], "S")
    return str(path)


@pytest.mark.parametrize("new", [True, False])
def test_files_of_cell_ranger(new: bool, tmp_path: Path) -> None:
    """Both versions, by the file or the group in it, beside others; names that occur twice get numbers."""
    paths = [write_10x(tmp_path / f"{number}.h5", number, new=new) for number in range(2)]
    for path in (paths[0], f"{paths[0]}::{'matrix' if new else 'GRCh38'}"):
        source = aiofeed.Arrays({"x": path}, sparse="csr")
        assert source.columns["x"] == GENES[0]
        assert_same(rows_of(source), counts(0).astype("i4"))
    for join, names in JOINED.items():
        assert_same(rows_of(aiofeed.Arrays({"x": paths}, join=join)), expected(names).astype("i4"))
    path = write_10x(tmp_path / "twice.h5", 0, new=new, names=["a", "b", "a", "a"])
    assert aiofeed.Arrays({"x": path}).columns["x"] == ["a", "b", "a-1", "a-2"]
    assert unique_names(["a", "a", "a-1", "a", "b"]) == ["a", "a-2", "a-1", "a-3", "b"]


@pytest.mark.parametrize("storage", ["file", "Series"])
@pytest.mark.parametrize("dtype", ["Int64", "Int8", "boolean", "Float32"])
@pytest.mark.parametrize("missing", [True, False])
def test_columns_that_may_lack_values(storage: str, dtype: str, missing: bool, tmp_path: Path) -> None:
    """They have NaN, in float64, where a value is missing; otherwise their dtype stays."""
    given: Any = pd.Series([True, False, True] if dtype == "boolean" else [1, 7, 2], dtype=dtype)
    wanted = given.to_numpy(given.dtype.numpy_dtype)
    if missing:
        given[1] = pd.NA
        wanted = given.to_numpy(np.float64, na_value=np.nan)
    if storage == "file":
        kind = "nullable-boolean" if dtype == "boolean" else "nullable-integer"
        values, mask = given.fillna(False if dtype == "boolean" else 0), given.isna().to_numpy()
        with h5py.File(tmp_path / "c.h5ad", "w") as file:
            column = file.create_group("obs/n")
            column.attrs["encoding-type"] = kind
            column["values"], column["mask"] = values.to_numpy(given.dtype.numpy_dtype), mask
        given = f"{tmp_path}/c.h5ad::obs/n"
    assert_same(rows_of(aiofeed.Arrays({"y": given}), "y"), wanted)


def test_categories_of_old_versions(tmp_path: Path) -> None:
    """An attribute refers to them."""
    with h5py.File(tmp_path / "old.h5ad", "w") as file:
        file["obs/kind"], file["obs/__categories/kind"] = codes(0), KINDS[0]
        file["obs/kind"].attrs["categories"] = file["obs/__categories/kind"].ref
    source = aiofeed.Arrays({"y": f"{tmp_path}/old.h5ad::obs/kind"})
    assert source.categories["y"] == KINDS[0]
    assert_same(rows_of(source, "y"), codes(0))


def test_a_matrix_in_columns_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error with the bytes that its rows need, before it is read."""
    monkeypatch.setattr("aiofeed.arrays.cells.free_memory", lambda: 100)
    with pytest.raises(ValueError, match=r"0\.h5ad::X is a csc_matrix, which needs .* write X\.tocsr\(\)"):
        aiofeed.Arrays({"x": write(tmp_path, 0, "csc", ".h5ad")})


def test_what_cells_lack(tmp_path: Path) -> None:
    """Texts, frames, other arguments and names that are not there: the message says what to write."""
    path, frame = write(tmp_path, 0, "csr", ".h5ad"), pd.DataFrame({"kind": [1]})
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: aiofeed.Arrays({"y": pd.Series(["B", "T"])}), ValueError, r'astype\("category"\)'),
        (lambda: aiofeed.Arrays({"y": frame}), TypeError, r"a column, obs\[name\]"),
        (lambda: aiofeed.Arrays(AnnData(counts(0), GENES[0])), TypeError, r'"x": adata'),  # type: ignore[arg-type]
        (lambda: aiofeed.Arrays({"y": f"{path}::obs/knd"}), ValueError, r"there are \['kind'\]"),
        (lambda: aiofeed.Arrays({"y": f"{path}::obs"}), ValueError, r"there are \['kind'\]"),
        (lambda: aiofeed.Arrays({"x": path}, join="union"), ValueError, "'inner' and 'outer'"),
        (lambda: aiofeed.Arrays({"x": path}, target="y"), TypeError, "fields of the dict"),  # type: ignore[call-arg]
        (lambda: aiofeed.Arrays({"x": path}, genes="inner"), TypeError, "join="),  # type: ignore[call-arg]
        (lambda: aiofeed.AnnLoader, AttributeError, r"aiofeed\.Arrays"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            call()
    twice = [AnnData(counts(0), ["a", "a", "b", "c"]), AnnData(counts(0), ["a", "b", "c", "d"])]
    with pytest.raises(ValueError, match=r"several columns 'a': adata\.var_names_make_unique"):
        aiofeed.Arrays({"x": twice}, join="inner")
