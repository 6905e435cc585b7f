"""What a run looks like to its user: explanations and timelines, from its statistics."""

from __future__ import annotations

from aiofeed import _namespace

__all__, __getattr__ = _namespace(__name__)
