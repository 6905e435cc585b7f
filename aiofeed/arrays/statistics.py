"""Means, deviations and ranges of the values of fields, over samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.common.progress_bar import LoadProgress

if TYPE_CHECKING:
    import torch

    from aiofeed.arrays.fields import Field

# A batch has so many bytes: its values are copied several times, as float64.
BATCH_BYTES = 32 << 20


def statistics_of_values(
    source: Any, fields: dict[str, Field], samples: int = 1000, seed: int = 0, by: Any = ()
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the statistics of the fields of ``Arrays`` or a part of one, as ``Arrays.statistics`` describes them."""
    import torch

    from aiofeed import Feeder

    axes = [by] if isinstance(by, str | int) else [*by]
    there = {name: [names[-1] for names in field.axes] for name, field in fields.items()}
    if missing := {*axes}.difference(*(names for field in fields.values() for names in field.axes)):
        raise ValueError(f"statistics(by={by!r}): samples have no axes {[*missing]}; there are {there}")
    chosen = np.random.default_rng(seed).choice(len(source), min(samples, len(source)), replace=False)
    found: dict[str, list[torch.Tensor]] = {}
    progress = LoadProgress("statistics", "samples", len(chosen), "read {} samples for statistics".format)
    batch_size = int(min(max(BATCH_BYTES // source.gathered_bytes, 1), 512))
    # All ranks have the same numbers.
    with Feeder(source[np.sort(chosen)], batch_size=batch_size, seed=seed, shard=None) as feeder, progress:
        for batch in feeder:
            for name, tensor in batch.items():
                if not tensor.is_complex():
                    values = (tensor if tensor.layout is torch.strided else tensor.to_dense()).double()
                    # Of a batch, whose first axis is that of samples.
                    over = [0, *(at for at, names in enumerate(fields[name].axes, 1) if not {*names} & {*axes})]
                    no = values.isnan()
                    mean, *ends = (values.masked_fill(no, at) for at in (0, math.inf, -math.inf))
                    new = _moments((~no).double(), mean, 0, *ends, over=over)
                    known = map(torch.cat, zip(found[name], new, strict=True)) if name in found else None
                    found[name] = _moments(*known, over=[0]) if known else new
            progress.add(len(tensor))
    return {name: _result(moments, bool(axes)) for name, moments in found.items() if moments[0].any()}


def _moments(count: Any, mean: Any, squares: Any, low: Any, high: Any, *, over: list[int]) -> list[torch.Tensor]:
    """Return counts, means, squared deviations, minima and maxima of values that are merged along axes.

    As in Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    total = count.sum(over, keepdim=True)
    middle = (count * mean).sum(over, keepdim=True) / total.clamp(min=1)
    squares = (squares + count * (mean - middle).square()).sum(over, keepdim=True)
    return [total, middle, squares, low.amin(over, keepdim=True), high.amax(over, keepdim=True)]


def _result(moments: Sequence[torch.Tensor], by: bool) -> dict[str, torch.Tensor]:
    count, mean, squares, low, high = (each[0] if by else each.reshape(()) for each in moments)
    found = {"mean": mean, "std": (squares / count).sqrt(), "min": low, "max": high}
    return {name: values.masked_fill(count == 0, math.nan) for name, values in found.items()}
