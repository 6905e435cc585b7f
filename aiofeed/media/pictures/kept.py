"""Pictures as they are: ``DecodeImage(mode="keep")``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from aiofeed.kernel.decoders.geometry import View
from aiofeed.kernel.decoders.pillow import BITS_PER_SAMPLE, SAMPLE_FORMAT, load_picture

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiofeed.kernel.decoders.image import DecodeImage

# TIFF 6.0, sections 8 and 19.
_SAMPLES_PER_PIXEL = 277
_KINDS = {1: "u", 2: "i", 3: "f"}
# Formats whose samples have 8 bits. Pillow scales the deeper ones of AVIF and JPEG 2000.
_EIGHT_BITS = ("JPEG", "WEBP", "GIF", "BMP")


def check_kept(decoder: DecodeImage) -> None:
    """Raise ``ValueError`` if another setting excludes ``mode="keep"``."""
    if decoder.backend in ("native", "turbo"):
        raise ValueError(f'mode="keep" decodes with Pillow, so leave out backend={decoder.backend!r}')
    if decoder.cached_size is not None:
        raise ValueError(f'mode="keep" caches its results, so leave out cached_size={decoder.cached_size!r}')
    if decoder.augment is not None:
        raise ValueError('augment= changes RGB images: pass a decoder of your own in place of mode="keep"')
    if decoder.size is None and decoder.crop == "random":
        raise ValueError('size=None keeps the size of each file: pass a size for crop="random"')


def decode_kept(
    data: bytes,
    choose_view: Callable[[int, int], View],
    *,
    size: tuple[int, int] | None,
    max_pixels: int,
    formats: Collection[str],
) -> NDArray[Any]:
    """Decode ``data`` to an array [C, H, W] with all channels, in the dtype and with the values of the file.

    Pillow reads some files with other values: it drops the low byte of 16-bit colour. This undoes what can be undone,
    and refuses the rest. Grey of less than 8 bits is scaled to 8, as PNG (third edition, section 13.12) demands; a TIFF
    has its own numbers, as in tifffile.

    Args:
        size: (width, height) to which the view is resized; ``None``: the picture is not resized.
    """
    dtype = np.dtype(np.uint8)

    def exact(image: Image.Image) -> Image.Image:
        nonlocal dtype
        dtype, picture = _exact(image, data)
        return picture

    picture, view = load_picture(data, choose_view, target=None, max_pixels=max_pixels, formats=formats, convert=exact)
    if size is not None:
        if picture.mode.startswith("I;16"):  # Pillow rounds after each of the two axes
            picture = Image.fromarray(np.asarray(picture).astype(np.float32))
        picture = picture.resize(size, Image.Resampling.BILINEAR, box=view.box)
    if view.flip:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(picture)
    if pixels.dtype.kind == "f" and dtype.kind != "f":
        pixels = np.rint(pixels)
    # Always a copy, because the memory of Pillow is read-only.
    return (pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)).astype(dtype, order="C")


def _exact(image: Image.Image, data: bytes) -> tuple[np.dtype[Any], Image.Image]:
    """Return the dtype of the samples of a loaded file, and a picture with their values.

    Raises:
        ValueError: Pillow does not give their values.
    """
    read, bands, name = np.asarray(image), len(image.getbands()), image.format
    kind: str = read.dtype.kind
    bits, samples = 8 * read.dtype.itemsize, bands
    if name == "PNG":
        bits = data[24]
    elif name == "TIFF":
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        bits, samples = max(tags.get(BITS_PER_SAMPLE, (1,))), tags.get(_SAMPLES_PER_PIXEL, 1)
        kind = _KINDS.get(tags.get(SAMPLE_FORMAT, (1,))[0], "u")
    elif name == "PPM":
        header = re.sub(rb"#[^\n\r]*", b"", data[:1024]).split()
        highest = int(header[3]) if header[0] in (b"P2", b"P3", b"P5", b"P6") else None
        if highest not in (None, 65535 if image.mode == "I" else 255):
            raise ValueError(f'mode="keep": Pillow scales the samples of a PPM of at most {highest} to 8 or 16 bits')
        kind, bits = ("u", 16) if image.mode == "I" else (kind, bits)
    elif name not in _EIGHT_BITS:
        raise ValueError(f'mode="keep" reads {", ".join(_EIGHT_BITS)}, PNG, TIFF and PPM, not {name}')
    if bits > 8 * read.dtype.itemsize or samples != bands:
        raise ValueError(
            f'mode="keep": this {name} has {samples} channels of {bits} bits, and Pillow reads {bands} of '
            f"{8 * read.dtype.itemsize} bits; pass a decoder of your own as decode="
        )
    if image.mode == "1":
        return (np.dtype(np.bool_), image) if name == "TIFF" else (np.dtype(np.uint8), image.convert("L"))
    if image.mode == "L" and bits in (2, 4) and name == "TIFF":
        return read.dtype, Image.fromarray(read // (255 // ((1 << bits) - 1)))
    dtype = np.dtype(f"{kind}{1 if bits <= 8 else 2 if bits <= 16 else 4}")
    if dtype == np.int8:
        image = Image.fromarray(read.view(np.int8).astype(np.int32))
    elif dtype == np.uint32 and read.min() < 0:
        raise ValueError(f'mode="keep": this {name} has numbers above {2**31 - 1}, which Pillow does not read')
    return dtype, image
