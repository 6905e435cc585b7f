"""Any mode of Pillow to 8-bit RGB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
