"""Measures how much faster training could be without loading, within the training loop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

from aiofeed.kernel.core.pytree import map_leaves
from aiofeed.kernel.core.types import public_in

# Batches at the start of the epoch that are not timed, and further ones of which copies are kept. More than one, so
# that the step does not find all data in the processor's caches.
WARM_UP = 2
KEPT = 3

BatchT = TypeVar("BatchT")


@public_in("aiofeed.reports")
class Headroom(Generic[BatchT]):
    """An epoch in which some batches are returned again; ``print`` it afterwards. See ``Feeder.headroom``.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        feeder = aiofeed.Feeder(photos, decode=aiofeed.DecodeImage(size=224), batch_size=1)
        run = feeder.headroom(1)  # some 20 steps in a training
        for images, labels in run:
            images.float().mean()  # your training step
        print(run.loaded_s, run.floor_s)
        ```

    Attributes:
        loaded_s: Seconds per step with loading; 0 before the measurement.
        floor_s: Seconds per step without loading; 0 before the measurement.
    """

    def __init__(
        self,
        begin: Callable[[], Any],
        batches: int,
        *,
        static: bool,
        position: Callable[[], Any],
        go_to: Callable[[Any], None],
    ) -> None:
        self._begin = begin
        self._batches = batches
        self._needed = WARM_UP + KEPT + batches
        self._static = static
        self._position = position
        self._go_to = go_to
        self._kept: list[Any] = []
        self._before: Any = None
        self.loaded_s: float = 0.0
        self.floor_s: float = 0.0

    @property
    def gain(self) -> float:
        """How many times as fast training could be at most; 1 before the measurement."""
        return max(self.loaded_s / self.floor_s, 1.0) if self.floor_s else 1.0

    def __str__(self) -> str:
        if not self.floor_s:
            return (
                f"not measured: headroom({self._batches}) needs {self._needed} batches, and the epoch ended, or was "
                f"left, before"
            )
        return (
            f"A step takes {self.loaded_s * 1e3:.2f} ms with loading and {self.floor_s * 1e3:.2f} ms without: training "
            f"could be at most {self.gain:.2f} times as fast ({self._batches} and {self._batches} steps)"
        )

    def __iter__(self) -> Iterator[BatchT]:
        """Start an epoch."""
        epoch = self._start()
        for batch in epoch:
            self._returning(batch)
            yield batch
            del batch
            if self._returned():
                break
        yield from self._repeats(epoch)
        yield from epoch

    async def __aiter__(self) -> AsyncIterator[BatchT]:
        """Start an epoch."""
        epoch = self._start()
        async for batch in epoch:
            self._returning(batch)
            yield batch
            del batch
            if self._returned():
                break
        for batch in self._repeats(epoch):
            yield batch
            del batch
        async for batch in epoch:
            yield batch
            del batch

    def _start(self) -> Any:
        self._kept, self._number, self._began = [], 0, 0.0
        self.loaded_s = self.floor_s = 0.0
        return self._begin()

    def _returning(self, batch: Any) -> None:
        """Keep a copy, because the step may change the batch. Static batches are valid until the next one."""
        if WARM_UP <= self._number < WARM_UP + KEPT:
            try:
                self._kept = [*self._kept, batch if self._static else copied(batch)]
            except BaseException:  # no memory, or Ctrl-C: the user does not get this batch, so the state is before it
                self._go_to(self._before)
                raise

    def _returned(self) -> bool:
        """Count a batch after its step; return whether it is the last one that is timed."""
        self._number += 1
        if WARM_UP <= self._number < WARM_UP + KEPT:
            self._before = self._position()
        elif self._number == WARM_UP + KEPT:
            self._began = _now()
        return self._number == self._needed

    def _repeats(self, epoch: Any) -> Iterator[Any]:
        """End the timing with loading, return batches again, and print the result; not if too few were timed."""
        if epoch.batches < self._needed:
            self._kept = []
            print(self)
            return
        self.loaded_s = (_now() - self._began) / self._batches
        repeats_s = 0.0
        for number in range(self._batches):
            batch = self._kept[-1] if self._static else copied(self._kept[number % len(self._kept)])
            began = time.perf_counter()
            yield batch
            del batch
            seconds = (_now() if number == self._batches - 1 else time.perf_counter()) - began
            repeats_s += seconds
            epoch.leave_out(seconds)
        self.floor_s = repeats_s / self._batches
        self._kept = []
        print(self)


def copied(batch: Any) -> Any:
    """Return a batch with copies of its tensors and arrays."""
    import numpy as np
    import torch

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(copy_of, batch)


def _now() -> float:
    """Return the time at which the accelerator has done what was queued."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
