"""Who is fastest where the files are much larger than what is wanted of them?

JPEG files of 3000 x 2000 to 224 x 224, batch 16, in the page cache, epochs after the first. "pillow" decodes them
whole; "draft" (Pillow) and "turbo" (simplejpeg) at a quarter, the smallest scale of at least twice the side, then
resize antialiased, "native" is the library that is built with aiofeed; tf.data, DALI and SPDL's ffmpeg have their own
ways. The stated quality is that of aiofeed's pictures: worst PSNR against Pillow at full scale; who is half a dB below
it has not kept it. That library is not offered to the others, though a dataset of theirs could call it.

Targets: at least 4.5 times ``DataLoader`` with a plain Pillow decode, 5 with simplejpeg; 0.95 of two bare processes
with the same scaled decode; first among all that keep the quality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from benchmarks.data import jpeg_folder
from benchmarks.harness import Contender, Settings
from benchmarks.peers.adapters import bare
from benchmarks.peers.contest import OURS, Field, Found, Way, race
from benchmarks.peers.work import contender
from benchmarks.turbo import has_native

TITLE = "JPEG 3000x2000 to 224, batch 16, second epoch"

SCALED: tuple[Way, ...] = (
    ("feeder", "thread"),
    ("feeder", "process:2"),
    ("dataloader", "persistent"),
    ("spdl_threads", "by batches"),
    ("grain_threads", "whole batches"),
)
OWN: tuple[Way, ...] = (
    ("tfdata", "AUTOTUNE"),
    ("tfdata", "at 1/4"),
    ("tfdata", "at 1/8"),
    ("dali", "CPU"),
    ("spdl_threads", "ffmpeg"),
)
PLAIN = "DataLoader, persistent, pillow"
KEPT_DB = 0.5


def run(settings: Settings, field: Field) -> Found:
    folder = str(jpeg_folder(settings.data, settings.size(192, 12), 3000, 2000))
    work = {"folder": folder, "side": 224, "batch": settings.size(16, 4)}
    shared = ["draft", "turbo"] if find_spec("simplejpeg") else ["draft"]
    fast = [*shared, "native"] if has_native() else shared
    scaled, absent = field.divide(SCALED)
    own, not_own = field.divide(OWN)
    loaders = [
        contender("dataloader", "persistent", {**work, "decoder": "pillow"}, judged=True),
        *[contender(*way, {**work, "decoder": decoder}, judged=True) for decoder in shared for way in scaled],
        *[contender(*way, {**work, "decoder": "native"}, judged=True) for way in SCALED[:2] if "native" in fast],
    ]
    loaders = [named(each) for each in loaders]
    loaders += [contender(*way, {**work, "decoder": "draft"}, judged=True) for way in own]
    plain = [named(bare.contender("processes", {**work, "decoder": decoder})) for decoder in fast]
    found = race([*loaders, *plain], settings, {**absent, **not_own})
    better = {decoder: found.best(f"{OURS}, {way}, {decoder}" for way in ("thread", "process:2")) for decoder in fast}
    best = found.best(better.values())
    keep = [peer for peer in found.peers() if found.db(peer) >= found.db(best) - KEPT_DB]
    least = {"draft": 4.5, "turbo": 5.0, "native": 5.0}
    targets = [
        *[figure for name, ours in better.items() for figure in found.speed(ours, PLAIN, least[name])],
        *[f for name, ours in better.items() for f in found.speed(ours, f"two bare processes, {name}", 0.95)],
        *found.first(best, keep, "those that keep the quality"),
        *[figure for peer in found.peers() for figure in found.speed(best, peer) if peer != PLAIN],
    ]
    return Found(TITLE, "images", found.columns(), targets, found.absent)


def named(each: Contender) -> Contender:
    """With the decoder's name behind its own."""
    options: Mapping[str, Any] = each.options
    return replace(each, label=f"{each.label}, {options.get('work', options)['decoder']}")
