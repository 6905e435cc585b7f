"""Which part of a picture is shown, and at what scale a JPEG is decoded for it. Pure arithmetic.

Lengths are pixels of the upright picture (EXIF orientation applied) unless a name says otherwise. A box is
(left, upper, right, lower), may end between pixels and never leaves the picture.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import NamedTuple, TypeAlias

from aiofeed.core.random_numbers import SplitMix64

Box: TypeAlias = tuple[float, float, float, float]

# What libjpeg can decode at by leaving out frequencies, most saving first.
JPEG_FACTORS = (8, 4, 2)

# EXIF orientations whose upright picture has its right (lower) edge where the stored picture begins.
_RIGHT_IS_FIRST = frozenset({2, 3, 6, 7})
_LOWER_IS_FIRST = frozenset({3, 4, 7, 8})

# The same, seen from the stored picture.
_STORED_RIGHT_IS_FIRST = frozenset({2, 3, 7, 8})
_STORED_LOWER_IS_FIRST = frozenset({3, 4, 6, 7})


class View(NamedTuple):
    """What one sample shows of its picture.

    Args:
        box: the part that fills the sample.
        flip: mirrored left to right.
    """

    box: Box
    flip: bool = False


def center_box(width: int, height: int, size: int, resize: int) -> Box:
    """The box that ``Resize(resize)`` and ``CenterCrop(size)`` of torchvision leave of a picture.

    The long side becomes ``int(resize * long / short)``; the crop begins at ``round((side - size) / 2)``, half to even.
    """
    if width <= height:
        new_width, new_height = resize, int(resize * height / width)
    else:
        new_width, new_height = int(resize * width / height), resize
    left, upper = round((new_width - size) / 2.0), round((new_height - size) / 2.0)
    # One product and one quotient each: exact at the edges, where new_width is size.
    return (
        left * width / new_width,
        upper * height / new_height,
        min((left + size) * width / new_width, width),
        min((upper + size) * height / new_height, height),
    )


def random_box(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], numbers: SplitMix64
) -> Box:
    """The box of torchvision's ``RandomResizedCrop``: ten tries, then the largest central one within ``ratio``."""
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
    whole = width / height
    w, h = width, height
    if whole < ratio[0]:
        h = min(max(round(width / ratio[0]), 1), height)
    elif whole > ratio[1]:
        w = min(max(round(height * ratio[1]), 1), width)
    upper, left = (height - h) // 2, (width - w) // 2
    return left, upper, left + w, upper + h


def stored_box(box: Box, width: int, height: int, orientation: int) -> Box:
    """``box`` of the upright picture in the pixels of the stored one, which is of width x height."""
    first, second, third, fourth = box
    if orientation >= 5:  # the axes are exchanged
        first, second, third, fourth = second, first, fourth, third
    if orientation in _STORED_RIGHT_IS_FIRST:
        first, third = max(width - third, 0), width - first
    if orientation in _STORED_LOWER_IS_FIRST:
        second, fourth = max(height - fourth, 0), height - second
    return first, second, third, fourth


def jpeg_factor(box: Box, target_width: int, target_height: int) -> int:
    """The largest of 8, 4, 2, 1 at which ``box`` is still decoded to twice the target or more on both axes.

    1 where the box has less than four times the target already.
    """
    spare_width = (box[2] - box[0]) / (2 * target_width)
    spare_height = (box[3] - box[1]) / (2 * target_height)
    for factor in JPEG_FACTORS:
        if spare_width >= factor and spare_height >= factor:
            return factor
    return 1


def draft_size(width: int, height: int, factor: int) -> tuple[int, int]:
    """The (width, height) to ask ``Image.draft`` for so that it takes exactly ``factor``.

    ``draft`` takes the largest of 8, 4, 2, 1 that is not above ``min(width // w, height // h)``. Rounding the request
    down puts both quotients in [factor, 2 * factor); rounding it up would miss (9 // ceil(9 / 8) is 4).
    """
    return width // factor, height // factor


def scaled_box(box: Box, width: int, height: int, factor: int, orientation: int) -> Box:
    """``box`` of the upright picture of width x height in pixels of its decode at 1/``factor``.

    libjpeg rounds the decoded size up: the last column and row show less than ``factor`` pixels each. Orientations
    that mirror an axis bring that part pixel to the front, so that the picture begins inside it.
    """
    if factor == 1:
        return box
    decoded_width, decoded_height = -(-width // factor), -(-height // factor)
    dx = decoded_width - width / factor if orientation in _RIGHT_IS_FIRST else 0.0
    dy = decoded_height - height / factor if orientation in _LOWER_IS_FIRST else 0.0
    return (
        box[0] / factor + dx,
        box[1] / factor + dy,
        min(box[2] / factor + dx, decoded_width),
        min(box[3] / factor + dy, decoded_height),
    )
