"""The options of ``engine="ray"``. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from aiofeed.core.types import public
from aiofeed.core.validation import check_int_from, check_positive_int, explain_arguments


@public
@explain_arguments({"num_cpus": "pass cpus_per_actor=", "num_workers": "pass actors="})
@dataclass(frozen=True)
class RayEngine:
    """Reads and decodes in the actors of a Ray cluster; the value of ``Feeder(engine=)``. Needs ``aiofeed[ray]``.

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
