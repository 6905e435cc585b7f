"""The same picture, saved in every way that keeps its pixels, gives the same numbers, or an error."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aiofeed import DecodeImage

HEIGHT, WIDTH = 9, 14
# Adam7: first row and column of each pass, and the distance to the next. Source: PNG, third edition, section 8.
PASSES = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]


def packed(pixels: Any, bits: int) -> list[bytes]:
    """Rows of numbers of ``bits`` bits each, most significant first."""
    rows = pixels.reshape(len(pixels), -1)[..., None].astype(np.int64) >> np.arange(bits - 1, -1, -1) & 1
    return [row.tobytes() for row in np.packbits(rows.reshape(len(pixels), -1).astype(np.uint8), axis=1)]


def png(pixels: Any, bits: int, colour: int, *, interlaced: bool = False, more: bytes = b"") -> bytes:
    """A PNG of samples, [H, W] or [H, W, C]. Source: PNG, third edition, section 11."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">L", len(data)) + name + data + struct.pack(">L", zlib.crc32(name + data))

    parts = [pixels[row::rows, column::columns] for row, column, rows, columns in PASSES] if interlaced else [pixels]
    raw = b"".join(b"\0" + row for part in parts if part.size for row in packed(part, bits))
    header = struct.pack(">LLBBBBB", pixels.shape[1], len(pixels), bits, colour, 0, 0, interlaced)
    palette = chunk(b"PLTE", more) if more else b""
    pixels = palette + chunk(b"IDAT", zlib.compress(raw))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def bmp(indices: Any, bits: int, palette: Any) -> bytes:
    """An uncompressed BMP with a palette of greys."""
    rows = b"".join(row.ljust((WIDTH * bits + 31) // 32 * 4, b"\0") for row in packed(indices[::-1], bits))
    colours = b"".join(bytes([grey, grey, grey, 0]) for grey in palette)
    start = 54 + len(colours)
    head = struct.pack("<LHHL", start + len(rows), 0, 0, start)
    head += struct.pack("<LllHHLLllLL", 40, WIDTH, HEIGHT, 1, bits, 0, len(rows), 0, 0, len(palette), 0)
    return b"BM" + head + colours + rows


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def ways(levels: int) -> Iterator[tuple[str, Any, bytes]]:
    """Name, grey uint8 [H, W] and file of each way to save a picture of some levels of grey."""
    step = 255 // (levels - 1)
    numbers = np.random.default_rng(levels).integers(0, levels, (HEIGHT, WIDTH))
    grey = (numbers * step).astype(np.uint8)
    alpha, colours = np.full_like(grey, 90), np.repeat(grey[..., None], 3, axis=2)
    palette = bytes(np.repeat(np.arange(levels, dtype=np.uint8) * step, 3))
    for depth in (1, 2, 4, 8, 16):
        most = (1 << depth) - 1
        if most % (levels - 1) == 0:
            exact = numbers * (most // (levels - 1))
            for lace in (False, True):
                name = f"{depth} bits{', interlaced' * lace}"
                yield f"PNG grey, {name}", grey, png(exact, depth, 0, interlaced=lace)
                if depth >= 8:
                    more = np.stack([exact, alpha.astype(exact.dtype)], -1)
                    yield f"PNG grey and alpha, {name}", grey, png(more, depth, 4, interlaced=lace)
                    yield f"PNG RGB, {name}", grey, png(np.repeat(exact[..., None], 3, 2), depth, 2, interlaced=lace)
        if levels <= 1 << depth <= 256:
            yield f"PNG palette, {depth} bits", grey, png(numbers, depth, 3, more=palette)
            if depth != 2:
                yield f"BMP, {depth} bits", grey, bmp(numbers, depth, np.arange(levels) * step)
                backwards = np.arange(levels)[::-1] * step
                yield f"BMP, white first, {depth} bits", grey, bmp(levels - 1 - numbers, depth, backwards)
    for kind in ("TIFF", "GIF", "PPM", "BMP"):
        yield f"{kind} grey", grey, saved(Image.fromarray(grey), kind)
        yield f"{kind} RGB", grey, saved(Image.fromarray(colours), kind)
    yield "WebP", grey, saved(Image.fromarray(colours), "WEBP", lossless=True)
    head = f"{WIDTH} {HEIGHT}"
    for most in {levels - 1, 255, 65535}:
        exact = (numbers * (most // (levels - 1))).astype(">u2" if most > 255 else "u1")
        yield f"PGM of {most}", grey, f"P5 {head} {most}\n".encode() + exact.tobytes()
        yield f"PPM of {most}", grey, f"P6 {head} {most}\n".encode() + np.repeat(exact[..., None], 3, 2).tobytes()
        text = " ".join(map(str, exact.ravel().tolist()))
        yield f"PGM of {most} in text", grey, f"P2 {head} {most}\n{text}\n".encode()
    if levels == 2:
        yield "PBM", grey, f"P4 {head}\n".encode() + b"".join(packed(1 - numbers, 1))
        yield "PBM in text", grey, f"P1 {head}\n{' '.join(map(str, (1 - numbers).ravel().tolist()))}\n".encode()


LEVELS = pytest.mark.parametrize("levels", [2, 4, 16, 256])
# BMPs that Pillow does not read.
REFUSED = {"BMP, 4 bits", "BMP, 8 bits"}


@LEVELS
@pytest.mark.parametrize("backend", ["auto", "pillow"])
def test_rgb(levels: int, backend: Any) -> None:
    """As RGB, a picture has the same pixels in every format and depth, by every decoder."""
    decode = DecodeImage((HEIGHT, WIDTH), scaled=False, backend=backend)
    refused = set()
    for name, grey, data in ways(levels):
        try:
            found = decode(data)
        except ValueError:
            refused.add(name)
            continue
        assert found.tolist() == [grey.tolist()] * 3, name
    assert refused == (REFUSED if levels == 2 else set())


@LEVELS
@pytest.mark.parametrize("size", [None, (5, 8)])
def test_keep(levels: int, size: Any) -> None:
    """With mode="keep", files without a palette give the same numbers, resized or not; those of 16 bits 257 times."""
    decode = DecodeImage(size, mode="keep")
    expected, read = None, set()
    for name, grey, data in ways(levels):
        expected = decode(png(grey, 8, 0)).numpy() if expected is None else expected
        try:
            found = decode(data).numpy()
        except ValueError:
            continue
        has_palette = "palette" in name or name.startswith(("GIF", "BMP, white first"))
        if has_palette or (levels < 256 and name in ("BMP, 4 bits", "BMP, 8 bits")):
            continue  # its indices
        if size is not None and ("alpha" in name or found.dtype == np.uint16):
            continue  # weighted by alpha; rounded in their own precision
        assert np.array_equal(found[:1] // (257 if found.dtype == np.uint16 else 1), expected), name
        read.add(name)
    depths = [depth for depth in (1, 2, 4, 8) if ((1 << depth) - 1) % (levels - 1) == 0]
    assert read >= {f"PNG grey, {depth} bits{lace}" for depth in depths for lace in ("", ", interlaced")}
    assert read >= ({"PBM", "PBM in text", "BMP, 1 bits"} if levels == 2 else {"PGM of 255", "TIFF grey", "BMP grey"})
