"""Files that are work out of all proportion to their pixels: hours of decoding, or of copying metadata."""

from __future__ import annotations

# How many full pictures a progressive JPEG's scans may come to. Each is a pass over all pixels for as little as ten
# bytes, so that one small file could take hours; files in the wild have about ten scans.
PASSES = 16

# Metadata in front of the first pixel. Pillow joins the segments of a JPEG's EXIF, and the blocks of a GIF's comment,
# one after the other, copying what it has each time: these take some seconds, ten times as much a hundred times that.
# What cameras write is below 10 MiB in a JPEG, thumbnails and depth maps included.
JPEG_METADATA = 32 << 20
GIF_METADATA = 4 << 20


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
