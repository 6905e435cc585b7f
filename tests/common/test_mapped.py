"""Files that are mapped and become shorter: to read behind their end would end the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiofeed
from aiofeed.common.mapped import MappedFiles
from aiofeed.errors import ReadError
from tests.support.simulated_device import SimulatedDevice

# Rows that torch's own Dataset reads.
UNKNOWN = [("tensors", "samples"), ("tensors", "with a time limit")]
# Less than a page, of which the system keeps the memory, with zeros behind the end of the file.
ROWS = 300
NUMBERS = np.arange(1, ROWS + 1).astype(np.uint16)


def token_file(path: Path) -> Path:
    NUMBERS.tofile(path)
    return path


def arrow_file(path: Path, column: Any = NUMBERS) -> Path:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": column})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def npy_file(path: Path) -> Any:
    np.save(path, NUMBERS)
    return np.load(path, mmap_mode="r")


def dataset(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"x": NUMBERS}).save_to_disk(folder / "a")
    return datasets.load_from_disk(folder / "a").shuffle(seed=1)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "tokens": lambda folder: aiofeed.Tokens(token_file(folder / "a.bin"), 10),
    "tokens, a part": lambda folder: aiofeed.Tokens(token_file(folder / "a.bin"), 10)[5:],
    "tokens of two files": lambda folder: aiofeed.Tokens([token_file(folder / f"{at}.bin") for at in "ab"], 10),
    "a column of tokens": lambda folder: aiofeed.Tokens(
        arrow_file(folder / "a.arrow", NUMBERS.reshape(-1, 10).tolist()), 10, column="x"
    ),
    "table": lambda folder: aiofeed.Table(arrow_file(folder / "a.arrow")),
    "tables": lambda folder: aiofeed.Table([arrow_file(folder / f"{at}.arrow") for at in "ab"]),
    "dataset": lambda folder: aiofeed.Table(dataset(folder)),
    "records": lambda folder: aiofeed.Table(npy_file(folder / "a.npy").view([("x", "u2")])),
    "tensors": lambda folder: aiofeed.Tensors(NUMBERS[10:], np.asarray(npy_file(folder / "a.npy")[10:])[:, None]),
    "arrays": lambda folder: aiofeed.Arrays({"x": npy_file(folder / "a.npy")}),
}
WAYS: dict[str, dict[str, Any]] = {
    "in the consumer's thread": {},
    "for a device": {"device": SimulatedDevice()},
    "samples": {"collate_fn": list},
    "with a time limit": {"collate_fn": list, "on_error": aiofeed.FailurePolicy(read_timeout_s=60)},
    "kept on a device": {"device": SimulatedDevice(), "cache": "device"},
}


def files_in(folder: Path) -> list[Path]:
    """The files of numbers whose names begin with a, or that are in such a folder."""
    kinds = (".bin", ".arrow", ".npy")
    found = sorted(path for path in folder.glob("a*") if path.suffix in kinds)
    return found or sorted(folder.glob("a/data-*.arrow"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SOURCES)
def test_a_file_that_becomes_shorter(name: str, way: str, tmp_path: Path) -> None:
    """A source whose mapped file is truncated raises a ``ReadError`` that names the file, whoever gathers batches."""
    if (way == "kept on a device" and not name.startswith("tokens")) or (name, way) in UNKNOWN:
        pytest.skip("rows of torch's tensors, or no tokens that are uploaded")
    source = SOURCES[name](tmp_path)
    [path] = files_in(tmp_path)
    os.truncate(path, os.path.getsize(path) - 2)
    with aiofeed.Feeder(source, batch_size=4, **WAYS[way]) as feeder, pytest.raises(ReadError) as caught:
        list(feeder)
    assert f"from {path.stat().st_size + 2} to {path.stat().st_size} bytes" in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.key == source.key(caught.value.index)


@pytest.mark.parametrize("change", [os.remove, lambda path: Path(path).with_suffix(".new").rename(path)])
@pytest.mark.parametrize("name", SOURCES)
def test_a_file_that_is_removed_or_replaced(name: str, change: Callable[[Path], object], tmp_path: Path) -> None:
    """The complete file that was opened is read, also if a shorter one has its name now."""
    source = SOURCES[name](tmp_path)
    with aiofeed.Feeder(source, batch_size=4) as feeder:
        expected = list(map(repr, feeder))
        [path] = files_in(tmp_path)
        path.with_suffix(".new").write_bytes(b"new")
        change(path)
        assert list(map(repr, feeder)) == expected


def test_only_the_files_of_the_rows_are_asked(tmp_path: Path) -> None:
    """A file that became shorter is an error of its rows, not of those of other files."""
    paths = [token_file(tmp_path / f"{at}.bin") for at in range(3)]
    files = MappedFiles([([(str(path), path.stat().st_size)], 10) for path in paths])
    os.truncate(paths[1], 10)
    files.check([0, 9, 20, 29])
    for rows in ([10], [0, 19], None):
        with pytest.raises(OSError, match=r"from 600 to 10 bytes: .*1\.bin"):
            files.check(rows)


def test_the_sample_of_the_file_is_named(tmp_path: Path) -> None:
    """The error has the index of the first sample that needs a file that became shorter, not of its window."""
    source = aiofeed.Tokens([token_file(tmp_path / f"{at}.bin") for at in range(3)], 10)
    os.truncate(tmp_path / "1.bin", 10)
    with aiofeed.Feeder(source, batch_size=4) as feeder, pytest.raises(ReadError) as caught:
        list(feeder)
    assert (caught.value.index, caught.value.stage) == (30, "read")
