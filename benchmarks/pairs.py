"""How fast are images with masks, with one random crop and flip for both?

Photographs of 500 x 400 as JPEG and their masks as PNG with a palette, in the page cache; a random crop to 224 x 224
and a flip, batch 32, shuffled, no step. ``FolderPairs`` with ``DecodePair`` is compared with ``DataLoader`` and two
workers: with Pillow, as in the references of torchvision, and with OpenCV and albumentations if they are installed.
OpenCV does not antialias, so it does less work. Then both with boxes: a list of samples.

Target: 1.1 times as fast as ``DataLoader`` with Pillow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.data import HEIGHT, WIDTH, files_below, generate, jpeg_folder
from benchmarks.figures import Figure, at_least, cpu_us_per_item, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

TITLE = "images 500x400 with masks, random crops to 224, batch 32"

BATCH, SIZE = 32, 224
BOX = [60, 50, 400, 350]


def run(settings: Settings) -> list[Figure]:
    count = settings.size(384, 64)
    folder = str(generate(settings.data / f"pairs-{count}", lambda root: write_pairs(settings.data, root, count)))
    boxed = {"folder": folder, "boxes": True}
    contenders = [
        Contender("DecodePair", decode_pair, {"folder": folder}, ("torch", "aiofeed:DecodePair")),
        Contender("DataLoader, Pillow", data_loader, {"folder": folder}, ("torch.utils.data",)),
        Contender("DecodePair, boxes", decode_pair, boxed, ("torch", "aiofeed:DecodePair")),
        Contender("DataLoader, Pillow, boxes", data_loader, boxed, ("torch.utils.data",)),
    ]
    if find_spec("albumentations") is not None:
        options = {"folder": folder, "opencv": True}
        contenders.append(Contender("DataLoader, albumentations", data_loader, options, ("torch.utils.data",)))
    samples = interleave(contenders, settings)
    rate = {label: rates(rounds) for label, rounds in samples.items()}
    cpu = {label: cpu_us_per_item(rounds) for label, rounds in samples.items()}
    figures = [
        Figure("speed / DataLoader, Pillow", per(rate["DecodePair"], rate["DataLoader, Pillow"]), target=at_least(1.1)),
        Figure("CPU / DataLoader, Pillow", per(cpu["DecodePair"], cpu["DataLoader, Pillow"])),
        Figure(
            "with boxes: speed / DataLoader, Pillow",
            per(rate["DecodePair, boxes"], rate["DataLoader, Pillow, boxes"]),
            target=at_least(1.1),
        ),
    ]
    if (label := "DataLoader, albumentations") in rate:
        figures.append(Figure(f"speed / {label}", per(rate["DecodePair"], rate[label])))
    return [*figures, *[Figure(f"samples: {label}", values, "/s") for label, values in rate.items()]]


def write_pairs(data: Path, root: Path, count: int) -> None:
    """Photographs, and masks of their bright parts in 8 classes."""
    import numpy as np
    from PIL import Image

    for folder in ("images", "masks"):
        (root / folder).mkdir()
    for number, path in enumerate(files_below(jpeg_folder(data, count))):
        (root / "images" / f"{number:05}.jpg").write_bytes(Path(path).read_bytes())
        grey = Image.open(path).convert("L").resize((WIDTH // 8, HEIGHT // 8)).resize((WIDTH, HEIGHT))
        mask = Image.fromarray(np.asarray(grey) // 32)
        mask.putpalette(np.random.default_rng(0).integers(0, 256, 768).astype(np.uint8).tobytes())
        mask.save(root / "masks" / f"{number:05}.png")


@contextmanager
def decode_pair(folder: str, boxes: bool = False) -> Iterator[Measure]:
    import aiofeed

    target = {path.name: [BOX] for path in Path(folder, "images").iterdir()} if boxes else None
    source = aiofeed.FolderPairs(f"{folder}/images", f"{folder}/masks", target)
    decode = aiofeed.DecodePair(aiofeed.DecodeImage(SIZE, crop="random", scale=(0.2, 1.0), flip=True))
    collate_fn = aiofeed.pad_collate() if boxes else None
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "drop_last": True, "collate_fn": collate_fn}
    with aiofeed.Feeder(source, decode=decode, **options) as feeder:
        one_epoch = single_epochs(feeder)

        def epoch() -> Mapping[str, float]:
            return {"items": BATCH * sum(1 for _ in one_epoch())}

        epoch()
        yield epoch


@contextmanager
def data_loader(folder: str, boxes: bool = False, opencv: bool = False) -> Iterator[Measure]:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        OpenCVPairs(folder) if opencv else PillowPairs(folder, boxes),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
        collate_fn=list if boxes else None,
    )

    def epoch() -> Mapping[str, float]:
        return {"items": BATCH * sum(1 for _ in loader)}

    epoch()
    yield epoch


class PillowPairs:
    """Images and masks with Pillow: one random crop, as ``RandomResizedCrop`` chooses it, and one flip for both."""

    def __init__(self, folder: str, boxes: bool) -> None:
        self.images = sorted(map(str, Path(folder, "images").iterdir()))
        self.masks = sorted(map(str, Path(folder, "masks").iterdir()))
        self.boxes = boxes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        import numpy as np
        import torch
        from PIL import Image

        from aiofeed.core.random_numbers import SplitMix64
        from aiofeed.decoders.geometry import random_box

        with Image.open(self.images[index]) as file:
            image = file.convert("RGB")
        mask = Image.open(self.masks[index])
        box = random_box(*image.size, (0.2, 1.0), (3 / 4, 4 / 3), SplitMix64(random.getrandbits(64)))
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
        mask = mask.resize((SIZE, SIZE), Image.Resampling.NEAREST, box)
        if flip := random.random() < 0.5:
            image, mask = (each.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for each in (image, mask))
        sample = torch.from_numpy(np.array(image)).permute(2, 0, 1), torch.from_numpy(np.array(mask))
        if not self.boxes:
            return sample
        left, upper, right, lower = box
        boxes = torch.tensor([BOX], dtype=torch.float32) - torch.tensor([left, upper, left, upper])
        boxes *= torch.tensor([SIZE / (right - left), SIZE / (lower - upper)]).repeat(2)
        if flip:
            boxes = torch.stack([SIZE - boxes[:, 2], boxes[:, 1], SIZE - boxes[:, 0], boxes[:, 3]], 1)
        boxes = boxes.clip(0, SIZE)
        return *sample, boxes[((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1)]


class OpenCVPairs(PillowPairs):
    """Images and masks with OpenCV and albumentations; Pillow reads the masks, because OpenCV applies palettes."""

    def __init__(self, folder: str) -> None:
        import os

        os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
        import albumentations
        import cv2

        super().__init__(folder, boxes=False)
        cv2.setNumThreads(0)
        steps = [albumentations.RandomResizedCrop((SIZE, SIZE), (0.2, 1.0)), albumentations.HorizontalFlip()]
        self.transform = albumentations.Compose(steps)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        import cv2
        import numpy as np
        import torch
        from PIL import Image

        image: Any = cv2.imread(self.images[index])
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        found = self.transform(image=image, mask=np.array(Image.open(self.masks[index])))
        return torch.from_numpy(found["image"]).permute(2, 0, 1), torch.from_numpy(found["mask"])
