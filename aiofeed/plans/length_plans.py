"""Plans that form batches by the lengths of samples: length buckets and token budgets.

The batches of an epoch are a pure function of seed and epoch, so every rank computes the same list. Rank r of R takes
the batches r, r + R, r + 2R, ... All formulas of ``Schedule`` hold with a batch instead of a sample.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.faces import bind_decoder
from aiofeed.kernel.core.formatting import kind_of
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_positive_int, counted
from aiofeed.kernel.sampling.lister import Lister, Plan
from aiofeed.kernel.sampling.order import BatchLists, Int64, epoch_seed
from aiofeed.kernel.sampling.schedule import Position, Schedule
from aiofeed.kernel.sampling.state import json_dict
from aiofeed.plans.computed import ExcludingOrder, WeightedOrder

Lengths: TypeAlias = "Sequence[int] | Int64 | Callable[[int], int] | Literal['measure', 'decoded']"
"""The length of each sample, a function of its index, "measure" or "decoded"."""

Measure: TypeAlias = "str | int | Callable[[Any], int]"
"""The key or index of the part of a sample whose length counts, or a function that returns the length of a sample."""

OnOversize: TypeAlias = Literal["error", "skip", "truncate"]

# Samples that are sorted or packed together, of a list and of a stream.
WINDOW = 16_384
STREAM_WINDOW = 1024


class LengthPlan(Plan):
    """The base class of plans that form batches by the lengths of samples.

    Args:
        lengths: The length of each sample, an int from 1; or a function of the index, called once per sample; or
            "measure"; ``None`` for the items of a stream, or "decoded": they are measured as they come.
        length: How samples are measured, see ``Buckets``.
        size: The next argument, which must not be 0.

    """

    groups: int | None = None
    """The largest number of ranks whose costs a plan balances, if it does."""
    costs: Int64 = np.empty(0, np.int64)
    """The costs that it balances, after ``bind``."""
    examined = False
    """Whether it has looked for costs that cannot be balanced."""

    def __init__(self, lengths: Lengths | None, length: Measure | None = None, **size: object) -> None:
        self._given = lengths
        self._lengths: Int64 | None = None
        self.decoded: Any = self.measured if isinstance(lengths, str) and lengths == "decoded" else None
        self.streams: bool = lengths is None or self.decoded is not None
        self.measures: bool = isinstance(lengths, str) and lengths == "measure"
        self.length: Measure | None = length
        self._longest = 0
        self._window = STREAM_WINDOW if self.streams else WINDOW
        measured, plan = self.streams or self.measures, type(self).__name__
        for name, value in size.items():
            if isinstance(lengths, int | np.integer):
                raise TypeError(f"lengths, one for each sample, come first: {plan}(lengths, {name}={lengths})")
            if type(value) is int and value == 0:
                raise ValueError(f"{plan} needs {name}=: {plan}({name}=) must be at least 1, got 0")
        if self.streams and self.groups is not None:
            raise ValueError(f"{plan}(groups=) balances samples whose lengths are known: pass lengths=")
        if length is not None and not measured:
            raise ValueError(f"{plan}(length=) measures samples: pass no lengths=, or lengths='measure'")
        if not (measured or callable(lengths)):
            self.use(lengths)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Have no lengths again."""
        self._lengths = None

    def use(self, lengths: Sequence[int] | Int64) -> None:
        """Set the lengths.

        Raises:
            TypeError, ValueError: They are no ints from 1.
        """
        array = np.asarray(lengths)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(f"lengths must be a list of ints, got {array.dtype} with shape {array.shape}")
        if array.size and array.min() < 1:
            index = int(array.argmin())
            raise ValueError(f"lengths must be at least 1, got {array[index]} for sample {index}")
        self._lengths = array.astype(np.int64)

    def known_lengths(self, a: Any) -> Int64 | None:
        """Return the lengths that a source or a decoder knows without decoding.

        Args:
            a: The ``Arguments`` of a feeder.
        """
        source, unit = a.adopted, "" if self.length is None else self.length
        # What a decoder knows may be an estimate, and "measure" has to be exact.
        if a.decode is not None and self.streams and unit == "" and (stated := bind_decoder(a.decode).lengths):
            return stated(source)
        with_target = unit and source.target is not None  # a tuple, which has no part of the name
        known = a.decode is None and isinstance(unit, str) and not with_target
        return source.lengths(unit) if known else None

    def new_lister(self, schedule: Schedule, samples: Lister | None) -> Lister:
        """Return the lister of the plan for a schedule of all samples, or for an order of them."""
        self.bind(schedule.length)
        shuffle = bool(schedule.shuffle) or isinstance(samples, WeightedOrder)
        return PlanLister(self, schedule.seed, shuffle=shuffle, drop_last=schedule.drop_last, order=samples)

    def measured(self, samples: list[Any]) -> list[tuple[Any, int | Exception]]:
        """Return each sample of a list with its length, or the error of measuring it."""
        found: list[tuple[Any, int | Exception]] = []
        for number, sample in enumerate(samples):
            try:
                found.append((sample, self.measure(number, sample)))
            except Exception as error:  # noqa: BLE001 - of length=; raised with the key of the sample
                found.append((sample, error))
        return found

    def measure(self, number: int, sample: Any) -> int:
        """Return the length of a sample with this number.

        Raises:
            TypeError, ValueError: It is no int from 1, or the sample cannot be in a batch.
        """
        how = self.length
        found: object = how(sample) if callable(how) else self._length_in(sample, number)
        what = f"the length of sample {number}, of its first tensor or by {type(self).__name__}(length=),"
        length = check_positive_int(what, found)
        if length > self._longest:  # a sample may be too long, never too short
            self._check(np.array([length]), number)
            self._longest = length
        return length

    def _length_in(self, sample: Any, number: int) -> int:
        """Return the length of a sample, of its first part or of the one that ``length=`` names.

        Raises:
            ValueError: It has none; the message has the line to write.
        """
        how, part, plan, before = self.length, None, type(self).__name__, self.streams and self.decoded is None
        is_table = hasattr(type(sample), "columns")
        with suppress(LookupError, TypeError):  # a sample without this part
            part = None if is_table else sample if how is None else sample[how]
        if (found := first_length(part, self.axis)) is not None:
            return found
        kind, line = kind_of(sample), "len(sample)"
        if is_table:
            kind, line = f"{kind} of {counted(len(sample), 'row')}", f"len(sample[{how or 'tokens'!r}][0])"
        elif isinstance(sample, Mapping):
            ways = {
                name: ("len(sample[{!r}])" if hasattr(each, "__len__") else "sample[{!r}]").format(name)
                for name, each in sample.items()
            }
            kind, line = f"a dict of {list(sample)}", ways.get(how) or min(ways.values(), default=line)
        raise ValueError(
            f"{plan}(length={how!r}) finds no length in sample {number}, {kind}{', before decode=' * before}: "
            f"pass a function that returns it, {plan}(..., length=lambda sample: {line})"
            + f", or measure what decode= returns, {plan}('decoded', ...)"
            * before
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._describe()})"

    def bind(self, samples: int) -> None:
        """Find the lengths of a source's samples and check them.

        Raises:
            TypeError, ValueError: They are no lengths of that many samples.
        """
        if self.streams and self._lengths is None:
            raise ValueError(f"{self} measures the items of a Stream: pass lengths=, also 'measure' or 'decoded'")
        if self._lengths is None:
            assert callable(self._given)
            self.use([self._given(index) for index in range(samples)])
        if len(self.lengths) != samples:
            given, wanted = counted(len(self.lengths), "length"), counted(samples, "sample")
            raise ValueError(f"{type(self).__name__}(lengths=) has {given} for {wanted}")
        self._check(self.lengths)

    @property
    def lengths(self) -> Int64:
        """The lengths, after ``bind``."""
        assert self._lengths is not None
        return self._lengths

    def check_ranks(self, ranks: int) -> None:
        """Raise ``ValueError`` if the plan has no batches for that many ranks."""
        if self.groups is not None and self.groups % ranks:
            allowed = [number for number in range(1, self.groups + 1) if self.groups % number == 0]
            raise ValueError(
                f"{type(self).__name__}(groups={self.groups}) balances batches for as many ranks as divide groups, "
                f"{', '.join(map(str, allowed))}, and there are {ranks}: pass groups={ranks} or a multiple of it"
            )

    def fingerprint(self) -> str:
        """Identifies the plan in saved states."""
        costs = "" if self.groups is None else f", costs={self._digests[1]}"
        return f"{type(self).__name__}({self._describe()}{costs}, lengths={self._digests[0]})"

    @cached_property
    def _digests(self) -> list[str]:
        # Every state has them; 10 million lengths take 0.1 s.
        return [hashlib.sha256(each.tobytes()).hexdigest()[:16] for each in (self.lengths, self.costs)]

    def _check(self, lengths: Int64, first: int = 0) -> None:
        """Raise ``ValueError`` if a sample, of which ``first`` is the number of the first, cannot be in a batch."""

    def _check_longest(self, lengths: Int64, max_tokens: int, on_oversize: OnOversize, first: int) -> None:
        if on_oversize == "error" and len(lengths) and lengths.max() > max_tokens:
            index = int(lengths.argmax())
            raise ValueError(
                f"sample {first + index} has {lengths[index]} tokens, more than max_tokens={max_tokens}: raise it, "
                f'or pass on_oversize="skip" or "truncate"'
            )

    @property
    @abstractmethod
    def typical_samples(self) -> int:
        """The number of samples of a typical batch, after ``bind``."""

    @abstractmethod
    def batches(self, order: Int64, rng: np.random.Generator, *, shuffle: bool, drop_last: bool) -> BatchLists:
        """Return the batches of an epoch.

        Args:
            order: The indices of the epoch's samples, shuffled already. An index may come several times, or never.
            rng: Shuffles the batches if ``shuffle``.
            shuffle: Whether the batches come in random order.
            drop_last: Leave out incomplete batches.
        """

    @abstractmethod
    def _describe(self) -> str: ...


@public
class Buckets(LengthPlan):
    """A plan for ``batch_size=``: each batch has samples of one range of lengths, and the size of that range.

    Example:
        ```python
        import aiofeed

        texts = [list(range(length)) for length in (3, 5, 8, 2, 9, 4)]
        buckets = aiofeed.Buckets([len(text) for text in texts], boundaries=[6], batch_sizes=[4, 2])
        for batch in aiofeed.Feeder(texts, batch_size=buckets, collate_fn=aiofeed.pad_collate()):
            print(batch)
        ```

    With ``shuffle=True`` samples are shuffled within a bucket, and batches among each other. ``drop_last=True`` drops
    the incomplete batch of each bucket.

    Args:
        lengths: The length of each sample, an array or list of ints from 1; or a function of the index, called once
            per sample; or "measure": the items of a ``Dataset`` are read once and measured, and their lengths kept in
            ``$AIOFEED_CACHE``, unless the source knows them, as a ``Table`` does. Leave it out for a source that knows
            them, or for a ``Stream``, whose items are measured as they come. There a batch ends when its first item is
            16,384 items old, and ``drop_last=True`` leaves it out if it is not full. "decoded" does that for any
            source, and measures what ``decode=`` returns, in the decode threads. Each rank decodes all samples; with
            ``Feeder(pad=False)`` its own only, and ranks may then have different numbers of batches.
        boundaries: Ascending lengths. Bucket k has the samples with ``boundaries[k - 1] <= length < boundaries[k]``, as
            in ``tf.data``'s ``bucket_by_sequence_length``; the last bucket has the rest.
        batch_sizes: Samples per batch of each bucket, one more than boundaries.
        length: How samples are measured: the key or index of a part, or a function that returns the length of a
            sample. Default: the first dimension of the first tensor, array or list of numbers.

    Raises:
        TypeError, ValueError: The arguments are no such lists.
    """

    def __init__(
        self,
        lengths: Lengths | None = None,
        boundaries: Sequence[int] = (),
        batch_sizes: Sequence[int] = (),
        *,
        length: Measure | None = None,
    ) -> None:
        super().__init__(lengths, length, boundaries=boundaries)
        self.boundaries: list[int] = _positive_ints("boundaries", boundaries)
        self.batch_sizes: list[int] = _positive_ints("batch_sizes", batch_sizes)
        if sorted(set(self.boundaries)) != self.boundaries:
            raise ValueError(f"Buckets(boundaries=) must be ascending, got {list(boundaries)}")
        self.shapes: int = len(self.batch_sizes)
        if len(self.batch_sizes) != len(self.boundaries) + 1:
            raise ValueError(
                f"Buckets has {len(self.boundaries)} boundaries and so {len(self.boundaries) + 1} buckets, "
                f"got {len(self.batch_sizes)} batch_sizes"
            )

    def _describe(self) -> str:
        return f"boundaries={self.boundaries}, batch_sizes={self.batch_sizes}"

    @property
    def typical_samples(self) -> int:
        """The size of the bucket with the most samples."""
        counts = np.bincount(self._buckets(), minlength=len(self.batch_sizes))
        return self.batch_sizes[int(counts.argmax())]

    def _buckets(self) -> Int64:
        buckets: Int64 = np.searchsorted(np.array(self.boundaries, np.int64), self.lengths, side="right")
        return buckets

    def batches(self, order: Int64, rng: np.random.Generator, *, shuffle: bool, drop_last: bool) -> BatchLists:
        """Return the batches of an epoch; without ``shuffle`` in the order of their first samples."""
        buckets = self._buckets()[order]
        pieces: list[Int64] = []
        for bucket, size in enumerate(self.batch_sizes):
            members = np.flatnonzero(buckets == bucket)
            if drop_last:
                members = members[: len(members) - len(members) % size]
            pieces += [members[at : at + size] for at in range(0, len(members), size)]
        if shuffle:
            pieces = [pieces[at] for at in rng.permutation(len(pieces))]
        else:
            pieces.sort(key=lambda piece: int(piece[0]))
        offsets = starts_of(np.array([len(piece) for piece in pieces], np.int64))
        return BatchLists(order[np.concatenate(pieces)] if pieces else order[:0], offsets)


@public
class TokenBudget(LengthPlan):
    """A plan for ``batch_size=``: batches of up to ``max_tokens`` after padding, of samples of similar length.

    Example:
        ```python
        import aiofeed

        texts = [list(range(length)) for length in (3, 5, 8, 2, 9, 4)]
        budget = aiofeed.TokenBudget([len(text) for text in texts], max_tokens=16)
        for batch in aiofeed.Feeder(texts, batch_size=budget, collate_fn=aiofeed.pad_collate()):
            print(batch)
        ```

    The cost of a batch is its number of samples times the length of its longest one. With ``shuffle=True`` the samples
    are shuffled, sorted by length within windows, alternately upwards and downwards, and cut into batches; then the
    batches are shuffled. ``drop_last=True`` drops the last batch if another sample as long as its longest would fit.

    Args:
        lengths: The length of each sample in tokens, an array or list of ints from 1; or a function of the index,
            called once per sample; or "measure" or "decoded". Leave it out for a ``Stream``. See ``Buckets``.
        max_tokens: The highest cost of a batch.
        max_samples: The most samples of a batch; ``None`` for no limit.
        window: Samples that are sorted together; 16,384, of a ``Stream`` 1,024. A larger window pads less and shuffles
            less.
        on_oversize: What to do about a sample longer than ``max_tokens``: "error"; "skip" it; or "truncate", a batch of
            its own, for a ``collate_fn`` that cuts it.
        length: See ``Buckets``.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        lengths: Lengths | None = None,
        max_tokens: int = 0,
        max_samples: int | None = None,
        *,
        window: int | None = None,
        on_oversize: OnOversize = "error",
        length: Measure | None = None,
    ) -> None:
        super().__init__(lengths, length, max_tokens=max_tokens)
        self.max_tokens: int = check_positive_int("TokenBudget(max_tokens=)", max_tokens)
        self.max_samples: int | None = (
            None if max_samples is None else check_positive_int("TokenBudget(max_samples=)", max_samples)
        )
        self.window: int = check_positive_int("TokenBudget(window=)", self._window if window is None else window)
        self.on_oversize = check_on_oversize("TokenBudget", on_oversize)

    def _describe(self) -> str:
        return (
            f"max_tokens={self.max_tokens}, max_samples={self.max_samples}, window={self.window}, "
            f"on_oversize={self.on_oversize!r}"
        )

    def _check(self, lengths: Int64, first: int = 0) -> None:
        self._check_longest(lengths, self.max_tokens, self.on_oversize, first)

    @property
    def typical_samples(self) -> int:
        """Samples of mean length that fill a batch."""
        mean = float(self.lengths.mean()) if len(self.lengths) else 1.0
        return max(1, min(int(self.max_tokens / mean), self.max_samples or self.max_tokens))

    def batches(self, order: Int64, rng: np.random.Generator, *, shuffle: bool, drop_last: bool) -> BatchLists:
        """Return the batches of an epoch. With ``drop_last``, without the last one if it has room."""
        lengths = np.minimum(self.lengths, self.max_tokens)
        if self.on_oversize == "skip":
            order = order[self.lengths[order] <= self.max_tokens]
        order = self._sorted_in_windows(order, lengths)
        offsets = self._cut(lengths[order])
        if drop_last and len(order):
            last = lengths[order[offsets[-2] :]]
            if len(last) != self.max_samples and (len(last) + 1) * last.max() <= self.max_tokens:
                offsets = offsets[:-1]
        if not shuffle:
            return BatchLists(order[: offsets[-1]], offsets)
        batches = rng.permutation(len(offsets) - 1)
        sizes, firsts = np.diff(offsets)[batches], offsets[:-1][batches]
        offsets = starts_of(sizes)
        return BatchLists(order[np.repeat(firsts - offsets[:-1], sizes) + np.arange(offsets[-1])], offsets)

    def _sorted_in_windows(self, order: Int64, lengths: Int64) -> Int64:
        key = lengths[order]
        number = np.arange(len(order)) // self.window
        # Downwards in every second window: neighbours at the border of two windows have similar lengths.
        key = np.where(number % 2, self.max_tokens - key, key)
        key += number * (self.max_tokens + 1)
        return order[np.argsort(key, kind="stable")]

    def _cut(self, lengths: Int64) -> Int64:
        """Cut a list of samples into batches, each as long as it may be; returns their offsets.

        Within a window the longest sample of a piece is at one of its ends, so 10 million lengths take two seconds.
        """
        contiguous: Any = np.ascontiguousarray(lengths)
        values, window, end = memoryview(contiguous), self.window, len(lengths)
        most, max_tokens = self.max_samples or end, self.max_tokens
        offsets, start = [0], 0
        while start < end:
            # `fits` samples are within the budget, `over` are not.
            fits, over = 1, min(most, max_tokens // values[start], end - start) + 1
            while over - fits > 1:
                middle = (fits + over) // 2
                if start // window == (start + middle - 1) // window:
                    longest = max(values[start], values[start + middle - 1])
                else:
                    longest = int(lengths[start : start + middle].max())
                if middle * longest <= max_tokens:
                    fits = middle
                else:
                    over = middle
            start += fits
            offsets.append(start)
        return np.array(offsets, np.int64)


def _positive_ints(name: str, values: Sequence[int]) -> list[int]:
    return [check_positive_int(f"{name}[{at}]", each) for at, each in enumerate(values)]


def first_length(sample: Any, axis: int = 0) -> int | None:
    """Return a dimension of the first tensor, array or list of numbers in a sample; ``None`` without one."""
    if hasattr(type(sample), "columns"):
        return None  # a table, whose rows are no tokens
    # Nor are the values of a row of pandas, or texts.
    kind = getattr(getattr(sample, "dtype", None), "kind", "i")
    if (shape := getattr(sample, "shape", ())) and kind not in "OSU":
        return int(shape[axis])
    if isinstance(sample, list) and all(isinstance(each, Real) for each in sample[:1]):
        return len(sample)
    parts = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, list | tuple) else ()
    return next((found for part in parts if (found := first_length(part, axis)) is not None), None)


def check_on_oversize(plan: str, value: OnOversize) -> OnOversize:
    """Return ``value`` if it is a valid ``on_oversize``."""
    if value not in ("error", "skip", "truncate"):
        raise ValueError(f'{plan}(on_oversize=) must be "error", "skip" or "truncate", got {value!r}')
    return value


def starts_of(counts: np.ndarray[Any, Any]) -> Int64:
    """Return the start of each of consecutive ranges with these sizes, and the end of the last one."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


class PlanLister(Lister):
    """A plan as the order of a feeder: lists the batches of an epoch, like ``SamplerAdapter``.

    Args:
        plan: Forms the batches.
        seed: Seeds the order of samples and batches.
        shuffle, drop_last: See ``Feeder``.
        order: Which samples come, and in which order; ``None`` for each of them once.
    """

    argument = "batch_size"
    by_batches = True

    def __init__(
        self, plan: LengthPlan, seed: int, *, shuffle: bool, drop_last: bool, order: Lister | None = None
    ) -> None:
        self.plan = plan
        self.order = order
        self.typical_samples: int = plan.typical_samples
        if order is not None:
            order.may_change = False  # the batches of an epoch are planned together
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        # The epoch listed last, whose number of batches is the length.
        self._listed: tuple[int, BatchLists] | None = None
        # The tokens drawn from each source before some epochs.
        self._tokens: dict[int, Any] = {0: 0}

    def __str__(self) -> str:
        return repr(self.plan)

    @property
    def sample_lister(self) -> Lister:
        """The order of samples, if it has one of its own."""
        return self if self.order is None else self.order

    def check_ranks(self, ranks: int) -> None:
        """Raise ``ValueError`` if the plan has no batches for that many ranks."""
        self.plan.check_ranks(ranks)

    def __len__(self) -> int:
        """Return the number of batches of the epoch listed last; at first of epoch 0."""
        if self._listed is None:
            self._listed = 0, self._new(0)
        return len(self._listed[1])

    def list_epoch(self, epoch: int, *, resumed: bool) -> BatchLists:
        """Return the batches of an epoch."""
        if self._listed is None or self._listed[0] != epoch:
            self._listed = epoch, self._new(epoch)
        return self._listed[1]

    def _new(self, epoch: int) -> BatchLists:
        rng = np.random.default_rng(epoch_seed(self._seed, epoch))
        samples = len(self.plan.lengths if self.order is None else self.order)
        if self.order is not None:
            order: Any = self.order.list_epoch(epoch, resumed=False)
            order = order[np.arange(samples)]
        else:
            order = rng.permutation(samples) if self._shuffle else np.arange(samples)
        return self.plan.batches(order, rng, shuffle=self._shuffle, drop_last=self._drop_last)

    def identity(self) -> str:
        """Identifies the plan and the order of samples."""
        return f"{self.plan.fingerprint()} {self._drop_last} {'' if self.order is None else self.order.identity()}"

    def state(self, position: Position) -> str:
        """Return what identifies the plan, and the state of the order at the start of the epoch, as JSON."""
        order = "" if self.order is None else self.order.state(Position(position.epoch))
        return json.dumps({"plan": self.plan.fingerprint(), "order": order})

    def counts(self, position: Position) -> dict[str, int]:
        """Return the samples drawn from each source of a mixture before a position, from the first epoch on."""
        before = {} if self.order is None else self.order.counts(Position(position.epoch))
        if self.order is None or not before:
            return {}
        lists = self.list_epoch(position.epoch, resumed=True)
        consumed = lists.consumed(min(position.consumed, len(lists)))
        return {name: before[name] + more for name, more in self.order.count(consumed).items()}

    def tokens(self, position: Position) -> dict[str, int]:
        """Return the tokens of the samples of ``counts``."""
        if self.order is None or not self._sources:
            return {}
        ends, lists = np.cumsum([*self._sources.values()]), self.list_epoch(position.epoch, resumed=True)
        for epoch in range(max(each for each in self._tokens if each <= position.epoch), position.epoch + 1):
            earlier: Any = None if epoch == position.epoch else self.order.list_epoch(epoch, resumed=True)
            consumed = lists.consumed(min(position.consumed, len(lists)))
            indices = consumed if earlier is None else earlier[np.arange(len(self.order))]
            sources = np.searchsorted(ends, indices, side="right")
            found = self._tokens[epoch] + np.bincount(sources, self.plan.lengths[indices], len(ends))
            if earlier is not None:
                self._tokens[epoch + 1] = found
        return dict(zip(self._sources, map(int, found), strict=True))

    @cached_property
    def _sources(self) -> dict[str, int]:
        """The number of samples of each source of a mixture."""
        return {} if self.order is None else self.order.count(np.arange(len(self.plan.lengths)))

    def load_state(self, text: str) -> None:
        """Check that a state is of the same plan.

        Raises:
            StateError: It is of another plan or of a sampler.
        """
        state = json_dict(text)
        saved, order = (str(state.get(name)) for name in ("plan", "order"))
        own = self.plan.fingerprint()
        if saved != own:
            (there, _, _), (here, _, _) = saved.partition(", lengths="), own.partition(", lengths=")
            difference = f"{there}) in the state, {here}) here" if there != here else f"other lengths= of {here})"
            raise StateError(f"the state is of another plan: {difference}")
        # FeedOrder.resumed compares samples that are excluded.
        names = json_dict(order or "{}").keys()
        order = order if "mixture" in names or "exclude" not in names else ""
        lister = self.order.mixture if isinstance(self.order, ExcludingOrder) else self.order
        if bool(order) != (lister is not None):
            raise StateError(
                "the state is of a plan with another order of samples: with or without a Mixture or weights="
            )
        if lister is not None:
            lister.load_state(order)
