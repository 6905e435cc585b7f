"""JPEGs by libjpeg-turbo through simplejpeg, from the same bytes to the same pixels as Pillow, in less Python.

Pillow spends some 30 microseconds of Python, all under the GIL, before and after libjpeg works on a file; this spends
less than 10. So it pays for small pictures, and for several threads. Only the plain is taken: sequential, 8 bits, grey
or three colours, nothing odd in front of the pixels, no complaint of libjpeg's while decoding. All else is left to
Pillow, whose verdict on a damaged file is therefore the only one.

The rest of the way is Pillow's too: its resize reads simplejpeg's memory in place, and is as fast as it is exact.
OpenCV's ``INTER_AREA`` takes three times as long (500x400 to 224x224: 627 us to 199 us; worst PSNR against Pillow
36 dB), and ``INTER_LINEAR`` does not antialias (133 us, 28 dB). What is faster is not to convert and resize all three
colours at the size of the file: ``native``, which needs a compiler. This is for where there is none, and for exact
pixels.
"""

from __future__ import annotations

import functools
import logging
import struct
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from aiofeed.decoders.geometry import View, jpeg_factor, scaled_box
from aiofeed.decoders.metadata import JPEG_METADATA, orientation_in_info
from aiofeed.decoders.pillow import check_pixels, render, turned

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("aiofeed.decoders")

# Beyond, a file's Python is a small share of its work: measured with simplejpeg 1.9.0 and Pillow-SIMD 12.1.1, CPU per
# picture, 64x64 2.0 times as fast, 224x224 1.3 times, 341x256 1.1 times, 500x400 and 1024x768 0.96 times.
WORTHWHILE_PIXELS = 1 << 17
INSTALL = "pip install 'aiofeed[turbo]'"

_SOF = (0xFFC0, 0xFFC1)
_SOS = 0xFFDA
_APP1 = 0xFFE1
# Tables, restart intervals, application data, comments. A file with anything else before its first scan is not plain.
_SKIPPED = frozenset({0xFFDB, 0xFFC4, 0xFFDD, *range(0xFFE0, 0xFFF0), 0xFFFE})
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_segment = struct.Struct(">HH").unpack_from
_frame = struct.Struct(">BHHB").unpack_from


class JpegHeader(NamedTuple):
    """What is told in front of a JPEG's first scan; pixels as stored."""

    width: int
    height: int
    orientation: int


@functools.cache
def jpeg_decoder() -> Callable[..., Any] | None:
    """``simplejpeg.decode_jpeg``; ``None`` where it is not installed, or of no use."""
    try:
        simplejpeg = import_module("simplejpeg")
    except ImportError as error:
        # One that is there but does not load, for a numpy of another age say, would go unnoticed.
        if not (isinstance(error, ModuleNotFoundError) and error.name == "simplejpeg"):
            _log.warning("simplejpeg is installed but cannot be imported, JPEGs are left to Pillow: %s", error)
        return None
    found: Callable[..., Any] = simplejpeg.decode_jpeg
    _log.info("plain JPEGs are decoded by simplejpeg %s", simplejpeg.__version__)
    return found


def required_decoder() -> Callable[..., Any]:
    """The same.

    Raises:
        ImportError: it is not installed; says how.
    """
    decoder = jpeg_decoder()
    if decoder is None:
        raise ImportError(f'backend="turbo" needs simplejpeg: {INSTALL}; backend="auto" does without where it must')
    return decoder


def read_header(data: bytes) -> JpegHeader | None:
    """The header of a plain JPEG; ``None`` for all that is better left to Pillow. Source: ITU T.81, annex B."""
    if len(data) > JPEG_METADATA or not data.startswith(b"\xff\xd8\xff"):
        return None
    at, width = 2, 0
    info: dict[str, bytes] | None = None
    try:
        while True:
            marker, length = _segment(data, at)
            if marker in _SKIPPED:
                if marker == _APP1:
                    info = _metadata(data[at + 4 : at + 2 + length], info or {})
                    if info is None:
                        return None
            elif marker in _SOF and not width:
                precision, height, width, components = _frame(data, at + 4)
                if precision != 8 or components not in (1, 3) or not width or not height:
                    return None
            elif marker == _SOS and width:
                break
            else:
                return None
            if length < 2:
                return None
            at += 2 + length
    except struct.error:  # it ends before its pixels begin
        return None
    return JpegHeader(width, height, 1 if info is None else orientation_in_info(info))


def _metadata(payload: bytes, info: dict[str, bytes]) -> dict[str, bytes] | None:
    """``info`` with what Pillow would keep of an APP1 segment; ``None`` where it would put two together."""
    name = "exif" if payload.startswith(b"Exif\0\0") else "xmp" if payload.startswith(_XMP) else None
    if name is None:
        return info
    if name in info:
        return None
    return {**info, name: payload if name == "exif" else payload[len(_XMP) :]}


def decode_jpeg_into(
    out: NDArray[np.uint8],
    data: bytes,
    choose: Callable[[int, int], View],
    decoder: Callable[..., Any],
    *,
    scaled: bool,
    max_pixels: int,
    large: bool,
) -> bool:
    """Fill ``out``, C-contiguous uint8 [H, W, 3], with what ``choose(width, height)`` shows of a plain JPEG.

    Args:
        decoder: ``simplejpeg.decode_jpeg``.
        scaled: decode at a smaller scale, by the rule of ``load_picture``.
        large: take pictures of more than ``WORTHWHILE_PIXELS`` too.

    Returns:
        False where Pillow is to be asked; ``out`` is as it was.

    Raises:
        ValueError: more than ``max_pixels`` pixels.
    """
    header = read_header(data)
    if header is None:
        return False
    width, height, orientation = header
    check_pixels((width, height), max_pixels)
    if width * height > WORTHWHILE_PIXELS and not large:
        return False
    shown = (width, height) if orientation < 5 else (height, width)
    view = choose(*shown)
    if view == ((0, 0, width, height), False) and out.shape == (height, width, 3) and orientation == 1:
        # As it is. It costs a copy of its own, since a file that ends too early must leave ``out`` alone.
        pixels = _decoded(decoder, data, "RGB", (width, height), 1)
        if pixels is None:
            return False
        out[:] = pixels
        return True
    factor = jpeg_factor(view.box, out.shape[1], out.shape[0]) if scaled else 1
    size = -(-width // factor), -(-height // factor)
    pixels = _decoded(decoder, data, "RGBX", size, factor)
    if pixels is None:
        return False
    # RGBX is what Pillow has in memory for RGB: it works on these bytes where they are.
    picture = turned(Image.frombuffer("RGBX", size, pixels, "raw", "RGBX", 0, 1), orientation)
    render(picture, View(scaled_box(view.box, *shown, factor, orientation), view.flip), out)
    return True


def _decoded(
    decoder: Callable[..., Any], data: bytes, mode: str, size: tuple[int, int], factor: int
) -> NDArray[np.uint8] | None:
    """The pixels at 1/``factor``, which is ``size`` (width, height); ``None`` where libjpeg is not quite happy."""
    width, height = size
    try:
        # Strict: what libjpeg only warns about (a file cut off, a broken code) is an error here, and Pillow's to judge.
        # The least width and height, as they are exactly those of one scale, select it.
        pixels: NDArray[np.uint8] = decoder(
            data, mode, min_height=height, min_width=width, min_factor=factor, strict=True
        )
    except Exception:  # noqa: BLE001 - whatever its reason: Pillow is asked next
        return None
    return pixels if pixels.shape == (height, width, len(mode)) else None
