"""Does a training on JPEG files run as fast as on a batch that is there?

A step of ResNet-50's size (bfloat16, channels_last, batches of 256 at 224 pixels; of 64 on a device of less than
40 GiB) fed from files of 500 x 400, decoded, cropped at random and flipped on the CPU, normalised on the device. Beside
it the same step on one batch of these that is on the device. Times are those between events in the stream of the step,
in the middle of an epoch, with the host at most two steps ahead. What is missing to 1.00 is the share of its time for
which the GPU idles: between steps it waits for a batch; within them, for a host whose threads share an interpreter. On
few cores decoding is the limit: see the images per second of the decode threads.

Target: none; the ratio says what the machine's cores can feed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

import aiofeed
from benchmarks import data
from benchmarks.figures import Figure, column, per
from benchmarks.gpu.clock import drive, marker
from benchmarks.gpu.setup import Setup, reason, synchronize

TITLE = "Training on JPEG files, a step of ResNet-50's size"

FILES = 2048
LARGE_BYTES = 40 << 30


def run(setup: Setup) -> list[Figure]:
    return measure(setup, "thread")


def measure(setup: Setup, engine: str) -> list[Figure]:
    """The figures of a feeder with this engine."""
    import torch

    from benchmarks.gpu.resnet import normalise, resnet, training_step

    backend = setup.backend
    batch_size, size = setup.size(256 if is_large(setup) else 64, 2), setup.size(224, 32)
    settle, steps = setup.size(8, 1), setup.size(24, 2)
    train = training_step(backend, resnet() if not setup.quick else resnet((1, 1), 8))

    def step(batch: Any) -> None:
        train(*batch)

    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        endless(setup, (settle + steps + setup.size(8, 1)) * batch_size),
        decode=aiofeed.DecodeImage(size, crop="random", flip=True),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        device=setup.device,
        transform=normalise,
        engine=engine,
    )
    with feeder:
        # Of real pictures too: on zeros a device is faster, and not by waiting less.
        there = [tensor.clone() for tensor in next(iter(feeder))]
    synchronize(backend)

    def resident() -> Mapping[str, float]:
        return drive(marker(backend), repeat(there), step, settle=settle, steps=steps)

    def fed() -> Mapping[str, float]:
        with feeder:
            return drive(marker(backend), iter(feeder), step, settle=settle, steps=steps)

    tuned: Any = torch.backends.cudnn
    before, tuned.benchmark = tuned.benchmark, True
    try:
        return figures(setup.interleave({"resident": resident, "files": fed}), batch_size)
    finally:
        tuned.benchmark = before


def figures(samples: Mapping[str, list[Mapping[str, float]]], batch_size: int) -> list[Figure]:
    """Throughput, and what becomes of the device's time."""
    step_s = {label: column(found, "step_s") for label, found in samples.items()}
    ratio = per(step_s["resident"], step_s["files"])
    return [
        Figure("images per second from files / on a batch that is there", ratio),
        Figure("share of its time for which the GPU idles", tuple(max(0.0, 1 - value) for value in ratio)),
        Figure("of its time it waits between steps", per(column(samples["files"], "gap_s"), step_s["files"])),
        *[
            Figure(f"images: {label}", tuple(batch_size / value for value in values), "/s")
            for label, values in step_s.items()
        ],
        *[Figure(f"step: {label}", column(found, "step_s", 1e3), "ms") for label, found in samples.items()],
    ]


def is_large(setup: Setup) -> bool:
    """Whether 256 images fit beside what their step keeps of them."""
    memory: Callable[[], tuple[int, int] | None] | None = getattr(setup.backend, "memory", None)
    found = None if memory is None else memory()
    return found is not None and found[1] >= LARGE_BYTES


def endless(setup: Setup, count: int) -> aiofeed.Files:
    """``count`` samples of the files, labelled by folder, over and over: an epoch so long that it does not end."""
    paths = files(setup, setup.size(FILES, 12))
    folders = sorted({path.rpartition("/")[0] for path in paths})
    chosen = [paths[number % len(paths)] for number in range(count)]
    return aiofeed.Files(chosen, [folders.index(path.rpartition("/")[0]) for path in chosen])


def files(setup: Setup, count: int) -> list[str]:
    """Photographs, or pictures of noise where those of the packages that bring photographs cannot be had."""
    setup.say(f"making {count} JPEG files, where they are not there")
    try:
        folder = data.jpeg_folder(setup.data, count)
    except Exception as error:  # noqa: BLE001 - packages are missing, or want to fetch what is not to be had
        setup.note(f"The files are pictures of noise: there are no photographs ({reason(error)}).")
        folder = data.noise_folder(setup.data, count)
    return data.files_below(folder)
