"""The arguments of ``DecodeImage`` and its methods, checked: every refusal says what was given and what is allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.types import Row
from aiofeed.decoders.opening import FORMATS, known_formats

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


def check_memory(out: NDArray[np.uint8], row: Row) -> None:
    """Memory that a row can be written to: C-contiguous uint8 of its shape."""
    if out.shape != row.shape or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"out must be writable C-contiguous uint8 {list(row.shape)}, "
            f"got {out.dtype} {list(out.shape)} with strides {out.strides}, writable={out.flags.writeable}"
        )


def as_bytes(data: object) -> bytes:
    """The bytes of anything with a buffer."""
    if isinstance(data, bytes):
        return data
    try:
        return bytes(memoryview(data))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"DecodeImage takes the bytes of one image, got {type(data).__name__}; where a sample is of several files, "
            "decode= takes a callable of your own, which may hand the image's bytes to a DecodeImage"
        ) from None
