"""Chooses the backend of each file: the native library or simplejpeg for plain JPEGs, Pillow for everything else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from aiofeed.decoders.geometry import View
from aiofeed.decoders.native_jpeg import NativeDecoder, native_decoder, required_native_decoder
from aiofeed.decoders.pillow import load_picture, render
from aiofeed.decoders.simplejpeg import decode_jpeg_into, required_simplejpeg_decoder, simplejpeg_decoder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image


@dataclass(frozen=True)
class JpegDispatch:
    """Decodes files with the backends that a ``DecodeImage`` allows; the fields are its arguments.

    Raises:
        ValueError: the backend is unknown, or cannot give the exact pixels that ``scaled=False`` asks for.
        ImportError: the backend "native" or "turbo" is not installed.
    """

    backend: Literal["auto", "native", "pillow", "turbo"]
    scaled: bool
    max_pixels: int
    formats: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "native", "pillow", "turbo"):
            raise ValueError(f'backend must be "auto", "native", "pillow" or "turbo", got {self.backend!r}')
        if self.backend == "native" and not self.scaled:
            raise ValueError('backend="native" is not exact, so it needs scaled=True; scaled=False is for exact pixels')
        if self.backend == "turbo":
            required_simplejpeg_decoder()
        elif self.backend == "native":
            required_native_decoder()

    def native(self) -> NativeDecoder | None:
        """The native library, or ``None`` if it is not installed or the arguments rule it out."""
        if not self.scaled or self.backend in ("pillow", "turbo") or not self._allows_jpeg():
            return None
        # Looked up at each call: a decoder may be pickled on one machine and decode on another.
        return required_native_decoder() if self.backend == "native" else native_decoder()

    def _allows_jpeg(self) -> bool:
        return "JPEG" in self.formats or "MPO" in self.formats

    def decode(self, data: bytes, out: NDArray[np.uint8], choose_view: Callable[[int, int], View]) -> None:
        """Fill ``out``, uint8 [H, W, 3], with ``choose_view(width, height)`` of the upright picture."""
        native = self.native()
        if native is None or native.decode(
            [data], out[np.newaxis], lambda _, width, height: choose_view(width, height), max_pixels=self.max_pixels
        ):
            self._decode_one(data, out, choose_view)

    def decode_many(
        self,
        files: Sequence[bytes],
        out: NDArray[np.uint8],
        choose_view: Callable[[int, int, int], View],
        errors: list[Exception | None],
    ) -> None:
        """Fill rows of ``out``, uint8 [N, H, W, 3], with views of N files; the native library takes all JPEGs at once.

        Args:
            files: N files.
            choose_view: called with the file's position and the width and height of its upright picture.
            errors: N entries, set for files that fail. Files that have an error already are skipped.
        """
        native = self.native()
        remaining: Iterable[int] = range(len(files))
        if native is not None:
            remaining = native.decode(files, out, choose_view, max_pixels=self.max_pixels)
        for i in remaining:
            if errors[i] is None:
                try:
                    self._decode_one(files[i], out[i], functools.partial(choose_view, i))
                except Exception as error:  # noqa: BLE001 - one file's error must not affect the other files
                    errors[i] = error

    def _decode_one(self, data: bytes, out: NDArray[np.uint8], choose_view: Callable[[int, int], View]) -> None:
        """Decode one file with simplejpeg or Pillow."""
        if self.backend in ("auto", "turbo") and self._allows_jpeg():
            any_size = self.backend == "turbo"
            simplejpeg = required_simplejpeg_decoder() if any_size else simplejpeg_decoder()
            if simplejpeg is not None and decode_jpeg_into(
                out, data, choose_view, simplejpeg, scaled=self.scaled, max_pixels=self.max_pixels, any_size=any_size
            ):
                return
        picture, view = self.load(data, choose_view, (out.shape[1], out.shape[0]))
        render(picture, view, out)

    def load(
        self, data: bytes, choose_view: Callable[[int, int], View], target: tuple[int, int]
    ) -> tuple[Image.Image, View]:
        """Load an upright picture with Pillow, and its view, to be resized to ``target`` (width, height)."""
        return load_picture(
            data,
            choose_view,
            target=target if self.scaled else None,
            max_pixels=self.max_pixels,
            formats=self.formats,
        )
