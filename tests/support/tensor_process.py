"""A process that shares tensors, or attaches to them, and executes commands from its standard input.

python tensor_process.py share|attach ADDRESS [fork]
"""

from __future__ import annotations

import os
import sys
import time

import torch

from aiofeed.serving.shared_tensors.api import attach_tensors, share


def main() -> None:
    role, address, *options = sys.argv[1:]
    if role == "share":
        shared = share({"x": torch.arange(100_000), "y": torch.zeros(3)}, address)
        tensors = shared.tensors
    else:
        tensors = attach_tensors(address, writable=True)
    if "fork" in options and os.fork() == 0:
        # Closed, because a test that waits for the parent's end waits for the end of its output.
        os.close(1)
        os.close(2)
        os.read(0, 1)
        time.sleep(0.5)
        os._exit(0)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("add"):
            tensors["y"] += float(line.split()[1])
        print(int(tensors["x"].sum()), tensors["y"].tolist(), flush=True)


if __name__ == "__main__":
    main()
