"""`aiofeed bench`: the data it opens, its measurements, its report and its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiofeed
from aiofeed.reports.commands import bench as bench_command
from aiofeed.reports.commands.cli import main
from tests.support.shard_files import write_tar
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of milliseconds, and indexes in a folder of the test."""
    monkeypatch.setattr(bench_command, "WARM_UP_S", 0.01)
    monkeypatch.setattr(bench_command, "STEP_S", 0.02)
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def given_rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Rates of the settings in place of those of real processes; the steps that were run are added as keys."""
    rates: dict[str, float] = {"read": 9000.0, "decode": 900.0, "threads": 800.0, "process": 700.0, "limits": 850.0}

    def feed(source: Any, **options: Any) -> tuple[float, float]:
        if options["decode"] is bench_command.nothing:
            return rates["read"], 2.0**20
        if isinstance(source, bench_command._InMemory):
            return rates["decode"], 0.0
        return rates["process" if "engine" in options else "limits" if "limits" in options else "threads"], 0.0

    monkeypatch.setattr(bench_command, "_feed", feed)
    monkeypatch.setattr(bench_command, "_torch_rate", lambda *_: 400.0)
    monkeypatch.setattr(bench_command.machine, "cpus", lambda: 4)
    return rates


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
class TestReal:
    @pytest.fixture(autouse=True)
    def one_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench_command.machine, "cpus", lambda: 1)

    def test_folder(self, jpeg_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Every step of a tiny folder has a rate, and the recommended code runs."""
        found = report_of(capsys, str(jpeg_folder), "--size", "32", "--batch-size", "8")
        assert set(found["samples_per_s"]) - {"256 reads"} == {"read", "decode", "threads", "process:1", "DataLoader"}
        assert min(found["samples_per_s"].values()) > 0
        assert found["read_bytes_per_s"] > 0
        namespace: dict[str, Any] = {}
        exec(found["code"], namespace)
        with namespace["feeder"] as feeder:
            assert next(iter(feeder))[0].shape == (8, 3, 32, 32)

    @pytest.mark.usefixtures("arrow_started")
    def test_manifest(self, jpeg_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The files that a manifest lists."""
        pytest.importorskip("pyarrow")
        paths = [str(file) for file in sorted(jpeg_folder.rglob("*.jpg"))]
        (tmp_path / "train.csv").write_text("\n".join(["path", *paths]))
        found = report_of(capsys, str(tmp_path / "train.csv"), "--size", "32", "--batch-size", "4")
        assert min(found["samples_per_s"].values()) > 0
        assert "aiofeed.Manifest(" in found["code"]

    def test_shards(self, jpeg_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Shards are measured in the same way, with `shuffle="window"`."""
        files = sorted(jpeg_folder.rglob("*.jpg"))
        for number in range(2):
            write_tar(tmp_path / f"{number}.tar", [(each.name, each.read_bytes()) for each in files[number::2]])
        found = report_of(capsys, str(tmp_path / "{0..1}.tar"), "--size", "32", "--batch-size", "8")
        assert min(found["samples_per_s"].values()) > 0
        assert 'shuffle="window"' in found["code"]
        namespace: dict[str, Any] = {}
        exec(found["code"], namespace)
        with namespace["feeder"] as feeder:
            assert sum(map(len, feeder)) == len(files)

    def test_damaged_files(
        self, make_image_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Some damaged files do not end the measurement; if all are damaged, it ends with one line."""
        folder = make_image_folder(tmp_path / "images", per_class=6)
        files = sorted(folder.rglob("*.jpg"))
        files[3].write_bytes(b"no image")
        assert min(report_of(capsys, str(folder), "--size", "32", "--batch-size", "4")["samples_per_s"].values()) > 0
        for file in files:
            file.write_bytes(b"no image")
        assert main(["bench", str(folder)]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("aiofeed bench: ")]
        assert len(lines) == 1

    @pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
    @pytest.mark.parametrize("step", ["reading", "process:1", "DataLoader"])
    def test_ctrl_c(self, jpeg_folder: Path, step: str, tmp_path: Path) -> None:
        """Ctrl-C in a terminal ends it with exit code 130, without a traceback of any of its processes."""
        code = (
            "import sys\n"
            "from aiofeed.reports.commands.cli import main\n"
            "from aiofeed.reports.commands import bench as b\n"
            "b.machine.cpus, b.WARM_UP_S, say = lambda: 1, 0.01, b._say\n"
            "def long_step(text):\n"
            f"    b.STEP_S = 60.0 if {step!r} in text else 0.01\n"
            "    say(text)\n"
            "b._say = long_step\n"
            f"sys.exit(main(['bench', {str(jpeg_folder)!r}, '--size', '32', '--batch-size', '8']))"
        )
        log = tmp_path / "stderr"
        with log.open("w") as file:
            process = subprocess.Popen([sys.executable, "-c", code], stderr=file, start_new_session=True)
        try:
            until(lambda: step in log.read_text(), 60)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
            process.wait()
        assert {line.partition(":")[0] for line in log.read_text().splitlines()} == {"measuring"}


class TestReport:
    def test_text(self, jpeg_folder: Path, given_rates: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
        """The report has all rates, the best setting and the limit, and ends with code to copy; steps go to stderr."""
        assert main(["bench", str(jpeg_folder), "--size", "32", "--batch-size", "8"]) == 0
        written = capsys.readouterr()
        assert written.out == (
            "36 samples, 4 cores, images of 32x32, batches of 8\n"
            "\n"
            "reading alone               9,000 samples/s, 1.0 MiB/s\n"
            "decoding alone                900 samples/s\n"
            "Feeder, threads               800 samples/s\n"
            "Feeder, process:4             700 samples/s\n"
            "DataLoader, 4 workers         400 samples/s\n"
            "\n"
            "Best: threads, 2.00 times as fast as DataLoader. The limit is decoding.\n"
            "\n"
            "import aiofeed\n"
            "\n"
            "feeder = aiofeed.Feeder(\n"
            f'    aiofeed.ImageFolder("{jpeg_folder}"),\n'
            "    decode=aiofeed.DecodeImage(size=32),\n"
            "    batch_size=8,\n"
            "    shuffle=True,\n"
            ")\n"
        )
        assert written.err.count("measuring: ") == 5

    def test_processes(
        self, jpeg_folder: Path, given_rates: dict[str, float], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Processes are recommended if they are clearly faster, and only then."""
        given_rates["process"] = 1.04 * given_rates["threads"]
        assert report_of(capsys, str(jpeg_folder))["best"] == "threads"
        given_rates["process"] = 1.06 * given_rates["threads"]
        found = report_of(capsys, str(jpeg_folder))
        assert found["best"] == "process:4"
        assert '    engine="process:4",\n' in found["code"]
        assert found["speedup"] == pytest.approx(1.06 * 2)

    def test_slow_storage(
        self, jpeg_folder: Path, given_rates: dict[str, float], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """If reading is the limit, more concurrent reads are tried."""
        given_rates["read"] = 500.0
        given_rates["limits"] = 1200.0
        found = report_of(capsys, str(jpeg_folder))
        assert (found["limit"], found["best"]) == ("read", "256 reads")
        assert "    limits=aiofeed.Limits(read_concurrency=256),\n" in found["code"]

    def test_time_is_over(
        self,
        jpeg_folder: Path,
        given_rates: dict[str, float],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """After the time limit further settings are left out."""
        monkeypatch.setattr(bench_command, "TOTAL_S", 0.0)
        assert set(report_of(capsys, str(jpeg_folder))["samples_per_s"]) == {"read", "decode", "threads", "DataLoader"}

    def test_small_data(
        self, jpeg_folder: Path, given_rates: dict[str, float], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A batch has at most all samples."""
        assert report_of(capsys, str(jpeg_folder))["batch_size"] == 36


class TestData:
    def test_flat_folder(
        self, jpeg_folder: Path, tmp_path: Path, given_rates: dict[str, float], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Images that lie in the folder itself are read without classes, and the code finds the same files."""
        for number, file in enumerate(sorted(jpeg_folder.rglob("*.jpg"))[:5]):
            (tmp_path / f"{number}.jpg").write_bytes(file.read_bytes())
        found = report_of(capsys, str(tmp_path))
        assert found["samples"] == 5
        namespace: dict[str, Any] = {}
        exec(found["code"], namespace)
        assert len(namespace["feeder"].dataset) == 5

    def test_torch_dataset(self, jpeg_folder: Path) -> None:
        """The dataset for `DataLoader` gives the samples of the source, over and over again."""
        source = aiofeed.ImageFolder(jpeg_folder)
        dataset = bench_command._TorchDataset(source, len)
        sizes = [os.path.getsize(path) for path in source.paths]
        assert [dataset[index] for index in range(40)] == [
            (sizes[index % 36], source.targets[index % 36]) for index in range(40)
        ]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nowhere"], "'nowhere' is no folder of images, no .csv, .jsonl or .parquet, and no .tar or .zip"),
            (["empty"], "ImageFolder: 'empty' has no sub-folders with images"),
            (["a.tar", "b"], "several paths are shards, which end in .tar or .zip, got ['a.tar', 'b']"),
            (["ftp://host/x"], "'ftp://host/x': the scheme must be one of"),
            (["nowhere", "--size", "0"], "--size must be at least 1, got 0"),
            (["empty.tar"], "empty.tar"),
            (["{0..1}.tar"], "No such file or directory: '0.tar'"),
        ],
    )
    def test_errors(
        self,
        arguments: list[str],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """A wrong argument is one line on stderr that names it, and exit code 1."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty.tar").write_bytes(b"")
        assert main(["bench", *arguments]) == 1
        written = capsys.readouterr()
        assert written.out == ""
        [line] = written.err.splitlines()
        assert line.startswith("aiofeed bench: ")
        assert message in line

    def test_ctrl_c(self, jpeg_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        """Ctrl-C ends it quietly."""

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(bench_command, "_measure", interrupted)
        assert main(["bench", str(jpeg_folder)]) == 130
        assert capsys.readouterr() == ("", "")
