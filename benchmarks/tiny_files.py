"""What does the framework cost for samples with hardly any work?

20,000 files of 2 KB in the page cache, decoded by ``np.frombuffer``, batch 64, epochs after the first, compared with
``DataLoader(num_workers=2, persistent_workers=True)`` with a Dataset that does the same.

Target: at least 2.0 times ``DataLoader``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.data import files_below, tiny_folder
from benchmarks.figures import Figure, at_least, cpu_us_per_item, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TITLE = "20,000 files of 2 KB, trivial decoder, batch 64"

BATCH = 64


def run(settings: Settings) -> list[Figure]:
    options = {"folder": str(tiny_folder(settings.data, settings.size(20_000, 200)))}
    feeder = Contender("aiofeed", aiofeed_feeder, options, ("torch", "aiofeed:Feeder", "aiofeed:Files"))
    loader = Contender("DataLoader, 2 workers", data_loader, options, ("torch.utils.data", "numpy"))
    samples = interleave([feeder, loader], settings)
    rate = {label: rates(rounds) for label, rounds in samples.items()}
    cpu = {label: cpu_us_per_item(rounds) for label, rounds in samples.items()}
    return [
        Figure("speed / DataLoader, 2 workers", per(*rate.values()), target=at_least(2.0)),
        Figure("CPU per file / DataLoader", per(*cpu.values())),
        *[Figure(f"files: {label}", values, "/s") for label, values in rate.items()],
        *[Figure(f"CPU per file: {label}", values, "us") for label, values in cpu.items()],
    ]


def decode(data: bytes) -> NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(data, np.uint8)


@contextmanager
def aiofeed_feeder(folder: str) -> Iterator[Measure]:
    import aiofeed

    source = aiofeed.Files(files_below(folder))
    with aiofeed.Feeder(source, decode=decode, batch_size=BATCH) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(map(len, one_epoch()))}

        epoch()
        yield epoch


@contextmanager
def data_loader(folder: str) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    # The arrays are views of bytes objects; default_collate only copies them.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    loader = DataLoader(TinyFiles(files_below(folder)), BATCH, num_workers=2, persistent_workers=True)  # type: ignore[arg-type,var-annotated]

    def epoch() -> Mapping[str, float]:
        return {"items": sum(map(len, loader))}

    epoch()
    yield epoch


class TinyFiles:
    """The Dataset for ``DataLoader``."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        with open(self._paths[index], "rb") as file:
            return decode(file.read())
