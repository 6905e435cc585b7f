"""Processes that serve, or attach to, batches in device memory that several processes share."""

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
from tests.support import serve_parts
from tests.support.late_device import LateDevice


class LogLines(logging.Handler):
    """Collects the messages that aiofeed logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def collate(samples: list[Any]) -> dict[str, Any]:
    """Dense, permuted, strided and empty tensors, several dtypes, values that stay on the host; sizes that differ."""
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


def wrong_parts(batch: dict[str, Any]) -> list[str]:
    """The parts of a batch that differ from the original."""
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
    address: str, pipe: Connection, count: int, device: dict[str, Any] | None = None, step_s: float = 0.0, keep: int = 4
) -> None:
    """Send the batches of each of some epochs and the parts that were wrong, then what was logged.

    Args:
        device: Arguments of the device; `None` for the host.
        step_s: Duration of a step.
        keep: How many batches are kept, and checked again before they are dropped.
    """
    lines = LogLines()
    logging.getLogger("aiofeed").addHandler(lines)
    try:
        on = None if device is None else LateDevice(**device)
        with aiofeed.attach(address, device=on) as feed:
            for _ in range(count):
                seen, bad, kept = [], [], []
                for batch in feed:
                    bad += wrong_parts(batch)
                    seen.append([int(number) for number in batch["array"]])
                    kept.append(batch)
                    if len(kept) > keep:
                        bad += wrong_parts(kept.pop(0))
                    time.sleep(step_s)
                for batch in kept:
                    bad += wrong_parts(batch)
                pipe.send((seen, bad))
            blocks = feed._subscription._device_reader  # type: ignore[union-attr]
            pipe.send((blocks is not None and bool(blocks._open), lines.lines))
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))


def endlessly(address: str, pipe: Connection, device: dict[str, Any] | None, step_s: float, begin: str = "") -> None:
    """Send each batch and its wrong parts, as ``serve_parts.endlessly`` does."""
    read = lambda batch: ([int(number) for number in batch["array"]], wrong_parts(batch))  # noqa: E731
    serve_parts.endlessly(address, pipe, step_s, begin, None if device is None else LateDevice(**device), read)


def stops(address: str, pipe: Connection, device: dict[str, Any] | None) -> None:
    """Stop (SIGSTOP) after the first batch; when continued, send the final error and the parts that were wrong."""
    with aiofeed.attach(address, device=None if device is None else LateDevice(**device)) as feed:
        iterator = iter(feed)
        bad = wrong_parts(next(iterator))
        pipe.send("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            for batch in iterator:
                bad += wrong_parts(batch)
        except Exception as error:
            pipe.send((type(error).__name__, str(error), bad))


def serves(address: str, pipe: Connection, device: dict[str, Any], options: dict[str, Any]) -> None:
    """Serve endlessly."""
    with feeder(40_000, LateDevice(**device)) as feeding, aiofeed.serve(feeding, address, **options):
        pipe.send("serving")
        time.sleep(60.0)


def serves_epochs(address: str, pipe: Connection, device: dict[str, Any], count: int, n: int) -> None:
    """Serve some epochs, then exit."""
    with feeder(n, LateDevice(**device)) as feeding:
        server = aiofeed.serve(feeding, address)
        pipe.send("serving")
        server.run(epochs=count)
    pipe.send("done")


def transformed(address: str, pipe: Connection, device: dict[str, Any]) -> None:
    """Send the parts that the transforms of the server and of the consumer have added."""
    transform = lambda batch: batch | {"here": "consumer"}  # noqa: E731
    with aiofeed.attach(address, device=LateDevice(**device), transform=transform) as feed:
        pipe.send([(batch["there"], batch["here"]) for batch in feed])


def closes_at_signal(address: str, pipe: Connection, device: dict[str, Any]) -> None:
    """Serve until SIGUSR1, close, and exit."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with feeder(48, LateDevice(**device)) as feeding, aiofeed.serve(feeding, address):
        pipe.send("serving")
        signal.pause()
    pipe.send("closed")


def leaves(address: str, pipe: Connection, count: int) -> None:
    """Leave epochs at different points; send the parts that were wrong."""
    bad = []
    with aiofeed.attach(address, device=LateDevice()) as feed:
        for turn in range(count):
            iterator = iter(feed)
            if turn % 3 == 0:
                continue  # no batch was taken: the next iterator gets this epoch
            for at, batch in enumerate(iterator):
                bad += wrong_parts(batch)
                if turn % 3 == 1 and at == turn % 7:
                    break
        blocks = feed._subscription._device_reader  # type: ignore[union-attr]
        pipe.send((blocks is not None and bool(blocks._open), bad))


def cannot_open_later(address: str, pipe: Connection) -> None:
    """Attach while memory can be opened, then fail to open more; send the error and the result of the next epoch."""
    device = LateDevice()
    with aiofeed.attach(address, device=device) as feed:
        device.refuses = "open"
        try:
            list(feed)
        except Exception as error:
            feed.close()
            good = sum(not wrong_parts(batch) for batch in feed)
            pipe.send((type(error).__name__, str(error), good, feed._subscription._device_reader is not None))  # type: ignore[union-attr]
