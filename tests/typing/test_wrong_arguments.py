"""What pyright says about one wrong argument of an overloaded function or class."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("basedpyright")

IMAGES = "Feeder(ImageFolder('x'), decode=DecodeImage(size=8), batch_size=2"
WRONG = {
    f"{IMAGES}, epochs=3)": "epochs",
    f"{IMAGES}, batchsize=32)": "batchsize",
    f"{IMAGES}, num_workers=2, shuffle=True)": "num_workers",
    f"{IMAGES}, shuffle=1000)": "shuffle",
    f"{IMAGES}, seed='1')": "seed",
    f"{IMAGES}, on_error='ignore')": "on_error",
    f"{IMAGES}, engine='fork')": "engine",
    f"{IMAGES}, cache='disk')": "cache",
    f"{IMAGES}, collate_fn=3)": "collate_fn",
    f"{IMAGES}, transform=3)": "transform",
    f"{IMAGES}, limits=3)": "limits",
    f"{IMAGES}, keys='yes')": "keys",
    "Feeder(ImageFolder('x'), decode='jpeg', batch_size=2)": "decode",
    "Feeder(Table('x.csv'), batch_size='2')": "batch_size",
    "Feeder(Table('x.csv'), batch_size=2, filters=[])": "filters",
    "Feeder(Tensors(torch.zeros(3)), batch_size=2, progress=True)": "progress",
    "Feeder(Tensors(torch.zeros(3)), batch_size=2, in_order='yes')": "in_order",
    "prefetch([torch.zeros(3)], depth=3)": "depth",
    "prefetch([torch.zeros(3)], 'cpu', prefetch_batches='3')": "prefetch_batches",
    "prefetch([torch.zeros(3)], transform=3)": "transform",
    "prefetch([torch.zeros(3)], 2.5)": "device",
    "prefetch(3)": "batches",
}


@pytest.mark.slow
def test_pyright_names_the_wrong_argument(tmp_path: Path) -> None:
    """Of another type, and of a name that there is not."""
    imports = "import torch\nfrom aiofeed import DecodeImage, Feeder, ImageFolder, Table, Tensors, prefetch\n"
    program = tmp_path / "program.py"
    program.write_text(imports + "\n".join(WRONG))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson", str(program)]
    environment = {"cwd": Path(__file__).parents[2]}
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False, **environment).stdout)  # type: ignore[call-overload]
    said = [""] * len(WRONG)
    for each in found["generalDiagnostics"]:
        if (line := each["range"]["start"]["line"] - 2) >= 0 and each["severity"] == "error":
            said[line] += each["message"]
    assert [call for call, text in zip(WRONG, said, strict=True) if f'parameter "{WRONG[call]}"' not in text] == []
