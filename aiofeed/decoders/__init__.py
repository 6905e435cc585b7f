"""Decoders that come with aiofeed. Importing this package imports neither PIL nor numpy; a decoder does."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiofeed.decoders.image import DecodeImage
    from aiofeed.decoders.pairs import DecodePair
    from aiofeed.decoders.records import DecodeJSON, DecodeNumpy, DecodeTensor

__all__ = ["DecodeImage", "DecodeJSON", "DecodeNumpy", "DecodePair", "DecodeTensor"]
_HOMES = {"DecodeImage": "image", "DecodePair": "pairs"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"aiofeed.decoders.{_HOMES.get(name, 'records')}")
    value: object = getattr(module, name)
    return value
