"""Places by coordinates: what samples have, where they are, and where their windows end, beside xarray."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiofeed
from tests.support.arrays import assert_same
from tests.support.examples import examples
from tests.support.fault_server import files_of

h5py = pytest.importorskip("h5py")
xarray = pytest.importorskip("xarray")
pytest.importorskip("h5netcdf")
pytest.importorskip("zarr", minversion="3")

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")

KINDS = ["w.nc::", "w2.zarr/", "w3.zarr/", "xarray"]
TIMES = np.arange("2019-01-01", "2019-01-03", dtype="M8[h]").astype("M8[ns]")


def hours(first: str, count: int, offset: float = 0) -> Any:
    """A field of one value for each hour, which counts."""
    time = np.datetime64(first, "ns") + np.arange(count).astype("m8[h]")
    return xarray.Dataset({"x": ("time", np.arange(count) + offset)}, {"time": time})


def epoch(source: Any, field: str = "x", **arguments: Any) -> Any:
    """The samples of an epoch."""
    with aiofeed.Feeder(source, batch_size=7, **arguments) as feeder:
        return np.concatenate([batch[field].numpy() for batch in feeder])


@pytest.fixture(scope="module")
def weather(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A NetCDF file and Zarr groups that xarray wrote: levels and latitudes descend, longitudes are float32."""
    folder, random = tmp_path_factory.mktemp("weather"), np.random.default_rng(0)
    found = xarray.Dataset(
        {
            "z": (("time", "level", "lat", "lon"), random.normal(size=(len(TIMES), 4, 6, 8)).astype("f4")),
            "land": (("lat", "lon"), random.normal(size=(6, 8)).astype("f4")),
        },
        {
            "time": TIMES,
            "level": [1000, 850, 500, 250],
            "lat": np.linspace(50, 0, 6),
            "lon": (np.arange(8) * 0.1).astype("f4"),
        },
    )
    chunks = (10, 2, 6, 8)
    found.to_netcdf(folder / "w.nc", engine="h5netcdf", encoding={"z": {"chunksizes": chunks, "zlib": True}})
    found.to_zarr(folder / "w2.zarr", zarr_format=2, encoding={"z": {"chunks": chunks}})
    found.to_zarr(folder / "w3.zarr", zarr_format=3, consolidated=False, encoding={"z": {"chunks": chunks}})
    return folder, found


def field(kind: str, weather: tuple[Path, Any], name: str = "z") -> Any:
    return weather[1][name] if kind == "xarray" else f"{weather[0]}/{kind}{name}"


SELECTIONS: list[dict[str, Any]] = [
    {"level": 500},
    {"level": [250, 1000]},
    {"level": slice(850, 250)},
    {"level": slice(None, None, 2)},
    {"level": slice(500, None), "lat": slice(35, 10)},
    {"lon": 0.1, "lat": [50.0, 0]},
    {"lon": slice(0.1, 0.4)},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("select", SELECTIONS, ids=str)
def test_values_of_coordinates_select(kind: str, select: dict[str, Any], weather: tuple[Path, Any]) -> None:
    """One value drops the axis, lists and slices keep it; the values are those of ``sel`` of xarray."""
    source = aiofeed.Arrays({"x": field(kind, weather)}, sample="time", select=select)
    assert_same(epoch(source), weather[1].z.sel(select).values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("select", [{1: 2}, {1: -1, 3: slice(2, 5)}, {2: [4, 0]}, {3: slice(None, None, -3)}], ids=str)
def test_axes_by_number_take_indices(kind: str, select: dict[int, Any], weather: tuple[Path, Any]) -> None:
    """As of NumPy, also where the axis has a coordinate."""
    source = aiofeed.Arrays({"x": field(kind, weather)}, sample="time", select=select)
    names = {weather[1].z.dims[axis]: at for axis, at in select.items()}
    assert_same(epoch(source), weather[1].z.isel(names).values)


@settings(max_examples=examples(40))
@given(st.data())
def test_selections_of_arrays_in_memory(data: Any) -> None:
    """Of any shapes, also of those that are copied without chunks."""
    shape = data.draw(st.tuples(*[st.integers(1, 6)] * 3))
    values = np.random.default_rng(0).normal(size=shape)
    asked: dict[int, Any] = {}
    for axis in (1, 2):
        at = st.integers(-shape[axis], shape[axis] - 1)
        asked[axis] = data.draw(st.one_of(at, st.lists(at, min_size=1, max_size=4), st.just(slice(None, None, -2))))
    low = -data.draw(st.integers(0, shape[0] - 1))
    source = aiofeed.Arrays({"x": values}, window=range(low, 1), select=asked)
    windows = np.stack([values[at : at + 1 - low] for at in range(shape[0] + low)])
    windows = windows[:, :, :, asked[2]][:, :, asked[1]]
    assert_same(epoch(source), windows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_the_axes_of_samples_and_tiles(kind: str, weather: tuple[Path, Any]) -> None:
    """Windows and tiles lie within it; other fields have the same part."""
    select = {"time": slice("2019-01-01T12", "2019-01-02"), "lat": slice(40, 10), "level": 850}
    source = aiofeed.Arrays(
        {"x": field(kind, weather), "land": field(kind, weather, "land")},
        **{"sample": "time", "window": {"x": range(-2, 2)}, "tile": {"lat": 3}, "stride": {"lat": 1}, "select": select},
    )
    part = weather[1].sel(select)
    assert len(source) == (len(part.time) - 3) * 2
    for index in range(len(source)):
        sample = aiofeed.Feeder(source[[index]], batch_size=1)
        coords = source.coords(index)
        time, lat = (part.indexes[axis].get_loc(coords[axis]) for axis in ("time", "lat"))
        with sample as feeder:
            [batch] = list(feeder)
        assert_same(batch["x"][0].numpy(), part.z.values[time - 2 : time + 2, lat : lat + 3])
        assert_same(batch["land"][0].numpy(), part.land.values[lat : lat + 3])
        assert source.at(coords["time"], lat=coords["lat"]) == index


def test_random_tiles_of_a_part(weather: tuple[Path, Any]) -> None:
    """Lie within it, too."""
    source = aiofeed.Arrays({"x": weather[1].lat}, select={0: slice(1, 4)})
    assert epoch(source).tolist() == [40, 30, 20]
    grid = weather[1].land.copy(data=np.arange(48).reshape(6, 8))
    tiles = aiofeed.Arrays(
        {"x": grid}, sample="lat", tile={"lon": 2}, stride="random", select={"lon": slice(0.3, None)}
    )
    found = {int(each) for seed in range(9) for each in epoch(tiles, seed=seed).reshape(-1) % 8}
    assert found == {3, 4, 5, 6, 7}


@pytest.mark.parametrize("kind", KINDS)
def test_a_selection_for_each_field(kind: str, weather: tuple[Path, Any]) -> None:
    """Or one for those that have the axis."""
    array = field(kind, weather)
    select = {"x": {"level": 500}, "y": {"level": [1000]}, "lon": 0.1}
    fields = {"x": array, "y": array, "land": field(kind, weather, "land")}
    source = aiofeed.Arrays(fields, sample="time", select=select)
    part = weather[1].sel(lon=np.float32(0.1))
    assert_same(epoch(source), part.z.sel(level=500).values)
    assert_same(epoch(source, "y"), part.z.sel(level=[1000]).values)
    assert_same(epoch(source, "land")[0], part.land.values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, "window", True])
def test_samples_by_their_coordinates(kind: str, shuffle: Any, weather: tuple[Path, Any]) -> None:
    """``at`` and ``coords`` are inverse, for sources that were sent to another process, too."""
    source = aiofeed.Arrays({"x": field(kind, weather)}, sample="time", window=range(-3, 1), tile={"lat": 2, "lon": 3})
    source = pickle.loads(pickle.dumps(source)) if kind != "xarray" else source
    assert all(source.at(*source.coords(index).values()) == index for index in range(len(source)))
    index = source.at("2019-01-01T05", lat=20, lon=0.4)
    assert source.coords(index) == {"time": np.datetime64("2019-01-01T05"), "lat": 30, "lon": np.float32(0.3)}
    assert source.key(index).endswith("[time=5, lat=2, lon=3]")
    with aiofeed.Feeder(source[[index]], batch_size=1, shuffle=shuffle) as feeder:
        [batch] = list(feeder)
    part = weather[1].z.sel(time=slice("2019-01-01T02", "2019-01-01T05")).isel(lat=slice(2, 4), lon=slice(3, 6))
    assert_same(batch["x"][0].numpy(), part.values)


def test_axes_without_coordinates() -> None:
    """Take indices and give them."""
    source = aiofeed.Arrays({"x": np.arange(30).reshape(10, 3)}, sample=(0, 1), window={"x": {0: range(-2, 1)}})
    assert source.coords(0) == {0: 2, 1: 0}
    assert source.at(7, 2) == [source.position(at) for at in range(len(source))].index({0: 7, 1: 2})


UNITS = [
    ("hours since 1900-01-01 00:00:0.0", [1043135, 1043136, 1043142]),
    ("days since 1850-1-1", [61727, 61728.25, 61729.5]),
    ("Seconds since 2019-01-01T00:00:00Z", [0, 60, 3600]),
    ("minutes since 2019-01-01 06:30 UTC", [0, 1.5, 90]),
    ("days since 2019-01-01", [0, 31, 59]),
    ("milliseconds since 2019-01-01 00:00:00.000", [0, 1, 2]),
]


@pytest.mark.parametrize(("units", "values"), UNITS)
@pytest.mark.parametrize("kind", ["nc", "zarr"])
def test_units_of_time(units: str, values: Any, kind: str, tmp_path: Path) -> None:
    """Times are those of xarray."""
    dataset = xarray.Dataset({"x": ("time", np.arange(3))}, {"time": ("time", values, {"units": units})})
    path = tmp_path / f"x.{kind}"
    if kind == "nc":
        dataset.to_netcdf(path, engine="h5netcdf")
    else:
        dataset.to_zarr(path, consolidated=False)
    expected = xarray.decode_cf(dataset).time.values
    source = aiofeed.Arrays({"x": f"{path}::x" if kind == "nc" else f"{path}/x"}, sample="time")
    for index, time in enumerate(expected):
        assert source.coords(index)["time"] == time
        assert source.at(time) == index


@pytest.mark.parametrize(
    "attributes",
    [
        {"units": "days since 2019-01-01", "calendar": "noleap"},
        {"units": "days"},
        {"units": "days since the start"},
        {"units": "hours since 2019-01-01 00:00:00 +01:00"},
        {"units": "hours since 2019-01-01 00:00:00 -05:00"},
    ],
    ids=str,
)
def test_other_times_stay_numbers(attributes: Any, tmp_path: Path) -> None:
    """Of calendars of models, and of other zones and origins."""
    dataset = xarray.Dataset({"x": ("time", np.arange(3))}, {"time": ("time", [0, 1, 5], attributes)})
    dataset.to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
    source = aiofeed.Arrays({"x": f"{tmp_path}/x.nc::x"}, sample="time")
    assert source.coords(2) == {"time": 5}
    assert source.at(5) == 2


@pytest.mark.parametrize("kind", ["nc", "zarr", "xarray"])
def test_texts_are_coordinates(kind: str, tmp_path: Path) -> None:
    """As names of channels are."""
    dataset = xarray.Dataset({"x": (("t", "channel"), np.arange(6).reshape(3, 2))}, {"channel": ["red", "nir"]})
    if kind == "nc":
        dataset.to_netcdf(tmp_path / "x.nc", engine="h5netcdf")
    else:
        dataset.to_zarr(tmp_path / "x.zarr", zarr_format=2, consolidated=False)
    given = {"nc": f"{tmp_path}/x.nc::x", "zarr": f"{tmp_path}/x.zarr/x", "xarray": dataset.x}[kind]
    assert epoch(aiofeed.Arrays({"x": given}, sample="t", select={"channel": "nir"})).tolist() == [1, 3, 5]
    assert aiofeed.Arrays({"x": given}, sample="channel").at("nir") == 1


def test_coordinates_in_groups_above(tmp_path: Path) -> None:
    """And with names of their own, by scales of HDF5."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["when"] = np.array([3.0, 4.0, 7.0])
        file["when"].make_scale()
        file["a/b/x"] = np.arange(3)
        file["a/b/x"].dims[0].attach_scale(file["when"])
    source = aiofeed.Arrays({"x": f"{tmp_path}/x.h5::a/b/x"})
    assert source.coords(2) == {0: 7}
    assert source.at(4) == 1


FILES = {"feb": "2019-02-01", "jan": "2019-01-01", "mar": "2019-03-01"}


@pytest.mark.parametrize("kind", ["nc", "zarr"])
@pytest.mark.parametrize("sample", ["time", 0])
def test_files_of_a_glob_are_in_the_order_of_their_coordinate(kind: str, sample: Any, tmp_path: Path) -> None:
    """Also if their times have other origins; those of a list stay as they are."""
    suffix = {"nc": ".nc::x", "zarr": ".zarr/x"}[kind]
    for name, first in FILES.items():
        dataset = hours(first, 5, int(first[5:7]) * 10)
        if kind == "nc":
            dataset.to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
        else:
            dataset.to_zarr(tmp_path / f"{name}.zarr", consolidated=False)
    source = aiofeed.Arrays({"x": f"{tmp_path}/*{suffix}", "y": f"{tmp_path}/*{suffix}"}, sample=sample)
    found = epoch(source)
    assert found.tolist() == [month * 10 + hour for month in (1, 2, 3) for hour in range(5)]
    assert_same(epoch(source, "y"), found)
    assert source.at("2019-02-01T03") == 8
    files = [f"{tmp_path}/{name}{suffix}" for name in FILES]
    assert epoch(aiofeed.Arrays({"x": files}, sample=sample))[0] == 20
    # A field without a coordinate, whose files belong to the others by their names.
    for name in FILES:
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.full(5, ord(name[0]))
    source = aiofeed.Arrays({"x": f"{tmp_path}/*{suffix}", "y": f"{tmp_path}/*.h5::x"}, sample=0)
    assert epoch(source)[::5].tolist() == [20, 10, 30]
    assert epoch(source, "y")[::5].tolist() == [ord(name[0]) for name in FILES]


def test_files_whose_coordinate_does_not_ascend_are_in_the_order_of_names(tmp_path: Path) -> None:
    """As latitudes from the north to the south, or a file that cannot be read."""
    for name, first in (("a", 90), ("b", 40)):
        values = {"x": ("lat", np.arange(3.0) + first)}
        xarray.Dataset(values, {"lat": first - np.arange(3.0)}).to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
    assert epoch(aiofeed.Arrays({"x": f"{tmp_path}/*.nc::x"}, sample="lat")).tolist() == [90, 91, 92, 40, 41, 42]


@settings(max_examples=examples(40))
@given(st.data())
def test_windows_within_equal_steps(data: Any) -> None:
    """Samples are all positions whose window crosses no gap, in the order of the array."""
    steps = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 7, -9]), min_size=2, max_size=40))
    steps += [1] * (len(steps) + 1)  # most are equal
    kind = data.draw(st.sampled_from(["M8[h]", "i4", "u2", "f4", "f8"]))
    values = (1000 + np.cumsum([0, *steps])).astype("i8").astype(kind)
    low, high = -data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    array = xarray.DataArray(np.arange(len(values)), {"time": values}, ("time",))
    part = slice(data.draw(st.integers(0, 3)), None)
    expected = [
        at
        for at in range(part.start - low, len(values) - high)
        if all(step == 1 for step in steps[at + low : at + high])
    ]
    arguments = {"sample": "time", "window": {"x": range(low, high + 1)}, "within": "time", "select": {0: part}}
    if not expected:
        with pytest.raises(ValueError, match=r"within='time'|positions, and a sample needs"):
            aiofeed.Arrays({"x": array, "y": array}, **arguments)
        return
    source = aiofeed.Arrays({"x": array, "y": array}, **arguments)
    assert epoch(source, "y").tolist() == expected
    assert sorted(epoch(source, "y", shuffle="window:2").tolist()) == expected
    assert [source.position(index)["time"] for index in range(len(source))] == expected
    if kind != "i4" or len({*values.tolist()}) == len(values):
        for index in range(0, len(source), 5):
            if np.count_nonzero(values == values[expected[index]]) == 1:
                assert source.at(values[expected[index]]) == index


def test_windows_do_not_cross_the_border_of_two_recordings(tmp_path: Path) -> None:
    """But that of two files which go on; without a coordinate, no border of two arrays."""
    for name, first, count in (("a", "2019-01-01T00", 5), ("b", "2019-01-01T05", 4), ("c", "2019-06-01T00", 6)):
        hours(first, count).to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(count)
    source = aiofeed.Arrays({"x": f"{tmp_path}/*.nc::x"}, sample="time", window=range(-2, 1), within="time")
    assert [source.position(index)["time"] for index in range(len(source))] == [*range(2, 9), *range(11, 15)]
    with pytest.raises(ValueError, match=r"at\(\): no sample is at '2019-06-01T01' along 'time'"):
        source.at("2019-06-01T01")
    source = aiofeed.Arrays({"x": f"{tmp_path}/*.h5::x"}, window=range(-2, 1), within=0)
    assert epoch(source).tolist() == [[at - 2, at - 1, at] for count in (5, 4, 6) for at in range(2, count)]


def test_states_tell_selections_apart(weather: tuple[Path, Any]) -> None:
    """And the samples that gaps leave; sources without either have the fingerprint that they had."""
    base: dict[str, Any] = {"sample": "time", "window": range(-1, 1)}
    others: list[dict[str, Any]] = [{}, {"select": {"level": 500}}, {"select": {"level": 250}}, {"select": {1: [2]}}]
    others += [{"select": {"time": slice(None, "2019-01-01")}}, {"within": "time"}]
    found = [aiofeed.Arrays({"x": weather[1].z}, **base, **each).fingerprint() for each in others]
    assert len({*found}) == len(others)
    gap = weather[1].z[[0, 1, 2, 5, 6, 7]]
    assert (
        aiofeed.Arrays({"x": gap}, **base, within="time").fingerprint()
        != aiofeed.Arrays({"x": weather[1].z[:6]}, **base, within="time").fingerprint()
    )


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"select": {"level": 510}}, r"z along 'level' has no 510, or several: its length is 4, \[1000  850  500  250\]"),
    ({"select": {"level": slice(400, 300)}}, r"along 'level' has no slice\(400, 300, None\)"),
    ({"select": {"level": "abc"}}, r"along 'level' has no 'abc'"),
    ({"select": {1: 7}}, r"along 1 has no 7, or several: its length is 4"),
    ({"select": {1: slice(4, 9)}}, r"along 1 has no slice"),
    ({"select": {1: 1.5}}, r"along 1 has no 1.5"),
    ({"select": {"levle": 500}}, r"no field or axis is 'levle'.*'level'"),
    ({"select": {"y": {"level": 500}}}, r"no field or axis is 'y'"),
    ({"select": {"x": {"levle": 500}}}, r"no field or axis is 'x': \{'levle': 500\}"),
    ({"select": {"time": "2019-01-01"}}, r"along 'time' all fields have one slice"),
    ({"select": {"time": ["2019-01-01"]}}, r"along 'time' all fields have one slice"),
    ({"select": {"time": slice("2020", None)}}, r"along 'time' has no slice.*2019-01-01"),
    ({"select": {"time": slice("2019", None)}, "pad": 0}, r"no pad="),
    ({"select": {"time": slice("2019-01-02T23", None)}}, r"there are 1 positions, and a sample needs 2"),
    ({"within": "lat"}, r"within='lat'\) is one of sample='time'"),
    ({"within": "time", "pad": 0}, r"within='time'.*not for pad="),
]


@pytest.mark.parametrize("kind", ["w.nc::", "w3.zarr/", "xarray"])
@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=str)
def test_mistakes(kind: str, arguments: Any, message: str, weather: tuple[Path, Any]) -> None:
    """Are errors that name the array, the axis and the value."""
    with pytest.raises(ValueError, match=message):
        aiofeed.Arrays({"x": field(kind, weather)}, sample="time", window=range(2), **arguments)


def test_mistakes_of_places(weather: tuple[Path, Any]) -> None:
    """A value for each axis, at which a sample is whole."""
    source = aiofeed.Arrays({"x": weather[1].z}, sample="time", window=range(-1, 1), tile={"lat": 4})
    for places, named in (((), {}), (("2019-01-01T05",), {}), (("2019-01-01T05", 50, 3), {}), ((1,), {"time": 3})):
        with pytest.raises(TypeError, match=r"at\(\) takes one value for each of \['time', 'lat'\]"):
            source.at(*places, **named)
    for time, lat in (("2019-01-01T00", 50), ("2019-01-01T01", 10), ("2020", 50), ("2019-01-01T01", 12)):
        with pytest.raises(ValueError, match=rf"at\(\).*{lat if lat < 50 else time}"):
            source.at(time, lat=lat)


def test_a_coordinate_of_another_length(tmp_path: Path) -> None:
    """Is an error that names both; who does not ask for it is not told."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["time"] = np.arange(4)
        file["time"].make_scale()
        file["x"] = np.arange(5)
        file["x"].dims[0].attach_scale(file["time"])
    source = aiofeed.Arrays({"x": f"{tmp_path}/x.h5::x"}, sample="time")
    assert len(source) == 5
    with pytest.raises(ValueError, match=r"x\.h5::time has the shape \(4,\), and .*x\.h5::x 5 places along 'time'"):
        source.coords(0)


@pytest.mark.parametrize("kind", ["w.nc::", "w2.zarr/", "w3.zarr/"])
def test_at_urls(kind: str, weather: tuple[Path, Any], server: Any) -> None:
    """Coordinates are read by requests; of axes without one, indices."""
    pytest.importorskip("obstore")
    folder, values = weather
    server.objects = files_of(folder)
    array = {"x": f"s3://bucket/{kind}z"}
    source = aiofeed.Arrays(array, sample="time", select={"level": 500}, options=server.options)
    assert_same(epoch(source), values.z.sel(level=500).values)
    assert source.coords(source.at("2019-01-01T07")) == {"time": np.datetime64("2019-01-01T07")}
    server.objects = {name: data for name, data in server.objects.items() if "/level/" not in name}
    if kind != "w.nc::":
        source = aiofeed.Arrays(array, sample="time", select={"level": 2}, options=server.options)
        assert_same(epoch(source), values.z.isel(level=2).values)


@pytest.mark.parametrize("select", [{"level": 500}, {"lat": 2}], ids=str)
def test_in_a_store(select: Any, weather: tuple[Path, Any]) -> None:
    """Of keys, with a coordinate and without one."""
    store = pytest.importorskip("obstore.store").MemoryStore()
    for name, data in files_of(weather[0] / "w3.zarr").items():
        if "/lat/" not in name:
            store.put(name, data)
    source = aiofeed.Arrays({"x": "bucket/z"}, sample="time", select=select, store=store)
    expected = weather[1].z.drop_vars("lat").sel(select)  # of an axis without a coordinate, indices
    assert_same(epoch(source), expected.values)


def test_tensors_of_a_training(weather: tuple[Path, Any]) -> None:
    """Selected windows are contiguous."""
    source = aiofeed.Arrays(
        {"x": field("w.nc::", weather)}, sample="time", window=range(2), select={"level": [850, 250]}
    )
    with aiofeed.Feeder(source, batch_size=4, shuffle=True) as feeder:
        batch = next(iter(feeder))
    assert batch["x"].shape == (4, 2, 2, 6, 8)
    assert batch["x"].dtype == torch.float32
    assert batch["x"].is_contiguous()
