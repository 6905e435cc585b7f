"""``Clips``: which frames a clip has, their pixels, the index of a video, and bad files."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import Clips, EncodedCache, Feeder, Files, Limits, Mixture, Tensors, Tokens
from aiofeed.errors import DecodeError, ReadError
from aiofeed.media import clips
from aiofeed.media.clips import ClipDecoder, VideoIndex
from aiofeed.media.container import import_av
from tests.support.media_files import WIDTH, cut, numbers_in, picture_of, shortened, sound, turned, video
from tests.support.mutations import mutated
from tests.support.simulated_device import SimulatedDevice

pytest.importorskip("av")

# `make test-long` sets this.
EXAMPLES = int(os.environ.get("AIOFEED_EXAMPLES", "600")) // 20
SIZE = (24, WIDTH)
OPEN = {"x264-params": "open-gop=1:keyint=12:min-keyint=12:scenecut=0:bframes=3"}
KINDS: dict[str, dict[str, Any]] = {
    "mp4": {},
    "one key frame": {"key_every": 250},
    "variable frame rate": {"timestamps": [number * (number + 3) // 2 for number in range(60)]},
    "fragments": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "mkv": {"container": "matroska"},
    "ts": {"container": "mpegts"},
    "avi": {"container": "avi", "codec": "mpeg4", "bf": "2"},
    "avi of H.264": {"container": "avi"},
    "packed B-frames": {"packed": True, "bf": "1", "container": "avi"},
    "packed B-frames, two": {"packed": True, "bf": "2", "container": "avi"},
    "H.264 copied to mkv": {"container": "matroska", "copied": True},
    "MPEG-4 copied to mp4": {"codec": "mpeg4", "bf": "2", "copied": True},
    "packed B-frames in mp4": {"packed": True, "bf": "2", "container": "mp4"},
    "program stream": {"container": "mpeg", "codec": "mpeg1video"},
    "program stream with B-frames": {"container": "vob", "codec": "mpeg2video", "bf": "2"},
    "program stream of H.264": {"container": "vob"},
    "ts of MPEG-2": {"container": "mpegts", "codec": "mpeg2video", "bf": "2"},
    "ts with open groups": {"container": "mpegts", **OPEN},
    "mp4 with open groups": OPEN,
    "intra refresh": {"x264-params": "intra-refresh=1:keyint=12"},
    "mkv without cues": {"container": "matroska", "container_options": {"live": "1"}},
    "H.264 without container": {"container": "h264"},
    "MPEG-1 without container": {"container": "mpeg1video", "codec": "mpeg1video", "bf": "2"},
    "flv": {"container": "flv"},
    "h265": {"codec": "libx265", "x265-params": "log-level=none"},
    "vp9": {"container": "webm", "codec": "libvpx-vp9", "deadline": "realtime", "cpu-used": "8"},
}


@pytest.fixture(scope="session")
def mp4() -> bytes:
    return video()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four videos of 60, 40, 30 and 20 frames."""
    for frames in (60, 40, 30, 20):
        (tmp_path / f"{frames}.mp4").write_bytes(video(frames))
    return tmp_path


def source_of(folder: Path, *, copies: int = 1) -> Files:
    paths = sorted(folder.glob("*.mp4")) * copies
    return Files(paths, targets=[int(path.stem) for path in paths])


def decode(data: Any, *arguments: Any, seed: int | None = None) -> torch.Tensor:
    decoder = ClipDecoder(*arguments)
    out = np.full(decoder.row.shape, 77, np.uint8)
    decoder.decode_into(data, out, seed)
    again = np.empty_like(out)
    decoder.decode_into(data, again, seed)  # with the index of the first time
    assert np.array_equal(out, again)
    return torch.from_numpy(out)


def batches_of(source: Any, **options: Any) -> list[tuple[torch.Tensor, ...]]:
    with Feeder(source, **{"batch_size": 3, "shuffle": True, "seed": 5, **options}) as feeder:
        return [tuple(batch) if isinstance(batch, list) else (batch,) for _ in range(2) for batch in feeder]


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert all(torch.equal(part, reference) for part, reference in zip(batch, other, strict=True))


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_frames_of_every_clip_are_those_of_the_video(kind: str) -> None:
    """Frame i of a clip is frame start + i * stride of the video, for every start, stride, codec and container."""
    data = video(**KINDS[kind])
    assert numbers_in(decode(data, 60, 1, 1, SIZE)[0]) == list(range(60))
    for frames, stride in ((4, 1), (3, 7), (3, 29)):
        last = 60 - 1 - (frames - 1) * stride
        found = decode(data, frames, stride, last + 1, SIZE)
        assert [numbers_in(clip) for clip in found] == [
            [start + stride * i for i in range(frames)] for start in range(last + 1)
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_after_a_seek_is_that_of_the_video(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clip alone, at the end of a video, has the frames that it has among all clips."""
    data, decoder = video(**KINDS[kind]), ClipDecoder(2, 3, 1, SIZE)
    out = np.empty(decoder.row.shape, np.uint8)
    for start in (*range(0, 57, 5), 30, 7):
        monkeypatch.setattr(ClipDecoder, "_starts", lambda *_, start=start: np.array([start]))
        decoder.decode_into(data, out)
        assert numbers_in(out[0]) == [start, start + 3]


def test_clips_of_a_video_are_in_the_middle_of_equal_parts(mp4: bytes) -> None:
    """n clips start in the middle of n equal parts of all starts; one is the middle of the video."""
    assert [numbers_in(clip)[0] for clip in decode(mp4, 1, 1, 1, SIZE)] == [30]
    assert [numbers_in(clip)[0] for clip in decode(mp4, 1, 1, 3, SIZE)] == [10, 30, 50]
    assert [numbers_in(clip) for clip in decode(mp4, 3, 10, 2, SIZE)] == [[10, 20, 30], [30, 40, 50]]


def test_a_random_clip_begins_anywhere(mp4: bytes) -> None:
    """The seed alone chooses the start, each one with the same probability, first and last included."""
    starts = [numbers_in(decode(mp4, 3, 28, "random", SIZE, seed=seed)) for seed in range(40)]
    assert sorted({start for start, *_ in starts}) == [0, 1, 2, 3]
    assert all(found == [found[0], found[0] + 28, found[0] + 56] for found in starts)
    assert starts[7] == numbers_in(decode(mp4, 3, 28, "random", SIZE, seed=7))


@pytest.mark.parametrize("per_video", ["random", 2])
def test_a_clip_longer_than_its_video_repeats_the_last_frame(per_video: Any) -> None:
    """A video that ends before the clip does is shown from its start, and its last frame is repeated."""
    found = decode(video(5), 4, 2, per_video, SIZE, seed=1)
    for clip in found[None] if per_video == "random" else found:
        assert numbers_in(clip) == [0, 2, 4, 4]


def test_a_path_is_opened_in_place(mp4: bytes, tmp_path: Path) -> None:
    """A source whose `read` returns a path gives the clips of one whose `read` returns the bytes."""
    (tmp_path / "a.mp4").write_bytes(mp4)

    class Paths:
        def __len__(self) -> int:
            return 3

        def key(self, index: int) -> str:
            return f"{index}"

        async def read(self, index: int) -> str:
            return str(tmp_path / "a.mp4")

    expected = batches_of(Clips(Files([tmp_path / "a.mp4"] * 3), 4, size=24))
    assert_equal(batches_of(Clips(Paths(), 4, size=24)), expected)


def test_few_frames_are_decoded(mp4: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the frames that a clip leaves out, only those are decoded that others refer to; a long stride seeks."""
    decoded: list[int] = []
    frames = clips._frames

    class Counting:
        def __init__(self, stream: Any) -> None:
            self.codec_context = self
            self.stream, self.codec = stream, stream.codec_context.codec
            self.skip_frame = "DEFAULT"

        def decode(self, packet: Any) -> Any:
            self.stream.codec_context.skip_frame = self.skip_frame
            found = self.stream.codec_context.decode(packet)
            decoded.extend(frame.pts for frame in found)
            return found

    class Container:
        def __init__(self, container: Any) -> None:
            self.container = container

        def seek(self, offset: int, *, stream: Any) -> None:
            self.container.seek(offset, stream=stream.stream)

        def demux(self, stream: Any) -> Any:
            return self.container.demux(stream.stream)

    def counted(container: Any, stream: Any, *arguments: Any) -> Any:
        return frames(Container(container), Counting(stream), *arguments)

    monkeypatch.setattr(clips, "_frames", counted)
    decode(video(bf="3", key_every=60), 10, 5, 1, SIZE)
    assert len(decoded) < 2 * 45  # of 53 up to the last one, twice
    decoded.clear()
    decode(mp4, 2, 40, 1, SIZE)
    assert len(decoded) < 2 * 20


@pytest.mark.parametrize("name", ["begins later", "ends earlier"])
def test_an_edit_list_is_no_damage(mp4: bytes, name: str) -> None:
    """A video that an edit list cuts has the frames that players show, in the middle of a group of frames, too."""
    edited, frames = (cut(mp4, Fraction(30, 25)), range(30, 60)) if name == "begins later" else (shortened(mp4), None)
    with import_av().open(io.BytesIO(edited)) as container:
        count = sum(1 for _ in container.decode(video=0))
    found = numbers_in(decode(edited, count, 1, 1, SIZE)[0])
    assert found == list(frames or range(count))
    assert count < 60


# --- pixels -----------------------------------------------------------------------------------------------------------


def test_an_int_resizes_the_shorter_side_and_crops_the_centre(mp4: bytes) -> None:
    """A square is the centre of the picture; a pair is the whole picture."""
    whole = decode(mp4, 1, 1, 1, (48, 64))[0, 0]
    assert torch.equal(decode(mp4, 1, 1, 1, 48)[0, 0], whole[:, :, 8:56])
    expected = torch.from_numpy(picture_of(30)).permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(expected, (48, 64), mode="bilinear", antialias=True)[0]
    assert float((whole.float() - resized).abs().mean()) < 4


@pytest.mark.parametrize("form", ["yuv420p", "yuv422p"])
def test_a_frame_of_the_size_of_the_clip_has_the_pixels_of_rgb24(form: str) -> None:
    """Every column of a frame that is not scaled is that of FFmpeg's rgb24, for every width from 16 to 96."""
    import av

    for width in range(16, 97):
        y, x = np.mgrid[:32, :width]
        picture = np.stack([x * 255 // width, y * 8, 255 - x * 255 // width], -1).astype(np.uint8)
        file = io.BytesIO()
        with av.open(file, "w", format="matroska") as output:
            stream: Any = output.add_stream("ffv1", rate=25, width=width, height=32, pix_fmt=form)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            output.mux(stream.encode(None))
        with av.open(io.BytesIO(file.getvalue())) as container:
            # PyAV 19 keeps the scaler of a thread: with threads of its own it would block a fork of this process.
            [expected] = [frame.to_ndarray(format="rgb24", threads=1) for frame in container.decode(video=0)]
        found = decode(file.getvalue(), 1, 1, 1, (32, width))[0, 0]
        assert np.array_equal(found.permute(1, 2, 0), expected), width


def test_a_stored_rotation_is_applied(mp4: bytes) -> None:
    """A video that a phone recorded upright is upright: stripes lie on their sides, with the highest bit on top."""
    upright = decode(turned(mp4), 1, 1, 1, (WIDTH, 24))[0]
    assert numbers_in(upright.transpose(2, 3)) == [30]
    square = decode(turned(mp4), 1, 1, 1, 24)[0, 0]
    assert square.shape == (3, 24, 24)


# The matrix (a, b, c, d), and where the picture that is shown grows red and green.
ORIENTATIONS: dict[str, tuple[tuple[int, int, int, int], str, str]] = {
    "turned by 180": ((-1, 0, 0, -1), "left", "up"),
    "turned by 270": ((0, -1, 1, 0), "up", "right"),
    "mirrored left to right": ((-1, 0, 0, 1), "left", "down"),
    "mirrored top to bottom": ((1, 0, 0, -1), "right", "up"),
    "transposed": ((0, 1, 1, 0), "down", "right"),
    "transposed and turned by 180": ((0, -1, -1, 0), "up", "left"),
}


@pytest.mark.parametrize("name", ORIENTATIONS)
def test_a_stored_mirroring_is_applied(name: str) -> None:
    """The matrix of a track is applied as players do: (x, y) is shown at (a x + c y, b x + d y)."""
    import av

    (a, b, c, d), *expected = ORIENTATIONS[name]
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("libx264", rate=25, width=96, height=64, pix_fmt="yuv420p")
        y, x = np.mgrid[:64, :96]
        picture = np.stack([x * 255 // 96, y * 255 // 64, 0 * x], -1).astype(np.uint8)
        output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    clip = decode(turned(file.getvalue(), matrix), 1, 1, 1, (96, 64) if b else (64, 96))[0, 0].float()
    found = []
    for channel in clip[:2]:
        across = float(channel[:, -8:].mean() - channel[:, :8].mean())
        down = float(channel[-8:].mean() - channel[:8].mean())
        directions = ("left", "right") if abs(across) > abs(down) else ("up", "down")
        found.append(directions[max(across, down, key=abs) > 0])
    assert found == expected


@pytest.mark.parametrize("per_video", ["random", 2])
def test_a_batch_is_uint8_with_channels_before_height(folder: Path, per_video: Any) -> None:
    """A batch is [N, frames, 3, H, W], or with n clips per video [N, n, frames, 3, H, W]; labels are the source's."""
    for images, labels in batches_of(Clips(source_of(folder), 4, 2, per_video, 32), batch_size=4):
        assert images.dtype == torch.uint8
        assert images.shape == ((4, 4, 3, 32, 32) if per_video == "random" else (4, 2, 4, 3, 32, 32))
        assert sorted(labels.tolist()) == [20, 30, 40, 60]


# --- index ------------------------------------------------------------------------------------------------------------


def test_the_index_of_a_video_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later epochs use the indexes of the first; a file that has changed gets another one."""
    made = count_calls(monkeypatch, "_new_index")
    source = Clips(source_of(folder), 4, size=32)
    for _ in range(3):
        batches_of(source, batch_size=2)
    assert len(made) == 4
    (folder / "60.mp4").write_bytes(video(50))
    batches_of(source, batch_size=2)
    assert len(made) == 5


def test_indexes_take_limited_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of frames no more indexes are kept, and clips are the same."""
    expected = batches_of(Clips(source_of(folder), 4, size=24))
    made = count_calls(monkeypatch, "_new_index")
    monkeypatch.setattr(clips, "MOST_INDEXED", 100)
    assert_equal(batches_of(Clips(source_of(folder), 4, size=24)), expected)
    assert len(made) > 4


def test_the_clips_of_a_video_share_one_open_file(mp4: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A video is opened once for all its clips."""
    opened = count_calls(monkeypatch, "open_media")
    decode(mp4, 4, 2, 5, 24)
    assert len(opened) == 2  # decode() decodes twice


def test_runs_seek_where_that_decodes_fewer_frames() -> None:
    """A run ends where the key frame before the next frame is further than a seek costs."""
    order = np.arange(60)
    index = VideoIndex(order, order // 12 * 12, order, order, {}, skips=True)

    def runs(*wanted: int) -> list[tuple[int, list[int]]]:
        return [(key, frames.tolist()) for key, frames in index.runs(np.array(wanted))]

    assert runs(13, 14, 22, 25) == [(12, [13, 14, 22, 25])]
    assert runs(2, 30, 59) == [(0, [2]), (24, [30]), (48, [59])]


@pytest.mark.parametrize("there", ["too far", "refused", "a packet is lost"])
def test_a_seek_that_leads_elsewhere_is_made_good(there: str, mp4: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the packets after a seek are not those of the index, the video is read from its start."""
    open_media, opened = clips.open_media, []

    class Elsewhere:
        def __init__(self, container: Any) -> None:
            self.container, self.sought = container, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.container, name)

        def seek(self, offset: int, *, stream: Any) -> None:
            if there == "refused":
                raise import_av().FFmpegError(1, "Operation not permitted")
            self.sought = True
            self.container.seek(48 * 512 if there == "too far" else offset, stream=stream)

        def demux(self, stream: Any) -> Any:
            for number, packet in enumerate(self.container.demux(stream)):
                if not (self.sought and there == "a packet is lost" and number == 1):
                    yield packet

    @contextlib.contextmanager
    def new_file(*arguments: Any) -> Any:
        opened.append(arguments)
        with open_media(*arguments) as (container, stream):
            yield (Elsewhere(container) if len(opened) == 1 else container), stream

    monkeypatch.setattr(clips, "open_media", new_file)
    out = np.empty((1, 3, 3, *SIZE), np.uint8)
    ClipDecoder(3, 3, 1, SIZE).decode_into(mp4, out)
    assert numbers_in(out[0]) == [27, 30, 33]
    assert len(opened) == 2


def test_a_decoder_is_pickled_without_its_indexes(mp4: bytes) -> None:
    """A copy of a decoder decodes the same, and makes its own indexes."""
    decoder = ClipDecoder(4, 1, 1, 24)
    out, other = np.empty(decoder.row.shape, np.uint8), np.empty(decoder.row.shape, np.uint8)
    decoder.decode_into(mp4, out)
    copy = pickle.loads(pickle.dumps(decoder))
    assert not copy._indexes
    copy.decode_into(mp4, other)
    assert np.array_equal(out, other)
    assert repr(copy) == repr(decoder) == "ClipDecoder(frames=4, stride=1, per_video=1, size=24)"


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[None]:
    calls: list[None] = []
    function: Callable[..., Any] = getattr(clips, name)

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return function(*arguments)

    monkeypatch.setattr(clips, name, counted)
    return calls


# --- feeders ----------------------------------------------------------------------------------------------------------


def test_epochs_and_copies_have_other_clips(folder: Path) -> None:
    """The clip of a video differs between epochs, and between two places of one epoch."""
    [first, second] = batches_of(Clips(Files([folder / "60.mp4"] * 2), 1, size=SIZE), batch_size=2, shuffle=False)
    starts = [number for (clip,) in (first, second) for number in numbers_in(clip[:, 0])]
    assert len(set(starts)) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "process"},
        {"device": "simulated"},
        {"in_order": "samples"},
        {"cache": "encoded"},
        {"limits": "two threads"},
    ],
    ids=lambda options: "-".join(f"{name}-{value}" for name, value in options.items() if isinstance(value, str)),
)
def test_every_kind_of_feeder_gives_the_same_clips(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Engine, device, order of finishing, threads and a cache of encoded samples do not change random clips."""
    source = Clips(source_of(folder), 4, 2, size=24)
    changed = dict(options)
    match options:
        case {"device": _}:
            changed["device"] = SimulatedDevice()
        case {"cache": _}:
            changed["cache"] = EncodedCache(tmp_path / "cache", 1 << 24)
        case {"limits": _}:
            changed["limits"] = Limits(decode_threads=2)
    batches = batches_of(source, batch_size=4, **changed)
    found = [tuple(torch.as_tensor(part).cpu() for part in batch) for batch in batches]
    expected = batches_of(source, batch_size=4)
    if options == {"in_order": "samples"}:  # the place in the batch may differ
        found, expected = by_label(found), by_label(expected)
    assert_equal(found, expected)


def by_label(batches: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    return [(clip[labels.argsort()], labels.sort().values) for clip, labels in batches]


def test_random_clips_cannot_be_cached(folder: Path) -> None:
    """A cache of decoded samples is refused for random clips, with what to do instead."""
    with pytest.raises(TypeError, match=r"another one in each epoch: leave out cache=.*EncodedCache.*per_video=n"):
        Feeder(Clips(source_of(folder), 4), batch_size=2, cache="host")


def test_a_collate_fn_gets_single_clips(folder: Path) -> None:
    """With `collate_fn` clips are decoded one by one, the same in every run."""
    source = Clips(source_of(folder), 4, 2, size=24)
    found = batches_of(source, collate_fn=lambda samples: [clip for clip, _ in samples])
    assert {clip.shape for batch in found for clip in batch} == {(4, 3, 24, 24)}
    assert_equal(batches_of(source, collate_fn=lambda samples: [clip for clip, _ in samples]), found)


def test_a_mixture_of_videos(folder: Path) -> None:
    """Clips takes a mixture of sources; a mixture of Clips gives the same, and those of other clips are refused."""
    mixture = Mixture({"a": Files([folder / "20.mp4"] * 4), "b": Files([folder / "60.mp4"] * 4)}, weights=[1, 3])
    found = batches_of(Clips(mixture, 4, size=24), batch_size=4, shuffle=True)
    assert {clip.shape for (clip,) in found} == {(4, 4, 3, 24, 24)}
    parts = {name: Clips(Files([folder / f"{frames}.mp4"] * 4), 4, size=24) for name, frames in (("a", 20), ("b", 60))}
    assert_equal(batches_of(Mixture(parts, weights=[1, 3]), batch_size=4, shuffle=True), found)
    longer = Mixture(parts | {"c": Clips(Files([folder / "60.mp4"]), 5, size=24)})
    with pytest.raises(TypeError, match=r"'a' with samples uint8 \[4, 3, 24, 24\] and 'c' with uint8 \[5, 3, 24, 24\]"):
        Feeder(longer, batch_size=8)


# --- bad input --------------------------------------------------------------------------------------------------------


def bad_file(kind: str) -> bytes:
    header_first = video(container_options={"moov_size": "20000"})
    match kind:
        case "empty":
            return b""
        case "text":
            return b"not a video " * 100
        case "truncated":
            return video()[:2000]
        case "truncated after the header":
            return header_first[:21500]
        case "truncated mkv":
            data = video(container="matroska")
            return data[: len(data) // 4]
        case "no frames":
            data = video(container="avi", codec="mpeg4")
            return data[: data.index(b"movi") + 4]
        case "no video":
            return sound(np.zeros((1, 100), np.float32), 8000)
        case _:
            start = header_first.index(b"mdat") + 4
            return header_first[:start] + bytes(len(header_first) - start)


BAD = {
    "empty": "no video, or it is truncated or damaged",
    "text": "no video, or it is truncated or damaged",
    "truncated": "no video, or it is truncated or damaged",
    "truncated after the header": r"truncated: its header counts 60 packets, and it has \d+",
    "truncated mkv": r"truncated: its header states 2\.4 seconds, and it has [0-9.]+",
    "no frames": "the video has no frames",
    "no video": "no video stream; it has audio",
    "zeros": "damaged",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named(kind: str, tmp_path: Path) -> None:
    """A file that has no clip is a `DecodeError` with its path and what is wrong with it."""
    path = tmp_path / "bad.mp4"
    path.write_bytes(bad_file(kind))
    with (
        Feeder(Clips(Files([path]), 4, size=24), batch_size=1) as feeder,
        pytest.raises(DecodeError, match=BAD[kind]) as raised,
    ):
        list(feeder)
    assert raised.value.key == str(path)
    assert str(path) in str(raised.value)


def test_a_playlist_opens_no_other_file(mp4: bytes, tmp_path: Path) -> None:
    """A playlist that stands for a video cannot make FFmpeg read other files."""
    (tmp_path / "secret.ts").write_bytes(video(container="mpegts"))
    for text in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{tmp_path}/secret.ts\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {tmp_path}/secret.ts\n",
    ):
        with pytest.raises(ValueError, match="no video, or it is truncated or damaged"):
            decode(text.encode(), 4, 1, 1, 24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frames": 0}, r"Clips\(frames=\.\.\.\) must be at least 1, got 0"),
        ({"frames": 4, "stride": 0}, r"Clips\(stride=\.\.\.\) must be at least 1, got 0"),
        ({"frames": 4, "per_video": 0}, r"Clips\(per_video=\.\.\.\) must be at least 1, got 0"),
        ({"frames": 4, "per_video": "all"}, r'Clips\(per_video=\.\.\.\) must be "random" or a number of clips'),
        ({"frames": 4, "size": (1, 2, 3)}, r"Clips\(size=\.\.\.\) must be an int or a pair"),
        ({"frames": 4, "size": 0}, r"Clips\(size=\.\.\.\) must be at least 1, got 0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    """A wrong argument is an error with its name and value, before anything is read."""
    with pytest.raises(ValueError, match=message):
        Clips(Files(["a.mp4"]), **arguments)


def test_wrong_sources_and_decoders_are_refused(folder: Path) -> None:
    """`Clips` decodes by itself, and needs a source of encoded videos."""
    with pytest.raises(TypeError, match="its samples are decoded already"):
        Feeder(Clips(source_of(folder), 4), decode=bytes.decode, batch_size=1)  # type: ignore[call-overload]
    (folder / "a.bin").write_bytes(bytes(100))
    for source in (Tensors(torch.zeros(4)), [1, 2, 3], Tokens(folder / "a.bin", 4)):
        with pytest.raises(TypeError, match="Clips takes a source of encoded videos"):
            Feeder(Clips(source, 4), batch_size=1)
    with pytest.raises(TypeError, match=r"it is called fps"):
        Clips(source_of(folder), 4, frame_rate=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="bytes or a path, got int"):
        decode(3, 4, 1, 1, 24)


def test_a_random_clip_needs_random_numbers(mp4: bytes) -> None:
    """A random decoder without a generator is refused; with one it returns the tensor of the row."""
    decoder = ClipDecoder(4, 1, "random", 24)
    with pytest.raises(ValueError, match=r"it needs rng"):
        decoder(mp4)
    with pytest.raises(ValueError, match=r"it needs a seed"):
        decoder.decode_into(mp4, np.empty(decoder.row.shape, np.uint8))
    assert decoder(mp4, rng=torch.Generator()).shape == (4, 3, 24, 24)
    assert ClipDecoder(4, 1, 2, 24)(mp4).shape == (2, 4, 3, 24, 24)


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyAV, `Clips` names the extra that installs it."""
    monkeypatch.setitem(sys.modules, "av", None)
    import_av.cache_clear()
    with pytest.raises(ImportError, match=r"aiofeed\[media\]"):
        Clips(Files(["a.mp4"]), 4)
    import_av.cache_clear()


def test_a_file_that_changes_gets_no_index_of_another(folder: Path) -> None:
    """A file that is truncated or removed between two epochs is an error."""
    source = Clips(Files([folder / "60.mp4"]), 4, size=24)
    with Feeder(source, batch_size=1) as feeder:
        list(feeder)
        (folder / "60.mp4").write_bytes(video(20, container_options={"moov_size": "20000"})[:20500])
        with pytest.raises(DecodeError, match="truncated"):
            list(feeder)
        os.remove(folder / "60.mp4")
        with pytest.raises(ReadError, match="No such file"):
            list(feeder)


@pytest.mark.parametrize("kind", ["mp4", "header first", "mkv", "ts", "avi"])
def test_damage_is_concealed_or_an_error_that_says_so(kind: str) -> None:
    """Of a video with damaged bytes, in its header above all, there are clips, or a ``ValueError``."""
    options = {"header first": {"container_options": {"moov_size": "5000"}}}.get(kind) or KINDS[kind]
    data = video(20, **options)
    start, end = max(data.find(b"moov"), 0), data.find(b"mdat") if kind == "header first" else len(data)
    decoder, outcomes = ClipDecoder(4, 1, 3, 24), set()
    for seed in range(EXAMPLES):
        try:
            decoder(data[:start] + mutated(data[start:end], seed) + data[end:])
            outcomes.add(None)
        except ValueError as error:
            outcomes.add(type(error))
    assert outcomes == {None, ValueError}  # not UnicodeDecodeError, which has no sentence for users


def test_a_header_of_far_more_than_the_file_is_refused() -> None:
    """A header that lists millions of frames is refused before packets are made of them."""
    data, many = bytearray(video(container_options={"moov_size": "20000"}, bf="0")), 1_400_000
    at = data.index(b"stsz") + 8
    data[at : at + 8] = struct.pack(">II", 1, many)
    at = data.index(b"stsc") + 16  # how many frames are in a chunk
    data[at : at + 4] = struct.pack(">I", many)
    with pytest.raises(ValueError, match="header of the file claims"):
        ClipDecoder(1, 1, 1, 24)(bytes(data))
