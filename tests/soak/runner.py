"""Draws episodes from a seed, runs them one after the other, and counts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from aiofeed.runtime.event_loop import new_event_loop
from tests.soak import bridges, episodes, faulty, policies, processes
from tests.soak.checks import Checks, Watch, watchdog
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
"""Kinds of episodes and how often they come."""


def _signals(seed: int) -> str:
    from tests.support.signal_cases import run_signal_cases

    totals = run_signal_cases(200, seed)
    totals.check()
    return f"{totals.signals} sent, slowest end after {totals.slowest_s:.2f} s"


def _fuzz(seed: int) -> str:
    from tests.decoders.test_image_fuzz import run_fuzz

    totals = run_fuzz(20_000, seed)
    decoded, refused = (sum(count[what] for count in totals.values()) for what in ("decoded", "refused"))
    return f"{decoded} decoded as Pillow does, {refused} refused by name"


EXTRAS: dict[str, Callable[[int], str]] = {"SIGINT in processes": _signals, "damaged images": _fuzz}
"""What a long run does beside episodes, by name; each raises what is wrong and says what it counted."""


class Soak:
    """A run of episodes.

    Args:
        seed: of everything that is drawn.
        folder: where real files may be written.
        fatal: whether a hang ends the process.
    """

    def __init__(self, seed: int, folder: Path, *, fatal: bool) -> None:
        self.seed = seed
        self.tally: Counter[str] = Counter()
        self.broken: list[str] = []
        self._folder = folder
        self._fatal = fatal
        self._watch = Watch()
        new_event_loop().close()  # libuv opens a pipe for signals that it keeps
        self.checks = Checks(self._watch)

    def replay(self, number: int) -> str:
        """The command that runs one episode again."""
        return f"python -m tests.soak --seed {self.seed} --episode {number}"

    def run(self, number: int) -> bool:
        """Run one episode; whether all promises were kept."""
        drawn = random.Random(f"{self.seed}/{number}")
        names = list(KINDS)
        [name] = drawn.choices(names, [KINDS[each][1] for each in names])
        episode = Episode(drawn, self._folder, self.tally)
        self._watch.allowed = ()
        with self._watch, watchdog(self.replay(number), fatal=self._fatal):
            try:
                KINDS[name][0](episode)
                self._watch.allowed = tuple(episode.allowed)
                self.checks.after(episode.rigs, number)
                for check in episode.after:
                    check()
            except Exception as error:  # whatever it is, the next episodes are worth running
                self.checks.abandon(episode.rigs)
                kind = error.kind if isinstance(error, ViolationError) else "wrong"
                self.tally[kind] += 1
                self.broken.append(f"{self.replay(number)}  ({name}): {type(error).__name__}: {error}")
                self.error = error
                return False
        self.tally["episodes"] += 1
        self.tally[f"kind: {name}"] += 1
        return True

    def totals(self) -> str:
        """Everything that was counted."""
        first, last = self.checks.growth()
        heads = ("episodes", "epochs", "batches", "samples", "cancellations", "timeouts", "resumes", "forks", "spawns")
        lines = [f"{name}: {self.tally[name]}" for name in heads]
        lines += [f"{name}: {self.tally[name]}" for name in ("lost", "doubled", "wrong", "left behind")]
        rest = sorted(set(self.tally) - set(heads) - {"lost", "doubled", "wrong", "left behind"})
        lines += [f"  {name}: {self.tally[name]}" for name in rest]
        lines.append(f"resident memory: {first / 1e6:.1f} MB in the first third, {last / 1e6:.1f} MB in the last")
        return "\n".join(lines)
