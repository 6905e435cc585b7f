"""Writes shards for tests: tar files with `tarfile`, TFRecord files with a writer of our own."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


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
