"""Files with random damage: never a crash, a hang, or an exception of another library."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

import aiofeed
from tests.support.arrays import numbers
from tests.support.hdf5_files import FLETCHER32, GZIP, SHUFFLE, ZSTD, write_packed

zarr = pytest.importorskip("zarr", minversion="3")
h5py = pytest.importorskip("h5py")

TIMES = 100


def write_hdf5(path: Path) -> dict[str, str]:
    """A small file of several layouts; returns its arrays."""
    values = numbers((6, 5), "<i4")
    with h5py.File(path, "w") as file:
        for name, filters in (("a", [SHUFFLE, GZIP]), ("b", [FLETCHER32, ZSTD]), ("c", [])):
            write_packed(file, name, values, (2, 3), filters)
        file["d"] = values
        file["a"].attrs["scale_factor"] = 0.5
        file["d"].attrs["_FillValue"] = np.int32(3)
    return {name: f"{path}::{name}" for name in "abcd"}


def write_zarr(folder: Path) -> dict[str, str]:
    """Small arrays of both versions; returns them."""
    values, known = numbers((6, 5), "<i4"), {"shape": (6, 5), "dtype": "<i4", "chunks": (2, 3)}
    zarr.create_array(folder / "a", **known, zarr_format=2)[...] = values
    zarr.create_array(folder / "b", **known, zarr_format=3, shards=(4, 3))[...] = values
    zarr.create_array(folder / "c", **known, compressors=None, attributes={"_FillValue": 3, "scale_factor": 0.5})[
        ...
    ] = values
    return {name: str(folder / name) for name in "abc"}


def read(arrays: dict[str, str]) -> None:
    """Read each array alone: it cannot be opened, or samples fail, or all is well."""
    for name, path in arrays.items():
        try:
            source = aiofeed.Arrays({name: path})
        except (ValueError, OSError, TypeError):
            continue
        with aiofeed.Feeder(source, batch_size=4, on_error=aiofeed.FailurePolicy("skip", max_failures=1.0)) as feeder:
            try:
                list(feeder)
            except aiofeed.FeedError:
                continue


def damage(data: bytes, chance: random.Random) -> bytes:
    """Flip, cut, or overwrite some bytes."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(len(changed))
        kind = chance.randrange(4)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at] = chance.choice([0, 1, 127, 255])
        elif kind == 2:
            changed[at : at + 4] = chance.randbytes(len(changed[at : at + 4]))
        elif chance.random() < 0.3:
            del changed[at + 1 :]
    return bytes(changed)


@pytest.mark.parametrize("seed", range(5))
def test_damaged_hdf5(seed: int, tmp_path: Path) -> None:
    """Of the superblock, the trees, the attributes and the chunks."""
    arrays = write_hdf5(path := tmp_path / "f.h5")
    data, chance = path.read_bytes(), random.Random(seed)
    for _ in range(TIMES // 5):
        path.write_bytes(damage(data, chance))
        read(arrays)


@pytest.mark.parametrize("seed", range(5))
def test_damaged_zarr(seed: int, tmp_path: Path) -> None:
    """Of the metadata, the shards and the chunks."""
    arrays, chance = write_zarr(tmp_path / "whole"), random.Random(seed)
    for _ in range(TIMES // 5):
        shutil.copytree(tmp_path / "whole", tmp_path / "part", dirs_exist_ok=True)
        name = chance.choice(list(arrays))
        files = sorted(each for each in (tmp_path / "part" / name).rglob("*") if each.is_file())
        path = chance.choice([*files, *[each for each in files if each.name.startswith((".z", "zarr"))] * 3])
        path.write_bytes(damage(path.read_bytes(), chance))
        read({name: str(tmp_path / "part" / name)})
