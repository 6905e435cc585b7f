"""The report on the machine: what it says, and the advice for each thing that is amiss."""

import dataclasses
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import aiofeed
from aiofeed import diagnostics
from aiofeed.diagnostics import AcceleratorReport, Environment, accelerators
from aiofeed.diagnostics import environment as around
from aiofeed.diagnostics.advice import advise
from aiofeed.diagnostics.cli import main
from aiofeed.diagnostics.report import DeviceReport
from aiofeed.testing import SimulatedDevice

GIB = 1 << 30
SOUND = Environment(
    aiofeed="0.1.0",
    python="Python 3.11.7, Linux x86_64",
    torch="2.9.0, CUDA 12.8",
    torch_threads=8,
    pillow="12.1.1.post0",
    pillow_simd=True,
    pillow_simd_hidden=False,
    x86=True,
    decoders={"simplejpeg": "1.8.2", "cv2": ""},
    small_files=True,
    uvloop="0.22.1",
    affinity=16,
    cpu_quota=7.5,
    cores=8,
    memory_limit_bytes=64 * GIB,
    free_memory_bytes=50 * GIB,
    open_files=(20_000, 20_000),
    locked_bytes=(8 << 20, -1),
    shm_bytes=16 * GIB,
    nvidia_driver="570.86.15",
    nvidia_files=True,
    nvidia_refused=(),
    forked=False,
)
CARD = AcceleratorReport("cuda:0", "NVIDIA H200", 140 * GIB, 139 * GIB, 0, 2 << 20, 55e9, 11e9)


def about(**changes):
    """The advice where one thing differs from a sound machine."""
    return advise([CARD], None, dataclasses.replace(SOUND, **changes))


def about_card(**changes):
    return advise([dataclasses.replace(CARD, **changes)], None, SOUND)


def about_absence(absent, **changes):
    return advise([], absent, dataclasses.replace(SOUND, **changes))


class TestAdvice:
    def test_a_sound_machine(self):
        """Nothing is amiss, nothing is advised."""
        assert about() == ()
        assert (
            about_absence(
                "a build without CUDA", torch="2.9.0+cpu, built without CUDA", nvidia_driver=None, nvidia_files=False
            )
            == ()
        )

    @pytest.mark.parametrize(
        ("absent", "changes", "line"),
        [
            ("no CUDA", {"torch": "2.9.0+cpu, built without CUDA"}, r"an NVIDIA driver \(570.86.15\).*get-started"),
            (
                "none (CUDA_VISIBLE_DEVICES='' limits what is visible)",
                {},
                r"^CUDA_VISIBLE_DEVICES='' limits .*: unset it",
            ),
            ("no", {"nvidia_refused": ("/dev/nvidia0",)}, "may not open /dev/nvidia0: join the group"),
            (
                "none: The NVIDIA driver on your system is too old (found version 11040)",
                {},
                "is too old for 2.9.0, CUDA 12.8",
            ),
            (
                "none: forward compatibility; insufficient driver",
                {},
                "update it, or install a torch built for an older",
            ),
            ("none", {"nvidia_files": False}, "no device files: start the container with `--gpus all`"),
            ("none", {"nvidia_files": False, "nvidia_driver": None}, "finds no driver"),
            ("none: unknown error", {}, "none: unknown error: see what `nvidia-smi` says"),
            ("none", {"forked": True}, "forked from one that had started CUDA.*'spawn'"),
        ],
    )
    def test_no_accelerator(self, absent, changes, line):
        """Each reason for the absence has its own way out."""
        [found] = about_absence(absent, **changes)
        assert re.search(line, found)

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"pillow": None, "pillow_simd": False}, r"no Pillow.*pip install 'aiofeed\[simd\]'"),
            (
                {"pillow": "12.1.1", "pillow_simd": False, "pillow_simd_hidden": True},
                "over Pillow-SIMD.*force-reinstall",
            ),
            ({"pillow": "12.1.1", "pillow_simd": False}, "Pillow-SIMD does it in less time"),
            ({"uvloop": None}, "pip install uvloop"),
            ({"torch_threads": 16}, "torch uses 16 threads on 8 cores: set OMP_NUM_THREADS=8"),
            ({"open_files": (256, 4096)}, r"only 256 files.*`ulimit -n` \(up to 4096"),
            ({"open_files": (256, -1)}, "no upper end"),
            ({"shm_bytes": 64 << 20}, r"/dev/shm has 64.0 MiB.*--shm-size"),
            ({"free_memory_bytes": 1 << 20}, r"only 1.0 MiB of memory are free \(the cgroup allows 64.0 GiB\)"),
        ],
    )
    def test_surroundings(self, changes, line):
        """Each thing that is amiss has its one line."""
        [found] = about(**changes)
        assert re.search(line, found)

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"pin_error": "RuntimeError: no", "pinned_bytes_per_s": None}, r"cannot be pinned .*no\).*`ulimit -l`"),
            ({"pinned_bytes_per_s": 3.2e9}, "cuda:0 copies 3.2 GB/s"),
            ({"free_bytes": GIB}, "other processes hold the rest"),
        ],
    )
    def test_accelerators(self, changes, line):
        """So has what is amiss with an accelerator."""
        [found] = about_card(**changes)
        assert re.search(line, found)

    @pytest.mark.parametrize(
        "changes",
        [
            {"open_files": None, "locked_bytes": None, "shm_bytes": None, "memory_limit_bytes": None},  # another system
            {"open_files": (-1, -1)},
            {"pillow": "12.1.1", "pillow_simd": False, "x86": False},
        ],
    )
    def test_what_is_not_amiss(self, changes):
        """What a system does not say, or does not have, is no fault."""
        assert about(**changes) == ()

    def test_memory_of_one_s_own_is_not_amiss(self):
        """A device that this process has filled is in use."""
        assert about_card(free_bytes=GIB, reserved_bytes=138 * GIB, allocated_bytes=130 * GIB) == ()


class TestText:
    def test_report(self):
        """One fact per line, units shown, then the advice."""
        text = str(DeviceReport((CARD,), None, SOUND, ("mend this",)))
        assert "NVIDIA H200; 139.0 GiB of 140.0 GiB free; 0 bytes allocated and 2.0 MiB reserved here" in text
        assert "pinned copies 55.0 GB/s; pageable copies 11.0 GB/s; copies on a stream of their own" in text
        assert "Pillow-SIMD 12.1.1.post0; other decoders: simplejpeg 1.8.2, cv2" in text
        assert "read in groups, without the GIL" in text
        assert "8 (affinity 16, quota 7.5)" in text
        assert "50.0 GiB free (limit 64.0 GiB)" in text
        assert "8.0 MiB (may be raised to no limit)" in text
        assert text.endswith("\n- mend this")

    def test_nothing(self):
        """A machine without anything is described too."""
        bare = dataclasses.replace(
            SOUND, pillow=None, decoders={}, small_files=False, uvloop=None, cpu_quota=None, memory_limit_bytes=None,
            open_files=None, locked_bytes=None, shm_bytes=None,
        )  # fmt: skip
        text = str(DeviceReport((), "no reason", bare, ()))
        assert "none: no reason" in text
        assert "none; other decoders: none" in text
        assert "asyncio's own" in text
        assert "read one by one" in text
        assert "/dev/shm" not in text
        assert text.endswith("Nothing is amiss.")
        metal = AcceleratorReport("mps:0", "mps", own_stream=False)
        assert "mps; one stream for copies and work" in str(DeviceReport((metal,), None, bare, ()))


class TestFacts:
    def test_of_this_machine(self):
        """The facts are those that the system gives."""
        found = around.inspect_environment()
        assert torch.__version__ in found.torch
        assert found.cores >= 1
        assert found.free_memory_bytes > 0
        assert found.forked is False

    def test_pillow(self, monkeypatch):
        """The active package counts, not the installed one."""
        installed = {"pillow": "12.1.1", "pillow-simd": "12.1.1.post0"}
        monkeypatch.setattr(around, "_installed", installed.get)
        for version, simd, hidden in (("12.1.1", False, True), ("12.1.1.post0", True, False)):
            monkeypatch.setitem(sys.modules, "PIL", SimpleNamespace(__version__=version))
            found = around.inspect_environment()
            assert (found.pillow, found.pillow_simd, found.pillow_simd_hidden) == (version, simd, hidden)
        monkeypatch.setitem(sys.modules, "PIL", None)
        assert around.inspect_environment().pillow is None

    def test_packages_are_not_imported(self, monkeypatch, tmp_path):
        """Decoders are looked for and not imported."""
        (tmp_path / "simplejpeg.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(around, "_installed", lambda package: "9.9" if package == "simplejpeg" else None)
        assert around.inspect_environment().decoders["simplejpeg"] == "9.9"

    def test_the_library_of_ones_own(self, monkeypatch):
        """It is named with its libjpeg-turbo where it was built, and not where it was not."""
        for library, expected in ((SimpleNamespace(version="3.1.2"), "3.1.2"), (None, None)):
            monkeypatch.setattr("aiofeed.decoders.native_jpeg.native_decoder", lambda library=library: library)
            assert around.inspect_environment().decoders.get("aiofeed's own over libjpeg-turbo") == expected

    def test_driver_and_device_files(self, monkeypatch, tmp_path):
        """The driver's version is read, and device files that may not be opened are named."""
        version = tmp_path / "version"
        version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n")
        (tmp_path / "nvidia0").touch()
        (tmp_path / "nvidiactl").touch()
        (tmp_path / "nvidia-caps").mkdir()
        monkeypatch.setattr(around, "_DRIVER", version)
        monkeypatch.setattr(around, "_DEV", tmp_path)
        monkeypatch.setattr(around.os, "access", lambda path, mode: Path(path).name != "nvidiactl")
        found = around.inspect_environment()
        assert found.nvidia_driver == "570.86.15"
        assert found.nvidia_files
        assert found.nvidia_refused == (str(tmp_path / "nvidiactl"),)
        assert found.shm_bytes is None

    def test_other_systems(self, monkeypatch):
        """Where there is no ``resource`` and no cgroup, those facts are missing and nothing fails."""
        monkeypatch.setitem(sys.modules, "resource", None)
        monkeypatch.delattr(around.os, "statvfs", raising=False)
        monkeypatch.setattr(around.machine, "_CGROUP", Path("/nowhere"))
        found = around.inspect_environment()
        assert (found.open_files, found.locked_bytes, found.shm_bytes) == (None, None, None)
        assert (found.cpu_quota, found.memory_limit_bytes) == (None, None)
        str(DeviceReport((), "x", found, ()))

    def test_no_limit(self, monkeypatch):
        """The system's word for no limit is -1 here."""
        limits = SimpleNamespace(RLIM_INFINITY=2**63 - 1, RLIMIT_NOFILE=7, getrlimit=lambda which: (1024, 2**63 - 1))
        monkeypatch.setitem(sys.modules, "resource", limits)
        found = around.inspect_environment()
        assert found.open_files == (1024, -1)
        assert found.locked_bytes is None


class TestAccelerators:
    @pytest.fixture
    def card(self, monkeypatch):
        """A machine whose one accelerator is a simulated one, under CUDA's name."""
        device = SimulatedDevice()
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(accelerators, "resolve_device", lambda index: device)
        monkeypatch.setattr(accelerators, "SECONDS", 0.0)
        monkeypatch.setattr(accelerators, "NBYTES", 4096)
        return device

    def test_described(self, monkeypatch):
        """Name and memory are torch's; what the device's part of torch does not have is left open."""
        module = SimpleNamespace(
            get_device_name=lambda device: "A card",
            mem_get_info=lambda device: (1, 2),
            memory_allocated=lambda device: 1 / 0,
        )
        monkeypatch.setattr(torch, "xpu", module)
        backend = SimpleNamespace(name="xpu:0", device=torch.device("xpu", 0))
        assert accelerators.describe_accelerator(backend) == AcceleratorReport("xpu:0", "A card", 2, 1)

    def test_described_by_what_torch_has_for_all(self, monkeypatch):
        """Where a device's part of torch does not tell its memory, torch.accelerator may."""
        monkeypatch.setattr(torch, "xpu", SimpleNamespace(memory_allocated=lambda device: 0))
        for name, found in {"get_memory_info": (1, 2), "memory_allocated": 3, "memory_reserved": 4}.items():
            monkeypatch.setattr(torch.accelerator, name, lambda device, found=found: found, raising=False)
        backend = SimpleNamespace(name="xpu:0", device=torch.device("xpu", 0))
        assert accelerators.describe_accelerator(backend) == AcceleratorReport("xpu:0", "xpu", 2, 1, 0, 4)

    def test_measured(self):
        """Both ways of copying are measured, by copies that the device makes."""
        device = SimulatedDevice()
        report = accelerators.measure_copies(CARD, device, 4096)
        assert report.pinned_bytes_per_s > 0
        assert report.pageable_bytes_per_s > 0
        assert report.pin_error is None
        assert device.copies >= 6
        device.synchronize()

    def test_rate(self, monkeypatch):
        """The rate is bytes over seconds, the first copy not counted."""
        ticks = iter([0.0, 0.5, 1.0])
        monkeypatch.setattr(accelerators.time, "perf_counter", lambda: next(ticks))
        device = SimulatedDevice()
        assert accelerators.copy_rate(device, device.pin(100), seconds=1.0) == 4 * 100
        assert device.copies == 5

    def test_memory_that_cannot_be_pinned(self):
        """It is said why, and the rest is measured."""
        report = accelerators.measure_copies(CARD, SimulatedDevice(pin_fails=True), 4096)
        assert "cannot be pinned" in report.pin_error
        assert report.pinned_bytes_per_s is None
        assert report.pageable_bytes_per_s > 0

    def test_a_device_that_fails(self):
        """A device that cannot copy is reported without rates."""
        report = accelerators.measure_copies(CARD, SimulatedDevice(memory_bytes=1024), 1 << 20)
        assert (report.pinned_bytes_per_s, report.pageable_bytes_per_s) == (None, None)

    def test_report(self, card):
        """The report has the accelerator and no reason for its absence; measuring can be left out."""
        report = aiofeed.device_report(measure=False)
        assert [found.device for found in report.accelerators] == ["simulated:0"]
        assert report.absent is None
        assert card.copies == 0
        assert aiofeed.device_report().accelerators[0].pinned_bytes_per_s > 0

    def test_forked(self, card, monkeypatch):
        """In a child of a process with CUDA, accelerators are not touched."""
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        monkeypatch.setattr(diagnostics, "explain_no_accelerator", lambda: "forked")
        report = aiofeed.device_report()
        assert report.accelerators == ()
        assert any("'spawn'" in line for line in report.advice)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="says why there is no accelerator")
def test_absent():
    """Without an accelerator the report says why."""
    report = aiofeed.device_report()
    assert report.accelerators == ()
    assert report.absent
    assert report.absent in str(report)


class TestCommand:
    def test_doctor(self, capsys):
        """The report is printed, and the exit code is 0 whatever it says."""
        assert main(["doctor", "--quick"]) == 0
        output = capsys.readouterr().out
        assert re.search(rf"^aiofeed .*; Python {platform.python_version()}", output, re.MULTILINE)
        assert "torch" in output

    def test_as_a_module(self):
        """``python -m aiofeed doctor`` is the same."""
        done = subprocess.run(
            [sys.executable, "-m", "aiofeed", "doctor", "--quick"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "cores" in done.stdout
        assert done.stderr == ""

    @pytest.mark.parametrize("arguments", [[], ["nonsense"]])
    def test_usage(self, arguments, capsys):
        """Anything else is an error that names what there is."""
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "doctor" in capsys.readouterr().err or not arguments
