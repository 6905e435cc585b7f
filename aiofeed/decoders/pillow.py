"""Decoding with Pillow: opening files safely, silencing its warnings, and drawing pixels into a row.

Pillow's ``Image.open`` is not called: its limit on pixels is one number for the whole process, and it warns below that.
The plugins are asked directly, so that the limit is the decoder's own and nothing global is touched.

Damaged files make Pillow warn and log thousands of lines that are of no use to a training run; the error says what is
wrong. ``warnings.catch_warnings`` changes the filters of all threads, so the name ``warnings`` in Pillow's modules
stands for an object that drops warnings of a decoding thread and passes on all others; loggers get such a filter.
"""

from __future__ import annotations

import functools
import logging
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

from aiofeed.decoders.geometry import View, draft_size, jpeg_factor, scaled_box
from aiofeed.decoders.metadata import check_directories, check_metadata, check_scans, orientation_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


_log = logging.getLogger("aiofeed.decoders")
# What people train on. Left out on purpose: EPS, which Pillow hands to Ghostscript, a PostScript interpreter; what has
# no signature (TGA, PCD, IM, ...), so that damage to another format may pass for it; what has pictures of further
# formats inside (ICO, ICNS, BLP, IPTC); what Pillow can only recognise (WMF, HDF5, MPEG, ...); what nobody has.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
_MULTI_PICTURE = "MPO"  # a JPEG with further ones behind it; no plugin of its own in Pillow
# What Pillow says where a plugin ends without a mode or with a side of 0.
_PLAIN = {"not identified by this driver": "its header gives no pixels"}
_plugins_lock = threading.Lock()
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class _Decoding(threading.local):
    now = False


decoding = _Decoding()
"""``now``: whether the calling thread is decoding. Set and reset by who decodes."""


class _Warnings:
    """Stands for the module ``warnings``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(
        self, message: Any, category: type[Warning] | None = None, stacklevel: int = 1, *args: Any, **options: Any
    ) -> None:
        if not decoding.now:
            warnings.warn(message, category, stacklevel + 1, *args, **options)


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not decoding.now


_warnings = _Warnings()


_filter = _Filter()


def hush_plugins() -> None:
    """See to the modules of Pillow that are loaded by now; those that were seen to stay as they are."""
    for name, module in list(sys.modules.items()):
        if name.startswith("PIL."):
            if getattr(module, "warnings", None) is warnings:
                module.warnings = _warnings  # type: ignore[attr-defined]
            if isinstance(logger := getattr(module, "logger", None), logging.Logger):
                logger.addFilter(_filter)


def to_rgb(image: Image.Image) -> Image.Image:
    """The loaded ``image`` as mode RGB; itself where it is RGB already.

    Modes of 8 bits and fewer are Pillow's ``convert("RGB")``: alpha is dropped, not composed. The others, which
    Pillow would clip, are scaled by a fixed rule:

    - ``I;16`` and its byte orders: the high byte, as Pillow itself reads 16-bit colour;
    - ``I``: what Pillow opens 16-bit grey as in some formats, so the same; ``ValueError`` outside 0 to 65535;
    - ``F``: times 255 where all values lie in [0, 1], as they are where they lie in [0, 255], rounded either way;
      ``ValueError`` for anything else, NaN and infinity included.
    """
    mode = image.mode
    if mode == "RGB":
        return image
    if mode.startswith("I;16"):
        return _grey(np.asarray(image) >> 8)
    if mode == "I":
        return _grey(_checked(image, 65535) >> 8)
    if mode == "F":
        levels = _checked(image, 255)
        return _grey(np.rint(levels * 255 if levels.max() <= 1 else levels))
    # A transparent colour is of no use without alpha. Pillow would translate it and warn where it cannot.
    image.info.pop("transparency", None)
    if mode == "La":  # Pillow converts it to LA only
        image = image.convert("LA")
    return image.convert("RGB")


def _checked(image: Image.Image, highest: int) -> NDArray[Any]:
    levels = np.asarray(image)
    low, high = levels.min(), levels.max()
    if not (low >= 0 and high <= highest):  # also where one is NaN
        raise ValueError(
            f"pixels of mode {image.mode} must lie in 0 to {highest} to be scaled to 8 bits, got {low} to {high}"
        )
    return levels


def _grey(levels: NDArray[Any]) -> Image.Image:
    return Image.fromarray(levels.astype(np.uint8)).convert("RGB")


def load_picture(
    data: bytes,
    choose: Callable[[int, int], View],
    *,
    target: tuple[int, int] | None,
    max_pixels: int,
    formats: Collection[str] = FORMATS,
) -> tuple[Image.Image, View]:
    """Decode ``data`` to an upright RGB picture; what ``choose(width, height)`` chose, in that picture's pixels.

    Args:
        target: (width, height) that the chosen box is to fill; a JPEG is then decoded at the smallest scale that
            leaves the box at least twice as large on both axes. ``None``: full scale.

    Raises:
        OSError, ValueError: the picture cannot be had. Whatever else Pillow's plugins raise over broken files
            (``SyntaxError``, ``struct.error``, ``zlib.error``, ...) becomes an ``OSError`` that says so.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        _tell_of_truncated_images()
    decoding.now = True
    try:
        image = open_image(data, max_pixels, formats)
        if not isinstance(image, JpegFile):
            image.load()
            check_pixels(image.size, max_pixels)  # an icon may turn out larger than its directory said
        orientation = orientation_of(image)
        width, height = image.size if orientation < 5 else image.size[::-1]
        view = choose(width, height)
        factor = 1
        if target is not None and isinstance(image, JpegFile):
            factor = jpeg_factor(view.box, *target)
            if factor > 1:
                # No mode is asked for, so only the size changes: greyscale and CMYK keep their colours.
                image.draft(None, draft_size(*image.size, factor))
        image.load()
        picture = to_rgb(image)
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # Plugins trip over broken files in their own ways.
        raise OSError(f"broken image: {type(error).__name__}: {error}") from error
    finally:
        decoding.now = False
    picture = turned(picture, orientation)
    return picture, View(scaled_box(view.box, width, height, factor, orientation), view.flip)


@functools.cache
def _tell_of_truncated_images() -> None:
    _log.warning(
        "ImageFile.LOAD_TRUNCATED_IMAGES is set: of a truncated image whatever is missing is made up, without an error"
    )


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


def turned(picture: Image.Image, orientation: int) -> Image.Image:
    """The stored picture, upright. Before a resize, which is horizontal first: later, the last bits would differ."""
    return picture if orientation == 1 else picture.transpose(_UPRIGHT[orientation])


def render(picture: Image.Image, view: View, out: NDArray[np.uint8]) -> None:
    """Fill ``out``, C-contiguous uint8 [H, W, 3], with what ``view`` shows of a ``picture``, RGB or RGBX."""
    height, width, _ = out.shape
    small = picture.resize((width, height), Image.Resampling.BILINEAR, box=view.box)
    if view.flip:
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # Pillow keeps RGB in four bytes a pixel, so it must pack, and packs into bytes only. Of what is public this is the
    # fastest for 224 x 224: 22 us, np.asarray(small) 24 us; a numpy copy from the four bytes takes 100 us.
    out.data.cast("B")[:] = small.tobytes("raw", "RGB")


hush_plugins()
