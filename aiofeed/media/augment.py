"""Calls the ``augment=`` of a decoder with the random numbers of one sample.

albumentations has generators of its own: each thread has a copy of the transform, whose generators are set for each
sample. torchvision's v2 draws from torch's global generator, which all threads share, the trainer's among them.
``SampleNumbers`` passes the sample's generator to each function of torch that draws random numbers. It is active in the
calling thread only, so no state is set and no lock is needed.
"""

from __future__ import annotations

import copy
import functools
import importlib
import random
import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from aiofeed.kernel.core.faces import bind_decoder
from aiofeed.kernel.core.validation import check_callable

if TYPE_CHECKING:
    from numpy.typing import NDArray

_local = threading.local()

# Functions and methods of torch that draw random numbers.
_RANDOM = re.compile(
    "rand(n|int)?(_like)?|randperm|(normal|bernoulli)_?|multinomial|poisson|binomial|_sample_dirichlet|_standard_gamma|"
    "(uniform|random|exponential|geometric|cauchy|log_normal)_|gumbel_softmax|rrelu_?|"
    "(feature_)?(alpha_)?dropout([123]d)?_?"
)


@functools.cache
def _is_random(name: str) -> bool:
    return _RANDOM.fullmatch(name) is not None


class SampleNumbers(TorchFunctionMode):
    """Random functions of torch that this thread calls without a generator draw from ``generator``."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        if not _is_random(getattr(func, "__name__", "")) or (kwargs and kwargs.get("generator") is not None):
            return func(*args, **(kwargs or {}))
        try:
            return func(*args, **{**(kwargs or {}), "generator": self._generator})
        except TypeError as error:
            if "generator" not in str(error):
                raise
            raise TypeError(
                f"augment= calls torch's {func.__name__}, which draws from the global generator and takes no other, so "
                f"that its numbers cannot be those of the sample"
            ) from error


class Augmentation:
    """The ``augment=`` of a decoder.

    Args:
        augment: A transform of albumentations 2 or of torchvision's v2, or a callable. A callable gets a dict of
            tensors and returns one, or with ``alone`` the image; and ``rng``, if it has such a keyword.
        alone: Whether samples are images only.

    Raises:
        TypeError: The random numbers of the transform cannot be those of a sample, or it cannot change masks.
    """

    def __init__(self, augment: Any, *, alone: bool = False) -> None:
        self._augment = augment
        self._alone = alone
        self._is_v2 = _is_of(augment, "torchvision.transforms.v2")
        self._is_albumentations = _is_of(augment, "albumentations")
        if not self._is_albumentations:
            check_callable("augment", augment, bind_decoder(augment).keywords)
        if self._is_albumentations and not hasattr(augment, "set_random_state"):
            raise TypeError(
                f"augment={augment!r}: this albumentations draws from generators of the whole process, which cannot be "
                f"those of a sample: use albumentations 2.0 or later"
            )
        if not alone and not self._is_v2 and _is_of(augment, "torchvision.transforms"):
            raise TypeError(
                f"augment={augment!r} changes an image without its mask and boxes: use torchvision.transforms.v2"
            )
        self._takes_rng = bind_decoder(augment).takes_rng

    def __call__(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        """Augment a sample.

        Args:
            sample: Arrays: "image", uint8 [H, W, 3]; and perhaps "mask" [H, W], "boxes" [N, 4], "keypoints" [N, K, 2],
                "masks" [N, H, W].
            seed: The seed of the sample.

        Returns:
            The same names, "image" and "mask" as tensors, the image [3, H, W]. "kept" has the numbers of the boxes
            that remain.
        """
        found = self._with_albumentations(sample, seed) if self._is_albumentations else self._with_torch(sample, seed)
        if "keypoints" in sample and found["keypoints"].shape != sample["keypoints"].shape:
            raise ValueError("augment= dropped keypoints, which are a part of their box: let it keep those outside")
        if "masks" in sample and "kept" in found and len(found["masks"]) != len(found["kept"]):
            found["masks"] = found["masks"][found["kept"]]  # SanitizeBoundingBoxes drops them, others do not
        return found

    def augment_row(self, pixels: NDArray[np.uint8], seed: int) -> None:
        """Augment an image, uint8 [H, W, 3], in place.

        Raises:
            ValueError: The result has another shape or dtype.
        """
        image = self({"image": pixels}, seed)["image"]
        height, width, _ = pixels.shape
        if tuple(image.shape) != (3, height, width) or image.dtype != torch.uint8:
            raise ValueError(
                f"augment= of DecodeImage must return uint8 {[3, height, width]}, got {image.dtype} "
                f"{list(image.shape)}: size= sets the size, and transform= of Feeder normalises whole batches; "
                f"augment= of DecodePair may return any shape and dtype"
            )
        pixels[...] = image.permute(1, 2, 0).numpy()

    def _with_torch(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        generator = getattr(_local, "generator", None)
        if generator is None:
            generator = _local.generator = torch.Generator()
        generator.manual_seed(seed)
        given: dict[str, Any] = {name: torch.from_numpy(array) for name, array in sample.items()}
        given["image"] = given["image"].permute(2, 0, 1)
        if self._is_v2:
            given = _tv_tensors(given)
        if "boxes" in given:
            given["labels"] = torch.arange(len(given["boxes"]))  # transforms that drop boxes drop their labels, too
        options = {"rng": generator} if self._takes_rng else {}
        with SampleNumbers(generator):
            found = self._augment(given["image"] if self._alone else given, **options)
        if self._alone:
            found = {"image": found}
        if not isinstance(found, dict) or not given.keys() <= found.keys():
            got = f"one of {sorted(map(str, found))}" if isinstance(found, dict) else f"a {type(found).__name__}"
            raise TypeError(f"augment= must return a dict of {sorted(given)}, got {got}")
        found = {name: torch.as_tensor(found[name]).as_subclass(torch.Tensor) for name in given}
        if "labels" in found:
            found["boxes"], found["kept"] = found["boxes"].numpy(), found.pop("labels").numpy()
            if len(found["kept"]) != len(found["boxes"]):
                raise ValueError(
                    f"augment= returned {len(found['boxes'])} boxes and {len(found['kept'])} labels: drop both, as "
                    f"SanitizeBoundingBoxes does by default"
                )
        return found | {name: found[name].numpy() for name in ("keypoints", "masks") if name in found}

    def _with_albumentations(self, sample: dict[str, Any], seed: int) -> dict[str, Any]:
        if getattr(_local, "augment", None) is not self._augment:
            _local.augment, _local.copy = self._augment, copy.deepcopy(self._augment)
        # Not set_random_seed, which gives each transform of a Compose the same numbers: with p=0.5 all or none apply.
        _local.copy.set_random_state(np.random.default_rng(seed), random.Random(seed))
        named: dict[str, Any] = {name: sample[name] for name in ("image", "mask") if name in sample}
        boxes, keypoints = sample.get("boxes"), sample.get("keypoints")
        if boxes is not None:
            rule = 'bbox_params=albumentations.BboxParams(format="pascal_voc")'
            self._check_params("bboxes", rule, "pascal_voc", label_fields=None)
            named["bboxes"] = np.column_stack([boxes, np.arange(len(boxes), dtype=np.float32)])
        if keypoints is not None:
            rule = 'keypoint_params=albumentations.KeypointParams(format="xy", remove_invisible=False)'
            self._check_params("keypoints", rule, "xy", remove_invisible=False)
            named["keypoints"] = keypoints.reshape(-1, 2)
        if "masks" in sample:
            named["masks"] = list(sample["masks"] + np.uint8(0))  # OpenCV takes no bool
        result = _local.copy(**named)
        image = result["image"]
        if isinstance(image, np.ndarray):
            image = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
        found: dict[str, Any] = {"image": image}
        if "mask" in named:
            found["mask"] = torch.as_tensor(result["mask"])
        if "masks" in sample:
            found["masks"] = np.array([np.asarray(each) for each in result["masks"]]).reshape(-1, *image.shape[-2:])
        if boxes is not None:
            rows = np.array(result["bboxes"], np.float32)
            rows = rows if rows.size else np.zeros((0, 5), np.float32)
            found["boxes"], found["kept"] = rows[:, :4].copy(), rows[:, 4].astype(np.int64)
        if keypoints is not None and not keypoints.size:
            found["keypoints"] = keypoints
        elif keypoints is not None:
            found["keypoints"] = np.array(result["keypoints"], np.float32)[:, :2].reshape(keypoints.shape)
        return found

    def _check_params(self, name: str, rule: str, format: str, **settings: Any) -> None:
        params = getattr(getattr(self._augment, "processors", {}).get(name), "params", None)
        if getattr(params, "format", None) != format or any(getattr(params, at) != settings[at] for at in settings):
            raise ValueError(
                f"augment= for boxes or keypoints must be albumentations.Compose([...], {rule}); labels follow their "
                f"boxes without label_fields"
            )


def _tv_tensors(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    tv_tensors = importlib.import_module("torchvision.tv_tensors")
    canvas_size = tuple(given["image"].shape[-2:])
    wrapped: dict[str, Any] = {"image": tv_tensors.Image(given["image"])}
    wrapped |= {name: tv_tensors.Mask(given[name]) for name in ("mask", "masks") if name in given}
    if "boxes" in given:
        wrapped["boxes"] = tv_tensors.BoundingBoxes(given["boxes"], format="XYXY", canvas_size=canvas_size)
    if "keypoints" in given:
        if not hasattr(tv_tensors, "KeyPoints"):
            raise ValueError("augment= of a target with keypoints needs torchvision 0.23 or later")
        wrapped["keypoints"] = tv_tensors.KeyPoints(given["keypoints"], canvas_size=canvas_size)
    return wrapped


def _is_of(augment: object, package: str) -> bool:
    """Return whether a transform is of a package, or of a subclass of its transforms."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(augment).__mro__)
