"""`format_bytes`."""

from __future__ import annotations

import pytest

from aiofeed.core.formatting import format_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (2 << 40, "2048.0 GiB")],
)
def test_bytes_are_in_the_largest_unit(nbytes: int, text: str) -> None:
    """Numbers have one decimal and the largest binary unit that is not above them."""
    assert format_bytes(nbytes) == text
