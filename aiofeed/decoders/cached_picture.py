"""Pictures kept somewhat larger than they are shown, for random crops: pixels, and how large the original was."""

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

_SIZE = struct.Struct("<II")


def larger_bytes(height: int, width: int) -> int:
    """Bytes of a kept picture."""
    return height * width * 3 + _SIZE.size


def keep(pixels: NDArray[np.uint8], original: tuple[int, int], out: NDArray[np.uint8]) -> None:
    """Fill ``out`` with a picture's pixels and the (width, height) of its original."""
    out[: pixels.size] = pixels.reshape(-1)
    out[pixels.size :] = np.frombuffer(_SIZE.pack(*original), np.uint8)


def show(
    kept: NDArray[np.uint8], size: tuple[int, int], view: Callable[[int, int], View], out: NDArray[np.uint8]
) -> tuple[Image.Image, View]:
    """The part of a kept picture that a view of the original needs, and that view in its pixels.

    Args:
        kept: what ``keep`` filled.
        size: (height, width) of its pixels.
        view: what is shown of an original of (width, height).
        out: where it is going to be shown.
    """
    height, width = size
    original = _SIZE.unpack(kept[height * width * 3 :].tobytes())
    box, flip = view(*original)
    left, upper, right, lower = mapped(box, original, (width, height))
    # As many rows as the filter looks at; all their columns, so that they lie in one piece.
    margin = math.ceil(max((lower - upper) / out.shape[0], 1.0)) + 1
    first, last = max(math.floor(upper) - margin, 0), min(math.ceil(lower) + margin, height)
    pixels = kept[first * width * 3 : last * width * 3]
    picture = Image.frombuffer("RGB", (width, last - first), pixels, "raw", "RGB", 0, 1)
    return picture, View((left, upper - first, right, lower - first), flip)


def mapped(box: Box, original: tuple[int, int], kept: tuple[int, int]) -> Box:
    """A box of a picture of ``original`` (width, height) in the pixels of one resized to ``kept``."""
    (width, height), (kept_width, kept_height) = original, kept
    return (
        box[0] * kept_width / width,
        box[1] * kept_height / height,
        min(box[2] * kept_width / width, kept_width),
        min(box[3] * kept_height / height, kept_height),
    )
