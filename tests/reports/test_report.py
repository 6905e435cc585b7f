"""Tests of the machine's report: its facts, its text, and the advice for each problem."""

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
from aiofeed.kernel.devices import resolve
from aiofeed.reports import machine
from aiofeed.reports.commands.cli import main
from aiofeed.reports.machine import AcceleratorReport, Environment, environment
from aiofeed.reports.machine.report import DeviceReport, advise
from tests.support.simulated_device import SimulatedDevice

GIB = 1 << 30
GOOD = Environment(
    aiofeed="0.1.0",
    python="Python 3.11.7, Linux x86_64",
    torch="2.9.0, CUDA 12.8",
    torch_threads=8,
    pillow="12.1.1.post0",
    pillow_simd=True,
    pillow_simd_hidden=False,
    x86=True,
    missing_formats=(),
    native_problem="",
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


def advice(**changes):
    """The advice for a machine that differs from a good one in ``changes``."""
    return advise([CARD], None, dataclasses.replace(GOOD, **changes))


def card_advice(**changes):
    return advise([dataclasses.replace(CARD, **changes)], None, GOOD)


def absence_advice(absent, **changes):
    return advise([], absent, dataclasses.replace(GOOD, **changes))


class TestAdvice:
    def test_torch_threads_of_one_of_several_ranks(self):
        """They are compared with the cores of the rank."""
        ranks = {"ranks": 8, "cores": 2, "machine_cores": 16, "torch_threads": 16}
        assert advice(**ranks) == ("torch uses 16 threads on 2 cores: set OMP_NUM_THREADS=2",)

    def test_a_good_machine(self):
        """A machine without problems gets no advice."""
        assert advice() == ()
        assert (
            absence_advice(
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
                r"^CUDA_VISIBLE_DEVICES='' hides devices: unset it",
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
            (
                "none",
                {"nvidia_files": False, "nvidia_driver": None},
                "install it, or nothing if there is no GPU",
            ),
            ("none: unknown error", {}, "none: unknown error: run `nvidia-smi`"),
            ("none", {"forked": True}, "forked from one that had initialized CUDA.*'spawn'"),
        ],
    )
    def test_no_accelerator(self, absent, changes, line):
        """Each reason for a missing accelerator has one line with its solution."""
        [found] = absence_advice(absent, **changes)
        assert re.search(line, found)

    def test_hidden_devices(self, monkeypatch):
        """The advice recognises the reason that ``explain_no_accelerator`` gives for hidden devices."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        monkeypatch.setattr(resolve, "built_without_cuda", lambda: False)
        [found] = absence_advice(resolve.explain_no_accelerator())
        assert found.startswith("CUDA_VISIBLE_DEVICES='7' hides devices")

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"pillow": None, "pillow_simd": False}, r"Pillow is missing.*pip install 'aiofeed\[simd\]'"),
            (
                {"pillow": "12.1.1", "pillow_simd": False, "pillow_simd_hidden": True},
                "over Pillow-SIMD.*force-reinstall",
            ),
            (
                {"pillow": "12.1.1", "pillow_simd": False},
                r"Pillow-SIMD is faster: first install the headers .*\(.*libwebp-dev.*\), then pip install",
            ),
            (
                {"missing_formats": ("WebP",)},
                "reads no WebP, and such files are errors: install the headers.*libwebp-dev",
            ),
            ({"native_problem": "was not built: do x"}, "^the native JPEG library was not built: do x$"),
            (
                {"small_files": False},
                "small files was not built: wheels.* have it; .*install a C compiler.*hatch_build.py",
            ),
            ({"uvloop": None}, "pip install uvloop"),
            ({"torch_threads": 16}, "torch uses 16 threads on 8 cores: set OMP_NUM_THREADS=8"),
            ({"open_files": (256, 4096)}, r"only 256 files.*`ulimit -n` \(up to 4096"),
            ({"open_files": (256, -1)}, "without a hard limit"),
            ({"shm_bytes": 64 << 20}, r"/dev/shm has 64.0 MiB.*--shm-size"),
            ({"free_memory_bytes": 1 << 20}, r"only 1.0 MiB of memory are free \(the cgroup allows 64.0 GiB\)"),
        ],
    )
    def test_environment(self, changes, line):
        """Each problem of the environment has one line with its solution."""
        [found] = advice(**changes)
        assert re.search(line, found)

    @pytest.mark.parametrize(
        ("changes", "line"),
        [
            ({"pin_error": "RuntimeError: no", "pinned_bytes_per_s": None}, r"cannot be pinned .*no\).*`ulimit -l`"),
            ({"pinned_bytes_per_s": 3.2e9}, "cuda:0 copies 3.2 GB/s"),
            ({"free_bytes": GIB}, "other processes use the rest"),
        ],
    )
    def test_accelerators(self, changes, line):
        """Each problem of an accelerator has one line with its solution."""
        [found] = card_advice(**changes)
        assert re.search(line, found)

    @pytest.mark.parametrize(
        "changes",
        [
            {"open_files": None, "locked_bytes": None, "shm_bytes": None, "memory_limit_bytes": None},  # another system
            {"open_files": (-1, -1)},
            {"pillow": "12.1.1", "pillow_simd": False, "x86": False},
        ],
    )
    def test_unknown_values_are_no_problem(self, changes):
        """Values that a system does not report or limit give no advice."""
        assert advice(**changes) == ()

    def test_memory_used_by_this_process_is_no_problem(self):
        """A device that is full with this process's own memory gives no advice."""
        assert card_advice(free_bytes=GIB, reserved_bytes=138 * GIB, allocated_bytes=130 * GIB) == ()


class TestText:
    def test_report(self):
        """The text has one fact per line, with units, then the advice."""
        text = str(DeviceReport((CARD,), None, GOOD, ("fix this",)))
        assert "NVIDIA H200; 139.0 GiB of 140.0 GiB free; 0 bytes allocated and 2.0 MiB reserved by this proc" in text
        assert "pinned copies 55.0 GB/s; pageable copies 11.0 GB/s; copies on a separate stream" in text
        assert "Pillow-SIMD 12.1.1.post0; other decoders: simplejpeg 1.8.2, cv2" in text
        assert "read in groups, without the GIL" in text
        assert "8 (affinity 16, quota 7.5)" in text
        assert "50.0 GiB free (limit 64.0 GiB)" in text
        assert "8.0 MiB (may be raised to no limit)" in text
        assert text.endswith("\n- fix this")

    def test_a_bare_machine(self):
        """A machine without accelerators, packages and limits is described too."""
        bare = dataclasses.replace(
            GOOD, pillow=None, decoders={}, small_files=False, uvloop=None, cpu_quota=None, memory_limit_bytes=None,
            open_files=None, locked_bytes=None, shm_bytes=None,
        )  # fmt: skip
        text = str(DeviceReport((), "no reason", bare, ()))
        assert "none: no reason" in text
        assert "none; other decoders: none" in text
        assert re.search("event loop +asyncio$", text, re.MULTILINE)
        assert "read one by one" in text
        assert "/dev/shm" not in text
        assert text.endswith("No problems found.")
        metal = AcceleratorReport("mps:0", "mps", own_stream=False)
        assert "mps; one stream for copies and kernels" in str(DeviceReport((metal,), None, bare, ()))


class TestFacts:
    def test_of_this_machine(self):
        """The facts of this machine are read."""
        found = environment.inspect_environment()
        assert torch.__version__ in found.torch
        assert found.cores >= 1
        assert found.free_memory_bytes > 0
        assert found.forked is False

    def test_ranks(self, monkeypatch):
        """Of several ranks, each has its part of the cores and of the memory."""
        monkeypatch.setattr(environment.machine, "cpus", lambda: 128)
        monkeypatch.setattr(environment.machine, "free_memory", lambda *_: 64 * GIB)
        assert "ranks share" not in str(DeviceReport((), "x", environment.inspect_environment(), ()))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        text = str(DeviceReport((), "x", environment.inspect_environment(), ()))
        line = "8 ranks share this machine: 16 of 128 cores and 8.0 GiB of 64.0 GiB of free memory for this one"
        assert re.search(rf"^ranks +{line}$", text, re.MULTILINE)
        assert re.search(r"^cores +16 \(affinity", text, re.MULTILINE)

    def test_pillow(self, monkeypatch):
        """The version is that of the active package, not of the installed one."""
        installed = {"pillow": "12.1.1", "pillow-simd": "12.1.1.post0"}
        monkeypatch.setattr(environment, "version", installed.get)
        for version, simd, hidden in (("12.1.1", False, True), ("12.1.1.post0", True, False)):
            monkeypatch.setitem(sys.modules, "PIL", SimpleNamespace(__version__=version))
            found = environment.inspect_environment()
            assert (found.pillow, found.pillow_simd, found.pillow_simd_hidden) == (version, simd, hidden)
        monkeypatch.setitem(sys.modules, "PIL", None)
        assert environment.inspect_environment().pillow is None

    def test_packages_are_not_imported(self, monkeypatch, tmp_path):
        """Decoders are found without importing them."""
        (tmp_path / "simplejpeg.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(environment, "version", lambda package: "9.9" if package == "simplejpeg" else None)
        assert environment.inspect_environment().decoders["simplejpeg"] == "9.9"

    def test_the_native_library(self, monkeypatch):
        """The native library is listed with its libjpeg-turbo if it was built."""
        name = "native library with libjpeg-turbo"
        load = "aiofeed.kernel.decoders.native_jpeg.load_native_decoder"
        monkeypatch.setattr(load, lambda: ("", SimpleNamespace(version="3.1.2")))
        found = environment.inspect_environment()
        assert (found.decoders[name], found.native_problem) == ("3.1.2", "")
        monkeypatch.setattr(load, lambda: ("was built, but cannot be loaded (libjpeg.so.8)", None))
        found = environment.inspect_environment()
        assert name not in found.decoders
        assert re.match(
            r"was built, .*libjpeg.so.8\): wheels .* have it; .*install a C compiler .*hatch_build.py$",
            found.native_problem,
        )

    def test_formats(self, monkeypatch):
        """Formats that Pillow lacks are listed."""
        monkeypatch.setattr("PIL.features.check", lambda feature: feature != "webp")
        assert environment.inspect_environment().missing_formats == ("WebP",)

    def test_driver_and_device_files(self, monkeypatch, tmp_path):
        """The driver's version is read, and device files that may not be opened are listed."""
        version = tmp_path / "version"
        version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n")
        (tmp_path / "nvidia0").touch()
        (tmp_path / "nvidiactl").touch()
        (tmp_path / "nvidia-caps").mkdir()
        monkeypatch.setattr(environment, "_DRIVER", version)
        monkeypatch.setattr(environment, "_DEV", tmp_path)
        monkeypatch.setattr(environment.os, "access", lambda path, mode: Path(path).name != "nvidiactl")
        found = environment.inspect_environment()
        assert found.nvidia_driver == "570.86.15"
        assert found.nvidia_files
        assert found.nvidia_refused == (str(tmp_path / "nvidiactl"),)
        assert found.shm_bytes is None

    def test_other_systems(self, monkeypatch):
        """Without ``resource`` and cgroups those facts are ``None``, and nothing fails."""
        monkeypatch.setitem(sys.modules, "resource", None)
        monkeypatch.delattr(environment.os, "statvfs", raising=False)
        monkeypatch.setattr(environment.machine, "_CGROUP", Path("/nowhere"))
        found = environment.inspect_environment()
        assert (found.open_files, found.locked_bytes, found.shm_bytes) == (None, None, None)
        assert (found.cpu_quota, found.memory_limit_bytes) == (None, None)
        str(DeviceReport((), "x", found, ()))

    def test_no_limit(self, monkeypatch):
        """``RLIM_INFINITY`` becomes -1."""
        limits = SimpleNamespace(RLIM_INFINITY=2**63 - 1, RLIMIT_NOFILE=7, getrlimit=lambda which: (1024, 2**63 - 1))
        monkeypatch.setitem(sys.modules, "resource", limits)
        found = environment.inspect_environment()
        assert found.open_files == (1024, -1)
        assert found.locked_bytes is None


class TestAccelerators:
    @pytest.fixture
    def card(self, monkeypatch):
        """A machine with one accelerator, which is simulated."""
        device = SimulatedDevice()
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(environment, "resolve_device", lambda index: device)
        monkeypatch.setattr(environment, "MEASURE_S", 0.0)
        monkeypatch.setattr(environment, "COPY_BYTES", 4096)
        return device

    def test_described(self, monkeypatch):
        """Name and memory come from the device's module of torch; functions that fail or are missing give ``None``."""
        module = SimpleNamespace(
            get_device_name=lambda device: "A card",
            mem_get_info=lambda device: (1, 2),
            memory_allocated=lambda device: 1 / 0,
        )
        monkeypatch.setattr(torch, "xpu", module)
        for name in ("memory_allocated", "memory_reserved"):  # newer versions of torch return 0
            monkeypatch.delattr(torch.accelerator, name, raising=False)
        backend = SimpleNamespace(name="xpu:0", device=torch.device("xpu", 0))
        assert environment.describe_accelerator(backend) == AcceleratorReport("xpu:0", "A card", 2, 1)

    def test_described_by_torch_accelerator(self, monkeypatch):
        """If the device's module of torch does not report memory, torch.accelerator may."""
        monkeypatch.setattr(torch, "xpu", SimpleNamespace(memory_allocated=lambda device: 0))
        for name, found in {"get_memory_info": (1, 2), "memory_allocated": 3, "memory_reserved": 4}.items():
            monkeypatch.setattr(torch.accelerator, name, lambda device, found=found: found, raising=False)
        backend = SimpleNamespace(name="xpu:0", device=torch.device("xpu", 0))
        assert environment.describe_accelerator(backend) == AcceleratorReport("xpu:0", "xpu", 2, 1, 0, 4)

    def test_measured(self):
        """Pinned and pageable copies are measured with copies that the device makes."""
        device = SimulatedDevice()
        report = environment.measure_copies(CARD, device, 4096)
        assert report.pinned_bytes_per_s > 0
        assert report.pageable_bytes_per_s > 0
        assert report.pin_error is None
        assert device.copies >= 6
        device.synchronize()

    def test_rate(self, monkeypatch):
        """The rate is bytes per second, without the first copy."""
        ticks = iter([0.0, 0.5, 1.0])
        monkeypatch.setattr(environment.time, "perf_counter", lambda: next(ticks))
        device = SimulatedDevice()
        assert environment.copy_rate(device, device.pin(100), seconds=1.0) == 4 * 100
        assert device.copies == 5

    def test_memory_that_cannot_be_pinned(self):
        """The report has the driver's error, and the rate of pageable copies."""
        report = environment.measure_copies(CARD, SimulatedDevice(pin_fails=True), 4096)
        assert "cannot be pinned" in report.pin_error
        assert report.pinned_bytes_per_s is None
        assert report.pageable_bytes_per_s > 0

    def test_a_device_that_fails(self):
        """A device that cannot copy is reported without rates."""
        report = environment.measure_copies(CARD, SimulatedDevice(memory_bytes=1024), 1 << 20)
        assert (report.pinned_bytes_per_s, report.pageable_bytes_per_s) == (None, None)

    def test_report(self, card):
        """The report lists the accelerator; ``measure=False`` makes no copies."""
        report = aiofeed.device_report(measure=False)
        assert [found.device for found in report.accelerators] == ["simulated:0"]
        assert report.absent is None
        assert card.copies == 0
        assert aiofeed.device_report().accelerators[0].pinned_bytes_per_s > 0

    def test_forked(self, card, monkeypatch):
        """In a child forked from a process with CUDA, accelerators are not initialized."""
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        monkeypatch.setattr(machine, "explain_no_accelerator", lambda: "forked")
        report = aiofeed.device_report()
        assert report.accelerators == ()
        assert any("'spawn'" in line for line in report.advice)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_absent():
    """Without an accelerator the report gives the reason."""
    report = aiofeed.device_report()
    assert report.accelerators == ()
    assert report.absent
    assert report.absent in str(report)


class TestCommand:
    def test_doctor(self, capsys):
        """``doctor`` prints the report and exits with 0 whatever it contains."""
        assert main(["doctor", "--quick"]) == 0
        output = capsys.readouterr().out
        assert re.search(rf"^aiofeed .*; Python {platform.python_version()}", output, re.MULTILINE)
        assert "torch" in output

    @pytest.mark.slow
    def test_as_a_module(self):
        """``python -m aiofeed doctor`` prints the report."""
        done = subprocess.run(
            [sys.executable, "-m", "aiofeed", "doctor", "--quick"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "cores" in done.stdout
        assert done.stderr == ""

    def test_usage(self, capsys):
        """With an unknown command it exits with usage; without one it prints help."""
        with pytest.raises(SystemExit) as stopped:
            main(["nonsense"])
        assert stopped.value.code == 2
        assert "doctor" in capsys.readouterr().err
        assert main([]) == 0
        assert "doctor" in capsys.readouterr().out

    def test_version(self, capsys):
        with pytest.raises(SystemExit) as stopped:
            main(["--version"])
        assert stopped.value.code == 0
        assert capsys.readouterr().out == f"aiofeed {aiofeed.__version__}\n"
