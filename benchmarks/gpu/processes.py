"""Does the same training run faster with the decoding in worker processes?

The training of ``images`` with ``engine="process:4"``, so that decoders do not hold the GIL of the training loop.

Target: none; compared with ``images`` it shows whether the GIL is the limit.
"""

from __future__ import annotations

from functools import partial

from benchmarks.gpu import images

TITLE = "The same, decoded in four processes"

run = partial(images.run, engine="process:4")
