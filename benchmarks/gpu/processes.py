"""Does the same training run faster with the decoding in processes of its own?

The training of ``images`` with ``engine="process:4"``: decoders that hold the GIL hold one that the training loop does
not need.

Target: none; beside ``images`` it says whether the GIL is the limit.
"""

from __future__ import annotations

from benchmarks.figures import Figure
from benchmarks.gpu import images
from benchmarks.gpu.setup import Setup

TITLE = "The same, decoded in four processes"


def run(setup: Setup) -> list[Figure]:
    return images.measure(setup, f"process:{setup.size(4, 1)}")
