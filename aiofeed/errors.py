"""The errors of a feeder while it runs; ``aiofeed.FeedError`` is the base class of all."""

from __future__ import annotations

from aiofeed import _namespace

__all__, __getattr__ = _namespace(__name__)
