"""Tests of DecodeImage(backend="native"): chunks in one call, pixels close to Pillow's, unusual files refused."""

from __future__ import annotations

import io
import pickle
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import aiofeed
from aiofeed.kernel.decoders import native_jpeg
from aiofeed.kernel.decoders.geometry import View, stored_box
from aiofeed.kernel.decoders.image import DecodeImage
from aiofeed.kernel.decoders.native_jpeg import LIBRARY, NativeDecoder, native_decoder
from tests.support.paths import ROOT
from tests.support.pictures import decode, exif, jpeg, psnr

needs_library = pytest.mark.skipif(native_decoder() is None, reason="the library was not built (hatch_build.py)")


def picture(width, height, mode="RGB"):
    """Smooth shapes of all colours, like a photograph, with noise."""
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    planes = np.stack([np.sin(7 * x + k) * np.cos(5 * y - 2 * k) for k in range(3)], axis=-1)
    noise = np.random.default_rng(0).normal(0, 3, (height, width, 1))
    return Image.fromarray((planes * 90 + 128 + noise).clip(0, 255).astype(np.uint8)).convert(mode)


@pytest.fixture
def refused(monkeypatch):
    """For each call of the library: the number of pictures that it leaves to Pillow."""
    counts = []
    decode = NativeDecoder.decode

    def spy(self, *args, **options):
        remaining = decode(self, *args, **options)
        counts.append(len(remaining))
        return remaining

    monkeypatch.setattr(NativeDecoder, "decode", spy)
    return counts


def sampled_jpeg(columns, rows, *samplings):
    """A baseline JPEG of smooth colours of 8 columns x 8 rows pixels, in which each block has one colour.

    Args:
        samplings: horizontal and vertical sampling factors of Y, Cb and Cr.
    """
    wide, high = (max(factors) for factors in zip(*samplings, strict=True))
    bits, last = [], [0, 0, 0]
    for row in range(-(-rows // high)):
        for column in range(-(-columns // wide)):
            for part, (across, down) in enumerate(samplings):
                for y in range(down):
                    for x in range(across):
                        place = (column + (x + 0.5) / across) * wide / columns, (row + (y + 0.5) / down) * high / rows
                        level = round(60 * np.sin(2 * place[0] + part) * np.cos(2 * place[1] - part))
                        step, last[part] = level - last[part], level
                        length = abs(step).bit_length()
                        bits.append(f"{length:04b}")  # the code of a length is its number
                        bits.append(f"{step if step > 0 else step + (1 << length) - 1:0{length}b}" if length else "")
                        bits.append("0")  # the end of the block
    text = "".join(bits)
    text += "1" * (-len(text) % 8)
    scan = int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0")
    parts = [bytes([n + 1, across << 4 | down, 0]) for n, (across, down) in enumerate(samplings)]
    segments = {
        0xE0: b"JFIF\0\1\1\0\0\1\0\1\0\0",
        0xDB: b"\0" + b"\x08" * 64,
        0xC0: struct.pack(">BHHB", 8, 8 * rows, 8 * columns, 3) + b"".join(parts),
        0xC4: b"\0" + bytes([0, 0, 0, 12]) + bytes(12) + bytes(range(12)) + b"\x10\1" + bytes(15) + b"\0",
        0xDA: b"\3\1\0\2\0\3\0\0\x3f\0",
    }
    head = b"".join(struct.pack(">BBH", 0xFF, each, len(data) + 2) + data for each, data in segments.items())
    return b"\xff\xd8" + head + scan + b"\xff\xd9"


# --- the pixels


@needs_library
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("size", [(64, 64), (83, 61), (300, 201), (640, 481)])
def test_pixels_are_close_to_pillows(subsampling, size, refused):
    """For every layout, scale, crop and flip the result has at least 40 dB PSNR against Pillow's at its scale."""
    data = jpeg(picture(*size), subsampling=subsampling)
    for options in (
        {"size": size[::-1]},
        {"size": (24, 40)},
        {"size": (20, 10)},
        {"size": 32, "resize": 40, "flip": True},
        {"size": 20, "crop": "random", "flip": True},
        {"size": (100, 301)},
    ):
        for seed in range(3):
            native, pillow = (decode(DecodeImage(**options, backend=by), data, seed) for by in ("native", "pillow"))
            assert psnr(native, pillow) > 40, (options, seed)
    assert refused == [0] * 18


SAMPLINGS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (4, 1), (1, 4), (4, 2), (2, 4)]


@needs_library
@pytest.mark.parametrize("luma", SAMPLINGS)
@pytest.mark.parametrize("chroma", [((1, 1), (1, 1)), ((2, 1), (2, 1)), ((1, 2), (1, 2)), ((1, 1), (2, 1))])
def test_samplings_that_are_rare(luma, chroma, refused):
    """Files of every sampling, 4:1:1 and 4:1:0 included, are as close to Pillow as documented, or left to it."""
    data = sampled_jpeg(40, 24, luma, *chroma)
    for size in ((192, 320), (100, 150), (24, 40)):
        outcomes = []
        for options in ({"backend": "native"}, {"backend": "pillow"}, {"backend": "pillow", "scaled": False}):
            try:
                outcomes.append(decode(DecodeImage(size, **options), data))
            except OSError as error:  # libjpeg does not read each of them
                outcomes.append(str(error))
        native, same, full = outcomes
        if isinstance(native, str) or isinstance(same, str):
            assert native == same
        else:
            assert psnr(native, same) > 45
            assert isinstance(full, str) or refused[-1] or psnr(native, full) > 40
    is_usual = max(luma) <= 2 and chroma == ((1, 1), (1, 1))
    assert refused == [0 if is_usual else 1] * 3


@needs_library
def test_photographs_are_as_close_as_documented(refused):
    """Photographs have at least 45 dB PSNR against Pillow at the same scale, and 40 dB against Pillow at full scale."""
    data = pytest.importorskip("benchmarks.data")
    pytest.importorskip("skimage")
    pytest.importorskip("sklearn")
    for name, photograph in data.photographs().items():
        file = jpeg(photograph)
        for size in ((224, 224), (112, 112), (64, 48)):
            native = decode(DecodeImage(size, backend="native"), file)
            for scaled in (True, False):
                pillow = decode(DecodeImage(size, backend="pillow", scaled=scaled), file)
                assert psnr(native, pillow) > (45 if scaled else 40), (name, size, scaled)
    assert not any(refused)


@needs_library
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("size", [24, 64, 100, 120, 200])
def test_photographs_that_are_enlarged(size, subsampling, refused):
    """Small photographs have 45 dB PSNR, too; if their chroma would be enlarged much, Pillow decodes them."""
    skimage = pytest.importorskip("skimage")
    for name in ("astronaut", "coffee", "chelsea"):
        photograph = Image.fromarray(getattr(skimage.data, name)()[:300, :300])
        file = jpeg(photograph.resize((size, size), Image.Resampling.LANCZOS), quality=95, subsampling=subsampling)
        native, pillow = (decode(DecodeImage(224, backend=by), file) for by in ("native", "pillow"))
        assert psnr(native, pillow) > 45, name
    assert refused == [int(size < 112 and subsampling != "4:4:4")] * 3


@needs_library
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (7, 300), (64, 64), (333, 251)])
def test_grey_pictures_differ_by_one_level_at_most(size, refused):
    """The filter equals Pillow's in both directions and for all ratios."""
    data = jpeg(picture(*size, "L"), restart_marker_rows=1)
    for target in ((4, 4), (3, 200), (64, 64), (251, 333), (11, 17)):
        native, pillow = (decode(DecodeImage(target, backend=by), data) for by in ("native", "pillow"))
        assert np.abs(native.astype(int) - pillow).max() <= 1
    assert refused == [0] * 5


@needs_library
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("crop", ["center", "random"])
def test_orientation_is_applied(orientation, crop, refused):
    """The orientation in EXIF or XMP is applied at all scales, for the whole picture and for crops, mirrored or not."""
    image = picture(333, 251)
    for options in ({"exif": exif(orientation)}, {"xmp": b'<x tiff:Orientation="%d"/>' % orientation}):
        data = jpeg(image, **options)
        for size in ((31, 42), (40, 40), (251, 333), (90, 60)):
            for seed in range(3):
                both = [
                    decode(DecodeImage(size, crop=crop, flip=True, backend=by), data, seed)
                    for by in ("native", "pillow")
                ]
                assert psnr(*both) > 36, (size, seed)
    assert refused == [0] * 24


@pytest.mark.parametrize("orientation", range(1, 9))
def test_stored_box_contains_the_same_pixels(orientation):
    """``stored_box`` of a box of the upright picture contains the same pixels of the stored picture."""
    stored = np.arange(5 * 7).reshape(5, 7)
    image = Image.fromarray(stored.astype(np.uint8))
    image.getexif()[0x0112] = orientation
    from PIL import ImageOps

    upright = np.asarray(ImageOps.exif_transpose(image))
    box = (1, 2, 3, 5)
    left, upper, right, lower = stored_box(box, 7, 5, orientation)
    shown = set(upright[box[1] : box[3], box[0] : box[2]].ravel().tolist())
    assert shown == set(stored[upper:lower, left:right].ravel().tolist())


# --- part of a file


@needs_library
def test_damage_below_the_visible_rows_is_ignored(refused, monkeypatch):
    """Damage below the visible rows is not read; damage above them leaves the file to Pillow."""
    data = bytearray(jpeg(picture(160, 480), restart_marker_rows=1))
    at = data.index(b"\xff\xd3", len(data) * 3 // 4)
    data[at : at + 2] = b"\xff\xd6"  # a restart marker out of turn
    damaged = bytes(data)
    monkeypatch.setattr(DecodeImage, "view", lambda *_: View((0, 0, 160, 160)))
    decode(DecodeImage((40, 40), backend="native"), damaged)
    monkeypatch.setattr(DecodeImage, "view", lambda *_: View((0, 300, 160, 460)))
    decode(DecodeImage((40, 40), backend="native"), damaged)
    monkeypatch.undo()
    assert refused == [0, 1]


@needs_library
def test_rows_above_the_visible_part_have_no_effect(refused):
    """A box that starts at any row shows what Pillow shows of it."""
    data = jpeg(picture(200, 300))
    for upper in (0, 1, 15, 16, 17, 100, 260):
        view = View((3.5, upper + 0.25, 180, upper + 39.75))
        rows = np.empty((1, 40, 50, 3), np.uint8)
        assert native_decoder().decode([data], rows, lambda *_, view=view: view, max_pixels=10**6) == []
        with Image.open(io.BytesIO(data)) as image:
            pillow = np.asarray(image.resize((50, 40), Image.Resampling.BILINEAR, box=view.box))
        assert psnr(rows[0], pillow) > 42


# --- files that are left to Pillow


def unusual_files():
    plain = jpeg(picture(40, 30))
    frame = plain.index(b"\xff\xc0")
    return {
        "progressive": jpeg(picture(40, 30), progressive=True),
        "CMYK": jpeg(picture(40, 30, "CMYK")),
        "RGB": jpeg(picture(40, 30), keep_rgb=True),
        "a tail": plain + b"\0",
        "another size": plain[: frame + 5] + struct.pack(">HH", 90, 40) + plain[frame + 9 :],
        "odd sampling": plain[: frame + 11] + b"\x31" + plain[frame + 12 :],
        "12 bits": plain[: frame + 4] + b"\x0c" + plain[frame + 5 :],
        "no end": plain[:-2],
        "half": plain[: len(plain) // 2],
        "half, with an end": plain[: len(plain) // 2] + b"\xff\xd9",
        "two frames": plain[:frame] + plain[frame : frame + 19] + plain[frame:],
        "a PNG": b"\x89PNG\r\n\x1a\n",
        "nothing": b"",
        "no bytes": 7,
    }


@needs_library
@pytest.mark.parametrize("kind", unusual_files())
def test_unusual_files_have_pillows_outcome(kind):
    """An unusual file has Pillow's pixels or error, alone and among other files, which it does not affect."""
    data, plain = unusual_files()[kind], jpeg(picture(50, 60))
    outcomes = []
    for backend in ("pillow", "native"):
        try:
            outcomes.append(decode(DecodeImage(16, backend=backend), data).tobytes())
        except (OSError, ValueError, TypeError) as error:
            outcomes.append(repr(error))
    assert outcomes[0] == outcomes[1]
    decoder = DecodeImage(16, backend="native")
    rows = np.full((3, 16, 16, 3), 77, np.uint8)
    errors = decoder.decode_many_into([plain, data, plain], rows)
    assert (errors[0], errors[2]) == (None, None)
    assert np.array_equal(rows[0], decode(decoder, plain))
    assert np.array_equal(rows[2], rows[0])
    assert outcomes[0] == (rows[1].tobytes() if errors[1] is None else repr(errors[1]))
    assert errors[1] is None or (rows[1] == 77).all()


@needs_library
def test_damaged_files_are_decoded_only_if_pillow_decodes_them():
    """A damaged file that is shown whole decodes if Pillow decodes it, else has Pillow's error."""
    files = [jpeg(picture(61, 45), subsampling=s, restart_marker_rows=r) for s in (0, 1, 2) for r in (0, 1)]
    rng = random.Random(0)
    decoder, pillow = DecodeImage((20, 30), max_pixels=10**6), DecodeImage((20, 30), max_pixels=10**6, backend="pillow")
    decoded = 0
    for _ in range(400):
        data = bytearray(rng.choice(files))
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(2, len(data) - 2)
            change = rng.randrange(3)
            if change == 0:
                data[at] = rng.randrange(256)
            elif change == 1:
                del data[at : at + rng.randrange(1, 20)]
            else:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
        outcomes = []
        for each in (pillow, decoder):
            try:
                outcomes.append(decode(each, bytes(data)))
            except (OSError, ValueError) as error:
                outcomes.append(repr(error))
        assert type(outcomes[0]) is type(outcomes[1]), outcomes
        if isinstance(outcomes[0], str):
            assert outcomes[0] == outcomes[1]
        else:
            decoded += 1
    assert decoded > 100


@needs_library
def test_max_pixels_is_enforced():
    """A file of more than ``max_pixels`` is refused with Pillow's message."""
    with pytest.raises(ValueError, match=r"40 x 30 = 1200 pixels .*max_pixels=1199 allows"):
        decode(DecodeImage(8, max_pixels=1199, backend="native"), jpeg(picture(40, 30)))


@needs_library
def test_a_very_strong_reduction_is_left_to_pillow(refused):
    """A side that shrinks more than a hundred times needs more weights than the library stores."""
    data = jpeg(picture(2000, 40))
    both = [decode(DecodeImage((40, 2), backend=by, scaled=True), data) for by in ("native", "pillow")]
    assert refused == [1]
    assert np.array_equal(*both)


# --- several files in one call


@needs_library
def test_decode_many_into_equals_decode_into():
    """Files of mixed sizes, orientations and kinds, each with a seed, decode into their rows of a larger array."""
    files = [jpeg(picture(40 + 9 * n, 90 - 5 * n, "L" if n % 3 else "RGB"), exif=exif(n % 8 + 1)) for n in range(12)]
    files[5] = jpeg(picture(40, 30), progressive=True)
    decoder = DecodeImage(24, crop="random", flip=True)
    seeds = [n * 7919 for n in range(12)]
    rows = np.zeros((14, 24, 24, 3), np.uint8)
    assert decoder.decode_many_into(files, rows[1:13], seeds) == [None] * 12
    for n, file in enumerate(files):
        assert np.array_equal(rows[n + 1], decode(decoder, file, seeds[n]))
    assert not rows[0].any()
    assert not rows[13].any()


@needs_library
def test_decode_many_into_takes_buffers():
    """Objects with a buffer decode as bytes do; a missing seed is an error of each sample."""
    file = jpeg(picture(40, 30))
    rows = np.zeros((3, 8, 8, 3), np.uint8)
    assert DecodeImage(8).decode_many_into([file, bytearray(file), memoryview(file)], rows) == [None] * 3
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])
    for error in DecodeImage(8, flip=True).decode_many_into([file] * 3, rows):
        assert "needs a seed" in str(error)
    assert DecodeImage(8).decode_many_into([], rows[:0]) == []


def test_decode_many_into_checks_its_arguments():
    """Rows of another number, shape, dtype or order are refused, as is a wrong number of seeds."""
    file = jpeg(picture(40, 30))
    decoder = DecodeImage(8)
    for wrong in (
        np.zeros((2, 8, 8, 3), np.uint8),
        np.zeros((1, 8, 9, 3), np.uint8),
        np.zeros((1, 8, 8, 3), np.int8),
        np.zeros((1, 8, 3, 8), np.uint8).transpose(0, 1, 3, 2),
        np.frombuffer(bytes(192), np.uint8).reshape(1, 8, 8, 3),
    ):
        with pytest.raises(ValueError, match=r"out must be (writable C-contiguous )?uint8"):
            decoder.decode_many_into([file], wrong)
    with pytest.raises(ValueError, match="seeds must be as many as data, 1, got 2"):
        decoder.decode_many_into([file], np.zeros((1, 8, 8, 3), np.uint8), [1, 2])


@needs_library
def test_threads_decode_at_the_same_time():
    """Four threads at a time get the pixels that one gets."""
    files = [jpeg(picture(100 + n, 80)) for n in range(20)]
    decoder = DecodeImage((30, 40))
    rows = np.zeros((4, 20, 30, 40, 3), np.uint8)
    threads = [threading.Thread(target=decoder.decode_many_into, args=(files, mine)) for mine in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = np.stack([decode(decoder, file) for file in files])
    assert all(np.array_equal(mine, expected) for mine in rows)


@needs_library
def test_a_feeder_decodes_chunks_and_names_the_failed_sample(tmp_path, refused):
    """A feeder decodes several samples per call; a broken one is listed in ``failures`` with its key and skipped."""
    (tmp_path / "a").mkdir()
    for n in range(12):
        (tmp_path / "a" / f"{n:02d}.jpg").write_bytes(jpeg(picture(40 + n, 30)))
    (tmp_path / "a" / "05.jpg").write_bytes(jpeg(picture(40, 30))[:-300])
    source = aiofeed.ImageFolder(tmp_path)
    decode = DecodeImage(8)
    with aiofeed.Feeder(source, decode=decode, batch_size=12, on_error="skip") as feeder:
        [(images, labels)] = list(feeder)
    assert images.shape == (11, 3, 8, 8)
    assert labels.shape == (11,)
    [failure] = feeder.failures
    assert failure.key.endswith("05.jpg")
    assert "truncated" in str(failure.error)
    assert sum(refused) == 1
    assert len(refused) < 12
    kept = [n for n in range(12) if n != 5]
    for image, n in zip(images, kept, strict=True):
        assert np.array_equal(
            image.permute(1, 2, 0), globals()["decode"](decode, (tmp_path / "a" / f"{n:02d}.jpg").read_bytes())
        )


def test_decode_many_into_replaces_decode_into(tmp_path):
    """A chunk is decoded by ``decode_many_into``, and ``decode_into`` is not called."""

    class Sevens(DecodeImage):
        def decode_into(self, data, out, seed=None):
            raise AssertionError

        def decode_many_into(self, data, out, seeds=None):
            out[...] = 7
            return [None] * len(data)

    for n in range(3):
        (tmp_path / f"{n}.jpg").write_bytes(jpeg(picture(40, 30)))
    with aiofeed.Feeder(aiofeed.Files(sorted(tmp_path.iterdir())), decode=Sevens(8), batch_size=3) as feeder:
        [images] = list(feeder)
    assert (images == 7).all()


@pytest.mark.parametrize("fault", ["raises", "too few"])
def test_a_faulty_decode_many_into_falls_back_to_decode_into(tmp_path, fault):
    """If ``decode_many_into`` raises, or returns too few results, each sample is decoded on its own."""

    class Odd(DecodeImage):
        def decode_many_into(self, data, out, seeds=None):
            out[...] = 9
            if fault == "raises":
                raise RuntimeError("not today")
            return []

    for n in range(3):
        (tmp_path / f"{n}.jpg").write_bytes(jpeg(picture(40 + n, 30)))
    files = sorted(tmp_path.iterdir())
    with aiofeed.Feeder(aiofeed.Files(files), decode=Odd(8), batch_size=3) as feeder:
        [images] = list(feeder)
    for image, file in zip(images, files, strict=True):
        assert np.array_equal(image.permute(1, 2, 0), decode(DecodeImage(8), file.read_bytes()))


# --- with and without the library


@needs_library
def test_backend_selects_the_library(refused):
    """ "auto" uses the library unless the caller requests exact pixels; "pillow" does not."""
    data = jpeg(picture(40, 30))
    for options, calls in (
        ({}, 1),
        ({"backend": "native"}, 1),
        ({"scaled": False}, 0),
        ({"backend": "pillow"}, 0),
        ({"formats": ("PNG", "JPEG")}, 1),
    ):
        refused.clear()
        decode(DecodeImage(16, **options), data)
        assert len(refused) == calls, options
    with pytest.raises(ValueError, match="leaves out"):
        decode(DecodeImage(16, formats=("PNG",)), data)
    with pytest.raises(ValueError, match="scaled=False is for exact pixels"):
        DecodeImage(16, backend="native", scaled=False)


def test_without_the_library_pillow_decodes(monkeypatch):
    """ "auto" works without the library; "native" raises with instructions, on construction or after unpickling."""
    data = jpeg(picture(40, 30))
    native = pickle.dumps(DecodeImage(16, backend="native")) if native_decoder() else None
    monkeypatch.setattr(native_jpeg, "LIBRARY", Path("/nowhere"))
    native_decoder.cache_clear()
    try:
        assert np.array_equal(decode(DecodeImage(16), data), decode(DecodeImage(16, backend="pillow"), data))
        with pytest.raises(ImportError, match="libjpeg-turbo's headers"):
            DecodeImage(16, backend="native")
        if native is not None:
            with pytest.raises(ImportError, match="was not built"):
                decode(pickle.loads(native), data)
    finally:
        native_decoder.cache_clear()


def test_a_library_that_does_not_load_is_logged_once(monkeypatch, tmp_path, caplog):
    """If the library cannot be loaded, Pillow decodes, and one log line gives the reason."""
    broken = tmp_path / "_native_jpeg.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native_jpeg, "LIBRARY", broken)
    monkeypatch.setattr(NativeDecoder.__init__, "__defaults__", (broken,))
    native_decoder.cache_clear()
    try:
        for _ in range(2):
            decode(DecodeImage(16), jpeg(picture(40, 30)))
        [record] = [record for record in caplog.records if "cannot be loaded" in record.getMessage()]
        assert "_native_jpeg.so" in record.getMessage()
    finally:
        native_decoder.cache_clear()


@needs_library
def test_fingerprint_contains_the_backend():
    """A cache that another backend filled is not used."""
    auto, pillow = DecodeImage(16).fingerprint(), DecodeImage(16, backend="pillow").fingerprint()
    assert auto != pillow
    assert native_decoder().version in auto


@needs_library
@pytest.mark.slow
def test_the_library_is_built_from_its_source(tmp_path):
    """``hatch_build.py`` builds the library; if it cannot, it says why and deletes the library of an earlier build."""
    for name in ("hatch_build.py", "aiofeed/kernel/decoders/native_jpeg.c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    built = tmp_path / LIBRARY.relative_to(ROOT)

    def build(**variables):
        env = {"PATH": "/usr/bin:/bin", "AIOFEED_BUILD_NATIVE_FILES": "0", **variables}
        command = [sys.executable, "hatch_build.py"]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert build().stdout == f"built {LIBRARY.relative_to(ROOT)}\n"
    assert NativeDecoder(built).version == native_decoder().version
    for variables, reason in (
        ({"CC": "/nowhere/cc"}, "/nowhere/cc"),
        ({"AIOFEED_BUILD_NATIVE_JPEG": "0"}, "AIOFEED_BUILD_NATIVE_JPEG=0"),
    ):
        done = build(**variables)
        assert done.returncode == 1
        assert reason in done.stderr
        assert not built.exists()
