"""`aiofeed replay`: the samples of a step, from a saved state."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from aiofeed import DecodeImage, Feeder, ImageFolder, Mixture, Stream
from aiofeed.reports.commands.cli import main

ITEMS = list(range(23))


def feeder(**options: Any) -> Feeder[Any]:
    return Feeder(ITEMS, **{"batch_size": 2, "shuffle": "keyed", "shard": (0, 3), "seed": 3, **options})


def replay(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict[str, Any]]:
    assert main(["replay", *map(str, arguments)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("kind", ["json", "torch", "checkpoint", "list", "tuple"])
def test_the_samples_of_a_step_are_printed(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A state in JSON, of torch.save or within a checkpoint gives index, epoch, position and seed of each sample."""
    path, state = tmp_path / "state", feeder().state_dict()
    if kind == "json":
        path.write_text(json.dumps(state))
    else:
        inner = {"checkpoint": state, "list": [{"other": 1}, state], "tuple": ([state],)}
        whole = {"model": {"x": torch.zeros(3)}, "loops": {"feeder": inner.get(kind)}}
        torch.save(state if kind == "torch" else whole, path)
    for step in (0, 5):
        wanted = feeder().samples(step)
        found = replay(capsys, path, "--step", str(step))
        assert [(each["index"], each["seed"], each["epoch"]) for each in found] == [
            (each.index, each.seed, each.epoch) for each in wanted
        ]
        assert {each["key"] for each in found} == {None}
    [first, _] = replay(capsys, path, "--step", "1", "--rank", "2", "--epoch", "4")
    assert first["index"] == feeder(shard=(2, 3)).samples(1, epoch=4)[0].index


def test_one_of_several_states_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--at` names the place of a state among several, and the error names an example."""
    path, states = tmp_path / "state", [feeder(seed=seed).state_dict() for seed in (1, 2)]
    path.write_text(json.dumps({"loaders": states}))
    assert main(["replay", str(path), "--step", "0"]) == 1
    message = capsys.readouterr().err
    assert "2 states of feeders, at [('loaders', 0), ('loaders', 1)], and not one: choose one of them, as in" in message
    found = replay(capsys, path, "--step", "0", *message.split()[-2:])
    assert [each["index"] for each in found] == [sample.index for sample in feeder(seed=2).samples(0)]
    assert main(["replay", str(path), "--step", "0", "--at", "loaders"]) == 1


MIXTURES: dict[str, dict[str, Any]] = {
    "without weights": {},
    "first": {"weights": [2, 1, 3], "until": "first"},
    "number": {"weights": [0.5, 0.25, 7], "until": 3000},
    "random": {"weights": [2, 1, 3], "until": 50, "random": True},
}


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_mixtures_are_read(kind: str, shuffle: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The samples of a mixture are those of the feeder, of a later epoch and after a change of it, too."""

    def new(**more: Any) -> Feeder[Any]:
        sources = {"a": ITEMS, "b, ü; weights [1], 3 samples)": ITEMS[:9], "c": ITEMS[:5]}
        mixed = Mixture(sources, **{**MIXTURES[kind], **more})
        return Feeder(mixed, batch_size=2, shuffle=shuffle, shard=(0, 3), seed=3)

    mixed = new()
    for _ in mixed.steps(15):
        pass
    states = [mixed]
    if kind == "number":
        states.append(new(weights=[1, 2, 3]))
        states[-1].load_state_dict(mixed.state_dict())
        for _ in states[-1].steps(5):
            pass
    path = tmp_path / "state.json"
    for each in states:
        path.write_text(json.dumps(each.state_dict()))
        for step in (20, 700):
            named = [(sample.index, sample.source, sample.seed) for sample in each.samples(step)]
            found = replay(capsys, path, "--step", str(step))
            assert [(sample["index"], sample["source"], sample["seed"]) for sample in found] == named


def test_with_the_data_it_prints_keys(jpeg_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--data` each sample has its key; other data are refused."""
    images = Feeder(ImageFolder(jpeg_folder), decode=DecodeImage(8), batch_size=2, shuffle=True, shard=None)
    path = tmp_path / "state.json"
    path.write_text(json.dumps(images.state_dict()))
    found = replay(capsys, path, "--step", "2", "--data", jpeg_folder)
    assert [each["key"] for each in found] == [sample.key for sample in images.samples(2)]
    path.write_text(json.dumps(feeder().state_dict()))
    assert main(["replay", str(path), "--step", "0", "--data", str(jpeg_folder)]) == 1
    assert "the state is of other data than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ({"a": 1}, ["--step", "0"], "has 0 states of feeders"),
        ({"a": {"handed_out": []}, "b": {"handed_out": []}}, ["--step", "0"], r"2 states of feeders, at \[\('a',\), "),
        (
            feeder(shuffle=False, weights=[1.0] * 23).state_dict(),
            ["--step", "0"],
            r"order, weights=: call feeder\.samp",
        ),
        (
            Feeder(Mixture({"a": ITEMS}, lambda _: [1], until=9), batch_size=2).state_dict(),
            ["--step", "0"],
            "not have the whole order: weights= is a function",
        ),
        (
            Feeder(Mixture({"a": ITEMS}), batch_size=2, exclude=[1]).state_dict(),
            ["--step", "0"],
            "or there is exclude=",
        ),
        (Feeder(Stream(ITEMS), batch_size=2).state_dict(), ["--step", "3"], "the whole order, a Stream"),
        (feeder().state_dict(), ["--step", "-1"], "step must be at least 0"),
        (feeder().state_dict(), ["--step", "0", "--rank", "3"], "0 <= rank < world_size"),
    ],
    ids=["none", "two", "weights", "function", "exclude", "stream", "step", "rank"],
)
def test_what_cannot_be_replayed_is_an_error(
    content: Any, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, and one line says what is missing."""
    path = tmp_path / "state.json"
    path.write_text(json.dumps(content))
    assert main(["replay", str(path), *arguments]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_a_file_that_is_no_state_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, and one with other content, are errors of one line."""
    assert main(["replay", str(tmp_path / "none"), "--step", "0"]) == 1
    (tmp_path / "text").write_text("no state")
    assert main(["replay", str(tmp_path / "text"), "--step", "0"]) == 1
    assert len(capsys.readouterr().err.splitlines()) >= 2
