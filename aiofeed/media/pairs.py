"""``DecodePair``: decodes an image with its mask, boxes, keypoints and masks of objects: one crop and one flip for all.

The image is decoded as ``DecodeImage`` does, and the part that it shows is the ``View`` of the others.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import explain_arguments
from aiofeed.kernel.decoders.geometry import FORMATS, View, map_box
from aiofeed.kernel.decoders.image import DecodeImage
from aiofeed.kernel.decoders.pillow import load_picture
from aiofeed.kernel.sampling.order import seed_from
from aiofeed.media.boxes import Objects, check_no_places, nearest

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from PIL import Image

_SIZE = struct.Struct("<II")  # width and height of the upright image, at the end of a cached sample
_OBJECTS = ("boxes", "keypoints", "masks")
# Of entries without places: those of a whole picture, whose length may be the number of boxes by chance.
_OF_PICTURES = ("image_id", "size", "orig_size")
_NOTHING: Any = object()
_WAYS = {
    "mask": "a sample with two files has a mask: Files([(image, mask), ...]), FolderPairs(images, masks)",
    "boxes": 'the target has them: FolderPairs(..., boxes=...), or Files(paths, targets=[{"boxes": ...}, ...])',
    **dict.fromkeys(("size", "crop", "flip"), "it is an argument of the DecodeImage, which comes first"),
}


@public
@explain_arguments(_WAYS)
@dataclass(frozen=True)
class DecodePair:
    """Decode an image with its mask, and move boxes and keypoints along: one random crop and flip for all.

    Example:
        ```python
        import aiofeed

        decode = aiofeed.DecodePair(aiofeed.DecodeImage(size=224, crop="random", flip=True))
        feeder = aiofeed.Feeder(aiofeed.FolderPairs("photos", "masks"), decode=decode, batch_size=4)
        for images, masks in feeder:
            print(images.shape, masks.shape)  # [N, 3, 224, 224], [N, 224, 224]
        ```

    Data are the bytes of an image, a tuple (image, mask) or a dict of ``fields``. The result is the image, uint8
    [3, H, W], or a tuple of the image and the mask, [H, W]. A mask has one channel of numbers, or a palette, whose
    numbers are kept; it is resized to the nearest pixel. It has the size of the upright image.

    If the target is a dict, the result is one dict: its entries, "image" and "mask". Of its entries, "boxes" (N boxes
    [N, 4]: left, upper, right, lower) and "keypoints" ([N, K, 2], or [N, K, 3] with COCO's visibility) are in pixels of
    the upright image and are converted to pixels of the result, float32. "masks" ([N, H, W], of the size of the upright
    image) get the size of the result. Boxes are clipped, and dropped with their labels, keypoints and masks if a side
    is shorter than ``min_size``, as torchvision's ``ClampBoundingBoxes`` and ``SanitizeBoundingBoxes`` do. Keypoints
    with a visibility become 0 outside the result; others keep their place. Other entries must not have places in the
    picture, because they are not moved; "area" keeps its numbers. ``pad_collate()`` pads boxes to one number per batch.

    Args:
        image: Decodes the image, and chooses size, crop and flip.
        fields: For data that are dicts, such as samples of shards: the names of the image and, if any, of the mask.
        mask_dtype: The dtype of masks.
        min_size: The least width and height of a box, in pixels of the result.
        labels: The entries of the target with one item per box.
        flip_pairs: The numbers of left and right keypoints, which a mirrored image exchanges: ``[(1, 2), (3, 4)]``.
        augment: Changes the sample after crop and flip, with its own random numbers: a transform of torchvision's v2,
            or of albumentations 2 with ``bbox_params`` and ``keypoint_params`` if there are boxes and keypoints, or a
            callable that gets a dict with "image", "mask", "boxes", "keypoints", "masks" and, with boxes, "labels",
            their numbers, as tensors, and the sample's generator if it has a keyword ``rng``. It returns such a dict.
            ``flip_pairs`` does not apply to it.

    Raises:
        TypeError: The data are of another kind, or ``augment`` cannot have the sample's random numbers.
        ValueError, OSError: A file cannot be decoded, the sizes of image and mask differ, the mask has colours or a
            number that ``mask_dtype`` lacks, a box is outside the image, or the target has other places.
    """

    takes_target: ClassVar[bool] = True

    image: DecodeImage
    fields: Sequence[str] | None = field(default=None, kw_only=True)
    mask_dtype: Literal["uint8", "int32", "int64"] = field(default="uint8", kw_only=True)
    min_size: float = field(default=1.0, kw_only=True)
    labels: Sequence[str] = field(default=("labels", "scores", "area", "iscrowd"), kw_only=True)
    flip_pairs: Sequence[tuple[int, int]] = field(default=(), kw_only=True)
    augment: Callable[..., Any] | None = field(default=None, kw_only=True)

    _augmentation: Callable[[dict[str, Any], int], dict[str, Any]] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.image, DecodeImage):
            raise TypeError(f"DecodePair needs a DecodeImage, such as DecodeImage(224), got {self.image!r}")
        if self.image.mode == "keep":
            raise ValueError('DecodePair decodes to RGB: leave out mode="keep"')
        if self.image.augment is not None:
            raise TypeError("pass augment= to DecodePair, and not to its DecodeImage: it changes image and mask")
        if self.fields is not None and (isinstance(self.fields, str) or len(self.fields) not in (1, 2)):
            raise ValueError(f'fields must be the names of the image and the mask: ("jpg", "png"), got {self.fields!r}')
        if self.mask_dtype not in ("uint8", "int32", "int64"):
            raise ValueError(f'mask_dtype must be "uint8", "int32" or "int64", got {self.mask_dtype!r}')
        if not self.min_size >= 0:
            raise ValueError(f"min_size must be at least 0, got {self.min_size!r}")
        augmentation = None
        if self.augment is not None:
            from aiofeed.media.augment import Augmentation  # imports torch

            augmentation = Augmentation(self.augment)
        object.__setattr__(self, "_augmentation", augmentation)

    def __call__(self, data: Any, /, *, rng: torch.Generator | None = None, target: Any = _NOTHING) -> Any:
        """Decode one sample; with its target, if that is given."""
        seed = self._seed(rng)
        image, mask = self._files(data)
        pixels = np.empty(self.image.row.shape, np.uint8)
        size, view = self._decode_image(image, pixels, lambda width, height: self.image.view(width, height, seed))
        numbers = None if mask is None else self._decode_mask(mask, size, view, pixels.shape[:2])
        return self._finish(pixels, numbers, size, view, seed, target)

    def decode_cached(self, data: Any) -> NDArray[np.uint8]:
        """Decode all that does not depend on random numbers: the form that a cache stores."""
        decoder = self.image
        image, mask = self._files(data)
        pixels = np.empty(decoder.cached_row.shape, np.uint8)
        if decoder.crop == "random":
            with _of("image"):
                decoder.decode_cached_into(image, pixels)
            size = _SIZE.unpack(pixels[-_SIZE.size :].tobytes())
            view = View((0, 0, *size))
        else:
            size, view = self._decode_image(
                image, pixels, lambda width, height: View(decoder._fixed_box(width, height))
            )
        parts = [pixels.reshape(-1)]
        if mask is not None:
            parts.append(self._decode_mask(mask, size, view, decoder._cached_shape).reshape(-1).view(np.uint8))
        return np.concatenate([*parts, np.frombuffer(_SIZE.pack(*size), np.uint8)])

    def augment_cached(self, cached: NDArray[np.uint8], /, *, rng: torch.Generator, target: Any = _NOTHING) -> Any:
        """Return the sample of its cached form."""
        seed, decoder = self._seed(rng), self.image
        stored, masked = cached[: -_SIZE.size], math.prod(decoder.cached_row.shape)
        size: tuple[int, int] = _SIZE.unpack(cached[-_SIZE.size :].tobytes())
        pixels = np.empty(decoder.row.shape, np.uint8)
        decoder.augment_into(stored[:masked].reshape(decoder.cached_row.shape), pixels, seed)
        view, numbers = decoder.view(*size, seed), None
        if len(stored) > masked:
            height, width = decoder._cached_shape
            numbers = stored[masked:].view(self.mask_dtype).reshape(height, width)
            whole = (0.0, 0.0, float(width), float(height))
            box = map_box(view.box, size, (width, height)) if decoder.crop == "random" else whole
            numbers = nearest(numbers, View(box, view.flip), pixels.shape[:2])
        return self._finish(pixels, numbers, size, view, seed, target)

    def fingerprint(self) -> str:
        """Identifies the cached form. Caches on disk store this text: changing its wording makes them unusable."""
        return f"DecodePair: {self.image.fingerprint()}, mask_dtype={self.mask_dtype}, fields={self.fields}"

    def _seed(self, rng: torch.Generator | None) -> int | None:
        if not self.image.takes_seed and self.augment is None:
            return None
        return seed_from(rng, self)

    def _files(self, data: Any) -> tuple[bytes, bytes | None]:
        """Return the bytes of the image and of the mask."""
        files: Sequence[Any]
        if isinstance(data, Mapping):
            if self.fields is None:
                raise TypeError(f"the data are a dict of {sorted(data)}: name image and mask in DecodePair(fields=...)")
            if missing := [name for name in self.fields if name not in data]:
                raise ValueError(f"the sample has no {missing[0]!r}; it has {sorted(data)}")
            files = [data[name] for name in self.fields]
        else:
            files = data if isinstance(data, tuple | list) else (data,)
        if len(files) > 2:
            raise TypeError(f"DecodePair takes an image and a mask, got {len(files)} files: pass a decoder of your own")
        try:
            image, *mask = [file if isinstance(file, bytes) else bytes(memoryview(file)) for file in files]
        except TypeError:
            kinds = ", ".join(type(file).__name__ for file in files)
            raise TypeError(f"DecodePair takes the bytes of an image and of a mask, got {kinds}") from None
        return image, mask[0] if mask else None

    def _decode_image(
        self, data: bytes, out: NDArray[np.uint8], choose_view: Callable[[int, int], View]
    ) -> tuple[tuple[int, int], View]:
        """Decode the image into ``out``; return the upright image's (width, height) and the view."""
        size, view = (0, 0), View((0, 0, 0, 0))

        def choose(width: int, height: int) -> View:
            nonlocal size, view
            size, view = (width, height), choose_view(width, height)
            return view

        with _of("image"):
            self.image._decode(data, out, choose)
        return size, view

    def _decode_mask(self, data: bytes, size: tuple[int, int], view: View, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the numbers of a view of the mask, resized to ``shape``."""

        def same_view(width: int, height: int) -> View:
            if (width, height) != size:
                raise ValueError(
                    f"it is {width} x {height}, and the image {size[0]} x {size[1]} (width x height, with the EXIF "
                    f"orientation applied)"
                )
            return view

        with _of("mask"):
            max_pixels, formats = self.image.max_pixels, (*FORMATS, *self.image.formats)
            picture, view = load_picture(
                data, same_view, target=None, max_pixels=max_pixels, formats=formats, convert=_check_numbers
            )
            numbers = nearest(np.asarray(picture), view, shape)
            most = np.iinfo(self.mask_dtype).max
            if numbers.dtype.itemsize > 1 and (numbers.min() < 0 or numbers.max() > most):
                raise ValueError(
                    f"it has the number {numbers.min() if numbers.min() < 0 else numbers.max()}, and "
                    f"mask_dtype={self.mask_dtype!r} has 0 to {most}"
                )
        return numbers.astype(self.mask_dtype)

    def _finish(
        self,
        pixels: NDArray[np.uint8],
        mask: NDArray[Any] | None,
        size: tuple[int, int],
        view: View,
        seed: int | None,
        target: Any,
    ) -> Any:
        """Return the sample of an image and a mask, with its target."""
        import torch

        notes = target if isinstance(target, Mapping) else {}
        height, width, _ = pixels.shape
        objects = Objects(notes, *size)
        objects.move(view, width, height, self.flip_pairs)
        objects.clip(width, height, self.min_size)
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        numbers = None if mask is None else torch.from_numpy(np.ascontiguousarray(mask))
        if self._augmentation is not None:
            assert seed is not None
            sample = {"image": pixels} | ({} if mask is None else {"mask": mask}) | objects.arrays()
            found = self._augmentation(sample, seed)
            image, numbers = found["image"], found.get("mask")
            height, width = image.shape[-2:]
            objects.update(found)
            objects.clip(width, height, self.min_size)
        if not isinstance(target, Mapping):
            check_no_places("it", target, *size, is_label=False)
            decoded = image if numbers is None else (image, numbers)
            return decoded if target is _NOTHING else (decoded, target)
        objects.hide(width, height)
        parts = {name: torch.from_numpy(each) for name in _OBJECTS if (each := getattr(objects, name)) is not None}
        for name, value in target.items():
            if name in _OBJECTS:
                continue
            check_no_places(name, value, *size, is_label=name in self.labels)
            parts[name] = value if "boxes" not in parts else self._kept(name, value, objects.kept, len(target["boxes"]))
        if twice := parts.keys() & {"image", "mask"}:
            raise ValueError(f"the target has {sorted(twice)}, which are names of what DecodePair decodes")
        return parts | ({"image": image} if numbers is None else {"image": image, "mask": numbers})

    def _kept(self, name: str, values: Any, kept: NDArray[np.int64], count: int) -> Any:
        """Return the items of an entry of the target that belong to boxes that are kept; others unchanged."""
        is_list = hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping)
        items = len(values) if is_list and getattr(values, "ndim", None) != 0 else None
        if name not in self.labels:
            if items == count > len(kept) and name not in _OF_PICTURES:
                raise ValueError(
                    f'"{name}" of the target has {items} items, as many as boxes, of which {count - len(kept)} are '
                    f"outside the part that is shown: name it in DecodePair(labels={(*self.labels, name)!r}) if it has "
                    f"one item per box, or else put it into a dict"
                )
            return values
        if items != count:
            raise ValueError(f'"{name}" of the target must have one item per box, {count} in all, got {values!r}')
        if isinstance(values, list | tuple) and not all(isinstance(each, Number) for each in values):
            return [values[at] for at in kept.tolist()]
        import torch

        # torch makes float32 of an empty list, and labels are integers.
        return torch.as_tensor(values, dtype=None if count else torch.int64)[torch.from_numpy(kept)]


@contextlib.contextmanager
def _of(part: str) -> Iterator[None]:
    """Name the file of an error, because a sample has several."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"the {part}: {error}") from error


def _check_numbers(mask: Image.Image) -> Image.Image:
    """Return the mask, which must have one channel of integers; a palette is left out."""
    if mask.mode not in ("1", "L", "P", "I") and not mask.mode.startswith("I;16"):
        raise ValueError(
            f"it has the mode {mask.mode}, and a mask has one channel of class numbers (L, P, 1 or I): save numbers in "
            f"place of colours"
        )
    return mask
