"""Plain JPEGs of a whole chunk in one call: ``native_jpeg.c``, which is built with the package where it can be.

The call lets go of the interpreter's lock, once for all of them. What it gives is not Pillow's picture to the bit:
colour, which most files keep at half the size, is brought to the wanted size directly, where Pillow enlarges it to that
of the file first. Of photographs no result is below 45 dB PSNR against Pillow's of the same scale (worst measured: 49);
grey pictures differ by one level of 255 at most.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aiofeed.decoders.geometry import View, jpeg_factor, stored_box
from aiofeed.decoders.metadata import JPEG_METADATA
from aiofeed.decoders.simplejpeg import read_header

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("aiofeed.decoders")

LIBRARY = Path(__file__).with_name("_native_jpeg.so")
BUILD = (
    "install a C compiler and libjpeg-turbo's headers (libjpeg62-turbo-dev or libjpeg-turbo8-dev), then aiofeed: "
    "pip install --force-reinstall --no-deps --no-cache-dir --no-binary aiofeed aiofeed"
)

_PLAIN, _WITH_METADATA = 0, 1
_DONE = 0
# ``picture_t`` of native_jpeg.c: addresses and size, the box, sizes and ways, the status that is set there.
_PICTURE = struct.Struct("@3Q4d8i")
_STATUS = struct.Struct("@i")


class NativeDecoder:
    """The library, loaded.

    Raises:
        OSError: it cannot be used.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        library = ctypes.CDLL(str(path))
        library.aiofeed_libjpeg.restype = ctypes.c_char_p
        found: bytes | None = library.aiofeed_libjpeg()
        if found is None:
            raise OSError("the libjpeg that it finds is not the one that it was built for; install aiofeed again")
        if library.aiofeed_picture_bytes() != _PICTURE.size:
            raise OSError("it was built for another release of aiofeed; install aiofeed again")
        library.aiofeed_arithmetic.restype = ctypes.c_char_p
        self.version = f"{found.decode()}, {library.aiofeed_arithmetic().decode()}"
        """Of libjpeg-turbo, and which of the library's two ways computes the pixels here."""
        self._headers, self._decode = library.aiofeed_headers, library.aiofeed_decode
        self._headers.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p]
        self._decode.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._headers.restype = self._decode.restype = None

    def decode(
        self,
        data: Sequence[bytes],
        out: NDArray[np.uint8],
        choose: Callable[[int, int, int], View],
        *,
        max_pixels: int,
    ) -> list[int]:
        """Fill rows of ``out`` with what is chosen of plain JPEGs, at the scales that ``load_picture`` would take.

        Args:
            data: what may be JPEG files.
            out: uint8 [N, H, W, 3]; each of the N C-contiguous.
            choose: called with which of ``data`` it is, and the width and height of the upright picture.

        Returns:
            Which of ``data`` are left, for whatever reason, for Pillow to be asked; their rows are as they were.
        """
        count = len(data)
        if not count:
            return []
        # Addresses are numpy's to tell: ctypes would raise an audit event for each.
        starts = np.ndarray((count,), np.uintp, (ctypes.c_char_p * count)(*data))  # type: ignore[arg-type]
        lengths = np.fromiter(map(len, data), np.uint64, count)
        found = np.empty((count, 3), np.int32)
        self._headers(starts.ctypes.data, lengths.ctypes.data, count, JPEG_METADATA, found.ctypes.data)
        height, width = out.shape[1:3]
        rows, step = out.ctypes.data, out.strides[0]
        addresses = starts.tolist()
        left: list[int] = []
        ours: list[int] = []
        pictures = bytearray(_PICTURE.size * count)
        for at, (kind, wide, high) in enumerate(found.tolist()):
            orientation = 1
            if kind == _WITH_METADATA:
                header = read_header(data[at])
                kind, orientation = (kind, 1) if header is None else (_PLAIN, header.orientation)
            if kind != _PLAIN or wide * high > max_pixels:
                left.append(at)
                continue
            try:
                box, flip = choose(at, wide, high) if orientation < 5 else choose(at, high, wide)
            except Exception:  # noqa: BLE001 - whoever is asked next chooses too, and raises it where it belongs
                left.append(at)
                continue
            factor = jpeg_factor(box, width, height)
            if orientation != 1:
                box = stored_box(box, wide, high, orientation)
            place = len(ours) * _PICTURE.size
            memory = rows + at * step
            sizes = (wide, high, width, height, factor, orientation, flip, -1)
            _PICTURE.pack_into(pictures, place, addresses[at], len(data[at]), memory, *box, *sizes)
            ours.append(at)
        if ours:
            self._decode(np.frombuffer(pictures, np.uint8).ctypes.data, len(ours))
            last = _PICTURE.size - _STATUS.size
            for number, at in enumerate(ours):
                if _STATUS.unpack_from(pictures, number * _PICTURE.size + last)[0] != _DONE:
                    left.append(at)
        return left


@functools.cache
def native_decoder() -> NativeDecoder | None:
    """The library; ``None`` where it was not built, or is of no use."""
    if not LIBRARY.exists():
        return None
    try:
        found = NativeDecoder()
    except (OSError, AttributeError) as error:
        # One that is there but does not load, since libjpeg was removed, say, would go unnoticed.
        _log.warning("%s cannot be used, JPEGs are decoded without it: %s", LIBRARY, error)
        return None
    _log.info("plain JPEGs are decoded by libjpeg-turbo %s, a chunk at a time", found.version)
    return found


def required_native_decoder() -> NativeDecoder:
    """The same.

    Raises:
        ImportError: there is none; says how.
    """
    found = native_decoder()
    if found is None:
        raise ImportError(f'backend="native" needs a library that was not built: {BUILD}; backend="auto" does without')
    return found
