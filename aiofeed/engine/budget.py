"""Bytes in flight: reserved from an estimate, corrected when they are known, one batch always allowed."""

from __future__ import annotations

# How fast the estimate forgets a large batch; at 0.95 half of it is gone after fourteen smaller ones.
_DECAY = 0.95


class Budget:
    """Reservations of memory against a limit. Used on the engine's loop only.

    Args:
        limit_bytes: most that may be reserved, one batch excepted.
        bytes_per_sample: first estimate; 0 where nothing is known, and then the first batch goes alone.
    """

    def __init__(self, limit_bytes: int, bytes_per_sample: float = 0.0) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self._per_sample = bytes_per_sample
        self._holders = 0

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return self._per_sample > 0.0

    def estimate(self, samples: int) -> int:
        """What a batch of ``samples`` will probably take."""
        return int(self._per_sample * samples)

    def admits(self, samples: int) -> bool:
        """Whether one more batch fits."""
        if self._holders == 0:
            return True
        if not self.known:
            return False
        return self.reserved_bytes + self.estimate(samples) <= self.limit_bytes

    def reserve(self, samples: int) -> int:
        """Take the estimate for a batch; give the returned figure to ``correct`` or ``release``."""
        taken = self.estimate(samples)
        self.reserved_bytes += taken
        self._holders += 1
        return taken

    def correct(self, taken: int, actual: int, samples: int) -> int:
        """Replace an estimate by what the batch really takes; returns the figure to release later."""
        self.reserved_bytes += actual - taken
        self._per_sample = max(actual / max(samples, 1), self._per_sample * _DECAY)
        return actual

    def at_least(self, taken: int, known: int) -> int:
        """Raise an estimate to what a batch is known to take by now; returns the figure to ``correct`` later."""
        self.reserved_bytes += max(known - taken, 0)
        return max(known, taken)

    def release(self, taken: int) -> None:
        """Give a batch's bytes back."""
        self.reserved_bytes -= taken
        self._holders -= 1
