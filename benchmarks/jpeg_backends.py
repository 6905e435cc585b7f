"""How much faster are the backends "turbo" (simplejpeg) and "native" (aiofeed's library) for JPEGs, small and large?

JPEG files of four sizes, batch 64, in the page cache, epochs after the first, through a feeder of two decode threads:
``DecodeImage(backend="pillow")``, "turbo" (one exact picture at a time) and "native" (a chunk in one call that does not
hold the GIL), the last also one picture at a time. Two bare processes only read and decode with "native", 16 files at a
time; two bare threads use Pillow at full scale, and so does a ``DataLoader(num_workers=2, persistent_workers=True)``.
Random crops show the gain from decoding only a part of each picture. The last figure is the worst PSNR of "native"
against Pillow at full scale.

Targets: 64x64 at least 1.3 times Pillow and 0.65 of two bare processes; 500x400 at least 1.4 times two bare threads
with Pillow and 0.95 of two bare processes; 3000x2000 at least 5 times ``DataLoader`` and 0.95 of two bare processes;
no picture below 35 dB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_least, cpu_us_per_item, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.jpeg import PIECE, bare_threads, counted, data_loader, forked
from benchmarks.single_epochs import single_epochs

TITLE = "Backends for JPEGs, batch 64, second epoch"

BATCH = 64
THREADS = 2

SIZES = ((64, 64, 64, 6000), (224, 224, 224, 1024), (500, 400, 224, 512), (3000, 2000, 224, 64))
"""Width, height, side of the result, number of files."""

_IMPORTS = ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage")
_TARGETS = {
    (64, "pillow"): 1.3,
    (64, "two bare processes"): 0.65,
    (500, "two bare threads, Pillow"): 1.4,
    (500, "two bare processes"): 0.95,
    (3000, "DataLoader, Pillow"): 5.0,
    (3000, "two bare processes"): 0.95,
}


def run(settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    for width, height, side, count in SIZES:
        folder = str(jpeg_folder(settings.data, settings.size(count, 12), width, height))
        samples = interleave(_contenders(folder, width, side), settings)
        rate = {label: rates(rounds) for label, rounds in samples.items()}
        cpu = {label: cpu_us_per_item(rounds) for label, rounds in samples.items()}
        best = "native" if "native" in rate else "turbo" if "turbo" in rate else "pillow"
        size = f"{width}x{height} to {side}"
        for label in rate:
            if label in (best, "pillow, random crops", "native, random crops"):
                continue
            target = _TARGETS.get((width, label)) if best == "native" else None
            ratio = per(rate[best], rate[label])
            figures.append(Figure(f"{size}: speed, {best} / {label}", ratio, target=target and at_least(target)))
        if "native, random crops" in rate:
            ratio = per(rate["native, random crops"], rate["pillow, random crops"])
            figures.append(Figure(f"{size}: speed, random crops, native / pillow", ratio))
        if width in (500, 3000) and best == "native":
            figures.append(Figure(f"{size}: worst PSNR, native", (worst_psnr(folder, side),), "dB", at_least(35)))
        figures += [Figure(f"{size}: images, {label}", values, "/s") for label, values in rate.items()]
        figures += [Figure(f"{size}: CPU per image, {label}", values, "us") for label, values in cpu.items()]
    return figures


def _contenders(folder: str, width: int, side: int) -> list[Contender]:
    files = {"folder": folder, "side": side}
    # Backends that are not installed are left out.
    backends = ["pillow", *(["turbo"] if find_spec("simplejpeg") else []), *(["native"] if has_native() else [])]
    contenders = [Contender(name, aiofeed_feeder, {**files, "backend": name}, _IMPORTS) for name in backends]
    if "native" in backends:
        one_by_one = {**files, "backend": "native", "many": False}
        contenders.append(Contender("native, one by one", aiofeed_feeder, one_by_one, _IMPORTS))
        contenders.append(Contender("two bare processes", bare_native_processes, files, ("numpy",)))
        if width == 500:
            for name in ("pillow", "native"):
                crops = {**files, "backend": name, "crop": "random"}
                contenders.append(Contender(f"{name}, random crops", aiofeed_feeder, crops, _IMPORTS))
    if width == 500:
        bare = Contender("two bare threads, Pillow", bare_threads, {"folder": folder}, ("numpy", "PIL.Image"))
        contenders.append(bare)
    if width == 3000:
        imports = ("torch.utils.data", "numpy", "PIL.Image")
        contenders.append(Contender("DataLoader, Pillow", data_loader, {"folder": folder}, imports))
    return contenders


def has_native() -> bool:
    """Whether the native library was built."""
    from aiofeed.decoders.native_jpeg import native_decoder

    return native_decoder() is not None


@contextmanager
def aiofeed_feeder(
    folder: str, side: int, backend: str, crop: str = "center", many: bool = True, threads: int = THREADS
) -> Iterator[Measure]:
    import aiofeed

    source = aiofeed.ImageFolder(folder)
    size: Any = side if crop == "random" else (side, side)
    decode: Any = aiofeed.DecodeImage(size, backend=backend, crop=crop)  # type: ignore[arg-type]
    if not many:
        decode = OneByOne(decode)
    limits = aiofeed.Limits(decode_threads=threads)
    with aiofeed.Feeder(source, decode=decode, batch_size=BATCH, limits=limits) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return counted(one_epoch(), len(source))

        epoch()
        yield epoch


class OneByOne:
    """A decoder without ``decode_many_into``."""

    def __init__(self, decoder: Any) -> None:
        self.row, self.takes_seed, self.decode_into = decoder.row, decoder.takes_seed, decoder.decode_into
        self._decoder = decoder

    def __call__(self, data: bytes) -> Any:
        return self._decoder(data)


def bare_native_processes(folder: str, side: int) -> AbstractContextManager[Measure]:
    """Processes, forked beforehand, that read and decode into the same 64 rows, without batches and labels."""
    return forked(folder, bare_worker, (side,), THREADS)


def bare_worker(todo: Any, done: Any, side: int) -> None:
    import numpy as np

    from aiofeed import DecodeImage

    decoder = DecodeImage((side, side), backend="native")
    rows = np.empty((BATCH, side, side, 3), np.uint8)
    position = 0
    for piece in iter(todo.get, None):
        files = []
        for path in piece:
            with open(path, "rb", buffering=0) as file:
                files.append(file.read())
        assert not any(decoder.decode_many_into(files, rows[position : position + len(files)]))
        position = (position + PIECE) % BATCH
        done.put(None)


def worst_psnr(folder: str, side: int, most: int = 64) -> float:
    """The lowest PSNR of pictures of "native", at the scale that it selects, against Pillow's at full scale."""
    import numpy as np

    from aiofeed import DecodeImage

    native = DecodeImage((side, side), backend="native")
    exact = DecodeImage((side, side), scaled=False, backend="pillow")
    pictures = np.empty((2, side, side, 3), np.uint8)
    worst = float("inf")
    for path in files_below(folder)[:most]:
        with open(path, "rb") as file:
            data = file.read()
        for decoder, out in zip((native, exact), pictures, strict=True):
            decoder.decode_into(data, out)
        error = float(np.mean((pictures[0].astype(np.float64) - pictures[1]) ** 2))
        worst = min(worst, 10 * float(np.log10(255**2 / error)) if error else worst)
    return worst
