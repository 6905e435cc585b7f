"""Image headers and EXIF: the orientation, and checks that metadata is in proportion to the file.

Pillow copies the value of every tag, and a few kilobytes can name the same kilobytes thousands of times. Tags that are
only looked at are read here, and tags that Pillow must read are measured here first. Source: TIFF 6.0, section 2.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from PIL import ExifTags, Image, TiffImagePlugin

_ORIENTATION = ExifTags.Base.Orientation.value


_FURTHER = {ExifTags.IFD.Exif.value, ExifTags.IFD.GPSInfo.value, ExifTags.IFD.Interop.value}


_STRIPS = {273: "strips", 324: "tiles"}


_TILE_WIDTH, _TILE_LENGTH = 322, 323


# Pillow keeps some 400 bytes for each.
MAX_STRIPS = 1 << 20


_CLASSIC = {b"II*\0": "<", b"II\0*": "<", b"MM\0*": ">", b"MM*\0": ">"}


_BIG = {b"II+\0": "<", b"MM\0+": ">"}


_UNITS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}


_NUMBERS = {3: "H", 4: "L", 5: "LL", 6: "b", 8: "h", 9: "l", 10: "ll", 11: "f", 12: "d", 13: "L", 16: "Q"}


_WHOLE = {3, 4, 13, 16}


# How many full pictures a progressive JPEG's scans may come to. Each is a pass over all pixels for as little as ten
# bytes, so that one small file could take hours; files in the wild have about ten scans.
PASSES = 16
# Metadata in front of the first pixel. Pillow joins the segments of a JPEG's EXIF, and the blocks of a GIF's comment,
# one after the other, copying what it has each time: these take some seconds, ten times as much a hundred times that.
# What cameras write is below 10 MiB in a JPEG, thumbnails and depth maps included.
JPEG_METADATA = 32 << 20
GIF_METADATA = 4 << 20


class _TiffEntry(NamedTuple):
    tag: int
    kind: int
    values: int
    size: int
    at: int


@functools.cache
def _first_counts() -> bool:
    """Whether this Pillow takes the first of two equal tags, and skips those that are together more than the file.

    Pillow 13 does. Pillow 12 takes the last, and stops where a tag points past the end.
    """
    return hasattr(TiffImagePlugin.ImageFileDirectory_v2(), "_tag_data_limit")


def _entries(data: bytes, at: int, order: str, big: bool = False, *, as_pillow: bool = False) -> Iterator[_TiffEntry]:
    """The tags of the directory at ``at`` whose values lie within ``data``; ``as_pillow``: those that it goes by."""
    head, entry, room = ("Q", "HHQ8x", 8) if big else ("H", "HHL4x", 4)
    head, entry, pointer = order + head, order + entry, order + ("Q" if big else "L")
    length, step = len(data), struct.calcsize(entry)
    at += struct.calcsize(head)
    if at > length:
        return
    (count,) = struct.unpack_from(head, data, at - struct.calcsize(head))
    first_counts = as_pillow and _first_counts()
    seen: set[int] = set()
    total = 0
    for place in range(at, min(at + count * step, length - step + 1), step):
        tag, kind, values = struct.unpack_from(entry, data, place)
        size = values * _UNITS.get(kind, 0)
        if size == 0 or tag in seen:
            continue
        value = place + step - room
        if size > room:
            (value,) = struct.unpack_from(pointer, data, value)
            total += size
            if first_counts and total > length:
                continue
            if value + size > length:
                if as_pillow:
                    return
                continue
        if first_counts:
            seen.add(tag)
        yield _TiffEntry(tag, kind, values, size, value)


def check_directories(data: bytes, max_pixels: int) -> None:
    """``ValueError`` where reading a TIFF would take memory out of all proportion.

    That is for tags that together are much more than the file, a million strips, or a tile, whatever the size of the
    picture, of more than ``max_pixels``. What is no TIFF passes.
    """
    order, big, at = _CLASSIC.get(data[:4]), False, data[4:8]
    if order is None:
        order, big, at = _BIG.get(data[:4]), True, data[8:16]
    if order is None or len(at) < (8 if big else 4):
        return
    ahead = list(struct.unpack(order + ("Q" if big else "L"), at))
    seen: set[int] = set()
    total = 0
    tile = {_TILE_WIDTH: 1, _TILE_LENGTH: 1}
    while ahead:
        start = ahead.pop()
        if start in seen:
            continue
        seen.add(start)
        for tag, kind, values, size, place in _entries(data, start, order, big):
            total += size
            if total > 2 * len(data):  # each byte belongs to one tag, where nobody cheats
                raise ValueError(f"the tags of this TIFF claim more than {total} bytes, the file has {len(data)}")
            if tag in _STRIPS and values > MAX_STRIPS:
                raise ValueError(f"this TIFF is in {values} {_STRIPS[tag]}, more than the {MAX_STRIPS} allowed")
            if kind in _WHOLE and (tag in tile or tag in _FURTHER):
                (number,) = struct.unpack_from(order + _NUMBERS[kind], data, place)
                if tag in tile:
                    tile[tag] = number
                elif len(seen) < 16:
                    ahead.append(number)
    if tile[_TILE_WIDTH] * tile[_TILE_LENGTH] > max_pixels:
        raise ValueError(
            f"this TIFF has tiles of {tile[_TILE_WIDTH]} x {tile[_TILE_LENGTH]} pixels, more than "
            f"max_pixels={max_pixels} allows"
        )


def orientation_in(exif: bytes) -> int | None:
    """EXIF orientation as Pillow's parser finds it, ``None`` where there is none; 1 for values that mean nothing.

    Raises:
        ValueError: this is no EXIF.
    """
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    if not exif:
        return None
    order = _CLASSIC.get(exif[:4])
    if order is None or len(exif) < 8:
        raise ValueError("EXIF begins with the header of a TIFF")
    (start,) = struct.unpack_from(order + "L", exif, 4)
    found = None
    for tag, kind, _values, _size, at in _entries(exif, start, order, as_pillow=True):
        if tag == _ORIENTATION:
            found = _orientation(kind, order, exif, at)
    return found


def _orientation(kind: int, order: str, data: bytes, at: int) -> int:
    if kind not in _NUMBERS:
        return 1
    value, *denominator = struct.unpack_from(order + _NUMBERS[kind], data, at)
    if denominator:
        value = value / denominator[0] if denominator[0] else 1
    return int(value) if value in (2, 3, 4, 5, 6, 7, 8) else 1


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8, as ``ImageOps.exif_transpose`` finds it: in EXIF, else in XMP.

    1 where there is none, or where the metadata are beyond reading. All but JPEG must be loaded: PNG may hold EXIF
    behind its pixels, and Pillow turns TIFF upright while loading. A file without EXIF costs a look into a dict; a
    directory is read here in a few microseconds, where Pillow's parser takes 15 to 50.
    """
    info = image.info
    if hasattr(image, "tag_v2") and info.get("exif") is None and "Raw profile type exif" not in info:
        try:
            value = image.getexif().get(_ORIENTATION)
        except Exception:  # noqa: BLE001 - as below
            return 1
        return int(value) if value in (2, 3, 4, 5, 6, 7, 8) else 1
    return orientation_in_info(info)


def orientation_in_info(info: Mapping[Any, Any]) -> int:
    """The same from the metadata alone, under the names that Pillow keeps them by."""
    try:
        found: int | None = None
        if (exif := info.get("exif")) is not None:
            found = orientation_in(exif)
        elif "Raw profile type exif" in info:
            found = orientation_in(bytes.fromhex("".join(info["Raw profile type exif"].split("\n")[3:])))
        if found is None and (xmp := info.get("XML:com.adobe.xmp")):
            found = _orientation_in_xmp(re.search(r'tiff:Orientation(="|>)([0-9])', xmp))
        elif found is None and (xmp := info.get("xmp")):
            found = _orientation_in_xmp(re.search(rb'tiff:Orientation(="|>)([0-9])', xmp))
    except Exception:  # noqa: BLE001 - whatever absurd metadata trip: the picture itself is sound
        return 1
    return 1 if found is None else found


def _orientation_in_xmp(match: re.Match[str] | re.Match[bytes] | None) -> int:
    value = int(match[2]) if match else 1
    return value if 2 <= value <= 8 else 1


def check_scans(data: bytes, size: tuple[int, int], max_pixels: int) -> None:
    """``ValueError`` where a progressive JPEG of this size would be passed over too often."""
    scans = data.count(b"\xff\xda")
    pixels = size[0] * size[1]
    if scans * pixels > PASSES * max_pixels:
        raise ValueError(
            f"the image has {pixels} pixels in {scans} scans, more than {PASSES} scans of max_pixels={max_pixels} "
            f"pixels; raise max_pixels if such images are expected"
        )


def check_metadata(data: bytes) -> None:
    """``ValueError`` for a JPEG or GIF with megabytes of metadata in front of its pixels; others pass."""
    if len(data) > JPEG_METADATA and data.startswith(b"\xff\xd8"):
        _check("JPEG", _jpeg_pixels(data), JPEG_METADATA)
    elif len(data) > GIF_METADATA and data.startswith(b"GIF8"):
        _check("GIF", _gif_pixels(data), GIF_METADATA)


def _check(kind: str, start: int, most: int) -> None:
    if start > most:
        raise ValueError(f"this {kind} has more than {most >> 20} MiB of metadata in front of its pixels")


def _jpeg_pixels(data: bytes) -> int:
    """Where a JPEG's first scan begins, or more than ``JPEG_METADATA``. Source: ITU T.81, annex B."""
    at = 2
    while at <= JPEG_METADATA:
        at = data.find(b"\xff", at)
        if at < 0 or at + 4 > len(data):
            return 0
        marker = data[at + 1]
        if marker == 0xDA:
            break
        at += 1 if marker == 0xFF else 2 if marker in (0, 1) or 0xD0 <= marker <= 0xD9 else 2 + _u16(data, at + 2)
    return at


def _u16(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "big")


def _gif_pixels(data: bytes) -> int:
    """Where a GIF's first frame begins, or more than ``GIF_METADATA``. Source: GIF89a, sections 18 to 26."""
    flags = data[10]
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while at <= GIF_METADATA and data[at : at + 1] == b"!":
        at += 2
        while at < len(data) and data[at] and at <= GIF_METADATA:
            at += data[at] + 1
        at += 1
    return at
