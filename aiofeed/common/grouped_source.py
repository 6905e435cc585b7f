"""A source that reads several samples together."""

from __future__ import annotations

from typing import Any

from aiofeed.kernel.sources.subset import IndexedSource


class GroupedSource(IndexedSource):
    """A source that reads several samples together, by ``read_many``."""

    read_many: Any

    async def read(self, index: int, /) -> Any:
        """Read one sample."""
        [sample] = await self.read_many([index])
        if isinstance(sample, Exception):
            raise sample
        return sample
