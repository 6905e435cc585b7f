"""Which loader is fastest for files much larger than the result?

JPEG files of 3000 x 2000 to 224 x 224, batch 16, in the page cache, epochs after the first. "pillow" decodes them at
full scale; "draft" (Pillow) and "turbo" (simplejpeg) at a quarter, the smallest scale of at least twice the side, then
resize with antialiasing; "native" is aiofeed's native library; tf.data, DALI and SPDL's ffmpeg use their own decoders.
Quality is the worst PSNR against Pillow at full scale; loaders more than half a dB below aiofeed's are of lower
quality. The other loaders do not get the native library, although their datasets could call it.

Targets: at least 4.5 times ``DataLoader`` with a plain Pillow decode, 5 with simplejpeg; 0.95 of two bare processes
with the same scaled decode; first among all of the same quality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from benchmarks.data import jpeg_folder
from benchmarks.harness import Contender, Settings
from benchmarks.jpeg_backends import has_native
from benchmarks.peers.adapters import bare
from benchmarks.peers.contest import OURS, CaseResult, Participants, Way, race
from benchmarks.peers.work import contender

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
QUALITY_DB = 0.5


def run(settings: Settings, participants: Participants) -> CaseResult:
    folder = str(jpeg_folder(settings.data, settings.size(192, 12), 3000, 2000))
    work = {"folder": folder, "side": 224, "batch": settings.size(16, 4)}
    shared = ["draft", "turbo"] if find_spec("simplejpeg") else ["draft"]
    fast = [*shared, "native"] if has_native() else shared
    scaled, absent = participants.divide(SCALED)
    own, not_own = participants.divide(OWN)
    loaders = [
        contender("dataloader", "persistent", {**work, "decoder": "pillow"}, judged=True),
        *[contender(*way, {**work, "decoder": decoder}, judged=True) for decoder in shared for way in scaled],
        *[contender(*way, {**work, "decoder": "native"}, judged=True) for way in SCALED[:2] if "native" in fast],
    ]
    loaders = [named(each) for each in loaders]
    loaders += [contender(*way, {**work, "decoder": "draft"}, judged=True) for way in own]
    plain = [named(bare.contender("processes", {**work, "decoder": decoder})) for decoder in fast]
    outcome = race([*loaders, *plain], settings, {**absent, **not_own})
    better = {decoder: outcome.best(f"{OURS}, {way}, {decoder}" for way in ("thread", "process:2")) for decoder in fast}
    best = outcome.best(better.values())
    comparable = [peer for peer in outcome.peers() if outcome.db(peer) >= outcome.db(best) - QUALITY_DB]
    least = {"draft": 4.5, "turbo": 5.0, "native": 5.0}
    targets = [
        *[figure for name, ours in better.items() for figure in outcome.speed(ours, PLAIN, least[name])],
        *[f for name, ours in better.items() for f in outcome.speed(ours, f"two bare processes, {name}", 0.95)],
        *outcome.first(best, comparable, "those of the same quality"),
        *[figure for peer in outcome.peers() for figure in outcome.speed(best, peer) if peer != PLAIN],
    ]
    return CaseResult(TITLE, "images", outcome.columns(), targets, outcome.absent)


def named(each: Contender) -> Contender:
    """The contender with the decoder's name in its label."""
    options: Mapping[str, Any] = each.options
    return replace(each, label=f"{each.label}, {options.get('work', options)['decoder']}")
