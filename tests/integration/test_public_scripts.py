"""Scripts of public repositories under `aiofeed run`, unchanged: every loss has the bits that it has under `python`.

`AIOFEED_SCRIPTS` names a folder with checkouts, each called "owner+name"; without it the tests are skipped.
`AIOFEED_SCRIPTS_PYTHON` is a Python that has what the scripts import: torch, torchvision, lightning, accelerate,
transformers, timm. The data are small and made here. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.paths import environment

CHECKOUTS = os.environ.get("AIOFEED_SCRIPTS", "")
PYTHON = os.environ.get("AIOFEED_SCRIPTS_PYTHON", sys.executable)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHECKOUTS, reason="AIOFEED_SCRIPTS names no folder of checkouts"),
]

# Seeds scripts that do not, and writes the bits of each loss; the scripts' clocks and progress bars are not compared.
RECORDER = """
import os, random
import numpy, torch
random.seed(0); numpy.random.seed(0); torch.manual_seed(0)
backward = torch.Tensor.backward
def recorded(self, *arguments, **options):
    with open(os.environ["LOSSES"] + "-" + os.environ.get("RANK", "0"), "a") as file:
        print(self.detach().double().sum().item().hex(), file=file)
    return backward(self, *arguments, **options)
torch.Tensor.backward = recorded
"""


# --- small data -------------------------------------------------------------------------------------------------------


def write_mnist(folder: Path) -> None:
    """Digits of MNIST's format, random, beside and above the folder of the script."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, n in (("train", 600), ("t10k", 200)):
        header = b"".join(size.to_bytes(4, "big") for size in (2051, n, 28, 28))
        pixels = random.integers(0, 256, (n, 28, 28), np.uint8).tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + pixels)
        labels = random.integers(0, 10, n).astype(np.uint8).tobytes()
        (raw / f"{name}-labels-idx1-ubyte").write_bytes((2049).to_bytes(4, "big") + n.to_bytes(4, "big") + labels)


def write_images(folder: Path, n: int = 16, size: int = 80) -> None:
    """Random pictures, `n` for each of two classes."""
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(n):
            picture = random.integers(0, 256, (size, size, 3), np.uint8)
            Image.fromarray(picture).save(folder / name / f"{number}.jpg")


def mnist(work: Path) -> None:
    for folder in ("../data", "../../data", "data", "../../data/mnist"):
        write_mnist(work / folder)
    (work / "results").mkdir()


def pictures(work: Path) -> None:
    for part in ("train", "val"):
        write_images(work / "pictures" / part)


def super_resolution(work: Path) -> None:
    for part in ("train", "test"):
        folder = work / "dataset" / "BSDS300" / "images" / part
        write_images(folder, n=6, size=300)
        for file in folder.glob("cat/*.jpg"):
            file.rename(folder / file.name)
        shutil.rmtree(folder / "cat")
        shutil.rmtree(folder / "dog")


def text(work: Path) -> None:
    words = np.random.default_rng(0).integers(0, 40, 6000)
    lines = [" ".join(f"w{word}" for word in line) for line in words.reshape(-1, 20)]
    (work / "input.txt").write_text("\n".join(lines))


def pairs(work: Path) -> None:
    """GLUE's MRPC as a local folder, a tiny BERT under the name of the script's, and a module for its metric."""
    text(work)
    lines = (work / "input.txt").read_text().splitlines()
    (work / "nyu-mll" / "glue").mkdir(parents=True)
    for part, n in (("train", 64), ("validation", 32), ("test", 32)):
        rows = [
            {"idx": row, "sentence1": lines[row], "sentence2": lines[row + 1], "label": row % 2} for row in range(n)
        ]
        (work / "nyu-mll" / "glue" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "nyu-mll" / "glue" / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n"
        + "".join(f"  - split: {part}\n    path: {part}.jsonl\n" for part in ("train", "validation", "test"))
        + "---\n"
    )
    write_model(work / "bert-base-cased")
    (work / "stubs" / "evaluate").mkdir(parents=True)
    (work / "stubs" / "evaluate" / "__init__.py").write_text(
        "class Metric:\n"
        "    def __init__(self): self.right = []\n"
        "    def add_batch(self, predictions, references): self.right += (predictions == references).tolist()\n"
        "    def compute(self, **_): return {'accuracy': sum(self.right) / max(len(self.right), 1), 'f1': 0.0}\n"
        "def load(*_): return Metric()\n"
    )


def write_model(folder: Path) -> None:
    """A model with random weights and two small layers, and a tokenizer of words."""
    program = """
import sys
import tokenizers, torch, transformers
folder = sys.argv[1]
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(40))]
words = {word: n for n, word in enumerate(words)}
raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
transformers.PreTrainedTokenizerFast(
    tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
    mask_token="[MASK]", eos_token="[SEP]", model_max_length=64,
).save_pretrained(folder)
torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
transformers.BertForSequenceClassification(config).save_pretrained(folder)
"""
    subprocess.run([PYTHON, "-c", program, folder], check=True, capture_output=True)


# --- the scripts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """A public script.

    Args:
        repository: owner/name on GitHub.
        path: The script.
        arguments: Its command line; {checkout} is the folder of the repository.
        data: Makes its data in the folder where it runs.
        loaders: It takes batches from a `DataLoader`.
    """

    repository: str
    path: str
    arguments: str = ""
    data: Callable[[Path], None] = mnist
    loaders: bool = True


EXAMPLES, TUTORIAL, GANS = "pytorch/examples", "yunjey/pytorch-tutorial", "eriklindernoren/PyTorch-GAN"
LIGHTNING, ACCELERATE = "Lightning-AI/pytorch-lightning", "huggingface/accelerate"
TIMM = "huggingface/pytorch-image-models"
SCRIPTS = [
    Script(EXAMPLES, "mnist/main.py", "--epochs 2 --no-accel"),
    Script(EXAMPLES, "mnist_rnn/main.py", "--epochs 1"),
    Script(EXAMPLES, "vae/main.py", "--epochs 2 --no-accel"),
    Script(EXAMPLES, "siamese_network/main.py", "--epochs 1 --no-accel"),
    Script(EXAMPLES, "mnist_forward_forward/main.py", "--epochs 3 --no_accel --train_size 300 --test_size 100"),
    Script(EXAMPLES, "dcgan/main.py",
           "--dataset folder --dataroot pictures/train --niter 2 --ngf 8 --ndf 8 --batchSize 8", pictures),
    Script(EXAMPLES, "imagenet/main.py", "pictures -a resnet18 --epochs 2 -j 2 -b 8 --seed 1 --no-accel", pictures),
    Script(EXAMPLES, "super_resolution/main.py", "--upscale_factor 3 --batchSize 2 --nEpochs 1 --threads 2",
           super_resolution),
    Script(TUTORIAL, "tutorials/01-basics/feedforward_neural_network/main.py"),
    Script(TUTORIAL, "tutorials/01-basics/logistic_regression/main.py"),
    Script(TUTORIAL, "tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py"),
    Script(TUTORIAL, "tutorials/02-intermediate/convolutional_neural_network/main.py"),
    Script(TUTORIAL, "tutorials/03-advanced/variational_autoencoder/main.py"),
    Script(GANS, "implementations/gan/gan.py", "--n_epochs 2"),
    Script(GANS, "implementations/aae/aae.py", "--n_epochs 1"),
    Script("karpathy/minGPT", "projects/adder/adder.py", "--trainer.max_iters=30 --trainer.num_workers=2", text),
    Script(TIMM, "train.py", "pictures --model resnet10t --num-classes 2 -b 8 --epochs 2 -j 2 --img-size 64 "
           "--device cpu --mixup 0.2 --aa rand-m5-mstd0.5 --reprob 0.2 --seed 1", pictures),
    Script(LIGHTNING, "examples/pytorch/bug_report/bug_report_model.py", "", text),
    Script(ACCELERATE, "examples/nlp_example.py", "--cpu", pairs),
    Script(ACCELERATE, "examples/by_feature/gradient_accumulation.py", "--cpu --gradient_accumulation_steps 2", pairs),
]  # fmt: skip


def run(way: Sequence[str], script: Script, work: Path) -> tuple[list[str], str]:
    """Run a script in an empty folder with its data; returns the bits of its losses and what it wrote to stderr."""
    checkout = Path(CHECKOUTS) / script.repository.replace("/", "+")
    if not (checkout / script.path).is_file():
        pytest.skip(f"{checkout} has no {script.path}")
    # Some scripts look for data beside themselves.
    copy = work / "a" / "b" / "c"
    shutil.copytree((checkout / script.path).parent, copy)
    if script.repository == TIMM:
        copy = checkout / Path(script.path).parent
    folder = work / "1" / "2" / "3"
    folder.mkdir(parents=True)
    script.data(folder)
    recorder = work / "recorder"
    recorder.mkdir()
    (recorder / "sitecustomize.py").write_text(RECORDER)
    path = [environment()["PYTHONPATH"], recorder, folder / "stubs", checkout]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "LOSSES": str(work / "losses"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
    }
    command = [PYTHON, *way, str(copy / Path(script.path).name), *shlex.split(script.arguments)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-5000:]
    losses = [line for file in sorted(work.glob("losses-*")) for line in file.read_text().splitlines()]
    return losses, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.repository}-{script.path}")
def test_losses_of_public_scripts(script: Script, tmp_path: Path) -> None:
    """Each loss is the same, bit for bit, and the loaders are listed."""
    before, _ = run((), script, tmp_path / "before")
    after, err = run(("-m", "aiofeed", "run"), script, tmp_path / "after")
    lines = [line for line in err.splitlines() if line.startswith("aiofeed: ")]
    print(f"{script.repository} {script.path}: {len(before)} losses", *lines, sep="\n  ")
    assert before
    assert after == before
    assert bool(lines) == script.loaders
    assert not [line for line in lines if "left alone" in line]
