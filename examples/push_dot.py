"""A small policy learns to push a dot to the middle of a canvas, from recorded episodes with two cameras.

The script writes episodes as a LeRobot data set (version 3.0): a dot is pushed to the middle, seen by a camera and by
its mirror image. From two frames of each camera, 0.1 s apart, the policy predicts the next four pushes. Training is
stopped after half of its steps and resumed from a checkpoint, with the moments of an uninterrupted training. Needs
`pip install "aiofeed[media,parquet]"`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import nn

import aiofeed

SIZE, FPS, LENGTH, BATCH_SIZE, PUSHES = 64, 10, 24, 16, 4
CAMERAS = ("observation.images.front", "observation.images.mirror")
WINDOWS = {camera: [-0.1, 0.0] for camera in CAMERAS} | {"action": [step / FPS for step in range(PUSHES)]}


def record(numbers: np.random.Generator) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the places of a dot and the pushes that bring it to the middle, [LENGTH, 2]."""
    place, places, pushes = numbers.uniform(-0.8, 0.8, 2), [], []
    for _ in range(LENGTH):
        push = np.clip(-0.4 * place, -0.15, 0.15)
        places.append(place)
        pushes.append(push * 5)
        place = place + push
    return np.array(places, np.float32), np.array(pushes, np.float32)


def draw(place: np.ndarray[Any, Any], background: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the picture of a dot, uint8 [SIZE, SIZE, 3]."""
    picture, [x, y] = background.copy(), ((place + 1) / 2 * (SIZE - 8)).astype(int)
    picture[y : y + 8, x : x + 8] = (230, 60, 30)
    return picture


def write_dataset(root: Path, episodes: int, seed: int) -> Path:
    """Write episodes, all in one file of rows and one video for each camera."""
    numbers = np.random.default_rng(seed)
    recorded = [record(numbers) for _ in range(episodes)]
    rows = {
        "observation.state": [place for places, _ in recorded for place in places],
        "action": [push for _, pushes in recorded for push in pushes],
        "timestamp": [np.float32(at / FPS) for _ in recorded for at in range(LENGTH)],
        "frame_index": [at for _ in recorded for at in range(LENGTH)],
        "episode_index": [episode for episode in range(episodes) for _ in range(LENGTH)],
        "index": list(range(episodes * LENGTH)),
        "task_index": [0] * (episodes * LENGTH),
    }
    described: dict[str, list[Any]] = {
        "episode_index": list(range(episodes)),
        "tasks": [["push the dot to the middle"]] * episodes,
        "length": [LENGTH] * episodes,
        "data/chunk_index": [0] * episodes,
        "data/file_index": [0] * episodes,
        "dataset_from_index": [episode * LENGTH for episode in range(episodes)],
        "dataset_to_index": [(episode + 1) * LENGTH for episode in range(episodes)],
    }
    features: dict[str, Any] = {name: {"dtype": "float32", "shape": [2]} for name in ("observation.state", "action")}
    features["timestamp"] = {"dtype": "float32", "shape": [1]}
    features |= {name: {"dtype": "int64", "shape": [1]} for name in list(rows)[3:]}
    background = numbers.integers(0, 90, (SIZE, SIZE, 3), dtype=np.uint8)
    for camera in CAMERAS:
        features[camera] = {"dtype": "video", "shape": [SIZE, SIZE, 3], "info": {"video.g": 2}}
        described[f"videos/{camera}/chunk_index"] = described[f"videos/{camera}/file_index"] = [0] * episodes
        described[f"videos/{camera}/from_timestamp"] = [episode * LENGTH / FPS for episode in range(episodes)]
        path = root / f"videos/{camera}/chunk-000/file-000.mp4"
        path.parent.mkdir(parents=True)
        with av.open(path, "w") as output:
            stream: Any = output.add_stream("libx264", rate=FPS, options={"preset": "ultrafast"})
            stream.width, stream.height, stream.pix_fmt, stream.gop_size = SIZE, SIZE, "yuv420p", 2
            for place in rows["observation.state"]:
                picture = draw(place, background)
                picture = picture if camera == CAMERAS[0] else np.ascontiguousarray(picture[:, ::-1])
                output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            output.mux(stream.encode(None))
    tables = {
        "meta/tasks.parquet": {"task_index": [0], "task": ["push the dot to the middle"]},
        "meta/episodes/chunk-000/file-000.parquet": described,
        "data/chunk-000/file-000.parquet": rows,
    }
    for name, table in tables.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({column: list(values) for column, values in table.items()}), root / name)
    info = {
        "codebase_version": "v3.0",
        "fps": FPS,
        "total_episodes": episodes,
        "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


class Policy(nn.Module):
    """Predicts the next pushes from two frames of each camera."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(len(CAMERAS) * 2 * 3, 16, 8, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 15 * 15, 64),
            nn.ReLU(),
            nn.Linear(64, PUSHES * 2),
        )

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        pictures = torch.cat([batch[camera].flatten(1, 2) for camera in CAMERAS], 1)
        pushes: torch.Tensor = self.layers(pictures.float() / 255 - 0.5)
        return pushes.unflatten(1, (PUSHES, 2))


def loss_of(policy: Policy, batch: dict[str, Any]) -> torch.Tensor:
    """Return the mean squared error of the pushes that are not padding."""
    errors = (policy(batch) - batch["action"]).square().mean(2)
    return errors[~batch["action_is_pad"]].mean()


def new_feeder(root: Path) -> aiofeed.Feeder[Any]:
    """Return a feeder of moments, mixed over runs of rows whose frames are decoded once."""
    return aiofeed.Feeder(aiofeed.Episodes(root, WINDOWS), batch_size=BATCH_SIZE, shuffle="window", drop_last=True)


def train(root: Path, checkpoint: Path, first: int, last: int) -> list[list[int]]:
    """Train from step ``first``, with the checkpoint unless it is 0, to ``last``; return the moments of each batch."""
    policy, seen = Policy(), []
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    with new_feeder(root) as feeder:
        if first:
            saved = torch.load(checkpoint, weights_only=True)
            policy.load_state_dict(saved["policy"])
            optimizer.load_state_dict(saved["optimizer"])
            feeder.load_state_dict(saved["feeder"])
        for batch in feeder.steps(last - first):
            loss = loss_of(policy, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            seen.append(batch["index"].tolist())
        print(f"steps {first} to {last}, epoch {feeder.epoch}: loss {loss.item():.4f}")
        state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "feeder": feeder.state_dict()}
        torch.save(state, checkpoint)
    return seen


@torch.no_grad()
def distance(checkpoint: Path, root: Path) -> float:
    """Return the error of the policy on other episodes, as a share of that without any push."""
    policy = Policy()
    policy.load_state_dict(torch.load(checkpoint, weights_only=True)["policy"])
    with aiofeed.Feeder(aiofeed.Episodes(root, WINDOWS), batch_size=BATCH_SIZE) as feeder:
        batches = list(feeder)
    found = sum(loss_of(policy, batch).item() for batch in batches)
    return found / sum(batch["action"][~batch["action_is_pad"]].square().mean().item() for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of the training (default: 200)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # more threads have no work with so small a model
    with tempfile.TemporaryDirectory() as name:
        root, checkpoint = write_dataset(Path(name, "train"), 40, seed=0), Path(name, "checkpoint.pt")
        seen = train(root, checkpoint, 0, steps // 2) + train(root, checkpoint, steps // 2, steps)
        print(f"error on other episodes: {distance(checkpoint, write_dataset(Path(name, 'test'), 8, seed=0)):.0%}")
        with new_feeder(root) as feeder:
            whole = [batch["index"].tolist() for batch in feeder.steps(steps)]
    print(f"the moments are those of one uninterrupted training: {seen == whole}")


if __name__ == "__main__":
    main()
