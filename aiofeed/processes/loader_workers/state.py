"""The saved state of a ``DataLoader``: its position in an epoch, and the states from which the order follows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from aiofeed.core.errors import StateError
from aiofeed.processes.loader_workers import random_state as rng
from aiofeed.processes.loader_workers.iterators import LoaderPosition

VERSION = 1


@dataclass(frozen=True)
class OrderState:
    """The states from which the order of an epoch follows, taken at one time."""

    generators: tuple[Any, ...]
    own_generators: list[torch.Tensor]
    sampler: Any

    @classmethod
    def of(cls, loader: Any) -> OrderState:
        """The present states of a loader."""
        stateful = _stateful_sampler(loader)
        return cls(
            rng.random_state(),
            [generator.get_state() for generator in _own_generators(loader)],
            None if stateful is None else stateful.state_dict(),
        )

    @classmethod
    def parse(cls, packed: dict[str, Any]) -> OrderState:
        """The states of ``packed``; ``LookupError``, ``TypeError``, ``ValueError`` or ``StateError`` if damaged."""
        return cls(
            rng.unpack_random_state(packed["generators"]),
            [rng.unpack_generator(each) for each in packed["own_generators"]],
            packed["sampler"],
        )

    @cached_property
    def packed(self) -> dict[str, Any]:
        """The states as plain values."""
        return {
            "generators": rng.pack_random_state(self.generators),
            "own_generators": [rng.pack_generator(state) for state in self.own_generators],
            "sampler": self.sampler,
        }

    def check(self, loader: Any) -> None:
        """Raise ``StateError`` if the generators of the loader cannot have the states."""
        for generator, state in zip(_own_generators(loader), self.own_generators, strict=False):
            try:
                torch.Generator(generator.device).set_state(state)
            except (RuntimeError, TypeError) as error:
                raise StateError(f"the state of a generator is damaged: {error}") from error

    def restore_generators(self, loader: Any) -> None:
        """Set the global generators and those of the loader."""
        rng.set_random_state(self.generators)
        for generator, state in zip(_own_generators(loader), self.own_generators, strict=False):
            generator.set_state(state)

    def restore_sampler(self, loader: Any) -> None:
        """Load the state of the sampler, if it has one."""
        stateful = _stateful_sampler(loader)
        if self.sampler is not None and stateful is not None:
            stateful.load_state_dict(self.sampler)


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of the loader and of its samplers, which may be nested, each once."""
    holders: list[Any] = [loader]
    for holder in holders:
        inner = [getattr(holder, name, None) for name in ("batch_sampler", "sampler")]
        holders += [each for each in inner if each is not None and not any(each is other for other in holders)]
    generators = [getattr(holder, "generator", None) for holder in holders]
    return list(dict.fromkeys(each for each in generators if isinstance(each, torch.Generator)))


def _stateful_sampler(loader: Any) -> Any:
    for sampler in (loader.batch_sampler, loader.sampler):
        if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
            return sampler
    return None


@dataclass(frozen=True)
class LoaderState:
    """A parsed state; ``start``: at the start of its epoch, ``None`` if it was saved between two epochs."""

    packed: dict[str, Any]
    num_workers: int
    batches: int | None
    position: LoaderPosition
    now: OrderState
    start: OrderState | None

    @classmethod
    def parse(cls, state: dict[str, Any]) -> LoaderState:
        """The parts of a ``state_dict``; ``StateError`` if it is damaged or of another version."""
        try:
            if state["version"] != VERSION:
                raise StateError(f"the state has version {state['version']!r}; this aiofeed reads {VERSION}")
            epoch, start = state["epoch"], None
            workers = [_checked_worker(each) for each in state["workers"]]
            position = LoaderPosition(workers=workers, dataset=state["dataset"], restarted=bool(workers))
            if epoch is not None:
                start = OrderState.parse(epoch["start"])
                position = LoaderPosition(
                    _natural(epoch["batches"]),
                    [_natural(batch) for batch in epoch["later"]],
                    _natural(epoch["returned"]),
                    [_natural(batch + 1) - 1 for batch in epoch["ended"]],
                    [_checked_worker(each) for each in epoch["workers"]],
                    epoch["dataset"],
                    {False: False, True: True}[epoch["restarted"]],
                )
            for values in (workers, position.workers, position.ended):
                if len(values) not in (0, state["num_workers"]):
                    raise ValueError(f"{len(values)} states of {state['num_workers']} workers")
            return cls(
                state,
                _natural(state["num_workers"]),
                state["batches"],
                position,
                OrderState.parse(state),
                start,
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"this is not the state of an aiofeed.DataLoader, or it is damaged: {type(error).__name__}: {error}"
            ) from error


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _checked_worker(state: list[Any] | None) -> list[Any] | None:
    if state is not None:
        random_generators, _ = state
        rng.unpack_random_state(random_generators)
    return state
