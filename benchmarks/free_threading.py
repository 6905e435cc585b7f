"""Do threads decode as fast as processes, with and without the GIL?

Three decoders: JPEGs of 64x64 pixels by Pillow, FLAC of four seconds by soundfile (if installed), and a loop in Python.
Each with one decode thread, with one per core, and with one worker process per core. Run it with both builds of Python:
``python3.14t -m benchmarks free_threading``.

Targets, if Python runs without the GIL: at least 0.9 of processes, for each decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np

from aiofeed.runtime import machine
from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_least, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

TITLE = f"Threads and processes, {'with' if machine.has_gil() else 'without'} the GIL"

BATCH = 32
LOOPS = 20_000
RATE, SECONDS = 16_000, 4


def run(settings: Settings) -> list[Figure]:
    cores = machine.cpus()
    figures = []
    for kind in ("jpeg", "soundfile", "python"):
        if kind == "soundfile" and find_spec("soundfile") is None:
            continue
        options = {
            "kind": kind,
            "folder": str(jpeg_folder(settings.data, settings.size(512, 8), 64, 64)),
            "samples": settings.size({"jpeg": 8192, "soundfile": 1024, "python": 1024}[kind], BATCH),
        }
        contenders = [
            Contender("1 thread", feeder, {**options, "threads": 1, "engine": "thread"}),
            Contender("threads", feeder, {**options, "threads": cores, "engine": "thread"}),
            Contender("processes", feeder, {**options, "threads": cores, "engine": f"process:{cores}"}),
        ]
        rate = {label: rates(rounds) for label, rounds in interleave(contenders, settings).items()}
        target = None if machine.has_gil() else at_least(0.9)
        figures += [
            Figure(
                f"{kind}: {cores} threads / {cores} processes", per(rate["threads"], rate["processes"]), target=target
            ),
            Figure(f"{kind}: {cores} threads / 1 thread", per(rate["threads"], rate["1 thread"])),
            Figure(f"{kind}: {cores} threads", rate["threads"], "/s"),
        ]
    return figures


class Encoded:
    """A source of ``samples`` items that are in memory already."""

    def __init__(self, encoded: list[bytes], samples: int) -> None:
        self._encoded = encoded
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def key(self, index: int) -> str:
        return f"item {index}"

    async def read(self, index: int) -> bytes:
        return self._encoded[index % len(self._encoded)]


@contextmanager
def feeder(kind: str, folder: str, samples: int, threads: int, engine: str) -> Iterator[Measure]:
    from aiofeed import Feeder, Limits

    encoded, decode = _decoder(kind, folder)
    source, limits = Encoded(encoded, samples), Limits(decode_threads=threads)
    with Feeder(source, decode=decode, batch_size=BATCH, engine=engine, limits=limits) as running:
        one_epoch = single_epochs(running)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(map(len, one_epoch()))}

        epoch()
        yield epoch


def _decoder(kind: str, folder: str) -> tuple[list[bytes], Callable[[bytes], Any]]:
    """The encoded items of a kind, and their decoder."""
    if kind == "jpeg":
        from aiofeed import DecodeImage

        encoded = []
        for path in files_below(folder):
            with open(path, "rb") as file:
                encoded.append(file.read())
        return encoded, DecodeImage((64, 64), backend="pillow")
    if kind == "soundfile":
        import soundfile

        file = BytesIO()
        noise = np.random.default_rng(0).uniform(-0.5, 0.5, RATE * SECONDS)
        soundfile.write(file, noise, RATE, format="FLAC")
        return [file.getvalue()], decode_sound
    return [bytes(range(256))], decode_in_python


def decode_sound(data: bytes) -> Any:
    """float32 [64000]."""
    import soundfile

    return soundfile.read(BytesIO(data), dtype="float32")[0]


def decode_in_python(data: bytes) -> Any:
    """float64 [1]: a sum that is made by Python alone."""
    total = 0
    for number in range(LOOPS):
        total += data[number & 255]
    return np.array([total], np.float64)
