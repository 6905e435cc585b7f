"""Sources, decoders and collate functions that are sent to worker processes. Imports no torch."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np


class Numbers:
    """n numbers; reading those in `bad` raises `error`."""

    def __init__(self, n: int = 40, bad: tuple[int, ...] = (), error: Exception | None = None) -> None:
        self.n = n
        self.bad = bad
        self.error = error or OSError(5, "input/output error")

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return f"number {index}"

    async def read(self, index: int) -> bytes:
        if index in self.bad:
            raise self.error
        return b"%d" % index


def number(data: bytes) -> Any:
    return np.array(int(data))


def append_line(path: str, text: str) -> None:
    """Append a line to a file that several processes write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


def worker_pids(feeder: Any) -> list[int]:
    """The process ids of a feeder's workers."""
    return [worker.pid for worker in feeder._session.pipeline._pool._workers]


class LoggedSource(Numbers):
    """Logs `open` and `aclose` in a file."""

    def __init__(self, n: int, path: str) -> None:
        super().__init__(n)
        self.path = path

    async def open(self) -> None:
        append_line(self.path, f"open {os.getpid()}")

    async def aclose(self) -> None:
        append_line(self.path, f"close {os.getpid()}")


class Unopenable(Numbers):
    """Raises in `open`."""

    async def open(self) -> None:
        raise ConnectionError("no route")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses notes."""

    reason: str


class UnopenableFrozen(Numbers):
    """Raises an exception that refuses notes in `open`."""

    async def open(self) -> None:
        raise FrozenError("no route")


class SlowAt(Numbers):
    """Reads of some numbers wait until a file exists."""

    def __init__(self, n: int, slow: tuple[int, ...], path: str) -> None:
        super().__init__(n)
        self.slow, self.path = slow, path

    async def read(self, index: int) -> bytes:
        while index in self.slow and not os.path.exists(self.path):  # noqa: ASYNC110 - another process creates it
            await asyncio.sleep(0.005)
        return await super().read(index)


class RemoteNumbers(Numbers):
    """Reads take 20 ms at any concurrency; each gives the number of concurrent reads when it began, itself included."""

    reading = 0

    async def read(self, index: int) -> bytes:
        self.reading += 1
        found = self.reading
        await asyncio.sleep(0.020)
        self.reading -= 1
        return b"%d" % found


class Large(Numbers):
    """Each sample is the same 10 MiB; reads take 1 ms."""

    data = bytes(10 << 20)

    async def read(self, index: int) -> bytes:
        await asyncio.sleep(0.001)
        return self.data


def size(data: bytes) -> Any:
    """int64 []: the number of bytes."""
    return np.array(len(data))


class Stuck(Numbers):
    """Reads never end."""

    async def read(self, index: int) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


@dataclasses.dataclass(frozen=True)
class CountingDecode:
    """Logs every sample in a file."""

    path: str

    def __call__(self, data: bytes) -> Any:
        append_line(self.path, data.decode())
        return np.array(int(data))


def stuck_at_nine(data: bytes) -> Any:
    if data == b"9":
        threading.Event().wait()
    return np.array(int(data))


def killed_at_nine(data: bytes) -> Any:
    if data == b"9":
        os.kill(os.getpid(), signal.SIGKILL)
    return np.array(int(data))


def exits_at_nine(data: bytes) -> Any:
    if data == b"9":
        os._exit(3)
    return np.array(int(data))


def fails_at_three(data: bytes) -> Any:
    if data == b"3":
        raise ValueError("three")
    return np.array(int(data))


def fails_at_seventeen(data: bytes) -> Any:
    if data == b"17":
        raise ZeroDivisionError("seventeen")
    return np.array(int(data))


class Unprintable(Exception):
    """Raises SystemExit when it is formatted, and takes no notes."""

    __notes__ = 3  # type: ignore[assignment]

    def __str__(self) -> str:
        raise SystemExit(3)


def unprintable_at_seventeen(data: bytes) -> Any:
    if data == b"17":
        raise Unprintable
    return np.array(int(data))


def unprintable_collate(samples: list[Any]) -> Any:
    if samples[0] == 4:
        raise Unprintable
    return np.stack(samples)


class StrangeError(Exception):
    """An exception that the trainer's process may not be able to import."""


def strange_at_seventeen(data: bytes) -> Any:
    if data == b"17":
        raise StrangeError("how strange")
    return np.array(int(data))


def modules(data: bytes) -> Any:
    """Whether torch was imported where this runs, and whether it is the main process."""
    return np.array(["torch" in sys.modules, "aiofeed.workers.main" in sys.modules])


def blocked_signals(data: bytes) -> Any:
    """How many signals the calling thread blocks."""
    return np.array(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))


def process_id(data: bytes) -> Any:
    return np.array(os.getpid())


def random_numbers(data: bytes, *, rng: Any) -> Any:
    import torch

    return torch.rand(3, generator=rng)


def growing(data: bytes) -> Any:
    """1 KiB more for each number."""
    return np.full((1 + int(data)) * 1024, int(data) % 251, np.uint8)


def large(data: bytes) -> Any:
    return np.full(1 << 20, int(data) % 251, np.uint8)


def slow_number(data: bytes) -> Any:
    time.sleep(0.002)
    return np.array(int(data))


class Pair(NamedTuple):
    """A namedtuple that both processes can import."""

    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    """A dataclass that both processes can import."""

    x: Any
    names: list[str]


def collate_structure(samples: list[Any]) -> Any:
    import torch

    numbers = torch.tensor([int(sample) for sample in samples])
    return {
        "pair": Pair(numbers, numbers.to(torch.bfloat16)),
        "record": Record(numbers.float().reshape(-1, 1), [str(sample) for sample in samples]),
        "plain": [1, 2.5, None, True, "ä", b"\x00\xff", "\udcff"],
        7: (np.arange(3, dtype=">i4"), np.float32(1.5), np.array(["a", "bc"])),
        "last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 3),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "mirrored": torch.arange(6).reshape(2, 3).t(),
    }


def collate_numbers(samples: list[Any]) -> Any:
    return np.array([int(sample) for sample in samples])


class Opaque:
    """An object that cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("it has a connection")


def collate_with_labels(samples: list[Any]) -> Any:
    return np.stack(samples), np.array([int(sample[0]) for sample in samples])


def collate_apart(samples: list[Any]) -> Any:
    return list(samples)


def collate_opaque(samples: list[Any]) -> Any:
    return {"numbers": np.array([int(sample) for sample in samples]), "extra": [Opaque()]}


class Squares:
    """A map-style Dataset."""

    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Any, str]:
        return np.array(index * index), f"name {index}"
