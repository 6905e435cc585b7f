"""Decoders that come with aiofeed. Importing this package imports neither PIL nor numpy; ``DecodeImage`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiofeed.decoders.image import DecodeImage

__all__ = ["DecodeImage"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aiofeed.decoders.image import DecodeImage

    return DecodeImage
