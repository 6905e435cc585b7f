"""Feeders of images with masks and boxes: order, state, caches, failures, processes and devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aiofeed import (
    DecodeImage,
    DecodePair,
    DiskCache,
    EncodedCache,
    FailurePolicy,
    Feeder,
    Files,
    FolderPairs,
    HostCache,
    Limits,
    TarShards,
    pad_collate,
)
from aiofeed.errors import DecodeError
from tests.support.pairs import write_pairs
from tests.support.shard_files import write_tar
from tests.support.simulated_device import SimulatedDevice

COUNT = 24
DECODE = DecodePair(DecodeImage(24, crop="random", scale=(0.4, 1.0), flip=True))


def brightened(sample: dict[str, torch.Tensor], rng: torch.Generator) -> dict[str, torch.Tensor]:
    """A transform with random numbers of the sample."""
    return {**sample, "image": sample["image"] // int(torch.randint(1, 4, (), generator=rng))}


def globally(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A transform that draws as torchvision's do."""
    return {**sample, "image": sample["image"] // int(torch.randint(1, 4, ()))}


AUGMENTS: dict[str, Any] = {"none": None, "rng": brightened, "torch": globally}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    (root / "boxes.json").write_text(json.dumps(write_pairs(root, COUNT)))
    return root


def with_boxes(root: Path) -> FolderPairs:
    boxes = json.loads((root / "boxes.json").read_text())
    noted = {name: {"boxes": found, "labels": [int(name[:3])]} for name, found in boxes.items()}
    return FolderPairs(root / "images", root / "masks", noted)


def feeder(root: Path, *, boxes: bool = True, **options: Any) -> Feeder[Any]:
    source = with_boxes(root) if boxes else FolderPairs(root / "images", root / "masks")
    if boxes:
        options.setdefault("collate_fn", pad_collate({"labels": -1}))
    return Feeder(source, **{"decode": DECODE, "batch_size": 5, "shuffle": True, "seed": 3, "shard": None, **options})


def plain(batch: Any) -> str:
    """The contents of a batch."""
    parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return json.dumps([(name, getattr(part, "tensor", part).tolist()) for name, part in parts])


def epochs(feeder: Feeder[Any], count: int = 2) -> list[list[str]]:
    with feeder:
        return [[plain(batch) for batch in feeder] for _ in range(count)]


def test_batches_have_images_masks_and_boxes(root: Path) -> None:
    """Image, mask and boxes of each sample belong together, in every epoch with another crop."""
    seen = []
    with feeder(root) as whole:
        for _ in range(2):
            for batch in whole:
                size = len(batch["image"])
                assert batch["image"].shape == (size, 3, 24, 24)
                assert batch["mask"].shape == (size, 24, 24)
                assert batch["boxes"].shape == (size, 1, 4)
                for image, mask, box, label, real in zip(
                    *[batch[name] for name in ("image", "mask", "boxes", "labels", "attention_mask")], strict=True
                ):
                    if real:
                        seen.append(int(label))
                        left, upper, right, lower = box[0].tolist()
                        inside = mask[int(upper + 0.6) : int(lower + 0.4), int(left + 0.6) : int(right + 0.4)]
                        assert bool((inside == 1 + int(label) % 5).all())
                        # Away from edges the image is 50 times the mask.
                        assert ((image[0].int() - mask.int() * 50).abs() > 40).float().mean() < 0.25
    assert sorted(seen) == sorted([*range(COUNT)] * 2)
    first, second = epochs(feeder(root))
    assert sorted(first) != sorted(second)


def test_without_boxes_a_batch_is_a_list_of_images_and_masks(root: Path) -> None:
    """The rules of `default_collate` apply, with memory of the batch."""
    for images, masks in feeder(root, boxes=False):
        assert (images.dtype, masks.dtype) == (torch.uint8, torch.uint8)
        assert images.shape[1:] == (3, 24, 24)
        assert masks.shape[1:] == (24, 24)


@pytest.mark.parametrize("name", AUGMENTS)
def test_batches_are_the_same_however_they_are_made(root: Path, name: str) -> None:
    """Threads, chunks, order of completion, time limits and caches of bytes do not change a batch."""
    decode = DecodePair(DECODE.image, augment=AUGMENTS[name])
    for boxes in (True, False):
        new = partial(feeder, root, boxes=boxes, decode=decode)
        expected = epochs(new())
        assert epochs(new(limits=Limits(decode_threads=1, read_concurrency=1))) == expected
        assert epochs(new(limits=Limits(decode_threads=4))) == expected
        assert epochs(new(on_error=FailurePolicy(decode_timeout_s=20, read_timeout_s=20, retries=1))) == expected
        unordered = epochs(new(in_order=False))
        assert [sorted(epoch) for epoch in unordered] == [sorted(epoch) for epoch in expected]


@pytest.mark.parametrize("boxes", [True, False])
@pytest.mark.parametrize("kind", ["host", "disk", "encoded"])
def test_caches_do_not_change_what_is_seen(root: Path, tmp_path: Path, kind: str, boxes: bool) -> None:
    """Cold and warm caches give the same batches; a cache of bytes gives those without a cache."""
    caches = {
        "host": HostCache,
        "disk": lambda: DiskCache(tmp_path / "cache"),
        "encoded": lambda: EncodedCache(tmp_path / "cache", 1 << 24),
    }
    decode = DecodePair(DECODE.image, augment=brightened)
    new = partial(feeder, root, boxes=boxes, decode=decode)
    cold = epochs(new(cache=caches[kind]()), 3)
    assert len({*cold[0], *cold[1], *cold[2]}) == 15
    if kind == "encoded":
        assert cold == epochs(new(), 3)
    else:
        with new(cache=caches[kind]()) as again:
            read = []
            for _ in range(3):
                assert len(list(again)) == 5
                read.append(again.statistics().bytes_read)
            assert (read[0] > 0, read[1:]) == (kind == "host", [0, 0])
    if kind != "host":
        assert epochs(new(cache=caches[kind]()), 3) == cold


def test_a_cache_on_the_device_is_refused(root: Path) -> None:
    """The message says that augmentation runs on the CPU, and what to use."""
    with pytest.raises(ValueError, match=r'its augmentation runs on the CPU.*cache="host"'):
        feeder(root, boxes=False, cache="device", device=SimulatedDevice())


@pytest.mark.parametrize("action", ["raise", "skip", "replace"])
def test_a_broken_mask_is_a_failure_of_its_sample(tmp_path: Path, action: Any) -> None:
    """The error names image and mask; `skip` and `replace` leave the others as they are."""
    write_pairs(tmp_path, 10)
    broken = tmp_path / "masks" / "004.png"
    broken.write_bytes((tmp_path / "masks" / "003.png").read_bytes())  # of another width
    source = FolderPairs(tmp_path / "images", tmp_path / "masks")
    whole = Feeder(source, decode=DECODE, batch_size=5, on_error=FailurePolicy(action, max_failures=9), shard=None)
    with whole:
        if action == "raise":
            names = (
                rf"cannot decode '{tmp_path}/images/004.jpg \+ {broken}'.*the mask: it is 99 x 80, and the image 100"
            )
            with pytest.raises(DecodeError, match=names) as caught:
                list(whole)
            assert caught.value.index == 4
            return
        assert [len(images) for images, _ in whole] == [4 if action == "skip" else 5, 5]
        [failure] = whole.failures
        assert failure.index == 4


def test_boxes_outside_the_picture_name_the_file(root: Path) -> None:
    """Boxes in other units fail with the name of the image and the box."""
    source = Files([root / "images" / "000.jpg"], [{"boxes": [[0, 0, 900, 5]]}])
    with pytest.raises(
        DecodeError, match=r"000.jpg'.*box 0 of the target, \[0.0, 0.0, 900.0, 5.0\], is not in the pic"
    ):
        list(Feeder(source, decode=DECODE, batch_size=1))


@pytest.mark.slow
@pytest.mark.parametrize("boxes", [True, False])
def test_worker_processes_give_the_same_batches(root: Path, boxes: bool) -> None:
    """`engine="process"` gives the batches of threads, with random numbers of torch and of the sample."""
    for augment in (None, globally):
        decode = DecodePair(DECODE.image, augment=augment)
        new = partial(feeder, root, boxes=boxes, decode=decode)
        assert epochs(new(engine="process:2")) == epochs(new())


def test_batches_arrive_on_a_device(root: Path) -> None:
    """Image, mask and boxes are copied to the device."""
    for boxes in (True, False):
        expected = epochs(feeder(root, boxes=boxes))
        assert epochs(feeder(root, boxes=boxes, device=SimulatedDevice())) == expected
    expected = epochs(feeder(root, boxes=False, drop_last=True))
    assert epochs(feeder(root, boxes=False, drop_last=True, device=SimulatedDevice(), static_batches=True)) == expected


@pytest.fixture
def shards(root: Path, tmp_path: Path) -> Iterator[Path]:
    boxes = json.loads((root / "boxes.json").read_text())
    members = []
    for name, found in boxes.items():
        key = name[:3]
        note = json.dumps({"boxes": found, "labels": [int(key)]}).encode()
        members += [(f"{key}.jpg", (root / "images" / name).read_bytes())]
        members += [(f"{key}.png", (root / "masks" / f"{key}.png").read_bytes()), (f"{key}.json", note)]
    write_tar(tmp_path / "train.tar", members)
    return tmp_path / "train.tar"


def test_samples_of_shards_are_pairs(root: Path, shards: Path) -> None:
    """A tar file with an image, a mask and boxes per sample gives the batches of the folders."""
    source = TarShards(str(shards), ["jpg", "png"], "json", to_target=json.loads)
    decode = DecodePair(DECODE.image, fields=("jpg", "png"))
    options: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 3, "collate_fn": pad_collate({"labels": -1})}
    assert epochs(Feeder(source, decode=decode, shard=None, **options)) == epochs(feeder(root))


def test_decoders_of_one_image_get_an_augment(root: Path) -> None:
    """`DecodeImage(augment=)` fills rows of batches in place; the same batches from any number of threads."""
    paths = sorted((root / "images").iterdir())

    def new(threads: int, **options: Any) -> Feeder[Any]:
        decode = DecodeImage(24, crop="random", flip=True, augment=lambda image: image // int(torch.randint(1, 4, ())))
        limits = Limits(decode_threads=threads)
        return Feeder(Files(paths, range(COUNT)), decode=decode, batch_size=5, limits=limits, shard=None, **options)

    expected = epochs(new(1))
    assert epochs(new(4)) == expected
    assert epochs(new(2, on_error=FailurePolicy(decode_timeout_s=20))) == expected
    cached = epochs(new(2, cache="host"), 3)
    assert len({*cached[0], *cached[1]}) == 10
    for images, _ in new(2):
        assert images.is_contiguous(memory_format=torch.channels_last)
