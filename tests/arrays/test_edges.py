"""``Arrays`` at its edges: no chunks, other files behind a name, arrays that change while they are read."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed

zarr = pytest.importorskip("zarr", minversion="3")
h5py = pytest.importorskip("h5py")
xarray = pytest.importorskip("xarray")
sparse = pytest.importorskip("scipy.sparse")

X = np.arange(200, dtype="f4").reshape(20, 10)


def first(source: aiofeed.Arrays) -> np.ndarray:
    with aiofeed.Feeder(source, batch_size=len(source)) as feeder:
        [batch] = feeder
    found: np.ndarray = batch["x"].numpy()
    return found


def new_zarr(path: Path, values: np.ndarray = X, **settings: object) -> str:
    zarr.create_array(path, data=values, overwrite=True, **settings)
    return str(path)


@pytest.mark.parametrize("offset", [15, 100])
def test_windows_beyond_the_array_need_no_chunk(offset: int) -> None:
    """Some batches, or all, have padding only."""
    with aiofeed.Feeder(aiofeed.Arrays({"x": X}, window=[offset], pad=-1), batch_size=4) as feeder:
        found = np.concatenate([batch["x"].numpy() for batch in feeder])
    kept = X[offset:]
    expected = np.concatenate([kept, np.full((20 - len(kept), 10), -1, "f4")])
    np.testing.assert_array_equal(found[:, 0], expected)


def test_a_part_without_samples() -> None:
    """It has no batches."""
    with aiofeed.Feeder(aiofeed.Arrays({"x": X})[[]], batch_size=4) as feeder:
        assert list(feeder) == []


def test_a_link_to_another_file_is_refused(tmp_path: Path) -> None:
    """The places of chunks are those of the other file."""
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = X
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"] = -X
        file["x"] = h5py.ExternalLink(str(tmp_path / "b.h5"), "x")
        file["z"] = h5py.SoftLink("/y")
    with pytest.raises(ValueError, match=r"a\.h5::x is a link to .*b\.h5"):
        aiofeed.Arrays({"x": f"{tmp_path}/a.h5::x"})
    np.testing.assert_array_equal(first(aiofeed.Arrays({"x": f"{tmp_path}/a.h5::z"})), -X)


def test_numbers_that_numpy_lacks_are_refused(tmp_path: Path) -> None:
    """h5py reads them by HDF5's conversion."""
    narrow = h5py.h5t.STD_I16LE.copy()
    narrow.set_precision(12)
    narrow.set_offset(4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((20, 10))
        h5py.h5d.create(file.id, b"x", narrow, space)
        file["x"][...] = 1
    with pytest.raises(ValueError, match=r"a\.h5::x has a type of numbers that NumPy lacks"):
        aiofeed.Arrays({"x": f"{tmp_path}/a.h5::x"})


def test_open_files_of_h5py(tmp_path: Path) -> None:
    """What was written and not flushed, and files in memory."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = X
        file.flush()
        file["x"][...] = X + 1
        np.testing.assert_array_equal(first(aiofeed.Arrays({"x": file["x"]})), X + 1)
    with h5py.File(io.BytesIO(), "w") as file:
        file["x"] = X
        np.testing.assert_array_equal(first(aiofeed.Arrays({"x": file["x"]})), X)
    with h5py.File(tmp_path / "a.h5", "w", driver="core", backing_store=False) as file:
        file["x"] = X + 2
        np.testing.assert_array_equal(first(aiofeed.Arrays({"x": file["x"]})), X + 2)


@pytest.mark.parametrize("settings", [{"chunks": (4, 10)}, {"chunks": (4, 10), "shards": (8, 10)}])
def test_a_folder_that_is_deleted_is_no_fill_value(settings: dict[str, object], tmp_path: Path) -> None:
    """A chunk that is not there is one that is not stored, as long as there is the array."""
    source = aiofeed.Arrays({"x": new_zarr(tmp_path / "x.zarr", **settings)})
    shutil.rmtree(tmp_path / "x.zarr")
    with aiofeed.Feeder(source, batch_size=4) as feeder, pytest.raises(aiofeed.errors.ReadError, match=r"x\.zarr"):
        list(feeder)


def test_a_shard_that_is_written_anew_is_noticed(tmp_path: Path) -> None:
    """Its index is that of the old one."""
    settings = {"chunks": (4, 10), "shards": (20, 10)}
    source = aiofeed.Arrays({"x": new_zarr(tmp_path / "x.zarr", **settings)})
    first(source)
    new_zarr(tmp_path / "x.zarr", X * 3 % 7, **settings)
    [shard] = [path for path in (tmp_path / "x.zarr" / "c").rglob("*") if path.is_file()]
    os.utime(shard, ns=(1, 1))
    with aiofeed.Feeder(source, batch_size=4) as feeder, pytest.raises(aiofeed.errors.ReadError, match="has changed"):
        list(feeder)


def test_the_fingerprint_of_several_axes_has_their_chunks(tmp_path: Path) -> None:
    """The numbers of samples depend on them."""
    paths = [new_zarr(tmp_path / name / "x.zarr", chunks=chunks) for name, chunks in (("a", (4, 5)), ("b", (4, 10)))]
    several = {aiofeed.Arrays({"x": path}, sample=(0, 1)).fingerprint() for path in paths}
    one = {aiofeed.Arrays({"x": path}, sample=0).fingerprint() for path in paths}
    assert (len(several), len(one)) == (2, 1)
    assert aiofeed.Arrays({"y": paths[0]}).fingerprint() not in one


def test_statistics_of_numbers_with_a_large_mean() -> None:
    """Squares would lose the deviation."""
    values = 1e6 + 1e-3 * np.random.default_rng(0).random(100)
    found = aiofeed.Arrays({"x": values}).statistics()["x"]
    assert float(found["std"]) == pytest.approx(values.std(), rel=1e-3)
    assert set(aiofeed.Arrays({"x": values, "c": 1j * values}).statistics()) == {"x"}


@pytest.mark.parametrize("arguments", [{"stride": 2, "tile": {1: 4}}, {"window": [1 << 70]}, {"window": 0.5}])
def test_arguments_of_other_types(arguments: dict[str, object]) -> None:
    """They are not ignored."""
    with pytest.raises(TypeError, match=r"Arrays\((stride|window)="):
        aiofeed.Arrays({"x": X}, **arguments)  # type: ignore[arg-type]


class Sliced:
    """An object with the shape, dtype and slices of an array, as netCDF4.Variable is."""

    shape, dtype, ndim = X.shape, X.dtype, 2

    def __init__(self, values: Any) -> None:
        self.values = values

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]


def of_dask(meta: Any) -> Any:
    """An array that looks like one of dask, whose chunks are as ``meta``."""
    found = type("Array", (Sliced,), {"__module__": "dask.array.core"})(X)
    found._meta = meta
    return found


MASKED = np.ma.masked_equal(X, 3)
REFUSED: dict[str, Callable[[], Any]] = {
    "masked": lambda: MASKED,
    "sliced masked": lambda: Sliced(MASKED),
    "sliced": lambda: Sliced(X),
    "dask, masked": lambda: of_dask(MASKED[:0]),
    "dask, sparse": lambda: of_dask(sparse.csr_matrix((0, 0))),
    "torch": lambda: torch.tensor(X),
    "Dataset": lambda: xarray.Dataset({"x": (("a", "b"), X)}),
    "group": lambda: zarr.create_group({}),
    "memoryview": lambda: memoryview(X),
    "list of masked": lambda: [X, MASKED],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_are_refused_at_once(kind: str) -> None:
    """A mask would be lost, and slices that are no plain arrays would fail in the first batch."""
    with pytest.raises(
        TypeError, match=r"Arrays takes paths, URLs and arrays of .*not \w+\.\w+: pass its path.*filled"
    ):
        aiofeed.Arrays({"x": REFUSED[kind]()})


def lazily_masked(folder: Path) -> Any:
    """An array of xarray that makes NaN of what is missing, when it is read."""
    values = xarray.DataArray(X, dims=("a", "b"), name="x")
    path = folder / "x.nc"
    values.to_netcdf(path, engine="h5netcdf", encoding={"x": {"dtype": "i2", "_FillValue": 3}})
    return xarray.open_dataarray(path, engine="h5netcdf")


SERVED: dict[str, Callable[[Path], Any]] = {
    "numpy": lambda folder: X,
    "memmap": lambda folder: np.memmap(folder / "x", X.dtype, "w+", shape=X.shape),
    "dask": lambda folder: of_dask(X[:0]),
    "zarr in memory": lambda folder: zarr.create_array({}, data=X),
    "h5py, another dtype": lambda folder: h5py.File(new_hdf5(folder))["x"].astype("f8"),
    "xarray": lambda folder: xarray.DataArray(X),
    "xarray, a variable": lambda folder: xarray.Variable(("a", "b"), X),
    "xarray, an index": lambda folder: xarray.IndexVariable("a", X[:, 0]),
    "xarray, masked": lambda folder: xarray.DataArray(MASKED),
    "xarray, lazily masked": lazily_masked,
    "pandas": lambda folder: pytest.importorskip("pandas").Series(X[:, 0]),
}


def new_hdf5(folder: Path) -> Path:
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = X
    return folder / "x.h5"


@pytest.mark.parametrize("kind", SERVED)
def test_opened_arrays(kind: str, tmp_path: Path) -> None:
    """They are served; xarray makes NaN of what is missing."""
    given = SERVED[kind](tmp_path)
    expected = X if kind == "dask" else np.asarray(given[:])
    source = aiofeed.Arrays({"x": given})
    np.testing.assert_array_equal(first(source), expected)
    assert source.fingerprint() == aiofeed.Arrays({"x": given}).fingerprint()
    assert len(source.content_parts()) < 99
    if "masked" in kind:
        assert np.isnan(expected).sum() == 1


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_arrays_of_zarr_in_memory_are_those_on_disk(tmp_path: Path) -> None:
    """With the names of axes, and what is missing."""
    for store in ({}, tmp_path / "x.zarr"):
        array = zarr.create_array(store, shape=(4,), chunks=(2,), dtype="i2", fill_value=7, zarr_format=2)
        array.attrs["_ARRAY_DIMENSIONS"] = ["time"]
        array[:3] = [1, 7, 3]
        np.testing.assert_array_equal(first(aiofeed.Arrays({"x": array}, sample="time")), [1, np.nan, 3, np.nan])
