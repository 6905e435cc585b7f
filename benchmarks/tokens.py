"""How fast are windows of tokens in a memory-mapped file?

64 shuffled windows of 1,024 uint16 tokens per batch and their targets, as int64, from a file of 20 million tokens in
the page cache; no step. ``Tokens`` is compared with one ``np.take`` per batch from the same memmap, converted to the
same two tensors; with nanoGPT's ``get_batch``; and with ``DataLoader`` over a ``Dataset`` of slices, without workers
and with two. "threads" is ``Tokens`` when a thread makes batches ahead, as for a file that memory cannot hold.

Targets: at least 0.7 of ``np.take``, and 20 times ``DataLoader`` with workers. Without workers ``np.take`` itself is
less than 20 times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, at_least, column, per
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

if TYPE_CHECKING:
    import torch

TITLE = "windows of 1,024 tokens with targets, batch 64, shuffled"

BATCH, BLOCK = 64, 1024


def run(settings: Settings) -> list[Figure]:
    import numpy as np

    settings.data.mkdir(parents=True, exist_ok=True)
    count = settings.size(20_000_000, 200_000)
    path = settings.data / f"tokens-{count}.bin"
    if not path.exists():
        np.random.default_rng(0).integers(50_257, size=count, dtype=np.uint16).tofile(path)
    epochs = settings.size(5, 1)
    options = {"path": str(path), "epochs": epochs}
    ours, torchs = ("torch", "aiofeed:Feeder", "aiofeed:Tokens"), ("torch.utils.data",)
    contenders = [
        Contender("Tokens", tokens, options, ours),
        Contender("Tokens, threads", tokens, options | {"in_memory": False}, ours),
        Contender("np.take", take, options, torchs),
        Contender("nanoGPT's get_batch", get_batch, options, torchs),
        Contender("DataLoader, no workers", data_loader, options, torchs),
        Contender("DataLoader, 2 workers", data_loader, options | {"workers": 2}, torchs),
    ]
    samples = interleave(contenders, settings)
    # The same number of batches in all.
    batches = (count - 1) // BLOCK // BATCH * epochs
    wall = {label: column(rounds, "wall_s", 1e6 / batches) for label, rounds in samples.items()}
    cpu = {label: column(rounds, "cpu_s", 1e6 / batches) for label, rounds in samples.items()}
    return [
        Figure("speed / np.take", per(wall["np.take"], wall["Tokens"]), target=at_least(0.7)),
        Figure(
            "speed / DataLoader, 2 workers", per(wall["DataLoader, 2 workers"], wall["Tokens"]), target=at_least(20)
        ),
        Figure("speed / DataLoader, no workers", per(wall["DataLoader, no workers"], wall["Tokens"])),
        Figure("speed / nanoGPT's get_batch", per(wall["nanoGPT's get_batch"], wall["Tokens"])),
        Figure("threads: speed / np.take", per(wall["np.take"], wall["Tokens, threads"])),
        *[Figure(f"batch: {label}", values, "us") for label, values in wall.items()],
        *[Figure(f"CPU per batch: {label}", cpu[label], "us") for label in ("Tokens", "np.take")],
    ]


@contextmanager
def tokens(path: str, epochs: int, in_memory: bool = True) -> Iterator[Measure]:
    import aiofeed

    source = aiofeed.Tokens(path, BLOCK, targets=True)
    source.in_memory = in_memory
    with aiofeed.Feeder(source, batch_size=BATCH, shuffle=True, drop_last=True) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(len(y) for _ in range(epochs) for _, y in one_epoch())}

        epoch()
        yield epoch


@contextmanager
def take(path: str, epochs: int) -> Iterator[Measure]:
    import numpy as np
    import torch

    data = np.asarray(np.memmap(path, np.uint16, "r"))
    windows = data[: (len(data) - 1) // BLOCK * BLOCK].reshape(-1, BLOCK)
    following = data[1 : 1 + windows.size].reshape(-1, BLOCK)

    def batch(chosen: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (np.take(each, chosen, axis=0).astype(np.int64) for each in (windows, following))
        return torch.from_numpy(x), torch.from_numpy(y)

    with by_hand(len(windows), batch, epochs) as epoch:
        yield epoch


@contextmanager
def get_batch(path: str, epochs: int) -> Iterator[Measure]:
    import numpy as np
    import torch

    data = np.memmap(path, np.uint16, "r")

    def batch(chosen: Any) -> tuple[torch.Tensor, torch.Tensor]:
        starts = (chosen * BLOCK).tolist()
        x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts])
        return x, y

    with by_hand((len(data) - 1) // BLOCK, batch, epochs) as epoch:
        yield epoch


@contextmanager
def by_hand(windows: int, batch: Callable[[Any], tuple[torch.Tensor, torch.Tensor]], epochs: int) -> Iterator[Measure]:
    import numpy as np

    generator = np.random.default_rng(0)

    def epoch() -> Mapping[str, float]:
        items = 0
        for _ in range(epochs):
            order = generator.permutation(windows)
            items += sum(len(batch(order[i : i + BATCH])[1]) for i in range(0, windows // BATCH * BATCH, BATCH))
        return {"items": items}

    epoch()
    yield epoch


@contextmanager
def data_loader(path: str, epochs: int, workers: int = 0) -> Iterator[Measure]:
    import numpy as np
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Slices(np.memmap(path, np.uint16, "r")),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )

    def epoch() -> Mapping[str, float]:
        return {"items": sum(len(y) for _ in range(epochs) for _, y in loader)}

    epoch()
    yield epoch


class Slices:
    """A Dataset of windows, as one writes it for ``DataLoader``."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return (len(self.data) - 1) // BLOCK

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import numpy as np
        import torch

        start = index * BLOCK
        window = torch.from_numpy(self.data[start : start + BLOCK + 1].astype(np.int64))
        return window[:-1], window[1:]
