"""Makes the LeRobot data sets in this folder, and hashes of their items, with LeRobot itself; see README.md.

Runs under LeRobot 0.6.1: ``HF_HUB_OFFLINE=1 python tests/data/lerobot/make.py``. With ``--check`` the data sets stay,
and the items that LeRobot reads from them are compared with the hashes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from lerobot.configs.video import RGBEncoderConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset

HERE = Path(__file__).parent
TOP, WRIST = "observation.images.top", "observation.images.wrist"
STATE, ACTION, REWARD = "observation.state", "action", "next.reward"
SIZES = {TOP: (50, 70), WRIST: (38, 54)}  # Height and width: even, as yuv420p asks for, but no multiples of 4.
TASKS = ["push the dot to the left", "push the dot to the right", "rest"]


def vector(dtype: str, *shape: int) -> dict[str, Any]:
    """Describe a column as LeRobot's features do."""
    return {"dtype": dtype, "shape": shape, "names": None}


COLUMNS = {STATE: vector("float32", 3), ACTION: vector("float32", 2), REWARD: vector("float32", 1)}
# LeRobot reads all integers as int64 and all floats as float32.
ODD_COLUMNS = COLUMNS | {
    "next.done": vector("bool", 1),
    "observation.buttons": vector("uint8", 4),
    "observation.force": vector("float64", 2, 3),
    "observation.grip": vector("float64", 1),
    "observation.mode": vector("int32", 1),
}
# Name: frames per second, type of the cameras, encoder, columns, lengths of the episodes. Limits of files are in MB.
DATASETS: dict[str, dict[str, Any]] = {
    "av1": {
        "fps": 10,
        "cameras": "video",
        "encoder": RGBEncoderConfig(),
        "columns": COLUMNS,
        "lengths": [9, 14, 5, 11, 8, 12],
        "limits": {"video_files_size_in_mb": 0.024, "data_files_size_in_mb": 0.006},
    },
    "h264": {
        "fps": 30,
        "cameras": "video",
        "encoder": RGBEncoderConfig(vcodec="h264", g=8, crf=26, extra_options={"bf": 2}),
        "columns": ODD_COLUMNS,
        "lengths": [20, 13, 5, 31, 17],
        "limits": {"video_files_size_in_mb": 0.016},
    },
    "images": {
        "fps": 10,
        "cameras": "image",
        "encoder": None,
        "columns": COLUMNS,
        "lengths": [4, 3],
        "limits": {},
    },
}

# Offsets in steps of a frame; seconds in expected.json.
WINDOWS: dict[str, dict[str, list[int]]] = {
    "none": {},
    "cameras": {TOP: [-1, 0], WRIST: [-4, -2, 0]},
    "columns": {STATE: [-1, 0], ACTION: [0, 1, 2, 3, 4, 5], REWARD: [1]},
    "single": {TOP: [-1], ACTION: [0]},
    "all": {TOP: [-2, 0, 3], WRIST: [0], STATE: [-1, 0], ACTION: [-1, 0, 1, 2, 3]},
    "far": {TOP: [20, -20, 0, 0], WRIST: [-9, 1], ACTION: [-40, 40], "timestamp": [0], "next.reward": [-3, 3]},
}
IMAGE_WINDOWS = ("none", "cameras", "single")
SUBSET = [1, 3]  # ``episodes=`` of one more configuration.


def frame(rng: np.random.Generator, camera: str, texture: np.ndarray, step: int) -> np.ndarray:
    """Draw a texture that moves, and a dot."""
    height, width = SIZES[camera]
    image = np.roll(texture[camera], (step, 2 * step), (0, 1))[:height, :width]
    image = image + rng.integers(0, 12, (height, width, 1))
    row, column = (5 + 3 * step) % (height - 8), (9 + 4 * step) % (width - 8)
    image[row : row + 8, column : column + 8] = (230, 40, step % 200)
    return np.clip(image, 0, 255).astype(np.uint8)


def values(rng: np.random.Generator, columns: dict[str, Any], step: int) -> dict[str, np.ndarray]:
    """Draw the columns of a row."""
    row = {}
    for name, column in columns.items():
        drawn = rng.normal(step / 10, 1, column["shape"])
        row[name] = drawn if "float" in column["dtype"] else drawn > 0 if column["dtype"] == "bool" else 20 * abs(drawn)
    return {name: value.astype(columns[name]["dtype"]) for name, value in row.items()}


def write(root: Path, seed: int, made: dict[str, Any], **limits: float) -> None:
    """Write a data set of version 3.0."""
    features = {
        camera: {"dtype": made["cameras"], "shape": (*size, 3), "names": ["height", "width", "channels"]}
        for camera, size in SIZES.items()
    }
    rng = np.random.default_rng(seed)
    coarse = {camera: rng.integers(20, 220, (8, 8, 3)) for camera in SIZES}
    texture = {camera: np.kron(coarse[camera], np.ones((10, 10, 1), int)) for camera in SIZES}
    dataset = LeRobotDataset.create(
        repo_id="aiofeed/test",
        fps=made["fps"],
        features=features | made["columns"],
        root=root,
        robot_type="dot",
        use_videos=made["cameras"] == "video",
        rgb_encoder=made["encoder"],
        encoder_threads=1,
        **limits,
    )
    for episode, length in enumerate(made["lengths"]):
        for step in range(length):
            images = {camera: frame(rng, camera, texture, 7 * episode + step) for camera in SIZES}
            row = values(rng, made["columns"], step)
            dataset.add_frame(images | row | {"task": TASKS[(episode + step // 10) % len(TASKS)]})
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()


def to_version_2(root: Path, single: Path) -> None:
    """Lay out ``single``, which has one video per episode, as version 2.1 does, under ``root``."""
    info = json.loads((single / "meta/info.json").read_text())
    lengths, cameras = [], [key for key, feature in info["features"].items() if feature["dtype"] == "video"]
    (root / "meta").mkdir(parents=True)
    episodes = pq.read_table(single / "meta/episodes").to_pylist()
    tasks = sorted(pq.read_table(single / "meta/tasks.parquet").to_pylist(), key=lambda task: task["task_index"])
    with (root / "meta/episodes.jsonl").open("w") as lines, (root / "meta/episodes_stats.jsonl").open("w") as stats:
        for row in episodes:
            episode, length = row["episode_index"], row["length"]
            lengths.append(length)
            print(json.dumps({"episode_index": episode, "tasks": row["tasks"], "length": length}), file=lines)
            of_episode: dict[str, dict[str, Any]] = {}
            for key, value in row.items():
                if key.startswith("stats/"):
                    _, column, kind = key.split("/")
                    if kind in ("min", "max", "mean", "std", "count"):
                        of_episode.setdefault(column, {})[kind] = value
            print(json.dumps({"episode_index": episode, "stats": of_episode}), file=stats)
            chunk, file = row["data/chunk_index"], row["data/file_index"]
            data = pq.read_table(single / f"data/chunk-{chunk:03}/file-{file:03}.parquet")
            of_rows = data.filter(np.equal(data["episode_index"].to_numpy(), episode))
            (root / "data/chunk-000").mkdir(parents=True, exist_ok=True)
            pq.write_table(of_rows, root / f"data/chunk-000/episode_{episode:06}.parquet")
            for camera in cameras:
                assert row[f"videos/{camera}/from_timestamp"] == 0
                chunk, file = row[f"videos/{camera}/chunk_index"], row[f"videos/{camera}/file_index"]
                target = root / f"videos/chunk-000/{camera}/episode_{episode:06}.mp4"
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(single / f"videos/{camera}/chunk-{chunk:03}/file-{file:03}.mp4", target)
    with (root / "meta/tasks.jsonl").open("w") as lines:
        for task in tasks:
            name = task.get("task", task.get("__index_level_0__"))
            print(json.dumps({"task_index": task["task_index"], "task": name}), file=lines)
    for gone in ("data_files_size_in_mb", "video_files_size_in_mb"):
        info.pop(gone)
    info |= {
        "codebase_version": "v2.1",
        "total_videos": len(lengths) * len(cameras),
        "total_chunks": 1,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    (root / "meta/info.json").write_text(json.dumps(info, indent=4) + "\n")


def sampled(lengths: list[int]) -> list[int]:
    """List the rows whose items are recorded: three or four of each episode."""
    first = np.cumsum([0, *lengths[:-1]]).tolist()
    return sorted({a + at for a, n in zip(first, lengths, strict=True) for at in (0, 1 % n, n // 2, n - 1)})


def record(name: str, root: Path) -> list[dict[str, Any]]:
    """Read items in all configurations; each tensor becomes a hash."""
    made, records = DATASETS[name], []
    configurations = [*((windows, None) for windows in WINDOWS), ("cameras", SUBSET)]
    if made["cameras"] == "image":
        configurations = [(windows, None) for windows in IMAGE_WINDOWS]
    for windows, episodes in configurations:
        seconds = {key: [step / made["fps"] for step in steps] for key, steps in WINDOWS[windows].items()}
        of = {"root": root, "delta_timestamps": seconds or None, "episodes": episodes}
        dataset = LeRobotDataset("aiofeed/test", return_uint8=True, **of)
        scaled = LeRobotDataset("aiofeed/test", return_uint8=False, video_backend="pyav", **of)
        lengths = made["lengths"] if episodes is None else [made["lengths"][at] for at in episodes]
        fields: dict[str, list[Any]] = {}
        items = []
        for index in sampled(lengths):
            item, hashes = dataset[index], []
            for key, value in item.items():
                if isinstance(value, torch.Tensor):
                    kind = [str(value.dtype).removeprefix("torch."), list(value.shape)]
                    assert fields.setdefault(key, kind) == kind
                    hashes.append(hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16])
                    if key in SIZES and made["cameras"] == "video":
                        # The same frames with either decoder, and as floats.
                        assert torch.equal(scaled[index][key], value.type(torch.float32) / 255)
            items.append({"index": index, "task": item["task"], "sha256": hashes})
        records.append(
            {"windows": seconds, "episodes": episodes, "length": len(dataset), "fields": fields, "items": items}
        )
    return records


def main() -> None:
    """Make everything, or check it."""
    if "--check" not in sys.argv:
        for seed, (name, made) in enumerate(DATASETS.items()):
            for folder in (name, f"{name}-v2.1", f"{name}-single"):
                shutil.rmtree(HERE / folder, ignore_errors=True)
            write(HERE / name, seed, made, **made["limits"])
        single = HERE / "av1-single"
        write(single, 0, DATASETS["av1"], video_files_size_in_mb=1e-6)
        as_single = record("av1", single)
        to_version_2(HERE / "av1-v2.1", single)
        shutil.rmtree(single)
    found = {name: record(name, HERE / name) for name in DATASETS}
    if "--check" in sys.argv:
        expected = json.loads((HERE / "expected.json").read_text())
        sys.exit(0 if found == expected else "LeRobot reads other items than expected.json describes.")
    assert as_single == found["av1"]  # The folder av1-v2.1 has the same content.
    parts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
        for name, records in found.items()
    ]
    (HERE / "expected.json").write_text("{\n" + "\n],\n".join(parts) + "\n]\n}\n")


if __name__ == "__main__":
    main()
