"""Tensors shared between processes: what arrives, who sees a write, who is refused, and that nothing is left behind."""

from __future__ import annotations

import array
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import aiofeed
from aiofeed.ipc import address
from aiofeed.ipc.cuda_ipc import CudaHandles, HandleError
from aiofeed.ipc.framing import frame
from aiofeed.ipc.peers import Peer
from aiofeed.ipc.schema import (
    ArrayNode,
    ContainerNode,
    DeviceMemoryHandle,
    NewSegment,
    PickledNode,
    encode,
)
from aiofeed.ipc.shared_memory import anonymous_memory
from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.runtime import machine
from aiofeed.serving.shared_tensors import api, client
from aiofeed.serving.shared_tensors.api import SharedTensors, attach_tensors, share
from aiofeed.serving.shared_tensors.offers import VERSION, Attach, Offer
from tests.support.dropping import python_calls_while_dropping
from tests.support.paths import ROOT, environment
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no Unix sockets that pass descriptors")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder with a short path, for sockets; the test must leave no socket in it."""
    tmp_path_factory.getbasetemp()  # pytest creates its folder at the first call, which must not be in this one
    with tempfile.TemporaryDirectory(prefix="af", dir="/tmp") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        monkeypatch.setenv("TMPDIR", made)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(made)
        left = [path.name for path in Path(made).rglob("*.tensors")]
    assert left == []


class Process:
    """A running `tensor_process.py`."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/support/tensor_process.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=environment(OMP_NUM_THREADS="1"),
        )

    def ready(self) -> Process:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    def execute(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Close its input; returns its exit status."""
        self.process.communicate()
        return self.process.returncode


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts processes, which are killed at the end of the test."""
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            each.kill()


# --- values -----------------------------------------------------------------------------------------------------

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every byte are the same; both in C order."""
    assert (type(one), one.dtype, one.shape, one.device) == (type(other), other.dtype, other.shape, other.device)
    assert one.is_contiguous()
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)] if one.numel() else [one, one]
    return torch.equal(*flat)


def test_every_dtype_is_shared() -> None:
    """Also those that NumPy lacks; all in one segment."""
    tensors = [torch.arange(0, 7).to(dtype) for dtype in DTYPES]
    with share(tensors, "dtypes") as shared:
        attached = attach_tensors("dtypes")
        assert all(map(same, attached, tensors))
        assert all(map(same, shared.tensors, tensors))
        assert shared.nbytes == sum(each.nbytes for each in tensors)
    assert all(map(same, attached, tensors))


@pytest.mark.parametrize(
    "shape", [(), (0,), (0, 3), (5, 0, 2), (1,), (2, 3, 4)], ids=lambda shape: "x".join(map(str, shape)) or "scalar"
)
def test_every_shape_is_shared(shape: tuple[int, ...]) -> None:
    """Also a tensor of 0 bytes."""
    tensor = torch.randn(shape)
    with share(tensor, "shape"):
        assert same(attach_tensors("shape"), tensor)


def test_containers_are_preserved_and_arrays_become_tensors() -> None:
    """A tensor, a list, a tuple, and a dict with keys of both types, in order."""
    x, y = torch.arange(3), np.arange(4.0)
    for structure in (x, [x, y], (x, y), {"b": x, "a": y, 7: x}):
        with share(structure, "structure") as shared:
            attached = attach_tensors(shared.address)
            assert type(attached) is type(structure)
            if isinstance(attached, dict):
                assert list(attached) == ["b", "a", 7]
            elif not isinstance(attached, torch.Tensor):
                assert same(attached[0], x)
                assert same(attached[1], torch.from_numpy(y))


def test_tensors_arrive_in_c_order() -> None:
    """Transposed, strided, expanded, conjugated, detached; read-only, reversed and big-endian arrays."""
    x = torch.randn(4, 6)
    frozen = np.arange(5)
    frozen.flags.writeable = False
    tensors = {
        "transposed": x.T,
        "strided": x[::2, 1:],
        "expanded": x[:1].expand(3, 6),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "computed": torch.nn.Parameter(torch.randn(3)) * 2,
        "frozen": frozen,
        "reversed": np.arange(5)[::-1],
        "big_endian": np.arange(5, dtype=">i4"),
    }
    with share(tensors, "memory"):
        attached = attach_tensors("memory")
    for name, found in attached.items():
        expected = tensors[name]
        if isinstance(expected, np.ndarray):
            expected = torch.from_numpy(np.ascontiguousarray(expected.astype(expected.dtype.newbyteorder("="))))
        assert not found.requires_grad
        assert torch.equal(found, expected.detach()), name
        assert found.is_contiguous()


def test_a_feeder_takes_attached_tensors() -> None:
    """Its batches equal those of the originals."""
    x, y = torch.randn(20, 3), torch.arange(20)
    with share((x, y), "feeder"), aiofeed.Feeder(TensorDataset(*attach_tensors("feeder")), batch_size=8) as feeder:
        batches = list(feeder)
    assert torch.equal(torch.cat([batch[0] for batch in batches]), x)
    assert torch.equal(torch.cat([batch[1] for batch in batches]), y)


# --- memory ----------------------------------------------------------------------------------------------------


def test_writes_are_private_unless_writable() -> None:
    """With writable=True all processes see them, except in pages that they have written themselves."""
    with share(torch.zeros(4), "writes") as shared:
        own, common, reader = (attach_tensors("writes", writable=each) for each in (False, True, False))
        own[0] = 1
        assert [each[0].item() for each in (shared.tensors, common, reader)] == [0, 0, 0]
        common[1] = 2
        assert [each[1].item() for each in (shared.tensors, reader, own)] == [2, 2, 0]
        shared.tensors[2] = 3
        assert [each[2].item() for each in (common, reader)] == [3, 3]


def test_torch_shared_memory_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors after share_memory_ stay there, all views in one segment, also if no memory is left."""
    x = torch.arange(12).share_memory_()
    monkeypatch.setattr(machine, "free_memory", lambda: 0)
    with share([x, x[4:6], x.view(3, 4)], "torch") as shared:
        attached = attach_tensors("torch", writable=True)
        attached[1][0] = -1
        assert x[4] == -1
        assert shared.tensors[0].data_ptr() == x.data_ptr()
        assert attached[2][1, 0] == -1
        del shared, attached


def test_some_torch_shared_memory_is_copied() -> None:
    """If it is not contiguous, or has more storages than a message has room for descriptors."""
    tensors = [torch.full((3,), number).share_memory_() for number in range(100)]
    matrix = torch.arange(6).view(2, 3).share_memory_()
    with share([*tensors, matrix.T], "many"):
        attached = attach_tensors("many")
    assert [int(each[2]) for each in attached[:100]] == list(range(100))
    assert torch.equal(attached[100], matrix.T)


def test_the_device_of_the_attached_tensors() -> None:
    """`device="cpu"` maps them; an unavailable device is refused by name."""
    with share(torch.arange(3), "device"):
        assert attach_tensors("device", "cpu").tolist() == [0, 1, 2]
        assert attach_tensors("device", torch.device("cpu")).tolist() == [0, 1, 2]
        with pytest.raises(ValueError, match="device='xla'"):
            attach_tensors("device", "xla")


# --- arguments --------------------------------------------------------------------------------------------------------


class Labelled(torch.Tensor):
    """A subclass of Tensor."""


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "number": (3, TypeError, "not int"),
    "list in list": ([torch.ones(1), [torch.ones(1)]], TypeError, r"tensors\[1\] is a list"),
    "text": ({"x": "text"}, TypeError, r"tensors\['x'\] is a str"),
    "none": ((None,), TypeError, r"tensors\[0\] is a NoneType"),
    "empty list": ([], ValueError, "an empty list"),
    "empty dict": ({}, ValueError, "an empty dict"),
    "key": ({(1, 2): torch.ones(1)}, TypeError, r"the key \(1, 2\)"),
    "surrogate": ({"\udcff": torch.ones(1)}, ValueError, "cannot be sent to another process"),
    "large key": ({1 << 80: torch.ones(1)}, ValueError, "cannot be sent to another process"),
    "texts": (np.array(["a"]), TypeError, "array of <U1"),
    "objects": (np.array([None]), TypeError, "array of object"),
    "masked": (np.ma.array([1, 2]), TypeError, "masked"),
    "meta": (torch.ones(1, device="meta"), TypeError, "no values"),
    "subclass": (torch.ones(1).as_subclass(Labelled), TypeError, r"a Labelled.*as_subclass"),
    "sparse": (torch.ones(2, 2).to_sparse(), TypeError, "layout torch.sparse_coo"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_be_shared_are_refused(name: str) -> None:
    """The message names the tensor, its type, and what to do."""
    tensors, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        share(tensors, "refused")


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_a_quantized_tensor_is_refused() -> None:
    """Its bytes are not its values."""
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="quantized"):
        share(quantized, "refused")


@pytest.mark.parametrize("address", ["", ".", "..", "a b", "ä", "x" * 65, "a\0b", "/a\0b"])
def test_invalid_addresses_are_refused(address: str) -> None:
    """By share and by attach_tensors."""
    with pytest.raises(ValueError, match="address="):
        share(torch.ones(1), address)
    with pytest.raises(ValueError, match="address="):
        attach_tensors(address)


def test_a_path_that_is_too_long_is_an_error_with_the_figures(folder: Path) -> None:
    """The paths of sockets are short."""
    with pytest.raises(ValueError, match=r"has \d+ bytes, and a socket's path at most \d+"):
        share(torch.ones(1), folder / ("x" * 120))


def test_arguments_of_the_wrong_type_are_refused() -> None:
    """By name."""
    for wrong in (3, None, b"name", [b"/x"]):
        with pytest.raises(TypeError, match="address="):
            share(torch.ones(1), wrong)  # type: ignore[arg-type]
    for timeout_s, kind in (("1", TypeError), (True, TypeError), (-1, ValueError), (float("nan"), ValueError)):
        with pytest.raises(kind, match="timeout_s="):
            attach_tensors("x", timeout_s=timeout_s)  # type: ignore[arg-type]


def test_too_little_memory_is_an_error_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is copied."""
    monkeypatch.setattr(machine, "free_memory", lambda: 10 << 20)
    with pytest.raises(FeedError, match=r"need 11\.0 MiB of shared memory.* has 10\.0 MiB left"):
        share(torch.empty(11 << 20, dtype=torch.uint8), "large")


def test_the_page_cache_counts_as_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container counts it as used, so that loading a data set from files would seem to have used it up."""
    for name, text in {
        "memory.max": "1000000",
        "memory.current": "900000",
        "memory.stat": "anon 1\ninactive_file 500000\nactive_file 7",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.free_memory() == 600_000


# --- addresses --------------------------------------------------------------------------------------------------------


def test_an_address_is_taken_until_it_is_closed() -> None:
    """A second share() is refused until then."""
    with share(torch.ones(1), "taken") as first:
        with pytest.raises(FeedError, match=r"shares tensors at .*taken\.tensors already .pid"):
            share(torch.zeros(1), "taken")
        assert attach_tensors("taken")[0] == 1
        first.close()
        with share(torch.zeros(1), "taken"):
            first.close()
            assert attach_tensors("taken")[0] == 0


def test_one_of_several_processes_replaces_a_dead_socket(folder: Path) -> None:
    """Of many that try at once; the others are refused."""
    path = folder / "dead"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    results: list[object] = []
    barrier = threading.Barrier(8)

    def take() -> None:
        barrier.wait()
        try:
            results.append(share(torch.ones(1), path))
        except FeedError as error:
            results.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [each for each in results if not isinstance(each, str)]
    assert sum("already" in each for each in results if isinstance(each, str)) == 7
    winner.close()  # type: ignore[attr-defined]
    assert not path.exists()


def test_attaching_to_an_unused_address_is_an_error(folder: Path) -> None:
    """After `timeout_s`; the message has the address and what to do."""
    with pytest.raises(
        FeedError, match=r"no process shares tensors at .*nobody\.tensors .*aiofeed\.processes\.share\("
    ):
        attach_tensors("nobody", timeout_s=0.05)


def test_attaching_waits_for_the_tensors() -> None:
    """Ranks start at the same time, and one of them loads the data."""
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(attach_tensors("later", timeout_s=20)))
    thread.start()
    with share(torch.arange(3), "later"):
        thread.join()
    assert found[0].tolist() == [0, 1, 2]


def test_files_and_folders_that_do_not_fit_are_refused(folder: Path) -> None:
    """They are left alone: a file, a missing folder, a folder that is open to others."""
    file = folder / "file"
    file.write_text("mine")
    with pytest.raises(FeedError, match="is not a socket"):
        share(torch.ones(1), file)
    assert file.read_text() == "mine"
    with pytest.raises(FeedError, match="No such file"):
        share(torch.ones(1), folder / "missing" / "x")
    with pytest.raises(FeedError, match="cannot be reached"):
        attach_tensors(file / "x", timeout_s=0)
    private = folder / f"aiofeed-{os.getuid()}"
    private.mkdir()
    private.chmod(0o755)
    with pytest.raises(FeedError, match="must be a folder of yours that is open to nobody else"):
        share(torch.ones(1), "name")


def test_another_user_is_refused_by_both_sides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the user id that the kernel reports."""
    with share(torch.ones(1), "user"):
        with monkeypatch.context() as patch:
            patch.setattr(address, "peer_of", lambda sock: Peer(os.getpid(), 12345))
            with pytest.raises(FeedError, match="runs as user 12345"):
                attach_tensors("user")
        with monkeypatch.context() as patch:
            here = threading.current_thread()
            uid_there = lambda: os.getuid() if threading.current_thread() is here else 12345  # noqa: E731
            patch.setattr(address, "peer_of", lambda sock: Peer(os.getpid(), uid_there()))
            with pytest.raises(FeedError, match="ended before it answered"):
                attach_tensors("user")
        assert attach_tensors("user")[0] == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become another user")
def test_a_process_of_another_user_gets_nothing(folder: Path) -> None:
    """The folder keeps it out; if somebody opens folder and socket, the server refuses it."""

    def try_it(path: str) -> str:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            os.seteuid(65534)
            try:
                sock.connect(path)
                sock.sendall(frame(encode(Attach(VERSION))))
                return f"got {len(sock.recv(1000))}"
            except OSError as error:
                return type(error).__name__
            finally:
                os.seteuid(0)

    with share(torch.ones(1), "private") as shared:
        assert try_it(shared.address) == "PermissionError"
        folder.chmod(0o777)
        Path(shared.address).parent.chmod(0o777)
        assert try_it(shared.address) == "PermissionError"
        Path(shared.address).chmod(0o777)
        assert try_it(shared.address) in ("got 0", "ConnectionResetError", "BrokenPipeError")


# --- invalid messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 64, frame(b"invalid"), frame(encode(Attach(VERSION)), 3), frame(b"x" * 2000), frame(encode(3)), b"\1"],
    ids=["bytes", "payload", "descriptors", "long", "type", "incomplete"],
)
def test_an_invalid_request_closes_its_connection(data: bytes) -> None:
    """The server continues."""
    with share(torch.arange(3), "invalid") as shared:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(shared.address)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            assert sock.recv(1) == b""
        assert attach_tensors("invalid").tolist() == [0, 1, 2]


def test_another_protocol_version_is_refused() -> None:
    """The message has both versions."""
    with share(torch.ones(1), "version"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "VERSION", 99)
        with pytest.raises(FeedError, match=r"version \d, .*version 99"):
            attach_tensors("version")


def place(**changes: Any) -> ArrayNode:
    return ArrayNode(**{"kind": "tensor", "segment": 0, "offset": 0, "shape": [4], "dtype": "<f4", **changes})


def offer(*places: Any, **changes: Any) -> Offer:
    tensors = ContainerNode(changes.pop("kind", "list"), list(places), changes.pop("keys", []))
    segments = [NewSegment(number, nbytes) for number, nbytes in enumerate(changes.pop("segments", [65536]))]
    return Offer(tensors, segments, changes.pop("handles", []), [])


HANDLE = DeviceMemoryHandle("GPU", b"", 16, 0, b"", 0, b"", False)
INVALID = {
    "beyond the end": offer(place(offset=65536)),
    "over the end": offer(place(offset=65532)),
    "before the start": offer(place(offset=-4)),
    "odd offset": offer(place(offset=2)),
    "another segment": offer(place(segment=1)),
    "negative segment": offer(place(segment=-1)),
    "negative size": offer(place(shape=[-4])),
    "overflow": offer(place(shape=[1 << 40, 1 << 40])),
    "empty and huge": offer(place(shape=[0, 1 << 47, 1 << 47])),
    "no dtype": offer(place(dtype="Tensor")),
    "attribute": offer(place(torch_dtype="__doc__")),
    "missing keys": offer(place(), kind="dict"),
    "pickle": offer(PickledNode(b"", [])),
    "segment too long": offer(place(), segments=[65537]),
    "segment of nothing": offer(place(), segments=[0]),
    "more segments": offer(place(), segments=[65536, 65536]),
    "device memory": offer(place(kind="device", offset=4, dtype="<u4", torch_dtype="float32"), handles=[HANDLE]),
    "no handle": offer(place(kind="device", dtype="<u4", torch_dtype="float32")),
    "no offer": 3,
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_offer_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside a segment is read or written."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(client, "connect", lambda path, kind, timeout_s: ours)
    descriptor = anonymous_memory(65536)
    socket.send_fds(theirs, [frame(encode(INVALID[name]), 1)], [descriptor])
    os.close(descriptor)
    with theirs, pytest.raises(FeedError, match="sent an invalid offer"):
        attach_tensors("invalid")


def test_attaching_to_a_silent_process_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process, for example."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(client, "connect", lambda path, kind, timeout_s: ours)
    monkeypatch.setattr(client, "_ANSWER_S", 0.05)
    with theirs, pytest.raises(FeedError, match=r"did not answer within 0\.05 s"):
        attach_tensors("silent", timeout_s=0)


def test_descriptors_of_an_invalid_request_are_closed() -> None:
    """The server does not run out of them."""
    with share(torch.ones(1), "flood") as shared:
        before = len(os.listdir("/dev/fd"))
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(shared.address)
                rights = array.array("i", [0] * 20)
                sock.sendmsg([b"\xff" * 20], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                sock.settimeout(10)
                try:
                    assert sock.recv(1) == b""
                except ConnectionResetError:
                    pass
        # The descriptors are closed right after the connection.
        until(lambda: len(os.listdir("/dev/fd")) == before)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_attached_tensors_outlive_close() -> None:
    """close is idempotent, and frees the address."""
    shared = share(torch.arange(5), "close")
    attached = attach_tensors("close")
    assert "close.tensors" in repr(shared)
    shared.close()
    shared.close()
    assert repr(shared).endswith("closed>")
    assert attached.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="closed"):
        _ = shared.tensors
    with pytest.raises(FeedError, match="no process"):
        attach_tensors("close", timeout_s=0)


def test_dropping_the_result_of_share_closes_it() -> None:
    """Thread, socket and descriptors are gone; tensors stay valid."""
    shared = share(torch.arange(5), "dropped")
    path, thread = Path(shared.address), shared._server.thread
    tensors = shared.tensors
    box: list[object] = [shared]
    del shared
    gc.collect()
    assert python_calls_while_dropping(box) == []
    assert thread.join(10)
    assert not path.exists()
    assert tensors.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_processes_that_are_killed(start: Callable[..., Process]) -> None:
    """The others keep the memory; the address of a killed process is free, although a fork of it lives."""
    shm = Path("/dev/shm")
    before = set(os.listdir(shm)) if shm.is_dir() else set()
    sharer, total = start("share", "killed", "fork"), sum(range(100_000))
    sharer.ready()
    attached = attach_tensors("killed", writable=True)
    one, other = start("attach", "killed"), start("attach", "killed")
    one.ready()
    other.ready()
    assert one.execute("add 2") == f"{total} [2.0, 2.0, 2.0]"
    assert other.execute("add 1") == f"{total} [3.0, 3.0, 3.0]"
    one.kill()
    assert other.execute("add 1") == f"{total} [4.0, 4.0, 4.0]"
    sharer.process.send_signal(signal.SIGKILL)
    sharer.process.wait()
    assert other.execute("add 1") == f"{total} [5.0, 5.0, 5.0]"
    assert attached["y"].tolist() == [5, 5, 5]
    with pytest.raises(FeedError, match="has ended"):
        attach_tensors("killed", timeout_s=0)
    with share(torch.ones(2), "killed"):
        assert attach_tensors("killed").tolist() == [1, 1]
    sharer.end()
    assert other.end() == 0
    # Files of other programs disappear in time.
    left = (set(os.listdir(shm)) if shm.is_dir() else set()) - before
    until(lambda: not left or not left & set(os.listdir(shm)))


@pytest.mark.slow
def test_interpreter_exit_removes_the_socket(start: Callable[..., Process]) -> None:
    """Without close()."""
    sharer = start("share", "exit").ready()
    [path] = Path(tempfile.gettempdir()).rglob("exit.tensors")
    assert sharer.end() == 0
    assert not path.exists()


# --- device memory ----------------------------------------------------------------------------------------------------


class FakeHandles(CudaHandles):
    """Simulated device memory: the storages that were put there; the allocation of a handle is their address.

    Args:
        no_open_from: Number of opened handles from which on opening fails.
        no_export_from: Number of exports from which on exporting fails.
    """

    def __init__(self, *, no_open_from: int = 1 << 30, no_export_from: int = 1 << 30) -> None:
        self._no_open_from, self._no_export_from = no_open_from, no_export_from
        self.forgotten: list[DeviceMemoryHandle] = []
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.synchronized = 0
        self.exported: list[DeviceMemoryHandle] = []
        self.opens: list[torch.device | None] = []
        self.no_export = self.no_open = False
        self.found: torch.device | None = torch.device("cpu")

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages

    def identity(self, tensor: torch.Tensor) -> str:
        return "GPU-7"

    def synchronize(self, tensor: torch.Tensor) -> None:
        self.synchronized += 1

    def export(self, tensor: torch.Tensor) -> DeviceMemoryHandle:
        if self.no_export or len(self.exported) >= self._no_export_from:
            raise HandleError("expandable segments")
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage
        number = storage.data_ptr().to_bytes(8, "little")
        self.exported.append(DeviceMemoryHandle("GPU-7", number, storage.nbytes(), 0, b"counter", 3, b"event", True))
        return self.exported[-1]

    def open(self, handle: DeviceMemoryHandle, wanted: torch.device | None) -> torch.UntypedStorage:
        self.opens.append(wanted)
        if self.no_open or len(self.opens) > self._no_open_from:
            self.forget(handle)
            raise HandleError("not visible")
        return self.storages[int.from_bytes(handle.allocation, "little")]

    def forget(self, handle: DeviceMemoryHandle) -> None:
        self.forgotten.append(handle)

    def find(self, identity: str) -> torch.device | None:
        assert identity == "GPU-7"
        return self.found


def on_both(handles: FakeHandles) -> dict[str, torch.Tensor]:
    """One tensor in host memory, and two views of one storage on the device."""
    block = handles.put(torch.arange(10.0))
    return {"host": torch.arange(3), "device": block, "part": block[4:8].view(2, 2)}


def share_through(handles: FakeHandles, tensors: Any, address: str) -> SharedTensors:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "CudaHandles", lambda: handles)
        return share(tensors, address)


def attach(handles: FakeHandles, device: object = None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "CudaHandles", lambda: handles)
        return attach_tensors("gpu", device, timeout_s=5)


def test_device_memory_is_opened_and_not_copied() -> None:
    """One handle per tensor and attachment; views keep their place in the storage."""
    handles = FakeHandles()
    tensors = on_both(handles)
    with share_through(handles, tensors, "gpu") as shared:
        assert handles.synchronized == 2
        assert shared.tensors["device"].data_ptr() == tensors["device"].data_ptr()
        for _ in range(2):
            attached = attach(handles)
            assert attached["part"].data_ptr() == tensors["part"].data_ptr()
            assert all(torch.equal(attached[name], tensors[name]) for name in tensors)
    assert len(handles.exported) == 4
    assert handles.opens == [None] * 4


@pytest.mark.parametrize("where", ["no_export", "no_open"])
def test_without_device_handles_each_process_gets_a_copy(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Through host memory, to which it is copied once; the log has the reason."""
    handles = FakeHandles()
    tensors = on_both(handles)
    setattr(handles, where, True)
    with share_through(handles, tensors, "gpu"):
        for _ in range(2):
            attached = attach(handles)
            assert attached["part"].data_ptr() != tensors["part"].data_ptr()
            assert all(torch.equal(attached[name], tensors[name]) for name in tensors)
        handles.found = None
        assert torch.equal(attach(handles)["device"], tensors["device"])
    assert {"no_export": "expandable segments", "no_open": "not visible"}[where] in caplog.text
    assert "own copy" in caplog.text or "copy of its own" in caplog.text
    assert "stay in host memory" in caplog.text


def test_device_tensors_can_be_attached_in_host_memory() -> None:
    """With `device="cpu"` nothing is exported."""
    handles = FakeHandles()
    tensors = on_both(handles)
    with share_through(handles, tensors, "gpu"):
        attached = attach(handles, "cpu")
    assert torch.equal(attached["part"], tensors["part"])
    assert handles.exported == handles.opens == []


@pytest.mark.parametrize("opened", [0, 1])
def test_exports_that_a_process_does_not_open_are_taken_back(opened: int) -> None:
    """Each once; opened ones are released with their tensors."""
    handles = FakeHandles(no_open_from=opened)
    tensors = [*on_both(handles).values(), handles.put(torch.ones(3))]
    with share_through(handles, tensors, "gpu"):
        attached = attach(handles)
    assert all(torch.equal(*pair) for pair in zip(attached, tensors, strict=True))
    assert len(handles.exported) == 3
    assert handles.forgotten == handles.exported[opened:]


def test_exports_are_taken_back_if_a_later_one_fails() -> None:
    """The process gets a copy of everything."""
    handles = FakeHandles(no_export_from=1)
    tensors = on_both(handles)
    with share_through(handles, tensors, "gpu"):
        attached = attach(handles)
    assert torch.equal(attached["part"], tensors["part"])
    assert len(handles.exported) == 1
    assert handles.forgotten == handles.exported
    assert handles.opens == []


def test_lazily_conjugated_views_have_their_values() -> None:
    """The bits in memory are what other processes get."""
    handles = FakeHandles()
    plain = handles.put(torch.tensor([1 + 2j, 3 - 4j]))
    with share_through(handles, [plain.conj(), plain.conj().imag, plain], "gpu"):
        attached = attach(handles)
    assert attached[0].tolist() == [1 - 2j, 3 + 4j]
    assert attached[1].tolist() == [-2, 4]
    assert attached[2].tolist() == [1 + 2j, 3 - 4j]


def test_too_little_host_memory_for_device_tensors_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that attaches, with the figures; the server continues."""
    handles = FakeHandles()
    with share_through(handles, on_both(handles), "gpu"):
        with monkeypatch.context() as patch:
            patch.setattr(machine, "free_memory", lambda: 0)
            with pytest.raises(FeedError, match=r"refused: FeedError: .* has 0 bytes left"):
                attach(handles, "cpu")
        assert attach(handles)["host"].tolist() == [0, 1, 2]
