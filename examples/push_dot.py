"""A robot policy learns to push a dot to the left or to the right, from recorded episodes with two cameras.

The script generates a data set in the layout of LeRobot 3.0: a scripted pusher, seen from the top and from its wrist,
with several episodes in each mp4 file. A small network learns the next actions from windows of both cameras and of the
state. Training is stopped in the middle of an epoch and resumed with the batches of an uninterrupted training. At the
end the policy pushes dots that it never saw. Needs `pip install "aiofeed[media,parquet]"`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import nn

import aiofeed

TOP, WRIST, STATE, ACTION = "observation.images.top", "observation.images.wrist", "observation.state", "action"
FPS, SIZES, PER_VIDEO, BATCH_SIZE = 10, {TOP: 64, WRIST: 32}, 5, 32
TASKS = ["push the dot to the left", "push the dot to the right"]
CHUNK, SPEED, TOUCH = 4, 3.0, 8.0  # actions that the policy predicts; pixels of a step; distance of a contact
WINDOWS = {
    TOP: [-0.1, 0.0],  # seconds from the moment: the frame before it, and its own
    WRIST: [0.0],
    ACTION: [step / FPS for step in range(CHUNK)],
}
Array: TypeAlias = NDArray[Any]


class Canvas:
    """A canvas of 64 x 64 with a dot and a pusher, which moves the dot where it touches it."""

    def __init__(self, numbers: np.random.Generator) -> None:
        self.task = int(numbers.integers(len(TASKS)))
        self.direction = 2.0 * self.task - 1
        self.dot = numbers.uniform((24, 20), (40, 44))
        angle = numbers.uniform(0, 2 * np.pi)
        self.pusher = self.dot + 16 * np.array([np.cos(angle), np.sin(angle)])

    @property
    def is_done(self) -> bool:
        """Whether the dot is where the task says."""
        return bool(self.direction * (self.dot[0] - 32) > 20)

    def expert(self) -> Array:
        """Return the action of the demonstrations: go around the dot, and push it from behind."""
        behind = self.direction * (self.dot[0] - self.pusher[0])
        side = self.pusher[1] - self.dot[1]
        if behind > TOUCH or (behind > TOUCH / 2 and abs(side) < TOUCH):
            x, y = (1.0 if abs(side) < 2 else 0.0), -side / SPEED
        else:
            x, y = (-1.0 if abs(side) > TOUCH else 0.0), (0.0 if abs(side) > TOUCH + 2 else np.copysign(1.0, side))
        return np.array([x * self.direction, np.clip(y, -1, 1)], np.float32)

    def step(self, action: Array) -> None:
        """Move the pusher, and the dot if they touch."""
        self.pusher = np.clip(self.pusher + SPEED * np.clip(action, -1, 1), 3, 61)
        apart = self.dot - self.pusher
        distance = max(float(np.hypot(*apart)), 1e-3)
        if distance < TOUCH:
            self.dot = self.pusher + apart / distance * TOUCH

    def state(self) -> Array:
        """Return the place of the pusher."""
        return np.array(self.pusher / 32 - 1, np.float32)

    def frames(self) -> dict[str, Array]:
        """Return what each camera sees, uint8 [H, W, 3]."""
        rows, columns = np.mgrid[-16:80, -16:80]
        canvas = np.full((96, 96, 3), 40, np.uint8)
        canvas[16:80, 16:80] = 90
        for place, radius, colour in ((self.dot, 5, (240, 60, 40)), (self.pusher, 3, (60, 220, 240))):
            canvas[(columns - place[0]) ** 2 + (rows - place[1]) ** 2 < radius**2] = colour
        left, top = self.pusher.astype(int)
        return {TOP: canvas[16:80, 16:80], WRIST: canvas[top : top + 32, left : left + 32]}


# --- the data set -----------------------------------------------------------------------------------------------------


def write_table(path: Path, rows: list[dict[str, Any]], kinds: dict[str, pa.DataType] | None = None) -> None:
    """Write a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: pa.array([row[name] for row in rows], (kinds or {}).get(name)) for name in rows[0]}
    pq.write_table(pa.table(columns), path)


def write_videos(folder: Path, number: int, frames: dict[str, list[Array]]) -> None:
    """Write the frames of several episodes to one file for each camera."""
    for camera, pictures in frames.items():
        path = folder / f"videos/{camera}/chunk-000/file-{number:03}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(path, "w") as output:
            stream: Any = output.add_stream("libx264", rate=FPS, options={"preset": "ultrafast", "crf": "18"})
            stream.width, stream.height, stream.pix_fmt, stream.gop_size = SIZES[camera], SIZES[camera], "yuv420p", 8
            for picture in pictures:
                output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
            output.mux(stream.encode(None))


def write_dataset(folder: Path, count: int, seed: int) -> None:
    """Write ``count`` episodes in the layout of LeRobot 3.0."""
    numbers = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    episodes: list[dict[str, Any]] = []
    frames: dict[str, list[Array]] = {camera: [] for camera in SIZES}
    for episode in range(count):
        canvas, first, seconds, at = Canvas(numbers), len(rows), len(frames[TOP]) / FPS, 0
        while not canvas.is_done and at < 60:
            action = canvas.expert()
            indices = {"frame_index": at, "episode_index": episode, "index": len(rows), "task_index": canvas.task}
            rows.append({STATE: canvas.state(), ACTION: action, "timestamp": at / FPS, **indices})
            for camera, picture in canvas.frames().items():
                frames[camera].append(picture)
            # A demonstration that goes astray at times shows how to return.
            canvas.step(action + numbers.normal(0, 0.3, 2))
            at += 1
        row = {"episode_index": episode, "tasks": [TASKS[canvas.task]], "length": at}
        row |= {"data/chunk_index": 0, "data/file_index": 0, "dataset_from_index": first, "dataset_to_index": len(rows)}
        for camera in SIZES:
            place = {"chunk_index": 0, "file_index": episode // PER_VIDEO, "from_timestamp": seconds}
            row |= {f"videos/{camera}/{name}": value for name, value in place.items()}
            row[f"videos/{camera}/to_timestamp"] = seconds + at / FPS
        episodes.append(row)
        if episode % PER_VIDEO == PER_VIDEO - 1 or episode == count - 1:
            write_videos(folder, episode // PER_VIDEO, frames)
            frames = {camera: [] for camera in SIZES}

    pair = pa.list_(pa.float32(), 2)
    kinds = {STATE: pair, ACTION: pair, "timestamp": pa.float32()}
    write_table(folder / "data/chunk-000/file-000.parquet", rows, kinds)
    write_table(folder / "meta/episodes/chunk-000/file-000.parquet", episodes)
    tasks = pa.table({"task_index": list(range(len(TASKS))), "task": TASKS})
    # LeRobot reads the table with pandas, and takes the texts from its index.
    column = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    index = {"index_columns": ["task"], "columns": [column], "column_indexes": []}
    pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(index)}), folder / "meta/tasks.parquet")
    features: dict[str, Any] = {
        camera: {"dtype": "video", "shape": [size, size, 3], "names": ["height", "width", "channels"]}
        for camera, size in SIZES.items()
    }
    features |= {name: {"dtype": "float32", "shape": [2], "names": ["x", "y"]} for name in (STATE, ACTION)}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    info = {
        "codebase_version": "v3.0",
        "robot_type": "dot",
        "fps": FPS,
        "total_episodes": count,
        "total_frames": len(rows),
        "total_tasks": len(TASKS),
        "chunks_size": 1000,
        "splits": {"train": f"0:{count}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": features,
    }
    (folder / "meta/info.json").write_text(json.dumps(info, indent=4))


# --- the policy -------------------------------------------------------------------------------------------------------


def eye(channels: int) -> nn.Module:
    """Return a network for the frames of a camera."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 6, 4, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(64),
        nn.ReLU(),
    )


class Policy(nn.Module):
    """Predicts the next actions, [N, CHUNK, 2], from frames, state and task."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.wrist = eye(6), eye(3)
        self.head = nn.Sequential(nn.Linear(64 + 64 + 3, 128), nn.ReLU(), nn.Linear(128, CHUNK * 2))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        goal = torch.tensor([[float(task.endswith("right"))] for task in batch["task"]])
        seen = [self.top(batch[TOP].flatten(1, 2)), self.wrist(batch[WRIST]), batch[STATE], goal]
        actions: torch.Tensor = self.head(torch.cat(seen, 1)).unflatten(1, (CHUNK, 2))
        return actions


def new_policy() -> Policy:
    """Return a policy with the same weights each time."""
    torch.manual_seed(0)
    policy = Policy()
    empty = {TOP: torch.zeros(1, 2, 3, 64, 64), WRIST: torch.zeros(1, 3, 32, 32), STATE: torch.zeros(1, 2)}
    policy({**empty, "task": TASKS[:1]})
    return policy


def as_floats(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose frames are floats from 0 to 1; a feeder calls it on the device."""
    return {**batch, **{camera: batch[camera].float() / 255 for camera in SIZES}}


def new_feeder(folder: Path) -> aiofeed.Feeder[Any]:
    """Return a feeder of the moments of the episodes, each with its windows."""
    episodes = aiofeed.Episodes(folder, WINDOWS)
    return aiofeed.Feeder(
        episodes, batch_size=BATCH_SIZE, shuffle="window", drop_last=True, seed=1, transform=as_floats
    )


def digest(batch: dict[str, Any]) -> tuple[list[int], float]:
    """Return the rows of a batch, and the sum of its pixels."""
    return batch["index"].tolist(), sum(batch[camera].double().sum().item() for camera in SIZES)


def train(folder: Path, checkpoint: Path, first: int, last: int) -> list[Any]:
    """Train from step ``first``, with the checkpoint unless it is 0, to ``last``; return a digest of each batch."""
    policy, seen, began = new_policy(), [], time.perf_counter()
    optimizer = torch.optim.AdamW(policy.parameters(), 2e-3)
    losses = []
    with new_feeder(folder) as feeder:
        if first:
            saved = torch.load(checkpoint, weights_only=True)
            policy.load_state_dict(saved["policy"])
            optimizer.load_state_dict(saved["optimizer"])
            feeder.load_state_dict(saved["feeder"])
        for batch in feeder.steps(last - first):
            is_action = ~batch[f"{ACTION}_is_pad"].unsqueeze(2)  # beyond the episode there are copies of the last one
            loss = ((policy(batch) - batch[ACTION]).abs() * is_action).sum() / is_action.sum() / 2
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen.append(digest(batch))
        state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "feeder": feeder.state_dict()}
        torch.save(state, checkpoint)
        rate = (last - first) * BATCH_SIZE / (time.perf_counter() - began)
        begin, end = np.mean(losses[:10]), np.mean(losses[-10:])
        print(f"steps {first} to {last}, epoch {feeder.epoch}: loss {begin:.3f} to {end:.3f}, {rate:.0f} samples/s")
        print("  " + str(feeder.explain()).splitlines()[0])
    return seen


@torch.no_grad()
def success(policy: Policy, count: int, seed: int) -> float:
    """Return the share of new dots that the policy pushes to their side in 80 steps."""
    numbers = np.random.default_rng(seed)
    canvases = [Canvas(numbers) for _ in range(count)]
    before = [canvas.frames()[TOP] for canvas in canvases]
    for _ in range(80):
        views = [canvas.frames() for canvas in canvases]
        tops = [np.stack([old, view[TOP]]) for old, view in zip(before, views, strict=True)]
        frames = {TOP: np.stack(tops), WRIST: np.stack([view[WRIST] for view in views])}
        batch: dict[str, Any] = {name: torch.from_numpy(array).movedim(-1, -3) for name, array in frames.items()}
        batch[STATE] = torch.from_numpy(np.stack([canvas.state() for canvas in canvases]))
        batch["task"] = [TASKS[canvas.task] for canvas in canvases]
        for canvas, actions in zip(canvases, policy(as_floats(batch)).numpy(), strict=True):
            if not canvas.is_done:
                canvas.step(actions[0])
        before = [view[TOP] for view in views]
    return sum(canvas.is_done for canvas in canvases) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an empty or new folder for the data set (default: a temporary one)")
    parser.add_argument("--episodes", type=int, default=60, help="episodes to record (default: 60)")
    parser.add_argument("--steps", type=int, default=300, help="steps of the training (default: 300)")
    parser.add_argument("--quick", action="store_true", help="few episodes and steps, which train no useful policy")
    options = parser.parse_args()
    count, steps, dots = (12, 40, 5) if options.quick else (options.episodes, options.steps, 25)
    torch.set_num_threads(1)  # more threads have no work with so small a network
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder, checkpoint = options.data or temporary / "push-dot", temporary / "checkpoint.pt"
        write_dataset(folder, count, seed=0)
        print(f"{count} episodes, {len(aiofeed.Episodes(folder))} moments, {len(SIZES)} cameras")
        half = steps // 2
        seen = train(folder, checkpoint, 0, half) + train(folder, checkpoint, half, steps)
        policy = new_policy()
        policy.load_state_dict(torch.load(checkpoint, weights_only=True)["policy"])
        print(f"new dots that are pushed to their side: {success(policy, dots, seed=1):.0%}")
        with new_feeder(folder) as feeder:
            whole = [digest(batch) for batch in feeder.steps(steps)]
    print(f"the batches are those of one uninterrupted training: {seen == whole}")


if __name__ == "__main__":
    main()
