"""What a user does on a platform, one function per feature; a program that runs all in a process that looks like it."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aiofeed
from tests.support.shard_files import members_of, numbered, write_tar, write_zip
from tests.support.simulated_device import SimulatedDevice
from tests.support.token_files import write_raw

BATCH = 8


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """The numbers 0 to 39 as tensors."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index)


class SlowNumbers:
    """A source whose reads take a minute, or until they are cancelled."""

    def __len__(self) -> int:
        return 40

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> bytes:
        await asyncio.sleep(60)
        return b""


def decode(data: bytes) -> torch.Tensor:
    """The length of the data."""
    return torch.tensor(len(data))


def files(folder: Path) -> aiofeed.Files:
    """40 files of different sizes."""
    paths = [folder / f"{number:02}.bin" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(number))
    return aiofeed.Files(paths)


def values(batches: Any) -> list[int]:
    """All numbers of some batches."""
    tensors = (batch if isinstance(batch, torch.Tensor) else batch[0] for batch in batches)
    return [int(value) for tensor in tensors for value in tensor.flatten()]


def check_all(feeder: aiofeed.Feeder[Any], expected: list[int], *, repeats: int = 1) -> None:
    """Each number comes exactly once per epoch, in another order; a resume in the middle of an epoch gives the rest."""
    with feeder:
        first = values(feeder)
        assert sorted(first) == sorted(expected * repeats), first
        state = feeder.state_dict()
        second = values(feeder)
        assert sorted(second) == sorted(first)
        assert second != first
        iterator = iter(feeder)
        feeder.load_state_dict(state)
        iterator = iter(feeder)
        begun = values([next(iterator)])
        middle = feeder.state_dict()
        iterator.close()
        feeder.load_state_dict(middle)
        assert begun + values(feeder) == second


def imports(folder: Path) -> None:
    """Every public name and module can be imported, but for the one behind DiskCache and those that Python runs."""
    for name in aiofeed.__all__:
        getattr(aiofeed, name)
    for module in pkgutil.walk_packages(aiofeed.__path__, "aiofeed."):
        windows = sys.argv[1] == "win32" and module.name == "aiofeed.cache.disk_format"
        name = module.name.rpartition(".")[2]
        if not (windows or "_native" in name or name in ("__main__", "sitecustomize")):
            importlib.import_module(module.name)


def image_folder(folder: Path) -> None:
    """Images of a folder, decoded and cached in host memory."""
    from PIL import Image

    for name in ("ant", "bee"):
        (folder / name).mkdir()
        for number in range(12):
            Image.new("RGB", (40, 30), (number, number, number)).save(folder / name / f"{number}.png")
    source = aiofeed.ImageFolder(folder)
    with aiofeed.Feeder(source, decode=aiofeed.DecodeImage(16), batch_size=BATCH, shuffle=True, cache="host") as feeder:
        for _ in range(2):
            batches = list(feeder)
            assert sum(len(labels) for _, labels in batches) == 24
            assert batches[0][0].shape == (BATCH, 3, 16, 16)


def file_source(folder: Path) -> None:
    """Files, shuffled and resumed."""
    check_all(aiofeed.Feeder(files(folder), decode=decode, batch_size=BATCH, shuffle=True), list(range(40)))


def files_without_links(folder: Path) -> None:
    """Files whose paths must not be links."""
    files(folder)
    names = sorted(path.name for path in folder.iterdir())
    source = aiofeed.Files(names, root=folder, follow_symlinks=False)
    check_all(aiofeed.Feeder(source, decode=decode, batch_size=BATCH, shuffle=True), list(range(40)))


def tensors(folder: Path) -> None:
    """Tensors in memory."""
    feeder = aiofeed.Feeder(aiofeed.Tensors(torch.arange(40)), batch_size=BATCH, shuffle=True)
    check_all(feeder, list(range(40)))


def dataset(folder: Path) -> None:
    """A Dataset in a thread."""
    check_all(aiofeed.Feeder(Numbers(), batch_size=BATCH, shuffle=True), list(range(40)), repeats=4)


def tokens(folder: Path) -> None:
    """Windows of tokens from a mapped file."""
    path = write_raw(folder / "tokens.bin", np.arange(160))
    source = aiofeed.Tokens(path, block=4, dtype="uint16", targets=False)
    check_all(aiofeed.Feeder(source, batch_size=BATCH, shuffle=True), list(range(160)))


def shards(folder: Path) -> None:
    """Samples in tar and zip files."""
    samples = numbered(0, 40)
    sizes = [len(each["jpg"]) for each in samples.values()]
    write_tar(folder / "a.tar", members_of(samples))
    write_zip(folder / "a.zip", [(f"{key}.jpg", each["jpg"]) for key, each in samples.items()])
    for source in (aiofeed.TarShards(folder / "a.tar", "jpg"), aiofeed.ZipShards(folder / "a.zip", "jpg")):
        check_all(aiofeed.Feeder(source, decode=decode, batch_size=BATCH, shuffle=True), sizes)


def encoded_cache(folder: Path) -> None:
    """Encoded samples in a file."""
    cache = aiofeed.EncodedCache(folder / "encoded.cache", 1 << 20)
    feeder = aiofeed.Feeder(files(folder), decode=decode, batch_size=BATCH, shuffle=True, cache=cache)
    check_all(feeder, list(range(40)))


def disk_cache(folder: Path) -> None:
    """Decoded samples in a file."""
    cache = aiofeed.DiskCache(folder / "decoded.cache")
    for _ in range(2):
        feeder = aiofeed.Feeder(Numbers(), batch_size=BATCH, shuffle=True, cache=cache)
        check_all(feeder, list(range(40)), repeats=4)
    assert cache.verify() == ()


def async_for(folder: Path) -> None:
    """An epoch in the caller's event loop."""

    async def run() -> list[int]:
        with aiofeed.Feeder(files(folder), decode=decode, batch_size=BATCH) as feeder:
            return values([batch async for batch in feeder])

    assert asyncio.run(run()) == list(range(40))


def ctrl_c(folder: Path) -> None:
    """Ctrl-C in ``next``, which waits for a slow read, ends the wait; the feeder closes."""
    import _thread

    with aiofeed.Feeder(SlowNumbers(), decode=decode, batch_size=BATCH) as feeder:
        timer = threading.Timer(0.2, _thread.interrupt_main)
        timer.start()
        begun = time.monotonic()
        try:
            next(iter(feeder))
        except KeyboardInterrupt:
            pass
        assert time.monotonic() - begun < 20
        timer.join()


def a_device(folder: Path) -> None:
    """Copies from pinned memory, by a thread of their own."""
    feeder = aiofeed.Feeder(Numbers(), batch_size=BATCH, shuffle=True, device=SimulatedDevice())
    check_all(feeder, list(range(40)), repeats=4)


def reports(folder: Path) -> None:
    """The report of the machine, its figures and the folder of listings."""
    from aiofeed.common.cache_folder import cache_folder
    from aiofeed.kernel.runtime import machine

    assert "torch" in str(aiofeed.device_report())
    assert machine.cpus() >= 1
    assert machine.free_memory() > 0
    assert machine.memory_limit() is machine.cpu_quota() is None
    assert cache_folder().is_absolute()


def process_engine(folder: Path) -> None:
    """Worker processes."""
    with aiofeed.Feeder(files(folder), decode=len, batch_size=BATCH, engine="process:1") as feeder:
        assert values(feeder) == list(range(40))


def serve(folder: Path) -> None:
    """A feeder and tensors for another process."""
    code = (
        "import sys, aiofeed; print([int(value) for batch in aiofeed.attach(sys.argv[1]) for value in batch[:, 0]] + "
        "aiofeed.processes.attach_tensors(sys.argv[2]).tolist())"
    )
    with (
        aiofeed.Feeder(Numbers(), batch_size=BATCH) as feeder,
        aiofeed.serve(feeder, folder / "feed.sock") as server,
        aiofeed.processes.share(torch.arange(40, 45), folder / "tensors.sock") as shared,
    ):
        command = [sys.executable, "-c", code, server.address, shared.address]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == list(range(45))


def attach(folder: Path) -> None:
    """A client without a server."""
    try:
        aiofeed.attach(folder / "feed.sock")
    except aiofeed.FeedError as error:
        if "no server listens" not in str(error):
            raise


def share(folder: Path) -> None:
    """Tensors for other processes."""
    with aiofeed.processes.share(torch.arange(5), folder / "tensors.sock") as shared:
        assert shared.tensors.tolist() == list(range(5))


def attach_tensors(folder: Path) -> None:
    """A client without a process that shares tensors."""
    try:
        aiofeed.processes.attach_tensors(folder / "tensors.sock", timeout_s=0)
    except aiofeed.FeedError as error:
        if "no process shares tensors" not in str(error):
            raise


def loader(folder: Path) -> None:
    """DataLoader in this process, and with a thread."""
    assert values(aiofeed.DataLoader(Numbers(), BATCH))[::4] == list(range(40))
    assert values(aiofeed.DataLoader(Numbers(), BATCH, num_workers=2, threads=1))[::4] == list(range(40))


def loader_workers(folder: Path) -> None:
    """DataLoader with worker processes."""
    batches = aiofeed.DataLoader(Numbers(), BATCH, num_workers=1, multiprocessing_context="spawn")
    assert values(batches)[::4] == list(range(40))


CASES = [
    imports, image_folder, file_source, files_without_links, tensors, dataset, tokens, shards, encoded_cache,
    disk_cache, async_for, ctrl_c, a_device, reports, process_engine, serve, attach, share, attach_tensors, loader,
    loader_workers,
]  # fmt: skip


def main() -> None:
    """Print the outcome of all cases as JSON: "" or the error; the second argument is a folder."""
    outcomes = {}
    # What works without POSIX is not run again without Linux.
    pure = (image_folder, files_without_links, tensors, dataset, shards, async_for, a_device, loader)
    for case in CASES:
        if sys.argv[1] == "darwin" and case in pure:
            continue
        folder = Path(sys.argv[2]) / case.__name__
        folder.mkdir()
        try:
            case(folder)
            outcomes[case.__name__] = ""
        except Exception as error:
            inner = traceback.format_exc() if not isinstance(error, ValueError | aiofeed.FeedError) else ""
            outcomes[case.__name__] = f"{type(error).__name__}: {error}{inner}{getattr(error, 'stderr', '')}"
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
