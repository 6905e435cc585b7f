"""Does a training on JPEG files run as fast as on a batch that is there?

A step of ResNet-50's size (bfloat16, channels_last, batches of 256 at 224 pixels) fed from files of 500 x 400, decoded,
cropped at random and flipped on the CPU, normalised on the device. Beside it the same step on one batch that is on the
device. What is missing to 1.00 is the share of its time for which the GPU idles. On few cores decoding is the limit:
see the images per second of the decode threads.

Target: none; the ratio says what the machine's cores can feed.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import aiofeed
from benchmarks import data
from benchmarks.figures import Figure, column, per
from benchmarks.gpu.resnet import CLASSES, normalise, resnet, training_step
from benchmarks.gpu.setup import Setup, synchronize

TITLE = "Training on JPEG files, a step of ResNet-50's size"


AHEAD = 8
"""Batches that are taken before the clock starts."""


def run(setup: Setup) -> list[Figure]:
    import torch

    backend = setup.backend
    batch_size, batches, size = setup.size(256, 2), setup.size(40, 2), setup.size(224, 32)
    source = aiofeed.ImageFolder(files(setup, setup.size(4096, 12)))
    model = resnet() if not setup.quick else resnet((1, 1), 8)
    step = training_step(backend, model)
    host = torch.zeros(batch_size, size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2), torch.zeros(batch_size).long()
    images, labels = normalise([backend.copy(tensor) for tensor in host])
    synchronize(backend)
    assert len(source.classes) <= CLASSES
    feeder: aiofeed.Feeder[Any] = aiofeed.Feeder(
        source,
        decode=aiofeed.DecodeImage(size, crop="random", flip=True),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        device=setup.device,
        transform=normalise,
    )

    def resident() -> Mapping[str, float]:
        synchronize(backend)
        started = time.perf_counter()
        for _ in range(batches):
            step(images, labels)
        synchronize(backend)
        return {"items": float(batches * batch_size), "busy_s": time.perf_counter() - started}

    def fed() -> Mapping[str, float]:
        stall_s = started = 0.0
        iterator = endless(feeder)
        for number in range(AHEAD + batches):
            if number == AHEAD:  # what was read before anybody took it is used up
                synchronize(backend)
                stall_s, started = 0.0, time.perf_counter()
            asked = time.perf_counter()
            found = next(iterator)
            stall_s += time.perf_counter() - asked
            step(*found)
        synchronize(backend)
        iterator.close()
        return {"items": float(batches * batch_size), "busy_s": time.perf_counter() - started, "stall_s": stall_s}

    with feeder:
        samples = setup.interleave({"resident": resident, "files": fed})
    rates = {label: per(column(found, "items"), column(found, "busy_s")) for label, found in samples.items()}
    ratio = per(rates["files"], rates["resident"])
    return [
        Figure("images per second from files / on a batch that is there", ratio),
        Figure("share of its time for which the GPU idles", tuple(max(0.0, 1 - value) for value in ratio)),
        Figure(
            "share of its time for which the loop waits",
            per(column(samples["files"], "stall_s"), column(samples["files"], "busy_s")),
        ),
        *[Figure(f"images: {label}", values, "/s") for label, values in rates.items()],
    ]


def endless(feeder: aiofeed.Feeder[Any]) -> Generator[Any, None, None]:
    """Batches of one epoch after the other."""
    while True:
        yield from feeder


def files(setup: Setup, count: int) -> Path:
    """Photographs, or pictures of noise where the packages that bring photographs are missing."""
    try:
        return data.jpeg_folder(setup.data, count)
    except ImportError:
        return data.noise_folder(setup.data, count)
