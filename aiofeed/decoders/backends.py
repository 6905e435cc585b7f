"""Who decodes a file: the library that is built with aiofeed, simplejpeg, or Pillow, whose word is the last."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from aiofeed.decoders.geometry import View
from aiofeed.decoders.native_jpeg import NativeDecoder, native_decoder, required_native_decoder
from aiofeed.decoders.pillow import load_picture, render
from aiofeed.decoders.simplejpeg import decode_jpeg_into, jpeg_decoder, required_decoder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

_NAMES = ("auto", "native", "pillow", "turbo")


@dataclass(frozen=True)
class JpegDispatch:
    """The backends of a ``DecodeImage``, whose arguments these are.

    Raises:
        ValueError: there is no such backend, or it is not for exact pixels.
        ImportError: the one that is insisted on is not there.
    """

    backend: Literal["auto", "native", "pillow", "turbo"]
    scaled: bool
    max_pixels: int
    formats: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.backend not in _NAMES:
            raise ValueError(f'backend must be "auto", "native", "pillow" or "turbo", got {self.backend!r}')
        if self.backend == "native" and not self.scaled:
            raise ValueError('backend="native" is faster than it is exact; scaled=False is for exact pixels')
        if self.backend == "turbo":
            required_decoder()
        elif self.backend == "native":
            required_native_decoder()

    def library(self) -> NativeDecoder | None:
        """What decodes many at once, where it may."""
        if not self.scaled or self.backend in ("pillow", "turbo") or not self._takes_jpegs():
            return None
        # Asked for here and not kept: a decoder may be pickled on one machine and decode on another.
        return required_native_decoder() if self.backend == "native" else native_decoder()

    def _takes_jpegs(self) -> bool:
        return "JPEG" in self.formats or "MPO" in self.formats

    def decode(self, data: bytes, out: NDArray[np.uint8], choose: Callable[[int, int], View]) -> None:
        """Fill ``out``, uint8 [H, W, 3], with what is chosen of an upright picture of (width, height)."""
        library = self.library()
        if library is None or library.decode(
            [data], out[np.newaxis], lambda _, width, height: choose(width, height), max_pixels=self.max_pixels
        ):
            self._decode_alone(data, out, choose)

    def decode_many(
        self,
        files: Sequence[bytes],
        out: NDArray[np.uint8],
        choose: Callable[[int, int, int], View],
        errors: list[Exception | None],
    ) -> None:
        """Fill rows of ``out``, uint8 [N, H, W, 3]; at once if it can.

        Args:
            files: N of them.
            choose: called with which of them it is, and the width and height of the upright picture.
            errors: of each; those that have one already are passed over.
        """
        library = self.library()
        left: Iterable[int] = range(len(files))
        if library is not None:
            left = library.decode(files, out, choose, max_pixels=self.max_pixels)
        for at in left:
            if errors[at] is None:
                try:
                    self._decode_alone(files[at], out[at], functools.partial(choose, at))
                except Exception as error:  # noqa: BLE001 - whatever it is, it is of this file and not of the others
                    errors[at] = error

    def _decode_alone(self, data: bytes, out: NDArray[np.uint8], choose: Callable[[int, int], View]) -> None:
        """By simplejpeg or by Pillow."""
        if self.backend in ("auto", "turbo") and self._takes_jpegs():
            every = self.backend == "turbo"
            jpegs = required_decoder() if every else jpeg_decoder()
            if jpegs is not None and decode_jpeg_into(
                out, data, choose, jpegs, scaled=self.scaled, max_pixels=self.max_pixels, large=every
            ):
                return
        picture, view = self.load(data, choose, (out.shape[1], out.shape[0]))
        render(picture, view, out)

    def load(self, data: bytes, choose: Callable[[int, int], View], size: tuple[int, int]) -> tuple[Image.Image, View]:
        """An upright picture by Pillow, to be shown at ``size`` (width, height), and what is chosen of it."""
        target = size if self.scaled else None
        return load_picture(data, choose, target=target, max_pixels=self.max_pixels, formats=self.formats)
