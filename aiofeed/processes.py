"""More than one process: workers, serving and shared tensors."""

from __future__ import annotations

from aiofeed import _namespace

__all__, __getattr__ = _namespace(__name__)
