"""Builds the package's two native libraries at installation: ``native_jpeg`` and ``native_files``.

Both need a C compiler; ``native_jpeg`` also needs the headers of libjpeg-turbo. Without them, or with
``AIOFEED_BUILD_NATIVE_JPEG=0`` or ``AIOFEED_BUILD_NATIVE_FILES=0``, the package works without that library.
``python hatch_build.py`` builds both in place. Python's headers are not needed: the libraries are plain C, called
through ``ctypes``.

``AIOFEED_LIBJPEG_TURBO=PREFIX`` links the static libjpeg-turbo that ``.ci/build_libjpeg_turbo.py`` installed at PREFIX.
A library that cannot be built is then an error.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
PREFIX = os.environ.get("AIOFEED_LIBJPEG_TURBO", "")
SUFFIX = ".dll" if sys.platform == "win32" else ".so"


class Dependency(NamedTuple):
    """A C library that a native library links to.

    Args:
        name: its name for pkg-config.
        linker_flags: used if pkg-config does not find it.
        packages: system packages that install its headers.
    """

    name: str
    linker_flags: tuple[str, ...]
    packages: str

    def flags(self, option: str) -> list[str]:
        """The flags that pkg-config prints for ``--cflags`` or ``--libs``, or those of the static library."""
        if PREFIX:
            return [f"-I{PREFIX}/include"] if option == "--cflags" else [f"{PREFIX}/lib/{self.name}.a"]
        command = ["pkg-config", option, self.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            flags = [] if done.returncode else shlex.split(done.stdout)
        except (OSError, subprocess.TimeoutExpired):
            flags = []
        return flags or (list(self.linker_flags) if option == "--libs" else [])

    def needs(self) -> str:
        """Text for an error: what must be installed."""
        return f"AIOFEED_LIBJPEG_TURBO={PREFIX} with include/ and lib/{self.name}.a" if PREFIX else self.packages


class Library(NamedTuple):
    """A native library of the package.

    Args:
        source: path of the C file, relative to the root.
        path: path of the library, relative to the root.
        switch: environment variable; the library is not built if it is "0".
        purpose: named in the warning if the library is not built.
        dependency: C library that it links to.
    """

    source: str
    path: str
    switch: str
    purpose: str
    dependency: Dependency | None = None

    def build(self) -> str | None:
        """Build the library; returns ``None``, or why it was not built."""
        if os.environ.get(self.switch) == "0":
            return f"{self.switch}=0"
        if sys.platform == "win32" and not PREFIX:
            return "on Windows the library is built for wheels only"
        compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
        cflags, libs = [], []
        if self.dependency is not None:
            cflags, libs = self.dependency.flags("--cflags"), self.dependency.flags("--libs")
        target = ROOT / self.path
        # No -ffast-math and no -march: the results must not depend on the machine that builds the library.
        # A bundle of macOS does not contain its own path, which differs from build to build.
        command = [*compiler, "-std=c11", "-O3", "-fPIC", "-bundle" if sys.platform == "darwin" else "-shared"]
        command += ["-fvisibility=hidden", "-fno-strict-aliasing", *shlex.split(os.environ.get("CFLAGS", "")), *cflags]
        command += [str(ROOT / self.source), *shlex.split(os.environ.get("LDFLAGS", "")), *libs, "-lm", "-o"]
        try:
            # Under its final name, which a DLL contains.
            with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as folder:
                unfinished = Path(folder, target.name)
                command.append(str(unfinished))
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
                if done.returncode:
                    needs = f"; it needs {self.dependency.needs()}" if self.dependency else ""
                    return f"{shlex.join(command)}: {done.stderr.strip()[-500:]}{needs}"
                unfinished.replace(target)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler[0]}: {error}"
        return None

    def remove(self) -> None:
        """Delete the library of an earlier build."""
        with contextlib.suppress(OSError):  # the tree may be read-only
            (ROOT / self.path).unlink(missing_ok=True)


LIBRARIES = [
    Library(
        "aiofeed/kernel/decoders/native_jpeg.c",
        f"aiofeed/kernel/decoders/_native_jpeg{SUFFIX}",
        "AIOFEED_BUILD_NATIVE_JPEG",
        "native JPEG decoding",
        Dependency(
            "libjpeg",
            ("-ljpeg",),
            "libjpeg62-turbo-dev (Debian), libjpeg-turbo8-dev (Ubuntu), libjpeg-turbo-devel (Fedora), "
            "jpeg-turbo (Homebrew)",
        ),
    ),
    Library(
        "aiofeed/kernel/sources/native_files.c",
        "aiofeed/kernel/sources/_native_files.so",
        "AIOFEED_BUILD_NATIVE_FILES",
        "native reading of small files",
    ),
]
if sys.platform == "win32":
    LIBRARIES.pop()  # native_files.c uses POSIX calls


def build() -> tuple[list[str], list[str]]:
    """Build the libraries; returns the paths of those that were built, and a warning for each other one."""
    built: list[str] = []
    warnings: list[str] = []
    for library in LIBRARIES:
        if reason := library.build():
            library.remove()
            warnings.append(f"aiofeed is built without {library.purpose}: {reason}")
            if PREFIX and os.environ.get(library.switch) != "0":
                sys.exit(warnings[-1])
        else:
            built.append(library.path)
    return built, warnings


def wheel_platform() -> str:
    """The platform tag of the wheel."""
    if sys.platform == "darwin":
        from packaging.tags import mac_platforms  # a dependency of hatchling

        oldest = os.environ.get("MACOSX_DEPLOYMENT_TARGET")
        return next(mac_platforms(tuple(map(int, f"{oldest}.0".split(".")[:2])) if oldest else None))
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    pass
else:

    class LibrariesBuildHook(BuildHookInterface):
        """Adds the libraries that can be built to the wheel, editable or not."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, object]) -> None:
            """Build the libraries, and mark the wheel as platform-dependent if there are any."""
            built, warnings = build()
            for line in warnings:
                self.app.display_warning(line)
            if not built:
                return
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{wheel_platform()}"
            artifacts = build_data["artifacts"]
            assert isinstance(artifacts, list)
            artifacts += built


if __name__ == "__main__":
    built, warnings = build()
    print("".join(f"built {path}\n" for path in built), end="")
    if warnings:
        sys.exit("\n".join(warnings))
