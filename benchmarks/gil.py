"""How long does decoding an image hold the GIL, and at which rate does one process therefore stop to scale?

``DecodeImage`` with Pillow and with simplejpeg, from bytes in memory to a row of a batch, one thread, JPEGs of three
sizes; and reading a file of 2 KB. Another process measures the time under the GIL (``benchmarks.gil_probe``). The limit
of a process, for any number of threads, is one image per time under the GIL. Compared with the usual Pillow code: open,
convert, resize, ``np.asarray``.

Targets: at 64x64 with Pillow no more than the usual Pillow code, with simplejpeg at most 0.60 of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from typing import Any

from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, Sample, Target, at_most, per
from benchmarks.gil_probe import ProbedProcess
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "The GIL, per image, one thread"

SIZES = ((64, 64, 64, 512), (500, 400, 224, 128), (3000, 2000, 224, 8))
"""Width, height, side of the result, number of files."""

WORK_S = 0.6
"""Approximate duration of one measurement."""


def run(settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    backends = ("pillow", "turbo") if find_spec("simplejpeg") else ("pillow",)
    for width, height, side, count in SIZES:
        folder = str(jpeg_folder(settings.data, settings.size(count, 8), width, height))
        options = {"folder": folder, "side": side, "seconds": 0.02 if settings.quick else WORK_S}
        names = {"usual Pillow code": "bare", **{f"DecodeImage, {backend}": backend for backend in backends}}
        if side == width:
            names["reading the file"] = "read"
        contenders = [Contender(name, probed, {**options, "how": how}) for name, how in names.items()]
        samples = interleave(contenders, settings)
        held = {label: _us(rounds, "held_s") for label, rounds in samples.items()}
        cpu = {label: _us(rounds, "cpu_s") for label, rounds in samples.items()}
        size = f"{width}x{height} to {side}"
        for backend in backends:
            ratio = per(held[f"DecodeImage, {backend}"], tuple(max(us, 0.01) for us in held["usual Pillow code"]))
            target: Target | None = at_most(1.0 if backend == "pillow" else 0.60) if side == width else None
            figures.append(Figure(f"{size}: GIL, DecodeImage, {backend} / usual Pillow code", ratio, target=target))
        figures += [Figure(f"{size}: GIL, {label}", values, "us") for label, values in held.items()]
        figures += [Figure(f"{size}: CPU, {label}", values, "us") for label, values in cpu.items()]
        figures += [
            Figure(f"{size}: limit of a process, {label}", tuple(1e6 / max(us, 0.01) for us in values), "/s")
            for label, values in held.items()
        ]
    return figures


def _us(rounds: list[Sample], name: str) -> tuple[float, ...]:
    return tuple(sample[name] / sample["items"] * 1e6 for sample in rounds)


@contextmanager
def probed(folder: str, side: int, how: str, seconds: float) -> Iterator[Measure]:
    options = {"folder": folder, "side": side, "how": how, "seconds": seconds}
    with ProbedProcess("benchmarks.gil:worker", options) as process:
        yield process.measure


def worker(folder: str, side: int, how: str, seconds: float) -> Callable[[], int]:
    """In the measured process: returns a function that does one of the jobs for ``seconds``."""
    import time

    import numpy as np

    paths = files_below(folder)
    encoded = [_bytes_of(path) for path in paths]
    rows = np.empty((64, side, side, 3), np.uint8)
    one: Callable[[int], object]
    if how == "bare":

        def one(number: int) -> object:
            rows[number % 64] = _usual_pillow_code(encoded[number], side)
            return None
    elif how == "read":
        from aiofeed.sources.file_io import read_file

        def one(number: int) -> object:
            return read_file(paths[number])
    else:
        from aiofeed import DecodeImage

        decoder = DecodeImage((side, side), backend=how)  # type: ignore[arg-type]

        def one(number: int) -> object:
            decoder.decode_into(encoded[number], rows[number % 64])
            return None

    def work() -> int:
        items = 0
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            for number in range(len(paths)):
                one(number)
            items += len(paths)
        return items

    return work


def _usual_pillow_code(data: bytes, side: int) -> Any:
    import numpy as np
    from PIL import Image

    with Image.open(BytesIO(data)) as image:
        return np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
