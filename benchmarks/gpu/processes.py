"""Does the same training run faster with the decoding in worker processes?

The training of ``images`` with ``engine="process:4"``, so that decoders do not hold the GIL of the training loop.

Target: none; compared with ``images`` it shows whether the GIL is the limit.
"""

from __future__ import annotations

from benchmarks.figures import Figure
from benchmarks.gpu import images
from benchmarks.gpu.setup import Setup

TITLE = "The same, decoded in four processes"


def run(setup: Setup) -> list[Figure]:
    return images.measure(setup, f"process:{setup.size(4, 1)}")
