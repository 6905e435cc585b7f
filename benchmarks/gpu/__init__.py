"""Benchmarks that need a GPU: one module per question. ``python -m benchmarks.gpu`` runs them on the current one.

A module has a ``TITLE`` and ``run(setup)``, which gives its figures; none where what it measures is not there. All is
measured in one process, which is how a feeder and a training live: contenders take turns, round after round.
"""

from __future__ import annotations

MODULES = ("copies", "overlap", "images", "threads", "resident", "memory")
