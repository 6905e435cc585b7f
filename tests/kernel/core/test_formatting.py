"""`format_bytes` and `format_error`."""

from __future__ import annotations

import pytest

from aiofeed.kernel.core.formatting import format_bytes, format_error


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (2 << 40, "2048.0 GiB")],
)
def test_bytes_are_in_the_largest_unit(nbytes: int, text: str) -> None:
    """Numbers have one decimal and the largest binary unit that is not above them."""
    assert format_bytes(nbytes) == text


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("no"), "ValueError: no"), (ValueError(), "ValueError"), (Unprintable("no"), "Unprintable")],
)
def test_any_exception_can_be_formatted(error: Exception, text: str) -> None:
    """One without a text, or whose ``__str__`` raises SystemExit, gives its type alone."""
    assert format_error(error) == text
