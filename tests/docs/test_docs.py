"""Tests of the documents: their Python blocks run, links are valid, and the API page has every public name."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import aiofeed
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

pytestmark = pytest.mark.usefixtures("accelerator_started")

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"docs/training-frameworks.md": ("accelerate", "lightning")}
"""Packages that a document imports and aiofeed does not need."""
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
INFO_STRINGS = {"python": True, "python no-run": False}


@dataclass(frozen=True)
class Block:
    """One fenced block of Python.

    Args:
        path: the document.
        line: number of the fence's line, from 1; the code starts on the next.
        code: the text between the fences, without their indentation.
        runs: false for ``python no-run``, which is only compiled.
    """

    path: Path
    line: int
    code: str
    runs: bool

    def compile(self) -> CodeType:
        """Compile with the document's line numbers; ``await`` is allowed outside functions, as in a notebook."""
        source = "\n" * self.line + self.code
        code: CodeType = compile(source, self.path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        return code


def python_blocks(path: Path, text: str) -> list[Block]:
    """The Python blocks of a document, in order; an unknown info string that starts like Python's is an error."""
    blocks = []
    for match in FENCE.finditer(text):
        info = match["info"].strip()
        line = text.count("\n", 0, match.start()) + 1
        if not info.lower().startswith(("py", "{py")):
            continue
        if info not in INFO_STRINGS:
            raise ValueError(f"{path.name}:{line}: info string {info!r}, expected one of {list(INFO_STRINGS)}")
        code = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        blocks.append(Block(path, line, code, runs=INFO_STRINGS[info]))
    return blocks


async def run_in_loop(code: CodeType, namespace: dict[str, Any]) -> None:
    """Run a block that awaits."""
    await eval(code, namespace)


def run_blocks(blocks: list[Block], namespace: dict[str, Any]) -> None:
    """Run the blocks in order in one namespace; those marked ``no-run`` are compiled."""
    for block in blocks:
        code = block.compile()
        if not block.runs:
            continue
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(run_in_loop(code, namespace))
        else:
            exec(code, namespace)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_image_folder: Callable[..., Path]) -> dict[str, Any]:
    """The names and folders that the documents use: ``train/`` and ``val/``, ``train_step``, ``asyncio``."""
    make_image_folder(tmp_path / "train", per_class=24, seed=0)
    make_image_folder(tmp_path / "val", per_class=8, seed=1)
    monkeypatch.chdir(tmp_path)
    return {"__name__": "__main__", "asyncio": asyncio, "train_step": lambda images, labels: None}


def document(path: Path) -> Any:
    """A test parameter; documents that import other packages are marked, and those packages may warn."""
    name = path.relative_to(ROOT).as_posix()
    marks = [pytest.mark.integration, pytest.mark.filterwarnings("default")] if name in NEEDS else []
    return pytest.param(path, id=name, marks=marks)


@pytest.mark.parametrize("path", [document(path) for path in DOCUMENTS])
def test_document_runs(path: Path, reader: dict[str, Any]) -> None:
    """Every Python block of a document runs, in order, in one namespace; ``python no-run`` ones compile."""
    for package in NEEDS.get(path.relative_to(ROOT).as_posix(), ()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(package)
    try:
        run_blocks(python_blocks(path, path.read_text(encoding="utf-8")), reader)
    finally:
        for value in list(reader.values()):
            if isinstance(value, aiofeed.Feeder):
                value.close()
        reader.clear()


def test_api_page_is_complete() -> None:
    """docs/api.md has a directive for every public name, and for nothing else at the top level."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    directives = re.findall(r"^::: aiofeed\.(\w+)$", text, re.MULTILINE)
    assert sorted(directives) == sorted(aiofeed.__all__)


def test_architecture_names_every_room() -> None:
    """docs/architecture.md mentions every folder of aiofeed."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "aiofeed").glob("*/**/__init__.py")]
    assert [room for room in rooms if f"`{room}/`" not in text] == []


def test_links_between_documents_are_valid() -> None:
    """A relative link in a document points to an existing file."""
    broken = [
        f"{path.name}: {target}"
        for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert broken == []


# --- the runner -------------------------------------------------------------------------------------------------------


def test_runner_reports_the_document_line(tmp_path: Path) -> None:
    """An error in a block is reported at its line in the document."""
    document = tmp_path / "page.md"
    blocks = python_blocks(document, "# Title\n\n```python\nx = 1\nraise KeyError(x)\n```\n")
    with pytest.raises(KeyError) as error:
        run_blocks(blocks, {})
    assert error.traceback[-1].lineno + 1 == 5


def test_runner_keeps_one_namespace_and_awaits() -> None:
    """Blocks share one namespace, and may await at the top level."""
    text = "```python\nimport asyncio\nx = 1\n```\n\n  ```python\n  await asyncio.sleep(0)\n  x += 1\n  ```\n"
    namespace: dict[str, Any] = {}
    run_blocks(python_blocks(Path("page.md"), text), namespace)
    assert namespace["x"] == 2


def test_runner_only_compiles_no_run() -> None:
    """A ``no-run`` block is compiled and not run."""
    run_blocks(python_blocks(Path("page.md"), "```python no-run\nraise KeyError\n```\n"), {})
    with pytest.raises(SyntaxError):
        run_blocks(python_blocks(Path("page.md"), "```python no-run\nx = = 1\n```\n"), {})


def test_runner_refuses_unknown_info_strings() -> None:
    """A misspelt info string is an error."""
    with pytest.raises(ValueError, match="python norun"):
        python_blocks(Path("page.md"), "```python norun\nx\n```\n")
