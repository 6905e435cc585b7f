"""Trains a small network on photographs through DataLoader and through aiofeed, and says what aiofeed gains and why.

    make demo                            or: python examples/demo.py --images 120 --epochs 1

Each photograph of examples/photographs is a class; its images are crops at random places and scales, written once as
JPEGs of 1600 x 1280 and reused by the next run. There are three sides, with the same images in the same batches and
order: DataLoader, aiofeed as it comes, which decodes JPEGs at a smaller scale if the network needs fewer pixels, and
aiofeed with the same Pillow calls as DataLoader's Dataset. First each side loads without training, then each trains
from the same weights. They alternate epoch by epoch, so that other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import aiofeed

PHOTOGRAPHS = Path(__file__).resolve().with_name("photographs")
DATA = PHOTOGRAPHS.parent.parent / ".demo-data"
WIDTH, HEIGHT = 1600, 1280
SEED = 0
WORKERS = 2

Batches = Iterator[list[torch.Tensor]]


# --- the images -------------------------------------------------------------------------------------------------------


def make_images(folder: Path, count: int, progress: Progress) -> None:
    """Write ``folder/<class>/<number>.jpg``; renames the folder to its final name when it is complete."""
    task = progress.add_task("images", total=count, note="")
    pictures = {path.stem: Image.open(path).convert("RGB") for path in sorted(PHOTOGRAPHS.glob("*.jpg"))}
    names = list(pictures)
    unfinished = folder.with_name(folder.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name in names:
        (unfinished / name).mkdir(parents=True)

    def write(number: int) -> None:
        name = names[number % len(names)]
        picture = pictures[name]
        random = np.random.default_rng(number)
        width = random.uniform(0.4, 1.0) * min(picture.width, picture.height * WIDTH / HEIGHT)
        height = width * HEIGHT / WIDTH
        left, upper = random.uniform(0, picture.width - width), random.uniform(0, picture.height - height)
        box = (left, upper, left + width, upper + height)
        image = picture.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box)
        image.save(unfinished / name / f"{number:05d}.jpg", quality=90)

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for _ in pool.map(write, range(count)):
            progress.advance(task)
    finally:
        pool.shutdown(cancel_futures=True)
    unfinished.rename(folder)


def image_folder(data: Path, count: int, progress: Progress) -> Path:
    """The folder with ``count`` images; creates it if it does not exist."""
    folder = data / f"photographs-{WIDTH}x{HEIGHT}-{count}"
    if not folder.is_dir():
        data.mkdir(parents=True, exist_ok=True)
        (data / ".gitignore").write_text("*\n")
        make_images(folder, count, progress)
    return folder


# --- the two sides ----------------------------------------------------------------------------------------------------


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """A Dataset for DataLoader, with the Pillow calls that ``DecodeImage`` makes for these images."""

    def __init__(self, paths: list[str], targets: list[int], size: int) -> None:
        self.paths, self.targets, self.size = paths, targets, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as image:
            margin = (image.width - image.height) / 2  # all images are wider than high; use the central square
            box = (margin, 0, image.width - margin, image.height)
            picture = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1), self.targets[index]


@dataclass
class Side:
    """One side of the comparison, with its measurements.

    Args:
        name: heading of its column.
        begin: starts an epoch, given its number.
        model: the network that this side trains.
        loading, training: images per second of each epoch, without and with training.
    """

    name: str
    begin: Callable[[int], Batches]
    model: nn.Module
    loading: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    images: int = 0
    wall_s: float = 0.0
    stall_s: float = 0.0
    cpu_s: float = 0.0
    first_batch_s: list[float] = field(default_factory=list)
    loss: float = 0.0
    accuracy: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)


def network(classes: int) -> nn.Module:
    """Three convolutions on a quarter of the size, always with the same weights; a step is shorter than loading."""
    torch.manual_seed(SEED)
    layers: list[nn.Module] = [nn.AvgPool2d(4)]
    channels = 3
    for width, kernel, stride in ((16, 3, 2), (32, 3, 2), (64, 3, 2)):
        convolution = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def new_sides(
    source: aiofeed.ImageFolder, options: argparse.Namespace
) -> tuple[aiofeed.Feeder[list[torch.Tensor]], list[Side]]:
    """The three sides, with the same images, order, batches and weights, and the feeder of the second."""
    dataset = Photographs(source.paths, source.targets, options.size)
    # With one replica, the sampler only shuffles each epoch by seed + epoch, as Feeder does.
    sampler = DistributedSampler[tuple[torch.Tensor, int]](dataset, num_replicas=1, rank=0, shuffle=True, seed=SEED)
    loader = DataLoader(
        dataset,
        batch_size=options.batch_size,
        sampler=sampler,
        drop_last=True,
        num_workers=WORKERS,
        persistent_workers=True,
    )

    def new_feeder(decode: aiofeed.DecodeImage) -> aiofeed.Feeder[list[torch.Tensor]]:
        return aiofeed.Feeder(
            source, decode=decode, batch_size=options.batch_size, shuffle=True, seed=SEED, drop_last=True
        )

    same_calls = new_feeder(aiofeed.DecodeImage(options.size, scaled=False, backend="pillow"))
    default = new_feeder(aiofeed.DecodeImage(options.size))

    def begin_loader(epoch: int) -> Batches:
        sampler.set_epoch(epoch)
        return iter(loader)

    classes = len(source.classes)
    return default, [
        Side(f"DataLoader, {WORKERS} workers", begin_loader, network(classes)),
        Side("aiofeed", partial(begin_feeder, default), network(classes)),
        Side("aiofeed, same Pillow calls", partial(begin_feeder, same_calls), network(classes)),
    ]


def begin_feeder(feeder: aiofeed.Feeder[list[torch.Tensor]], epoch: int) -> Batches:
    """An epoch; the feeder is closed after it, so that it does not read ahead while another side is measured."""
    feeder.set_epoch(epoch)
    with feeder:
        yield from feeder


def train_step(side: Side, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """Train on a batch; returns the loss and the number of correct predictions."""
    inputs = images.to(torch.float32, memory_format=torch.channels_last).div_(127.5).sub_(1)
    logits = side.model(inputs)
    loss = nn.functional.cross_entropy(logits, labels)
    side.optimizer.zero_grad()
    loss.backward()
    side.optimizer.step()
    return loss.item(), int((logits.argmax(1) == labels).sum())


def load_epoch(side: Side, epoch: int, progress: Progress, task: TaskID) -> None:
    """Measure one epoch without training."""
    started, seen = time.perf_counter(), 0
    for _, labels in side.begin(epoch):
        seen += len(labels)
        progress.update(task, advance=1, note="")
    side.loading.append(seen / (time.perf_counter() - started))


def train_epoch(side: Side, epoch: int, progress: Progress, task: TaskID) -> None:
    """Train and measure one epoch; ``stall_s`` is the time spent in ``iter()`` and ``next()``."""
    loss = 0.0
    seen = correct = 0
    cpu = cpu_seconds()
    started = requested = time.perf_counter()
    batches = side.begin(epoch)
    while (batch := next(batches, None)) is not None:
        now = time.perf_counter()
        if not seen:
            side.first_batch_s.append(now - started)
        side.stall_s += now - requested
        step_loss, step_correct = train_step(side, *batch)
        seen, loss, correct = seen + len(batch[1]), loss + step_loss * len(batch[1]), correct + step_correct
        progress.update(task, advance=1, note=f"loss {loss / seen:.3f}, accuracy {correct / seen:.1%}")
        requested = time.perf_counter()
    ended = time.perf_counter()
    side.stall_s += ended - requested
    side.wall_s += ended - started
    side.training.append(seen / (ended - started))
    side.cpu_s += cpu_seconds() - cpu
    side.images += seen
    side.loss, side.accuracy = loss / seen, correct / seen


def cpu_seconds() -> float:
    """CPU time of this process and of all its children, including those that have ended."""
    process = psutil.Process()
    total = sum(process.cpu_times()[:4])  # user and system time, and both of children that have ended
    for child in process.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            pass  # it has just ended, and counts as an ended child in the next call
    return float(total)


# --- the run ----------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, console: Console) -> None:
    """Create the images, train, print the tables."""
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        folder = image_folder(options.data, options.images, progress)
        source = aiofeed.ImageFolder(folder)
        console.print(f"The images stay in {folder}", soft_wrap=True)
        for path in source.paths:
            Path(path).read_bytes()  # fill the page cache for both sides

        feeder, sides = new_sides(source, options)
        warm_up(options, len(source.classes))
        task = progress.add_task("", total=2 * options.epochs * len(sides) * len(feeder), note="")
        for measure in (load_epoch, train_epoch):
            for epoch in range(options.epochs):
                # Reverse the order in every other epoch, so that a machine that slows down favours neither side.
                for side in sides if epoch % 2 == 0 else reversed(sides):
                    name = f"{'load' if measure is load_epoch else 'train'} {epoch + 1}: {side.name}"
                    progress.update(task, description=name)
                    measure(side, epoch, progress, task)
    console.print(comparison(*sides, size=options.size))
    console.print(reasons(sides[0], sides[2]), soft_wrap=True)


def warm_up(options: argparse.Namespace, classes: int) -> None:
    """Take one step that is not measured, in which torch prepares its kernels for these shapes."""
    images = torch.zeros(options.batch_size, 3, options.size, options.size, dtype=torch.uint8)
    labels = torch.zeros(options.batch_size, dtype=torch.int64)
    train_step(Side("", lambda epoch: iter(()), network(classes)), images, labels)


def comparison(loader: Side, feeder: Side, same_calls: Side, size: int) -> Table:
    """A table of what a user gains, the most convincing row first; the last is for the same work on both sides."""
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{WIDTH} x {HEIGHT} JPEGs for {size} x {size}")
    for name in (loader.name, feeder.name, "gain"):
        table.add_column(name, justify="right")

    def rates(label: str, one: list[float], other: list[float]) -> None:
        by_one, by_other = statistics.median(one), statistics.median(other)
        table.add_row(label, f"{by_one:.0f}", f"{by_other:.0f}", f"{by_other / by_one:.2f} x")

    def row(label: str, value: Callable[[Side], float], form: str) -> None:
        table.add_row(label, form.format(value(loader)), form.format(value(feeder)), "")

    rates("training, images per second", loader.training, feeder.training)
    row("waits for data per 1,000 images", lambda side: side.stall_s / side.images * 1000, "{:.2f} s")
    rates("loading alone, images per second", loader.loading, feeder.loading)
    row("first batch of an epoch", lambda side: statistics.median(side.first_batch_s) * 1000, "{:.0f} ms")
    row("CPU time per 1,000 images", lambda side: side.cpu_s / side.images * 1000, "{:.1f} s")
    row("loss in the last epoch", lambda side: side.loss, "{:.4f}")
    rates("loading by the same Pillow calls", loader.loading, same_calls.loading)
    return table


def reasons(loader: Side, same_calls: Side) -> str:
    """Two lines that say where the gain comes from."""
    ratio = statistics.median(same_calls.loading) / statistics.median(loader.loading)
    return (
        "Why: aiofeed decodes a JPEG at the scale that the network needs, in threads that read ahead during the step.\n"
        f"The same calls, in threads instead of processes, are {ratio:.2f} times as fast here: the rest is the decoder."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=240, help="number of images to generate (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="side of the network's input in pixels (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder for the images (%(default)s)")
    options = parser.parse_args()
    for name in ("epochs", "size", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.images < max(options.batch_size, 6):
        parser.error(f"--images must be at least 6 and fill a batch of {options.batch_size}, got {options.images}")
    try:
        run(options, Console())
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr, flush=True)
        # Do not delete DataLoader's iterator: if Ctrl-C came while it took a queue's lock, it waits for it forever.
        os._exit(130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
