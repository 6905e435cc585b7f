"""`aiofeed cache build`: what it stores, continues and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aiofeed
from aiofeed.reports.commands.cli import main


def unchanged(data: bytes) -> bytes:
    return data


def storage_of_a_run(folder: Path, cache: Path) -> Any:
    """The storage statistics of an epoch of a feeder with the cache."""
    with aiofeed.Feeder(
        aiofeed.ImageFolder(str(folder)),
        decode=unchanged,
        batch_size=4,
        collate_fn=list,
        cache=aiofeed.EncodedCache(cache, 1 << 30),
    ) as feeder:
        for _ in feeder:
            pass
        return feeder.statistics().storage


def test_build_stores_every_sample(jpeg_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A training with the printed source reads nothing from the storage afterwards."""
    cache = tmp_path / "train.cache"
    assert main(["cache", "build", str(cache), str(jpeg_folder), "--gigabytes", "0.5"]) == 0
    out = capsys.readouterr().out
    count = len(aiofeed.ImageFolder(str(jpeg_folder)))
    assert f"{count} entries" in out
    assert "of 512.0 MiB" in out
    assert f'aiofeed.Feeder(aiofeed.ImageFolder("{jpeg_folder}"), ..., cache=aiofeed.EncodedCache("{cache}", ' in out
    storage = storage_of_a_run(jpeg_folder, cache)
    assert (storage.cache_hits, storage.cache_misses) == (count, 0)


def test_build_continues(jpeg_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second build adds the samples that the first lacked."""
    cache = tmp_path / "train.cache"
    files = [path for path in sorted(jpeg_folder.rglob("*")) if path.is_file()]
    assert main(["cache", "build", str(cache), str(jpeg_folder), "--gigabytes", "0.000005"]) == 0
    assert f"{len(files)} entries" not in capsys.readouterr().out
    assert main(["cache", "build", str(cache), str(jpeg_folder), "--gigabytes", "1"]) == 0
    assert f"{len(files)} entries" in capsys.readouterr().out


@pytest.mark.usefixtures("arrow_started")
def test_a_sample_that_cannot_be_read_is_counted(
    jpeg_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other samples are stored; the exit code is 1."""
    pytest.importorskip("pyarrow")
    missing = tmp_path / "missing.jpg"
    files = [path for path in sorted(jpeg_folder.rglob("*")) if path.is_file()][:3]
    (tmp_path / "train.csv").write_text("\n".join(["path", *map(str, [*files, missing])]))
    assert main(["cache", "build", str(tmp_path / "c.cache"), str(tmp_path / "train.csv")]) == 1
    captured = capsys.readouterr()
    assert "3 entries" in captured.out
    assert "1 of 4 samples could not be read" in captured.err


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("nowhere", [], "is no folder of images"),
        ("", ["--gigabytes", "-1"], "max_bytes=...) must be at least 1, got -"),
    ],
)
def test_bad_arguments(
    data: str, options: list[str], message: str, jpeg_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what is wrong, and there is no file."""
    cache = tmp_path / "c.cache"
    assert main(["cache", "build", str(cache), data or str(jpeg_folder), *options]) == 1
    assert message in capsys.readouterr().err
    assert not cache.exists()


def test_build_refuses_a_file_that_is_no_cache(
    jpeg_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is left as it is."""
    (tmp_path / "notes.txt").write_text("notes" * 1000)
    assert main(["cache", "build", str(tmp_path / "notes.txt"), str(jpeg_folder)]) == 1
    assert "notes.txt" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "notes" * 1000
