"""Damaged Parquet, Arrow and token files, by seeded mutation: an error of ours that names the file, or some values."""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiofeed import Feeder, FeedError, ParquetRows, Table, Tokens
from aiofeed.tokens.formats import MEGATRON_HEADER, MEGATRON_MAGIC

pytestmark = pytest.mark.integration
pa = pytest.importorskip("pyarrow")

FAST, SLOW = 40, 1000
INTERESTING = (0, 1, 2, 127, 128, 255, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def mutated(data: bytes, rng: random.Random, *, head: int) -> bytes:
    """The bytes with one to four changes, most of them within the first or last ``head``: where headers are."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        size = max(len(changed), 1)
        at = rng.randrange(size) if rng.random() < 0.2 else rng.randrange(min(head, size))
        at = size - 1 - at if rng.random() < 0.4 else at
        way = rng.randrange(6)
        if way == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif way == 1:
            width = rng.choice((1, 2, 4, 8))
            changed[at : at + width] = (rng.choice(INTERESTING) % (1 << 8 * width)).to_bytes(width, "little")
        elif way == 2:
            del changed[at:]
        elif way == 3:
            del changed[at : at + rng.randint(1, 16)]
        elif way == 4:
            changed[at:at] = rng.randbytes(rng.randint(1, 16))
        else:
            other = rng.randrange(size)
            changed[at : at + 8] = changed[other : other + 8]
    return bytes(changed)


def table() -> Any:
    return pa.table(
        {
            "tokens": pa.array([list(range(row % 9, 12)) for row in range(40)], pa.list_(pa.int32())),
            "n": pa.array(range(40)),
            "text": pa.array([f"row {row}" for row in range(40)]),
            "d": pa.array(["a", "b"] * 20).dictionary_encode(),
            "f": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(160, dtype="f4").reshape(40, 2, 2)),
        }
    )


def parquet(path: Path) -> None:
    from pyarrow.parquet import write_table

    # Damaged statistics of sizes end the process within pyarrow's RowGroupMetaData.column.
    write_table(table(), path, row_group_size=15, write_statistics=False)


def arrow(path: Path) -> None:
    with (pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file)(path, table().schema) as writer:
        writer.write_table(table(), max_chunksize=15)


def raw(path: Path) -> None:
    np.arange(500, dtype="u2").tofile(path)


def llm_c(path: Path) -> None:
    header = np.zeros(256, "i4")
    header[:3] = 20240520, 1, 500
    path.write_bytes(header.tobytes() + np.arange(500, dtype="u2").tobytes())


def npy(path: Path) -> None:
    np.save(path, np.arange(500, dtype="u2"))


def megatron(path: Path) -> None:
    np.arange(500, dtype="i4").tofile(path.with_suffix(".bin"))
    lengths = np.full(5, 100, "<i4")
    index = MEGATRON_HEADER.pack(MEGATRON_MAGIC, 1, 4, 5, 6) + lengths.tobytes()
    path.write_bytes(index + struct.pack("<5q", *range(0, 2000, 400)) + struct.pack("<6q", *range(6)))


def tokens(path: Path) -> Any:
    return Tokens(path.with_suffix(".bin") if path.suffix == ".idx" else path, 8)


def column(path: Path) -> Any:
    return Tokens(path, 8, column="tokens")


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any], dict[str, Any]]] = {
    "a.parquet": (parquet, Table, {"collate_fn": list}),
    "numbers.parquet": (parquet, lambda path: Table(path, ["n", "f"]), {}),
    "rows.parquet": (parquet, lambda path: ParquetRows(path, data="n", target="d"), {"decode": lambda value: value}),
    "tokens.parquet": (parquet, column, {}),
    "a.arrow": (arrow, Table, {"collate_fn": list}),
    "stream.arrow": (arrow, lambda path: Table(path, ["n", "f"]), {}),
    "tokens.arrow": (arrow, column, {}),
    "raw.bin": (raw, tokens, {}),
    "llm_c.bin": (llm_c, tokens, {}),
    "a.npy": (npy, tokens, {}),
    "a.idx": (megatron, tokens, {}),
}


def read_damaged(name: str, seeds: range, folder: Path) -> int:
    """Read the file with each mutation; return how many of them are errors."""
    write, make, options = KINDS[name]
    path, refused = folder / name, 0
    write(path)
    data = path.read_bytes()
    for seed in seeds:
        path.unlink()  # not changed in place: the file before may be mapped
        path.write_bytes(mutated(data, random.Random(f"{name} {seed}"), head=1100))
        try:
            with warnings.catch_warnings(), Feeder(make(path), batch_size=7, **options) as feeder:
                warnings.simplefilter("ignore")
                for _ in feeder:
                    pass
        except (ValueError, TypeError, OSError, FeedError) as error:
            refused += 1
            if str(path.with_suffix("")) not in str(error) or type(error).__module__.startswith("pyarrow"):
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return refused


@pytest.mark.parametrize(("first", "end"), [(0, FAST), pytest.param(FAST, SLOW, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_named(name: str, first: int, end: int, tmp_path: Path) -> None:
    """A damaged file is an error that names it, when it is opened or read."""
    assert read_damaged(name, range(first, end), tmp_path) > end // 4
