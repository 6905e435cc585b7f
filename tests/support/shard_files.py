"""Writes shards for tests: tar files with `tarfile`, TFRecord files with a writer of our own."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def sample_bytes(number: int) -> dict[str, bytes]:
    """The fields of a sample that differs from all others; its jpg has 0 to 1,999 bytes."""
    return {"jpg": bytes([number % 256]) * (number * 37 % 2000), "cls": b"%d" % number}


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], *, form: int = tarfile.PAX_FORMAT) -> None:
    """Write a tar file with these members."""
    path.write_bytes(tar_of(members, form=form))


def tar_of(members: Iterable[tuple[str, bytes]], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar file with these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_zip(path: Path, members: Iterable[tuple[str, bytes]], *, method: int = zipfile.ZIP_STORED) -> None:
    """Write a zip file with these members."""
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members:
            file.writestr(name, data)


def members_of(samples: Mapping[str, Mapping[str, bytes]]) -> list[tuple[str, bytes]]:
    """The members `key.field` of samples."""
    return [(f"{key}.{field}", data) for key, fields in samples.items() for field, data in fields.items()]


def numbered(first: int, count: int) -> dict[str, dict[str, bytes]]:
    """Samples with the keys `d/000000`, `d/000001`, ..."""
    return {f"d/{number:06}": sample_bytes(number) for number in range(first, first + count)}


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def tfrecord(records: Sequence[bytes]) -> bytes:
    """A TFRecord file: length, its masked CRC, data, their masked CRC."""

    def masked(data: bytes) -> bytes:
        crc = crc32c(data)
        return struct.pack("<L", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    lengths = [struct.pack("<Q", len(record)) for record in records]
    return b"".join(
        [length + masked(length) + data + masked(data) for length, data in zip(lengths, records, strict=True)]
    )


def write_mds(
    folder: Path,
    shards: Sequence[Sequence[Sequence[bytes]]],
    columns: Mapping[str, tuple[str, int | None]],
    **more: Any,
) -> dict[str, Any]:
    """Write samples of encoded columns in the layout of MDS, and the index of the folder."""
    folder.mkdir(exist_ok=True)
    names, config, entries = sorted(columns), b"{}", []
    sizes = [columns[name][1] for name in names]
    for number, samples in enumerate(shards):
        bodies = []
        for sample in samples:
            heads = [len(data) for data, size in zip(sample, sizes, strict=True) if size is None]
            bodies.append(np.array(heads, "<u4").tobytes() + b"".join(sample))
        start = 4 * (len(samples) + 2) + len(config)
        offsets = np.cumsum([start, *map(len, bodies)]).astype("<u4")
        data = np.uint32(len(samples)).tobytes() + offsets.tobytes() + config + b"".join(bodies)
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(data)
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        encodings = [columns[name][0] for name in names]
        entries.append(
            {"version": 2, "format": "mds", "samples": len(samples), "raw_data": raw, "zip_data": None}
            | {"column_names": names, "column_encodings": encodings, "column_sizes": sizes, "compression": None}
            | more
        )
    index = {"version": 2, "shards": entries}
    (folder / "index.json").write_text(json.dumps(index))
    return index
