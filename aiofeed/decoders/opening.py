"""From bytes to an image file whose format is allowed and whose header has been read and checked.

Pillow's ``Image.open`` is not called: its limit on pixels is one number for the whole process, and it warns below
that. The plugins are asked directly, so that the limit is the decoder's own and nothing global is touched.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Collection
from io import BytesIO

from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from aiofeed.decoders.exif import check_directories
from aiofeed.decoders.proportion import check_metadata, check_scans
from aiofeed.decoders.quiet import hush_plugins

# What people train on. Left out on purpose: EPS, which Pillow hands to Ghostscript, a PostScript interpreter; what has
# no signature (TGA, PCD, IM, ...), so that damage to another format may pass for it; what has pictures of further
# formats inside (ICO, ICNS, BLP, IPTC); what Pillow can only recognise (WMF, HDF5, MPEG, ...); what nobody has.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
_MULTI_PICTURE = "MPO"  # a JPEG with further ones behind it; no plugin of its own in Pillow

# What Pillow says where a plugin ends without a mode or with a side of 0.
_PLAIN = {"not identified by this driver": "its header gives no pixels"}

_plugins_lock = threading.Lock()
hush_plugins()


class JpegFile(JpegImageFile):
    """Pillow's JPEG file, without the parsing of EXIF that it does at opening to find a resolution."""

    def _read_dpi_from_exif(self) -> None:
        pass


def known_formats() -> set[str]:
    """The names that ``formats`` may have: what this Pillow has plugins for, third parties' included."""
    _load_plugins(everything=True)
    return {*Image.OPEN, *FORMATS, _MULTI_PICTURE}


def open_image(data: bytes, max_pixels: int, formats: Collection[str] = FORMATS) -> ImageFile.ImageFile:
    """Read the header of ``data``; no pixels yet.

    A JPEG is always a ``JpegFile`` (of a multi-picture file the first one).

    Raises:
        OSError: none of ``formats`` is this, or its header is broken.
        ValueError: more than ``max_pixels`` pixels, or none; another format; out of all proportion.
    """
    if not data:
        raise ValueError("no bytes: the file is empty")
    check_metadata(data)
    image: ImageFile.ImageFile
    if data.startswith(b"\xff\xd8\xff") and ("JPEG" in formats or _MULTI_PICTURE in formats):
        image = JpegFile(BytesIO(data))
        # The whole file in one call of libjpeg: the GIL is let go of once, not once per 64 KiB.
        image.decodermaxblock = max(len(data), image.decodermaxblock)
        check_pixels(image.size, max_pixels)
        if "progressive" in image.info:
            check_scans(data, image.size, max_pixels)
        return image
    canvas = _webp_canvas(data)
    if canvas is not None:  # libwebp reserves memory for all of it as soon as it is opened
        check_pixels(canvas, max_pixels)
    check_directories(data, max_pixels)
    image = _open_any(data, formats)
    check_pixels(image.size, max_pixels)
    return image


def check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    """Raise ``ValueError`` for a (width, height) of no pixels or of more than ``max_pixels``."""
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"the image has no pixels: {width} x {height} (width x height)")
    if width * height > max_pixels:
        raise ValueError(
            f"the image has {width} x {height} = {width * height} pixels (width x height), more than "
            f"max_pixels={max_pixels} allows; raise max_pixels if such images are expected"
        )


def _load_plugins(*, everything: bool) -> list[str]:
    with _plugins_lock:
        (Image.init if everything else Image.preinit)()
        names = list(Image.ID)
        _hush(len(names))
        return names


@functools.cache
def _hush(plugins: int) -> None:
    # Once for each number of plugins: the look at all modules takes half as long as decoding a small picture.
    hush_plugins()


def _open_any(data: bytes, formats: Collection[str]) -> ImageFile.ImageFile:
    """What ``Image.open(formats=...)`` does with the registered plugins, without its check of the size."""
    prefix = data[:16]
    tried: set[str] = set()
    notes: list[str] = []
    for everything in (False, True):
        for name in _load_plugins(everything=everything):
            if name in tried or name not in formats:
                continue
            tried.add(name)
            factory, accept = Image.OPEN[name]
            verdict = accept is None or accept(prefix)
            if isinstance(verdict, str):
                notes.append(verdict)
            elif verdict:
                try:
                    return factory(BytesIO(data), "")
                except (SyntaxError, IndexError, TypeError, struct.error) as error:  # as Image.open: not its format
                    if accept is not None:  # those without would be asked about any file
                        notes.append(f"{name}: {_PLAIN.get(str(error), error)}")
    if others := [name for name in Image.ID if name not in formats and _claims(name, prefix)]:
        raise ValueError(
            f"this looks like {' or '.join(others)}, which formats={tuple(formats)!r} leaves out; "
            f"add it to formats if such files are expected, and trusted"
        )
    why = f" ({'; '.join(notes)})" if notes else ""
    raise UnidentifiedImageError(
        f"Pillow knows no such image: {len(data)} bytes that begin with {prefix!r}{why}; formats={tuple(formats)!r}"
    )


def _claims(name: str, prefix: bytes) -> bool:
    """Whether a plugin takes this for its format, by the signature alone."""
    accept = Image.OPEN[name][1]
    try:
        return accept is not None and accept(prefix) in (True, 1)
    except Exception:  # noqa: BLE001 - plugins trip over few bytes; this is only to name what is refused anyway
        return False


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a WebP, ``None`` for anything else. Source: RFC 9649, sections 2.5 to 2.7."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
