"""Builds ``aiofeed/decoders/turbo.c`` at installation, where a compiler and libjpeg-turbo's headers are.

Where they are not, or with ``AIOFEED_TURBO=0``, the package is pure Python and does without. ``python hatch_build.py``
builds it in place. Python's own headers are not needed: the library is plain C, and is called through ``ctypes``.
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

ROOT = Path(__file__).resolve().parent
SOURCE = "aiofeed/decoders/turbo.c"
LIBRARY = "aiofeed/decoders/_turbo.so"
INSTALL = (
    "libjpeg62-turbo-dev (Debian), libjpeg-turbo8-dev (Ubuntu), libjpeg-turbo-devel (Fedora), jpeg-turbo (Homebrew)"
)


def build() -> str | None:
    """Build the library; ``None``, or why there is none."""
    if os.environ.get("AIOFEED_TURBO") == "0":
        return "AIOFEED_TURBO=0"
    if os.name != "posix":
        return "this is for Linux and macOS"
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    unfinished = ROOT / (LIBRARY + f".{os.getpid()}")
    # No -ffast-math, no -march: what a machine makes does not depend on the one that it was built on.
    command = [*compiler, "-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing"]
    command += [*shlex.split(os.environ.get("CFLAGS", "")), *_flags("--cflags"), str(ROOT / SOURCE)]
    command += ["-o", str(unfinished), *shlex.split(os.environ.get("LDFLAGS", "")), *(_flags("--libs") or ["-ljpeg"])]
    try:
        done = subprocess.run([*command, "-lm"], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            return f"{shlex.join(command)}: {done.stderr.strip()[-500:]}; it needs {INSTALL}"
        unfinished.replace(ROOT / LIBRARY)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler[0]}: {error}"
    finally:
        unfinished.unlink(missing_ok=True)
    return None


def remove() -> None:
    """Let no library of an earlier build stay."""
    with contextlib.suppress(OSError):  # of a read-only tree
        (ROOT / LIBRARY).unlink(missing_ok=True)


def wheel_platform() -> str:
    """The platform of the wheel, as pip spells it."""
    if sys.platform == "darwin":
        from packaging.tags import mac_platforms  # hatchling needs it too

        return next(mac_platforms())
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _flags(which: str) -> list[str]:
    """Where libjpeg is, if pkg-config knows."""
    try:
        found = subprocess.run(
            ["pkg-config", which, "libjpeg"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if found.returncode else shlex.split(found.stdout)


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # not a build: run by hand
    pass
else:

    class TurboBuildHook(BuildHookInterface):
        """The wheel, editable ones too, has the library where it can be built."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, object]) -> None:
            """Build, and say so to the wheel."""
            if why := build():
                remove()
                self.app.display_warning(f"aiofeed is built without its own JPEG decoding: {why}")
                return
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{wheel_platform()}"
            artifacts = build_data["artifacts"]
            assert isinstance(artifacts, list)
            artifacts.append(LIBRARY)


if __name__ == "__main__":
    if reason := build():
        remove()
        sys.exit(reason)
    print(f"built {LIBRARY}")
