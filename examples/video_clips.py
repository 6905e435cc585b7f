"""A network learns which way things move, from random clips of video files.

The script generates short videos of a textured square that moves to the left, right, up or down. A single frame does
not show where it goes. Training is stopped after half of its steps and resumed from a checkpoint, with the clips of an
uninterrupted training. The test uses three clips of each video. Needs `pip install "aiofeed[media]"`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import nn

import aiofeed

WIDTH, HEIGHT, SIZE, FRAMES, BATCH_SIZE = 96, 72, 32, 4, 8
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def write_video(path: Path, direction: tuple[int, int], numbers: np.random.Generator) -> None:
    """Write a video of 30 to 60 frames, in which a square moves at a random speed around a noisy background."""
    background = numbers.integers(0, 90, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    square = numbers.integers(120, 255, (24, 24, 3), dtype=np.uint8)
    place, speed = numbers.uniform(0, 90, 2), numbers.uniform(1.0, 2.0)
    with av.open(path, "w") as output:
        stream: Any = output.add_stream("libx264", rate=25, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", 25
        for at in range(int(numbers.integers(30, 60))):
            x, y = (int(start + side * speed * at) for start, side in zip(place, direction, strict=True))
            picture = background.copy()
            picture[np.ix_(np.arange(y, y + 24) % HEIGHT, np.arange(x, x + 24) % WIDTH)] = square
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))


def write_videos(folder: Path, count: int, seed: int) -> aiofeed.Files:
    """Write videos, and return them with their labels."""
    folder.mkdir()
    numbers = np.random.default_rng(seed)
    labels = [number % len(DIRECTIONS) for number in range(count)]
    paths = [folder / f"{number:03}-{list(DIRECTIONS)[label]}.mp4" for number, label in enumerate(labels)]
    for path, label in zip(paths, labels, strict=True):
        write_video(path, list(DIRECTIONS.values())[label], numbers)
    return aiofeed.Files(paths, labels)


def new_model() -> nn.Module:
    """Return a network for [N, 3, frames, H, W]."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(3, 16, (3, 5, 5), (1, 2, 2), (1, 2, 2)),
        nn.ReLU(),
        nn.Conv3d(16, 32, 3, (2, 2, 2), 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(32, len(DIRECTIONS)),
    )


def as_input(video: torch.Tensor) -> torch.Tensor:
    """Return clips, uint8 [N, frames, 3, H, W], as the network takes them."""
    return video.transpose(1, 2).float() / 127.5 - 1


def new_feeder(files: aiofeed.Files) -> aiofeed.Feeder[Any]:
    """Return a feeder of random clips and their labels."""
    clips = aiofeed.Clips(files, FRAMES, stride=2, size=SIZE)
    return aiofeed.Feeder(clips, batch_size=BATCH_SIZE, shuffle=True, drop_last=True, seed=1)


def train(files: aiofeed.Files, checkpoint: Path, first: int, last: int) -> list[int]:
    """Train from step ``first``, with the checkpoint unless it is 0, to ``last``; return a sum of each batch."""
    model, seen = new_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with new_feeder(files) as feeder:
        if first:
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            feeder.load_state_dict(saved["feeder"])
        for video, label in feeder.steps(last - first):
            loss = nn.functional.cross_entropy(model(as_input(video)), label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            seen.append(int(video.sum(dtype=torch.int64)))
        print(f"steps {first} to {last}, epoch {feeder.epoch}: loss {loss.item():.3f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "feeder": feeder.state_dict()}
        torch.save(state, checkpoint)
    return seen


@torch.no_grad()
def accuracy(files: aiofeed.Files, checkpoint: Path) -> float:
    """Return the share of videos that the mean of three clips classifies."""
    model = new_model()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    right = 0
    with aiofeed.Feeder(aiofeed.Clips(files, FRAMES, 2, per_video=3, size=SIZE), batch_size=BATCH_SIZE) as feeder:
        for video, label in feeder:  # [N, 3, frames, 3, H, W]
            scores = model(as_input(video.flatten(0, 1))).unflatten(0, (-1, 3)).mean(dim=1)
            right += int((scores.argmax(dim=1) == label).sum())
    return right / len(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="steps of the training (default: 80)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # more threads have no work with so small a model
    with tempfile.TemporaryDirectory() as name:
        files = write_videos(Path(name, "train"), 48, seed=0)
        checkpoint = Path(name, "checkpoint.pt")
        seen = train(files, checkpoint, 0, steps // 2) + train(files, checkpoint, steps // 2, steps)
        print(f"accuracy on other videos: {accuracy(write_videos(Path(name, 'test'), 24, seed=1), checkpoint):.0%}")
        with new_feeder(files) as feeder:
            whole = [int(video.sum(dtype=torch.int64)) for video, _ in feeder.steps(steps)]
    print(f"the clips are those of one uninterrupted training: {seen == whole}")


if __name__ == "__main__":
    main()
