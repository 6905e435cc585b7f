"""Tests of the examples: each runs as its documentation says, and prints the documented results."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image

from aiofeed import ImageFolder, pad_collate
from tests.support.fault_server import Fault, FaultServer
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def command(name: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / name), *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """The environment of a terminal without colours that is wide enough for every table."""
    return {**os.environ, "COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8", **changes}


# Torch 2.13 keeps gloo's threads after destroy_process_group if there was a DistributedDataParallel. At the exit of a
# process they seldom abort it with this message, after all it had to do.
ABORTED_AT_EXIT = "terminate called without an active exception"


def checked(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The output of an example, which must have exited with ``code``."""
    assert done.returncode == code, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def run_fresh(name: str, *arguments: str | Path, code: int = 0, attempts: int = 1) -> str:
    """Run an example in a new interpreter; returns its stdout and stderr.

    Further attempts are for torch's abort at the exit of a process only.
    """
    done = subprocess.run(
        command(name, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        env=environment(),
        timeout=150,
        check=False,
    )
    if attempts > 1 and ABORTED_AT_EXIT in done.stdout:
        return run_fresh(name, *arguments, code=code, attempts=attempts - 1)
    return checked(done, code)


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Callable[..., str]:
    """`run(name, *arguments, code=0)` is `run_fresh` in a process in which torch is imported, where there are forks."""
    if not hasattr(os, "fork"):
        return run_fresh
    server = request.getfixturevalue("fork_server")

    def forked(name: str, *arguments: str | Path, code: int = 0) -> str:
        done = server.run(EXAMPLES / name, *arguments, env=environment(), merge=True, timeout=150)
        return checked(done, code)

    return forked


def cells(output: str, label: str) -> list[str]:
    """The cells to the right of ``label`` in a table that the demo printed."""
    [line] = [line for line in output.splitlines() if line.startswith(f"{label}  ")]
    return re.split(r" {2,}", line.removeprefix(label).strip())


def number(cell: str) -> float:
    """The number in a cell such as "7.9%" or "12 ms"."""
    return float(cell.rstrip("% msx"))


def drain(terminal: int) -> None:
    """Read until the other side is closed, which some systems report as an error."""
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:
        pass


# --- demo -------------------------------------------------------------------------------------------------------------

SMALL_DEMO = ("--images", "60", "--batch-size", "16", "--size", "64")


@dataclass(frozen=True)
class DemoRun:
    """A run of the demo: the folder of its images, and its output."""

    data: Path
    output: str


@pytest.fixture(scope="module")
def demo(run: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    data = tmp_path_factory.mktemp("demo")
    return DemoRun(data, run("demo.py", *SMALL_DEMO, "--epochs", "1", "--data", data))


@pytest.mark.slow
def test_demo_compares_the_sides(demo: DemoRun) -> None:
    """The table has figures for both sides, the gain, and the same Pillow calls in both; all sides learn the same."""
    for label in (
        "training, images per second",
        "loading alone, images per second",
        "loading by the same Pillow calls",
    ):
        by_loader, by_feeder, gain = map(number, cells(demo.output, label))
        assert by_loader > 0
        assert by_feeder > 0
        assert gain > 0
    for label in ("waits for data per 1,000 images", "first batch of an epoch", "CPU time per 1,000 images"):
        assert [number(cell) > 0 for cell in cells(demo.output, label)] == [True] * 2
    by_loader, by_feeder = map(number, cells(demo.output, "loss in the last epoch"))
    assert by_feeder == pytest.approx(by_loader, rel=0.2)


@pytest.mark.slow
def test_demo_makes_its_point_in_ten_lines(demo: DemoRun) -> None:
    """The table and the reasons are the last ten lines, of 120 letters at most."""
    lines = demo.output.rstrip().splitlines()[-10:]
    assert lines[0].startswith("1600 x 1280 JPEGs for 64 x 64 ")
    assert lines[1].startswith("training, images per second")
    assert lines[8].startswith("Why: ")
    assert max(map(len, lines)) <= 120


@pytest.mark.slow
def test_demo_gives_two_sides_the_same_pixels(demo: DemoRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """DataLoader and the feeder with the same decoding give equal batches."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo as script  # type: ignore[import-not-found, unused-ignore]

    [folder] = demo.data.glob("photographs-*")
    _, (loader, _, same_calls) = script.new_sides(ImageFolder(folder), argparse.Namespace(size=64, batch_size=16))
    by_loader, by_feeder = (
        [[image.clone() for image in batch] for batch in side.begin(1)] for side in (loader, same_calls)
    )
    assert len(by_loader) == 3
    for one, other in zip(by_loader, by_feeder, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.slow
def test_demo_generates_its_images_once(run: Callable[..., str], demo: DemoRun) -> None:
    """The demo writes sixty JPEGs of 1600 x 1280 in six classes; the next run does not change them."""
    [folder] = demo.data.glob("photographs-*")
    assert f"The images stay in {folder}" in demo.output
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")}
    assert len(written) == 60
    assert len({path.parent for path in written}) == 6
    for path in written:
        with Image.open(path) as image:
            assert (image.format, image.size) == ("JPEG", (1600, 1280))
    run("demo.py", *SMALL_DEMO, "--epochs", "1", "--data", demo.data)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")} == written


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_demo_prints_no_traceback_on_ctrl_c(demo: DemoRun) -> None:
    """Ctrl-C while it measures, sent to the workers too, prints one word and no traceback."""
    import pty

    terminal, child_side = pty.openpty()
    process = subprocess.Popen(
        command("demo.py", *SMALL_DEMO, "--epochs", "1000", "--data", demo.data),
        stdout=child_side,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment(TERM="xterm"),
        start_new_session=True,
    )
    os.close(child_side)
    try:
        output = b""
        while b"load 2: DataLoader" not in output:
            output += os.read(terminal, 4096)
        os.killpg(process.pid, signal.SIGINT)
        drain(terminal)
        _, errors = process.communicate()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert errors.strip() == "Stopped."
    assert process.returncode == 130


def test_demo_refuses_too_few_images(run: Callable[..., str], tmp_path: Path) -> None:
    """Fewer images than a batch has is an error with both numbers."""
    output = run("demo.py", "--images", "10", "--batch-size", "64", "--data", tmp_path, code=2)
    assert "--images must be at least 6 and fill a batch of 64, got 10" in output
    assert not list(tmp_path.iterdir())


def test_overlap_loads_the_next_sample_during_a_step(run: Callable[..., str]) -> None:
    """With one load at a time, load N + 1 begins after load N ends and before step N ends."""
    one_by_one, four = run("overlap.py", "--samples", "3", "--scale", "0.5").split("4 loads at a time")
    events = re.findall(r"((?:load|step) \d (?:begins|ends))", one_by_one)
    assert len(events) == 12
    for sample in range(2):
        assert events.index(f"load {sample} ends") < events.index(f"load {sample + 1} begins")
        assert events.index(f"load {sample + 1} begins") < events.index(f"step {sample} ends")
    for part in (one_by_one, four):
        sequential, overlapped, ideal = (
            float(re.search(rf"{name} ([0-9.]+) s", part)[1])  # type: ignore[index]
            for name in ("sequential", "overlapped", "ideal")
        )
        assert sequential == pytest.approx(3 * (0.5 + 0.15))
        assert ideal <= overlapped


# --- train_images -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_images_saves_a_model(run: Callable[..., str], jpeg_folder: Path, tmp_path: Path) -> None:
    """Training on a folder prints loss and statistics per epoch, and saves the weights with the class names."""
    saved = tmp_path / "model.pt"
    arguments = ("--epochs", "2", "--size", "32", "--batch-size", "8", "--checkpoint", saved)
    output = run("train_images.py", jpeg_folder, *arguments)
    assert len(re.findall(r"^loss [0-9.]+, accuracy [0-9.]+%$", output, re.MULTILINE)) == 2
    assert output.count("36 samples in 5 batches") == 2
    checkpoint = torch.load(saved, weights_only=True)
    assert checkpoint["classes"] == ["ant", "bee", "cat"]
    assert all(torch.isfinite(weights).all() for weights in checkpoint["model"].values())


@pytest.mark.slow
def test_train_images_without_a_path_mentions_the_demo(run: Callable[..., str]) -> None:
    """Without PATH the error says how to generate images."""
    assert "`make demo` creates one" in run("train_images.py", code=2)


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "broken"])
def test_train_images_names_the_bad_path(run: Callable[..., str], kind: str, tmp_path: Path) -> None:
    """A path that is missing, empty or a file, and a file that is not an image, is named in one line."""
    path = culprit = tmp_path / kind
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("no folder")
    elif kind == "broken":
        (path / "ant").mkdir(parents=True)
        culprit = path / "ant" / "0.jpg"
        culprit.write_bytes(b"no image")
    output = run("train_images.py", path, "--checkpoint", tmp_path / "model.pt", code=1)
    assert str(culprit) in output.splitlines()[-1]
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.slow
def test_async_training_answers_while_it_trains(run: Callable[..., str]) -> None:
    """The answers to /progress advance through the batches, and the loss falls."""
    output = run("async_training.py", "--self-test", "--samples", "12000", "--epochs", "2")
    assert re.search(r"^listening on http://127\.0\.0\.1:[0-9]+/progress$", output, re.MULTILINE)
    answers = [json.loads(answer) for answer in re.findall(r"^/progress: (.*)$", output, re.MULTILINE)]
    steps = [(answer["epoch"], answer["batch"]) for answer in answers]
    assert steps == sorted(steps)
    assert len({step for step in steps if 0 < step[1] < answers[0]["batches"]}) >= 3
    first, last = re.findall(r"^epoch [12]: loss ([0-9.]+)", output, re.MULTILINE)
    assert float(last) < float(first)
    assert f"self-test: {len(answers)} answers while training" in output


def test_existing_dataset_gives_the_same_batches_in_every_way(run: Callable[..., str]) -> None:
    """The batches of Feeder, Feeder with two threads and prefetch equal DataLoader's."""
    output = run("existing_dataset.py", "--samples", "50", "--batch-size", "16", "--step-s", "0.005")
    for way in ("Feeder(dataset)", "Feeder(FromDataset(dataset, threads=2))", "prefetch(DataLoader(dataset))"):
        assert re.search(rf"^{re.escape(way)} +[0-9.]+ s, batches equal$", output, re.MULTILINE)


# --- detection --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_detection_learns_from_pictures_of_two_shapes(run: Callable[..., str]) -> None:
    """The loss falls to less than half, over epochs, with batches of both shapes."""
    output = run("detection.py", "--samples", "320", "--steps", "60", "--report", "20")
    lines = re.findall(r"^step +(\d+), epoch (\d): loss ([0-9.]+), (\d+) images/s, (.*)$", output, re.MULTILINE)
    assert [line[0] for line in lines] == ["20", "40", "60"]
    assert int(lines[-1][1]) > 0
    assert float(lines[-1][2]) < float(lines[0][2]) / 2
    assert all(int(line[3]) > 0 for line in lines)
    assert {line[4] for line in lines} == {"64x96 and 96x64"}


def test_detection_ignores_padded_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More padding of the boxes does not change the loss, whatever its values."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import detection as script  # type: ignore[import-not-found, unused-ignore]

    pictures = script.Pictures(40)
    portraits = [pictures[at] for at, size in enumerate(pictures.sizes) if size == script.PORTRAIT]
    batch = pad_collate()(portraits)
    padded = pad_collate({"boxes": 1e6, "labels": -1}, multiple_of=16)(portraits)
    assert not batch["attention_mask"].all()
    assert padded["boxes"].shape[1] == 16 > batch["boxes"].shape[1]
    grid = torch.randn(len(portraits), 7, 12, 8)
    assert script.detection_loss(grid, padded) == script.detection_loss(grid, batch)


@pytest.mark.slow
def test_packed_text_is_resumed_with_another_number_of_processes() -> None:
    """The loss falls, documents come in the proportions of the mixture, and no batch is lost or repeated."""
    output = run_fresh("packed_text.py", attempts=3)
    lines = re.findall(
        r"^(\d) processes: loss ([0-9.]+) to ([0-9.]+), .* prose (\d+), code (\d+)$", output, re.MULTILINE
    )
    assert [line[0] for line in lines] == ["2", "1"]
    assert float(lines[0][2]) < float(lines[0][1]) - 1
    for _, _, _, prose, code in lines:
        assert abs(int(prose) - 0.7 * (int(prose) + int(code))) < 0.05 * int(prose) + 5
    assert "uninterrupted process: True" in output


@pytest.mark.slow
def test_three_kinds_are_mixed_by_tokens() -> None:
    """The loss of each source falls, the tokens are shared by the weights, and the resumed training loses no batch."""
    pytest.importorskip("pyarrow")
    output = run_fresh("three_kinds.py", "--steps", "40")
    for name, share in (("docs", 50), ("code", 30), ("help", 20)):
        first, second = re.findall(
            rf"^  {name}: \d+ samples, (\d+)% of the tokens, loss ([\d.]+)$", output, re.MULTILINE
        )
        assert float(second[1]) < float(first[1]) - 0.3
        assert all(abs(int(found) - share) <= 1 for found in (first[0], second[0]))
    assert "uninterrupted training: True" in output


@pytest.mark.slow
def test_segmentation_learns_the_masks(run: Callable[..., str]) -> None:
    """The loss falls, objects are found, and the boxes are on their objects."""
    pytest.importorskip("skimage")
    output = run("segmentation.py", "--steps", "60", "--samples", "96")
    lines = re.findall(
        r"^step +\d+, .*: loss ([0-9.]+), mean IoU ([0-9.]+), ([0-9.]+) of the boxes", output, re.MULTILINE
    )
    losses, ious, fits = zip(*[map(float, line) for line in lines], strict=True)
    assert losses[1] < losses[0] / 1.5
    assert ious[1] > ious[0] + 0.1
    assert min(fits) > 0.7


@pytest.mark.slow
def test_nanogpt_is_resumed_with_its_next_batches(run: Callable[..., str]) -> None:
    """The loss on other text falls, and the resumed training gets the batches of an uninterrupted one."""
    output = run("nanogpt.py", "--steps", "60")
    lines = re.findall(r"^steps (\d+) to (\d+), .* val loss ([0-9.]+), [0-9,]+ tokens/s$", output, re.MULTILINE)
    assert [line[:2] for line in lines] == [("0", "30"), ("30", "60")]
    assert float(lines[1][2]) < float(lines[0][2]) < 4
    assert "uninterrupted training: True" in output


@pytest.mark.slow
@pytest.mark.integration
def test_raw_text_is_packed_once_on_8_ranks_then_2_then_8(
    object_server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of an object store that fails at times: the loss falls, and each token of each text comes exactly once."""
    tokenizers = pytest.importorskip("tokenizers")
    texts = [f"Text {index}: " + "the sum of " * (index % 9) + f"{index} and {7 * index}." for index in range(560)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["[END]", "[UNK]"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for shard in range(4):
        lines = [json.dumps({"text": text}) for text in texts[shard::4]]
        object_server.objects[f"corpus/{shard}.jsonl"] = "\n".join(lines).encode()
    object_server.schedule = lambda request: Fault(status=503) if request.number % 9 == 0 else None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    options = ["--endpoint", object_server.endpoint, "--tokenizer", tmp_path / "tokenizer.json", "--steps", "1"]
    output = run_fresh("raw_text.py", *(f"s3://corpus/{shard}.jsonl" for shard in range(4)), *options)
    lines = re.findall(r"^(\d) ranks, (\d+) batches: loss ([0-9.]+) to ([0-9.]+)$", output, re.MULTILINE)
    assert [(ranks, batches) for ranks, batches, _, _ in lines[:2]] == [("8", "8"), ("2", "8")]
    assert lines[2][:2] == ("8", "16")
    assert float(lines[2][3]) < float(lines[0][2])
    assert "the batches are those of one uninterrupted rank: True" in output
    assert "560 documents of 4 shards, each token once: True" in output


@pytest.mark.slow  # tests/sources/tables has these resumes, too
@pytest.mark.integration
def test_tables_is_resumed_with_its_next_batches() -> None:
    """Both trainings on the dataset learn, and the resumed one gets the batches of an uninterrupted one."""
    pytest.importorskip("datasets")
    output = run_fresh("tables.py")
    for name in ("columns", "images"):
        [(first, last)] = re.findall(rf"^{name}: loss ([0-9.]+) to ([0-9.]+)$", output, re.MULTILINE)
        assert float(last) < 0.5 < float(first)
    assert "the same batches: True" in output


@pytest.mark.slow
def test_video_clips_learns_and_is_resumed_with_its_next_clips(run: Callable[..., str]) -> None:
    """The network tells the directions of other videos apart, and the resumed training sees the same clips."""
    pytest.importorskip("av")
    output = run("video_clips.py")
    assert "the clips are those of one uninterrupted training: True" in output
    accuracy = re.search(r"^accuracy on other videos: (\d+)%$", output, re.MULTILINE)
    assert accuracy is not None
    assert int(accuracy[1]) > 60


@pytest.mark.slow
def test_push_dot_learns_and_is_resumed_with_its_next_moments(run: Callable[..., str]) -> None:
    """The loss falls, and the resumed training sees the moments and pixels of an uninterrupted one."""
    pytest.importorskip("av")
    pytest.importorskip("pyarrow")
    output = run("push_dot.py", "--quick")
    losses = re.findall(
        r"^steps \d+ to \d+, epoch \d+: loss ([0-9.]+) to ([0-9.]+), \d+ samples/s$", output, re.MULTILINE
    )
    assert len(losses) == 2
    assert float(losses[1][1]) < 0.8 * float(losses[0][0])
    assert "the batches are those of one uninterrupted training: True" in output


# --- weather, single_cells --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weather_is_forecast_better_than_by_persistence(run: Callable[..., str]) -> None:
    """After an epoch, the error in a year that the model has not seen is smaller than that of no change."""
    pytest.importorskip("zarr")
    output = run("weather.py", "--epochs", "1")
    found = re.search(r"error in the other year ([0-9.]+) K, of persistence ([0-9.]+) K$", output, re.MULTILINE)
    assert found is not None
    assert float(found[1]) < 0.8 * float(found[2])


@pytest.mark.slow
def test_single_cells_are_told_apart(run: Callable[..., str]) -> None:
    """Dense and sparse batches of the same rows train the same classifier."""
    pytest.importorskip("h5py")
    output = run("single_cells.py", "--epochs", "2")
    dense, sparse = re.findall(r"^accuracy on other cells: ([0-9.]+)%$", output, re.MULTILINE)
    assert dense == sparse
    assert float(dense) > 90


@pytest.mark.slow
def test_several_devices_equal_one_device(run: Callable[..., str]) -> None:
    """The loss falls, and is the same with two devices as with one."""
    losses = {}
    for devices in (["cpu"], ["cpu", "cpu"]):
        output = run("several_devices.py", "--devices", *devices)
        losses[len(devices)] = [float(loss) for loss in re.findall(r"^epoch \d: loss ([0-9.]+)", output, re.MULTILINE)]
    assert losses[1][1] < losses[1][0]
    assert losses[2] == pytest.approx(losses[1], rel=0.01, abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no Unix sockets that pass descriptors")
def test_shared_tensors_are_one_copy(run: Callable[..., str]) -> None:
    """Both children train on 16 MiB that three processes map, and each accounts for a third."""
    output = run("shared_tensors.py", "--samples", "16384")
    assert "16 MiB shared" in output
    losses = re.findall(r"^rate ([0-9.]+): loss ([0-9.]+)$", output, re.MULTILINE)
    assert [rate for rate, _ in losses] == ["0.005", "0.02"]
    assert float(losses[1][1]) < float(losses[0][1]) < 0.9
    if sys.platform == "linux":
        figures = re.findall(r"\(Rss\) ([0-9.]+) MiB, its share \(Pss\) ([0-9.]+) MiB", output)
        assert len(figures) == 2
        for mapped, share in figures:
            assert float(mapped) >= 16
            assert float(share) == pytest.approx(float(mapped) / 3, rel=0.05)


# --- training frameworks ----------------------------------------------------------------------------------------------


OUTPUTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("lightning", "lightning_resume.py"): (
        "stopped after step 5 of 13: 40 samples seen",
        "resumed: 60 more samples in epoch 0, 100 in epoch 1",
        "epoch 0, each sample once: True",
    ),
    ("accelerate", "accelerate_loop.py"): (
        "saved in epoch 0, after 40 samples",
        "trained to the end",
        "epoch 0, each sample once: True",
    ),
    ("transformers", "transformers_trainer.py"): ("after 40 samples", "epoch 0, each sample once: True"),
    ("lightning", "fabric_loop.py"): ("after 40 samples", "epoch 0, each sample once: True"),
    ("ignite", "ignite_engine.py"): ("after 40 samples", "epoch 0, each sample once: True"),
    ("ray", "ray_train.py", "--self-test"): ("self-test: 302 samples seen: 300, and 2 repeated",),
}


@pytest.mark.slow  # tests/integration has these frameworks, too
@pytest.mark.integration
@pytest.mark.parametrize("command", OUTPUTS, ids=lambda command: command[1])
def test_framework_example_resumes_with_the_rest_of_its_samples(command: tuple[str, ...]) -> None:
    """The training stops after 40 of 100 samples, resumes, also with more workers, and sees each sample once."""
    package, *script = command
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    output = run_fresh(*script)
    assert [line for line in OUTPUTS[command] if line not in output] == []


@pytest.mark.integration
def test_timm_mixup_turns_mixup_off() -> None:
    """`create_loader` makes aiofeed's loader; mixup is off in the last epoch."""
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    output = run_fresh("timm_mixup.py")
    assert "made an aiofeed.DataLoader" in output
    assert re.findall(r"mixup (\w+)$", output, re.MULTILINE) == ["True", "True", "False"]


@pytest.mark.integration
@pytest.mark.skipif(sys.platform == "win32", reason="torchrun's rendezvous needs another build of torch on Windows")
@pytest.mark.slow
def test_torchrun_ddp_resumes_with_more_processes() -> None:
    """Two processes see 40 samples each, then three see the rest of the 300, with two repeated."""
    output = run_fresh("torchrun_ddp.py", "--self-test", attempts=3)
    lines = re.findall(r"^process (\d) of (\d): (\d+) samples$", output, re.MULTILINE)
    assert sorted(lines) == [("0", "2", "40"), ("0", "3", "74"), ("1", "2", "40"), ("1", "3", "74"), ("2", "3", "74")]
    assert "self-test: 302 samples seen: 300, and 2 repeated" in output


def test_torchrun_ddp_shows_its_command(run: Callable[..., str]) -> None:
    """Without torchrun the error shows the command to use."""
    assert "torchrun --nproc-per-node=2" in run("torchrun_ddp.py", code=2)


@pytest.mark.integration
@pytest.mark.slow
def test_ray_data_is_resumed_with_its_next_batches() -> None:
    """Ray's batches and the feeder's rows are all images, and the resumed feeder gets the batches after its state."""
    pytest.importorskip("ray")
    output = run_fresh("ray_data.py")
    assert re.findall(r"^(\d+) images, loss", output, re.MULTILINE) == ["120", "120", "48", "72"]
    assert "one uninterrupted epoch: True" in output


@pytest.mark.slow
@pytest.mark.integration
def test_checkpoint_dcp_sees_each_sample_once() -> None:
    """A distributed checkpoint restores the feeder's position and the weights."""
    from torch.distributed.checkpoint import save

    if "no_dist" not in inspect.signature(save).parameters:
        pytest.skip("torch 2.6 finds out by itself that there is one process, and warns")
    output = run_fresh("checkpoint_dcp.py")
    assert "loaded: 60 samples are left, each sample once: True" in output
    assert "the weights equal the saved ones: True" in output


# --- three_trainings, ddp_one_host -----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix sockets")
@pytest.mark.slow
def test_three_trainings_share_decoded_images(run: Callable[..., str]) -> None:
    """Each of three trainings sees 120 images in each of three epochs, 360 are decoded, and the losses fall."""
    output = run("three_trainings.py")
    lines = re.findall(r"rate [0-9.]+: 360 images, loss ([0-9.]+) in the first epoch, ([0-9.]+) in the last", output)
    assert len(lines) == 3
    assert all(float(last) < float(first) for first, last in lines)
    assert "decoded once: 360 images" in output


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix sockets")
@pytest.mark.slow
def test_ddp_one_host_distributes_the_batches() -> None:
    """Two ranks get half of the 32 batches each, no sample twice, and end with the same weights."""
    output = run_fresh("ddp_one_host.py", attempts=3)
    assert len(re.findall(r"^rank [01]: 16 batches", output, re.MULTILINE)) == 2
    assert "each sample once: True, same weights: True" in output


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="four processes that each import torch take too long")
@pytest.mark.parametrize("arguments", [(), ("--accelerate",)], ids=str)
def test_device_mesh_is_resumed_on_another_mesh(run: Callable[..., str], arguments: tuple[str, ...]) -> None:
    """Tensor-parallel processes see the same samples, and a resume on another mesh has the rest of the epoch."""
    if arguments:
        pytest.importorskip("accelerate")
    output = run("device_mesh.py", *arguments)
    assert "2 x 2: the processes of a group saw the same samples: True" in output
    assert "4 x 1: each sample once: True" in output


def test_every_example_is_listed() -> None:
    """examples/README.md lists exactly the examples that exist."""
    listed = re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for ending in ("py", "ipynb") for path in EXAMPLES.glob(f"*.{ending}"))


@pytest.mark.slow
def test_resident_digits_learns_and_compares(run: Callable[..., str]) -> None:
    """The test accuracy is above 95 %, and every way has a time."""
    pytest.importorskip("sklearn")
    output = run("resident_digits.py", "--samples", "2000", "--epochs", "8")
    assert float(re.search(r"test accuracy ([0-9.]+)%", output)[1]) > 95  # type: ignore[index]
    for way in (
        "DataLoader",
        "indexed by hand",
        r"Feeder\(Tensors\(...\)\)",
        "sliced, no shuffle",
        "Feeder, no shuffle",
    ):
        assert float(re.search(rf"^{way} +([0-9.]+) ms$", output, re.MULTILINE)[1]) > 0  # type: ignore[index]
