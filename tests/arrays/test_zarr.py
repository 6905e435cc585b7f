"""``Arrays`` of Zarr: every dtype, codec, order and border equals what zarr reads, bit by bit."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arrays import DTYPES, Asked, check_epoch, numbers, selections

zarr = pytest.importorskip("zarr", minversion="3")
numcodecs = pytest.importorskip("numcodecs")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Numcodecs codecs are not in the Zarr:UserWarning", "ignore::zarr.errors.UnstableSpecificationWarning"
)

ORDERS = (False, True, "window:2")


def compressors_v3() -> Any:
    """Compressors of Zarr's version 3."""
    from zarr import codecs

    blosc = st.builds(
        codecs.BloscCodec,
        cname=st.sampled_from(["lz4", "lz4hc", "blosclz", "zstd", "zlib"]),
        clevel=st.integers(0, 9),
        shuffle=st.sampled_from(["noshuffle", "shuffle", "bitshuffle"]),
    )
    zstd = st.builds(codecs.ZstdCodec, level=st.integers(0, 5), checksum=st.booleans())
    gzip = st.builds(codecs.GzipCodec, level=st.integers(0, 9))
    plain = st.lists(st.one_of(blosc, zstd, gzip, st.just(codecs.Crc32cCodec())), max_size=2)
    return plain


def compressors_v2() -> Any:
    """Compressors of Zarr's version 2."""
    blosc = st.builds(
        numcodecs.Blosc,
        cname=st.sampled_from(["lz4", "lz4hc", "blosclz", "zstd", "zlib"]),
        clevel=st.integers(0, 9),
        shuffle=st.sampled_from([numcodecs.Blosc.NOSHUFFLE, numcodecs.Blosc.SHUFFLE, numcodecs.Blosc.BITSHUFFLE]),
    )
    others = [numcodecs.BZ2(), numcodecs.GZip(), numcodecs.LZ4(), numcodecs.LZMA(), numcodecs.Zlib(), numcodecs.Zstd()]
    return st.one_of(blosc, st.sampled_from([None, *others]))


@st.composite
def layouts(draw: Any, axes: int) -> dict[str, Any]:
    """Arguments of ``zarr.create_array`` but for the shape."""
    chunks = tuple(draw(st.integers(1, 5)) for _ in range(axes))
    dtype = draw(st.sampled_from(DTYPES))
    known: dict[str, Any] = {"chunks": chunks, "dtype": dtype, "fill_value": draw(st.sampled_from([0, 1]))}
    if draw(st.booleans()):
        filters = st.sampled_from([None, [numcodecs.Shuffle(np.dtype(dtype).itemsize)]])
        order = draw(st.sampled_from("CF"))
        return {**known, "zarr_format": 2, "compressors": draw(compressors_v2()), "filters": draw(filters), "order": order}
    if draw(st.booleans()):
        known["shards"] = tuple(chunk * draw(st.integers(1, 3)) for chunk in chunks)
        known["shards"] = {"shape": known["shards"], "index_location": draw(st.sampled_from(["start", "end"]))}
    order = draw(st.permutations(range(axes)))
    if order != list(range(axes)) and draw(st.booleans()):
        known["filters"] = [zarr.codecs.TransposeCodec(order=order)]
    separator = draw(st.sampled_from(["/", "."]))
    return {
        **known,
        "zarr_format": 3,
        "compressors": draw(compressors_v3()),
        "chunk_key_encoding": {"name": draw(st.sampled_from(["default", "v2"])), "separator": separator},
    }


def write(path: Path, values: Any, layout: dict[str, Any], holes: Any = ()) -> Any:
    """Write values, but for chunks along the first axis with these numbers; returns what zarr reads."""
    array = zarr.create_array(path, shape=values.shape, **layout)
    size = layout["chunks"][0]
    for at in range(0, len(values), size):
        if at // size not in holes:
            array[at : at + size] = values[at : at + size]
    return zarr.open_array(path, mode="r")[...]


@settings(max_examples=100)
@given(st.data())
def test_windows_equal_zarr(data: Any) -> None:
    """Whatever the window, the layout, the missing chunks and the order."""
    asked: Asked = data.draw(selections(["x", "y"]))
    with tempfile.TemporaryDirectory() as folder:
        given_arrays, values = {}, {}
        for name in ("x", "y"):
            least = max([0, *asked.windows.get(name, ())])
            axes = data.draw(st.integers(least + 1, len(asked.sizes)))
            shape = [*list(asked.sizes.values())[:axes]]
            layout = data.draw(layouts(axes))
            holes = data.draw(st.sets(st.integers(0, 9), max_size=3))
            values[name] = write(Path(folder, name), numbers(shape, layout["dtype"]), layout, holes)
            given_arrays[name] = str(Path(folder, name))
        check_epoch(asked, given_arrays, values, shuffle=data.draw(st.sampled_from(ORDERS)))
