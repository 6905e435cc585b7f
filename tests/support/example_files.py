"""The files that the examples of docstrings read, by the same names in all of them."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.paths import ROOT
from tests.support.shard_files import members_of, tfrecord, write_mds, write_tar, write_zip

CLASSES = ("cat", "dog")
PER_CLASS = 4


def write_example_files(folder: Path) -> None:
    """Write photos/, masks/, tokens.bin and others; those whose package is missing are left out."""
    random = np.random.default_rng(0)
    _write_photos(folder)
    _write_shards(folder)
    for name in ("tokens.bin", "code.bin"):
        random.integers(0, 50, 8192, "u2").tofile(folder / name)  # 0 ends a document
    arrays = folder / "arrays"
    arrays.mkdir()
    for number in range(4):
        np.save(arrays / f"{number}.npy", random.random((3, 8)))
        (arrays / f"{number}.json").write_text(json.dumps({"x": number}))
        if _installed("safetensors"):
            from safetensors.numpy import save_file

            save_file({"x": random.random((3, 8))}, arrays / f"{number}.safetensors")
    if _installed("pyarrow"):
        _write_table(folder / "train.parquet", random)
    if _installed("zarr"):
        import zarr

        field: Any = zarr.create_array(
            folder / "weather.zarr" / "t2m",
            shape=(24, 8, 16),
            chunks=(6, 8, 16),
            dtype="f4",
            dimension_names=("time", "lat", "lon"),
        )
        field[:] = random.normal(280, 10, field.shape)
    if _installed("av"):
        _write_media(folder)
    if _installed("litdata"):
        code = 'import litdata; litdata.optimize(hex, list(range(8)), "optimized", chunk_bytes="64MB", num_workers=1)'
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    shutil.copytree(ROOT / "tests" / "data" / "lerobot", folder / "lerobot")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _jpeg(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (96, 72), (number * 20, 90, 90)).save(file, "JPEG")
    return file.getvalue()


def _photos() -> Iterator[tuple[int, str, bytes]]:
    """Yield number, class and bytes of each photo."""
    for number in range(PER_CLASS * len(CLASSES)):
        yield number, CLASSES[number // PER_CLASS], _jpeg(number)


def _write_photos(folder: Path) -> None:
    rows = ["path,age"]
    for number, name, data in _photos():
        photo, mask = (folder / kind / name / str(number % PER_CLASS) for kind in ("photos", "masks"))
        for path in (photo, mask):
            path.parent.mkdir(parents=True, exist_ok=True)
        photo.with_suffix(".jpg").write_bytes(data)
        Image.new("L", (96, 72), number).save(mask.with_suffix(".png"))
        rows.append(f"photos/{name}/{photo.name}.jpg,{number}")
    (folder / "photos.csv").write_text("\n".join(rows) + "\n")


def _write_shards(folder: Path) -> None:
    """Write the photos as tar, zip, MDS and TFRecord."""
    samples = {f"{number:04}": {"jpg": data, "cls": b"%d" % number} for number, _, data in _photos()}
    members = members_of(samples)
    for shard in range(2):
        write_tar(folder / f"train-{shard:03}.tar", members[8 * shard : 8 * (shard + 1)])
    write_zip(folder / "train.zip", members)
    rows = [[data, np.int64(number).tobytes()] for number, _, data in _photos()]
    write_mds(folder / "mds", [rows], {"image": ("jpeg", None), "label": ("int", 8)})
    (folder / "train.tfrecord").write_bytes(tfrecord([data for _, _, data in _photos()]))


def _write_table(path: Path, random: np.random.Generator) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"area": random.random(64, "f4"), "rooms": random.integers(1, 6, 64), "price": random.random(64, "f4")}
    parquet.write_table(pa.table(columns), path, row_group_size=16)


def _write_media(folder: Path) -> None:
    from tests.support.media_files import chirp, sound, video

    for kind in ("videos", "recordings", "actions/run", "actions/walk", "words/yes", "words/no"):
        (folder / kind).mkdir(parents=True)
    for number in range(2):
        (folder / "videos" / f"{number}.mp4").write_bytes(video(frames=24))
        (folder / "recordings" / f"{number}.wav").write_bytes(sound(chirp(1.0, 16000), 16000))
    for name in ("run", "walk"):
        (folder / "actions" / name / "0.mp4").write_bytes(video(frames=24))
    for name in ("yes", "no"):
        (folder / "words" / name / "0.wav").write_bytes(sound(chirp(1.0, 16000), 16000))
