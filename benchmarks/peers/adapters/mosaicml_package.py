"""Imports ``streaming``. That imports torchvision, whose wheel on PyPI is not for a torch without CUDA and then
stumbles over the operators that it lacks; nothing here uses one, so they are declared where they are missing.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import streaming  # noqa: E402

__all__ = ["streaming"]
