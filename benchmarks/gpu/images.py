"""Does a training on JPEG files run as fast as on a resident batch?

A step of ResNet-50's size (bfloat16, batches of 256 at 224 pixels; of 64 on a device of less than 40 GiB) fed from
files of 500 x 400, cropped at random and flipped on the CPU, normalised on the device; compared with the same step on
one batch that stays on the device. The difference to 1.00 is the share of time in which the GPU idles.

Target: none; the ratio shows how much the machine's cores can feed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aiofeed
from aiofeed.kernel.core.faces import DeviceBackend
from aiofeed.reports.machine.environment import describe_accelerator
from benchmarks import data
from benchmarks.figures import Figure, column, per
from benchmarks.gpu.setup import Setup, drive, marker, steps_of, synchronize

TITLE = "Training on JPEG files, a step of ResNet-50's size"

FILES = 2048
LARGE_BYTES = 40 << 30
CLASSES = 1000


def run(setup: Setup, engine: str = "thread") -> list[Figure]:
    backend = setup.backend
    large = (describe_accelerator(backend).total_bytes or 0) >= LARGE_BYTES
    batch_size, size = setup.size(256 if large else 64, 2), setup.size(224, 32)
    settle, steps = setup.size(8, 1), setup.size(24, 2)
    step = training_step(backend, resnet() if not setup.quick else resnet((1, 1), 8))
    options: Any = {"engine": engine if not setup.quick or engine == "thread" else "process:1"}
    feeder: Any = aiofeed.Feeder(
        endless(setup, (settle + steps + setup.size(8, 1)) * batch_size),
        decode=aiofeed.DecodeImage(size, crop="random", flip=True),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        device=setup.device,
        transform=normalise,
        **options,
    )
    with feeder:
        # Real pictures here too: a device computes faster on zeros.
        batch = [tensor.clone() for tensor in next(iter(feeder))]
    synchronize(backend)

    def resident() -> Mapping[str, float]:
        return drive(marker(backend), repeat(batch), step, settle=settle, steps=steps)

    fed = steps_of(setup, feeder, step, settle=settle, steps=steps)
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


def endless(setup: Setup, count: int) -> aiofeed.Files:
    """``count`` samples that repeat the files, labelled by folder: an epoch longer than the measurement."""
    paths = files(setup, setup.size(FILES, 12))
    folders = sorted({path.rpartition("/")[0] for path in paths})
    repeated = [paths[number % len(paths)] for number in range(count)]
    return aiofeed.Files(repeated, [folders.index(path.rpartition("/")[0]) for path in repeated])


def files(setup: Setup, count: int) -> list[str]:
    """Photographs, or pictures of noise if the packages with photographs are missing or fail."""
    try:
        folder = data.jpeg_folder(Path(setup.data), count)
    except Exception as error:  # noqa: BLE001 - packages are missing, or cannot download their data
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        setup.notes.append(f"The files are pictures of noise: there are no photographs ({why}).")
        folder = data.noise_folder(Path(setup.data), count)
    return data.files_below(folder)


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(*conv(channels, width, 1), nn.ReLU(inplace=True), *conv(width, width, 3, stride, 1)),
            *(nn.ReLU(inplace=True), *conv(width, out, 1)),
        )
        short = nn.Sequential(*conv(channels, out, 1, stride))
        self.short = nn.Identity() if channels == out and stride == 1 else short

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def conv(channels: int, out: int, *shape: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, out, *shape, bias=False), nn.BatchNorm2d(out)


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> nn.Module:
    """ResNet-50 by default, of 25.6 million parameters. Source: He et al. 2015, table 1."""
    layers: list[nn.Module] = [*conv(3, width, 7, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def training_step(backend: DeviceBackend, model: nn.Module) -> Callable[[Any], None]:
    """Forward, backward and SGD on float images, in bfloat16 on accelerators."""
    device = backend.device
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(batch: Any) -> None:
        images, labels = batch
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def normalise(batch: Any) -> Any:
    """Bytes to floats about zero, on the device."""
    images, labels = batch
    return images.float().div(127.5).sub(1.0), labels
