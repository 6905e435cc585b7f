"""The cached form of pictures for random crops: pixels somewhat larger than a sample, and the size of the original."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from aiofeed.decoders.geometry import Box, View

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_ORIGINAL_SIZE = struct.Struct("<II")  # width, height


def cached_picture_bytes(height: int, width: int) -> int:
    """Bytes of a cached picture of height x width pixels."""
    return height * width * 3 + _ORIGINAL_SIZE.size


def write_cached_picture(pixels: NDArray[np.uint8], original: tuple[int, int], out: NDArray[np.uint8]) -> None:
    """Write pixels, uint8 [H, W, 3], and the (width, height) of their original into ``out``, uint8 [bytes]."""
    out[: pixels.size] = pixels.reshape(-1)
    out[pixels.size :] = np.frombuffer(_ORIGINAL_SIZE.pack(*original), np.uint8)


def crop_cached_picture(
    cached: NDArray[np.uint8], shape: tuple[int, int], choose_view: Callable[[int, int], View], target_height: int
) -> tuple[Image.Image, View]:
    """The rows of a cached picture that a view of the original needs, and that view in their pixels.

    Args:
        cached: a picture written by ``write_cached_picture``.
        shape: (height, width) of its pixels.
        choose_view: selects a view of an original of (width, height).
        target_height: height that the view is going to be resized to.
    """
    height, width = shape
    original = _ORIGINAL_SIZE.unpack(cached[height * width * 3 :].tobytes())
    box, flip = choose_view(*original)
    left, upper, right, lower = map_box(box, original, (width, height))
    # The filter needs `margin` rows more on both sides. All columns, so that the rows are contiguous.
    margin = math.ceil(max((lower - upper) / target_height, 1.0)) + 1
    first, last = max(math.floor(upper) - margin, 0), min(math.ceil(lower) + margin, height)
    pixels = cached[first * width * 3 : last * width * 3]
    picture = Image.frombuffer("RGB", (width, last - first), pixels, "raw", "RGB", 0, 1)
    return picture, View((left, upper - first, right, lower - first), flip)


def map_box(box: Box, original: tuple[int, int], cached: tuple[int, int]) -> Box:
    """Convert a box of a picture of ``original`` (width, height) to the same picture resized to ``cached``."""
    (width, height), (cached_width, cached_height) = original, cached
    return (
        box[0] * cached_width / width,
        box[1] * cached_height / height,
        min(box[2] * cached_width / width, cached_width),
        min(box[3] * cached_height / height, cached_height),
    )
