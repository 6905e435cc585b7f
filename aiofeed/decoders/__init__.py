"""Decoders that come with aiofeed. Nothing is imported until it is named: no PIL, no numpy; torch never is here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiofeed.decoders.image import DecodeImage as DecodeImage

_HOMES = {"DecodeImage": "aiofeed.decoders.image"}

__all__ = ["DecodeImage"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(home), name)
    return found
