"""What NetCDF and other writers mean in HDF5: attributes as bytes, names, dimensions and lengths, beside xarray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from tests.support.arrays import assert_same

h5py = pytest.importorskip("h5py")
xarray = pytest.importorskip("xarray")
h5netcdf = pytest.importorskip("h5netcdf")
zarr = pytest.importorskip("zarr", minversion="3")

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")


def whole(given: Any, **arguments: Any) -> Any:
    """All samples of an array."""
    source = aiofeed.Arrays({"x": given}, **arguments)
    with aiofeed.Feeder(source, batch_size=len(source), shuffle=False) as feeder:
        [batch] = feeder
    return batch["x"].numpy()


def by_xarray(path: Path, name: str, **arguments: Any) -> Any:
    with xarray.open_dataset(path, engine="h5netcdf", decode_times=False, phony_dims="sort", **arguments) as dataset:
        return dataset[name].values


# --- attributes -------------------------------------------------------------------------------------------------------

UNSIGNED: dict[str, Any] = {
    "text": "true",
    "bytes": np.bytes_("true"),
    "padded": np.bytes_("true  "),
    "an array of bytes": np.array([b"true"]),
    "an array of texts": np.array(["true"], object),
}


@pytest.mark.parametrize("kind", UNSIGNED)
@pytest.mark.parametrize("memory", [False, True])
def test_texts_of_attributes(kind: str, memory: bool, tmp_path: Path) -> None:
    """In HDF5 they are texts or bytes, alone or in an array, in a file and in memory."""
    with h5py.File(tmp_path / "a.nc", "w", **({"driver": "core", "backing_store": False} if memory else {})) as file:
        data = file.create_dataset("x", data=np.array([1, -56, -1, 5], "i1"))
        data.attrs.update({"_Unsigned": UNSIGNED[kind], "_FillValue": np.array([-1], "i1")})
        data.attrs["scale_factor"] = np.array([0.5], "f4")
        found = whole(data)
    assert_same(found, np.array([0.5, 100, np.nan, 2.5], "f4"))


@pytest.mark.parametrize("version", [2, 3])
def test_texts_of_attributes_of_zarr(version: int, tmp_path: Path) -> None:
    """A list of one text is that text, and the name of one axis stays a list."""
    values = np.array([1, -56, -1, 5], "i1")
    names = {"dimension_names": ["time"]} if version == 3 else {"attributes": {"_ARRAY_DIMENSIONS": ["time"]}}
    array = zarr.create_array(tmp_path / "x", data=values, zarr_format=version, **names)
    array.attrs.update({"_Unsigned": ["true"], "scale_factor": [0.5], "_FillValue": -1})
    for given in (str(tmp_path / "x"), array):
        assert_same(whole(given, sample="time"), np.array([0.5, 100, np.nan, 2.5]))


@pytest.mark.parametrize("value", ["0.5", np.bytes_("0.5"), np.array([b"0.5"]), h5py.Empty("S1")])
def test_texts_are_no_numbers(value: Any, tmp_path: Path) -> None:
    """The attribute is named when the source is made."""
    with h5py.File(path := tmp_path / "a.nc", "w") as file:
        file.create_dataset("x", data=np.arange(4)).attrs["scale_factor"] = value
    with pytest.raises(ValueError, match=r"a\.nc::x: its attribute scale_factor is no number"):
        aiofeed.Arrays({"x": f"{path}::x"})


LABELS: dict[str, Any] = {
    "texts": ["time", "y"],
    "bytes": np.array([b"time", b"y"]),
    "one": ["time"],
    "numbers": np.array([1, 2]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_axes(kind: str, tmp_path: Path) -> None:
    """They may be bytes, and too few: HDF5's own function would end the process."""
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(12).reshape(4, 3)).attrs["DIMENSION_LABELS"] = LABELS[kind]
    assert whole(f"{path}::x", sample="time" if kind in ("texts", "bytes") else 0).shape == (4, 3)


@pytest.mark.parametrize("text", ["DIMENSION_SCALE", np.bytes_("DIMENSION_SCALE")])
def test_a_coordinate_is_its_own_axis(text: Any, tmp_path: Path) -> None:
    """However its class is written."""
    with h5py.File(path := tmp_path / "a.nc", "w") as file:
        file.create_dataset("time", data=np.arange(4.0)).attrs["CLASS"] = text
    assert whole(f"{path}::time", sample="time").tolist() == [0, 1, 2, 3]


def test_dimensions_that_were_deleted(tmp_path: Path) -> None:
    """References to them, and to arrays that were deleted, say nothing."""
    with h5py.File(path := tmp_path / "a.nc", "w") as file:
        for name in ("time", "a", "b", "c"):
            data = file.create_dataset(name, data=np.arange(4.0), maxshape=(None,), chunks=(4,))
            _ = data.make_scale() if name == "time" else data.dims[0].attach_scale(file["time"])
        del file["b"]
    assert whole(f"{path}::a", sample="time").tolist() == [0, 1, 2, 3]
    with h5py.File(path, "r+") as file:
        del file["time"]
    assert whole(f"{path}::a").tolist() == [0, 1, 2, 3]


# --- names and dimensions ---------------------------------------------------------------------------------------------


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """A file with a variable that has the name of a dimension but not its axis, in the root and in a group."""
    path = tmp_path / "names.nc"
    with h5netcdf.File(path, "w") as file:
        file.dimensions = {"x": 3, "y": 4, "z": 5}
        file.create_variable("x", ("y",), data=np.array([5, 6, 7, 8], "f4"))
        group = file.create_group("g")
        group.dimensions = {"y": 2}
        group.create_variable("y", ("x", "y"), data=np.arange(6.0).reshape(3, 2))
    return path


def test_a_variable_with_the_name_of_a_dimension(names: Path) -> None:
    """By its name in NetCDF, and by that in HDF5."""
    for name in ("x", "/x", "_nc4_non_coord_x"):
        assert whole(f"{names}::{name}", sample="y").tolist() == [5, 6, 7, 8]
    assert whole(f"{names}::g/y", sample="x").tolist() == [[0, 1], [2, 3], [4, 5]]
    with h5py.File(names) as file:
        assert whole(file["_nc4_non_coord_x"]).tolist() == [5, 6, 7, 8]


def test_dimensions_without_a_variable(names: Path) -> None:
    """They have no values, and are not listed."""
    for name in ("y", "z"):
        with pytest.raises(ValueError, match=rf"names\.nc::{name} is a dimension of NetCDF"):
            aiofeed.Arrays({"x": f"{names}::{name}"})
    with pytest.raises(ValueError, match=r"name one of its arrays.*\['x', 'g/y'\]|\['g/y', 'x'\]"):
        aiofeed.Arrays({"x": str(names)})
    with pytest.raises(ValueError, match=r"is a group: name an array in it; there are \['y'\]"):
        aiofeed.Arrays({"x": f"{names}::g"})


def test_the_only_variable_needs_no_name(tmp_path: Path) -> None:
    """Its dimensions do not count."""
    with h5netcdf.File(path := tmp_path / "a.nc", "w") as file:
        file.dimensions = {"y": 4}
        file.create_variable("v", ("y",), data=np.arange(4))
    assert whole(path, sample="y").tolist() == [0, 1, 2, 3]


# --- unlimited dimensions ---------------------------------------------------------------------------------------------

SHORT: dict[str, Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]] = {
    "chunks": lambda size: ({"data": np.arange(size, dtype="f4"), "chunks": (4,)}, {"_FillValue": np.float32([-1])}),
    "compressed": lambda size: ({"data": np.arange(size, dtype="i2"), "chunks": (4,), "compression": "gzip"}, {}),
    "packed": lambda size: (
        {"data": np.arange(size, dtype="i2"), "chunks": (4,)},
        {"_FillValue": np.int16(-1), "scale_factor": np.float32(0.5)},
    ),
    "matrix": lambda size: ({"data": np.arange(3 * size, dtype="i4").reshape(size, 3), "chunks": (4, 2)}, {}),
}


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("size", [0, 5, 8, 12])
@pytest.mark.parametrize("coordinate", [True, False])
def test_arrays_that_are_shorter_along_an_unlimited_dimension(
    kind: str, size: int, coordinate: bool, tmp_path: Path
) -> None:
    """They have the fill value up to the longest array, as by xarray; a coordinate, too."""
    with h5py.File(path := tmp_path / "a.nc", "w") as file:
        file.create_dataset("time", (10 if coordinate else 0,), "f8", maxshape=(None,), chunks=(4,), fillvalue=-7)
        name = "time" if coordinate else "This is a netCDF dimension but not a netCDF variable.        0"
        file["time"].make_scale(name)
        file.create_dataset("y", (3,), "f4").make_scale("y")
        for name, length in (("a", 12), ("b", size)):
            options, attributes = SHORT[kind](length)
            fill = options["data"].dtype.type(-1)
            most = (None, *options["data"].shape[1:])
            data = file.create_dataset(name, maxshape=most, fillvalue=fill, **options)
            data.attrs.update(attributes)
            for axis in range(data.ndim):
                data.dims[axis].attach_scale(file["y" if axis else "time"])
    for name in ("a", "b", *["time"] * coordinate):
        assert_same(whole(f"{path}::{name}", sample="time"), by_xarray(path, name))
        raw = by_xarray(path, name, mask_and_scale=False)
        assert_same(whole(f"{path}::{name}", sample="time", decode_cf=False), raw)
    both = aiofeed.Arrays({"a": f"{path}::a", "b": f"{path}::b"}, sample="time", window=range(2))
    assert len(both) == 11


def test_what_lies_in_a_chunk_beyond_an_array_is_no_value(tmp_path: Path) -> None:
    """The fill value is where the file has none, also if the end of a chunk was never filled."""
    space, kind = h5py.h5s.create_simple((5,), (h5py.h5s.UNLIMITED,)), h5py.h5t.NATIVE_INT32
    known = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    known.set_chunk((4,))
    known.set_fill_value(np.array(-1, "i4"))
    with h5py.File(path := tmp_path / "a.nc", "w") as file:
        file.create_dataset("time", (7,), "f8", maxshape=(None,), chunks=(4,)).make_scale("time")
        h5py.h5d.create(file.id, b"x", kind, space, known)
        file["x"].dims[0].attach_scale(file["time"])
        file["x"].id.write_direct_chunk((0,), np.arange(4, dtype="i4").tobytes())
        file["x"].id.write_direct_chunk((4,), np.full(4, 99, "i4").tobytes())
    assert whole(f"{path}::x", sample="time").tolist() == [0, 1, 2, 3, 99, -1, -1]


def test_unlimited_axes_without_dimensions_keep_their_length(tmp_path: Path) -> None:
    """So do arrays of a dimension that is limited."""
    with h5py.File(path := tmp_path / "a.h5", "w") as file:
        file.create_dataset("time", (10,), "f8").make_scale("time")
        for name in ("free", "short"):
            file.create_dataset(name, data=np.arange(4), maxshape=(None,), chunks=(4,))
        file["short"].dims[0].attach_scale(file["time"])
    assert [len(aiofeed.Arrays({"x": f"{path}::{name}"})) for name in ("free", "short")] == [4, 4]


# --- other files ------------------------------------------------------------------------------------------------------

HEADS = {
    "NetCDF 3": b"CDF\x01",
    "64 bit": b"CDF\x02",
    "5": b"CDF\x05",
    "HDF 4": b"\x0e\x03\x13\x01",
    "zip": b"PK\x03\x04",
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("suffix", [".nc", ".nc::x", ".data"])
def test_files_of_other_formats(name: str, suffix: str, tmp_path: Path) -> None:
    """The error says which it is, and what to do."""
    (tmp_path / f"a{suffix.partition('::')[0]}").write_bytes(HEADS[name] + bytes(99))
    way = {"HDF 4": "HDF 4: .*h4toh5", "zip": "zip file"}.get(name, r"NetCDF 3: .*nccopy -k nc4")
    with pytest.raises(ValueError, match=rf"a\.\w+ is .*{way}"):
        aiofeed.Arrays({"x": f"{tmp_path}/a{suffix}"})


@pytest.mark.parametrize("suffix", [".nwb", ".loom", ".h5mu", ".cdf", ""])
def test_files_whose_array_is_not_named(suffix: str, tmp_path: Path) -> None:
    """Any file is one of HDF5, whose arrays are listed; a path that goes on behind it is refused with the way out."""
    with h5py.File(path := tmp_path / f"a{suffix}", "w") as file:
        file["acquisition/x"], file["acquisition/y"] = np.arange(4), np.arange(3)
    with pytest.raises(ValueError, match=r"name one of its arrays, '.*::acquisition/x': .*acquisition/y"):
        aiofeed.Arrays({"x": str(path)})
    with pytest.raises(FileNotFoundError, match="named after '::'"):
        aiofeed.Arrays({"x": f"{path}/acquisition/x"})
    assert whole(f"{path}::acquisition/x").tolist() == [0, 1, 2, 3]
