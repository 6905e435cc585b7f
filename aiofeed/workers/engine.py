"""Opens the workers of ``engine="process"`` and ``engine="ray"``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from aiofeed.workers.pool import ProcessPool, WorkerPool
from aiofeed.workers.remote_assembly import RemoteAssembly
from aiofeed.workers.spawn import WorkerConfig, check_not_starting


def open_workers(config: Any) -> tuple[WorkerPool[Any], Callable[..., RemoteAssembly]]:
    """Return the workers of a feeder with a configuration, not started yet, and the assembly of their batches."""
    check_not_starting()
    limits, source = config.limits, config.source
    # Each process has its own copy of a Dataset.
    copies = config.engines if source.threads else 1
    worker_config = WorkerConfig(
        source=source,
        decode=config.decode,
        collate_fn=config.collate_fn,
        length=config.length,
        engines=config.engines,
        read_concurrency=limits.read_concurrency * copies,
        decode_threads=limits.decode_threads * copies,
        keep=limits.most_batches + 1,
        in_order=bool(config.in_order),
        policy=config.policy,
        cache=config.cache,
        reads_given=config.user_limits.read_concurrency is not None,
        threads_given=config.user_limits.decode_threads is not None,
    )
    pool: WorkerPool[Any]
    if config.ray is not None:
        from aiofeed.workers.ray.actor_pool import ActorPool

        pool = ActorPool(worker_config, config.ray)
    else:
        # All devices of one kind can copy from memory that one of them has page-locked.
        pool = ProcessPool(worker_config, None if config.backend is None else config.backend.backends[0])
    return pool, partial(RemoteAssembly, pool=pool)
