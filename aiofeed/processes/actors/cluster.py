"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import logging
import os
from typing import Any

from aiofeed.core.errors import FeedError

log: logging.Logger = logging.getLogger("aiofeed.processes")


def join_cluster(address: str | None, problem: str, advice: str) -> None:
    """Connect to a cluster unless this process is connected to one; ``FeedError`` if there is none.

    Args:
        address: As for ``ray.init``.
        problem: Start of the message of the error.
        advice: What to do beside starting a cluster.
    """
    import ray

    if ray.is_initialized():
        return
    try:
        found = ray.init(address=address, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise FeedError(f"{problem}: {error}; start one with `ray start --head`, {advice}") from error
    log.info("connected to the Ray cluster at %s", found.address_info["gcs_address"])


def one_line(error: BaseException) -> str:
    """The message of one of Ray's errors, which have many lines."""
    return " ".join(str(error).split())[:500]


class ClusterConnection:
    """The connection that this process has when the object is created."""

    def __init__(self) -> None:
        import ray

        self._worker = ray.get_runtime_context().get_worker_id()
        self._pid = os.getpid()

    def alive(self) -> bool:
        """Whether this process still has the connection: no fork has it, nor a process after ``ray.shutdown()``."""
        import ray

        if os.getpid() != self._pid or not ray.is_initialized():
            return False
        return bool(ray.get_runtime_context().get_worker_id() == self._worker)

    def call(self, actor: Any, method: str, *arguments: Any) -> Any:
        """Call a method of an actor. Without a connection Ray would start or join a cluster for the call."""
        self._check()
        return getattr(actor, method).remote(*arguments)

    def kill(self, actor: Any) -> None:
        """End an actor. Without a connection it ends by itself."""
        if self.alive():
            import ray

            ray.kill(actor)

    def _check(self) -> None:
        if not self.alive():
            raise ConnectionError("the connection to the Ray cluster has ended: ray.shutdown() was called")
