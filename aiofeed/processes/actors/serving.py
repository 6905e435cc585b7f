"""``serve`` and ``attach`` in a Ray cluster: the address, the registry of the server, and the memory of batches."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sized
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.core.errors import FeedError
from aiofeed.processes.actors.cluster import ClusterConnection, join_cluster, one_line
from aiofeed.processes.actors.mailbox import SERVER, Mailbox, MailboxLink
from aiofeed.processes.actors.worker import versions
from aiofeed.processes.ipc import address as addresses
from aiofeed.processes.ipc.ring import Slot, SlotPool
from aiofeed.processes.serving.transport import Link, ServerAddress, ServerListener, socket_address
from aiofeed.runtime.buffers import Bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

log: logging.Logger = logging.getLogger("aiofeed.processes")

_PREFIX = "ray:"
_POLL_S = 0.05
# How long the name of a server that has died may still be taken.
_FREE_S = 2.0
# How long an actor without CPUs may take to start, or to answer.
_START_S = 60.0
# A batch of 100 kB takes 9 ms in a message, and 14 ms by way of the object store (one consumer, two busy cores).
_MESSAGE_BYTES = 128 * 1024


def server_address(address: str | os.PathLike[str]) -> ServerAddress:
    """The address of a server: "ray:NAME" for a name in a Ray cluster; else see ``resolve``.

    Raises:
        TypeError, ValueError: It is no address.
        FeedError: There can be no socket.
        ImportError: Ray is not installed.
    """
    if not isinstance(address, str) or not address.startswith(_PREFIX):
        return socket_address(addresses.resolve(address, addresses.SERVER))
    if not addresses.NAME.fullmatch(name := address.removeprefix(_PREFIX)):
        raise ValueError(
            f"address={address!r}: expected 'ray:NAME' with a name of letters, digits, '_', '-' and '.', at most 64; "
            f"the cluster is that of ray.init(address=...), and a socket's path can be given as './ray:...'"
        )
    if find_spec("ray") is None:
        raise ImportError(f"address={address!r} needs Ray: pip install 'aiofeed[ray]'")
    return _RayAddress(name)


def _start_mailbox(about: dict[str, str], **options: Any) -> Any:
    """Start a mailbox on this node. It ends with this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here, **options).remote(about)


class _RayAddress:
    """A name in the Ray cluster of this process."""

    def __init__(self, name: str) -> None:
        self.registry = {"name": f"serve:{name}", "namespace": "aiofeed"}
        self._text = f"{_PREFIX}{name}"
        self._pid = os.getpid()

    def __str__(self) -> str:
        return self._text

    def check_free(self) -> None:
        self._join()
        deadline = time.monotonic() + _FREE_S
        while (found := self._find()) is not None:
            if time.monotonic() > deadline:
                raise self.taken(f" ({found[1]['where']})")
            time.sleep(_POLL_S)

    def taken(self, who: str = "") -> FeedError:
        return FeedError(f"a server listens at {self} already{who}: attach to it, close it, or choose another address")

    def listen(self) -> ServerListener:
        return _RayListener(self)

    def connect(self, wait_s: float) -> Link:
        import ray

        self._join()
        deadline = time.monotonic() + wait_s
        while (found := self._find()) is None:
            if time.monotonic() >= deadline:
                waited = f" (waited {wait_s:g} s)" if wait_s else ""
                raise FeedError(
                    f"no server listens at {self} in this Ray cluster{waited}: start one with "
                    f"aiofeed.serve(feeder, {str(self)!r}) in a process of the cluster"
                )
            time.sleep(_POLL_S)
        registry, about = found
        for what, ours in versions().items():
            if about[what] != ours:
                raise FeedError(
                    f"the server at {self} ({about['where']}) has {what} {about[what]}, and this process has {what} "
                    f"{ours}: install the same version on every node"
                )
        connection, mailbox = ClusterConnection(), _start_mailbox({})
        try:
            ray.get(mailbox.about.remote(), timeout=_START_S)
            # Not before the mailbox runs: the server waits a few seconds for the handshake.
            ray.get(registry.put.remote(SERVER, [(mailbox, os.getpid())]), timeout=_START_S)
        except BaseException as error:
            connection.kill(mailbox)
            if isinstance(error, ray.exceptions.RayError):
                raise FeedError(f"cannot connect to the server at {self}: {one_line(error)}") from error
            raise
        return MailboxLink(connection, mailbox, registry=registry)

    def _join(self) -> None:
        if os.getpid() != self._pid:
            raise FeedError(f"{self}: a forked process has no connection to the Ray cluster: start it by spawn")
        problem = f"address={str(self)!r}: this process is in no Ray cluster, and none runs on this machine"
        join_cluster("auto", problem, 'and connect to it by ray.init(address="host:6379") or RAY_ADDRESS')
        import ray

        if ray.util.client.ray.is_connected():
            raise FeedError(f"address={str(self)!r} needs a process on a node of the cluster, and not Ray Client")

    def _find(self) -> tuple[Any, dict[str, str]] | None:
        """The registry of the server and its description; ``None`` if there is none."""
        import ray

        try:
            registry = ray.get_actor(**self.registry)
            return registry, ray.get(registry.about.remote(), timeout=_START_S)
        except (ValueError, ray.exceptions.RayActorError):
            return None  # it does not exist, or has just died
        except ray.exceptions.GetTimeoutError as error:
            raise FeedError(f"the server at {self} did not answer within {_START_S:.0f} s") from error


class _RayListener:
    """The registry of a server; ``FeedError`` if another one has the name."""

    def __init__(self, address: _RayAddress) -> None:
        import ray

        self.failure: FeedError | None = None
        self._address = address
        self._connection = ClusterConnection()
        self._task: asyncio.Task[None] | None = None
        where = f"node {ray.util.get_node_ip_address()}, pid {os.getpid()}"
        try:
            self._registry = _start_mailbox({**versions(), "where": where}, **address.registry)
        except ValueError:
            raise address.taken() from None

    def slots(self, keep: int, advice: str) -> SlotPool:
        return _ObjectPool(advice, self._connection)

    def start_accepting(self, accepted: Callable[[Link], object], connections: Sized) -> None:
        server = asyncio.current_task()
        assert server is not None
        self._task = asyncio.get_running_loop().create_task(self._accept(accepted, connections, server))

    async def _accept(
        self, accepted: Callable[[Link], object], connections: Sized, server: asyncio.Task[object]
    ) -> None:
        try:
            while True:
                call = self._connection.call(self._registry, "take", SERVER)
                for mailbox, pid in await self._connection.result(call.future()):
                    if len(connections) >= addresses.MAX_CONNECTIONS:
                        log.warning("refused a connection of process %d at %s", pid, self._address)
                    else:
                        accepted(MailboxLink(self._connection, mailbox, pid=pid))
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds of errors if an actor or its node is lost
            what = f"the server at {self._address} can serve no more"
            self.failure = FeedError(f"{what}: its actor has died, or ray.shutdown() was called: {one_line(error)}")
            server.cancel()

    def stop_accepting(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        self._connection.kill(self._registry)


class _ObjectPool(SlotPool):
    """Slots for batches that go through Ray's object store."""

    def __init__(self, advice: str, connection: ClusterConnection) -> None:
        super().__init__(0, advice, single_reader=False)
        self.connection = connection

    def lease(self) -> Slot:
        return _ObjectSlot(self)


class _ObjectSlot(Slot):
    """The arrays of one batch. They stay where they are until ``seal`` copies them."""

    inline_bytes = _MESSAGE_BYTES

    def __init__(self, pool: _ObjectPool) -> None:
        super().__init__(pool)
        self._connection = pool.connection
        self._arrays: list[Bytes] = []
        self._memory: list[Any] = []

    def take(self, nbytes: int) -> Bytes:
        """New memory, for an array that has to be copied to be contiguous."""
        return np.empty(nbytes, np.uint8)

    def locate(self, memory: NDArray[Any]) -> tuple[int, int]:
        self._arrays.append(memory.reshape(-1).view(np.uint8))
        return len(self._arrays) - 1, 0

    def seal(self) -> None:
        """Copy the arrays of a small batch; put those of a large one into the object store."""
        arrays = dict(enumerate(self._arrays))
        if sum(array.nbytes for array in self._arrays) > _MESSAGE_BYTES:
            self._memory = [self._connection.put(arrays)]
        elif arrays:
            self._memory = [{number: array.tobytes() for number, array in arrays.items()}]
        self._arrays.clear()

    def introduce(self, known: set[int]) -> tuple[list[Any], list[Any], list[int]]:
        return [], self._memory, []

    def give_back(self, reusable: bool = True) -> None:
        """Drop the reference: Ray frees the object when no consumer uses it."""
        self._memory = []
