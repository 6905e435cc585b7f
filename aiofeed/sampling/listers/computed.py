"""The base of orders that are computed from seed and epoch, position by position."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import ClassVar

from aiofeed.core.errors import StateError
from aiofeed.sampling.order import ComputedEpoch, Permutation
from aiofeed.sampling.schedule import Position
from aiofeed.sampling.state import json_dict


class ComputedOrder(ABC):
    """An order of which a state has to identify the arguments only.

    Args:
        length: The number of samples of an epoch.
        digest: Identifies the arguments.
    """

    sized = True
    argument: ClassVar[str]
    """The argument of ``Feeder`` that it belongs to."""
    differs: ClassVar[str]
    """What differs if the digest of a state does."""

    def __init__(self, length: int, digest: str) -> None:
        self._length = length
        self._digest = digest

    def __len__(self) -> int:
        """The samples of an epoch."""
        return self._length

    @abstractmethod
    def permutation(self, epoch: int) -> Permutation:
        """The index at each position of an epoch."""

    def list_epoch(self, epoch: int, *, resumed: bool) -> ComputedEpoch:
        """The indices of an epoch, computed on demand."""
        return ComputedEpoch(self._length, self.permutation(epoch))

    def repeat_last_epoch(self) -> None:
        """Does nothing: the list of an epoch is always the same."""
        return None

    def state(self, position: Position) -> str:
        """What identifies the order, as JSON."""
        return json.dumps({self.argument: self._digest})

    def load_state(self, text: str) -> None:
        """Check that a state is of the same order.

        Raises:
            StateError: It is of another one.
        """
        if json_dict(text).get(self.argument) != self._digest:
            raise StateError(f"the state was saved with {self.differs}")
