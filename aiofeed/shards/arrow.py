"""pyarrow, imported at its first use, and the test for files that are text."""

from __future__ import annotations

import codecs
import importlib
import re
from functools import cache
from typing import Any

from aiofeed.common.blocking import signal_held

_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")


@cache
def arrow(module: str = "pyarrow") -> Any:
    """Return ``pyarrow``, or a module of it.

    Raises:
        ImportError: It is not installed.
    """
    try:
        with signal_held():
            return importlib.import_module(module)
    except ImportError:
        raise ImportError('Parquet, Arrow and such files need pyarrow: pip install "aiofeed[parquet]"') from None


@cache
def load_pandas() -> None:
    """Let pyarrow import pandas if it is installed, which it does for the first array that becomes numpy's."""
    with signal_held():
        arrow().array([0]).to_numpy()


def stored_type(kind: Any) -> Any:
    """Return one type for all types of Arrow that Parquet stores alike, such as lists and large lists."""
    types, pa = arrow().types, arrow()
    if types.is_dictionary(kind):
        return stored_type(kind.value_type)
    if types.is_large_list(kind) or types.is_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(stored_type(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([(each.name, stored_type(each.type)) for each in kind])
    if types.is_map(kind):
        return pa.map_(stored_type(kind.key_type), stored_type(kind.item_type))
    if types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")  # the instant is stored
    if types.is_decimal(kind):
        return pa.decimal256(kind.precision, kind.scale)
    return {
        **{"large_string": pa.string(), "string_view": pa.string()},
        **{"large_binary": pa.binary(), "binary_view": pa.binary()},
    }.get(str(kind), kind)


def is_text(head: bytes, least: int) -> bool:
    """Return whether at least so many bytes are UTF-8 without control characters. The last character may be cut."""
    if len(head) < least or _CONTROL.search(head):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
