"""``Episodes``: windows over the episodes of LeRobot data sets, at a path and at a URL."""

import hashlib
import io
import json
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import aiofeed
from aiofeed import Episodes, Feeder, Limits, Mixture
from aiofeed.episodes import videos
from aiofeed.episodes.moments import RUNS
from aiofeed.media.frames import FrameIndex, FramePool, Span
from tests.support.fault_server import FaultServer
from tests.support.media_files import cut, shortened, video
from tests.support.mutations import mutated

# `make test-long` sets this.
EXAMPLES = int(os.environ.get("AIOFEED_EXAMPLES", "240")) // 20
DATA = Path(__file__).parents[1] / "data/lerobot"
EXPECTED = json.loads((DATA / "expected.json").read_text())
TOP, WRIST = "observation.images.top", "observation.images.wrist"
WINDOWS = {TOP: [-0.1, 0.0], "observation.state": [-0.1, 0.0], "action": [0.0, 0.1, 0.2]}


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]


def assert_expected(episodes: Episodes, configuration: Mapping[str, Any]) -> None:
    assert len(episodes) == configuration["length"]
    for item in configuration["items"]:
        sample = episodes[item["index"]]
        assert sample.pop("task") == item["task"]
        layout = {name: [str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in sample.items()}
        assert layout == configuration["fields"]
        assert [digest(sample[name]) for name in configuration["fields"]] == item["sha256"]


def assert_items(batch: Mapping[str, Any], episodes: Episodes) -> list[int]:
    """Check that a batch has the items of the numbers in its column ``index``, and return these."""
    numbers: list[int] = batch["index"].tolist()
    for at, number in enumerate(numbers):
        for name, value in episodes[number].items():
            found = batch[name][at]
            assert found == value if name == "task" else torch.equal(found, value), (name, number)
    return numbers


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of a data set to damage."""
    return Path(shutil.copytree(DATA / "av1", tmp_path / "av1"))


def change_episodes(root: Path, column: str, change: Callable[[list[Any]], list[Any]]) -> None:
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = parquet.read_table(path)
    at, kind = table.column_names.index(column), table.schema.field(column).type
    changed = pa.array(change(table.column(column).to_pylist()), kind)
    parquet.write_table(table.set_column(at, column, changed), path)


# --- items


@pytest.mark.parametrize(("root", "name"), [("av1", "av1"), ("av1-v2.1", "av1"), ("h264", "h264")])
def test_items_equal_those_of_lerobot(root: str, name: str) -> None:
    """Items have LeRobot's fields, shapes, dtypes and bytes, in version 3.0 and 2.1, for any windows and episodes."""
    for configuration in EXPECTED[name]:
        episodes = Episodes(DATA / root, configuration["windows"], episodes=configuration["episodes"])
        assert_expected(episodes, configuration)


@pytest.mark.parametrize("shuffle", [True, False, "window:2"])
def test_batches_have_the_items(shuffle: Any) -> None:
    """Each order gives every item once, with the frames of all its cameras and a list of tasks."""
    episodes = Episodes(DATA / "av1", WINDOWS, run=4)
    with Feeder(episodes, batch_size=8, shuffle=shuffle) as feeder:
        assert sorted(number for batch in feeder for number in assert_items(batch, episodes)) == list(range(59))


@pytest.mark.parametrize("shuffle", [True, "window:2"])
def test_worker_processes_give_the_same_batches(shuffle: Any, forked_workers: None) -> None:
    """Workers decode with decoders and frames of their own."""
    episodes = Episodes(DATA / "av1", WINDOWS, episodes=[0, 2], run=4)
    batches = [Feeder(episodes, batch_size=8, shuffle=shuffle, engine=engine) for engine in ("thread", "process:2")]
    here, there = [[batch["index"].tolist() for batch in feeder] for feeder in batches]
    assert here == there
    for feeder in batches:
        feeder.close()


def test_resume_is_exact_within_a_mixed_window() -> None:
    """A state in the middle of an epoch of ``shuffle="window"`` continues with the same batches."""
    episodes = Episodes(DATA / "av1", WINDOWS, run=4)
    with Feeder(episodes, batch_size=8, shuffle="window:2", seed=3) as feeder:
        iterator = iter(feeder)
        _ = [next(iterator) for _ in range(3)]
        state = json.loads(json.dumps(feeder.state_dict()))
        rest = [batch["index"].tolist() for batch in iterator]
    with Feeder(Episodes(DATA / "av1", WINDOWS, run=4), batch_size=8, shuffle="window:2", seed=3) as resumed:
        resumed.load_state_dict(state)
        assert [assert_items(batch, episodes) for batch in resumed] == rest


# --- decode once


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Counts how often each key-frame group is decoded: codec and first byte."""
    counts: Counter[tuple[str, int]] = Counter()
    decode = FrameIndex.decode

    def count(index: FrameIndex, span: Span, data: bytes) -> dict[int, Any]:
        counts[data[:64].hex(), span.start] += 1
        return decode(index, span, data)

    monkeypatch.setattr(FrameIndex, "decode", count)
    return counts


@pytest.mark.parametrize("shuffle", [False, "window:2"])
def test_neighbours_share_frames(shuffle: Any, decoded: Counter[tuple[str, int]]) -> None:
    """In order and in mixed windows each key-frame group is decoded once, whatever number of moments need it."""
    episodes = Episodes(DATA / "h264", {TOP: [-0.1, 0.0]}, features=[TOP, "action"], run=16)
    with Feeder(episodes, batch_size=8, shuffle=shuffle) as feeder:
        assert sum(len(batch["action"]) for batch in feeder) == len(episodes)
    assert decoded
    assert set(decoded.values()) == {1}


def test_kept_frames_are_bounded(decoded: Counter[tuple[str, int]]) -> None:
    """Frames beyond ``decoded_bytes`` are decoded again, and runs are shorter, so that 16 of them fit: one group."""
    small, large = (Episodes(DATA / "h264", decoded_bytes=size) for size in (1, 1 << 30))
    assert max(np.diff(small.shard_starts)) == 8 < max(np.diff(large.shard_starts))
    pool = FramePool(1)
    frames = Episodes(DATA / "h264")._of.frames(np.array([0, 20, 0]))
    pictures = [each[TOP].decode(pool) for each in frames]
    assert (pictures[0] == pictures[2]).all()
    assert max(decoded.values()) == 2
    assert len(pool._groups) == 1


@pytest.mark.parametrize(("offsets", "rows"), [([0.0], 24), ([-0.1, 0.0], 16), ([-0.1, 0.1], 8)])
def test_runs_fit_with_the_groups_that_their_windows_reach(offsets: list[float], rows: int) -> None:
    """A run has fewer rows if its windows need the groups before and behind it, too."""
    bytes_of_row = 3 * 50 * 70 // 2
    episodes = Episodes(DATA / "h264", {TOP: offsets}, features=[TOP], run=24, decoded_bytes=RUNS * 24 * bytes_of_row)
    assert max(np.diff(episodes.shard_starts)) == rows


def test_frames_before_a_key_frame_are_of_the_group_before(tmp_path: Path) -> None:
    """Open groups, as of H.265, have frames that are decoded after a key frame and shown before it."""
    root = Path(shutil.copytree(DATA / "h264", tmp_path / "h264"))
    for path in (root / f"videos/{TOP}").rglob("*.mp4"):
        with av.open(path) as container:
            frames = list(container.decode(video=0))
        options = {"g": "8", "x264-params": "open-gop=1:bframes=3:scenecut=0"}
        with av.open(path, "w") as container:
            stream = container.add_stream("libx264", rate=30, options=options)
            stream.width, stream.height = frames[0].width, frames[0].height
            for frame in frames:
                frame.pict_type = av.video.frame.PictureType.NONE
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    episodes = Episodes(root, {TOP: [-2 / 30, -1 / 30, 0.0]}, features=[TOP, "index"])
    with Feeder(episodes, batch_size=8) as feeder:
        assert sorted(number for batch in feeder for number in assert_items(batch, episodes)) == list(range(86))


def test_runs_end_before_key_frames() -> None:
    """A run has a multiple of the distance of key frames, so that no group is in two of them."""
    assert Episodes(DATA / "av1", run=5).shard_starts.tolist()[:4] == [0, 4, 8, 9]


# --- what only the container says


def data_set(root: Path, data: bytes) -> list[np.ndarray[Any, Any]]:
    """Write a data set of version 2.1 with one video at 25 frames per second; return its frames, as PyAV gives them."""
    for folder in ("meta", "data", "videos"):
        (root / folder).mkdir(parents=True)
    (root / "videos/0.mp4").write_bytes(data)
    with av.open(io.BytesIO(data)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        frames = list(container.decode(video=0))
    columns: dict[str, Any] = {"timestamp": np.array([frame.time for frame in frames], np.float32)}
    columns |= dict.fromkeys(("episode_index", "task_index"), np.zeros(len(frames), np.int64))
    columns |= dict.fromkeys(("frame_index", "index"), np.arange(len(frames)))
    parquet.write_table(pa.table(columns), root / "data/0.parquet")
    features = {name: {"dtype": str(column.dtype), "shape": [1]} for name, column in columns.items()}
    features["cam"] = {"dtype": "video", "shape": [frames[0].height, frames[0].width, 3]}
    info = {"codebase_version": "v2.1", "total_episodes": 1, "fps": 25, "features": features}
    info |= {"data_path": "data/{episode_index}.parquet", "video_path": "videos/{episode_index}.mp4"}
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0, "length": len(frames)}))
    (root / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "wave"}))
    return [frame.to_ndarray(format="rgb24", threads=1).transpose(2, 0, 1) for frame in frames]


SMALL = {"bf": "0", "sc_threshold": "0"}
CONTAINERS: dict[str, Callable[[], bytes]] = {
    "cut in a group, H.264": lambda: cut(video(40, **SMALL), Fraction(7, 25)),
    "cut in a group, MPEG-4 part 2": lambda: cut(video(40, codec="mpeg4", **SMALL), Fraction(7, 25)),
    "cut in a group with frames in another order": lambda: cut(video(40, bf="2"), Fraction(15, 25)),
    "ends earlier": lambda: shortened(video(40, **SMALL)),
    "intra refresh": lambda: video(40, bf="0", **{"x264-params": "intra-refresh=1:keyint=10:scenecut=0"}),
    "open groups": lambda: video(40, **{"x264-params": "open-gop=1:keyint=12:min-keyint=12:scenecut=0:bframes=3"}),
    "MPEG-4 with B-frames": lambda: video(40, codec="mpeg4", bf="2"),
    "colours of the container": lambda: coloured(),
    "bytes behind a packet": lambda: video(24, codec="mpeg4", qmin="2", qmax="2"),
}


def coloured() -> bytes:
    """A video whose matrix and range stand in the container only."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", container_options={"movflags": "write_colr"}) as output:
        stream: Any = output.add_stream("mpeg4", rate=25, width=64, height=48, pix_fmt="yuv420p")
        for name in ("color_primaries", "color_trc", "colorspace"):
            setattr(stream.codec_context, name, 1)
        for at in range(4):
            frame = av.VideoFrame(64, 48, "yuv420p")
            for plane, value in zip(frame.planes, (90 + at, 60, 200), strict=True):
                plane.update(bytes([value]) * plane.buffer_size)
            frame.colorspace = 1
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("name", CONTAINERS)
def test_frames_equal_those_of_the_whole_file(name: str, tmp_path: Path) -> None:
    """Frames have the pixels of a decoder that reads the file from its start, by themselves and in groups."""
    expected = data_set(tmp_path / "set", CONTAINERS[name]())
    episodes = Episodes(tmp_path / "set", tolerance_s=0.002)
    assert len(episodes) == len(expected)
    for source in (episodes, episodes.sharing_frames()):
        for at in reversed(range(len(expected))):
            assert np.array_equal(source[at]["cam"], expected[at]), at


def test_an_earlier_key_frame_is_read_at_a_url(object_server: FaultServer, tmp_path: Path) -> None:
    """If a key frame is only a recovery point, the groups before it are read from the URL, too."""
    expected = data_set(tmp_path / "set", CONTAINERS["intra refresh"]())
    files = [path for path in (tmp_path / "set").rglob("*") if path.is_file()]
    object_server.objects = {f"bucket/{path.relative_to(tmp_path).as_posix()}": path.read_bytes() for path in files}
    episodes = Episodes("s3://bucket/set", tolerance_s=0.002, options=object_server.options)
    for at in (15, 39):
        assert np.array_equal(episodes[at]["cam"], expected[at])


def test_packets_have_zeros_behind_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a packet are in memory of FFmpeg, which has the padding that its decoders read."""
    data_set(tmp_path / "set", CONTAINERS["bytes behind a packet"]())
    made: list[Any] = []
    packet = av.Packet
    monkeypatch.setattr(av, "Packet", lambda given: made.append(given) or packet(given))
    _ = Episodes(tmp_path / "set", tolerance_s=0.002)[3]
    assert made
    assert all(isinstance(size, int) for size in made)


# --- rows


@pytest.mark.parametrize("options", [{}, {"batch_size": aiofeed.TokenBudget([8] * 59, 64)}])
def test_rows_are_gathered_in_whole_batches(options: dict[str, Any]) -> None:
    """Without cameras a batch is gathered from columns, with padding and tasks, in memory and in decode threads."""
    episodes = Episodes(DATA / "av1", WINDOWS, features=["index", "action", "observation.state", "task"])
    with Feeder(episodes, **({"batch_size": 8, "shuffle": True} | options)) as feeder:
        assert feeder._config.source.in_memory
        assert sorted(number for batch in feeder for number in assert_items(batch, episodes)) == list(range(59))


def test_rows_are_read_without_videos(copied: Path) -> None:
    """Without cameras no video is opened: action chunks need none."""
    shutil.rmtree(copied / "videos")
    sample = Episodes(copied, {"action": [0.0, 0.1]}, features=["action", "task"], drop_last_frames=1)[8]
    assert {name: getattr(value, "shape", None) for name, value in sample.items()} == {
        "action": (2, 2),
        "action_is_pad": (2,),
        "task": None,
    }
    assert not sample["action_is_pad"].any()


def test_last_frames_are_dropped_from_each_episode() -> None:
    """``drop_last_frames`` leaves out moments; windows still reach to the end of the episode."""
    episodes = Episodes(DATA / "av1", {"action": [0.2]}, features=["action", "frame_index"], drop_last_frames=2)
    assert len(episodes) == 59 - 2 * 6
    assert not any(episodes[number]["action_is_pad"].any() for number in range(len(episodes)))


def test_statistics_are_of_the_chosen_episodes() -> None:
    """Mean and deviation are LeRobot's; those of some episodes are of their rows."""
    stated = json.loads((DATA / "av1/meta/stats.json").read_text())["action"]
    found = Episodes(DATA / "av1").statistics
    for name in ("mean", "std", "min", "max"):
        torch.testing.assert_close(found["action"][name], torch.tensor(stated[name]), rtol=1e-5, atol=1e-6)
    some = Episodes(DATA / "av1", episodes=[1], features=["action", "index"])
    actions = torch.stack([some[number]["action"] for number in range(len(some))])
    torch.testing.assert_close(some.statistics["action"]["mean"], actions.mean(0))
    assert set(some.statistics) == {"action", "index"}


# --- mixtures


def test_mixture_of_different_cameras() -> None:
    """Renamed and filled fields make the batches of two data sets equal; filled windows are padding."""
    rename = {"observation.images.top": "front"}
    windows = {"front": [-0.1, 0.0], "side": [-0.1, 0.0]}
    fill = {"side": np.zeros((3, 50, 70), np.uint8), "force": 1.5}
    features = ["front", "side", "force", "action", "index"]
    sources = {
        name: Episodes(DATA / root, windows, features=features, rename=rename, fill=fill)
        for name, root in (("new", "av1"), ("old", "av1-v2.1"))
    }
    with Feeder(Mixture(sources), batch_size=8, shuffle=True) as feeder:
        batches = list(feeder)
    assert sum(len(batch["index"]) for batch in batches) == 118
    assert batches[0]["side"].shape == (8, 2, 3, 50, 70)
    assert batches[0]["side_is_pad"].all()
    assert batches[0]["force"].tolist() == [1.5] * 8
    with pytest.raises(TypeError, match=r"\['files'\] are sources of encoded samples"):
        Mixture({"episodes": sources["new"], "files": aiofeed.Files([str(DATA / "README.md")])})


def test_filled_camera_has_the_shape_of_a_camera() -> None:
    """A filled camera with one offset has no dimension for it, as one of the data set."""
    windows, fill = {WRIST: [0.0], "side": [0.0], "force": [0.0]}, {"side": np.zeros((3, 38, 54), np.uint8), "force": 1}
    sample = Episodes(DATA / "av1", windows, fill=fill)[0]
    assert sample["side"].shape == sample[WRIST].shape == (3, 38, 54)
    assert sample["force"].shape == (1,)


# --- URLs


@pytest.fixture
def served(object_server: FaultServer) -> FaultServer:
    """A server with two data sets."""
    object_server.objects = {
        f"bucket/{path.relative_to(DATA).as_posix()}": path.read_bytes()
        for root in ("av1", "h264")
        for path in (DATA / root).rglob("*")
        if path.is_file()
    }
    return object_server


@pytest.mark.parametrize("name", ["av1", "h264"])
def test_items_at_a_url_equal_those_of_files(name: str, served: FaultServer) -> None:
    """A data set at a URL gives the same items, with each order."""
    windows = {TOP: [-0.1, 0.0]}
    remote = Episodes(f"s3://bucket/{name}", windows, run=8, options=served.options)
    local = Episodes(DATA / name, windows)
    assert torch.equal(remote[3][TOP], local[3][TOP])
    for shuffle in (True, "window:2"):
        with Feeder(remote, batch_size=16, shuffle=shuffle) as feeder:
            numbers = [number for batch in feeder for number in assert_items(batch, local)]
            assert sorted(numbers) == list(range(len(local)))


def test_only_needed_groups_are_read_at_a_url(served: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the header of each video, the bytes that are read are those of the key-frame groups of the frames."""
    read: list[tuple[int, int]] = []
    fetch = videos.Video._read

    async def record(video: videos.Video, start: int, end: int) -> bytes:
        if video.index is not None:
            read.append((start, end))
        return await fetch(video, start, end)

    monkeypatch.setattr(videos.Video, "_read", record)
    remote = Episodes("s3://bucket/av1", {TOP: [-0.5, 0.0]}, features=[TOP], options=served.options)
    _ = remote[20]
    local = Episodes(DATA / "av1", {TOP: [-0.5, 0.0]}, features=[TOP])
    [frames] = local._of.frames(np.array([20]))
    needed = frames[TOP].find(frames[TOP].video.open_now(), whole=True)[1]
    assert sum(end - start for start, end in read) <= sum(span.end - span.start for span in needed)


# --- errors


def skipped(episodes: Episodes) -> tuple[int, list[str]]:
    """How many samples are left with ``on_error="skip"``, and the errors of the others."""
    with Feeder(episodes, batch_size=64, on_error=aiofeed.FailurePolicy("skip", max_failures=100)) as feeder:
        count = sum(len(batch["index"]) for batch in feeder)
        return count, [str(failure.error) for failure in feeder.failures]


def test_missing_video_fails_its_samples_only(copied: Path) -> None:
    """The error names episode, time, camera and file, and may be skipped."""
    (copied / f"videos/{WRIST}/chunk-000/file-001.mp4").unlink()
    count, errors = skipped(Episodes(copied))
    assert 0 < count < 59
    assert len(errors) == 59 - count
    for part in ("episode", "frame", f"camera {WRIST!r} at", "file-001.mp4"):
        assert part in errors[0]


def test_camera_without_some_episodes_fails_their_samples(copied: Path) -> None:
    """An episode without a video of a camera is an error that says so."""
    change_episodes(copied, f"videos/{TOP}/file_index", lambda values: [None, *values[1:]])
    count, errors = skipped(Episodes(copied))
    assert count == 50
    assert "episode 0" in errors[0]
    assert "there is no video of this episode" in errors[0]


def test_lost_marks_of_key_frames(copied: Path) -> None:
    """Without the mark of the first key frame its frames are decoded from the first frame on."""
    path = copied / f"videos/{TOP}/chunk-000/file-000.mp4"
    data = bytearray(path.read_bytes())
    at = data.index(b"stss") + 12  # the number of the first key frame, from 1
    assert int.from_bytes(data[at : at + 4], "big") == 1
    data[at : at + 4] = (3).to_bytes(4, "big")
    path.write_bytes(data)
    damaged, whole = (Episodes(root, features=[TOP, "index"]) for root in (copied, DATA / "av1"))
    for shuffle in (True, False):
        with Feeder(damaged, batch_size=8, shuffle=shuffle) as feeder:
            assert sum(len(assert_items(batch, whole)) for batch in feeder) == 59


def test_frames_out_of_tolerance_may_be_skipped(copied: Path) -> None:
    """A frame that is further from its time than the tolerance names both times."""
    change_episodes(copied, f"videos/{TOP}/from_timestamp", lambda values: [values[0] + 0.03, *values[1:]])
    count, errors = skipped(Episodes(copied))
    assert count == 50
    assert "no frame at 0.030000 s: the nearest one is at 0.000000 s" in errors[0]
    assert skipped(Episodes(copied, tolerance_s=0.04))[0] == 59


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "text"])
def test_broken_video_is_named(copied: Path, damage: str) -> None:
    """A truncated, damaged or foreign file is an error of the samples that need it."""
    path = copied / f"videos/{TOP}/chunk-000/file-000.mp4"
    data = path.read_bytes()
    changed = {"truncated": data[: len(data) // 2], "overwritten": data[:100] + bytes(len(data) - 4100) + data[-4000:]}
    path.write_bytes(changed.get(damage, b"no video"))
    count, errors = skipped(Episodes(copied, features=[TOP, "index"]))
    assert count < 59
    assert all("file-000.mp4" in error for error in errors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"windows": {"action": [0.05]}}, r"offsets of 'action': \[0.05\] are no multiples of 1 / 10 s"),
        ({"windows": {"action": []}}, "there are none"),
        ({"windows": {"nothing": [0.0]}}, r"windows=\) has \['nothing'\], and there are \['observation.images.top'"),
        ({"features": ["nothing"]}, r"features=\) has \['nothing'\]"),
        ({"rename": {"nothing": "a"}}, r"rename=\) has \['nothing'\]"),
        ({"rename": {TOP: WRIST}}, r"rename=\) gives two of .* the same name"),
        ({"windows": {"task": [0.0]}}, r"windows=\) has \['task'\]"),
        ({"episodes": [9]}, r"episodes=\) has \[9\]"),
        ({"episodes": []}, "no rows are left"),
        ({"drop_last_frames": 100}, "no rows are left"),
        ({"run": 0}, "run"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    """A wrong argument is named, with what the data set has."""
    with pytest.raises(ValueError, match=message):
        Episodes(DATA / "av1", **arguments)


@pytest.mark.parametrize("episodes", [[1.5], np.array([True, False]), ["1"]])
def test_episodes_are_chosen_by_whole_numbers(episodes: Any) -> None:
    """Fractions, masks and texts are no numbers of episodes."""
    with pytest.raises(TypeError, match="integer"):
        Episodes(DATA / "av1", episodes=episodes)


def test_images_in_rows_are_refused() -> None:
    """A camera whose images are in the rows is an error that says how to leave it out."""
    with pytest.raises(ValueError, match=r"does not read .*images in the rows.*pass features="):
        Episodes(DATA / "images")


@pytest.mark.parametrize(
    "feature",
    [
        *({"dtype": kind, "shape": [1]} for kind in ("list", "sequence", "audio", "complex64", "(2,", ["float32"])),
        *({"dtype": kind, "shape": [0]} for kind in ("string", "image", "language", "video", "float32")),
        *({"dtype": "float32", "shape": shape} for shape in ([1 << 40], None, ["a"], 3)),
        *({"dtype": "video", "shape": shape} for shape in ([], [3], [2, 3, 4, 3])),
        *({"dtype": kind} for kind in ("string", "float32")),
        {"shape": [1]},
    ],
)
def test_features_that_are_not_used_may_be_of_any_kind(copied: Path, feature: dict[str, Any]) -> None:
    """A feature of an unknown dtype, or of a shape that is not possible, is an error only if it is chosen."""
    path = copied / "meta/info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"features": info["features"] | {"odd": feature}}))
    assert Episodes(copied, features=["action"])[0]["action"].shape == (2,)
    with pytest.raises(ValueError, match=r"av1: Episodes does not read \{'odd': .*pass features="):
        Episodes(copied, features=["action", "odd"])
    path.write_text(json.dumps(info | {"features": info["features"] | {"timestamp": {"dtype": "list", "shape": [1]}}}))
    with pytest.raises(ValueError, match=r"info\.json: features that are always needed .*'timestamp': .*'list'"):
        Episodes(copied, features=["action"])


def test_inconsistent_data_sets_are_refused(copied: Path) -> None:
    """Other numbers of rows or episodes than described, other versions and missing files are named."""
    change_episodes(copied, "length", lambda values: [values[0] + 1, *values[1:]])
    with pytest.raises(ValueError, match=r"file-000.parquet: episode 0 has \d+ rows, and its length is"):
        Episodes(copied)
    info = json.loads((copied / "meta/info.json").read_text())
    for change, message in (({"total_episodes": 7}, "describes 6 episodes"), ({"codebase_version": "v1.6"}, "v1.6")):
        (copied / "meta/info.json").write_text(json.dumps(info | change))
        with pytest.raises(ValueError, match=message):
            Episodes(copied)
    with pytest.raises(FileNotFoundError, match=r"info\.json"):
        Episodes(copied / "meta")


def change_rows(root: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    path = root / "data/chunk-000/file-000.parquet"
    parquet.write_table(change(parquet.read_table(path)), path)


def replaced(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def features_of(action: list[int]) -> dict[str, Any]:
    names = ("frame_index", "episode_index", "index", "task_index")
    numbers = {name: {"dtype": "int64", "shape": [1]} for name in names}
    one = {"dtype": "float32", "shape": [1]}
    return {"action": {"dtype": "float32", "shape": action}, "timestamp": one, **numbers}


def rows_of(episodes: list[int], length: int, step: float) -> pa.Table:
    """Rows whose action says which episode and frame they are."""
    episode, frame = np.repeat(episodes, length), np.tile(np.arange(length), len(episodes))
    columns = {"action": (step * episode + frame).astype(np.float32), "timestamp": (frame / 10).astype(np.float32)}
    return pa.table(
        {**columns, "frame_index": frame, "episode_index": episode, "index": frame, "task_index": 0 * frame}
    )


def write_rows_in_files(root: Path, files: list[int], described: list[int], length: int = 5) -> None:
    """Write a data set of version 3.0 with the rows of each episode in one of two files, and what meta says of them."""
    info = {"codebase_version": "v3.0", "fps": 10, "features": features_of([1]), "total_episodes": 3}
    info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        (root / folder).mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    for number in (0, 1):
        within = [episode for episode in range(3) if files[episode] == number]
        parquet.write_table(rows_of(within, length, 100.0), root / f"data/chunk-000/file-{number:03d}.parquet")
    places = {"data/chunk_index": [0] * 3, "data/file_index": described}
    episodes = pa.table({"episode_index": [0, 1, 2], "length": [length] * 3, **places})
    parquet.write_table(episodes, root / "meta/episodes/chunk-000/file-000.parquet")
    parquet.write_table(pa.table({"task_index": [0], "task": ["push"]}), root / "meta/tasks.parquet")


def write_version_2(root: Path, version: str) -> None:
    """Write a data set of two episodes of three rows."""
    info = {"codebase_version": version, "fps": 10, "features": features_of([1]), "total_episodes": 2}
    info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    for folder in ("meta", "data/chunk-000"):
        (root / folder).mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    lines = [json.dumps({"episode_index": episode, "tasks": ["push"], "length": 3}) for episode in (0, 1)]
    (root / "meta/episodes.jsonl").write_text("\n".join(lines))
    (root / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "push"}))
    for episode in (0, 1):
        parquet.write_table(rows_of([episode], 3, 10.0), root / f"data/chunk-000/episode_{episode:06d}.parquet")


OTHER_ROWS: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "wider": (
        lambda t: replaced(t, "action", [[0.0] * 4] * len(t)),
        r"column 'action' has float64 \[4\] in a row, and",
    ),
    "narrower": (lambda t: replaced(t, "action", [0.0] * len(t)), "column 'action' has"),
    "fractions": (lambda t: replaced(t, "index", np.arange(len(t)) + 0.5), "column 'index' has float64"),
    "a row twice": (
        lambda t: t.take(np.r_[1, 1, 2 : len(t)]),
        "'frame_index' lacks the number of a row, or has one twice",
    ),
    "a row missing": (lambda t: t.slice(1), "file-000.parquet: episode 0 has"),
    "rows of another episode": (
        lambda t: replaced(t, "episode_index", np.zeros(len(t), np.int64)),
        "file-000.parquet: episode 0 has",
    ),
    "another rate": (
        lambda t: replaced(t, "timestamp", np.array(t["timestamp"]) / 3),
        "'timestamp' has 30 rows per second, and info.json describes 10",
    ),
    "no times": (lambda t: replaced(t, "timestamp", np.full(len(t), np.nan, np.float32)), "nan rows per second"),
    "null": (
        lambda t: replaced(t, "action", [None] + [[0.0, 0.0]] * (len(t) - 1)),
        "null values: leave it out with features=",
    ),
    "ragged": (lambda t: replaced(t, "action", [[0.0]] + [[0.0, 0.0]] * (len(t) - 1)), "leave it out with features="),
    "no text": (lambda t: replaced(t, "task_index", np.full(len(t), 9)), r"the tasks \[9\], which have no text"),
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_rows_that_contradict_the_description_are_refused(copied: Path, name: str) -> None:
    """Rows of other shapes, types, episodes and times than described never become rows of other moments."""
    change, message = OTHER_ROWS[name]
    change_rows(copied, change)
    with pytest.raises(ValueError, match=message) as raised:
        Episodes(copied)
    assert str(copied) in str(raised.value)
    for advice in ("columns=", "collate_fn=", "data="):
        assert advice not in str(raised.value)


@pytest.mark.parametrize("order", ["reversed", "shuffled", "two rows"])
def test_rows_are_found_by_their_episode_and_frame(copied: Path, order: str) -> None:
    """The order of the rows in a file does not matter."""
    wanted = [Episodes(copied)[at] for at in range(len(Episodes(copied)))]
    orders = {"reversed": lambda n: np.arange(n)[::-1].copy(), "two rows": lambda n: np.r_[1, 0, 2:n]}
    orders["shuffled"] = lambda n: np.random.default_rng(0).permutation(n)
    change_rows(copied, lambda t: t.take(orders[order](len(t))))
    source = Episodes(copied)
    assert all(
        torch.equal(source[at][name], each[name]) for at, each in enumerate(wanted) for name in ("action", "index")
    )


@pytest.mark.parametrize("described", [[0, 1, 0], [0, 0, 1], [1, 0, 0]], ids=["in turns", "one before", "swapped"])
@pytest.mark.parametrize("episodes", [None, [1], [0, 2], [2, 1]])
def test_episodes_are_found_in_any_file_of_rows(
    tmp_path: Path, described: list[int], episodes: list[int] | None
) -> None:
    """Rows belong to the episode that they name, in whichever file, also if the description names another one."""
    files = [0, 1, 0] if described == [0, 1, 0] else [0, 1, 1]
    write_rows_in_files(tmp_path, files, described)
    source = Episodes(tmp_path, {"action": [0.0]}, episodes=episodes)
    got = [source[at]["action"].reshape(-1)[0].item() for at in range(len(source))]
    assert got == [100.0 * episode + row for episode in sorted(episodes or range(3)) for row in range(5)]


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_version_2_0_is_read_as_2_1(tmp_path: Path, version: str) -> None:
    """They differ in statistics only, which Episodes computes."""
    write_version_2(tmp_path, version)
    source = Episodes(tmp_path)
    assert [source[at]["action"].item() for at in range(len(source))] == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]


def test_episodes_are_described_in_the_order_of_their_numbers(copied: Path) -> None:
    """Descriptions of episodes in another order would give each the rows of another one."""
    change_episodes(copied, "episode_index", lambda values: values[::-1])
    with pytest.raises(ValueError, match="meta/episodes: the episodes are in another order"):
        Episodes(copied)


@pytest.mark.parametrize("columns", [{"robot": "arm"}, {}])
def test_the_text_of_a_task_is_the_index_of_its_table(copied: Path, columns: dict[str, str]) -> None:
    """Further columns of tasks.parquet do not matter; a table without texts is an error that names it."""
    path = copied / "meta/tasks.parquet"
    table = parquet.read_table(path)
    for name, value in columns.items():
        table = table.add_column(0, name, pa.array([value] * len(table))).replace_schema_metadata(table.schema.metadata)
    parquet.write_table(table, path)
    assert Episodes(copied)[0]["task"] == Episodes(DATA / "av1")[0]["task"]
    parquet.write_table(table.select(["task_index"]), path)
    with pytest.raises(ValueError, match=r"tasks\.parquet"):
        Episodes(copied)


@pytest.mark.parametrize(
    "template",
    [
        "{chunk_index:0300000000d}",
        "{chunk_index:{chunk_index}}",
        "{chunk_index.__class__}",
        "{chunk_index!r:>900000000}",
        "{nothing}",
        "../private/{file_index}.parquet",
        "/etc/{file_index}.parquet",
        "s3://other/{file_index}.parquet",
        3,
    ],
)
def test_paths_of_the_description_are_names_within_the_data_set(copied: Path, template: Any) -> None:
    """A path has plain fields of small widths, and does not lead out of the data set."""
    for name in ("data_path", "video_path"):
        info = json.loads((DATA / "av1/meta/info.json").read_text()) | {name: template}
        (copied / "meta/info.json").write_text(json.dumps(info))
        with pytest.raises(ValueError, match=r"meta/info\.json: ") as raised:
            Episodes(copied)
        assert len(str(raised.value)) < 1000


DAMAGED = {
    "av1-v2.1": ["meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl"],
    "av1": [
        "meta/info.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
        f"videos/{TOP}/chunk-000/file-000.mp4",
    ],
}


@pytest.mark.parametrize(("root", "name"), [(root, name) for root, names in DAMAGED.items() for name in names])
def test_damaged_files_are_named(root: str, name: str, tmp_path: Path) -> None:
    """A damaged file gives samples, or a ``ValueError`` or ``OSError`` that names the data set."""
    copy = Path(shutil.copytree(DATA / root, tmp_path / "set"))
    whole, errors = (copy / name).read_bytes(), list[Exception]()
    for seed in range(EXAMPLES):
        (copy / name).write_bytes(damaged(name, whole, seed))
        try:
            episodes = Episodes(copy, features=[TOP, "action", "task", "index"])
            _ = episodes[0], episodes[len(episodes) - 1]
        except (OSError, ValueError) as error:
            errors.append(error)
    assert errors
    assert [error for error in errors if str(copy) not in str(error) or isinstance(error, UnicodeError)] == []


def damaged(name: str, data: bytes, seed: int) -> bytes:
    """A damaged copy: of a video the header."""
    start = max(data.find(b"moov"), 0)
    return data[:start] + mutated(data[start:], seed, text="json" in name)


@pytest.mark.parametrize("bf", ["1", "2"])
def test_packets_of_two_frames_are_refused(bf: str, tmp_path: Path) -> None:
    """Frames of packets that DivX has packed have the timestamps of others: an error, and no other frame."""
    frames = data_set(tmp_path / "set", video(40, packed=True, bf=bf))
    for source in (Episodes(tmp_path / "set"), Episodes(tmp_path / "set").sharing_frames()):
        for at in range(1, len(frames)):
            with pytest.raises(ValueError, match=r"0\.mp4: packets of the video have two frames.*encode it again"):
                _ = source[at]


@pytest.mark.parametrize("container", ["mpegts", "matroska", "avi"])
def test_a_video_of_another_format_is_named(container: str, tmp_path: Path) -> None:
    """A file of another format with the name of an MP4 file is an error that names it."""
    data_set(tmp_path / "set", video(4))
    (tmp_path / "set/videos/0.mp4").write_bytes(video(4, container=container, codec="mpeg4"))
    with pytest.raises(ValueError, match=r"0\.mp4: the file (is no MP4 file, but of the|has no video)"):
        _ = Episodes(tmp_path / "set")[0]


def test_damaged_rows_are_named(copied: Path) -> None:
    """A damaged file of rows is an error with its name."""
    path = copied / "data/chunk-000/file-000.parquet"
    path.write_bytes(b"PAR1" + bytes(len(path.read_bytes()) - 12) + path.read_bytes()[-8:])
    with pytest.raises((OSError, ValueError), match=r"data/chunk-000/file-000\.parquet: "):
        Episodes(copied)


def test_copies_are_equal(tmp_path: Path) -> None:
    """A pickled source gives the same items and fingerprint; other windows have another one."""
    episodes = Episodes(DATA / "av1", WINDOWS)
    copy = pickle.loads(pickle.dumps(episodes))
    assert torch.equal(copy[5][TOP], episodes[5][TOP])
    assert copy.fingerprint() == episodes.fingerprint() != Episodes(DATA / "av1").fingerprint()
    with Feeder(episodes, batch_size=8, cache="host", limits=Limits(decode_threads=1)) as feeder:
        first, second = [[batch[WRIST].sum() for batch in feeder] for _ in range(2)]
        assert len(first) == len(second)
