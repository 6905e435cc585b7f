"""The options of ``engine="ray"``, and the connection of this process to a Ray cluster. Imports Ray when it is used."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.core.types import public_in
from aiofeed.kernel.core.validation import check_int_from, check_positive_int, explain_arguments

log: logging.Logger = logging.getLogger("aiofeed.processes")


@public_in("aiofeed.processes")
@explain_arguments({"num_cpus": "pass cpus_per_actor=", "num_workers": "pass actors="})
@dataclass(frozen=True)
class RayEngine:
    """Reads and decodes in the actors of a Ray cluster; the value of ``Feeder(engine=)``. Needs ``aiofeed[ray]``.

    Example:
        ```python
        import aiofeed

        engine = aiofeed.processes.RayEngine(actors=4, cpus_per_actor=2)
        photos = aiofeed.ImageFolder("photos")
        decode = aiofeed.DecodeImage(size=224)
        feeder = aiofeed.Feeder(photos, decode=decode, batch_size=32, engine=engine)
        ```

    Args:
        actors: Actors, each with an event loop and decode threads of its own. The feeder starts when the first one is
            ready; the others join as the cluster has room for them. They share ``Limits(read_concurrency=)`` and
            ``Limits(decode_threads=)``.
        max_actors: More actors are started, up to this number, while the training waits for batches and all actors are
            busy. Each has the share of the limits of one of ``actors``. Default: ``actors``.
        cpus_per_actor: CPUs that each one reserves, and its decode threads unless ``Limits(decode_threads=)`` is given.
        address: The address of the cluster, as ``ray.init`` takes it. Default: the cluster that this process is
            connected to; else that of the environment variable RAY_ADDRESS; else one that runs on this machine; else a
            new one on this machine.
        retries: How often a batch whose actor has died is given to another actor.
        straggler_factor: A batch that takes this many times the median time is also given to a second actor; the first
            one to finish it counts.
        start_timeout_s: How long no actor may be ready before that is an error: at the start, and after all have died.
        options: Further options of the actors, as ``ray.remote`` takes them: ``resources``, ``runtime_env``, ...

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    actors: int = 4
    cpus_per_actor: int = 1
    _: KW_ONLY
    max_actors: int | None = None
    address: str | None = None
    retries: int = 3
    straggler_factor: float = 4.0
    start_timeout_s: float = 300.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive_int("RayEngine(actors=...)", self.actors)
        check_positive_int("RayEngine(cpus_per_actor=...)", self.cpus_per_actor)
        if self.max_actors is not None:
            check_int_from(self.actors, "RayEngine(max_actors=...)", self.max_actors)
        check_int_from(0, "RayEngine(retries=...)", self.retries)
        if not self.straggler_factor > 1:
            raise ValueError(f"RayEngine(straggler_factor=...) must be more than 1, got {self.straggler_factor!r}")
        if not self.start_timeout_s > 0:
            raise ValueError(f"RayEngine(start_timeout_s=...) must be more than 0, got {self.start_timeout_s!r}")
        object.__setattr__(self, "options", dict(self.options))


def check_cluster(engine: RayEngine) -> None:
    """Connect to the cluster of an engine, or start one on this machine, unless this process is connected to one.

    Raises:
        FeedError: There is no cluster at the address, or no node has enough CPUs for one actor.
    """
    import ray

    if not ray.is_initialized():
        try:
            found = ray.init(address=engine.address, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            where = "" if engine.address is None else f" at {engine.address!r}"
            raise FeedError(
                f"RayEngine found no cluster{where}: {error}; start one with `ray start --head`, pass its address as "
                f'RayEngine(address="host:6379"), or leave address= out to use one on this machine'
            ) from error
        log.info("connected to the Ray cluster at %s", found.address_info["gcs_address"])
    most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if most < engine.cpus_per_actor:
        raise FeedError(
            f"RayEngine(cpus_per_actor={engine.cpus_per_actor}): no node of the Ray cluster has as many CPUs, the "
            f"largest has {most:g}: pass cpus_per_actor={max(int(most), 1)}, or add larger nodes"
        )


def one_line(error: BaseException) -> str:
    """Return the message of one of Ray's errors, which have many lines."""
    return " ".join(str(error).split())[:500]


class ClusterConnection:
    """The connection that this process has when the object is created."""

    def __init__(self) -> None:
        import ray

        self._worker = ray.get_runtime_context().get_worker_id()
        self._pid = os.getpid()

    def alive(self) -> bool:
        """Return whether the connection is open here: a fork has none, nor a process after ``ray.shutdown()``."""
        import ray

        if os.getpid() != self._pid or not ray.is_initialized():
            return False
        return bool(ray.get_runtime_context().get_worker_id() == self._worker)

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        """Call a method of an actor. Without a connection Ray would start or join a cluster for the call."""
        if not self.alive():
            raise ConnectionError("the connection to the Ray cluster has ended: ray.shutdown() was called")
        return getattr(actor, method).remote(*arguments)
