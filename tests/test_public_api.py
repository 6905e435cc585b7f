"""Files that follow from the names in `aiofeed/__init__.py`: stubs, the pages of the API and the record of the API.

`aiofeed/__init__.pyi` and those of the namespaces tell type checkers what each name is. docs/api.md lists all names,
and docs/api/ has a page for each task. `tests/public_api.txt` records signatures and defaults, so that a change is
deliberate. `AIOFEED_RECORD_API=1 python -m pytest tests/test_public_api.py` writes all of them again.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aiofeed

ROOT = Path(__file__).parents[1]
TESTS = "Test your code"
# The file of each task in docs/api/ and its introduction, in the order of docs/api.md.
PAGES = {
    "Feed a training": (
        "feeding.md",
        "A feeder returns batches and loads the next ones meanwhile. The [tutorial](../tutorial.md) introduces it.",
    ),
    "Read data": (
        "sources.md",
        "The first argument of a feeder says where its samples are. A `Dataset` or a list of your own works, too.",
    ),
    "Decode samples": (
        "decoding.md",
        "`decode=` turns the bytes of a sample into a tensor. Any function from bytes to a sample will do.",
    ),
    "Form batches": (
        "batches.md",
        "`batch_size=` takes a number or one of these plans; see [batches of every kind](../batches.md).",
    ),
    "Cache samples": (
        "caching.md",
        "`cache=` keeps samples for later epochs. [Caching](../caching.md) says which cache to use.",
    ),
    "Use more processes": (
        "processes.md",
        "`engine=` decodes in other processes, and one process can feed several. [Processes](../processes.md) and "
        "[Ray](../ray.md) have examples.",
    ),
    "Observe a run": (
        "runs.md",
        "What a feeder returns about its work, and where to send it; see [where the time goes](../explain.md) and "
        "[monitoring](../monitoring.md).",
    ),
    "Handle errors": (
        "errors.md",
        "Wrong arguments raise `TypeError` or `ValueError`. Errors while a feeder runs are subclasses of `FeedError`.",
    ),
    TESTS: ("testing.md", "Helpers for tests of programs that use aiofeed."),
}
FACES = "aiofeed.kernel.core.faces"
OPERATORS = ("__len__", "__iter__", "__aiter__", "__enter__", "__aenter__", "__call__", "__getitem__")


def parameters(function: Any) -> str:
    """The parameters of a callable with their defaults, without annotations."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else Default(each.default))
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


class Default:
    """A default value, shown without what differs between interpreters."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        value = self._value
        if callable(value) or type(value) is object:
            return f"<{getattr(value, '__name__', type(value).__name__)}>"
        return repr(value)


def members(name: str, found: type) -> Iterator[str]:
    """Lines of the constructor, methods, properties and fields of a class."""
    bases = [base.__name__ for base in found.__mro__[1:] if base.__module__.startswith("aiofeed")]
    yield f"class {name}{f' of {bases[0]}' if bases else ''}"
    if not issubclass(found, Exception):
        # Without `__new__`, which may choose a subclass.
        yield f"{name}{parameters(found.__init__).replace('(self, ', '(').replace('(self)', '()')}"
    if dataclasses.is_dataclass(found):
        yield from (f"{name}.{field.name}" for field in dataclasses.fields(found) if not field.name.startswith("_"))
    # What all sources, caches and devices have for the kernel is no interface of each of them.
    owners = [each for each in found.__mro__ if each.__module__.startswith("aiofeed") and each.__module__ != FACES]
    for member in dir(found):
        value = inspect.getattr_static(found, member)
        ours = any(member in vars(each) for each in owners)
        if not ours or (member.startswith("_") and member not in OPERATORS):
            continue
        if isinstance(value, property):
            yield f"{name}.{member}"
        elif isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
            yield f"{name}.{member}{parameters(getattr(found, member))}"


def public_api() -> list[str]:
    """A sorted line for each public name, parameter list, method and field."""
    lines: set[str] = set()
    for module_name in ("aiofeed", *(f"aiofeed.{each}" for each in (*aiofeed._NAMESPACES, "lightning"))):
        module = importlib.import_module(module_name)
        for each in module.__all__:
            name, found = f"{module_name}.{each}", getattr(module, each)
            if inspect.isclass(found):
                lines.update(members(name, found))
            elif inspect.isfunction(found):
                lines.add(f"{name}{parameters(found)}")
            else:
                lines.add(name)
    return sorted(lines)


def record() -> str:
    """The content of tests/public_api.txt."""
    return "".join(f"{line}\n" for line in public_api())


def stub() -> str:
    """The content of `aiofeed/__init__.pyi`."""
    lines = [f"from {module} import {name} as {name}" for name, module in aiofeed._MODULES.items() if "." not in name]
    lines = [*(f"from aiofeed import {each} as {each}" for each in aiofeed._NAMESPACES), *sorted(lines)]
    load = "def _load_addon(name: str, needed_by: str) -> Any: ...\ndef _hint_at(owner: str, name: Any) -> Any: ..."
    head = ('"""The public names, for type checkers."""', "", "from typing import Any", "")
    return "\n".join((*head, *lines, "", "__version__: str", "", load, ""))


def stub_of(namespace: str) -> str:
    """The content of the stub of a namespace."""
    homes = [(name.split("."), module) for name, module in aiofeed._MODULES.items() if name.startswith(f"{namespace}.")]
    lines = sorted(f"from {module} import {name} as {name}" for (_, name), module in homes)
    return "\n".join((f'"""The public names of `aiofeed.{namespace}`, for type checkers."""', "", *lines, ""))


def names_of(task: str) -> list[str]:
    """The full names of a task."""
    names = [f"aiofeed.{name}" for name in aiofeed._HOMES.get(task, ())]
    return names + {"Observe a run": ["aiofeed.lightning.FeederMonitor"], TESTS: ["aiofeed.testing"]}.get(task, [])


def overview() -> str:
    """The content of docs/api.md."""
    text = (
        "# API\n\nAll public names, by task, without the `aiofeed.` in front. The page of a task describes them, with "
        "an example of each. Everything else may change without notice.\n\n| task | names |\n| --- | --- |\n"
    )
    for task, (file, _) in PAGES.items():
        names = ", ".join(f"[`{name.removeprefix('aiofeed.')}`][{name}]" for name in names_of(task))
        text += f"| [{task}](api/{file}) | {names} |\n"
    return text


def api_page(task: str) -> str:
    """The content of the page of a task."""
    return f"# {task}\n\n{PAGES[task][1]}\n" + "".join(f"\n::: {name}\n" for name in names_of(task))


FILES: dict[str, Callable[[], str]] = {
    "aiofeed/__init__.pyi": stub,
    "aiofeed/errors.pyi": partial(stub_of, "errors"),
    "aiofeed/processes.pyi": partial(stub_of, "processes"),
    "aiofeed/reports/__init__.pyi": partial(stub_of, "reports"),
    "docs/api.md": overview,
    **{f"docs/api/{file}": partial(api_page, task) for task, (file, _) in PAGES.items()},
    "tests/public_api.txt": record,
}


@pytest.mark.parametrize("path", FILES)
def test_the_file_is_up_to_date(path: str) -> None:
    """A name, a parameter or a default that differs is a change for users: see "Versions" in docs/compatibility.md."""
    pytest.importorskip("lightning")
    found = FILES[path]()
    if os.environ.get("AIOFEED_RECORD_API") == "1":
        (ROOT / path).write_text(found, encoding="utf-8")
    assert found.splitlines() == (ROOT / path).read_text(encoding="utf-8").splitlines()


def test_every_task_has_a_page() -> None:
    """The tasks of `_HOMES` and the files of docs/api/ are those of `PAGES`."""
    assert set(PAGES) == {*aiofeed._HOMES, TESTS}
    assert {path.name for path in (ROOT / "docs" / "api").iterdir()} == {file for file, _ in PAGES.values()}


def test_the_record_notices_changes() -> None:
    """Another default, parameter or method gives other lines."""

    class First:
        def read(self, path: str, *, size: int = 3) -> None: ...

    class Second:
        def read(self, path: str, *, size: int = 4) -> None: ...

    for found in (First, Second):
        found.__module__ = "aiofeed.example"
    assert "Name.read(self, path, *, size=3)" in list(members("Name", First))
    assert "Name.read(self, path, *, size=4)" in list(members("Name", Second))
