"""Several sources as one, and the weights by which their samples are drawn."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.faces import BaseSource, Exclusion, adapt_source, passes_on
from aiofeed.kernel.core.types import Source, Traits, hides_secrets, public
from aiofeed.kernel.core.validation import check_bool, check_positive_int, counted, explain_arguments
from aiofeed.kernel.feeder.arguments import check_decoder
from aiofeed.kernel.sources.dataset import FromDataset, MapDataset, is_iterable_dataset, is_map_dataset
from aiofeed.kernel.sources.subset import IndexedSource, Subset
from aiofeed.mixtures.combined import CombinedDatasets, MixedSource
from aiofeed.mixtures.mixture_order import (
    ChangingShares,
    ConstantShares,
    Interleaving,
    MixtureOrder,
    ShareBlocks,
    TokenCounts,
)
from aiofeed.mixtures.parts import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

Weights: TypeAlias = "Mapping[str, float] | Sequence[float]"
Until: TypeAlias = 'Literal["all", "first"] | int'


@public
@explain_arguments()
@passes_on
class Mixture(IndexedSource):
    """Several sources, from which samples are drawn by weight. Pass it to ``Feeder`` like a source.

    Example:
        ```python
        import aiofeed

        web = aiofeed.Tokens("tokens.bin", block=128)
        code = aiofeed.Tokens("code.bin", block=128)
        mixture = aiofeed.Mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
        for batch in aiofeed.Feeder(mixture, batch_size=8, shuffle=True):
            print(batch.shape)
        ```

    After any number of samples the count of a source differs from its share by less than one, counted from a change of
    the mixture on by less than two. Each source is passed
    through in an order of its own, shuffled anew each time that it starts again. The order is a function of seed and
    epoch, so a state is exact under another world size, too.

    Args:
        sources: The sources by name, of any kinds: sources, parts of sources, map-style ``Dataset``, mixtures. Their
            decoded samples must have the same structure. If all are sources of bytes, ``Feeder(decode=)`` may decode
            them. A mixture in the mixture counts as its sources, with the names ``"outer/inner"`` and the product of
            their weights.
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
            another sample becomes ``(sample, name)``. Without ``decode=`` here, a sample of a source of bytes becomes
            ``(sample, name)`` or ``(sample, (target, name))``.
        decode: By source, the function that decodes what it reads, or changes samples that it has decoded, so that the
            samples of all sources are alike. Sources without one need none.
        unit: What shares count: "samples", or "tokens", the lengths of samples. Then after any number of samples the
            tokens of a source differ from its share by at most the longest sample. Needs a number as ``until=`` and
            weights that do not change.
        lengths: By source, the tokens of each sample, for ``unit="tokens"``. Default: those that the source knows.
        max_repeats: How often a source may be passed through, for all or by source. The feeder raises an error before a
            sample comes more often.
        at_end: With streams, what happens when a source ends: "restart" it (the default; the epoch ends when each
            source has ended once, or after ``until`` samples), "stop" the epoch, as with ``until="first"``, or "leave
            out" the source and share by the other weights. With streams ``weights=`` is needed, each epoch begins anew,
            and items are shuffled in groups of the largest ``shuffle_buffer``.

    Raises:
        TypeError, ValueError: An argument has the wrong type, a source is empty, a weight is not above 0, or with
            ``until="first"`` an epoch is too short for a sample of each source.
    """

    traits: Traits = Traits(ordered=True)
    whole: BaseSource
    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (("weights=", "sampler=", "batch_sampler=", 'shuffle="replacement" or "window"'), ("a Mixture with weights",),
         ValueError, "a Mixture decides which samples come: leave out {option}"),
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
        decode: Mapping[str, Callable[..., Any]] | None = None,
        unit: Literal["samples", "tokens"] = "samples",
        lengths: Mapping[str, Any] | None = None,
        max_repeats: int | Mapping[str, int] | None = None,
        at_end: Literal["restart", "stop", "leave out"] | None = None,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise TypeError(f"Mixture takes a dict of sources by name, got {sources!r}")
        for name in sources:
            if not isinstance(name, str) or not name:
                raise TypeError(f"Mixture: the names of sources are non-empty strings, got {name!r}")
        self._given: dict[str, Any] = dict(sources)
        inner = [each for each in sources.values() if isinstance(each, Mixture)]
        self._random = check_bool("Mixture(random=)", random)
        self._names: bool = check_bool("names", names) or any(each._names for each in inner)
        self.parts: list[Part] = _parts_of(sources, decode)
        self.names: list[str] = [part.name for part in self.parts]
        self._most: list[int | None] = self._checked_repeats(max_repeats)
        self._streams = any(not part.source.traits.indexed for part in self.parts)
        self._lengths: dict[str, int] = {part.name: len(part.source) for part in self.parts if not self._streams}
        for name, length in self._lengths.items():
            if not length:
                raise ValueError(f"Mixture: the source {name!r} is empty")
        self._function: Callable[[int], Weights] | None = None
        self._own: list[Any] = []
        self._weights: list[Fraction] = []
        if callable(weights):
            self._function = weights
        else:
            if weights is None and self._streams:
                raise ValueError("Mixture: streams have no length by which to weigh them: pass weights=")
            given = [*map(len, sources.values())] if weights is None else self._in_order(weights)
            self._own = [_checked_weight(name, each) for name, each in zip(sources, given, strict=True)]
        if at_end is not None and not self._streams:
            raise ValueError("Mixture(at_end=) is for streams; without them, until= decides when an epoch ends")
        if self._streams:
            self._set_streams(until, unit, at_end or ("stop" if until == "first" else "restart"))
            return
        self.whole = _combined(self.parts, self._names)
        self.whole.source_names = self.names if self._names else ()
        if self._changes:
            self._changing_weights(0)
        else:
            self._weights = self._of_parts(self._own, 0)
        self._tokens: list[NDArray[np.int64]] | None = self._token_lengths(unit, lengths)
        self._until = until
        self._length = self._epoch_length(until, self._lengths)
        self._restarts = until in ("all", "first")
        # Without own weights, the samples may also be drawn in another way.
        self.draws = weights is not None or until != "all" or self._random or any(each.draws for each in inner)

    def _checked_repeats(self, max_repeats: Any) -> list[int | None]:
        most = dict.fromkeys(self.names, max_repeats) if not isinstance(max_repeats, Mapping) else max_repeats
        if not {*most} <= {*self.names}:
            raise ValueError(f"Mixture(max_repeats=) is for {sorted(most)}, but the sources are {self.names}")
        for each in most.values():
            if each is not None:
                check_positive_int("Mixture(max_repeats=)", each)
        return [most.get(name) for name in self.names]

    def _set_streams(self, until: Any, unit: str, at_end: str) -> None:
        """Make one stream of the sources."""
        from aiofeed.mixtures.streamed import Drawing, StreamedMixture

        if at_end not in ("restart", "stop", "leave out"):
            raise ValueError(f'Mixture(at_end=) must be "restart", "stop" or "leave out", got {at_end!r}')
        if self._changes or self._random or unit != "samples":
            kind = "random=True" if self._random else 'unit="tokens"' if unit != "samples" else "weights that change"
            raise ValueError(f"Mixture: {kind} is not possible with streams in it, whose samples come in their order")
        if until == "first" and at_end != "stop":
            raise ValueError(f'Mixture(until="first") ends an epoch as at_end="stop" does: leave out at_end={at_end!r}')
        samples = None if until in ("all", "first") else check_positive_int("Mixture(until=)", until)
        drawing = Drawing(self._of_parts(self._own, 0), at_end, samples, self._most)
        self.whole = StreamedMixture(self.parts, self._names, drawing)
        self.traits: Traits = self.whole.traits
        self.draws: bool = False

    def __len__(self) -> int:
        """Return the number of samples of an epoch, on all ranks together."""
        return len(self.whole) if self._streams else self._length

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

    def order(self, seed: int, *, shuffle: bool, excluded: NDArray[np.int64] | None = None) -> MixtureOrder:
        """Return the order of a feeder's epochs, without samples that are excluded.

        Raises:
            ValueError: All samples of a source are excluded.
        """
        lengths, tokens, options = self._lengths, self._tokens, {}
        if excluded is not None:
            bounds = np.cumsum([0, *lengths.values()])
            kept = np.setdiff1d(np.arange(bounds[-1]), excluded)
            edges = np.searchsorted(kept, bounds)
            lengths = dict(zip(lengths, np.diff(edges).tolist(), strict=True))
            if empty := [name for name, length in lengths.items() if not length]:
                raise ValueError(f"exclude= has all samples of the source {empty[0]!r}: leave the source out")
            tokens = None if tokens is None else np.split(np.concatenate(tokens)[kept], edges[1:-1])
            options = {"kept": kept, "bounds": bounds}
        blocks = ShareBlocks(self._epoch_length(self._until, lengths))
        shares = ChangingShares(self._changing_weights, blocks) if self._changes else ConstantShares(self._weights)
        sizes = None if tokens is None else TokenCounts(tokens)
        return MixtureOrder(
            lengths,
            Interleaving(shares, blocks, seed if self._random else None, sizes),
            seed,
            shuffle=shuffle,
            restarts=self._restarts,
            max_repeats=self._most,
            **options,
        )

    def _token_lengths(self, unit: str, lengths: Any) -> list[NDArray[np.int64]] | None:
        """Return the tokens of the samples of each source, if shares are of tokens."""
        if unit not in ("samples", "tokens"):
            raise ValueError(f'Mixture(unit=) must be "samples" or "tokens", got {unit!r}')
        if unit == "samples":
            return None
        if self._changes or self._random:
            raise ValueError('Mixture(unit="tokens") needs weights that do not change, and no random=True')
        given, found = lengths or {}, []
        for part in self.parts:
            known = given.get(part.name)
            if known is None:
                known = None if part.decode else part.source.lengths("")
            if known is None:
                raise ValueError(
                    f"Mixture: the lengths of the samples of {part.name!r} are not known before they are decoded: pass "
                    f"Mixture(lengths={{{part.name!r}: [...]}})"
                )
            each = np.asarray(known, np.int64)
            if each.shape != (len(part.source),) or each.min(initial=1) < 1:
                raise ValueError(
                    f"Mixture: the lengths of {part.name!r} must be at least 1, one for each of "
                    f"{counted(len(part.source), 'sample')}"
                )
            found.append(each)
        return found

    @property
    def _changes(self) -> bool:
        """Whether a function gives weights, here or in a mixture in this one."""
        inner = [each for each in self._given.values() if isinstance(each, Mixture)]
        return self._function is not None or any(each._changes for each in inner)

    def _part(self, rows: NDArray[np.int64]) -> Any:
        return self.whole[self.order(0, shuffle=False).list_epoch(0, resumed=False)[rows]]  # type: ignore[index]

    @hides_secrets
    def split(self, parts: Mapping[str, float], seed: int = 0) -> dict[str, Any]:
        """Split the samples of an epoch at random, as those of other sources.

        Raises:
            ValueError: An epoch has samples twice, which two parts could have.
        """
        drawn = self.order(0, shuffle=False).list_epoch(0, resumed=False)[np.arange(len(self))]
        if len(np.unique(drawn)) < len(drawn):
            raise ValueError(
                f"{self!r} has samples twice in an epoch, which two parts could have: split its sources, or pass "
                f'until="first"'
            )
        return super().split(parts, seed)

    def _in_order(self, weights: Any) -> list[Any]:
        names = [*self._given]
        if isinstance(weights, Mapping):
            if set(weights) != set(names):
                raise ValueError(f"Mixture(weights=) is for {sorted(weights)}, but the sources are {names}")
            return [weights[name] for name in names]
        if isinstance(weights, str) or (not isinstance(weights, Sequence) and not hasattr(weights, "tolist")):
            raise TypeError(f"Mixture(weights=) must be a dict, a list or a function, got {weights!r}")
        if len(weights) != len(names):
            raise ValueError(
                f"Mixture(weights=) has {counted(len(weights), 'weight')} for {counted(len(names), 'source')}"
            )
        return list(weights)

    def _changing_weights(self, samples: int) -> list[Any]:
        if self._function is None:
            return self._of_parts(self._own, samples)
        weights = [float(weight) for weight in self._in_order(self._function(samples))]
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise ValueError(
                f"the function given as Mixture(weights=) returned {weights} for {counted(samples, 'sample')}: weights "
                f"are finite numbers from 0, and one of them above 0"
            )
        return self._of_parts(weights, samples)

    def _of_parts(self, weights: Sequence[Any], samples: int) -> list[Any]:
        """Return the weight of each part: a mixture in this one shares its own by the weights in it."""
        found: list[Any] = []
        for weight, given in zip(weights, self._given.values(), strict=True):
            inner = given._changing_weights(samples) if isinstance(given, Mixture) else [1]
            total = sum(inner)
            found += [weight * each / total if total != each else weight for each in inner]
        return found

    def _epoch_length(self, until: Any, lengths: Mapping[str, int]) -> int:
        if until not in ("all", "first"):
            if isinstance(until, str):
                raise ValueError(f'Mixture(until=) must be "all", "first" or a number of samples, got {until!r}')
            return check_positive_int("Mixture(until=)", until)
        if self._changes or self._random or self._tokens is not None:
            kind = "random=True" if self._random else "weights that change" if self._changes else 'unit="tokens"'
            raise ValueError(f"Mixture(until={until!r}): with {kind} it is not known when that is; pass a number")
        total = sum(self._weights)
        ends = [length * total / each for length, each in zip(lengths.values(), self._weights, strict=True)]
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
        TypeError: It is no source.
    """
    found = load_addon("Stream", "an IterableDataset")(given) if is_iterable_dataset(given) else adapt_source(given)
    if found is None and is_map_dataset(given):
        found = FromDataset(given)
    if found is None:
        raise TypeError(
            f"Mixture: {name!r} must be a source with __len__, key and read, a Dataset or a Stream, got {given!r}"
        )
    found = found.adopted()
    if found.traits.in_memory and (found := found.as_samples()).traits.in_memory:
        raise TypeError(f"Mixture: {name!r} is {given!r} on a device: pass Tensors of host memory")
    return found


def _parts_of(sources: Mapping[str, Any], decode: Any) -> list[Part]:
    """Return the parts of a mixture; those of a mixture in it have both names, joined by a slash."""
    decoders = {} if decode is None else decode
    if not isinstance(decoders, Mapping) or not {*decoders} <= {*sources}:
        raise TypeError(f"Mixture(decode=) is a dict of functions by source, of {[*sources]}, got {decode!r}")
    found = []
    for name, given in sources.items():
        function = check_decoder(decoders.get(name), None)
        if not isinstance(given, Mixture):
            found.append(Part(name, _adapted(name, given), function))
            continue
        if function is not None and any(part.decode for part in given.parts):
            raise TypeError(f"Mixture(decode=): {name!r} is a Mixture with decode= of its own: leave out one of them")
        found += [Part(f"{name}/{part.name}", part.source, part.decode or function) for part in given.parts]
    return found


def _combined(parts: Sequence[Part], names: bool) -> BaseSource:
    """Return the sources as one, whose indices count through them in order."""
    sources: list[Any] = [part.source for part in parts]
    decoded = any(part.decode for part in parts)
    wholes = [source.whole if isinstance(source, Subset) else source for source in sources]
    if all(whole.joined for whole in wholes) and not (names or decoded):
        return _joined(sources, wholes)
    items, kinds = [source.traits.items for source in sources], {source.traits.decode for source in sources}
    if all(items) and not decoded:
        return CombinedDatasets(parts, names)
    # Their texts have all arguments that change a sample. What decodes rows of a batch together belongs to one source.
    alike = len({repr(source.decoder) for source in sources}) == 1 and not any(source.traits.rows for source in sources)
    own = decoded or any(items) or ("none" in kinds and not (len(kinds) == 1 and alike))
    encoded = [part.name for part in parts if part.source.traits.decode == "needed" and part.decode is None]
    if own and encoded:
        raise TypeError(
            f"Mixture: {encoded} are sources of encoded samples beside others that are decoded: pass "
            f"Mixture(decode={{{encoded[0]!r}: aiofeed.DecodeImage(size=224)}}), or another function for each"
        )
    return MixedSource(parts, names, own)


def _joined(sources: list[Any], wholes: list[Any]) -> BaseSource:
    """Return parts of sources that the first one joins to itself."""
    joined: BaseSource = wholes[0].joined(wholes[1:])
    if wholes == sources:
        return joined
    starts = accumulate(map(len, wholes), initial=0)
    rows = [
        start + (np.arange(len(whole)) if whole is source else source.rows)
        for start, whole, source in zip(starts, wholes, sources, strict=False)
    ]
    return Subset(joined, np.concatenate(rows))
