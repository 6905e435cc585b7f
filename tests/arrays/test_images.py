"""Images of different sizes, and several random tiles of a position, beside NumPy."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiofeed
from tests.support.arrays import assert_same, samples_of
from tests.support.examples import examples

zarr = pytest.importorskip("zarr", minversion="3")
h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")


def images(shapes: Any, seed: int = 0) -> list[Any]:
    """Images whose values tell the image and the place."""
    return [1_000_000 * at + np.arange(np.prod(shape)).reshape(shape) for at, shape in enumerate(shapes)]


def stored(folder: Path, values: list[Any], kind: str, chunk: int) -> list[Any]:
    found: list[Any] = []
    for at, each in enumerate(values):
        chunks = tuple(min(chunk + at % 2, size) for size in each.shape)
        if kind == "zarr":
            found.append(str(folder / f"{at}.zarr"))
            zarr.create_array(found[-1], data=each, chunks=chunks)
        elif kind == "hdf5":
            found.append(f"{folder}/{at}.h5::x")
            with h5py.File(folder / f"{at}.h5", "w") as file:
                file.create_dataset("x", data=each, chunks=chunks)
        else:
            found.append(each)
    return found


def expected(values: list[Any], tile: dict[int, int], stride: dict[int, int], windows: int, pad: Any) -> Any:
    """All samples in any order: windows along the first axis, or whole images if there are none; tiles of others."""
    for image, each in enumerate(values):
        first = [range(len(each) - windows + 1)] if windows else []
        along = {
            axis: range(0, each.shape[axis] if pad is not None else each.shape[axis] - size + 1, stride.get(axis, size))
            for axis, size in tile.items()
        }
        if pad is not None:
            each = np.pad(each, [(0, max(tile.get(axis, 0), 0)) for axis in range(each.ndim)], constant_values=pad)
        for at in np.ndindex(*map(len, (*first, *along.values()))):
            part = each
            for (axis, size), number in zip(tile.items(), at[len(first) :], strict=True):
                part = part.take(range(along[axis][number], along[axis][number] + size), axis)
            yield image, part[at[0] : at[0] + windows] if windows else part


@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_images_of_different_sizes(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """All tiles of all images, each once; a target beside them has a row for each image."""
    folder = tmp_path_factory.mktemp("images")
    sizes = st.tuples(st.integers(1, 3), st.integers(2, 9), st.integers(2, 9))
    windows = data.draw(st.sampled_from([0, 0, 1, 2]))
    shapes = data.draw(st.lists(sizes, min_size=2, max_size=5))
    if not windows:
        shapes = [(2, *shape[1:]) for shape in shapes]
    shapes[:2] = [(2, 5, 6), (2, 7, 4)]  # one at least is large enough, and they differ
    values = images(shapes)
    pad = data.draw(st.sampled_from([None, None, 7])) if not windows else None
    tile = data.draw(st.sampled_from([{1: 2, 2: 3}, {2: 4, 1: 3}]))
    stride = data.draw(st.sampled_from([{}, {1: 1}, {1: 4, 2: 2}]))
    arrays: dict[str, Any] = {"x": stored(folder, values, data.draw(st.sampled_from(["zarr", "hdf5", "numpy"])), 3)}
    arguments: dict[str, Any] = {"tile": tile, "stride": stride or None, "pad": pad}
    if windows:
        arguments["window"] = range(windows)
    else:
        arguments["sample"] = ()
        arrays["target"] = np.arange(len(values)) * 10
    source = aiofeed.Arrays(arrays, **arguments)
    wanted = list(expected(values, tile, stride, windows, pad))
    assert len(source) == len(wanted)
    source = pickle.loads(pickle.dumps(source))
    with aiofeed.Feeder(
        source, batch_size=4, seed=1, shuffle=data.draw(st.sampled_from([False, True, "window:2"])), keys=True
    ) as feeder:
        found = []
        for batch, keys in feeder:
            found += list(zip(samples_of([batch]), keys, strict=True))
    assert sorted(sample["x"].tobytes() for sample, _ in found) == sorted(each.tobytes() for _, each in wanted)
    if not windows:
        by_image = Counter(image for image, _ in wanted)
        assert Counter(int(sample["target"]) // 10 for sample, _ in found) == by_image
    for sample, name in found:
        if pad is None:
            image = int(sample["x"].reshape(-1)[0]) // 1_000_000
            assert windows or int(sample["target"]) == 10 * image
            if isinstance(arrays["x"][0], str):
                assert name.startswith(arrays["x"][image].partition("::")[0])


@pytest.mark.parametrize("shuffle", [False, True, "window"])
def test_several_random_tiles_of_a_position(shuffle: Any) -> None:
    """Each position has as many, at other places in each epoch and for each of them; an epoch is resumed exactly."""
    shapes = [(3, 40, 50), (3, 30, 90), (3, 10, 10), (3, 80, 20)]  # the third has no room for a tile
    values = images(shapes)
    source = aiofeed.Arrays(
        {"x": values, "y": np.arange(4)}, sample=(), tile={1: 16, 2: 16}, stride="random", samples_per_position=4
    )
    assert len(source) == 3 * 4
    feeder = aiofeed.Feeder(source, batch_size=5, seed=1, shuffle=shuffle)
    epochs = []
    for _ in range(2):
        found = list(samples_of(feeder))
        assert Counter(int(sample["y"]) for sample in found) == {0: 4, 1: 4, 3: 4}
        for sample in found:
            image = values[int(sample["y"])]
            _, y, x = np.unravel_index(int(sample["x"][0, 0, 0]) - 1_000_000 * int(sample["y"]), image.shape)
            assert_same(sample["x"], image[:, y : y + 16, x : x + 16])
        places = {sample["x"].tobytes() for sample in found}
        assert len(places) >= 11  # of 12, drawn of hundreds
        epochs.append(found)
    assert {each["x"].tobytes() for each in epochs[0]} != {each["x"].tobytes() for each in epochs[1]}
    feeder = aiofeed.Feeder(source, batch_size=5, seed=1, shuffle=shuffle)
    batches = iter(feeder)
    next(batches)
    state = feeder.state_dict()
    batches.close()
    again = aiofeed.Feeder(pickle.loads(pickle.dumps(source)), batch_size=5, seed=1, shuffle=shuffle)
    again.load_state_dict(state)
    for sample, wanted in zip(samples_of(again), epochs[0][5:], strict=True):
        assert_same(sample["x"], wanted["x"])


def test_tiles_of_a_position_come_of_one_decoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their indices follow each other, so that an epoch in windows decodes a chunk once."""
    zarr.create_array(tmp_path / "x", data=np.arange(20 * 64).reshape(20, 8, 8), chunks=(1, 8, 8))
    source = aiofeed.Arrays({"x": str(tmp_path / "x")}, tile={1: 4, 2: 4}, stride="random", samples_per_position=8)
    assert [source.position(at) for at in (0, 7, 8)] == [{0: 0}, {0: 0}, {0: 1}]
    assert source.at(3) == 24
    assert source.key(25) == f"{tmp_path}/x[0=3, tile=1]"
    assert len({source.key(index) for index in range(160)}) == 160
    decoded = []
    part = next(source._parts())
    decode = type(part).decode
    monkeypatch.setattr(type(part), "decode", lambda self, data, at: decoded.append(at) or decode(self, data, at))
    with aiofeed.Feeder(source, batch_size=16, shuffle="window") as feeder:
        assert sum(len(batch["x"]) for batch in feeder) == 160
    assert len(decoded) == 20


def test_positions_keys_and_places(tmp_path: Path) -> None:
    """Name the image; the image is found by its name or number."""
    values = images([(5, 6), (7, 9), (4, 4)])
    paths = stored(tmp_path, values, "zarr", 3)
    source = aiofeed.Arrays({"x": paths, "y": np.arange(3)}, sample=(), tile={0: 3, 1: 3})
    with aiofeed.Feeder(source, batch_size=9) as feeder:
        [batch] = feeder
    assert batch["y"].tolist() == [0, 0, *[1] * 6, 2]
    for image, value in enumerate(values):
        index = source.at(image, value.shape[0] - 3, 0)
        assert index == source.at(paths[image], value.shape[0] - 3, 0)
        places = {"image": image, 0: (value.shape[0] // 3 - 1) * 3, 1: 0}
        assert source.position(index) == places
        assert source.coords(index) == {**places, "image": paths[image]}
        assert source.key(index) == f"{paths[image]}[0={places[0]}, 1=0]"
    keys = [source.key(index) for index in range(len(source))]
    assert len({*keys}) == len(keys)
    assert source.fingerprint() != aiofeed.Arrays({"x": paths[::-1]}, sample=(), tile={0: 3, 1: 3}).fingerprint()
    joined = aiofeed.Arrays({"x": paths}, tile={1: 3})
    assert len(joined) == 5 * 2 + 7 * 3 + 4
    assert joined.key(joined.at(6, 3)) == f"{paths[1]}[0=1, 1=3]"


def test_images_that_are_too_small_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A warning says how many images have no samples."""
    values = images([(5, 6), (2, 9), (4, 4)])
    assert len(aiofeed.Arrays({"x": values}, sample=(), tile={0: 3, 1: 3})) == 3
    assert "1 of 3 are smaller than a sample and left out; pad= keeps them" in caplog.text


def test_images_of_one_size_are_samples() -> None:
    """Whole ones, without tiles."""
    values = images([(2, 3)] * 4)
    source = aiofeed.Arrays({"x": values, "y": np.arange(4)}, sample=())
    with aiofeed.Feeder(source, batch_size=4) as feeder:
        [batch] = feeder
    assert_same(batch["x"].numpy(), np.stack(values))
    assert batch["y"].tolist() == [0, 1, 2, 3]


MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no tile": ([(4, 5), (4, 6)], {}, r"the shape \[any, 6\].*may differ in size along axes of tile="),
    "one image": ([(4, 5)], {"sample": ()}, r"sample=\(\)\) needs several arrays"),
    "small": ([(4, 5), (4, 6)], {"tile": {1: 9}}, r"along 1 there are 6 positions, and a sample needs 9"),
    "select": ([(4, 5), (4, 6)], {"tile": {1: 2}, "select": {1: slice(0, 3)}}, r"along 1 all fields have one slice"),
    "pad": ([(4, 5), (4, 6)], {"tile": {1: 2}, "window": range(2), "pad": 0}, r"windows do not reach beyond one"),
    "axes": ([(4, 5), (4, 6, 2)], {"tile": {1: 2}}, r"the shape \[any, any, 2\]"),
    "samples": ([(4, 5)], {"tile": {1: 2}, "samples_per_position": 2}, r'=2\) is 1, or more with stride="random"'),
    "count": ([(4, 5)], {"tile": {1: 2}, "stride": "random", "samples_per_position": 0}, r"=0\) is 1, or more"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    """Are errors that say what is allowed."""
    shapes, arguments, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        aiofeed.Arrays({"x": images(shapes)}, **arguments)


def test_fields_must_have_the_same_images() -> None:
    """Images and masks agree one by one."""
    arguments: dict[str, Any] = {"sample": (), "tile": {0: 2, 1: 2}}
    with pytest.raises(ValueError, match=r"along 0 'y' has \(5, 4\) positions, others \(4, 5\)"):
        aiofeed.Arrays({"x": images([(4, 5), (5, 4)]), "y": images([(5, 4), (4, 5)])}, **arguments)
    with pytest.raises(ValueError, match=r"'y' has"):
        aiofeed.Arrays({"x": images([(4, 5), (5, 4)]), "y": np.arange(3)}, **arguments)


def test_windows_and_random_tiles_of_a_slice_of_recordings() -> None:
    """A window stays within its recording; recordings without a whole window or tile have no samples."""
    xarray = pytest.importorskip("xarray")
    sizes = [(5, 8), (3, 12), (2, 3), (4, 30)]
    values = images([(times, height, 8) for times, height in sizes])
    coords = [{"t": np.arange(times) + 10 * at} for at, (times, _) in enumerate(sizes)]
    films = [xarray.DataArray(*each, dims=("t", "y", "x")) for each in zip(values, coords, strict=True)]
    source = aiofeed.Arrays(
        {"x": films}, sample="t", window=range(2), tile={"y": 4}, stride="random", samples_per_position=3,
        select={"t": slice(2, 31)},
    )  # fmt: skip
    found: Counter[tuple[int, int]] = Counter()
    with aiofeed.Feeder(source, batch_size=4, shuffle=True) as feeder:
        for sample in samples_of(feeder):
            at, place = divmod(int(sample["x"][0, 0, 0]), 1_000_000)
            time, y, _ = np.unravel_index(place, values[at].shape)
            assert_same(sample["x"], values[at][time : time + 2, y : y + 4])
            found[at, int(time)] += 1
    assert found == dict.fromkeys([(0, 2), (0, 3), (1, 0), (1, 1), (3, 0)], 3)
    assert source.at(11) == 9
    with pytest.raises(ValueError, match=r"no sample is at 20 along 't'"):
        source.at(20)
