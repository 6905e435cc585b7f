"""Benchmarks that need a GPU: one module per question. ``python -m benchmarks.gpu`` runs them on the current one.

A module has a ``TITLE`` and ``run(setup)``, which gives its figures; none where what it measures is not there. Each
module runs in a process of its own, with time of its own, so that one that fails or hangs takes no other along. Within
it all is measured in one process, which is how a feeder and a training live: contenders take turns, round after round.
"""

from __future__ import annotations

# What is quick and has targets first: a run that is cut off has those.
MODULES = ("copies", "overlap", "trace", "resident", "memory", "threads", "images", "processes")
