"""Small training scripts for processes that receive signals. Unless documented otherwise, a script runs until stopped.

The module does not import aiofeed; the scripts do. In a fresh interpreter a signal may arrive during that import.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import io
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch

from tests.support.process_parts import Numbers

SCRIPTS: dict[str, Callable[[], None]] = {}

# Objects that live until the end of the process.
references: list[Any] = []


def script(function: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(function)
    def run() -> None:
        # These decoders are pure Python, so aiofeed may warn that the GIL limits them.
        logging.getLogger("aiofeed.feeder").addFilter(lambda record: "GIL-bound" not in str(record.msg))
        function()

    SCRIPTS[function.__name__] = run
    return run


class SlowNumbers(Numbers):
    """A source of numbers; each read waits `delay_s` without blocking others."""

    def __init__(self, n: int = 64, delay_s: float = 0.0) -> None:
        super().__init__(n)
        self.delay_s = delay_s

    async def read(self, index: int) -> bytes:
        await asyncio.sleep(self.delay_s)
        return await super().read(index)


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


decoding = threading.Event()


def stuck_in_c(data: bytes) -> torch.Tensor:
    """Release the GIL and sleep in C for 30 s."""
    decoding.set()
    ctypes.CDLL(None).sleep(30)
    return number(data)


def stuck_in_sleep(data: bytes) -> torch.Tensor:
    time.sleep(30)
    return number(data)


def feeder(source: Any = None, decode: Any = number, **options: Any) -> Any:
    from aiofeed import Feeder

    return Feeder(source or SlowNumbers(), decode=decode, batch_size=4, **options)


def step(batch: Any) -> None:
    tensor = batch[0] if isinstance(batch, (list, tuple)) else batch
    (tensor * 2).sum()


def write_line(line: str) -> None:
    os.write(1, line.encode() + b"\n")


# --- train until a signal arrives -------------------------------------------------------------------------------------


@script
def plain() -> None:
    while True:
        for batch in feeder():
            step(batch)


@script
def epochs() -> None:
    loader = feeder(shuffle=True)
    for _ in loader.epochs(10**6):
        for batch in loader:
            step(batch)


@script
def closing() -> None:
    while True:
        with feeder() as loader:
            for batch in itertools.islice(loader, 5):
                step(batch)


@script
def breaking() -> None:
    loader = feeder()
    while True:
        for batch in loader:
            step(batch)
            break


@script
def asynchronous() -> None:
    async def train() -> None:
        while True:
            async for batch in feeder():
                step(batch)

    asyncio.run(train())


@script
def asynchronous_closing() -> None:
    async def train() -> None:
        while True:
            async with feeder() as loader:
                async for batch in loader:
                    step(batch)

    asyncio.run(train())


@script
def bridge() -> None:
    from aiofeed import prefetch

    def batches() -> Iterator[torch.Tensor]:
        yield from torch.arange(64).split(4)

    while True:
        for batch in prefetch(batches()):
            step(batch)


@script
def asynchronous_bridge() -> None:
    from aiofeed import prefetch

    async def batches() -> AsyncIterator[torch.Tensor]:
        for batch in torch.arange(64).split(4):
            await asyncio.sleep(0)
            yield batch

    while True:
        for batch in prefetch(batches()):
            step(batch)


@script
def device() -> None:
    from tests.support.simulated_device import SimulatedDevice

    while True:
        for batch in feeder(device=SimulatedDevice()):
            (batch * 2).to("cpu")


@script
def images() -> None:
    import numpy as np
    from PIL import Image

    from aiofeed import DecodeImage

    jpeg = io.BytesIO()
    Image.fromarray(np.arange(64 * 48 * 3, dtype=np.uint8).reshape(48, 64, 3)).save(jpeg, "JPEG")

    class Images(SlowNumbers):
        async def read(self, index: int) -> bytes:
            return jpeg.getvalue()

    while True:
        for batch in feeder(Images(), DecodeImage(size=32)):
            step(batch)


@script
def slow() -> None:
    for batch in feeder(SlowNumbers(10**6, delay_s=0.05)):
        step(batch)


@script
def stuck() -> None:
    for batch in feeder(decode=stuck_in_c):
        step(batch)


@script
def stuck_while_closing() -> None:
    from aiofeed import Limits

    with feeder(decode=stuck_in_sleep, limits=Limits(decode_threads=1)) as loader:
        for batch in loader:
            step(batch)


@script
def global_feeder() -> None:
    references.append(feeder(SlowNumbers(10**6)))
    for batch in references[0]:
        step(batch)


@script
def live_iterator() -> None:
    references.append(iter(feeder(SlowNumbers(10**6))))
    for batch in references[0]:
        step(batch)


TRAINING = tuple(SCRIPTS)
"""The scripts that run until a signal arrives."""


# --- with the user's own signal handler, and at particular moments ----------------------------------------------------


@script
def own_handler() -> None:
    """Ends by itself after the user's handler has recorded the signal."""
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    write_line("listening")
    while not received:
        with feeder(SlowNumbers(delay_s=0.001)) as loader:
            for batch in loader:
                step(batch)
    write_line("asked to end")


@script
def own_exception() -> None:
    """The user's handler raises an exception, which ends the loop; then a new, complete epoch follows."""

    class Interrupted(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Interrupted

    loader = feeder(SlowNumbers(delay_s=0.001))
    try:
        signal.signal(signal.SIGINT, handler)
        write_line("listening")
        while True:
            for batch in loader:
                step(batch)
    except Interrupted:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        write_line(str(sum(1 for _ in loader)))
    loader.close()


def wait_for_decoder() -> None:
    """Wait until a decoder has begun."""
    assert decoding.wait(60)


@script
def close_of_a_stuck_feeder() -> None:
    loader = feeder(decode=stuck_in_c)
    references.append(iter(loader))
    wait_for_decoder()
    write_line("closing")
    loader.close()


@script
def ctrl_c_at_the_exit_of_a_stuck_feeder() -> None:
    """A thread sends SIGINT as soon as the interpreter waits at exit for aiofeed's threads."""
    import threading

    from aiofeed.kernel.runtime import threads

    references.append(iter(feeder(decode=stuck_in_c)))
    wait_for_decoder()
    main = threading.get_ident()

    def waiting() -> bool:
        frame = sys._current_frames()[main]
        while frame.f_code is not threads._join_all.__code__ and frame.f_back is not None:
            frame = frame.f_back
        return frame.f_code is threads._join_all.__code__

    def interrupt() -> None:
        while not waiting():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


# --- end without a signal ---------------------------------------------------------------------------------------------


@script
def end_with_a_live_iterator() -> None:
    references.append(iter(feeder()))
    next(references[0])


@script
def end_with_a_dropped_feeder() -> None:
    loader = feeder()
    next(iter(loader))
    del loader


@script
def end_with_an_idle_feeder() -> None:
    references.append(feeder())
    list(references[0])


@script
def end_with_a_stuck_decoder() -> None:
    references.append(iter(feeder(decode=stuck_in_c)))
    wait_for_decoder()


@script
def end_in_calls_of_torch() -> None:
    """The decoder is nearly always in C++ and returns to the interpreter again and again."""
    numbers = torch.arange(200_000).flip(0)

    def decode(data: bytes) -> torch.Tensor:
        decoding.set()
        while True:
            torch.sort(numbers)

    references.append(iter(feeder(decode=decode)))
    wait_for_decoder()


@script
def end_by_sys_exit() -> None:
    for _ in feeder():
        sys.exit(3)


@script
def end_by_an_error() -> None:
    for _ in feeder():
        raise ZeroDivisionError("in the loop")


@script
def end_by_a_decoder() -> None:
    for _ in feeder(decode=lambda data: 1 // 0):
        pass


@script
def end_by_os_exit() -> None:
    for _ in feeder():
        os._exit(4)


@script
def end_of_a_bridge() -> None:
    from aiofeed import prefetch

    references.append(iter(prefetch(itertools.repeat(torch.zeros(4)))))
    next(references[0])


@script
def end_of_a_device() -> None:
    from tests.support.simulated_device import SimulatedDevice

    references.append(iter(feeder(device=SimulatedDevice())))
    next(references[0])
