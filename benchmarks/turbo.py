"""What does simplejpeg (the extra ``turbo``) bring, for small JPEGs and for large ones?

JPEG files of four sizes, batch 64, in the page cache, epochs after the first, through a feeder of two decode threads:
``DecodeImage(backend="pillow")`` against "auto", which takes simplejpeg for small ones, and "turbo", which takes it for
all. The pixels are the same in all of them. Then what the feeder adds to one thread that only reads and decodes 64x64
files, one after the other.

Targets: 64x64 at least 1.3 times Pillow; 500x400 by "auto" at least 1.4 times two bare threads with Pillow (without
fewer pixels, or a filter that does not antialias, libjpeg alone takes longer than that allows).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_least, cpu_us_per_item, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.jpeg import bare_threads, counted
from benchmarks.passes import single

TITLE = "JPEGs by simplejpeg, batch 64, second epoch"

BATCH = 64
THREADS = 2

SIZES = ((64, 64, 64, 6000), (224, 224, 224, 1024), (500, 400, 224, 512), (3000, 2000, 224, 64))
"""Width, height, the side that is asked for, files."""

_IMPORTS = ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage")


def run(settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    # Without the extra "auto" is Pillow: the ratios say 1.
    backends = ("pillow", "auto", "turbo") if find_spec("simplejpeg") else ("pillow", "auto")
    for width, height, side, count in SIZES:
        files = {"folder": str(jpeg_folder(settings.data, settings.size(count, 12), width, height))}
        contenders = [
            Contender(name, aiofeed_feeder, {**files, "side": side, "backend": name}, _IMPORTS) for name in backends
        ]
        size = f"{width}x{height} to {side}"
        if side == width:
            contenders.append(Contender("one bare thread", one_thread, {**files, "side": side}, ("torch", "numpy")))
        if (width, height) == (500, 400):
            contenders.append(Contender("two bare threads", bare_threads, files, ("numpy", "PIL.Image")))
        samples = interleave(contenders, settings)
        rate = {label: rates(rounds) for label, rounds in samples.items()}
        cpu = {label: cpu_us_per_item(rounds) for label, rounds in samples.items()}
        for name in backends[1:]:
            target = at_least(1.3) if (side, name) == (64, "auto") else None
            figures.append(Figure(f"{size}: speed, {name} / pillow", per(rate[name], rate["pillow"]), target=target))
            figures.append(Figure(f"{size}: CPU, {name} / pillow", per(cpu[name], cpu["pillow"])))
        if "two bare threads" in rate:
            ratio = per(rate["auto"], rate["two bare threads"])
            figures.append(Figure(f"{size}: speed, auto / two bare threads", ratio, target=at_least(1.4)))
        if "one bare thread" in cpu:
            added = tuple(a - b for a, b in zip(cpu["auto"], cpu["one bare thread"], strict=True))
            figures.append(Figure(f"{size}: CPU that the feeder adds, per image", added, "us"))
        figures += [Figure(f"{size}: images, {label}", values, "/s") for label, values in rate.items()]
        figures += [Figure(f"{size}: CPU per image, {label}", values, "us") for label, values in cpu.items()]
    return figures


@contextmanager
def aiofeed_feeder(folder: str, side: int, backend: str, threads: int = THREADS) -> Iterator[Measure]:
    import aiofeed

    source = aiofeed.ImageFolder(folder)
    decode = aiofeed.DecodeImage((side, side), backend=backend)  # type: ignore[arg-type]
    limits = aiofeed.Limits(decode_threads=threads)
    with aiofeed.Feeder(source, decode=decode, batch_size=BATCH, limits=limits) as feeder:
        one_epoch = single(feeder)

        def epoch() -> Mapping[str, float]:
            return counted(one_epoch(), len(source))

        epoch()
        yield epoch


@contextmanager
def one_thread(folder: str, side: int) -> Iterator[Measure]:
    """The calling thread reads and decodes into 64 rows, over and over; no batches, no labels."""
    import numpy as np

    from aiofeed import DecodeImage

    paths = files_below(folder)
    decoder = DecodeImage((side, side))
    rows = np.empty((BATCH, side, side, 3), np.uint8)

    def epoch() -> Mapping[str, float]:
        for number, path in enumerate(paths):
            with open(path, "rb", buffering=0) as file:
                decoder.decode_into(file.read(), rows[number % BATCH])
        return {"items": len(paths)}

    epoch()
    yield epoch
