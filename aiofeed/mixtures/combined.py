"""Several sources as one, whose indices count through them in order: of one kind, of any kinds, or all Datasets."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aiofeed.common.fingerprint import identity
from aiofeed.common.parts import in_order
from aiofeed.kernel.core.faces import BaseSource, BuildsBatches, Exclusion
from aiofeed.kernel.core.pytree import leaves, map_leaves
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import BatchPlan, Gathered, HostTensor, Traits
from aiofeed.kernel.engine.fetch.collate import CollateBatchBuilder, DefaultCollateBuilder, Positions, pick
from aiofeed.kernel.runtime.cancellation import caught
from aiofeed.kernel.sampling.progress import digest
from aiofeed.kernel.sources.dataset import FromDataset, MapDataset
from aiofeed.kernel.sources.file_io import Content
from aiofeed.kernel.sources.subset import IndexedSource, kind_of, names_of
from aiofeed.mixtures.parts import Found, Group, Part, array_of, check_forms, form_of, may_fit, merged, text_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Combined:
    """Sources whose samples are numbered one source after the other."""

    def _combine(self, parts: Sequence[Part], names: bool) -> None:
        self.parts: list[Part] = list(parts)
        self._adds_names = names
        self._sources: list[Any] = [part.source for part in parts]
        self._starts: NDArray[np.int64] = np.cumsum([0, *map(len, self._sources)])
        self._bounds: list[int] = self._starts.tolist()
        self._numbers = np.min_scalar_type(len(parts))  # stable sorts of a small type are fast

    def __len__(self) -> int:
        """Return the number of samples of all sources."""
        return self._bounds[-1]

    def _find(self, index: int) -> tuple[int, int]:
        """Return the number of the part of an index, and the index in it."""
        number = bisect_right(self._bounds, index) - 1
        return number, index - self._bounds[number]

    def _groups(self, indices: Any, plan: BatchPlan | None = None) -> list[Group]:
        """Return the samples of each part."""
        rows = np.asarray(indices, np.int64)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(numbers.astype(self._numbers), kind="stable")
        found, stop = [], 0
        for number, size in enumerate(np.bincount(numbers).tolist()):
            if size:
                places = order[stop : stop + size]
                found.append(Group(number, places, rows[places] - self._bounds[number], plan))
                stop += size
        return found

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the lengths of the samples of all sources, if these are known and no function changes samples."""
        known = [source.lengths(unit) for source in self._sources if not any(part.decode for part in self.parts)]
        return None if not known or any(each is None for each in known) else np.concatenate(known)

    def key(self, index: int, /) -> str:
        """Return the name of the source, and the sample's key in it."""
        number, local = self._find(index)
        return f"{self.parts[number].name}: {self._sources[number].key(local)}"


class SeveralSources:
    """What a source that reads several others passes on to all of them."""

    parts: list[Part]

    def content_parts(self) -> list[Content]:
        """Return those of all sources."""
        return [content for part in self.parts for content in part.source.content_parts()]

    def storage_statistics(self) -> StorageStatistics | None:
        """Return the requests of all sources together."""
        asked = [part.source.storage_statistics() for part in self.parts]
        return StorageStatistics.joined([found for found in asked if found is not None])

    async def open(self) -> None:
        """Open every source."""
        for part in self.parts:
            await part.source.open()

    async def aclose(self) -> None:
        """Close every source."""
        for part in self.parts:
            await part.source.aclose()


class MixedSource(_Combined, SeveralSources, IndexedSource):
    """Sources of any kinds as one.

    Args:
        parts: The sources.
        names: Whether samples have the names of their sources.
        own: Whether each source reads, gathers and decodes its samples as it does alone; otherwise one decoder is for
            all: ``decode=`` of the feeder, or that which all of them have.
        batches: Whether batches are gathered by each source that can do it.
    """

    excluded: ClassVar[Sequence[Exclusion]] = (
        (("sources with different samples",), ("no decode=",), TypeError,
         "their samples do not fit into one batch: choose equal columns, make them alike with Mixture(decode={...}), "
         "or pass collate_fn="),
        (("EncodedCache",), ("sources with decoders of their own",), TypeError,
         "it keeps the bytes that a source reads: give the sources that are far away a cache of their own"),
    )  # fmt: skip
    collate: Any = None

    def __init__(self, parts: Sequence[Part], names: bool, own: bool, batches: bool = False) -> None:
        self._combine(parts, names)
        self._own, self._reads = own, count()
        sources, kinds = self._sources, {source.traits.decode for source in self._sources}
        self.together: bool = batches and all(part.together for part in parts)
        self.traits: Traits = Traits(decode="needed" if len(kinds) > 1 else kinds.pop())
        self.decoder: Any = sources[0].decoder
        if own:
            self.traits = Traits(decode="none", rows=self.together)
            self.decoder = None if self.together else MixedDecoder(self)
            self.collate = MixedBatches(self) if batches else None
            self.new_gathered: Any = self._new_gathered
        else:
            self._set_targets()
        if all(source.version for source in sources):
            self.version: Callable[[int], str] = self._version
        if all(source.nbytes for source in sources):
            self.nbytes: Callable[[int], int] = self._nbytes
        if all(source.read_now for source in sources):
            self.read_now: Callable[[Sequence[int]], Any] = self._read_now
        # Parts of sources find them anew each time.
        self._shards = [None if (starts := each.shard_starts) is None else np.asarray(starts) for each in sources]
        if all(starts is not None for starts in self._shards):
            each = zip(self._shards, self._bounds, strict=False)
            firsts = [starts[:-1] + first for starts, first in each if starts is not None]
            self.shard_starts: NDArray[np.int64] = np.concatenate([*firsts, [len(self)]])
        self.reads_whole_shards: bool = any(source.reads_whole_shards for source in sources)
        self.shards_at_once: int = max(source.shards_at_once for source in sources)
        self.shards_per_read: int = max(source.shards_per_read for source in sources)

    def _set_targets(self) -> None:
        without = [part.name for part in self.parts if part.source.target is None]
        if without and len(without) < len(self.parts):
            raise ValueError(
                f"Mixture: the sources {without} have no targets, and the others have: give all of them, or pass "
                f"Mixture(decode={{...}}), whose functions make samples alike"
            )
        self._has_targets = not without
        if self._has_targets or self._adds_names:
            self.target: Callable[[int], Any] | None = self._target

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedSource, (self.parts, self._adds_names, self._own, self.collate is not None)

    def __repr__(self) -> str:
        return f"Mixture({', '.join(part.name for part in self.parts)})"

    # --- what it is

    @property
    def looks_ahead(self) -> bool:
        """Whether samples should be read before their batches begin: those of any source that gathers by itself."""
        ahead = [source.looks_ahead for source in self._sources]
        return any(ahead) if self._own else self.shard_starts is not None and all(ahead)

    @property
    def answers_at_once(self) -> bool:
        """Whether every source does."""
        return all(source.answers_at_once for source in self._sources)

    @property
    def gathered_bytes(self) -> float:
        """Encoded bytes of a sample on average, as far as they are known."""
        each = [source.gathered_bytes or (source.nbytes(0) if source.nbytes else 0) for source in self._sources]
        return max(float(np.dot(np.diff(self._starts), each)) / len(self), 1.0)

    def structure(self) -> Mapping[Any, Sequence[int] | None] | None:
        """Return the columns of the first source, if they are those of its samples."""
        others = self.parts[0].decode or (self._own and self._adds_names)
        found: Mapping[Any, Sequence[int] | None] | None = None if others else self._sources[0].structure()
        return found

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return that sources have decoders, and whether the samples of two sources are known to differ."""
        facts = {"sources with decoders of their own": repr(self)} if self._own else {}
        known = [(part.name, found) for part in self.parts if (found := part.described()) is not None]
        (first, one), *others = known or [("", None)]
        differ = next((each for each in others if not may_fit(one, each[1])), None)
        if differ is not None and arguments.collate_fn is None:
            words = f"Mixture of {first!r} with samples {text_of(one)} and {differ[0]!r} with {text_of(differ[1])}"
            facts["sources with different samples"] = words
        return facts

    def fingerprint(self) -> str:
        """Identifies all sources, with their names."""
        return digest(*[f"{part.name}={names_of(part.source, len(part.source))}" for part in self.parts])

    def _nbytes(self, index: int, /) -> int:
        number, local = self._find(index)
        return self._sources[number].nbytes(local)  # type: ignore[no-any-return]

    def _version(self, index: int, /) -> str:
        number, local = self._find(index)
        return f"{kind_of(self._sources[number])} {self._sources[number].version(local)}"

    def _target(self, index: int, /) -> Any:
        number, local = self._find(index)
        if not self._has_targets:
            return self.parts[number].name
        target = self._sources[number].target(local)
        return (target, self.parts[number].name) if self._adds_names else target

    # --- samples

    async def read(self, index: int, /) -> Any:
        """Read a sample."""
        [found] = await self.read_planned([index], None, [0])
        if isinstance(found, BaseException):
            raise found
        return found

    async def read_many(self, indices: Sequence[int], /) -> Sequence[Any]:
        """Read several samples, those of each source together."""
        return await self.read_planned(indices, None, range(len(indices)))

    async def read_planned(
        self, indices: Sequence[int], plan: BatchPlan | None, places: Sequence[int]
    ) -> Sequence[Any]:
        """``read_many`` for a batch that has the samples at ``places``."""
        groups, given = self._groups(indices, plan), np.asarray(places)
        reads = [self._read_group(each, given[each.places].tolist()) for each in groups]
        for error in await asyncio.gather(*reads):
            if error is not None:
                raise error
        return self._result(groups, len(indices))

    async def _read_group(self, group: Group, places: Sequence[int]) -> BaseException | None:
        # A task that is cancelled before it begins leaves no coroutine behind.
        group.values, error = await caught(self.parts[group.number].read(group, places))
        return error

    def _read_now(self, indices: Sequence[int], /) -> Sequence[Any]:
        return self._result(self._groups_now(indices), len(indices))

    def _groups_now(self, indices: Any) -> list[Group]:
        groups = self._groups(indices)
        for group in groups:
            group.values = self.parts[group.number].read_now(group.local)
        return groups

    def _result(self, groups: Sequence[Group], count: int) -> Sequence[Any]:
        if not self._own:
            return in_order(count, [(group.places.tolist(), group.values) for group in groups])
        found = MixedGathered(self, groups, count)
        return found if self.together and not found.errors else list(found)

    # --- reads ahead

    def _new_gathered(self, indices: Any, memory: Any, plan: BatchPlan) -> MixedGathered:
        found, needs = MixedGathered(self, self._groups(indices, plan), len(indices)), []
        for number, group in found.groups.items():
            source, at = self._sources[number], group.places
            group.values, shards = [None] * len(at), np.full(len(at), next(self._reads))
            if (starts := self._shards[number]) is not None and source.looks_ahead:
                shards = np.searchsorted(starts, group.local, side="right")
                if (new_gathered := source.new_gathered) is not None:
                    positions = [plan.positions[place] for place in at.tolist()]
                    own = replace(plan, indices=group.local.tolist(), positions=positions)
                    group.values = new_gathered(group.local, memory, own)
                    if group.values.shards is not None:
                        at, shards = at[group.values.shards[0]], group.values.shards[1]
            needs.append((at, shards * len(self.parts) + number))
        places, numbers = (np.concatenate(each) for each in zip(*needs, strict=True))
        found.shards = places, numbers
        return found

    async def gather_several(self, shards: Mapping[int, Any], run: Any) -> None:
        """Read samples of shards of sources, and those of sources without shards, each in one batch."""
        parts: dict[int, dict[int, Any]] = {}
        for shard, targets in shards.items():
            own, number = divmod(shard, len(self.parts))
            groups = [(gathered.groups[number], places) for gathered, places in targets]
            parts.setdefault(number, {})[own] = [(each, np.searchsorted(each.places, at)) for each, at in groups]
        await asyncio.gather(*[self.parts[number].gather(each, run) for number, each in parts.items()])

    # --- batches

    def in_batches(self) -> BaseSource:
        """Return the sources with batches that each of them gathers; itself if one decoder is for all samples."""
        parts = [part.in_batches() for part in self.parts]
        gathers = self._own or all(part.together for part in parts)
        return MixedSource(parts, self._adds_names, True, batches=True) if gathers else self

    def for_memory(self, nbytes: int, /) -> MixedSource:
        """Return the sources that may keep their data in memory, each its share of ``nbytes``."""
        parts = [
            Part(each.name, each.source.for_memory(nbytes * len(each.source) // len(self)), each.decode, each.together)
            for each in self.parts
        ]
        found = MixedSource(parts, self._adds_names, self._own, self.collate is not None)
        found.collate = self.collate  # by which the feeder knows its own
        return found

    def load(self, places: int, /) -> bool:
        """Read the data that stay in memory; return whether all are there."""
        shares = [-(-places * len(source) // len(self)) for source in self._sources]
        loaded = [source.load(share) for source, share in zip(self._sources, shares, strict=True)]
        return all(loaded)

    @property
    def in_memory(self) -> bool:
        """Whether batches are gathered from memory by all sources."""
        return self.together and all(part.in_memory for part in self.parts)

    @property
    def sample_bytes(self) -> int:
        """Bytes of the largest samples."""
        return max(int(source.sample_bytes) for source in self._sources)

    def gathered(self, indices: NDArray[np.int64], memory: Any) -> list[NDArray[Any]]:
        """Return the rows of each tensor of a batch, and which source each is from."""
        groups = self._groups_now(indices)
        batch = self.collate.gathered(groups, memory)
        self._form = map_leaves(lambda _: None, batch)  # without the memory, which is used again
        numbers = [_numbers_of(groups)] if self._adds_names else []
        return [*map(array_of, leaves(batch)), *numbers]

    def form_batch(self, rows: Sequence[Any]) -> Any:
        """Return the batch of the tensors of rows."""
        each = iter(rows)
        batch = map_leaves(lambda _: next(each), self._form)
        return self.collate.named(batch, rows[-1].tolist() if self._adds_names else ())


def _numbers_of(groups: Sequence[Group]) -> NDArray[np.int64]:
    found = np.empty(sum(len(group.places) for group in groups), np.int64)
    for group in groups:
        found[group.places] = group.number
    return found


class MixedDecoder:
    """Decodes a sample with the decoder of its source, and adds the source's name."""

    def __init__(self, source: MixedSource) -> None:
        self._source = source
        self.takes_seed: bool = any(part.takes_rng for part in source.parts)

    def __repr__(self) -> str:
        return f"MixedDecoder({', '.join(part.name for part in self._source.parts)})"

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
    """The samples of a batch, which each source reads or gathers in its own way."""

    def __init__(self, source: MixedSource, groups: Sequence[Group], count: int) -> None:
        super().__init__(count)
        self._source = source
        self.groups: dict[int, Group] = {group.number: group for group in groups}

    def _own(self) -> list[Gathered]:
        return [group.values for group in self.groups.values() if isinstance(group.values, Gathered)]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Encoded bytes that sources which gather have read."""
        return sum(each.nbytes for each in self._own())

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """What decoding them took."""
        return sum(each.seconds for each in self._own())

    @property
    def cpu_seconds(self) -> float:  # type: ignore[override]
        """What of that was processor time."""
        return sum(each.cpu_seconds for each in self._own())

    @property
    def errors(self) -> Mapping[int, Exception]:  # type: ignore[override]
        """The errors of all sources, by place."""
        found: dict[int, Exception] = {}
        for group in self.groups.values():
            values = group.values
            own = values.errors if isinstance(values, Gathered) else dict(enumerate(values))
            found |= {int(group.places[at]): each for at, each in own.items() if isinstance(each, Exception)}
        return found

    def __iter__(self) -> Iterator[Any]:
        found: list[Any] = [None] * len(self)
        for number, group in self.groups.items():
            for place, at, value in zip(group.places.tolist(), group.local.tolist(), group.values, strict=True):
                found[place] = value if isinstance(value, BaseException) else Found(number, at, value)
        return iter(found)

    def batch(self, lease: Any) -> tuple[Any, int]:
        """Return the batch, in memory of a lease, and its bytes."""
        groups, batches = [*self.groups.values()], self._source.collate
        batch = batches.gathered(groups, lease)
        numbers = _numbers_of(groups).tolist() if self._source._adds_names else ()
        return batches.named(batch, numbers), _nbytes_of(batch)


def _nbytes_of(batch: Any) -> int:
    return sum(leaf.memory.nbytes for leaf in leaves(batch) if type(leaf) is HostTensor)


class MixedBatches(BuildsBatches):
    """Makes the batches of a mixture, of those of its sources."""

    def __init__(self, source: MixedSource) -> None:
        self._source = source

    def new_builder(self, plan: BatchPlan, lease: Any, /) -> MixedBuilder:
        """Return a builder of a planned batch."""
        return MixedBuilder(len(plan.indices), self, lease)

    def gathered(self, groups: Sequence[Group], lease: Any) -> Any:
        """Return the batch of what sources have gathered, without names.

        Raises:
            CollateError: The samples of two sources do not fit together.
        """
        source = self._source
        batches = [source.parts[group.number].batch(group.values, lease) for group in groups]
        forms = [
            (source.parts[group.number].name, form_of(batch, 1), source._bounds[group.number] + int(group.local[0]))
            for group, batch in zip(groups, batches, strict=True)
        ]
        check_forms(forms, source.key)
        return merged(batches, [group.places for group in groups], lease)

    def build(self, found: Sequence[Found], keys: Sequence[str], lease: Any) -> Any:
        """Return the batch of samples, of which some are gathered together; raises as ``gathered``."""
        source, groups = self._source, dict[int, list[int]]()
        for place, each in enumerate(found):
            groups.setdefault(each.part, []).append(place)
        batches, places, singly, forms = list[Any](), list[Any](), list[int](), []
        for number, at in sorted(groups.items()):
            part, value = source.parts[number], found[at[0]].value
            if part.together:
                batches.append(part.batch([found[place].value for place in at], lease))
                places.append(at)
            else:
                singly += at
            form = form_of(batches[-1], 1) if part.together else form_of(value)
            forms.append((part.name, form, at[0]))
        check_forms(forms, keys.__getitem__)
        if singly:
            singly.sort()
            builder = DefaultCollateBuilder(len(found), lease, may_keep=True)
            for place in singly:
                builder.put(place, found[place].value)
            places.append(singly)
            batches.append(builder.finish(keys, singly if batches else None))
        return self.named(merged(batches, places, lease), [each.part for each in found])

    def named(self, batch: Any, numbers: Sequence[int]) -> Any:
        """Return a batch with the names of the sources of its samples, if they are wanted."""
        if not self._source._adds_names:
            return batch
        names = [self._source.parts[number].name for number in numbers]
        if isinstance(batch, Mapping):
            return {**batch, "source": names}
        return [*batch, tuple(names)] if isinstance(batch, list | tuple) else [batch, tuple(names)]


class MixedBuilder(CollateBatchBuilder):
    """Builder of a batch of a mixture."""

    def __init__(self, samples: int, batches: MixedBatches, lease: Any) -> None:
        super().__init__(samples, batches.build, lease, staged=True)  # type: ignore[arg-type]
        self._batches = batches

    def _build(self, keys: Sequence[str], positions: Positions) -> Any:
        if self._gathered is not None:
            return super()._build(keys, positions)
        samples = pick(self.samples, positions)
        self.samples: list[Any] = []
        self.kept: list[Any] | None = None
        batch = self._batches.build(samples, keys if positions is None else pick(keys, positions), self._lease)
        self.nbytes: int = _nbytes_of(batch)
        return batch


class CombinedDatasets(FromDataset):
    """Datasets as one, called by as many threads as each of them allows."""

    def __init__(self, parts: Sequence[Part], names: bool) -> None:
        self._items = CombinedDataset(parts, names)
        given = {part.name: part.source.fingerprint() for part in parts}
        super().__init__(
            self._items,
            threads=min((part.source.threads for part in parts if part.source.threads), default="auto"),
            setup=CombinedDataset.set_up,
            fingerprint=None if None in given.values() else digest(*[f"{name}={own}" for name, own in given.items()]),
        )

    def key(self, index: int, /) -> str:
        """Return the name of the source, and the sample's key in it."""
        return self._items.key(self.named(index))

    def lengths(self, unit: str, /) -> NDArray[np.int64] | None:
        """Return the lengths of the samples of all Datasets, if all are known."""
        found = self._items.lengths(unit)
        return found if found is None or self.rows is None else found[self.rows]

    def items(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples, those of each Dataset together."""
        return super().items(indices) if self.rows is not None else self._items._items(indices)


class CombinedDataset(_Combined):
    """The items of several datasets."""

    def __init__(self, parts: Sequence[Part], names: bool) -> None:
        self._combine(parts, names)
        self.datasets: dict[str, MapDataset[Any]] = {part.name: part.source.given for part in parts}
        self._datasets = list(self.datasets.values())
        self._several = any(hasattr(dataset, "__getitems__") for dataset in self._datasets)
        if self._several:
            self.__getitems__: Callable[[Sequence[int]], list[Any]] = self._items

    def set_up(self) -> None:
        """Call the ``setup`` hooks of the parts in this thread."""
        for source in self._sources:
            source.set_up()

    # A DiskCache knows the dataset by this code.
    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return self._items([index])[0]

    def _items(self, indices: Sequence[int]) -> list[Any]:
        bounds, datasets, found = self._bounds, self._datasets, list[Any]()
        if self._several and len(indices) > 1:
            groups = self._groups(indices)
            for group in groups:
                group.values = self._sources[group.number].items(group.local.tolist())
            found = in_order(len(indices), [(group.places.tolist(), group.values) for group in groups])
        else:
            for index in indices:
                number = bisect_right(bounds, index) - 1
                found.append(datasets[number][index - bounds[number]])
        names = [self.parts[self._find(index)[0]].name for index in indices] if self._adds_names else ()
        return list(map(_with_name, found, names)) if names else found


def _with_name(item: Any, name: str) -> Any:
    if isinstance(item, Mapping):
        return {**item, "source": name}
    return (*item, name) if isinstance(item, tuple | list) else (item, name)
