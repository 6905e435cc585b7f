"""Checks the wheels in a folder: ``python .ci/check_wheel.py dist``. Those of a platform are checked on that platform.

Such a wheel is one for every version of Python, and has the native libraries and the licences of libjpeg-turbo. The
libraries load without any other, and export no symbol of libjpeg. A pure wheel has none of them.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import zipfile
from pathlib import Path

MOST_BYTES = 2_000_000
LICENSES = {"LICENSE", *(f"LICENSE.libjpeg-turbo.{kind}" for kind in ("ijg.txt", "md", "zlib.txt"))}
FOREIGN = ("jpeg_CreateDecompress", "jpeg_read_raw_data", "jsimd_idct_islow")


def load(path: Path) -> str:
    """Load a library and return its version; exits if it exports a symbol of libjpeg."""
    library = ctypes.CDLL(str(path))
    if exported := [name for name in FOREIGN if hasattr(library, name)]:
        sys.exit(f"{path.name} exports {', '.join(exported)}")
    if path.stem == "_native_files":
        return f"version {library.aiofeed_files_version()}"
    library.aiofeed_libjpeg.restype = library.aiofeed_arithmetic.restype = ctypes.c_char_p
    return f"libjpeg-turbo {library.aiofeed_libjpeg().decode()}, {library.aiofeed_arithmetic().decode()}"


def check(wheel: Path) -> None:
    """Check one wheel, and print a line for it and one for each of its libraries."""
    python, abi, platform = wheel.stem.split("-")[-3:]
    expected = {"_native_jpeg.dll"} if platform == "win_amd64" else {"_native_jpeg.so", "_native_files.so"}
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size:,} bytes")
    if (python, abi) != ("py3", "none") or platform.startswith("linux"):
        sys.exit("the tag must be py3-none and a platform, or any; auditwheel replaces linux")
    if size > MOST_BYTES:
        sys.exit(f"the wheel has more than {MOST_BYTES:,} bytes")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        names = [Path(name) for name in archive.namelist()]
        libraries = {path.name: path for path in names if path.suffix in (".so", ".dll", ".dylib", ".pyd")}
        licenses = {path.name for path in names if "licenses" in path.parts}
        if platform == "any":
            expected = set()
        elif not licenses >= LICENSES:
            sys.exit(f"licences are missing: {', '.join(sorted(LICENSES - licenses))}")
        if libraries.keys() != expected:
            sys.exit(f"the wheel has the libraries {sorted(libraries)}, expected {sorted(expected)}")
        for name, path in sorted(libraries.items()):
            print(f"  {name}: {load(Path(archive.extract(path.as_posix(), folder)))}")


if __name__ == "__main__":
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    if not wheels:
        sys.exit(f"no wheels in {sys.argv[1]}")
    for wheel in wheels:
        check(wheel)
