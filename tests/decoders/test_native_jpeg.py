"""DecodeImage(backend="native"): whole chunks in one call, close to Pillow's pixels, everything odd left to Pillow."""

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
from aiofeed.decoders import DecodeImage, native_jpeg
from aiofeed.decoders.geometry import View, stored_box
from aiofeed.decoders.native_jpeg import LIBRARY, NativeDecoder, native_decoder
from tests.support.paths import ROOT
from tests.support.pictures import decode, exif, jpeg, psnr

here = pytest.mark.skipif(native_decoder() is None, reason="the library was not built (hatch_build.py)")


def picture(width, height, mode="RGB"):
    """Smooth shapes of all colours, as photographs are, and some noise."""
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    planes = np.stack([np.sin(7 * x + k) * np.cos(5 * y - 2 * k) for k in range(3)], axis=-1)
    noise = np.random.default_rng(0).normal(0, 3, (height, width, 1))
    return Image.fromarray((planes * 90 + 128 + noise).clip(0, 255).astype(np.uint8)).convert(mode)


@pytest.fixture
def left(monkeypatch):
    """How many of each call's pictures are left to Pillow."""
    found = []
    decode = NativeDecoder.decode

    def spy(self, *args, **options):
        what = decode(self, *args, **options)
        found.append(len(what))
        return what

    monkeypatch.setattr(NativeDecoder, "decode", spy)
    return found


# --- the pixels


@here
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "4:1:1"])
@pytest.mark.parametrize("size", [(64, 64), (83, 61), (300, 201), (640, 481)])
def test_pixels_are_close_to_pillows(subsampling, size, left):
    """Every common layout, full or scaled, whole or cut, mirrored or not: 40 dB or more from Pillow at its scale."""
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
            ours, theirs = (decode(DecodeImage(**options, backend=by), data, seed) for by in ("native", "pillow"))
            assert psnr(ours, theirs) > 40, (options, seed)
    assert left == [0] * 18


@here
def test_photographs_are_closer_than_is_said(left):
    """At least 45 dB from Pillow at the same scale, and from Pillow at full scale."""
    data = pytest.importorskip("benchmarks.data")
    pytest.importorskip("skimage")
    pytest.importorskip("sklearn")
    for name, photograph in data.photographs().items():
        file = jpeg(photograph)
        for size in ((224, 224), (112, 112), (64, 48)):
            ours = decode(DecodeImage(size, backend="native"), file)
            for scaled in (True, False):
                theirs = decode(DecodeImage(size, backend="pillow", scaled=scaled), file)
                assert psnr(ours, theirs) > (45 if scaled else 40), (name, size, scaled)
    assert not any(left)


@here
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (7, 300), (64, 64), (333, 251)])
def test_grey_pictures_differ_by_one_level_at_most(size, left):
    """The filter is Pillow's, whatever the direction and the ratio."""
    data = jpeg(picture(*size, "L"), restart_marker_rows=1)
    for target in ((4, 4), (3, 200), (64, 64), (251, 333), (11, 17)):
        ours, theirs = (decode(DecodeImage(target, backend=by), data) for by in ("native", "pillow"))
        assert np.abs(ours.astype(int) - theirs).max() <= 1
    assert left == [0] * 5


@here
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("crop", ["center", "random"])
def test_orientation_is_honoured(orientation, crop, left):
    """From EXIF or XMP, at full and smaller scales, for the whole and for a part, mirrored too."""
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
    assert left == [0] * 24


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_are_turned_back(orientation):
    """A box of the upright picture is where its pixels are stored."""
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


@here
def test_rows_below_what_is_shown_are_not_read(left, monkeypatch):
    """What is damaged there does no harm, and above it does; a picture that is shown whole is Pillow's to judge."""
    data = bytearray(jpeg(picture(160, 480), restart_marker_rows=1))
    at = data.index(b"\xff\xd3", len(data) * 3 // 4)
    data[at : at + 2] = b"\xff\xd6"  # a restart marker out of turn
    damaged = bytes(data)
    monkeypatch.setattr(DecodeImage, "view", lambda *_: View((0, 0, 160, 160)))
    decode(DecodeImage((40, 40), backend="native"), damaged)
    monkeypatch.setattr(DecodeImage, "view", lambda *_: View((0, 300, 160, 460)))
    decode(DecodeImage((40, 40), backend="native"), damaged)
    monkeypatch.undo()
    assert left == [0, 1]


@here
def test_rows_above_what_is_shown_change_nothing(left):
    """Any part of a picture is what Pillow shows of it, from any row on."""
    data = jpeg(picture(200, 300))
    for upper in (0, 1, 15, 16, 17, 100, 260):
        view = View((3.5, upper + 0.25, 180, upper + 39.75))
        rows = np.empty((1, 40, 50, 3), np.uint8)
        assert native_decoder().decode([data], rows, lambda *_, view=view: view, max_pixels=10**6) == []
        with Image.open(io.BytesIO(data)) as image:
            theirs = np.asarray(image.resize((50, 40), Image.Resampling.BILINEAR, box=view.box))
        assert psnr(rows[0], theirs) > 42


# --- what is left to Pillow


def odd():
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


@here
@pytest.mark.parametrize("kind", odd())
def test_what_is_odd_has_pillows_outcome(kind):
    """Its picture to the bit, or its error to the word, alone and among others, whose pictures are theirs."""
    data, plain = odd()[kind], jpeg(picture(50, 60))
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


@here
def test_damaged_files_are_decoded_only_where_pillow_decodes_them_too():
    """Whole pictures, damaged anywhere by the hundred: no picture where Pillow has none, else one of its errors."""
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


@here
def test_the_limit_on_pixels_is_kept():
    """More than ``max_pixels`` is refused with the same words as ever."""
    with pytest.raises(ValueError, match=r"40 x 30 = 1200 pixels .*max_pixels=1199 allows"):
        decode(DecodeImage(8, max_pixels=1199, backend="native"), jpeg(picture(40, 30)))


@here
def test_a_reduction_beyond_its_tables_is_pillows(left):
    """A side that shrinks more than a hundred times needs more weights than there is room for."""
    data = jpeg(picture(2000, 40))
    both = [decode(DecodeImage((40, 2), backend=by, scaled=True), data) for by in ("native", "pillow")]
    assert left == [1]
    assert np.array_equal(*both)


# --- many at once


@here
def test_many_are_what_each_is_alone():
    """Sizes, orientations and kinds mixed, with seeds of their own, in rows of a larger array."""
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


@here
def test_many_take_anything_with_a_buffer():
    """Bytes, and what can be made bytes; a seed that is missing is an error of each sample."""
    file = jpeg(picture(40, 30))
    rows = np.zeros((3, 8, 8, 3), np.uint8)
    assert DecodeImage(8).decode_many_into([file, bytearray(file), memoryview(file)], rows) == [None] * 3
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])
    for error in DecodeImage(8, flip=True).decode_many_into([file] * 3, rows):
        assert "needs a seed" in str(error)
    assert DecodeImage(8).decode_many_into([], rows[:0]) == []


def test_many_check_their_memory():
    """Rows of another number, shape, dtype or order are refused, as are too few seeds."""
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


@here
def test_threads_decode_at_the_same_time():
    """Four of them get what one gets."""
    files = [jpeg(picture(100 + n, 80)) for n in range(20)]
    decoder = DecodeImage((30, 40))
    rows = np.zeros((4, 20, 30, 40, 3), np.uint8)
    threads = [threading.Thread(target=decoder.decode_many_into, args=(files, mine)) for mine in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = np.stack([decode(decoder, file) for file in files])
    assert all(np.array_equal(mine, alone) for mine in rows)


@here
def test_a_feeder_decodes_chunks_and_names_who_failed(tmp_path, left):
    """One call for many samples; the one that is broken is an error with its name, or is left out."""
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
    assert sum(left) == 1
    assert len(left) < 12
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
def test_a_call_for_many_that_fails_is_made_for_each(tmp_path, fault):
    """A decoder whose ``decode_many_into`` does not keep its word loses nothing but time."""

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


# --- there or not


@here
def test_who_decodes_is_who_is_asked_for(left):
    """ "auto" takes the library, but for exact pixels; "pillow" and "turbo" never do."""
    data = jpeg(picture(40, 30))
    for options, calls in (
        ({}, 1),
        ({"backend": "native"}, 1),
        ({"scaled": False}, 0),
        ({"backend": "pillow"}, 0),
        ({"formats": ("PNG", "JPEG")}, 1),
    ):
        left.clear()
        decode(DecodeImage(16, **options), data)
        assert len(left) == calls, options
    with pytest.raises(ValueError, match="leaves out"):
        decode(DecodeImage(16, formats=("PNG",)), data)
    with pytest.raises(ValueError, match="scaled=False is for exact pixels"):
        DecodeImage(16, backend="native", scaled=False)


def test_without_the_library_others_serve(monkeypatch):
    """ "auto" does without; "native" says how to get it, at once, or where such a decoder was unpickled."""
    data = jpeg(picture(40, 30))
    insists = pickle.dumps(DecodeImage(16, backend="native")) if native_decoder() else None
    monkeypatch.setattr(native_jpeg, "LIBRARY", Path("/nowhere"))
    native_decoder.cache_clear()
    try:
        assert np.array_equal(decode(DecodeImage(16), data), decode(DecodeImage(16, backend="pillow"), data))
        with pytest.raises(ImportError, match="libjpeg-turbo's headers"):
            DecodeImage(16, backend="native")
        if insists is not None:
            with pytest.raises(ImportError, match="was not built"):
                decode(pickle.loads(insists), data)
    finally:
        native_decoder.cache_clear()


def test_a_library_that_does_not_load_is_told_once(monkeypatch, tmp_path, caplog):
    """One that is no library, say: the others serve, and the log says why."""
    broken = tmp_path / "_native_jpeg.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native_jpeg, "LIBRARY", broken)
    monkeypatch.setattr(NativeDecoder.__init__, "__defaults__", (broken,))
    native_decoder.cache_clear()
    try:
        for _ in range(2):
            decode(DecodeImage(16), jpeg(picture(40, 30)))
        [record] = [record for record in caplog.records if "cannot be used" in record.getMessage()]
        assert "_native_jpeg.so" in record.getMessage()
    finally:
        native_decoder.cache_clear()


@here
def test_what_is_kept_knows_who_decoded_it():
    """A cache that another decoder filled is not taken for this one's."""
    auto, pillow = DecodeImage(16).fingerprint(), DecodeImage(16, backend="pillow").fingerprint()
    assert auto != pillow
    assert native_decoder().version in auto


@here
@pytest.mark.slow
def test_the_library_is_built_from_its_source(tmp_path):
    """``hatch_build.py`` says what is missing where there is no compiler, and leaves no library behind."""
    for name in ("hatch_build.py", "aiofeed/decoders/native_jpeg.c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    where = {"PATH": "/usr/bin:/bin", "AIOFEED_GROUPS": "0"}
    done = subprocess.run(
        [sys.executable, "hatch_build.py"], cwd=tmp_path, env=where, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"built {LIBRARY.relative_to(ROOT)}\n"
    assert NativeDecoder(tmp_path / LIBRARY.relative_to(ROOT)).version == native_decoder().version
    for extra, reason in (({"CC": "/nowhere/cc"}, "/nowhere/cc"), ({"AIOFEED_TURBO": "0"}, "AIOFEED_TURBO=0")):
        done = subprocess.run(
            [sys.executable, "hatch_build.py"],
            cwd=tmp_path,
            env={**where, **extra},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert reason in done.stderr
        assert not (tmp_path / LIBRARY.relative_to(ROOT)).exists()
