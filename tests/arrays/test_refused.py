"""What ``Arrays`` cannot read: an error that names the file or the argument, and says the way out."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed

zarr = pytest.importorskip("zarr", minversion="3")
h5py = pytest.importorskip("h5py")

X = np.arange(24.0).reshape(6, 4)


def hdf5(folder: Path, write: Callable[[Any], Any], name: str = "f.h5") -> str:
    with h5py.File(folder / name, "w") as file:
        write(file)
    return f"{folder / name}::x"


def with_filter(number: int, file: Any) -> None:
    """A data set of a filter, whose chunks are never written."""
    known = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    known.set_chunk((2, 4))
    known.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (0,) * 8)
    h5py.h5d.create(file.id, b"x", h5py.h5t.py_create(X.dtype), h5py.h5s.create_simple(X.shape), known)


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout(shape=(6, 4), dtype="f8")
    layout[...] = h5py.VirtualSource("other.h5", "y", shape=(6, 4))
    file.create_virtual_dataset("x", layout)


def zarr_of(folder: Path, values: Any, **options: Any) -> str:
    path = folder / f"a{len(list(folder.iterdir()))}.zarr" / "x"
    options = {"chunks": (2, *values.shape[1:]), **options}
    zarr.create_array(path, shape=values.shape, dtype=values.dtype, **options)[...] = values
    return str(path)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "szip": (lambda folder: hdf5(folder, lambda file: with_filter(4, file)), r"f\.h5::x.*szip"),
    "nbit": (lambda folder: hdf5(folder, lambda file: with_filter(5, file)), r"f\.h5::x.*nbit"),
    "scale-offset": (
        lambda folder: hdf5(folder, lambda file: file.create_dataset("x", data=X.astype(int), scaleoffset=4)),
        r"f\.h5::x.*scale-offset",
    ),
    "bitshuffle": (lambda folder: hdf5(folder, lambda file: with_filter(32008, file)), r"f\.h5::x.*32008"),
    "another filter": (lambda folder: hdf5(folder, lambda file: with_filter(32026, file)), r"f\.h5::x.*32026"),
    "virtual": (lambda folder: hdf5(folder, virtual), r"f\.h5::x is a view of other files: pass a list"),
    "external": (
        lambda folder: hdf5(
            folder, lambda file: file.create_dataset("x", data=X, external=[(str(folder / "x.raw"), 0, 192)])
        ),
        r"f\.h5::x is a view of other files: pass a list",
    ),
    "HDF5, texts": (lambda folder: hdf5(folder, lambda file: file.create_dataset("x", data=["a", "b"])), "texts"),
    "HDF5, bytes": (
        lambda folder: hdf5(folder, lambda file: file.create_dataset("x", data=np.array([b"a", b"b"]))), "texts|dtype"
    ),
    "HDF5, compound": (
        lambda folder: hdf5(folder, lambda file: file.create_dataset("x", data=np.zeros(4, "i4,f4"))),
        r"f\.h5::x.*of which torch has no tensors",
    ),
    "HDF5, lists": (
        lambda folder: hdf5(folder, lambda file: file.create_dataset("x", (3,), h5py.vlen_dtype("i4"))),
        r"f\.h5::x.*of which torch has no tensors",
    ),
    "HDF5, references": (
        lambda folder: hdf5(folder, lambda file: file.create_dataset("x", (3,), h5py.ref_dtype)),
        r"f\.h5::x.*of which torch has no tensors",
    ),
    "HDF5, without values": (
        lambda folder: hdf5(folder, lambda file: file.create_dataset("x", data=h5py.Empty("f4"))), r"f\.h5::x"
    ),
    "HDF5, no rows": (
        lambda folder: hdf5(folder, lambda file: file.create_dataset("x", (0, 4), "f4", maxshape=(None, 4))),
        r"f\.h5::x.*no values",
    ),
    "HDF5, no columns": (
        lambda folder: hdf5(folder, lambda file: file.create_dataset("x", (4, 0), "f4")), r"f\.h5::x.*no values"
    ),
    "HDF5, another name": (
        lambda folder: hdf5(folder, lambda file: file.create_dataset("temperature", data=X)), r"f\.h5.*temperature"
    ),
    "HDF5, several": (
        lambda folder: hdf5(folder, lambda file: file.update({"a": X, "b": X}))[:-3],
        r"f\.h5.*name one of its arrays.*'a'",
    ),
    "HDF5, a group": (
        lambda folder: hdf5(folder, lambda file: file.create_group("x")), r"f\.h5::x is a group: name an array in it"
    ),
    "HDF5, a broken link": (
        lambda folder: hdf5(folder, lambda file: file.update({"x": h5py.SoftLink("/gone")})), r"f\.h5.*no 'x'"
    ),
    "no HDF5": (lambda folder: write(folder / "f.h5", b"no HDF5 at all" * 99), r"f\.h5.*no HDF5 file"),
    "a NumPy file": (lambda folder: write(folder / "f.npy", b"\x93NUMPY\x01\x00"), r"f\.npy is a NumPy file: pass"),
    "an empty HDF5": (lambda folder: write(folder / "f.h5", b""), r"f\.h5"),
    "Zarr, a group": (lambda folder: str(Path(zarr_of(folder, X)).parent), r"a0\.zarr"),
    "Zarr, texts": (lambda folder: zarr_of(folder, np.array(["a", "bc"], "U2")), r"a0\.zarr/x.*no tensors"),
    "Zarr, compound": (
        lambda folder: zarr_of(folder, np.zeros(4, "i4,f4"), zarr_format=2), r"a0\.zarr/x.*no tensors"
    ),
    "Zarr, dates": (lambda folder: zarr_of(folder, np.zeros(4, "M8[s]")), r"a0\.zarr/x.*no tensors"),
    "Zarr, no rows": (lambda folder: zarr_of(folder, np.zeros((0, 4)), chunks=(1, 4)), r"a0\.zarr/x.*no values"),
    "Zarr, no array": (lambda folder: str(folder), "is no Zarr array"),
    "Zarr, text": (lambda folder: str(write(folder / "x" / "zarr.json", b"hello").parent), r"x/zarr\.json"),
    "Zarr, a list": (lambda folder: str(write(folder / "x" / "zarr.json", b"[1]").parent), r"x/zarr\.json"),
    "Zarr, half": (lambda folder: str(write(folder / "x" / ".zarray", b'{"shape": [4], "chu').parent), r"x/\.zarray"),
    "Zarr, little": (
        lambda folder: str(write(folder / "x" / ".zarray", b'{"shape": [4], "zarr_format": 2}').parent), r"/x"
    ),
    "dtypes": (
        lambda folder: [zarr_of(folder, X), zarr_of(folder, X.astype("f4"))], r"a1\.zarr/x has the dtype float32"
    ),
    "shapes": (lambda folder: [zarr_of(folder, X), zarr_of(folder, X[:, :3])], r"a1\.zarr/x .*3.*a0\.zarr/x .*4"),
    "axes": (lambda folder: [zarr_of(folder, X), zarr_of(folder, X[:, 0])], r"a1\.zarr/x"),
    "an empty list": (lambda folder: [], "'x' is a list without arrays"),
}  # fmt: skip


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.filterwarnings(
    "ignore::zarr.errors.UnstableSpecificationWarning", "ignore:.*does not have a Zarr V3:UserWarning"
)
@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    """A file that cannot be read is named when the source is made."""
    make, message = FILES[name]
    given = make(tmp_path)
    with pytest.raises(ValueError, match=message):
        aiofeed.Arrays({"x": given})


MISSING = ["absent.h5::x", "absent.zarr/x", "absent-*.zarr", "absent-*.nc::x", "absent-{0..1}.h5::x"]


@pytest.mark.parametrize("name", MISSING)
def test_missing_files(name: str, tmp_path: Path) -> None:
    """A file that does not exist, and a pattern without a match, are named."""
    with pytest.raises(FileNotFoundError, match="absent"):
        aiofeed.Arrays({"x": str(tmp_path / name)})


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no dict": ({"arrays": "x.zarr"}, TypeError, r"takes a dict of arrays.*got str"),
    "an empty dict": ({"arrays": {}}, TypeError, "takes a dict of arrays"),
    "no array": ({"arrays": {"x": 5}}, TypeError, r"takes paths, URLs and arrays of .*not .*int"),
    "a list": ({"arrays": {"x": [[1, 2]]}}, TypeError, r"takes paths, URLs and arrays of .*not .*list"),
    "sparse": ({"sparse": "coo"}, ValueError, r"sparse=.*'dense' and 'csr', got 'coo'"),
    "stride": ({"tile": {1: 2}, "stride": "shuffled"}, ValueError, r"stride=.*'random', got 'shuffled'"),
    "a stride of 0": ({"tile": {1: 2}, "stride": {1: 0}}, ValueError, r"stride=.*1 or more along 1, got 0"),
    "a tile of 0": ({"tile": {1: 0}}, ValueError, r"tile=.*1 or more, got 0"),
    "a large tile": ({"tile": {1: 5}}, ValueError, "along 1 there are 4 positions, and a sample needs 5"),
    "a large random tile": (
        {"tile": {1: 5}, "stride": "random"}, ValueError, "along 1 there are 4 positions, and a sample needs 5"
    ),
    "a long window": ({"window": range(7)}, ValueError, "along 0 there are 6 positions, and a sample needs 7"),
    "an empty window": ({"window": []}, TypeError, r"window=.*'x' has \[\]"),
    "a text": ({"window": "abc"}, TypeError, r"window=.*'x' has 'abc'"),
    "floats": ({"window": [0.5]}, TypeError, r"window=.*'x' has \[0\.5\]"),
    "another field": ({"window": {"z": [0]}}, ValueError, r"window=.*names \['z'\].*\['x'\]"),
    "another axis in the window": ({"window": {"x": {1: [0]}}}, ValueError, "1"),
    "an axis of no array": ({"sample": 2}, ValueError, "no array has the axis 2"),
    "a tile of no array": ({"tile": {3: 1}}, ValueError, "no array has the axis 3"),
    "a negative axis": ({"sample": -1}, ValueError, "-1"),
    "a sample axis as a tile": ({"tile": {0: 2}}, ValueError, "0"),
    "the same axis twice": ({"sample": (0, 0)}, ValueError, "0"),
    "no axis": ({"sample": ()}, ValueError, "sample"),
    "a name without names": ({"sample": "time"}, ValueError, "has no names of axes: give numbers in place of 'time'"),
    "a stride without a tile": ({"stride": {1: 2}}, ValueError, "stride"),
    "random without a tile": ({"stride": "random"}, ValueError, "stride"),
    "the stride of another axis": ({"tile": {1: 2}, "stride": {0: 2}}, ValueError, "stride"),
    "a pad as text": ({"pad": "zero"}, (TypeError, ValueError), "pad"),
    "a pad that the dtype lacks": (
        {"pad": float("nan"), "arrays": {"x": np.arange(6)}}, ValueError, "pad"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    """A wrong argument is named when the source is made, with what is allowed."""
    arguments, kind, message = ARGUMENTS[name]
    with pytest.raises(kind, match=message):
        aiofeed.Arrays(**{"arrays": {"x": X}, **arguments})


def test_fields_of_different_lengths() -> None:
    """Along an axis of samples, the fields agree."""
    with pytest.raises(ValueError, match=r"along 0 'y' has 5 positions, others 6"):
        aiofeed.Arrays({"x": X, "y": X[:5]})


def test_random_tiles_are_those_of_an_epoch() -> None:
    """No cache keeps them, and a sample that is read alone has no place."""
    source = aiofeed.Arrays({"x": X}, tile={1: 2}, stride="random")
    with pytest.raises(ValueError, match="random tiles are others in each epoch"):
        asyncio.run(source.read_many([0]))
    with (
        aiofeed.Feeder(source, decode=dict, batch_size=2, cache="host") as feeder,
        pytest.raises(aiofeed.FeedError, match="random tiles are others in each epoch: no cache can keep them"),
    ):
        list(feeder)


@pytest.mark.parametrize("package", ["h5py", "imagecodecs", "numcodecs", "zarr"])
def test_packages_that_are_missing(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    find, saved = (
        importlib.util.find_spec,
        {name: each for name, each in sys.modules.items() if "aiofeed.arrays" in name},
    )
    for name in saved:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == package else find(name, *more))
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "aiofeed\[arrays\]"'):
        importlib.import_module("aiofeed.arrays.arrays")
