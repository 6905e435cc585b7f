"""Small training scripts for the processes that are sent signals; each goes on until it is stopped, unless it says so.

Nothing of aiofeed is imported before a script runs: in a fresh interpreter a signal may come in the middle of that.
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
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch

SCRIPTS: dict[str, Callable[[], None]] = {}

# What a script keeps to the very end of its process.
kept: list[Any] = []


def script(function: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(function)
    def run() -> None:
        # Decoders as small as these are Python alone, and a warning that the GIL limits them is right.
        logging.getLogger("aiofeed.feeder").addFilter(lambda record: "GIL-bound" not in str(record.msg))
        function()

    SCRIPTS[function.__name__] = run
    return run


class Numbers:
    """A source of numbers; each read takes `delay_s` without holding up others."""

    def __init__(self, n: int = 64, delay_s: float = 0.0) -> None:
        self.n = n
        self.delay_s = delay_s

    def __len__(self) -> int:
        return self.n

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> bytes:
        await asyncio.sleep(self.delay_s)
        return b"%d" % index


def number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


def stuck_in_c(data: bytes) -> torch.Tensor:
    """Releases the GIL and does not come back."""
    ctypes.CDLL(None).sleep(30)
    return number(data)


def stuck_in_sleep(data: bytes) -> torch.Tensor:
    time.sleep(30)
    return number(data)


def feeder(source: Any = None, decode: Any = number, **options: Any) -> Any:
    from aiofeed import Feeder

    return Feeder(source or Numbers(), decode=decode, batch_size=4, **options)


def step(batch: Any) -> None:
    tensor = batch[0] if isinstance(batch, (list, tuple)) else batch
    (tensor * 2).sum()


def say(word: str) -> None:
    os.write(1, word.encode() + b"\n")


# --- ways of training, until a signal comes ---------------------------------------------------------------------------


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
    from aiofeed.testing import SimulatedDevice

    while True:
        for batch in feeder(device=SimulatedDevice()):
            (batch * 2).to("cpu")


@script
def images() -> None:
    import numpy as np
    from PIL import Image

    from aiofeed import DecodeImage

    made = io.BytesIO()
    Image.fromarray(np.arange(64 * 48 * 3, dtype=np.uint8).reshape(48, 64, 3)).save(made, "JPEG")

    class Images(Numbers):
        async def read(self, index: int) -> bytes:
            return made.getvalue()

    while True:
        for batch in feeder(Images(), DecodeImage(size=32)):
            step(batch)


@script
def slow() -> None:
    for batch in feeder(Numbers(10**6, delay_s=0.05)):
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
def held_in_a_global() -> None:
    kept.append(feeder(Numbers(10**6)))
    for batch in kept[0]:
        step(batch)


@script
def live_iterator() -> None:
    kept.append(iter(feeder(Numbers(10**6))))
    for batch in kept[0]:
        step(batch)


TRAINING = tuple(SCRIPTS)
"""The scripts that go on until a signal comes."""


# --- with a handler of the user's own, and at particular moments ------------------------------------------------------


@script
def own_handler() -> None:
    """Ends by itself once the user's handler has taken note of the signal."""
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    say("listening")
    while not asked:
        with feeder(Numbers(delay_s=0.001)) as loader:
            for batch in loader:
                step(batch)
    say("asked to end")


@script
def own_exception() -> None:
    """The user's handler raises; the loop is left, and a new epoch begins and is complete."""

    class Asked(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Asked

    loader = feeder(Numbers(delay_s=0.001))
    try:
        signal.signal(signal.SIGINT, handler)
        say("listening")
        while True:
            for batch in loader:
                step(batch)
    except Asked:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        say(str(sum(1 for _ in loader)))
    loader.close()


def decoding() -> None:
    """Wait until a decoder is at work."""
    import threading

    while not any(thread.name.startswith("aiofeed-decode") for thread in threading.enumerate()):
        time.sleep(0.001)


@script
def close_of_a_stuck_feeder() -> None:
    loader = feeder(decode=stuck_in_c)
    kept.append(iter(loader))
    decoding()
    say("closing")
    loader.close()


@script
def ctrl_c_at_the_exit_of_a_stuck_feeder() -> None:
    """It comes from a thread of its own, as soon as the end of the interpreter waits for aiofeed's."""
    import threading

    from aiofeed.runtime import threads

    kept.append(iter(feeder(decode=stuck_in_c)))
    decoding()
    main = threading.get_ident()

    def waiting() -> bool:
        frame = sys._current_frames()[main]
        while frame.f_code is not threads._wait.__code__ and frame.f_back is not None:
            frame = frame.f_back
        return frame.f_code is threads._wait.__code__

    def interrupt() -> None:
        while not waiting():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


# --- ways of ending ---------------------------------------------------------------------------------------------------


@script
def end_with_a_live_iterator() -> None:
    kept.append(iter(feeder()))
    next(kept[0])


@script
def end_with_a_dropped_feeder() -> None:
    loader = feeder()
    next(iter(loader))
    del loader


@script
def end_with_an_idle_feeder() -> None:
    kept.append(feeder())
    list(kept[0])


@script
def end_with_a_stuck_decoder() -> None:
    kept.append(iter(feeder(decode=stuck_in_c)))
    decoding()


@script
def end_in_calls_of_torch() -> None:
    """The decoder is in C++ nearly always, and comes back to the interpreter again and again."""
    numbers = torch.arange(200_000).flip(0)

    def decode(data: bytes) -> torch.Tensor:
        while True:
            torch.sort(numbers)

    kept.append(iter(feeder(decode=decode)))
    decoding()


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

    kept.append(iter(prefetch(itertools.repeat(torch.zeros(4)))))
    next(kept[0])


@script
def end_of_a_device() -> None:
    from aiofeed.testing import SimulatedDevice

    kept.append(iter(feeder(device=SimulatedDevice())))
    next(kept[0])
