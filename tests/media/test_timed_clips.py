"""``Clips`` by time: ``fps=``, the sound of a clip, and folders of videos by class."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import AudioFolder, Clips, DecodeAudio, Feeder, Files, Mixture, VideoFolder
from aiofeed.errors import DecodeError
from aiofeed.media.clips import ClipDecoder
from tests.media.test_clips import KINDS, SIZE
from tests.support.media_files import chirp, numbers_in, picture_of, video

av: Any = pytest.importorskip("av")

RATE = 16_000
LIST = [0, 1, 3, 4, 9, 10, 11, 12, 20, 21, 22, 23, 24, 30, 31, 32, 33, 34, 35, 36]
SOUNDS = {"mp4": "aac", "matroska": "flac", "mpegts": "mp2", "avi": "libmp3lame"}


def talk(container: str, *, sound_at: float = 0.0, seconds: float = 2.0, layout: str = "mono") -> bytes:
    """A video of 2 seconds with a rising tone that begins later, or ends earlier."""
    import io

    file, channels = io.BytesIO(), 2 if layout == "stereo" else 1
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream("mpeg4" if container == "avi" else "libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        audio = output.add_stream(SOUNDS[container], rate=RATE, layout=layout)
        for number in range(50):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture_of(number), format="rgb24")))
        output.mux(stream.encode(None))
        frame = av.AudioFrame.from_ndarray(chirp(seconds, RATE, channels), format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = RATE, round(sound_at * RATE), Fraction(1, RATE)
        output.mux(audio.encode(frame))
        output.mux(audio.encode(None))
    return file.getvalue()


# --- fps ---


@pytest.mark.parametrize("fps", [8, 25, 12.5, Fraction(30_000, 1001), 60])
@pytest.mark.parametrize("kind", ["mp4", "variable frame rate", "mkv", "avi", "H.264 copied to mkv", "ts", "vp9"])
def test_frame_i_is_shown_at_its_time(kind: str, fps: Any, tmp_path: Path) -> None:
    """Frame i of a clip is the last one whose time is not after start + i / fps."""
    path, decoder = tmp_path / "video", ClipDecoder(6, 1, "random", SIZE, fps)
    path.write_bytes(video(**KINDS[kind]))
    with av.open(str(path)) as container:
        known = [float(frame.pts * frame.time_base) for frame in container.decode(video=0)]
    times = np.array(known) if kind not in ("avi", "H.264 copied to mkv") else np.arange(60) / 25
    for seed in range(4):
        out = np.empty(decoder.shape, np.uint8)
        [start] = decoder.decode_into(path, out, seed)
        assert times[0] <= start <= max(times[-1] + 0.05 - 6 / float(fps), times[0]) + 1e-6
        wanted = [int((times <= start + at / float(fps) + 1e-6).sum()) - 1 for at in range(6)]
        assert numbers_in(out) == wanted


def test_clips_of_a_video_start_at_times() -> None:
    """Clips of `per_video=n` are in the middle of n parts of the time, not of the frames."""
    data, decoder = video(20, timestamps=LIST), ClipDecoder(2, 1, 3, SIZE, 5)
    out = np.empty(decoder.shape, np.uint8)
    starts = decoder.decode_into(data, out)
    room = 37 / 25 - 2 / 5
    assert starts == pytest.approx([room / 6, room / 2, room * 5 / 6], abs=0.03)
    shown = [[sum(at / 25 <= start + step / 5 + 1e-6 for at in LIST) - 1 for step in range(2)] for start in starts]
    assert [numbers_in(clip) for clip in out] == shown


def test_a_clip_longer_than_its_video_repeats_the_last_frame() -> None:
    """The video is shown from its start."""
    found = ClipDecoder(4, 1, 1, SIZE, 1)(video(50))
    assert numbers_in(found[0]) == [0, 25, 49, 49]


# --- sound ---


@pytest.mark.parametrize("per_video", ["random", 3])
@pytest.mark.parametrize("container", SOUNDS)
def test_the_sound_is_that_of_the_time_of_the_clip(container: str, per_video: Any, tmp_path: Path) -> None:
    """`"audio"` has the part of the whole recording from the start of the clip on, [channels, samples]."""
    path, audio = tmp_path / "talk", DecodeAudio(8_000)
    path.write_bytes(talk(container))
    decoder = Clips(Files([path]), 4, per_video=per_video, size=SIZE, fps=8, audio=audio).decoder
    sample = decoder(path, rng=torch.Generator().manual_seed(3))
    videos, sounds = sample["video"], sample["audio"]
    if per_video == "random":
        videos, sounds = videos[None], sounds[None]
    assert videos.shape == (len(sounds), 4, 3, *SIZE)
    assert sounds.shape == (len(sounds), 1, 4_000)
    whole = audio(path)[0].numpy()
    windows = np.lib.stride_tricks.sliding_window_view(whole, 4_000)
    with av.open(str(path)) as opened:
        begins = [
            float(each.start_time * each.time_base) for each in (opened.streams.video[0], opened.streams.audio[0])
        ]
    for clip, sound in zip(videos, sounds, strict=True):
        place = int(np.abs(windows - sound.numpy()).max(axis=1).argmin())
        assert np.abs(windows[place] - sound.numpy()).max() < 1e-3
        at = place / 8_000 + begins[1] - begins[0]
        shown = numbers_in(clip)[0] / 25
        late = 0.08 if container == "avi" else 0.0  # which states no delay of the encoder
        assert shown - 0.001 <= at < shown + late + 0.041


@pytest.mark.parametrize(("begins", "ends"), [(0.5, 2.0), (0.0, 0.4), (1.2, 1.6)])
def test_there_are_zeros_where_there_is_no_sound(begins: float, ends: float, tmp_path: Path) -> None:
    """Sound that begins later or ends earlier than the video is at its time, with zeros around it."""
    data, audio = talk("matroska", sound_at=begins, seconds=ends - begins), DecodeAudio(RATE)
    decoder = Clips(Files(["a"]), 4, per_video=4, size=SIZE, fps=8, audio=audio).decoder
    starts = decoder.decode_into(data, np.empty(decoder.shape, np.uint8))
    sounds = decoder(data)["audio"]
    track = np.zeros(3 * RATE, np.float32)
    track[round(begins * RATE) : round(ends * RATE)] = audio(data)[0]
    for start, sound in zip(starts, sounds, strict=True):
        assert np.abs(track[round(start * RATE) :][: len(sound[0])] - sound[0].numpy()).max() < 1e-3
    assert any(not sound.any() for sound in sounds) or begins == 0.5


def test_a_video_without_sound_is_an_error_or_silent(tmp_path: Path) -> None:
    """The error names the file and both ways out; with `silence=True` there are zeros."""
    path = tmp_path / "mute.mp4"
    path.write_bytes(video(40))
    options: dict[str, Any] = {"frames": 4, "size": SIZE, "fps": 8, "audio": DecodeAudio(RATE, channels=2)}
    with pytest.raises(DecodeError, match=r"mute\.mp4.*has no sound: Clips\(silence=True\).*on_error"):
        next(iter(Feeder(Clips(Files([path]), **options), batch_size=1)))
    [batch] = Feeder(Clips(Files([path]), silence=True, **options), batch_size=1)
    assert batch["audio"].shape == (1, 2, RATE // 2)
    assert not batch["audio"].any()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fps": 0}, ValueError, r"Clips\(fps=\.\.\.\) must be a number of frames per second above 0, got 0"),
        ({"fps": "8"}, ValueError, r"Clips\(fps=\.\.\.\) must be a number"),
        ({"fps": 8, "stride": 2}, ValueError, r"Clips\(stride=2, fps=8\): .*leave one out"),
        ({"audio": 16_000, "fps": 8}, TypeError, r"must be aiofeed\.DecodeAudio\(rate=\.\.\.\)"),
        ({"audio": "seconds", "fps": 8}, TypeError, "without seconds="),
        ({"audio": "whole"}, ValueError, "needs fps=, in place of stride="),
        ({"audio": "whole", "stride": 2}, ValueError, "needs fps=, in place of stride="),
        ({"silence": 1}, TypeError, "silence"),
        ({"frame_rate": 8}, TypeError, "it is called fps"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """A wrong argument, or two that exclude each other, is an error that says what to pass."""
    sounds = {"whole": DecodeAudio(RATE), "seconds": DecodeAudio(RATE, 1)}
    if arguments.get("audio") in sounds:
        arguments = arguments | {"audio": sounds[arguments["audio"]]}
    with pytest.raises(error, match=message):
        Clips(Files(["a.mp4"]), 4, **arguments)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_feeder_batches_and_resumes_clips_with_sound(engine: Any, tmp_path: Path) -> None:
    """Dicts of videos and sounds with labels, the same in threads, in processes, after a resume and from a mixture."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.mp4").write_bytes(talk("mp4"))
    clips = Clips(str(tmp_path), 2, size=(24, 32), fps=8, audio=DecodeAudio(8_000))

    def feeder(**options: Any) -> Feeder[Any]:
        return Feeder(clips, **{"batch_size": 2, "shuffle": True, "seed": 5, **options})

    with feeder(engine=engine) as running:
        batches, state = [], None
        for batch in running:
            batches.append(batch)
            state = state or running.state_dict()
    with feeder() as again:
        again.load_state_dict(state)
        rest = list(again)
    assert batches[0][0]["audio"].shape == (2, 1, 2_000)
    for (one, labels), (other, others) in zip(batches[1:], rest, strict=True):
        assert torch.equal(labels, others)
        assert all(torch.equal(one[name], other[name]) for name in ("video", "audio"))
    [mixed, _] = next(iter(Feeder(Mixture({"x": clips[:2], "y": clips[2:]}), batch_size=6)))
    assert mixed["video"].shape == (6, 2, 3, 24, 32)


# --- folders ---


@pytest.mark.parametrize(
    ("kind", "endings", "what"), [(VideoFolder, "mp4 MKV webm", "video"), (AudioFolder, "wav OGG flac", "recording")]
)
def test_folders_by_class(kind: Any, endings: str, what: str, tmp_path: Path) -> None:
    """Classes are the sorted folders that are not hidden, files those with the known endings, in any case."""
    for name in ("swim", "run", ".hidden", "run/deep"):
        (tmp_path / name).mkdir()
        for number, ending in enumerate([*endings.split(), "txt", "jpg"]):
            (tmp_path / name / f"{number}.{ending}").write_bytes(b"x")
    folder = kind(tmp_path)
    assert (folder.classes, folder.class_to_idx) == (["run", "swim"], {"run": 0, "swim": 1})
    assert list(folder.targets) == [0] * 6 + [1] * 3
    assert [Path(path).name for path in folder.paths[:3]] == [f"{at}.{end}" for at, end in enumerate(endings.split())]
    assert repr(folder).startswith(f"{kind.__name__}(")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"{kind.__name__}: class 'empty' of .* has no {what}s \(\."):
        kind(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"has 3 {what}s but no sub-folders"):
        kind(tmp_path / "swim")
    with pytest.raises(FileNotFoundError, match=rf"{kind.__name__}: the folder '.*absent' does not exist"):
        kind(tmp_path / "absent")


def test_clips_of_a_folder_have_its_classes(tmp_path: Path) -> None:
    """`Clips(folder)` is `Clips(VideoFolder(folder))`; parts have the classes, too; a file is refused."""
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"{number}.mp4").write_bytes(video(8, preset="ultrafast"))
    clips = Clips(tmp_path, 2, size=24)
    assert (clips.classes, clips.class_to_idx, clips.targets) == (["a", "b"], {"a": 0, "b": 1}, [0, 0, 1, 1])
    assert clips[1:3].targets == [0, 1]
    assert clips.split({"x": 0.5, "y": 0.5})["x"].classes == ["a", "b"]
    assert Clips(VideoFolder(tmp_path)[1:], 2).classes == ["a", "b"]
    [(found, labels), names] = next(iter(Feeder(clips, batch_size=4, keys=True)))
    assert (found.shape, labels.tolist()) == ((4, 2, 3, 24, 24), [0, 0, 1, 1])
    assert names == VideoFolder(tmp_path).paths
    with pytest.raises(AttributeError, match="classes"):
        _ = Clips(Files([tmp_path / "a/0.mp4"]), 2).classes
    with pytest.raises(TypeError, match=r"aiofeed\.Files\(paths\), or a folder; got '.*0\.mp4'"):
        Clips(str(tmp_path / "a/0.mp4"), 2)
    with pytest.raises(AttributeError, match=r"aiofeed\.Clips reads videos"):
        _ = aiofeed.VideoReader
