"""A cache: what a source has read, in a dict."""

from typing import Any

from aiofeed.kernel.core.faces import BaseCache, BaseSource, passes_on


class CacheOfReads(BaseCache):
    """The value of `cache=`: keeps the samples of the first epoch as they were read."""

    excluded = (
        (("cache=CacheOfReads()",), ('engine="process"',), ValueError,
         "each process would keep samples of its own: pass engine='thread', or another cache"),
    )  # fmt: skip

    def facts(self, arguments: Any) -> dict[str, str]:
        """Return the fact that the row of `excluded` names; messages show it by its name."""
        return {"cache=CacheOfReads()": ""}

    def wrap(self, source: BaseSource) -> "CachedReads":
        """Return a source that looks samples up before it reads them."""
        return CachedReads(source)


@passes_on
class CachedReads(BaseSource):
    """A source that reads each sample of another one once. What is not defined here is that source's."""

    # The ways of reading that do not ask the dict.
    answers_at_once = in_memory = False
    read_many = read_now = read_planned = new_gathered = gather_ahead = None

    def __init__(self, source: BaseSource) -> None:
        self.whole = source
        self.samples: dict[int, Any] = {}

    def uncopied_reader(self) -> None:
        """Return `None`: bytes are kept."""

    def __len__(self) -> int:
        return len(self.whole)

    async def read(self, index: int) -> Any:
        """Return a sample from the dict or from the source."""
        if index not in self.samples:
            self.samples[index] = await self.whole.read(index)
        return self.samples[index]
