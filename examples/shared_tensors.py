"""A dataset that is loaded once and shared with two other processes.

    python examples/shared_tensors.py

The parent generates the data and shares it. Each child attaches, trains a small model with its own learning rate, and
prints the memory of the data: `Rss` is the memory it has mapped, `Pss` its share of that, with every page divided by
the number of processes that have mapped it (Linux only).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

import aiofeed

FEATURES = 256
RATES = (0.005, 0.02)


def parent(samples: int) -> None:
    """Share the data, and start two children that train on it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, FEATURES, generator=generator)
    y = x @ torch.randn(FEATURES, 1, generator=generator) / FEATURES**0.5
    with aiofeed.processes.share({"x": x, "y": y}, f"example-{os.getpid()}") as shared:
        del x, y  # from here on only shared.tensors is used
        print(f"{shared.nbytes / 2**20:.0f} MiB shared", flush=True)
        command = [sys.executable, __file__, "--attach", shared.address, "--rate"]
        children = [
            subprocess.Popen([*command, str(rate)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for rate in RATES
        ]
        for _ in range(2):
            print(*(receive_line(each) for each in children), sep="\n", flush=True)
            for each in children:  # both have trained and still have the data mapped
                send_line(each, "continue")
        codes = [each.wait() for each in children]
    sys.exit(max(map(abs, codes)))


def child(address: str, rate: float) -> None:
    """Train on the shared data; sends the loss and the memory to the parent."""
    data = aiofeed.processes.attach_tensors(address)
    weights = torch.zeros(FEATURES, 1)
    for _ in range(5):
        for x, y in zip(data["x"].split(1024), data["y"].split(1024), strict=True):
            weights -= rate * x.T @ (x @ weights - y) / len(x)
    loss = (data["x"] @ weights - data["y"]).square().mean()
    report(f"rate {rate}: loss {loss:.6f}")
    report(f"rate {rate}: {memory()}")


def receive_line(process: subprocess.Popen[str]) -> str:
    """Read a line from a child."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def send_line(process: subprocess.Popen[str], text: str) -> None:
    """Send a line to a child."""
    assert process.stdin is not None
    print(text, file=process.stdin, flush=True)


def report(text: str) -> None:
    """Send a line to the parent, and wait until all children have sent theirs."""
    print(text, flush=True)
    sys.stdin.readline()


def memory() -> str:
    """The shared memory that this process has mapped, and its share of it."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        return "this system does not report shared pages"
    totals, is_shared = {"Rss:": 0, "Pss:": 0}, False
    for line in maps.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            is_shared = any(word.startswith("/memfd:aiofeed") for word in rest)
        elif is_shared and first in totals:
            totals[first] += int(rest[0])
    return f"data mapped (Rss) {totals['Rss:'] / 1024:.1f} MiB, its share (Pss) {totals['Pss:'] / 1024:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=65_536, help=f"samples of {FEATURES} floats (%(default)s)")
    parser.add_argument("--attach", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=RATES[0], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.samples < 1024:
        parser.error(f"--samples must be at least 1024, got {options.samples}")
    if options.attach:
        torch.set_num_threads(1)
        child(options.attach, options.rate)
    else:
        parent(options.samples)


if __name__ == "__main__":
    main()
