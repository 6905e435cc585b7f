"""Processes that attach to, or serve, batches in the memory of a device that they share."""

from __future__ import annotations

import logging
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

import aiofeed
from tests.support import process_parts as parts
from tests.support.late_device import LateDevice
from tests.support.serve_parts import wait_for


class Lines(logging.Handler):
    """What aiofeed logs, told to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def collate(samples: list[Any]) -> dict[str, Any]:
    """Tensors dense, permuted, strided, empty and of odd types; what stays on the host; sizes that differ."""
    numbers = torch.tensor([int(sample) for sample in samples])
    width = 16 + 16 * (int(numbers[0]) // 4 % 3)
    images = numbers.view(-1, 1, 1, 1).expand(-1, 3, 4, width).to(torch.bfloat16)
    return {
        "numbers": numbers,
        "images": images.contiguous(memory_format=torch.channels_last),
        "strided": numbers.view(-1, 1).expand(-1, 512).contiguous()[:, ::2],
        "odd": (numbers % 2).to(torch.bool),
        "nothing": torch.empty(0, 3),
        "names": [f"number {number}" for number in numbers.tolist()],
        "array": np.array(numbers.tolist(), np.float64),
    }


def wrong(batch: dict[str, Any]) -> list[str]:
    """Which parts of a batch are not as they were made."""
    made = collate(batch["array"].tolist())
    found = []
    for name, value in made.items():
        got = batch[name]
        if isinstance(value, torch.Tensor):
            if value.dtype != got.dtype or value.shape != got.shape or not torch.equal(value, got):
                found.append(name)
        elif name == "array":
            found += [] if np.array_equal(value, got) else [name]
        elif value != got:
            found.append(name)
    if not found and batch["images"].stride() != made["images"].stride():
        found.append("strides")
    return found


def feeder(n: int = 48, device: Any = None, **options: Any) -> aiofeed.Feeder[Any]:
    options = {"decode": parts.number, "batch_size": 4, "collate_fn": collate, "shuffle": False} | options
    return aiofeed.Feeder(parts.Numbers(n), device=device, **options)


def expected(n: int = 48) -> list[list[int]]:
    return [[4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3] for at in range(n // 4)]


def epochs(
    address: str, told: Connection, count: int, device: dict[str, Any] | None = None, step_s: float = 0.0, keep: int = 4
) -> None:
    """Tell what each of some epochs gave, and what was wrong with it, at once and later; then what was logged.

    Args:
        device: arguments of the device; `None` for the host.
        step_s: how long a step takes.
        keep: so many batches are looked at again before they are dropped.
    """
    lines = Lines()
    logging.getLogger("aiofeed").addHandler(lines)
    try:
        on = None if device is None else LateDevice(**device)
        with aiofeed.attach(address, device=on) as feed:
            for _ in range(count):
                seen, bad, kept = [], [], []
                for batch in feed:
                    bad += wrong(batch)
                    seen.append([int(number) for number in batch["array"]])
                    kept.append(batch)
                    if len(kept) > keep:
                        bad += wrong(kept.pop(0))
                    time.sleep(step_s)
                for batch in kept:
                    bad += wrong(batch)
                told.send((seen, bad))
            blocks = feed._subscription.taker._blocks  # type: ignore[union-attr]
            told.send((blocks is not None and bool(blocks._opened), lines.lines))
    except Exception as error:
        told.send((type(error).__name__, str(error)))


def for_ever(address: str, told: Connection, device: dict[str, Any] | None, step_s: float, begin: str = "") -> None:
    """Tell of each batch until killed, or until the server is gone; the first is taken once `begin`, a file, exists."""
    try:
        with aiofeed.attach(address, device=None if device is None else LateDevice(**device)) as feed:
            while True:
                iterator = iter(feed)
                if begin:
                    wait_for(begin)
                for batch in iterator:
                    told.send(([int(number) for number in batch["array"]], wrong(batch)))
                    time.sleep(step_s)
    except Exception as error:
        told.send((type(error).__name__, str(error)))


def stops(address: str, told: Connection, device: dict[str, Any]) -> None:
    """Stop with the first batch; tell, once that is over, what is wrong with the rest and how it ends."""
    with aiofeed.attach(address, device=LateDevice(**device)) as feed:
        iterator = iter(feed)
        bad = wrong(next(iterator))
        told.send("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            for batch in iterator:
                bad += wrong(batch)
        except Exception as error:
            told.send((type(error).__name__, str(error), bad))


def serves(address: str, told: Connection, device: dict[str, Any], options: dict[str, Any]) -> None:
    """Serve for ever."""
    with feeder(40_000, LateDevice(**device)) as feeding, aiofeed.serve(feeding, address, **options):
        told.send("serving")
        time.sleep(60.0)


def serves_epochs(address: str, told: Connection, device: dict[str, Any], count: int, n: int) -> None:
    """Serve some epochs, and end."""
    with feeder(n, LateDevice(**device)) as feeding:
        server = aiofeed.serve(feeding, address)
        told.send("serving")
        server.run(epochs=count)
    told.send("done")


def said(address: str, told: Connection, device: dict[str, Any]) -> None:
    """Tell what a transform on both sides made of the batches of an epoch."""
    transform = lambda batch: batch | {"also": "transformed"}  # noqa: E731
    with aiofeed.attach(address, device=LateDevice(**device), transform=transform) as feed:
        told.send([(batch["said"], batch["also"]) for batch in feed])


def closes_when_told(address: str, told: Connection, device: dict[str, Any]) -> None:
    """Serve until SIGUSR1, close, and end."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with feeder(48, LateDevice(**device)) as feeding, aiofeed.serve(feeding, address):
        told.send("serving")
        signal.pause()
    told.send("closed")


def leaves(address: str, told: Connection, count: int) -> None:
    """Iterate in every way that leaves batches behind; tell what was wrong."""
    bad = []
    with aiofeed.attach(address, device=LateDevice()) as feed:
        for turn in range(count):
            iterator = iter(feed)
            if turn % 3 == 0:
                continue  # nothing was taken: the next iterator has it
            for at, batch in enumerate(iterator):
                bad += wrong(batch)
                if turn % 3 == 1 and at == turn % 7:
                    break
        blocks = feed._subscription.taker._blocks  # type: ignore[union-attr]
        told.send((blocks is not None and bool(blocks._opened), bad))


def opens_no_more(address: str, told: Connection) -> None:
    """Attach where memory can be opened, then it cannot; tell of the error, and of the next epoch."""
    device = LateDevice()
    with aiofeed.attach(address, device=device) as feed:
        device.refuses = "open"
        try:
            list(feed)
        except Exception as error:
            feed.close()
            good = sum(not wrong(batch) for batch in feed)
            told.send((type(error).__name__, str(error), good, feed._subscription.taker._blocks is not None))  # type: ignore[union-attr]
