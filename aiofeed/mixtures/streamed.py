"""A mixture with streams in it: a stream of the samples that its sources give in turn, by weight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from aiofeed.kernel.core.errors import FeedError, ReadError, StateError
from aiofeed.kernel.core.faces import BaseSource, Exclusion
from aiofeed.kernel.core.formatting import format_error
from aiofeed.kernel.core.types import Traits
from aiofeed.kernel.core.validation import counted
from aiofeed.kernel.sampling.order import feistel, mix64
from aiofeed.kernel.sampling.progress import digest
from aiofeed.kernel.sampling.schedule import Schedule
from aiofeed.kernel.sources.subset import names_of
from aiofeed.mixtures.combined import MixedBatches, MixedDecoder, SeveralSources
from aiofeed.mixtures.mixture_order import BLOCK, NEVER, ConstantShares, Interleaving, ShareBlocks
from aiofeed.mixtures.parts import Found, Group, Part
from aiofeed.plans.length_plans import LengthPlan
from aiofeed.streams.stream import Stream
from aiofeed.streams.stream_epochs import ItemNumber, Shard, StreamOrder, items_of

_END: Any = object()


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn.

    Args:
        weights: The weight of each source.
        at_end: "restart" a source that has ended, "stop" the epoch, or "leave out" the source.
        until: The samples of an epoch; ``None``: it ends when each source has ended, with "stop" when one has.
        most: How often each source may be passed through in an epoch, if that is limited.
        seed, shuffle: Of the feeder; for sources that are no streams.
    """

    weights: Sequence[Fraction]
    at_end: str
    until: int | None
    most: Sequence[int | None]
    seed: int = 0
    shuffle: bool = False


class StreamedMixture(SeveralSources, Stream):
    """Sources, one of them a stream at least, as one stream, whose items are ``Found``."""

    traits: Traits = Traits(decode="none", indexed=False)
    excluded: ClassVar[Sequence[Exclusion]] = (
        *[row for row in Stream.excluded if row[0] != ("shuffle=",)],
        (("shuffle= other than True",), ("Mixture of streams",), ValueError,
         "its streams have orders of their own: pass shuffle=True, for the sources that are no streams"),
        (("a plan",), ("Mixture of streams",), TypeError,
         "its samples are read after their batches are known: pass lengths=\"decoded\", or a number as batch_size="),
    )  # fmt: skip
    collate: Any = None

    def __init__(self, parts: Sequence[Part], names: bool, drawing: Drawing) -> None:
        self.parts: list[Part] = [*parts]
        self._names = [part.name for part in parts]
        self._adds_names, self._drawing = names, drawing
        self.source_names: Sequence[str] = self._names if names else ()
        streams = {part.name: part.source for part in parts if isinstance(part.source, Stream)}
        for name, stream in streams.items():
            if isinstance(stream._make, AsyncIterable):
                raise TypeError(f"Mixture: the stream {name!r} is asynchronous; mix streams that `for` can read")
        sharded = [name for name, stream in streams.items() if stream.sharded]
        if sharded and len(sharded) < len(parts):
            raise ValueError(
                f"Mixture: {sharded} have sharded=True, and the other sources have not: each rank takes its samples of "
                f"all of a mixture; leave out sharded="
            )
        super().__init__(
            partial(MixedItems, parts, drawing),
            shuffle_buffer=max(stream.shuffle_buffer for stream in streams.values()),
            sharded=bool(sharded),
            length=drawing.until,
        )
        self.name: str = f"Mixture({', '.join(self._names)})"
        self.decoder: MixedDecoder = MixedDecoder(self)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return self.name

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return that it is a mixture of streams."""
        return {**super().facts(arguments), "Mixture of streams": self.name}

    def fingerprint(self) -> str:
        """Identifies all sources, with their names."""
        named = [(part.name, part.source) for part in self.parts]
        return digest(*[f"{name}={names_of(source, _length(source))}" for name, source in named])

    def key(self, index: int, /) -> str:
        """Return the name of the source, and the sample's key in it."""
        if not isinstance(index, ItemNumber):
            return super().key(index)
        found: Found = index.item
        return f"{self._names[found.part]}: {self.parts[found.part].source.key(found.at)}"

    def new_order(self, schedule: Schedule, shard: Shard, plan: LengthPlan | None) -> StreamOrder:
        """Return the order of its samples, with the seed of the feeder."""
        drawing = replace(self._drawing, seed=schedule.seed, shuffle=schedule.shuffle is True)
        bound = StreamedMixture(self.parts, self._adds_names, drawing)
        return StreamOrder(replace(schedule, shuffle=False), shard, bound, plan)

    def in_batches(self) -> BaseSource:
        """Return the mixture with batches in which samples of two sources are compared."""
        found = StreamedMixture(self.parts, self._adds_names, self._drawing)
        found.collate = MixedBatches(found)  # type: ignore[arg-type]
        return found

    async def read_many(self, indices: Sequence[int]) -> list[Any]:
        """Return ``Found`` with what is read of each sample."""
        # A copy: the items of the plan stay as they are, for keys and for another read.
        items: list[Any] = [*items_of(indices)]
        groups: dict[int, list[int]] = {}
        for place, found in enumerate(items):
            groups.setdefault(found.part, []).append(place)
        reads = [self._read_part(number, places, [items[at].at for at in places]) for number, places in groups.items()]
        for places, values in zip(groups.values(), await asyncio.gather(*reads), strict=True):
            for place, value in zip(places, values, strict=True):
                items[place] = value if isinstance(value, BaseException) else items[place]._replace(value=value)
        return items

    async def _read_part(self, number: int, places: list[int], local: list[int]) -> Sequence[Any]:
        part = self.parts[number]
        if part.source.traits.indexed:
            return await part.read(Group(number, np.array(places), np.array(local)), places)
        assert part.source.read_many is not None
        found: Sequence[Any] = await part.source.read_many(local)
        return found


def _length(source: BaseSource) -> int:
    return len(source) if source.traits.indexed else 0


class MixedItems:
    """The samples of an epoch of a mixture, each as ``Found`` without what is read of it. Has a state."""

    def __init__(self, parts: Sequence[Part], drawing: Drawing, epoch: int) -> None:
        self._names, self._drawing = [part.name for part in parts], drawing
        self._courses: list[Course] = []
        for number, part in enumerate(parts):
            indexed = part.source.traits.indexed
            seed = drawing.seed ^ mix64(number) if drawing.shuffle else None
            self._courses.append(IndexCourse(part.source, epoch, seed) if indexed else Course(part.source, epoch))
        self._drawn = 0
        self._mix([*range(len(parts))])

    def _mix(self, left: list[int]) -> None:
        """Draw from those sources that are left."""
        self._left, self._place = left, 0
        weights = [self._drawing.weights[number] for number in left]
        self._weights = [str(weight) for weight in weights]
        self._interleaving = Interleaving(ConstantShares(weights), ShareBlocks(NEVER)) if left else None

    def __iter__(self) -> Iterator[Found]:
        try:
            while self._interleaving is not None and self._drawn != self._drawing.until:
                block, within = divmod(self._place, BLOCK)
                number = self._left[self._interleaving.block(block)[0][within]]
                try:
                    at = self._courses[number].next()
                except Exception as error:
                    raise self._read_error(number, error) from error
                if at is _END and self._drawing.at_end == "leave out":
                    self._mix([each for each in self._left if each != number])
                    continue
                if at is _END and (self._drawing.at_end == "stop" or self._all_ended(number)):
                    return
                if at is _END:
                    at = self._restarted(number)
                self._place, self._drawn = self._place + 1, self._drawn + 1
                yield Found(number, at, None)
        finally:
            for course in self._courses:
                course.close()

    def _read_error(self, number: int, error: Exception) -> FeedError:
        course = self._courses[number]
        key = f"{self._names[number]}: {course.source.key(course.taken)}"
        message = f"cannot read {key!r}: {format_error(error)}"
        return error if isinstance(error, FeedError) else ReadError(message, key=key, index=self._drawn, stage="read")

    def _all_ended(self, number: int) -> bool:
        """Return whether an epoch without a number of samples is over when this source has ended."""
        others = [course for each, course in enumerate(self._courses) if each != number]
        return self._drawing.until is None and all(course.passes for course in others)

    def _restarted(self, number: int) -> Any:
        course, most = self._courses[number], self._drawing.most[number]
        if most is not None and course.passes + 1 >= most:
            raise ValueError(
                f"the source {self._names[number]!r} has been passed through {counted(most, 'time')}, as often as "
                f"Mixture(max_repeats=) allows: give it less weight, or end the epoch earlier"
            )
        course.restart()
        if (at := course.next()) is _END:
            raise ValueError(f"the stream {self._names[number]!r} has no items: leave it out of the Mixture")
        return at

    def state_dict(self) -> dict[str, Any]:
        """Return where each source is, and where the mixture is since the last source has ended."""
        courses = {name: course.state() for name, course in zip(self._names, self._courses, strict=True)}
        left = [self._names[number] for number in self._left]
        return {"sources": courses, "left": left, "weights": self._weights, "place": self._place, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; with other weights, shares are counted from here on.

        Raises:
            StateError: It is of other sources.
        """
        if set(state["sources"]) != set(self._names):
            raise StateError(f"it is of the sources {[*state['sources']]}, and this Mixture has {self._names}")
        for name, course in zip(self._names, self._courses, strict=True):
            course.load(state["sources"][name])
        self._mix([number for number, name in enumerate(self._names) if name in state["left"]])
        self._drawn = state["drawn"]
        if self._weights == state["weights"]:
            self._place = state["place"]


class Course:
    """The passes through a stream in an epoch; pass n is as the first one of the epoch that is n later."""

    def __init__(self, source: Any, epoch: int) -> None:
        self.source: Any = source
        self._epoch = epoch
        self.passes: int = 0
        self.taken: int = 0
        self._iterator: Any = None
        self._stateful: Any = None
        # Of a pass that is not opened yet: a source that has ended is not read again.
        self._state: Any = None

    def _open(self, state: Any) -> None:
        """Begin the pass, or go on at its state, which the iterable has or its iterator."""
        iterable = self.source.open_epoch(self._epoch + self.passes)
        self._stateful = self._loaded(iterable, state)
        self._iterator = iter(iterable)
        if self._stateful is None:
            self._stateful = self._loaded(self._iterator, state)
        if state is None or self._stateful is None:
            for _ in islice(self._iterator, self.taken):
                pass

    def _loaded(self, stateful: Any, state: Any) -> Any:
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            return None
        if state is not None:
            stateful.load_state_dict(state)
        return stateful

    def next(self) -> Any:
        """Return the next item with its number, or ``_END``."""
        if self._iterator is None:
            self._open(self._state)
        if (item := next(self._iterator, _END)) is _END:
            return _END
        self.taken += 1
        return ItemNumber.of(self.taken - 1, item)

    def restart(self) -> None:
        """Begin the next pass."""
        self.close()
        self.passes, self.taken = self.passes + 1, 0
        self._iterator = self._stateful = self._state = None

    def state(self) -> dict[str, Any]:
        """Return the pass, the items of it that have been taken, and the state of the iterable, if it has one."""
        own = self._state if self._stateful is None else self._stateful.state_dict()
        return {"passes": self.passes, "taken": self.taken, "state": own}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.passes, self.taken, self._state = state["passes"], state["taken"], state["state"]

    def close(self) -> None:
        """Close the iterator, if it can be closed."""
        if (close := getattr(self._iterator, "close", None)) is not None:
            close()


class IndexCourse(Course):
    """The passes through a source with indices, shuffled anew in each if there is a seed."""

    def __init__(self, source: Any, epoch: int, seed: int | None) -> None:
        super().__init__(source, epoch)
        self._seed = seed

    def _open(self, state: Any) -> None:
        length = len(self.source)
        order = None if self._seed is None else feistel(length, self._seed, self._epoch + self.passes)

        def indices() -> Iterator[int]:
            for first in range(self.taken, length, BLOCK):
                places = np.arange(first, min(first + BLOCK, length))
                yield from (places if order is None else order(places)).tolist()

        self._iterator = indices()

    def next(self) -> Any:
        """Return the next index, or ``_END``."""
        at = super().next()
        return at if at is _END else at.item
