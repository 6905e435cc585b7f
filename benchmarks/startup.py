"""How long until the first batch?

``import aiofeed`` and ``aiofeed.Feeder`` in a new process that has imported torch; then from ``iter()`` of the first
epoch to 64 JPEGs of 500 x 400 at 224 x 224, in the page cache, everything imported. Each round uses a new process.

Targets: under 50 ms and under 100 ms.
"""

from __future__ import annotations

import compileall
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_most
from benchmarks.harness import PROJECT, Contender, Measure, Settings, interleave_fresh
from benchmarks.jpeg import BATCH, SIZE, Images

TITLE = "Start: import, and the first batch of 64 JPEGs"

LOADER = "DataLoader, 2 workers"


def run(settings: Settings) -> list[Figure]:
    options = {"folder": str(jpeg_folder(settings.data, settings.size(1024, 96)))}
    contenders = [
        Contender("aiofeed", aiofeed_feeder, options, ("torch",)),
        Contender(LOADER, data_loader, options, ("torch.utils.data", "numpy", "PIL.Image")),
    ]
    # Otherwise every round would compile with PYTHONDONTWRITEBYTECODE set, which takes twice as long as the import.
    compileall.compile_dir(PROJECT / "aiofeed", quiet=2)
    race = interleave_fresh(contenders, settings)
    first = "iter() to first batch"
    return [
        Figure("import of aiofeed beyond torch", race.column("aiofeed", "import_s", 1e3), "ms", at_most(50)),
        Figure("import of its decoder and Pillow", race.column("aiofeed", "decoder_import_s", 1e3), "ms"),
        Figure(first, race.column("aiofeed", "first_batch_s", 1e3), "ms", at_most(100)),
        Figure(f"{first}: {LOADER}", race.column(LOADER, "first_batch_s", 1e3), "ms"),
    ]


@contextmanager
def aiofeed_feeder(folder: str) -> Iterator[Measure]:
    warm(folder)
    started = time.perf_counter()
    import aiofeed

    _ = aiofeed.Feeder
    import_s = time.perf_counter() - started
    started = time.perf_counter()
    _ = aiofeed.ImageFolder, aiofeed.DecodeImage
    decoder_import_s = time.perf_counter() - started
    decode = aiofeed.DecodeImage((SIZE, SIZE), scaled=False)
    with aiofeed.Feeder(aiofeed.ImageFolder(folder), decode=decode, batch_size=BATCH) as feeder:

        def first_batch() -> Mapping[str, float]:
            started = time.perf_counter()
            images, _ = next(iter(feeder))
            first_batch_s = time.perf_counter() - started
            assert len(images) == BATCH
            return {"import_s": import_s, "decoder_import_s": decoder_import_s, "first_batch_s": first_batch_s}

        yield first_batch


@contextmanager
def data_loader(folder: str) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    warm(folder)
    loader = DataLoader(Images(files_below(folder)), BATCH, num_workers=2, persistent_workers=True)  # type: ignore[arg-type,var-annotated]

    def first_batch() -> Mapping[str, float]:
        started = time.perf_counter()
        images, _ = next(iter(loader))
        first_batch_s = time.perf_counter() - started
        assert len(images) == BATCH
        return {"first_batch_s": first_batch_s}

    yield first_batch


def warm(folder: str) -> None:
    """Read the files of the first batches into the page cache."""
    for path in files_below(folder)[: 4 * BATCH]:
        Path(path).read_bytes()
