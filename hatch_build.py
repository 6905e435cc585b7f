"""Builds the package's two libraries at installation: one that decodes JPEGs, one that reads small files in groups.

They take a compiler; that for JPEGs takes libjpeg-turbo's headers, too. Where these are not, or with
``AIOFEED_TURBO=0`` and ``AIOFEED_GROUPS=0``, the package is pure Python and does without. ``python hatch_build.py``
builds them in place. Python's own headers are not needed: the libraries are plain C, and are called through ``ctypes``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
INSTALL = (
    "libjpeg62-turbo-dev (Debian), libjpeg-turbo8-dev (Ubuntu), libjpeg-turbo-devel (Fedora), jpeg-turbo (Homebrew)"
)


class Library(NamedTuple):
    """A library of the package's.

    Args:
        source, path: below the root.
        switch: the environment's variable that leaves it out, by a 0.
        lacking: what aiofeed is without it.
        package: what pkg-config knows it to need, its flags where pkg-config is not to be had, and who has it.
    """

    source: str
    path: str
    switch: str
    lacking: str
    package: tuple[str, tuple[str, ...], str] | None = None

    def build(self) -> str | None:
        """Build it; ``None``, or why there is none."""
        if os.environ.get(self.switch) == "0":
            return f"{self.switch}=0"
        if os.name != "posix":
            return "this is for Linux and macOS"
        compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
        unfinished = ROOT / (self.path + f".{os.getpid()}")
        # No -ffast-math, no -march: what a machine makes does not depend on the one that it was built on.
        command = [*compiler, "-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing"]
        command += [*shlex.split(os.environ.get("CFLAGS", "")), *self._flags("--cflags"), str(ROOT / self.source)]
        command += ["-o", str(unfinished), *shlex.split(os.environ.get("LDFLAGS", "")), *self._flags("--libs"), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                needs = f"; it needs {self.package[2]}" if self.package else ""
                return f"{shlex.join(command)}: {done.stderr.strip()[-500:]}{needs}"
            unfinished.replace(ROOT / self.path)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler[0]}: {error}"
        finally:
            unfinished.unlink(missing_ok=True)
        return None

    def remove(self) -> None:
        """Let none of an earlier build stay."""
        with contextlib.suppress(OSError):  # of a read-only tree
            (ROOT / self.path).unlink(missing_ok=True)

    def _flags(self, which: str) -> list[str]:
        """Where what it needs is, if pkg-config knows."""
        if self.package is None:
            return []
        name, otherwise, _ = self.package
        try:
            found = subprocess.run(["pkg-config", which, name], capture_output=True, text=True, timeout=60, check=False)
            flags = [] if found.returncode else shlex.split(found.stdout)
        except (OSError, subprocess.TimeoutExpired):
            flags = []
        return flags or (list(otherwise) if which == "--libs" else [])


LIBRARIES = (
    Library(
        "aiofeed/decoders/native_jpeg.c",
        "aiofeed/decoders/_native_jpeg.so",
        "AIOFEED_TURBO",
        "its own JPEG decoding",
        ("libjpeg", ("-ljpeg",), INSTALL),
    ),
    Library(
        "aiofeed/sources/native_files.c",
        "aiofeed/sources/_native_files.so",
        "AIOFEED_GROUPS",
        "its own reading of small files",
    ),
)


def build() -> tuple[list[str], list[str]]:
    """Build them: where those that were built are, and a line for each that was not."""
    built: list[str] = []
    lacking: list[str] = []
    for library in LIBRARIES:
        if why := library.build():
            library.remove()
            lacking.append(f"aiofeed is built without {library.lacking}: {why}")
        else:
            built.append(library.path)
    return built, lacking


def wheel_platform() -> str:
    """The platform of the wheel, as pip spells it."""
    if sys.platform == "darwin":
        from packaging.tags import mac_platforms  # hatchling needs it too

        return next(mac_platforms())
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # not a build: run by hand
    pass
else:

    class LibrariesBuildHook(BuildHookInterface):
        """The wheel, editable ones too, has the libraries that can be built."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, object]) -> None:
            """Build, and say so to the wheel."""
            built, lacking = build()
            for line in lacking:
                self.app.display_warning(line)
            if not built:
                return
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{wheel_platform()}"
            artifacts = build_data["artifacts"]
            assert isinstance(artifacts, list)
            artifacts += built


if __name__ == "__main__":
    found, missing = build()
    print("".join(f"built {path}\n" for path in found), end="")
    if missing:
        sys.exit("\n".join(missing))
