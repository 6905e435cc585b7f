"""A training on a Hugging Face dataset: its columns as batches of tensors, and its images decoded in threads.

    python examples/tables.py

scikit-learn's handwritten digits become a dataset with the pixels of each digit, its label and its picture as a PNG,
as datasets on the Hub have it. The first training takes the columns of numbers: a batch is a dict of tensors, gathered
from the mapped files. It stops in the middle of an epoch, and goes on with the batches of a training that did not stop.
The second one takes the pictures, of which Table hands the bytes to DecodeImage. The same dataset through a DataLoader
shows what an epoch costs otherwise.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import aiofeed

BATCH_SIZE = 64


def prepare(folder: Path) -> datasets.Dataset:
    """Write the digits as a dataset and map its files."""
    pixels, labels = load_digits(return_X_y=True)
    pictures = []
    for picture in (pixels.reshape(-1, 8, 8) * 15).astype("uint8"):
        data = io.BytesIO()
        Image.fromarray(picture).save(data, "PNG")
        pictures.append({"bytes": data.getvalue(), "path": None})
    features = datasets.Features(
        {
            "pixels": datasets.Sequence(datasets.Value("float32"), 64),
            "label": datasets.ClassLabel(num_classes=10),
            "image": datasets.Image(),
        }
    )
    columns = {"pixels": pixels / 16, "label": labels, "image": pictures}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder)
    return datasets.load_from_disk(folder)


def train(batches: Iterable[Any], split: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Train on batches, which ``split`` divides into inputs and labels; return the loss of the first and last ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for batch in batches:
        x, labels = split(batch)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return f"loss {sum(losses[:10]) / 10:.2f} to {sum(losses[-10:]) / 10:.2f}"


def of_columns(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["pixels"], batch["label"]


def of_images(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = batch
    return images[:, 0].float() / 255, labels


def feeder_of(digits: datasets.Dataset) -> aiofeed.Feeder[dict[str, torch.Tensor]]:
    table = aiofeed.Table(digits, columns=["pixels", "label"])
    return aiofeed.Feeder(table, batch_size=BATCH_SIZE, shuffle=True)


def seconds(epoch: Callable[[], object]) -> float:
    epoch()
    started = time.perf_counter()
    epoch()
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)  # more threads have no work with so small a model
    with tempfile.TemporaryDirectory() as name:
        digits = prepare(Path(name))
        with feeder_of(digits) as feeder:
            print(f"columns: {train(feeder.steps(150), of_columns)}")
            state = feeder.state_dict()
            expected = [batch["label"].tolist() for batch in feeder.steps(20)]
        with feeder_of(digits) as resumed:
            resumed.load_state_dict(state)
            same = [batch["label"].tolist() for batch in resumed.steps(20)] == expected
            print(f"the resumed training gets the same batches: {same}")
        images = aiofeed.Table(digits, data="image", target="label")
        with aiofeed.Feeder(images, decode=aiofeed.DecodeImage(8), batch_size=BATCH_SIZE, shuffle=True) as feeder:
            print(f"images: {train(feeder.steps(150), of_images)}")
        with feeder_of(digits) as feeder:
            ours = seconds(lambda: list(feeder))
        loader: Any = torch.utils.data.DataLoader(
            digits.select_columns(["pixels", "label"]).with_format("torch"),  # type: ignore[arg-type]
            BATCH_SIZE,
            shuffle=True,
        )
        theirs = seconds(lambda: list(loader))
        print(f"an epoch: Table {ours * 1e3:.1f} ms, DataLoader {theirs * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
