"""Finds out why samples do not collate, for the message of the error."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiofeed.kernel.core.formatting import kind_of
from aiofeed.kernel.runtime.tensors import is_plain


def find_misfit(values: Sequence[Any], error: Exception) -> tuple[str, tuple[int, ...], str | None]:
    """Return why ``default_collate`` has raised ``error`` for values, none of which is ``None``.

    Returns:
        The problem, the positions of the values to name, and what to do; ``None``: what helps for all that differ.
    """
    for position, value in enumerate(values):
        if (problem := _common_mistake(value)) is not None:
            return problem, (position,), ""  # it says what to do
    shapes = [tuple(value.shape) if hasattr(value, "shape") else None for value in values]
    for position, shape in enumerate(shapes):
        if shape != shapes[0]:
            problem = f"shapes {list(shapes[0] or ())} and {list(shape or ())}"
            if shape is None or shapes[0] is None:
                problem = f"one is {kind_of(values[0])}, another {kind_of(values[position])}"
            return problem, (0, position), None
    dtypes = [getattr(value, "dtype", None) for value in values]
    for position, dtype in enumerate(dtypes):
        if dtype != dtypes[0]:
            return f"dtypes {dtypes[0]} and {dtype}: {error}", (0, position), None
    return str(error), (), None


def _common_mistake(value: Any) -> str | None:
    """Return what is wrong with a value of a type that never collates, and the way out; ``None`` for other values."""
    if inspect.iscoroutine(value):
        return "one is a coroutine: `async def` is for a source's read, not for decoders, datasets and targets"
    if inspect.isgenerator(value):
        return "one is a generator: use `return` in place of `yield`, or list(...)"
    if type(value).__module__.startswith("PIL."):
        return f"one is {kind_of(value)}, a PIL image: convert it with numpy.asarray(image), or pass collate_fn=list"
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and not (is_plain(dtype) or isinstance(value, str | bytes)):
        return f"one has the dtype {dtype}, which torch lacks: convert it"
    return None
