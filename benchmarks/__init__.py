"""Benchmarks: one module per question. ``python -m benchmarks`` runs them and prints the ratios.

A module has a ``TITLE`` and ``run(settings)``, which returns its figures, with and without targets. Each way of doing
the work is a ``Contender`` of ``benchmarks.harness``.
"""

from __future__ import annotations

MODULES = (
    "jpeg",
    "overlap",
    "slow_reads",
    "tuning",
    "startup",
    "datasets",
    "memory",
    "tables",
    "mixtures",
    "parquet",
    "arrays",
    "media",
    "episodes",
    "cache",
    "processes",
    "objects",
    "explain",
    "cores",
    "gil",
)
