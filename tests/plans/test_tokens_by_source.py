"""The samples and tokens of each source of a ``Mixture`` that a plan has drawn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import aiofeed

LENGTHS = {"web": [1 + 7 * n % 29 for n in range(60)], "code": [1 + 5 * n % 23 for n in range(40)]}
ALL = [*LENGTHS["web"], *LENGTHS["code"]]
PLANS: dict[str, Any] = {
    "pack": lambda: aiofeed.Pack(ALL, context=32, rows=2, separator=7, split=False),
    "split": lambda: aiofeed.Pack(ALL, context=32, rows=2),
    "budget": lambda: aiofeed.TokenBudget(ALL, 100),
    "balanced": lambda: aiofeed.Balanced(ALL, 100, groups=2),
    "buckets": lambda: aiofeed.Buckets(ALL, [10], [6, 4]),
}


def new_feeder(plan: str, until: Any, **options: Any) -> aiofeed.Feeder[Any]:
    sources = {name: [torch.ones(length) for length in lengths] for name, lengths in LENGTHS.items()}
    mixture = aiofeed.Mixture(sources, [1, 2], until=until, names=True)
    collate = None if plan in ("pack", "split") else aiofeed.pad_collate()
    options = {"shuffle": True, "shard": None} | options
    return aiofeed.Feeder(mixture, batch_size=PLANS[plan](), collate_fn=collate, **options)


def tokens_of(batch: Any) -> Counter[str]:
    if isinstance(batch, dict):
        return Counter(
            {name: int(((batch["source_ids"] == at) & (batch["tokens"] == 1)).sum()) for at, name in enumerate(LENGTHS)}
        )
    found: Counter[str] = Counter()
    for name, tokens in zip(batch[1], batch[-1].sum(1).tolist(), strict=True):
        found[name] += tokens
    return found


@pytest.mark.parametrize("until", ["all", 70])
@pytest.mark.parametrize("plan", PLANS)
def test_tokens_of_sources_are_those_of_the_batches(plan: str, until: Any) -> None:
    """At every batch the tokens of each source are those drawn since the first epoch, also after a resume."""
    seen: Counter[str] = Counter()
    with new_feeder(plan, until) as feeder:
        for step, batch in enumerate(feeder.steps(60)):
            seen += tokens_of(batch)
            found = feeder.statistics().tokens_by_source
            # A document that is split counts when its first part comes.
            assert all(seen[name] <= found[name] <= seen[name] + 29 * (plan == "split") for name in LENGTHS)
            if step % 8 == 7:
                with new_feeder(plan, until, shard=(1, 2)) as other:
                    other.load_state_dict(feeder.state_dict())
                    assert other.statistics().tokens_by_source == found
        scalars = feeder.scalars("")
    assert {name: scalars[f"tokens_by_source/{name}"] for name in LENGTHS} == found
    assert {name: scalars[f"by_source/{name}"] for name in LENGTHS} == feeder.statistics().by_source
    assert feeder.epoch >= 1


def test_without_a_mixture_or_lengths_there_are_none() -> None:
    """A plan over one source, and a mixture without a plan, count no tokens."""
    with aiofeed.Feeder([torch.ones(length) for length in ALL], batch_size=PLANS["budget"]()) as feeder:
        assert feeder.statistics().tokens_by_source == {}
    with aiofeed.Feeder(aiofeed.Mixture({"web": [torch.ones(2)] * 3}), batch_size=2) as feeder:
        assert feeder.statistics().tokens_by_source == {}
