"""Computes the part of a picture that a sample shows, and the scale at which a JPEG is decoded for it. Pure arithmetic.

Also has the limits that all decoders of images share.

Lengths are pixels of the upright picture (EXIF orientation applied) unless a name says otherwise. A box is
(left, upper, right, lower), in fractions of pixels, inside the picture.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import NamedTuple, TypeAlias

from aiofeed.kernel.sampling.order import SplitMix64

Box: TypeAlias = tuple[float, float, float, float]

# The formats that training data comes in. Left out: EPS, which Pillow passes to Ghostscript, a PostScript interpreter;
# formats without a signature (TGA, PCD, IM, ...), which accept damaged files of other formats; containers of further
# formats (ICO, ICNS, BLP, IPTC); formats that Pillow only identifies (WMF, HDF5, MPEG, ...); rare formats.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
# Bytes of metadata before the first pixel. Pillow joins the segments of a JPEG's EXIF, and the blocks of a GIF's
# comment, one by one, and copies the result each time: metadata of this size takes some seconds, ten times as much a
# hundred times that. Cameras write less than 10 MiB into a JPEG, thumbnails and depth maps included.
JPEG_METADATA_BYTES = 32 << 20

# EXIF orientations that reverse the upright picture's x axis (y axis) relative to the stored axis it comes from.
_REVERSES_X = frozenset({2, 3, 6, 7})
_REVERSES_Y = frozenset({3, 4, 7, 8})

# EXIF orientations that reverse the stored picture's x axis (y axis) in the upright picture.
_REVERSES_STORED_X = frozenset({2, 3, 7, 8})
_REVERSES_STORED_Y = frozenset({3, 4, 6, 7})


class View(NamedTuple):
    """The part of a picture that one sample shows.

    Args:
        box: resized to the sample's size.
        flip: mirror left to right.
    """

    box: Box
    flip: bool = False


def center_box(width: int, height: int, size: int, resize: int) -> Box:
    """Return the box of a picture that torchvision's ``Resize(resize)`` and ``CenterCrop(size)`` keep.

    The long side becomes ``int(resize * long / short)``; the crop starts at ``round((side - size) / 2)``, half to even.
    """
    if width <= height:
        new_width, new_height = resize, int(resize * height / width)
    else:
        new_width, new_height = int(resize * width / height), resize
    left, upper = round((new_width - size) / 2.0), round((new_height - size) / 2.0)
    # One multiplication and one division each: exact at the edges if new_width equals size.
    return (
        left * width / new_width,
        upper * height / new_height,
        min((left + size) * width / new_width, width),
        min((upper + size) * height / new_height, height),
    )


def random_box(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], numbers: SplitMix64
) -> Box:
    """The box of torchvision's ``RandomResizedCrop``: ten attempts, then the largest central box within ``ratio``."""
    area = width * height
    low, high = log(ratio[0]), log(ratio[1])
    random = numbers.random
    for _ in range(10):
        target = area * (scale[0] + (scale[1] - scale[0]) * random())
        aspect = exp(low + (high - low) * random())
        w, h = round(sqrt(target * aspect)), round(sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            upper = int(random() * (height - h + 1))
            left = int(random() * (width - w + 1))
            return left, upper, left + w, upper + h
    aspect = width / height
    w, h = width, height
    if aspect < ratio[0]:
        h = min(max(round(width / ratio[0]), 1), height)
    elif aspect > ratio[1]:
        w = min(max(round(height * ratio[1]), 1), width)
    upper, left = (height - h) // 2, (width - w) // 2
    return left, upper, left + w, upper + h


def stored_box(box: Box, width: int, height: int, orientation: int) -> Box:
    """Convert ``box`` of the upright picture to pixels of the stored picture, which is width x height."""
    left, upper, right, lower = box
    if orientation >= 5:  # the axes are swapped
        left, upper, right, lower = upper, left, lower, right
    if orientation in _REVERSES_STORED_X:
        left, right = max(width - right, 0), width - left
    if orientation in _REVERSES_STORED_Y:
        upper, lower = max(height - lower, 0), height - upper
    return left, upper, right, lower


def map_box(box: Box, original: tuple[int, int], cached: tuple[int, int]) -> Box:
    """Convert a box of a picture of ``original`` (width, height) to the same picture resized to ``cached``."""
    (width, height), (cached_width, cached_height) = original, cached
    return (
        box[0] * cached_width / width,
        box[1] * cached_height / height,
        min(box[2] * cached_width / width, cached_width),
        min(box[3] * cached_height / height, cached_height),
    )


def jpeg_factor(box: Box, target_width: int, target_height: int) -> int:
    """The largest of 8, 4, 2, 1 by which libjpeg can shrink ``box`` and keep at least twice the target on both axes.

    1 if the box has less than four times the target.
    """
    most_width = (box[2] - box[0]) / (2 * target_width)
    most_height = (box[3] - box[1]) / (2 * target_height)
    for factor in (8, 4, 2):
        if most_width >= factor and most_height >= factor:
            return factor
    return 1


def draft_size(width: int, height: int, factor: int) -> tuple[int, int]:
    """Return the (width, height) to pass to ``Image.draft`` so that it uses exactly ``factor``.

    ``draft`` uses the largest of 8, 4, 2, 1 that is at most ``min(width // w, height // h)``. Rounding the request
    down keeps both quotients in [factor, 2 * factor); rounding it up would not (9 // ceil(9 / 8) is 4).
    """
    # Rounded down: rounded up, Pillow may choose another factor, as for 9 // ceil(9 / 8) = 4.
    return width // factor, height // factor


def scaled_box(box: Box, width: int, height: int, factor: int, orientation: int) -> Box:
    """Convert ``box`` of the upright picture of width x height to pixels of its decode at 1/``factor``.

    libjpeg rounds the decoded size up: the last stored column and row cover fewer than ``factor`` pixels. An
    orientation that reverses an axis moves that partial pixel to the start, and the picture starts inside it.
    """
    if factor == 1:
        return box
    decoded_width, decoded_height = -(-width // factor), -(-height // factor)
    dx = decoded_width - width / factor if orientation in _REVERSES_X else 0.0
    dy = decoded_height - height / factor if orientation in _REVERSES_Y else 0.0
    return (
        box[0] / factor + dx,
        box[1] / factor + dy,
        min(box[2] / factor + dx, decoded_width),
        min(box[3] / factor + dy, decoded_height),
    )
