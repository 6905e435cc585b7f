"""What does it cost that every feeder records its last seconds?

The feeders of ``jpeg`` and ``tiny_files``, with and without ``timeline=False``: samples per second, and CPU time per
sample.

Targets: less than 1 % of CPU time for JPEGs, less than 3 % for files of 2 KB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.data import files_below, jpeg_folder, tiny_folder
from benchmarks.figures import Figure, at_most, cpu_us_per_item, per, rates
from benchmarks.harness import Contender, Measure, Settings, interleave
from benchmarks.single_epochs import single_epochs
from benchmarks.tiny_files import decode

TITLE = "The cost of the timeline, batch 64"

BATCH = 64
IMPORTS = ("torch", "aiofeed:Feeder", "aiofeed:Files", "aiofeed:DecodeImage")


def run(settings: Settings) -> list[Figure]:
    figures = []
    for what, folder, bound in (
        ("JPEGs of 500x400", jpeg_folder(settings.data, settings.size(1024, 96)), 1.01),
        ("files of 2 KB", tiny_folder(settings.data, settings.size(20_000, 200)), 1.03),
    ):
        options = {"folder": str(folder), "images": what.startswith("JPEG")}
        on = Contender("on", feeder, {**options, "timeline": True}, IMPORTS)
        off = Contender("off", feeder, {**options, "timeline": False}, IMPORTS)
        samples = interleave([on, off], settings)
        cpu = {label: cpu_us_per_item(rounds) for label, rounds in samples.items()}
        figures += [
            Figure(f"{what}: CPU per sample, on / off", per(cpu["on"], cpu["off"]), target=at_most(bound)),
            Figure(f"{what}: speed, on / off", per(rates(samples["on"]), rates(samples["off"]))),
            *[Figure(f"{what}: CPU per sample, {label}", values, "us") for label, values in cpu.items()],
        ]
    return figures


@contextmanager
def feeder(folder: str, *, images: bool, timeline: bool) -> Iterator[Measure]:
    import aiofeed

    source = aiofeed.Files(files_below(folder))
    with aiofeed.Feeder(
        source, decode=aiofeed.DecodeImage(224) if images else decode, batch_size=BATCH, timeline=timeline
    ) as one:
        one_epoch = single_epochs(one)

        def epoch() -> Mapping[str, float]:
            return {"items": sum(map(len, one_epoch()))}

        epoch()
        yield epoch
