"""From indices to filled places, as the engine asks for it: read a chunk, decode it. Errors travel on as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiofeed.core.errors import FeedError
from aiofeed.core.limits import ResolvedLimits
from aiofeed.core.types import BatchPlan
from aiofeed.engine.fetch.async_reader import Encoded
from aiofeed.engine.fetch.collate import Assembly
from aiofeed.engine.tuning.threads import Job
from aiofeed.runtime.guard import Watch


@dataclass(eq=False)
class Outcome:
    """What came of one chunk. Errors are by position in the batch, in order; ``job`` is there where it was measured."""

    errors: list[tuple[int, FeedError]] = field(default_factory=list)
    read_s: float = 0.0
    nbytes: int = 0
    retries: int = 0
    decode_s: float = 0.0
    collate_s: float = 0.0
    job: Job | None = None


class Fetcher(Protocol):
    """Two steps per chunk: ``read`` on the loop, ``decode`` in a decode thread."""

    @property
    def has_targets(self) -> bool:
        """Whether a sample is ``(decoded, target)``."""
        ...

    @property
    def limit_s(self) -> float | None:
        """Most seconds that ``decode`` may be at one sample."""
        ...

    def chunk_size(self, samples: int, limits: ResolvedLimits) -> int:
        """How many samples the next executor job should have."""
        ...

    def lanes(self, threads: int) -> int:
        """How many of ``threads`` decode threads are worth using now."""
        ...

    async def read(self, indices: Sequence[int]) -> Encoded:
        """Encoded samples, an exception in the place of one that failed.

        Where ``decode`` is going to read them, nothing is in their places yet.
        """
        ...

    def decode(self, plan: BatchPlan, start: int, encoded: list[Any], assembly: Assembly, watch: Watch) -> Outcome:
        """Decode samples ``start``, ``start + 1``, ... of a batch into their places.

        Raises:
            AbandonedError: the guard's job was.
        """
        ...

    def overdue(self, index: int) -> FeedError:
        """The error of a sample at which ``decode`` was longer than ``limit_s``."""
        ...

    def key(self, index: int) -> str:
        """The sample's name, whatever the source says."""
        ...
