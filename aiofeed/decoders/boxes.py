"""Boxes and keypoints of a picture: checked, moved with its view, and cleaned. Pure arithmetic.

Boxes are float32 [N, 4]: left, upper, right, lower. Keypoints are float32 [N, K, 2] or, with COCO's visibility,
[N, K, 3]. Both are in pixels of the upright picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.decoders.geometry import View

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Annotations are rounded: a box may exceed its picture by so many pixels, and is clipped.
_OVERHANG = 1.0


def checked_boxes(value: Any, width: int, height: int) -> NDArray[np.float32]:
    """Boxes in a picture of width x height.

    Raises:
        ValueError: They have another shape, or one is outside the picture.
    """
    boxes = np.array(np.asarray(value), np.float32)
    if not boxes.size:
        return boxes.reshape(0, 4)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f'"boxes" of the target must be [N, 4], got {list(boxes.shape)}')
    least, most = -_OVERHANG, np.array([width, height], np.float32) + _OVERHANG
    corners = boxes.reshape(-1, 2, 2)
    # Also false for NaN.
    inside = (corners[:, 0] <= corners[:, 1]) & (corners[:, 0] >= least) & (corners[:, 1] <= most)
    if (wrong := np.flatnonzero(~inside.all(axis=1))).size:
        raise ValueError(
            f"box {wrong[0]} of the target, {boxes[wrong[0]].tolist()}, is not in the picture of {width} x {height} "
            f"(width x height): boxes are left, upper, right, lower in pixels, with the EXIF orientation applied"
        )
    return boxes


def checked_keypoints(value: Any) -> NDArray[np.float32]:
    """Keypoints.

    Raises:
        ValueError: They have another shape.
    """
    keypoints = np.array(np.asarray(value), np.float32)
    if keypoints.ndim != 3 or keypoints.shape[2] not in (2, 3):
        raise ValueError(f'"keypoints" of the target must be [N, K, 2] or [N, K, 3], got {list(keypoints.shape)}')
    return keypoints


def move_points(points: NDArray[np.float32], view: View, width: int, height: int) -> None:
    """Convert points [..., 2] of the picture to pixels of its view, which is resized to width x height; in place."""
    left, upper, right, lower = view.box
    points -= np.array([left, upper], np.float32)
    points *= np.array([width / (right - left), height / (lower - upper)], np.float32)
    if view.flip:
        points[..., 0] = width - points[..., 0]


def move_boxes(boxes: NDArray[np.float32], view: View, width: int, height: int) -> None:
    """Convert boxes as ``move_points`` does."""
    move_points(boxes.reshape(-1, 2, 2), view, width, height)
    if view.flip:
        boxes[:, [0, 2]] = boxes[:, [2, 0]]


def swap_sides(keypoints: NDArray[np.float32], pairs: Sequence[tuple[int, int]]) -> None:
    """Exchange the left and the right one of each pair of keypoints of a mirrored picture, in place."""
    for one, other in pairs:
        keypoints[:, [one, other]] = keypoints[:, [other, one]]


def clip_boxes(boxes: NDArray[np.float32], width: int, height: int, least: float) -> NDArray[np.int64]:
    """Clip boxes to the picture, in place; return the numbers of those whose sides are at least ``least`` pixels."""
    np.clip(boxes, 0, np.array([width, height, width, height], np.float32), out=boxes)
    sides = boxes[:, 2:] - boxes[:, :2]
    return np.flatnonzero((sides >= least).all(axis=1))


def hide_outside(keypoints: NDArray[np.float32], width: int, height: int) -> None:
    """Set keypoints with a visibility that are outside the picture to 0, in place, as COCO has unlabelled ones."""
    if keypoints.shape[2] == 3:
        x, y, visible = keypoints[..., 0], keypoints[..., 1], keypoints[..., 2]
        keypoints[~((x >= 0) & (x < width) & (y >= 0) & (y < height) & (visible > 0))] = 0
