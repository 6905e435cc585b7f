"""The documents: their Python runs as it stands, their links and file names exist, the API page is complete."""

from __future__ import annotations

import ast
import asyncio
import builtins
import io
import logging
import re
import shutil
import symtable
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
import torch.utils.data
from PIL import Image

import aiofeed
from tests.support.calls import calls_in, messages_of
from tests.support.paths import ROOT
from tests.support.shard_files import tar_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

    from tests.support.fault_server import FaultServer

pytestmark = pytest.mark.usefixtures("accelerator_started", "arrow_started", "zarr_started")

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NEEDS = {
    "docs/arrays.md": ("h5netcdf", "h5py", "xarray", "zarr"),
    "docs/choose.md": ("datasets", "h5py", "pyarrow", "zarr"),
    "docs/table.md": ("pyarrow",),
    "docs/media.md": ("av",),
    "docs/monitoring.md": ("lightning", "opentelemetry.sdk", "prometheus_client", "tensorboard"),
    "docs/training-frameworks.md": ("accelerate", "ignite", "lightning", "transformers"),
    "docs/recipes/http-service.md": ("aiohttp",),
    "docs/recipes/language-model.md": ("datasets", "pyarrow"),
}
"""Packages that a document imports and aiofeed does not need."""
ROBOTS = ROOT / "docs" / "robots.md"
SLOW = {"docs/training-frameworks.md", "docs/tutorial.md"}
"""Documents that take more than a second."""
SMALLER = {"README.md": ("range(256)", "range(40)"), "docs/index.md": ("range(64)", "range(40)")}
"""Replacements in the code of documents: fewer pictures."""
BUCKET_RECIPE = ROOT / "docs" / "recipes" / "buckets.md"
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
INFO_STRINGS = {"python": True, "{.python .no-run}": False}
EXPLAINED = re.compile(r"^# With (.+) (?:from above|of your own)\.$|^(.*)# yours", re.MULTILINE)
"""Comments of a block about names that it does not define."""
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
FILES = "https://github.com/aiofeed/aiofeed/blob/main/"
PAGES = "https://aiofeed.github.io/aiofeed/"
OURS = (FILES, "https://raw.githubusercontent.com/aiofeed/aiofeed/main/", PAGES)
"""Where the files of this repository are published: as they are, and the documents of docs/ as pages."""


@dataclass(frozen=True)
class Block:
    """One fenced block of Python.

    Args:
        path: the document.
        line: number of the fence's line, from 1; the code starts on the next.
        code: the text between the fences, without their indentation.
        runs: false for ``{.python .no-run}``, which is only compiled.
    """

    path: Path
    line: int
    code: str
    runs: bool

    def compile(self) -> CodeType:
        """The code, with the document's own line numbers."""
        return compile("\n" * self.line + self.code, self.path, "exec", dont_inherit=True)


def python_blocks(path: Path, text: str) -> list[Block]:
    """The Python blocks of a document, in order; an unknown info string that starts like Python's is an error."""
    blocks = []
    for match in FENCE.finditer(text):
        info = match["info"].strip()
        line = text.count("\n", 0, match.start()) + 1
        if not info.lower().startswith(("py", "{py", "{.py")):
            continue
        if info not in INFO_STRINGS:
            raise ValueError(f"{path.name}:{line}: info string {info!r}, expected one of {list(INFO_STRINGS)}")
        code = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        blocks.append(Block(path, line, code, runs=INFO_STRINGS[info]))
    return blocks


def unexplained(code: str) -> set[str]:
    """The names that a block neither defines nor imports, and that no comment of it explains."""
    module = symtable.symtable(code, "block", "exec")
    used, tables = set[str](), [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {each.get_name() for each in table.get_symbols() if each.is_referenced() and each.is_global()}
    here = module.get_symbols()
    used |= {each.get_name() for each in here if each.is_referenced()}
    used -= {each.get_name() for each in here if each.is_assigned() or each.is_imported()}
    words = re.findall(r"\w+", " ".join(first + rest for first, rest in EXPLAINED.findall(code)))
    return used - {*words, *dir(builtins), "__name__", "__file__"}


def run_blocks(blocks: list[Block], namespace: dict[str, Any]) -> None:
    """Run the blocks in order in one namespace; those marked ``no-run`` are compiled."""
    for block in blocks:
        code = block.compile()
        if block.runs:
            exec(code, namespace)


def run_document(path: Path) -> None:
    """Run the blocks of a document, and close its feeders."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        text = path.read_text(encoding="utf-8")
        if smaller := SMALLER.get(path.relative_to(ROOT).as_posix()):
            assert smaller[0] in text
            text = text.replace(*smaller)
        run_blocks(python_blocks(path, text), namespace)
    finally:
        for value in list(namespace.values()):
            if isinstance(value, aiofeed.Feeder):
                value.close()
        namespace.clear()


def test_calls_in_messages_and_documents() -> None:
    """Each has arguments that the public name takes, and all that it needs where it does not only name some."""
    texts = [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in sorted((ROOT / "aiofeed").rglob("*.py"))
        for line, text in messages_of(path)
    ]
    for path in DOCUMENTS:
        if path.name != "CHANGELOG.md":  # it names what there was
            prose = FENCE.sub("", path.read_text(encoding="utf-8"))
            texts += [(path.name, code) for code in re.findall("`([^`]+)`", prose)]
    calls, wrong = 0, []
    for place, text in texts:
        for call in calls_in(text):
            calls += 1
            try:
                call.bind()
            except TypeError as error:
                wrong.append(f"{place}: {call.code}: {error}")
    assert calls > 200
    assert wrong == []


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, beside the sockets of addresses that are plain names; restores the levels of loggers."""
    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("AIOFEED_CACHE", str(tmp_path / "cache"))
    yield folder
    for name in ("aiofeed", *(name for name in logging.root.manager.loggerDict if name.startswith("aiofeed."))):
        logging.getLogger(name).setLevel(logging.NOTSET)


def document(path: Path) -> Any:
    """The parameter of a document; one that needs other packages is marked, and their warnings are allowed."""
    name = path.relative_to(ROOT).as_posix()
    marks = [pytest.mark.integration, pytest.mark.filterwarnings("default")] if name in NEEDS else []
    marks += [pytest.mark.slow] if name in SLOW else []
    return pytest.param(path, id=name, marks=marks)


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("empty_folder")
def test_a_client_that_leaves_cancels_the_handler() -> None:
    """With the runner of the recipe for a service over HTTP."""
    aiohttp = pytest.importorskip("aiohttp")
    path = ROOT / "docs" / "recipes" / "http-service.md"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    run_blocks(python_blocks(path, path.read_text(encoding="utf-8")), namespace)

    async def client_leaves() -> None:
        cancelled = asyncio.Event()

        async def handler(request: Any) -> None:
            response = aiohttp.web.StreamResponse()
            await response.prepare(request)
            await response.write(b"x")
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        namespace["batches"] = handler
        runner = namespace["new_runner"]()
        await runner.setup()
        try:
            await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
            async with aiohttp.ClientSession() as session:
                response = await session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/batches")
                await response.content.readexactly(1)
                response.close()
                await asyncio.wait_for(cancelled.wait(), 20)
        finally:
            await runner.shutdown()
            await asyncio.wait_for(runner.cleanup(), 20)

    asyncio.run(client_leaves())


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("path", [document(path) for path in DOCUMENTS if path not in (BUCKET_RECIPE, ROBOTS)])
def test_document_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of a document runs as it stands, in order, in one namespace that is empty at first.

    ``{.python .no-run}`` blocks are compiled.
    """
    for package in NEEDS.get(path.relative_to(ROOT).as_posix(), ()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(package)
            if package == "accelerate":  # the document replaces it
                monkeypatch.setattr("accelerate.data_loader.DataLoader", torch.utils.data.DataLoader)
    run_document(path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_block_that_is_copied_alone_shows_what_it_needs(path: Path) -> None:
    """It imports what it uses; a comment in it names what is from above, or of the reader."""
    blocks = python_blocks(path, path.read_text(encoding="utf-8"))
    assert {block.line: names for block in blocks if (names := unexplained(block.code))} == {}


@pytest.mark.integration
def test_the_page_about_robots_runs(empty_folder: Path) -> None:
    """docs/robots.md runs in a folder with the data sets of tests/data/lerobot."""
    for package in ("av", "pyarrow"):
        pytest.importorskip(package)
    shutil.copytree(ROOT / "tests" / "data" / "lerobot", empty_folder / "lerobot")
    run_document(ROBOTS)


@pytest.mark.usefixtures("empty_folder")
def test_the_recipe_for_buckets_runs(object_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/recipes/buckets.md finds a server by the variables that it names, and its shards there."""
    for shard in range(2):
        members = []
        for number in range(16):
            picture = io.BytesIO()
            Image.new("RGB", (96, 72), (number, 0, 0)).save(picture, "JPEG")
            members += [(f"{shard}-{number}.jpg", picture.getvalue()), (f"{shard}-{number}.cls", b"%d" % (number % 2))]
        object_server.objects[f"bucket/train-{shard:03}.tar"] = tar_of(members)
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_server.endpoint)
    run_document(BUCKET_RECIPE)


def test_architecture_names_every_room() -> None:
    """docs/architecture.md mentions every folder of aiofeed."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "aiofeed").glob("*/**/__init__.py")]
    assert [room for room in rooms if f"`{room}/`" not in text] == []


def test_architecture_names_existing_functions() -> None:
    """Each `room/file.py` of docs/architecture.md is a file, and a `Class.method` after it is defined there."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"`(\w+/[\w/]+\.py)`", text)
    assert [file for file in files if not (ROOT / "aiofeed" / file).exists()] == []
    named = re.findall(r"`([\w/]+\.py)`[ \n]+`([\w.]+)`", text)
    assert len(named) > 30
    missing = []
    for file, function in named:
        body: list[ast.stmt] = ast.parse((ROOT / "aiofeed" / file).read_text(encoding="utf-8")).body
        for name in function.split("."):
            found = [node for node in body if getattr(node, "name", None) == name]
            if not found:
                missing.append(f"{file} {function}")
                break
            body = getattr(found[0], "body", [])
    assert missing == []


def local_links(path: Path, text: str) -> list[tuple[str, Path, str]]:
    """The links of a document that lead into this repository, relative or absolute: link, file, anchor."""
    found = []
    for match in LINK.finditer(re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))):
        link = unquote(match[1] or match[2])
        target, _, anchor = link.partition("#")
        if home := next((home for home in OURS if target.startswith(home)), None):
            rest = target.removeprefix(home)
            file = ROOT / "docs" / f"{rest.removesuffix('.html') or 'index'}.md" if home == PAGES else ROOT / rest
        elif ":" not in target:
            file = path.parent / target if target else path
        else:
            continue
        found.append((link, file, anchor))
    return found


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and Zensical make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_of_this_repository(path: Path) -> None:
    """Relative links, and absolute links to places where this repository is published, lead to a file and a heading."""
    broken = [
        link
        for link, file, anchor in local_links(path, path.read_text(encoding="utf-8"))
        if not file.exists() or (anchor and anchor not in anchors(file))
    ]
    assert broken == []


def test_the_readme_has_absolute_links_only() -> None:
    """README.md has no relative link, because PyPI shows it without the other files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [link for link, _, _ in local_links(ROOT / "README.md", text) if ":" not in link] == []


def test_the_urls_of_the_project_agree_with_the_links() -> None:
    """``[project.urls]`` has the five links of PyPI's side bar, to the same places as the documents."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    homes = ("https://github.com/aiofeed/aiofeed", "https://aiofeed.github.io/aiofeed/")
    assert [url for url in urls.values() if not url.startswith(homes)] == []
    assert (ROOT / urls["Changelog"].removeprefix(FILES)).is_file()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_a_document_names_exist(path: Path) -> None:
    """`tests/x.py`, `aiofeed/y.c` and `test_z.py` in backticks are files of this repository."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    tests = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`((?:aiofeed|tests|benchmarks|examples|docs)/[\w/.-]+\.\w+)`", text)
    assert [name for name in named if "*" not in name and not (ROOT / name).exists()] == []
    assert [name for name in re.findall(r"`(test_\w+\.py)[`:]", text) if name not in tests] == []


# --- the runner itself ------------------------------------------------------------------------------------------------


def test_runner_reports_the_document_line(tmp_path: Path) -> None:
    """An error in a block is reported at its line in the document."""
    document = tmp_path / "page.md"
    blocks = python_blocks(document, "# Title\n\n```python\nx = 1\nraise KeyError(x)\n```\n")
    with pytest.raises(KeyError) as error:
        run_blocks(blocks, {})
    assert error.traceback[-1].lineno + 1 == 5


def test_names_that_a_block_does_not_explain_are_found() -> None:
    """In functions and classes, too; not those that it defines, imports, or names in a comment."""
    code = "import io\n\nfor x in a, x:\n    def f(y):\n        return b + y + io.x + len(x)\n\nclass C:\n    d = c\n"
    assert unexplained(code) == {"a", "b", "c"}
    assert unexplained(f"# With a and b from above.\n{code}print(c)  # yours\n") == set()


def test_runner_keeps_one_namespace() -> None:
    """Blocks see the names of earlier ones, indented blocks too."""
    text = "```python\nx = 1\n```\n\n  ```python\n  x += 1\n  ```\n"
    namespace: dict[str, Any] = {}
    run_blocks(python_blocks(Path("page.md"), text), namespace)
    assert namespace["x"] == 2


def test_links_are_found_in_every_form(tmp_path: Path) -> None:
    """Relative, to GitHub, to the documentation, to an image; not in code, and not to other places."""
    text = (
        "[a](docs/tutorial.md#install) [b](https://github.com/aiofeed/aiofeed/blob/main/LICENSE) `[x](y)`\n"
        '[c](https://aiofeed.github.io/aiofeed/api.html) <img src="docs/no.png"> [d](https://pytorch.org/x)\n'
        "[e](https://aiofeed.github.io/aiofeed/)\n\n```text\n[f](nowhere)\n```\n"
    )
    found = [(file, anchor) for _, file, anchor in local_links(ROOT / "README.md", text)]
    assert found == [
        (ROOT / "docs/tutorial.md", "install"),
        (ROOT / "LICENSE", ""),
        (ROOT / "docs/api.md", ""),
        (ROOT / "docs/no.png", ""),
        (ROOT / "docs/index.md", ""),
    ]


def test_runner_only_compiles_no_run() -> None:
    """A ``no-run`` block is compiled and not run."""
    run_blocks(python_blocks(Path("page.md"), "```{.python .no-run}\nraise KeyError\n```\n"), {})
    with pytest.raises(SyntaxError):
        run_blocks(python_blocks(Path("page.md"), "```{.python .no-run}\nx = = 1\n```\n"), {})


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_the_site_shows_every_block_as_code(path: Path) -> None:
    """Superfences reads one word, or attributes in braces; any other block would appear as text."""
    for match in FENCE.finditer(path.read_text(encoding="utf-8")):
        assert re.fullmatch(r"[\w.+-]*|\{[^{}]+\}", match["info"].strip()), match["info"]


def test_runner_refuses_unknown_info_strings() -> None:
    """A misspelt info string is an error, so that its block cannot be skipped by mistake."""
    with pytest.raises(ValueError, match="python norun"):
        python_blocks(Path("page.md"), "```python norun\nx\n```\n")
