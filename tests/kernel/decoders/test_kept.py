"""``DecodeImage(mode="keep")``: all channels of a file, in its dtype and with its values."""

from __future__ import annotations

import asyncio
import pickle
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aiofeed import DecodeImage, DiskCache, Feeder, Files
from aiofeed.errors import CollateError, DecodeError
from tests.support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.usefixtures("forked_workers")

KEEP = DecodeImage(None, mode="keep")
RANDOM = np.random.default_rng(0)
DEPTH = RANDOM.integers(0, 65_536, (24, 30)).astype(np.uint16)


def saved(pixels: Any, kind: str, **options: Any) -> bytes:
    """The bytes of an array or a picture, written by Pillow."""
    file = BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(file, kind, **options)
    return file.getvalue()


def tiff(pixels: Any, order: str = "<") -> bytes:
    """An uncompressed TIFF of an array, [H, W] or [H, W, C], of any dtype. Source: TIFF 6.0, section 2."""
    pixels = np.asarray(pixels)
    height, width, channels = (*pixels.shape, 1)[:3]
    size = pixels.dtype.itemsize
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    values: list[tuple[int, int, int, int]] = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, channels, 8 * size),
        (259, 3, 1, 1),
        (262, 3, 1, 2 if channels >= 3 else 1),
        (273, 4, 1, 8),
        (277, 3, 1, channels),
        (279, 4, 1, len(data)),
        (339, 3, channels, "uif".index(pixels.dtype.kind) + 1),
    ]
    end = 8 + len(data) + len(data) % 2
    extra = end + 2 + 12 * len(values) + 4
    directory, more = struct.pack(f"{order}H", len(values)), b""
    for tag, kind, count, value in values:
        directory += struct.pack(f"{order}HHL", tag, kind, count)
        if count > 2:
            directory += struct.pack(f"{order}L", extra + len(more))
            more += struct.pack(f"{order}{count}H", *[value] * count)
        elif kind == 3:
            directory += struct.pack(f"{order}HH", value, value if count == 2 else 0)
        else:
            directory += struct.pack(f"{order}L", value)
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(f"{order}L", end) + data + b"\0" * (len(data) % 2) + directory + bytes(4) + more


def png(depth: int, colour: int, rows: list[bytes], width: int) -> bytes:
    """A PNG of rows of packed samples. Source: PNG, third edition, section 11."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">L", len(data)) + name + data + struct.pack(">L", zlib.crc32(name + data))

    header = struct.pack(">LLBBBBB", width, len(rows), depth, colour, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32", "float32"])
def test_tiff(dtype: str, order: str) -> None:
    """A grey TIFF of every dtype and byte order gives its numbers, [1, H, W]."""
    if np.dtype(dtype).kind == "f":
        pixels = RANDOM.normal(0, 1000, (6, 7)).astype(dtype)
    else:
        pixels = RANDOM.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (6, 7), dtype, endpoint=True)
    found = KEEP(tiff(pixels, order))
    assert found.dtype == getattr(torch, dtype)
    assert found.is_contiguous()
    assert found.tolist() == [pixels.tolist()]


def test_uint32() -> None:
    """Numbers of 32 bits without a sign are read up to 2**31 - 1; larger ones are refused."""
    found = KEEP(tiff(np.array([[0, 2**31 - 1]], np.uint32)))
    assert found.dtype == torch.uint32
    assert found.tolist() == [[[0, 2**31 - 1]]]
    with pytest.raises(ValueError, match="numbers above 2147483647"):
        KEEP(tiff(np.array([[2**31]], np.uint32)))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_uint16(kind: str) -> None:
    """Grey of 16 bits is uint16 in every format that has it."""
    found = KEEP(saved(DEPTH, kind))
    assert found.dtype == torch.uint16
    assert found.tolist() == [DEPTH.tolist()]


def test_floats_with_nan() -> None:
    """Floats arrive bit for bit, infinity and NaN included."""
    pixels = np.array([[1e30, -1e-30, np.nan], [np.inf, -0.0, 0.1]], np.float32)
    assert KEEP(saved(pixels, "TIFF")).numpy().tobytes() == pixels.tobytes()


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "1"])
def test_modes_of_8_bits(mode: str) -> None:
    """All channels come, alpha too; a palette gives its indices, a bilevel picture 0 and 255."""
    picture = Image.fromarray((DEPTH >> 8).astype(np.uint8)).convert("L" if mode in ("L", "LA", "1") else "RGB")
    picture = picture.convert(mode)
    pixels = np.asarray(picture) * np.uint8(255 if mode == "1" else 1)
    found = KEEP(saved(picture, "PNG"))
    assert found.dtype == torch.uint8
    assert found.numpy().tolist() == (pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)).tolist()


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP"])
def test_formats_of_8_bits(kind: str) -> None:
    """Other formats give the pixels that Pillow reads, without a smaller scale."""
    picture = Image.fromarray((DEPTH >> 8).astype(np.uint8)).convert("RGB")
    data = saved(picture, kind)
    with Image.open(BytesIO(data)) as read:
        expected = np.asarray(read)
    assert np.array_equal(KEEP(data).numpy().squeeze(), expected if expected.ndim == 2 else expected.transpose(2, 0, 1))


def test_orientation() -> None:
    """The EXIF orientation is applied."""
    exif = Image.Exif()
    exif[0x0112] = 6
    assert KEEP(saved(DEPTH, "PNG", exif=exif)).tolist() == [np.rot90(DEPTH, -1).tolist()]


# --- size, crop and flip ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32", "float32"])
def test_resize_in_the_precision_of_the_file(dtype: str) -> None:
    """A resize has the filter of Pillow in 32-bit floats, rounded once."""
    pixels = (DEPTH.astype(np.int64) - (0 if dtype == "uint16" else 30_000)).clip(-32768, 65535)
    pixels = pixels.clip(-32768, 32767 if dtype == "int16" else 65535).astype(dtype)
    reference = Image.fromarray(pixels.astype(np.float32)).resize((11, 9), Image.Resampling.BILINEAR)
    found = DecodeImage((9, 11), mode="keep")(tiff(pixels)).numpy()[0]
    assert found.dtype == dtype
    assert np.abs(found.astype(np.float64) - np.asarray(reference)).max() <= (0.0 if dtype == "float32" else 1.0)


def test_center_crop() -> None:
    """An int as size crops the centre, as for RGB."""
    found = DecodeImage(24, mode="keep")(saved(DEPTH, "PNG"))
    assert found.tolist() == [DEPTH[:, 3:27].tolist()]


@pytest.mark.parametrize("mode", ["P", "1"])
def test_labels_are_not_blended(mode: str) -> None:
    """Palettes and bilevel TIFFs are resized to the nearest pixel."""
    picture = Image.fromarray((DEPTH >> 8).astype(np.uint8)).convert("RGB").convert(mode)
    found = DecodeImage((7, 50), mode="keep")(saved(picture, "PNG" if mode == "P" else "TIFF"))
    assert found.shape == (1, 7, 50)
    assert set(found.flatten().tolist()) <= set(np.asarray(picture).ravel().tolist())


def test_flip_and_random_crop() -> None:
    """The generator of the sample chooses flip and crop, as for RGB."""
    data = saved(DEPTH, "PNG")
    decode = DecodeImage(None, mode="keep", flip=True)
    found = {tuple(decode(data, rng=torch.Generator().manual_seed(at)).flatten().tolist()) for at in range(8)}
    assert found == {tuple(DEPTH.ravel().tolist()), tuple(DEPTH[:, ::-1].ravel().tolist())}
    decode = DecodeImage(8, mode="keep", crop="random")
    crops = [decode(data, rng=torch.Generator().manual_seed(at)) for at in (1, 1, 2)]
    assert torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2])
    assert crops[0].shape == (1, 8, 8)
    with pytest.raises(ValueError, match="needs rng"):
        decode(data)


# --- in a feeder ------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Files:
    """Twelve depth maps of one size, and a number for each."""
    for at in range(12):
        (tmp_path / f"{at:02}.png").write_bytes(saved(DEPTH + np.uint16(at), "PNG"))
    return Files(sorted(tmp_path.glob("*.png")), targets=list(range(12)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device": SimulatedDevice()},
        {"engine": "process:2"},
        {"in_order": "samples"},
        {"cache": "host"},
        {"cache": "device", "device": SimulatedDevice()},
        {"static_batches": True, "device": SimulatedDevice()},
    ],
)
def test_batches(options: dict[str, Any], source: Files) -> None:
    """A batch is one tensor of the dtype of the files, with every option."""
    with Feeder(source, decode=KEEP, batch_size=4, **options) as feeder:
        for _ in feeder.epochs(2):
            seen = []
            for maps, numbers in feeder:
                assert maps.dtype == torch.uint16
                assert maps.shape == (4, 1, 24, 30)
                for each, number in zip(maps.cpu().numpy(), numbers.tolist(), strict=True):
                    assert np.array_equal(each[0], DEPTH + np.uint16(number))
                    seen.append(number)
            assert sorted(seen) == list(range(12))


def test_random_samples_are_resumed(source: Files) -> None:
    """After a resume, crops and flips are those of an uninterrupted epoch; ``async for`` gives the same."""
    decode = DecodeImage(8, mode="keep", crop="random", flip=True)
    options: dict[str, Any] = {"decode": decode, "batch_size": 2, "shuffle": True}
    whole = [maps.tolist() for maps, _ in Feeder(source, **options)]
    for position in range(6):
        feeder: Feeder[Any] = Feeder(source, **options)
        batches = iter(feeder)
        for _ in range(position):
            next(batches)
        resumed: Feeder[Any] = Feeder(source, **options)
        resumed.load_state_dict(feeder.state_dict())
        assert [maps.tolist() for maps, _ in resumed] == whole[position:]

    async def collected() -> list[Any]:
        return [maps.tolist() async for maps, _ in Feeder(source, **options)]

    assert asyncio.run(collected()) == whole


def test_disk_cache(source: Files, tmp_path: Path) -> None:
    """A cache in a file keeps the dtype, and belongs to these settings."""
    for _ in range(2):
        with Feeder(source, decode=KEEP, batch_size=4, cache=DiskCache(tmp_path / "cache")) as feeder:
            assert [maps.dtype for maps, _ in feeder] == [torch.uint16] * 3
    assert feeder.statistics().bytes_read == 0
    assert KEEP.fingerprint() != DecodeImage((24, 30), mode="keep").fingerprint() != DecodeImage((24, 30)).fingerprint()


def test_a_random_decoder_is_not_cached(source: Files) -> None:
    """A cache would show the same crop in every epoch, so it is refused."""
    with pytest.raises(TypeError, match="the decoder is random"):
        Feeder(source, decode=DecodeImage(8, mode="keep", flip=True), batch_size=4, cache="host")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DEPTH[:, 1:], r"shapes \[1, 24, 30\] and \[1, 24, 29\]"),
        ((DEPTH >> 8).astype(np.uint8), "dtypes torch.uint16 and torch.uint8"),
    ],
)
def test_files_that_differ(other: Any, message: str, source: Files, tmp_path: Path) -> None:
    """Files of another size or dtype are an error that names two of them."""
    (tmp_path / "05.png").write_bytes(saved(other, "PNG"))
    with pytest.raises(CollateError, match=message) as caught:
        list(Feeder(source, decode=KEEP, batch_size=4))
    assert "04.png" in str(caught.value)
    assert "05.png" in str(caught.value)


def test_files_of_several_sizes_are_resized(source: Files, tmp_path: Path) -> None:
    """With a size, files may differ in size."""
    (tmp_path / "05.png").write_bytes(saved(DEPTH[:, 1:], "PNG"))
    shapes = {tuple(maps.shape) for maps, _ in Feeder(source, decode=DecodeImage(16, mode="keep"), batch_size=4)}
    assert shapes == {(4, 1, 16, 16)}


def test_a_damaged_file(source: Files, tmp_path: Path) -> None:
    """A truncated file is an error that names it, or is skipped."""
    (tmp_path / "05.png").write_bytes((tmp_path / "05.png").read_bytes()[:200])
    with pytest.raises(DecodeError, match=r"05\.png"):
        list(Feeder(source, decode=KEEP, batch_size=4))
    assert sum(len(maps) for maps, _ in Feeder(source, decode=KEEP, batch_size=4, on_error="skip")) == 11


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tiff(np.zeros((4, 5, 3), np.uint16)), "TIFF has 3 channels of 16 bits, and Pillow reads 3 of 8 bits"),
        (tiff(np.zeros((4, 5, 5), np.uint8)), "cannot identify|TIFF has 5 channels of 8 bits, and Pillow reads 3"),
        (tiff(np.zeros((4, 5))), "unknown pixel mode"),
        (png(16, 2, [bytes(6)], 1), "PNG has 3 channels of 16 bits, and Pillow reads 3 of 8 bits"),
        (png(16, 6, [bytes(8)], 1), "PNG has 4 channels of 16 bits, and Pillow reads 4 of 8 bits"),
        (b"P5 3 1 4095\n" + bytes(6), "scales the samples of a PPM of at most 4095"),
        (b"P6 #x\n1 1 65535\n" + bytes(6), "scales the samples of a PPM of at most 65535"),
    ],
)
def test_values_that_pillow_does_not_read(data: bytes, message: str) -> None:
    """A file of which Pillow changes the values is refused."""
    with pytest.raises((ValueError, OSError), match=message):
        KEEP(data)


def test_other_formats() -> None:
    """A format whose depth is unknown is refused."""
    with pytest.raises(ValueError, match=r'mode="keep" reads JPEG, .* not TGA'):
        DecodeImage(None, mode="keep", formats=("TGA",))(saved(DEPTH.view(np.uint8), "TGA"))


def test_max_pixels() -> None:
    """The limit holds before memory is allocated."""
    with pytest.raises(ValueError, match="more than max_pixels=100"):
        DecodeImage(None, mode="keep", max_pixels=100)(saved(DEPTH, "PNG"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 8, "mode": "raw"}, 'mode must be "rgb" or "keep", got \'raw\''),
        ({"size": None, "mode": "keep", "crop": "random"}, "pass a size for crop"),
        ({"size": None, "mode": "keep", "resize": 9}, "needs an int size .* got size=None"),
        ({"size": 8, "mode": "keep", "backend": "native"}, "leave out backend="),
        ({"size": 8, "mode": "keep", "crop": "random", "cached_size": 9}, "leave out cached_size="),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    """Arguments that make no sense with it are errors that name them."""
    with pytest.raises(ValueError, match=message):
        DecodeImage(**arguments)


def test_size_none_needs_keep() -> None:
    """Without it a size is needed, because rows of a batch have one size."""
    with pytest.raises(TypeError, match="size"):
        DecodeImage(None)


def test_copies() -> None:
    """A copy decodes alike, and ``repr`` shows the mode."""
    decode = DecodeImage(8, mode="keep", flip=True)
    copied = pickle.loads(pickle.dumps(decode))
    assert copied == decode
    assert repr(copied) == "DecodeImage(size=8, mode='keep', flip=True)"
