"""Builds the static libjpeg-turbo that wheels are linked to: ``python .ci/build_libjpeg_turbo.py PREFIX [SOURCES]``.

``AIOFEED_LIBJPEG_TURBO=PREFIX`` makes ``hatch_build.py`` link it. Its licences are copied beside that of
aiofeed, as ``LICENSE.libjpeg-turbo.*``, and so go into the wheel. Without SOURCES, a folder with the sources of
libjpeg-turbo, the pinned release is downloaded. Needs CMake, a C compiler (``CC``) and, for x86-64, NASM.
``CMAKE_ARGS`` adds options.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

LICENSE = Path(__file__).resolve().parents[1] / "LICENSE.libjpeg-turbo"
VERSION = "3.2.0"
SHA256 = "6f30092cef9fb839779646608f4ee14ae3cbac989c47fa05e841b0841f09878e"
URL = f"https://github.com/libjpeg-turbo/libjpeg-turbo/releases/download/{VERSION}/libjpeg-turbo-{VERSION}.tar.gz"
# Hidden symbols: a process may have loaded another libjpeg. SIMD: without it decoding takes several times as long, and
# CMake only warns that NASM is missing.
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_C_VISIBILITY_PRESET=hidden",
    "-DCMAKE_INSTALL_LIBDIR=lib",
    "-DCMAKE_POSITION_INDEPENDENT_CODE=ON",
    "-DENABLE_SHARED=OFF",
    "-DREQUIRE_SIMD=ON",
    "-DWITH_TESTS=OFF",
    "-DWITH_TOOLS=OFF",
    "-DWITH_TURBOJPEG=OFF",
)


def download(folder: Path) -> Path:
    """Download and unpack the pinned release."""
    archive = folder / "libjpeg-turbo.tar.gz"
    with urllib.request.urlopen(URL, timeout=120) as answer:
        archive.write_bytes(answer.read())
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{URL}: the SHA-256 is {found}, expected {SHA256}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"libjpeg-turbo-{VERSION}"


def zlib_license(sources: Path) -> str:
    """The zlib licence of the SIMD code, which libjpeg-turbo has only in the comments of the code."""
    comment = []
    for line in (sources / "simd" / "nasm" / "jsimdext.inc").read_text("utf-8").splitlines():
        if not line.startswith(";"):
            break
        comment.append(line.removeprefix(";").strip())
    text = "\n".join(comment).strip()
    if "This software is provided 'as-is'" not in text:
        sys.exit(f"{sources}/simd/nasm/jsimdext.inc does not start with the zlib licence")
    return f"{text}\n"


def main() -> None:
    """Build and install the library and its licences."""
    prefix = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(sys.argv[2]).resolve() if sys.argv[2:] else download(Path(folder))
        build = Path(folder, "build")
        configure = ["cmake", "-S", str(sources), "-B", str(build), f"-DCMAKE_INSTALL_PREFIX={prefix}", *OPTIONS]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        make = ["cmake", "--build", str(build), "--target", "jpeg-static", "--parallel"]
        for command in (configure, make, ["cmake", "--install", str(build)]):
            subprocess.run(command, check=True)
        shutil.copyfile(sources / "LICENSE.md", f"{LICENSE}.md")
        shutil.copyfile(sources / "README.ijg", f"{LICENSE}.ijg.txt")
        Path(f"{LICENSE}.zlib.txt").write_text(zlib_license(sources), "utf-8")


if __name__ == "__main__":
    main()
