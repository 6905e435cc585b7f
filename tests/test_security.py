"""Untrusted paths and files: no path leaves its root, no file starts a program, nothing is unpickled."""

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
from aiofeed import DecodeImage, Feeder, Files, ImageFolder
from aiofeed.errors import DecodeError, ReadError
from aiofeed.ipc.batch_codec import decode_batch
from aiofeed.ipc.framing import ProtocolError
from aiofeed.ipc.schema import ContainerNode, PickledNode
from aiofeed.kernel.decoders.geometry import FORMATS
from aiofeed.kernel.sources.links import open_below
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs the links of a POSIX file system")


def encoded(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (200, 60, 30)).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A dataset with a class of two pictures, and a secret folder beside it."""
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
def test_a_path_that_may_lead_out_of_its_root_is_refused(tree: Path, path: str, follow_symlinks: bool) -> None:
    """The constructor refuses absolute paths and any `..`; the error has path and root."""
    with pytest.raises(ValueError, match="root=") as caught:
        Files(["cat/a.png", path], root=tree / "data", follow_symlinks=follow_symlinks)
    assert repr(path) in str(caught.value)
    assert str(tree / "data") in str(caught.value)


def test_paths_below_a_root_are_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are joined to the root, `key` is the joined path, and names may contain dots."""
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


def test_a_state_matches_the_same_list_below_another_root(tree: Path) -> None:
    """The fingerprint of a source does not contain the root, so data may be moved."""
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
    """With follow_symlinks=False the constructor raises and names the link; otherwise the link is followed."""
    link(tree)
    with pytest.raises(ValueError, match=r"leads through the symbolic link .*cat.*follow_symlinks=False"):
        Files(["cat/b.png"], root=tree / "data", follow_symlinks=False)
    assert read_all(Files(["cat/b.png"], root=tree / "data")) == 1


@pytest.mark.parametrize("link", [links_a_file, links_a_folder])
@pytest.mark.parametrize("kind", ["Files", "ImageFolder"])
def test_a_link_created_after_listing_is_not_followed(tree: Path, link: Callable[[Path], None], kind: str) -> None:
    """A file or class folder that is replaced by a link after construction raises ReadError."""
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


def test_opening_follows_no_link(tree: Path) -> None:
    """The calls that open the file refuse links themselves, so there is no gap after a check."""
    data = str(tree / "data")
    os.close(open_below(data, ["cat", "b.png"], os.O_RDONLY))
    links_a_file(tree)
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.ELOOP))):
        open_below(data, ["cat", "b.png"], os.O_RDONLY)
    links_a_folder(tree)
    with pytest.raises(NotADirectoryError):
        open_below(data, ["cat", "b.png"], os.O_RDONLY)
    with pytest.raises(OSError, match="leads out of the root"):
        open_below(data, ["..", "secret", "b.png"], os.O_RDONLY)


def test_without_a_root_the_file_must_not_be_a_link(tree: Path) -> None:
    """Without a root, follow_symlinks=False applies to the file and not to its folders."""
    links_a_file(tree)
    (tree / "linked").symlink_to(tree / "data")
    assert read_all(Files([tree / "linked" / "cat" / "a.png"], follow_symlinks=False)) == 1
    with pytest.raises(ReadError, match="it is a symbolic link, and follow_symlinks=False"):
        read_all(Files([tree / "linked" / "cat" / "b.png"], follow_symlinks=False))
    with pytest.raises(TypeError, match="follow_symlinks must be True or False"):
        Files([], follow_symlinks=None)  # type: ignore[arg-type]


def test_an_image_folder_lists_no_links_if_none_are_followed(tree: Path) -> None:
    """Linked classes, folders and files are listed only with follow_symlinks=True."""
    (tree / "data" / "dog").symlink_to(tree / "secret")
    (tree / "data" / "cat" / "more").symlink_to(tree / "secret")
    (tree / "data" / "cat" / "c.png").symlink_to(tree / "secret" / "b.png")
    plain = ImageFolder(tree / "data", follow_symlinks=False)
    assert plain.classes == ["cat"]
    assert [os.path.basename(path) for path in plain.paths] == ["a.png", "b.png"]
    assert read_all(plain) == 2
    assert read_all(ImageFolder(tree / "data")) == 5


def test_the_root_may_be_a_link(tree: Path) -> None:
    """Only components below the root are checked for links."""
    (tree / "link").symlink_to("data")
    assert read_all(ImageFolder(tree / "link", follow_symlinks=False)) == 2
    assert read_all(Files(["cat/a.png"], root=tree / "link", follow_symlinks=False)) == 1


def test_a_folder_that_cannot_be_listed_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor raises instead of leaving out the images of the folder."""
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
def test_other_formats_are_not_opened(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's plugin is never called; the error names the file, the format and how to allow it."""
    Image.init()
    accept = Image.OPEN[kind][1]
    monkeypatch.setitem(Image.OPEN, kind, (lambda *_: pytest.fail(f"{kind} was opened"), accept))
    path = tmp_path / "picture.jpg"
    path.write_bytes(FOREIGN[kind])
    with pytest.raises(DecodeError, match=rf"looks like .*{kind}.*formats=\('JPEG', .*leaves out; add it") as caught:
        read_all(Files([path]))
    assert caught.value.key == str(path)


def test_the_formats_argument() -> None:
    """Names are case-insensitive; formats that are not named are refused, JPEG included; MPO is a JPEG."""
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


@pytest.mark.slow
def test_decoding_starts_no_program_and_touches_no_file(tmp_path: Path) -> None:
    """Under an audit hook, decoding any bytes executes, unpickles, connects to, writes and opens nothing."""
    samples = [encoded(kind) for kind in ("JPEG", "PNG", "GIF", "TIFF", "BMP", "PPM")] + list(FOREIGN.values())
    samples += [data[:n] for data in samples for n in (3, 20, len(data) // 2)]
    (tmp_path / "samples").write_text(json.dumps([data.hex() for data in samples]))
    code = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch\n"
        "from PIL import Image\n"
        "from aiofeed.kernel.decoders.image import DecodeImage\n"
        "Image.init()\n"
        "decode, seen, on = DecodeImage(4), set(), False\n"
        f"samples = [bytes.fromhex(each) for each in json.load(open({str(tmp_path / 'samples')!r}))]\n"
        "decode(samples[0])\n"
        "DecodeImage(4, scaled=False)(samples[0])\n"  # imports the exact decoder, too
        "decode(samples[1])\n"  # and that of PNGs
        "bad = ('subprocess', 'os.', 'pickle', 'socket', 'ctypes.dl', 'open', 'exec', 'compile', 'shutil', 'marshal')\n"
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


ALLOWED = {
    "reports/commands/run.py": {"subprocess"},
    "workers/spawn.py": {"pickle"},
    "workers/handle.py": {"subprocess"},
    "ipc/pickling.py": {"pickle"},
    "loader/workers/batches.py": {"pickle"},
    "loader/workers/state.py": {"pickle"},
    "loader/workers/worker_loop.py": {"pickle"},
    "loader/workers/workers.py": {"pickle"},
    "testing/source_check.py": {"pickle"},
}
"""A worker process and its parent exchange the user's own objects, by unnamed files and sockets that only they have;
``aiofeed run`` runs the user's own script; ``check_source`` copies the source that it is given."""


def test_no_module_unpickles_or_evaluates() -> None:
    """No module names pickle, marshal, subprocess, eval, exec or torch.load, except for the user's own processes.

    ``torch.load(weights_only=True)`` runs no code of a file.
    """
    names = {"pickle", "cPickle", "marshal", "shelve", "dill", "subprocess", "eval", "exec", "system", "popen"}
    package = Path(aiofeed.__file__).parent
    for path in sorted(package.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        without_pickle = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _refuses_pickles(node)}
        for node in nodes:
            if isinstance(node, ast.Import):
                used = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                used = {node.func.id}
            elif isinstance(node, ast.Attribute):
                used = {node.attr}
                if node.attr == "load" and isinstance(node.value, ast.Name) and id(node) not in without_pickle:
                    assert node.value.id not in ("torch", "np", "numpy"), f"{path}:{node.lineno}"
            else:
                continue
            used -= ALLOWED.get(path.relative_to(package).as_posix(), set())
            assert not used & names, f"{path}:{node.lineno} names {used & names}"


def _refuses_pickles(call: ast.Call) -> bool:
    """Whether a call says `allow_pickle=False` or `weights_only=True`."""
    given = {(word.arg, word.value.value) for word in call.keywords if isinstance(word.value, ast.Constant)}
    return bool(given & {("allow_pickle", False), ("weights_only", True)})


def test_a_pickled_value_of_another_process_is_refused() -> None:
    """A batch that a server sends is decoded without unpickling; its own worker processes may send pickles."""
    node = PickledNode(b"cbuiltins\nexec\n(S'raise SystemExit'\ntR.", [])
    with pytest.raises(ProtocolError, match="pickled"):
        decode_batch(ContainerNode("list", [1, node]), lambda array: array)
