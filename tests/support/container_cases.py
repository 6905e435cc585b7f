"""What a user does in a container: a program that prints the outcome and the log of each case as JSON."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import aiofeed
from aiofeed.kernel.runtime import machine
from tests.support.platform_cases import BATCH, Numbers, decode, values

MIB = 1 << 20


class Large(torch.utils.data.Dataset[torch.Tensor]):
    """Tensors of 35 MiB."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((35 * MIB,), index, dtype=torch.uint8)


def feeder(folder: Path, **options: Any) -> aiofeed.Feeder[Any]:
    """Batches of numbers 0 to 39, from files."""
    return aiofeed.Feeder(aiofeed.Files(sorted(folder.glob("*.bin"))), decode=decode, batch_size=BATCH, **options)


def check_served(address: str, shared_address: str) -> None:
    """Attach to a feeder and to tensors in another process."""
    code = (
        "import sys, aiofeed; print([int(value) for batch in aiofeed.attach(sys.argv[1]) for value in batch[:, 0]] + "
        "aiofeed.processes.attach_tensors(sys.argv[2]).tolist())"
    )
    with (
        aiofeed.Feeder(Numbers(), batch_size=BATCH) as numbers,
        aiofeed.serve(numbers, address) as server,
        aiofeed.processes.share(torch.arange(40, 45), shared_address) as shared,
    ):
        command = [sys.executable, "-c", code, server.address, shared.address]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == list(range(45)), done.stdout


def check(condition: object) -> None:
    """Raise ``AssertionError`` unless a condition holds."""
    assert condition


def small(folder: Path) -> dict[str, Callable[[], object]]:
    """64 MiB of /dev/shm, a quota of 1.5 cores and 200 MiB of 300 MiB of memory left."""
    images = aiofeed.DecodeImage(1024)
    files = aiofeed.Files(sorted(folder.glob("*.bin")))

    def limits() -> None:
        assert (machine.cpu_quota(), machine.memory_limit(), machine.free_memory()) == (1.5, 300 * MIB, 200 * MIB)
        assert machine.cpus() <= 2
        with feeder(folder) as numbers:
            assert values(numbers) == list(range(40))
            assert numbers.statistics().decode_threads <= 2

    def large_batches() -> None:
        with aiofeed.Feeder(Large(), batch_size=2, engine="process:1") as large:
            assert [batch.shape[0] for batch in large] == [2, 2, 2]

    def too_large_batches() -> None:
        with aiofeed.Feeder(Large(), batch_size=6, engine="process:1") as large:
            next(iter(large))

    return {
        "limits": limits,
        "report": lambda: str(aiofeed.device_report()),
        "large_batches": large_batches,
        "large_worker_batches": lambda: check(len(list(aiofeed.DataLoader(Large(), 2, num_workers=1))) == 3),
        "share": lambda: aiofeed.processes.share(
            torch.zeros(70 * MIB, dtype=torch.uint8), folder / "small.sock"
        ).close(),
        "share_too_much": lambda: aiofeed.processes.share(
            torch.zeros(250 * MIB, dtype=torch.uint8), folder / "large.sock"
        ),
        "batches_too_large": lambda: aiofeed.Feeder(files, decode=images, batch_size=64),
        "batches_too_large_in_processes": too_large_batches,
        "cache": lambda: values(feeder(folder, cache="host")) and None,
    }


def read_only(folder: Path) -> dict[str, Callable[[], object]]:
    """Nothing can be written; no home; a user id without an account."""

    def identity() -> None:
        assert os.getuid() == 12345
        assert os.path.expanduser("~") == "~"
        for path in (folder, Path("/tmp"), Path.cwd()):
            assert not os.access(path, os.W_OK)

    return {
        "identity": identity,
        "feeder": lambda: check(values(feeder(folder, cache="host")) == list(range(40))),
        "process": lambda: check(values(feeder(folder, engine="process:1")) == list(range(40))),
        "workers": lambda: check(len(values(aiofeed.DataLoader(Numbers(), BATCH, num_workers=1))) == 160),
        "report": lambda: check("torch" in str(aiofeed.device_report())),
        "serve": lambda: aiofeed.serve(feeder(folder), "numbers"),
        "serve_at": lambda: aiofeed.serve(feeder(folder), folder / "x.sock").start(),
        "share": lambda: aiofeed.processes.share(torch.arange(5), "numbers"),
        "shards": lambda: check(len(aiofeed.TarShards(folder / "a.tar", "jpg")) == 40),
        "disk_cache": lambda: values(feeder(folder, cache=aiofeed.DiskCache(folder / "x.cache"))),
        "encoded_cache": lambda: feeder(folder, cache=aiofeed.EncodedCache(folder / "x.cache", MIB)),
    }


def one_folder(folder: Path) -> dict[str, Callable[[], object]]:
    """As ``read_only``, but one folder can be written, which TMPDIR and XDG_CACHE_HOME name."""
    writable = folder / "writable"
    tempfile.tempdir = None
    os.environ.update(TMPDIR=str(writable), XDG_CACHE_HOME=str(writable))

    def shards() -> None:
        assert len(aiofeed.TarShards(folder / "a.tar", "jpg")) == 40
        assert list((writable / "aiofeed").glob("*.index"))

    return {
        "serve": lambda: check_served("numbers", "numbers"),
        "shards": shards,
        "disk_cache": lambda: values(feeder(folder, cache=aiofeed.DiskCache(writable / "1.cache"))) and None,
        "encoded_cache": lambda: values(feeder(folder, cache=aiofeed.EncodedCache(writable / "2.cache", MIB))) and None,
    }


class Lines(logging.Handler):
    """Collects the messages of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    """Run groups of cases, whose names are the arguments after the folder."""
    log = Lines()
    logging.getLogger("aiofeed").addHandler(log)
    outcomes = {}
    for group in sys.argv[2:]:
        for name, case in globals()[group](Path(sys.argv[1])).items():
            log.lines.clear()
            try:
                outcome = case()
                text = outcome if isinstance(outcome, str) else ""
            except Exception as error:
                text = f"{type(error).__name__}: {error}{getattr(error, 'stderr', '')}"
            outcomes[f"{group}.{name}"] = "\n".join([text, *log.lines]).strip()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
