"""Tokens in a column of lists: of row groups of Parquet files, and of record batches of Arrow files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiofeed.tables.columns import is_list
from aiofeed.tables.memory import mapped
from aiofeed.tokens.formats import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MappedLists:
    """The tokens of each record batch of a local Arrow file, in its mapped memory."""

    def __init__(self, path: str, column: str) -> None:
        self._arguments = path, column
        table = mapped(path)
        self.dtype: str = dtype_of(table.schema, column)
        self.batches: list[NDArray[Any]] = [tokens_of(chunk) for chunk in table.column(column).chunks]

    def __reduce__(self) -> tuple[Any, ...]:
        """Map the file again."""
        return type(self), self._arguments


def dtype_of(schema: Any, column: str) -> str:
    """Return the dtype of the tokens in a column.

    Raises:
        ValueError: There is no such column, or it has other values.
    """
    if column not in schema.names:
        raise ValueError(f"there is no column {column!r}; there are {schema.names}")
    kind = schema.field(column).type
    if not is_list(kind) or str(kind.value_type) not in DTYPES:
        raise ValueError(f"column {column!r} has the type {kind}: tokens are lists of {', '.join(DTYPES)}")
    return str(kind.value_type)


def tokens_of(lists: Any) -> NDArray[Any]:
    """Return the tokens of an Arrow array of lists, of which null ones and empty ones have none.

    Raises:
        ValueError: A token is null.
    """
    tokens = lists.flatten()
    if tokens.null_count:
        raise ValueError("the column has null tokens")
    return tokens.to_numpy()  # type: ignore[no-any-return]
