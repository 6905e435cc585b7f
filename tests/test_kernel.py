"""What a small feeder loads, and what is left of the package without one of its add-ons."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from typing import Any

import pytest

import aiofeed
from tests.support.paths import ROOT, environment

SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["aiofeed"]
ADDONS: dict[str, list[str]] = SETTINGS["addons"]
LISTS = ROOT / "tests" / "kernel" / "loaded"

# Runs each scenario in a fork, which begins with torch and without aiofeed, and prints one line of JSON for each.
PROGRAM = """
import importlib.abc, json, os, sys, tempfile, traceback
from pathlib import Path
import aiofiles.os, numpy, torch, torch.utils.data, PIL.Image, PIL.JpegImagePlugin, PIL.PngImagePlugin
try: import uvloop
except ImportError: pass


class Missing(importlib.abc.MetaPathFinder):
    def __init__(self, addon):
        self.name = f"aiofeed.{addon}"

    def find_spec(self, name, path=None, target=None):
        if name == self.name or name.startswith(self.name + "."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class Numbers:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index


def feed_jpegs(aiofeed, **options):
    with tempfile.TemporaryDirectory() as folder:
        for index in range(8):
            path = Path(folder, "ab"[index % 2], f"{index}.jpg")
            path.parent.mkdir(exist_ok=True)
            PIL.Image.new("RGB", (64, 48), (index, 0, 0)).save(path)
        source = aiofeed.ImageFolder(folder)
        with aiofeed.Feeder(source, decode=aiofeed.DecodeImage(32), batch_size=4, shuffle=True, **options) as feeder:
            assert sum(len(labels) for _, labels in feeder) == 8


def feed_numbers(aiofeed, shuffle=True, **options):
    with aiofeed.Feeder(Numbers(), batch_size=4, shuffle=shuffle, **options) as feeder:
        assert sum(len(batch) for batch in feeder) == 16
        return feeder


def outcome(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except ImportError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    return "works"


# Uses of an add-on by a word, without a name of its own.
WORDS = {
    "cache": lambda aiofeed: feed_jpegs(aiofeed, cache="host"),
    "plans": lambda aiofeed: feed_numbers(aiofeed, shuffle=False, weights=[1.0] * 16),
    "streams": lambda aiofeed: aiofeed.Feeder(Endless(), batch_size=2),
    "workers": lambda aiofeed: feed_numbers(aiofeed, engine="process:1"),
    "reports": lambda aiofeed: feed_numbers(aiofeed).explain(),
    "objects": lambda aiofeed: aiofeed.ImageFolder("https://x.invalid/a"),
}


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


def without(addon):
    sys.meta_path.insert(0, Missing(addon))
    import aiofeed

    found = {"a folder of JPEGs": outcome(feed_jpegs, aiofeed), "a Dataset": outcome(feed_numbers, aiofeed)}
    for name in aiofeed._MODULES:
        space, _, last = name.rpartition(".")
        found[name] = outcome(lambda: getattr(getattr(aiofeed, space) if space else aiofeed, last))
    if addon in WORDS:
        found["word"] = outcome(WORDS[addon], aiofeed)
    return found


def loaded(feed):
    import aiofeed

    feed(aiofeed)
    return sorted(name for name in sys.modules if name.partition(".")[0] == "aiofeed")


def run(name, function, *arguments):
    if os.fork():
        assert os.wait()[1] == 0, name
        return
    print(json.dumps([name, function(*arguments)]), flush=True)
    os._exit(0)


run("loaded jpegs", loaded, feed_jpegs)
run("loaded dataset", loaded, feed_numbers)
for addon in sys.argv[1:]:
    run(addon, without, addon)
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What each scenario printed."""
    if not hasattr(os, "fork"):
        pytest.skip("the scenarios are forks")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ADDONS],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": str(ROOT), "AIOFEED_DEFAULT_DEVICE": ""},
    )
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(line) for line in ended.stdout.splitlines())


def lines_of_code(module: str) -> int:
    """Count the lines of code of a module as the budgets do."""
    spec = importlib.util.spec_from_file_location("lines_of_code", ROOT / ".ci" / "lines_of_code.py")
    assert spec is not None
    assert spec.loader is not None
    counter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(counter)
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return int(counter.lines_of_code(path, ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("kind", ["jpegs", "dataset"])
def test_a_small_feeder_loads_the_kernel_only(found: dict[str, Any], kind: str) -> None:
    """The modules are those of the list, all of them the kernel's, and within the budget of lines.

    ``AIOFEED_RECORD_LOADED=1`` writes the list anew.
    """
    modules, path = found[f"loaded {kind}"], LISTS / f"{kind}.txt"
    if os.environ.get("AIOFEED_RECORD_LOADED"):
        path.write_text("\n".join(modules) + "\n", encoding="utf-8")
    assert modules == path.read_text(encoding="utf-8").splitlines()
    assert [each for each in modules if not each.startswith("aiofeed.kernel") and each != "aiofeed"] == []
    budget = SETTINGS["loaded"][kind]
    assert len(modules) <= budget["modules"]
    assert sum(map(lines_of_code, modules)) <= budget["lines"]


@pytest.mark.parametrize("addon", ADDONS)
def test_the_package_works_without(found: dict[str, Any], addon: str) -> None:
    """Feeders and all names of other rooms work; its own names say that it is missing."""
    results, missing = dict(found[addon]), f"aiofeed.{addon}"
    word = results.pop("word", "")
    assert not word or (missing in word and "\n" not in word), word
    for name, result in results.items():
        room = aiofeed._MODULES.get(name, "aiofeed.kernel").split(".")[1]
        if addon in (room, name.partition(".")[0]):
            assert missing in result, (name, result)
            assert "\n" not in result, result
        elif addon not in ADDONS.get(room, ()):
            assert result == "works", (name, result)
