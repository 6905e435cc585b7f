"""Benchmarks that need a GPU: one module per question. ``python -m benchmarks.gpu`` runs them on the current one.

A module has a ``TITLE`` and ``run(setup)``, which returns its figures, or none if the device cannot give them. Each
module runs in its own process with a share of the time, so that one that fails or hangs does not affect the others.
Its contenders run in this one process, like a feeder and its training, in interleaved rounds.
"""

from __future__ import annotations

# Quick benchmarks with targets come first, so that an interrupted run has them.
MODULES = ("copies", "overlap", "trace", "resident", "memory", "threads", "images", "processes")
