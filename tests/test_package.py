"""The public names: each exists, is listed and documented, and importing them is cheap."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

import aiofeed
from aiofeed.kernel.core.formatting import format_bytes
from tests.support.interrupts import Interrupt

HEAVY = ("PIL", "numpy", "ray", "torch")

# Modules that only some feeders use.
RARE = (
    "aiofeed.cache.disk",
    "aiofeed.cache.host",
    "aiofeed.cache.cached_fetcher",
    "aiofeed.resident.pipeline",
    "aiofeed.processes",
    "numpy.typing",
    "uvloop",
)


@pytest.mark.parametrize("name", aiofeed.__all__)
def test_name_is_public(name: str) -> None:
    """A name in `__all__` is an attribute, is listed by `dir` and comes with `import *`."""
    namespace: dict[str, object] = {}
    exec("from aiofeed import *", namespace)
    assert namespace[name] is getattr(aiofeed, name)
    assert name in dir(aiofeed)


@pytest.mark.parametrize("name", aiofeed.__all__)
def test_name_is_documented(name: str) -> None:
    """A public name has its own docstring, not the signature that `dataclass` generates."""
    value = getattr(aiofeed, name)
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize("name", aiofeed.__all__)
def test_methods_are_documented(name: str) -> None:
    """The public methods and properties of a public class have docstrings, inherited ones included."""
    value = getattr(aiofeed, name)
    if not inspect.isclass(value):
        return
    members = {
        member: found
        for member, found in vars(value).items()
        if not member.startswith("_") and (inspect.isroutine(found) or isinstance(found, property))
    }
    assert [member for member in members if not inspect.getdoc(getattr(value, member))] == []


def test_names_are_unique() -> None:
    """No public name is listed twice."""
    assert len(set(aiofeed.__all__)) == len(aiofeed.__all__)


def test_version_is_the_installed_ones() -> None:
    """`aiofeed.__version__` equals the version of the installed package."""
    assert aiofeed.__version__ == metadata.version("aiofeed")


def test_unknown_name_is_an_attribute_error() -> None:
    """The error for a name that does not exist quotes it."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = aiofeed.no_such_name


def test_import_is_light() -> None:
    """`import aiofeed` imports no heavy package."""
    program = f"import sys, aiofeed; print(*[name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == []


def test_feeder_imports_only_what_every_feeder_needs() -> None:
    """`aiofeed.Feeder` imports no module for caches, in-memory data or worker processes."""
    program = f"import sys, aiofeed; aiofeed.Feeder; print(*[name for name in {RARE} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == []


@pytest.mark.slow
def test_without_pillow_only_the_use_of_it_fails() -> None:
    """The package can be imported, listed and inspected; using `DecodeImage` names both extras that install PIL."""
    code = """
        import sys
        sys.modules["PIL"] = None
        import inspect
        import pydoc
        import aiofeed
        from aiofeed import *
        aiofeed.ImageFolder
        assert hasattr(aiofeed, "DecodeImage")
        inspect.getmembers(aiofeed)
        pydoc.render_doc(aiofeed)
        try:
            aiofeed.DecodeImage(224)
        except ImportError as error:
            print(error)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "aiofeed[simd]" in ended.stdout
    assert "aiofeed[pillow]" in ended.stdout


def test_tab_completion_shows_public_names_only() -> None:
    assert {name for name in dir(aiofeed) if not name.startswith("__")} == set(aiofeed.__all__)


@pytest.mark.parametrize("name", aiofeed._MODULES)
def test_name_reports_where_it_is_imported_from(name: str) -> None:
    """Tracebacks and reprs show `aiofeed.errors.ReadError`, wherever the class is defined."""
    *namespace, last = name.split(".")
    module = importlib.import_module(".".join(["aiofeed", *namespace]))
    assert getattr(module, last).__module__ == module.__name__
    assert last in module.__all__


@pytest.mark.parametrize("name", [name for name in aiofeed._MODULES if "." in name])
def test_an_old_name_works_and_names_its_new_place(name: str) -> None:
    """Names that were in `aiofeed` before still work there, with a warning."""
    with pytest.warns(DeprecationWarning, match=rf"^aiofeed\.{name.split('.')[1]} is now aiofeed\.{name}$"):
        found = getattr(aiofeed, name.split(".")[1])
    assert found is eval(f"aiofeed.{name}")


def test_a_namespace_lacks_other_names() -> None:
    """A wrong name in a namespace is an `AttributeError` with both names."""
    with pytest.raises(AttributeError, match=r"module 'aiofeed\.errors' has no attribute 'Feeder'"):
        aiofeed.errors.Feeder  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", aiofeed._PLUGS)
def test_the_kernel_finds_each_add_on(name: str) -> None:
    """Each name that the kernel loads add-ons by exists, and is no public one, which could be another object."""
    assert name not in aiofeed._MODULES
    assert aiofeed._load_addon(name, "weights=").__name__ == name


def test_a_missing_add_on_is_an_error_that_names_it_and_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import error of a module of aiofeed says which add-on is missing; that of another package stays as it is."""
    monkeypatch.setitem(aiofeed._PLUGS, "Gone", "aiofeed.gone.module")
    with pytest.raises(ImportError, match=r"^weights= needs aiofeed\.gone, which is missing here") as error:
        aiofeed._load_addon("Gone", "weights=")
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    monkeypatch.setitem(aiofeed._PLUGS, "Gone", "absent_package.module")
    with pytest.raises(ModuleNotFoundError, match="absent_package"):
        aiofeed._load_addon("Gone", "weights=")


@pytest.mark.slow
def test_aiofeed_log_prints_every_stage() -> None:
    """`AIOFEED_LOG=debug` prints when batches are planned, read, decoded, delivered and returned."""
    code = """
        import aiofeed
        with aiofeed.Feeder(list(range(8)), batch_size=4) as feeder:
            list(feeder)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "AIOFEED_LOG": "debug"},
    )
    for stage in ("planned, 4 samples", "read samples 0 to ", "decoded", "delivered", "returned", "stopped"):
        assert stage in ended.stderr


def test_a_wrong_aiofeed_log_is_no_error() -> None:
    """The import goes on, with a warning that names the variable and its values."""
    with pytest.warns(UserWarning, match="AIOFEED_LOG='1' is no level: set it to debug, info"):
        aiofeed._log_to_stderr("1")
    assert [type(each).__name__ for each in logging.getLogger("aiofeed").handlers] == ["_LastResort"]


@pytest.mark.parametrize("setup", ["", "logging.basicConfig()", "logging.getLogger('aiofeed').addHandler(handler)"])
def test_a_warning_names_aiofeed_and_is_printed_once(setup: str) -> None:
    """Without handlers of the program, a warning begins with "aiofeed"; with some, only they print it."""
    code = f"""
import logging, aiofeed
handler = logging.StreamHandler()
{setup}
logging.getLogger("aiofeed.feeder").info("quiet")
logging.getLogger("aiofeed.feeder").warning("said")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    wanted = {"": "aiofeed: said", "logging.basicConfig()": "WARNING:aiofeed.feeder:said"}
    assert ended.stderr.splitlines() == [wanted.get(setup, "said")]


def test_no_subpackage_has_a_public_name() -> None:
    """Importing a subpackage would replace the public name."""
    folder = Path(aiofeed.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules & set(aiofeed.__all__) <= set(aiofeed._NAMESPACES)


def test_only_the_package_is_interrupted() -> None:
    """In a checkout called `aiofeed`, Ctrl-C at a place of the package is not raised in a test's own code."""
    run = compile("len('')", "/home/me/aiofeed/tests/test_own.py", "exec")
    with Interrupt(0) as interrupt:
        exec(run)
    assert interrupt.left == 0
    with pytest.raises(KeyboardInterrupt), Interrupt(0):
        format_bytes(1)
