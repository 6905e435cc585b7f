"""The recipe of the wheels: the switch of the build hook, the tag for macOS, the check of a finished wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from aiofeed.kernel.decoders.native_jpeg import native_decoder
from tests.support.paths import ROOT

LIBRARIES = ("aiofeed/kernel/decoders/_native_jpeg.so", "aiofeed/kernel/sources/_native_files.so")
needs_headers = pytest.mark.skipif(native_decoder() is None, reason="needs a C compiler and libjpeg-turbo's headers")
KINDS = ("", ".libjpeg-turbo.ijg.txt", ".libjpeg-turbo.md", ".libjpeg-turbo.zlib.txt")
LICENSES = tuple(f"a.dist-info/licenses/LICENSE{kind}" for kind in KINDS)


def load(path: str) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, tag: str, names: tuple[str, ...], size: int = 0) -> Path:
    """A wheel with these files, of `size` zeros each."""
    path = folder / f"aiofeed-0.1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, bytes(size))
    return path


def compile_c(path: Path, code: str, *options: str) -> None:
    """Compile C code to an object file or a library."""
    subprocess.run(["cc", "-fPIC", *options, "-x", "c", "-o", path, "-"], input=code, text=True, check=True)


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``hatch_build.py`` on a copy of the native JPEG library's source."""
    for name in ("hatch_build.py", "aiofeed/kernel/decoders/native_jpeg.c"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    env = {"PATH": "/usr/bin:/bin", "AIOFEED_BUILD_NATIVE_FILES": "0", **variables}
    command = [sys.executable, "hatch_build.py"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


class TestBuildHook:
    def test_the_static_library_must_exist(self, tmp_path: Path) -> None:
        """A prefix without the library is an error that names the variable, its value and what must be there."""
        done = build(tmp_path, AIOFEED_LIBJPEG_TURBO="/nowhere")
        assert done.returncode == 1
        assert "it needs AIOFEED_LIBJPEG_TURBO=/nowhere with include/ and lib/libjpeg.a" in done.stderr

    @needs_headers
    def test_the_static_library_is_linked(self, tmp_path: Path) -> None:
        """The result contains the code of the prefix's libjpeg.a, and does not need libjpeg.so."""
        (tmp_path / "lib").mkdir()
        (tmp_path / "include").symlink_to("/usr/include")
        compile_c(tmp_path / "jpeg.o", 'const char *jpeg_CreateDecompress(void) { return "from the prefix"; }', "-c")
        subprocess.run(["ar", "rc", tmp_path / "lib/libjpeg.a", tmp_path / "jpeg.o"], check=True)
        done = build(tmp_path, AIOFEED_LIBJPEG_TURBO=str(tmp_path))
        assert f"built {LIBRARIES[0]}" in done.stdout, done.stderr
        built = (tmp_path / LIBRARIES[0]).read_bytes()
        assert b"from the prefix" in built
        assert b"libjpeg.so" not in built

    def test_windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On Windows there is one library, and it is built with the static libjpeg-turbo only."""
        monkeypatch.setattr(sys, "platform", "win32")
        monkeypatch.delenv("AIOFEED_LIBJPEG_TURBO", raising=False)
        hook = load("hatch_build.py")
        assert [library.path for library in hook.LIBRARIES] == ["aiofeed/kernel/decoders/_native_jpeg.dll"]
        built, [warning] = hook.build()
        assert built == []
        assert "on Windows the library is built for wheels only" in warning

    @pytest.mark.parametrize(("target", "tag"), [("11.0", "11_0"), ("12", "12_0"), (None, "14_0")])
    def test_the_tag_for_macos(self, monkeypatch: pytest.MonkeyPatch, target: str | None, tag: str) -> None:
        """The wheel is for the oldest macOS that the compiler was asked for, else for this one."""
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(platform, "mac_ver", lambda: ("14.5", ("", "", ""), "arm64"))
        monkeypatch.delenv("MACOSX_DEPLOYMENT_TARGET", raising=False)
        if target:
            monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", target)
        assert load("hatch_build.py").wheel_platform() == f"macosx_{tag}_arm64"


class TestCheck:
    """``.ci/check_wheel.py``."""

    @pytest.mark.parametrize(
        ("tag", "names", "size", "problem"),
        [
            ("cp311-cp311-manylinux_2_28_x86_64", (), 0, "tag must be py3-none"),
            ("py3-none-linux_x86_64", (), 0, "tag must be py3-none"),
            ("py3-none-any", LIBRARIES, 0, r"expected \[\]"),
            (
                "py3-none-manylinux_2_28_x86_64",
                LIBRARIES + LICENSES[:2],
                0,
                "missing: LICENSE.libjpeg-turbo.md, LICENSE.libjpeg-turbo.zlib.txt",
            ),
            ("py3-none-manylinux_2_28_x86_64", LICENSES + LIBRARIES[:1], 0, "expected .*_native_files.so"),
            ("py3-none-win_amd64", LICENSES, 0, "expected .*_native_jpeg.dll"),
            ("py3-none-any", ("a.py",), 2_000_001, "more than 2,000,000 bytes"),
        ],
    )
    def test_refused(self, tmp_path: Path, tag: str, names: tuple[str, ...], size: int, problem: str) -> None:
        """A wheel with another tag, without a library or a licence, or too large is refused."""
        with pytest.raises(SystemExit, match=problem):
            load(".ci/check_wheel.py").check(wheel(tmp_path, tag, names, size))

    @needs_headers
    def test_exported_symbols(self, tmp_path: Path) -> None:
        """A library that exports a function of libjpeg is refused: it could replace that of another library."""
        library = tmp_path / "_native_jpeg.so"
        compile_c(library, "void jpeg_CreateDecompress(void) {}", "-shared")
        with pytest.raises(SystemExit, match=r"_native_jpeg\.so exports jpeg_CreateDecompress"):
            load(".ci/check_wheel.py").load(library)

    def test_a_pure_wheel(self, tmp_path: Path) -> None:
        """A pure wheel has no libraries and needs no licences of others."""
        load(".ci/check_wheel.py").check(wheel(tmp_path, "py3-none-any", ("aiofeed/__init__.py",)))


def test_another_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive of libjpeg-turbo with another SHA-256 than the pinned one is not unpacked."""
    recipe = load(".ci/build_libjpeg_turbo.py")
    archive = tmp_path / "other.tar.gz"
    archive.write_bytes(b"another release")
    monkeypatch.setattr(recipe, "URL", archive.as_uri())
    digest = hashlib.sha256(b"another release").hexdigest()
    with pytest.raises(SystemExit, match=f"the SHA-256 is {digest}, expected {recipe.SHA256}"):
        recipe.download(tmp_path)
