"""Where does the time of one sample go, stage by stage, and how much of it is the framework's?

20,000 JPEGs of 64x64 with simplejpeg and with Pillow, and JPEGs of 500x400, epochs after the first, one decode thread.
The cost of a sample in a thread is the thread's CPU time over an epoch, divided by the samples. Reading and decoding
alone are measured with the same calls in a loop, in the same process, right before and after. The other work of the
decode thread takes a few microseconds, less than the decode varies; so it is measured with a second feeder of the same
files and rows, whose decoder does nothing. That work, the loop's thread and the consumer's thread are the framework's.

Target: at most 20 us a sample, at 64x64.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from benchmarks.data import default_folder, files_below, jpeg_folder
from benchmarks.figures import Figure, at_most, column
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs

TITLE = "CPU time of one sample, stage by stage, batch 64, one decode thread"

BATCH = 64
STAGES = {
    "read_us": "read the file",
    "decode_us": "decode it into its row",
    "thread_us": "other work of the decode thread: chunk, target, batch",
    "loop_us": "the event loop's thread: plan, prefetch, deliver",
    "consumer_us": "the consumer's thread: next()",
    "framework_us": "the framework: the last three",
}


def run(settings: Settings) -> list[Figure]:
    small = str(jpeg_folder(settings.data, settings.size(20_000, 128), 64, 64))
    large = str(jpeg_folder(settings.data, settings.size(1024, 24)))
    works = {"64x64, Pillow": (small, 64, "pillow"), "500x400": (large, 224, "auto")}
    if find_spec("simplejpeg"):
        works = {"64x64, simplejpeg": (small, 64, "turbo"), **works}
    imports = ("torch", "aiofeed:Feeder", "aiofeed:DecodeImage")
    contenders = [
        Contender(name, epochs, {"folder": folder, "side": side, "backend": backend}, imports)
        for name, (folder, side, backend) in works.items()
    ]
    figures: list[Figure] = []
    for name, rounds in interleave(contenders, settings).items():
        for stage, what in STAGES.items():
            target = at_most(20.0) if stage == "framework_us" and name.startswith("64x64") else None
            figures.append(Figure(f"{name}: {what}", column(rounds, stage), "us", target))
    return figures


@contextmanager
def epochs(folder: str, side: int, backend: str) -> Iterator[Measure]:
    import numpy as np

    import aiofeed

    decoder = aiofeed.DecodeImage((side, side), backend=backend)  # type: ignore[arg-type]
    paths = files_below(folder)
    source = aiofeed.Files(paths, targets=list(range(len(paths))))
    alone = aiofeed.Files(paths)
    rows = np.empty((BATCH, side, side, 3), np.uint8)

    class Nothing:
        row = decoder.row
        takes_seed = False

        def __call__(self, data: bytes) -> object:
            raise NotImplementedError

        def decode_into(self, data: bytes, out: object, seed: int | None = None) -> None:
            pass

    def bare() -> tuple[float, float]:
        """Seconds of reading and of decoding, in the feeder's chunks."""
        read_s = decode_s = 0.0
        for start in range(0, len(paths), BATCH):
            started = time.thread_time()
            encoded = alone.read_now(range(start, min(start + BATCH, len(paths))))
            read = time.thread_time()
            for row, data in zip(rows, encoded, strict=False):
                decoder.decode_into(data, row)
            decode_s += time.thread_time() - read
            read_s += read - started
        return read_s, decode_s

    def spent_in(one_epoch: Callable[[], Iterator[object]]) -> tuple[float, float, float]:
        """Microseconds per sample in the threads that read and decode, on the loop, and in the consumer."""
        before = by_thread()
        for _ in one_epoch():
            pass
        us = {name: (after - before.get(name, 0.0)) / len(paths) * 1e6 for name, after in by_thread().items()}
        # The other feeder's threads are idle meanwhile.
        working = sum(value for name, value in us.items() if "-decode-" in name or "-read-" in name)
        return working, us["aiofeed-engine"], us[threading.current_thread().name]

    limits = aiofeed.Limits(decode_threads=1)
    with (
        aiofeed.Feeder(source, decode=decoder, batch_size=BATCH, limits=limits) as feeder,
        aiofeed.Feeder(source, decode=Nothing(), batch_size=BATCH, limits=limits) as idle,
    ):
        one_epoch, nothing = single_epochs(feeder), single_epochs(idle)

        def measure() -> Mapping[str, float]:
            first = bare()
            _, loop_us, consumer_us = spent_in(one_epoch)
            working, _, _ = spent_in(nothing)
            second = bare()
            read_us, decode_us = ((a + b) / 2 / len(paths) * 1e6 for a, b in zip(first, second, strict=True))
            thread_us = working - read_us
            return {
                "read_us": read_us,
                "decode_us": decode_us,
                "thread_us": thread_us,
                "loop_us": loop_us,
                "consumer_us": consumer_us,
                "framework_us": thread_us + loop_us + consumer_us,
            }

        bare()
        spent_in(one_epoch)
        spent_in(nothing)
        yield measure


def by_thread() -> dict[str, float]:
    """CPU seconds of the threads, by name; threads of one name are added up."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        spent = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
        seconds[thread.name] = seconds.get(thread.name, 0.0) + spent
    return seconds


def main(epochs: int = 12) -> None:
    """Run only the hot path, for a profiler; docs/performance.md has the command."""
    import torch  # noqa: F401 - otherwise its import would be half of the profile

    import aiofeed

    paths = files_below(jpeg_folder(default_folder(), 20_000, 64, 64))
    source = aiofeed.Files(paths, targets=list(range(len(paths))))
    limits = aiofeed.Limits(decode_threads=1)
    with aiofeed.Feeder(source, decode=aiofeed.DecodeImage((64, 64)), batch_size=BATCH, limits=limits) as feeder:
        for _ in feeder.epochs(epochs):
            for _ in feeder:
                pass


if __name__ == "__main__":
    main()
