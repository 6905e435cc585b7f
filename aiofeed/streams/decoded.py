"""``lengths="decoded"``: the decoded samples of any source as a stream, of which a plan forms batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiofeed.kernel.core.errors import CollateError
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.sampling.schedule import Position
from aiofeed.streams.stream import Stream
from aiofeed.streams.stream_epochs import Blocks, Measured, Snapshot, items_of

if TYPE_CHECKING:
    from aiofeed.kernel.feeder.feeder import Feeder
    from aiofeed.kernel.feeder.iterator import FeedIterator


def decode_first(a: Any, new_feeder: Any) -> None:
    """Let a feeder of its own read and decode the samples, and form batches of those as of a stream.

    Args:
        a: The ``Arguments`` of a feeder, which get the stream and lose the options that act on samples.
        new_feeder: ``Feeder``.
    """
    feeder = new_feeder(
        a.source,
        decode=a.decode,
        batch_size=64,  # few jobs, and a first batch that does not wait for many samples
        shuffle=a.shuffle,
        sampler=a.sampler,
        weights=a.weights,
        seed=a.seed,
        pad=a.pad,
        collate_fn=a.plan.decoded,
        on_error=a.on_error,
        cache=a.cache,
        limits=a.limits,
        # Without padding, ranks may differ, and each decodes its own samples only.
        shard=None if a.pad else a.shard,
        exclude=a.exclude,
        engine=a.engine,
        keys=True,
    )
    a.source = a.adopted = DecodedStream(feeder, sharded=not a.pad)
    a.decode = a.sampler = a.weights = a.cache = a.exclude = None
    a.shuffle, a.on_error, a.engines, a.ray = False, FailurePolicy(), 0, None
    a._choose_source()


class DecodedStream(Stream):
    """The samples of a feeder, which reads and decodes them in threads of its own, in the order of its epochs.

    Args:
        feeder: Its batches are ``(samples, keys)``, with samples and lengths of ``Plan.decoded``.
        sharded: Whether it has the samples of one rank only.
    """

    def __init__(self, feeder: Feeder[Any], *, sharded: bool) -> None:
        super().__init__(partial(DecodedSamples, feeder), sharded=sharded)
        self.feeder: Feeder[Any] = feeder
        self.given: Any = feeder.dataset
        self.name: str = f"{feeder._source!r}, decoded"
        self.source_names: Sequence[str] = feeder._source.source_names
        # Engines that use it: one may start before the one before it has ended.
        self._engines: list[None] = []

    def fingerprint(self) -> str:
        """Identifies the source and its order."""
        schedule, session = self.feeder._order.schedule(0), self.feeder._session
        return f"decoded {schedule.shuffle} {session.order.lister.identity()} {session.fingerprint}"

    def named(self, index: int, /) -> Any:
        """Return the name of the sample of an ``ItemNumber``; of another number the place in the epoch."""
        found = items_of([index])
        return found[0][1] if found else f"sample {index} of an epoch of {self.name}"

    def key(self, index: int, /) -> str:
        """Return the name as a text."""
        return str(self.named(index))

    def storage_statistics(self) -> Any:
        """Return the requests of the source."""
        return self.feeder.statistics().storage

    async def open(self) -> None:
        """Count the engines."""
        self._engines.append(None)

    async def aclose(self) -> None:
        """End the threads of the feeder after the last engine."""
        self._engines.pop()
        if not self._engines:
            await self.feeder.aclose()

    def interrupt(self, iterable: Any) -> None:
        """Leave out the decodes that have not begun: a batch of them may take seconds."""
        if iterable is not None and iterable.batches is not None:
            iterable.batches.close()

    async def read_many(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of ``ItemNumber``s."""
        return [sample for (sample, _), _ in items_of(indices)]

    def _read_blocks(self, epoch: int, first: int, snapshot: Snapshot | None, size: int, measure: Measured) -> Blocks:
        return super()._read_blocks(epoch, first, snapshot, size, lambda _, item: _length_of(item))


def _length_of(item: Any) -> int:
    (_, length), key = item
    if isinstance(length, Exception):
        raise CollateError(f"cannot measure {str(key)!r}: {format_error(length)}") from length
    return length  # type: ignore[no-any-return]


class DecodedSamples:
    """The samples of one epoch of a feeder, each with its length and its key.

    Its state is that of the feeder before a batch, with the number of samples that were used of this batch.

    Attributes:
        batches: The iterator of the feeder, as soon as there is one.
    """

    def __init__(self, feeder: Feeder[Any], epoch: int) -> None:
        self._feeder = feeder
        self._before: Mapping[str, Any] = {}
        self._used = 0
        self.batches: FeedIterator[Any] | None = None
        feeder._session.checkpoint.load(Position(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for JSON."""
        return {"feeder": self._before, "used": self._used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        self._feeder.load_state_dict(state["feeder"])
        self._used = state["used"]

    def __iter__(self) -> Iterator[Any]:
        """Go on from the position, or begin the epoch."""
        used, self._before = self._used, self._feeder.state_dict()
        self.batches = iter(self._feeder)
        for batch in self.batches:
            for self._used, item in enumerate(zip(*batch, strict=True), 1):
                if self._used > used:
                    yield item
            used, self._used, self._before = 0, 0, self._feeder.state_dict()
