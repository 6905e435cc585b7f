"""Rank and world size of this process, from ``torch.distributed`` or the environment of the launcher."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("aiofeed.sampling")


def find_shard() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without a launcher.

    Uses ``torch.distributed`` if it is initialised, else ``RANK`` and ``WORLD_SIZE`` as torchrun sets them.

    Raises:
        ValueError: The environment's values are no rank and world size.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        shard = (int(distributed.get_rank()), int(distributed.get_world_size()))
        log.info("shard %d of %d, from torch.distributed", *shard)
        return shard
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return (0, 1)
    try:
        shard = check_shard((int(rank), int(world_size)))
    except ValueError as error:
        raise ValueError(f"RANK={rank!r} and WORLD_SIZE={world_size!r} in the environment: {error}") from error
    log.info("shard %d of %d, from RANK and WORLD_SIZE", *shard)
    return shard


def check_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """The shard as a tuple; ``TypeError`` or ``ValueError`` if it is not (rank, world size)."""
    if (
        not isinstance(shard, tuple | list)
        or len(shard) != 2
        or not all(isinstance(number, int) and not isinstance(number, bool) for number in shard)
    ):
        raise TypeError(f"shard must be (rank, world_size), None or 'auto', got {shard!r}")
    rank, world_size = shard
    if not 0 <= rank < world_size:
        raise ValueError(f"shard must be (rank, world_size) with 0 <= rank < world_size, got {shard!r}")
    return (rank, world_size)
