"""``Arrays`` of Zarr: every dtype, codec, order and border equals what zarr reads, bit by bit."""

from __future__ import annotations

import lzma
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arrays import DTYPES, Asked, check_epoch, numbers, selections
from tests.support.examples import examples

zarr = pytest.importorskip("zarr", minversion="3")
numcodecs = pytest.importorskip("numcodecs")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Numcodecs codecs are not in the Zarr:UserWarning",
    "ignore::zarr.errors.UnstableSpecificationWarning",
    "ignore:Combining a `sharding_indexed` codec:UserWarning",
)

ORDERS = (False, True, "window:2")
RAW_LZMA = numcodecs.LZMA(
    format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_DELTA, "dist": 4}, {"id": lzma.FILTER_LZMA2}]
)


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
    others = [
        numcodecs.BZ2(),
        numcodecs.GZip(),
        numcodecs.LZ4(),
        numcodecs.LZMA(),
        RAW_LZMA,
        numcodecs.Zlib(),
        numcodecs.Zstd(),
    ]
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
        return {
            **known,
            "zarr_format": 2,
            "compressors": draw(compressors_v2()),
            "filters": draw(filters),
            "order": order,
        }
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


@settings(max_examples=examples(15))
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


# --- codecs and layouts -----------------------------------------------------------------------------------------------

VALUES = np.arange(60, dtype="<f4").reshape(20, 3)
OLD: dict[str, dict[str, Any]] = {
    "adler32": {"filters": [numcodecs.Adler32()]},
    "astype": {"filters": [numcodecs.AsType("f8", "f4")]},
    "bitround": {"filters": [numcodecs.BitRound(5)]},
    "crc32": {"filters": [numcodecs.CRC32()]},
    "crc32c": {"filters": [numcodecs.CRC32C()]},
    "delta": {"filters": [numcodecs.Delta("f4")]},
    "delta, shuffle": {"filters": [numcodecs.Delta("f4"), numcodecs.Shuffle(4)]},
    "fixed scale": {"filters": [numcodecs.FixedScaleOffset(offset=7, scale=2, dtype="f4", astype="u1")]},
    "fletcher32": {"filters": [numcodecs.Fletcher32()]},
    "jenkins": {"filters": [numcodecs.JenkinsLookup3()]},
    "packed bits": {"dtype": "?", "filters": [numcodecs.PackBits()]},
    "quantize": {"filters": [numcodecs.Quantize(1, "f4")]},
    "shuffle as compressor": {"compressors": numcodecs.Shuffle(4)},
    "separator": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "columns": {"order": "F", "filters": [numcodecs.Delta("f4")]},
}
NEW: dict[str, Callable[[Any], dict[str, Any]]] = {
    "blosc": lambda codecs: {"compressors": [codecs.Blosc()]},
    "bz2": lambda codecs: {"compressors": [codecs.BZ2()]},
    "lz4": lambda codecs: {"compressors": [codecs.LZ4()]},
    "lzma": lambda codecs: {"compressors": [codecs.LZMA()]},
    "zlib": lambda codecs: {"compressors": [codecs.Zlib()]},
    "zstd": lambda codecs: {"compressors": [codecs.Zstd()]},
    "shuffle": lambda codecs: {"compressors": [codecs.Shuffle(elementsize=4), codecs.Zlib()]},
    "delta": lambda codecs: {"filters": [codecs.Delta(dtype="float32")]},
    "crc32": lambda codecs: {"compressors": [codecs.CRC32()]},
    "fletcher32": lambda codecs: {"compressors": [codecs.Fletcher32()]},
    "bitround": lambda codecs: {"filters": [codecs.BitRound(keepbits=5)]},
    "fixed scale": lambda codecs: {
        "filters": [codecs.FixedScaleOffset(offset=7, scale=2, dtype="float32", astype="uint8")]
    },
    "a shard of a foreign codec": lambda codecs: {"shards": (8, 3), "compressors": [codecs.LZ4()]},
    "a shard of shards": lambda codecs: {
        "chunks": (8, 3),
        "serializer": zarr.codecs.ShardingCodec(
            chunk_shape=(4, 3), codecs=[zarr.codecs.ShardingCodec(chunk_shape=(2, 3)), zarr.codecs.GzipCodec()]
        ),
    },
    "a shard without checksum": lambda codecs: {
        "chunks": (8, 3),
        "serializer": zarr.codecs.ShardingCodec(chunk_shape=(2, 1), index_codecs=[zarr.codecs.BytesCodec()]),
        "compressors": None,
    },
    "a transposed shard": lambda codecs: {
        "chunks": (6, 6),
        "filters": [zarr.codecs.TransposeCodec(order=(1, 0))],
        "serializer": zarr.codecs.ShardingCodec(chunk_shape=(3, 2)),
        "compressors": None,
    },
    "a compressed shard": lambda codecs: {
        "chunks": (8, 3),
        "serializer": zarr.codecs.ShardingCodec(chunk_shape=(2, 1)),
        "compressors": [zarr.codecs.GzipCodec()],
    },
    "transposed in a shard": lambda codecs: {
        "shards": (8, 3), "filters": [zarr.codecs.TransposeCodec(order=(1, 0))]
    },
    "big endian": lambda codecs: {"serializer": zarr.codecs.BytesCodec(endian="big")},
    "transposed twice": lambda codecs: {
        "dtype": "i4", "shape": (20, 3, 2), "chunks": (4, 2, 1),
        "filters": [zarr.codecs.TransposeCodec(order=(1, 2, 0)), zarr.codecs.TransposeCodec(order=(1, 0, 2))],
    },
}  # fmt: skip


def check(path: Path, version: int, options: dict[str, Any]) -> None:
    """Write two thirds of the rows; an epoch has what zarr reads."""
    options = {"chunks": (4, 3), "dtype": "<f4", "shape": VALUES.shape, "zarr_format": version, **options}
    array = zarr.create_array(path, **options)
    values = np.resize(VALUES, options["shape"]).astype(options["dtype"])
    array[:7], array[14:] = values[:7], values[14:]
    expected = zarr.open_array(path, mode="r")[...]
    axes = dict(enumerate(expected.shape))
    check_epoch(Asked(axes, windows={"x": {0: range(-2, 1)}}), {"x": str(path)}, {"x": expected}, shuffle=True)


@pytest.mark.parametrize("name", OLD)
def test_codecs_of_version_2(name: str, tmp_path: Path) -> None:
    """All of numcodecs, also those that lose some bits."""
    check(tmp_path / "x", 2, OLD[name])


@pytest.mark.parametrize("name", NEW)
def test_codecs_of_version_3(name: str, tmp_path: Path) -> None:
    """Those of zarr and of numcodecs, and shards in every place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = NEW[name](zarr.codecs.numcodecs)
    check(tmp_path / "x", 3, options)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("f4", np.nan), ("f8", -np.inf), ("f2", 1.5), ("c8", 1 - 2j), ("i8", -(2**63)), ("u8", 2**64 - 1), ("?", True)],
)
def test_fill_values(version: int, dtype: str, fill: Any, tmp_path: Path) -> None:
    """Of chunks that are not stored, bit by bit."""
    zarr.create_array(tmp_path / "x", shape=(5, 2), chunks=(2, 2), dtype=dtype, fill_value=fill, zarr_format=version)
    expected = zarr.open_array(tmp_path / "x", mode="r")[...]
    check_epoch(Asked({0: 5, 1: 2}), {"x": str(tmp_path / "x")}, {"x": expected}, arrays={"decode_cf": False})


def test_a_version_2_array_without_a_fill_value(tmp_path: Path) -> None:
    """Has zeros, as zarr has."""
    zarr.create_array(tmp_path / "x", shape=(5,), chunks=(2,), dtype="f4", fill_value=None, zarr_format=2)[:2] = 3
    expected = zarr.open_array(tmp_path / "x", mode="r")[...]
    check_epoch(Asked({0: 5}), {"x": str(tmp_path / "x")}, {"x": expected})
