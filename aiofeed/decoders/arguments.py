"""The arguments of ``DecodeImage``, checked: every refusal says what was given and what is allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from aiofeed.decoders.opening import FORMATS, known_formats


def positive(name: str, value: object) -> int:
    """An int of 1 or more."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if number < 1:
        raise ValueError(f"{name} must be 1 or more, got {number}")
    return number


def size_of(size: Any, name: str = "size") -> int | tuple[int, int]:
    """A side, or a pair of them as a tuple."""
    if isinstance(size, (tuple, list)):
        if len(size) != 2:
            raise ValueError(f"{name} must be an int or a pair (height, width), got {size!r}")
        return positive(f"height in {name}", size[0]), positive(f"width in {name}", size[1])
    return positive(name, size)


def bounds(name: str, value: Any, *, highest: float) -> tuple[float, float]:
    """A pair of finite numbers above 0, in order."""
    allowed = f"0 < low <= high{' <= 1' if highest == 1.0 else ''}"
    try:
        low, high = (float(bound) for bound in value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair (low, high) of numbers with {allowed}, got {value!r}") from None
    if not (0 < low <= high <= highest and math.isfinite(high)):
        raise ValueError(f"{name} must be a pair (low, high) with {allowed}, got {value!r}")
    return low, high


def names_of(formats: Any) -> tuple[str, ...]:
    """Names of formats in upper case, each once."""
    if isinstance(formats, str) or not isinstance(formats, Iterable):
        raise TypeError(f"formats must be a tuple of names, as {FORMATS!r}, got {formats!r}")
    formats = tuple(formats)
    if not all(isinstance(name, str) for name in formats):
        raise TypeError(f"formats must be a tuple of names, as {FORMATS!r}, got {formats!r}")
    names = tuple(dict.fromkeys(name.upper() for name in formats))
    if not names:
        raise ValueError("formats must name one format or more, got none")
    # Plugins are loaded only to look for other names: the usual ones need no look, whether this Pillow has them or not.
    if not set(names) <= set(FORMATS) and (unknown := set(names) - known_formats()):
        known = ", ".join(sorted(known_formats()))
        raise ValueError(f"formats has {min(unknown)!r}, which this Pillow cannot open; it knows {known}")
    return names
