"""``Arrays`` at its edges: no chunks, other files behind a name, arrays that change while they are read."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import aiofeed

zarr = pytest.importorskip("zarr", minversion="3")
h5py = pytest.importorskip("h5py")

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


def test_a_masked_array_is_refused() -> None:
    """Its mask would be lost."""
    with pytest.raises(TypeError, match="filled"):
        aiofeed.Arrays({"x": np.ma.masked_array(X)})
