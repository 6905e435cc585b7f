"""Files that are no good, on a real file system through a real feeder: an error with the path, never anything else."""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import socket
import struct
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, features

from aiofeed import DecodeError, DecodeImage, Feeder, Files, ImageFolder, ReadError, SampleError
from aiofeed.sources import file_io as reading
from aiofeed.sources.file_io import ReadRules, read_file, read_settled, settled_by
from tests.support.paths import ROOT
from tests.support.rewriting import rewritten

resource: Any = pytest.importorskip("resource", reason="needs POSIX: FIFOs, links, and a look at peak memory")


def encoded(kind: str, size: tuple[int, int] = (60, 40), color: Any = (200, 60, 30), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind, **options)
    return file.getvalue()


def noisy(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    levels = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(levels).save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + name + payload + struct.pack(">I", zlib.crc32(name + payload))


def png_with(*chunks: bytes) -> bytes:
    plain = encoded("PNG")
    return plain[:33] + b"".join(chunks) + plain[33:]


def error_of(path: Path | str, decode: Any = None, source: Files | None = None) -> SampleError:
    """The error that a feeder raises for a file that comes between two good ones; the first good one is fed."""
    good = Path(path).parent / "good.png"
    if not good.exists():
        good.write_bytes(encoded("PNG"))
    source = source or Files([good, path, good])
    with Feeder(source, decode=decode or DecodeImage((8, 8)), batch_size=1) as feeder:
        iterator = iter(feeder)
        assert next(iterator)[0, :, 4, 4].tolist() == [200, 60, 30]
        with pytest.raises(SampleError) as caught:
            next(iterator)
    assert str(path) in str(caught.value)
    assert (caught.value.key, caught.value.index) == (str(path), 1)
    return caught.value


def fed(path: Path, decode: Any = None) -> np.ndarray[Any, Any]:
    """What a feeder makes of a file that is good in spite of all."""
    with Feeder(Files([path]), decode=decode or DecodeImage((8, 8)), batch_size=1) as feeder:
        [batch] = list(feeder)
    return batch[0].permute(1, 2, 0).numpy()


# --- what cannot be read


@pytest.mark.parametrize("held", [False, True], ids=["no writer", "a writer"])
def test_a_fifo_is_a_read_error(tmp_path: Path, held: bool) -> None:
    """A FIFO is refused at once, whether somebody has it open for writing or nobody ever will."""
    os.mkfifo(tmp_path / "fifo.jpg")
    writer = os.open(tmp_path / "fifo.jpg", os.O_RDWR | os.O_NONBLOCK) if held else None
    try:
        error = error_of(tmp_path / "fifo.jpg")
    finally:
        if writer is not None:
            os.close(writer)
    assert isinstance(error, ReadError)
    assert "regular files, this is a FIFO" in str(error)
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENXIO


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/urandom"])
def test_a_device_is_a_read_error(tmp_path: Path, device: str) -> None:
    """A device without end is not read at all, named or linked to."""
    if not os.path.exists(device):
        pytest.skip(f"needs {device}")
    (tmp_path / "link.jpg").symlink_to(device)
    error = error_of(tmp_path / "link.jpg")
    assert isinstance(error, ReadError)
    assert "this is a character device" in str(error)
    with pytest.raises(OSError, match="a character device"):
        read_file(device)


def test_a_socket_and_an_open_pipe_are_read_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are a socket in the file system, and a pipe under its name in /dev/fd."""
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert isinstance(error_of(tmp_path / "socket"), ReadError)
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="this is a FIFO"):
            read_file(f"/dev/fd/{reader}")
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.mkdir(), IsADirectoryError),
        (lambda path: path.symlink_to("nowhere"), FileNotFoundError),
        (lambda path: path.symlink_to(path.name), OSError),
        (lambda path: None, FileNotFoundError),
    ],
    ids=["directory", "dangling link", "link to itself", "missing"],
)
def test_what_is_no_file_is_a_read_error(tmp_path: Path, make: Callable[[Path], None], kind: type[OSError]) -> None:
    """A directory, a link to nothing or to itself, nothing: the system's own error is chained."""
    make(tmp_path / "bad.jpg")
    error = error_of(tmp_path / "bad.jpg")
    assert isinstance(error, ReadError)
    assert isinstance(error.__cause__, kind)


def test_no_permission_is_a_read_error(tmp_path: Path) -> None:
    """A file that may not be read is told as such."""
    (tmp_path / "bad.jpg").write_bytes(encoded("JPEG"))
    (tmp_path / "bad.jpg").chmod(0)
    if os.geteuid() != 0:
        error: Any = error_of(tmp_path / "bad.jpg")
        assert isinstance(error, ReadError)
        assert isinstance(error.__cause__, PermissionError)
        return
    # The superuser reads everything: somebody else has to try, in a process of their own.
    tmp_path.chmod(0o755)
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from aiofeed import Feeder, Files, ReadError\n"
        "from aiofeed.sources.file_io import read_file\n"
        "import torch\n"
        f"folder = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
        "os.fchdir(folder)\n"
        "list(Feeder([0, 1], batch_size=1))\n"  # everything is imported while it may be
        "os.setresgid(65534, 65534, 65534)\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "try:\n"
        "    list(Feeder(Files(['bad.jpg']), decode=len, batch_size=1))\n"
        "except ReadError as error:\n"
        "    print(type(error.__cause__).__name__, error)\n"
        "os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("PermissionError cannot read 'bad.jpg'"), done


def test_a_giant_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """100 GB, of which nothing is on the disk: the error names file, size and the way out, and no memory is taken."""
    with open(tmp_path / "giant.jpg", "wb") as file:
        file.truncate(100 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = error_of(tmp_path / "giant.jpg")
    assert isinstance(error, ReadError)
    assert f"{100 << 30} bytes are more than max_bytes={1 << 30} allows; raise max_bytes" in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("over", [False, True])
def test_max_bytes_is_the_largest_that_is_read(tmp_path: Path, over: bool) -> None:
    """A file of max_bytes is read, one of a byte more is not, from a list and from a folder."""
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "a.png").write_bytes(bytes(1000))
    limit = 999 if over else 1000
    for source in (Files([tmp_path / "class" / "a.png"], max_bytes=limit), ImageFolder(tmp_path, max_bytes=limit)):
        with Feeder(source, decode=len, batch_size=1) as feeder:
            if over:
                with pytest.raises(ReadError, match="1000 bytes are more than max_bytes=999") as caught:
                    list(feeder)
                assert isinstance(caught.value.__cause__, OSError)
                assert caught.value.__cause__.errno == errno.EFBIG
            else:
                assert len(list(feeder)) == 1
    for wrong, kind in ((0, ValueError), (1.5, TypeError), (None, TypeError)):
        with pytest.raises(kind, match="max_bytes must be"):
            Files([], max_bytes=wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_max_bytes_holds_for_files_that_do_not_know_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of /proc says that it is empty; it is read to its end or to max_bytes."""
    assert b"Name:" in read_file("/proc/self/status", ReadRules(max_bytes=100_000))
    with pytest.raises(OSError, match="more than max_bytes=100 allows"):
        read_file("/proc/self/status", ReadRules(max_bytes=100))


# --- files that change while they are read


def meddling(monkeypatch: pytest.MonkeyPatch, meddle: Callable[[], object]) -> None:
    """Have ``meddle`` happen between the first look at an open file and the reading of it."""
    real = os.read

    class Meddled:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def read(self, descriptor: int, count: int) -> bytes:
            meddle()
            return real(descriptor, count)

    monkeypatch.setattr(reading, "os", Meddled())


def test_a_file_that_changes_while_it_is_read_is_a_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated, emptied, appended to, or overwritten in its length meanwhile: an error that may pass."""
    whole = noisy("JPEG")
    path = tmp_path / "changing.jpg"
    changes: list[Callable[[], object]] = [
        lambda: os.truncate(path, len(whole) // 2),
        lambda: os.truncate(path, 0),
        lambda: path.write_bytes(whole + b"more"),
        lambda: (path.write_bytes(whole + b"more"), os.utime(path, ns=(2, 2))),
        lambda: (path.write_bytes(whole[::-1]), os.utime(path, ns=(1, 1))),
    ]
    for change in changes:
        path.write_bytes(whole)
        os.utime(path, ns=(2, 2))  # so that one of the changes leaves the time, and one the size, as it was
        with monkeypatch.context() as patched:
            meddling(patched, change)
            with pytest.raises(OSError, match="the file changed while it was read") as caught:
                read_file(str(path))
            assert caught.value.errno == errno.EBUSY
            assert caught.value.filename == str(path)
    path.write_bytes(whole)
    source = Files([path])
    with monkeypatch.context() as patched, Feeder(source, decode=DecodeImage(8), batch_size=1) as feeder:
        meddling(patched, changes[0])
        with pytest.raises(ReadError, match="changed while it was read") as error:
            list(feeder)
    assert error.value.key == str(path)


def test_a_file_that_is_replaced_or_removed_while_it_is_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened stays whole where a file is put in its place, as careful writers do: that is no error."""
    path, other = tmp_path / "replaced.jpg", tmp_path / "other.jpg"
    for change in (lambda: os.replace(other, path), lambda: path.unlink()):
        path.write_bytes(b"the first")
        other.write_bytes(b"the second")
        with monkeypatch.context() as patched:
            done: list[object] = []
            meddling(patched, lambda change=change, done=done: done or done.append(change()))  # type: ignore[misc]
            assert read_file(str(path)) == b"the first"


def test_files_under_a_writer_are_whole_or_errors(tmp_path: Path) -> None:
    """A writer truncates and rewrites a file all the time: what is read is one of its two states, or an error."""
    path = tmp_path / "busy"
    states = (b"a" * 300_000, b"b" * 200_000)
    with rewritten(path, states):
        for _ in range(300):
            try:
                data = read_file(str(path))
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
            else:
                # Cut short by a writer who stood still is not to be told from a short file; mixed it never is.
                assert len(set(data)) <= 1


# --- files that were left alone long before


def settled(path: Path, rules: ReadRules = ReadRules()) -> bytes | None:  # noqa: B008 - frozen
    """What one look gives where the last change of ``path`` up to now is long past."""
    return read_settled(str(path), rules, (path.stat().st_ctime_ns + 1000) / 1e9)


def test_of_a_file_left_alone_one_look_is_enough(tmp_path: Path) -> None:
    """A regular file that has not changed since is read whole; the same file, changed since, is for a closer look."""
    path = tmp_path / "old"
    path.write_bytes(b"whole")
    assert settled(path) == b"whole"
    assert read_settled(str(path), ReadRules(), path.stat().st_ctime - 1.0) is None
    os.utime(path, (1, 1))  # says that it is old
    assert read_settled(str(path), ReadRules(), settled_by(time.time())) is None


def test_one_look_takes_no_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated, appended to, overwritten in its length, its time put back: each time a closer look is taken."""
    path = tmp_path / "changing"
    changes: list[Callable[[], object]] = [
        lambda: os.truncate(path, 4),
        lambda: os.truncate(path, 0),
        lambda: path.write_bytes(b"0123456789ab"),
        lambda: path.write_bytes(b"9876543210"),
        lambda: (path.write_bytes(b"9876543210"), os.utime(path, ns=(1, 1))),
    ]

    class Meddled:
        def __init__(self, change: Callable[[], object]) -> None:
            self.change = change

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def pread(self, descriptor: int, count: int, offset: int) -> bytes:
            since = os.fstat(descriptor).st_ctime_ns
            while os.fstat(descriptor).st_ctime_ns == since:  # the file system's clock ticks
                self.change()
            return os.pread(descriptor, count, offset)

    for at, change in enumerate(changes):
        path.write_bytes(b"0123456789")
        with monkeypatch.context() as patched:
            patched.setattr(reading, "os", Meddled(change))
            assert settled(path) is None
            if at < 3:  # another length shows whatever the clock says
                path.write_bytes(b"0123456789")
                assert read_settled(str(path), ReadRules(), math.inf) is None


def test_one_look_reads_regular_files_within_bounds_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices, pipes, folders, empty files and files beyond max_bytes wait for the closer look; links to the rules."""
    (tmp_path / "empty").touch()
    (tmp_path / "ten").write_bytes(bytes(10))
    (tmp_path / "link").symlink_to("ten")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "empty", tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        assert settled(other) is None
    assert settled(tmp_path / "ten", ReadRules(max_bytes=9)) is None
    assert settled(tmp_path / "ten", ReadRules(max_bytes=10)) == bytes(10)
    assert settled(tmp_path / "link") == bytes(10)
    with monkeypatch.context() as patched:  # a device with an end, as disks have
        patched.setattr(os, "lseek", lambda *_: 10)
        patched.setattr(os, "pread", lambda *_: bytes(10))
        patched.setattr(os, "fstat", lambda _: os.stat_result((0o20666, 0, 0, 1, 0, 0, 10, 0, 0, 0)))
        assert settled(Path("/dev/zero")) is None
    with pytest.raises(OSError, match="symbolic link"):
        settled(tmp_path / "link", ReadRules(follow_symlinks=False))


def test_a_source_of_old_files_takes_one_look_and_of_new_ones_a_closer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files read alike, whichever they are; a bad one among them is its own error."""
    import aiofeed.sources.files as module

    paths = [tmp_path / str(number) for number in range(4)]
    for path in paths[:3]:
        path.write_bytes(path.name.encode())
    os.mkfifo(paths[3])
    closer: list[str] = []
    monkeypatch.setattr(module, "read_file", lambda path, rules: closer.append(path) or read_file(path, rules))
    for old in (False, True):
        closer.clear()
        monkeypatch.setattr(reading, "SETTLED_S", -3600.0 if old else 3600.0)
        found = Files(paths).read_now(range(4))
        assert found[:3] == [b"0", b"1", b"2"]
        assert isinstance(found[3], OSError)
        assert closer == [str(path) for path in (paths[3:] if old else paths)]


# --- what can be read, but is no picture


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM"])
@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_a_truncated_image_is_a_decode_error(tmp_path: Path, kind: str, keep: float) -> None:
    """Whatever the format: a picture of which a part is missing is none."""
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("this Pillow is built without WebP")
    data = noisy(kind)
    (tmp_path / "cut").write_bytes(data[: int(len(data) * keep)])
    error = error_of(tmp_path / "cut")
    assert isinstance(error, DecodeError)
    assert isinstance(error.__cause__, (OSError, ValueError))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_pillows_own_switch_for_truncated_images_is_obeyed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the program has set LOAD_TRUNCATED_IMAGES, truncated pictures are what Pillow makes of them, said once."""
    from aiofeed.decoders import pillow

    data = noisy(kind)
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    pillow._warn_about_truncated_images.cache_clear()
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with caplog.at_level(logging.WARNING, logger="aiofeed"):
        found = fed(tmp_path / "cut", DecodeImage((60, 80), scaled=False))
        fed(tmp_path / "cut")
    assert np.array_equal(found, np.asarray(Image.open(tmp_path / "cut").convert("RGB")))
    assert [record.message for record in caplog.records if "LOAD_TRUNCATED_IMAGES" in record.message] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no bytes: the file is empty"),
        (b"<html>not found</html>", "Pillow cannot identify this image"),
        (bytes(5000), "Pillow cannot identify this image"),
        (b"\xff\xd8\xff\xe0", "broken image"),
        (b"P6 0 5 255\n", "its header gives no pixels"),
        (b"P6 100000 100000 255\n", "more than max_pixels=178956970 allows"),
        (b"PK\x03\x04" + bytes(100), "Pillow cannot identify this image"),
    ],
)
def test_what_is_no_image_is_a_decode_error(tmp_path: Path, data: bytes, message: str) -> None:
    """Nothing, a web page, zeros, a bare header, no pixels, too many, an archive."""
    (tmp_path / "bad.jpg").write_bytes(data)
    error = error_of(tmp_path / "bad.jpg")
    assert isinstance(error, DecodeError)
    assert message in str(error)


def test_flipped_bits_are_noticed_where_the_format_can(tmp_path: Path) -> None:
    """A PNG and a lossless WebP notice a flipped bit in their pixels; it is a DecodeError."""
    data = bytearray(noisy("PNG"))
    data[len(data) // 2] ^= 4
    (tmp_path / "flipped.png").write_bytes(data)
    assert isinstance(error_of(tmp_path / "flipped.png"), DecodeError)


# --- what claims more than it is


def grown_by(work: str) -> int:
    """Peak memory, in bytes, that ``work`` adds to a process that has decoded a small picture already."""
    code = (
        "import io, resource, sys, zlib, struct\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import numpy as np\n"
        "from PIL import Image\n"
        "from aiofeed.decoders import DecodeImage\n"
        "def decode(data, **options):\n"
        "    decoder = DecodeImage(8, **options)\n"
        "    decoder.decode_into(data, np.empty((8, 8, 3), np.uint8))\n"
        "def refused(data, **options):\n"
        "    try:\n"
        "        decode(data, **options)\n"
        "    except (OSError, ValueError) as error:\n"
        "        return str(error)\n"
        "    raise AssertionError('decoded')\n"
        "def chunk(name, payload):\n"
        "    return struct.pack('>I', len(payload)) + name + payload + struct.pack('>I', zlib.crc32(name + payload))\n"
        "small = io.BytesIO()\n"
        "Image.new('RGB', (9, 9)).save(small, 'PNG')\n"
        "small = small.getvalue()\n"
        "decode(small)\n"
        "Image.init()\n"
        "def peak():\n"
        "    if sys.platform == 'linux':  # ru_maxrss begins with that of who started it\n"
        "        return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) * 1024\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)\n"
        f"{work}\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


BOMBS = {
    "pixels": (
        "data = b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 60000, 60000, 8, 2, 0, 0, 0))\n"
        "data += chunk(b'IDAT', zlib.compress(bytes(1000))) + chunk(b'IEND', b'')\n"
        "before = peak()\n"
        "assert 'max_pixels' in refused(data)"
    ),
    "zTXt": (
        "text = chunk(b'zTXt', b'a\\0\\0' + zlib.compress(bytes(200 << 20), 9))\n"
        "data = small[:33] + text + small[33:]\n"
        "del text\n"
        "before = peak()\n"
        "assert 'too large' in refused(data)"
    ),
    "many zTXt": (
        "text = chunk(b'zTXt', b'a\\0\\0' + zlib.compress(bytes(1 << 20), 9)) * 1000\n"
        "data = small[:33] + text + small[33:]\n"
        "before = peak()\n"
        "assert 'Too much memory' in refused(data)"
    ),
    "iTXt": (
        "text = chunk(b'iTXt', b'a\\0\\1\\0\\0\\0' + zlib.compress(bytes(200 << 20), 9))\n"
        "data = small[:33] + text + small[33:]\n"
        "del text\n"
        "before = peak()\n"
        "assert 'too large' in refused(data)"
    ),
    "iCCP": (
        "profile = chunk(b'iCCP', b'a\\0\\0' + zlib.compress(bytes(200 << 20), 9))\n"
        "data = small[:33] + profile + small[33:]\n"
        "before = peak()\n"
        "assert 'too large' in refused(data)"
    ),
    "TIFF tags": (
        "count = 20000\n"
        "entries = b''.join(struct.pack('<HHII', tag, 7, count * 12, 8) for tag in range(40000, 40000 + count))\n"
        "data = b'II*\\0' + struct.pack('<IH', 8, count) + entries + bytes(4)\n"
        "before = peak()\n"
        "assert 'the tags of this TIFF claim' in refused(data)"
    ),
    "EXIF tags": (
        "count = 20000\n"
        "entries = b''.join(struct.pack('<HHII', tag, 7, count * 12, 8) for tag in range(40000, 40000 + count))\n"
        "exif = b'II*\\0' + struct.pack('<IH', 8, count) + entries + bytes(4)\n"
        "before = peak()\n"
        "decode(small[:33] + chunk(b'eXIf', exif) + small[33:])"
    ),
    "TIFF strips": (
        "tags = [(256, 8), (257, 8), (258, 8), (259, 1), (262, 1)]\n"
        "entries = b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags)\n"
        "count = 4 << 20\n"
        "entries += struct.pack('<HHII', 273, 3, count, 8 + 2 + 7 * 12 + 4) + struct.pack('<HHII', 278, 4, 1, 1)\n"
        "data = b'II*\\0' + struct.pack('<IH', 8, 7) + entries + bytes(4) + bytes(2 * count)\n"
        "before = peak()\n"
        "assert 'strips' in refused(data)"
    ),
    "TIFF tile": (
        "tags = [(256, 8), (257, 8), (258, 8), (259, 5), (262, 1), (277, 1), (322, 30000), (323, 30000)]\n"
        "entries = b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags)\n"
        "entries += struct.pack('<HHII', 324, 4, 1, 8) + struct.pack('<HHII', 325, 4, 1, 100)\n"
        "data = b'II*\\0' + struct.pack('<IH', 8, 10) + entries + bytes(4)\n"
        "before = peak()\n"
        "assert 'tiles of 30000 x 30000' in refused(data)"
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_file_claims_takes_no_memory(name: str) -> None:
    """Pixels, compressed text and profiles, tags that share their bytes, strips, tiles: refused or passed over."""
    assert grown_by(BOMBS[name]) < 160 << 20  # Pillow itself allows a PNG 64 MiB of text


def test_a_progressive_jpeg_of_thousands_of_scans_is_refused(tmp_path: Path) -> None:
    """Ten bytes are one more pass over all pixels: what would take hours is refused by its number of scans."""
    data = encoded("JPEG", (4000, 4000), progressive=True)
    start = data.rindex(b"\xff\xda")
    scan = data[start : data.rindex(b"\xff\xd9")]
    assert len(scan) < 100_000
    (tmp_path / "scans.jpg").write_bytes(data[:start] + scan * 300 + b"\xff\xd9")
    error = error_of(tmp_path / "scans.jpg")
    assert isinstance(error, DecodeError)
    assert "scans" in str(error)
    (tmp_path / "usual.jpg").write_bytes(data)
    assert (abs(fed(tmp_path / "usual.jpg").astype(int) - (200, 60, 30)) < 6).all()


def long_comment(size: int) -> bytes:
    gif = encoded("GIF")
    start = 13 + (3 << (gif[10] & 7) + 1)
    return gif[:start] + b"!\xfe" + (b"\xff" + b"x" * 255) * (size >> 8) + b"\0" + gif[start:]


def long_exif(size: int, fill: bytes = b"") -> bytes:
    jpeg = encoded("JPEG", quality=95)
    segment = b"\xff\xe1\xff\xffExif\0\0" + b"x" * (65533 - 6)
    return jpeg[:2] + (fill + segment) * (size >> 16) + jpeg[2:]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [(long_comment, (64 << 20,)), (long_exif, (160 << 20,)), (long_exif, (160 << 20, b"\xff"))],
    ids=["GIF", "JPEG", "JPEG with fill bytes"],
)
def test_metadata_that_would_be_copied_for_minutes_is_refused(
    tmp_path: Path, make: Callable[..., bytes], arguments: tuple[Any, ...]
) -> None:
    """Pillow joins EXIF segments and comment blocks one by one; too many in front of the pixels are refused."""
    (tmp_path / "long").write_bytes(make(*arguments))
    error = error_of(tmp_path / "long")
    assert isinstance(error, DecodeError)
    assert "MiB of metadata before its pixels" in str(error)


@pytest.mark.parametrize(
    "make",
    [lambda: long_comment(1 << 20), lambda: long_exif(2 << 20), lambda: noisy("JPEG") + bytes(40 << 20)],
    ids=["GIF", "JPEG", "tail"],
)
def test_other_metadata_and_long_files_are_not(tmp_path: Path, make: Callable[[], bytes]) -> None:
    """A megabyte of it, or a long tail, is no reason to refuse a picture."""
    (tmp_path / "long").write_bytes(make())
    assert fed(tmp_path / "long").shape == (8, 8, 3)


# --- what is odd, but a picture


@pytest.mark.parametrize(
    "data",
    [
        png_with(chunk(b"tEXt", b"Comment\0" + b"x" * (8 << 20))),
        png_with(chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(500_000)))),
        png_with(chunk(b"eXIf", b"II*\0" + b"\xff" * 60)),
        png_with(chunk(b"acTL", bytes(8))),
        encoded("PNG", save_all=True, append_images=[Image.new("RGB", (60, 40), "blue")]),
        encoded("GIF", save_all=True, append_images=[Image.new("RGB", (60, 40), "blue")], comment=b"x" * 60_000),
        encoded("TIFF", save_all=True, append_images=[Image.new("RGB", (60, 40), "blue")]),
        encoded("TIFF") + bytes(5),
        encoded("JPEG", icc_profile=bytes(300_000), quality=95),
        encoded("JPEG", quality=95) + b"\xff" * 70_000,
        encoded("JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff", quality=95),
        encoded("WEBP", lossless=True, icc_profile=bytes(300_000)) if features.check("webp") else encoded("PNG"),
    ],
    ids=[
        "text",
        "profile",
        "exif",
        "acTL",
        "APNG",
        "GIF",
        "pages",
        "tail",
        "icc",
        "jpeg tail",
        "jpeg exif",
        "webp icc",
    ],
)
def test_odd_files_are_their_first_picture(tmp_path: Path, data: bytes) -> None:
    """Giant text and profiles, absurd EXIF, further frames and pages, rubbish behind the end: the picture is sound."""
    (tmp_path / "odd").write_bytes(data)
    assert (abs(fed(tmp_path / "odd").astype(int) - (200, 60, 30)) <= 6).all()


def damaged_tiff() -> bytes:
    """A sound picture with three tags that make Pillow warn: twice too many values, and one past the end."""
    tags = [(256, 4, 1, 2), (257, 4, 1, 2), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 200)]
    tags += [(277, 3, 2, 1 | 1 << 16), (278, 4, 1, 2), (279, 4, 1, 4), (700, 1, 10**6, 100)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return (b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries).ljust(200, b"\0") + bytes([9, 9, 9, 9])


def test_pillow_says_nothing_about_damaged_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its warnings and log lines stay away, also where warnings are errors; those of other threads do not."""
    (tmp_path / "odd.tif").write_bytes(damaged_tiff())
    (tmp_path / "odd.png").write_bytes(png_with(chunk(b"acTL", bytes(8))))
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        for name in ("odd.tif", "odd.png"):
            fed(tmp_path / name)
        assert [str(each.message) for each in caught] == []
        assert [record for record in caplog.records if record.name.startswith("PIL")] == []
        with Image.open(tmp_path / "odd.tif"):  # somebody else's use of Pillow
            pass
        assert [each.category for each in caught] != []
        assert caught[0].filename.endswith("TiffImagePlugin.py")
        assert [record for record in caplog.records if record.name.startswith("PIL")] != []
