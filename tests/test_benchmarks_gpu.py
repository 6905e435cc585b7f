"""The GPU benchmarks run here as far as they can: tiny, on the CPU and on a simulated device. No times are judged."""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from aiofeed.testing import SimulatedDevice
from benchmarks import report
from benchmarks.figures import Figure, at_least
from benchmarks.gpu import MODULES, __main__, resnet, setup
from benchmarks.harness import PROJECT

if TYPE_CHECKING:
    from pathlib import Path

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without one")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


def tiny(device: object, folder: Path) -> setup.Setup:
    return setup.Setup(device, rounds=1, quick=True, data=folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_every_benchmark_runs(name: str, device: str, inputs: Path) -> None:
    """Each gives its figures, or none where what it measures is not there."""
    given = SimulatedDevice() if device == "simulated" else device
    results = __main__.run([name], tiny(given, inputs))
    absent = name == "resident" or (name == "memory" and device == "cpu")
    assert absent or results
    for result in results:
        assert all(len(figure.values) == 1 for figure in result.figures)
        assert result.title in report.plain(result)


@no_gpu
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """No GPU is no error."""
    assert __main__.main([]) == 0
    assert "The GPU benchmarks were not run: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_line_names_the_device(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Conditions, tables and a tally, on the CPU to show that everything runs."""
    assert __main__.main(["copies", "--device", "cpu", "--quick", "--rounds", "1", "--data", str(inputs)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("cpu (cpu), driver ")
    assert "prefetch, pinned batches / bare loop" in output
    assert "the figures mean nothing" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["copy"], "no benchmark named copy; there are copies,"),
        (["--rounds", "0"], "must be at least 1, got 0"),
        (["--write", "--quick"], "--write takes a GPU"),
        (["--write", "--device", "cpu"], "--write takes a GPU"),
        (["--write", "copies"], "--write takes a GPU"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        __main__.parse(arguments)
    assert message in capsys.readouterr().err


def test_results_go_into_the_page(tmp_path: Path) -> None:
    """The hardware, the tally and the tables, between the markers of the page as it stands."""
    (tmp_path / "docs").mkdir()
    shutil.copy(PROJECT / __main__.PAGE, tmp_path / "docs")
    results = [report.Result("copies", "Copies", [Figure("ratio", (0.95,), target=at_least(0.9))])]
    text = __main__.write(results, "A card.", tmp_path).read_text()
    assert "A card.\n\n1 of 1 targets met.\n\n### Copies\n\n" in text
    assert "| ratio | 0.950 | 0.950 to 0.950 | ≥ 0.90 | met |" in text
    assert "None yet" not in text


def test_every_benchmark_states_its_question_and_its_target() -> None:
    for name in MODULES:
        text = import_module(f"benchmarks.gpu.{name}").__doc__ or ""
        assert text.partition("\n")[0].endswith("?"), name
        assert "Target" in text, name


def test_contenders_take_turns_after_one_that_does_not_count(tmp_path: Path) -> None:
    """Each is run once more than there are rounds, and the device's own time is in what is measured."""
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


def test_the_network_is_of_resnet_50_s_size() -> None:
    """25.6 million parameters, 1,000 classes."""
    with torch.device("meta"):
        model = resnet.resnet()
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
