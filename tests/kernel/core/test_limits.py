"""`Limits`: validation and defaults."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aiofeed.kernel.core.limits import MIB, Limits, resolve_limits


@pytest.mark.parametrize("name", ["read_concurrency", "decode_threads", "prefetch_batches", "memory_bytes"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_limit_is_a_positive_int(name: str, value: object, error: type[Exception]) -> None:
    """The error names the limit and the received value."""
    with pytest.raises(error, match=rf"{name}.*{value}"):
        Limits(**{name: value})


def test_numpys_ints_are_ints() -> None:
    """They become Python ints; tensors, arrays, bools and floats are refused."""
    limit = Limits(decode_threads=np.int64(3)).decode_threads  # type: ignore[arg-type]
    assert (limit, type(limit)) == (3, int)
    for other in (np.float64(3), np.array(3), torch.tensor(3), np.bool_(True)):
        with pytest.raises(TypeError, match=r"decode_threads.* must be an int"):
            Limits(decode_threads=other)  # type: ignore[arg-type]


def test_unspecified_limits_are_chosen() -> None:
    """Threads follow cores, reads follow the batch size, memory follows free memory."""
    chosen = resolve_limits(Limits(), batch_size=128, cpus=6, free_memory=1024 * MIB)
    assert (chosen.decode_threads, chosen.read_concurrency, chosen.memory_bytes) == (6, 128, 256 * MIB)


@pytest.mark.parametrize(("batch_size", "reads"), [(1, 8), (32, 32), (128, 128)])
def test_ranks_of_a_machine_share_the_reads(batch_size: int, reads: int) -> None:
    """Each has its part of 64, at least one batch."""
    chosen = resolve_limits(Limits(), batch_size=batch_size, cpus=2, free_memory=1 << 30, ranks=8)
    assert chosen.read_concurrency == reads
    assert resolve_limits(Limits(), batch_size=1, cpus=1, free_memory=1, ranks=100).read_concurrency == 1


def test_specified_limits_stay() -> None:
    """Only a source that allows fewer threads changes a user-specified limit."""
    given = Limits(
        **{"read_concurrency": 3, "decode_threads": 5, "prefetch_batches": 7, "memory_bytes": 11},
        **{"device_batches": 13, "lookahead_bytes": 17},
    )
    chosen = resolve_limits(given, batch_size=128, cpus=6, free_memory=1 << 30, most_threads=8, ranks=8)
    assert vars(chosen) == {**vars(given), "decode_threads": 5, "prefetch_given": True}


def test_a_dataset_gets_the_threads_it_allows() -> None:
    """A dataset gets one thread unless it allows more, and never more than it allows."""
    assert resolve_limits(Limits(), batch_size=1, cpus=8, free_memory=1, most_threads=1).decode_threads == 1
    assert resolve_limits(Limits(), batch_size=1, cpus=2, free_memory=1, most_threads=4).decode_threads == 4
    limits = Limits(decode_threads=8)
    assert resolve_limits(limits, batch_size=1, cpus=2, free_memory=1, most_threads=4).decode_threads == 4
