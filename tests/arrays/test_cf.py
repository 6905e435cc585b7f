"""Scale, offset and fill values of the CF conventions: values and dtypes are those of xarray."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiofeed
from tests.support.arrays import assert_same
from tests.support.examples import examples

h5py = pytest.importorskip("h5py")
xarray = pytest.importorskip("xarray")
pytest.importorskip("h5netcdf")
pytest.importorskip("zarr", minversion="3")

pytestmark = [
    pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning"),
    pytest.mark.filterwarnings("ignore:.*has multiple fill values:xarray.SerializationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning"),
]

ROWS = 12
INTS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]


@st.composite
def packed(draw: Any) -> tuple[Any, dict[str, Any]]:
    """Stored values and their attributes."""
    dtype = np.dtype(draw(st.sampled_from([*INTS, "f2", "f4", "f8"])))
    attributes: dict[str, Any] = {}
    for name, values in (("scale_factor", [0.5, 2, 0.1]), ("add_offset", [0.0, 100, -0.3])):
        kind = draw(st.sampled_from([None, np.float32, np.float64]))
        if kind is not None:
            attributes[name] = kind(draw(st.sampled_from(values)))
    if draw(st.booleans()):
        attributes["_FillValue"] = dtype.type(draw(st.sampled_from([0, 1, 7])))
    if "_FillValue" not in attributes and draw(st.booleans()):
        several = draw(st.lists(st.sampled_from([1, 7, 0]), min_size=1, max_size=2))
        attributes["missing_value"] = np.array(several, dtype)[slice(None) if len(several) > 1 else 0]
    if dtype.kind in "iu" and draw(st.booleans()):
        attributes["_Unsigned"] = draw(st.sampled_from(["true", "false"]))
    values = np.random.default_rng(3).integers(0, 256, (ROWS, dtype.itemsize), np.uint8)
    stored = values.view(dtype)[:, 0].copy() if dtype.kind != "f" else np.linspace(-2, 9, ROWS).astype(dtype)
    stored[:4] = 7, 1, 0, 7
    if dtype.kind == "f":
        stored[5] = np.nan
        if "_FillValue" not in attributes and draw(st.booleans()):
            attributes["_FillValue"] = None
    return stored, attributes


def stored_as(kind: str, folder: str, stored: Any, attributes: Any) -> tuple[str, Any]:
    """Write a data set by xarray; returns the array for ``Arrays``, and the one that xarray opens."""
    dataset = xarray.Dataset({"x": ("time", stored, {k: v for k, v in attributes.items() if v is not None})})
    if "_FillValue" in attributes and attributes["_FillValue"] is None:
        dataset["x"].encoding["_FillValue"] = None  # otherwise xarray writes NaN
    if kind == "NetCDF":
        path = Path(folder, "x.nc")
        dataset.to_netcdf(path, engine="h5netcdf")
        return f"{path}::x", xarray.open_dataset(path, engine="h5netcdf", decode_times=False)
    path = Path(folder, "x.zarr")
    dataset.to_zarr(path, zarr_format=int(kind[-1]), consolidated=False)
    return f"{path}/x", xarray.open_zarr(path, decode_times=False, consolidated=False, chunks=None)


@pytest.mark.parametrize("kind", ["NetCDF", "Zarr 2", "Zarr 3"])
@settings(max_examples=examples(20), report_multiple_bugs=False)
@given(packed())
def test_values_and_dtypes_are_those_of_xarray(kind: str, given: Any) -> None:
    """Of integers and floats, packed in every way."""
    with tempfile.TemporaryDirectory() as folder:
        path, expected = stored_as(kind, folder, *given)
        with expected:
            values = expected["x"].values
        with aiofeed.Feeder(aiofeed.Arrays({"x": path}), batch_size=ROWS) as feeder:
            [batch] = list(feeder)
        assert_same(batch["x"].numpy(), values)
        with aiofeed.Feeder(aiofeed.Arrays({"x": path}, decode_cf=False), batch_size=ROWS) as feeder:
            [batch] = list(feeder)
        assert_same(batch["x"].numpy(), given[0])


ATTRIBUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "a default of floats": ("i2", {"_FillValue": np.float32(9.96921e36)}),
    "a fraction": ("i2", {"missing_value": 0.5}),
    "beyond the dtype": ("i2", {"missing_value": 65537.0}),
    "negative": ("u1", {"missing_value": np.int16(-1)}),
    "unsigned, negative": ("i1", {"missing_value": np.int8(-1), "_Unsigned": "true"}),
    "unsigned, positive": ("i1", {"missing_value": np.uint8(255), "_Unsigned": "true"}),
    "unsigned, fill": ("i1", {"_FillValue": np.int8(-1), "_Unsigned": "true", "scale_factor": np.float32(0.5)}),
    "a double": ("f4", {"missing_value": np.float64(1e20)}),
    "a float": ("f4", {"missing_value": np.float32(1e20)}),
    "two": ("f4", {"missing_value": np.float32(5), "_FillValue": np.float32(1e20)}),
    "two, the same": ("i4", {"missing_value": np.int32(5), "_FillValue": np.int32(5)}),
    "NaN and a number": ("f4", {"missing_value": np.float32(5), "_FillValue": np.float32(np.nan)}),
    "NaN": ("f4", {"_FillValue": np.float32(np.nan), "add_offset": np.float32(1)}),
    "a list of one": ("i2", {"scale_factor": np.array([0.5]), "add_offset": np.array([0.5])}),
    "mixed kinds": ("i2", {"scale_factor": np.float32(0.5), "add_offset": np.int32(2), "_FillValue": np.int16(5)}),
    "int32 by floats": ("i4", {"scale_factor": np.float32(0.1), "add_offset": np.float32(2)}),
    "uint64": ("u8", {"scale_factor": np.float32(0.1), "missing_value": np.uint64(5)}),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_that_others_write(name: str, tmp_path: Path) -> None:
    """Of any types: values and dtypes are those of xarray."""
    dtype, attributes = ATTRIBUTES[name]
    values = np.array([1, 1e20 if dtype == "f4" else 0, 5, -1 if dtype[0] != "u" else 255, 127]).astype(dtype)
    with h5py.File(path := tmp_path / "x.nc", "w") as file:
        file["time"] = np.arange(len(values))
        file["time"].make_scale()
        file["x"] = values
        file["x"].dims[0].attach_scale(file["time"])
        file["x"].attrs.update(attributes)
    with xarray.open_dataset(path, engine="h5netcdf", decode_times=False) as opened:
        expected = opened["x"].values
    with aiofeed.Feeder(aiofeed.Arrays({"x": f"{path}::x"}), batch_size=9) as feeder:
        assert_same(next(iter(feeder))["x"].numpy(), expected)


@pytest.mark.parametrize("name", ["scale_factor", "add_offset", "_FillValue", "missing_value"])
@pytest.mark.parametrize("dtype", ["i2", "f4"])
def test_attributes_that_are_no_numbers(name: str, dtype: str, tmp_path: Path) -> None:
    """An error that names the array and the attribute; without ``decode_cf`` it does not matter."""
    with h5py.File(path := tmp_path / "x.nc", "w") as file:
        file.create_dataset("x", data=np.arange(5, dtype=dtype)).attrs[name] = "abc"
    with pytest.raises(ValueError, match=rf"x\.nc::x.*{name}"):
        aiofeed.Arrays({"x": f"{path}::x"})
    assert len(aiofeed.Arrays({"x": f"{path}::x"}, decode_cf=False)) == 5


def test_joined_files_are_packed_in_their_own_ways(tmp_path: Path) -> None:
    """As the months of ERA5 are."""
    for month in range(3):
        packed = xarray.Dataset(
            {"x": ("time", np.arange(4, dtype="i2"), {"scale_factor": 0.5 * (month + 1), "add_offset": -1.0 * month})}
        )
        packed.to_netcdf(tmp_path / f"{month}.nc", engine="h5netcdf")
    with aiofeed.Feeder(aiofeed.Arrays({"x": str(tmp_path / "*.nc::x")}), batch_size=12) as feeder:
        found = next(iter(feeder))["x"].numpy()
    assert np.array_equal(found, np.concatenate([np.arange(4) * 0.5 * (month + 1) - month for month in range(3)]))
