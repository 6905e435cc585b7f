"""Decoders that come with aiofeed. Importing this package imports neither PIL nor numpy; a decoder does."""

from __future__ import annotations

from typing import Any

from aiofeed import _load_addon

__all__ = ["DecodeImage", "DecodeJSON", "DecodeNumpy", "DecodePair", "DecodeTensor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load_addon(name, f"{__name__}.{name}")
