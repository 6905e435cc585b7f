"""Whole recordings: ``DecodeAudio`` without ``seconds``, their padding, and the lengths that files state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import AudioFolder, Buckets, DecodeAudio, Feeder, Files, Mixture, TokenBudget, pad_collate
from aiofeed.errors import DecodeError
from tests.media.test_audio import KINDS
from tests.support.media_files import chirp, sound

pytest.importorskip("av")

RATE = 16_000
SECONDS = (0.3, 0.9, 0.5, 1.2, 0.7, 0.2)
SUFFIXES = {**KINDS, "ogg": {"container": "ogg", "codec": "libopus", "form": "flt"}}
SUFFIXES["aac"] = {"container": "adts", "codec": "aac", "form": "fltp"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six recordings of two classes."""
    for number, seconds in enumerate(SECONDS):
        path = tmp_path / "ab"[number // 3] / f"{number}.wav"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(sound(chirp(seconds, RATE), RATE))
    return tmp_path


def samples_by_length(batches: Any) -> dict[int, Any]:
    """The recordings of padded batches, by their lengths; the padding is 0."""
    found = {}
    for sounds, _, masks in batches:
        assert masks.shape == (len(sounds), sounds.shape[-1])
        for each, mask in zip(sounds, masks, strict=True):
            length = int(mask.sum())
            assert mask[:length].all()
            assert not each[:, length:].any()
            found[length] = each[:, :length]
    return found


@pytest.mark.parametrize("rate", [48_000, 16_000, 44_100])
@pytest.mark.parametrize("kind", SUFFIXES)
def test_a_whole_recording_is_a_crop_of_all_of_it(kind: str, rate: int) -> None:
    """It has all samples of the file, at any rate: those of a crop of that length; a longer crop has no more."""
    samples, decoder = chirp(1.3, 48_000, 2), DecodeAudio(rate, channels=2)
    data = sound(samples, 48_000, **SUFFIXES[kind])
    whole = decoder(data)
    count = whole.shape[1]
    assert torch.equal(DecodeAudio(rate, count / rate, crop="first", channels=2)(data), whole)
    longer = DecodeAudio(rate, count / rate + 0.2, crop="first", channels=2)(data)
    assert not longer[:, count:].abs().max() > 1e-3
    if kind in ("wav", "flac", "mp3", "webm", "ogg"):
        assert count == round(1.3 * rate)
    if (kind, rate) == ("wav", 48_000):
        assert np.array_equal(whole, samples)


@pytest.mark.parametrize("kind", SUFFIXES)
def test_stated_lengths_are_near_the_real_ones(kind: str, tmp_path: Path) -> None:
    """Files of every kind state a length within some 50 ms, those without a codec's delay the exact one."""
    for seconds in SECONDS:
        (tmp_path / f"{seconds}.{kind}").write_bytes(sound(chirp(seconds, 48_000), 48_000, **SUFFIXES[kind]))
    source, decoder = Files(sorted(tmp_path.glob("*"))), DecodeAudio(RATE)
    stated, real = decoder.lengths(source), [decoder(path).shape[1] for path in source.paths]
    assert stated.dtype == np.int64
    if kind in ("wav", "flac", "mp3"):
        assert stated.tolist() == real
    assert np.abs(stated - real).max() < 0.05 * RATE


def test_pad_collate_pads_whole_recordings_whatever_their_lengths(folder: Path) -> None:
    """The last dimension is padded, also of a batch of equal lengths, which has a mask of samples, not of channels."""
    source, decoder = AudioFolder(folder), DecodeAudio(RATE)
    for size in (1, 4):
        with Feeder(source, decode=decoder, batch_size=size, shuffle=True, collate_fn=pad_collate()) as feeder:
            found = samples_by_length(feeder)
        assert sorted(found) == sorted(round(seconds * RATE) for seconds in SECONDS)
        assert all(torch.equal(found[len(whole[0])], whole) for whole in map(decoder, source.paths))


@pytest.mark.parametrize(
    "plan",
    [
        lambda: TokenBudget(max_tokens=24_000),
        lambda: Buckets(boundaries=[9_000], batch_sizes=[3, 2]),
        lambda: TokenBudget("measure", 24_000),
        lambda: TokenBudget("decoded", 24_000),
    ],
    ids=["budget", "buckets", "measured", "decoded"],
)
def test_plans_take_the_lengths_of_recordings(plan: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `lengths` those that the files state, otherwise those decoded: in samples, not in channels."""
    monkeypatch.setenv("AIOFEED_CACHE", str(folder / "cache"))
    source, decoder = AudioFolder(folder), DecodeAudio(RATE)
    with Feeder(source, decode=decoder, batch_size=plan(), collate_fn=pad_collate()) as feeder:
        batches = list(feeder)
    assert sorted(samples_by_length(batches)) == sorted(round(seconds * RATE) for seconds in SECONDS)
    assert 1 < len(batches) < 6
    assert all(sounds.shape[0] * sounds.shape[2] <= 2 * 24_000 for sounds, _, _ in batches)


@pytest.mark.parametrize("form", ["part", "mixture", "read whole", "crops"])
def test_lengths_of_other_sources(form: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts, mixtures and files that may be no links have lengths, too; crops have that of the crop."""
    source, real = AudioFolder(folder), [round(seconds * RATE) for seconds in SECONDS]
    if form == "part":
        assert DecodeAudio(RATE).lengths(source[::-1]).tolist() == real[::-1]
    elif form == "mixture":
        assert DecodeAudio(RATE).lengths(Mixture({"a": source[:2], "b": source[2:]})).tolist() == real
    elif form == "read whole":
        assert DecodeAudio(RATE).lengths(AudioFolder(folder, follow_symlinks=False)).tolist() == real
    else:
        assert DecodeAudio(RATE, 0.5).lengths(source).tolist() == [8000] * 6


class NamedFiles(Files):
    """Files with names of their own."""

    def key(self, index: int, /) -> str:
        return f"recording {index}"


def test_lengths_read_the_heads_of_local_files_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, and those of a part, are opened in place; those whose keys are no paths are read."""
    source = AudioFolder(folder)
    assert len(DecodeAudio(RATE).lengths(NamedFiles(source.paths))) == 6
    monkeypatch.setattr(Files, "_contents", lambda *_: pytest.fail("a file was read"))
    assert len(DecodeAudio(RATE).lengths(source)) == 6
    assert len(DecodeAudio(RATE).lengths(source.split({"train": 4, "val": 2})["train"])) == 4


def test_a_plan_forgets_the_dimension_of_another_decoder(folder: Path) -> None:
    """A plan that measured recordings measures rows of other samples along their first dimension."""
    plan = TokenBudget("measure", max_tokens=100_000)
    list(Feeder(AudioFolder(folder), decode=DecodeAudio(RATE), batch_size=plan, collate_fn=pad_collate()))
    rows = [torch.zeros(length, 3) for length in (40_000, 70_000)]
    assert [len(batch[0]) for batch in Feeder(rows, batch_size=plan, collate_fn=pad_collate())] == [1, 1]


def test_bad_files_are_named_and_other_arguments_refused(folder: Path) -> None:
    """The length of an empty file or of something else is an error with its path; `seconds` and `dim` are checked."""
    (folder / "a/x.wav").write_bytes(b"")
    with pytest.raises(DecodeError, match=r"a/x\.wav.*no audio"):
        DecodeAudio(RATE).lengths(AudioFolder(folder))
    (folder / "a/x.wav").write_bytes(sound(chirp(1, RATE), RATE)[:9000])
    with pytest.raises(ValueError, match="truncated"):
        DecodeAudio(RATE)(folder / "a/x.wav")
    with pytest.raises(ValueError, match="or None for whole recordings"):
        DecodeAudio(RATE, 0)
    with pytest.raises(ValueError, match=r"dim=\) must be 0, the first dimension, or -1"):
        pad_collate(dim=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dim=-1 pads the last one"):
        pad_collate()([torch.zeros(2, 3), torch.zeros(2, 4)])
