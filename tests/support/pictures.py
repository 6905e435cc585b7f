"""Files of pictures, what a decoder makes of them, and how far that is from another's."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed import DecodeImage

ORIENTATION = 0x0112


def jpeg(image: Image.Image, **options: Any) -> bytes:
    """A JPEG file; the options are those of Pillow's `save`."""
    return encode(image, "JPEG", **{"quality": 90, **options})


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A file of any kind that Pillow saves."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif(orientation: int) -> Image.Exif:
    """For the `exif` of a file: how it is to be turned."""
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def decode(decoder: DecodeImage, data: bytes, seed: int | None = None) -> NDArray[np.uint8]:
    """Pixels, [H, W, 3]; 77 where the decoder writes nothing."""
    out = np.full(decoder.row.shape, 77, np.uint8)
    decoder.decode_into(data, out, seed)
    return out


def psnr(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Of 8 bits, in dB; infinite where they are equal."""
    error = np.mean((ours.astype(float) - theirs) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else np.inf
