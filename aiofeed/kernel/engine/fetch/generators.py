"""The random generators of ``random``, NumPy and torch, global and of a ``Dataset``, from which its items may draw."""

from __future__ import annotations

import gc
import logging
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

ItemT = TypeVar("ItemT")

log: logging.Logger = logging.getLogger("aiofeed.engine")

# A dataset is reported if it draws in each of its first calls. The training may draw at the same time, rarely in all.
CALLS = 3

# The objects, and those in each list, that are looked at for generators: a dataset may have a list of all its samples.
LOOKED_AT, LOOKED_AT_EACH = 10_000, 100

# Types of datasets that were reported.
_reported: weakref.WeakSet[type] = weakref.WeakSet()


def seed_generators(seed: int, owned: Sequence[Any] = ()) -> None:
    """Seed the global generators, and others; takes 10 us, most of it ``random.seed``. Does not import torch."""
    for number, generator in enumerate(owned, 1):  # several must not draw the same numbers
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed + number).state
        else:
            getattr(generator, "manual_seed", generator.seed)(seed + number & 0xFFFFFFFF)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for CUDA devices, too: 150 us


def generators_of(dataset: object) -> list[Any]:
    """Return the generators in the attributes of a dataset, and of its transforms. Runs no code of it."""
    torch, left, seen = sys.modules.get("torch"), [dataset], dict[int, Any]()
    kinds = (random.Random, np.random.Generator, np.random.RandomState, *([torch.Generator] if torch else []))
    while left and len(seen) < LOOKED_AT:
        value = left.pop()
        if id(value) not in seen and not isinstance(value, type | ModuleType | FunctionType):
            seen[id(value)] = value
            left += () if isinstance(value, kinds) else gc.get_referents(value)[:LOOKED_AT_EACH]
    return [value for value in seen.values() if isinstance(value, kinds)]


def _states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    found = {"random": random.getstate(), "numpy.random": (kind, np.asarray(keys).tobytes(), *rest)}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.default_generator.get_state().numpy().tobytes()
    return found


class DrawDetector:
    """Reports a dataset that draws from the global generators in threads, which share them with the training.

    It compares the states of the generators around the first calls: 0.2 ms per call, and nothing is drawn.

    Attributes:
        done: Whether no further call needs to be watched.
    """

    def __init__(self, dataset: object) -> None:
        self._type = type(dataset)
        self._calls = 0
        self._drawn: set[str] | None = None
        self.done: bool = self._type in _reported

    def watch(self, call: Callable[[], ItemT]) -> ItemT:
        """Return the result of a call of the dataset."""
        before = _states()
        item = call()
        after = _states()
        drawn = {name for name, state in before.items() if after[name] != state}
        self._drawn = drawn if self._drawn is None else self._drawn & drawn
        self._calls += 1
        self.done = not self._drawn or self._calls == CALLS
        if self.done and self._drawn:
            self._report(" and ".join(sorted(self._drawn)))
        return item

    def _report(self, drawn: str) -> None:
        if self._type in _reported:
            return
        _reported.add(self._type)
        log.warning(
            "%s draws from the global generator of %s, which its thread shares with the training: its items differ "
            'from run to run and after a resume. With engine="process:N" each item has generators seeded by (seed, '
            "epoch, position); aiofeed.DataLoader seeds its workers as torch does",
            self._type.__name__,
            drawn,
        )
