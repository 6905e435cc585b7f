"""Compares aiofeed with other loaders on the same work: one function per case, one adapter per loader.

``make bench-peers`` installs the loaders into a separate environment and runs ``python -m benchmarks.peers``. A case is
a function of ``races``, ``case(settings, participants)``; ``benchmarks.peers.adapters`` lists the loaders.
"""

from __future__ import annotations

CASES = (
    *("same_decode", "footprint", "best_decoder", "large_files", "small_files", "small_files_simplejpeg"),
    *("slow_storage", "training_step"),
)
