"""Ray Data reads and resizes images in the tasks of a cluster, here on this machine; aiofeed feeds them to a training.

    python examples/ray_data.py

The first epoch takes the batches that Ray forms, loaded ahead by ``prefetch``. The second takes the rows from a
``Feeder``, which flips images at random, and is repeated with a stop in mid-epoch. Without PATH the images are
generated.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import ray.data
import torch
from three_trainings import generate

import aiofeed

SIZE = 32
BATCH_SIZE = 16


def open_dataset(folder: Path) -> ray.data.Dataset:
    """Rows of image, uint8 [32, 32, 3], and label; nothing is read yet."""
    labels = {each.name: label for label, each in enumerate(sorted(folder.iterdir()))}
    rows = ray.data.read_images(str(folder), size=(SIZE, SIZE), mode="RGB", include_paths=True)
    return rows.map(lambda row: {"image": row["image"], "label": labels[Path(row["path"]).parent.name]})


def flip(row: dict[str, Any], *, rng: torch.Generator) -> dict[str, Any]:
    """Flip half of the images, with the random generator of the sample."""
    image = torch.from_numpy(row["image"].copy())
    return {"image": image.flip(1) if torch.rand((), generator=rng) < 0.5 else image, "label": row["label"]}


def new_feeder(dataset: ray.data.Dataset) -> aiofeed.Feeder[dict[str, torch.Tensor]]:
    """A feeder over the rows of the dataset, which Ray shuffles anew for each epoch."""

    def rows(epoch: int) -> Iterable[dict[str, Any]]:
        return dataset.random_shuffle(seed=epoch).iter_rows()

    return aiofeed.Feeder(aiofeed.Stream(rows), decode=flip, batch_size=BATCH_SIZE, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", help="a folder of images, one subfolder per class")
    options = parser.parse_args()
    ray.init("local", num_cpus=2, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # the same rows in the same order, so that a feeder can resume
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def train(batches: Iterable[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Train on batches; returns them."""
        seen, losses = [], []
        for batch in batches:
            loss = torch.nn.functional.cross_entropy(model(batch["image"].float() / 255), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen.append(batch["image"])
        print(f"{sum(map(len, seen))} images, loss {losses[0]:.2f} to {losses[-1]:.2f}")
        return seen

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.path
        if folder is None:
            folder = Path(temporary)
            generate(folder)
        dataset = open_dataset(folder)
        shuffled = dataset.random_shuffle(seed=0)
        train(aiofeed.prefetch(shuffled.iter_torch_batches(batch_size=BATCH_SIZE)))
        with new_feeder(dataset) as feeder:
            whole = train(feeder)
        with new_feeder(dataset) as feeder:
            first = train(feeder.steps(3))
            state = feeder.state_dict()  # plain values, for a checkpoint
        with new_feeder(dataset) as feeder:
            feeder.load_state_dict(state)
            rest = train(feeder)
        same = all(torch.equal(*each) for each in zip([*first, *rest], whole, strict=True))
        print(f"the batches are those of one uninterrupted epoch: {same}")
    ray.shutdown()


if __name__ == "__main__":
    main()
