"""Tests of DecodeImage(backend="turbo"): simplejpeg gives Pillow's pixels, and leaves unusual files to Pillow."""

from __future__ import annotations

import pickle
import struct
import sys

import numpy as np
import pytest
from PIL import Image, ImageFile

from aiofeed.kernel.decoders.image import DecodeImage
from aiofeed.kernel.decoders.metadata import JpegHeader, read_header
from aiofeed.media.pictures import plain
from aiofeed.media.pictures.plain import WORTHWHILE_PIXELS, simplejpeg_decoder
from tests.support.pictures import decode, exif, jpeg

needs_simplejpeg = pytest.mark.skipif(simplejpeg_decoder() is None, reason="simplejpeg is not installed (extra turbo)")


def picture(width, height, mode="RGB"):
    """Edges, gradients and noise, on which two decoders cannot agree by chance."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width]
    planes = np.stack([x * 255 // width, y * 255 // height, (x // 5 + y // 7) % 2 * 255], axis=-1)
    image = Image.fromarray((planes * 0.8 + rng.integers(0, 50, planes.shape)).astype(np.uint8))
    return image.convert(mode)


@pytest.fixture
def calls(monkeypatch):
    """For each call of simplejpeg: (height, width, channels) of the result, or the error."""
    results = []
    decoder = simplejpeg_decoder()

    def spy(*args, **options):
        try:
            pixels = decoder(*args, **options)
        except Exception as error:
            results.append(error)
            raise
        results.append(pixels.shape)
        return pixels

    monkeypatch.setattr("aiofeed.media.pictures.plain.simplejpeg_decoder", lambda: spy)
    monkeypatch.setattr("aiofeed.media.pictures.plain.required_simplejpeg_decoder", lambda: spy)
    return results


@pytest.fixture
def no_simplejpeg(monkeypatch):
    """simplejpeg is not installed."""
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    simplejpeg_decoder.cache_clear()
    yield
    monkeypatch.undo()
    simplejpeg_decoder.cache_clear()


@pytest.fixture
def no_native_library(monkeypatch):
    """The native library is not built."""
    monkeypatch.setattr("aiofeed.kernel.decoders.image.native_decoder", lambda: None)


# --- pixels


@needs_simplejpeg
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "4:1:1"])
@pytest.mark.parametrize("size", [(64, 64), (83, 61), (1, 1), (7, 300), (640, 481)])
def test_pixels_are_pillows(mode, subsampling, size, calls):
    """For every layout, scale, crop and flip the result equals Pillow's bit for bit."""
    data = jpeg(picture(*size, mode), subsampling=subsampling)
    for options in (
        {"size": size[::-1]},
        {"size": (24, 40)},
        {"size": (24, 40), "scaled": False},
        {"size": 32, "resize": 40, "flip": True},
        {"size": 20, "crop": "random", "flip": True},
    ):
        for seed in range(4):
            both = [decode(DecodeImage(**options, backend=backend), data, seed) for backend in ("turbo", "pillow")]
            assert np.array_equal(*both), (options, seed)
    assert len(calls) == 20
    assert all(isinstance(each, tuple) for each in calls)


@needs_simplejpeg
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("scaled", [False, True])
def test_orientation_is_pillows(orientation, scaled, calls):
    """The orientation in EXIF or XMP is applied as by Pillow, also with odd sizes that a scaled decode rounds up."""
    image = picture(333, 251)
    for options in ({"exif": exif(orientation)}, {"xmp": b'<x tiff:Orientation="%d"/>' % orientation}):
        data = jpeg(image, **options)
        for size in ((31, 42), 40, (251, 333), (333, 251)):
            both = [decode(DecodeImage(size, scaled=scaled, backend=b), data) for b in ("turbo", "pillow")]
            assert np.array_equal(*both)
    assert len(calls) == 8


@needs_simplejpeg
@pytest.mark.parametrize(
    ("size", "target", "decoded"),
    [
        ((1600, 1200), (150, 200), (300, 400)),
        ((1600, 1200), (151, 200), (600, 800)),
        ((1607, 1207), (75, 100), (151, 201)),
        ((500, 400), (224, 224), (400, 500)),
        ((1600, 1200), 224, (600, 800)),
    ],
)
def test_the_scale_equals_pillows(size, target, decoded, calls):
    """The scale is 1/2, 1/4 or 1/8, never below twice the target; simplejpeg's other scales (3/8, ...) are not used."""
    data = jpeg(picture(*size))
    scaled, full = (decode(DecodeImage(target, scaled=s, backend="turbo"), data) for s in (True, False))
    assert [each[:2] for each in calls] == [decoded, size[::-1]]
    error = np.mean((scaled.astype(float) - full) ** 2)
    assert decoded == size[::-1] or 0 < error < 255**2 / 10**3.0
    assert np.array_equal(scaled, decode(DecodeImage(target, backend="pillow"), data))


# --- files that simplejpeg decodes


@needs_simplejpeg
def test_auto_uses_simplejpeg_for_small_jpegs(calls, no_native_library):
    """ "auto" uses simplejpeg for small JPEGs, "turbo" for all, "pillow" for none."""
    small, large = jpeg(picture(512, 256)), jpeg(picture(513, 256))
    assert WORTHWHILE_PIXELS == 512 * 256
    for backend, expected in (("auto", 1), ("turbo", 2), ("pillow", 0)):
        calls.clear()
        for data in (small, large):
            decode(DecodeImage(16, backend=backend), data)
        assert len(calls) == expected, backend


def not_plain():
    plain = jpeg(picture(40, 30))
    frame = plain.index(b"\xff\xc0")
    app1 = b"\xff\xe1" + struct.pack(">H", 8) + b"Exif\0\0"
    return {
        "progressive": jpeg(picture(40, 30), progressive=True),
        "CMYK": jpeg(picture(40, 30, "CMYK")),
        "12 bits": plain[: frame + 4] + b"\x0c" + plain[frame + 5 :],
        "arithmetic": plain[: frame + 1] + b"\xc9" + plain[frame + 2 :],
        "lossless": plain[: frame + 1] + b"\xc3" + plain[frame + 2 :],
        "no height": plain[: frame + 5] + b"\0\0" + plain[frame + 7 :],
        "no width": plain[: frame + 7] + b"\0\0" + plain[frame + 9 :],
        "two frames": plain[:frame] + plain[frame : frame + 19] + plain[frame:],
        "bytes between segments": plain[:frame] + b"\0" + plain[frame:],
        "fill bytes": plain[:frame] + b"\xff" + plain[frame:],
        "EXIF in two parts": plain[:2] + app1 + app1 + plain[2:],
        "a segment of no length": plain[:frame] + b"\xff\xfe\0\0" + plain[frame:],
        "the header alone": plain[: frame + 6],
        "a start": b"\xff\xd8\xff",
        "a PNG": b"\x89PNG\r\n\x1a\n",
        "nothing": b"",
    }


@pytest.mark.parametrize("kind", not_plain())
def test_files_that_are_not_plain_are_left_to_pillow(kind):
    """``read_header`` refuses a file that is not plain, and it has Pillow's pixels or error."""
    data = not_plain()[kind]
    assert read_header(data) is None
    if simplejpeg_decoder() is not None:
        outcomes = []
        for backend in ("pillow", "turbo"):
            try:
                outcomes.append(decode(DecodeImage(16, backend=backend), data).tobytes())
            except (OSError, ValueError) as error:
                outcomes.append(repr(error))
        assert outcomes[0] == outcomes[1]


def test_headers_are_read():
    """``read_header`` returns the stored size and the orientation, and skips other segments."""
    assert read_header(jpeg(picture(40, 30))) == JpegHeader(40, 30, 1)
    assert read_header(jpeg(picture(40, 30, "L"), restart_marker_rows=1)) == JpegHeader(40, 30, 1)
    data = jpeg(picture(40, 30), exif=exif(6), icc_profile=bytes(range(256)), comment=b"a comment")
    assert read_header(data) == JpegHeader(40, 30, 6)


@needs_simplejpeg
def test_truncated_files_are_errors_and_leave_the_row_unchanged(calls):
    """A file truncated anywhere raises Pillow's error and leaves the row unchanged."""
    for size in ((30, 40), (16, 16)):
        data = jpeg(picture(40, 30))
        for end in (len(data) - 2, len(data) - 40, len(data) * 2 // 3, len(data) // 2):
            out = np.full((*size, 3), 77, np.uint8)
            with pytest.raises(OSError, match="truncated"):
                DecodeImage(size, backend="turbo").decode_into(data[:end], out)
            assert (out == 77).all()
    assert calls
    assert all(isinstance(each, ValueError) for each in calls)


@needs_simplejpeg
def test_load_truncated_images_is_obeyed(monkeypatch):
    """With ``LOAD_TRUNCATED_IMAGES`` a truncated file decodes to Pillow's pixels."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = jpeg(picture(40, 30))[:-200]
    both = [decode(DecodeImage((30, 40), backend=backend), data) for backend in ("turbo", "pillow")]
    assert np.array_equal(*both)


@needs_simplejpeg
def test_damage_that_libjpeg_only_warns_about_has_pillows_outcome():
    """A file with a broken code, which libjpeg warns about, has Pillow's pixels or error."""
    data = bytearray(jpeg(picture(120, 90)))
    start = data.index(b"\xff\xda") + 14
    rng = np.random.default_rng(1)
    decoded = 0
    for _ in range(60):
        broken = bytearray(data)
        broken[int(rng.integers(start, len(data) - 2))] ^= 1 << int(rng.integers(8))
        outcomes = []
        for backend in ("pillow", "turbo"):
            try:
                outcomes.append(decode(DecodeImage((60, 70), backend=backend), bytes(broken)).tobytes())
                decoded += 1
            except (OSError, ValueError) as error:
                outcomes.append(repr(error))
        assert outcomes[0] == outcomes[1]
    assert decoded > 60


@needs_simplejpeg
def test_max_pixels_is_checked_before_simplejpeg_is_called(calls):
    """More than ``max_pixels`` is refused with the message of other formats, before simplejpeg is called."""
    with pytest.raises(ValueError, match=r"40 x 30 = 1200 pixels .*max_pixels=1199 allows"):
        decode(DecodeImage(8, max_pixels=1199, backend="turbo"), jpeg(picture(40, 30)))
    assert calls == []


@needs_simplejpeg
def test_formats_without_jpeg_refuse_jpegs(calls):
    """If ``formats`` leaves out JPEG, simplejpeg is not called."""
    with pytest.raises(ValueError, match="leaves out"):
        decode(DecodeImage(8, formats=("PNG",), backend="turbo"), jpeg(picture(40, 30)))
    assert calls == []


# --- with and without simplejpeg


def test_without_simplejpeg_pillow_decodes(no_simplejpeg, no_native_library):
    """ "auto" works without simplejpeg; "turbo" raises on construction and says how to install it."""
    data = jpeg(picture(40, 30))
    assert np.array_equal(decode(DecodeImage(16), data), decode(DecodeImage(16, backend="pillow"), data))
    with pytest.raises(ImportError, match=r"pip install 'aiofeed\[turbo\]'"):
        DecodeImage(16, backend="turbo")


@needs_simplejpeg
def test_an_unpickled_decoder_looks_for_simplejpeg_again(request, no_native_library):
    """A decoder that was pickled with simplejpeg decodes without it if its backend is "auto", and raises if "turbo"."""
    auto, turbo = (pickle.loads(pickle.dumps(DecodeImage(16, backend=backend))) for backend in ("auto", "turbo"))
    assert (auto.backend, turbo.backend) == ("auto", "turbo")
    assert hash(turbo) == hash(DecodeImage(16, backend="turbo"))
    assert auto != turbo
    data = jpeg(picture(40, 30))
    before = decode(auto, data)
    request.getfixturevalue("no_simplejpeg")
    assert np.array_equal(decode(auto, data), before)
    with pytest.raises(ImportError, match="needs simplejpeg"):
        decode(turbo, data)


def test_a_simplejpeg_that_does_not_load_is_logged_once(monkeypatch, caplog, no_native_library):
    """If simplejpeg is installed but cannot be imported, Pillow decodes, and one log line gives the reason."""

    def broken(name):
        raise ImportError("numpy.core.multiarray failed to import")

    monkeypatch.setattr(plain, "import_module", broken)
    simplejpeg_decoder.cache_clear()
    try:
        data = jpeg(picture(40, 30))
        for _ in range(2):
            decode(DecodeImage(16), data)
        [record] = caplog.records
        assert "multiarray failed" in record.getMessage()
    finally:
        simplejpeg_decoder.cache_clear()
