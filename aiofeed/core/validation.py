"""Argument checks: each returns the value, or raises an error with the received value and what is allowed."""

from __future__ import annotations

import inspect
import operator
from typing import Any


def check_int(name: str, value: object) -> int:
    """The value as an int. Integers of numpy are allowed; bools and floats are not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    # __index__ is what Python accepts as an index. Tensors and arrays have it too, but also a __len__.
    if isinstance(value, bool) or not hasattr(type(value), "__index__") or hasattr(type(value), "__len__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return operator.index(value)  # type: ignore[arg-type]


def check_positive_int(name: str, value: object) -> int:
    """The value as an int of at least 1."""
    number = check_int(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def check_bool(name: str, value: object) -> bool:
    """The value, which must be a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_callable(name: str, value: Any) -> Any:
    """The value, which must be ``None`` or callable and not an ``async def`` function."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")
    if value is not None and is_async_function(value):
        raise TypeError(f"{name} must be an ordinary function, because a thread calls it; {value!r} is `async def`")
    return value


def check_seed(value: object) -> int:
    """The value as a seed; a torch generator takes it plus any epoch number."""
    seed = check_int("seed", value)
    if not -(1 << 62) <= seed < 1 << 62:
        raise ValueError(f"seed must be between -2**62 and 2**62 - 1, got {seed}")
    return seed


def is_async_function(value: Any) -> bool:
    """Whether calling the value returns a coroutine."""
    return inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(getattr(value, "__call__", None))  # noqa: B004
