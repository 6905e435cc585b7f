"""Helpers for image tests: encode files, decode them with a decoder, compare pixels."""

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
    """Encode a JPEG file, with the options of Pillow's ``save``."""
    return encode(image, "JPEG", **{"quality": 90, **options})


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Encode a file of any format that Pillow saves."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif(orientation: int) -> Image.Exif:
    """EXIF with an orientation, for the option ``exif`` of ``save``."""
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def decode(decoder: DecodeImage, data: bytes, seed: int | None = None) -> NDArray[np.uint8]:
    """The decoded pixels, [H, W, 3]; 77 where the decoder writes nothing."""
    out = np.full(decoder.row.shape, 77, np.uint8)
    decoder.decode_into(data, out, seed)
    return out


def psnr(pixels: NDArray[Any], reference: NDArray[Any]) -> float:
    """Peak signal-to-noise ratio of 8-bit pixels, in dB; infinite if they are equal."""
    error = np.mean((pixels.astype(float) - reference) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else np.inf
