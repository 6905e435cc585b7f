"""The case of a training step that is fed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, at_most
from benchmarks.harness import Contender, Measure, Settings
from benchmarks.peers.contest import OURS, CaseResult, Participants, bare, contender, epochs_of, race
from benchmarks.peers.decoders import quiet_helpers
from benchmarks.peers.races import LOADER, PROCESS, THREAD, medium
from benchmarks.peers.work import Work

if TYPE_CHECKING:
    import torch

FED = (THREAD, PROCESS, LOADER, "SPDL, by batches", "Grain, whole batches")
BATCH = 32
ALONE = "step bare of loading"
"""The word "bare" makes it one of the bare contenders."""


def training_step(settings: Settings, participants: Participants) -> CaseResult:
    """How much slower is a training step that is fed than one on a batch in memory?

    A small transformer on the CPU, one thread of torch, forward, backward and Adam without its fused kernels: mostly
    Python. Batches of 32 JPEGs, 500 x 400 to 224 x 224, Pillow decode. One contender has its batch in memory, the
    others are fed; their time per step includes the wait for the batch. Decoding's share of the cores is the CPU time
    of one bare thread for as many images, divided by the number of cores.

    Target: a step fed by aiofeed is longer by at most that.
    """
    work = {**medium(settings), "batch": settings.size(BATCH, 8)}
    present, absent = participants.divide(FED)
    imports = ("torch", "numpy", "PIL.Image")
    contenders = [Contender(ALONE, steps, {"label": ALONE, "work": work}, imports)]
    for label in present:
        loader = contender(label, work).imports
        contenders.append(Contender(label, steps, {"label": label, "work": work}, (*loader, *imports)))
    decoding = bare("threads", work, 1)
    outcome = race([*contenders, decoding], settings, absent)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = tuple(us * 1e-6 * work["batch"] / cores for us in outcome.cpu_us(decoding.label))
    step_s = {label: outcome.column(label, "step_s") for label in (ALONE, *outcome.ours(), *outcome.peers())}
    columns = {label: [Figure("step", tuple(1e3 * each for each in values), "ms")] for label, values in step_s.items()}
    without = step_s.pop(ALONE)
    targets = []
    for label, values in step_s.items():
        added = tuple((mine - alone) / most for mine, alone, most in zip(values, without, share, strict=True))
        target = at_most(1.0) if label.startswith(OURS) else None
        targets.append(Figure(f"added time per step / decoding's share of the cores: {label}", added, target=target))
    targets.append(Figure("decoding's share of the cores, per step", tuple(1e3 * each for each in share), "ms"))
    title = "A training step in Python on the CPU, fed with 32 JPEGs of 500x400 to 224 each"
    return CaseResult(title, "", columns, targets, outcome.absent)


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
def steps(label: str, work: Mapping[str, Any]) -> Iterator[Measure]:
    """Steps on the batches of a loader, or for ``ALONE`` as many on one batch, with torch limited to one thread."""
    import torch

    task = Work(**work)
    images = torch.randint(0, 256, (task.batch, 224, 224, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    batch = images, torch.zeros(task.batch, dtype=torch.int64)
    alone = nullcontext(lambda: repeat(batch, len(task.paths) // task.batch))
    quiet_helpers()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    step = Step()
    try:
        with alone if label == ALONE else epochs_of(label, task) as epoch:

            def measure() -> Mapping[str, float]:
                count, started = 0, time.perf_counter()
                for images, labels in epoch():
                    step(torch.as_tensor(images), torch.as_tensor(labels))
                    count += 1
                return {"step_s": (time.perf_counter() - started) / count, "items": len(task.paths)}

            measure()
            yield measure
    finally:
        torch.set_num_threads(threads)
