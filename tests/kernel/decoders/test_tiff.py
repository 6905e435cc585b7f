"""TIFFs of every byte order, compression, sample format, photometry and alpha: numbers as in tifffile, or an error.

Compressed files need a Pillow with libtiff, which its wheels have and Pillow-SIMD has not: without it these cells are
skipped. An unpacked wheel in PYTHONPATH runs them.
"""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from aiofeed import DecodeImage, DecodePair
from tests.support.pairs import ramps
from tests.support.pictures import encode

tifffile = pytest.importorskip("tifffile")

KEEP = DecodeImage(None, mode="keep")
HEIGHT, WIDTH = 24, 17
RGB = DecodeImage((HEIGHT, WIDTH), scaled=False)

DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "float64")
# By name: tifffile's photometry, the channels, and what those beyond the colours are.
KINDS: dict[str, tuple[str, int, list[str]]] = {
    "grey": ("minisblack", 1, []),
    "white is 0": ("miniswhite", 1, []),
    "palette": ("palette", 1, []),
    "grey and alpha": ("minisblack", 2, ["unassalpha"]),
    "grey and associated alpha": ("minisblack", 2, ["assocalpha"]),
    "grey and more": ("minisblack", 2, ["unspecified"]),
    "white is 0 and alpha": ("miniswhite", 2, ["unassalpha"]),
    "RGB": ("rgb", 3, []),
    "RGBA": ("rgb", 4, ["unassalpha"]),
    "RGB and associated alpha": ("rgb", 4, ["assocalpha"]),
    "RGB and more": ("rgb", 4, ["unspecified"]),
    "RGB, associated alpha and more": ("rgb", 5, ["assocalpha", "unspecified"]),
    "CMYK": ("separated", 4, []),
    "CMYK and more": ("separated", 5, ["unspecified"]),
    "LAB": ("cielab", 3, []),
    "YCbCr": ("ycbcr", 3, []),
    "colour filters": ("cfa", 1, []),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one strip": {},
    "strips": {"rowsperstrip": 5},
    "tiles": {"tile": (16, 16)},
    "planes": {"planarconfig": "separate"},
}
PALETTE = np.random.default_rng(1).integers(0, 65536, (3, 256), np.uint16)
# What must be read, in every layout but planes: of these, uint32 and uint16 of which 0 is white in little-endian only.
READ = {
    "grey": {"bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32"},
    "white is 0": {"bool", "uint8", "uint16", "float32"},
    **{
        name: {"uint8"}
        for name in ("palette", "grey and alpha", "RGB", "RGBA", "RGB and associated alpha", "CMYK", "LAB")
    },
}
SHOWN = {("grey", "uint8"), ("grey", "uint16"), ("grey", "float32"), ("RGB", "uint8"), ("RGB", "uint16"),
         ("white is 0", "uint8"), ("white is 0", "float32"), ("CMYK", "uint8"), ("palette", "uint8")}  # fmt: skip
LITTLE_ENDIAN = {("grey", "uint32"), ("white is 0", "uint16")}


def numbers(dtype: str, channels: int) -> Any:
    """Numbers of a dtype, [H, W] or [H, W, C]; those without a sign and floats can be shown as a picture."""
    rng = np.random.default_rng(0)
    shape = (HEIGHT, WIDTH) if channels == 1 else (HEIGHT, WIDTH, channels)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return rng.uniform(0, 200, shape).astype(kind)
    if kind.kind == "b":
        return rng.random(shape) < 0.5
    return rng.integers(np.iinfo(kind).min, min(np.iinfo(kind).max, 2**31 - 1), shape, kind, endpoint=True)


def tiff(pixels: Any, kind: str, order: str, **options: Any) -> bytes:
    """A file that tifffile writes and reads back."""
    photometry, _, extra = KINDS[kind]
    options |= {"extrasamples": extra} if extra else {}
    options |= {"colormap": PALETTE} if kind == "palette" else {}
    file = io.BytesIO()
    planes = np.moveaxis(pixels, -1, 0) if "planarconfig" in options else pixels
    tifffile.imwrite(file, planes, metadata=None, byteorder=order, photometric=photometry, **options)
    assert np.array_equal(tifffile.imread(io.BytesIO(file.getvalue())), planes)
    return file.getvalue()


def cells(order: str, compression: str | None, layout: str) -> Any:
    """Name, dtype, numbers and file of each kind of file that tifffile can write."""
    options = dict(LAYOUTS[layout])
    if compression is not None:
        name, _, predictor = compression.partition(", ")
        options |= {"compression": name} | ({"predictor": True} if predictor else {})
    for kind, dtype in itertools.product(KINDS, DTYPES):
        channels = KINDS[kind][1]
        if (kind == "palette" and dtype != "uint8") or (layout == "planes" and channels == 1):
            continue
        pixels = numbers(dtype, channels)
        try:
            data = tiff(pixels, kind, order, **options)
        except (ValueError, NotImplementedError, AssertionError, KeyError):  # tifffile writes no such file
            continue
        yield kind, dtype, pixels, data


def decoded(decode: Any, data: bytes) -> Any:
    """The pixels, [C, H, W], or None if they are refused."""
    try:
        return decode(data).numpy()
    except (ValueError, OSError):
        return None


def colours(kind: str, pixels: Any) -> Any:
    """The picture that a file shows, uint8 [H, W, 3]; None where Pillow's own rule is another."""
    if pixels.dtype.kind == "f":
        levels: Any = np.rint(pixels)
    elif pixels.dtype.kind == "i":
        return None
    else:
        bits = 8 * pixels.dtype.itemsize
        levels = pixels * 255 if pixels.dtype.kind == "b" else pixels.astype(np.int64) >> (bits - 8)
    grey = levels if levels.ndim == 2 else levels[..., 0]
    if kind.startswith("white"):
        grey = 255 - grey
    if kind.startswith(("grey", "white")):
        return np.repeat(grey[..., None], 3, axis=-1)
    if kind == "palette":
        return (PALETTE >> 8)[:, pixels].transpose(1, 2, 0)
    if "associated" in kind:  # Pillow divides by alpha
        alpha = levels[..., 3:4]
        return np.where(alpha == 0, 0, np.minimum(levels[..., :3] * 255 // np.maximum(alpha, 1), 255))
    if kind.startswith("RGB"):
        return levels[..., :3]
    if kind.startswith(("CMYK", "YCbCr", "LAB")) and pixels.dtype == np.uint8:
        mode, count = ("CMYK", 4) if kind.startswith("CMYK") else (kind, 3)
        return np.asarray(Image.frombytes(mode, (WIDTH, HEIGHT), pixels[..., :count].tobytes()).convert("RGB"))
    return None


COMPRESSIONS = ["adobe_deflate", "adobe_deflate, predictor", "lzw", "packbits", "zstd"]
NEEDS_LIBTIFF = pytest.mark.skipif(not features.check("libtiff"), reason="this Pillow has no libtiff")
FILES = pytest.mark.parametrize(
    "compression", [None, *[pytest.param(each, marks=NEEDS_LIBTIFF) for each in COMPRESSIONS]]
)


@FILES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["<", ">"])
def test_numbers_and_colours_are_those_of_the_file(order: str, layout: str, compression: str | None) -> None:
    """With mode="keep" a file has the numbers and dtype that tifffile reads, as RGB its colours, or it is refused."""
    read, shown = set(), set()
    for kind, dtype, pixels, data in cells(order, compression, layout):
        if (found := decoded(KEEP, data)) is not None:
            expected = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            assert found.dtype == expected.dtype, (kind, dtype)
            assert np.array_equal(found, expected), (kind, dtype)
            read.add((kind, dtype))
        found, expected = decoded(RGB, data), colours(kind, pixels)
        if found is not None and expected is not None:
            tolerance = 3 if kind == "YCbCr" else 0  # libtiff has other constants
            assert np.abs(found.transpose(1, 2, 0) - expected.astype(int)).max() <= tolerance, (kind, dtype)
            shown.add((kind, dtype))
    if layout != "planes":
        # tifffile does not compress single bits.
        left_out = (set() if order == "<" else LITTLE_ENDIAN) | (
            {(kind, "bool") for kind in READ} if compression else set()
        )
        assert {(kind, dtype) for kind, dtypes in READ.items() for dtype in dtypes} - left_out <= read
        assert shown >= SHOWN


# --- files that tifffile reads only -----------------------------------------------------------------------------------


def packed_tiff(pixels: Any, bits: int, photometry: int, order: str, *, compressed: bool, fill: int = 1) -> bytes:
    """A TIFF of grey numbers of a few bits. Source: TIFF 6.0, section 2."""
    unpacked = pixels[..., None] >> np.arange(bits - 1, -1, -1) & 1
    rows = np.packbits(unpacked.reshape(HEIGHT, -1).astype(np.uint8), axis=1)
    if fill == 2:
        rows = np.packbits(np.unpackbits(rows[..., None], axis=2)[..., ::-1], axis=2)[..., 0]
    data = zlib.compress(rows.tobytes()) if compressed else rows.tobytes()
    data += b"\0" * (len(data) % 2)
    tags = {256: WIDTH, 257: HEIGHT, 258: bits, 259: 8 if compressed else 1, 262: photometry, 266: fill, 273: 8,
            277: 1, 278: HEIGHT, 279: len(data), 339: 1}  # fmt: skip
    body = b"".join(struct.pack(f"{order}HHLL", tag, 4, 1, value) for tag, value in tags.items())
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}L", 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(tags)) + body + bytes(4)


@pytest.mark.parametrize("compressed", [False, pytest.param(True, marks=NEEDS_LIBTIFF)])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("photometry", [0, 1])
def test_grey_of_few_bits(photometry: int, order: str, compressed: bool) -> None:
    """Numbers of 1 to 16 bits are those of the file, whether 0 is white or black, or refused."""
    read = set()
    for bits, fill in itertools.product([1, 2, 4, 6, 8, 10, 12, 14], [1] if compressed else [1, 2]):
        pixels = np.random.default_rng(bits).integers(0, 1 << bits, (HEIGHT, WIDTH))
        data = packed_tiff(pixels, bits, photometry, order, compressed=compressed, fill=fill)
        assert np.array_equal(tifffile.imread(io.BytesIO(data)), pixels)
        found = decoded(KEEP, data)
        if found is not None:
            assert found.tolist() == [pixels.tolist()], (bits, fill)
            read.add((bits, fill))
        shown = decoded(RGB, data)
        if shown is not None and bits <= 8:
            levels = pixels * 255 // ((1 << bits) - 1)
            assert shown[0].tolist() == (levels if photometry else 255 - levels).tolist(), (bits, fill)
    assert {(1, 1), (2, 1), (4, 1), (8, 1)} <= read


def test_a_mask_of_which_0_is_white() -> None:
    """The numbers of a mask are not inverted."""
    mask = np.random.default_rng(0).integers(0, 5, (HEIGHT, WIDTH), np.uint8)
    image = encode(ramps(WIDTH, HEIGHT), "PNG")
    _, found = DecodePair(RGB)((image, tiff(mask, "white is 0", "<")))
    assert np.array_equal(found, mask)


def test_negative_numbers_of_8_bits_are_no_picture() -> None:
    """As RGB, int8 below 0 is refused as other numbers outside their range are; from 0 on it is grey."""
    pixels = np.arange(-64, 64).reshape(8, 16).astype(np.int8)
    with pytest.raises(ValueError, match="must lie in 0 to 127"):
        RGB(tiff(pixels, "grey", "<"))
    shown = DecodeImage((8, 16))(tiff(pixels + np.int8(64), "grey", "<"))
    assert shown[0].tolist() == (pixels + 64).tolist()


@pytest.mark.parametrize("order", ["<", ">"])
def test_floats_of_a_pfm(order: str) -> None:
    """A PFM names its byte order, and has its last row first."""
    pixels = numbers("float32", 1)
    scale = -1.0 if order == "<" else 1.0
    data = f"Pf\n{WIDTH} {HEIGHT}\n{scale}\n".encode() + pixels[::-1].astype(f"{order}f4").tobytes()
    assert np.array_equal(KEEP(data)[0], pixels)
