"""``Arrays`` of HDF5: every dtype, filter, layout and border equals what h5py reads, bit by bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiofeed
from tests.support.arrays import Asked, check_epoch, numbers, selections
from tests.support.examples import examples
from tests.support.hdf5_files import layouts

h5py = pytest.importorskip("h5py")

ORDERS = (False, True, "window:2")


@settings(max_examples=examples(25), report_multiple_bugs=False)
@given(st.data())
def test_windows_equal_h5py(data: Any) -> None:
    """Whatever the window, the layout, the filters, the missing chunks and the order."""
    asked: Asked = data.draw(selections(["x", "y"]))
    with tempfile.TemporaryDirectory() as folder:
        given_arrays, values, path = {}, {}, Path(folder, "f.h5")
        block, version = data.draw(st.sampled_from([0, 512])), data.draw(st.sampled_from([None, "latest"]))
        with h5py.File(path, "w", userblock_size=block, libver=version) as file:
            group = file.create_group("g")
            for name in ("x", "y"):
                least = max([0, *asked.windows.get(name, ())])
                axes = data.draw(st.integers(least + 1, len(asked.sizes)))
                shape = [*list(asked.sizes.values())[:axes]]
                layout = data.draw(layouts(shape))
                values[name] = layout.write(group, name, numbers(shape, layout.dtype))
                given_arrays[name] = f"{path}::g/{name}"
        check_epoch(asked, given_arrays, values, shuffle=data.draw(st.sampled_from(ORDERS)))


# --- what else a file may have ----------------------------------------------------------------------------------------

X = np.arange(60, dtype="i4").reshape(20, 3)


def check(path: Path, name: str = "x", **arguments: Any) -> None:
    """An epoch has what h5py reads."""
    with h5py.File(path) as file:
        expected = file[name][...]
    asked = Asked(dict(enumerate(expected.shape)), windows={"x": {0: range(-2, 1)}})
    check_epoch(asked, {"x": f"{path}::{name}"}, {"x": expected}, shuffle=True, **arguments)


@pytest.mark.parametrize("chunks", [None, (3, 2)])
def test_a_data_set_without_a_fill_value(chunks: Any, tmp_path: Path) -> None:
    """As PyTables and MPI codes write them: what is not stored is 0, as of h5py."""
    import ctypes

    maps = Path("/proc/self/maps").read_text().splitlines()
    libraries = [line.split(maxsplit=5)[5] for line in maps if "libhdf5-" in line]
    if not libraries:
        pytest.skip("the library of HDF5 is not found")
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    undefine = ctypes.CDLL(libraries[0]).H5Pset_fill_value
    undefine.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    assert undefine(properties.id, h5py.h5t.STD_I32LE.id, None) >= 0
    if chunks:
        properties.set_chunk(chunks)
    with h5py.File(path := tmp_path / "f.h5", "w") as file:
        space = h5py.h5s.create_simple(X.shape)
        h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, space, properties)
        file["x"][4 if chunks else 0 :] = X[4 if chunks else 0 :]
    check(path)


@pytest.mark.parametrize("kind", ["STD_B8LE", "STD_B16BE", "STD_B32LE", "STD_B64BE"])
def test_bit_fields(kind: str, tmp_path: Path) -> None:
    """As PyTables writes bools; h5py reads unsigned integers."""
    stored = getattr(h5py.h5t, kind)
    with h5py.File(path := tmp_path / "f.h5", "w") as file:
        data = h5py.h5d.create(file.id, b"x", stored, h5py.h5s.create_simple(X.shape))
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, X.astype(stored.dtype) % 2, mtype=stored)
    check(path)


@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_a_data_set_that_was_resized(version: str, tmp_path: Path) -> None:
    """Smaller, and larger again."""
    for kind, sizes in {"smaller": [7], "larger": [31], "both": [5, 23]}.items():
        with h5py.File(path := tmp_path / f"{kind}.h5", "w", libver=version) as file:
            data = file.create_dataset("x", data=X, chunks=(4, 2), maxshape=(None, None), fillvalue=-1)
            for size in sizes:
                data.resize(size, 0)
        check(path)


def test_links_and_groups(tmp_path: Path) -> None:
    """A soft link, and a name with dots, blanks and other letters, in groups."""
    with h5py.File(path := tmp_path / "f.h5", "w", track_order=True) as file:
        file["a/b c/größe.x"] = X
        file["soft"] = h5py.SoftLink("/a/b c/größe.x")
        file["hard"] = file["a/b c/größe.x"]
    for name in ("a/b c/größe.x", "/a/b c/größe.x", "soft", "hard"):
        check(path, name)


def test_the_only_array_needs_no_name(tmp_path: Path) -> None:
    """Whatever the ending of the file's name is, with two colons."""
    with h5py.File(tmp_path / "f.dat", "w") as file:
        file["group/x"] = X
    (tmp_path / "f.h5").write_bytes((tmp_path / "f.dat").read_bytes())
    for path in (f"{tmp_path}/f.h5", tmp_path / "f.h5", f"{tmp_path}/f.dat::", f"{tmp_path}/f.dat::group/x"):
        check_epoch(Asked({0: 20, 1: 3}), {"x": path}, {"x": X})


@pytest.mark.parametrize("kind", ["enum", "bool", "complex"])
def test_types_that_h5py_makes(kind: str, tmp_path: Path) -> None:
    """Enumerations are integers, and complex numbers are pairs in the file."""
    dtype = {"enum": h5py.enum_dtype({"A": 0, "B": 1}, "u1"), "bool": "?", "complex": "c8"}[kind]
    with h5py.File(path := tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", data=(X % 2).astype("u1" if kind == "enum" else dtype), dtype=dtype, chunks=(3, 2))
    check(path)


def test_lists_of_a_fixed_length(tmp_path: Path) -> None:
    """They are one more axis, or refused by name."""
    with h5py.File(path := tmp_path / "f.h5", "w") as file:
        file.create_dataset("x", (4,), "(3,)f4", chunks=(2,))
    with pytest.raises(ValueError, match=r"f\.h5::x"):
        aiofeed.Arrays({"x": f"{path}::x"})
