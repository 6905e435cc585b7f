"""Tests of the GPU benchmarks on the CPU and on a simulated device, with tiny inputs. No times are checked."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import report
from benchmarks.figures import Figure, at_least
from benchmarks.gpu import MODULES, __main__, images, runner, setup, threads
from tests.support.benchmarking import check_refused
from tests.support.simulated_device import SimulatedDevice

if TYPE_CHECKING:
    from pathlib import Path

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


def run(name: str, device: object, folder: Path) -> runner.Part:
    return runner.run_here(name, {"device": device, "rounds": 1, "quick": True, "data": folder, "limit_s": 60.0})


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_every_benchmark_runs(name: str, device: str, inputs: Path) -> None:
    """Each benchmark returns its figures, or none if the device cannot give them."""
    found = run(name, SimulatedDevice() if device == "simulated" else device, inputs)
    assert not found.failed
    assert not found.real
    assert bool(found.figures) == (name != "trace" and (name, device) != ("memory", "cpu"))
    assert all(len(figure.values) == 1 for figure in found.figures)
    assert found.title in runner.plain(found)


def test_a_benchmark_that_fails_reports_its_error(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of a benchmark that fails has the error in one line, its notes and the machine."""

    def fail(given: setup.Setup) -> list[Figure]:
        given.notes.append("Something was left out.")
        raise RuntimeError("CUDA error:\nno kernel image")

    monkeypatch.setattr(import_module("benchmarks.gpu.copies"), "run", fail)
    found = run("copies", "cpu", inputs)
    assert found.failed == "RuntimeError: CUDA error: no kernel image"
    assert found.notes == ("Something was left out.",)
    assert found.machine.startswith("cpu (cpu); driver ")


@no_gpu
@pytest.mark.parametrize("arguments", [[], ["copies", "--rounds", "1"], ["--device", "cuda:0"]])
def test_without_a_gpu_nothing_runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU the command prints the reason and exits with 0."""
    assert __main__.main(arguments) == 0
    assert "The GPU benchmarks were not run: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_line_names_the_device(inputs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With ``--device cpu`` the command prints conditions, tables and a tally, and saves the results."""
    saved = inputs / "saved.json"
    options = ["--device", "cpu", "--quick", "--rounds", "1", "--data", str(inputs), "--save", str(saved)]
    assert __main__.main(["overlap", "copies", *options]) == 0
    output = capfd.readouterr().out
    assert output.startswith("\ncpu (cpu); driver ")
    assert output.count("driver") == 1
    assert "prefetch, pinned batches / bare loop" in output
    assert "the figures mean nothing" in output
    found = runner.from_json(saved.read_text())
    assert [part.name for part in found] == ["copies", "overlap"]
    assert not any(part.real for part in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["copy"], "no benchmark named copy; there are copies,"),
        (["--rounds", "0"], "must be at least 1, got 0"),
        (["--limit-s", "0"], "must be more than 0, got 0"),
        (["--load", "nowhere.json"], "--load: "),
        (["--write", "--quick"], "--write needs a GPU"),
        (["--write", "--device", "cpu"], "--write needs a GPU"),
        (["--write", "--rounds", "3"], "--write needs a GPU"),
        (["--write", "copies"], "--write needs a GPU"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(__main__.parse, arguments, message, capsys)


def a_part(name: str, **options: object) -> runner.Part:
    figures = (Figure("ratio", (0.95,), target=at_least(0.9)),)
    return runner.Part(name, name.title(), **{"figures": figures, "machine": "A card.", **options})  # type: ignore[arg-type]


class TestResults:
    def test_results_are_written_into_the_page(self, tmp_path: Path) -> None:
        """Hardware and tables are written between the markers of the page, without targets."""
        (tmp_path / "docs").mkdir()
        shutil.copy(__main__.PROJECT / runner.PAGE, tmp_path / "docs")
        text = runner.write([a_part("copies")], tmp_path).read_text()
        assert "A card.\n\n### Copies\n\n" in text
        assert "| ratio | 0.950 | 0.950 to 0.950 |\n" in text
        assert "target" not in text
        assert "None yet" not in text

    def test_a_failed_part_is_shown_with_its_error(self) -> None:
        """A failed part is in the page, on the terminal and in the tally; notes follow their table."""
        parts = [a_part("copies", notes=("A note.",)), a_part("images", figures=(), failed="OutOfMemoryError: 20 GiB")]
        assert runner.markdown(parts).endswith(" 0.950 |\n\nA note.\n\n### Images\n\nFailed: OutOfMemoryError: 20 GiB")
        assert "FAILED: OutOfMemoryError: 20 GiB" in runner.plain(parts[1])
        assert runner.plain(parts[0]).endswith("  A note.")
        assert runner.tally(parts) == "1 of 1 targets met.\n\nFailed: images."

    def test_a_part_that_does_not_apply_is_only_on_the_terminal(self) -> None:
        """A part without figures and error is left out of the page, and marked on the terminal."""
        parts = [a_part("copies"), a_part("trace", figures=())]
        assert "Trace" not in runner.markdown(parts)
        assert runner.plain(parts[1]) == "Trace  [trace]\n  does not apply here"

    def test_parts_of_two_machines_each_name_theirs(self) -> None:
        parts = [a_part("copies"), a_part("images", machine="Another card.")]
        text = runner.markdown(parts)
        assert "### Copies\n\nA card.\n\n|" in text
        assert "### Images\n\nAnother card.\n\n|" in text

    def test_json_round_trip(self) -> None:
        """``from_json(to_json(parts))`` equals ``parts``."""
        parts = [a_part("copies", notes=("A note.",)), a_part("images", figures=(), failed="why", real=False)]
        assert runner.from_json(runner.to_json(parts)) == parts

    def test_later_ones_replace_earlier_ones(self) -> None:
        """The last part of a name counts; the parts are in the order of the modules."""
        old, new = a_part("images", duration_s=1.0), a_part("images", duration_s=2.0)
        assert runner.merged([old], [a_part("copies"), new]) == [a_part("copies"), new]

    def test_the_page_is_written_from_saved_results(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """``--load`` of several files writes the page without a GPU, unless a part is missing."""
        (tmp_path / "docs").mkdir()
        shutil.copy(__main__.PROJECT / runner.PAGE, tmp_path / "docs")
        monkeypatch.setattr(__main__, "PROJECT", tmp_path)
        first, second = tmp_path / "first.json", tmp_path / "second.json"
        first.write_text(runner.to_json([a_part(name) for name in MODULES[:3]]))
        second.write_text(runner.to_json([a_part(name) for name in MODULES[3:]]))
        with pytest.raises(SystemExit):
            __main__.main(["--load", str(first), "--write"])
        assert __main__.main(["--load", str(first), str(second), "--write"]) == 0
        assert (tmp_path / runner.PAGE).read_text().count("| ratio | 0.950 |") == len(MODULES)
        assert capsys.readouterr().out.count("A card.") == 1

    def test_results_of_tiny_inputs_are_not_written(self, tmp_path: Path) -> None:
        saved = tmp_path / "saved.json"
        saved.write_text(json.dumps([json.loads(runner.to_json([a_part(name, real=False)]))[0] for name in MODULES]))
        with pytest.raises(SystemExit):
            __main__.parse(["--load", str(saved), "--write"])


def test_every_benchmark_states_its_question_and_its_target() -> None:
    for name in MODULES:
        text = import_module(f"benchmarks.gpu.{name}").__doc__ or ""
        assert text.partition("\n")[0].endswith("?"), name
        assert "Target" in text, name


class TestHardware:
    def test_nvidia_smi_reports_the_bus(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The bus is the one that nvidia-smi reports; without nvidia-smi, or if it fails, it is unknown."""
        monkeypatch.setenv("PATH", str(tmp_path))
        assert setup.bus(0) == "unknown"
        program = tmp_path / "nvidia-smi"
        for text, bus in (("echo '5, 16'", "5 x16"), ("echo No devices; exit 6", "unknown")):
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)
            assert setup.bus(0) == bus

    def test_versions_that_torch_was_built_with(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_002)
        assert "; CUDA 13.0, cuDNN 91002; " in setup.Setup("cpu", 1, True, tmp_path).conditions()

    def test_without_pillow_the_report_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "PIL", None)
        assert report.pillow() == "no Pillow"


class TestTurns:
    def test_contenders_are_interleaved_after_a_warm_up(self, tmp_path: Path) -> None:
        """Each contender runs once more than there are rounds, and the measured time includes the device's."""
        order: list[str] = []
        device = SimulatedDevice(latency="late")
        given = setup.Setup(device, rounds=2, quick=True, data=tmp_path)

        def work(label: str) -> dict[str, float]:
            order.append(label)
            device.sleep()
            return {"items": 1.0}

        samples = given.interleave({label: lambda label=label: work(label) for label in "ab"})
        assert order == ["a", "b", "a", "b", "b", "a"]
        assert [len(found) for found in samples.values()] == [2, 2]
        assert all(sample["wall_s"] > 0 and sample["items"] == 1.0 for sample in samples["a"])
        assert device.queued == 0

    def test_no_round_starts_that_would_end_too_late(self, tmp_path: Path) -> None:
        """The longest round decides; the first round always runs, and a note gives the number of rounds."""
        now = 0.0
        notes: list[str] = []

        def work() -> dict[str, float]:
            nonlocal now
            now += 10.0
            return {}

        def rounds(limit_s: float) -> int:
            given = setup.Setup("cpu", 5, True, tmp_path, limit_s, clock=lambda: now, notes=notes)
            return len(given.interleave({"a": work})["a"])

        assert rounds(60.0) == 5
        assert notes == []
        assert rounds(45.0) == 3  # ten seconds of warm-up, and three rounds
        assert rounds(0.0) == 1
        assert notes == ["3 rounds instead of 5: the time was over.", "1 rounds instead of 5: the time was over."]


def test_batches_are_counted_from_the_first_after_the_settling_time() -> None:
    """The batch that starts the interval does not count, the one that ends it does."""
    now = 0.0

    def every(seconds: float, count: int):
        nonlocal now
        for _ in range(count):
            now += seconds
            yield None

    # From 0.75 s to 2.0 s.
    assert threads.counted(every(0.25, 100), lambda: now, settle_s=0.6, count_s=1.2) == (5, 1.25)
    with pytest.raises(RuntimeError, match="the batches ended after"):
        threads.counted(every(0.25, 2), lambda: now, settle_s=0.6, count_s=1.2)


def test_shares_of_the_device_s_time() -> None:
    """Throughput is images per step time, idle time the ratio of steps (never negative), waiting the gaps."""
    samples = {
        "resident": [{"step_s": 0.1}, {"step_s": 0.1}],
        "files": [{"step_s": 0.125, "gap_s": 0.005}, {"step_s": 0.0999, "gap_s": 0.0}],
    }
    found = {figure.what: figure.values for figure in images.figures(samples, 256)}
    assert found["images per second from files / on a resident batch"] == pytest.approx((0.8, 0.1 / 0.0999))
    assert found["share of time in which the GPU idles"] == pytest.approx((0.2, 0.0))
    assert found["share of time in which it waits between steps"] == pytest.approx((0.04, 0.0))
    assert found["images: files"] == pytest.approx((2048, 256 / 0.0999))


def test_without_photographs_there_are_pictures_of_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If photographs cannot be loaded, for any reason, pictures of noise are used, and a note says so."""

    def fetch() -> dict[str, object]:
        raise OSError("no network")

    notes: list[str] = []
    monkeypatch.setattr("benchmarks.data.photographs", fetch)
    found = images.files(setup.Setup("cpu", 1, True, tmp_path, notes=notes), 12)
    assert len(found) == 12
    assert notes == ["The files are pictures of noise: there are no photographs (OSError: no network)."]
    assert len(images.endless(setup.Setup("cpu", 1, True, tmp_path), 30)) == 30


@pytest.mark.filterwarnings("ignore:The global interpreter lock:RuntimeWarning")  # of triton on Python 3.14t
def test_the_network_is_of_resnet_50_s_size() -> None:
    """25.6 million parameters, 1,000 classes."""
    with torch.device("meta"):
        model = images.resnet()
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
