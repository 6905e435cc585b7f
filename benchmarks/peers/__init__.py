"""Compares aiofeed with other loaders on the same work: one function per case, one adapter per loader.

``make bench-peers`` installs the loaders into a separate environment and runs ``python -m benchmarks.peers``. A case is
a function of its name, ``case(settings, participants)``; ``benchmarks.peers.adapters`` lists the loaders.
"""

from __future__ import annotations

CASES = {
    "same_decode": "races",
    "footprint": "races",
    "best_decoder": "races",
    "large_files": "races",
    "small_files": "races",
    "small_files_simplejpeg": "races",
    "slow_storage": "slow_storage",
    "training_step": "training_step",
}
"""The module of each case."""
