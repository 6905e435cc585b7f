"""Targets that can stand in one tensor with the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def kind_of(target: Any) -> str | None:
    """What two targets must have in common to stand in one tensor, or one structure of tensors; ``None``: nothing."""
    if type(target) in (int, float, bool) or isinstance(target, np.generic):
        kind = type(target).__name__
        return kind if not isinstance(target, np.generic) or target.dtype.kind in "biufc" else None
    if isinstance(target, np.ndarray):
        return f"array {target.dtype} {list(target.shape)}" if target.dtype.kind in "biufc" else None
    if isinstance(target, Mapping):
        kinds = {str(name): kind_of(value) for name, value in target.items()}
        return None if type(target) is not dict or None in kinds.values() else f"dict {kinds}"
    if isinstance(target, tuple | list):
        parts = [kind_of(value) for value in target]
        return None if not parts or None in parts else f"{type(target).__name__} ({', '.join(map(str, parts))})"
    if hasattr(target, "__torch_function__") and hasattr(target, "layout"):
        plain = str(target.layout) == "torch.strided" and str(target.device) == "cpu" and not target.requires_grad
        return f"tensor {target.dtype} {list(target.shape)}" if plain else None
    return None


def target_bytes(target: Any) -> int:
    """Bytes of a target as it stands in a tensor with the others; 0 for what cannot."""
    if isinstance(target, bool):
        return 1
    if isinstance(target, int | float):
        return 8
    if isinstance(target, Mapping):
        return sum(map(target_bytes, target.values()))
    if isinstance(target, tuple | list):
        return sum(map(target_bytes, target))
    return int(getattr(target, "nbytes", 0))
