"""Decodes plain JPEGs with simplejpeg (libjpeg-turbo) to the same pixels as Pillow, in less Python.

Pillow spends about 30 microseconds of Python per file under the GIL, this module less than 10. That pays for small
pictures, and for several threads. Only plain files are decoded: sequential, 8 bits, grey or three colours, only
standard segments before the pixels, no warning of libjpeg while decoding. Pillow decodes all others, so that damaged
files always have Pillow's outcome.

Pillow also does the resize: it reads simplejpeg's memory in place and is exact. Measured for 500x400 to 224x224: Pillow
199 us; OpenCV's ``INTER_AREA`` 627 us and at worst 36 dB PSNR against Pillow; ``INTER_LINEAR`` 133 us and 28 dB,
without antialiasing. ``native_jpeg`` is faster: it resizes the colour planes before it converts them. This module is
for installations without that library, and for exact pixels.
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
from aiofeed.decoders.metadata import JPEG_METADATA_BYTES, orientation_in_info
from aiofeed.decoders.pillow import check_pixels, render, turn_upright

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger("aiofeed.decoders")

# In larger files the Python per file is a small share of the work. Speed relative to Pillow, in CPU time per picture,
# with simplejpeg 1.9.0 and Pillow-SIMD 12.1.1: 64x64 2.0, 224x224 1.3, 341x256 1.1, 500x400 and 1024x768 0.96.
WORTHWHILE_PIXELS = 1 << 17
INSTALL = "pip install 'aiofeed[turbo]'"

_SOF = (0xFFC0, 0xFFC1)  # baseline and extended sequential frames
_SOS = 0xFFDA
_APP1 = 0xFFE1
# Tables, restart intervals, application data, comments. A file with other segments before its first scan is not plain.
_SKIPPED = frozenset({0xFFDB, 0xFFC4, 0xFFDD, *range(0xFFE0, 0xFFF0), 0xFFFE})
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_segment = struct.Struct(">HH").unpack_from
_frame = struct.Struct(">BHHB").unpack_from


class JpegHeader(NamedTuple):
    """Width and height as stored, and EXIF orientation, 1 to 8."""

    width: int
    height: int
    orientation: int


@functools.cache
def simplejpeg_decoder() -> Callable[..., Any] | None:
    """``simplejpeg.decode_jpeg``, or ``None`` if simplejpeg is not installed or cannot be imported."""
    try:
        simplejpeg = import_module("simplejpeg")
    except ImportError as error:
        # An installed package that cannot be imported (built for another numpy, say) would go unnoticed.
        if not (isinstance(error, ModuleNotFoundError) and error.name == "simplejpeg"):
            _log.warning("simplejpeg is installed but cannot be imported, Pillow decodes JPEGs: %s", error)
        return None
    decoder: Callable[..., Any] = simplejpeg.decode_jpeg
    _log.info("plain JPEGs are decoded by simplejpeg %s", simplejpeg.__version__)
    return decoder


def required_simplejpeg_decoder() -> Callable[..., Any]:
    """``simplejpeg.decode_jpeg``.

    Raises:
        ImportError: simplejpeg is not installed; the message says how to install it.
    """
    decoder = simplejpeg_decoder()
    if decoder is None:
        raise ImportError(f'backend="turbo" needs simplejpeg: {INSTALL}; backend="auto" works without it')
    return decoder


def read_header(data: bytes) -> JpegHeader | None:
    """The header of a plain JPEG, or ``None`` for data that Pillow has to decode. Source: ITU T.81, annex B."""
    if len(data) > JPEG_METADATA_BYTES or not data.startswith(b"\xff\xd8\xff"):
        return None
    at, width = 2, 0
    info: dict[str, bytes] = {}
    try:
        while True:
            marker, length = _segment(data, at)
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
    except struct.error:  # the data ends before the first scan
        return None
    return JpegHeader(width, height, orientation_in_info(info) if info else 1)


def decode_jpeg_into(
    out: NDArray[np.uint8],
    data: bytes,
    choose_view: Callable[[int, int], View],
    decoder: Callable[..., Any],
    *,
    scaled: bool,
    max_pixels: int,
    any_size: bool,
) -> bool:
    """Fill ``out``, C-contiguous uint8 [H, W, 3], with ``choose_view(width, height)`` of a plain JPEG.

    Args:
        decoder: ``simplejpeg.decode_jpeg``.
        scaled: decode at a smaller scale, by the rule of ``load_picture``.
        any_size: also decode pictures of more than ``WORTHWHILE_PIXELS``.

    Returns:
        False if Pillow has to decode the file; ``out`` is unchanged then.

    Raises:
        ValueError: more than ``max_pixels`` pixels.
    """
    header = read_header(data)
    if header is None:
        return False
    width, height, orientation = header
    check_pixels((width, height), max_pixels)
    if width * height > WORTHWHILE_PIXELS and not any_size:
        return False
    upright = (width, height) if orientation < 5 else (height, width)
    view = choose_view(*upright)
    if view == ((0, 0, width, height), False) and out.shape == (height, width, 3) and orientation == 1:
        # No resize. The pixels are still copied: a file that ends too early must leave `out` unchanged.
        pixels = _decode(decoder, data, "RGB", (width, height), 1)
        if pixels is None:
            return False
        out[:] = pixels
        return True
    factor = jpeg_factor(view.box, out.shape[1], out.shape[0]) if scaled else 1
    size = -(-width // factor), -(-height // factor)
    pixels = _decode(decoder, data, "RGBX", size, factor)
    if pixels is None:
        return False
    # RGBX is Pillow's memory layout of RGB: Pillow reads these bytes in place.
    picture = turn_upright(Image.frombuffer("RGBX", size, pixels, "raw", "RGBX", 0, 1), orientation)
    render(picture, View(scaled_box(view.box, *upright, factor, orientation), view.flip), out)
    return True


def _decode(
    decoder: Callable[..., Any], data: bytes, mode: str, size: tuple[int, int], factor: int
) -> NDArray[np.uint8] | None:
    """The pixels at 1/``factor``, which has ``size`` (width, height); ``None`` if libjpeg warns or fails."""
    width, height = size
    try:
        # strict turns libjpeg's warnings (a truncated file, a broken code) into errors, and Pillow decodes the file.
        # min_width and min_height are exactly those of one scale, which selects it.
        pixels: NDArray[np.uint8] = decoder(
            data, mode, min_height=height, min_width=width, min_factor=factor, strict=True
        )
    except Exception:  # noqa: BLE001 - for any reason: Pillow decodes the file next
        return None
    return pixels if pixels.shape == (height, width, len(mode)) else None
