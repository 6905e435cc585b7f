"""Decoding with Pillow: opens files within limits, silences Pillow's warnings, and writes pixels into a row.

``Image.open`` is not used: its pixel limit is one number for the whole process, and it warns below that limit. This
module calls Pillow's plugins directly with the decoder's own limit and changes no global setting.

Damaged files make Pillow warn and log thousands of lines; the error that is raised says what is wrong.
``warnings.catch_warnings`` changes the filters of all threads. So this module replaces the name ``warnings`` in
Pillow's modules by an object that drops the warnings of threads that decode, and gives Pillow's loggers such a filter.
"""

from __future__ import annotations

import functools
import logging
import re
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from aiofeed.kernel.decoders.geometry import FORMATS, View, draft_size, jpeg_factor, scaled_box
from aiofeed.kernel.decoders.metadata import check_metadata, check_scans, check_tiff, orientation_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("aiofeed.decoders")

_MULTI_PICTURE = "MPO"  # a JPEG followed by further JPEGs; Pillow has no separate plugin that accepts it
# Replaces the message that Pillow gives if a plugin finds no mode, or a side of 0.
_CLEARER_MESSAGES = {"not identified by this driver": "its header gives no pixels"}
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# TIFF 6.0, sections 8 and 19.
BITS_PER_SAMPLE, _COMPRESSION, _PHOTOMETRY, _PLANES, SAMPLE_FORMAT = 258, 259, 262, 284, 339
_WHITE_IS_ZERO, _YCBCR = 0, 6
_JPEGS = (6, 7)


# --- silencing Pillow


_thread = threading.local()
"""Its attribute ``decoding`` is true in threads that decode."""


class _QuietWarnings:
    """Replaces the module ``warnings`` inside Pillow's modules."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(
        self, message: Any, category: type[Warning] | None = None, stacklevel: int = 1, *args: Any, **options: Any
    ) -> None:
        if not getattr(_thread, "decoding", False):
            warnings.warn(message, category, stacklevel + 1, *args, **options)


def _quiet_filter(record: logging.LogRecord) -> bool:
    return not getattr(_thread, "decoding", False)


_quiet_warnings = _QuietWarnings()
_plugins_lock = threading.Lock()


@functools.cache
def _silence_plugins(plugins: int) -> None:
    """Silence the modules of Pillow that are loaded.

    Runs once for each number of ``plugins``: the loop over all modules takes half as long as decoding a small picture.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("PIL."):
            if getattr(module, "warnings", None) is warnings:
                module.warnings = _quiet_warnings  # type: ignore[attr-defined]
            if isinstance(logger := getattr(module, "logger", None), logging.Logger):
                logger.addFilter(_quiet_filter)


def _load_plugins(*, all_formats: bool) -> list[str]:
    """Load Pillow's common or all plugins; the names of those that are loaded."""
    with _plugins_lock:
        (Image.init if all_formats else Image.preinit)()
        names = list(Image.ID)
        _silence_plugins(len(names))
        return names


def known_formats() -> set[str]:
    """Return the names that ``formats`` may contain: all formats with a plugin, third-party plugins included."""
    _load_plugins(all_formats=True)
    return {*Image.OPEN, *FORMATS, _MULTI_PICTURE}


# --- opening


class JpegFile(JpegImageFile):
    """Pillow's JPEG file without the EXIF parsing that it does on opening, to find a resolution."""

    def _read_dpi_from_exif(self) -> None:
        pass


def open_image(data: bytes, max_pixels: int, formats: Collection[str] = FORMATS) -> ImageFile.ImageFile:
    """Read the header of ``data``, no pixels.

    A JPEG is always a ``JpegFile`` (of a multi-picture file, the first picture).

    Raises:
        OSError: the file has none of ``formats``, or a broken header.
        ValueError: no pixels, or more than ``max_pixels``; a format that is left out; metadata out of proportion.
    """
    if not data:
        raise ValueError("no bytes: the file is empty")
    check_metadata(data)
    image: ImageFile.ImageFile
    if data.startswith(b"\xff\xd8\xff") and ("JPEG" in formats or _MULTI_PICTURE in formats):
        image = JpegFile(BytesIO(data))
        # Pass the whole file to libjpeg in one call, which releases the GIL once instead of once per 64 KiB.
        image.decodermaxblock = max(len(data), image.decodermaxblock)
        check_pixels(image.size, max_pixels)
        if "progressive" in image.info:
            check_scans(data, image.size, max_pixels)
        return image
    canvas = _webp_canvas(data)
    if canvas is not None:  # libwebp allocates the whole canvas on opening
        check_pixels(canvas, max_pixels)
    check_tiff(data, max_pixels)
    image = _open_with_plugins(data, formats)
    check_pixels(image.size, max_pixels)
    return image


def check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    """Raise ``ValueError`` if a (width, height) has no pixels or more than ``max_pixels``."""
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"the image has no pixels: {width} x {height} (width x height)")
    if width * height > max_pixels:
        raise ValueError(
            f"the image has {width} x {height} = {width * height} pixels (width x height), more than "
            f"max_pixels={max_pixels} allows; raise max_pixels if such images are expected"
        )


def _open_with_plugins(data: bytes, formats: Collection[str]) -> ImageFile.ImageFile:
    """Open ``data`` as ``Image.open(formats=...)`` does, without its size check."""
    prefix = data[:16]
    tried: set[str] = set()
    reasons: list[str] = []
    for all_formats in (False, True):
        for name in _load_plugins(all_formats=all_formats):
            if name in tried or name not in formats:
                continue
            tried.add(name)
            factory, accept = Image.OPEN[name]
            accepted = accept is None or accept(prefix)
            if isinstance(accepted, str):  # the plugin's reason for refusing
                reasons.append(accepted)
            elif accepted:
                try:
                    return factory(BytesIO(data), "")
                except (SyntaxError, IndexError, TypeError, struct.error) as error:  # as Image.open: not this format
                    if accept is not None:  # a plugin without a signature would give a reason for any file
                        reasons.append(f"{name}: {_CLEARER_MESSAGES.get(str(error), error)}")
    if others := [name for name in Image.ID if name not in formats and _has_signature(name, prefix)]:
        raise ValueError(
            f"this looks like {' or '.join(others)}, which formats={tuple(formats)!r} leaves out; "
            f"add it to formats if such files are expected and trusted"
        )
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise UnidentifiedImageError(
        f"Pillow cannot identify this image: {len(data)} bytes that begin with {prefix!r}{why}; "
        f"formats={tuple(formats)!r}"
    )


def _has_signature(name: str, prefix: bytes) -> bool:
    """Return whether a plugin accepts ``prefix`` as the start of a file of its format."""
    accept = Image.OPEN[name][1]
    try:
        return accept is not None and accept(prefix) in (True, 1)
    except Exception:  # noqa: BLE001 - plugins fail on short prefixes; the answer only names a format that is refused
        return False


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a WebP, or ``None`` for other data. Source: RFC 9649, sections 2.5 to 2.7."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


# --- decoding


def load_picture(
    data: bytes,
    choose_view: Callable[[int, int], View],
    *,
    target: tuple[int, int] | None,
    max_pixels: int,
    formats: Collection[str] = FORMATS,
    convert: Callable[[Image.Image], Image.Image] | None = None,
) -> tuple[Image.Image, View]:
    """Decode ``data`` to an upright RGB picture; returns it and the chosen view in its pixels.

    Args:
        choose_view: called with the upright picture's width and height at full scale.
        target: (width, height) to which the view is going to be resized; a JPEG is decoded at the smallest scale that
            keeps the view at least twice as large on both axes. ``None``: full scale.
        convert: called with the loaded picture, which has the numbers of the file; ``None``: ``to_rgb``.

    Raises:
        OSError, ValueError: the picture cannot be decoded. Other errors of Pillow's plugins over broken files
            (``SyntaxError``, ``struct.error``, ``zlib.error``, ...) become an ``OSError`` that quotes them.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        _warn_about_truncated_images()
    _thread.decoding = True
    try:
        image = open_image(data, max_pixels, formats)
        if not isinstance(image, JpegFile):
            if image.format == "TIFF":
                _mend_tiff(image, as_stored=convert is not None)
            if image.format == "BMP" and image.mode == "1" and (bits := data[24 if data[14] == 12 else 28]) != 1:
                raise ValueError(f"this BMP has two colours in {bits} bits, and Pillow reads one: save it again as PNG")
            image.load()
            check_pixels(image.size, max_pixels)  # an icon may be larger than its directory states
        orientation = orientation_of(image)
        width, height = image.size if orientation < 5 else image.size[::-1]
        view = choose_view(width, height)
        factor = 1
        if target is not None and isinstance(image, JpegFile):
            factor = jpeg_factor(view.box, *target)
            if factor > 1:
                # Without a mode only the size changes: greyscale and CMYK keep their colours.
                image.draft(None, draft_size(*image.size, factor))
        image.load()
        picture = (convert or to_rgb)(image)
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # plugins raise errors of many kinds over broken files
        raise OSError(f"broken image: {type(error).__name__}: {error}") from error
    finally:
        _thread.decoding = False
    picture = turn_upright(picture, orientation)
    return picture, View(scaled_box(view.box, width, height, factor, orientation), view.flip)


@functools.cache
def _warn_about_truncated_images() -> None:
    _log.warning(
        "ImageFile.LOAD_TRUNCATED_IMAGES is set: Pillow fills in the missing part of truncated images without an error"
    )


def _mend_tiff(image: Any, *, as_stored: bool) -> None:
    """Let Pillow read the numbers of an opened TIFF rightly, and with ``as_stored`` without changes.

    Raises:
        ValueError: Pillow cannot, and would give others.
    """
    tags, mode, what = image.tag_v2, image.mode, ""
    codec, raw = (image.tile[0].codec_name, image.tile[0].args[0]) if image.tile else ("", "")
    bits, has_alpha = max(tags.get(BITS_PER_SAMPLE, (1,))), raw.startswith("RGBa") or mode in ("LA", "PA")
    if tags.get(_PLANES) == 2 and (mode == "LAB" or (as_stored and has_alpha) or (codec == "raw" and bits > 8)):
        what = f"{mode} with {bits} bits in separate planes"
    elif tags.get(_PHOTOMETRY) == _YCBCR and tags.get(_COMPRESSION, 1) not in _JPEGS and (as_stored or codec == "raw"):
        what = "YCbCr"
    if what:
        raise ValueError(f"this TIFF has {what}, which Pillow does not read: pass a decoder of your own as decode=")
    for at, tile in enumerate(image.tile):
        raw, *more = tile.args
        if codec == "libtiff":  # it gives numbers in the order of the machine, for which Pillow cares in "I;16" only
            raw = re.sub(r"^([IF];\d\d)B?([SF])$", r"\1N\2", raw)
        if as_stored:  # Pillow inverts grey of which 0 is white, and divides by an associated alpha
            raw = raw.replace("a", "A") if mode == "RGBA" else raw.replace("I", "").rstrip(";") if mode in "1L" else raw
        image.tile[at] = tile._replace(args=(raw, *more))


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the loaded ``image`` in mode RGB; ``image`` itself if it is RGB.

    Modes of up to 8 bits are converted by Pillow's ``convert("RGB")``: alpha is dropped, not composed. Pillow would
    clip the other modes; they are scaled by fixed rules:

    - ``I;16`` in any byte order: the high byte, as Pillow reads 16-bit colour;
    - ``I``, as which Pillow opens 16-bit grey in some formats: the same; ``ValueError`` outside 0 to 65535;
    - ``F``: times 255 if all values lie in [0, 1], unchanged if they lie in [0, 255], then rounded; ``ValueError`` for
      other values, NaN and infinity included.

    In a TIFF they are inverted if 0 is white, as Pillow does with 8 bits; ``ValueError`` for negative ones of 8 bits.
    """
    mode = image.mode
    if mode == "RGB":
        return image
    levels: NDArray[Any] | None = None
    if mode.startswith("I;16"):
        levels = np.asarray(image) >> 8
    elif mode == "I":
        levels = _levels(image, 65535) >> 8
    elif mode == "F":
        levels = _levels(image, 255)
        levels = np.rint(levels * 255 if levels.max() <= 1 else levels)
    tags: Any = image.tag_v2 if image.format == "TIFF" else {_PHOTOMETRY: 1}  # type: ignore[attr-defined]
    if levels is not None:
        levels = 255 - levels if tags.get(_PHOTOMETRY, _WHITE_IS_ZERO) == _WHITE_IS_ZERO else levels
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if mode == "L" and tags.get(SAMPLE_FORMAT) == (2,):
        _levels(image, 127)
    # Without alpha a transparent colour has no effect. Pillow would convert it, and warn if it cannot.
    image.info.pop("transparency", None)
    if mode == "La":  # Pillow converts it to LA only
        image = image.convert("LA")
    return image.convert("RGB")


def _levels(image: Image.Image, highest: int) -> NDArray[Any]:
    levels = np.asarray(image)
    low, high = levels.min(), levels.max()
    if not (low >= 0 and high <= highest):  # NaN fails this too
        raise ValueError(
            f"pixels of mode {image.mode} must lie in 0 to {highest} to be scaled to 8 bits, got {low} to {high}"
        )
    return levels


def turn_upright(picture: Image.Image, orientation: int) -> Image.Image:
    """Turn the stored picture upright. Call it before a resize: turning afterwards changes the lowest bits."""
    return picture if orientation == 1 else picture.transpose(_UPRIGHT[orientation])


def render(picture: Image.Image, view: View, out: NDArray[np.uint8]) -> None:
    """Resize ``view`` of a ``picture``, RGB or RGBX, into ``out``, C-contiguous uint8 [H, W, 3]."""
    height, width, _ = out.shape
    resized = picture.resize((width, height), Image.Resampling.BILINEAR, box=view.box)
    if view.flip:
        resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # Pillow stores RGB in four bytes per pixel and packs it into bytes objects only. For 224 x 224, tobytes takes
    # 22 us, np.asarray(resized) 24 us, a numpy copy from the four bytes 100 us.
    out.data.cast("B")[:] = resized.tobytes("raw", "RGB")


# The modules that the imports above load; _load_plugins() silences the others.
_silence_plugins(0)
