"""Bad files on a real file system, read through a feeder: each is an error that names the path."""

from __future__ import annotations

import errno
import io
import logging
import os
import socket
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, features

from aiofeed import DecodeImage, Feeder, Files, ImageFolder
from aiofeed.common.foreign_names import check_foreign_name
from aiofeed.errors import DecodeError, ReadError, SampleError
from aiofeed.kernel.sources import file_io
from aiofeed.kernel.sources.file_io import ReadRules, read_file
from tests.support.fork_server import ForkServer
from tests.support.rewriting import rewritten

resource: Any = pytest.importorskip("resource", reason="needs POSIX: FIFOs, links and peak memory")


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
    """The error that a feeder raises for a file between two good ones, after the batch of the first."""
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
    """The sample that a feeder makes of a file."""
    with Feeder(Files([path]), decode=decode or DecodeImage((8, 8)), batch_size=1) as feeder:
        [batch] = list(feeder)
    return batch[0].permute(1, 2, 0).numpy()


# --- files that cannot be read


@pytest.mark.parametrize("held", [False, True], ids=["no writer", "a writer"])
def test_a_fifo_is_a_read_error(tmp_path: Path, held: bool) -> None:
    """A FIFO is refused at once, with and without a writer."""
    os.mkfifo(tmp_path / "fifo.jpg")
    writer = os.open(tmp_path / "fifo.jpg", os.O_RDWR | os.O_NONBLOCK) if held else None
    try:
        error = error_of(tmp_path / "fifo.jpg")
    finally:
        if writer is not None:
            os.close(writer)
    assert isinstance(error, ReadError)
    assert "regular files, but this is a FIFO" in str(error)
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENXIO


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/urandom"])
def test_a_device_is_a_read_error(tmp_path: Path, device: str) -> None:
    """A device is not read, neither directly nor through a link."""
    if not os.path.exists(device):
        pytest.skip(f"needs {device}")
    (tmp_path / "link.jpg").symlink_to(device)
    error = error_of(tmp_path / "link.jpg")
    assert isinstance(error, ReadError)
    assert "this is a character device" in str(error)
    with pytest.raises(OSError, match="a character device"):
        read_file(device)


def test_a_socket_and_an_open_pipe_are_read_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket in the file system and a pipe in /dev/fd are refused, and the error says which."""
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        error = error_of(tmp_path / "socket")
        assert isinstance(error, ReadError)
        assert "this is a socket" in str(error)
        with pytest.raises(OSError, match="this is a socket"):
            read_file("socket", ReadRules(follow_symlinks=False))
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
def test_a_path_without_a_file_is_a_read_error(
    tmp_path: Path, make: Callable[[Path], None], kind: type[OSError]
) -> None:
    """The error of the system is the cause, for a directory, broken links and a missing file."""
    make(tmp_path / "bad.jpg")
    error = error_of(tmp_path / "bad.jpg")
    assert isinstance(error, ReadError)
    assert isinstance(error.__cause__, kind)


@pytest.mark.parametrize("root", [None, "."])
@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize(
    ("path", "kind"), [("./.", IsADirectoryError), ("./folder/", IsADirectoryError), ("./file/", NotADirectoryError)]
)
def test_a_path_with_a_separator_at_its_end_names_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: type[OSError], follow: bool, root: str | None
) -> None:
    """Reading it is an error of the system, whether links are followed or not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(kind):
        read_file(path, ReadRules(follow_symlinks=follow, root=root))


def test_no_permission_is_a_read_error(tmp_path: Path, fork_server: ForkServer) -> None:
    """A file without read permission raises PermissionError as the cause."""
    (tmp_path / "bad.jpg").write_bytes(encoded("JPEG"))
    (tmp_path / "bad.jpg").chmod(0)
    if os.geteuid() != 0:
        error: Any = error_of(tmp_path / "bad.jpg")
        assert isinstance(error, ReadError)
        assert isinstance(error.__cause__, PermissionError)
        return
    # The superuser may read every file, so a process of another user tries.
    tmp_path.chmod(0o755)
    code = (
        "import os\n"
        "from aiofeed import Feeder, Files, ReadError\n"
        f"folder = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
        "os.fchdir(folder)\n"
        "list(Feeder(Files(['bad.jpg']), decode=len, batch_size=1))\n"  # imports everything while it may
        "os.setresgid(65534, 65534, 65534)\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "try:\n"
        "    list(Feeder(Files(['bad.jpg']), decode=len, batch_size=1))\n"
        "except ReadError as error:\n"
        "    print(type(error.__cause__).__name__, error, flush=True)\n"
        "os._exit(0)"
    )
    done = fork_server.run(code)
    assert done.stdout.startswith("PermissionError cannot read 'bad.jpg'"), done


def test_a_giant_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The error for a sparse file of 100 GiB names size and limit, and no memory is allocated."""
    with open(tmp_path / "giant.jpg", "wb") as file:
        file.truncate(100 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = error_of(tmp_path / "giant.jpg")
    assert isinstance(error, ReadError)
    assert f"{100 << 30} bytes are more than max_bytes={1 << 30} allows; raise max_bytes" in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("over", [False, True])
def test_max_bytes_is_the_largest_size_that_is_read(tmp_path: Path, over: bool) -> None:
    """A file of max_bytes is read and a file of one more byte is refused, by Files and ImageFolder."""
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
def test_max_bytes_limits_files_of_unknown_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of /proc has the size 0; it is read up to its end or to max_bytes."""
    assert b"Name:" in read_file("/proc/self/status", ReadRules(max_bytes=100_000))
    with pytest.raises(OSError, match="more than max_bytes=100 allows"):
        read_file("/proc/self/status", ReadRules(max_bytes=100))


# --- files that change while they are read


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Call ``change`` between the first fstat of an open file and its read."""
    real = os.read

    class ChangingOs:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def read(self, descriptor: int, count: int) -> bytes:
            change()
            return real(descriptor, count)

    monkeypatch.setattr(file_io, "os", ChangingOs())


def test_a_file_that_changes_while_it_is_read_is_a_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncating, emptying, appending and overwriting during the read is a transient error."""
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
        os.utime(path, ns=(2, 2))  # so that one change keeps the time, and one keeps the size
        with monkeypatch.context() as patched:
            changing(patched, change)
            with pytest.raises(OSError, match="the file changed while it was read") as caught:
                read_file(str(path))
            assert caught.value.errno == errno.EBUSY
            assert caught.value.filename == str(path)
    path.write_bytes(whole)
    source = Files([path])
    with monkeypatch.context() as patched, Feeder(source, decode=DecodeImage(8), batch_size=1) as feeder:
        changing(patched, changes[0])
        with pytest.raises(ReadError, match="changed while it was read") as error:
            list(feeder)
    assert error.value.key == str(path)


@pytest.mark.parametrize("least", [0, 1000, 300_000])
def test_a_read_that_ends_before_the_file_is_a_read_error(
    least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer bytes than the file has are a transient error, also if its size and times stay; so does a file server."""
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(1_000_000))
    real = os.read
    reads: list[int] = []

    class EndingOs:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def read(self, descriptor: int, count: int) -> bytes:
            reads.append(count)
            return real(descriptor, least) if len(reads) == 1 else b""

    monkeypatch.setattr(file_io, "os", EndingOs())
    with pytest.raises(OSError, match=f"1000000 bytes, {least} were read") as caught:
        read_file(str(path))
    assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, str(path))
    reads.clear()
    with Feeder(Files([path]), decode=len, batch_size=1, collate_fn=list) as feeder, pytest.raises(ReadError) as error:
        list(feeder)
    assert error.value.key == str(path)


def test_a_file_that_is_replaced_or_removed_while_it_is_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing or removing the path does not affect the opened file."""
    path, other = tmp_path / "replaced.jpg", tmp_path / "other.jpg"
    for change in (lambda: os.replace(other, path), lambda: path.unlink()):
        path.write_bytes(b"the first")
        other.write_bytes(b"the second")
        with monkeypatch.context() as patched:
            done: list[object] = []
            changing(patched, lambda change=change, done=done: done or done.append(change()))  # type: ignore[misc]
            assert read_file(str(path)) == b"the first"


def test_files_under_a_writer_are_consistent_or_errors(tmp_path: Path) -> None:
    """While a writer rewrites a file, a read gives bytes of one version, or an error."""
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
                # A file of a paused writer looks like a short file. The two versions are never mixed.
                assert len(set(data)) <= 1


# --- files that are no pictures


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM"])
@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_a_truncated_image_is_a_decode_error(tmp_path: Path, kind: str, keep: float) -> None:
    """In every format, a picture with a missing part is an error."""
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("this Pillow is built without WebP")
    data = noisy(kind)
    (tmp_path / "cut").write_bytes(data[: int(len(data) * keep)])
    error = error_of(tmp_path / "cut")
    assert isinstance(error, DecodeError)
    assert isinstance(error.__cause__, (OSError, ValueError))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_load_truncated_images_of_pillow_is_respected(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With LOAD_TRUNCATED_IMAGES, truncated pictures equal Pillow's, and one log line says so."""
    from aiofeed.kernel.decoders import pillow

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
def test_a_file_that_is_no_image_is_a_decode_error(tmp_path: Path, data: bytes, message: str) -> None:
    """The error describes the problem."""
    (tmp_path / "bad.jpg").write_bytes(data)
    error = error_of(tmp_path / "bad.jpg")
    assert isinstance(error, DecodeError)
    assert message in str(error)


def test_a_flipped_bit_in_a_png_is_a_decode_error(tmp_path: Path) -> None:
    """A PNG has a checksum over its pixels."""
    data = bytearray(noisy("PNG"))
    data[len(data) // 2] ^= 4
    (tmp_path / "flipped.png").write_bytes(data)
    assert isinstance(error_of(tmp_path / "flipped.png"), DecodeError)


# --- files with false claims


GROWN_BY = """
import io, resource, struct, sys, zlib
import numpy as np
from PIL import Image
from aiofeed.kernel.decoders.image import DecodeImage
def decode(data, **options):
    decoder = DecodeImage(8, **options)
    decoder.decode_into(data, np.empty((8, 8, 3), np.uint8))
def refused(data, **options):
    try:
        decode(data, **options)
    except (OSError, ValueError) as error:
        return str(error)
    raise AssertionError("decoded")
def chunk(name, payload):
    return struct.pack(">I", len(payload)) + name + payload + struct.pack(">I", zlib.crc32(name + payload))
small = io.BytesIO()
Image.new("RGB", (9, 9)).save(small, "PNG")
small = small.getvalue()
decode(small)
Image.init()
def peak():
    if sys.platform == "linux":  # ru_maxrss includes the peak of the process that started this one
        return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
{work}
print(peak() - before)
"""
"""Prints the peak memory in bytes that ``work`` adds to a process that has decoded a small picture."""

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
def test_false_claims_allocate_no_memory(name: str, fork_server: ForkServer) -> None:
    """Pixels, compressed text and profiles, tags that share bytes, strips and tiles are refused or ignored."""
    done = fork_server.run(GROWN_BY.replace("{work}", BOMBS[name]))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 160 << 20  # Pillow itself allows a PNG 64 MiB of text


def test_a_progressive_jpeg_of_thousands_of_scans_is_refused(tmp_path: Path) -> None:
    """A progressive JPEG with hundreds of scans would take hours; ten bytes per scan are enough."""
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
    """Too much metadata before the pixels is refused: Pillow joins its blocks one by one, in quadratic time."""
    (tmp_path / "long").write_bytes(make(*arguments))
    error = error_of(tmp_path / "long")
    assert isinstance(error, DecodeError)
    assert "MiB of metadata before its pixels" in str(error)


@pytest.mark.parametrize(
    "make",
    [lambda: long_comment(1 << 20), lambda: long_exif(2 << 20), lambda: noisy("JPEG") + bytes(40 << 20)],
    ids=["GIF", "JPEG", "tail"],
)
def test_some_metadata_and_a_long_tail_are_allowed(tmp_path: Path, make: Callable[[], bytes]) -> None:
    """A picture with a megabyte of metadata or a long tail is decoded."""
    (tmp_path / "long").write_bytes(make())
    assert fed(tmp_path / "long").shape == (8, 8, 3)


# --- odd files that are pictures


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
    """Large texts and profiles, wrong EXIF, further frames and pages, and a tail do not affect the first picture."""
    (tmp_path / "odd").write_bytes(data)
    assert (abs(fed(tmp_path / "odd").astype(int) - (200, 60, 30)) <= 6).all()


def damaged_tiff() -> bytes:
    """A good picture with three tags that make Pillow warn: two with too many values, one past the end."""
    tags = [(256, 4, 1, 2), (257, 4, 1, 2), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 200)]
    tags += [(277, 3, 2, 1 | 1 << 16), (278, 4, 1, 2), (279, 4, 1, 4), (700, 1, 10**6, 100)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return (b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries).ljust(200, b"\0") + bytes([9, 9, 9, 9])


def test_pillow_logs_nothing_about_damaged_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pillow's warnings and log lines are suppressed while aiofeed decodes, and only then."""
    (tmp_path / "odd.tif").write_bytes(damaged_tiff())
    (tmp_path / "odd.png").write_bytes(png_with(chunk(b"acTL", bytes(8))))
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        for name in ("odd.tif", "odd.png"):
            fed(tmp_path / name)
        assert [str(each.message) for each in caught] == []
        assert [record for record in caplog.records if record.name.startswith("PIL")] == []
        with Image.open(tmp_path / "odd.tif"):  # direct use of Pillow
            pass
        assert [each.category for each in caught] != []
        assert caught[0].filename.endswith("TiffImagePlugin.py")
        assert [record for record in caplog.records if record.name.startswith("PIL")] != []


@pytest.mark.parametrize("name", ["a.tar", "b/c..d.tar", "...", "é.tar", "\udcff.tar", "100%.tar", ".hidden"])
@pytest.mark.parametrize("base", ["/data", "http://host/data"])
def test_a_foreign_name_below_the_folder_is_returned_as_it_is(name: str, base: str) -> None:
    """A name that stays in the folder of the list is not changed."""
    assert check_foreign_name("list.json", name, base) == name


@pytest.mark.parametrize("name", ["%2Fdata%2Fa.jpg", "x%00y", "%2e%2e/a", "a/%2E./b"])
def test_a_foreign_name_is_unquoted_in_urls_only(name: str) -> None:
    """Files may have such names: only those of URLs are unquoted."""
    assert check_foreign_name("list.json", name, "data") == name
    with pytest.raises(ValueError, match=r"^list\.json: it names the file "):
        check_foreign_name("list.json", name, "file:///data")


@pytest.mark.parametrize(
    "name",
    [
        *("", "/etc/passwd", "..", "../a", "a/../../b", "a/..", "%2e%2e/a", "%2Fetc/passwd", "a/%2E./b"),
        *("file:///etc/passwd", "http://host/a", "a\0b", "a%00b", "\ud800", None, 1, ["a"], b"a"),
    ],
)
def test_a_foreign_name_that_leads_elsewhere_is_an_error_with_the_list(name: object) -> None:
    """Absolute names, those with "..", quoted or not, and values that are no names are refused."""
    with pytest.raises(ValueError, match=r"^list\.json: it names the file .*relative paths"):
        check_foreign_name("list.json", name, "http://host/data")
