"""aiofeed beside its peers, on the same work: one module per case, one adapter per peer, run where it is installed.

``make bench-peers`` installs the peers into an environment of their own and runs ``python -m benchmarks.peers``. A case
has a ``TITLE`` and ``run(settings, field)``; ``benchmarks.peers.work`` says what an adapter is.
"""

from __future__ import annotations

CASES = (
    "same_decode",
    "footprint",
    "best_decoder",
    "large_files",
    "small_files",
    "small_files_turbo",
    "slow_storage",
    "training_step",
)
