"""What is drawn for an episode: a feeder's arguments, and what it is expected to give."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiofeed import Feeder, FromDataset, Limits
from aiofeed.sampling.schedule import Position, Schedule
from aiofeed.testing import SimulatedDevice
from tests.soak.sources import FILE_WIDTH, FILES, Decode, Items, Many, Numbers, files

SOURCES = ("coroutine", "many", "files", "dataset")
LATENCIES = (None, None, "random", "late", "early")


class ViolationError(AssertionError):
    """A promise was broken.

    Args:
        what: which, and how.
        kind: "lost", "doubled", "wrong" or "left behind".
    """

    def __init__(self, what: str, kind: str = "wrong") -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A feeder's arguments. `latency` is the simulated device's, `None` for the host."""

    length: int
    batch_size: int
    width: int = 4
    shuffle: Any = False
    in_order: bool = True
    drop_last: bool = False
    seed: int = 0
    source: str = "coroutine"
    weather: str = "calm"
    latency: str | None = None
    limits: Limits = field(default_factory=Limits)

    def expected(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, by the rules alone."""
        schedule = Schedule(
            length=self.length,
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )
        return [[int(index) for index in plan.indices] for plan in schedule.plans(Position(epoch))]


def draw_limits(random: random.Random) -> Limits:
    """Limits small and large."""
    return Limits(
        read_concurrency=random.choice((None, 1, 3, 16)),
        decode_threads=random.choice((1, 2, 2, 4)),
        prefetch_batches=random.choice((None, 1, 2, 5)),
        memory_bytes=random.choice((None, None, None, 1, 3_000, 100_000)),
        device_batches=random.choice((None, 1, 4)),
    )


def draw(random: random.Random, folder: Path, **fixed: Any) -> Configuration:
    """A configuration; what is `fixed` is not left to chance."""
    source = fixed.get("source") or random.choice(SOURCES)
    drawn = Configuration(
        length=random.randint(1, FILES),
        batch_size=random.choice((1, 2, 3, 4, 7, 8, 16)),
        width=FILE_WIDTH if source == "files" else random.choice((1, 4, 4, 64, 4096)),
        shuffle=random.choice((False, True, "keyed")),
        in_order=random.random() < 0.75,
        drop_last=random.random() < 0.3,
        seed=random.randrange(1 << 40),
        source=source,
        weather=random.choice(("calm", "turns", "turns", "tail")),
        latency=random.choice(LATENCIES),
        limits=draw_limits(random),
    )
    return replace(drawn, **fixed)


class Rig:
    """A feeder with what stands around it, and what it is expected to give.

    Args:
        configuration: its arguments.
        folder: where real files are.
        tally: what is counted.
        device: another device than the configuration's.
        options: further arguments of the feeder.
    """

    def __init__(
        self,
        configuration: Configuration,
        folder: Path,
        tally: Counter[str],
        *,
        device: SimulatedDevice | None = None,
        **options: Any,
    ) -> None:
        self.configuration = configuration
        self.tally = tally
        self.device = device
        if device is None and configuration.latency is not None:
            self.device = SimulatedDevice(configuration.seed, latency=configuration.latency)  # type: ignore[arg-type]
        self.source = self._source(folder)
        dataset = configuration.source == "dataset"
        self.feeder: Feeder[Any] = Feeder(
            self.source,
            decode=None if dataset else Decode(configuration.width),
            batch_size=configuration.batch_size,
            shuffle=configuration.shuffle,
            seed=configuration.seed,
            drop_last=configuration.drop_last,
            in_order=configuration.in_order,
            limits=configuration.limits,
            device=self.device,  # type: ignore[arg-type]
            shard=None,
            **options,
        )

    def _source(self, folder: Path) -> Any:
        drawn = self.configuration
        if drawn.source == "files":
            return files(folder, drawn.length)
        if drawn.source == "dataset":
            items = Items(drawn.length, drawn.width)
            return FromDataset(items, threads=2) if drawn.seed % 2 else items
        kind = Many if drawn.source == "many" else Numbers
        return kind(drawn.length, drawn.width, drawn.weather, drawn.seed)

    @property
    def faults(self) -> Any:
        """What the source is told to do wrong."""
        return self.source.dataset.faults if isinstance(self.source, FromDataset) else self.source.faults

    def identify(self, batch: Any) -> list[int]:
        """The samples of a batch, each shown to be whole."""
        found = [int(index) for index in batch[:, 0].tolist()]
        if not bool((batch == batch[:, :1]).all()):
            raise ViolationError(f"the contents of a batch are wrong: samples {found}")
        return found

    def begin(self) -> Pass:
        """What the epoch that was begun just now should give."""
        return Pass(self, self.feeder.epoch)


class Pass:
    """What one epoch handed out, compared with what it should.

    Args:
        rig: the feeder.
        epoch: which epoch.
        skip: batches handed out before, by another feeder.
    """

    def __init__(self, rig: Rig, epoch: int, skip: list[list[int]] | None = None) -> None:
        self.rig = rig
        self.epoch = epoch
        self.wanted = rig.configuration.expected(epoch)
        self.got: list[list[int]] = list(skip or ())

    def take(self, batch: Any) -> None:
        """Note a batch that was handed out."""
        found = self.rig.identify(batch)
        place = len(self.got)
        self.got.append(found)
        self.rig.tally["batches"] += 1
        self.rig.tally["samples"] += len(found)
        if self.rig.configuration.in_order:
            due = self.wanted[place] if place < len(self.wanted) else None
            if found != due:
                self._broken(f"batch {place} should be {due}, is {found}")
        elif self.got.count(found) > self.wanted.count(found):
            self._broken(f"batch {found} came once too often, or never should have")

    def complete(self) -> None:
        """The end was reached: every batch came once."""
        self.rig.tally["epochs"] += 1
        if sorted(self.got) != sorted(self.wanted):
            self._broken(f"{len(self.got)} of {len(self.wanted)} batches came")

    def _broken(self, what: str) -> None:
        came = Counter(index for batch in self.got for index in batch)
        due = Counter(index for batch in self.wanted for index in batch)
        doubled, lost = came - due, due - came
        kind = "doubled" if doubled else "lost" if lost else "wrong"
        raise ViolationError(f"epoch {self.epoch} of {self.rig.configuration}: {what}", kind)
