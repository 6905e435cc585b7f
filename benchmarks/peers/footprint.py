"""How long until the first batch, and how much memory?

The work of ``same_decode``, each contender alone in a new process after its imports. The time of the first batch
includes the loader's construction. Memory is the peak of the whole process tree above its level after the imports,
sampled every 20 ms, over three epochs; then over 20 epochs.

Targets: aiofeed's first batch before every peer's; at most 60 MB; at most 5 MB more after 20 epochs.
"""

from __future__ import annotations

from statistics import median

from benchmarks.figures import Figure, at_most, per
from benchmarks.harness import BenchmarkError, Contender, Settings, measure_memory
from benchmarks.peers.contest import OURS, CaseResult, Participants, check
from benchmarks.peers.same_decode import THREAD, WAYS, task
from benchmarks.peers.work import contender

TITLE = "First batch and memory, JPEG 500x400 to 224, the same Pillow decode for all, batch 64"

ROUNDS = 3
EPOCHS = 20
SOME = 2


def run(settings: Settings, participants: Participants) -> CaseResult:
    work = task(settings)
    present, absent = participants.divide(WAYS)
    contenders = [contender(*way, work) for way in present]
    first: dict[str, list[float]] = {each.label: [] for each in contenders}
    memory: dict[str, list[float]] = {each.label: [] for each in contenders}
    long: dict[str, list[float]] = {each.label: [] for each in contenders if each.label.startswith(OURS)}
    dropped: dict[str, str] = {}
    for number in range(min(ROUNDS, settings.rounds)):
        for each in contenders[number:] + contenders[:number]:
            if each.label in dropped:
                continue
            settings.progress(f"round {number + 1}: {each.label}")
            try:
                peak, first_s = footprint(each, settings, SOME)
                if each.label in long:
                    long[each.label].append(footprint(each, settings, settings.size(EPOCHS, 3))[0])
            except BenchmarkError as error:
                dropped[each.label] = str(error).strip().splitlines()[-1]
                continue
            first[each.label].append(first_s)
            memory[each.label].append(peak)
    check(dropped)
    labels = sorted((label for label in first if label not in dropped), key=lambda label: median(first[label]))
    columns = {
        label: [
            Figure("first batch", tuple(1e3 * value for value in first[label]), "ms"),
            Figure("memory", tuple(memory[label]), "MB"),
        ]
        for label in labels
    }
    targets = []
    if peers := [label for label in labels if not label.startswith(OURS)]:
        ratio = per(first[THREAD], first[peers[0]])
        targets.append(Figure(f"first batch: {THREAD} / fastest of the peers ({peers[0]})", ratio, target=at_most(1.0)))
    for label, peaks in long.items():
        grown = tuple(after - before for after, before in zip(peaks, memory[label], strict=True))
        targets.append(Figure(f"memory above the imports: {label}", tuple(memory[label]), "MB", at_most(60)))
        targets.append(Figure(f"memory, {EPOCHS} epochs beyond {1 + SOME}: {label}", grown, "MB", at_most(5)))
    return CaseResult(TITLE, "", columns, targets, {**absent, **dropped})


def footprint(each: Contender, settings: Settings, measures: int) -> tuple[float, float]:
    """Memory above the imports in MB, and seconds to the first batch."""
    (memory,), samples = measure_memory(each, settings, (measures,))
    return memory.total / 1e6, samples[0]["first_s"]
