"""Reads the EXIF orientation, and refuses files whose metadata is out of proportion to their size.

Pillow copies the value of every tag, and a few kilobytes can reference the same kilobytes thousands of times. This
module parses TIFF directories itself where only one tag is needed, and checks them before Pillow reads them. Source:
TIFF 6.0, section 2.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from PIL import ExifTags, Image, TiffImagePlugin

from aiofeed.kernel.decoders.geometry import JPEG_METADATA_BYTES

_ORIENTATION = ExifTags.Base.Orientation.value
_SUBDIRECTORIES = {ExifTags.IFD.Exif.value, ExifTags.IFD.GPSInfo.value, ExifTags.IFD.Interop.value}
_STRIP_TAGS = {273: "strips", 324: "tiles"}
_TILE_WIDTH, _TILE_LENGTH = 322, 323

# By the first four bytes of a TIFF: its byte order, in struct's notation.
_CLASSIC = {b"II*\0": "<", b"II\0*": "<", b"MM\0*": ">", b"MM*\0": ">"}
_BIG = {b"II+\0": "<", b"MM\0+": ">"}

# By TIFF field type: bytes per value, and struct's format of the types that are numbers.
_VALUE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_NUMBER_FORMATS = {3: "H", 4: "L", 5: "LL", 6: "b", 8: "h", 9: "l", 10: "ll", 11: "f", 12: "d", 13: "L", 16: "Q"}
_UNSIGNED_TYPES = {3, 4, 13, 16}

_SOF = (0xFFC0, 0xFFC1)  # baseline and extended sequential frames
_SOS = 0xFFDA
_APP1 = 0xFFE1
# Tables, restart intervals, application data, comments. A file with other segments before its first scan is not plain.
_SKIPPED = frozenset({0xFFDB, 0xFFC4, 0xFFDD, *range(0xFFE0, 0xFFF0), 0xFFFE})
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_jpeg_segment = struct.Struct(">HH").unpack_from
_jpeg_frame = struct.Struct(">BHHB").unpack_from

# Pillow allocates some 400 bytes for each strip.
MAX_STRIPS = 1 << 20
# The scans of a progressive JPEG may cover this many pictures of max_pixels. A scan visits all pixels and may be ten
# bytes long, so without a limit one small file could take hours. Real files have about ten scans.
MAX_SCANS = 16
# As JPEG_METADATA_BYTES.
GIF_METADATA_BYTES = 4 << 20


@functools.cache
def _uses_first_of_equal_tags() -> bool:
    """Return whether this Pillow uses the first of two equal tags, and skips tags whose total size exceeds the file.

    Pillow 13 does. Pillow 12 uses the last one, and stops at a tag that points past the end.
    """
    return hasattr(TiffImagePlugin.ImageFileDirectory_v2(), "_tag_data_limit")


def _entries(
    data: bytes, offset: int, order: str, big: bool = False, *, like_pillow: bool = False
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the tags of the directory at ``offset`` whose values lie within ``data``.

    Yields the tag, its field type, the number of values, the bytes of all values and the offset of the first.

    Args:
        order: byte order, in struct's notation.
        big: the file is a BigTIFF.
        like_pillow: yield only the tags that Pillow's parser uses.
    """
    head, entry, value_bytes = ("Q", "HHQ8x", 8) if big else ("H", "HHL4x", 4)
    head, entry, pointer = order + head, order + entry, order + ("Q" if big else "L")
    length, step = len(data), struct.calcsize(entry)
    first = offset + struct.calcsize(head)
    if first > length:
        return
    (count,) = struct.unpack_from(head, data, offset)
    first_counts = like_pillow and _uses_first_of_equal_tags()
    seen: set[int] = set()
    total = 0
    for at in range(first, min(first + count * step, length - step + 1), step):
        tag, kind, values = struct.unpack_from(entry, data, at)
        size = values * _VALUE_BYTES.get(kind, 0)
        if size == 0 or tag in seen:
            continue
        value = at + step - value_bytes
        if size > value_bytes:
            (value,) = struct.unpack_from(pointer, data, value)
            total += size
            if first_counts and total > length:
                continue
            if value + size > length:
                if like_pillow:
                    return
                continue
        if first_counts:
            seen.add(tag)
        yield tag, kind, values, size, value


def check_tiff(data: bytes, max_pixels: int) -> None:
    """Raise ``ValueError`` if reading a TIFF would take memory out of proportion; other data passes.

    Refused are tags that together are more than twice the file, more than ``MAX_STRIPS`` strips, and tiles of more than
    ``max_pixels``.
    """
    order, big, pointer = _CLASSIC.get(data[:4]), False, data[4:8]
    if order is None:
        order, big, pointer = _BIG.get(data[:4]), True, data[8:16]
    if order is None or len(pointer) < (8 if big else 4):
        return
    directories = list(struct.unpack(order + ("Q" if big else "L"), pointer))
    seen: set[int] = set()
    total = 0
    tile = {_TILE_WIDTH: 1, _TILE_LENGTH: 1}
    while directories:
        start = directories.pop()
        if start in seen:
            continue
        seen.add(start)
        for tag, kind, values, size, offset in _entries(data, start, order, big):
            total += size
            if total > 2 * len(data):  # in a sound file each byte belongs to at most one tag
                raise ValueError(f"the tags of this TIFF claim more than {total} bytes, the file has {len(data)}")
            if tag in _STRIP_TAGS and values > MAX_STRIPS:
                raise ValueError(f"this TIFF has {values} {_STRIP_TAGS[tag]}, at most {MAX_STRIPS} are allowed")
            if kind in _UNSIGNED_TYPES and (tag in tile or tag in _SUBDIRECTORIES):
                (number,) = struct.unpack_from(order + _NUMBER_FORMATS[kind], data, offset)
                if tag in tile:
                    tile[tag] = number
                elif len(seen) < 16:
                    directories.append(number)
    if tile[_TILE_WIDTH] * tile[_TILE_LENGTH] > max_pixels:
        raise ValueError(
            f"this TIFF has tiles of {tile[_TILE_WIDTH]} x {tile[_TILE_LENGTH]} pixels, more than "
            f"max_pixels={max_pixels} allows"
        )


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8, as ``ImageOps.exif_transpose`` finds it: in EXIF, else in XMP.

    1 if there is none or the metadata cannot be read. Images other than JPEG must be loaded: PNG may have EXIF after
    its pixels, and Pillow turns a TIFF upright while loading it. A file without EXIF costs a dict lookup, one with EXIF
    a few microseconds; Pillow's parser takes 15 to 50.
    """
    info = image.info
    if hasattr(image, "tag_v2") and info.get("exif") is None and "Raw profile type exif" not in info:
        try:
            value = image.getexif().get(_ORIENTATION)
        except Exception:  # noqa: BLE001 - broken metadata must not make a sound picture fail
            return 1
        return int(value) if value in (2, 3, 4, 5, 6, 7, 8) else 1
    return orientation_in_info(info)


def orientation_in_info(info: Mapping[Any, Any]) -> int:
    """EXIF orientation, 1 to 8, in metadata under the keys of Pillow's ``Image.info``; 1 if there is none."""
    try:
        orientation: int | None = None
        if (exif := info.get("exif")) is not None:
            orientation = orientation_in_exif(exif)
        elif "Raw profile type exif" in info:
            orientation = orientation_in_exif(bytes.fromhex("".join(info["Raw profile type exif"].split("\n")[3:])))
        if orientation is None and (xmp := info.get("XML:com.adobe.xmp")):
            orientation = _orientation_in_xmp(re.search(r'tiff:Orientation(="|>)([0-9])', xmp))
        elif orientation is None and (xmp := info.get("xmp")):
            orientation = _orientation_in_xmp(re.search(rb'tiff:Orientation(="|>)([0-9])', xmp))
    except Exception:  # noqa: BLE001 - broken metadata must not make a sound picture fail
        return 1
    return 1 if orientation is None else orientation


def _orientation_in_xmp(match: re.Match[str] | re.Match[bytes] | None) -> int:
    value = int(match[2]) if match else 1
    return value if 2 <= value <= 8 else 1


def orientation_in_exif(exif: bytes) -> int | None:
    """Return the orientation that Pillow's EXIF parser finds; ``None`` if there is none, 1 if its value is invalid.

    Raises:
        ValueError: ``exif`` does not begin with a TIFF header.
    """
    while exif.startswith(b"Exif\0\0"):
        exif = exif[6:]
    if not exif:
        return None
    order = _CLASSIC.get(exif[:4])
    if order is None or len(exif) < 8:
        raise ValueError("EXIF must begin with the header of a TIFF")
    (start,) = struct.unpack_from(order + "L", exif, 4)
    orientation = None
    for tag, kind, _values, _size, offset in _entries(exif, start, order, like_pillow=True):
        if tag == _ORIENTATION:
            orientation = _read_orientation(kind, order, exif, offset)
    return orientation


def _read_orientation(kind: int, order: str, data: bytes, offset: int) -> int:
    if kind not in _NUMBER_FORMATS:
        return 1
    value, *denominator = struct.unpack_from(order + _NUMBER_FORMATS[kind], data, offset)
    if denominator:
        value = value / denominator[0] if denominator[0] else 1
    return int(value) if value in (2, 3, 4, 5, 6, 7, 8) else 1


def check_scans(data: bytes, size: tuple[int, int], max_pixels: int) -> None:
    """Raise ``ValueError`` if the scans of a progressive JPEG cover more than ``MAX_SCANS * max_pixels`` pixels."""
    scans = data.count(b"\xff\xda")
    pixels = size[0] * size[1]
    if scans * pixels > MAX_SCANS * max_pixels:
        raise ValueError(
            f"the image has {pixels} pixels in {scans} scans, more than {MAX_SCANS} scans of max_pixels={max_pixels} "
            f"pixels; raise max_pixels if such images are expected"
        )


def check_metadata(data: bytes) -> None:
    """Raise ``ValueError`` if a JPEG or GIF has megabytes of metadata before its pixels; other data passes."""
    kind, start, limit = "JPEG", 0, JPEG_METADATA_BYTES
    if len(data) > JPEG_METADATA_BYTES and data.startswith(b"\xff\xd8"):
        start = _jpeg_scan_offset(data)
    elif len(data) > GIF_METADATA_BYTES and data.startswith(b"GIF8"):
        kind, start, limit = "GIF", _gif_frame_offset(data), GIF_METADATA_BYTES
    if start > limit:
        raise ValueError(f"this {kind} has more than {limit >> 20} MiB of metadata before its pixels")


def _jpeg_scan_offset(data: bytes) -> int:
    """Offset of a JPEG's first scan, or a number above ``JPEG_METADATA_BYTES``. Source: ITU T.81, annex B."""
    at = 2
    while at <= JPEG_METADATA_BYTES:
        at = data.find(b"\xff", at)
        if at < 0 or at + 4 > len(data):
            return 0
        marker = data[at + 1]
        if marker == 0xDA:
            break
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in (0, 1) or 0xD0 <= marker <= 0xD9:  # without a segment
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at


def _gif_frame_offset(data: bytes) -> int:
    """Offset of a GIF's first frame, or a number above ``GIF_METADATA_BYTES``. Source: GIF89a, sections 18 to 26."""
    flags = data[10]
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while at <= GIF_METADATA_BYTES and data[at : at + 1] == b"!":
        at += 2
        while at < len(data) and data[at] and at <= GIF_METADATA_BYTES:
            at += data[at] + 1
        at += 1
    return at


class JpegHeader(NamedTuple):
    """Width and height as stored, and EXIF orientation, 1 to 8."""

    width: int
    height: int
    orientation: int


def read_header(data: bytes) -> JpegHeader | None:
    """Return the header of a plain JPEG, or ``None`` for data that Pillow has to decode. Source: ITU T.81, annex B."""
    if len(data) > JPEG_METADATA_BYTES or not data.startswith(b"\xff\xd8\xff"):
        return None
    at, width = 2, 0
    info: dict[str, bytes] = {}
    try:
        while True:
            marker, length = _jpeg_segment(data, at)
            if marker in _SKIPPED:
                if marker == _APP1:
                    payload = data[at + 4 : at + 2 + length]
                    is_exif = payload.startswith(b"Exif\0\0")
                    if is_exif or payload.startswith(_XMP):
                        name = "exif" if is_exif else "xmp"
                        if name in info:  # Pillow joins the two
                            return None
                        info[name] = payload if is_exif else payload[len(_XMP) :]
            elif marker in _SOF and not width:
                precision, height, width, components = _jpeg_frame(data, at + 4)
                if precision != 8 or components not in (1, 3) or not width or not height:
                    return None
            elif marker == _SOS and width:
                break
            else:
                return None
            if length < 2:
                return None
            at += 2 + length
    except struct.error:  # the data ends before the first scan
        return None
    return JpegHeader(width, height, orientation_in_info(info) if info else 1)
