"""Decoders that come with aiofeed. Importing this package imports neither PIL nor numpy; ``DecodeImage`` does."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiofeed.decoders.image import DecodeImage as DecodeImage

_MODULES = {"DecodeImage": "aiofeed.decoders.image"}

__all__ = ["DecodeImage"]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value
