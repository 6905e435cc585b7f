"""``DecodeNumpy``, ``DecodeTensor`` and ``DecodeJSON``."""

from __future__ import annotations

import io
import json
import pickle
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import pytest
import torch

from aiofeed import DecodeJSON, DecodeNumpy, DecodeTensor, DiskCache, Feeder, Files
from aiofeed.common import expanded
from aiofeed.errors import DecodeError

ARRAYS = {
    "float32": np.arange(12, dtype=np.float32).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "big-endian": np.arange(5, dtype=">i4"),
    "scalar": np.array(3.5),
    "empty": np.empty((0, 3), np.uint8),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "text": np.array(["ab", "c"]),
}


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def npz(compressed: bool = False, **arrays: Any) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


# --- DecodeNumpy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, (1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_npy(name: str, version: tuple[int, int] | None) -> None:
    """Every array keeps dtype, shape, order and values, and can be written to."""
    array = ARRAYS[name]
    for data in (npy(array, version), memoryview(npy(array, version)), npy(array, version) + b"more"):
        found = DecodeNumpy()(data)  # type: ignore[arg-type, unused-ignore]
        assert isinstance(found, np.ndarray)
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.flags.f_contiguous == array.flags.f_contiguous
        assert np.array_equal(found, array)
        assert found.flags.writeable


@pytest.mark.parametrize("compressed", [False, True])
def test_npz(compressed: bool) -> None:
    """A member is an array; without a name all are a dict."""
    data = npz(compressed, x=ARRAYS["float32"], y=ARRAYS["bool"])
    x = DecodeNumpy("x")(data)
    assert isinstance(x, np.ndarray)
    assert np.array_equal(x, ARRAYS["float32"])
    every = DecodeNumpy()(data)
    assert isinstance(every, dict)
    assert sorted(every) == ["x", "y"]
    assert every["y"].tolist() == [True, False]


PICKLES = np.array([print], dtype=object)
FLOATS = npy(ARRAYS["float32"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a .npy or .npz file: it begins with b''"),
        (b"\x89PNG....", "not a .npy or .npz file: it begins with b.*PNG"),
        (FLOATS[:-1], r"truncated: float32 \[3, 4\] needs 48 bytes, and it has 47"),
        (FLOATS[:6], "no .npy file of version 1 to 3, or it is truncated"),
        (FLOATS[:7], "the header of the .npy file is damaged"),
        (FLOATS[:6] + b"\4" + FLOATS[7:], "no .npy file of version 1 to 3"),
        (FLOATS.replace(b"(3, 4), }" + b" " * 30, b"(0, 1" + b"0" * 30 + b")} "), "header of the .npy file is damaged"),
        (FLOATS[:40], "header of the .npy file is damaged: EOF"),
        (FLOATS.replace(b"'shape'", b"'sheep'"), "header of the .npy file is damaged: .*sheep"),
        (FLOATS.replace(b"(3, 4)", b"(3, -)"), "header of the .npy file is damaged"),
        (FLOATS.replace(b"(3, 4)", b"(-3,4)"), r"header of the .npy file is damaged: its shape is \[-3, 4\]"),
        (FLOATS.replace(b"'<f4'", b"'<z9'"), "header of the .npy file is damaged"),
        (npz(x=ARRAYS["float32"])[:100], "truncated or damaged"),
        (npz(x=ARRAYS["float32"]).replace(b"\0\0\x80?", b"\0\1\x80?"), "truncated or damaged: Bad CRC"),
    ],
)
def test_damaged_arrays(data: bytes, message: str) -> None:
    """Damaged data are a ValueError that says what is wrong."""
    with pytest.raises(ValueError, match=message):
        DecodeNumpy()(data)


def test_pickles_are_never_loaded() -> None:
    """Python objects in .npy and .npz files are errors."""
    file = io.BytesIO()
    np.save(file, PICKLES, allow_pickle=True)
    with pytest.raises(ValueError, match="pickles"):
        DecodeNumpy()(file.getvalue())
    with pytest.raises(ValueError, match="Python objects, which are pickles"):
        DecodeNumpy()(npz(x=PICKLES))
    fields = np.array([(1, print)], [("a", int), ("b", object)])
    file = io.BytesIO()
    np.lib.format.write_array(file, fields, (3, 0))
    with pytest.raises(ValueError, match="Python objects, which are pickles"):
        DecodeNumpy()(file.getvalue())
    with pytest.raises(TypeError, match="never loaded"):
        DecodeNumpy(allow_pickle=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_a_header_claims_no_memory(version: tuple[int, int], packed: bool) -> None:
    """A header with a huge shape is refused without an allocation, whatever its version, and in a .npz file, too."""
    floats = npy(ARRAYS["float32"], version)
    data = floats.replace(b"(3, 4), }         ", b"(3000000000000,)} ")
    assert data != floats
    with pytest.raises(ValueError, match="needs 12000000000000 bytes"):
        DecodeNumpy("x" if packed else None)(zipped(x=data) if packed else data)


def test_fields_with_names_beyond_latin() -> None:
    """Names of fields that only version 3 can store are kept."""
    fields = np.array([(1, 2.5)], [("é", np.int64), ("数", np.float32)])
    file = io.BytesIO()
    np.lib.format.write_array(file, fields, (3, 0))
    for data in (file.getvalue(), zipped(x=file.getvalue())):
        found = DecodeNumpy()(data)
        found = found["x"] if isinstance(found, dict) else found
        assert found.dtype == fields.dtype
        assert found.tolist() == fields.tolist()
    with pytest.raises(ValueError, match="truncated"):
        DecodeNumpy()(file.getvalue()[:-1])


def zipped(method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    """A .npz file of the bytes of its members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as writer:
        for name, data in members.items():
            writer.writestr(f"{name}.npy", data)
    return file.getvalue()


def test_members_that_inflate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A .npz file that inflates to more than the limit is refused before it does; a part of it may be decoded."""
    monkeypatch.setattr(expanded, "EXPANDED_BYTES", 16 << 20)
    zeros = npy(np.zeros(9 << 20, np.uint8))
    bomb = zipped(x=zeros, y=zeros, z=npy(ARRAYS["float32"]))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"the .npz file claims 18\.0 MiB in memory, .* damaged, or made to"):
            DecodeNumpy()(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    z = DecodeNumpy("z")(bomb)
    assert isinstance(z, np.ndarray)
    assert np.array_equal(z, ARRAYS["float32"])


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_of_npz(method: int) -> None:
    """Compressions that numpy does not write, and Python unpacks without a limit, are refused."""
    with pytest.raises(ValueError, match=r"'x\.npy' of the .npz file is not compressed by numpy"):
        DecodeNumpy()(zipped(method, x=FLOATS))


def test_a_member_inflates_to_no_more_than_the_directory_says() -> None:
    """A directory that states a smaller size than the data have gives an error, and no more memory."""
    bomb = bytearray(zipped(x=npy(np.zeros(16 << 20, np.uint8))))
    at = bomb.index(b"PK\1\2")
    bomb[at + 24 : at + 28] = (1000).to_bytes(4, "little")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="truncated"):
            DecodeNumpy()(bytes(bomb))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "content"), [("meta.json", b"{}"), ("dir/", b""), ("y.npy", b"text")])
def test_members_that_are_no_arrays(name: str, content: bytes) -> None:
    """They are bytes, as of `np.load`; damaged headers and pickles beside them are errors."""
    for array, message in ((FLOATS, ""), (FLOATS[:40], "damaged"), (npy(PICKLES), "Python objects")):
        file = io.BytesIO(zipped(x=array))
        with zipfile.ZipFile(file, "a") as writer:
            writer.writestr(name, content)
        member = name.removesuffix(".npy")
        assert DecodeNumpy(member)(file.getvalue()) == content
        if message:
            with pytest.raises(ValueError, match=message):
                DecodeNumpy()(file.getvalue())
        else:
            found = DecodeNumpy()(file.getvalue())
            assert isinstance(found, dict)
            assert found[member] == content
            assert np.array_equal(found["x"], ARRAYS["float32"])


def test_members_of_npz() -> None:
    """A member that does not exist is an error that lists the others."""
    with pytest.raises(ValueError, match=r"no 'z'; it has \['x', 'y'\]"):
        DecodeNumpy("z")(npz(x=ARRAYS["bool"], y=ARRAYS["bool"]))


# --- DecodeTensor -----------------------------------------------------------------------------------------------------


def test_tensors() -> None:
    """Tensors keep dtype and values; a name chooses one."""
    save = pytest.importorskip("safetensors.torch").save
    tensors = {"x": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "y": torch.tensor([True])}
    found = DecodeTensor()(save(tensors))
    assert isinstance(found, dict)
    assert sorted(found) == ["x", "y"]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    y = DecodeTensor("y")(save(tensors))
    assert isinstance(y, torch.Tensor)
    assert y.tolist() == [True]
    with pytest.raises(ValueError, match=r"no 'z'; it has \['x', 'y'\]"):
        DecodeTensor("z")(save(tensors))


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_damaged_tensors(cut: int) -> None:
    """Truncated data are a ValueError."""
    save = pytest.importorskip("safetensors.torch").save
    with pytest.raises(ValueError, match="safetensors file is truncated or damaged"):
        DecodeTensor()(save({"x": torch.zeros(3)})[:cut])


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra, before any file is read."""
    from aiofeed.media import records

    records._safetensors.cache_clear()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"aiofeed\[safetensors\]"):
        DecodeTensor()


# --- DecodeJSON -------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: int
    label: str


class Sample(TypedDict):
    text: str
    score: float


def test_json() -> None:
    """JSON becomes Python values, or the type."""
    assert DecodeJSON()(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert DecodeJSON(Point)(b'[1, "ant"]') == Point(1, "ant")
    assert DecodeJSON(Sample)(json.dumps({"text": "a", "score": 1}).encode()) == {"text": "a", "score": 1.0}


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (None, b"{", "this is not JSON: "),
        (None, b"", "this is not JSON: "),
        (None, b"\xff", "this is not JSON: "),
        (None, b'"\xff"', "this is not JSON: "),
        (None, b"[" * 100_000, "this is not JSON: .*recursion"),
        (Point, b'["a", "b"]', r"not of the type .*Point.*Expected `int`, got `str` - at `\$\[0\]`"),
        (dict[str, int], b'{"a": "b"}', "Expected `int`, got `str`"),
    ],
)
def test_other_json(kind: Any, data: bytes, message: str) -> None:
    """Damaged JSON and JSON of another type are ValueErrors that name the place."""
    with pytest.raises(ValueError, match=message):
        DecodeJSON(kind)(data)


def test_an_unknown_type() -> None:
    """A type that msgspec does not know is an error when the decoder is made."""
    with pytest.raises(TypeError, match="3"):
        DecodeJSON(3)


# --- in a feeder ------------------------------------------------------------------------------------------------------

DECODERS: list[Any] = [DecodeNumpy(), DecodeNumpy("x"), DecodeJSON(), DecodeJSON(Point), DecodeJSON(dict[str, int])]


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
def test_copies_are_equal(decoder: Any) -> None:
    """A decoder that is pickled, as for a worker process, is equal."""
    assert pickle.loads(pickle.dumps(decoder)) == decoder


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
@pytest.mark.parametrize("data", ["text", 3, None, {"x": b""}])
def test_no_bytes(decoder: Any, data: Any) -> None:
    """Anything but bytes is a TypeError that names the decoder."""
    with pytest.raises(TypeError, match="takes the bytes of one file, got"):
        decoder(data)


@pytest.mark.parametrize("name", [1, b"x"])
def test_wrong_names(name: Any) -> None:
    """A name is text."""
    with pytest.raises(TypeError, match=r"DecodeNumpy\(member=\.\.\.\) must be a name"):
        DecodeNumpy(name)
    with pytest.raises(TypeError, match=r"DecodeTensor\(name=\.\.\.\) must be a name"):
        DecodeTensor(name)


@pytest.mark.parametrize("options", [{}, {"cache": "host"}, {"cache": "device"}, {"engine": "process:1"}, {"cache": 0}])
def test_arrays_in_a_feeder(options: dict[str, Any], tmp_path: Path) -> None:
    """Arrays of files are collated; a truncated file is skipped, and its error names it."""
    paths = []
    for number in range(6):
        paths.append(tmp_path / f"{number}.npy")
        paths[-1].write_bytes(npy(np.full((2, 3), number)))
    paths[3].write_bytes(paths[3].read_bytes()[:-8])
    if options == {"cache": 0}:
        options = {"cache": DiskCache(tmp_path / "cache")}
    with Feeder(Files(paths), decode=DecodeNumpy(), batch_size=2, on_error="skip", **options) as feeder:
        for _ in feeder.epochs(2):
            assert [batch[:, 0, 0].tolist() for batch in feeder] == [[0, 1], [2], [4, 5]]
        first = feeder.failures[0]
        assert first.key == str(paths[3])
        assert "truncated" in str(first.error)


def test_the_error_names_the_file(tmp_path: Path) -> None:
    """A damaged file is a DecodeError with its path."""
    path = tmp_path / "broken.json"
    path.write_text("{")
    feeder: Feeder[Any] = Feeder(Files([path]), decode=DecodeJSON(), batch_size=1)
    with pytest.raises(DecodeError, match=r"broken\.json.*this is not JSON"):
        next(iter(feeder))
