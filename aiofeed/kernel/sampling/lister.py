"""Which samples come, and in which batches: the base classes of listers and of plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from aiofeed.kernel.core.faces import Declares
from aiofeed.kernel.sampling.order import EpochList, Int64
from aiofeed.kernel.sampling.schedule import Position, Schedule

# Samples of a batch of a stream with a plan, as far as limits depend on them.
STREAM_SAMPLES = 32


class Lister:
    """Lists the epochs of a feeder, which its schedule shards by rank.

    This base class leaves the order to the schedule.

    Args:
        length: The number of samples of an epoch.

    Attributes:
        argument: The argument of ``Feeder`` that it belongs to; empty if the source or ``shuffle=`` decides.
        by_batches: Whether it lists batches, and not samples.
        typical_samples: The number of samples of a typical batch, if it lists batches.
        listed_once: Whether epochs can only be listed one after another, so that steps are not known before.
        sized: Whether its length is known before an epoch is listed.
        ranks: The number of ranks to which it gives other samples.
        distributed: Whether it gives each rank other samples, which must not be sharded again.
        excluded: Identifies the samples that it leaves out; ``None`` if it leaves out none.
        changed_at: The position at which it was changed last.
        may_change: Whether a state of other sources or weights may be loaded.
    """

    argument: str = ""
    by_batches: bool = False
    typical_samples: int = 1
    listed_once: bool = False
    sized: bool = True
    ranks: int = 1
    distributed: bool = False
    excluded: str | None = None
    changed_at: Position = Position()
    may_change: bool = False

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        """Return the number of samples, or of batches, of an epoch."""
        return self._length

    def list_epoch(self, epoch: int, *, resumed: bool) -> EpochList | None:
        """Return the list of an epoch; ``None`` for the order of the schedule.

        ``resumed``: whether the rest of an epoch is wanted, so that the list must be the same as before.
        """
        return None

    def identity(self) -> str:
        """Return a text that identifies the order of the epoch listed last, besides the schedule."""
        return ""

    def state(self, position: Position) -> str:
        """Return the state for a position as the JSON of a dict; empty without one."""
        return ""

    def load_state(self, text: str) -> None:
        """Restore a state. Raise ``StateError`` if it is of another order."""

    @property
    def sample_lister(self) -> Lister:
        """The lister of the samples of which this one forms batches; otherwise itself."""
        return self

    def check_ranks(self, ranks: int) -> None:
        """Raise ``ValueError`` if there are no batches for that many ranks."""

    def repeat_last_epoch(self) -> None:
        """List the last epoch again when it is listed next, because it returned no batch."""

    def counts(self, position: Position) -> dict[str, int]:
        """Return the samples drawn from each source before a position, from the first epoch on."""
        return {}

    def tokens(self, position: Position) -> dict[str, int]:
        """Return the tokens drawn from each source before a position, from the first epoch on, if it knows them."""
        return {}

    def count(self, indices: Int64) -> dict[str, int]:
        """Return how many of some samples are of each source."""
        return {}

    def name_of(self, index: int) -> str | None:
        """Return the name of the source of a sample."""
        return None

    def consumed(self, epoch: int, at: int) -> int:
        """Return the position that a position among all samples has without those that are excluded."""
        return at


class Plan(Declares, ABC):
    """The base class of values of ``batch_size=`` that form batches by the lengths of samples.

    Attributes:
        streams: Whether it is for a stream, whose items it measures as they come.
        decoded: Returns samples with their lengths, if it measures those of any source as they are decoded.
        measures: Whether the lengths have to be found by reading all samples first.
        shapes: The number of sizes of its full batches; 0: any.
        axis: The dimension of a tensor that is its length.
    """

    streams: bool = False
    decoded: Any = None
    measures: bool = False
    shapes: int = 0
    axis: int = 0

    @abstractmethod
    def new_lister(self, schedule: Schedule, samples: Lister | None) -> Lister:
        """Return the lister of the batches of all samples of a schedule, or of those that another lister lists.

        Raises:
            TypeError, ValueError: The plan is not for so many samples.
        """

    def new_collate(self) -> Any:
        """Return what makes batches in place of ``collate_fn``, see ``builder_factory``; ``None``: the default."""
        return None
