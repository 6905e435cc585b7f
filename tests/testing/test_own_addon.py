"""An add-on from outside, ``examples/own_addon``, plugs into a feeder: its source, its cache and its plan."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from aiofeed import Feeder
from aiofeed.errors import StateError
from aiofeed.testing import WrongSampleError, check_source
from tests.support.paths import ROOT

TEXTS = [b"x" * (1 + index * 7 % 13) + b"\n" for index in range(50)]


@pytest.fixture
def addon(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import own_addon

    return own_addon


@pytest.fixture
def lines(addon: Any, tmp_path: Path) -> Any:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"".join(TEXTS))
    return addon.Lines(path)


def new_feeder(addon: Any, lines: Any, **options: Any) -> Feeder[Any]:
    plan = addon.SimilarLengths([len(text) for text in TEXTS], 8)
    return Feeder(lines, decode=bytes, batch_size=plan, collate_fn=list, shuffle=True, **options)


def test_its_source_passes_the_check(lines: Any) -> None:
    """``check_source`` accepts it."""
    check_source(lines)


def test_its_plan_forms_the_batches(addon: Any, lines: Any) -> None:
    """Batches have neighbours in the order of lengths; each sample comes once in an epoch, batches in another order."""
    with new_feeder(addon, lines) as feeder:
        epochs = [list(feeder) for _ in feeder.epochs(2)]
    for batches in epochs:
        assert sorted(text for batch in batches for text in batch) == sorted(TEXTS)
        assert all(max(map(len, batch)) - min(map(len, batch)) <= 3 for batch in batches)
    assert epochs[0] != epochs[1]


def test_an_epoch_of_its_plan_resumes_exactly(addon: Any, lines: Any) -> None:
    """The rest of an epoch is the same; a state of another plan is refused."""
    with new_feeder(addon, lines) as feeder:
        whole = list(feeder)
        feeder.set_epoch(0)
        taken = [batch for _, batch in zip(range(2), feeder, strict=False)]
        state = feeder.state_dict()
    with new_feeder(addon, lines) as feeder:
        feeder.load_state_dict(state)
        assert taken + list(feeder) == whole
    with (
        Feeder(lines, decode=bytes, batch_size=8, collate_fn=list, shuffle=True) as feeder,
        pytest.raises(StateError),
    ):
        feeder.load_state_dict(state)


def test_its_cache_reads_each_sample_once(addon: Any, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second epoch reads nothing."""
    read: list[int] = []
    monkeypatch.setattr(addon.Lines, "_read", lambda self, index: (read.append(index), TEXTS[index])[1])
    with new_feeder(addon, lines, cache=addon.CacheOfReads()) as feeder:
        for _ in feeder.epochs(2):
            assert sorted(text for batch in feeder for text in batch) == sorted(TEXTS)
    assert sorted(read) == list(range(len(TEXTS)))


def test_its_cache_excludes_processes(addon: Any, lines: Any) -> None:
    """The error has the words of the cache."""
    with pytest.raises(ValueError, match=r"cache=CacheOfReads\(\).*each process would keep samples of its own"):
        new_feeder(addon, lines, cache=addon.CacheOfReads(), engine="process:2")


def test_it_runs(addon: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m own_addon`` prints the batches of two epochs."""
    runpy.run_module("own_addon", run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) > 10


@pytest.mark.parametrize("mistake", ["values", "keys"])
def test_a_wrong_source_fails_the_check(lines: Any, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """Samples that differ from read to read, and equal keys, are found."""
    count = iter(range(10_000))
    if mistake == "values":
        monkeypatch.setattr(type(lines), "_read", lambda self, index: str(next(count)).encode())
    else:
        monkeypatch.setattr(type(lines), "key", lambda self, index: "a line")
    with pytest.raises(WrongSampleError):
        check_source(lines)
