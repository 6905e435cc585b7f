"""Decoders that come with aiofeed. Importing this package imports neither PIL nor numpy; a decoder does."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiofeed.decoders.image import DecodeImage
    from aiofeed.decoders.records import DecodeJSON, DecodeNumpy, DecodeTensor

__all__ = ["DecodeImage", "DecodeJSON", "DecodeNumpy", "DecodeTensor"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module("aiofeed.decoders.image" if name == "DecodeImage" else "aiofeed.decoders.records")
    value: object = getattr(module, name)
    return value
