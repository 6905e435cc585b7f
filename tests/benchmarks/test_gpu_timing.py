"""What the GPU benchmarks make of a device's time: marks, traces, and shares of a time limit. All of it made up."""

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

from aiofeed.devices.backend import CpuBackend
from aiofeed.testing import SimulatedDevice
from benchmarks.gpu import apart, clock, memory, timeline, trace
from benchmarks.gpu.part import Task
from benchmarks.gpu.results import Part
from benchmarks.gpu.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class FakeMark:
    """A moment of the fake device; it has come once the host has waited for it or for a later one."""

    device: FakeDevice
    at: float

    def wait(self) -> None:
        self.device.waited.append(self.at)

    def since(self, earlier: FakeMark) -> float:
        assert max(self.at, earlier.at) <= max(self.device.waited)
        return self.at - earlier.at


class FakeDevice:
    """Its clock is how far its queue reaches."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[float] = []

    def mark(self) -> FakeMark:
        return FakeMark(self, self.now)

    def batches(self, idle: float) -> Iterator[int]:
        """Batches for each of which the device waits so long."""
        for number in count():
            self.now += idle
            yield number


class TestDrive:
    def test_steps_and_gaps_behind_those_that_settle(self) -> None:
        """From the end of the last that does not count to the end of the last."""
        device = FakeDevice()
        done: list[int] = []

        def step(number: int) -> None:
            done.append(number)
            device.now += 100.0 if number < 3 else 4.0

        found = clock.drive(device.mark, device.batches(1.0), step, settle=3, steps=5)
        assert done == list(range(8))
        assert found["step_s"] == 5.0
        assert found["gap_s"] == 1.0
        assert found["waited_s"] >= 0.0

    def test_the_host_is_two_steps_ahead_at_most(self) -> None:
        """It waits for the end of the last step but one before it takes the next batch, and for the last at the end."""
        device = FakeDevice()

        def step(number: int) -> None:
            # What was waited for by now: steps end at 1, 2, 3, ...
            assert len(device.waited) == max(0, number - clock.LEAD)
            device.now += 1.0

        clock.drive(device.mark, device.batches(0.0), step, settle=1, steps=5)
        assert device.waited == [1.0, 2.0, 3.0, 4.0, 6.0]

    @pytest.mark.parametrize("backend", [CpuBackend(), SimulatedDevice(latency="late")])
    def test_where_events_have_no_times_the_host_waits(self, backend: Any) -> None:
        """What is queued has run before its end is noted."""
        mark = clock.marker(backend)
        first = mark()
        if isinstance(backend, SimulatedDevice):
            backend.sleep()
        second = mark()
        second.wait()
        assert second.since(first) > 0.0
        assert not isinstance(backend, SimulatedDevice) or backend.queued == 0


class FakeEvent:
    """An event of CUDA's, at so many milliseconds."""

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
    """Timing events on the current stream, for which the host waits asleep; their milliseconds as seconds."""
    monkeypatch.setattr(FakeEvent, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    mark = clock.marker(SimpleNamespace(device=torch.device("cuda", 0), current_stream=lambda: "the stream"))  # type: ignore[arg-type]
    first, second = mark(), mark()
    second.wait()
    assert second.since(first) == 0.25
    assert [made.recorded for made in FakeEvent.made] == [["the stream"], ["the stream"]]
    assert [made.waited for made in FakeEvent.made] == [0, 1]
    assert all(made.options == {"enable_timing": True, "blocking": True} for made in FakeEvent.made)


def event(kind: str, name: str, stream: int, ts: float, dur: float) -> dict[str, Any]:
    """As torch.profiler exports it."""
    args = {"device": 0, "context": 1, "stream": stream, "correlation": 7}
    return {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"

TRACE = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 9, "tid": 9, "ts": 0.0, "dur": 5.0},
        event("gpu_memcpy", PINNED, 20, 5.0, 10.0),  # five before the first kernel, five under it
        event("kernel", "gemm", 7, 10.0, 30.0),
        event("kernel", "gemm", 7, 35.0, 15.0),  # overlaps the one before: until 50
        event("gpu_memcpy", PINNED, 20, 20.0, 10.0),  # all under
        event("kernel", "reduce", 7, 60.0, 40.0),
        event("gpu_memcpy", PAGEABLE, 7, 48.0, 14.0),  # four under, in the way, and not pinned
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 90.0, 9.0),
        event("gpu_memset", "Memset (Device)", 20, 0.0, 1.0),
        {"ph": "f", "id": 7, "pid": 0, "tid": 7, "ts": 10, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    ],
}


class TestTrace:
    def test_copies_beside_kernels(self) -> None:
        """Which of them were hidden, by how much, on which streams; and how long the device had nothing to do."""
        found = timeline.overlap(timeline.spans(TRACE))
        assert (found.copies, found.kernels, found.beside_kernels, found.pageable) == (3, 3, 1, 1)
        assert (found.copied_us, found.hidden_us) == (34.0, 19.0)
        assert found.hidden == 19.0 / 34.0
        assert (found.busy_us, found.whole_us) == (80.0, 90.0)
        assert found.idle == pytest.approx(1 / 9)

    def test_a_stream_is_one_of_its_device(self) -> None:
        """Streams of two devices have the same numbers."""
        other = event("gpu_memcpy", PINNED, 7, 0.0, 1.0)
        other["args"]["device"] = 1
        found = timeline.overlap(timeline.spans({"traceEvents": [other, event("kernel", "gemm", 7, 0.0, 2.0)]}))
        assert found.beside_kernels == 0

    def test_copies_that_run_at_the_same_time_count_once(self) -> None:
        events = [event("gpu_memcpy", PINNED, stream, 1.0, 2.0) for stream in (20, 24)]
        found = timeline.overlap(timeline.spans({"traceEvents": [*events, event("kernel", "gemm", 7, 0.0, 2.0)]}))
        assert (found.copies, found.copied_us, found.hidden_us) == (2, 2.0, 1.0)

    @pytest.mark.parametrize("kept", ["kernel", "gpu_memcpy"])
    def test_a_trace_that_lacks_one_of_them_says_so(self, kept: str) -> None:
        """The profiler saw nothing, say."""
        events = [each for each in TRACE["traceEvents"] if each.get("cat") == kept]  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"the trace has \d kernels and \d copies"):
            timeline.overlap(timeline.spans({"traceEvents": events}))


class TestOnCuda:
    """The parts of the benchmarks that only a CUDA device has, with all that is CUDA's made up."""

    @pytest.fixture
    def given(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Setup:
        monkeypatch.setattr(Setup, "on_cuda", True)
        return Setup(SimulatedDevice(), rounds=2, quick=True, data=tmp_path)

    def test_the_figures_of_a_trace(self, given: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of each round, while a feeder feeds a step; the turn before them does not count."""
        asked = []

        def recorded(backend: Any, work: Any) -> Any:
            asked.append(work())
            return TRACE

        monkeypatch.setattr(trace, "recorded", recorded)
        found = {figure.what: figure for figure in trace.run(given)}
        assert len(asked) == 3
        assert found["share of the copies' time under kernels"].values == (19.0 / 34.0,) * 2
        assert found["copies in a stream that has kernels"].verdict == "SHORT"
        assert found["copies from pageable memory"].values == (1.0, 1.0)
        assert found["one copy"].values == (34.0 / 3,) * 2

    def test_memory_where_the_host_never_waits(self, given: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        """There is a figure of it, and one of page-locked memory where torch counts that; by either name."""
        pinned = {"reserved_bytes.current": 3072, "allocated_bytes.current": 1}
        monkeypatch.setattr(memory, "slow_kernel", given.device.sleep)
        monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: dict(pinned))
        found = {figure.what: figure.values for figure in memory.run(given)}
        assert found["page-locked memory of the host"] == (0.0,)
        assert "more where the host never waits for its device" in found
        assert memory.pinned_bytes(given) == 3072
        del pinned["reserved_bytes.current"]
        assert memory.pinned_bytes(given) == 1
        pinned.clear()
        assert memory.pinned_bytes(given) is None


def a_task(name: str, limit_s: float, result: str) -> Task:
    return Task(name, "cpu", 1, True, "nowhere", result, limit_s)


class TestShares:
    def test_each_has_more_than_its_share_and_all_together_no_more_than_the_limit(self) -> None:
        """However long they take; those for which nothing is left are left out, and say so."""
        now = 0.0
        given: list[tuple[float, float]] = []

        def run(task: Task, limit_s: float) -> Part:
            nonlocal now
            given.append((limit_s, task.limit_s))
            now += limit_s
            return Part(task.name, task.name)

        names = ["copies", "overlap", "trace", "resident", "memory", "threads", "images", "processes"]
        parts = list(apart.each(names, a_task, 480.0, run=run, clock=lambda: now))
        assert [part.name for part in parts] == names
        assert now <= 480.0
        assert given[0] == (480.0 * 2 / 9, 480.0 * 2 / 9 * 0.75)
        left_out = [part for part in parts if part.failed]
        assert len(given) + len(left_out) == len(names)
        assert all("of all parts were up" in part.failed for part in left_out)
        assert all(part.title != part.name for part in left_out)

    def test_the_last_has_all_that_is_left(self) -> None:
        assert apart.share(100.0, 1) == 100.0
        assert apart.share(100.0, 3) == 50.0


class TestApart:
    def test_what_hangs_is_ended(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        """With what it started; its part says so."""
        groups: list[int] = []
        end = apart.end
        monkeypatch.setattr(apart, "end", lambda process: (groups.append(process.pid), end(process)))
        monkeypatch.setattr(sys, "executable", a_script(tmp_path, "sleep 600 & sleep 600"))
        found = apart.apart(a_task("copies", 1.0, str(tmp_path / "result.json")), 0.2)
        assert found.failed == "it did not end within 0 s"
        assert found.title == "Copies of batches to the device"
        assert not found.real
        with pytest.raises(ProcessLookupError):
            while True:  # until init has seen the end of the last; the test has a limit
                os.killpg(groups[0], 0)
                time.sleep(0.01)

    def test_what_dies_says_how(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        """With half a result, too."""
        result = tmp_path / "result.json"
        monkeypatch.setattr(sys, "executable", a_script(tmp_path, f"printf '[{{' > {result}; kill -ABRT $$"))
        found = apart.apart(a_task("copies", 1.0, str(result)), 30.0)
        assert result.exists()
        assert found.failed == "its process ended with -6"


def a_script(folder: Any, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
