"""Columns with values in place of nulls, and numbers in place of categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from aiofeed.shards.arrow import arrow

Categories: TypeAlias = Mapping[str, Sequence[Any]]
"""The values of columns whose numbers are their places."""


def is_text(kind: Any) -> bool:
    """Return whether a column of an Arrow type has texts, or categories that are texts."""
    kind = kind.value_type if arrow().types.is_dictionary(kind) else kind
    return str(kind) in ("string", "large_string", "string_view")


def odd_number(name: str, column: Any) -> str:
    """Return which text of a column is no number, if most of them look like numbers; otherwise nothing."""
    plain, compute = _plain(column), arrow("pyarrow.compute")
    if any(mark in name for mark in ";\t|"):
        return f"; the name {name!r} has a separator: pass Table(pandas.read_csv(path, sep=...))"
    alike = compute.match_substring_regex(plain, r"^\W*\d[\d., ']*\W*$")
    others = compute.invert(compute.match_substring_regex(plain, r"^\s*[-+]?[\d.]+([eE][-+]?\d+)?\s*$"))
    row = compute.index(others, True).as_py()
    if row < 0 or (compute.mean(alike).as_py() or 0) < 1 / 2:
        return ""
    way = 'pass Table(pandas.read_csv(path, decimal=",")), or thousands=",", or na_values=[...]'
    return f"; row {row} (the first is 0) has {plain[row].as_py()!r:.80} among numbers: {way}"


def values_of(column: Any) -> list[Any]:
    """Return the values of a column of categories: as a dictionary has them, otherwise sorted."""
    if arrow().types.is_dictionary(column.type):
        chunks = column.unify_dictionaries().chunks
        return chunks[0].dictionary.to_pylist() if chunks else []
    return sorted(arrow("pyarrow.compute").unique(_plain(column).drop_null()).to_pylist())


def coded(name: str, column: Any, values: Sequence[Any], fill: Any) -> Any:
    """Return the places of the values of a column, int64; ``fill`` is that of null and unknown ones, or a value.

    Raises:
        ValueError: A value is none of ``values``, or null, and there is no ``fill``.
    """
    compute, plain = arrow("pyarrow.compute"), _plain(column)
    try:
        is_empty = arrow().types.is_null(plain.type)  # as a row without the value has it
        known = arrow().array(values, None if is_empty else plain.type)
        plain = plain.cast(known.type) if is_empty else plain
    except (arrow().ArrowException, TypeError) as error:
        raise ValueError(f"categories of column {name!r}, which has the type {plain.type}: {error}") from None
    if isinstance(fill, str):
        plain, fill = compute.fill_null(plain, fill), None
    found = compute.index_in(plain, known)
    if found.null_count and fill is None:
        row = int(np.argmax(found.is_null().to_numpy()))
        raise ValueError(
            f"row {row} (the first is 0): column {name!r} has {plain[row].as_py()!r}, which is none of its "
            f"{len(known)} categories: fill={{{name!r}: -1}} gives such rows a number"
        )
    return compute.fill_null(found.cast(arrow().int64()), -1 if fill is None else fill).to_numpy()


def _plain(column: Any) -> Any:
    return column.cast(arrow().large_string()) if is_text(column.type) else column


def filled(name: str, column: Any, value: Any) -> Any:
    """Return a column with a value in place of nulls and of NaN.

    Raises:
        ValueError: The column cannot have the value.
    """
    compute = arrow("pyarrow.compute")
    try:
        if isinstance(column, np.ndarray):
            return np.where(np.isnan(column), np.asarray(value, column.dtype), column)
        if arrow().types.is_floating(column.type):
            column = compute.if_else(compute.is_nan(column), None, column)
        if arrow().types.is_null(column.type):
            column = column.cast(arrow().scalar(value).type)
        return compute.fill_null(column, arrow().scalar(value, column.type))
    except (arrow().ArrowException, TypeError, ValueError) as error:
        kind = column.dtype if isinstance(column, np.ndarray) else column.type
        raise ValueError(f"fill= of column {name!r}, which has the type {kind}: {error}") from None
