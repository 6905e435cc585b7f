"""The saved state of a ``DataLoader``: the start of an epoch, and the batches of it that were returned."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.data.dataloader import _DatasetKind, _get_distributed_settings

from aiofeed.kernel.core.errors import StateError
from aiofeed.kernel.core.validation import check_int_from, length_of
from aiofeed.kernel.sampling.state import state_hint, unreadable
from aiofeed.loader.workers import random_state as rng
from aiofeed.loader.workers.fetching import dataset_state, first_stateful

VERSION = 1
_natural = partial(check_int_from, 0, "a count")


@dataclass(frozen=True)
class OrderState:
    """The states from which the order of an epoch follows, taken at one time."""

    generators: tuple[Any, ...]
    own_generators: list[torch.Tensor]
    sampler: Any

    @classmethod
    def of(cls, loader: Any) -> OrderState:
        """Return the present states of a loader."""
        stateful = first_stateful(loader.batch_sampler, loader.sampler)
        return cls(
            rng.random_state(),
            [generator.get_state() for generator in _own_generators(loader)],
            None if stateful is None else stateful.state_dict(),
        )

    @classmethod
    def parse(cls, packed: dict[str, Any]) -> OrderState:
        """Parse ``packed`` states; ``LookupError``, ``TypeError``, ``ValueError`` or ``StateError`` if damaged."""
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

    def restore(self, loader: Any) -> None:
        """Set the generators, and load the state of the sampler."""
        self.restore_generators(loader)
        self.restore_sampler(loader)

    def restore_generators(self, loader: Any) -> None:
        """Set the global generators and those of the loader."""
        rng.set_random_state(self.generators)
        self.restore_own_generators(loader)

    def restore_own_generators(self, loader: Any) -> None:
        """Set the generators of the loader and its samplers."""
        for generator, state in zip(_own_generators(loader), self.own_generators, strict=False):
            generator.set_state(state)

    def restore_sampler(self, loader: Any) -> None:
        """Load the state of the sampler, if it has one."""
        stateful = first_stateful(loader.batch_sampler, loader.sampler)
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


@dataclass(frozen=True)
class LoaderPosition:
    """Where an epoch continues.

    Args:
        batches: The batches before this number were returned, or failed before one that was returned.
        later: Numbers of further such batches, if they need not be in order.
        returned: Number of batches that were returned.
        turn: The worker of the next batch, in order.
        workers: For each worker the number of its batches that were returned or failed, and the state to continue
            from, see ``Restore``; ``None``: from its seed. If an iterable dataset saves no state, it is the worker's
            state at the start of the epoch, and the batches are read again.
        dataset: State of the dataset without workers, if it has one.
        base_seed: The seed of persistent workers, if the epoch is not their first.
    """

    batches: int = 0
    later: Sequence[int] = ()
    returned: int = 0
    turn: int = 0
    workers: Sequence[tuple[int, list[Any] | None]] = ()
    dataset: Any = None
    base_seed: int | None = None


class Progress:
    """The start of an epoch, and the batches that were returned. It does not refer to the iterator.

    Args:
        start: The states at the start of the epoch.
        position: Where the iterator starts.
        workers: The pickled state of each worker after its last batch that was received; changed by the iterator.
        base_seed: The seed of persistent workers.
        iterable: Whether the dataset is iterable.
        dataset: Returns the state of the dataset, without workers.

    Attributes:
        finished: Whether the consumer has seen the end of the epoch.
        making: While a batch is made, without workers: the state of the dataset before it, if it is known.
    """

    def __init__(
        self,
        start: OrderState,
        position: LoaderPosition,
        *,
        workers: list[bytes | None] | None = None,
        base_seed: int | None = None,
        iterable: bool = False,
        dataset: Callable[[], Any] | None = None,
    ) -> None:
        self.start = start
        self.first = position
        self.finished: bool = False
        self.making: tuple[Any, ...] | None = None
        self.returned: int = position.returned
        self._received = workers = workers if workers is not None else []
        self._first_states = self._states = list(workers)
        self._handed = [0] * len(workers)
        if workers and position.workers:
            self._handed = [handed for handed, _ in position.workers]
        self._batches, self._later, self._turn = position.batches, set(position.later), position.turn
        self._base_seed = base_seed
        self._iterable = iterable
        self._dataset = dataset
        self._last = -1
        self._failed: list[tuple[int, int, bytes | None]] = []

    @property
    def begun(self) -> bool:
        """Whether the consumer got a batch, or the end of the epoch."""
        return self.finished or self.returned > self.first.returned

    def add(self, batch: int, worker: int | None = None, state: bytes | None = None, *, in_order: bool = True) -> None:
        """Count a returned batch; ``state``: of its worker after it. A call that Ctrl-C interrupts is repeated."""
        if batch == self._last:
            return
        handed, states, batches, later = list(self._handed), list(self._states), self._batches, set(self._later)
        if worker is not None:
            for _, number, after in (*self._failed, (batch, worker, state)):
                handed[number] += 1
                states[number] = after
        if in_order or self._iterable:
            batches = batch + 1
        else:
            later.update([batch, *(number for number, _, _ in self._failed)])
            while batches in later:
                later.discard(batches)
                batches += 1
        turn = 0 if worker is None else (worker + 1) % len(handed)
        # No call follows, so Ctrl-C cannot come between these lines.
        self._handed, self._states, self._batches, self._later, self._turn = handed, states, batches, later, turn
        self._failed = []
        self.returned += 1
        self._last = batch

    def failed(self, batch: int, worker: int, state: bytes | None) -> None:
        """Note that the error of a batch was raised. Its batch counts once a later one is returned."""
        if not self._failed or self._failed[-1][0] != batch:
            self._failed.append((batch, worker, state))

    def position(self) -> LoaderPosition:
        """Return the position after the last batch that was returned."""
        dataset = None
        # At the start of an epoch an iterable dataset may still have its state at the end of the epoch before.
        if self._dataset is not None and (self._batches or not self._iterable):
            (dataset,) = self.making or (self._dataset(),)
        return replace(
            self.first,
            batches=self._batches,
            later=sorted(self._later),
            returned=self.returned,
            turn=self._turn,
            workers=[(handed, self._state(number, handed)) for number, handed in enumerate(self._handed)],
            dataset=dataset,
        )

    def _state(self, worker: int, handed: int) -> list[Any] | None:
        state = _unpickled(self._states[worker])
        if not self._iterable or (handed and state is not None and state[1] is not None):
            return state
        first = _unpickled(self._first_states[worker])
        return first and [first[0], None]

    def after(self) -> LoaderPosition:
        """Return the position before the next epoch, in which persistent workers read a dataset from its start."""
        if self._base_seed is None:
            return LoaderPosition()
        self._states = self._first_states = self._received
        workers = [(0, self._state(number, 0)) for number in range(len(self._received))]
        return LoaderPosition(workers=workers, base_seed=self._base_seed)


def _unpickled(state: bytes | None) -> list[Any] | None:
    return None if state is None else pickle.loads(state)


@dataclass
class LoaderState:
    """A parsed state. ``start``: at the start of its epoch, ``None`` if it was saved between two epochs."""

    packed: dict[str, Any]
    num_workers: int
    batches: int | None
    rank: int
    position: LoaderPosition
    now: OrderState
    start: OrderState | None

    @staticmethod
    def pack(loader: Any, start: OrderState | None, position: LoaderPosition) -> dict[str, Any]:
        """Return the present state of a loader, as plain values."""
        return {
            "version": VERSION,
            "num_workers": loader.num_workers,
            "batches": _batches(loader),
            "rank": _rank(),
            **OrderState.of(loader).packed,
            "epoch": {"start": None if start is None else start.packed, **asdict(position)},
        }

    @classmethod
    def parse(cls, state: dict[str, Any], loader: Any) -> LoaderState:
        """Return the parts of a ``state_dict``; ``StateError`` if it is damaged or of another loader or version."""
        try:
            if type(state["version"]) is not int or state["version"] != VERSION:
                raise StateError(f"the state has version {state['version']!r}; this aiofeed reads {VERSION}")
            epoch = state["epoch"]
            loaded = cls(
                state,
                _natural(state["num_workers"]),
                None if state["batches"] is None else _natural(state["batches"]),
                _natural(state["rank"]),
                LoaderPosition(
                    _natural(epoch["batches"]),
                    [_natural(batch) for batch in epoch["later"]],
                    _natural(epoch["returned"]),
                    _natural(epoch["turn"]),
                    [(_natural(handed), _checked_worker(each)) for handed, each in epoch["workers"]],
                    epoch["dataset"],
                    None if epoch["base_seed"] is None else _natural(epoch["base_seed"]),
                ),
                OrderState.parse(state),
                None if epoch["start"] is None else OrderState.parse(epoch["start"]),
            )
            workers, turn = len(loaded.position.workers), loaded.position.turn
            if workers not in (0, loaded.num_workers) or turn >= max(loaded.num_workers, 1):
                raise ValueError(f"{workers} states and the turn of worker {turn}, of {loaded.num_workers}")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(state, dict) and ("_snapshot" in state or "_sampler_iter_yielded" in state):
                raise StateError(
                    "this is a state of torchdata's StatefulDataLoader, which lacks the random generators from which "
                    "the order follows here: finish its epoch with StatefulDataLoader, and begin the next one with "
                    "aiofeed.DataLoader"
                ) from None
            if isinstance(error, KeyError) and "version" in state:
                raise unreadable("the state", error) from None
            raise StateError(
                f"this is not the state of an aiofeed.DataLoader, or it is damaged: {type(error).__name__}: {error}"
                f"{state_hint(state, 'own_generators')}"
            ) from error
        loaded._check(loader)
        return loaded

    def _check(self, loader: Any) -> None:
        for name, theirs, ours in (
            ("num_workers", self.num_workers, loader.num_workers),
            ("batches per epoch", self.batches, _batches(loader)),
        ):
            if theirs != ours:
                raise StateError(f"the state is of another DataLoader: {name}: {theirs} in the state, {ours} here")
        for order in (self.now, self.start):
            if order is not None:
                order.check(loader)

    @property
    def restores_generators(self) -> bool:
        """Whether loading the state sets the global generators; from within Accelerate's ``load_state`` it does not.

        Accelerate restores them itself, as they were after the step on the last batch.
        """
        frames = (frame for frame, _ in traceback.walk_stack(None))
        accelerate = any(frame.f_globals.get("__name__") == "accelerate.checkpointing" for frame in frames)
        return not (accelerate and "_iterator_finished" in self.packed)

    @property
    def first_generators(self) -> tuple[Any, ...] | None:
        """The states of the global generators for the first batch alone; ``None`` if it is made with the present ones.

        Accelerate takes the state of a loader that it has prepared, and reads the next batch, before the step on the
        last one.
        """
        now = self.now.generators
        early = "_iterator_finished" in self.packed and self.position.returned > 0
        return now if early and not rng.same_random_state(rng.random_state(), now) else None

    @property
    def of_this_rank(self) -> bool:
        """Whether this rank has saved the state."""
        return self.rank == _rank()

    def without_worker_generators(self) -> None:
        """Leave out the random generators of the workers: each begins with its seed."""
        workers = [(handed, state and [None, state[1]]) for handed, state in self.position.workers]
        self.position = replace(self.position, workers=workers)


def _rank() -> int:
    return int(_get_distributed_settings()[1])


def _batches(loader: Any) -> int | None:
    # The length of an iterable dataset may be inaccurate.
    return None if loader._dataset_kind == _DatasetKind.Iterable else length_of(loader._index_sampler)


def saved_dataset(loader: Any) -> Any:
    """Return the state of a dataset with indices, which is called in this process."""
    return dataset_state(None, loader.dataset) if loader._dataset_kind == _DatasetKind.Map else None


def _checked_worker(state: list[Any] | None) -> list[Any] | None:
    if state is not None:
        random_generators, _ = state
        if random_generators is not None:
            rng.unpack_random_state(random_generators)
    return state
