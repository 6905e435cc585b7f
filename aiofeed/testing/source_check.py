"""Checks that a source gives the same samples however it is read."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from aiofeed.kernel.core.limits import Limits
from aiofeed.kernel.core.pytree import map_leaves
from aiofeed.kernel.feeder.arguments import as_source
from aiofeed.kernel.feeder.feeder import Feeder


class WrongSampleError(AssertionError):
    """A source has given another sample than before for an index."""


def check_source(source: Any, *, decode: Callable[..., Any] | None = None, samples: int = 64) -> None:
    """Read samples of a source in every way that feeders do, and compare them.

    One after the other, many at once, in a random order, from the middle of an epoch on, and of a copy by ``pickle``,
    as worker processes have one.

    Args:
        source: A source with indices. Each sample must always be the same.
        decode: As for ``Feeder``. By default samples are compared as they are read.
        samples: Most samples that are read.

    Raises:
        WrongSampleError: A sample differs, or a key is not a text of its own.
        TypeError: The source cannot be pickled, or lacks a method.
        FeedError: A sample cannot be read.
    """
    count = min(len(source), samples)
    keys = [source.key(index) for index in range(count)]
    if not all(isinstance(key, str) for key in keys) or len({*keys}) < count:
        raise WrongSampleError(f"key(index) must be another text for each sample, got {keys[:4]}")
    if decode is None and as_source(source).traits.decode == "needed":
        decode = _unchanged

    def read(indices: list[int], checked: Any = source, resumed_at: int = 0, **limits: int) -> list[str]:
        options: dict[str, Any] = {"decode": decode, "batch_size": 4, "sampler": indices, "collate_fn": list}
        found: list[str] = []
        with Feeder(checked, limits=Limits(**limits), **options) as feeder:
            for number, batch in enumerate(feeder, 1):
                found += map(_digest, batch)
                if number == resumed_at:
                    break
            state = feeder.state_dict()
        if resumed_at:
            with Feeder(checked, limits=Limits(**limits), **options) as feeder:
                feeder.load_state_dict(state)
                found += [_digest(sample) for batch in feeder for sample in batch]
        return found

    in_order = list(range(count))
    shuffled = [int(index) for index in np.random.default_rng(0).permutation(count)]
    expected = read(in_order, read_concurrency=1, decode_threads=1)
    ways = {
        "many at once": (in_order, read(in_order)),
        "in another order": (shuffled, read(shuffled)),
        "after a resume": (shuffled, read(shuffled, resumed_at=max(count // 8, 1))),
        "of a pickled copy": (in_order, read(in_order, pickle.loads(pickle.dumps(source)))),
    }
    for way, (indices, found) in ways.items():
        for index, digest in zip(indices, found, strict=True):
            if digest != expected[index]:
                raise WrongSampleError(f"{keys[index]}: the sample {index}, read {way}, differs from the first read")


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
