"""A data set that is loaded once and used by two processes: shared memory, not three copies.

    python examples/shared_tensors.py

The parent makes the data and shares it. Each child attaches, trains a small model with a learning rate of its own, and
says how much of the data's memory is in use by how many: `Rss` is what it has mapped, `Pss` its share of that, with
every page divided by the number of processes that use it (Linux only).
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
    """Share the data, and let two children train on it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, FEATURES, generator=generator)
    y = x @ torch.randn(FEATURES, 1, generator=generator) / FEATURES**0.5
    with aiofeed.share({"x": x, "y": y}, f"example-{os.getpid()}") as shared:
        del x, y  # what is used from here on is shared.tensors
        print(f"{shared.nbytes / 2**20:.0f} MiB shared", flush=True)
        command = [sys.executable, __file__, "--attach", shared.address, "--rate"]
        children = [
            subprocess.Popen([*command, str(rate)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for rate in RATES
        ]
        for _ in range(2):
            print(*(answer(each) for each in children), sep="\n", flush=True)
            for each in children:  # by now both have trained, and both still have the data
                tell(each, "go on")
        codes = [each.wait() for each in children]
    sys.exit(max(map(abs, codes)))


def child(address: str, rate: float) -> None:
    """Train on the shared data; a line at each step of the parent's."""
    data = aiofeed.attach_tensors(address)
    weights = torch.zeros(FEATURES, 1)
    for _ in range(5):
        for x, y in zip(data["x"].split(1024), data["y"].split(1024), strict=True):
            weights -= rate * x.T @ (x @ weights - y) / len(x)
    loss = (data["x"] @ weights - data["y"]).square().mean()
    say(f"rate {rate}: loss {loss:.6f}")
    say(f"rate {rate}: {memory()}")


def answer(process: subprocess.Popen[str]) -> str:
    """A line of a child's."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def tell(process: subprocess.Popen[str], text: str) -> None:
    """A line for a child."""
    assert process.stdin is not None
    print(text, file=process.stdin, flush=True)


def say(text: str) -> None:
    """A line for the parent, who answers when the others have come as far."""
    print(text, flush=True)
    sys.stdin.readline()


def memory() -> str:
    """What of the shared memory this process has mapped, and its share of it."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        return "this system does not say who uses a page"
    totals, ours = {"Rss:": 0, "Pss:": 0}, False
    for line in maps.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            ours = any(word.startswith("/memfd:aiofeed") for word in rest)
        elif ours and first in totals:
            totals[first] += int(rest[0])
    return f"data mapped (Rss) {totals['Rss:'] / 1024:.1f} MiB, its share (Pss) {totals['Pss:'] / 1024:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=65_536, help=f"of {FEATURES} floats each (%(default)s)")
    parser.add_argument("--attach", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=RATES[0], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.samples < 1024:
        parser.error(f"--samples must be 1024 or more, got {options.samples}")
    if options.attach:
        torch.set_num_threads(1)
        child(options.attach, options.rate)
    else:
        parent(options.samples)


if __name__ == "__main__":
    main()
