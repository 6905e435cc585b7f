"""Decodes the plain JPEGs of a whole chunk in one call of ``native_jpeg.c``, a library that wheels contain.

The call releases the GIL once for all of them. Its pixels differ slightly from Pillow's: it resizes the colour planes,
which most files store at half the size, straight to the target, where Pillow first enlarges them to the size of the
file. On photographs the result is at least 45 dB PSNR from Pillow's at the same scale (worst measured: 47.5); grey
pictures differ by at most one level of 255. Pictures with colours at half the size would be
at 43 if both sides are more than doubled, and are left to Pillow.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aiofeed.kernel.decoders.geometry import JPEG_METADATA_BYTES, View, jpeg_factor, stored_box

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("aiofeed.decoders")

LIBRARY = Path(__file__).with_name("_native_jpeg.dll" if sys.platform == "win32" else "_native_jpeg.so")
INSTALL = (
    "wheels for Linux (x86-64, aarch64), macOS (arm64) and Windows (x86-64) have it; to build it, install a C compiler "
    "and libjpeg-turbo's headers (libjpeg62-turbo-dev or libjpeg-turbo8-dev), then pip install --force-reinstall "
    "--no-deps --no-cache-dir --no-binary aiofeed aiofeed, or in a checkout python hatch_build.py"
)

_PLAIN, _WITH_METADATA = 0, 1
_DONE = 0
# `picture_t` of native_jpeg.c: 2 addresses and a size, the box, 7 integers, and the status that the library sets.
_PICTURE = struct.Struct("@3Q4d8i")
_STATUS = struct.Struct("@i")
_STATUS_OFFSET = _PICTURE.size - _STATUS.size


class NativeDecoder:
    """The loaded library.

    Raises:
        OSError: the library is for another libjpeg or another version of aiofeed.
    """

    def __init__(self, path: Path = LIBRARY) -> None:
        library = ctypes.CDLL(str(path))
        library.aiofeed_libjpeg.restype = ctypes.c_char_p
        libjpeg: bytes | None = library.aiofeed_libjpeg()
        if libjpeg is None:
            raise OSError("it was built for another version of libjpeg; install aiofeed again")
        if library.aiofeed_picture_bytes() != _PICTURE.size:
            raise OSError("it was built for another version of aiofeed; install aiofeed again")
        library.aiofeed_arithmetic.restype = ctypes.c_char_p
        self.version: str = f"{libjpeg.decode()}, {library.aiofeed_arithmetic().decode()}"
        """Version of libjpeg-turbo, and the instruction set that computes the pixels."""
        self._headers, self._decode = library.aiofeed_headers, library.aiofeed_decode
        self._headers.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p]
        self._decode.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._headers.restype = self._decode.restype = None

    def decode(
        self,
        data: Sequence[bytes],
        out: NDArray[np.uint8],
        choose_view: Callable[[int, int, int], View],
        *,
        max_pixels: int,
    ) -> list[int]:
        """Fill rows of ``out`` with views of plain JPEGs, decoded at the scales that ``load_picture`` uses.

        Args:
            data: N files, JPEG or not.
            out: uint8 [N, H, W, 3]; each row C-contiguous.
            choose_view: called with the file's position and the width and height of its upright picture.

        Returns:
            Positions of the files that Pillow has to decode; their rows are unchanged.
        """
        count = len(data)
        if not count:
            return []
        # numpy reads the addresses: ctypes would raise an audit event for each.
        starts = np.ndarray((count,), np.uintp, (ctypes.c_char_p * count)(*data))  # type: ignore[arg-type]
        lengths = np.fromiter(map(len, data), np.uint64, count)
        headers = np.empty((count, 3), np.int32)
        self._headers(starts.ctypes.data, lengths.ctypes.data, count, JPEG_METADATA_BYTES, headers.ctypes.data)
        height, width = out.shape[1:3]
        rows, row_bytes = out.ctypes.data, out.strides[0]
        addresses = starts.tolist()
        remaining: list[int] = []
        submitted: list[int] = []
        pictures = bytearray(_PICTURE.size * count)
        for i, (kind, stored_width, stored_height) in enumerate(headers.tolist()):
            orientation = 1
            if kind == _WITH_METADATA:
                from aiofeed.kernel.decoders.metadata import read_header

                header = read_header(data[i])
                kind, orientation = (kind, 1) if header is None else (_PLAIN, header.orientation)
            if kind != _PLAIN or stored_width * stored_height > max_pixels:
                remaining.append(i)
                continue
            upright = (stored_width, stored_height) if orientation < 5 else (stored_height, stored_width)
            try:
                box, flip = choose_view(i, *upright)
            except Exception:  # noqa: BLE001 - the next backend calls choose_view again, and reports its error
                remaining.append(i)
                continue
            factor = jpeg_factor(box, width, height)
            if orientation != 1:
                box = stored_box(box, stored_width, stored_height, orientation)
            offset = len(submitted) * _PICTURE.size
            integers = (stored_width, stored_height, width, height, factor, orientation, flip, -1)
            _PICTURE.pack_into(pictures, offset, addresses[i], len(data[i]), rows + i * row_bytes, *box, *integers)
            submitted.append(i)
        if submitted:
            # One call, which releases the GIL once for all pictures.
            self._decode(np.frombuffer(pictures, np.uint8).ctypes.data, len(submitted))
            for number, i in enumerate(submitted):
                if _STATUS.unpack_from(pictures, number * _PICTURE.size + _STATUS_OFFSET)[0] != _DONE:
                    remaining.append(i)
        return remaining


def load_native_decoder() -> tuple[str, NativeDecoder | None]:
    """Return the library, or why there is none: it was not built, or was built and cannot be loaded."""
    if not LIBRARY.exists():
        return "was not built", None
    try:
        return "", NativeDecoder()
    except (OSError, AttributeError) as error:  # libjpeg was removed or replaced
        return f"was built, but cannot be loaded ({error})", None


@functools.cache
def native_decoder() -> NativeDecoder | None:
    """Return the library, or ``None`` if it was not built or cannot be used."""
    problem, decoder = load_native_decoder()
    if decoder is None:
        # Once, because slower decoding would go unnoticed.
        _log.warning(
            "the native JPEG library %s, so JPEGs are decoded by slower ones: %s. DecodeImage(backend=...) with "
            "another backend turns this message off",
            problem,
            INSTALL,
        )
        return None
    _log.info("plain JPEGs are decoded by libjpeg-turbo %s, one chunk per call", decoder.version)
    return decoder


def required_native_decoder() -> NativeDecoder:
    """Return the library.

    Raises:
        ImportError: it was not built; the message says how to build it.
    """
    decoder = native_decoder()
    if decoder is None:
        raise ImportError(
            f'backend="native" needs a library that was not built: {INSTALL}; backend="auto" works without'
        )
    return decoder
