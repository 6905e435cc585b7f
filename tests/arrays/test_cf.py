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
@settings(max_examples=60, report_multiple_bugs=False)
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
