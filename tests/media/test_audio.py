"""``DecodeAudio``: crops, rates, channels, and bad files."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import DecodeAudio, EncodedCache, Feeder, Files
from aiofeed.errors import DecodeError
from aiofeed.media.container import import_av
from tests.support.media_files import chirp, cut, shortened, sound, video
from tests.support.mutations import mutated
from tests.support.simulated_device import SimulatedDevice

pytest.importorskip("av")

# `make test-long` sets this.
EXAMPLES = int(os.environ.get("AIOFEED_EXAMPLES", "600")) // 20
RATE = 16_000
KINDS: dict[str, dict[str, str]] = {
    "wav": {},
    "flac": {"container": "flac", "codec": "flac", "form": "s16"},
    "mp3": {"container": "mp3", "codec": "libmp3lame", "form": "fltp"},
    "m4a": {"container": "mp4", "codec": "aac", "form": "fltp"},
    "webm": {"container": "webm", "codec": "libopus", "form": "flt"},
}


def decode(decoder: DecodeAudio, data: Any, seed: int | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
    out = np.full(decoder.row.shape, 77, np.float32)
    decoder.decode_into(data, out, seed)
    return out


def place_of(crop: Any, whole: Any) -> int:
    """The place at which a crop of a rising tone is found in the whole."""
    windows = np.lib.stride_tricks.sliding_window_view(whole[0], crop.shape[1])[:, :40]
    return int(np.abs(windows - crop[0, :40]).max(axis=1).argmin())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four recordings of 1 to 4 seconds."""
    for seconds in (1, 2, 3, 4):
        (tmp_path / f"{seconds}.wav").write_bytes(sound(chirp(seconds, RATE), RATE))
    return tmp_path


def batches_of(folder: Path, decoder: DecodeAudio | None = None, **options: Any) -> list[torch.Tensor]:
    source = Files(sorted(folder.glob("*.wav")) * 2)
    decoder = decoder or DecodeAudio(RATE, 0.5)
    with Feeder(source, decode=decoder, **{"batch_size": 4, "shuffle": True, "seed": 3, **options}) as feeder:
        return [torch.as_tensor(batch).cpu() for _ in range(2) for batch in feeder]


# --- samples ----------------------------------------------------------------------------------------------------------


def test_samples_are_those_of_the_file() -> None:
    """Samples of the file's own rate are exact, from the start; a shorter recording is followed by zeros."""
    samples = chirp(1.5, RATE)
    assert np.array_equal(decode(DecodeAudio(RATE, 1, crop="first"), sound(samples, RATE)), samples[:, :RATE])
    padded = decode(DecodeAudio(RATE, 2.0), sound(samples, RATE), seed=3)
    assert np.array_equal(padded[:, : len(samples[0])], samples)
    assert not padded[:, len(samples[0]) :].any()


@pytest.mark.parametrize("rate", [48_000, 16_000, 22_050])
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_crop_is_a_part_of_the_whole(kind: str, rate: int) -> None:
    """A crop equals its part of the whole recording, whatever the codec and the rate; the seed chooses its place."""
    data = sound(chirp(4, 48_000), 48_000, **KINDS[kind])
    whole = decode(DecodeAudio(rate, 4, crop="first"), data)
    decoder = DecodeAudio(rate, 0.25)
    places = []
    for seed in range(6):
        crop = decode(decoder, data, seed)
        place = place_of(crop, whole)
        tolerance = 0.02 if kind == "webm" else 1e-3  # its timestamps are milliseconds
        assert np.abs(whole[:, place : place + crop.shape[1]] - crop).max() < tolerance
        places.append(place)
    assert len(set(places)) == 6
    assert max(places) - min(places) > rate
    assert np.array_equal(decode(decoder, data, 2), decode(decoder, data, 2))


def test_resampled_sound_is_the_same_sound() -> None:
    """A resampled tone is the tone at the new rate, without a shift."""
    found = decode(DecodeAudio(16_000, 2, crop="first"), sound(chirp(2, 44_100), 44_100))
    assert np.abs(found - chirp(2, 16_000))[:, 50:-50].max() < 2e-3


def test_channels_are_mixed_kept_or_repeated() -> None:
    """One channel is the mean; two are those of the file, or one that is repeated; others are refused."""
    stereo = chirp(1, RATE, channels=2)
    data = sound(stereo, RATE)
    assert np.allclose(decode(DecodeAudio(RATE, 1, crop="first"), data), stereo.mean(axis=0), atol=1e-6)
    assert np.array_equal(decode(DecodeAudio(RATE, 1, crop="first", channels=2), data), stereo)
    mono = decode(DecodeAudio(RATE, 1, crop="first", channels=3), sound(chirp(1, RATE), RATE))
    assert np.array_equal(mono, np.repeat(chirp(1, RATE), 3, axis=0))
    with pytest.raises(ValueError, match=r"has 2 channels, not 3: pass channels=1"):
        decode(DecodeAudio(RATE, 1, crop="first", channels=3), data)


def test_the_first_and_the_last_place_are_drawn() -> None:
    """A random crop may be any part of a recording, the first and the last included."""
    samples = chirp(1, 1000)
    data, decoder = sound(samples, 1000), DecodeAudio(1000, 0.997)
    found = {place_of(decode(decoder, data, seed), samples) for seed in range(40)}
    assert found == {0, 1, 2, 3}


def test_the_sound_of_a_video_and_a_path(tmp_path: Path) -> None:
    """The sound of a video is decoded, and a local file by its path."""
    assert decode(DecodeAudio(RATE, 1, crop="first"), video(sound=True)).shape == (1, RATE)
    (tmp_path / "a.wav").write_bytes(sound(chirp(1, RATE), RATE))
    assert np.array_equal(decode(DecodeAudio(RATE, 1), str(tmp_path / "a.wav"), 1), chirp(1, RATE))


# --- uncompressed sound -----------------------------------------------------------------------------------------------

LIST = b"LIST" + struct.pack("<I", 5) + b"INFO!\0"


def wav(samples: Any, size: int | None = None, riff: int = 0, *, form: int = 1, ds64: int | None = None) -> bytes:
    """A WAV of samples of a dtype of numpy, with any size in its header; with ``ds64`` an RF64 of that size."""
    width, data = samples.dtype.itemsize, samples.tobytes()
    fmt = LIST + b"fmt " + struct.pack("<IHHIIHH", 16, form, 1, RATE, RATE * width, width, 8 * width)
    if ds64 is not None:
        fmt = b"ds64" + struct.pack("<IQQQI", 28, ds64 + 72, ds64, ds64 // width, 0) + fmt
    kind = b"RIFF" if ds64 is None else b"RF64"
    return kind + struct.pack("<I", riff) + b"WAVE" + fmt + b"data" + struct.pack("<I", size or 0) + data


def au(samples: Any, size: int) -> bytes:
    return b".snd" + struct.pack(">IIIII", 24, size, 3, RATE, 1) + samples.astype(">i2").tobytes()


def caf(samples: Any, size: int) -> bytes:
    description = struct.pack(">qd4sIIIII", 32, RATE, b"lpcm", 0, 2, 1, 1, 16)
    data = b"desc" + description + b"data" + struct.pack(">qI", size, 0)
    return b"caff\0\1\0\0" + data + samples.astype(">i2").tobytes()


def aiff(samples: Any, size: int) -> bytes:
    common = b"COMM" + struct.pack(">IhIhhQ", 18, 1, len(samples), 16, 16383 + 13, RATE << 50)
    data = b"SSND" + struct.pack(">III", size + 8, 0, 0) + samples.astype(">i2").tobytes()
    return b"FORM" + struct.pack(">I", 4 + len(common) + len(data)) + b"AIFF" + common + data


WAVE = (np.sin(np.arange(RATE // 2) / 7) * 20_000).astype(np.int16)
PIPES = {f"{size:#x}": wav(WAVE, size, size) for size in
         (0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF - 36, 0x7FFFFFFF, 0x7FFFFFFF - 36, 0x7FFFF000, 0x80000000)}  # fmt: skip
PIPES |= {"0, Python": wav(WAVE, 0, 36), "0": wav(WAVE, 0, 0), "AU": au(WAVE, 0xFFFFFFFF), "CAF": caf(WAVE, -1)}
PIPES |= {"RF64": wav(WAVE, 0xFFFFFFFF, 0xFFFFFFFF, ds64=WAVE.nbytes), "an odd byte": PIPES["0xffffffff"] + b"!"}


@pytest.mark.parametrize("name", PIPES)
def test_a_file_of_a_pipe_goes_on_to_its_end(name: str, tmp_path: Path) -> None:
    """A header that was written before the size was known does not make a file a truncated one."""
    (tmp_path / "a.wav").write_bytes(PIPES[name])
    for data in (PIPES[name], tmp_path / "a.wav"):
        assert np.array_equal(decode(DecodeAudio(RATE, 0.5, crop="first"), data)[0], WAVE / np.float32(32768))


@pytest.mark.parametrize("cut", [2, 700, 8192])
@pytest.mark.parametrize("kind", ["WAV", "RF64", "AU", "CAF", "AIFF"])
def test_uncompressed_sound_that_is_cut(kind: str, cut: int) -> None:
    """A file with less sound than its header states is an error with both lengths, wherever it ends."""
    whole = {
        "WAV": lambda: wav(WAVE, WAVE.nbytes),
        "RF64": lambda: wav(WAVE, 0xFFFFFFFF, 0xFFFFFFFF, ds64=WAVE.nbytes),
        "AU": lambda: au(WAVE, WAVE.nbytes),
        "CAF": lambda: caf(WAVE, WAVE.nbytes + 4),
        "AIFF": lambda: aiff(WAVE, WAVE.nbytes),
    }[kind]()
    assert np.array_equal(decode(DecodeAudio(RATE, 0.5, crop="first"), whole)[0], WAVE / np.float32(32768))
    with pytest.raises(ValueError, match=r"truncated: its header states (\S+) seconds, and it has (?!\1)"):
        decode(DecodeAudio(RATE, 0.5, crop="first"), whole[:-cut])


def test_a_wav_without_samples_has_no_sound_in_its_metadata() -> None:
    """What follows an empty chunk of data is no sound, if the size of the file says that it is whole."""
    data = wav(WAVE[:0], 0) + LIST
    with pytest.raises(ValueError, match="the audio has no samples"):
        decode(DecodeAudio(RATE, 0.5, crop="first"), data[:4] + struct.pack("<I", len(data) - 8) + data[8:])


@pytest.mark.parametrize("channels", [7, 8, 9, 33])
def test_many_channels(channels: int) -> None:
    """Sound of 8 channels and more is decoded, each in its place."""
    samples = (np.arange(400)[:, None] * np.arange(1, channels + 1)).astype(np.int16)
    data = bytearray(wav(samples, samples.nbytes))
    at = data.index(b"fmt ") + 10
    data[at : at + 12] = struct.pack("<HIIH", channels, RATE, RATE * 2 * channels, 2 * channels)
    found = decode(DecodeAudio(RATE, 400 / RATE, crop="first", channels=channels), bytes(data))
    assert np.array_equal(found, samples.T / np.float32(32768))


def test_a_rate_out_of_proportion() -> None:
    """A header with a huge rate is refused before the filter for it takes memory."""
    data = wav(WAVE, WAVE.nbytes).replace(struct.pack("<I", RATE), struct.pack("<I", 0x7FFFFFFF))
    with pytest.raises(ValueError, match="2147483647 samples per second, not 1 to 100 \\* 16000"):
        decode(DecodeAudio(RATE, 0.5, crop="first"), data)


@pytest.mark.parametrize(
    ("dtype", "form", "one"),
    [("u1", 1, None), ("<i2", 1, 2**15), ("<i4", 1, 2**31), ("<f4", 3, 1.0), ("<f8", 3, 1.0)],
)
def test_sample_formats(dtype: str, form: int, one: float | None) -> None:
    """Samples with and without a sign, and floats, have full scale at -1 and 1."""
    levels = np.array([-1.0, -0.5, 0.0, 0.25, 0.5] * 20)
    samples = ((levels + 1) * 128 if one is None else levels * one).astype(dtype)
    found = decode(DecodeAudio(RATE, 100 / RATE, crop="first"), wav(samples, samples.nbytes, form=form))
    assert found[0].tolist() == levels.tolist()


# --- feeders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["process", "device", "encoded cache"])
def test_every_kind_of_feeder_gives_the_same_samples(folder: Path, tmp_path: Path, way: str) -> None:
    """Engine, device and a cache of encoded samples do not change random crops."""
    options: dict[str, Any] = {
        "process": {"engine": "process"},
        "device": {"device": SimulatedDevice()},
        "encoded cache": {"cache": EncodedCache(tmp_path / "cache", 1 << 24)},
    }[way]
    found, expected = batches_of(folder, **options), batches_of(folder)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert found[0].shape == (4, 1, RATE // 2)
    assert found[0].dtype == torch.float32


def test_first_crops_can_be_cached(folder: Path) -> None:
    """The beginning of each recording is cached; random crops are refused, with what to do instead."""
    first = DecodeAudio(RATE, 0.5, crop="first")
    found, expected = batches_of(folder, first, cache="host"), batches_of(folder, first)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with pytest.raises(TypeError, match=r'another one in each epoch: leave out cache=.*crop="first"'):
        batches_of(folder, cache="host")


# --- bad input --------------------------------------------------------------------------------------------------------


def bad_file(kind: str) -> bytes:
    whole = sound(chirp(4, RATE), RATE)
    match kind:
        case "empty":
            return b""
        case "text":
            return b"not a sound " * 100
        case "truncated":
            return whole[: len(whole) // 2]
        case "truncated flac":
            data = sound(chirp(4, RATE), RATE, **KINDS["flac"])
            return data[: len(data) // 2]
        case "truncated m4a":
            data = sound(chirp(4, RATE), RATE, **KINDS["m4a"])
            return data[: len(data) // 2]
        case "no samples":
            with io.BytesIO() as file, wave.open(file, "wb") as writer:
                writer.setparams((1, 2, RATE, 0, "NONE", ""))
                writer.writeframes(b"")
                return file.getvalue()
        case "no audio":
            return video(3)
        case _:
            return sound(chirp(1, 8_000), 8_000)


BAD = {
    "empty": "no audio, or it is truncated or damaged",
    "text": "no audio, or it is truncated or damaged",
    "truncated": r"truncated: its header states 4 seconds, and it has [0-9.]+",
    "truncated flac": r"truncated: its header states 4 seconds, and it has [0-9.]+",
    "truncated m4a": "no audio, or it is truncated or damaged",
    "no samples": "the audio has no samples",
    "no audio": "no audio stream; it has video",
    "another rate": r"has 8000 samples per second, not 16000: pass resample=True",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named(kind: str, tmp_path: Path) -> None:
    """A file that cannot be decoded, or has another rate with `resample=False`, is a `DecodeError` with its path."""
    path = tmp_path / "bad.wav"
    path.write_bytes(bad_file(kind))
    decoder = DecodeAudio(RATE, 1.0, resample=False)
    with (
        Feeder(Files([path]), decode=decoder, batch_size=1) as feeder,
        pytest.raises(DecodeError, match=BAD[kind]) as raised,
    ):
        list(feeder)
    assert raised.value.key == str(path)


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong argument is an error with its name and value; without PyAV the extra is named."""
    with pytest.raises(TypeError, match=r"DecodeAudio\(rate=\.\.\.\) must be an int, got None"):
        DecodeAudio(None, 1.0)  # type: ignore[arg-type]
    for seconds in (0, -1, float("nan"), float("inf"), "1", 1e-9):
        with pytest.raises(ValueError, match=r"DecodeAudio\(seconds=\.\.\.\) must be at least one sample"):
            DecodeAudio(RATE, seconds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'must be "random" or "first", got "last"|got \'last\''):
        DecodeAudio(RATE, 1, crop="last")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"DecodeAudio\(channels=\.\.\.\) must be at least 1"):
        DecodeAudio(RATE, 1, channels=0)
    with pytest.raises(TypeError, match="it is called rate"):
        DecodeAudio(sample_rate=RATE, seconds=1)  # type: ignore[call-arg]
    monkeypatch.setitem(sys.modules, "av", None)
    import_av.cache_clear()
    with pytest.raises(ImportError, match=r"aiofeed\[media\]"):
        DecodeAudio(RATE, 1)
    import_av.cache_clear()


def test_a_random_crop_needs_random_numbers() -> None:
    """A random decoder without a generator is refused; with one it returns the tensor of the row."""
    data, decoder = sound(chirp(1, RATE), RATE), pickle.loads(pickle.dumps(DecodeAudio(RATE, 0.5)))
    with pytest.raises(ValueError, match=r"it needs rng"):
        decoder(data)
    with pytest.raises(ValueError, match=r"it needs a seed"):
        decode(decoder, data)
    assert decoder(data, rng=torch.Generator()).shape == (1, RATE // 2)
    assert DecodeAudio(RATE, 0.5, crop="first")(data).dtype == torch.float32


@pytest.mark.parametrize("name", ["begins later", "ends earlier"])
def test_an_edit_list_is_no_damage(name: str) -> None:
    """A recording that an edit list cuts has the samples that players play, and crops are parts of them."""
    data = sound(chirp(2.0, RATE), RATE, **KINDS["m4a"])
    edited = cut(data, Fraction(1, 2), "audio") if name == "begins later" else shortened(data)
    with import_av().open(io.BytesIO(edited)) as container:
        whole = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    assert np.array_equal(decode(DecodeAudio(RATE, whole.shape[1] / RATE, crop="first"), edited), whole)
    crop = decode(DecodeAudio(RATE, 0.25), edited, seed=4)
    at = place_of(crop, whole)
    assert np.abs(crop - whole[:, at : at + crop.shape[1]]).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_concealed_or_an_error_that_says_so(kind: str) -> None:
    """Of a recording with damaged bytes, in its header above all, there are samples, or a ``ValueError``."""
    data, outcomes = sound(chirp(1.0, RATE), RATE, **KINDS[kind]), set()
    start = max(data.find(b"moov"), 0)
    decoders = [DecodeAudio(rate, 0.25) for rate in (8000, RATE)]
    for seed in range(EXAMPLES):
        try:
            with np.errstate(invalid="ignore"):  # the sum of infinite samples
                decode(decoders[seed % 2], data[:start] + mutated(data[start:], seed), seed)
            outcomes.add(None)
        except ValueError as error:
            outcomes.add(type(error))
    assert None in outcomes
    assert outcomes <= {None, ValueError}  # not UnicodeDecodeError, which has no sentence for users


@pytest.mark.parametrize("rate", [0, 0x7FFFFFFF])
def test_a_rate_that_cannot_be_is_refused(rate: int) -> None:
    """A header that states no rate, or one of gigahertz, is refused before a filter is made for it."""
    data = bytearray(sound(chirp(0.2, RATE), RATE))
    data[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(ValueError, match=r"samples per second|truncated or damaged"):
        decode(DecodeAudio(8000, 0.1), bytes(data), 1)


def test_text_in_another_encoding_does_not_matter() -> None:
    """A title that is not UTF-8 does not keep a file from being decoded."""
    file, samples = io.BytesIO(), chirp(0.2, RATE)
    with import_av().open(file, "w", format="wav") as output:
        output.metadata["title"] = "caf__"
        stream = output.add_stream("pcm_f32le", rate=RATE, layout="mono")
        frame = import_av().AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.sample_rate = RATE
        output.mux([*stream.encode(frame), *stream.encode(None)])
    data = file.getvalue().replace(b"caf__", b"caf\xe9_")
    assert np.array_equal(decode(DecodeAudio(RATE, 0.1, crop="first"), data), samples[:, : RATE // 10])
