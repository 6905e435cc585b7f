"""Tests of DecodeImage: the pixels it returns, and the files and arguments it refuses."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import warnings
import zlib
from numbers import Number
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, features

from aiofeed.kernel.core.types import Row, RowDecoder
from aiofeed.kernel.decoders.image import DecodeImage
from aiofeed.kernel.decoders.metadata import orientation_in_exif, orientation_of
from aiofeed.kernel.decoders.pillow import JpegFile, open_image, to_rgb
from tests.support.paths import environment
from tests.support.pictures import ORIENTATION, decode, encode, exif, psnr

BILINEAR = Image.Resampling.BILINEAR


def picture(mode="RGB", width=83, height=61, seed=0):
    """A smooth picture with noise, different in every pixel and corner."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    planes = [x * 255 / width, y * 255 / height, (x + 2 * y) % 256, 255 - x * 128 / width]
    noisy = np.stack(planes, axis=-1) * 0.9 + rng.integers(0, 25, (height, width, 4))
    image = Image.fromarray(noisy.astype(np.uint8))
    if mode == "LAB":
        return Image.merge("LAB", image.split()[:3])
    if mode in ("P", "PA"):
        return image.convert("RGB").quantize(64).convert(mode)
    if mode in ("La", "RGBa"):
        return image.convert({"La": "LA", "RGBa": "RGBA"}[mode]).convert(mode)
    return image.convert("RGB").convert(mode) if mode in ("HSV", "YCbCr", "CMYK") else image.convert(mode)


def pillow(data, height, width):
    """The reference: Pillow's own functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        return np.asarray(image.convert("RGB").resize((width, height), BILINEAR))


def chunk(name, payload):
    return struct.pack(">I", len(payload)) + name + payload + struct.pack(">I", zlib.crc32(name + payload))


def png_header(width, height):
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


# --- pixels equal to Pillow's


FILES = [
    *[("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
    ("PNG", "P", {"transparency": 3}),
    ("PNG", "P", {"transparency": bytes(range(0, 256, 4))}),
    ("PNG", "L", {"transparency": 7}),
    ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    *[("JPEG", mode, {"quality": 90}) for mode in ("L", "RGB", "CMYK", "YCbCr")],
    ("JPEG", "RGB", {"quality": 90, "progressive": True}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {"lossless": True}),
    *[("GIF", mode, {}) for mode in ("1", "L", "P", "RGB")],
    ("GIF", "P", {"transparency": 3}),
    *[("TIFF", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "LAB")],
    *[("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")],
    *[("PPM", mode, {}) for mode in ("1", "L", "RGB", "RGBA")],
    *[("TGA", mode, {}) for mode in ("L", "LA", "P", "RGB", "RGBA")],
    ("ICO", "RGBA", {}),
    ("AVIF", "RGB", {}),
]


@pytest.mark.parametrize(("kind", "mode", "options"), FILES)
@pytest.mark.parametrize("size", [(24, 40), (61, 83), (100, 90)])
def test_equals_pillow(kind, mode, options, size):
    """A fixed size with scaled=False equals Pillow's exif_transpose, convert and resize bit for bit."""
    feature = {"WEBP": "webp", "AVIF": "avif", "JPEG": "jpg"}.get(kind)
    if feature and not features.check(feature):
        pytest.skip(f"this Pillow is built without {kind}")
    data = encode(picture(mode), kind, **options)
    decoder = DecodeImage(size, scaled=False, formats=(*DecodeImage.formats, "TGA", "ICO"))
    assert np.array_equal(decode(decoder, data), pillow(data, *size))


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"]
)
def test_8_bit_modes_are_converted_as_by_pillow(mode):
    """Every 8-bit mode, including those that no common format stores, becomes RGB as Pillow converts it."""
    image = picture(mode)
    assert image.mode == mode
    expected = image.convert("LA" if mode == "La" else mode).convert("RGB")  # Pillow converts La to LA only
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(expected))


def test_adobe_cmyk_is_inverted_as_by_pillow():
    """The inverted CMYK of Adobe's JPEGs decodes to the colours of the original."""
    rgb = Image.new("RGB", (32, 32), (200, 60, 30))
    data = encode(rgb.convert("CMYK"), "JPEG", quality=95)
    assert b"Adobe" in data
    assert np.abs(decode(DecodeImage((8, 8)), data).astype(int) - (200, 60, 30)).max() <= 3


def test_the_first_frame_of_an_animation_is_decoded():
    """An animated file decodes to its first frame."""
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "lime", "blue")]
    for kind in ("GIF", "PNG", "TIFF", *(["WEBP"] if features.check("webp") else [])):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert (decode(DecodeImage((4, 4)), data) == (255, 0, 0)).all(), kind


def test_the_first_picture_of_a_multi_picture_jpeg_is_decoded():
    """A multi-picture JPEG (MPO) decodes to its first picture, scaled or not."""
    first, second = picture(width=400, height=300), picture(width=100, height=80, seed=1)
    data = encode(first, "MPO", save_all=True, append_images=[second])
    assert np.array_equal(decode(DecodeImage((30, 40), scaled=False), data), pillow(data, 30, 40))
    assert psnr(decode(DecodeImage((30, 40)), data), pillow(data, 30, 40)) > 30


# --- orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied(kind, orientation):
    """All eight EXIF orientations are applied before the resize, in every format that stores them."""
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("this Pillow is built without WebP")
    data = encode(picture(), kind, exif=exif(orientation))
    assert np.array_equal(decode(DecodeImage((30, 20), scaled=False), data), pillow(data, 30, 20))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_with_scaling_and_odd_sizes(orientation):
    """A scaled decode shows the same part as a full one, also if the partial last column becomes the first."""
    x, y = np.meshgrid(np.arange(1601), np.arange(1203))
    rings = (127 + 120 * np.sin(x / 40) * np.cos(y / 55)).astype(np.uint8)
    data = encode(Image.fromarray(rings), "JPEG", quality=95, exif=exif(orientation))
    for options in ({}, {"crop": "random", "scale": (0.5, 1.0)}):
        for size in (72, (72, 56)):
            if options or isinstance(size, tuple):
                full, scaled = (decode(DecodeImage(size, scaled=s, **options), data, 3) for s in (False, True))
                assert not np.array_equal(full, scaled)
                assert psnr(full, scaled) > 50


def test_orientation_in_xmp_and_after_the_pixels():
    """Orientation is also found in XMP, and in a PNG whose EXIF follows its pixels."""
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    jpeg = encode(picture(), "JPEG", xmp=xmp)
    plain = encode(picture(), "PNG")
    late = plain[:-12] + chunk(b"eXIf", exif(6).tobytes()[6:]) + plain[-12:]
    for data in (jpeg, late):
        assert np.array_equal(decode(DecodeImage((30, 20), scaled=False), data), pillow(data, 30, 20))
    turned = np.asarray(picture().transpose(Image.Transpose.ROTATE_270).resize((20, 30), BILINEAR))
    assert np.array_equal(decode(DecodeImage((30, 20)), late), turned)


def jpeg_with_exif(payload):
    plain = encode(picture(width=24, height=16), "JPEG")
    return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload + plain[2:]


@pytest.mark.parametrize(
    "tiff",
    [
        b"",
        b"II",
        b"garbage garbage garbage",
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff",
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0",  # orientation 99
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\xff\xff\xff\xff\x06\0\0\0\0\0\0\0",  # 4 GiB of text
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x05\0\x01\0\0\0\0\0\0\0\0\0\0\0",  # a fraction
        b"II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\x01\0\0\0\x06\0",  # truncated
    ],
)
def test_invalid_exif_is_ignored(tiff):
    """EXIF that cannot be read, or has an invalid orientation, leaves the picture as it is stored."""
    plain = jpeg_with_exif(b"other\0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = decode(DecodeImage((16, 24), scaled=False), jpeg_with_exif(b"Exif\0\0" + tiff))
    assert np.array_equal(got, decode(DecodeImage((16, 24), scaled=False), plain))


@given(
    order=st.sampled_from("<>"),
    entries=st.lists(
        st.tuples(
            st.sampled_from([ORIENTATION, ORIENTATION, 0x010F, 0x0128, 0x0111]),
            st.integers(0, 18),
            st.sampled_from([0, 1, 2, 3, 2**32 - 1]),
            st.integers(0, 60),
        ),
        max_size=4,
    ),
    prefix=st.sampled_from([b"", b"Exif\0\0", b"Exif\0\0Exif\0\0"]),
    header=st.sampled_from([None, None, None, b"II\0*", b"MM*\0", b"II+\0", b"none"]),
    start=st.sampled_from([8, 8, 8, 0, 2, 20, 10_000]),
    tail=st.binary(max_size=24),
    cut=st.integers(0, 6),
)
@settings(max_examples=400, deadline=None)
@example("<", [(ORIENTATION, 3, 1, 6), (ORIENTATION, 3, 1, 8)], b"", None, 8, b"", 0)  # the tag twice
@example(">", [(ORIENTATION, 3, 1, 0), (0x0128, 3, 1, 2)], b"Exif\0\0", None, 8, b"", 0)
@example("<", [(ORIENTATION, 5, 1, 26)], b"", None, 8, struct.pack("<II", 12, 2), 0)  # the fraction 12 / 2
@example("<", [(ORIENTATION, 11, 1, 0x40C0)], b"", None, 8, b"", 0)
def test_orientation_equals_pillows_parser(order, entries, prefix, header, start, tail, cut):
    """For any directory, valid or not, the orientation equals that of Pillow's parser, failures included."""
    tiff = (header or (b"II*\0" if order == "<" else b"MM\0*")) + struct.pack(order + "IH", start, len(entries))
    for tag, kind, count, value in entries:
        tiff += struct.pack(order + ("HHII" if order == "<" else "HHIHxx"), tag, kind, count, value)
    data = prefix + tiff + bytes(4) + tail
    data = data[: len(data) - cut]
    tags = Image.Exif()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tags.load(data)
        except Exception:
            with pytest.raises(ValueError, match="header of a TIFF"):
                orientation_in_exif(data)
            return
        expected = tags.get(ORIENTATION)
    valid = expected is None or (isinstance(expected, Number) and expected in range(2, 9))
    assert orientation_in_exif(data) == (expected if valid else 1)


@pytest.mark.parametrize("options", [{}, {"exif": exif(1)}], ids=["none", "upright"])
def test_pillows_exif_parser_is_not_used_for_upright_files(options, monkeypatch):
    """A file without EXIF, or with orientation 1, is opened without Pillow's EXIF parser."""
    data = encode(picture(), "JPEG", **options)
    monkeypatch.setattr(Image.Exif, "load", lambda *_: pytest.fail("EXIF was parsed"))
    image = open_image(data, 10**6)
    assert orientation_of(image) == 1


# --- more than 8 bits


def grey16(levels):
    """The levels, and a 16-bit PNG of them."""
    levels = np.asarray(levels, np.uint16).reshape(16, -1)
    return levels, encode(Image.fromarray(levels), "PNG")


def test_16_bit_grey_becomes_its_high_byte():
    """16-bit grey is scaled, not clipped: 65535 is white, 256 is 1, as in Pillow's 16-bit colour."""
    levels, data = grey16(np.linspace(0, 65535, 256).round())
    out = decode(DecodeImage((16, 16)), data)
    assert np.array_equal(out, np.repeat((levels >> 8)[..., None], 3, axis=-1))
    assert out.max() == 255


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_other_16_bit_formats_are_scaled_alike(mode):
    """TIFF in both byte orders and 16-bit PGM (mode I) decode as the PNG does."""
    levels, data = grey16(np.linspace(0, 65535, 256).round())
    if mode == "I":
        other = b"P5 16 16 65535\n" + levels.astype(">u2").tobytes()
    else:
        raw = levels.astype("<u2" if mode == "I;16" else ">u2")
        other = encode(Image.frombytes(mode, (16, 16), raw.tobytes()), "TIFF")
    assert Image.open(io.BytesIO(other)).mode == mode
    assert np.array_equal(decode(DecodeImage((16, 16)), other), decode(DecodeImage((16, 16)), data))


@pytest.mark.parametrize(("low", "high"), [(-1, 10), (0, 65536), (0, 2**31 - 1)])
def test_32_bit_integers_beyond_16_bits_are_refused(low, high):
    """Mode I outside 0 to 65535 raises an error with its range; the levels are never clipped."""
    data = encode(Image.fromarray(np.array([[low, high]], np.int32)), "TIFF")
    with pytest.raises(ValueError, match=rf"mode I must lie in 0 to 65535 .* got {low} to {high}"):
        decode(DecodeImage((4, 4)), data)


def test_floats_are_scaled_by_their_range():
    """Mode F is multiplied by 255 if it lies in [0, 1], unchanged if it lies in [0, 255], and rounded."""
    unit = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    expected = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=-1)
    for levels in (unit, unit * 255):
        data = encode(Image.fromarray(levels), "TIFF")
        assert np.array_equal(decode(DecodeImage((16, 16)), data), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5, 256.0])
def test_floats_out_of_range_are_refused(bad):
    """NaN, infinity and values outside [0, 255] raise an error."""
    data = encode(Image.fromarray(np.array([[0.5, bad]], np.float32)), "TIFF")
    with pytest.raises(ValueError, match="mode F must lie in 0 to 255"):
        decode(DecodeImage((4, 4)), data)


# --- crops


@pytest.mark.parametrize(("width", "height"), [(83, 61), (61, 83), (64, 64), (200, 31)])
@pytest.mark.parametrize(("size", "resize"), [(32, None), (32, 37), (100, 120)])
def test_centre_crop_is_resize_then_crop(width, height, size, resize):
    """An int size equals torchvision's Resize and CenterCrop, within two levels of rounding."""
    image = picture(width=width, height=height)
    short = resize or size
    long = int(short * max(width, height) / min(width, height))
    new = (short, long) if width <= height else (long, short)
    left, upper = round((new[0] - size) / 2), round((new[1] - size) / 2)
    expected = image.convert("RGB").resize(new, BILINEAR).crop((left, upper, left + size, upper + size))
    got = decode(DecodeImage(size, resize=resize), encode(image, "PNG"))
    assert np.abs(got.astype(int) - np.asarray(expected)).max() <= 2


def test_random_crop_and_flip_follow_the_view():
    """A random sample is the resize of the box that ``view`` returns for its seed, mirrored if ``view`` says flip."""
    image, data = picture().convert("RGB"), encode(picture(), "PNG")
    decoder = DecodeImage((24, 40), crop="random", flip=True)
    for seed in range(10):
        box, flip = decoder.view(*image.size, seed)
        expected = np.asarray(image.resize((40, 24), BILINEAR, box=box))
        assert np.array_equal(decode(decoder, data, seed), expected[:, ::-1] if flip else expected)


def test_seeds_are_reproducible_and_differ():
    """A seed gives the same picture in every instance; different seeds give different pictures."""
    data = encode(picture(), "JPEG")
    one, two = (DecodeImage(32, crop="random", flip=True) for _ in range(2))
    pictures = {seed: decode(one, data, seed).tobytes() for seed in (0, 1, 2**63, 2**64 - 1)}
    assert len(set(pictures.values())) == 4
    assert all(decode(two, data, seed).tobytes() == pixels for seed, pixels in pictures.items())


def test_half_of_the_samples_are_mirrored_and_crops_do_not_depend_on_it():
    """Half of the seeds mirror, independently of the crop; the crop of a seed is the same without flips."""
    cropped, both, flipped = (DecodeImage(32, **o) for o in (
        {"crop": "random"}, {"crop": "random", "flip": True}, {"flip": True}))  # fmt: skip
    views = [both.view(500, 400, seed) for seed in range(4000)]
    flips = np.array([view.flip for view in views])
    assert abs(flips.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(flips, [view.box[0] for view in views])[0, 1]) < 0.06
    assert [view.box for view in views[:100]] == [cropped.view(500, 400, seed).box for seed in range(100)]
    assert [view.flip for view in views[:100]] == [flipped.view(500, 400, seed).flip for seed in range(100)]
    assert not any(cropped.view(500, 400, seed).flip for seed in range(100))


def test_a_random_decoder_requires_a_seed():
    """Without a seed, or without rng, a random decoder raises; a deterministic one ignores both."""
    data = encode(picture(), "PNG")
    for options in ({"crop": "random"}, {"flip": True}):
        decoder = DecodeImage(16, **options)
        assert decoder.takes_seed
        with pytest.raises(ValueError, match="needs a seed"):
            decode(decoder, data)
        with pytest.raises(ValueError, match=r"needs rng, a torch\.Generator"):
            decoder(data)
    fixed = DecodeImage(16)
    assert not fixed.takes_seed
    assert np.array_equal(decode(fixed, data, 1), decode(fixed, data, 2))


# --- scaled decoding


def decoded_sizes(monkeypatch):
    """A list that collects the (width, height) at which Pillow decodes JPEGs."""
    sizes = []
    load_end = JpegFile.load_end
    monkeypatch.setattr(JpegFile, "load_end", lambda self: (sizes.append(self.size), load_end(self))[1])
    return sizes


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize(
    ("size", "target", "decoded"),
    [
        ((1600, 1200), (150, 200), (400, 300)),  # exactly twice at 1/4
        ((1600, 1200), (151, 200), (800, 600)),  # one row less than twice at 1/4
        ((1600, 1200), (150, 201), (800, 600)),  # one column less
        ((1607, 1207), (75, 100), (201, 151)),  # rounded up at 1/8
        ((500, 400), (224, 224), (500, 400)),  # no scale keeps twice the target
        ((1600, 1200), 224, (800, 600)),  # the visible part of a centre crop decides
    ],
)
def test_jpegs_are_decoded_at_the_smallest_sufficient_scale(mode, size, target, decoded, monkeypatch):
    """A JPEG is decoded at the smallest of 1, 1/2, 1/4, 1/8 that keeps twice the target on both axes."""
    sizes = decoded_sizes(monkeypatch)
    decode(DecodeImage(target, backend="pillow"), encode(Image.new(mode, size), "JPEG"))
    decode(DecodeImage(target, scaled=False, backend="pillow"), encode(Image.new(mode, size), "JPEG"))
    assert sizes == [decoded, size]


def test_small_crops_are_decoded_at_a_larger_scale(monkeypatch):
    """The scale depends on the visible part: a small random crop is decoded at full scale."""
    sizes = decoded_sizes(monkeypatch)
    data = encode(Image.new("RGB", (1600, 1600)), "JPEG")
    for share, side in ((1.0, 400), (0.25, 800), (0.01, 1600)):
        sizes.clear()
        decode(DecodeImage(190, crop="random", scale=(share, share), ratio=(1, 1), backend="pillow"), data, 0)
        assert sizes == [(side, side)]


def photographs():
    files = []
    for package, folder in (("skimage", "data"), ("sklearn", "datasets/images")):
        module = pytest.importorskip(package)
        root = Path(module.__file__).parent / folder
        files += [root / name for name in ("astronaut.png", "chelsea.png", "coffee.png", "china.jpg", "flower.jpg")]
    return [file for file in files if file.exists()]


def test_scaled_decoding_keeps_quality():
    """On photographs a scaled decode has at least 35 dB PSNR against the full one, at every scale."""
    factors = set()
    for file in photographs():
        data = (
            file.read_bytes() if file.suffix == ".jpg" else encode(Image.open(file).convert("RGB"), "JPEG", quality=92)
        )
        width, height = Image.open(io.BytesIO(data)).size
        for divisor in (4, 6, 8, 12, 16, 20):
            size = height // divisor, width // divisor
            full, scaled = (decode(DecodeImage(size, scaled=s), data) for s in (False, True))
            assert psnr(full, scaled) > 35, (file, size)
            factors.add(8 if divisor >= 16 else 4 if divisor >= 8 else 2)
    assert factors == {2, 4, 8}


# --- refused files


LIMIT = 178_956_970


def webp_canvas(width, height):
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + (width - 1).to_bytes(3, "little")
    body += (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body)) + body


def huge_jpeg():
    data = encode(Image.new("RGB", (16, 16)), "JPEG")
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", 65_000, 65_000) + data[at + 4 :]


@pytest.mark.parametrize(
    "data",
    [
        png_header(100_000, 100_000) + chunk(b"IDAT", b""),
        huge_jpeg(),
        b"P6 100000 100000 255\n",
        b"GIF89a"
        + struct.pack("<HH", 65_000, 65_000)
        + bytes(3)
        + b","
        + struct.pack("<HHHHB", 0, 0, 1, 1, 0)
        + b"\2\0;",
        webp_canvas(16_384, 16_384),
    ],
    ids=["png", "jpeg", "ppm", "gif", "webp"],
)
def test_decompression_bombs_are_refused_by_their_header(data):
    """More pixels than max_pixels are refused before any is decoded; the error gives both numbers."""
    with pytest.raises(ValueError, match=rf"has \d+ x \d+ = \d+ pixels .* max_pixels={LIMIT} allows"):
        decode(DecodeImage(8), data)


@pytest.mark.parametrize(("kind", "options"), [("VP8 ", {}), ("VP8L", {"lossless": True})])
def test_webp_size_is_checked_before_libwebp_is_called(kind, options, monkeypatch):
    """The limit holds for all kinds of WebP before libwebp is called."""
    if not features.check("webp"):
        pytest.skip("this Pillow is built without WebP")
    data = encode(picture(width=83, height=61), "WEBP", **options)
    assert data[12:16] == kind.encode()
    assert np.array_equal(decode(DecodeImage((61, 83), max_pixels=83 * 61), data), pillow(data, 61, 83))
    monkeypatch.setitem(Image.OPEN, "WEBP", (lambda *_: pytest.fail("libwebp was called"), lambda prefix: True))
    with pytest.raises(ValueError, match="83 x 61 = 5063 pixels"):
        decode(DecodeImage((61, 83), max_pixels=83 * 61 - 1), data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_pillows_own_limit_has_no_effect(kind, monkeypatch):
    """Only max_pixels limits: Pillow's process-wide limit neither refuses, nor warns, nor changes."""
    data = encode(picture(width=30, height=20), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    decode(DecodeImage(8, max_pixels=600), data)
    with pytest.raises(ValueError, match="max_pixels=599"):
        decode(DecodeImage(8, max_pixels=599), data)
    assert Image.MAX_IMAGE_PIXELS == 100


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "BMP", "PPM", "WEBP"])
def test_truncated_images_are_errors(kind):
    """An image truncated in its pixels raises, scaled or not, and writes nothing."""
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("this Pillow is built without WebP")
    data = encode(picture(width=400, height=300), kind)
    for keep in (0.5, 0.9):
        for scaled in (True, False):
            out = np.full((20, 20, 3), 77, np.uint8)
            with pytest.raises((OSError, ValueError)):
                DecodeImage((20, 20), scaled=scaled).decode_into(data[: int(len(data) * keep)], out)
            assert (out == 77).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no bytes: the file is empty"),
        (
            b"this is a text, not a picture",
            "Pillow cannot identify this image: 29 bytes that begin with b'this is a text, '",
        ),
        (b"\xff\xd8\xff", "broken image"),
        (b"\xff\xd8\xff\xe0\x00", "broken image"),
        (b"\x89PNG\r\n\x1a\n", "Pillow cannot identify this image"),
        (
            png_header(0, 5) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""),
            "PNG: its header gives no pixels",
        ),
        (
            b"GIF89a" + struct.pack("<HH", 0, 0) + bytes(3) + b"," + bytes(9) + b"\2\0;",
            "GIF: its header gives no pixels",
        ),
        (b"P6 0 5 255\n", "PPM: its header gives no pixels"),
    ],
)
def test_data_that_is_not_an_image_is_an_error(data, message):
    """No data, other data, a bare signature and an image without pixels raise an OSError or ValueError that says so."""
    with pytest.raises((OSError, ValueError), match=message):
        decode(DecodeImage(8), data)


@pytest.mark.parametrize("data", [(b"a", b"b"), {"image": b"a"}, "a.jpg", None, 7, [1, 2]])
def test_data_without_a_buffer_is_a_type_error(data):
    """An object without a buffer raises a TypeError with its type and the expected one."""
    with pytest.raises(TypeError, match=f"takes the bytes of one image, got {type(data).__name__}"):
        decode(DecodeImage(8), data)


def test_objects_with_a_buffer_are_decoded():
    """bytearray, memoryview and numpy bytes decode as bytes do."""
    for kind in ("JPEG", "PNG"):
        data = encode(picture(), kind)
        expected = decode(DecodeImage(8), data)
        for other in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
            assert np.array_equal(decode(DecodeImage(8), other), expected)


SEEDS = [
    encode(picture(width=24, height=16), kind, **options)
    for kind, options in (
        ("JPEG", {"exif": exif(6)}),
        ("PNG", {"exif": exif(3)}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
    )
]


@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=4), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_damaged_files_decode_as_pillow_or_raise(data, changes, draw):
    """A file with changed or missing bytes decodes as with Pillow, or raises an OSError or ValueError."""
    damaged = bytearray(data)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    damaged = bytes(damaged[: draw.draw(st.integers(0, len(damaged)))] if not changes else damaged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = decode(DecodeImage((9, 7), scaled=False, max_pixels=10**6), damaged)
        except (OSError, ValueError):
            return
        try:
            expected = pillow(damaged, 9, 7)
        except SyntaxError:  # from Pillow's EXIF parser: the pixels are intact
            expected = np.asarray(Image.open(io.BytesIO(damaged)).convert("RGB").resize((7, 9), BILINEAR))
        assert np.array_equal(got, expected)


# --- the DecodeImage object


def test_a_tensor_is_a_view_of_channels_last_memory():
    """``__call__`` returns uint8 [3, H, W] over memory as ``row`` describes it, with the pixels of decode_into."""
    decoder, data = DecodeImage((24, 40)), encode(picture(), "PNG")
    assert decoder.row == Row((24, 40, 3), "uint8", (2, 0, 1))
    assert isinstance(decoder, RowDecoder)
    tensor = decoder(data)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (3, 24, 40)
    assert tensor.stride() == (1, 120, 3)
    assert np.array_equal(tensor.permute(1, 2, 0).numpy(), decode(decoder, data))


def test_only_rng_is_drawn_from():
    """A generator in the same state gives the same picture; the global generators do not change."""
    decoder, data = DecodeImage(16, crop="random", flip=True), encode(picture(), "PNG")
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, again, other = (decoder(data, rng=torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


@pytest.mark.parametrize(
    "out",
    [
        np.empty((8, 8), np.uint8),
        np.empty((3, 8, 8), np.uint8),
        np.empty((8, 8, 3), np.int8),
        np.empty((3, 8, 8), np.uint8).transpose(1, 2, 0),
        np.empty((8, 16, 3), np.uint8)[:, ::2],
    ],
)
def test_memory_of_another_layout_is_refused(out):
    """``out`` must be C-contiguous uint8 [H, W, 3]; the message describes what was passed."""
    with pytest.raises(ValueError, match=r"out must be writable C-contiguous uint8 \[8, 8, 3\], got"):
        DecodeImage(8).decode_into(encode(picture(), "PNG"), out)


def test_decoding_into_a_row_leaves_other_rows_unchanged():
    """Decoding into a row of a batch writes to that row only."""
    batch = np.full((3, 8, 8, 3), 7, np.uint8)
    DecodeImage(8).decode_into(encode(Image.new("RGB", (20, 20), (1, 2, 3)), "PNG"), batch[1])
    assert (batch[1] == (1, 2, 3)).all()
    assert (batch[[0, 2]] == 7).all()


def test_pickles_and_compares_by_value():
    """A pickled copy is equal, has the same repr and decodes alike."""
    decoder = DecodeImage(
        [24, 40], crop="random", scale=[0.2, 1], flip=True, scaled=False, max_pixels=10**6, formats=["png", "Jpeg"]
    )
    copy = pickle.loads(pickle.dumps(decoder))
    data = encode(picture(), "JPEG")
    assert copy == decoder
    assert hash(copy) == hash(decoder)
    assert repr(copy) == repr(decoder)
    assert repr(DecodeImage(8, crop="random")) == "DecodeImage(size=8, crop='random')"  # only non-default arguments
    assert (copy.row, copy.takes_seed) == (decoder.row, decoder.takes_seed)
    assert np.array_equal(decode(copy, data, 3), decode(decoder, data, 3))
    assert decoder != DecodeImage((24, 40))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"size": (224, -1)}, ValueError, "width in size must be at least 1, got -1"),
        ({"size": (1, 2, 3)}, ValueError, r"size must be an int or a pair \(height, width\), got \(1, 2, 3\)"),
        ({"size": 22.4}, TypeError, "size must be an int, \\(height, width\\) or None, got 22.4"),
        ({"size": True}, TypeError, "size must be an int, got True"),
        ({"size": "224"}, TypeError, "size must be an int, \\(height, width\\) or None, got '224'"),
        ({"size": 224, "resize": 200}, ValueError, "resize must be at least size=224, got 200"),
        ({"size": (8, 8), "resize": 9}, ValueError, r'needs an int size and crop="center", got size=\(8, 8\)'),
        ({"size": 8, "resize": 9, "crop": "random"}, ValueError, 'crop="center", got crop="random"'),
        ({"size": 8, "crop": "middle"}, ValueError, 'crop must be "center" or "random", got \'middle\''),
        ({"size": 8, "scale": (0, 1)}, ValueError, r"scale must be a pair \(low, high\) with 0 < low <= high <= 1"),
        ({"size": 8, "scale": (0.5, 1.5)}, ValueError, r"got \(0.5, 1.5\)"),
        ({"size": 8, "scale": 0.5}, TypeError, "scale must be a pair"),
        (
            {"size": 8, "ratio": (2, 1)},
            ValueError,
            r"ratio must be a pair \(low, high\) with 0 < low <= high, got \(2, 1\)",
        ),
        ({"size": 8, "ratio": (1, float("inf"))}, ValueError, "ratio must be a pair"),
        ({"size": 8, "ratio": (float("nan"), 1)}, ValueError, "ratio must be a pair"),
        ({"size": 8, "flip": 0.5}, TypeError, "flip must be True or False, got 0.5"),
        ({"size": 8, "max_pixels": 0}, ValueError, "max_pixels must be at least 1, got 0"),
        ({"size": 8, "max_pixels": None}, TypeError, "max_pixels must be an int, got None"),
        ({"size": 8, "formats": "JPEG"}, TypeError, "formats must be a tuple of names, such as .* got 'JPEG'"),
        ({"size": 8, "formats": None}, TypeError, "formats must be a tuple of names, such as .* got None"),
        ({"size": 8, "formats": ("PNG", 3)}, TypeError, "formats must be a tuple of names"),
        ({"size": 8, "formats": ()}, ValueError, "formats must contain at least one name, got none"),
        (
            {"size": 8, "backend": "opencv"},
            ValueError,
            'backend must be "auto", "native", "pillow" or "turbo", got \'opencv\'',
        ),
        ({"size": 8, "formats": ("JPG",)}, ValueError, "contains 'JPG', which this Pillow cannot open; it can open .*"),
    ],
)
def test_arguments_are_checked(options, error, message):
    """The constructor refuses a wrong argument; the message gives the value and what is allowed."""
    with pytest.raises(error, match=message):
        DecodeImage(**options)


def run_python(code):
    """Run ``code`` in a new interpreter that imports this aiofeed."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_decoding_does_not_import_torch():
    """Importing the decoder and decoding into an array do not import torch."""
    data = encode(picture(), "PNG")
    run_python(
        "import sys, numpy as np, aiofeed.kernel.decoders.image as image\n"
        f"image.DecodeImage(8, flip=True).decode_into({data!r}, np.empty((8, 8, 3), np.uint8), 1)\n"
        "assert 'torch' not in sys.modules"
    )


def test_the_package_imports_lazily():
    """Importing ``aiofeed.kernel.decoders`` imports neither PIL nor numpy nor torch."""
    run_python("import sys, aiofeed.kernel.decoders; assert not {'PIL', 'numpy', 'torch'} & set(sys.modules)")


def test_the_first_images_of_a_process_decode_in_several_threads_at_once():
    """Pillow's plugins load once if several threads open the first images, and each thread gets its picture."""
    kinds = ["TIFF", "PNG", "JPEG", "PPM", "GIF", *(["WEBP"] if features.check("webp") else [])]
    files = [encode(Image.new("RGB", (8, 8), (250, 0, 0)), kind) for kind in kinds] * 3
    run_python(
        "import threading, numpy as np\n"
        "from aiofeed.kernel.decoders.image import DecodeImage\n"
        f"files = {files!r}\n"
        "start, good = threading.Barrier(len(files)), []\n"
        "def work(data):\n"
        "    out = np.empty((8, 8, 3), np.uint8)\n"
        "    start.wait()\n"
        "    DecodeImage(8).decode_into(data, out)\n"
        "    good.append(abs(out.astype(int) - (250, 0, 0)).max() < 6)\n"
        "threads = [threading.Thread(target=work, args=(data,)) for data in files]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "assert good == [True] * len(files), good"
    )
