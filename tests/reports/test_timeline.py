"""`Feeder.timeline`: reads, decode jobs, copies, waits and steps of the last seconds."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections import deque
from collections.abc import Iterator
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import aiofeed
from aiofeed.kernel.core.statistics import EVENTS, Event
from aiofeed.reports.timeline import MEANINGS, lanes_of, ticks_of, write_timeline
from tests.support.browser import LEFT, RIGHT, Browser, new_browser
from tests.support.number_decoders import scalar
from tests.support.simulated_device import SimulatedDevice

SAMPLES = 96
BATCH = 8


@pytest.fixture
def files(tmp_path: Path) -> aiofeed.Files:
    paths = []
    for number in range(SAMPLES):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(str(number))
    return aiofeed.Files(paths)


def new_feeder(files: aiofeed.Files, **arguments: Any) -> aiofeed.Feeder[Any]:
    return aiofeed.Feeder(files, **{"decode": scalar, "batch_size": BATCH, **arguments})


def trace_of(feeder: aiofeed.Feeder[Any], path: Path, **arguments: Any) -> list[dict[str, Any]]:
    feeder.timeline(path, **arguments)
    trace: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return trace


def slices(trace: list[dict[str, Any]], what: str = "") -> list[dict[str, Any]]:
    """Our events of a kind."""
    ours = [event for event in trace if event["ph"] == "X" and event["cat"] == "aiofeed"]
    return [event for event in ours if event["name"].startswith(what)]


def batches_of(trace: list[dict[str, Any]], what: str) -> list[int]:
    return [event["args"]["batch"] for event in slices(trace, what)]


def test_every_batch_passes_every_stage(files: aiofeed.Files, tmp_path: Path) -> None:
    """Each batch is read, decoded, put together, waited for and used, with all its samples."""
    with new_feeder(files) as feeder:
        for _ in feeder:
            time.sleep(0.001)
        trace = trace_of(feeder, tmp_path / "t.json")
    for what in ("collate", "wait", "step"):
        assert sorted(batches_of(trace, what)) == list(range(SAMPLES // BATCH))
    for what in ("read", "decode"):
        assert sum(event["args"]["samples"] for event in slices(trace, what)) == SAMPLES
    assert sum(event["args"]["bytes"] for event in slices(trace)) > 0
    assert all(event["dur"] >= 1000 for event in slices(trace, "step"))
    names = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert "training" in names
    assert any(name.startswith("decode-") for name in names)


def test_arrows_follow_batches(files: aiofeed.Files, tmp_path: Path) -> None:
    """An arrow per batch begins in its read and ends in its step, within an event at each point."""
    with new_feeder(files) as feeder:
        for _ in feeder:
            pass
        trace = trace_of(feeder, tmp_path / "t.json")
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in trace:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    assert len(arrows) == SAMPLES // BATCH
    for points in arrows.values():
        assert [point["ph"] for point in points] == ["s", *["t"] * (len(points) - 2), "f"]
        found = []
        for point in points:
            [event, *_] = [
                event
                for event in slices(trace)
                if event["tid"] == point["tid"] and event["ts"] <= point["ts"] <= event["ts"] + event["dur"]
            ]
            found.append(event["name"].split()[0])
        assert (found[0], found[-2:]) == ("read", ["wait", "step"])


def test_it_is_on_the_clock_of_the_profiler(files: aiofeed.Files, tmp_path: Path) -> None:
    """Merged into a trace of torch's profiler, what the loop body does lies within its steps."""
    with (
        new_feeder(files) as feeder,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        for _ in feeder:
            with torch.profiler.record_function("body"):
                time.sleep(0.002)
    profile.export_chrome_trace(str(tmp_path / "torch.json"))
    trace = trace_of(feeder, tmp_path / "t.json", merge=tmp_path / "torch.json")
    bodies = sorted(event["ts"] for event in trace if event["ph"] == "X" and event["name"] == "body")
    steps = sorted((event["ts"], event["ts"] + event["dur"]) for event in slices(trace, "step"))
    assert len(bodies) == len(steps) == SAMPLES // BATCH
    assert all(began <= body <= ended for body, (began, ended) in zip(bodies, steps, strict=True))
    assert (
        len({event["pid"] for event in slices(trace)} | {event["pid"] for event in trace if event["name"] == "body"})
        == 2
    )


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("engine", ["process", "process:2"])
def test_worker_processes_have_lanes(files: aiofeed.Files, tmp_path: Path, engine: Any) -> None:
    """Their events are on the same clock: each batch is decoded before the training gets it."""
    with new_feeder(files, engine=engine) as feeder:
        for _ in feeder:
            pass
        trace = trace_of(feeder, tmp_path / "t.json")
    names = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    workers = {f"worker {1 + number}" for number in range(int(engine[8:] or 1))}
    assert {name.partition(":")[0] for name in names} >= workers
    decoded = {event["args"]["batch"]: event["ts"] + event["dur"] for event in slices(trace, "decode")}
    for event in slices(trace, "step"):
        assert decoded[event["args"]["batch"]] < event["ts"]


def test_an_attached_process_has_its_own_steps(files: aiofeed.Files, tmp_path: Path) -> None:
    """The timelines of the server and of the consumer name the same batches, and merge into one trace."""
    with new_feeder(files) as feeder, aiofeed.serve(feeder, tmp_path / "feed.sock"):
        attached = aiofeed.attach(tmp_path / "feed.sock")
        for _ in attached:
            pass
        server = trace_of(feeder, tmp_path / "server.json")
        shown = attached.timeline(tmp_path / "both.json", merge=tmp_path / "server.json")
        assert "12 batches in " in shown._repr_html_()
        attached.close()
    both = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    added = both[len(server) :]
    assert both[: len(server)] == server
    assert batches_of(added, "step") == sorted({*batches_of(server, "decode")}) == list(range(SAMPLES // BATCH))
    # The earliest: the server has begun the next epoch.
    decoded = {event["args"]["batch"]: event["ts"] for event in reversed(slices(server, "decode"))}
    assert all(decoded[event["args"]["batch"]] < event["ts"] for event in slices(added, "step"))


def test_copies_to_a_device(files: aiofeed.Files, tmp_path: Path) -> None:
    """The copy thread has a lane."""
    with new_feeder(files, device=SimulatedDevice()) as feeder:
        for _ in feeder:
            pass
        assert sorted(batches_of(trace_of(feeder, tmp_path / "t.json"), "copy")) == list(range(SAMPLES // BATCH))


@pytest.mark.parametrize("arguments", [{"in_order": "samples"}, {"in_order": False}, {"cache": "host"}], ids=str)
def test_other_feeders(files: aiofeed.Files, tmp_path: Path, arguments: dict[str, Any]) -> None:
    """All engines and caches give events; tensors in memory give waits and steps."""
    with new_feeder(files, **arguments) as feeder:
        for _ in range(2):
            for _ in feeder:
                pass
        assert len(slices(trace_of(feeder, tmp_path / "t.json"), "decode")) >= SAMPLES // BATCH
    with aiofeed.Feeder(aiofeed.Tensors(torch.arange(10)), batch_size=5) as resident:
        for _ in resident:
            pass
        assert batches_of(trace_of(resident, tmp_path / "t.json"), "step") == [0, 1]


def test_pictures(files: aiofeed.Files, tmp_path: Path) -> None:
    """A page and an image, without anything else."""
    with new_feeder(files) as feeder:
        for _ in feeder:
            pass
        feeder.timeline(tmp_path / "t.html")
        feeder.timeline(str(tmp_path / "t.png"))
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert page.count("<rect") >= SAMPLES // BATCH * 5
    assert "decode of batch 0:" in page
    assert "src=" not in page
    assert re.search(r"<title>aiofeed: 12 batches in \d[\d.]* m?s, waiting \d+%</title>", page)
    for what, meaning in MEANINGS.items():
        assert f"<li class={what}>{what}: {meaning}" in page
    assert not re.search(r"\[(title|colours|legend|names|left|width|height|seconds|events)\]", page)
    with Image.open(tmp_path / "t.png") as image:
        colours = image.convert("RGB").getcolors()
    assert colours is not None
    assert len(colours) > 4


def test_a_notebook_shows_it(files: aiofeed.Files, tmp_path: Path) -> None:
    """The result of a call, with a file or without, is the page in a frame; later batches are not in it."""
    with new_feeder(files) as feeder:
        for _ in feeder:
            pass
        shown, written = feeder.timeline(), feeder.timeline(tmp_path / "t.html")
        for _ in feeder:
            pass
        later = feeder.timeline()
    [page] = re.findall(r' srcdoc="([^"]*)"></iframe>$', shown._repr_html_())
    assert unescape(page.replace("&amp;", "&#38;")) == (tmp_path / "t.html").read_text(encoding="utf-8")
    assert written._repr_html_() == shown._repr_html_()
    assert re.fullmatch(r"<Timeline: 12 batches in \d[\d.]* m?s, waiting \d+%>", repr(shown))
    assert repr(later).startswith("<Timeline: 24 batches in ")


VIEW = "return document.querySelector('svg').getAttribute('viewBox').split(' ').map(Number)"
TOLD = "return document.querySelector('output').textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with new_browser() as found:
        yield found


@pytest.fixture
def page(tmp_path: Path) -> str:
    """The address of a page with eight events of 100 ms, one after the other, and some of ten other threads."""
    events: deque[Event] = deque(("step", "training", n / 10, (n + 1) / 10, n, 8, 0) for n in range(8))
    events += [
        ("decode", f"aiofeed-a-thread-with-a-long-name-{n}", n / 20, n / 20 + 0.01, n, 8, 100) for n in range(10)
    ]
    write_timeline(events, tmp_path / "t.html", seconds=9.0)
    return (tmp_path / "t.html").as_uri()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_fits_the_window(browser: Browser, page: str, width: int, dark: bool) -> None:
    """Nothing is beyond the edge of a telephone or a screen; the events have most of the width, in both modes."""
    browser.open(page, width=width, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run("return document.querySelector('svg').clientWidth") > 0.6 * width
    edges = (
        "return [...document.querySelectorAll('h1, li, output, .names div')].map(e => e.getBoundingClientRect().right)"
    )
    assert max(browser.run(edges)) <= width
    ticks = browser.run("return [...document.querySelectorAll('.ticks span')].map(tick => tick.textContent)")
    assert 3 <= len(ticks) <= 20
    assert (ticks[0], {tick.split()[1] for tick in ticks}) == ("0 ms", {"ms"})
    ground = browser.run("return getComputedStyle(document.querySelector('output')).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") != dark


def test_wheel_and_keys_zoom(browser: Browser, page: str) -> None:
    """What is below the pointer stays there; keys zoom in the middle, move, and show all; never beyond the ends."""
    browser.open(page, width=1400)
    whole = browser.run(VIEW)
    left, top = browser.run("const box = document.querySelector('svg').getBoundingClientRect(); return [box.x, box.y]")
    place = (round(left + 400), round(top + 30))
    below = "return document.elementFromPoint(arguments[0], arguments[1]).textContent"
    before = browser.run(below, *place)
    browser.turn_wheel(*place, -300)
    assert browser.run(VIEW)[2] == pytest.approx(whole[2] / 2)
    assert browser.run(below, *place) == before
    browser.turn_wheel(*place, 3000)
    assert browser.run(VIEW) == pytest.approx(whole)
    browser.type("++")
    assert browser.run(VIEW)[::2] == pytest.approx([whole[0] + whole[2] * 3 / 8, whole[2] / 4])
    browser.type(LEFT)
    assert browser.run(VIEW)[::2] == pytest.approx([whole[0] + whole[2] * (3 / 8 - 0.05), whole[2] / 4])
    browser.type(RIGHT * 30)
    assert browser.run(VIEW)[::2] == pytest.approx([whole[0] + whole[2] * 3 / 4, whole[2] / 4])
    browser.type("-0")
    assert browser.run(VIEW) == pytest.approx(whole)
    browser.type("+" * 30)
    assert browser.run(VIEW)[2] == pytest.approx(whole[2] / 1e5)


def test_fingers_zoom_move_and_tell(browser: Browser, page: str) -> None:
    """Two fingers apart zoom in, one moves the picture, and a tap shows the figures of an event."""
    browser.open(page, width=390)
    whole = browser.run(VIEW)
    left, bottom = browser.run(
        "const box = document.querySelector('svg').getBoundingClientRect(); return [box.x, box.bottom]"
    )
    x, y = round(left), round(bottom) - 9
    browser.touch([(x + 20, y), (x + 20, y)])
    assert browser.run(TOLD) == "step of batch 0: 100.00 ms, 8 samples"
    browser.touch([(x + 120, y), (x + 70, y)], [(x + 160, y), (x + 210, y)])
    zoomed = browser.run(VIEW)
    assert zoomed[2] < whole[2] / 2
    browser.touch([(x + 100, y), (x + 150, y)])
    moved = browser.run(VIEW)
    assert moved[2] == pytest.approx(zoomed[2])
    assert moved[0] < zoomed[0]


def test_seconds_and_the_size_of_the_buffer(files: aiofeed.Files, tmp_path: Path) -> None:
    """Older events are left out; no more than a number of them is kept."""
    with new_feeder(files) as feeder:
        for epoch in range(2):
            for _ in feeder:
                pass
            time.sleep(0.3 * (1 - epoch))
        assert len(batches_of(trace_of(feeder, tmp_path / "t.json"), "wait")) == 2 * SAMPLES // BATCH
        assert len(batches_of(trace_of(feeder, tmp_path / "t.json", seconds=0.2), "wait")) <= SAMPLES // BATCH
        assert feeder._order.events.maxlen == EVENTS
        assert not pickle.loads(pickle.dumps(feeder))._order.events


@pytest.mark.parametrize(
    ("path", "merge", "error", "message"),
    [
        ("t.txt", None, ValueError, "a timeline is .json for Perfetto, .html or .png"),
        ("t.html", "t.json", ValueError, "must end in .json, got '.*t.html'"),
        (None, "t.json", ValueError, "must end in .json, got no path"),
        ("t.json", "list.json", ValueError, "is no trace of torch.profiler"),
        ("t.json", "missing.json", FileNotFoundError, "missing.json"),
        ("no/folder/t.json", None, FileNotFoundError, "no/folder"),
    ],
)
def test_errors(
    files: aiofeed.Files, tmp_path: Path, path: str | None, merge: str | None, error: type[Exception], message: str
) -> None:
    """They name the file."""
    (tmp_path / "list.json").write_text("[1]")
    with new_feeder(files) as feeder:
        next(iter(feeder))
        with pytest.raises(error, match=message):
            feeder.timeline(path and tmp_path / path, merge=merge and tmp_path / merge)


def test_it_can_be_turned_off(files: aiofeed.Files, tmp_path: Path) -> None:
    """Then nothing is kept, as before the first batch."""
    with new_feeder(files, timeline=False) as feeder:
        for _ in feeder:
            pass
        assert not feeder._order.events
        with pytest.raises(ValueError, match="timeline=False"):
            feeder.timeline(tmp_path / "t.json")
    with pytest.raises(TypeError, match="timeline must be"):
        new_feeder(files, timeline=1)


def test_it_may_be_written_during_an_epoch(files: aiofeed.Files, tmp_path: Path) -> None:
    """Threads go on adding events."""
    with new_feeder(files) as feeder:
        for _ in range(20):
            for number, _ in enumerate(feeder):
                if number % 4 == 0:
                    feeder.timeline(tmp_path / "t.json")


def test_lanes_do_not_overlap() -> None:
    """Reads that overlap are in lanes of their own."""
    events: list[Event] = [("read", "reads", at / 10, at / 10 + 0.35, at, 1, 1) for at in range(20)]
    lanes = lanes_of(events)
    assert [lane.name for lane in lanes] == ["reads 1", "reads 2", "reads 3", "reads 4"]
    for lane in lanes:
        assert all(first[3] <= second[2] for first, second in pairwise(lane.events))


def test_lanes_are_in_the_order_of_their_numbers() -> None:
    """Thread 2 comes before thread 10, and the training is the last lane."""
    events: list[Event] = [("decode", f"aiofeed-decode-{n}", n, n + 1, n, 1, 1) for n in range(12)]
    events.append(("step", "training", 3.0, 4.0, 0, 1, 0))
    assert [lane.name for lane in lanes_of(events)] == [*(f"decode-{n}" for n in range(12)), "training"]


@pytest.mark.parametrize("seconds", [1e-6, 0.003, 0.9, 1.0, 7.0, 99.0, 12345.0])
def test_the_axis_has_round_numbers(seconds: float) -> None:
    """Five to ten of them, or up to thirteen."""
    events: list[Event] = [("step", "training", 5.0, 5.0 + seconds, 0, 1, 0)]
    ticks = ticks_of(lanes_of(events))
    assert 5 <= len(ticks) <= 14
    assert all(len(text) <= 10 for _, text in ticks)


def test_an_empty_buffer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to show"):
        write_timeline(deque(), tmp_path / "t.json", seconds=1.0)
