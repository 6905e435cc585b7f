"""Imports ``streaming``. That imports torchvision, whose wheel on PyPI is not for a torch without CUDA and then stumbles
over its own first operator; nothing here uses one, so that one is declared where it is missing."""

from __future__ import annotations

import torch

if not hasattr(torch.ops.torchvision, "nms"):
    LIBRARY = torch.library.Library("torchvision", "DEF")
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import streaming  # noqa: E402

__all__ = ["streaming"]
