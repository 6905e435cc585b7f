"""Boxes, keypoints and masks of objects: checked, moved with the view of a picture, and clipped. Pure arithmetic."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.kernel.decoders.geometry import View

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Annotations are rounded: a box may exceed its picture by so many pixels, and is clipped.
_OVERHANG = 1.0
# The classes of torchvision.tv_tensors, and names of entries, that have places in a picture.
_PLACE_TYPES = {"BoundingBoxes", "KeyPoints", "Mask"}
_PLACE_NAMES = re.compile(
    r"box|polygon|segment|contour|landmark|keypoint|corner|mask|^rles?$|^counts$|^[xy]_?(min|max|\d)$"
)


class Objects:
    """The objects of a picture, in its pixels.

    Args:
        target: May have "boxes", [N, 4] as left, upper, right, lower; "keypoints", [N, K, 2], or [N, K, 3] with COCO's
            visibility; and "masks", [N, height, width].
        width: The width of the upright picture.
        height: Its height.

    Attributes:
        boxes: float32 [N, 4], or ``None``.
        keypoints: float32 [N, K, 2 or 3], or ``None``.
        masks: [N, H, W] in the dtype of the target, or ``None``.
        kept: The numbers of the objects that have not been dropped.

    Raises:
        ValueError: The target has other shapes, a box outside the picture, or places in shares of the picture.
    """

    def __init__(self, target: Mapping[str, Any], width: int, height: int) -> None:
        self.boxes = _boxes(target["boxes"], width, height) if "boxes" in target else None
        self.keypoints = _keypoints(target["keypoints"], width, height) if "keypoints" in target else None
        self.masks: NDArray[Any] | None = _masks(target["masks"], width, height) if "masks" in target else None
        self.kept: NDArray[np.int64] = np.arange(0 if self.boxes is None else len(self.boxes))
        for name, each in (("keypoints", self.keypoints), ("masks", self.masks)):
            if self.boxes is not None and each is not None and len(self.boxes) != len(each):
                raise ValueError(f'"{name}" of the target has {len(each)} items, and "boxes" has {len(self.boxes)}')

    def move(self, view: View, width: int, height: int, flip_pairs: Sequence[tuple[int, int]]) -> None:
        """Convert to pixels of a view of the picture, which is resized to width x height.

        ``flip_pairs``: numbers of left and right keypoints, which a mirrored picture exchanges.
        """
        left, upper, right, lower = view.box
        for points in (self.boxes, self.keypoints):
            if points is not None:
                xy = points.reshape(-1, 2, 2) if points is self.boxes else points[..., :2]
                xy -= np.array([left, upper], np.float32)
                xy *= np.array([width / (right - left), height / (lower - upper)], np.float32)
                if view.flip:
                    xy[..., 0] = width - xy[..., 0]
        if view.flip and self.boxes is not None:
            self.boxes[:, [0, 2]] = self.boxes[:, [2, 0]]
        if view.flip and self.keypoints is not None and self.keypoints.size:
            for one, other in flip_pairs:
                self.keypoints[:, [one, other]] = self.keypoints[:, [other, one]]
        if self.masks is not None:
            self.masks = nearest(self.masks, view, (height, width))

    def clip(self, width: int, height: int, least: float) -> None:
        """Clip boxes to width x height; drop those with a side of less than ``least``, with keypoints and masks."""
        if self.boxes is not None:
            np.clip(self.boxes, 0, np.array([width, height, width, height], np.float32), out=self.boxes)
            self._take(np.flatnonzero((self.boxes[:, 2:] - self.boxes[:, :2] >= least).all(axis=1)))

    def hide(self, width: int, height: int) -> None:
        """Set keypoints with a visibility that are outside of width x height to 0, as COCO has unlabelled ones."""
        if self.keypoints is not None and self.keypoints.shape[2] == 3:
            x, y, visible = np.moveaxis(self.keypoints, 2, 0)
            self.keypoints[~((x >= 0) & (x < width) & (y >= 0) & (y < height) & (visible > 0))] = 0

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the boxes, the places of the keypoints, and the masks, by name."""
        keypoints = None if self.keypoints is None else self.keypoints[..., :2].copy()
        found = {"boxes": self.boxes, "keypoints": keypoints, "masks": self.masks}
        return {name: array for name, array in found.items() if array is not None}

    def update(self, found: Mapping[str, Any]) -> None:
        """Take over changed ``arrays``, of which ``found["kept"]`` are the numbers of the boxes."""
        if self.keypoints is not None:
            self.keypoints[..., :2] = found["keypoints"]
        if self.boxes is not None:
            self._take(found["kept"])
            self.boxes = np.array(found["boxes"], np.float32)
        if self.masks is not None:
            self.masks = np.asarray(found["masks"], self.masks.dtype)

    def _take(self, numbers: NDArray[np.int64]) -> None:
        assert self.boxes is not None
        self.boxes, self.kept = self.boxes[numbers], self.kept[numbers]
        self.keypoints, self.masks = (None if each is None else each[numbers] for each in (self.keypoints, self.masks))


def check_no_places(name: str, value: Any, width: int, height: int, *, is_label: bool) -> None:
    """Raise ``ValueError`` if an entry of the target, which is not moved, looks like places in the picture.

    ``is_label``: whether the user says that it has one item per box, whose shape then says nothing.
    """
    numbers, is_places = _numbers(value), not _PLACE_TYPES.isdisjoint(kind.__name__ for kind in type(value).__mro__)
    shape, kind = numbers.shape, numbers.dtype.kind
    first = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(first, Mapping):  # an annotation of COCO, or RLE
        is_places = any(_PLACE_NAMES.search(str(key)) for key in first)
    elif numbers.size and (len(shape) > 1 or (shape and kind == "O") or shape == (4,)):  # else one number per box
        is_places = is_places or _PLACE_NAMES.search(name) is not None
    if numbers.size and len(shape) > 1 and kind in "biuf" and not is_label:
        is_places |= (height, width) in (shape[:2], shape[-2:]) or (shape[-1] in (2, 4) and kind != "b")
    if is_places:
        raise ValueError(
            f'"{name}" of the target looks like places in the picture, which would not move with crop and flip: pass '
            f'"boxes" (left, upper, right, lower), "keypoints" [N, K, 2 or 3] or "masks" [N, H, W], of polygons and '
            f'RLE by pycocotools\' annToMask. If it has none, choose a name without "box", "mask" and the like, and '
            f"name it in DecodePair(labels=...) if it has one item per box, or else put it into a dict"
        )


def nearest(masks: NDArray[Any], view: View, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a view of masks [..., H, W], resized to the nearest pixel: that below the centre of each new one."""
    left, upper, right, lower = view.box
    rows = (upper + (np.arange(shape[0]) + 0.5) * ((lower - upper) / shape[0])).astype(np.intp)
    columns = (left + (np.arange(shape[1]) + 0.5) * ((right - left) / shape[1])).astype(np.intp)
    return masks[..., rows, :][..., columns[::-1] if view.flip else columns]


def _numbers(value: Any) -> NDArray[Any]:
    """Return an entry as an array; of objects if it is none."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # lists of several lengths; tensors that numpy does not have
        return np.empty(1, object)


def _masks(value: Any, width: int, height: int) -> NDArray[Any]:
    masks = _numbers(value)
    if not masks.size:
        return np.zeros((0, height, width), masks.dtype if masks.ndim == 3 else np.uint8)
    if masks.shape[1:] != (height, width) or masks.dtype.kind not in "biuf":
        raise ValueError(
            f'"masks" of the target must be numbers [N, {height}, {width}], of the size of the upright picture, got '
            f"{masks.dtype} {list(masks.shape)}; make masks of polygons and RLE (pycocotools: coco.annToMask)"
        )
    return masks


def _boxes(value: Any, width: int, height: int) -> NDArray[np.float32]:
    # torchvision's BoundingBoxes name their format.
    if (form := getattr(getattr(value, "format", None), "name", "XYXY")) != "XYXY":
        raise ValueError(f'"boxes" of the target have the format {form}: make left, upper, right, lower of them')
    given = np.asarray(value)
    boxes = np.array(given, np.float32)
    if not boxes.size:
        return boxes.reshape(0, 4)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f'"boxes" of the target must be [N, 4], got {list(boxes.shape)}')
    if given.dtype.kind not in "iu":  # integers are pixels, also in the corner
        _check_units("boxes", boxes, width, height)
    least, most = -_OVERHANG, np.array([width, height], np.float32) + _OVERHANG
    upper_left, lower_right = boxes[:, :2], boxes[:, 2:]
    # Also false for NaN.
    inside = ((upper_left <= lower_right) & (upper_left >= least) & (lower_right <= most)).all(axis=1)
    if not inside.all():
        number = int(inside.argmin())
        coco, (left, upper, right, lower) = "", boxes[number].tolist()
        if left > right or upper > lower:
            sides = "right is less than left" if left > right else "lower is less than upper"
            coco = f"{sides}: COCO's bbox is left, upper, width, height; here "
        raise ValueError(
            f"box {number} of the target, {boxes[number].tolist()}, is not in the picture of {width} x {height} "
            f"(width x height): {coco}boxes are left, upper, right, lower in pixels, as EXIF orients the picture"
        )
    return boxes


def _keypoints(value: Any, width: int, height: int) -> NDArray[np.float32]:
    keypoints = np.array(np.asarray(value), np.float32)
    if keypoints.ndim < 3 and not keypoints.size:
        return keypoints.reshape(0, 0, 3)
    if keypoints.ndim != 3 or keypoints.shape[2] not in (2, 3):
        raise ValueError(f'"keypoints" of the target must be [N, K, 2] or [N, K, 3], got {list(keypoints.shape)}')
    points = keypoints[..., :2][keypoints[..., 2] > 0] if keypoints.shape[2] == 3 else keypoints.reshape(-1, 2)
    # Whole numbers, and one point alone, may be a pixel in the corner.
    if (points != points[:1]).any() and (points != np.floor(points)).any():
        _check_units("keypoints", points, width, height)
    return keypoints


def _check_units(name: str, places: NDArray[np.float32], width: int, height: int) -> None:
    """Raise ``ValueError`` if places are shares of a picture: all in its first pixel, but for rounding."""
    if max(width, height) > 2 and places.min() > -0.5 and 0 < places.max() < 1.01:
        raise ValueError(
            f'"{name}" of the target are all between {places.min():g} and {places.max():g}, in a picture of {width} x '
            f"{height} (width x height): these are shares of it: multiply them by its width and height, "
            "or pass pixels as integers"
        )
