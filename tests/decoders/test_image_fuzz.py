"""Damaged images by the thousand: each is decoded exactly as Pillow decodes it, or is an error with its name.

``python -m tests.decoders.test_image_fuzz COUNT SEED`` runs it alone; ``... COUNT SEED NUMBER`` one input of that run.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import random
import re
import struct
import subprocess
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, UnidentifiedImageError, features
from PIL.JpegImagePlugin import JpegImageFile

from aiofeed import DecodeError, DecodeImage
from aiofeed.core.types import BatchPlan
from aiofeed.decoders.native_jpeg import native_decoder
from aiofeed.decoders.pillow import FORMATS
from aiofeed.decoders.simplejpeg import jpeg_decoder
from aiofeed.engine.fetch.source import SourceFetcher
from aiofeed.runtime.time_limits import JobControl, StopFlag
from tests.support.paths import ROOT

resource: Any = pytest.importorskip("resource", reason="needs POSIX: a look at peak memory")

# `make test-long` sets this.
EXAMPLES = int(os.environ.get("AIOFEED_EXAMPLES", "1000"))
SIZE = (9, 7)
MAX_PIXELS = 1_000_000
INPUT_LIMIT_S = 60.0
"""For one input, on a machine that is busy with other things: the slowest takes some 0.1 s."""
MEMORY_LIMIT = 400 << 20
"""What the process may grow by: some pictures of MAX_PIXELS, and the 64 MiB of text that Pillow allows a PNG."""

Totals = dict[str, Counter[str]]


# --- sound files


def picture(mode: str, width: int = 61, height: int = 45) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    planes = np.stack([x * 4, y * 5, (x * 3 + y * 7) % 256, 255 - x * 2], axis=-1)
    image = Image.fromarray((planes + np.random.default_rng(0).integers(0, 16, planes.shape)).clip(0, 255).astype("u1"))
    if mode == "P":
        return image.convert("RGB").quantize(32)
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype("u2") * 257)
    return image.convert("RGB").convert(mode) if mode == "CMYK" else image.convert(mode)


def corpus() -> list[tuple[str, bytes]]:
    """Sound files of the formats that are opened by default, with each one's format; several variants of each."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "a maker of cameras"
    exif[0x9286] = "a comment " * 9
    frames: dict[str, Any] = {"save_all": True, "append_images": [picture("RGB", 61, 45).rotate(a) for a in (90, 180)]}
    variants: list[tuple[str, str, dict[str, Any]]] = [
        *[("JPEG", mode, {"quality": 85}) for mode in ("RGB", "L", "CMYK")],
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "RGB", {"exif": exif, "icc_profile": bytes(range(256)), "comment": b"a comment"}),
        ("JPEG", "RGB", {"xmp": b'<x tiff:Orientation="8"/>', "subsampling": 2, "restart_marker_rows": 1}),
        ("MPO", "RGB", frames),
        *[("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")],
        ("PNG", "P", {"transparency": bytes(range(32)), "bits": 8}),
        ("PNG", "RGB", {"exif": exif, "icc_profile": bytes(range(256)), "dpi": (72, 72)}),
        ("PNG", "RGBA", {**frames, "default_image": True}),
        *[("WEBP", "RGB", options) for options in ({}, {"lossless": True}, {"exif": exif}, frames)],
        ("WEBP", "RGBA", {"lossless": True}),
        *[("GIF", mode, {}) for mode in ("L", "P")],
        ("GIF", "RGB", {**frames, "comment": b"a comment", "disposal": 2}),
        *[("TIFF", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F")],
        ("TIFF", "RGB", {"exif": exif, "tiffinfo": {278: 7}, "description": "described"}),
        ("TIFF", "RGB", {"big_tiff": True}),
        ("TIFF", "RGB", frames),
        *[("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")],
        *[("PPM", mode, {}) for mode in ("1", "L", "RGB", "I;16")],
    ]
    if features.check("libtiff"):
        compressions = ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "lzma", "zstd")
        variants += [("TIFF", "RGB", {"compression": compression}) for compression in compressions]
        variants.append(("TIFF", "1", {"compression": "group4"}))
    if features.check("jpg_2000"):
        variants += [("JPEG2000", mode, {"num_resolutions": 3}) for mode in ("L", "RGB", "RGBA")]
    if features.check("avif"):
        variants += [("AVIF", "RGB", {"speed": 10, "exif": exif}), ("AVIF", "RGB", {**frames, "speed": 10})]
    found = []
    for kind, mode, options in variants:
        if kind == "WEBP" and not features.check("webp"):
            continue
        file = io.BytesIO()
        if "append_images" in options:  # Pillow leaves notes on them
            options = {**options, "append_images": [frame.copy() for frame in options["append_images"]]}
        picture(mode).save(file, kind, **options)
        found.append((kind, file.getvalue()))
    floats = np.linspace(0, 1, 61 * 45, dtype="<f4").tobytes()
    found += [
        ("PNG", text_png()),
        ("PNG", interlaced_png()),
        ("TIFF", tiled_tiff()),
        ("PPM", b"P3 4 2 255\n" + b" ".join(b"%d" % (n * 9) for n in range(24))),
        ("PPM", b"P1\n# a comment\n4 2\n0 1 0 1 1 1 0 0\n"),
        ("PPM", b"Pf\n61 45\n-1.0\n" + floats),
        ("PPM", b"P2\n4 2\n15\n0 1 2 3 4 5 6 15"),
    ]
    return found


def chunk(name: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + name + payload + struct.pack(">I", zlib.crc32(name + payload))


def text_png() -> bytes:
    file = io.BytesIO()
    picture("RGB").save(file, "PNG")
    plain = file.getvalue()
    texts = [
        chunk(b"tEXt", b"Author\0somebody"),
        chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n 8\n" + b"4d4d002a00000008" * 2)),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + b'<x tiff:Orientation="3"/>'),
        chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3)),
    ]
    return plain[:33] + b"".join(texts) + plain[33:]


def interlaced_png() -> bytes:
    """Adam7, 5 x 4 grey: seven passes, written by hand since Pillow does not."""
    grey = np.arange(20, dtype="u1").reshape(4, 5) * 12
    rows = b""
    for y, x, dy, dx in (
        (0, 0, 8, 8),
        (0, 4, 8, 8),
        (4, 0, 8, 4),
        (0, 2, 4, 4),
        (2, 0, 4, 2),
        (0, 1, 2, 2),
        (1, 0, 2, 1),
    ):
        part = grey[y::dy, x::dx]
        rows += b"".join(b"\0" + row.tobytes() for row in part if row.size)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 4, 8, 0, 0, 0, 1))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiled_tiff() -> bytes:
    """32 x 16 grey in two tiles, not compressed."""
    tags = [(256, 32), (257, 16), (258, 8), (259, 1), (262, 1), (277, 1), (322, 16), (323, 16)]
    pixels = 8 + 2 + 12 * 10 + 4 + 16
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    entries += struct.pack("<HHII", 324, 4, 2, pixels - 16) + struct.pack("<HHII", 325, 4, 2, pixels - 8)
    arrays = struct.pack("<IIII", pixels, pixels + 256, 256, 256)
    return b"II*\0" + struct.pack("<IH", 8, 10) + entries + bytes(4) + arrays + bytes(range(256)) * 2


# --- damage

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 15, 16, 255, 256, 32767, 32768, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


def pieces(data: bytes) -> list[bytes]:
    """The file in the parts of its format: PNG and RIFF chunks, JPEG segments; else a few equal parts."""
    parts, at = [], 0
    if data.startswith(b"\x89PNG"):
        parts, at = [data[:8]], 8
        while at + 12 <= len(data):
            end = at + 12 + int.from_bytes(data[at : at + 4], "big")
            parts.append(data[at:end])
            at = end
    elif data[:4] == b"RIFF":
        parts, at = [data[:12]], 12
        while at + 8 <= len(data):
            size = int.from_bytes(data[at + 4 : at + 8], "little")
            parts.append(data[at : at + 8 + size + size % 2])
            at += 8 + size + size % 2
    elif data[:2] == b"\xff\xd8":
        parts, at = [data[:2]], 2
        while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] not in (b"\xda", b"\xd9"):
            end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            parts.append(data[at:end])
            at = end
    else:
        step = max(len(data) // 8, 1)
        return [data[n : n + step] for n in range(0, len(data), step)]
    return [*parts, data[at:]]


def mended(data: bytes) -> bytes:
    """A PNG with right check sums, a RIFF with the right length: damage that gets past the first look."""
    if data.startswith(b"\x89PNG"):
        parts = pieces(data)
        return b"".join(
            part[:-4] + struct.pack(">I", zlib.crc32(part[4:-4])) if n and len(part) >= 12 else part
            for n, part in enumerate(parts)
        )
    if data[:4] == b"RIFF":
        return data[:4] + struct.pack("<I", max(len(data) - 8, 0)) + data[8:]
    return data


def flip_bits(data: bytes, other: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    reach = len(out) if rng.random() < 0.6 else min(len(out), 200)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        out[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return bytes(out)


def set_bytes(data: bytes, other: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 5))):
        out[rng.randrange(len(out))] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))
    return bytes(out)


def set_number(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """A field of the header becomes a number that programs trip over."""
    width, order = rng.choice((1, 2, 2, 4, 4, 4, 8)), rng.choice(("little", "big"))
    at = rng.randrange(min(len(data), 300))
    number = (rng.choice(NUMBERS) + rng.choice((0, 0, -1, 1))) % (1 << 8 * width)
    return data[:at] + number.to_bytes(width, order) + data[at + width :]


def truncate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def insert(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.choice((rng.randbytes(rng.randrange(1, 40)), bytes(rng.randrange(1, 40)))) + data[at:]


def delete(data: bytes, other: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 40) :]


def duplicate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    end = min(start + rng.randrange(1, 400), len(data))
    return data[:end] + data[start:end] * rng.choice((1, 1, 3)) + data[end:]


def splice(data: bytes, other: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


def shuffle_pieces(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Parts of the format doubled, dropped, moved, or taken from another file."""
    parts, foreign = pieces(data), pieces(other)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(parts))
        what = rng.randrange(4)
        if what == 0:
            parts.insert(at, rng.choice(parts))
        elif what == 1 and len(parts) > 1:
            del parts[at]
        elif what == 2:
            parts.insert(at, parts.pop(rng.randrange(len(parts))))
        else:
            parts.insert(at, rng.choice(foreign))
    return b"".join(parts)


DAMAGE: tuple[Callable[[bytes, bytes, random.Random], bytes], ...] = (
    flip_bits, flip_bits, set_bytes, set_number, set_number, truncate,
    insert, delete, duplicate, splice, shuffle_pieces,
)  # fmt: skip


def damaged(files: list[tuple[str, bytes]], seed: int, number: int) -> tuple[str, bytes]:
    """Input ``number`` of the run ``seed``, and the format that it was; the same on every machine with this corpus."""
    rng = random.Random(seed * 1_000_003 + number)
    kind, data = files[number % len(files)]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3)) if number % 97 else 0):
        related = [data for name, data in files if name == kind]
        _, other = rng.choice(files)
        if rng.random() < 0.7:
            other = rng.choice(related)
        data = rng.choice(DAMAGE)(data, other, rng) or b"\0"
    return kind, mended(data) if rng.random() < 0.5 else data


# --- what may come of it


class OneImage:
    """A source of one sample, and a place for what it becomes."""

    data = b""

    def __len__(self) -> int:
        return 1

    def key(self, index: int) -> str:
        return "the damaged image"

    async def read(self, index: int) -> bytes:
        return self.data


class Sink:
    def __init__(self) -> None:
        self.samples: list[Any] = []

    def put(self, position: int, sample: Any) -> None:
        self.samples.append(sample)


def through_fetcher(decoder: DecodeImage, data: bytes) -> np.ndarray[Any, Any] | DecodeError:
    """What ``SourceFetcher`` makes of it: a picture, or an error by name. Anything else is raised here."""
    fetcher = SourceFetcher(OneImage(), decoder, in_place=False)
    plan, sink = BatchPlan(0, [0], [0], 1), Sink()
    outcome = fetcher.decode(plan, 0, [data], sink, JobControl(StopFlag()))  # type: ignore[arg-type]
    if outcome.errors:
        [(_, error)] = outcome.errors
        if not isinstance(error, DecodeError) or "the damaged image" not in str(error) or not str(error.__cause__):
            raise AssertionError(f"an error without a name: {error!r}") from error
        # What else the plugins raise is told by an error of ours, and their warnings are none.
        if not isinstance(error.__cause__, (OSError, ValueError)) or "Warning" in str(error):
            raise AssertionError(f"an error of a kind that is not ours: {error!r}") from error
        return error
    [sample] = sink.samples
    found: np.ndarray[Any, Any] = sample.permute(1, 2, 0).numpy()
    return found


def reference(data: bytes) -> tuple[str, np.ndarray[Any, Any]]:
    """Plain Pillow, one function after the other; and the mode that it found."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])
        except UnidentifiedImageError:
            # Pillow gives up on a JPEG whose index of further pictures is broken; the first one is sound, and is all
            # that counts here.
            if not data.startswith(b"\xff\xd8\xff"):
                raise
            image = JpegImageFile(io.BytesIO(data))
        image.load()
        mode = image.mode
        try:
            upright = ImageOps.exif_transpose(image)
        except Exception:  # its parser of EXIF, or its writer, which has yet to take the turn out of the tags
            upright = turned_by_tag(image)
        if mode.startswith("I;16"):
            upright = Image.fromarray((np.asarray(upright) >> 8).astype("u1"))
        if upright.mode == "La":
            upright = upright.convert("LA")
        small = upright.convert("RGB").resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)
    return mode, np.asarray(small)


def turned_by_tag(image: Image.Image) -> Image.Image:
    """The turn alone; as it is stored where there is no reading what the turn is."""
    turns = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
    try:
        turn = dict(enumerate(turns, 2)).get(image.getexif().get(0x0112))
    except Exception:
        turn = None
    return image if turn is None else image.transpose(Image.Transpose[turn])


def check(data: bytes) -> bool:
    """Whether it was decoded; ``AssertionError`` for anything but Pillow's picture or a named error."""
    found = by_all_backends(data, SIZE, scaled=False)
    exact = "pillow" if jpeg_decoder() is None else "turbo"
    cropped = by_all_backends(data, 5, crop="random", flip=True, backend=exact)
    if native_decoder() is not None and data.startswith(b"\xff\xd8"):
        check_native(data)
    if not data.startswith(b"\xff\xd8"):  # at a smaller scale a JPEG's damage may come to light elsewhere
        assert isinstance(found, DecodeError) == isinstance(cropped, DecodeError), "decoded or not, as the crop says"
    if isinstance(found, DecodeError):
        return False
    mode, expected = reference(data)
    if mode not in ("I", "F"):  # these have a rule of their own, see `to_rgb`
        assert np.array_equal(found, expected), f"not the picture that Pillow gives, from mode {mode}"
    return True


def by_all_backends(data: bytes, size: Any, **options: Any) -> np.ndarray[Any, Any] | DecodeError:
    """What comes of it, which is the same by Pillow alone and by whatever is installed for JPEGs: pixels or words."""
    found = through_fetcher(DecodeImage(size, max_pixels=MAX_PIXELS, **options), data)
    if data.startswith(b"\xff\xd8"):
        plain = through_fetcher(DecodeImage(size, max_pixels=MAX_PIXELS, **{**options, "backend": "pillow"}), data)
        if isinstance(found, DecodeError) or isinstance(plain, DecodeError):
            assert str(found) == str(plain), f"{found} is not what Pillow makes of it: {plain}"
        else:
            assert np.array_equal(found, plain), "not the picture that Pillow gives of this JPEG"
    return found


def check_native(data: bytes) -> None:
    """A whole JPEG is a picture where Pillow has one, else Pillow's error; of a part, either will do."""
    options: dict[str, Any] = {"max_pixels": MAX_PIXELS}
    found, plain = (through_fetcher(DecodeImage(SIZE, backend=by, **options), data) for by in ("native", "pillow"))
    if isinstance(found, DecodeError) or isinstance(plain, DecodeError):
        assert str(found) == str(plain), f"{found} is not what Pillow makes of it: {plain}"
    through_fetcher(DecodeImage(5, crop="random", flip=True, backend="native", **options), data)


def peak_bytes() -> int:
    """The most memory that the process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_fuzz(count: int, seed: int, first: int = 0, note: int = 2) -> Totals:
    """Check ``count`` damaged images, from number ``first`` on; totals by format: decoded, refused.

    An ``AssertionError`` names seed and number. An input that takes too long ends the process, by a thread of C's own
    that needs no GIL; an input that crashes it does so anyway: both are named in the file of descriptor ``note``.

    Args:
        note: where the number of each input is written before it is tried; 2, standard error, is told of the last only.
    """
    Image.init()
    files = corpus()
    for _, data in files:  # what is loaded once for all is no growth
        through_fetcher(DecodeImage(SIZE), data)
    totals: Totals = {kind: Counter() for kind, _ in files}
    before = peak_bytes()
    try:
        for number in range(first, first + count):
            if note != 2:
                os.pwrite(note, b"seed %d, input %d\n" % (seed, number), 0)
            faulthandler.dump_traceback_later(INPUT_LIMIT_S, exit=True, file=note)
            kind, data = damaged(files, seed, number)
            try:
                decoded = check(data)
            except Exception as error:
                raise AssertionError(f"seed {seed}, input {number} ({kind}): {error}") from error
            totals[kind]["decoded" if decoded else "refused"] += 1
            if peak_bytes() - before > MEMORY_LIMIT:
                raise AssertionError(f"seed {seed}, input {number} ({kind}): the process grew beyond {MEMORY_LIMIT}")
    finally:
        faulthandler.cancel_dump_traceback_later()
    return totals


# --- the tests


def fuzz_apart(count: int, seed: int, folder: Path) -> dict[str, dict[str, int]]:
    """``run_fuzz`` in a process of its own: it may crash or be ended. Warnings are errors, and all of Pillow logs."""
    note = folder / "note"
    note.touch()
    code = (
        "import json, logging, os, sys\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.decoders.test_image_fuzz import run_fuzz\n"
        f"totals = run_fuzz({count}, {seed}, note=os.open({str(note)!r}, os.O_RDWR))\n"
        "print(json.dumps(totals))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: ended by {done.returncode}\n{note.read_text()}\n{done.stderr}"
    # dav1d, below AVIF, writes lines of its own ("Unknown OBU type"), which nobody can stop; Python is to write none.
    assert not re.search("warning|PIL|Traceback", done.stderr, re.IGNORECASE), done.stderr
    totals: dict[str, dict[str, int]] = json.loads(done.stdout)
    return totals


@pytest.mark.timeout(3600)
def test_damaged_images_are_pillows_pictures_or_named_errors(tmp_path: Path) -> None:
    """No crash, no hang, no wrong picture, no error without its key, no line on standard error, no memory gone."""
    seed = 1 if os.environ.get("CI") else random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}")  # shown where the test fails
    totals = fuzz_apart(2 * EXAMPLES, seed, tmp_path)
    assert sum(sum(each.values()) for each in totals.values()) == 2 * EXAMPLES
    # Neither is the damage without effect, nor is it beyond all decoding.
    assert sum(each.get("decoded", 0) for each in totals.values()) > EXAMPLES // 5
    assert sum(each.get("refused", 0) for each in totals.values()) > EXAMPLES // 5


def test_sound_files_are_all_decoded() -> None:
    """What the damage begins with is decoded, each as Pillow has it: the fuzz does not pass by refusing everything."""
    for kind, data in corpus():
        assert check(data), kind


def test_the_fuzz_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong picture and an error of another kind are found, with seed and number."""
    from aiofeed.decoders import pillow

    monkeypatch.setattr(pillow, "orientation_of", lambda _: 3)
    with pytest.raises(AssertionError, match=r"seed 5, input \d+ .*not the picture"):
        run_fuzz(200, 5)
    monkeypatch.setattr(pillow, "orientation_of", lambda _: 1)
    monkeypatch.setattr(pillow, "to_rgb", lambda _: 1 / 0)
    monkeypatch.setattr(pillow, "OSError", KeyError, raising=False)
    with pytest.raises(AssertionError, match="of a kind that is not ours"):
        run_fuzz(200, 5)


if __name__ == "__main__":
    only = int(sys.argv[3]) if len(sys.argv) > 3 else None
    found = run_fuzz(int(sys.argv[1]) if only is None else 1, int(sys.argv[2]), only or 0)
    for name, counts in sorted(found.items()):
        print(f"{name:9} {counts['decoded']:7} decoded {counts['refused']:7} refused")
    decoded, refused = (sum(counts[what] for counts in found.values()) for what in ("decoded", "refused"))
    print(f"{'all':9} {decoded:7} decoded {refused:7} refused")
