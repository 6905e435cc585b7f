"""How much slower is a training step that is fed than one on a batch in memory?

A small transformer on the CPU, one thread of torch, forward, backward and Adam without its fused kernels: mostly
Python. Batches of 32 JPEGs, 500 x 400 to 224 x 224, Pillow decode. One contender has its batch in memory, the others
are fed; their time per step includes the wait for the batch. Decoding's share of the cores is the CPU time of one bare
thread for as many images, divided by the number of cores.

Target: a step fed by aiofeed is longer by at most that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, at_most, column
from benchmarks.harness import Contender, Measure, Settings
from benchmarks.peers.adapters import bare
from benchmarks.peers.contest import OURS, CaseResult, Participants, Way, race
from benchmarks.peers.decoders import quiet_helpers
from benchmarks.peers.same_decode import task
from benchmarks.peers.work import Work, adapter, contender

if TYPE_CHECKING:
    import torch

TITLE = "A training step in Python on the CPU, fed with 32 JPEGs of 500x400 to 224 each"

WAYS: tuple[Way, ...] = (
    ("feeder", "thread"),
    ("feeder", "process:2"),
    ("dataloader", "persistent"),
    ("spdl_threads", "by batches"),
    ("grain_threads", "whole batches"),
)
BATCH = 32
ALONE = "step bare of loading"
"""The word "bare" makes it one of the bare contenders."""


def run(settings: Settings, participants: Participants) -> CaseResult:
    work = {**task(settings), "batch": settings.size(BATCH, 8)}
    present, absent = participants.divide(WAYS)
    fed = [contender(*way, work) for way in present]
    contenders = [
        Contender(each.label, step_fed, each.options, (*each.imports, "torch", "numpy", "PIL.Image")) for each in fed
    ]
    steps = settings.size(1024, 96) // work["batch"]
    alone = Contender(ALONE, step_alone, {"steps": steps, "batch": work["batch"]}, ("torch",))
    decoding = bare.contender("threads", work, 1)
    outcome = race([*contenders, alone, decoding], settings, absent)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = tuple(us * 1e-6 * work["batch"] / cores for us in outcome.cpu_us(decoding.label))
    without = column(outcome.samples[ALONE], "step_s")
    columns, targets = {}, []
    for label in (ALONE, *outcome.ours(), *(peer for peer in outcome.peers() if peer != ALONE)):
        step = column(outcome.samples[label], "step_s")
        longer = tuple(mine - other for mine, other in zip(step, without, strict=True))
        columns[label] = [Figure("step", tuple(1e3 * each for each in step), "ms")]
        if label == ALONE:
            continue
        parts = tuple(each / most for each, most in zip(longer, share, strict=True))
        target = at_most(1.0) if label.startswith(OURS) else None
        targets.append(Figure(f"added time per step / decoding's share of the cores: {label}", parts, target=target))
    targets.append(Figure("decoding's share of the cores, per step", tuple(1e3 * each for each in share), "ms"))
    return CaseResult(TITLE, "", columns, targets, outcome.absent)


class Step:
    """A training step on images, uint8 [B, 3, H, W], and class numbers."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        layers = [nn.TransformerEncoderLayer(48, 2, 96, dropout=0.0, batch_first=True) for _ in range(12)]
        self._cut = nn.Conv2d(3, 48, 32, 32)
        self._model = nn.Sequential(*layers)
        self._head = nn.Linear(48, 16)
        parts = nn.ModuleList([self._cut, self._model, self._head])
        self._optimizer = torch.optim.Adam(parts.parameters(), foreach=False)
        self._loss = nn.CrossEntropyLoss()

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        tokens = self._cut(images.float().div_(255)).flatten(2).transpose(1, 2)
        loss = self._loss(self._head(self._model(tokens).mean(1)), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


@contextmanager
def one_thread() -> Iterator[Step]:
    """A step, with torch limited to one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Step()
    finally:
        torch.set_num_threads(threads)


@contextmanager
def step_alone(steps: int, batch: int) -> Iterator[Measure]:
    import torch

    images = torch.randint(0, 256, (batch, 224, 224, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    labels = torch.zeros(batch, dtype=torch.int64)

    def measure() -> Mapping[str, float]:
        started = time.perf_counter()
        for _ in range(steps):
            step(images, labels)
        return {"step_s": (time.perf_counter() - started) / steps, "items": steps * batch}

    with one_thread() as step:
        measure()
        yield measure


@contextmanager
def step_fed(adapter_name: str, way: str, work: Mapping[str, Any]) -> Iterator[Measure]:
    import torch

    task = Work(**work)
    quiet_helpers()
    with one_thread() as step, adapter(adapter_name).loader(task, way) as epoch:

        def measure() -> Mapping[str, float]:
            count, started = 0, time.perf_counter()
            for images, labels in epoch():
                step(torch.as_tensor(images), torch.as_tensor(labels))
                count += 1
            return {"step_s": (time.perf_counter() - started) / count, "items": len(task.paths)}

        measure()
        yield measure
