"""`DecodePair`: an image with its mask, boxes and keypoints."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aiofeed import DecodeImage, DecodePair, pad_collate
from tests.support.pairs import number_png, palette_png, ramps
from tests.support.pictures import encode, exif, jpeg

RANDOM: dict[str, Any] = {"crop": "random", "scale": (0.2, 1.0), "flip": True}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "JPEG, 1/4"])
@pytest.mark.parametrize("options", [RANDOM, {"flip": True}, {"resize": 60}], ids=["random", "flip", "center"])
def test_image_and_mask_show_the_same_part(kind: str, options: dict[str, Any]) -> None:
    """Image and mask have one crop and one flip, also if the JPEG is decoded at a smaller scale."""
    width, height = (1203, 901) if kind == "JPEG, 1/4" else (203, 151)
    picture = ramps(width, height)
    image = encode(picture, "PNG") if kind == "PNG" else jpeg(picture, quality=98, subsampling=0)
    decode = DecodePair(DecodeImage(48, **options))
    for axis in (0, 1):
        mask = number_png(np.asarray(picture)[..., axis])
        for seed in range(20):
            pixels, numbers = decode((image, mask), rng=rng(seed))
            assert pixels.shape == (3, 48, 48)
            assert numbers.shape == (48, 48)
            assert numbers.dtype == torch.uint8
            # A pixel of the sample is at most 4.2 wide, and a level 0.6: half a pixel is less than 4 levels.
            difference = (pixels[axis].int() - numbers.int()).abs()
            assert difference.max() <= 5
            assert difference.float().mean() < 2.5


def test_the_image_is_that_of_decode_image() -> None:
    """The image of a pair equals that of its `DecodeImage` with the same generator."""
    image, mask = jpeg(ramps(120, 90)), number_png(np.zeros((90, 120), np.uint8))
    alone = DecodeImage(32, **RANDOM)
    pixels, _ = DecodePair(alone)((image, mask), rng=rng(3))
    assert torch.equal(pixels, alone(image, rng=rng(3)))
    assert torch.equal(DecodePair(alone)(image, rng=rng(3)), pixels)


def test_masks_keep_their_numbers() -> None:
    """Palettes, single bits and 16 bits keep their numbers; none is between two others."""
    numbers = np.random.default_rng(0).choice([0, 7, 200], (60, 80)).astype(np.uint8)
    image = jpeg(ramps(80, 60))
    decode = DecodePair(DecodeImage((60, 80)))
    for mask in (number_png(numbers), palette_png(numbers)):
        assert np.array_equal(decode((image, mask))[1], numbers)
    bits = encode(Image.fromarray(numbers > 0), "PNG")
    assert np.array_equal(decode((image, bits))[1], numbers > 0)
    deep = number_png(numbers.astype(np.uint16) * 300)
    for dtype in ("int32", "int64"):
        found = DecodePair(DecodeImage((60, 80)), mask_dtype=dtype)((image, deep))[1]
        assert found.dtype == getattr(torch, dtype)
        assert np.array_equal(found, numbers.astype(int) * 300)
    small = DecodePair(DecodeImage((13, 17)))((image, palette_png(numbers)))[1]
    assert set(small.unique().tolist()) <= {0, 7, 200}


def test_a_mask_fits_the_upright_image() -> None:
    """The mask has the size of the image after its EXIF orientation is applied."""
    stored = ramps(80, 60).transpose(Image.Transpose.ROTATE_90)
    image = encode(stored, "PNG", exif=exif(6))  # 6: rotate by 270 degrees
    mask = number_png(np.asarray(ramps(80, 60))[..., 0])
    pixels, numbers = DecodePair(DecodeImage((60, 80)))((image, mask))
    assert torch.equal(pixels[0], numbers)
    with pytest.raises(ValueError, match=r"the mask: it is 60 x 80, and the image 80 x 60"):
        DecodePair(DecodeImage(32))((image, number_png(np.zeros((80, 60), np.uint8))))


def test_boxes_and_keypoints_move_with_the_image() -> None:
    """A box surrounds its object in the mask after crop and flip, and keypoints stay on their object."""
    mask = np.zeros((90, 120), np.uint8)
    mask[20:70, 30:80] = 1
    files = jpeg(ramps(120, 90)), number_png(mask)
    target = {
        "boxes": [[30, 20, 80, 70]],
        "labels": [4],
        "keypoints": [[[30, 20, 2], [55, 45, 1], [80, 70, 0]]],
        "image_id": 9,
    }
    decode = DecodePair(DecodeImage(64, **RANDOM))
    for seed in range(30):
        sample = decode(files, rng=rng(seed), target=target)
        assert list(sample) == ["boxes", "keypoints", "labels", "image_id", "image", "mask"]
        assert sample["image_id"] == 9
        rows, columns = np.nonzero(sample["mask"].numpy())
        shown = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.allclose(sample["boxes"][0], shown, atol=1.01)
        assert sample["labels"].tolist() == [4]
        middle = sample["keypoints"][0, 1].tolist()
        if middle[2]:
            assert sample["mask"][int(middle[1]), int(middle[0])] == 1
        assert sample["keypoints"][0, 2].tolist() == [0, 0, 0]


def test_boxes_outside_the_crop_are_dropped_with_their_labels() -> None:
    """A box that is cut off is dropped with its labels and keypoints; one that is cut is clipped."""
    decode = DecodePair(DecodeImage(50))  # of 100 x 50, the middle 50 columns
    target = {
        "boxes": torch.tensor([[0.0, 0, 20, 20], [20, 0, 40, 20], [24.5, 0, 25.5, 20]]),
        "labels": ["cut off", "cut", "thin"],
        "area": np.array([1.0, 2.0, 3.0]),
        "keypoints": np.arange(6, dtype=float).reshape(3, 1, 2),
    }
    sample = decode(jpeg(ramps(100, 50)), target=target)
    assert sample["boxes"].tolist() == [[0, 0, 15, 20]]
    assert sample["boxes"].dtype == torch.float32
    assert sample["labels"] == ["cut"]
    assert sample["area"].tolist() == [2.0]
    assert sample["keypoints"].tolist() == [[[2 - 25, 3]]]
    assert "mask" not in sample
    least = DecodePair(DecodeImage(50), min_size=0.25)(jpeg(ramps(100, 50)), target=target)
    assert least["labels"] == ["cut", "thin"]


@pytest.mark.parametrize("form", [np.asarray, torch.as_tensor, list, lambda masks: Mask(torch.as_tensor(masks))])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64"])
@pytest.mark.parametrize("cached", [False, True])
def test_masks_of_objects_move_with_their_boxes(form: Any, dtype: str, cached: bool) -> None:
    """Each box surrounds its own mask after crop and flip, also of a cached sample; masks of dropped boxes go, too."""
    objects = np.zeros((3, 90, 120), dtype)
    target = {"boxes": [[30, 20, 80, 70], [0, 0, 30, 25], [90, 50, 120, 90]], "labels": [4, 5, 6]}
    for mask, (left, upper, right, lower) in zip(objects, target["boxes"], strict=True):
        mask[upper:lower, left:right] = 1
    decode = DecodePair(DecodeImage(64, **RANDOM))
    data = jpeg(ramps(120, 90))
    stored, counts = decode.decode_cached(data), set()
    for seed in range(30):
        given: Any = {"target": {**target, "masks": form(objects)}, "rng": rng(seed)}
        sample = decode.augment_cached(stored, **given) if cached else decode(data, **given)
        masks = sample["masks"]
        assert (masks.dtype, masks.shape) == (getattr(torch, dtype), (len(sample["boxes"]), 64, 64))
        counts.add(len(masks))
        for mask, box in zip(masks.numpy(), sample["boxes"], strict=True):
            rows, columns = np.nonzero(mask)
            assert np.allclose(box, [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], atol=1.01)
    assert len(counts) > 1


def test_masks_without_boxes_or_objects() -> None:
    """Masks move without boxes, too; an image without objects has none, [0, H, W]."""
    mask = np.zeros((1, 30, 40), np.uint8)
    mask[:, :, :10] = 1
    decode = DecodePair(DecodeImage((15, 20), flip=True))
    shown = {tuple(decode(jpeg(ramps(40, 30)), rng=rng(seed), target={"masks": mask})["masks"][0, 0].tolist())
             for seed in range(20)}  # fmt: skip
    assert shown == {(1,) * 5 + (0,) * 15, (0,) * 15 + (1,) * 5}
    for none in ([], torch.zeros((0, 30, 40), dtype=torch.uint8)):
        sample = decode(jpeg(ramps(40, 30)), rng=rng(1), target={"boxes": [], "masks": none})
        assert (sample["masks"].shape, sample["masks"].dtype) == ((0, 15, 20), torch.uint8)


class BoundingBoxes(torch.Tensor):
    """A class of `torchvision.tv_tensors`, by its name."""


class Mask(torch.Tensor):
    """Another."""


POLYGON = [10.0, 2.0, 30.0, 2.0, 30.0, 20.0]
BOX_2 = {"boxes": [[3, 4, 30, 20], [0, 0, 9, 9]]}
PLACES: list[dict[str, Any]] = [
    {"segmentation": [[POLYGON], [POLYGON, POLYGON[:4]]]},
    {"segmentation": [[POLYGON], [POLYGON]]},
    {"segmentation": {"counts": b"x", "size": [30, 40]}},
    {"regions": [{"counts": "x", "size": [30, 40]}]},
    {"annotations": [{"id": 3, "bbox": [3, 4, 27, 16]}]},
    {"object": {"xmin": 3, "ymin": 4}},
    {"bbox": [3, 4, 27, 16]},
    {"bbox": [[3, 4, 27, 16]]},
    {"gt_bboxes": torch.zeros(3, 4)},
    {"proposals": torch.rand(5, 4)},
    {"centers": np.zeros((2, 2))},
    {"landmarks": np.zeros((2, 5, 3))},
    {"depth": np.zeros((30, 40), np.float32)},
    {"instances": np.zeros((2, 30, 40), bool)},
    {"semantic": Mask(torch.zeros(30, 40))},
    {"others": BoundingBoxes(torch.zeros(2, 4))},
    {"picture": Image.new("RGB", (40, 30))},
]


@pytest.mark.parametrize("target", PLACES, ids=lambda target: next(iter(target)))
def test_places_that_do_not_move_are_refused(target: dict[str, Any]) -> None:
    """An entry that looks like places in the picture is refused by name, with boxes and without, and as the target."""
    decode = DecodePair(DecodeImage(16))
    for whole in (target, BOX_2 | target):
        with pytest.raises(ValueError, match=f'"{next(iter(target))}" of the target looks like places'):
            decode(jpeg(ramps(40, 30)), target=whole)
    with pytest.raises(ValueError, match='"segmentation" of the target looks like places'):
        DecodePair(DecodeImage(16), labels=["segmentation"])(jpeg(ramps(40, 30)), target=BOX_2 | PLACES[1])


@pytest.mark.parametrize("target", [[{"bbox": [3, 4, 5, 6]}], torch.rand(3, 4), BoundingBoxes(torch.zeros(2, 4))])
def test_a_target_of_places_is_refused(target: Any) -> None:
    """A target that is no dict stays where it is, so it cannot be boxes."""
    with pytest.raises(ValueError, match="looks like places in the picture"):
        DecodePair(DecodeImage(16))(jpeg(ramps(40, 30)), target=target)


OTHERS: dict[str, Any] = {
    "image_id": torch.tensor([7]),
    "size": [30, 40],
    "file_name": "box.jpg",
    "caption": ["a", "b", "c"],
    "classes": np.eye(3),
    "has_boxes": True,
    "num_keypoints": 3,
    "box_names": ["left"],
    "camera": {"pose": np.eye(4)},
}


def test_entries_without_places_are_unchanged() -> None:
    """What has no places stays as it is, whether boxes are dropped or not."""
    decode = DecodePair(DecodeImage(16))
    for boxes in ([[0, 0, 30, 20]], [[0, 0, 1, 1], [5, 0, 30, 20]]):
        sample = decode(jpeg(ramps(40, 30)), target=OTHERS | {"boxes": boxes})
        assert len(sample["boxes"]) == 1
        assert {name: id(sample[name]) for name in OTHERS} == {name: id(value) for name, value in OTHERS.items()}


@pytest.mark.parametrize("names", [["a", "b"], np.arange(2), torch.rand(2, 8), range(2)])
def test_one_item_per_box_must_be_named_if_a_box_is_dropped(names: Any) -> None:
    """An entry with as many items as boxes is refused if boxes were dropped, until `labels` says what it is."""
    target = BOX_2 | {"names": names, "scores": [0.5, 0.75], "labels": [1, 2]}
    assert len(DecodePair(DecodeImage((30, 40)))(jpeg(ramps(40, 30)), target=target)["names"]) == 2
    few = DecodeImage((3, 40))
    with pytest.raises(ValueError, match=r"\"names\" of the target has 2 items.*'iscrowd', 'names'\)"):
        DecodePair(few)(jpeg(ramps(40, 30)), target=target)
    sample = DecodePair(few, labels=("labels", "scores", "names"))(jpeg(ramps(40, 30)), target=target)
    assert sample["labels"].tolist() == [1]
    assert sample["scores"].tolist() == [0.5]
    assert len(sample["names"]) == 1


def test_a_mirrored_image_exchanges_left_and_right_keypoints() -> None:
    """`flip_pairs` exchanges keypoints in mirrored images only."""
    target = {"keypoints": [[[10, 5], [30, 5], [20, 8]]]}
    decode = DecodePair(DecodeImage(40, flip=True), flip_pairs=[(0, 1)])
    found = {str(decode(jpeg(ramps(40, 40)), rng=rng(seed), target=target)["keypoints"].tolist()) for seed in range(20)}
    assert found == {"[[[10.0, 5.0], [30.0, 5.0], [20.0, 8.0]]]"}
    plain = DecodePair(DecodeImage(40, flip=True))
    found = {str(plain(jpeg(ramps(40, 40)), rng=rng(seed), target=target)["keypoints"].tolist()) for seed in range(20)}
    assert len(found) == 2


def test_a_target_that_is_no_dict_is_returned_beside_the_sample() -> None:
    """A number or a `None` is the second part of the sample, as for other decoders."""
    decode = DecodePair(DecodeImage(8))
    pixels, label = decode(jpeg(ramps(10, 10)), target=3)
    assert (tuple(pixels.shape), label) == ((3, 8, 8), 3)
    assert decode(jpeg(ramps(10, 10)), target=None)[1] is None


def test_no_boxes_are_an_empty_tensor() -> None:
    """Images without objects have float32 [0, 4] boxes."""
    decode = DecodePair(DecodeImage(8), labels=("labels", "area", "names"))
    none = decode(jpeg(ramps(10, 10)), target={"boxes": [], "labels": [], "area": []})
    one = decode(jpeg(ramps(10, 10)), target={"boxes": [[0, 0, 9, 9]], "labels": [1 << 30], "area": [80.5]})
    assert (list(none["boxes"].shape), none["boxes"].dtype, none["labels"].dtype) == (
        [0, 4],
        torch.float32,
        torch.int64,
    )
    for samples in ([none, one], [one, none]):
        batch = pad_collate()(samples)
        assert (batch["labels"].dtype, batch["labels"].max()) == (torch.int64, 1 << 30)
        assert batch["area"].max() == 80.5
    assert pad_collate()([none, none])["boxes"].shape == (2, 0, 4)


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("empty", [[], [[]], np.zeros((0, 17, 3))])
def test_keypoints_of_none_are_an_empty_tensor(empty: Any, columns: int) -> None:
    """An image without persons has lists without items; a batch with others is padded, and a mirrored one is legal."""
    decode = DecodePair(DecodeImage(16, flip=True), flip_pairs=[(0, 1)], augment=lambda sample: dict(sample))
    person = {"boxes": [[3, 4, 30, 20]], "labels": [1], "keypoints": [[[9, 8, 2][:columns]] * 17]}
    nobody = {"boxes": [], "labels": [], "keypoints": empty}
    for seed in range(4):
        samples = [decode(jpeg(ramps(40, 30)), rng=rng(seed), target=each) for each in (nobody, person, nobody)]
        assert [len(sample["keypoints"]) for sample in samples] == [0, 1, 0]
        for place, order in ((1, samples), (0, samples[1:])):
            for side in ("left", "right"):
                batch = pad_collate({"labels": -1}, side=side)(order)  # type: ignore[arg-type, unused-ignore]
                assert batch["keypoints"].shape == (len(order), 1, 17, columns)
                assert batch["keypoints"].dtype == torch.float32
                assert torch.equal(batch["keypoints"][place], samples[1]["keypoints"])
                assert batch["attention_mask"].sum() == 1
        assert len(pad_collate()([samples[0]])["keypoints"][0]) == 0


def test_fields_name_the_files_of_a_dict() -> None:
    """The sample of a shard is a dict, of which `fields` chooses image and mask."""
    mask = number_png(np.full((10, 10), 3, np.uint8))
    data = {"seg.png": mask, "jpg": jpeg(ramps(10, 10)), "txt": b"x"}
    pixels, numbers = DecodePair(DecodeImage(8), fields=("jpg", "seg.png"))(data)
    assert (tuple(pixels.shape), numbers.unique().tolist()) == ((3, 8, 8), [3])
    assert DecodePair(DecodeImage(8), fields=["jpg"])(data).shape == (3, 8, 8)
    with pytest.raises(TypeError, match=r"dict of \['jpg', 'seg.png', 'txt'\].*fields="):
        DecodePair(DecodeImage(8))(data)
    with pytest.raises(ValueError, match=r"no 'png'; it has \['jpg'"):
        DecodePair(DecodeImage(8), fields=("jpg", "png"))(data)


@pytest.mark.parametrize("options", [RANDOM, {"flip": True}, {"resize": 60}], ids=["random", "flip", "center"])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_the_cached_form_gives_the_same_sample(options: dict[str, Any], dtype: Any) -> None:
    """A sample of the cached form has the same part, flip and boxes as a decoded one, and nearly its pixels."""
    picture = ramps(203, 151)
    files = encode(picture, "PNG"), number_png(np.asarray(picture)[..., 0])
    decode = DecodePair(DecodeImage(48, **options), mask_dtype=dtype)
    cached = decode.decode_cached(files)
    target = {"boxes": [[20, 10, 150, 140]]}
    for seed in range(10):
        fresh = decode(files, rng=rng(seed), target=target)
        again = decode.augment_cached(cached, rng=rng(seed), target=target)
        assert torch.equal(fresh["boxes"], again["boxes"])
        assert fresh["mask"].dtype == again["mask"].dtype == getattr(torch, dtype)
        for name in ("image", "mask"):
            assert (fresh[name].int() - again[name].int()).abs().max() <= 6
    alone = decode.decode_cached(files[0])
    assert torch.equal(decode.augment_cached(alone, rng=rng(1)), decode.augment_cached(cached, rng=rng(1))[0])


BOX = r"box 1 of the target, \[.*\], is not in the picture of 40 x 30 \(width x height\)"
SHARES = (
    '"{}" of the target are all between {} and {}, in a picture of 40 x 30 .*are shares .*or pass pixels as integers'
)


class Formatted(list[list[float]]):
    """Boxes that name their format, as `torchvision.tv_tensors.BoundingBoxes` do."""

    def __init__(self, form: str) -> None:
        super().__init__([[3, 4, 30, 20]])
        self.format = SimpleNamespace(name=form)


BAD_TARGETS: list[tuple[dict[str, Any], str]] = [
    ({"boxes": [[0, 0, 5, 5], [30, 0, 45, 5]]}, BOX),
    ({"boxes": [[0, 0, 5, 5], [30, 20, 10, 25]]}, BOX),
    ({"boxes": [[0, 0, 5, 5], [-3, 0, 5, 5]]}, BOX),
    ({"boxes": [[0, 0, 5, 5], [0, 0, 5, float("nan")]]}, BOX),
    ({"boxes": [[0, 0, 5]]}, r'"boxes" of the target must be \[N, 4\], got \[1, 3\]'),
    (
        {"boxes": [[0, 0, 5, 5]], "labels": [1, 2]},
        r'"labels" of the target must have one item per box, 1 in all, got \[1, 2\]',
    ),
    ({"boxes": [[0, 0, 5, 5]], "area": 25}, r'"area" of the target must have one item per box, 1 in all, got 25'),
    ({"boxes": [], "keypoints": [[[1, 2]]]}, '"keypoints" of the target has 1 items'),
    ({"keypoints": [[1, 2]]}, r"must be \[N, K, 2\] or \[N, K, 3\], got \[1, 2\]"),
    ({"boxes": [], "masks": np.zeros((1, 30, 40))}, '"masks" of the target has 1 items'),
    ({"masks": np.zeros((1, 40, 30))}, r'"masks" of the target must be numbers \[N, 30, 40\].*got float64 \[1, 40, 30'),
    ({"boxes": [[0, 0, 5, 5]], "masks": [[[1.0, 2.0]], [[1.0]]]}, '"masks" of the target must be numbers'),
    ({"masks": [{"counts": "", "size": [30, 40]}]}, '"masks" of the target must be numbers .*annToMask'),
    ({"image": 3}, r"the target has \['image'\]"),
    ({"boxes": [[0.1, 0.2, 0.5, 0.7], [0, 0, 1, 1]], "labels": [1, 2]}, SHARES.format("boxes", "0", "1")),
    ({"boxes": [[0.5, 0.5, 0.2, 0.3]]}, SHARES.format("boxes", "0.2", "0.5")),
    ({"boxes": np.float64([[0, 0, 1.0000001, 0.5]])}, SHARES.format("boxes", "0", "1")),
    (
        {"boxes": [[3, 4, 30, 20]], "keypoints": [[[0.5, 0.25, 2], [0.1, 0.3, 1]]]},
        SHARES.format("keypoints", "0.1", "0.5"),
    ),
    ({"keypoints": torch.tensor([[[0.5, 0.25], [0.5, 0.75]]])}, SHARES.format("keypoints", "0.25", "0.75")),
    ({"boxes": Formatted("XYWH")}, '"boxes" of the target have the format XYWH: make left, upper, right, lower'),
    ({"boxes": Formatted("CXCYWH")}, '"boxes" of the target have the format CXCYWH'),
]


@pytest.mark.parametrize(
    ("target", "left"),
    [
        ({"boxes": [[5, 5, 5.5, 5.5], [0.2, 0.2, 0.6, 0.6]]}, 0),
        ({"boxes": [[0, 0, 1, 1], [3, 3, 9, 9]]}, 2),
        ({"boxes": [[0, 0, 0, 0]]}, 0),
        ({"boxes": [[0, 0, 1, 1]]}, 1),
        ({"boxes": torch.tensor([[0, 0, 1, 1]])}, 1),
        ({"boxes": [[3, 4, 30, 20]], "keypoints": [[[0.5, 0.25, 2], [0, 0, 0]]]}, 1),
        ({"boxes": [[3, 4, 30, 20]], "keypoints": [[[0.5, 0.25, 2], [0.5, 0.25, 1]]]}, 1),
        ({"boxes": [[3, 4, 30, 20]], "keypoints": [[[0.5, 0.25]]]}, 1),
        ({"boxes": [[3, 4, 30, 20]], "keypoints": [[[1, 1, 2], [1, 0, 1]]]}, 1),
        ({"boxes": [[3, 4, 30, 20]], "keypoints": [[[0, 0, 0]]]}, 1),
        ({"boxes": [[3, 4, 30, 20]], "keypoints": [[[float("inf"), float("nan"), 2]]]}, 1),
        ({"boxes": Formatted("XYXY")}, 1),
    ],
)
def test_small_places_in_pixels_are_legal(target: dict[str, Any], left: int) -> None:
    """Tiny boxes are dropped, and keypoints in the first pixel are kept: only shares of the picture are errors."""
    assert len(DecodePair(DecodeImage((30, 40)))(jpeg(ramps(40, 30)), target=target)["boxes"]) == left


@pytest.mark.parametrize(("target", "message"), BAD_TARGETS)
def test_a_wrong_target_is_an_error(target: dict[str, Any], message: str) -> None:
    """Boxes outside the picture, other shapes and other numbers of labels are errors."""
    with pytest.raises(ValueError, match=message):
        DecodePair(DecodeImage(16))(jpeg(ramps(40, 30)), target=target)


def test_a_box_may_be_rounded_past_the_edge() -> None:
    """Boxes that exceed the picture by up to a pixel are clipped."""
    sample = DecodePair(DecodeImage((30, 40)))(jpeg(ramps(40, 30)), target={"boxes": [[-0.5, 0, 41, 30]]})
    assert sample["boxes"].tolist() == [[0, 0, 40, 30]]


def test_a_wrong_mask_is_an_error_that_names_it() -> None:
    """Masks of another size, with colours, with large numbers or damaged are errors."""
    image = jpeg(ramps(40, 30))
    decode = DecodePair(DecodeImage(16))
    with pytest.raises(ValueError, match=r"the mask: it is 30 x 40, and the image 40 x 30"):
        decode((image, number_png(np.zeros((40, 30), np.uint8))))
    with pytest.raises(ValueError, match="the mask: it has the mode RGB, and a mask has one channel of class numbers"):
        decode((image, encode(ramps(40, 30), "PNG")))
    with pytest.raises(ValueError, match="the mask: it has the number 300, and mask_dtype='uint8' has 0 to 255"):
        decode((image, number_png(np.full((30, 40), 300, np.uint16))))
    with pytest.raises(ValueError, match="the mask: "):
        decode((image, number_png(np.asarray(ramps(40, 30))[..., 0])[:60]))
    with pytest.raises(ValueError, match="the image: "):
        decode((image[:300], number_png(np.zeros((30, 40), np.uint8))))


def test_wrong_arguments_and_data_are_errors() -> None:
    """Each message says what to pass."""
    image = jpeg(ramps(40, 30))
    with pytest.raises(ValueError, match='leave out mode="keep"'):
        DecodePair(DecodeImage(None, mode="keep"))
    with pytest.raises(ValueError, match="augment= changes RGB images"):
        DecodeImage(None, mode="keep", augment=abs)
    with pytest.raises(TypeError, match=r"needs a DecodeImage, such as DecodeImage\(224\), got 224"):
        DecodePair(224)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no argument 'boxes'.*the target has them"):
        DecodePair(DecodeImage(8), boxes=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="mask_dtype must be"):
        DecodePair(DecodeImage(8), mask_dtype="int16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fields must be"):
        DecodePair(DecodeImage(8), fields="jpg")
    with pytest.raises(ValueError, match="min_size must be at least 0"):
        DecodePair(DecodeImage(8), min_size=-1)
    with pytest.raises(TypeError, match="to DecodePair, and not to its DecodeImage"):
        DecodePair(DecodeImage(8, augment=lambda image: image))
    with pytest.raises(TypeError, match="takes an image and a mask, got 3 files"):
        DecodePair(DecodeImage(8))((image, image, image))
    with pytest.raises(TypeError, match="takes the bytes of an image and of a mask, got bytes, str"):
        DecodePair(DecodeImage(8))((image, "mask.png"))
    with pytest.raises(ValueError, match="is random: it needs rng"):
        DecodePair(DecodeImage(8, flip=True))(image)


def test_a_pair_can_be_pickled() -> None:
    """A decoder that travels to a worker process gives the same samples."""
    decode = DecodePair(DecodeImage(16, **RANDOM), fields=("jpg", "png"))
    again = pickle.loads(pickle.dumps(decode))
    data = {"jpg": jpeg(ramps(40, 30)), "png": number_png(np.zeros((30, 40), np.uint8))}
    assert again == decode
    assert torch.equal(decode(data, rng=rng(1))[0], again(data, rng=rng(1))[0])
