"""From indices to filled places, as the engine asks for it: read a chunk, decode it. Errors travel on as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiofeed.core.errors import FeedError
from aiofeed.core.limits import ResolvedLimits
from aiofeed.core.types import BatchPlan
from aiofeed.engine.fetch.async_reader import ReadResult
from aiofeed.engine.fetch.collate import BatchBuilder
from aiofeed.engine.tuning.threads import JobTiming
from aiofeed.runtime.time_limits import JobControl

# Work per executor job. A chunk costs the loop a task, two hops through executors and three wake-ups, which 25 ms of
# decoding makes small; a batch still splits into a piece for each thread.
CHUNK_S = 0.025
FIRST_CHUNK = 16
# Encoded bytes of a job, where that is more than one sample: what is read is decoded while it is still in a cache, and
# the memory that it leaves serves the next one.
CHUNK_BYTES = 16 << 20
# Less than this part of its time on the processor, and a sample waits for something of its own: storage, a network.
AT_WORK = 0.1


@dataclass(eq=False)
class ChunkOutcome:
    """What came of one chunk. Errors are by position in the batch, in order; ``job`` is there where it was measured."""

    errors: list[tuple[int, FeedError]] = field(default_factory=list)
    read_s: float = 0.0
    nbytes: int = 0
    retries: int = 0
    decode_s: float = 0.0
    collate_s: float = 0.0
    job: JobTiming | None = None


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

    def max_running(self, threads: int) -> int:
        """How many of ``threads`` decode threads are worth using now."""
        ...

    async def read(self, indices: Sequence[int]) -> ReadResult:
        """Encoded samples, an exception in the place of one that failed.

        Where ``decode`` is going to read them, nothing is in their places yet.
        """
        ...

    def decode(
        self, plan: BatchPlan, start: int, encoded: list[Any], builder: BatchBuilder, watch: JobControl
    ) -> ChunkOutcome:
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


class ChunkSizer:
    """Seconds of decoding and encoded bytes per sample, followed by moving averages; from them the size of a chunk."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._bytes = 0.0

    def weigh(self, nbytes: int, samples: int) -> None:
        """Take note of how large some samples were together."""
        per_sample = nbytes / max(samples, 1)
        self._bytes += (per_sample - self._bytes) * (0.2 if self._bytes else 1.0)

    def observe(self, seconds: float, samples: int, cpu_s: float = 0.0) -> None:
        """Take note of what some samples took together, ``cpu_s`` of it on the processor.

        Where that is a good part it counts alone. The rest is waiting for the GIL or for a core, which says nothing of
        the samples: taken for work, it makes chunks small, which makes threads wait for one another more.
        """
        if cpu_s > seconds * AT_WORK:
            seconds = cpu_s
        per_sample = seconds / max(samples, 1)
        self.seconds += (per_sample - self.seconds) * (0.2 if self.seconds else 1.0)

    def chunk_size(self, samples: int, threads: int) -> int:
        """How many of a batch's ``samples`` make a job, for so many threads."""
        even = -(-samples // threads)
        if self.seconds == 0.0:
            return max(1, min(FIRST_CHUNK, even))
        wanted = max(1, int(min(CHUNK_S / self.seconds, CHUNK_BYTES / max(self._bytes, 1.0))))
        if wanted >= samples:
            return samples
        # As many pieces as threads, or a multiple: an odd piece would leave a thread idle at the end of an epoch.
        pieces = max(threads, -(-samples // wanted) // threads * threads)
        return -(-samples // pieces)
