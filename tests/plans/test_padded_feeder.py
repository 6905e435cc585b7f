"""Padded batches of lists, arrays and tensors from feeders and loaders: the same on every way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import Buckets, DataLoader, DiskCache, Feeder, HostCache, Stream, TokenBudget, pad_collate

LENGTHS = [8, 8, 8, 8, 5, 9, 1, 8, 3, 12, 8, 8]
COLLATE = pad_collate(-1, parts=("prompt", "answer"), multiple_of=4)


class Pairs:
    """Samples with two sequences, one of which is a list, and two parts of fixed size."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        size = LENGTHS[index]
        answer = np.full(1 + index % 3, index)
        return {"soft": torch.full((8,), 0.5), "prompt": [index] * size, "answer": answer, "size": [1, 2]}


def plain(batch: dict[str, Any]) -> Any:
    return {
        name: torch.stack(part).tolist() if isinstance(part, list) else part.tolist() for name, part in batch.items()
    }


EXPECTED = [plain(COLLATE([Pairs()[at] for at in range(first, first + 4)])) for first in (0, 4, 8)]

WAYS: dict[str, Callable[[Path], Any]] = {
    "feeder": lambda _: Feeder(Pairs(), batch_size=4, collate_fn=COLLATE),
    "stream": lambda _: Feeder(Stream([Pairs()[at] for at in range(12)]), batch_size=4, collate_fn=COLLATE),
    "host": lambda _: Feeder(Pairs(), batch_size=4, collate_fn=COLLATE, cache=HostCache()),
    "disk": lambda folder: Feeder(Pairs(), batch_size=4, collate_fn=COLLATE, cache=DiskCache(folder / "cache")),
    "loader": lambda _: DataLoader(Pairs(), batch_size=4, collate_fn=COLLATE),
    "torch": lambda _: torch.utils.data.DataLoader(Pairs(), batch_size=4, collate_fn=COLLATE),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("way", WAYS)
def test_batches_are_the_same_on_every_way(way: str, tmp_path: Path) -> None:
    """In two epochs, the second of which comes from the cache if there is one."""
    batches = WAYS[way](tmp_path)
    for _ in range(2):
        assert [*map(plain, batches)] == EXPECTED
    if isinstance(batches, Feeder):
        batches.close()


@pytest.mark.slow
def test_batches_of_processes_are_the_same() -> None:
    """The function is pickled with its parts."""
    with Feeder(Pairs(), batch_size=4, collate_fn=COLLATE, engine="process") as feeder:
        assert [*map(plain, feeder)] == EXPECTED


@pytest.mark.parametrize(
    "plan",
    [Buckets(LENGTHS, [8, 9], [3, 2, 2]), TokenBudget(LENGTHS, 24)],
    ids=["buckets", "budget"],
)
def test_the_shapes_of_plans_do_not_depend_on_the_first_batch(plan: Any) -> None:
    """Ranks and a resumed feeder pad the same parts of each batch."""
    new = partial(Feeder, Pairs(), batch_size=plan, collate_fn=COLLATE, shuffle=True, seed=2)
    with new(shard=None) as feeder:
        whole = [*map(plain, feeder)]
    for batch in whole:
        assert {len(row) for row in batch["soft"]} == {8}
        assert all(len(row) % 4 == 0 for name in ("prompt", "answer") for row in batch[name])
    with new(shard=(1, 2)) as feeder:
        assert [*map(plain, feeder)][: len(whole) // 2] == whole[1::2]
    with new(shard=None) as feeder, new(shard=None) as resumed:
        next(iter(feeder))
        resumed.load_state_dict(feeder.state_dict())
        assert [*map(plain, resumed)] == whole[1:]
