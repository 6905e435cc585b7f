"""Tests of the comparison with other loaders: arithmetic, tables, and that installed loaders do the same work."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import data, harness, report
from benchmarks.figures import Figure, at_least
from benchmarks.peers import CASES, __main__, contest, install, races, work
from benchmarks.peers.adapters import ADAPTERS
from benchmarks.peers.work import Decode, Judge, psnr, quiet_helpers
from tests.support import benchmarking
from tests.support.benchmarking import check_refused

inputs = benchmarking.inputs
tracked = benchmarking.tracked

RESULT = contest.CaseResult(
    "A race",
    "images",
    {
        "aiofeed, thread": [Figure("rate", (100.0, 120.0), "/s"), Figure("CPU per item", (900.0,), "us")],
        "two bare threads": [Figure("rate", (90.0,), "/s"), Figure("CPU per item", (800.0,), "us")],
        "Other": [Figure("rate", (80.0,), "/s"), Figure("CPU per item", (1.0,), "us"), Figure("dB", (33.0,), "dB")],
    },
    [Figure("speed: aiofeed, thread / Other", (1.1,), target=at_least(1.15))],
    {"Third": "needs <x> | y"},
)


def samples(*walls: float) -> list[dict[str, float]]:
    return [{"items": 10.0, "wall_s": wall, "cpu_s": 1.0} for wall in walls]


JUDGED = [{**sample, "worst_db": 33.0} for sample in samples(2, 2.5)]

RACE = contest.Race(
    {"aiofeed, thread": samples(1, 1), "two bare threads": samples(1, 1), "A": samples(4, 2), "B": JUDGED}, {}
)


# --- participants -----------------------------------------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, name: str, needed: str) -> None:
    """Let an adapter need a module that is missing."""
    monkeypatch.setitem(ADAPTERS, name, replace(ADAPTERS[name], needs=(needed,)))


def test_a_loader_that_is_not_installed_is_absent_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of which a module of a package is missing."""
    without(monkeypatch, "DALI", "no_such_package.part")
    assert ADAPTERS["DALI"].missing() == ["no_such_package.part"]
    without(monkeypatch, "Grain", "no_such_module")
    participants = contest.Participants(failures={"DALI": "no wheel for this Python"})
    present, absent = participants.divide(["DataLoader, persistent", "DALI, CPU", "Grain, per item"])
    assert present == ["DataLoader, persistent"]
    assert absent == {"DALI, CPU": "no wheel for this Python", "Grain, per item": "no_such_module is not installed"}


def test_only_leaves_out_the_other_peers_and_never_aiofeed() -> None:
    participants = contest.Participants(frozenset({"DataLoader"}))
    present, absent = participants.divide(["aiofeed, thread", "DataLoader, persistent", "torchdata.nodes, per item"])
    assert present == ["aiofeed, thread", "DataLoader, persistent"]
    assert not absent


def test_a_peer_may_fail_and_aiofeed_may_not() -> None:
    contest.check({"Grain, per item": "broke"})
    for label in ("aiofeed, thread", "two bare threads"):
        with pytest.raises(harness.BenchmarkError, match=f"{label}: broke"):
            contest.check({label: "broke"})


def test_every_case_states_its_question_and_its_targets() -> None:
    for name in CASES:
        text = __main__.case(name).__doc__ or ""
        assert text.partition("\n")[0].endswith("?"), name
        assert "Target" in text, name


def test_the_ways_of_all_cases_exist() -> None:
    """Each adapter is documented, and its ways are different."""
    labels = [*races.SAME, *races.BEST, *races.SCALED, *races.OWN_SCALE, *races.SMALL, *races.FED]
    existing = {f"{name}, {way}" for name, adapter in ADAPTERS.items() for way in adapter.ways}
    assert set(labels) == existing
    for name, adapter in ADAPTERS.items():
        assert adapter.loader.__doc__, name
        assert 0 < len(set(adapter.ways)) == len(adapter.ways), name


def test_freed_memory_is_kept_in_all_contenders_of_a_race(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The settings of malloc are in the environment in which the contenders start, and only there."""
    seen: list[dict[str, str]] = []

    def interleave(*given: object) -> dict[str, list[Any]]:
        seen.append({name: os.environ[name] for name in harness.KEEP_FREED_MEMORY})
        return {}

    monkeypatch.setattr(contest, "interleave", interleave)
    for name in harness.KEEP_FREED_MEMORY:
        monkeypatch.delenv(name, raising=False)
    contest.race([], harness.Settings(rounds=1, quick=True, data=tmp_path), {})
    assert seen == [harness.KEEP_FREED_MEMORY]
    assert not harness.KEEP_FREED_MEMORY.keys() & os.environ.keys()


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_the_fastest_peer_has_the_highest_median() -> None:
    """Bare contenders are no peers, and a missing one has no ratio; the table starts with the fastest."""
    (figure,) = RACE.first("aiofeed, thread", RACE.peers(), "the peers")
    assert figure.what == "speed: aiofeed, thread / first of the peers (B)"
    assert figure.values == (2.0, 2.5)
    assert figure.target == at_least(1.0)
    assert (RACE.peers(), RACE.ours()) == (["A", "B"], ["aiofeed, thread"])
    assert RACE.faster("aiofeed, thread", "C", 1.0) == RACE.first("aiofeed, thread", [], "nobody") == []
    assert list(RACE.columns()) == ["aiofeed, thread", "two bare threads", "B", "A"]
    assert [figure.what for figure in RACE.columns()["B"]] == ["rate", "CPU per item", "worst PSNR"]
    assert [figure.what for figure in RACE.columns()["A"]] == ["rate", "CPU per item"]


def test_psnr_follows_its_definition() -> None:
    flat = np.zeros((4, 4, 3), np.uint8)
    assert psnr(flat, flat) == 99.0
    assert psnr(flat, flat + np.uint8(1)) == pytest.approx(20 * np.log10(255))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 8, 8, 3), np.uint8), np.zeros(2, np.int64), "a batch of"),
        (np.zeros((2, 3, 8, 8), np.float32), np.zeros(2, np.int64), "images of float32"),
        (np.zeros((2, 3, 8, 8), np.uint8), np.zeros(2, np.int32), "labels of int32"),
        (np.zeros((2, 3, 8, 8), np.uint8), np.zeros(3, np.int64), "3 labels"),
    ],
)
def test_batches_of_another_shape_or_dtype_are_refused(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        work.checked(images, labels, (3, 8, 8))


# --- installing -------------------------------------------------------------------------------------------------------


def test_requirements_name_the_peer_in_a_comment() -> None:
    """Each of ours has a version, and its peer an adapter."""
    assert install.lines("# all\ntorch==1\n\ngrain==2  # Grain\n") == [
        install.Line("torch==1", ""),
        install.Line("grain==2", "Grain"),
    ]
    for line in install.lines(install.REQUIREMENTS.read_text()):
        assert "==" in line.requirement, line
        assert not line.peer or line.peer in ADAPTERS, line


def test_the_reason_is_the_line_with_the_cause(tmp_path: Path) -> None:
    """Failures are kept in the environment."""
    log = "error: subprocess-exited-with-error\n  RuntimeError: no opencv4: install it\nERROR: Failed to build x:\n"
    assert install.reason(log) == "RuntimeError: no opencv4: install it"
    assert install.reason("") == "pip failed without a message"
    assert install.failures(tmp_path) == {}
    (tmp_path / "peers-not-installed.json").write_text(json.dumps({"FFCV": "no compiler"}))
    assert install.failures(tmp_path) == {"FFCV": "no compiler"}


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_plain_table_has_all_participants_and_the_absent_ones() -> None:
    text = contest.plain("race", RESULT)
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == ["images", "min", "to", "max", "CPU", "per", "item", "dB"]
    assert lines[2] == ["aiofeed,", "thread", "110/s", "100/s", "to", "120/s", "900", "us"]
    assert lines[4] == ["Other", "80/s", "80/s", "to", "80/s", "1", "us", "33", "dB"]
    assert "absent: Third: needs <x> | y" in text
    assert "SHORT" in text


def test_kept_results_have_all_figures_and_the_absent_participants() -> None:
    kept = contest.kept_result("race", RESULT, "A machine.")
    assert (kept.name, kept.title) == ("peers race", "A race")
    assert {"images: Other", "CPU per item: two bare threads", "speed: aiofeed, thread / Other"} <= {
        figure.what for figure in kept.figures
    }
    assert kept.conditions == "A machine. Absent: Third (needs <x> | y)."


@pytest.fixture(scope="module")
def fonts_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let matplotlib open the font files, which it keeps open."""
    pytest.importorskip("matplotlib")
    contest.picture([("race", RESULT)], tmp_path_factory.mktemp("picture") / "first.png")


@pytest.mark.slow
@pytest.mark.usefixtures("fonts_open")
def test_writing_keeps_the_figures_and_draws_the_picture(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / report.PAGE).write_text("| Race | <!-- peers race: images: Other --> | | |\n")
    *_, picture = contest.write([("race", RESULT)], "A machine.", tmp_path)
    assert "**80/s**" in (tmp_path / report.PAGE).read_text()
    assert list(report.load(tmp_path / report.DATA)) == ["peers race"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jpeg"], "no case named jpeg; there are same_decode,"),
        (["--only", "dataloader"], "no peer named dataloader; there are DALI, DataLoader,"),
        (["--rounds", "0"], "must be at least 1, got 0"),
        (["--write", "--quick"], "--write needs all cases"),
        (["--write", "--only", "SPDL"], "--write needs all cases"),
        (["--write", "same_decode"], "--write needs all cases"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(__main__.parse, arguments, message, capsys)


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_contender_that_fails_is_dropped_with_its_reason_and_the_others_continue(inputs: Path) -> None:
    options = {"folder": str(data.jpeg_folder(inputs, 12)), "side": 32, "decoder": "pillow"}
    good = contest.contender("DataLoader, persistent", options)
    bad = harness.Contender("bad", contest.feed, {"label": "DataLoader, x", "work": {**options, "y": 1}})
    dropped: dict[str, str] = {}
    settings = harness.Settings(rounds=2, quick=True, data=inputs)
    samples = harness.interleave([bad, good], settings, dropped)
    assert list(samples) == [good.label]
    assert [sample["items"] for sample in samples[good.label]] == [12, 12]
    assert list(dropped) == ["bad"]
    assert "unexpected keyword argument 'y'" in dropped["bad"]


SHARED = [
    (name, way)
    for name, adapter in ADAPTERS.items()
    if name not in ("tf.data", "DALI", "FFCV")
    for way in adapter.ways
    if way != "ffmpeg"
]
"""Loaders that accept a decoder."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), SHARED)
def test_loaders_with_the_same_decoder_give_the_same_samples(name: str, way: str, inputs: Path) -> None:
    """Every loader gives the samples in the order of the files, in every epoch."""
    if missing := ADAPTERS[name].missing():
        pytest.skip(f"{', '.join(missing)} is not installed")
    quiet_helpers()
    task = work.Work(str(data.jpeg_folder(inputs, 12)), 48, "pillow", batch=5)
    whole = Decode("pillow", 48)
    expected = [(whole.file(path).tobytes(), label) for path, label in zip(task.paths, task.targets, strict=True)]
    with contest.epochs_of(f"{name}, {way}", task) as epoch:
        for _ in range(2):
            received = [
                (np.asarray(image).transpose(1, 2, 0).tobytes(), int(label))
                for images, labels in epoch()
                for image, label in zip(images, labels, strict=True)
                if work.checked(images, labels, (3, 48, 48))
            ]
            assert received == expected


@pytest.mark.slow
def test_the_worst_picture_of_an_epoch_is_reported(inputs: Path) -> None:
    paths = data.files_below(data.jpeg_folder(inputs, 12))
    pictures = np.stack([Decode("pillow", 32).file(path) for path in paths])
    labels = np.arange(12)
    judge = Judge(paths, list(range(12)), 32)
    judge.look(pictures[:5].transpose(0, 3, 1, 2), labels[:5])
    judge.look(pictures[5:].transpose(0, 3, 1, 2), labels[5:])
    assert judge.worst_db() == 99.0
    pictures[7] = 255 - pictures[7]
    judge = Judge(paths, list(range(12)), 32)
    judge.look(pictures.transpose(0, 3, 1, 2), labels)
    assert judge.worst_db() < 15


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["draft", "turbo"])
def test_scaled_decoders_equal_aiofeed(decoder: str, inputs: Path) -> None:
    if decoder == "turbo":
        pytest.importorskip("simplejpeg")
    import aiofeed

    path = data.files_below(data.jpeg_folder(inputs, 12))[0]
    decode = aiofeed.DecodeImage((48, 48), backend="pillow")
    with open(path, "rb") as file:
        assert np.array_equal(Decode(decoder, 48).file(path), decode(file.read()).numpy().transpose(1, 2, 0))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CASES)
def test_every_case_runs_with_only_torch_installed(name: str, inputs: Path) -> None:
    if name == "small_files_simplejpeg":
        pytest.importorskip("simplejpeg")
    settings = harness.Settings(rounds=1, quick=True, data=inputs, own_processes=False)
    found = __main__.case(name)(settings, contest.Participants(frozenset({"DataLoader"})))
    assert found.columns
    assert any(figure.target for figure in found.targets)
    assert not found.absent
    assert found.title in contest.plain(name, found)
