"""Tests of the benchmarks: arithmetic, tables, and that each one runs. No times are checked."""

from __future__ import annotations

import math
import re
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import MODULES, __main__, contenders, data, figures, harness, jpeg, report, worker
from benchmarks.figures import Figure, at_least, at_most
from tests.support import benchmarking
from tests.support.benchmarking import check_refused

inputs = benchmarking.inputs
tracked = benchmarking.tracked

RESULTS = [
    report.Result(
        "speed",
        "A race",
        [
            Figure("speed / other", (1.2, 0.9, 1.1), target=at_least(1.15)),
            Figure("time", (12.0, 13.0, 1234.5), "us", at_most(50)),
            Figure("rate: other", (31000.4,), "/s"),
        ],
    )
]


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_a_figure_has_median_and_extremes_of_its_rounds() -> None:
    figure = Figure("speed", (3.0, 1.0, 2.0, 10.0))
    assert (figure.median, figure.low, figure.high) == (2.5, 1.0, 10.0)
    with pytest.raises(ValueError, match="'speed' has no values"):
        Figure("speed", ())


def test_ratios_are_taken_within_each_round_before_the_median() -> None:
    """Of speed, and of CPU time per item, whose unit is microseconds."""
    ours = [{"items": 10.0, "wall_s": 1.0}, {"items": 10.0, "wall_s": 4.0}, {"items": 10.0, "wall_s": 1.0}]
    theirs = [{"items": 10.0, "wall_s": 2.0}, {"items": 10.0, "wall_s": 8.0}, {"items": 10.0, "wall_s": 1.0}]
    figure = figures.Race(ours=ours, theirs=theirs).speed("ours", "theirs", 1.5, "case")
    assert (figure.what, figure.values, figure.verdict) == ("case: speed / theirs", (2.0, 2.0, 1.0), "met")
    with pytest.raises(ValueError, match="shorter"):
        figures.per((1.0, 2.0), (1.0,))
    race = figures.Race(ours=[{"cpu_s": 0.5, "items": 1000.0}], theirs=[{"cpu_s": 1.0, "items": 1000.0}])
    assert race.cpu_us("ours") == (500.0,)
    assert race.cpu("ours", "theirs", 0.5).values == (0.5,)


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (at_least(1.1), 1.1, "met"),
        (at_least(1.1), 1.0999, "SHORT"),
        (at_most(50), 50.0, "met"),
        (at_most(50), 50.1, "SHORT"),
        (None, 0.0, ""),
    ],
)
def test_the_bound_itself_counts_as_met(target: figures.Target | None, value: float, verdict: str) -> None:
    assert Figure("speed", (value,), target=target).verdict == verdict


def test_each_round_has_all_contenders_and_starts_with_the_next_one() -> None:
    assert [harness.turns(3, number) for number in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_plain_table_shows_median_spread_target_and_verdict() -> None:
    """Ratios below 1 have three digits; the tally below it lists the missed targets."""
    lines = [line.split() for line in report.plain(RESULTS[0]).splitlines()]
    assert lines[0] == ["A", "race", "[speed]"]
    assert lines[2] == ["speed", "/", "other", "1.10", "0.900", "to", "1.20", "≥", "1.15", "SHORT"]
    assert lines[3] == ["time", "13", "us", "12", "us", "to", "1,234", "us", "≤", "50", "us", "met"]
    assert lines[4] == ["rate:", "other", "31,000/s", "31,000/s", "to", "31,000/s"]
    assert report.tally(RESULTS) == "1 of 2 targets met; short:\n\n- A race: speed / other"
    assert [report.number(ratio) for ratio in (0.9794, 0.9999)] == ["0.979", "1.00"]


PAGE = """A page.

| label | times | range | to repeat |
| --- | --- | --- | --- |
| A race | <!-- speed: speed / other --> | | `make bench ARGS=speed` |
| Losses | <!-- other: a / b --> **0.500** | 0.400 to 0.600 | `make bench ARGS=other` |
"""


def test_results_are_the_same_after_saving(tmp_path: Path) -> None:
    results = {result.name: result for result in RESULTS}
    report.save(results, tmp_path / "found.json")
    assert report.load(tmp_path / "found.json") == results
    assert report.load(tmp_path / "absent.json") == {}


def test_the_page_has_the_figures_that_it_names() -> None:
    """Rows without a result stay as they are; filling in again changes nothing."""
    text, answers = report.answered(PAGE, {result.name: result for result in RESULTS})
    assert "| A race | <!-- speed: speed / other --> **1.10** | 0.900 to 1.20 | `make bench ARGS=speed` |" in text
    assert text.splitlines()[5] == PAGE.splitlines()[5]
    assert [(label, figure.what) for label, figure in answers] == [("A race", "speed / other")]
    assert report.answered(text, {result.name: result for result in RESULTS})[0] == text


def test_the_page_agrees_with_the_results() -> None:
    """Every row of docs/benchmarks.md has its figure of docs/benchmarks.json."""
    page = (harness.PROJECT / report.PAGE).read_text()
    text, answers = report.answered(page, report.load(harness.PROJECT / report.DATA))
    assert text == page
    assert len(answers) == page.count("<!-- ")
    assert "SHORT" not in page


def test_the_first_page_agrees_with_the_results() -> None:
    """The three numbers of docs/index.md are figures of docs/benchmarks.json; an older number is replaced."""
    page, results = (harness.PROJECT / report.FRONT).read_text(), report.load(harness.PROJECT / report.DATA)
    assert page.count("<!-- ") == 3
    assert report.front_page(page, results) == page
    assert report.front_page(re.sub(r"--> \*\*[^*]+", "--> **0", page), results) == page


def test_results_replace_only_the_text_between_the_markers() -> None:
    text = "before\n<!-- x:begin -->\nold\n<!-- x:end -->\nafter\n"
    assert report.replace_between(text, "x", "new") == "before\n<!-- x:begin -->\nnew\n<!-- x:end -->\nafter\n"
    for wrong in ("", "<!-- x:end --><!-- x:begin -->", "<!-- x:begin -->"):
        with pytest.raises(ValueError, match="<!-- x:begin -->"):
            report.replace_between(wrong, "x", "new")


def test_writing_keeps_other_results_and_fills_in_page_and_chart(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / report.PAGE).write_text(PAGE)
    other = report.Result("other", "Another", [Figure("a / b", (0.25,))], "A machine.")
    report.write([other], tmp_path)
    written = report.write(RESULTS, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [report.DATA, report.PAGE, report.CHART]
    assert list(report.load(tmp_path / report.DATA)) == ["other", "speed"]
    assert "**0.250**" in (tmp_path / report.PAGE).read_text()
    assert "A race" in (tmp_path / report.CHART).read_text()


def test_the_chart_shows_each_figure_in_both_schemes(tmp_path: Path) -> None:
    """The fastest first, the ones below 1 to the left of it, with colours for a dark page, and no other files."""
    ratios = [("Slow & small", Figure("a", (0.8, 0.9, 0.85))), ("Fast", Figure("b", (20.0, 30.0, 25.0)))]
    report.readme_chart(ratios, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    root = ElementTree.fromstring(text)
    words = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [word for word in words if word in ("Fast", "25x", "Slow & small", "0.85x")] == [
        "Fast",
        "25x",
        "Slow & small",
        "0.85x",
    ]
    bars = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if each.get("class") in ("faster", "slower")]
    ends = [(float(bar.get("x", "0")), float(bar.get("x", "0")) + float(bar.get("width", "0"))) for bar in bars]
    assert ends[1][1] == ends[0][0]
    assert "prefers-color-scheme:dark" in text
    assert "href" not in text


def test_the_committed_chart_is_that_of_the_page(tmp_path: Path) -> None:
    """`python -m benchmarks.report` draws docs/readme-chart.svg again, below 20 KB."""
    page = (harness.PROJECT / report.PAGE).read_text()
    report.readme_chart(report.answered(page, report.load(harness.PROJECT / report.DATA))[1], tmp_path / "chart.svg")
    drawn = (tmp_path / "chart.svg").read_text()
    assert drawn == (harness.PROJECT / report.CHART).read_text()
    assert len(drawn) < 20_000


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jpg"], "no benchmark named jpg; there are jpeg,"),
        (["--rounds", "0"], "must be at least 1, got 0"),
        (["--write", "--quick"], "--write needs real inputs"),
        (["--write", "jpeg", "--rounds", "4"], "5 rounds or more"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(__main__.parse, arguments, message, capsys)


def test_every_benchmark_states_its_question_and_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    """In its docstring; the command lists the questions."""
    for name in MODULES:
        text = import_module(f"benchmarks.{name}").__doc__ or ""
        assert text.partition("\n")[0].endswith("?"), name
        assert "Target" in text, name
    __main__.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(MODULES)
    assert all(line.endswith("?") for line in lines)


# --- running ----------------------------------------------------------------------------------------------------------


def test_the_worker_adds_wall_clock_and_cpu_time() -> None:
    sample = worker.measured(lambda: {"items": 3.0})
    assert sample["items"] == 3.0
    assert sample["wall_s"] > 0
    assert sample["cpu_s"] >= 0


@pytest.mark.parametrize(("least_s", "items"), [(0.0, 3), (5.0, 9)])
def test_epochs_are_measured_until_the_time_is_over(
    least_s: float, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least one, after the warm-up; all their samples count."""
    clock = iter([0.0, 1.0, 2.0, math.inf])
    monkeypatch.setattr(contenders.time, "perf_counter", lambda: next(clock))
    with contenders.epochs(lambda: ["a", "bc"], least_s=least_s) as measure:
        assert measure() == {"items": items}


@pytest.mark.slow
def test_a_contender_that_fails_ends_the_benchmark_with_its_traceback(tmp_path: Path) -> None:
    broken = harness.Contender("broken", jpeg.bare_threads, {"folder": str(tmp_path), "wrong": 1})
    with pytest.raises(harness.BenchmarkError, match=r"(?s)^broken:.*unexpected keyword argument 'wrong'"):
        harness.interleave([broken], harness.Settings(rounds=1, quick=True, data=tmp_path))


@pytest.mark.slow
def test_a_contender_that_beats_every_bound_is_an_error() -> None:
    """A bound is the best bare program; one that another contender beats by more than noise is none."""

    def at(*seconds: float) -> list[dict[str, float]]:
        return [{"items": 100.0, "wall_s": wall_s} for wall_s in seconds]

    samples = figures.Race(threads=at(2.0, 2.0, 9.0), processes=at(1.0, 1.1, 1.0), loader=at(0.97, 1.06, 0.97))
    harness.check_bounds(["threads", "processes"], samples)
    harness.check_bounds([], samples)
    with pytest.raises(harness.BenchmarkError, match=r"loader does 2\.06 times the items of threads: no bound"):
        harness.check_bounds(["threads"], figures.Race({label: samples[label] for label in ("threads", "loader")}))


def test_all_contenders_decode_to_the_same_pixels(inputs: Path) -> None:
    import aiofeed

    decoder = aiofeed.DecodeImage((jpeg.SIZE, jpeg.SIZE), scaled=False)
    paths = data.files_below(data.jpeg_folder(inputs, 96))[::16]
    dataset = jpeg.Images(paths)
    for number, path in enumerate(paths):
        with open(path, "rb") as file:
            ours = decoder(file.read()).numpy()
        assert np.array_equal(ours, jpeg.decode_file(path).transpose(2, 0, 1))
        assert np.array_equal(ours, dataset[number][0].numpy())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_runs(name: str, inputs: Path, obstore_started: None, zarr_started: None) -> None:
    # Only one benchmark uses processes, as in real runs; importing torch in all of them would take too long.
    settings = harness.Settings(rounds=1, quick=True, data=inputs, own_processes=name == "slow_reads")
    result = __main__.run(name, settings)
    assert any(figure.target for figure in result.figures)
    assert all(len(figure.values) == 1 for figure in result.figures)
    assert result.title in report.plain(result)
