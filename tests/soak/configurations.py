"""Random arguments of a feeder, the feeder made of them, and the batches that it must deliver."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiofeed import Feeder, FromDataset, Limits
from aiofeed.kernel.sampling.schedule import Position, Schedule
from tests.soak.sources import FILE_WIDTH, FILES, Decode, Items, Many, Numbers, files
from tests.support.simulated_device import SimulatedDevice

SOURCES = ("coroutine", "many", "files", "dataset")
LATENCIES = (None, None, "random", "late", "early")


class ViolationError(AssertionError):
    """A feeder broke a guarantee.

    Args:
        message: the guarantee and the difference.
        kind: "lost", "doubled", "wrong" or "leaked".
    """

    def __init__(self, message: str, kind: str = "wrong") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A feeder's arguments. `latency` configures the simulated device; `None` leaves batches on the host."""

    length: int
    batch_size: int
    width: int = 4
    shuffle: Any = False
    in_order: Any = True
    drop_last: bool = False
    seed: int = 0
    source: str = "coroutine"
    read_delay: str = "none"
    latency: str | None = None
    limits: Limits = field(default_factory=Limits)

    def expected(self, epoch: int) -> list[list[int]]:
        """Return an epoch's batches as the schedule defines them."""
        schedule = Schedule(
            length=self.length,
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )
        return [[int(index) for index in plan.indices] for plan in schedule.plans(Position(epoch))]


def draw_limits(random: random.Random) -> Limits:
    """Draw limits, small and large ones."""
    return Limits(
        read_concurrency=random.choice((None, 1, 3, 16)),
        decode_threads=random.choice((1, 2, 2, 4)),
        prefetch_batches=random.choice((None, 1, 2, 5)),
        memory_bytes=random.choice((None, None, None, 1, 3_000, 100_000)),
        device_batches=random.choice((None, 1, 4)),
    )


def draw(random: random.Random, folder: Path, **fixed: Any) -> Configuration:
    """Draw a configuration; `fixed` sets arguments to given values."""
    source = fixed.get("source") or random.choice(SOURCES)
    drawn = Configuration(
        length=random.randint(1, FILES),
        batch_size=random.choice((1, 2, 3, 4, 7, 8, 16)),
        width=FILE_WIDTH if source == "files" else random.choice((1, 4, 4, 64, 4096)),
        shuffle=random.choice((False, True, "keyed")),
        in_order=random.choice((True, True, True, False, "samples")),
        drop_last=random.random() < 0.3,
        seed=random.randrange(1 << 40),
        source=source,
        read_delay=random.choice(("none", "yields", "yields", "tail")),
        latency=random.choice(LATENCIES),
        limits=draw_limits(random),
    )
    return replace(drawn, **fixed)


class Rig:
    """A feeder with its source and its simulated device.

    Args:
        configuration: the feeder's arguments.
        folder: folder for real files.
        counts: counters of the run.
        device: replaces the configuration's device.
        options: further arguments of the feeder.
    """

    def __init__(
        self,
        configuration: Configuration,
        folder: Path,
        counts: Counter[str],
        *,
        device: SimulatedDevice | None = None,
        **options: Any,
    ) -> None:
        self.configuration = configuration
        self.counts = counts
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
        return kind(drawn.length, drawn.width, drawn.read_delay, drawn.seed)

    @property
    def faults(self) -> Any:
        """The source's faults."""
        return self.source.dataset.faults if isinstance(self.source, FromDataset) else self.source.faults

    def identify(self, batch: Any) -> list[int]:
        """Return the samples' indices in a batch; check that each sample is complete."""
        indices = [int(index) for index in batch[:, 0].tolist()]
        if not bool((batch == batch[:, :1]).all()):
            raise ViolationError(f"the contents of a batch are wrong: samples {indices}")
        return indices

    def start_record(self) -> EpochRecord:
        """Start the record of the feeder's current epoch."""
        return EpochRecord(self, self.feeder.epoch)


class EpochRecord:
    """One epoch's received batches, compared with the expected ones.

    Args:
        rig: the feeder.
        epoch: the epoch's number.
        received: batches that another feeder delivered before.
    """

    def __init__(self, rig: Rig, epoch: int, received: list[list[int]] | None = None) -> None:
        self.rig = rig
        self.epoch = epoch
        self.expected = rig.configuration.expected(epoch)
        self.received: list[list[int]] = list(received or ())

    def add(self, batch: Any) -> None:
        """Add a received batch and check it."""
        indices = self.rig.identify(batch)
        position = len(self.received)
        self.received.append(indices)
        self.rig.counts["batches"] += 1
        self.rig.counts["samples"] += len(indices)
        if self.rig.configuration.in_order == "samples":
            if position >= len(self.expected) or len(indices) != len(self.expected[position]):
                self._fail(f"batch {position} has {len(indices)} samples")
        elif self.rig.configuration.in_order:
            expected = self.expected[position] if position < len(self.expected) else None
            if indices != expected:
                self._fail(f"batch {position} is {indices}, expected {expected}")
        elif self.received.count(indices) > self.expected.count(indices):
            self._fail(f"batch {indices} was received more often than expected")

    def check_complete(self) -> None:
        """Check, at the end of the epoch, that every batch was received once."""
        self.rig.counts["epochs"] += 1
        received, expected = sorted(self.received), sorted(self.expected)
        if self.rig.configuration.in_order == "samples":
            received, expected = ([sorted(itertools.chain(*batches))] for batches in (received, expected))
        if received != expected:
            self._fail(f"{len(self.received)} of {len(self.expected)} batches received")

    def _fail(self, message: str) -> None:
        received = Counter(index for batch in self.received for index in batch)
        expected = Counter(index for batch in self.expected for index in batch)
        doubled, lost = received - expected, expected - received
        kind = "doubled" if doubled else "lost" if lost else "wrong"
        raise ViolationError(f"epoch {self.epoch} of {self.rig.configuration}: {message}", kind)
