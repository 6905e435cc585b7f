"""Batches that are gathered: the number of decode threads is chosen by the jobs that gather them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiofeed
from aiofeed.kernel.engine.concurrency import Concurrency


def test_jobs_that_gather_are_timed_and_batches_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timing of a job is that of one part; to put a batch together takes no time worth a thread."""
    pytest.importorskip("zarr")
    samples, observe = [], Concurrency.observe_job

    def count(self: Concurrency, tuner: Any, job: Any, *, saturated: bool) -> None:
        samples.append(job.samples)
        observe(self, tuner, job, saturated=saturated)

    monkeypatch.setattr(Concurrency, "observe_job", count)
    source = aiofeed.Arrays({"x": np.zeros((4_000, 64, 64), np.uint8)})
    with aiofeed.Feeder(source, batch_size=50) as feeder:
        assert sum(len(batch["x"]) for batch in feeder) == 4_000
    # 16 parts of 256 rows, in 80 batches.
    assert samples
    assert max(samples) == 256
    assert sum(samples) <= 4_000
