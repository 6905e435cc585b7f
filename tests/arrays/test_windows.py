"""Windows of arrays in memory, joined files, names of axes and static fields, beside NumPy and xarray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiofeed
from tests.support.arrays import Asked, assert_same, check_epoch, numbers, samples_of, selections
from tests.support.examples import examples

zarr = pytest.importorskip("zarr", minversion="3")
h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")

TIME, LAT, LON = 20, 6, 9
ORDERS = (False, True, "window:2")


@settings(max_examples=examples(50))
@given(st.data())
def test_windows_of_arrays_in_memory(data: Any) -> None:
    """Of any shapes, axes of samples, windows, tiles, strides and pads."""
    asked: Asked = data.draw(selections(["x", "y"]))
    values = {}
    for name in ("x", "y"):
        least = max([0, *asked.windows.get(name, ())])
        axes = data.draw(st.integers(least + 1, len(asked.sizes)))
        values[name] = numbers(list(asked.sizes.values())[:axes], data.draw(st.sampled_from(["f4", "i2", "u8", "?"])))
    check_epoch(asked, values, values, shuffle=data.draw(st.sampled_from(ORDERS)))


@settings(max_examples=examples(35))
@given(st.data())
def test_joined_files(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Of different lengths and chunks, along the first axis of samples."""
    folder = tmp_path_factory.mktemp("joined")
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    axis = data.draw(st.integers(0, 1))
    whole = numbers((sum(lengths), 3) if axis == 0 else (3, sum(lengths)), "<i4")
    parts = np.split(whole, np.cumsum(lengths)[:-1], axis)
    kinds = [data.draw(st.sampled_from(["zarr", "h5"])) for _ in parts]
    files = []
    for at, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        chunks = data.draw(st.tuples(*[st.integers(1, 4 if at == axis else 3) for at in range(2)]))
        if kind == "zarr":
            files.append(str(folder / f"{at}.zarr"))
            zarr.create_array(files[-1], data=part, chunks=chunks)
        else:
            files.append(f"{folder}/{at}.h5::x")
            with h5py.File(folder / f"{at}.h5", "w") as file:
                file.create_dataset("x", data=part, chunks=chunks, maxshape=(None, None))
    low, high = sorted(data.draw(st.tuples(st.integers(-3, 3), st.integers(-3, 3))))
    pad = 0.0 if max(high, 0) - min(low, 0) >= sum(lengths) else data.draw(st.sampled_from([None, 0.0]))
    sizes = dict(enumerate(whole.shape))
    asked = Asked(sizes, (axis,), {"x": {axis: range(low, high + 1)}}, pad=pad)
    check_epoch(asked, {"x": files}, {"x": whole}, shuffle=data.draw(st.sampled_from(ORDERS)))


@pytest.fixture
def weather(tmp_path: Path) -> tuple[Path, Any]:
    """A NetCDF file and a Zarr group that xarray wrote, with names of axes and static fields."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    random = np.random.default_rng(0)
    found = xarray.Dataset(
        {
            "t2m": (("time", "lat", "lon"), random.normal(size=(TIME, LAT, LON)).astype("f4")),
            "wind": (("time", "level", "lat", "lon"), random.normal(size=(TIME, 2, LAT, LON)).astype("f4")),
            "land": (("lat", "lon"), random.normal(size=(LAT, LON)).astype("f4")),
            "heights": (("level",), np.array([10.0, 100.0])),
            "constant": ((), np.float64(2.5)),
        },
        {"time": np.arange(TIME), "lat": np.linspace(-90, 90, LAT), "lon": np.linspace(0, 320, LON)},
    )
    found.to_netcdf(tmp_path / "w.nc", engine="h5netcdf", encoding={"t2m": {"chunksizes": (5, LAT, LON), "zlib": True}})
    found.to_zarr(tmp_path / "w3.zarr", zarr_format=3, consolidated=False)
    found.to_zarr(tmp_path / "w2.zarr", zarr_format=2)
    return tmp_path, found


@pytest.mark.parametrize("kind", ["w.nc::", "w2.zarr/", "w3.zarr/", "xarray"])
@pytest.mark.parametrize("stride", [None, {"lat": 1, "lon": 3}, "random"])
def test_names_of_axes(kind: str, stride: Any, weather: tuple[Path, Any]) -> None:
    """Windows of time and tiles of space; static fields come with each sample, as the tile where they have its axes."""
    folder, values = weather
    names = ["t2m", "wind", "land", "heights", "constant", "lat", "time"]
    tile, windows = {"lat": 2, "lon": 4}, {"t2m": range(-3, 1), "wind": [1], "time": range(2)}
    given = {name: values[name] if kind == "xarray" else f"{folder}/{kind}{name}" for name in names}
    places = values["t2m"].copy(data=np.arange(TIME * LAT * LON).reshape(TIME, LAT, LON))
    source = aiofeed.Arrays({**given, "at": places}, sample="time", window=windows, tile=tile, stride=stride)
    asked = Asked(
        {"time": TIME, "lat": LAT, "lon": LON}, ("time",), {n: {"time": w} for n, w in windows.items()}, tile, stride
    )
    seen = []
    with aiofeed.Feeder(source, batch_size=7, shuffle="window") as feeder:
        for sample in samples_of(feeder):
            time, lat, lon = (int(at) for at in np.unravel_index(int(sample["at"].reshape(-1)[0]), (TIME, LAT, LON)))
            for name in names:
                position = {"time": time, "lat": lat, "lon": lon}
                assert_same(sample[name], asked.of(name, values[name].values, values[name].dims, position))
            seen.append((time, *((lat, lon) if stride != "random" else (-1, -1))))
    assert sorted(seen) == sorted(asked.positions())
    if stride is None:
        assert [*source.position(0)] == ["time", "lat", "lon"]
        assert source.key(len(source) - 1).endswith("t2m[time=18, lat=4, lon=4]")


@pytest.mark.parametrize("kind", ["w.nc", "w2.zarr", "w3.zarr"])
def test_arrays_that_xarray_has_opened(kind: str, weather: tuple[Path, Any]) -> None:
    """Are read by their slices, in the chunks of the file; xarray has unpacked them."""
    xarray = pytest.importorskip("xarray")
    folder, values = weather
    options = {"engine": "h5netcdf"} if kind == "w.nc" else {"engine": "zarr", "consolidated": False}
    with xarray.open_dataset(folder / kind, **options) as opened:
        source = aiofeed.Arrays(
            {"x": opened["t2m"], "land": opened["land"], "at": opened["time"]}, sample="time", window={"x": range(2)}
        )
        with aiofeed.Feeder(source, batch_size=6, shuffle="window") as feeder:
            samples = list(samples_of(feeder))
    for sample in samples:
        assert_same(sample["x"], values["t2m"].values[int(sample["at"]) :][:2])
    assert sorted(int(sample["at"]) for sample in samples) == list(range(TIME - 1))


def test_the_shapes_of_batches() -> None:
    """An int drops the axis, a list of one keeps it; scalars come as such."""
    x = np.arange(40.0).reshape(10, 4)
    source = aiofeed.Arrays(
        {"a": x, "b": x, "c": x, "d": np.float32(3)}, window={"a": [1], "b": 1, "c": range(-1, 3, 2)}
    )
    with aiofeed.Feeder(source, batch_size=3) as feeder:
        batch = next(iter(feeder))
    assert {name: list(tensor.shape) for name, tensor in batch.items()} == {
        "a": [3, 1, 4],
        "b": [3, 4],
        "c": [3, 2, 4],
        "d": [3],
    }
    assert batch["d"].dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in batch.values())
    assert repr(source) == "Arrays(8 samples of a [1, 4], b [4], c [2, 4], d [])"


def test_one_window_for_all_fields() -> None:
    """And its own for each."""
    x = np.arange(10)
    for window, first in (
        (range(-2, 1), [0, 1, 2]),
        ([-2, 0], [0, 2]),
        (-2, 0),
        (None, 0),
        ({"x": {0: [1, 3]}}, [1, 3]),
    ):
        with aiofeed.Feeder(aiofeed.Arrays({"x": x}, window=window), batch_size=1) as feeder:
            assert next(iter(feeder))["x"][0].tolist() == first


@pytest.mark.parametrize(("dtype", "pad"), [("f4", float("nan")), ("f2", -1), ("i2", 7), ("u1", 255), ("?", 0)])
def test_pads(dtype: str, pad: float) -> None:
    """Beyond the array, in the dtype of the field."""
    x = np.ones(3, dtype)
    with aiofeed.Feeder(aiofeed.Arrays({"x": x}, window=range(-1, 2), pad=pad), batch_size=3) as feeder:
        [batch] = list(feeder)
    p = np.asarray(pad).astype(dtype)
    assert_same(batch["x"].numpy(), np.array([[p, 1, 1], [1, 1, 1], [1, 1, p]], dtype))


def test_statistics(tmp_path: Path) -> None:
    """Of all samples, without NaN; of some, the same ones for the same seed."""
    x = np.random.default_rng(0).normal(3, 2, (50, 4))
    x[::3, 1] = np.nan
    zarr.create_array(tmp_path / "x", data=x, chunks=(7, 4))
    source = aiofeed.Arrays({"x": str(tmp_path / "x"), "y": np.arange(50, dtype="i2")})
    found = source.statistics()
    assert set(found) == {"x", "y"}
    assert {name: tensor.dtype for name, tensor in found["x"].items()} == dict.fromkeys(
        ("mean", "std", "min", "max"), torch.float64
    )
    for name, values in (("x", x), ("y", np.arange(50))):
        expected = {
            "mean": np.nanmean(values),
            "std": np.nanstd(values),
            "min": np.nanmin(values),
            "max": np.nanmax(values),
        }
        assert {each: float(found[name][each]) for each in expected} == pytest.approx(expected)
    some = [source.statistics(10, seed=seed)["y"]["mean"] for seed in (1, 1, 3)]
    assert some[0] == some[1] != some[2]


def test_exclude_and_failures_have_keys() -> None:
    """A sample's key names the array and the position, by which it can be left out."""
    source = aiofeed.Arrays({"x": np.arange(6), "y": np.arange(6) * 2})
    assert source.key(4) == "numpy.ndarray[0=4]"
    with aiofeed.Feeder(source, batch_size=6, exclude=[source.key(4), 0]) as feeder:
        assert [batch["x"].tolist() for batch in feeder] == [[1, 2, 3, 5]]


def test_a_glob_is_in_order(tmp_path: Path) -> None:
    """Of the names of files."""
    for at in (2, 0, 1):
        zarr.create_array(tmp_path / f"{at}.zarr", name="g/x", data=np.arange(3 * at, 3 * at + 3), chunks=(3,))
    for array in (
        f"{tmp_path}/*.zarr/g/x",
        f"{tmp_path}/{{0..2}}.zarr/g/x",
        [f"{tmp_path}/{at}.zarr/g/x" for at in range(3)],
    ):
        with aiofeed.Feeder(aiofeed.Arrays({"x": array}), batch_size=9) as feeder:
            assert next(iter(feeder))["x"].tolist() == list(range(9))
