"""``aiofeed bench``: measures a data set with several settings and with torch's ``DataLoader``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import aiofeed
from aiofeed.common.blocking import signal_held
from aiofeed.kernel.core.formatting import format_bytes
from aiofeed.kernel.core.validation import check_positive_int
from aiofeed.kernel.runtime import machine
from aiofeed.kernel.runtime.tensors import unchanged
from aiofeed.reports.commands.data_set import DataSet, nothing, open_data_set, quoted

# Each step is measured for so long, after a warm-up in which threads and reads are tuned.
WARM_UP_S = 1.0
STEP_S = 4.0
# Further settings are left out after this time, so that all ends within a minute.
TOTAL_S = 40.0
# Decoding alone uses samples in memory.
DECODE_SAMPLES = 512
DECODE_BYTES = 128 << 20
# Threads are recommended unless another setting is faster by this factor.
CLEARLY_FASTER = 1.05
# No step meets the end of a small data set: batches of a feeder, and samples of an epoch of a ``DataLoader``.
_ENDLESS = 1 << 20


def bench(paths: Sequence[str], *, size: int, batch_size: int, as_json: bool) -> int:
    """Measure and print the results; returns the exit code.

    Args:
        paths: A folder of images, a manifest, or shards: paths or URLs, with braces or globs.
        size: The size of decoded images.
        batch_size: Samples per batch.
        as_json: Whether to print one JSON object in place of text.
    """
    check_positive_int("--size", size)
    data = open_data_set(paths)
    report = _measure(data, size, min(check_positive_int("--batch-size", batch_size), len(data.source)))
    print(json.dumps(report) if as_json else _describe(report))
    return 0


# --- steps


def _measure(data: DataSet, size: int, batch_size: int) -> dict[str, Any]:
    started, cores = time.monotonic(), machine.rank_cpus()
    from aiofeed.kernel.decoders.image import DecodeImage  # needs Pillow

    decode = DecodeImage(size)
    rates: dict[str, float] = {}
    settings: dict[str, dict[str, Any]] = {"threads": {}, f"process:{cores}": {"engine": f"process:{cores}"}}
    common = {"batch_size": batch_size, "shuffle": data.shuffle}

    _say(f"{data.source!r}, {cores} cores; reading alone")
    rates["read"], read_bytes = _feed(data.source, decode=nothing, seed=0, **common)
    _say("decoding alone")
    rates["decode"], _ = _feed(_InMemory(_some_samples(data.source, batch_size)), decode=decode, batch_size=batch_size)
    if rates["read"] < rates["decode"]:
        settings["256 reads"] = {"limits": aiofeed.Limits(read_concurrency=256)}
    for seed, (name, options) in enumerate(settings.items(), 1):
        if not options or time.monotonic() - started < TOTAL_S:
            _say(f"Feeder, {name}")
            rates[name], _ = _feed(data.source, decode=decode, seed=seed, **options, **common)
    _say(f"torch's DataLoader, {cores} workers")
    rates["DataLoader"] = _torch_rate(data, decode, batch_size, cores)

    best = max([name for name in settings if name in rates], key=rates.__getitem__)
    if rates[best] < CLEARLY_FASTER * rates["threads"]:
        best = "threads"
    return {
        "samples": len(data.source),
        "cores": cores,
        "size": size,
        "batch_size": batch_size,
        "samples_per_s": rates,
        "read_bytes_per_s": read_bytes,
        "limit": "read" if rates["read"] < rates["decode"] else "decode",
        "best": best,
        "speedup": rates[best] / rates["DataLoader"],
        "code": _code(data, size, batch_size, settings[best]),
    }


def _say(step: str) -> None:
    print(f"measuring: {step} ...", file=sys.stderr, flush=True)


def _rate(batches: Iterable[Any]) -> float:
    """Return samples per second, after a warm-up."""
    begin = end = time.perf_counter()
    warm, samples = False, 0
    for batch in batches:
        now = time.perf_counter()
        if warm:
            samples, end = samples + _samples(batch), now
            if now - begin >= STEP_S:
                break
        elif now - begin >= WARM_UP_S:
            warm, begin = True, now
    return samples / max(end - begin, 1e-9)


def _samples(batch: Any) -> int:
    while isinstance(batch, list | tuple):
        batch = batch[0]
    return len(batch)


def _feed(source: Any, **options: Any) -> tuple[float, float]:
    """Return samples and encoded bytes per second of a feeder."""
    policy = aiofeed.FailurePolicy("replace", max_failures=0.5)
    with aiofeed.Feeder(source, on_error=policy, **options) as feeder:
        rate = _rate(feeder.steps(_ENDLESS))
        found = feeder.statistics(total=True)
    return rate, rate * found.bytes_read / max(found.samples, 1)


def _some_samples(source: Any, batch_size: int) -> list[bytes]:
    """Read encoded samples for decoding alone, as many as are read within a step."""
    found: list[bytes] = []
    begin = time.perf_counter()
    policy = aiofeed.FailurePolicy("skip", max_failures=0.5)
    with aiofeed.Feeder(
        source, decode=unchanged, batch_size=batch_size, shuffle=True, collate_fn=list, on_error=policy
    ) as feeder:
        for batch in feeder:
            found += [sample[0] if isinstance(sample, tuple) else sample for sample in batch]
            seconds = time.perf_counter() - begin
            if len(found) >= DECODE_SAMPLES or sum(map(len, found)) >= DECODE_BYTES or seconds >= STEP_S:
                break
    return found


class _InMemory:
    """Encoded samples in memory."""

    answers_at_once = True

    def __init__(self, samples: list[bytes]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def key(self, index: int) -> str:
        return f"sample {index}"

    async def read(self, index: int) -> bytes:
        return self._samples[index]

    def read_now(self, indices: Sequence[int]) -> list[bytes]:
        return [self._samples[index] for index in indices]


class _TorchDataset:
    """A map-style dataset over a source, over and over again, with the same decoder; damaged samples are replaced."""

    def __init__(self, source: Any, decode: Any) -> None:
        self._source = source
        self._decode = decode

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Any:
        for attempt in range(100):
            at = (index + attempt) % len(self._source)
            try:
                image = self._decode(self._read(at))
                return (image, self._source.target(at)) if hasattr(self._source, "target") else image
            except Exception:
                if attempt == 99:
                    raise
        return None

    def _read(self, index: int) -> Any:
        if os.path.isfile(path := self._source.key(index)):
            return Path(path).read_bytes()
        if getattr(self._source, "looks_ahead", True):
            return self._loop.run_until_complete(self._source.read(index))
        [sample] = self._source.read_now([index])  # of a shard in a file
        if isinstance(sample, Exception):
            raise sample
        return sample

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()


def _torch_rate(data: DataSet, decode: Any, batch_size: int, workers: int) -> float:
    from torch.utils.data import DataLoader

    local = os.path.isfile(data.source.key(0)) or not getattr(data.source, "looks_ahead", True)
    dataset: Any = _TorchDataset(data.source, decode)
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=data.shuffle is True,  # shards in order, as streams of shards are read
        num_workers=workers,
        multiprocessing_context=None if local else "spawn",  # connections do not survive a fork
    )
    with signal_held():  # the workers keep its handler, and so ignore Ctrl-C
        batches = iter(loader)
    return _rate(batches)


# --- report


def _code(data: DataSet, size: int, batch_size: int, options: dict[str, Any]) -> str:
    lines = [
        "import glob\n\nimport aiofeed\n" if "glob." in data.code else "import aiofeed\n",
        "feeder = aiofeed.Feeder(",
        f"    {data.code},",
        f"    decode=aiofeed.DecodeImage(size={size}),",
        f"    batch_size={batch_size},",
        f"    shuffle={quoted(data.shuffle) if isinstance(data.shuffle, str) else data.shuffle},",
    ]
    if "engine" in options:
        lines.append(f"    engine={quoted(options['engine'])},")
    if "limits" in options:
        lines.append(f"    limits=aiofeed.Limits(read_concurrency={options['limits'].read_concurrency}),")
    return "\n".join([*lines, ")"])


def _describe(report: dict[str, Any]) -> str:
    names = {
        "read": "reading alone",
        "decode": "decoding alone",
        "DataLoader": f"DataLoader, {report['cores']} workers",
    }
    rates = {names.get(name, f"Feeder, {name}"): rate for name, rate in report["samples_per_s"].items()}
    width = max(map(len, rates))
    lines = [f"{name:<{width}}  {rate:>10,.0f} samples/s" for name, rate in rates.items()]
    lines[0] += f", {format_bytes(report['read_bytes_per_s'])}/s"
    work = {"read": "reading", "decode": "decoding"}[report["limit"]]
    return "\n".join(
        [
            f"{report['samples']:,} samples, {report['cores']} cores, images of {report['size']}x{report['size']}, "
            f"batches of {report['batch_size']}",
            "",
            *lines,
            "",
            f"Best: {report['best']}, {report['speedup']:.2f} times as fast as DataLoader. The limit is {work}.",
            "",
            report["code"],
        ]
    )
