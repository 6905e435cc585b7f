"""Imports ``streaming``, which imports torchvision.

torchvision's wheel on PyPI fails with a torch without CUDA, because operators are missing. They are not used here, so
this module declares them.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import streaming  # noqa: E402

__all__ = ["streaming"]
