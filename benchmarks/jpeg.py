"""How fast is the feeder, compared with decoding alone and with ``DataLoader``?

JPEG files of 500 x 400 to 224 x 224, uint8, batch 64, decoded by Pillow or Pillow-SIMD in every contender
(antialiased bilinear, full scale), files in the page cache, epochs after the first. Two bare threads and two bare
processes only read and decode, 16 files at a time, without batches and labels.
``DataLoader(num_workers=2, persistent_workers=True)`` has a Dataset with the same decode that, like torchvision,
returns a [3, H, W] view.

Targets: at least 0.98 of two bare threads; at least 1.10 of ``DataLoader``; no more CPU time per image than it; at
most 60 MB of memory above the imports, and no more than 1.05 times that after 20 epochs.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_least, at_most, cpu_us_per_item, per, rates
from benchmarks.harness import Contender, Measure, Settings, added_memory, interleave
from benchmarks.process_tree import Memory
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    DecodeFile = Callable[[str], NDArray[np.uint8]]

TITLE = "JPEG 500x400 to 224, batch 64, second epoch"

SIZE = 224
BATCH = 64
WORKERS = 2
PIECE = 16
MEMORY_RUNS = 3
# Epochs after which memory is compared.
SHORT, LONG = 2, 20


def run(settings: Settings) -> list[Figure]:
    options = {"folder": str(jpeg_folder(settings.data, settings.size(1024, 96)))}
    feeder = Contender("aiofeed", aiofeed_feeder, options, ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage"))
    loader = Contender("DataLoader", data_loader, options, ("torch.utils.data", "numpy", "PIL.Image"))
    threads = Contender("two bare threads", bare_threads, options, ("numpy", "PIL.Image"), bound=True)
    processes = Contender("two bare processes", bare_processes, options, ("numpy", "PIL.Image"), bound=True)
    samples = interleave([feeder, threads, processes, loader], settings)
    rate = {label: rates(rounds) for label, rounds in samples.items()}
    cpu = {label: cpu_us_per_item(rounds) for label, rounds in samples.items()}
    memory: dict[str, list[Memory]] = {feeder.label: [], loader.label: []}
    longer: list[Memory] = []
    long = settings.size(LONG, SHORT + 1)
    for number in range(min(MEMORY_RUNS, settings.rounds)):
        for contender in (feeder, loader):
            settings.progress(f"memory {number + 1}: {contender.label}")
            measures = (SHORT, long - SHORT) if contender is feeder else (SHORT,)
            after, *later = added_memory(contender, settings, measures)
            memory[contender.label].append(after)
            longer += later
    return [
        Figure("speed / two bare threads", per(rate["aiofeed"], rate["two bare threads"]), target=at_least(0.98)),
        Figure("speed / two bare processes", per(rate["aiofeed"], rate["two bare processes"])),
        Figure("speed / DataLoader, 2 workers", per(rate["aiofeed"], rate["DataLoader"]), target=at_least(1.10)),
        Figure("CPU per image / DataLoader", per(cpu["aiofeed"], cpu["DataLoader"]), target=at_most(1.0)),
        Figure("CPU per image / two bare threads", per(cpu["aiofeed"], cpu["two bare threads"])),
        Figure("memory above the imports", tuple(m.total / 1e6 for m in memory["aiofeed"]), "MB", at_most(60)),
        Figure("  without mapped files", tuple(m.unmapped / 1e6 for m in memory["aiofeed"]), "MB"),
        Figure(
            "memory, 20 epochs / 2",
            tuple(b.total / a.total for a, b in zip(memory["aiofeed"], longer, strict=True)),
            target=at_most(1.05),
        ),
        Figure("memory above the imports: DataLoader", tuple(m.total / 1e6 for m in memory["DataLoader"]), "MB"),
        Figure("  without mapped files: DataLoader", tuple(m.unmapped / 1e6 for m in memory["DataLoader"]), "MB"),
        *[Figure(f"images: {label}", values, "/s") for label, values in rate.items()],
        *[Figure(f"CPU per image: {label}", values, "us") for label, values in cpu.items()],
    ]


@contextmanager
def aiofeed_feeder(folder: str) -> Iterator[Measure]:
    import aiofeed

    source = aiofeed.ImageFolder(folder)
    decode = aiofeed.DecodeImage((SIZE, SIZE), scaled=False)
    with aiofeed.Feeder(source, decode=decode, batch_size=BATCH) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return counted(one_epoch(), len(source))

        epoch()
        yield epoch


@contextmanager
def data_loader(folder: str) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    dataset = Images(files_below(folder))
    loader = DataLoader(dataset, BATCH, num_workers=WORKERS, persistent_workers=True)  # type: ignore[arg-type,var-annotated]

    def epoch() -> Mapping[str, float]:
        return counted(loader, len(dataset))

    epoch()
    yield epoch


@contextmanager
def bare_threads(
    folder: str, decode: DecodeFile | None = None, side: int = SIZE, workers: int = WORKERS
) -> Iterator[Measure]:
    """Threads that decode into the same 64 rows."""
    import numpy as np

    paths = files_below(folder)
    rows = [np.empty((BATCH, side, side, 3), np.uint8) for _ in range(workers)]
    one = decode or decode_file

    def epoch() -> Mapping[str, float]:
        # next() of a list's iterator is atomic under the GIL, so the threads can share it.
        pieces = iter([paths[start : start + PIECE] for start in range(0, len(paths), PIECE)])
        threads = [threading.Thread(target=lambda rows: decode_all(pieces, rows, one), args=(mine,)) for mine in rows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"items": len(paths)}

    epoch()
    yield epoch


def bare_processes(
    folder: str, decode: DecodeFile | None = None, side: int = SIZE, workers: int = WORKERS
) -> AbstractContextManager[Measure]:
    """The same in processes, which are forked beforehand."""
    return forked(folder, bare_worker, (decode or decode_file, side), workers)


@contextmanager
def forked(folder: str, worker: Callable[..., None], options: tuple[Any, ...], workers: int) -> Iterator[Measure]:
    """Processes of ``worker(todo, done, *options)``, each of which takes ``PIECE`` files of a folder at a time."""
    context = multiprocessing.get_context("fork")
    paths = files_below(folder)
    todo, done = context.SimpleQueue(), context.SimpleQueue()
    processes = [context.Process(target=worker, args=(todo, done, *options), daemon=True) for _ in range(workers)]
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


def bare_worker(todo: Any, done: Any, decode: DecodeFile, side: int) -> None:
    import numpy as np

    rows = np.empty((BATCH, side, side, 3), np.uint8)
    for piece in iter(todo.get, None):
        decode_all(iter([piece]), rows, decode)
        done.put(None)


def decode_all(pieces: Iterator[list[str]], rows: NDArray[np.uint8], decode: DecodeFile) -> None:
    position = 0
    for piece in pieces:
        for path in piece:
            rows[position] = decode(path)
            position = (position + 1) % len(rows)


def decode_file(path: str) -> NDArray[np.uint8]:
    """A file to uint8 [224, 224, 3], with the usual Pillow code."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


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
        import numpy as np
        import torch
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            small = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(small)).permute(2, 0, 1), self.targets[index]


def counted(loader: Any, expected: int) -> Mapping[str, float]:
    """Iterate one epoch; returns the number of images, which must be ``expected``."""
    items = 0
    for _, labels in loader:
        items += len(labels)
    assert items == expected, f"{items} of {expected} images"
    return {"items": items}
