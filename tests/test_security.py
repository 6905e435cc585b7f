"""What comes from elsewhere stays data: no path leaves its root, no file names a program, nothing is unpickled."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, features

import aiofeed
from aiofeed import DecodeError, DecodeImage, Feeder, Files, ImageFolder, ReadError
from aiofeed.decoders.pillow import FORMATS
from aiofeed.sources.file_io import _walk
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs the links of a POSIX file system")


def encoded(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (200, 60, 30)).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A data set with a class of two pictures, and a secret beside it."""
    (tmp_path / "data" / "cat").mkdir(parents=True)
    for name in ("a.png", "b.png"):
        (tmp_path / "data" / "cat" / name).write_bytes(encoded("PNG"))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "b.png").write_bytes(encoded("PNG"))
    return tmp_path


def read_all(source: Files) -> int:
    with Feeder(source, decode=DecodeImage(4), batch_size=1) as feeder:
        return len(list(feeder))


# --- paths


@pytest.mark.parametrize(
    "path",
    [
        "../secret/b.png",
        "cat/../../secret/b.png",
        "cat/..",
        "..",
        "/etc/passwd",
        "",
        "cat/../cat/a.png",
        "//host/share",
    ],
)
@pytest.mark.parametrize("follow_symlinks", [False, True])
def test_a_path_that_may_leave_its_root_is_refused(tree: Path, path: str, follow_symlinks: bool) -> None:
    """Absolute paths and any `..`, links or no links: at construction, with path and root in the message."""
    with pytest.raises(ValueError, match="root=") as caught:
        Files(["cat/a.png", path], root=tree / "data", follow_symlinks=follow_symlinks)
    assert repr(path) in str(caught.value)
    assert str(tree / "data") in str(caught.value)


def test_paths_below_a_root_are_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are joined to it; key is what can be opened; names with dots in them are names."""
    (tree / "data" / "..cat").mkdir()
    (tree / "data" / "..cat" / "c...png").write_bytes(encoded("PNG"))
    names = ["cat/a.png", "./cat//b.png", "..cat/c...png"]
    monkeypatch.chdir(tree)
    for root in (tree / "data", str(tree / "data"), f"{tree}/data/", "data", Path("data"), "./data"):
        for follow_symlinks in (False, True):
            source = Files(names, [1, 2, 3], root=root, follow_symlinks=follow_symlinks)
            assert [os.path.samefile(source.key(i), tree / "data" / names[i]) for i in range(3)] == [True] * 3
            assert read_all(source) == 3
    monkeypatch.chdir(tree / "data")
    for here in ("", "."):
        assert read_all(Files(names, root=here, follow_symlinks=False)) == 3


def test_a_state_fits_the_same_list_below_another_root(tree: Path) -> None:
    """The root is no part of what identifies a source: data may move."""
    (tree / "data").rename(tree / "moved")
    (tree / "data").symlink_to("moved")
    states = []
    for root in ("data", "moved"):
        source = Files(["cat/a.png", "cat/b.png"], root=tree / root)
        with Feeder(source, decode=DecodeImage(4), batch_size=1) as feeder:
            states.append(feeder.state_dict())
    assert states[0] == states[1]


def links_a_file(tree: Path) -> None:
    (tree / "data" / "cat" / "b.png").unlink()
    (tree / "data" / "cat" / "b.png").symlink_to(tree / "secret" / "b.png")


def links_a_folder(tree: Path) -> None:
    (tree / "data" / "cat").rename(tree / "data" / "was")
    (tree / "data" / "cat").symlink_to(tree / "secret")


@pytest.mark.parametrize("link", [links_a_file, links_a_folder])
def test_a_link_below_the_root_is_refused_or_followed(tree: Path, link: Callable[[Path], None]) -> None:
    """As follow_symlinks says: refused when the source is made, with the link's name, or followed wherever it leads."""
    link(tree)
    with pytest.raises(ValueError, match=r"leads through the symbolic link .*cat.*follow_symlinks=False"):
        Files(["cat/b.png"], root=tree / "data", follow_symlinks=False)
    assert read_all(Files(["cat/b.png"], root=tree / "data")) == 1


@pytest.mark.parametrize("link", [links_a_file, links_a_folder])
@pytest.mark.parametrize("kind", ["Files", "ImageFolder"])
def test_a_link_put_in_place_after_listing_is_not_followed(tree: Path, link: Callable[[Path], None], kind: str) -> None:
    """A file or class folder that becomes a link once the source was made is a ReadError."""
    source: Files
    if kind == "ImageFolder":
        source = ImageFolder(tree / "data", follow_symlinks=False)
    else:
        source = Files(["cat/a.png", "cat/b.png"], root=tree / "data", follow_symlinks=False)
    link(tree)
    with pytest.raises(ReadError, match=r"symbolic link.*follow_symlinks=False") as caught:
        read_all(source)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ELOOP
    assert caught.value.key.startswith(str(tree / "data" / "cat"))


def test_the_opening_itself_follows_no_link(tree: Path) -> None:
    """Between a look and the opening there is no gap: the calls that open are those that refuse."""
    data = str(tree / "data")
    os.close(_walk(data, ["cat", "b.png"]))
    links_a_file(tree)
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.ELOOP))):
        _walk(data, ["cat", "b.png"])
    links_a_folder(tree)
    with pytest.raises(NotADirectoryError):
        _walk(data, ["cat", "b.png"])
    with pytest.raises(OSError, match="leads out"):
        _walk(data, ["..", "secret", "b.png"])


def test_without_a_root_the_file_itself_is_no_link(tree: Path) -> None:
    """`Files` with follow_symlinks=False and no root: folders are the caller's, the file must not be a link."""
    links_a_file(tree)
    (tree / "linked").symlink_to(tree / "data")
    assert read_all(Files([tree / "linked" / "cat" / "a.png"], follow_symlinks=False)) == 1
    with pytest.raises(ReadError, match="it is a symbolic link, and follow_symlinks=False"):
        read_all(Files([tree / "linked" / "cat" / "b.png"], follow_symlinks=False))
    with pytest.raises(TypeError, match="follow_symlinks must be True or False"):
        Files([], follow_symlinks=None)  # type: ignore[arg-type]


def test_an_image_folder_lists_no_links_where_none_are_followed(tree: Path) -> None:
    """Neither a class that is a link, nor a folder or file that is one; with links followed, all of them."""
    (tree / "data" / "dog").symlink_to(tree / "secret")
    (tree / "data" / "cat" / "more").symlink_to(tree / "secret")
    (tree / "data" / "cat" / "c.png").symlink_to(tree / "secret" / "b.png")
    plain = ImageFolder(tree / "data", follow_symlinks=False)
    assert plain.classes == ["cat"]
    assert [os.path.basename(path) for path in plain.paths] == ["a.png", "b.png"]
    assert read_all(plain) == 2
    assert read_all(ImageFolder(tree / "data")) == 5


def test_a_root_that_is_a_link_itself_is_fine(tree: Path) -> None:
    """Only what is below the root is looked at: whoever named the root meant it."""
    (tree / "link").symlink_to("data")
    assert read_all(ImageFolder(tree / "link", follow_symlinks=False)) == 2
    assert read_all(Files(["cat/a.png"], root=tree / "link", follow_symlinks=False)) == 1


def test_a_folder_that_cannot_be_listed_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its images are not left out without a word."""
    (tree / "data" / "cat" / "inner").mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("inner"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="inner"):
        ImageFolder(tree / "data")


# --- formats

FOREIGN = {
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(pwned) print\n%%EOF\n",
    "WMF": b"\xd7\xcd\xc6\x9a\x00\x00" + bytes(100),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "FITS": b"SIMPLE  =                    T" + bytes(100),
    "GRIB": b"GRIB\x00\x00\x00\x01" + bytes(100),
    "MPEG": b"\x00\x00\x01\xb3" + bytes(100),
    "ICO": encoded("ICO"),
    "PCX": encoded("PCX"),
    "SGI": encoded("SGI"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_formats_that_are_not_listed_are_not_opened(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is never called; the error names the file, the format and the way out."""
    Image.init()
    accept = Image.OPEN[kind][1]
    monkeypatch.setitem(Image.OPEN, kind, (lambda *_: pytest.fail(f"{kind} was opened"), accept))
    path = tmp_path / "picture.jpg"
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(DecodeError, match=rf"looks like .*{kind}.*formats=\('JPEG', .*leaves out; add it") as caught:
        read_all(Files([path]))
    assert caught.value.key == str(path)


def test_formats_are_what_may_be_opened() -> None:
    """Names count in any case; what is not named is refused, JPEG included; MPO is a JPEG."""
    files = {kind: encoded(kind) for kind in ("JPEG", "PNG", "GIF", "TIFF", "BMP", "PPM", "TGA")}
    if features.check("webp"):
        files["WEBP"] = encoded("WEBP")
    for kind, data in files.items():
        assert DecodeImage(4, formats=(kind.lower(),))(data).shape == (3, 4, 4)
        others = tuple(other for other in files if other not in (kind, "TGA"))
        with pytest.raises((OSError, ValueError), match="formats="):
            DecodeImage(4, formats=others)(data)
    assert DecodeImage(4, formats=["mpo"])(files["JPEG"]).shape == (3, 4, 4)
    assert DecodeImage(4, formats=("png", "PNG", "Gif")).formats == ("PNG", "GIF")
    assert DecodeImage(4) == DecodeImage(4, formats=[name.lower() for name in FORMATS])
    assert not {"EPS", "WMF", "HDF5", "FITS", "MPEG", "GRIB", "BUFR", "ICO", "TGA"} & set(DecodeImage.formats)


def test_decoding_starts_no_program_and_touches_no_file(tmp_path: Path) -> None:
    """Under an audit hook: whatever the bytes say, nothing is executed, unpickled, connected to, written or opened."""
    samples = [encoded(kind) for kind in ("JPEG", "PNG", "GIF", "TIFF", "BMP", "PPM")] + list(FOREIGN.values())
    samples += [data[:n] for data in samples for n in (3, 20, len(data) // 2)]
    (tmp_path / "samples").write_text(json.dumps([data.hex() for data in samples]))
    code = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch\n"
        "from PIL import Image\n"
        "from aiofeed.decoders import DecodeImage\n"
        "Image.init()\n"
        "decode, seen, on = DecodeImage(4), set(), False\n"
        f"samples = [bytes.fromhex(each) for each in json.load(open({str(tmp_path / 'samples')!r}))]\n"
        "decode(samples[0])\n"
        "DecodeImage(4, scaled=False)(samples[0])\n"  # loads what decodes exactly, too
        "bad = ('subprocess', 'os.', 'pickle', 'socket', 'ctypes', 'open', 'exec', 'compile', 'shutil', 'marshal')\n"
        "sys.addaudithook(lambda event, args: on and event.startswith(bad) and seen.add(event + repr(args)[:80]))\n"
        "on = True\n"
        "for data in samples:\n"
        "    try:\n"
        "        decode(data)\n"
        "    except (OSError, ValueError):\n"
        "        pass\n"
        "on = False\n"
        "print(json.dumps(sorted(seen)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


ALLOWED = {"spawn.py": {"pickle"}, "handle.py": {"subprocess"}}
"""An engine process is started, and given the user's own objects by its own parent, in a file that has no name."""


def test_nothing_of_ours_unpickles_or_evaluates() -> None:
    """No module of aiofeed names pickle, marshal, subprocess, eval, exec, or torch.load, but to start its processes."""
    names = {"pickle", "cPickle", "marshal", "shelve", "dill", "subprocess", "eval", "exec", "system", "popen"}
    for path in sorted(Path(aiofeed.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                used = {node.func.id}
            elif isinstance(node, ast.Attribute):
                used = {node.attr}
                if node.attr == "load" and isinstance(node.value, ast.Name):
                    assert node.value.id not in ("torch", "np", "numpy"), f"{path}:{node.lineno}"
            else:
                continue
            used -= ALLOWED.get(path.name, set()) if path.parent.name == "workers" else set()
            assert not used & names, f"{path}:{node.lineno} names {used & names}"
