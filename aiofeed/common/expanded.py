"""How much memory the contents of a file may take."""

from __future__ import annotations

from aiofeed.kernel.core.formatting import format_bytes

# What a file may take in memory by claiming or inflating more than it stores: label masks deflate to a thousandth, but
# larger ones than this are rather an attack or damage.
EXPANDED_BYTES = 256 << 20
EXPANDED_TIMES = 100


def check_expanded(name: str, nbytes: int, stored_bytes: int) -> int:
    """Return ``nbytes``, the size in memory of what ``stored_bytes`` of a file hold or claim.

    Raises:
        ValueError: It is negative, or more than 256 MiB and than 100 times the stored bytes.
    """
    most = max(EXPANDED_BYTES, EXPANDED_TIMES * stored_bytes)
    if not 0 <= nbytes <= most:
        size = format_bytes(nbytes) if nbytes >= 0 else f"{nbytes} bytes"
        raise ValueError(
            f"{name} claims {size} in memory, from {format_bytes(stored_bytes)} stored; at most {format_bytes(most)} "
            "are allowed: the file is damaged, or made to exhaust memory"
        )
    return nbytes
