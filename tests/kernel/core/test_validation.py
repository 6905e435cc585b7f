"""`core.validation`: accepted values and error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest

from aiofeed.common.expanded import check_expanded
from aiofeed.kernel.core.validation import check_bool, check_callable, check_int, check_positive_int, check_seed


async def asynchronous() -> None:
    """Not allowed where a thread calls the function."""


class CallableAsync:
    async def __call__(self) -> None:
        """The same, as an object."""


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (check_int, 0),
        (check_int, -3),
        (check_int, np.int32(7)),
        (check_positive_int, 1),
        (check_bool, False),
        (check_callable, None),
        (check_callable, len),
        (check_callable, Mock(spec=lambda value: value)),
        (check_callable, MagicMock(spec=lambda value: value)),
        (check_callable, Mock(spec=len)),
    ],
)
def test_accepted_values(check: Callable[[str, Any], Any], value: Any) -> None:
    """The value is returned; integers of numpy become Python ints."""
    found = check("name", value)
    assert found == value
    assert type(found) is (int if isinstance(value, np.integer) else type(value))


@pytest.mark.parametrize(
    ("check", "value", "error", "message"),
    [
        (check_int, 1.0, TypeError, "name must be an int, got 1.0"),
        (check_int, True, TypeError, "name must be an int, got True"),
        (check_int, "1", TypeError, "name must be an int, got '1'"),
        (check_positive_int, 0, ValueError, "name must be at least 1, got 0"),
        (check_bool, 1, TypeError, "name must be True or False, got 1"),
        (check_callable, 3, TypeError, "name must be callable, got 3"),
        (check_callable, asynchronous, TypeError, "name must be an ordinary function.*`async def`"),
        (check_callable, Mock(spec=asynchronous), TypeError, "name must be an ordinary function.*`async def`"),
        (check_callable, CallableAsync(), TypeError, "name must be an ordinary function.*`async def`"),
    ],
)
def test_refused_values(check: Callable[[str, Any], Any], value: Any, error: type[Exception], message: str) -> None:
    """The error has the name, what is allowed and the received value."""
    with pytest.raises(error, match=message):
        check("name", value)


@pytest.mark.parametrize("seed", [1 << 62, -(1 << 62) - 1])
def test_a_seed_leaves_room_for_epochs(seed: int) -> None:
    """A torch generator takes 64 bits, and the epoch is added to the seed."""
    with pytest.raises(ValueError, match="seed must be between"):
        check_seed(seed)
    assert check_seed(seed // 2) == seed // 2


@pytest.mark.parametrize(("nbytes", "stored_bytes"), [(0, 0), (256 << 20, 1), (100 << 30, 1 << 30)])
def test_what_a_file_may_take_in_memory(nbytes: int, stored_bytes: int) -> None:
    """A file may take 256 MiB, or 100 times what it stores."""
    assert check_expanded("a.npz", nbytes, stored_bytes) == nbytes


@pytest.mark.parametrize(("nbytes", "stored_bytes"), [(-1, 100), ((256 << 20) + 1, 1 << 20), (100 << 40, 1 << 30)])
def test_what_a_file_may_not_take_in_memory(nbytes: int, stored_bytes: int) -> None:
    """More, and negative sizes, are refused by the name of the file."""
    with pytest.raises(ValueError, match=r"a\.npz claims .* in memory, from .* stored"):
        check_expanded("a.npz", nbytes, stored_bytes)
