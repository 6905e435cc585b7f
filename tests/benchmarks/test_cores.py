"""Tests of the simulation of many cores and of the GIL's measurement; no times are checked."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import cores, gil, harness, report, simulated
from tests.support import benchmarking

tracked = benchmarking.tracked


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of 50 us, and reads of 0.1 ms."""
    monkeypatch.setattr(simulated, "SLEEP_US", 50)
    monkeypatch.setattr(simulated, "READ_US", 100)


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        *((simulated.OURS, kind) for kind in simulated.KINDS),
        *((simulated.BARE, kind) for kind in simulated.KINDS),
        (simulated.DEFAULT, "chunks"),
        ("aiofeed, copy thread", "chunks"),
    ],
)
def test_loaders_give_batches_of_one_shape(loader: str, kind: str, short: None) -> None:
    make, options = simulated.LOADERS[loader]
    batches = make(kind, 2, 4, **options)
    for batch in itertools.islice(batches, 3):
        assert (batch.shape, batch.dtype) == ((4, 3, simulated.SIDE, simulated.SIDE), torch.uint8)
    batches.close()


def test_the_pretended_cores_are_those_of_the_feeder_only(short: None) -> None:
    """A default feeder has as many decode threads as cores are pretended; then the machine has its own again."""
    from aiofeed.kernel.runtime import machine

    before = machine.cpus()
    with simulated.feeder("chunks", 7, 4, default=True) as feeder:
        next(iter(feeder))
        assert feeder.statistics().decode_threads == 7
    assert machine.cpus() == before


def test_the_ideal_is_limited_by_threads_or_by_the_gil() -> None:
    assert simulated.ideal("chunks", 64) == pytest.approx(50_000)
    assert simulated.ideal("Pillow-like", 2) == pytest.approx(2000)
    assert simulated.ideal("Pillow-like", 64) == pytest.approx(1e6 / 300)
    assert simulated.ideal("pure Python", 64) == pytest.approx(1000)


def test_samples_are_counted_up_to_the_batch_with_the_last_one_wanted() -> None:
    assert simulated.run(iter([torch.empty(4)] * 9), 10, math.inf) == 12
    assert simulated.run(iter([torch.empty(4)] * 9), math.inf, math.inf) == 36
    assert simulated.run(itertools.repeat(torch.empty(4)), math.inf, -1.0) == 4


def test_a_row_has_rates_ratios_and_cpu_time(tmp_path: Path, short: None) -> None:
    settings = harness.Settings(rounds=1, quick=True, data=tmp_path, own_processes=False)
    figures = list(cores.row(settings, 2, "chunks", 4, (simulated.OURS, simulated.BARE)))
    names = ["aiofeed", "aiofeed / bare pool", "CPU, aiofeed", "bare pool", "CPU, bare pool"]
    assert [figure.what for figure in figures] == [f"chunks, batch 4, 2 threads: {each}" for each in names]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of this process")
def test_the_flag_of_the_gil_tells_python_from_waiting() -> None:
    with gil.GilFlag() as flag:

        def share(work: Callable[[], object]) -> float:
            flag.start()
            work()
            return flag.stop()

        # The other process, or this one, may not run for as long as that, beside other load.
        assert any(share(partial(time.sleep, 0.05)) < 0.5 for _ in range(40))
        assert any(share(partial(simulated.hold_gil, 50_000)) > 0.5 for _ in range(40))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of this process")
def test_a_flag_that_is_not_found_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that looks for it ends, and its pipes are closed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(Popen(*arguments, **options))
        return started[0]

    Popen = subprocess.Popen  # noqa: N806 - a class
    monkeypatch.setattr(gil.subprocess, "Popen", start)
    answer = gil.GilFlag._answer
    monkeypatch.setattr(gil.GilFlag, "_answer", lambda self: answer(self) and "0")
    with pytest.raises(RuntimeError, match="no flag of the GIL"):
        gil.GilFlag()
    [process] = started
    assert process.returncode is not None
    assert process.stdin is not None
    assert process.stdin.closed


def test_the_picture_has_a_line_for_each_loader_in_both_schemes() -> None:
    loaders = [simulated.OURS, simulated.BARE, simulated.DEFAULT]
    medians = {
        f"chunks, batch 64, {threads} threads: {loader}": 700.0 * threads for threads in (2, 64) for loader in loaders
    }
    drawn = cores.picture(medians)
    root = ElementTree.fromstring(drawn)
    lines = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if "L" in path.get("d", "")]
    assert len(lines) == len(loaders)
    light, dark = re.split(r"@media \(prefers-color-scheme:dark\)", cores.STYLE)
    for kind, _ in cores.LINES.values():
        assert f".{kind}{{" in light
        assert f".{kind}{{" in dark
    for path in lines:
        for x, y in re.findall(r"([\d.]+) ([\d.]+)", path.get("d", "")):
            assert 0 <= float(x) <= 460
            assert 0 <= float(y) <= 300


def test_the_performance_page_agrees_with_the_results(tmp_path: Path) -> None:
    """Its tables and its picture are those of docs/benchmarks.json."""
    results = report.load(harness.PROJECT / report.DATA)
    (tmp_path / "docs").mkdir()
    for file in (cores.PAGE, cores.PICTURE):
        (tmp_path / file).write_bytes((harness.PROJECT / file).read_bytes())
    assert len(list(cores.fill(tmp_path, results))) == 2
    for file in (cores.PAGE, cores.PICTURE):
        assert (tmp_path / file).read_bytes() == (harness.PROJECT / file).read_bytes()
    assert "| 64 |" in (tmp_path / cores.PAGE).read_text()
