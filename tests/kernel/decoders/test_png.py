"""Plain PNGs by imagecodecs: Pillow's pixels, and Pillow for every other file."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from aiofeed import DecodeImage, Feeder, Files
from aiofeed.media.pictures import plain

pytest.importorskip("imagecodecs")

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)).resize((60, 45))
SIZE = (16, 20)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that imagecodecs is asked to decode."""
    files: list[bytes] = []
    decoder = plain.png_decoder()
    assert decoder is not None

    def counted(data: bytes) -> Any:
        files.append(data)
        return decoder(data)

    monkeypatch.setattr(plain, "png_decoder", lambda: counted)
    return files


def saved(mode: str = "RGB", **options: Any) -> bytes:
    file = BytesIO()
    PICTURE.convert(mode).save(file, "PNG", **options)
    return file.getvalue()


def text(name: str) -> PngInfo:
    info = PngInfo()
    info.add_text(name, "value")
    return info


def chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        yield data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        at += 12 + length


def joined(parts: Any) -> bytes:
    """A PNG of chunks, with their checksums."""
    return plain.PNG_SIGNATURE + b"".join(
        len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big") for name, data in parts
    )


def changed(data: bytes, name: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The PNG with the data of one kind of chunk changed."""
    return joined((each, change(old) if each == name else old) for each, old in chunks(data))


def outcome(data: bytes, **options: Any) -> Any:
    """The pixels, or the type of the error; the row must not change if decoding fails."""
    out = np.full((*SIZE, 3), 7, np.uint8)
    try:
        DecodeImage(SIZE, **options).decode_into(data, out)
    except (OSError, ValueError) as error:
        assert (out == 7).all()
        return type(error), str(error)
    return out.tolist()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA"])
@pytest.mark.parametrize("options", [{}, {"scaled": False}, {"crop": "random", "flip": True}])
def test_pixels_are_those_of_pillow(mode: str, options: dict[str, Any], decoded: list[bytes]) -> None:
    """Grey and RGB, with and without alpha, resized, cropped and mirrored, give Pillow's pixels bit for bit."""
    data = saved(mode)
    for seed in range(4):
        ours, theirs = np.empty((2, *SIZE, 3), np.uint8)
        DecodeImage(SIZE, **options).decode_into(data, ours, seed)
        DecodeImage(SIZE, backend="pillow", **options).decode_into(data, theirs, seed)
        assert np.array_equal(ours, theirs)
    assert decoded == [data] * 4


@pytest.mark.parametrize(
    "options",
    [{"dpi": (72, 72)}, {"pnginfo": text("Software")}, {"optimize": True}, {"compress_level": 0}, {"gamma": 0.45}],
)
def test_usual_chunks(options: dict[str, Any], decoded: list[bytes]) -> None:
    """Chunks that change no pixel are allowed."""
    data = saved(**options)
    assert outcome(data) == outcome(data, backend="pillow")
    assert decoded == [data]


def oriented() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize(
    "data",
    [
        saved("P"),
        saved("1"),
        saved("L", transparency=3),
        saved(exif=oriented()),
        saved(icc_profile=b"profile"),
        saved(pnginfo=text("Raw profile type exif")),
        changed(saved(), b"IHDR", lambda header: header[:12] + b"\1"),
        saved()[:-12],
        saved()[:-1] + b"x",
        saved()[:30],
        b"",
    ],
)
def test_other_files_are_decoded_by_pillow(data: bytes, decoded: list[bytes]) -> None:
    """Palettes, bilevel pictures, transparent colours, orientations, profiles and damaged headers are for Pillow."""
    assert outcome(data) == outcome(data, backend="pillow")
    assert decoded == []


@pytest.mark.parametrize("mode", ["RGB", "LA"])
def test_damaged_files(mode: str) -> None:
    """Cut files, changed bytes, and pixel data that are too short, too long or invalid have Pillow's outcome."""
    data, numbers = saved(mode), random.Random(0)

    def garbled(old: bytes) -> bytes:
        at = numbers.randrange(len(old))
        return old[:at] + bytes([numbers.randrange(256)]) + old[at + 1 :]

    def recompressed(change: Callable[[bytes], bytes]) -> bytes:
        return changed(data, b"IDAT", lambda old: zlib.compress(change(zlib.decompress(old))))

    files = [data[: numbers.randrange(len(data))] for _ in range(20)]
    files += [garbled(data) for _ in range(40)]
    for _ in range(20):
        files.append(recompressed(garbled))
        files.append(recompressed(lambda old: old[: numbers.randrange(len(old))]))
        files.append(changed(data, b"IDAT", garbled))
        files.append(changed(data, b"IDAT", lambda old: old[: numbers.randrange(len(old))]))
        files.append(changed(data, b"IHDR", garbled))
    files.append(recompressed(lambda old: old + bytes(99)))
    files.append(changed(data, b"IHDR", lambda header: bytes(4) + header[4:]))
    for file in files:
        assert outcome(file, max_pixels=10_000) == outcome(file, max_pixels=10_000, backend="pillow")


def test_max_pixels(decoded: list[bytes]) -> None:
    """The limit is checked in the header, before libpng sees the file."""
    huge = changed(saved(), b"IHDR", lambda header: (1 << 30).to_bytes(4, "big") * 2 + header[8:])
    assert "more than max_pixels" in outcome(huge)[1]
    assert "60 x 45 = 2700 pixels" in outcome(saved(), max_pixels=2699)[1]
    assert decoded == []


@pytest.mark.parametrize("options", [{"backend": "pillow"}, {"formats": ("JPEG",)}])
def test_settings_that_rule_it_out(options: dict[str, Any], decoded: list[bytes]) -> None:
    """``backend="pillow"`` means Pillow, and a format that is left out is not opened."""
    outcome(saved(), **options)
    assert decoded == []


def test_feeder(tmp_path: Path, decoded: list[bytes]) -> None:
    """Batches of a feeder equal those of Pillow."""
    paths = [tmp_path / f"{mode}.png" for mode in ("RGB", "RGBA", "L", "LA", "P")]
    for path in paths:
        path.write_bytes(saved(path.stem))
    [ours] = Feeder(Files(paths), decode=DecodeImage(SIZE), batch_size=5)
    [theirs] = Feeder(Files(paths), decode=DecodeImage(SIZE, backend="pillow"), batch_size=5)
    assert torch.equal(ours, theirs)
    assert len(decoded) == 4


@pytest.mark.parametrize("installed", [False, True])
def test_without_imagecodecs(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without imagecodecs Pillow decodes; a package that cannot be imported is logged."""
    expected = outcome(saved())
    for name in [name for name in sys.modules if name.partition(".")[0] == "imagecodecs"]:
        monkeypatch.delitem(sys.modules, name)
    if installed:
        (tmp_path / "imagecodecs.py").write_text("raise ImportError('another numpy')")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "imagecodecs", None)
    plain.png_decoder.cache_clear()
    try:
        assert plain.png_decoder() is None
        assert outcome(saved()) == expected
    finally:
        plain.png_decoder.cache_clear()
    assert ("another numpy" in caplog.text) == installed
