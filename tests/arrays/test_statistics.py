"""Statistics of fields over samples, by axes, beside NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import aiofeed
from tests.support.examples import examples

NAMES = ("mean", "std", "min", "max")
FUNCTIONS = dict(zip(NAMES, (np.nanmean, np.nanstd, np.nanmin, np.nanmax), strict=True))


def assert_equals(found: Any, values: Any, axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for name, function in FUNCTIONS.items():
        expected = function(values, axis=axes, keepdims=True).reshape(shape)
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_statistics_by_axes(data: Any) -> None:
    """Of any axes of samples, as NumPy has them; other axes have the size 1, so that batches are normalised at once."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    count = data.draw(st.integers(1, 50))
    values = np.random.default_rng(data.draw(st.integers(0, 9))).normal(1e6, 1, (count, *sizes))
    values[data.draw(st.integers(0, count)) :, ..., 0] = np.nan
    by = data.draw(st.lists(st.integers(1, len(sizes)), unique=True, min_size=1))
    source = aiofeed.Arrays({"x": values, "n": np.arange(count)})
    found = source.statistics(by=by if len(by) > 1 else by[0])
    over = (0, *(at for at in range(1, values.ndim) if at not in by))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of NaN alone
        if np.isnan(values).all():
            assert "x" not in found
            return
        assert_equals(found["x"], values, over, tuple(n if at in by else 1 for at, n in enumerate(sizes, 1)))
    assert_equals(found["n"], np.arange(count), (0,), ())
    with aiofeed.Feeder(source, batch_size=7) as feeder:
        for batch in feeder:
            assert ((batch["x"] - found["x"]["mean"]) / found["x"]["std"]).shape == batch["x"].shape


@pytest.mark.parametrize("stride", [None, "random"])
def test_names_windows_and_tiles(stride: Any) -> None:
    """An axis has its name or number; a field without it has numbers that go with its batches, too."""
    xarray = pytest.importorskip("xarray")
    x = xarray.DataArray(np.random.default_rng(0).normal(size=(20, 3, 8)), dims=("time", "level", "lat"))
    land = x.isel(time=0, level=0, drop=True)
    asked: Any = {"sample": "time", "window": {"x": range(2), "y": 1}, "tile": {"lat": 4}, "stride": stride}
    source = aiofeed.Arrays({"x": x, "y": x, "land": land}, **asked)
    found = source.statistics(by="level")
    assert {name: each["mean"].shape for name, each in found.items()} == {"x": (1, 3, 1), "y": (3, 1), "land": (1,)}
    assert all(torch.equal(found["x"][name], source.statistics(by=1)["x"][name]) for name in NAMES)
    assert source.statistics(by=("time", "level"))["x"]["std"].shape == (2, 3, 1)
    if stride is None:
        assert_equals(found["y"], x.values[1:], (0, 2), (3, 1))
    with pytest.raises(
        ValueError, match=r"statistics\(by='lon'\): .*'x': \['time', 'level', 'lat'\].*'land': \['lat'\]"
    ):
        source.statistics(by="lon")


@pytest.mark.parametrize("by", [(), 1])
def test_statistics_of_a_part(by: Any) -> None:
    """Are of its samples only: those of validation stay unseen."""
    x = np.arange(60.0).reshape(30, 2)
    source = aiofeed.Arrays({"x": x})
    for rows in (slice(20), [25, 3, 7]):
        part = source[rows][::-1]
        assert_equals(part.statistics(by=by)["x"], x[rows], (0,) if by else (0, 1), (2,) if by else ())


def test_statistics_on_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are those of all samples on each rank."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    x = np.arange(60.0).reshape(30, 2)
    assert_equals(aiofeed.Arrays({"x": x}).statistics()["x"], x, (0, 1), ())
