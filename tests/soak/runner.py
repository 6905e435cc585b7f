"""Draws episodes from a seed, runs one after the other, and counts the results."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from aiofeed.kernel.runtime.event_loop import new_event_loop
from tests.soak import bridges, episodes, faulty, policies, processes
from tests.soak.checks import Checks, ProblemLog, watchdog
from tests.soak.configurations import ViolationError
from tests.soak.episodes import Episode

Kind = Callable[[Episode], None]

KINDS: dict[str, tuple[Kind, float]] = {
    "leave": (episodes.leave, 6),
    "leave async": (episodes.leave_async, 5),
    "cancel points": (episodes.cancel_points, 5),
    "two feeders": (episodes.two_feeders, 2),
    "epochs in a row": (episodes.epochs_in_a_row, 3),
    "pickled": (episodes.pickled, 2),
    "resume": (episodes.resume, 6),
    "feeder dropped": (episodes.feeder_dropped, 2),
    "bridge": (bridges.bridge, 4),
    "policy": (policies.policy, 6),
    "fork": (processes.fork, 0.15),
    "spawn": (processes.spawn, 0.04),
    **{name: (fault, 1) for name, fault in faulty.FAULTS.items()},
}
"""Kinds of episodes, each with its relative frequency."""


def _signals(seed: int) -> str:
    from tests.support.fork_server import ForkServer
    from tests.support.signal_cases import run_signal_cases

    with ForkServer() as server:
        totals = run_signal_cases(server, 200, seed)
    totals.check()
    return f"{totals.signals} sent, the slowest process ended after {totals.slowest_s:.2f} s"


def _fuzz(seed: int) -> str:
    from tests.kernel.decoders.test_image_fuzz import run_fuzz

    totals = run_fuzz(20_000, seed)
    decoded, refused = (sum(count[result] for count in totals.values()) for result in ("decoded", "refused"))
    return f"{decoded} decoded like Pillow, {refused} rejected"


EXTRAS: dict[str, Callable[[int], str]] = {"SIGINT in processes": _signals, "damaged images": _fuzz}
"""Further tests of a long run, by name. Each raises an error or returns a summary."""


class Soak:
    """A run of episodes.

    Args:
        seed: seed of all random choices.
        folder: folder for real files.
        fatal: whether a hang ends the process.
    """

    def __init__(self, seed: int, folder: Path, *, fatal: bool) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._folder = folder
        self._fatal = fatal
        self._problems = ProblemLog()
        new_event_loop().close()  # libuv opens a permanent pipe for signals
        self.checks = Checks(self._problems)

    def replay(self, number: int) -> str:
        """Return the command that runs an episode again."""
        return f"python -m tests.soak --seed {self.seed} --episode {number}"

    def run(self, number: int) -> bool:
        """Run one episode; return whether it passed."""
        drawn = random.Random(f"{self.seed}/{number}")
        names = list(KINDS)
        [name] = drawn.choices(names, [KINDS[each][1] for each in names])
        episode = Episode(drawn, self._folder, self.counts)
        self._problems.allowed = ()
        with self._problems, watchdog(self.replay(number), fatal=self._fatal):
            try:
                KINDS[name][0](episode)
                self._problems.allowed = tuple(episode.allowed)
                self.checks.after(episode.rigs, number)
                for check in episode.after:
                    check()
            except Exception as error:  # continue with the next episodes
                self.checks.abandon(episode.rigs)
                kind = error.kind if isinstance(error, ViolationError) else "wrong"
                self.counts[kind] += 1
                self.failures.append(f"{self.replay(number)}  ({name}): {type(error).__name__}: {error}")
                self.error = error
                return False
        self.counts["episodes"] += 1
        self.counts[f"kind: {name}"] += 1
        return True

    def totals(self) -> str:
        """Return the counters as text."""
        first, last = self.checks.growth()
        heads = ("episodes", "epochs", "batches", "samples", "cancellations", "timeouts", "resumes", "forks", "spawns")
        lines = [f"{name}: {self.counts[name]}" for name in heads]
        lines += [f"{name}: {self.counts[name]}" for name in ("lost", "doubled", "wrong", "leaked")]
        rest = sorted(set(self.counts) - set(heads) - {"lost", "doubled", "wrong", "leaked"})
        lines += [f"  {name}: {self.counts[name]}" for name in rest]
        lines.append(f"resident memory: {first / 1e6:.1f} MB in the first third, {last / 1e6:.1f} MB in the last")
        return "\n".join(lines)
