"""The order of a feeder's samples: its arguments, checked against each other, become listers and a ``FeedOrder``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from aiofeed.sampling.feed_order import FeedOrder, Lister
from aiofeed.sampling.listers.computed import ComputedOrder
from aiofeed.sampling.listers.length_plans import LengthPlan, PlanLister
from aiofeed.sampling.listers.mixture import MixtureOrder
from aiofeed.sampling.listers.sampler import BatchSamplerAdapter
from aiofeed.sampling.listers.weighted import WeightedOrder
from aiofeed.sampling.listers.window import WindowOrder
from aiofeed.sampling.schedule import Schedule, Shuffle, is_shuffle, window_shards
from aiofeed.sources.mixture import Mixture
from aiofeed.sources.stream import Stream
from aiofeed.sources.stream_epochs import StreamOrder


def a_shuffle(value: object) -> Shuffle:
    """Return ``value`` if it is a valid ``shuffle``."""
    if is_shuffle(value):
        return value
    hint = ": pass False; aiofeed.DataLoader takes None, too" if value is None else ""
    raise TypeError(f"shuffle must be True, False, 'keyed', 'replacement' or 'window', got {value!r}{hint}")


def new_lister(
    source: object, weights: Any, order: Schedule, *, sampled: bool, listed: bool
) -> MixtureOrder | ComputedOrder | None:
    """Return the order of a mixture, of weights or of shards; ``None`` for the schedule's own order.

    Raises:
        TypeError, ValueError: The arguments exclude each other, or the weights do not fit the source.
    """
    if isinstance(source, Mixture):
        given = {
            "weights=": weights is not None,
            "sampler=": sampled,
            "batch_sampler=": listed,
            f"shuffle={order.shuffle!r}": order.shuffle not in (True, False, "keyed"),
        }
        if excluded := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"a Mixture decides which samples come, so leave out {', '.join(excluded)}")
        return source.order(order.seed, shuffle=bool(order.shuffle))
    shards = window_shards(order.shuffle)
    if weights is None and (shards is None or sampled or listed):  # those exclude shuffle=
        return None
    if weights is None and shards is not None:
        starts = getattr(source, "shard_starts", None)
        if starts is None:
            raise ValueError(
                f"shuffle={order.shuffle!r} mixes the samples of shards, and {source!r} has none: pass shuffle=True"
            )
        return WindowOrder(starts, shards, order.seed)
    if sampled or listed or order.shuffle not in (False, "replacement"):
        other = "sampler=" if sampled else "batch_sampler=" if listed else f"shuffle={order.shuffle!r}"
        raise ValueError(f"weights= draws samples with replacement, so leave out {other}")
    return WeightedOrder(weights, order.length, order.seed)


def new_batches(
    batch_size: object,
    batch_sampler: Any,
    order: Schedule,
    lister: MixtureOrder | ComputedOrder | None,
    *,
    sampled: bool,
) -> BatchSamplerAdapter | PlanLister | None:
    """Return the lister of a plan or of a batch sampler; ``None`` for a ``batch_size`` that is a number.

    Raises:
        TypeError, ValueError: The arguments exclude each other, or the plan does not fit the source.
    """
    if batch_sampler is not None:
        given = {
            "batch_size": batch_size is not None,
            "sampler": sampled,
            "shuffle": bool(order.shuffle),
            "drop_last": order.drop_last,
        }
        if excluded := [f"{name}=" for name, is_given in given.items() if is_given]:
            raise ValueError(f"batch_sampler= makes the batches, so leave out {', '.join(excluded)}")
        return BatchSamplerAdapter(batch_sampler, order.length)
    if not isinstance(batch_size, LengthPlan):
        return None
    if sampled:
        raise ValueError(f"{type(batch_size).__name__} decides the order, so leave out sampler=")
    if order.shuffle not in (True, False) and (lister is None or isinstance(lister, WindowOrder)):
        name = type(batch_size).__name__
        raise ValueError(f"{name} shuffles a list: pass shuffle=True instead of {order.shuffle!r}")
    batch_size.bind(order.length)
    shuffle = bool(order.shuffle) or isinstance(lister, WeightedOrder)
    return PlanLister(batch_size, order.seed, shuffle=shuffle, drop_last=order.drop_last, order=lister)


def new_order(
    source: object,
    base: Schedule,
    sampler: Iterable[int] | None,
    shard: tuple[int, int] | Literal["auto"] | None,
    lister: Lister | None,
) -> FeedOrder:
    """Return the order of a feeder; see ``FeedOrder``."""
    if isinstance(source, Stream):
        return StreamOrder(base, shard, source)
    return FeedOrder(base, sampler, shard, lister)
