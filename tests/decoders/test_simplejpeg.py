"""DecodeImage(backend=): the same pixels, errors and choices whoever decodes a JPEG; what is left to Pillow."""

from __future__ import annotations

import pickle
import struct
import sys

import numpy as np
import pytest
from PIL import Image, ImageFile

from aiofeed.decoders import DecodeImage, simplejpeg
from aiofeed.decoders.simplejpeg import WORTHWHILE_PIXELS, JpegHeader, jpeg_decoder, read_header
from tests.support.pictures import decode, exif, jpeg

here = pytest.mark.skipif(jpeg_decoder() is None, reason="simplejpeg is not installed (the extra `turbo`)")


def picture(width, height, mode="RGB"):
    """Edges, gradients and noise: nothing that two decoders could agree on by chance."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width]
    planes = np.stack([x * 255 // width, y * 255 // height, (x // 5 + y // 7) % 2 * 255], axis=-1)
    image = Image.fromarray((planes * 0.8 + rng.integers(0, 50, planes.shape)).astype(np.uint8))
    return image.convert(mode)


@pytest.fixture
def calls(monkeypatch):
    """What simplejpeg is asked for from here on: (height, width, channels) of each result, or the error."""
    found = []
    decoder = jpeg_decoder()

    def spy(*args, **options):
        try:
            pixels = decoder(*args, **options)
        except Exception as error:
            found.append(error)
            raise
        found.append(pixels.shape)
        return pixels

    monkeypatch.setattr("aiofeed.decoders.backends.jpeg_decoder", lambda: spy)
    monkeypatch.setattr("aiofeed.decoders.backends.required_decoder", lambda: spy)
    return found


@pytest.fixture
def absent(monkeypatch):
    """simplejpeg is not installed."""
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    jpeg_decoder.cache_clear()
    yield
    monkeypatch.undo()
    jpeg_decoder.cache_clear()


@pytest.fixture
def no_library(monkeypatch):
    """The library that is built with aiofeed was not."""
    monkeypatch.setattr("aiofeed.decoders.backends.native_decoder", lambda: None)


# --- the same pixels


@here
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "4:1:1"])
@pytest.mark.parametrize("size", [(64, 64), (83, 61), (1, 1), (7, 300), (640, 481)])
def test_pixels_are_pillows(mode, subsampling, size, calls):
    """Every common layout, full or scaled, whole or cut, mirrored or not: bit for bit what Pillow gives."""
    data = jpeg(picture(*size, mode), subsampling=subsampling)
    for options in (
        {"size": size[::-1]},
        {"size": (24, 40)},
        {"size": (24, 40), "scaled": False},
        {"size": 32, "resize": 40, "flip": True},
        {"size": 20, "crop": "random", "flip": True},
    ):
        for seed in range(4):
            by = [decode(DecodeImage(**options, backend=backend), data, seed) for backend in ("turbo", "pillow")]
            assert np.array_equal(*by), (options, seed)
    assert len(calls) == 20
    assert all(isinstance(each, tuple) for each in calls)


@here
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("scaled", [False, True])
def test_orientation_is_pillows(orientation, scaled, calls):
    """From EXIF or from XMP, with odd sizes that a scaled decode rounds up."""
    image = picture(333, 251)
    for options in ({"exif": exif(orientation)}, {"xmp": b'<x tiff:Orientation="%d"/>' % orientation}):
        data = jpeg(image, **options)
        for size in ((31, 42), 40, (251, 333), (333, 251)):
            by = [decode(DecodeImage(size, scaled=scaled, backend=b), data) for b in ("turbo", "pillow")]
            assert np.array_equal(*by)
    assert len(calls) == 8


@here
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
def test_the_scale_is_the_one_that_pillow_is_asked_for(size, target, decoded, calls):
    """1/2, 1/4 or 1/8, never below twice the target; simplejpeg's other scales (3/8, 5/8, ...) are not taken."""
    data = jpeg(picture(*size))
    scaled, full = (decode(DecodeImage(target, scaled=s, backend="turbo"), data) for s in (True, False))
    assert [each[:2] for each in calls] == [decoded, size[::-1]]
    error = np.mean((scaled.astype(float) - full) ** 2)
    assert decoded == size[::-1] or 0 < error < 255**2 / 10**3.0
    assert np.array_equal(scaled, decode(DecodeImage(target, backend="pillow"), data))


# --- what goes to whom


@here
def test_small_plain_jpegs_are_taken_by_themselves(calls, no_library):
    """ "auto" takes what gains by it; "turbo" takes large ones too; "pillow" none."""
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
        "height to follow": plain[: frame + 5] + b"\0\0" + plain[frame + 7 :],
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
def test_what_is_not_plain_is_pillows(kind):
    """It is not even tried, and has Pillow's outcome."""
    data = not_plain()[kind]
    assert read_header(data) is None
    if jpeg_decoder() is not None:
        outcomes = []
        for backend in ("pillow", "turbo"):
            try:
                outcomes.append(decode(DecodeImage(16, backend=backend), data).tobytes())
            except (OSError, ValueError) as error:
                outcomes.append(repr(error))
        assert outcomes[0] == outcomes[1]


def test_headers_are_read():
    """Size as stored, orientation, whatever else is in front of the pixels."""
    assert read_header(jpeg(picture(40, 30))) == JpegHeader(40, 30, 1)
    assert read_header(jpeg(picture(40, 30, "L"), restart_marker_rows=1)) == JpegHeader(40, 30, 1)
    data = jpeg(picture(40, 30), exif=exif(6), icc_profile=bytes(range(256)), comment=b"a comment")
    assert read_header(data) == JpegHeader(40, 30, 6)


@here
def test_truncated_files_are_errors_and_leave_the_row_alone(calls):
    """However much is missing: the error is Pillow's, the row is as it was."""
    for size in ((30, 40), (16, 16)):
        data = jpeg(picture(40, 30))
        for end in (len(data) - 2, len(data) - 40, len(data) * 2 // 3, len(data) // 2):
            out = np.full((*size, 3), 77, np.uint8)
            with pytest.raises(OSError, match="truncated"):
                DecodeImage(size, backend="turbo").decode_into(data[:end], out)
            assert (out == 77).all()
    assert calls
    assert all(isinstance(each, ValueError) for each in calls)


@here
def test_truncated_files_are_decoded_where_the_program_says_so(monkeypatch):
    """Pillow's switch is obeyed with simplejpeg as without."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = jpeg(picture(40, 30))[:-200]
    by = [decode(DecodeImage((30, 40), backend=backend), data) for backend in ("turbo", "pillow")]
    assert np.array_equal(*by)


@here
def test_damage_that_libjpeg_only_warns_about_has_pillows_outcome():
    """A pixel's code broken: Pillow decodes on, and so its picture is what comes of it."""
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


@here
def test_the_limit_on_pixels_comes_before_the_pixels(calls):
    """With the same words as for other formats, and before simplejpeg is asked."""
    with pytest.raises(ValueError, match=r"40 x 30 = 1200 pixels .*max_pixels=1199 allows"):
        decode(DecodeImage(8, max_pixels=1199, backend="turbo"), jpeg(picture(40, 30)))
    assert calls == []


@here
def test_formats_without_jpeg_refuse_it(calls):
    """What ``formats`` leaves out is not decoded by the other way in."""
    with pytest.raises(ValueError, match="leaves out"):
        decode(DecodeImage(8, formats=("PNG",), backend="turbo"), jpeg(picture(40, 30)))
    assert calls == []


# --- installed or not


def test_without_simplejpeg_pillow_serves(absent, no_library):
    """ "auto" does without; "turbo" says what to install, at once, or where such a decoder was unpickled."""
    data = jpeg(picture(40, 30))
    assert np.array_equal(decode(DecodeImage(16), data), decode(DecodeImage(16, backend="pillow"), data))
    with pytest.raises(ImportError, match=r"pip install 'aiofeed\[turbo\]'"):
        DecodeImage(16, backend="turbo")


@here
def test_a_decoder_that_travels_asks_where_it_arrives(request, no_library):
    """Pickled with simplejpeg, it decodes without, unless it insists."""
    auto, insists = (pickle.loads(pickle.dumps(DecodeImage(16, backend=backend))) for backend in ("auto", "turbo"))
    assert (auto.backend, insists.backend) == ("auto", "turbo")
    assert hash(insists) == hash(DecodeImage(16, backend="turbo"))
    assert auto != insists
    data = jpeg(picture(40, 30))
    before = decode(auto, data)
    request.getfixturevalue("absent")
    assert np.array_equal(decode(auto, data), before)
    with pytest.raises(ImportError, match="needs simplejpeg"):
        decode(insists, data)


def test_a_simplejpeg_that_does_not_load_is_told_once(monkeypatch, caplog, no_library):
    """Built for another numpy, say: Pillow serves, and the log says why."""

    def broken(name):
        raise ImportError("numpy.core.multiarray failed to import")

    monkeypatch.setattr(simplejpeg, "import_module", broken)
    jpeg_decoder.cache_clear()
    try:
        data = jpeg(picture(40, 30))
        for _ in range(2):
            decode(DecodeImage(16), data)
        [record] = caplog.records
        assert "multiarray failed" in record.getMessage()
    finally:
        jpeg_decoder.cache_clear()
