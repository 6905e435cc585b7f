"""The state of the global random generators of Python, NumPy and torch: read, restored, and as plain values."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from aiofeed.kernel.core.errors import StateError


def random_state() -> tuple[Any, ...]:
    """Return the state of the global generators of Python, NumPy and torch (on the CPU)."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def same_random_state(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two states of ``random_state`` are equal."""
    (name, keys, *rest), (other_name, other_keys, *other_rest) = one[1], other[1]
    return (
        one[0] == other[0]
        and (name, rest) == (other_name, other_rest)
        and bool((keys == other_keys).all())
        and one[2].equal(other[2])
    )


def set_random_state(state: tuple[Any, ...]) -> None:
    """Restore a state that ``random_state`` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def pack_random_state(state: tuple[Any, ...]) -> list[Any]:
    """Return a state as lists, numbers and text, which survive JSON; about 14 KiB."""
    (version, words, gauss), (name, keys, position, has_gauss, cached), generator = state
    return [
        [version, _to_text(np.array(words, np.uint32)), gauss],
        [name, _to_text(keys), position, has_gauss, cached],
        pack_generator(generator),
    ]


def unpack_random_state(packed: Any) -> tuple[Any, ...]:
    """Return the state that ``pack_random_state`` has packed; ``StateError`` if it is damaged."""
    try:
        (version, words, gauss), (name, keys, *rest), generator = packed
        state = (
            (version, tuple(_from_text(words, np.uint32).tolist()), gauss),
            (name, _from_text(keys, np.uint32), *rest),
            unpack_generator(generator),
        )
        _check(state)
        return state
    except Exception as error:  # the generators raise errors of many types
        raise StateError(f"the state of the random generators is damaged: {error}") from error


def _check(state: tuple[Any, ...]) -> None:
    random.Random().setstate(state[0])
    _, keys, position, _, _ = state[1]
    if not 0 <= position <= len(keys):  # NumPy does not check it, and would read other memory
        raise ValueError(f"the position of NumPy's generator is {position}")
    np.random.RandomState().set_state(state[1])
    torch.Generator().set_state(state[2])


def pack_generator(state: torch.Tensor) -> str:
    """Return the state of a ``torch.Generator`` as text."""
    return _to_text(state.numpy())


def unpack_generator(packed: str) -> torch.Tensor:
    """Return the state that ``pack_generator`` has packed."""
    return torch.from_numpy(_from_text(packed, np.uint8).copy())


def _to_text(values: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")


def _from_text(text: str, dtype: type) -> Any:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)
