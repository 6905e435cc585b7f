"""How fast are batches of a mixture?

Three token files of which windows of 1,024 tokens are drawn in the shares 0.5, 0.3 and 0.2, shuffled, batches of 16:
``Mixture`` beside an index that is blended before, as Megatron does it, in a ``DataLoader``; and beside
``MapDataset.mix`` of Grain and ``CombinedStreamingDataset`` of LitData, where these are installed. Then the rows of
three tables, lists of 200 tokens on average, packed to rows of 2,048, batches of 8: ``Pack`` over ``Mixture`` beside
``interleave_datasets`` of Hugging Face with a loop that packs, in a ``DataLoader``, and beside Grain's packing, with
which torchtitan trains. All without workers. Then what a mixture of two sources costs beside the two alone.

Targets: less processor time than each other loader; at most 1.2 times that of the sources alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aiofeed
from benchmarks.contenders import epochs, fed, single_epochs
from benchmarks.data import generate
from benchmarks.figures import Figure, at_most, per
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "Mixtures: tokens drawn from three sources, and documents packed; two sources beside the same alone"

SHARES = (0.5, 0.3, 0.2)
BLOCK, BATCH = 1024, 16
CONTEXT, ROWS = 2048, 8
KINDS = {"files": (16, 64), "Tokens": (16, 64), "Table in memory": (64, 1024), "Parquet": (64, 1024), "Dataset": (64,)}
"""Sources of which two are mixed, with batch sizes."""


def run(settings: Settings) -> list[Figure]:
    folder = str(data(settings))
    figures: list[Figure] = []
    for name, contenders in (("windows", WINDOWS), ("packed documents", PACKED)):
        present = [label for label, (needs, _) in contenders.items() if needs is None or find_spec(needs)]
        race = interleave([Contender(each, tokens_of, {"folder": folder, "label": each}) for each in present], settings)
        ours, *others = present
        figures += [race.cpu(ours, other, 1, name) for other in others]
        figures += [race.speed(ours, other, None, name) for other in others]
        figures += race.rates("tokens", name)
        figures += [Figure(f"{name}: CPU of 1,000 tokens, {label}", each, "us") for label, each in _cpu(race).items()]
    for kind, sizes in itertools.islice(KINDS.items(), settings.size(len(KINDS), 1)):
        for size in sizes:
            options = {"folder": folder, "kind": kind, "batch_size": settings.size(size, 4)}
            labels = ("mixed", "alone")
            race = interleave(
                [Contender(each, pair, {**options, "mixed": each == "mixed"}) for each in labels], settings
            )
            ratio = per(race.cpu_us("mixed"), race.cpu_us("alone"))
            figures.append(Figure(f"two of {kind}, batch {size}: CPU / alone", ratio, target=at_most(1.2)))
    return figures


def _cpu(race: Any) -> dict[str, tuple[float, ...]]:
    return {label: tuple(1000 * each for each in race.cpu_us(label)) for label in race}


def data(settings: Settings) -> Path:
    """A folder of token files, tables of documents and small files."""
    windows = settings.size(4_000, 40)

    def write(folder: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        random = np.random.default_rng(0)
        for number in range(len(SHARES)):
            tokens = random.integers(50_000, size=windows * BLOCK, dtype=np.uint16)
            tokens.tofile(folder / f"{number}.bin")
            ends = np.cumsum(random.geometric(1 / 200, len(tokens) // 200))
            offsets = np.concatenate([[0], ends[ends < len(tokens)], [len(tokens)]]).astype(np.int32)
            lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens.astype(np.int32)))
            parquet.write_table(pa.table({"ids": lists}), folder / f"{number}.parquet")
            rows = pa.table({"x": np.arange(windows * 20), "y": random.random(windows * 20, np.float32)})
            parquet.write_table(rows, folder / f"rows-{number}.parquet", row_group_size=4096)
        (folder / "small").mkdir()
        for number in range(windows):
            (folder / "small" / f"{number}").write_bytes(random.bytes(2048))

    return generate(settings.data / f"mixtures-{windows}", write)


@contextmanager
def tokens_of(folder: str, label: str) -> Iterator[Measure]:
    """Measures epochs of a contender, in tokens."""
    _, new = (WINDOWS | PACKED)[label]
    with epochs(new(Path(folder)), torch.numel) as measure:
        yield measure


Batches = Callable[[], Iterator[torch.Tensor]]


def ours_windows(folder: Path) -> Batches:
    sources = {f"{number}": aiofeed.Tokens(folder / f"{number}.bin", block=BLOCK) for number in range(len(SHARES))}
    mixture = aiofeed.Mixture(sources, SHARES, until="first")
    return single_epochs(aiofeed.Feeder(mixture, batch_size=BATCH, shuffle=True))


class Blended(torch.utils.data.Dataset[torch.Tensor]):
    """Windows of token files by an index that is blended before, by the largest error as Megatron's helper does it."""

    def __init__(self, folder: Path) -> None:
        self.files = [np.memmap(folder / f"{number}.bin", np.uint16) for number in range(len(SHARES))]
        count = int(min(len(file) // BLOCK / share for file, share in zip(self.files, SHARES, strict=True)))
        shares, drawn = np.array(SHARES), np.zeros(len(SHARES))
        self.index = np.empty((count, 2), np.int64)
        for place in range(count):
            source = int(np.argmax(shares * max(place, 1) - drawn))
            self.index[place] = source, drawn[source]
            drawn[source] += 1

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, place: int) -> torch.Tensor:
        source, window = self.index[place].tolist()
        return torch.from_numpy(self.files[source][window * BLOCK : (window + 1) * BLOCK].astype(np.int64))


def blended(folder: Path) -> Batches:
    loader = torch.utils.data.DataLoader(Blended(folder), BATCH, shuffle=True)
    return lambda: iter(loader)


class Windows:
    """The windows of a token file, as a random access source of Grain."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16)

    def __len__(self) -> int:
        return len(self.tokens) // BLOCK

    def __getitem__(self, window: int) -> Any:
        return self.tokens[window * BLOCK : (window + 1) * BLOCK].astype(np.int64)


def grain_windows(folder: Path) -> Batches:
    import grain

    sources: Sequence[Any] = [
        grain.MapDataset.source(Windows(folder / f"{number}.bin")).shuffle(0)
        for number in range(len(SHARES))  # type: ignore[arg-type]
    ]
    batches: Any = grain.MapDataset.mix(sources, SHARES).batch(BATCH).to_iter_dataset(grain.ReadOptions())
    return lambda: map(torch.from_numpy, batches)


def litdata_windows(folder: Path) -> Batches:
    import litdata

    sources = []
    for number in range(len(SHARES)):
        made = folder / f"litdata-{number}"
        if not made.exists():
            windows = Windows(folder / f"{number}.bin")
            cache = litdata.streaming.cache.Cache(
                str(made), chunk_size=BLOCK * 64, item_loader=litdata.TokensLoader(block_size=BLOCK)
            )
            for window in range(len(windows)):
                cache[window] = torch.from_numpy(windows[window])
            cache.done()
            cache.merge()
        loader = litdata.TokensLoader(block_size=BLOCK)
        sources.append(litdata.StreamingDataset(str(made), item_loader=loader, shuffle=True))
    mixed = litdata.CombinedStreamingDataset(sources, weights=SHARES, iterate_over_all=False)
    loader = litdata.StreamingDataLoader(mixed, batch_size=BATCH)
    return lambda: iter(loader)


def ours_packed(folder: Path) -> Batches:
    sources = {f"{number}": aiofeed.Table(folder / f"{number}.parquet") for number in range(len(SHARES))}
    mixture = aiofeed.Mixture(sources, SHARES, until="first")
    feeder = aiofeed.Feeder(mixture, batch_size=aiofeed.Pack("measure", CONTEXT, rows=ROWS, length="ids"), shuffle=True)
    new = single_epochs(feeder)
    return lambda: (batch["ids"] for batch in new())


def _hf_tables(folder: Path) -> list[Any]:
    import datasets

    datasets.disable_progress_bars()
    files = [str(folder / f"{number}.parquet") for number in range(len(SHARES))]
    return [datasets.Dataset.from_parquet(file, cache_dir=str(folder / "hf")).with_format("numpy") for file in files]


class PackedRows(torch.utils.data.IterableDataset[torch.Tensor]):
    """Rows of tokens of documents one after the other, cut at their ends."""

    def __init__(self, documents: Any) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[torch.Tensor]:
        rest: list[Any] = []
        length = 0
        for document in self.documents:
            rest.append(document["ids"])
            length += len(rest[-1])
            if length >= CONTEXT:
                tokens = torch.from_numpy(np.concatenate(rest))
                yield from tokens[: length // CONTEXT * CONTEXT].view(-1, CONTEXT)
                rest = [tokens[length // CONTEXT * CONTEXT :].numpy()]
                length %= CONTEXT


def hf_packed(folder: Path) -> Batches:
    import datasets

    mixed = datasets.interleave_datasets([each.shuffle(0) for each in _hf_tables(folder)], [*SHARES], seed=0)
    loader = torch.utils.data.DataLoader(PackedRows(mixed), ROWS)
    return lambda: iter(loader)


def grain_packed(folder: Path) -> Batches:
    import grain

    sources: Any = [grain.MapDataset.source(each).shuffle(0) for each in _hf_tables(folder)]
    mixed: Any = grain.MapDataset.mix(sources, SHARES).to_iter_dataset(grain.ReadOptions())
    split = grain.experimental.ConcatThenSplitIterDataset(mixed, length_struct={"ids": CONTEXT})
    batches = split.batch(ROWS)
    return lambda: (torch.from_numpy(batch["ids"]) for batch in batches)


WINDOWS: dict[str, tuple[str | None, Callable[[Path], Batches]]] = {
    "aiofeed": (None, ours_windows),
    "DataLoader of a blended index": (None, blended),
    "Grain": ("grain", grain_windows),
    "LitData": ("litdata", litdata_windows),
}
PACKED: dict[str, tuple[str | None, Callable[[Path], Batches]]] = {
    "aiofeed, packed": (None, ours_packed),
    "interleave_datasets, DataLoader": ("datasets", hf_packed),
    "Grain, packed": ("grain", grain_packed),
}
"""By label: the package that it needs, and its batches."""


class Numbers(torch.utils.data.Dataset[Any]):
    """Items that take a microsecond."""

    def __init__(self, first: int) -> None:
        self.rows = torch.arange(first, first + 20_000).float().view(-1, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def source(folder: str, kind: str, number: int) -> Any:
    """One of two sources of a kind."""
    if kind == "files":
        return aiofeed.Files(sorted(Path(folder, "small").iterdir())[number::2])
    if kind == "Tokens":
        return aiofeed.Tokens(Path(folder, f"{number}.bin"), block=BLOCK)
    if kind == "Dataset":
        return Numbers(number)
    return aiofeed.Table(Path(folder, f"rows-{number}.parquet"), in_memory=kind == "Table in memory")


def pair(folder: str, kind: str, batch_size: int, mixed: bool) -> AbstractContextManager[Measure]:
    """Measures epochs of two sources, in a mixture or one after the other."""
    sources = {f"{number}": source(folder, kind, number) for number in range(2)}
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "collate_fn": None}
    if kind == "files":
        options["decode"] = lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if mixed:
        return fed(aiofeed.Feeder(aiofeed.Mixture(sources), **options), samples_in)
    new = [single_epochs(aiofeed.Feeder(each, **options)) for each in sources.values()]
    return epochs(lambda: itertools.chain.from_iterable(each() for each in new), samples_in)


def samples_in(batch: Any) -> int:
    return len(batch["x"] if isinstance(batch, dict) else batch)
