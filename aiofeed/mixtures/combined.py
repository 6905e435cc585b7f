"""Several sources as one, whose indices count through them in order: of one kind, of any kinds, or all Datasets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aiofeed.common.fingerprint import identity
from aiofeed.common.parts import Parts, in_order
from aiofeed.kernel.core.faces import BaseSource, BuildsBatches, Exclusion
from aiofeed.kernel.core.pytree import leaves
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import BatchPlan, Gathered, HostTensor, Traits
from aiofeed.kernel.engine.fetch.collate import BatchBuilder, Positions, SampleList
from aiofeed.kernel.runtime.cancellation import caught
from aiofeed.kernel.sampling.progress import digest
from aiofeed.kernel.sources.dataset import FromDataset, MapDataset
from aiofeed.kernel.sources.file_io import Content
from aiofeed.kernel.sources.subset import IndexedSource, kind_of, names_of
from aiofeed.mixtures.parts import At, Found, Keys, Part, check_forms, collated, form_of, may_fit, merged, text_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Combined:
    """Sources whose samples are numbered one source after the other."""

    def __init__(self, sources: Mapping[str, Any], names: bool) -> None:
        self._names, self._sources = list(sources), list(sources.values())
        self._parts = Parts(map(len, self._sources))
        self._adds_names = names

    def __len__(self) -> int:
        """Return the number of samples of all sources."""
        return len(self._parts)

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the lengths of the samples of all sources, if all know them."""
        found = [each for source in self._sources if (each := source.lengths(unit)) is not None]
        return np.concatenate(found) if len(found) == len(self._sources) else None

    def key(self, index: int, /) -> str:
        """Return the name of the source, and the sample's key in it."""
        number, local = self._parts.find(index)
        return f"{self._names[number]}: {self._sources[number].key(local)}"


class CombinedSource(_Combined, IndexedSource):
    """Sources of bytes, or of rows, as one; one ``decode=`` of the feeder is for all."""

    excluded: ClassVar[Sequence[Exclusion]] = (
        (("sources with different samples",), ("no decode=",), TypeError,
         "their samples do not fit into one batch: choose equal columns, make them alike with Mixture(decode={...}), "
         "or pass collate_fn="),
    )  # fmt: skip

    def __init__(self, parts: Sequence[Part], names: bool) -> None:
        super().__init__({part.name: part.source for part in parts}, names)
        self.parts: list[Part] = list(parts)
        kinds = {source.traits.decode for source in self._sources}
        self.traits: Traits = Traits(decode="needed" if len(kinds) > 1 else kinds.pop())
        self.decoder: Any = self._sources[0].decoder
        without = [part.name for part in parts if part.source.target is None]
        if without and len(without) < len(parts):
            raise ValueError(
                f"Mixture: the sources {without} have no targets, and the others have: give all of them, or pass "
                f"Mixture(decode={{...}}), whose functions make samples alike"
            )
        self._has_targets = not without
        if self._has_targets or names:
            self.target: Callable[[int], Any] | None = self._target
        self._set_members()

    def _set_members(self) -> None:
        """Set the members that all sources have."""
        if all(source.version for source in self._sources):
            self.version: Callable[[int], str] = self._version
        if all(source.nbytes for source in self._sources):
            self.nbytes: Callable[[int], int] = self._nbytes
        if all(source.read_now for source in self._sources):
            self.read_now: Callable[[Sequence[int]], list[Any]] = self._read_now
        shards = [source.shard_starts for source in self._sources]
        if all(starts is not None for starts in shards):
            firsts = [
                np.asarray(starts)[:-1] + first for starts, first in zip(shards, self._parts.starts, strict=False)
            ]
            self.shard_starts: NDArray[np.int64] = np.concatenate([*firsts, [len(self)]])
        self.reads_whole_shards: bool = any(source.reads_whole_shards for source in self._sources)
        self.shards_at_once: int = max(source.shards_at_once for source in self._sources)

    @property
    def looks_ahead(self) -> bool:
        """Whether samples of each source should be read before their batches begin."""
        return self.shard_starts is not None and all(source.looks_ahead for source in self._sources)

    def _nbytes(self, index: int, /) -> int:
        number, local = self._parts.find(index)
        found: int = self._sources[number].nbytes(local)
        return found

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self._names)})"

    def structure(self) -> Mapping[str, Sequence[int] | None] | None:
        """Return the columns of the first source."""
        found: Mapping[str, Sequence[int] | None] | None = self._sources[0].structure()
        return found

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return whether the samples of two sources are known to differ."""
        known = [(part.name, found) for part in self.parts if (found := part.described()) is not None]
        (first, one), *others = known or [("", None)]
        differ = next((each for each in others if not may_fit(one, each[1])), None)
        if differ is None or arguments.collate_fn is not None:
            return {}
        words = f"Mixture of {first!r} with samples {text_of(one)} and {differ[0]!r} with {text_of(differ[1])}"
        return {"sources with different samples": words}

    def in_batches(self) -> BaseSource:
        """Return the sources with batches that each of them gathers; itself if none does."""
        gathers = not self.traits.items and all(part.in_batches().together for part in self.parts)
        return MixedSource(self.parts, self._adds_names).in_batches() if gathers else self

    def fingerprint(self) -> str:
        """Identifies all sources, with their names."""
        return digest(
            *[
                f"{name}={names_of(source, len(source))}"
                for name, source in zip(self._names, self._sources, strict=True)
            ]
        )

    def content_parts(self) -> list[Content]:
        """Return those of all sources."""
        return [part for source in self._sources for part in source.content_parts()]

    def _version(self, index: int, /) -> str:
        number, local = self._parts.find(index)
        source = self._sources[number]
        return f"{kind_of(source)} {source.version(local)}"

    def _target(self, index: int, /) -> Any:
        number, local = self._parts.find(index)
        if not self._has_targets:
            return self._names[number]
        target = self._sources[number].target(local)
        return (target, self._names[number]) if self._adds_names else target

    def storage_statistics(self) -> StorageStatistics | None:
        """Return the requests of all sources together."""
        asked = [source.storage_statistics() for source in self._sources]
        return StorageStatistics.joined([found for found in asked if found is not None])

    async def read(self, index: int, /) -> Any:
        """Read a sample."""
        number, local = self._parts.find(index)
        return await self._sources[number].read(local)

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Read several samples, those of each source together."""
        return await self.read_planned(indices, None, range(len(indices)))

    async def read_planned(self, indices: Sequence[int], plan: BatchPlan | None, places: Sequence[int]) -> list[Any]:
        """``read_many`` for a batch that has the samples at ``places``."""
        given = places

        async def read_part(number: int, places: list[int], local: list[int]) -> tuple[list[int], Sequence[Any]]:
            return places, await self._read_part(number, local, plan, [given[place] for place in places])

        parts = [caught(read_part(number, *part)) for number, part in self._parts.group(indices).items()]
        async with asyncio.TaskGroup() as group:
            reads = [group.create_task(part) for part in parts]
        for error in [error for _, error in (read.result() for read in reads) if error is not None]:
            raise error
        return in_order(len(indices), [read.result()[0] for read in reads])

    async def _read_part(
        self, number: int, local: Sequence[int], plan: BatchPlan | None, places: Sequence[int]
    ) -> Sequence[Any]:
        return await self.parts[number].read(local, plan, places)

    @property
    def answers_at_once(self) -> bool:
        """Whether every source does."""
        return all(source.answers_at_once for source in self._sources)

    def _read_now(self, indices: Sequence[int], /) -> list[Any]:
        groups = self._parts.group(indices).items()
        return in_order(
            len(indices), [(places, self._sources[number].read_now(local)) for number, (places, local) in groups]
        )

    async def open(self) -> None:
        """Open every source."""
        for source in self._sources:
            await source.open()

    async def aclose(self) -> None:
        """Close every source."""
        for source in self._sources:
            await source.aclose()


class MixedSource(CombinedSource):
    """Sources of any kinds as one: each reads, gathers and decodes its samples as it does alone."""

    traits: Traits = Traits(decode="none")
    excluded: ClassVar[Sequence[Exclusion]] = (
        *CombinedSource.excluded,
        (("EncodedCache",), ("sources with decoders of their own",), TypeError,
         "it keeps the bytes that a source reads: give the sources that are far away a cache of their own"),
    )  # fmt: skip
    collate: Any = None

    def __init__(self, parts: Sequence[Part], names: bool) -> None:
        _Combined.__init__(self, {part.name: part.source for part in parts}, names)
        self.parts: list[Part] = list(parts)
        self.decoder: MixedDecoder = MixedDecoder(self)
        self.new_gathered: Any = partial(MixedGathered, self)
        self._reads: Iterator[int] = count()
        self._set_members()

    def __reduce__(self) -> tuple[Any, ...]:
        return _mixed, (self.parts, self._adds_names, self.collate is not None)

    @property
    def looks_ahead(self) -> bool:
        """Whether a source should be read before its batches begin."""
        return any(source.looks_ahead for source in self._sources)

    @property
    def gathered_bytes(self) -> float:
        """Encoded bytes of a sample on average, as far as they are known."""
        known = [
            len(source) * float(source.gathered_bytes or (source.nbytes(0) if source.nbytes else 0))
            for source in self._sources
        ]
        return max(sum(known) / len(self), 1.0)

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return that sources have decoders, and whether their samples are known to differ."""
        return {**super().facts(arguments), "sources with decoders of their own": repr(self)}

    def structure(self) -> Mapping[Any, Sequence[int] | None] | None:
        """Return the columns of the first source, if they are those of its samples."""
        return None if self._adds_names or self.parts[0].decode else super().structure()

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the lengths of the samples of all sources, if none is decoded by a function of the user."""
        return None if any(part.decode for part in self.parts) else super().lengths(unit)

    def in_batches(self) -> BaseSource:
        """Return the source of which batches are gathered by each source that can do it."""
        return _mixed([part.in_batches() for part in self.parts], self._adds_names, True)

    async def _read_part(
        self, number: int, local: Sequence[int], plan: BatchPlan | None, places: Sequence[int]
    ) -> Sequence[Any]:
        return self._found(number, local, await super()._read_part(number, local, plan, places))

    def _read_now(self, indices: Sequence[int], /) -> list[Any]:
        groups = self._parts.group(indices).items()
        read = [
            (places, self._found(number, local, self._sources[number].read_now(local)))
            for number, (places, local) in groups
        ]
        return in_order(len(indices), read)

    def _found(self, number: int, local: Sequence[int], values: Sequence[Any]) -> list[Any]:
        return [
            value if isinstance(value, BaseException) else Found(number, index, value)
            for index, value in zip(local, values, strict=True)
        ]

    async def read(self, index: int, /) -> Any:
        """Read a sample."""
        [found] = await self.read_planned([index], None, [0])
        if isinstance(found, BaseException):
            raise found
        return found

    async def gather_ahead(self, indices: Any, targets: Any, run: Any, shard: int) -> None:
        """Read samples of a shard of a source, or those of a source without shards in one batch."""
        shard, number = divmod(shard, len(self.parts))
        part, local = self.parts[number], np.asarray(indices) - self._parts.starts[number]
        own = part.source
        if own.new_gathered is not None and (own.gather_several or own.gather_ahead):
            within = [target.within(number, places) for target, places in targets]
            if own.gather_several is not None:
                await own.gather_several({shard: within}, run)
            elif own.gather_ahead is not None:
                await own.gather_ahead(local, within, run, shard)
            return
        first, places = targets[0]
        plan = None if part.source.looks_ahead else first.plan
        values = iter(await self._read_part(number, local.tolist(), plan, places.tolist()))
        for target, at in targets:
            target.put(at.tolist(), values)


def _mixed(parts: Sequence[Part], names: bool, batches: bool) -> MixedSource:
    found = MixedSource(parts, names)
    found.collate = MixedBatches(found) if batches else None
    return found


class MixedDecoder:
    """Decodes a sample with the decoder of its source, and adds the source's name."""

    def __init__(self, source: MixedSource) -> None:
        self._source = source
        self.takes_seed: bool = any(part.takes_rng for part in source.parts)

    def __repr__(self) -> str:
        return f"MixedDecoder({', '.join(self._source._names)})"

    def fingerprint(self) -> str:
        """Identifies the decoders of all sources."""
        parts = [(part.name, [identity(each.call) for each in part.decoders]) for part in self._source.parts]
        return f"MixedDecoder {parts} {self._source._adds_names}"

    def __call__(self, found: Found, /, *, rng: Any = None) -> Any:
        """Return the sample; for batches that are gathered, what was read of it or its sample."""
        source = self._source
        part = source.parts[found.part]
        if part.together:
            return found
        sample = part.sample(found, rng)
        if source.collate is not None:
            return found._replace(value=sample)
        return _with_name(sample, part.name) if source._adds_names else sample


class MixedGathered(Gathered):
    """The samples of a batch, which each source reads ahead or gathers in its own way."""

    def __init__(self, source: MixedSource, indices: Any, memory: Any, plan: BatchPlan) -> None:
        super().__init__(len(indices))
        self.nbytes: int = 0
        self.seconds: float = 0.0
        self.cpu_seconds: float = 0.0
        self.plan: BatchPlan = plan
        self._source = source
        self._values: list[Any] = [None] * len(indices)
        self._own: dict[int, tuple[NDArray[np.int64], Sequence[int], Gathered]] = {}
        needs = []
        for number, (places, local) in source._parts.group(np.asarray(indices).tolist()).items():
            part, at = source.parts[number].source, np.array(places)
            shards = np.full(len(local), next(source._reads))
            if part.looks_ahead and part.shard_starts is not None:
                shards = np.searchsorted(np.asarray(part.shard_starts), local, side="right")
                if (new_gathered := part.new_gathered) is not None:
                    positions = [plan.positions[place] for place in places]
                    gathered = new_gathered(np.array(local), memory, replace(plan, indices=local, positions=positions))
                    self._own[number] = at, local, gathered
                    if gathered.shards is not None:
                        at, shards = at[gathered.shards[0]], gathered.shards[1]
            needs.append((at, shards * len(source.parts) + number))
        at, shards = (np.concatenate(each) for each in zip(*needs, strict=True))
        self.shards: tuple[NDArray[np.int64], NDArray[np.int64]] | None = (at, shards)

    @property
    def errors(self) -> Mapping[int, Exception]:  # type: ignore[override]
        """The errors of all sources, by place."""
        found = {at: value for at, value in enumerate(self._values) if isinstance(value, Exception)}
        for places, _, gathered in self._own.values():
            found |= {int(places[at]): error for at, error in gathered.errors.items()}
        return found

    def within(self, number: int, places: NDArray[np.int64]) -> tuple[Gathered, NDArray[np.int64]]:
        """Return what a source gathers, and these places of the batch in it."""
        own, _, gathered = self._own[number]
        return gathered, np.searchsorted(own, places)

    def put(self, places: Sequence[int], values: Iterator[Any]) -> None:
        """Store samples that were read."""
        for place in places:
            self._values[place] = next(values)

    def __iter__(self) -> Iterator[Any]:
        values = list(self._values)
        for number, (places, local, gathered) in self._own.items():
            together = self._source.parts[number].together
            samples = [At(gathered, at) for at in range(len(local))] if together else list(gathered)
            for at, (place, sample) in enumerate(zip(places.tolist(), samples, strict=True)):
                values[place] = gathered.errors.get(at) or (
                    sample if isinstance(sample, Exception) else Found(number, local[at], sample)
                )
            self.nbytes += gathered.nbytes
            self.seconds += gathered.seconds
            self.cpu_seconds += gathered.cpu_seconds
        return iter(values)


class MixedBatches(BuildsBatches):
    """Makes the batches of a mixture, of those of its sources."""

    def __init__(self, source: MixedSource) -> None:
        self._source = source

    def new_builder(self, plan: BatchPlan, lease: Any, /) -> BatchBuilder:
        """Return a builder of a planned batch."""
        return MixedBuilder(len(plan.indices), self._source, lease)

    def build(self, found: Sequence[Found], keys: Sequence[str], lease: Any) -> Any:
        """Return the batch of samples.

        Raises:
            CollateError: Those of two sources do not fit together.
        """
        groups: dict[int, list[int]] = {}
        for place, (number, _, _) in enumerate(found):
            groups.setdefault(number, []).append(place)
        parts, together, singly, forms = self._source.parts, [], [], []
        for number, places in sorted(groups.items()):
            if parts[number].together:
                batch = parts[number].batch([found[at] for at in places], Keys(keys, places), lease)
                together.append((places, batch))
                forms.append((parts[number].name, form_of(batch, 1), places[0]))
            else:
                singly += places
                forms.append((parts[number].name, form_of(found[places[0]].value), places[0]))
        check_forms(forms, keys)
        if singly:
            singly.sort()
            batch = collated([found[at].value for at in singly], Keys(keys, singly), lease)
            together.append((singly, batch))
        batch = together[0][1]
        if len(together) > 1:
            batch = merged([batch for _, batch in together], [places for places, _ in together], lease)
        names = [parts[number].name for number, _, _ in found]
        return _batch_with_names(batch, names) if self._source._adds_names else batch


class MixedBuilder(SampleList):
    """Builder of a batch of a mixture."""

    def __init__(self, samples: int, source: MixedSource, lease: Any) -> None:
        super().__init__(samples)
        self._source, self._lease = source, lease
        self.nbytes: int = 0

    def _build(self, keys: Sequence[str], positions: Positions) -> Any:
        samples = super()._build(keys, positions)
        named = keys if positions is None else Keys(keys, positions)
        self.samples: list[Any] = []
        self.kept: list[Any] | None = None
        assert self._source.collate is not None
        batch = self._source.collate.build(samples, named, self._lease)
        self.nbytes = sum(leaf.memory.nbytes for leaf in leaves(batch) if type(leaf) is HostTensor)
        return batch


class CombinedDatasets(FromDataset):
    """Datasets as one, called by as many threads as each of them allows."""

    def __init__(self, parts: Mapping[str, FromDataset], names: bool) -> None:
        given = {name: part.fingerprint() for name, part in parts.items()}
        self._items = CombinedDataset(parts, names)
        super().__init__(
            self._items,
            threads=min((part.threads for part in parts.values() if part.threads), default="auto"),
            setup=CombinedDataset.set_up,
            fingerprint=None if None in given.values() else digest(*[f"{name}={own}" for name, own in given.items()]),
        )

    def key(self, index: int, /) -> str:
        """Return the name of the source, and the sample's key in it."""
        return self._items.key(index)

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the lengths of the samples of all Datasets, if all are known."""
        return self._items.lengths(unit)


class CombinedDataset(_Combined):
    """The items of several datasets."""

    def __init__(self, datasets: Mapping[str, FromDataset], names: bool) -> None:
        self.datasets: dict[str, MapDataset[Any]] = {name: source.given for name, source in datasets.items()}
        super().__init__(datasets, names)
        if any(hasattr(source.given, "__getitems__") for source in self._sources):
            self.__getitems__: Callable[[Sequence[int]], list[Any]] = self._items

    def set_up(self) -> None:
        """Call the ``setup`` hooks of the parts in this thread."""
        for source in self._sources:
            source.set_up()

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return self._items([index])[0]

    def _items(self, indices: Sequence[int]) -> list[Any]:
        found = []
        for number, (places, local) in self._parts.group(indices).items():
            items = self._sources[number].items(local)
            found.append(
                (places, [_with_name(item, self._names[number]) for item in items] if self._adds_names else items)
            )
        return in_order(len(indices), found)


def _with_name(item: Any, name: str) -> Any:
    if isinstance(item, Mapping):
        return {**item, "source": name}
    if isinstance(item, tuple | list):
        return (*item, name)
    return (item, name)


def _batch_with_names(batch: Any, names: list[str]) -> Any:
    if isinstance(batch, Mapping):
        return {**batch, "source": names}
    return [*batch, tuple(names)] if isinstance(batch, list | tuple) else [batch, tuple(names)]
