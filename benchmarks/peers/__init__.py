"""Compares aiofeed with other loaders on the same work: one module per case, one adapter per loader.

``make bench-peers`` installs the loaders into a separate environment and runs ``python -m benchmarks.peers``. A case
has a ``TITLE`` and ``run(settings, participants)``; ``benchmarks.peers.work`` describes adapters.
"""

from __future__ import annotations

CASES = (
    "same_decode",
    "footprint",
    "best_decoder",
    "large_files",
    "small_files",
    "small_files_simplejpeg",
    "slow_storage",
    "training_step",
)
