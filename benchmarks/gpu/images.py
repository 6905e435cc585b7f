"""Does a training on JPEG files run as fast as on a resident batch?

A step of ResNet-50's size (bfloat16, channels_last, batches of 256 at 224 pixels; of 64 on a device of less than
40 GiB) fed from files of 500 x 400, decoded, cropped at random and flipped on the CPU, normalised on the device.
Compared with the same step on one batch of these that stays on the device. Times are measured between events in the
stream of the step, in the middle of an epoch, with the host at most two steps ahead. The difference to 1.00 is the
share of time in which the GPU idles: between steps it waits for a batch; within steps, for the host, whose threads
share an interpreter. With few cores decoding is the limit: see the images per second of the decode threads.

Target: none; the ratio shows how much the machine's cores can feed.
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
    """The figures of a feeder with ``engine``."""
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
        # Real pictures here too: a device computes faster on zeros.
        batch = [tensor.clone() for tensor in next(iter(feeder))]
    synchronize(backend)

    def resident() -> Mapping[str, float]:
        return drive(marker(backend), repeat(batch), step, settle=settle, steps=steps)

    def fed() -> Mapping[str, float]:
        with feeder:
            return drive(marker(backend), iter(feeder), step, settle=settle, steps=steps)

    cudnn: Any = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, True
    try:
        return figures(setup.interleave({"resident": resident, "files": fed}), batch_size)
    finally:
        cudnn.benchmark = before


def figures(samples: Mapping[str, list[Mapping[str, float]]], batch_size: int) -> list[Figure]:
    """Throughput, and the device's idle time."""
    step_s = {label: column(rounds, "step_s") for label, rounds in samples.items()}
    ratio = per(step_s["resident"], step_s["files"])
    gaps = per(column(samples["files"], "gap_s"), step_s["files"])
    return [
        Figure("images per second from files / on a resident batch", ratio),
        Figure("share of time in which the GPU idles", tuple(max(0.0, 1 - value) for value in ratio)),
        Figure("share of time in which it waits between steps", gaps),
        *[
            Figure(f"images: {label}", tuple(batch_size / value for value in values), "/s")
            for label, values in step_s.items()
        ],
        *[Figure(f"step: {label}", column(rounds, "step_s", 1e3), "ms") for label, rounds in samples.items()],
    ]


def is_large(setup: Setup) -> bool:
    """Whether a step on 256 images fits on the device."""
    memory: Callable[[], tuple[int, int] | None] | None = getattr(setup.backend, "memory", None)
    free_and_total = None if memory is None else memory()
    return free_and_total is not None and free_and_total[1] >= LARGE_BYTES


def endless(setup: Setup, count: int) -> aiofeed.Files:
    """``count`` samples that repeat the files, labelled by folder: an epoch longer than the measurement."""
    paths = files(setup, setup.size(FILES, 12))
    folders = sorted({path.rpartition("/")[0] for path in paths})
    repeated = [paths[number % len(paths)] for number in range(count)]
    return aiofeed.Files(repeated, [folders.index(path.rpartition("/")[0]) for path in repeated])


def files(setup: Setup, count: int) -> list[str]:
    """Photographs, or pictures of noise if the packages with photographs are missing or fail."""
    setup.progress(f"generating {count} JPEG files, unless they exist")
    try:
        folder = data.jpeg_folder(setup.data, count)
    except Exception as error:  # noqa: BLE001 - packages are missing, or cannot download their data
        setup.note(f"The files are pictures of noise: there are no photographs ({reason(error)}).")
        folder = data.noise_folder(setup.data, count)
    return data.files_below(folder)
