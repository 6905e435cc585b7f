"""A device that copies directly from the ring of a worker process."""

from __future__ import annotations

import pytest
import torch

from aiofeed import Feeder, Limits
from tests.support import process_parts as parts

pytestmark = pytest.mark.cuda


def test_slots_are_page_locked_once_and_their_copies_are_right() -> None:
    """Over epochs with a slow consumer stream, batches are right and the ring's memory is pinned."""
    limits = Limits(decode_threads=2)
    slow = torch.zeros(4000, 4000, device="cuda")
    with Feeder(
        parts.Numbers(64), decode=parts.large, batch_size=4, device="cuda", engine="process", limits=limits
    ) as (feeder):
        sums = []
        for _ in range(3):
            for batch in feeder:
                torch.mm(slow, slow)
                sums.append(batch.to(torch.int64).sum(dim=1))
        assert feeder._session.pipeline is not None
        assert feeder._session.pipeline._pool is not None
        [worker] = feeder._session.pipeline._pool._workers
        assert worker.ring.pinned
        assert all(torch.from_numpy(each.memory).is_pinned() for each in worker.ring._segments.values())
    expected = torch.arange(64).repeat(3) * (1 << 20)
    assert torch.equal(torch.cat(sums).cpu(), expected)
