"""pyarrow, imported at its first use, and the test for files that are text."""

from __future__ import annotations

import codecs
import importlib
import re
from functools import cache
from typing import Any

_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")


@cache
def arrow(module: str = "pyarrow") -> Any:
    """Return ``pyarrow``, or a module of it.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError('Parquet, Arrow and such files need pyarrow: pip install "aiofeed[parquet]"') from None


def is_text(head: bytes, least: int) -> bool:
    """Return whether at least so many bytes are UTF-8 without control characters. The last character may be cut."""
    if len(head) < least or _CONTROL.search(head):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
