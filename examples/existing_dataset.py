"""A Dataset written for DataLoader, fed in four ways: compares the batches and the times.

    python examples/existing_dataset.py

A step sleeps, like a step on an accelerator, which does not use the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import aiofeed


class Spectrograms(Dataset[tuple[torch.Tensor, int]]):
    """Spectrograms of one second of a noisy tone, with the tone's number. Does not use aiofeed."""

    RATE = 16_000

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        tone = index % 10
        noise = np.random.default_rng(index).normal(size=self.RATE)
        wave = np.sin(2 * np.pi * 220 * (tone + 1) * np.arange(self.RATE) / self.RATE) + noise
        frames = np.lib.stride_tricks.sliding_window_view(wave, 512)[::128] * np.hanning(512)
        power = np.abs(np.fft.rfft(frames)) ** 2
        return torch.from_numpy(np.log1p(power).astype(np.float32)), tone


def epoch(batches: Iterable[list[torch.Tensor]], step_s: float) -> tuple[list[list[torch.Tensor]], float]:
    """The batches of an epoch, and its time in seconds, with a step after each batch."""
    started = time.perf_counter()
    received = []
    for batch in batches:
        time.sleep(step_s)
        received.append(batch)
    return received, time.perf_counter() - started


def equal(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(left, right) for pair in zip(one, other, strict=True) for left, right in zip(*pair, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--step-s", type=float, default=0.03, help="seconds of a step (%(default)s)")
    options = parser.parse_args()
    size = options.batch_size

    dataset = Spectrograms(options.samples)
    unchanged: aiofeed.Feeder[list[torch.Tensor]] = aiofeed.Feeder(dataset, batch_size=size)
    # Spectrograms has no state that changes, so two threads may call it at once.
    two_threads: aiofeed.Feeder[list[torch.Tensor]] = aiofeed.Feeder(
        aiofeed.FromDataset(dataset, threads=2), batch_size=size
    )
    expected, seconds = epoch(DataLoader(dataset, batch_size=size), options.step_s)
    print(f"{'DataLoader(dataset)':<44}{seconds:6.2f} s")
    ways: dict[str, Iterable[list[torch.Tensor]]] = {
        "Feeder(dataset)": unchanged,
        "Feeder(FromDataset(dataset, threads=2))": two_threads,
        "prefetch(DataLoader(dataset))": aiofeed.prefetch(DataLoader(dataset, batch_size=size)),
    }
    with unchanged, two_threads:
        for name, batches in ways.items():
            received, seconds = epoch(batches, options.step_s)
            same = equal(expected, received)
            print(f"{name:<44}{seconds:6.2f} s, batches {'equal' if same else 'DIFFER'}")
            if not same:
                sys.exit(f"the batches of {name} differ from DataLoader's")


if __name__ == "__main__":
    main()
