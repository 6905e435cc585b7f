"""Checks that a source gives the same samples however it is read, and what a feeder gives for each way of reading."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiofeed import _load_addon as load_addon
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.core.limits import Limits
from aiofeed.kernel.core.pytree import map_leaves
from aiofeed.kernel.feeder.arguments import as_source
from aiofeed.kernel.feeder.feeder import Feeder
from aiofeed.kernel.sampling.order import shuffled
from aiofeed.kernel.sources.subset import Subset


class WrongSampleError(AssertionError):
    """A source has given another sample than before for an index.

    Example:
        ```python
        import random

        from aiofeed.testing import WrongSampleError, check_source


        class Noise(list):
            def __getitem__(self, index):
                return random.random()


        try:
            check_source(Noise(range(10)))
        except WrongSampleError as error:
            print(error)
        ```
    """


class Way(NamedTuple):
    """A way to read a source, and the samples of its first epoch.

    Args:
        options: Arguments of ``Feeder``.
        indices: The samples that come; ``None``: as many as the source has, drawn with replacement.
        in_order: Whether they come in this order.
    """

    options: Mapping[str, Any]
    indices: Sequence[int] | None
    in_order: bool = False

    def gives(self, found: Sequence[Any], samples: Sequence[Any]) -> bool:
        """Return whether samples are those of an epoch, of all samples of the source in order."""
        if self.indices is None:
            return len(found) == len(samples) and {*found} <= {*samples}
        expected = [samples[index] for index in self.indices]
        return [*found] == expected if self.in_order else Counter(found) == Counter(expected)


def ways_of(samples: int, order: Sequence[int] | None = None) -> dict[str, Way]:
    """Return the ways to read a source of so many samples, which has an ``order`` of its own if it is a mixture."""
    every, last_first = range(samples), range(samples)[::-1]
    ordered, mixed = every if order is None else order, shuffled(samples, 0, 0)(np.arange(samples)).tolist()
    batches = [[*last_first[at : at + 3]] for at in range(0, samples, 3)]
    return {
        "in order": Way({}, ordered, True),
        "shuffle=True": Way({"shuffle": True}, mixed if order is None else every, order is None),
        'shuffle="keyed"': Way({"shuffle": "keyed"}, every),
        'shuffle="window"': Way({"shuffle": "window:2"}, every),
        'shuffle="replacement"': Way({"shuffle": "replacement"}, None),
        "sampler=": Way({"sampler": [*last_first]}, last_first, True),
        "weights=": Way({"weights": [1.0] * samples}, None),
        "batch_sampler=": Way({"batch_size": None, "batch_sampler": batches}, last_first, True),
        "exclude=": Way({"exclude": [samples - 1]}, every[:-1]),
        "in_order=False": Way({"in_order": False}, every),
        'in_order="samples"': Way({"in_order": "samples"}, every),
        'on_error="skip"': Way({"on_error": FailurePolicy("skip", max_failures=1)}, ordered, True),
        'on_error="replace"': Way({"on_error": FailurePolicy("replace", max_failures=1)}, ordered, True),
        "retries": Way({"on_error": FailurePolicy(retries=1, read_timeout_s=600)}, ordered, True),
        'cache="host"': Way({"cache": "host"}, ordered, True),
    }


def resumed(
    source: Any, samples_in: Callable[[Any], list[Any]], before: int = 2, after: int = 4, **options: Any
) -> list[Any]:
    """Return the samples of an epoch that other ranks, ``after`` of them, go on with after a batch of each of before.

    ``samples_in`` returns the samples of a batch.
    """
    found, state = [], ""
    for rank in range(before):
        with Feeder(source, shard=(rank, before), **options) as feeder:
            found += samples_in(next(iter(feeder)))
            state = state or json.dumps(feeder.state_dict())
    for rank in range(after):
        with Feeder(source, shard=(rank, after), **options) as feeder:
            feeder.load_state_dict(json.loads(state))
            found += [sample for batch in feeder for sample in samples_in(batch)]
    return found


def check_source(source: Any, *, decode: Callable[..., Any] | None = None, samples: int = 64) -> None:
    """Read samples of a source in every way that feeders do, and compare them.

    Example:
        ```python
        import aiofeed
        from aiofeed.testing import check_source

        photos = aiofeed.ImageFolder("photos")  # or a source of your own
        check_source(photos, decode=aiofeed.DecodeImage(size=64))
        ```

    One after the other, many at once, in every order, with policies for failures and a cache, from the middle of an
    epoch on by other ranks, of a part and of a mixture with itself, and of a copy by ``pickle``, as worker processes
    have one. What a ``Feeder`` refuses before the first batch is left out.

    Args:
        source: A source with indices. Each sample must always be the same.
        decode: As for ``Feeder``. By default samples are compared as they are read.
        samples: Most samples that are read.

    Raises:
        WrongSampleError: A sample differs, or a key is not a text of its own.
        TypeError: The source cannot be pickled, or lacks a method.
        FeedError: A sample cannot be read.
    """
    whole: Any = as_source(source).adopted()
    count = min(len(whole), samples)
    part = whole[:count] if hasattr(type(whole), "__getitem__") else Subset(whole, np.arange(count))
    keys = [part.key(index) for index in range(count)]
    if not all(isinstance(key, str) for key in keys) or len({*keys}) < count:
        raise WrongSampleError(f"key(index) must be another text for each sample, got {keys[:4]}")
    if decode is None and whole.traits.decode == "needed":
        decode = _unchanged
    given: dict[str, Any] = {"decode": decode, "batch_size": 4, "collate_fn": list}
    with Feeder(part, **given, limits=Limits(read_concurrency=1, decode_threads=1)) as feeder:
        expected = [_digest(sample) for batch in feeder for sample in batch]
    reads: list[tuple[str, Any, Way]] = [(name, part, way) for name, way in ways_of(count).items()]
    reads.append(("of a pickled copy", _pickled(part), Way({}, range(count), True)))
    reads.append(("of a part", part[::-1], Way({}, range(count)[::-1], True)))
    with contextlib.suppress(TypeError, ValueError):
        mixture = load_addon("Mixture", "check_source")({"a": part, "b": part})
        reads.append(("of a mixture with itself", mixture, Way({}, [*range(count)] * 2)))
    for name, checked, way in reads:
        try:
            feeder = Feeder(checked, **given | {**way.options})
        except (TypeError, ValueError):
            continue
        with feeder:
            found = [_digest(sample) for batch in feeder for sample in batch]
        if not way.gives(found, expected):
            pairs = zip(way.indices or (), found, strict=False)
            wrong = [keys[index] for index, each in pairs if way.in_order and each != expected[index]]
            raise WrongSampleError(f"{', '.join(wrong[:3])}: the samples read {name} differ from the first read")
    rest = resumed(part, lambda batch: list(map(_digest, batch)), **given, shuffle=True)
    if {*rest} != {*expected}:
        raise WrongSampleError("the samples that other ranks read after a resume differ from the first read")


def _pickled(source: Any) -> Any:
    try:
        return pickle.loads(pickle.dumps(source))
    except Exception as error:
        raise TypeError(f"{type(source).__name__} cannot be pickled, as worker processes need it: {error}") from error


def _unchanged(sample: Any) -> Any:
    return sample


def _digest(sample: Any) -> str:
    """Return a text that identifies the values of a sample."""
    leaves: list[bytes] = []

    def add(leaf: Any) -> Any:
        values = np.asarray(leaf) if hasattr(leaf, "shape") else None
        leaves.append(repr(leaf).encode() if values is None else f"{values.dtype}{values.shape}".encode())
        leaves.append(b"" if values is None else values.tobytes())
        return leaf

    map_leaves(add, sample)
    return hashlib.sha256(b"\0".join(leaves)).hexdigest()
