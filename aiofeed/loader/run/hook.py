"""Lets torch's ``DataLoader`` class make aiofeed's iterators. Imports neither torch nor the rest of aiofeed."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from types import FrameType, FunctionType, ModuleType
from typing import Any

# Imported with the first iterator: it needs torch.
_LOADERS = "aiofeed.loader.run.loaders"
# What `aiofeed run` was given: device, threads, explain.
options: dict[str, Any] = {}
# Torch's classes and their methods, while these are replaced.
_of_torch: list[tuple[Any, Any]] = []
_FOLDER = os.path.abspath("") + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


class _AfterImport:
    """Finds the module of ``DataLoader`` as Python does, and changes it as soon as it is executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name == "torch.utils.data.dataloader":
            sys.meta_path.remove(self)
            spec: Any = PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: replace(module, execute(module))
            return spec


def replace_when_imported(given: dict[str, Any]) -> None:
    """Change torch's ``DataLoader`` when the script imports it; ``given``: the options of ``aiofeed run``."""
    options.update(given)
    sys.meta_path.insert(0, _AfterImport())
    nothing = "aiofeed run: this process took no batch from a torch DataLoader\n"
    # Looks at its exit: a process may be forked from that of the script.
    atexit.register(lambda: given["process"] != os.getpid() or _LOADERS in sys.modules or sys.stderr.write(nothing))


def replace(module: ModuleType, executed: None = None) -> None:
    """Change the classes of torch's module: loaders make iterators of aiofeed and say where they were made.

    The class stays torch's own, so it does not matter when and from where a script or a framework has imported it.
    Subclasses that do not make iterators of their own are changed with it.
    """
    loader, iterator = module.DataLoader, module._BaseDataLoaderIter
    init, get_iterator, begin = loader.__init__, loader._get_iterator, iterator.__init__
    call = in_place_of(iterator.__init__)

    def made(self: Any, *given: Any, **named: Any) -> None:
        vars(self).setdefault("_aiofeed_place", place(sys._getframe(1)))
        init(self, *given, **named)

    def new_iterator(self: Any) -> Any:
        return import_module(_LOADERS).new_iterator(self, options, get_iterator)

    def begun(self: Any, loader: Any) -> None:
        import_module(_LOADERS).note_iterator(self, loader)
        call(begin, self, loader)

    for cls, old, new in ((loader, init, made), (loader, get_iterator, new_iterator), (iterator, begin, begun)):
        _of_torch.append((cls, old))
        setattr(cls, old.__name__, functools.wraps(old)(new))


def in_place_of(function: Any) -> Callable[..., Any]:
    """Return a function that calls another one, in a frame with the file, the line and the module of ``function``.

    Warnings name their caller, by which users filter them: it is torch's, not a function here in its place.
    """

    def call(other: Any, *arguments: Any) -> Any:
        return other(*arguments)

    theirs = function.__code__
    code = call.__code__.replace(co_filename=theirs.co_filename, co_firstlineno=theirs.co_firstlineno)
    return FunctionType(code, function.__globals__)


def place(frame: FrameType | None) -> str:
    """Return file and line of the innermost frame that is not of a library, or an empty string."""
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen")):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename.removeprefix(_FOLDER)}:{frame.f_lineno} "


def load_ipython_extension(shell: Any) -> None:
    """Change torch's ``DataLoader`` in a notebook; ``%aiofeed`` prints a line for each loader."""
    if not _of_torch:
        replace(import_module("torch.utils.data.dataloader"))
    shell.register_magic_function(lambda _: import_module(_LOADERS).report(), "line", "aiofeed")


def unload_ipython_extension(shell: Any) -> None:
    """Give torch's ``DataLoader`` its own iterators back."""
    while _of_torch:
        cls, method = _of_torch.pop()
        setattr(cls, method.__name__, method)
