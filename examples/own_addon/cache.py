"""A cache: what a source has read, in a dict."""

from typing import Any


class CacheOfReads:
    """The value of `cache=`: keeps the samples of the first epoch as they were read."""

    def wrap(self, source: Any) -> "CachedReads":
        """Return a source that looks samples up before it reads them."""
        return CachedReads(source)


class CachedReads:
    """A source that reads each sample of another one once."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.samples: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.source)

    def key(self, index: int) -> str:
        """Return the name of a sample in errors."""
        return str(self.source.key(index))

    async def read(self, index: int) -> Any:
        """Return a sample from the dict or from the source."""
        if index not in self.samples:
            self.samples[index] = await self.source.read(index)
        return self.samples[index]
