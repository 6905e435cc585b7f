"""Several sources as one, and the weights by which their samples are drawn."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from aiofeed.common.parts import Parts, in_order
from aiofeed.kernel.core.faces import BaseSource, Exclusion, adapt_source, passes_on
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import BatchPlan, Source, Traits, public
from aiofeed.kernel.core.validation import check_bool, check_positive_int, counted, explain_arguments
from aiofeed.kernel.runtime.cancellation import caught
from aiofeed.kernel.sampling.progress import digest
from aiofeed.kernel.sources.dataset import FromDataset, MapDataset, is_iterable_dataset, is_map_dataset
from aiofeed.kernel.sources.file_io import Content
from aiofeed.kernel.sources.subset import kind_of, names_of
from aiofeed.mixtures.mixture_order import ChangingShares, ConstantShares, Interleaving, MixtureOrder, ShareBlocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

Weights: TypeAlias = "Mapping[str, float] | Sequence[float]"
Until: TypeAlias = 'Literal["all", "first"] | int'


@public
@explain_arguments()
@passes_on
class Mixture(BaseSource):
    """Several sources, from which samples are drawn by weight. Pass it to ``Feeder`` like a source.

    After any number of samples the count of a source differs from its share by less than one, counted from a change of
    the mixture on by less than two. Each source is passed
    through in an order of its own, shuffled anew each time that it starts again. The order is a function of seed and
    epoch, so a state is exact under another world size, too.

    Args:
        sources: The sources by name: all of them sources of bytes with the same kind of samples, or all of them
            map-style ``Dataset``.
        weights: The weight of each source, above 0: a dict by name, or a list in the order of the sources. They need
            not add up to 1. Default: the number of samples, so that each sample comes equally often. Or a function of
            the number of samples that all ranks have drawn before, from the first epoch on, which returns the weights,
            0 for sources that pause. It is called for the start of each epoch and every 1,024 samples from there, must
            always return the same, and runs in the engine's thread.
        until: The length of an epoch. "all": until every source has been passed through, so that each epoch has every
            sample. "first": until one source has been passed through, except perhaps its last sample, so that no epoch
            has a sample twice. In both, shares are counted from the start of each epoch. Or a number of samples, on all
            ranks together: each epoch goes on where the one before has ended, and shares are counted from the first
            epoch on.
        random: Draw the source of each sample independently, as ``interleave_datasets`` of Hugging Face does.
        names: Add the name of its source to each sample: to a dict as ``"source"``, to a tuple as its last item;
            another sample becomes ``(sample, name)``, a sample of a source of bytes ``(sample, name)`` or
            ``(sample, (target, name))``.

    Raises:
        TypeError, ValueError: An argument has the wrong type, a source is empty, a weight is not above 0, or with
            ``until="first"`` an epoch is too short for a sample of each source.
    """

    traits: Traits = Traits(ordered=True)
    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (("weights=", "sampler=", "batch_sampler=", 'shuffle="replacement" or "window"'), ("a Mixture with weights",),
         ValueError, "a Mixture decides which samples come: leave out {option}"),
        (("exclude=",), ("a Mixture with weights",), ValueError,
         "it leaves out samples of shuffle=True, False or 'keyed' only: take them out of the source"),
    )
    # fmt: on

    def __init__(
        self,
        sources: Mapping[str, Source[Any] | MapDataset[Any] | FromDataset],
        weights: Weights | Callable[[int], Weights] | None = None,
        *,
        until: Until = "all",
        random: bool = False,
        names: bool = False,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise TypeError(f"Mixture takes a dict of sources by name, got {sources!r}")
        for name in sources:
            if not isinstance(name, str) or not name:
                raise TypeError(f"Mixture: the names of sources are non-empty strings, got {name!r}")
        self.names: list[str] = list(sources)
        self._random = check_bool("Mixture(random=)", random)
        self.whole: BaseSource = _combined(sources, check_bool("names", names))
        self._lengths: dict[str, int] = {name: len(source) for name, source in sources.items()}
        for name, length in self._lengths.items():
            if not length:
                raise ValueError(f"Mixture: the source {name!r} is empty")
        self._function: Callable[[int], Weights] | None = None
        self._weights: list[Fraction] = []
        if callable(weights):
            self._function = weights
            self._changing_weights(0)
        else:
            given = list(self._lengths.values()) if weights is None else self._in_order(weights)
            self._weights = [_checked_weight(name, each) for name, each in zip(self.names, given, strict=True)]
        self._length = self._epoch_length(until)
        self._restarts = until in ("all", "first")
        # Without own weights, the samples may also be drawn in another way.
        self.draws: bool = weights is not None or until != "all" or self._random

    def __len__(self) -> int:
        """Return the number of samples of an epoch, on all ranks together."""
        return self._length

    def __repr__(self) -> str:
        return f"Mixture({', '.join(self.names)})"

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return whether it decides which samples come."""
        return {"a Mixture with weights": repr(self)} if arguments.traits.ordered else {}

    def adopted(self) -> BaseSource:
        """Return the sources as one."""
        return self.whole

    def _passed(self, name: str, value: Any) -> Any:
        return value

    def order(self, seed: int, *, shuffle: bool) -> MixtureOrder:
        """Return the order of a feeder's epochs."""
        blocks = ShareBlocks(self._length)
        shares: ConstantShares | ChangingShares
        if self._function is None:
            shares = ConstantShares(self._weights)
        else:
            shares = ChangingShares(self._changing_weights, blocks)
        interleaving = Interleaving(shares, blocks, seed if self._random else None)
        return MixtureOrder(self._lengths, interleaving, seed, shuffle=shuffle, restarts=self._restarts)

    def _in_order(self, weights: Any) -> list[Any]:
        if isinstance(weights, Mapping):
            if set(weights) != set(self.names):
                raise ValueError(f"Mixture(weights=) is for {sorted(weights)}, but the sources are {self.names}")
            return [weights[name] for name in self.names]
        if isinstance(weights, str) or (not isinstance(weights, Sequence) and not hasattr(weights, "tolist")):
            raise TypeError(f"Mixture(weights=) must be a dict, a list or a function, got {weights!r}")
        if len(weights) != len(self.names):
            raise ValueError(
                f"Mixture(weights=) has {counted(len(weights), 'weight')} for {counted(len(self.names), 'source')}"
            )
        return list(weights)

    def _changing_weights(self, samples: int) -> list[float]:
        assert self._function is not None
        weights = [float(weight) for weight in self._in_order(self._function(samples))]
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise ValueError(
                f"the function given as Mixture(weights=) returned {weights} for {counted(samples, 'sample')}: weights "
                f"are finite numbers from 0, and one of them above 0"
            )
        return weights

    def _epoch_length(self, until: Any) -> int:
        if until not in ("all", "first"):
            if isinstance(until, str):
                raise ValueError(f'Mixture(until=) must be "all", "first" or a number of samples, got {until!r}')
            return check_positive_int("Mixture(until=)", until)
        if self._function is not None or self._random:
            kind = "random=True" if self._random else "weights that change"
            raise ValueError(f"Mixture(until={until!r}): with {kind} it is not known when that is; pass a number")
        total = sum(self._weights)
        ends = [length * total / each for length, each in zip(self._lengths.values(), self._weights, strict=True)]
        if until == "all":
            return math.ceil(max(ends))
        length = math.floor(min(ends))
        rare = [name for name, each in zip(self.names, self._weights, strict=True) if each * length < total]
        if rare:
            raise ValueError(
                f'Mixture(until="first"): an epoch of {counted(length, "sample")} is too short for a sample of {rare}; '
                f"pass a number of samples"
            )
        return length


def _checked_weight(name: str, weight: Any) -> Fraction:
    if not isinstance(weight, numbers.Real) or isinstance(weight, bool):
        raise TypeError(f"Mixture: the weight of {name!r} must be a number, got {weight!r}")
    if not math.isfinite(weight) or weight <= 0:
        raise ValueError(f"Mixture: the weight of {name!r} must be above 0, got {weight}; leave out the others")
    # The decimal that people see, not the nearest binary number: 0.1 is a tenth.
    return Fraction(int(weight)) if isinstance(weight, numbers.Integral) else Fraction(str(float(weight)))


def _adapted(name: str, given: Any) -> BaseSource:
    """Return the source of a mixture that an object is.

    Raises:
        TypeError: It has no samples with indices, or gives whole batches.
    """
    if is_iterable_dataset(given) or (isinstance(given, BaseSource) and not given.traits.indexed):
        raise TypeError(
            f"Mixture: {name!r} is {given!r}, which has no indices to draw: mix the iterables, for example with "
            f"interleave_datasets of Hugging Face, and pass the result to Feeder as a Stream"
        )
    found = adapt_source(given)
    if found is None and is_map_dataset(given):
        found = FromDataset(given)
    if found is None or found.adopted() is not found:
        raise TypeError(
            f"Mixture: {name!r} must be a source with __len__, key and read, or a Dataset with __len__ and "
            f"__getitem__, got {given!r}"
        )
    if found.traits.in_memory:
        raise TypeError(f"Mixture: {name!r} is Tensors, which give whole batches: pass a TensorDataset instead")
    return found


def _combined(given: Mapping[str, Any], names: bool) -> BaseSource:
    """Return the sources as one, whose indices count through them in order."""
    sources: dict[str, Any] = {name: _adapted(name, each) for name, each in given.items()}
    tokens = [name for name, source in sources.items() if hasattr(getattr(source, "whole", source), "joined")]
    if tokens:
        if len(tokens) < len(sources) or names or any(hasattr(source, "whole") for source in sources.values()):
            raise TypeError(f"Mixture: {tokens} are Tokens, which mix with Tokens only, whole and without names=True")
        first, *others = sources.values()
        joined: BaseSource = first.joined(others)
        return joined
    datasets = {name: source for name, source in sources.items() if source.traits.items}
    if not datasets:
        return CombinedSource(sources, names)
    if len(datasets) < len(sources):
        others = [name for name in sources if name not in datasets]
        raise TypeError(
            f"Mixture: {list(datasets)} are Datasets of samples, {others} sources of bytes; make them of one kind, for "
            f"example with a Dataset that reads and decodes the files"
        )
    return CombinedDatasets(datasets, names)


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


class CombinedSource(_Combined, BaseSource):
    """Sources of bytes as one."""

    excluded: ClassVar[Sequence[Exclusion]] = (
        (("sources with different columns",), ("no decode=",), TypeError,
         "their samples do not fit into one batch: choose equal columns, or pass decode= or collate_fn="),
    )  # fmt: skip

    def __init__(self, sources: Mapping[str, Any], names: bool) -> None:
        super().__init__(sources, names)
        self.sources: dict[str, Any] = dict(sources)
        traits = {source.traits.decode for source in self._sources}
        if len(traits) > 1:
            raise TypeError(f"Mixture: {self._sources} differ in whether samples are decoded by decode=")
        self.traits: Traits = Traits(decode=traits.pop())
        self.decoder: Any = self._sources[0].decoder
        # Their texts have all arguments that change a sample.
        if self.traits.decode == "none" and len({repr(source.decoder) for source in self._sources}) > 1:
            raise TypeError(f"Mixture: {self._sources} decode samples in different ways; give them the same arguments")
        without = [name for name, source in sources.items() if source.target is None]
        if without and len(without) < len(sources):
            raise ValueError(f"Mixture: the sources {without} have no targets, and the others have: give all of them")
        self._has_targets = not without
        if self._has_targets or names:
            self.target: Callable[[int], Any] = self._target
        if all(source.read_now for source in self._sources):
            self.read_now: Callable[[Sequence[int]], list[Any]] = self._read_now
        if all(source.version for source in self._sources):
            self.version: Callable[[int], str] = self._version
        if all(source.nbytes for source in self._sources):
            self.nbytes: Callable[[int], int] = self._nbytes
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
        """Return whether the sources are known to have different columns."""
        known = [(name, source.structure()) for name, source in self.sources.items()]
        columns = {name: sorted(found) for name, found in known if found is not None}
        differ = arguments.collate_fn is None and len({*map(str, columns.values())}) > 1
        return {"sources with different columns": f"Mixture of the columns {columns}"} if differ else {}

    def fingerprint(self) -> str:
        """Identifies all sources, with their names."""
        return digest(*[f"{name}={names_of(source, len(source))}" for name, source in self.sources.items()])

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
            source = self._sources[number]
            if plan is not None and (read_planned := source.read_planned) is not None:
                return places, await read_planned(local, plan, [given[place] for place in places])
            if source.read_many is not None:
                return places, await source.read_many(local)
            singly = await asyncio.gather(*[caught(source.read(each)) for each in local])
            return places, [sample if error is None else error for sample, error in singly]

        parts = [caught(read_part(number, *part)) for number, part in self._parts.group(indices).items()]
        async with asyncio.TaskGroup() as group:
            reads = [group.create_task(part) for part in parts]
        for error in [error for _, error in (read.result() for read in reads) if error is not None]:
            raise error
        return in_order(len(indices), [read.result()[0] for read in reads])

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
