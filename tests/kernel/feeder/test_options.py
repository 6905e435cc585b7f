"""Which options go with which sources: the table, the page that is printed from it, and sources of one's own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import Feeder
from aiofeed.kernel.core.faces import Declares, Exclusion
from aiofeed.kernel.core.types import Traits
from aiofeed.kernel.feeder.rules import EXCLUDED
from tests.support.calls import PUBLIC, calls_in
from tests.support.paths import ROOT
from tests.support.simulated_device import SimulatedDevice

PAGE = ROOT / "docs" / "options.md"
N = 24
LENGTHS = [1 + number % 5 for number in range(N)]


def excluded() -> list[Exclusion]:
    """The rows of the kernel, and those of the sources, plans and caches of all add-ons, by their names."""
    kinds: dict[str, type[Declares]] = {}
    waiting: list[type[Declares]] = [Declares]
    for name in (each for each in PUBLIC if each in dir(aiofeed)):
        getattr(aiofeed, name)  # which imports its module
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("aiofeed") and isinstance(vars(kind).get("excluded"), tuple):
            kinds[kind.__name__] = kind
    return [*EXCLUDED, *(row for _, kind in sorted(kinds.items()) for row in kind.excluded)]


def options_page() -> str:
    """The content of docs/options.md."""
    rows = [f"| {_code(options)} | {_code(others)} | {why} |" for options, others, _, why in excluded()]
    text = [
        "# What goes with what",
        "",
        "Every option of `Feeder` goes with every source and every other option, except for the pairs in this table.",
        "The error of a `Feeder` that is made with such a pair gives the same reason. The page is printed from the",
        "table in `aiofeed/kernel/feeder/rules.py` and from `excluded` in the classes of sources, plans and caches.",
        "",
        "| this | not with | reason, and what to do |",
        "| --- | --- | --- |",
        *(row.replace("{option}", "one of the two") for row in rows),
    ]
    return "\n".join(text) + "\n"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" if "=" in name and " " not in name else name for name in names)


def test_the_page_is_up_to_date() -> None:
    """`AIOFEED_RECORD_API=1 python -m pytest tests/kernel/feeder/test_options.py` writes docs/options.md again."""
    if os.environ.get("AIOFEED_RECORD_API") == "1":
        PAGE.write_text(options_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == options_page()


def test_calls_in_the_table_work(tmp_path: Path) -> None:
    """Each call that is written out makes an object; of ``N`` and other names a program has its own values."""
    (tmp_path / "a").write_bytes(b"a")
    names = {"aiofeed": aiofeed, "path": tmp_path / "cache", "paths": [tmp_path / "a"], "max_bytes": 1 << 20}
    calls = [call for *_, why in excluded() for call in calls_in(why)]
    assert {call.name for call in calls} >= {"DiskCache", "EncodedCache", "Files", "DecodeImage", "Stream"}
    for call in calls:
        call.bind()
        if not call.is_open:
            eval(call.code, PUBLIC | names)


# --- sources of one's own, each a class ---


class Encoded:
    """Bytes, which `decode=` makes a sample of."""

    def __len__(self) -> int:
        return N

    def key(self, index: int) -> str:
        return f"sample {index}"

    async def read(self, index: int) -> bytes:
        return np.full(3, index, np.int64).tobytes()


class Decoded(Encoded):
    """Samples that are decoded already."""

    traits = Traits(decode="none")

    async def read(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return torch.full((3,), index)


class Rows(Encoded):
    """Rows that come many at a time and need no thread of their own."""

    traits = Traits(decode="optional")

    def read_now(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return list(torch.tensor(indices)[:, None].expand(-1, 3))

    async def read(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return self.read_now([index])[0]


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    """A stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(N)[:, None].expand(-1, 3))


def decode(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int64)


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "encoded": lambda: {"source": Encoded(), "decode": decode},
    "decoded": lambda: {"source": Decoded()},
    "rows": lambda: {"source": Rows()},
    "stream": lambda: {"source": Numbers()},
    "tensors": lambda: {"source": aiofeed.Tensors(torch.arange(N)[:, None].expand(-1, 3).contiguous())},
    "mixture": lambda: {"source": aiofeed.Mixture({"a": Halves(0), "b": Halves(12)})},
}


class Halves(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return N // 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), self.first + index)


def collate(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(sample[0] if isinstance(sample, tuple) else sample) for sample in samples])


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "none": lambda _: {},
    "shuffle": lambda _: {"shuffle": True},
    "keyed": lambda _: {"shuffle": "keyed"},
    "replacement": lambda _: {"shuffle": "replacement"},
    "sampler": lambda _: {"sampler": list(reversed(range(N)))},
    "weights": lambda _: {"weights": [1.0] * N},
    "batch_sampler": lambda _: {"batch_size": None, "batch_sampler": [[0, 5], [7], [1, 2, 3]]},
    "buckets": lambda _: {"batch_size": aiofeed.Buckets(LENGTHS, boundaries=[3], batch_sizes=[4, 2])},
    "budget": lambda _: {"batch_size": aiofeed.TokenBudget(LENGTHS, 12)},
    "drop_last": lambda _: {"drop_last": True, "batch_size": 5},
    "ranks": lambda _: {"shard": (1, 3)},
    "collate": lambda _: {"collate_fn": collate},
    "transform": lambda _: {"transform": lambda batch: batch},
    "host": lambda _: {"cache": "host"},
    "disk": lambda folder: {"cache": aiofeed.DiskCache(folder / "samples")},
    "cached on the device": lambda _: {"cache": "device", "device": SimulatedDevice()},
    "in any order": lambda _: {"in_order": False},
    "samples": lambda _: {"in_order": "samples"},
    "device": lambda _: {"device": SimulatedDevice()},
    "devices": lambda _: {"device": [SimulatedDevice(), SimulatedDevice(index=1)]},
    "static": lambda _: {"static_batches": True},
    "skip": lambda _: {"on_error": aiofeed.FailurePolicy("skip", max_failures=3)},
    "replace": lambda _: {"on_error": aiofeed.FailurePolicy("replace", max_failures=3)},
    "limits": lambda _: {"limits": aiofeed.Limits(read_concurrency=1, decode_threads=1, prefetch_batches=1)},
}


def flat(batch: Any) -> list[int]:
    """The numbers of the samples of a batch; each sample has its number three times."""
    if isinstance(batch, tuple):  # one for each device
        return [number for part in batch for number in flat(part)]
    [rows] = batch if isinstance(batch, list) else [batch]
    rows = rows.cpu()
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()  # type: ignore[no-any-return]


def brute_force(kind: str, options: dict[str, Any], found: list[list[int]]) -> bool:
    """Whether two epochs of batches are what the options say."""
    epochs = [list(itertools.chain.from_iterable(epoch)) for epoch in found]
    if "sampler" in options:
        return epochs == [list(options["sampler"])] * 2
    if "batch_sampler" in options:
        return found == [options["batch_sampler"]] * 2
    if "weights" in options or options.get("shuffle") == "replacement":
        return all(len(epoch) == N and set(epoch) <= set(range(N)) for epoch in epochs)
    if options.get("drop_last"):
        return all(len(set(epoch)) == len(epoch) == 20 for epoch in epochs)
    if "shard" in options:
        return all(len(set(epoch)) == 8 for epoch in epochs)
    plain = not options.get("shuffle") and options.get("in_order", True) is True and kind != "mixture"
    if plain and isinstance(options.get("batch_size", 4), int):
        return epochs == [list(range(N))] * 2
    return all(sorted(epoch) == list(range(N)) for epoch in epochs)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", SOURCES)
def test_every_option_with_every_kind_of_source(kind: str, option: str, tmp_path: Path) -> None:
    """Two epochs have the right samples, or the pair is refused when the feeder is made, and by the table."""
    options = OPTIONS[option](tmp_path)
    arguments = SOURCES[kind]() | {"batch_size": 4} | options
    source = arguments.pop("source")
    if (kind, option) in REFUSED:
        with pytest.raises((TypeError, ValueError), match="is not possible with"):
            Feeder(source, **arguments)
        return
    with Feeder(source, **arguments) as feeder:
        assert brute_force(kind, options, [[flat(batch) for batch in feeder] for _ in range(2)])


REFUSED = {
    *itertools.product(
        ["stream"],
        ["shuffle", "keyed", "replacement", "sampler", "weights", "batch_sampler", "buckets", "budget", "host", "disk"],
    ),
    *itertools.product(["stream"], ["cached on the device", "samples", "static"]),
    *itertools.product(["tensors"], ["host", "disk", "cached on the device"]),
    ("mixture", "static"),
}
"""The pairs that cannot work."""
