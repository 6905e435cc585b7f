"""From bytes to an image file whose header has been read and checked, and which way up it is.

Pillow's ``Image.open`` is not called: its limit on pixels is one number for the whole process, and it warns below
that. The plugins are asked directly, so that the limit is the decoder's own and nothing global is touched.
"""

from __future__ import annotations

import struct
import threading
from io import BytesIO

from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

_ORIENTATION = ExifTags.Base.Orientation.value
_SHORT = 3
_XMP_KEYS = ("xmp", "XML:com.adobe.xmp")

# What Pillow says where a plugin ends without a mode or with a side of 0.
_PLAIN = {"not identified by this driver": "its header gives no pixels"}

_plugins_lock = threading.Lock()


class JpegFile(JpegImageFile):
    """Pillow's JPEG file, without the parsing of EXIF that it does at opening to find a resolution."""

    def _read_dpi_from_exif(self) -> None:
        pass


def open_image(data: bytes, max_pixels: int) -> ImageFile.ImageFile:
    """Read the header of ``data``; no pixels yet.

    A JPEG is always a ``JpegFile`` (of a multi-picture file the first one).

    Raises:
        OSError: no plugin of Pillow reads this, or its header is broken.
        ValueError: more than ``max_pixels`` pixels, or none.
    """
    if not data:
        raise ValueError("no bytes: the file is empty")
    image: ImageFile.ImageFile
    if data.startswith(b"\xff\xd8\xff"):
        image = JpegFile(BytesIO(data))
        # The whole file in one call of libjpeg: the GIL is let go of once, not once per 64 KiB.
        image.decodermaxblock = max(len(data), image.decodermaxblock)
    else:
        canvas = _webp_canvas(data)
        if canvas is not None:  # libwebp reserves memory for all of it as soon as it is opened
            check_pixels(canvas, max_pixels)
        image = _open_any(data)
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


def _open_any(data: bytes) -> ImageFile.ImageFile:
    """What ``Image.open`` does with the registered plugins, without its check of the size."""
    prefix = data[:16]
    tried: set[str] = set()
    notes: list[str] = []
    for load_plugins in (Image.preinit, Image.init):
        with _plugins_lock:
            load_plugins()
            names = [name for name in Image.ID if name not in tried]
        for name in names:
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
    why = f" ({'; '.join(notes)})" if notes else ""
    raise UnidentifiedImageError(f"Pillow knows no such image: {len(data)} bytes that begin with {prefix!r}{why}")


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


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8, as ``ImageOps.exif_transpose`` finds it: in EXIF, else in XMP.

    1 where there is none, or where the metadata are beyond reading. All but JPEG must be loaded: PNG may hold EXIF
    behind its pixels, and Pillow turns TIFF upright while loading. A file without EXIF costs a look into a dict; a
    regular directory is read here in 1 to 4 microseconds, where Pillow's parser takes 15 to 50; the rest is Pillow's.
    """
    info = image.info
    exif = info.get("exif")
    if isinstance(exif, bytes):
        found = _regular_orientation(exif)
        if found is not None and (found or not any(key in info for key in _XMP_KEYS)):
            return found or 1
    elif not ("Raw profile type exif" in info or hasattr(image, "tag_v2") or any(key in info for key in _XMP_KEYS)):
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
        return int(value) if value in (2, 3, 4, 5, 6, 7, 8) else 1
    except Exception:  # noqa: BLE001 - whatever absurd metadata trip in Pillow's parser: the picture itself is sound
        return 1


def _regular_orientation(exif: bytes) -> int | None:
    """Orientation in a well-formed first directory, 0 where it has none; ``None``: let Pillow look.

    An entry is tag, type, count and four bytes of value. Source: TIFF 6.0, section 2.
    """
    start = 6 if exif.startswith(b"Exif\0\0") else 0
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[start : start + 4])
    if order is None or len(exif) < start + 8:
        return None
    (offset,) = struct.unpack_from(order + "I", exif, start + 4)
    begin = start + offset + 2
    if offset < 8 or begin > len(exif):
        return None
    (count,) = struct.unpack_from(order + "H", exif, begin - 2)
    end = begin + 12 * count
    if end > len(exif):
        return None
    found = 0
    for tag, kind, values, value in struct.iter_unpack(order + "HHIHxx", exif[begin:end]):
        if tag == _ORIENTATION:
            if kind != _SHORT or values != 1:
                return None
            found = value if 1 <= value <= 8 else 1
    return found
