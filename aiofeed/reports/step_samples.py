"""The names of the samples of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiofeed.kernel.core.types import public_in
from aiofeed.kernel.core.validation import check_epoch, check_int_from, counted
from aiofeed.kernel.sampling.feed_order import FeedOrder
from aiofeed.kernel.sampling.order import sample_seed
from aiofeed.kernel.sampling.schedule import Position


@public_in("aiofeed.reports")
@dataclass(frozen=True)
class StepSample:
    """A sample of one step, as ``Feeder.samples`` names it.

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(photos, decode=decode, batch_size=4, shuffle=True)
        for sample in feeder.samples(1):  # of the second batch; nothing is read
            print(sample.index, sample.key)
        ```

    Args:
        index: Its index in the source.
        key: Its key, by which errors name it; ``None`` if the source is not known.
        source: The name of its source in a ``Mixture`` with weights; otherwise ``None``.
        epoch: The epoch.
        position: Its position in the global order of the epoch.
        seed: The seed of its random numbers.
    """

    index: int
    key: str | None
    source: str | None
    epoch: int
    position: int
    seed: int


def samples_at(
    order: FeedOrder, step: int, epoch: int, rank: int | None, key: Callable[[int], str | None]
) -> list[StepSample]:
    """Return the samples of a step, counted from the start of an epoch; ``rank``: by default this one.

    Raises:
        TypeError, ValueError: An argument is no such number, an epoch has no batches, or the order is a sampler's.
    """
    step, epoch = check_int_from(0, "step", step), check_epoch("epoch", epoch)
    lister = order.lister
    if lister.listed_once:
        raise ValueError(
            f"the samples of a step are not known with {order.describe()}: it lists epochs one after another"
        )
    position, schedule, listed = order.seek(Position(epoch), step, rank)
    change = lister.changed_at
    if (position.epoch, position.consumed) < (change.epoch, change.consumed):
        raise ValueError(
            f"the step is before the mixture was changed, after {counted(change.consumed, 'sample')} of epoch "
            f"{change.epoch}: ask a feeder over the mixture of that time"
        )
    plan, source = next(schedule.plans(position, listed)), lister.sample_lister.name_of
    return [
        StepSample(index, key(index), source(index), position.epoch, at, sample_seed(plan.epoch_seed, at))
        for index, at in zip(plan.indices, plan.positions, strict=True)
    ]
