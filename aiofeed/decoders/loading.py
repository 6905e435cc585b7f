"""From the bytes of one file to an upright RGB picture, by Pillow: which scale, which way up, whose errors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection

from PIL import Image, ImageFile

from aiofeed.decoders.exif import orientation_of
from aiofeed.decoders.geometry import View, draft_size, jpeg_factor, scaled_box
from aiofeed.decoders.modes import to_rgb
from aiofeed.decoders.opening import FORMATS, JpegFile, check_pixels, open_image
from aiofeed.decoders.quiet import decoding
from aiofeed.decoders.rendering import turned

_log = logging.getLogger("aiofeed")


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
