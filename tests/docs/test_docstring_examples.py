"""Every public name has an example in its docstring, which runs as it stands."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import runpy
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

import aiofeed
from tests.support.example_files import write_example_files

pytestmark = pytest.mark.usefixtures("accelerator_started", "arrow_started", "zarr_started")

EXAMPLE = re.compile(r"^Example:\n    ```python\n(?P<code>.*?)^    ```$", re.MULTILINE | re.DOTALL)
MOST_LINES = 10
"""Lines of an example that are not blank; classes and errors need more than the others."""
NEEDS = {
    "Arrays": ("zarr", "numcodecs"),
    "Clips": ("av",),
    "DecodeAudio": ("av",),
    "DecodeTensor": ("safetensors",),
    "ArrayRecordShards": ("array_record",),
    "Episodes": ("av", "pyarrow"),
    "LitDataShards": ("litdata",),
    "Manifest": ("pyarrow",),
    "ParquetRows": ("pyarrow",),
    "Table": ("pyarrow",),
    "exporters": ("prometheus_client",),
    "exporters.OpenTelemetryMetrics": ("opentelemetry",),
    "exporters.PrometheusCollector": ("prometheus_client",),
    "lightning.FeederMonitor": ("lightning",),
    "processes.RayEngine": ("ray",),
}
"""Packages that an example needs and aiofeed does not."""
SILENT = {"errors.WorkerDiedError", "testing.WrongBytesError"}
"""Examples that print errors which do not occur here."""
SLOW = {"lightning.FeederMonitor"}
"""Examples whose imports take more than a second."""


def public_names() -> list[str]:
    """All public names without the `aiofeed.` in front, those of the namespaces too."""
    namespaces = {name: importlib.import_module(f"aiofeed.{name}") for name in aiofeed._NAMESPACES}
    names = [f"{namespace}.{name}" for namespace, module in namespaces.items() for name in module.__all__]
    return sorted([*aiofeed.__all__, *names, "lightning.FeederMonitor"])


def parameter(name: str) -> Any:
    """The parameter of a public name; one whose example needs other packages is marked."""
    marks = [pytest.mark.integration, pytest.mark.filterwarnings("default")] if name in NEEDS else []
    return pytest.param(name, marks=[*marks, *[pytest.mark.slow] * (name in SLOW)])


def example_of(name: str) -> str:
    """The code of the example in the docstring of a public name."""
    module, _, last = f"aiofeed.{name}".rpartition(".")
    text = inspect.getdoc(getattr(importlib.import_module(module), last))
    found = EXAMPLE.search(text or "")
    assert found, f'the docstring of aiofeed.{name} has no "Example:" with a block of Python'
    return textwrap.dedent(found["code"])


@pytest.fixture(scope="session")
def example_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the files that examples read."""
    folder = tmp_path_factory.mktemp("examples")
    write_example_files(folder)
    return folder


@pytest.mark.usefixtures("forked_workers", "one_thread")
@pytest.mark.parametrize("name", [parameter(name) for name in public_names()])
def test_the_example_runs(
    name: str, example_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a script of its own, in a folder with the files that all examples read, in a few lines."""
    for package in NEEDS.get(name, ()):
        module = pytest.importorskip(package)
        if package == "prometheus_client":  # what registers in its registry stays there as long as the process
            monkeypatch.setattr(module, "REGISTRY", module.CollectorRegistry())
    code = example_of(name)
    assert len([line for line in code.splitlines() if line.strip()]) <= MOST_LINES
    folder = tmp_path / "files"
    shutil.copytree(example_files, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "cache"))
    Path("example.py").write_text(code, encoding="utf-8")
    namespace: dict[str, Any] = runpy.run_path("example.py", run_name="__main__")
    for value in namespace.values():
        if isinstance(value, aiofeed.Feeder | aiofeed.processes.SharedTensors):
            value.close()
    assert capsys.readouterr().out or "print" not in code or name in SILENT


def test_the_help_of_a_feeder_begins_with_five_lines_that_work() -> None:
    """They stand before the arguments, behind one sentence."""
    before, _, _ = (inspect.getdoc(aiofeed.Feeder) or "").partition("Args:")
    assert before.splitlines()[2] == "Example:"
    assert len([line for line in example_of("Feeder").splitlines() if line.strip()]) == 5
