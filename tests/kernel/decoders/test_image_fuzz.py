"""Fuzz test: thousands of damaged images, each decoded exactly as by Pillow, or refused with an error that names it.

``python -m tests.kernel.decoders.test_image_fuzz COUNT SEED`` runs it alone, with ``NUMBER`` behind it one input.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import random
import re
import struct
import sys
import threading
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

from aiofeed import DecodeImage
from aiofeed.errors import DecodeError
from aiofeed.kernel.core.faces import AdaptedSource
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.decoders.geometry import FORMATS
from aiofeed.kernel.decoders.native_jpeg import native_decoder
from aiofeed.kernel.engine.fetch.source import SourceFetcher
from aiofeed.kernel.runtime.time_limits import JobControl
from aiofeed.media.pictures.plain import simplejpeg_decoder
from tests.support.examples import examples
from tests.support.fork_server import ForkServer
from tests.support.paths import ROOT

resource: Any = pytest.importorskip("resource", reason="needs POSIX, to measure peak memory")

# `make test-long` sets this.
EXAMPLES = examples(250)
SIZE = (9, 7)
MAX_PIXELS = 1_000_000
INPUT_LIMIT_S = 60.0
"""Time limit of one input on a busy machine; the slowest takes some 0.1 s."""
MEMORY_LIMIT = 400 << 20
"""Limit on the process's growth: some pictures of MAX_PIXELS, and the 64 MiB of text that Pillow allows a PNG."""

Totals = dict[str, Counter[str]]


# --- valid files


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
    """(format, file) of valid files: several variants of each format that is opened by default."""
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
        if "append_images" in options:  # Pillow modifies them
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
    """Adam7, 5 x 4 grey: seven passes, built by hand since Pillow cannot write it."""
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
    """32 x 16 grey in two uncompressed tiles."""
    tags = [(256, 32), (257, 16), (258, 8), (259, 1), (262, 1), (277, 1), (322, 16), (323, 16)]
    pixels = 8 + 2 + 12 * 10 + 4 + 16
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    entries += struct.pack("<HHII", 324, 4, 2, pixels - 16) + struct.pack("<HHII", 325, 4, 2, pixels - 8)
    arrays = struct.pack("<IIII", pixels, pixels + 256, 256, 256)
    return b"II*\0" + struct.pack("<IH", 8, 10) + entries + bytes(4) + arrays + bytes(range(256)) * 2


# --- damage

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 15, 16, 255, 256, 32767, 32768, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


def split_parts(data: bytes) -> list[bytes]:
    """Split a file into PNG chunks, RIFF chunks or JPEG segments; other formats into equal parts."""
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


def repair_checksums(data: bytes) -> bytes:
    """Correct a PNG's checksums or a RIFF's length, so that other damage is not refused early."""
    if data.startswith(b"\x89PNG"):
        parts = split_parts(data)
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
    """Overwrite a field of the header with a number at a limit."""
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


def shuffle_parts(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Duplicate, drop or move parts of the format, or insert parts of another file."""
    parts, foreign = split_parts(data), split_parts(other)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(parts))
        action = rng.randrange(4)
        if action == 0:
            parts.insert(at, rng.choice(parts))
        elif action == 1 and len(parts) > 1:
            del parts[at]
        elif action == 2:
            parts.insert(at, parts.pop(rng.randrange(len(parts))))
        else:
            parts.insert(at, rng.choice(foreign))
    return b"".join(parts)


DAMAGE: tuple[Callable[[bytes, bytes, random.Random], bytes], ...] = (
    flip_bits, flip_bits, set_bytes, set_number, set_number, truncate,
    insert, delete, duplicate, splice, shuffle_parts,
)  # fmt: skip


def damaged(files: list[tuple[str, bytes]], seed: int, number: int) -> tuple[str, bytes]:
    """Original format and contents of input ``number`` of the run ``seed``; reproducible for the same corpus."""
    rng = random.Random(seed * 1_000_003 + number)
    kind, data = files[number % len(files)]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3)) if number % 97 else 0):
        related = [data for name, data in files if name == kind]
        _, other = rng.choice(files)
        if rng.random() < 0.7:
            other = rng.choice(related)
        data = rng.choice(DAMAGE)(data, other, rng) or b"\0"
    return kind, repair_checksums(data) if rng.random() < 0.5 else data


# --- the check of one input


class OneImage:
    """A source of one sample."""

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


def fetch(decoder: DecodeImage, data: bytes) -> np.ndarray[Any, Any] | DecodeError:
    """The picture or ``DecodeError`` that ``SourceFetcher`` returns; raises ``AssertionError`` for other errors."""
    fetcher = SourceFetcher(AdaptedSource(OneImage()), decoder, in_place=False)
    plan, sink = BatchPlan(0, [0], [0], 1), Sink()
    outcome = fetcher.decode(plan, 0, [data], sink, JobControl(threading.Event()))  # type: ignore[arg-type]
    if outcome.errors:
        [(_, error)] = outcome.errors
        if not isinstance(error, DecodeError) or "the damaged image" not in str(error) or not str(error.__cause__):
            raise AssertionError(f"the error does not name the sample: {error!r}") from error
        # load_picture converts other errors of Pillow's plugins, and drops their warnings.
        if not isinstance(error.__cause__, (OSError, ValueError)) or "Warning" in str(error):
            raise AssertionError(f"the cause is neither OSError nor ValueError: {error!r}") from error
        return error
    [sample] = sink.samples
    pixels: np.ndarray[Any, Any] = sample.permute(1, 2, 0).numpy()
    return pixels


def reference(data: bytes) -> tuple[str, np.ndarray[Any, Any]]:
    """The mode and pixels that Pillow's own functions give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])
        except UnidentifiedImageError:
            # Pillow refuses a JPEG whose index of further pictures is broken. Its first picture is valid.
            if not data.startswith(b"\xff\xd8\xff"):
                raise
            image = JpegImageFile(io.BytesIO(data))
        image.load()
        mode = image.mode
        try:
            upright = ImageOps.exif_transpose(image)
        except Exception:  # from Pillow's EXIF parser, or its EXIF writer, which removes the orientation tag
            upright = turn_by_tag(image)
        if mode.startswith("I;16"):
            upright = Image.fromarray((np.asarray(upright) >> 8).astype("u1"))
        if upright.mode == "La":
            upright = upright.convert("LA")
        small = upright.convert("RGB").resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)
    return mode, np.asarray(small)


def turn_by_tag(image: Image.Image) -> Image.Image:
    """Apply only the orientation tag; the stored image if the tag cannot be read."""
    turns = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
    try:
        turn = dict(enumerate(turns, 2)).get(image.getexif().get(0x0112))
    except Exception:
        turn = None
    return image if turn is None else image.transpose(Image.Transpose[turn])


def check(data: bytes) -> bool:
    """Whether ``data`` is decoded; raises ``AssertionError`` for wrong pixels or an error that does not name it."""
    found = decode_with_all_backends(data, SIZE, scaled=False)
    exact = "pillow" if simplejpeg_decoder() is None else "turbo"
    cropped = decode_with_all_backends(data, 5, crop="random", flip=True, backend=exact)
    if native_decoder() is not None and data.startswith(b"\xff\xd8"):
        check_native(data)
    if not data.startswith(b"\xff\xd8"):  # at a smaller scale libjpeg may or may not notice the damage
        assert isinstance(found, DecodeError) == isinstance(cropped, DecodeError), "only one of both crops is decoded"
    if isinstance(found, DecodeError):
        return False
    mode, expected = reference(data)
    if mode not in ("I", "F"):  # `to_rgb` scales these by rules of its own
        assert np.array_equal(found, expected), f"not the picture that Pillow gives, from mode {mode}"
    return True


def decode_with_all_backends(data: bytes, size: Any, **options: Any) -> np.ndarray[Any, Any] | DecodeError:
    """The pixels or error of ``data``; checks that the backend "pillow" gives the same for a JPEG."""
    found = fetch(DecodeImage(size, max_pixels=MAX_PIXELS, **options), data)
    if data.startswith(b"\xff\xd8"):
        plain = fetch(DecodeImage(size, max_pixels=MAX_PIXELS, **{**options, "backend": "pillow"}), data)
        if isinstance(found, DecodeError) or isinstance(plain, DecodeError):
            assert str(found) == str(plain), f"{found} is not Pillow's result: {plain}"
        else:
            assert np.array_equal(found, plain), "not the picture that Pillow gives of this JPEG"
    return found


def check_native(data: bytes) -> None:
    """A whole JPEG decodes if Pillow decodes it, else has Pillow's error; a crop may decode or not."""
    options: dict[str, Any] = {"max_pixels": MAX_PIXELS}
    found, plain = (fetch(DecodeImage(SIZE, backend=by, **options), data) for by in ("native", "pillow"))
    if isinstance(found, DecodeError) or isinstance(plain, DecodeError):
        assert str(found) == str(plain), f"{found} is not Pillow's result: {plain}"
    fetch(DecodeImage(5, crop="random", flip=True, backend="native", **options), data)


def peak_bytes() -> int:
    """Peak resident memory of the process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_fuzz(count: int, seed: int, first: int = 0, progress_fd: int = 2) -> Totals:
    """Check ``count`` damaged images, from number ``first`` on; returns the number decoded and refused, by format.

    An ``AssertionError`` gives seed and number. For an input that takes too long, faulthandler's thread, which does not
    need the GIL, ends the process. That input, and one that crashes the process, is recorded in ``progress_fd``.

    Args:
        progress_fd: file descriptor to which the number of each input is written first; 2 (standard error): not
            written.
    """
    Image.init()
    files = corpus()
    for _, data in files:  # load everything that is loaded once, so that it does not count as growth
        fetch(DecodeImage(SIZE), data)
    totals: Totals = {kind: Counter() for kind, _ in files}
    before = peak_bytes()
    try:
        for number in range(first, first + count):
            if progress_fd != 2:
                os.pwrite(progress_fd, b"seed %d, input %d\n" % (seed, number), 0)
            faulthandler.dump_traceback_later(INPUT_LIMIT_S, exit=True, file=progress_fd)
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


def fuzz_in_subprocess(fork_server: ForkServer, count: int, seed: int, folder: Path) -> dict[str, dict[str, int]]:
    """``run_fuzz`` in a separate process, which may crash; with warnings as errors, and Pillow's logging enabled."""
    progress = folder / "progress"
    progress.touch()
    code = (
        "import json, logging, os, warnings\n"
        "warnings.simplefilter('error')\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "from tests.kernel.decoders.test_image_fuzz import run_fuzz\n"
        f"totals = run_fuzz({count}, {seed}, progress_fd=os.open({str(progress)!r}, os.O_RDWR))\n"
        "print(json.dumps(totals))"
    )
    done = fork_server.run(code, cwd=ROOT, timeout=3600)
    assert done.returncode == 0, f"seed {seed}: exit status {done.returncode}\n{progress.read_text()}\n{done.stderr}"
    # dav1d, which decodes AVIF, prints lines itself ("Unknown OBU type"); Python must print none.
    assert not re.search("warning|PIL|Traceback", done.stderr, re.IGNORECASE), done.stderr
    totals: dict[str, dict[str, int]] = json.loads(done.stdout)
    return totals


@pytest.mark.timeout(3600)
def test_damaged_images_equal_pillows_or_raise_named_errors(fork_server: ForkServer, tmp_path: Path) -> None:
    """No crash, no hang, no wrong pixels, no error without the key, nothing on standard error, no memory growth."""
    seed = 1 if os.environ.get("CI") else random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it if the test fails
    totals = fuzz_in_subprocess(fork_server, EXAMPLES, seed, tmp_path)
    assert sum(sum(each.values()) for each in totals.values()) == EXAMPLES
    # The damage must neither be without effect nor make all files undecodable.
    assert sum(each.get("decoded", 0) for each in totals.values()) > EXAMPLES // 10
    assert sum(each.get("refused", 0) for each in totals.values()) > EXAMPLES // 10


def test_valid_files_are_all_decoded() -> None:
    """Every undamaged file decodes to Pillow's pixels, so the fuzz test cannot pass by refusing everything."""
    for kind, data in corpus():
        assert check(data), kind


def test_the_fuzz_test_finds_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong pixels and errors of an unexpected type are reported with seed and number."""
    from aiofeed.kernel.decoders import pillow

    monkeypatch.setattr(pillow, "orientation_of", lambda _: 3)
    with pytest.raises(AssertionError, match=r"seed 5, input \d+ .*not the picture"):
        run_fuzz(200, 5)
    monkeypatch.setattr(pillow, "orientation_of", lambda _: 1)
    monkeypatch.setattr(pillow, "to_rgb", lambda _: 1 / 0)
    monkeypatch.setattr(pillow, "OSError", KeyError, raising=False)
    with pytest.raises(AssertionError, match="neither OSError nor ValueError"):
        run_fuzz(200, 5)


if __name__ == "__main__":
    only = int(sys.argv[3]) if len(sys.argv) > 3 else None
    found = run_fuzz(int(sys.argv[1]) if only is None else 1, int(sys.argv[2]), only or 0)
    for name, counts in sorted(found.items()):
        print(f"{name:9} {counts['decoded']:7} decoded {counts['refused']:7} refused")
    decoded, refused = (sum(counts[what] for counts in found.values()) for what in ("decoded", "refused"))
    print(f"{'all':9} {decoded:7} decoded {refused:7} refused")
