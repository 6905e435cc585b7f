"""Tables of Lance datasets."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from aiofeed.sources.tables.columns import Columns, problem_of
from aiofeed.sources.tables.table import Table, as_list, check_columns


class LanceTable(Table):
    """Rows of a Lance dataset; a read is one ``take``."""

    def _open(self, table: Any, columns: Any, target: Any, **storage: Any) -> None:
        if isinstance(table, str | os.PathLike):
            try:
                table = importlib.import_module("lance").dataset(os.fspath(table), **(storage["options"] or {}))
            except ImportError:
                raise ImportError(f"{table}: Lance datasets are read by pylance: pip install pylance") from None
        self._dataset, names = table, table.schema.names
        self.name: str = table.uri
        self._chosen = columns or (names if self.data is None else [self.data])
        check_columns(self.name, names, [*self._chosen, *as_list(target)])
        self._length = int(table.count_rows())
        if not self._length:
            raise ValueError(f"{self.name}: the table has no rows")
        # `target` is asked for one sample at a time.
        read = Columns.of(table.to_table(columns=as_list(target))) if target is not None else Columns({})
        self._set_targets(read, target)

    def _problems(self) -> Mapping[str, str | None]:
        return {name: problem_of(self._dataset.schema.field(name).type) for name in self._chosen}

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Read rows."""
        return await asyncio.to_thread(self._take, list(indices))

    def _take(self, indices: list[int]) -> list[Any]:
        return self._samples_read(self._dataset.take(indices, columns=self._chosen))

    def fingerprint(self) -> str:
        """Name, version, number of rows and columns of the dataset."""
        return f"{os.path.basename(self.name)} {self._dataset.version} {len(self)} {self._chosen}"
