"""Tests of the GPU benchmarks' timing with fake data: marks, traces, and shares of a time limit."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from aiofeed.kernel.devices.backend import CpuBackend
from aiofeed.kernel.devices.pinned import release_unused
from benchmarks.gpu import memory, runner, setup, trace
from benchmarks.gpu.runner import Part
from benchmarks.gpu.setup import Setup
from tests.support.simulated_device import SimulatedDevice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass
class FakeMark:
    """A point in the fake device's time; reached once the host has waited for it or for a later one."""

    device: FakeDevice
    at: float

    def wait(self) -> None:
        self.device.waited.append(self.at)

    def since(self, earlier: FakeMark) -> float:
        assert max(self.at, earlier.at) <= max(self.device.waited)
        return self.at - earlier.at


class FakeDevice:
    """A device whose clock is the end of its queue."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[float] = []

    def mark(self) -> FakeMark:
        return FakeMark(self, self.now)

    def batches(self, idle: float) -> Iterator[int]:
        """Batches, for each of which the device waits ``idle``."""
        for number in count():
            self.now += idle
            yield number


class TestDrive:
    def test_steps_and_gaps_after_settling(self) -> None:
        """Steps are measured from the end of the last settling step to the end of the last step."""
        device = FakeDevice()
        done: list[int] = []

        def step(number: int) -> None:
            done.append(number)
            device.now += 100.0 if number < 3 else 4.0

        found = setup.drive(device.mark, device.batches(1.0), step, settle=3, steps=5)
        assert done == list(range(8))
        assert found["step_s"] == 5.0
        assert found["gap_s"] == 1.0
        assert found["waited_s"] >= 0.0

    def test_the_host_is_at_most_two_steps_ahead(self) -> None:
        """The host waits for the last step but one before it takes a batch, and for the last step at the end."""
        device = FakeDevice()

        def step(number: int) -> None:
            # Marks that the host has waited for; steps end at 1, 2, 3, ...
            assert len(device.waited) == max(0, number - setup.LEAD)
            device.now += 1.0

        setup.drive(device.mark, device.batches(0.0), step, settle=1, steps=5)
        assert device.waited == [1.0, 2.0, 3.0, 4.0, 6.0]

    @pytest.mark.parametrize("backend", [CpuBackend(), SimulatedDevice(latency="late")])
    def test_without_timing_events_the_host_waits(self, backend: Any) -> None:
        """A mark of a device without timing events waits for the queued work."""
        mark = setup.marker(backend)
        first = mark()
        if isinstance(backend, SimulatedDevice):
            backend.sleep()
        second = mark()
        second.wait()
        assert second.since(first) > 0.0
        assert not isinstance(backend, SimulatedDevice) or backend.queued == 0


class FakeEvent:
    """A CUDA event at a time in milliseconds."""

    made: ClassVar[list[FakeEvent]] = []

    def __init__(self, **options: bool) -> None:
        self.options = options
        self.at = 250.0 * len(self.made)
        self.recorded: list[Any] = []
        self.waited = 0
        self.made.append(self)

    def record(self, stream: Any) -> None:
        self.recorded.append(stream)

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_marks_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks on CUDA are blocking timing events on the current stream; their milliseconds become seconds."""
    monkeypatch.setattr(FakeEvent, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    mark = setup.marker(SimpleNamespace(device=torch.device("cuda", 0), current_stream=lambda: "the stream"))  # type: ignore[arg-type]
    first, second = mark(), mark()
    second.wait()
    assert second.since(first) == 0.25
    assert [made.recorded for made in FakeEvent.made] == [["the stream"], ["the stream"]]
    assert [made.waited for made in FakeEvent.made] == [0, 1]
    assert all(made.options == {"enable_timing": True, "blocking": True} for made in FakeEvent.made)


def event(kind: str, name: str, stream: int, ts: float, dur: float) -> dict[str, Any]:
    """An event in torch.profiler's format."""
    args = {"device": 0, "context": 1, "stream": stream, "correlation": 7}
    return {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"

TRACE = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 9, "tid": 9, "ts": 0.0, "dur": 5.0},
        event("gpu_memcpy", PINNED, 20, 5.0, 10.0),  # 5 us before the first kernel, 5 us during it
        event("kernel", "gemm", 7, 10.0, 30.0),
        event("kernel", "gemm", 7, 35.0, 15.0),  # overlaps the one before: until 50
        event("gpu_memcpy", PINNED, 20, 20.0, 10.0),  # during a kernel
        event("kernel", "reduce", 7, 60.0, 40.0),
        event("gpu_memcpy", PAGEABLE, 7, 48.0, 14.0),  # 4 us during kernels, in their stream, and not pinned
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 90.0, 9.0),
        event("gpu_memset", "Memset (Device)", 20, 0.0, 1.0),
        {"ph": "f", "id": 7, "pid": 0, "tid": 7, "ts": 10, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    ],
}


class TestTrace:
    def test_overlap_of_copies_and_kernels(self) -> None:
        """Copies are counted with their streams and the time during kernels, and the device's idle time is given."""
        found = trace.overlap(TRACE)
        assert (found.copies, found.beside_kernels, found.pageable) == (3, 1, 1)
        assert found.copied_us == 34.0
        assert found.hidden == 19.0 / 34.0
        assert found.idle == pytest.approx(1 / 9)

    def test_streams_of_two_devices_differ(self) -> None:
        """Streams of two devices with the same number are different streams."""
        other = event("gpu_memcpy", PINNED, 7, 0.0, 1.0)
        other["args"]["device"] = 1
        found = trace.overlap({"traceEvents": [other, event("kernel", "gemm", 7, 0.0, 2.0)]})
        assert found.beside_kernels == 0

    def test_copies_that_run_at_the_same_time_count_once(self) -> None:
        events = [event("gpu_memcpy", PINNED, stream, 1.0, 2.0) for stream in (20, 24)]
        found = trace.overlap({"traceEvents": [*events, event("kernel", "gemm", 7, 0.0, 2.0)]})
        assert (found.copies, found.copied_us, found.hidden) == (2, 2.0, 0.5)

    @pytest.mark.parametrize("kept", ["kernel", "gpu_memcpy"])
    def test_a_trace_without_kernels_or_copies_is_an_error(self, kept: str) -> None:
        """A trace without kernels, or without copies to the device, raises an error with both numbers."""
        events = [each for each in TRACE["traceEvents"] if each.get("cat") == kept]  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"the trace has \d kernels and \d copies"):
            trace.overlap({"traceEvents": events})


class TestOnCuda:
    """The parts of the benchmarks for CUDA devices only, with a simulated device."""

    @pytest.fixture
    def fake_cuda(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Setup:
        monkeypatch.setattr(Setup, "on_cuda", True)
        return Setup(SimulatedDevice(), rounds=2, quick=True, data=tmp_path)

    def test_the_figures_of_a_trace(self, fake_cuda: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each round gives a trace; the warm-up does not count."""
        calls = []

        def recorded(backend: Any, work: Any) -> Any:
            calls.append(work())
            return TRACE

        monkeypatch.setattr(trace, "recorded", recorded)
        found = {figure.what: figure for figure in trace.run(fake_cuda)}
        assert len(calls) == 3
        assert found["share of the copies' time while kernels run"].values == (19.0 / 34.0,) * 2
        assert found["copies in a stream with kernels"].verdict == "SHORT"
        assert found["copies from pageable memory"].values == (1.0, 1.0)
        assert found["one copy"].values == (34.0 / 3,) * 2

    def test_page_locked_memory(self, fake_cuda: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        """There is a figure for page-locked memory if torch reports that, under either name."""
        pinned = {"reserved_bytes.current": 3072, "allocated_bytes.current": 1}
        monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: dict(pinned), raising=False)
        found = {figure.what: figure.values for figure in memory.run(fake_cuda)}
        assert found["page-locked memory of the host"] > (1.0,)
        release_unused()
        assert memory.pinned_bytes(fake_cuda) == 3072
        del pinned["reserved_bytes.current"]
        assert memory.pinned_bytes(fake_cuda) == 1
        pinned.clear()
        assert memory.pinned_bytes(fake_cuda) is None


ARGUMENTS = {"device": "cpu", "rounds": 1, "quick": True, "data": "nowhere"}


class TestShares:
    def test_all_parts_together_stay_within_the_limit(self) -> None:
        """However long parts take, their limits fit into the total; parts without time are left out and say so."""
        now = 0.0
        limits: list[tuple[float, float]] = []

        def run(name: str, arguments: Mapping[str, Any], limit_s: float) -> Part:
            nonlocal now
            limits.append((limit_s, arguments["limit_s"]))
            now += limit_s
            return Part(name, name)

        names = ["copies", "overlap", "trace", "resident", "memory", "threads", "images", "processes"]
        parts = list(runner.run_all(names, ARGUMENTS, 480.0, run=run, clock=lambda: now))
        assert [part.name for part in parts] == names
        assert now <= 480.0
        assert limits[0] == (480.0 * 2 / 9, 480.0 * 2 / 9 * 0.75)
        left_out = [part for part in parts if part.failed]
        assert len(limits) + len(left_out) == len(names)
        assert all("of all parts are over" in part.failed for part in left_out)
        assert all(part.title != part.name for part in left_out)

    def test_the_last_part_gets_all_remaining_time(self) -> None:
        assert runner.share(100.0, 1) == 100.0
        assert runner.share(100.0, 3) == 50.0


class TestProcesses:
    def test_a_process_that_hangs_is_killed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        """A process that hangs is killed with its children, and its part says so."""
        groups: list[int] = []
        end = runner.end
        monkeypatch.setattr(runner, "end", lambda process: (groups.append(process.pid), end(process)))
        monkeypatch.setattr(sys, "executable", a_script(tmp_path, "sleep 600 & sleep 600"))
        found = runner.run_in_process("copies", {**ARGUMENTS, "limit_s": 1.0}, 0.2)
        assert found.failed == "it did not end within 0 s"
        assert found.title == "Copies of batches to the device"
        assert not found.real
        with pytest.raises(ProcessLookupError):
            while True:  # until init has reaped the last child; the test has a time limit
                os.killpg(groups[0], 0)
                time.sleep(0.01)

    def test_a_process_that_crashes_is_reported(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        """The part of a process that crashes has its exit status, also if the result is incomplete."""
        written = tmp_path / "written"
        script = f"printf '[{{' > $5; cp $5 {written}; kill -ABRT $$"  # after -m, the module, the name and the setup
        monkeypatch.setattr(sys, "executable", a_script(tmp_path, script))
        found = runner.run_in_process("copies", {**ARGUMENTS, "limit_s": 1.0}, 30.0)
        assert written.read_text() == "[{"
        assert found.failed == "its process ended with -6"


def a_script(folder: Any, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
