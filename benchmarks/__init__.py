"""Benchmarks: one module per question. ``python -m benchmarks`` runs them and prints the ratios.

A module has a ``TITLE`` and ``run(settings)``, which gives its figures, those without a target too. Who takes part is
a ``Contender`` of ``benchmarks.harness``: another loader joins by one more of them, whose ``imports`` it may lack.
"""

from __future__ import annotations

MODULES = (
    "jpeg",
    "overlap",
    "slow_reads",
    "tiny_files",
    "tuning",
    "stages",
    "gil",
    "turbo",
    "handover",
    "startup",
    "epochs",
    "own_process",
    "shared_feed",
    "resident",
    "cache",
)
