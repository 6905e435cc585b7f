"""How fast are moments of robot episodes, from several cameras?

Generated LeRobot data sets (version 3.0) of 32 episodes of 150 frames, 640 x 480, in the page cache: AV1 with a key
frame every 2 frames, LeRobot's default, and H.264 with one every 2 and every 30. An item has the state, 16 actions, and
one frame of each of 2 or 4 cameras, or two, 0.1 s apart. ``Episodes`` in two decode threads is compared with LeRobot's
dataset in a ``DataLoader`` with two workers, if AIOFEED_LEROBOT_PYTHON is the path of its interpreter (`nox -s lerobot`
makes it). Decoded, the videos have four times the memory that ``Episodes`` may use. "20 ms" is AV1 in storage that
answers after 20 ms, beside the same from the page cache.

Targets: the global shuffle 1.8 times as fast as LeRobot, the shuffle of windows 2.7 times (AV1), 3.5 (H.264, key frame
every 2) and 6 (every 30); from storage at least 0.9 of the speed from the page cache.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

from benchmarks.data import generate
from benchmarks.figures import Figure
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.objects import options_of as storage_options
from benchmarks.objects import server

TITLE = "moments of robot episodes: 2 and 4 cameras of 640 x 480, 1 and 2 frames of each, batch 8"

LEROBOT = "AIOFEED_LEROBOT_PYTHON"
"""The environment variable with the interpreter that has LeRobot."""

GLOBAL, WINDOW, LOADER = "global shuffle", "window shuffle", "LeRobot, 2 workers"
STORAGE, CACHED, DELAY_S = "20 ms", "page cache", 0.020
BATCH, WORKERS = 8, 2
EPISODES, LENGTH, RATE = 32, 150, 30
FILES, DRAWN = 8, 2
"""The video files of a camera, and how many differ: the others are links to these."""

WIDTH, HEIGHT, DIMENSIONS, ACTIONS = 640, 480, 14, 16
CAMERAS = ("top", "wrist", "left", "right")
"""The files of the third and the fourth are links to those of the first two."""

ENCODINGS = {
    "AV1": ("libsvtav1", {"g": "2", "crf": "30", "preset": "12"}, 2.7),
    "H.264, 2": ("libx264", {"g": "2", "crf": "30"}, 3.5),
    "H.264, 30": ("libx264", {"g": "30", "crf": "30"}, 6.0),
}
"""Encoder, its options, and the target of the shuffle of windows. The number is the distance of key frames."""

READY = 4
"""Batches that are ready at the start of a round, at most: two for each worker."""

RUNS, RUN = 16, 64
"""The runs of rows that ``shuffle="window"`` mixes, and their rows: their frames are decoded in bursts."""


def run(settings: Settings) -> list[Figure]:
    figures = stored(settings)
    if os.environ.get(LEROBOT) or settings.quick:
        for encoding in ENCODINGS:
            for cameras in settings.size((2, 4), (2,)):
                for frames in settings.size((1, 2), (2,)):
                    figures += compared(settings, encoding, cameras, frames)
    return figures


def compared(settings: Settings, encoding: str, cameras: int, frames: int) -> list[Figure]:
    options = {**options_of(settings, encoding, cameras), "frames": frames}
    contenders = [
        Contender(GLOBAL, episodes, {**options, "shuffle": True}),
        Contender(WINDOW, episodes, {**options, "shuffle": "window", "least": settings.size(RUNS * RUN, 0)}),
    ]
    if lerobot := os.environ.get(LEROBOT, ""):
        contenders.append(Contender(LOADER, lerobot_loader, options, python=lerobot))
    race = interleave(contenders, settings)
    name = f"{encoding}: {cameras} cameras, {frames} frame{'s' * (frames > 1)}"
    if not lerobot:
        return race.rates("items", name)
    return [
        race.speed(GLOBAL, LOADER, 1.8, f"{name}, global"),
        race.speed(WINDOW, LOADER, ENCODINGS[encoding][2], f"{name}, window"),
        race.cpu(GLOBAL, LOADER, None, f"{name}, global"),
        race.cpu(WINDOW, LOADER, None, f"{name}, window"),
        *race.rates("items", name),
    ]


def options_of(settings: Settings, encoding: str, cameras: int) -> dict[str, Any]:
    """The data set, generated once, and how long a round takes."""
    count, length = settings.size(EPISODES, FILES), settings.size(LENGTH, 4)
    codec, options, _ = ENCODINGS[encoding]
    name = f"episodes-{codec}-{options['g']}-{count}x{length}"
    two = generate(settings.data / name, lambda root: write_dataset(root, codec, options, count, length))
    if cameras > 2:
        two = generate(settings.data / f"{name}-{cameras}", lambda root: more_cameras(two, root, cameras))
    return {"root": str(two), "cameras": cameras, "least_s": settings.size(20, 1) / 10}


def stored(settings: Settings) -> list[Figure]:
    """From storage beside the page cache."""
    options = {**options_of(settings, "AV1", 2), "frames": 2}
    figures = []
    with server("--folder", options["root"], "--delay", str(DELAY_S)) as port:
        there = {**options, "root": "s3://bucket", "options": storage_options(port)}
        for label, shuffle, least in ((GLOBAL, True, 0), (WINDOW, "window", settings.size(RUNS * RUN, 0))):
            given = {"shuffle": shuffle, "least": least}
            contenders = [Contender(STORAGE, episodes, there | given), Contender(CACHED, episodes, options | given)]
            race = interleave(contenders, settings)
            figures += [race.speed(STORAGE, CACHED, 0.9, f"{STORAGE}, {label}"), *race.rates("items", label)]
    return figures


def windows_of(cameras: int, frames: int) -> dict[str, list[float]]:
    """The offsets of an item, in seconds."""
    offsets = [-0.1, 0.0][-frames:]
    windows = {"action": [step / RATE for step in range(ACTIONS)]}
    return windows | {f"observation.images.{camera}": offsets for camera in CAMERAS[:cameras]}


@contextmanager
def endless(batches: Iterable[Any], least_s: float, least: int = 0) -> Iterator[Measure]:
    """Measures at least ``least_s`` and ``least`` items of iterating ``batches`` in an even flow."""
    from benchmarks.worker import tree_cpu_s

    iterator = iter(batches)

    def measure() -> Mapping[str, float]:
        for _ in islice(iterator, READY):
            pass
        cpu_s, started, items = tree_cpu_s(), time.perf_counter(), 0
        while items < least or time.perf_counter() - started < least_s:
            items += len(next(iterator)["action"])
        wall_s = time.perf_counter() - started
        return {"items": items, "wall_s": wall_s, "cpu_s": tree_cpu_s() - cpu_s}

    measure()
    yield measure


@contextmanager
def episodes(
    root: str, cameras: int, frames: int, least_s: float, shuffle: Any, least: int = 0, options: Any = None
) -> Iterator[Measure]:
    import aiofeed

    source = aiofeed.Episodes(root, windows_of(cameras, frames), decoded_bytes=cameras << 29, options=options)
    limits = aiofeed.Limits(decode_threads=WORKERS)
    feeder = aiofeed.Feeder(source, batch_size=BATCH, shuffle=shuffle, limits=limits)
    with feeder, endless((batch for _ in count() for batch in feeder), least_s, least) as measure:
        yield measure


@contextmanager
def lerobot_loader(root: str, cameras: int, frames: int, least_s: float) -> Iterator[Measure]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # type: ignore[import-not-found, unused-ignore]
    from torch.utils.data import DataLoader, RandomSampler

    windows = windows_of(cameras, frames)
    if frames == 1:
        windows = {"action": windows["action"]}
    dataset: Any = LeRobotDataset("aiofeed/benchmark", root=root, delta_timestamps=windows, return_uint8=True)
    sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 30)
    with endless(DataLoader(dataset, BATCH, sampler=sampler, num_workers=WORKERS), least_s) as measure:
        yield measure


def write_dataset(root: Path, codec: str, options: dict[str, str], count: int, length: int) -> None:
    """A data set of two cameras, as LeRobot writes it: several episodes in each file, one row group for each."""
    import datasets
    import numpy as np
    import pandas
    import pyarrow
    from pyarrow import parquet

    numbers, per_file = np.random.default_rng(0), count // FILES
    vectors = {"observation.state": DIMENSIONS, "action": DIMENSIONS}
    scalars = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
    features = {key: datasets.Sequence(datasets.Value("float32"), size) for key, size in vectors.items()}
    schema = datasets.Features(features | {key: datasets.Value(kind) for key, kind in scalars.items()}).arrow_schema
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    rows = []
    with parquet.ParquetWriter(root / "data/chunk-000/file-000.parquet", schema) as writer:
        for episode in range(count):
            at = np.arange(length)
            first = episode * length
            drawn = [numbers.standard_normal((length, size), np.float32) for size in vectors.values()]
            columns = [at / RATE, at, at * 0 + episode, at + first, at * 0]
            values = [*map(list, drawn), *columns]
            arrays = [pyarrow.array(value, kind) for value, kind in zip(values, schema.types, strict=True)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
            row = {"episode_index": episode, "tasks": ["push"], "length": length}
            row |= {"data/chunk_index": 0, "data/file_index": 0}
            row |= {"dataset_from_index": first, "dataset_to_index": first + length}
            file, start = divmod(episode, per_file)
            for camera in CAMERAS:
                key, start_s = f"videos/observation.images.{camera}", start * length / RATE
                row |= {f"{key}/chunk_index": 0, f"{key}/file_index": file}
                row |= {f"{key}/from_timestamp": start_s, f"{key}/to_timestamp": start_s + length / RATE}
            rows.append(row)
    parquet.write_table(pyarrow.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")
    pandas.DataFrame({"task_index": [0]}, index=pandas.Index(["push"], name="task")).to_parquet(
        root / "meta/tasks.parquet"
    )
    for number, camera in enumerate(CAMERAS[:2]):
        folder = video_folder(root, camera)
        folder.mkdir(parents=True)
        for file in range(DRAWN):
            write_video(folder / f"file-{file:03}.mp4", codec, options, per_file * length, length, 2 * file + number)
        for file in range(DRAWN, FILES):
            os.link(folder / f"file-{file % DRAWN:03}.mp4", folder / f"file-{file:03}.mp4")
    write_info(root, count, length, 2, int(options["g"]))


def video_folder(root: Path, camera: str) -> Path:
    return root / f"videos/observation.images.{camera}/chunk-000"


@cache
def texture_and_noise() -> tuple[Any, Any]:
    """A texture of 1024 x 1024 pixels, as smooth as the pictures of a webcam, and the noise of a sensor."""
    import numpy as np

    numbers, size = np.random.default_rng(0), 1024
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(size), np.fft.fftfreq(size), indexing="ij"))
    spectrum = np.fft.fft2(numbers.standard_normal((3, size, size))) / (frequency + 1 / size) ** 1.5
    texture = np.fft.ifft2(spectrum).real
    texture = 128 + 50 * texture / texture.std(axis=(1, 2), keepdims=True)
    return texture.transpose(1, 2, 0).astype(np.int16), numbers.normal(0, 1.5, (size, size, 3)).astype(np.int16)


def write_video(path: Path, codec: str, options: dict[str, str], frames: int, length: int, seed: int) -> None:
    """The texture, which moves, with noise; another part of it in each episode."""
    import av
    import numpy as np

    numbers = np.random.default_rng(seed)
    texture, noise = texture_and_noise()
    row, column = numbers.integers(500), numbers.integers(380)
    with av.open(path, "w", format="mp4") as output:
        stream: Any = output.add_stream(codec, rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for at in range(frames):
            down, right = (row + 37 * (at // length) + at % length) % 500, (column + 2 * (at % length)) % 380
            low, left = numbers.integers(500), numbers.integers(380)
            picture = texture[down : down + HEIGHT, right : right + WIDTH] + noise[low:, left:][:HEIGHT, :WIDTH]
            frame = av.VideoFrame.from_ndarray(picture.clip(0, 255).astype(np.uint8), format="rgb24")
            if at % length == 0:
                frame.pict_type = av.video.frame.PictureType.I
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def more_cameras(two: Path, root: Path, cameras: int) -> None:
    """A data set with more cameras, which show the same."""
    for folder in ("data", "meta"):
        shutil.copytree(two / folder, root / folder)
    for number, camera in enumerate(CAMERAS[:cameras]):
        shutil.copytree(video_folder(two, CAMERAS[number % 2]), video_folder(root, camera), copy_function=os.link)
    info = json.loads((two / "meta/info.json").read_text())
    group = info["features"][f"observation.images.{CAMERAS[0]}"]["info"]["video.g"]
    write_info(root, info["total_episodes"], info["total_frames"] // info["total_episodes"], cameras, group)


def write_info(root: Path, count: int, length: int, cameras: int, group: int) -> None:
    camera: dict[str, Any] = {"dtype": "video", "shape": [HEIGHT, WIDTH, 3], "names": ["height", "width", "channels"]}
    camera |= {"info": {"video.fps": RATE, "video.g": group}}
    features = {f"observation.images.{name}": camera for name in CAMERAS[:cameras]}
    for name in ("observation.state", "action"):
        features[name] = {"dtype": "float32", "shape": [DIMENSIONS], "names": None}
    for name in ("timestamp", "frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
    info = {
        "codebase_version": "v3.0",
        "robot_type": "dot",
        "fps": RATE,
        "features": features,
        "total_episodes": count,
        "total_frames": count * length,
        "total_tasks": 1,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "splits": {"train": f"0:{count}"},
    }
    (root / "meta/info.json").write_text(json.dumps(info, indent=4))
