"""`augment=` of decoders: transforms of torchvision's v2, of albumentations and of the user."""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import DecodeImage, DecodePair
from tests.support.pairs import number_png, ramps, torchvision_v2
from tests.support.pictures import decode, jpeg

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else its import asks the network for a new version

IMAGE = jpeg(ramps(80, 60), quality=98)
MASK = np.zeros((60, 80), np.uint8)
MASK[10:50, 20:60] = 1
FILES = IMAGE, number_png(MASK)
TARGET = {"boxes": [[20, 10, 60, 50], [0, 0, 10, 10]], "labels": [5, 6], "keypoints": [[[20, 10, 2]], [[1, 1, 2]]]}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(image: torch.Tensor) -> torch.Tensor:
    """A transform that draws from torch's global generator, in several ways."""
    order, sign = torch.randperm(3), torch.rand(1) < 0.5
    shift = torch.empty(1).uniform_(0, 40) + torch.randint(0, 9, (1,)) + 9 * torch.randn(1).abs()
    return (image[order] // 2 + shift.to(torch.uint8)) if sign else image


def torchvision_case() -> Any:
    v2 = torchvision_v2()
    return v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.ColorJitter(0.3, 0.3, 0.3, 0.1)])


def albumentations_case() -> Any:
    a = pytest.importorskip("albumentations")
    return a.Compose([a.HorizontalFlip(), a.VerticalFlip(), a.RandomBrightnessContrast(p=1)])


ALONE = [lambda: noise, torchvision_case, albumentations_case]
NAMES = ["callable", "torchvision", "albumentations"]


@pytest.mark.parametrize("case", ALONE, ids=NAMES)
def test_random_numbers_are_those_of_the_sample(case: Callable[[], Any]) -> None:
    """A seed gives one image in any thread and order, others differ, and no global generator is drawn from or set."""
    decoder = DecodeImage((60, 80), augment=case())
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    alone = [decode(decoder, IMAGE, seed) for seed in range(24)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda seed: decode(decoder, IMAGE, seed), reversed(range(24))))
    assert all(np.array_equal(one, other) for one, other in zip(alone, reversed(together), strict=True))
    assert len({image.tobytes() for image in alone}) > 3
    after = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    again = pickle.loads(pickle.dumps(decoder))
    assert np.array_equal(decode(again, IMAGE, 7), alone[7])


@pytest.mark.parametrize("case", ALONE, ids=NAMES)
def test_each_way_of_decoding_augments(case: Callable[[], Any]) -> None:
    """Chunks of files, single files and cached pictures have the same random numbers."""
    for options in ({}, {"crop": "random", "scale": (0.3, 1.0), "flip": True}):
        decoder = DecodeImage((60, 80), augment=case(), scaled=False, **options)  # type: ignore[arg-type]
        plain = DecodeImage((60, 80), scaled=False, **options)  # type: ignore[arg-type]
        assert decoder.takes_seed
        rows = np.empty((6, 60, 80, 3), np.uint8)
        assert decoder.decode_many_into([IMAGE] * 5 + [b"no image"], rows, list(range(6)))[:5] == [None] * 5
        cached = np.empty(decoder.cached_row.shape, np.uint8)
        decoder.decode_cached_into(IMAGE, cached)
        assert decoder.fingerprint() == plain.fingerprint()
        changed = 0
        for seed in range(5):
            alone = decode(decoder, IMAGE, seed)
            assert np.array_equal(rows[seed], alone)
            changed += not np.array_equal(alone, decode(plain, IMAGE, seed))
            if not options:
                out = np.empty_like(alone)
                decoder.augment_into(cached, out, seed)
                assert np.array_equal(out, alone)
        assert changed


def test_transforms_of_albumentations_are_independent() -> None:
    """Each transform draws numbers of its own: two flips with p=0.5 occur in all four combinations."""
    decoder = DecodeImage((60, 80), augment=albumentations_case().__class__([*albumentations_case().transforms[:2]]))
    plain = decode(DecodeImage((60, 80)), IMAGE)
    flips = [plain, plain[:, ::-1], plain[::-1], plain[::-1, ::-1]]
    found = [decode(decoder, IMAGE, seed) for seed in range(80)]
    counts = [sum(np.array_equal(image, flip) for image in found) for flip in flips]
    assert sum(counts) == 80
    assert min(counts) >= 8


def torchvision_pair() -> Any:
    v2 = torchvision_v2()
    return v2.Compose(
        [
            v2.RandomHorizontalFlip(),
            v2.RandomCrop((40, 60)),
            v2.SanitizeBoundingBoxes(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )


def albumentations_pair() -> Any:
    a = pytest.importorskip("albumentations")
    return a.Compose(
        [a.HorizontalFlip(), a.RandomCrop(40, 60), a.Normalize(0, 1)],
        bbox_params=a.BboxParams(format="pascal_voc"),
        keypoint_params=a.KeypointParams(format="xy", remove_invisible=False),
    )


def own_pair(sample: dict[str, torch.Tensor], rng: torch.Generator) -> dict[str, torch.Tensor]:
    """A crop by hand."""
    upper, left = (int(torch.randint(21, (), generator=rng)) for _ in range(2))
    corner = torch.tensor([left, upper], dtype=torch.float32)
    return {
        "image": sample["image"][:, upper : upper + 40, left : left + 60].float() / 255,
        "mask": sample["mask"][upper : upper + 40, left : left + 60],
        "boxes": sample["boxes"] - corner.repeat(2),
        "keypoints": sample["keypoints"] - corner,
        "labels": sample["labels"],
        **({"masks": sample["masks"][:, upper : upper + 40, left : left + 60]} if "masks" in sample else {}),
    }


@pytest.mark.parametrize("case", [lambda: own_pair, torchvision_pair, albumentations_pair], ids=NAMES)
def test_masks_boxes_and_keypoints_are_augmented_along(case: Callable[[], Any]) -> None:
    """After an augmentation that crops, boxes, labels and keypoints are those of the mask."""
    decoder = DecodePair(DecodeImage((60, 80), flip=True), augment=case())
    kept = set()
    objects = np.zeros((2, 60, 80), bool)
    objects[0], objects[1, :10, :10] = MASK > 0, True
    target = {**TARGET, "masks": objects}
    for seed in range(30):
        sample = decoder(FILES, rng=rng(seed), target=target)
        again = decoder(FILES, rng=rng(seed), target=target)
        assert sample["masks"].dtype == torch.bool
        assert torch.equal(sample["masks"][0], sample["mask"] > 0)
        assert sample["masks"][1:].any(dim=(1, 2)).all()
        assert all(torch.equal(sample[name], again[name]) for name in sample)
        assert sample["image"].shape == (3, 40, 60)
        assert sample["image"].dtype == torch.float32
        rows, columns = np.nonzero(sample["mask"].numpy())
        shown = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.allclose(sample["boxes"][0], shown, atol=1e-3)
        assert sample["labels"].tolist() in ([5, 6], [5])
        assert len(sample["boxes"]) == len(sample["labels"]) == len(sample["keypoints"]) == len(sample["masks"])
        x, y, visible = sample["keypoints"][0, 0].tolist()
        if visible:
            assert min(abs(x - shown[0]), abs(x - shown[2])) <= 1.001
            assert abs(y - shown[1]) <= 1.001
        kept.add(len(sample["labels"]))
    assert kept == {1, 2}
    nothing = {"boxes": [], "labels": [], "keypoints": np.zeros((0, 1, 2)), "masks": []}
    empty = decoder(FILES, rng=rng(0), target=nothing)
    assert (list(empty["boxes"].shape), len(empty["labels"]), list(empty["masks"].shape)) == ([0, 4], 0, [0, 40, 60])


def test_a_transform_gets_boxes_of_the_crop_only() -> None:
    """Boxes are clipped, and dropped, before a transform gets them: albumentations refuses boxes outside its image."""
    given = []

    def seen(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given.append((sample["boxes"].tolist(), sample["labels"].tolist(), len(sample["keypoints"])))
        return sample

    target = {**TARGET, "boxes": [[0, 0, 8, 8], [0, 10, 30, 50]]}
    sample = DecodePair(DecodeImage(60), augment=seen)(FILES, rng=rng(1), target=target)  # the columns from 10 to 70
    assert given == [([[0, 10, 20, 50]], [0], 1)]
    assert (sample["boxes"].tolist(), sample["labels"].tolist()) == ([[0, 10, 20, 50]], [6])


@pytest.mark.parametrize("case", [torchvision_case, albumentations_case], ids=NAMES[1:])
def test_image_and_mask_are_flipped_together(case: Callable[[], Any]) -> None:
    """Without a target, a pair is augmented as one."""
    decoder = DecodePair(DecodeImage((60, 80)), augment=case())
    mask = number_png(np.asarray(ramps(80, 60))[..., 0])
    for seed in range(10):
        image, numbers = decoder((IMAGE, mask), rng=rng(seed))
        brightness = np.corrcoef(image[0].flatten(), numbers.flatten())[0, 1]
        assert brightness > 0.5


def test_the_generator_is_active_in_its_thread_only() -> None:
    """Other threads draw from the global generator while a transform runs."""
    inside, drawn = threading.Event(), threading.Event()

    def waiting(image: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert drawn.wait(10)
        return image // int(torch.randint(1, 9, ()))

    decoder = DecodeImage(8, augment=waiting)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(decode, decoder, IMAGE, 3)
        assert inside.wait(10)
        found = torch.rand(3)
        drawn.set()
        assert np.array_equal(job.result(), decode(decoder, IMAGE, 3))
    assert torch.equal(found, expected)


def test_distributions_draw_from_the_sample() -> None:
    """Functions that torch calls inside others have the sample's generator, too: torch's distributions, for example."""

    def mixed(image: torch.Tensor) -> torch.Tensor:
        kinds = torch.distributions
        one, two = torch.tensor(2.0), torch.tensor(3.0)
        draws = [kinds.Beta(one, two), kinds.Normal(one, two), kinds.Bernoulli(one / 4), kinds.Uniform(one, two)]
        return image // (1 + int(sum(abs(float(each.sample())) for each in draws)))

    before = torch.random.get_rng_state()
    decoder = DecodeImage(8, augment=mixed)
    found = [decode(decoder, IMAGE, seed) for seed in range(20)]
    assert all(np.array_equal(image, decode(decoder, IMAGE, seed)) for seed, image in enumerate(found))
    assert len({image.tobytes() for image in found}) > 2
    assert torch.equal(before, torch.random.get_rng_state())


class OldTransform:
    """What the transforms of albumentations 1 have."""

    __module__ = "albumentations.core"

    def __call__(self, **data: Any) -> dict[str, Any]:
        return data


class V1Transform:
    __module__ = "torchvision.transforms.transforms"

    def __call__(self, image: Any) -> Any:
        return image


def test_transforms_that_cannot_be_tied_to_a_sample_are_refused() -> None:
    """The message gives the reason, and what to use."""
    with pytest.raises(TypeError, match=r"generators of the whole process.*use albumentations 2.0 or later"):
        DecodeImage(8, augment=OldTransform())
    with pytest.raises(TypeError, match=r"without its mask and boxes: use torchvision.transforms.v2"):
        DecodePair(DecodeImage(8), augment=V1Transform())
    DecodeImage(8, augment=V1Transform())
    with pytest.raises(TypeError, match="must be callable, got 3"):
        DecodeImage(8, augment=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got the class V1Transform; pass an instance"):
        DecodePair(DecodeImage(8), augment=V1Transform)
    dropout = DecodeImage(8, augment=lambda image: torch.nn.functional.dropout(image.float()))
    with pytest.raises(TypeError, match="calls torch's dropout, which draws from the global generator"):
        decode(dropout, IMAGE, 1)


def test_a_wrong_result_is_an_error() -> None:
    """An image of another shape or dtype, a result without its parts, or boxes without their labels."""
    with pytest.raises(ValueError, match=r"must return uint8 \[3, 8, 8\], got torch.float32 \[3, 8, 8\]: .*normalises"):
        decode(DecodeImage(8, augment=lambda image: image / 255), IMAGE, 1)
    rows = np.empty((1, 8, 8, 3), np.uint8)
    [error] = DecodeImage(8, augment=lambda image: image[:, :4]).decode_many_into([IMAGE], rows, [1])
    assert "got torch.uint8 [3, 4, 8]" in str(error)
    with pytest.raises(TypeError, match=r"must return a dict of \['image', 'mask'\], got a Tensor"):
        DecodePair(DecodeImage(8), augment=lambda sample: sample["image"])(FILES, rng=rng(1))
    half = DecodePair(DecodeImage((60, 80)), augment=lambda sample: {**sample, "boxes": sample["boxes"][:1]})
    with pytest.raises(ValueError, match="1 boxes and 2 labels: drop both"):
        half(FILES, rng=rng(1), target=TARGET)
    lost = DecodePair(DecodeImage((60, 80)), augment=lambda sample: {**sample, "keypoints": sample["keypoints"][:1]})
    with pytest.raises(ValueError, match="augment= dropped keypoints"):
        lost(FILES, rng=rng(1), target=TARGET)


def test_albumentations_needs_to_know_the_boxes() -> None:
    """Without parameters of boxes and keypoints in pixels, albumentations would leave them wrong: refused."""
    a = pytest.importorskip("albumentations")
    for augment in (
        a.HorizontalFlip(),
        a.Compose([a.HorizontalFlip()]),
        a.Compose([a.HorizontalFlip()], bbox_params=a.BboxParams(format="coco")),
        a.Compose([a.HorizontalFlip()], bbox_params=a.BboxParams(format="pascal_voc", label_fields=["labels"])),
    ):
        with pytest.raises(ValueError, match=r'bbox_params=albumentations.BboxParams.format="pascal_voc"'):
            DecodePair(DecodeImage(8), augment=augment)(FILES, rng=rng(1), target={"boxes": TARGET["boxes"]})
    with pytest.raises(ValueError, match="remove_invisible=False"):
        DecodePair(
            DecodeImage(8), augment=a.Compose([a.HorizontalFlip()], keypoint_params=a.KeypointParams(format="xy"))
        )(FILES, rng=rng(1), target={"keypoints": TARGET["keypoints"]})
