"""Decodes plain JPEGs with simplejpeg (libjpeg-turbo) and plain PNGs with imagecodecs (libpng), to Pillow's pixels.

Pillow decodes all files that are not plain, so that damaged files always have Pillow's outcome, and it does the resize:
it reads the memory of the other decoder in place and is exact.

JPEGs: Pillow spends about 30 microseconds of Python per file under the GIL, this module less than 10. That pays for
small pictures, and for several threads. Plain files are sequential, 8 bits, grey or three colours, with only standard
segments before the pixels and no warning of libjpeg while decoding. ``native_jpeg`` is faster: it resizes the colour
planes before it converts them. This module is for installations without that library, and for exact pixels. Other
filters, measured for 500x400 to 224x224: Pillow 199 us; OpenCV's ``INTER_AREA`` 627 us and at worst 36 dB PSNR against
Pillow; ``INTER_LINEAR`` 133 us and 28 dB, without antialiasing.

PNGs: libpng decodes without the GIL. Speed relative to Pillow, for photographs resized to 224 in a feeder with two
threads, imagecodecs 2026.3.6 and Pillow-SIMD 12.1.1, medians of 11 rounds: 256x256 1.3, 512x512 1.5, 1600x1600 1.6.
Plain files have 8 bits, grey or RGB, with or without alpha, are not interlaced, and have no chunk that may change
pixels or orientation and no error of libpng, which prints its warnings about other files to stderr.
"""

from __future__ import annotations

import functools
import logging
import struct
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from aiofeed.kernel.decoders.geometry import View, jpeg_factor, scaled_box
from aiofeed.kernel.decoders.metadata import read_header
from aiofeed.kernel.decoders.pillow import check_pixels, render, turn_upright

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.kernel.decoders.image import DecodeImage

_log = logging.getLogger("aiofeed.decoders")

# In larger files the Python per file is a small share of the work. Speed relative to Pillow, in CPU time per picture,
# with simplejpeg 1.9.0 and Pillow-SIMD 12.1.1: 64x64 2.0, 224x224 1.3, 341x256 1.1, 500x400 and 1024x768 0.96.
WORTHWHILE_PIXELS = 1 << 17
INSTALL = "pip install 'aiofeed[turbo]'"

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks without an effect on pixels, by the length that Pillow expects, and those of any length.
_LENGTHS = {b"IHDR": 13, b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"tIME": 7, b"IEND": 0}
_ANY_LENGTH = (b"IDAT", b"bKGD", b"sBIT", b"tEXt")
_png_chunk = struct.Struct(">L4s").unpack_from
_png_header = struct.Struct(">LLBB3s").unpack_from


def _import_decoder(package: str, function: str, files: str) -> Callable[..., Any] | None:
    """A function that decodes plain ``files``, or ``None`` if its package is not installed or cannot be imported."""
    try:
        module = import_module(package)
        decoder: Callable[..., Any] = getattr(module, function)
    except ImportError as error:
        # An installed package that cannot be imported (built for another numpy, say) would go unnoticed.
        if not (isinstance(error, ModuleNotFoundError) and error.name == package):
            _log.warning("%s is installed but cannot be imported, Pillow decodes %s: %s", package, files, error)
        return None
    _log.info("plain %s are decoded by %s %s", files, package, module.__version__)
    return decoder


@functools.cache
def simplejpeg_decoder() -> Callable[..., Any] | None:
    """``simplejpeg.decode_jpeg``, or ``None`` without simplejpeg."""
    return _import_decoder("simplejpeg", "decode_jpeg", "JPEGs")


@functools.cache
def png_decoder() -> Callable[..., Any] | None:
    """``imagecodecs.png_decode``, or ``None`` without imagecodecs."""
    return _import_decoder("imagecodecs", "png_decode", "PNGs")


def decode_plain(
    decoder: DecodeImage, data: bytes, out: NDArray[np.uint8], choose_view: Callable[[int, int], View]
) -> bool:
    """Fill ``out`` as the decoder does, by the libraries that its ``backend`` allows.

    Returns:
        False if Pillow has to decode the file; ``out`` is unchanged then.
    """
    takes_jpeg = decoder.backend != "native" and ("JPEG" in decoder.formats or "MPO" in decoder.formats)
    if takes_jpeg and _decode_jpeg_into(decoder, data, out, choose_view):
        return True
    return "PNG" in decoder.formats and _decode_png_into(decoder, data, out, choose_view)


# --- JPEG


def required_simplejpeg_decoder() -> Callable[..., Any]:
    """``simplejpeg.decode_jpeg``.

    Raises:
        ImportError: simplejpeg is not installed; the message says how to install it.
    """
    decoder = simplejpeg_decoder()
    if decoder is None:
        raise ImportError(f'backend="turbo" needs simplejpeg: {INSTALL}; backend="auto" works without it')
    return decoder


def _decode_jpeg_into(
    settings: DecodeImage, data: bytes, out: NDArray[np.uint8], choose_view: Callable[[int, int], View]
) -> bool:
    """Fill ``out``, C-contiguous uint8 [H, W, 3], with ``choose_view(width, height)`` of a plain JPEG.

    Returns:
        False if Pillow has to decode the file; ``out`` is unchanged then.

    Raises:
        ValueError: more than ``max_pixels`` pixels.
    """
    any_size = settings.backend == "turbo"
    decoder = required_simplejpeg_decoder() if any_size else simplejpeg_decoder()
    if decoder is None or (header := read_header(data)) is None:
        return False
    width, height, orientation = header
    check_pixels((width, height), settings.max_pixels)
    if width * height > WORTHWHILE_PIXELS and not any_size:
        return False
    upright = (width, height) if orientation < 5 else (height, width)
    view = choose_view(*upright)
    as_it_is = view == ((0, 0, width, height), False) and out.shape == (height, width, 3) and orientation == 1
    factor = jpeg_factor(view.box, out.shape[1], out.shape[0]) if settings.scaled and not as_it_is else 1
    size = -(-width // factor), -(-height // factor)
    pixels = _decode_jpeg(decoder, data, "RGB" if as_it_is else "RGBX", size, factor)
    if pixels is None:
        return False
    if as_it_is:
        out[:] = pixels  # not decoded in place: a file that ends too early must leave `out` unchanged
    else:
        # RGBX is Pillow's memory layout of RGB: Pillow reads these bytes in place.
        picture = turn_upright(Image.frombuffer("RGBX", size, pixels, "raw", "RGBX", 0, 1), orientation)
        render(picture, View(scaled_box(view.box, *upright, factor, orientation), view.flip), out)
    return True


def _decode_jpeg(
    decoder: Callable[..., Any], data: bytes, mode: str, size: tuple[int, int], factor: int
) -> NDArray[np.uint8] | None:
    """Return the pixels at 1/``factor``, which has ``size`` (width, height); ``None`` if libjpeg warns or fails."""
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


# --- PNG


def plain_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a plain PNG, or ``None`` for data that Pillow has to decode. Source: PNG, third edition."""
    if len(data) < 33 or not data.startswith(PNG_SIGNATURE) or data[12:16] != b"IHDR":
        return None
    width, height, depth, colour, rest = _png_header(data, 16)
    if not width or not height or depth != 8 or colour not in (0, 2, 4, 6) or rest != b"\0\0\0":
        return None
    at = len(PNG_SIGNATURE)
    while at + 12 <= len(data):
        length, name = _png_chunk(data, at)
        end = at + 8 + length
        if name != b"IDAT":  # libpng compares the sums of these
            if name not in _ANY_LENGTH and _LENGTHS.get(name) != length:
                return None
            if zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
                return None
            if name == b"tEXt" and data.startswith(b"Raw profile", at + 8):  # it may have an orientation
                return None
            if name == b"IEND":
                return width, height
        at = end + 4
    return None


def _decode_png_into(
    settings: DecodeImage, data: bytes, out: NDArray[np.uint8], choose_view: Callable[[int, int], View]
) -> bool:
    """Fill ``out``, C-contiguous uint8 [H, W, 3], with ``choose_view(width, height)`` of a plain PNG.

    Returns:
        False if Pillow has to decode the file; ``out`` is unchanged then.

    Raises:
        ValueError: more than ``max_pixels`` pixels.
    """
    if (size := plain_size(data)) is None or (decoder := png_decoder()) is None:
        return False
    check_pixels(size, settings.max_pixels)
    try:
        pixels: NDArray[np.uint8] = decoder(data)
    except Exception:  # noqa: BLE001 - for any reason: Pillow decodes the file next
        return False
    if pixels.shape[:2] != size[::-1] or pixels.dtype != np.uint8:
        return False
    if pixels.ndim == 2 or pixels.shape[2] == 2:
        picture = Image.fromarray(pixels if pixels.ndim == 2 else pixels[:, :, 0]).convert("RGB")
    else:
        mode = "RGBX" if pixels.shape[2] == 4 else "RGB"  # Pillow reads RGBX in place
        picture = Image.frombuffer(mode, size, pixels, "raw", mode, 0, 1)
    render(picture, choose_view(*size), out)
    return True
