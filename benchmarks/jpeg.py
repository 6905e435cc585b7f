"""How fast are files of pictures, and files with hardly any work, compared with decoding alone and ``DataLoader``?

JPEGs to uint8, batch 64, in the page cache, epochs after the first: with Pillow in every contender (antialiased
bilinear, full scale), and with "native", aiofeed's library. Two bare threads and two bare processes only read and
decode, 16 files at a time. ``DataLoader`` has two persistent workers. Then 20,000 files of 2 KB.

Targets, with Pillow: 0.98 of two bare threads; 1.10 of ``DataLoader``; no more CPU time per image than it; at most 60
MB above the imports, and no more than 1.05 times that after 20 epochs. Native: 64x64 1.3 times Pillow and 0.65 of two
bare processes; 500x400 1.4 times two bare threads with Pillow and 0.95 of two bare processes; 3000x2000 5 times
``DataLoader`` and 0.95 of two bare processes. Files of 2 KB: 2.0 times ``DataLoader``.
"""

from __future__ import annotations

import functools
import multiprocessing
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import Counted, as_array, fed, labelled, loaded
from benchmarks.data import files_below, jpeg_folder, tiny_folder
from benchmarks.figures import Figure, Race, at_most
from benchmarks.harness import Contender, Measure, Settings, interleave, measure_memory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    DecodePiece = Callable[[list[str], NDArray[np.uint8]], None]
    """Reads and decodes files into rows."""

TITLE = "JPEG files, and files of 2 KB; batch 64, second epoch"

SIZE = 224
BATCH = 64
WORKERS = 2
PIECE = 16
# Epochs after which memory is compared.
SHORT, LONG = 2, 20
OURS, LOADER = "aiofeed", "DataLoader, 2 workers"
THREADS, PROCESSES = "two bare threads", "two bare processes"


def run(settings: Settings) -> list[Figure]:
    figures = with_pillow(settings)
    if has_native():
        for width, height, side, count in ((64, 64, 64, 6000), (500, 400, SIZE, 512), (3000, 2000, SIZE, 64)):
            figures += native(settings, width, height, side, count)
    return figures + small(settings)


def with_pillow(settings: Settings) -> list[Figure]:
    options = {"folder": str(jpeg_folder(settings.data, settings.size(512, 96)))}
    feeder = Contender(OURS, aiofeed_feeder, {**options, "scaled": False}, ("torch", "aiofeed:Feeder", "PIL.Image"))
    loader = Contender(LOADER, data_loader, options, ("torch.utils.data", "numpy", "PIL.Image"))
    threads = Contender(THREADS, bare_threads, options, bound=True)
    processes = Contender(PROCESSES, bare_processes, options, bound=True)
    race = interleave([feeder, threads, processes, loader], settings)
    (after, later), _ = measure_memory(feeder, settings, (SHORT, settings.size(LONG, SHORT + 1) - SHORT))
    (theirs,), _ = measure_memory(loader, settings, (SHORT,))
    name = "500x400, Pillow"
    return [
        race.speed(OURS, THREADS, 0.98, name),
        race.speed(OURS, PROCESSES, None, name),
        race.speed(OURS, LOADER, 1.10, name),
        race.cpu(OURS, LOADER, 1.0, name),
        Figure(f"{name}: memory above the imports", (after / 1e6,), "MB", at_most(60)),
        Figure(f"{name}: memory, 20 epochs / 2", (later / after,), target=at_most(1.05)),
        Figure(f"{name}: memory above the imports, DataLoader", (theirs / 1e6,), "MB"),
        *race.rates("images", name),
    ]


def native(settings: Settings, width: int, height: int, side: int, count: int) -> list[Figure]:
    folder = str(jpeg_folder(settings.data, settings.size(count, 12), width, height))
    files = {"folder": folder, "side": side}
    contenders = [
        Contender("native", aiofeed_feeder, {**files, "backend": "native"}),
        Contender(PROCESSES, bare_processes, {**files, "decode": "native"}, bound=True),
    ]
    least = {PROCESSES: 0.65 if width == 64 else 0.95}
    if width == 64:
        contenders.append(Contender("Pillow", aiofeed_feeder, {**files, "backend": "pillow"}))
        least["Pillow"] = 1.3
    elif width == 500:
        contenders.append(Contender(f"{THREADS}, Pillow", bare_threads, {"folder": folder}))
        least[f"{THREADS}, Pillow"] = 1.4
    else:
        contenders.append(Contender("DataLoader, Pillow", data_loader, {"folder": folder}))
        least["DataLoader, Pillow"] = 5.0
    race: Race = interleave(contenders, settings)
    name = f"{width}x{height} to {side}, native"
    return [*[race.speed("native", other, bar, name) for other, bar in least.items()], *race.rates("images", name)]


def small(settings: Settings) -> list[Figure]:
    options = {"folder": str(tiny_folder(settings.data, settings.size(20_000, 200)))}
    race = interleave([Contender(OURS, tiny_feeder, options), Contender(LOADER, tiny_loader, options)], settings)
    return [race.speed(OURS, LOADER, 2.0, "2 KB"), race.cpu(OURS, LOADER, None, "2 KB"), *race.rates("files", "2 KB")]


def has_native() -> bool:
    """Whether the native library was built."""
    from aiofeed.kernel.decoders.native_jpeg import native_decoder

    return native_decoder() is not None


def aiofeed_feeder(
    folder: str, side: int = SIZE, threads: int | None = None, **decoder: Any
) -> AbstractContextManager[Measure]:
    import aiofeed

    decode, limits = aiofeed.DecodeImage((side, side), **decoder), aiofeed.Limits(decode_threads=threads)
    feeder = aiofeed.Feeder(aiofeed.ImageFolder(folder), decode=decode, batch_size=BATCH, limits=limits)
    return fed(feeder, labelled)


def data_loader(folder: str) -> AbstractContextManager[Measure]:
    return loaded(Images(files_below(folder)), BATCH, WORKERS, labelled)


def decode_file(path: str) -> NDArray[np.uint8]:
    """A file to uint8 [224, 224, 3], with the usual Pillow code."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def one_by_one(paths: list[str], rows: NDArray[np.uint8], decode: Callable[[str], Any] = decode_file) -> None:
    for path, row in zip(paths, rows, strict=True):
        row[:] = decode(path)


def native_chunk(paths: list[str], rows: NDArray[np.uint8]) -> None:
    files = []
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            files.append(file.read())
    assert not any(native_decoder(rows.shape[1]).decode_many_into(files, rows))


@functools.cache
def native_decoder(side: int) -> Any:
    from aiofeed import DecodeImage

    return DecodeImage((side, side), backend="native")


def decoded(pieces: Iterable[list[str]], side: int, decode: DecodePiece | str) -> Iterator[None]:
    """Decode piece after piece into the same 64 rows; "native" by aiofeed's library."""
    decode = native_chunk if isinstance(decode, str) else decode
    import numpy as np

    rows, position = np.empty((BATCH, side, side, 3), np.uint8), 0
    for piece in pieces:
        decode(piece, rows[position : position + len(piece)])
        position = (position + PIECE) % BATCH
        yield


@contextmanager
def bare_threads(
    folder: str, decode: DecodePiece | str = one_by_one, side: int = SIZE, workers: int = WORKERS
) -> Iterator[Measure]:
    """Threads that only read and decode."""
    paths = files_below(folder)

    def epoch() -> Mapping[str, float]:
        # next() of a list's iterator is atomic under the GIL, so the threads can share it.
        pieces = iter([paths[start : start + PIECE] for start in range(0, len(paths), PIECE)])
        threads = [threading.Thread(target=list, args=(decoded(pieces, side, decode),)) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"items": len(paths)}

    epoch()
    yield epoch


@contextmanager
def bare_processes(
    folder: str, decode: DecodePiece | str = one_by_one, side: int = SIZE, workers: int = WORKERS
) -> Iterator[Measure]:
    """The same in processes, which are forked beforehand."""
    context = multiprocessing.get_context("fork")
    paths = files_below(folder)
    todo, done = context.SimpleQueue(), context.SimpleQueue()
    processes = [
        context.Process(target=decode_on_request, args=(todo, done, side, decode), daemon=True) for _ in range(workers)
    ]
    for process in processes:
        process.start()

    def epoch() -> Mapping[str, float]:
        for start in range(0, len(paths), PIECE):
            todo.put(paths[start : start + PIECE])
        for _ in range(0, len(paths), PIECE):
            done.get()
        return {"items": len(paths)}

    try:
        epoch()
        yield epoch
    finally:
        for _ in processes:
            todo.put(None)
        for process in processes:
            process.join()
        todo.close()
        done.close()


def decode_on_request(todo: Any, done: Any, side: int, decode: DecodePiece | str) -> None:
    for _ in decoded(iter(todo.get, None), side, decode):
        done.put(None)


class Images:
    """The Dataset for ``DataLoader``, with the samples of torchvision's ``ImageFolder`` and ``pil_to_tensor``."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        names = [path.rsplit("/", 2)[-2] for path in paths]
        numbers = {name: number for number, name in enumerate(sorted(set(names)))}
        self.targets = [numbers[name] for name in names]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        return torch.from_numpy(decode_file(self.paths[index]).copy()).permute(2, 0, 1), self.targets[index]


def tiny_feeder(folder: str) -> AbstractContextManager[Measure]:
    import aiofeed

    return fed(aiofeed.Feeder(aiofeed.Files(files_below(folder)), decode=as_array, batch_size=BATCH))


def tiny_loader(folder: str) -> AbstractContextManager[Measure]:
    # The arrays are views of bytes objects; default_collate only copies them.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    return loaded(TinyFiles(files_below(folder)), BATCH, WORKERS)


class TinyFiles(Counted):
    """The Dataset of files of 2 KB for ``DataLoader``."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(len(paths))
        self._paths = paths

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        with open(self._paths[index], "rb") as file:
            return as_array(file.read())
