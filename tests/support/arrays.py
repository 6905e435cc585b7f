"""Windows of arrays by plain NumPy, and what an epoch of ``Arrays`` must have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

import aiofeed

DTYPES = [f"{order}{kind}" for kind in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16") for order in "<>"]
DTYPES += ["|b1", "|i1", "|u1"]
"""All dtypes of NumPy that torch has, in both byte orders."""


def numbers(shape: Sequence[int], dtype: Any = "<f4", seed: int = 0) -> Any:
    """Values that differ, among them negative ones and, of floats, NaN and infinity."""
    kind, random = np.dtype(dtype), np.random.default_rng(seed)
    if kind.kind in "iub":
        return random.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind.newbyteorder("="))[..., 0].astype(
            kind
        ) if kind.kind != "b" else random.integers(0, 2, shape).astype(kind)
    values = random.normal(size=shape).astype(kind)
    flat = values.reshape(-1)
    flat[::7], flat[3::11] = np.nan, np.inf
    return values


def bits(values: Any) -> Any:
    """Values as bytes in this machine's order, so that NaN equals NaN."""
    values = np.asarray(values)
    return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="))).reshape(-1).view(np.uint8)


def assert_same(found: Any, expected: Any) -> None:
    """Shape, dtype and bits are equal, but for the byte order."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype.newbyteorder("=")
    assert np.array_equal(bits(found), bits(expected))


@dataclass
class Asked:
    """What samples have: the arguments of ``Arrays`` in their longest form, with axes as keys.

    Args:
        sizes: The length of each axis.
        sample: The axes of samples.
        windows: By field and axis.
        tile: The size of tiles by axis.
        stride: By axis; "random"; or ``None``.
        pad: The value beyond.
    """

    sizes: Mapping[Any, int]
    sample: tuple[Any, ...] = (0,)
    windows: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    tile: Mapping[Any, int] = field(default_factory=dict)
    stride: Any = None
    pad: float | None = None

    def arguments(self) -> dict[str, Any]:
        return {
            "sample": self.sample,
            "window": {name: dict(by_axis) for name, by_axis in self.windows.items()} or None,
            "tile": dict(self.tile) or None,
            "stride": self.stride,
            "pad": self.pad,
        }

    def positions(self) -> set[tuple[int, ...]]:
        """Where samples begin, along the axes of samples and tiles."""
        along = []
        for axis in (*self.sample, *self.tile):
            size, offsets = self.sizes[axis], [0]
            if axis in self.tile:
                if self.stride == "random":
                    along.append([-1])
                    continue
                step = (self.stride or {}).get(axis, self.tile[axis])
                along.append(range(0, size if self.pad is not None else size - self.tile[axis] + 1, step))
                continue
            for by_axis in self.windows.values():
                given = by_axis.get(axis, 0)
                offsets += [given] if isinstance(given, int) else list(given)
            whole = range(-min(offsets), size - max(offsets))
            along.append(range(size) if self.pad is not None else whole)
        return set(itertools.product(*along))

    def of(self, name: str, values: Any, axes: Sequence[Any], position: Mapping[Any, int]) -> Any:
        """What a sample has of a field whose axes have these names."""
        wanted, dropped = [], []
        for number, (axis, size) in enumerate(zip(axes, values.shape, strict=True)):
            offsets: Any = range(self.tile.get(axis, size))
            if axis in self.sample:
                given = self.windows.get(name, {}).get(axis)
                offsets = [given or 0] if given is None or isinstance(given, int) else given
                if given is None or isinstance(given, int):
                    dropped.append(number)
            wanted.append(np.array(offsets) + (position[axis] if axis in position else 0))
        inside = [(each >= 0) & (each < size) for each, size in zip(wanted, values.shape, strict=True)]
        out = np.full([len(each) for each in wanted], 0 if self.pad is None else self.pad, values.dtype)
        out[np.ix_(*inside)] = values[np.ix_(*[each[mask] for each, mask in zip(wanted, inside, strict=True)])]
        return out.squeeze(tuple(dropped))

    def places(self) -> Any:
        """An array whose values tell the place: the field "at"."""
        return np.arange(np.prod(list(self.sizes.values()))).reshape(*self.sizes.values())


def samples_of(batches: Any) -> Iterator[dict[str, Any]]:
    for batch in batches:
        arrays = {name: tensor.cpu().numpy() for name, tensor in batch.items()}
        for at in range(len(next(iter(arrays.values())))):
            yield {name: values[at] for name, values in arrays.items()}


def check_epoch(
    asked: Asked, given: Mapping[str, Any], values: Mapping[str, Any], axes: Any = None, **arguments: Any
) -> None:
    """An epoch has each sample once, and all of them equal those of NumPy; axes are numbers unless they are named."""
    source = aiofeed.Arrays({"at": asked.places(), **given}, **asked.arguments(), **arguments.pop("arrays", {}))
    with aiofeed.Feeder(source, **{"batch_size": 5, "seed": 1, **arguments}) as feeder:
        samples = list(samples_of(feeder))
    found = []
    for number, sample in enumerate(samples):
        first = np.unravel_index(int(np.asarray(sample["at"]).reshape(-1)[0]), tuple(asked.sizes.values()))
        position = {
            axis: int(first[list(asked.sizes).index(axis)]) for axis in (*asked.sample, *asked.tile)
        }
        found.append(tuple(-1 if asked.stride == "random" and axis in asked.tile else position[axis] for axis in position))
        if not arguments.get("shuffle") and asked.stride != "random":
            assert source.position(number) == position
        for name, array in values.items():
            of_axes = (axes or {}).get(name) or range(array.ndim)
            assert_same(sample[name], asked.of(name, array, of_axes, position))
    assert len(found) == len(source)
    assert sorted(found) == sorted(asked.positions())


@st.composite
def selections(draw: Any, fields: Sequence[str] = ("x",), most_axes: int = 3, largest: int = 9) -> Asked:
    """Sizes of axes, and samples of them."""
    count = draw(st.integers(1, most_axes))
    sizes = {axis: draw(st.integers(1, largest)) for axis in range(count)}
    sample = tuple(draw(st.permutations(range(count)))[: draw(st.integers(1, count))])
    pad = draw(st.sampled_from([None, 0.0]))
    windows: dict[str, dict[int, Any]] = {}
    lows, highs = dict.fromkeys(sample, 0), dict.fromkeys(sample, 0)
    for axis in sample:
        room = sizes[axis] - 1 if pad is None else 6
        lows[axis] = -draw(st.integers(0, room))
        highs[axis] = draw(st.integers(0, room + lows[axis] if pad is None else room))
    for name in fields:
        for axis in sample:
            offset = st.integers(lows[axis], highs[axis])
            ranges = st.tuples(offset, offset).map(lambda ends: range(min(ends), max(ends) + 1))
            window = draw(st.one_of(st.none(), offset, ranges, st.lists(offset, min_size=1, max_size=4)))
            if window is not None:
                windows.setdefault(name, {})[axis] = window
    tiled = [axis for axis in sizes if axis not in sample and draw(st.booleans())]
    tile = {axis: draw(st.integers(1, sizes[axis] if pad is None else sizes[axis] + 2)) for axis in tiled}
    stride: Any = draw(st.sampled_from([None, "each", "random"])) if tile else None
    if stride == "each":
        stride = {axis: draw(st.integers(1, 4)) for axis in tiled if draw(st.booleans())}
    return Asked(sizes, sample, windows, tile, stride, pad)
