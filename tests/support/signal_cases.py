"""Child processes that run a script of `training.py` and receive signals, and checks of how they end.

Most children are forked by a `ForkServer`, which starts them about 100 times faster. The soak runs hundreds of them.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.support.fork_server import ENVIRONMENT, Child, End, ForkServer, pipes
from tests.support.paths import PACKAGE, ROOT

# The guaranteed time from the signal to the end of the process, and extra time for a busy machine.
PROMISE_S = 2.0
GRACE_S = 18.0
# Longest time from a script's first line to the signal. It covers imports, construction and some epochs.
SPREAD_S = 0.4
FRESH_SPREAD_S = 0.8

# Other packages are imported before the signal: aiofeed is not responsible for a Ctrl-C during their imports.
IMPORTS = """
import faulthandler, sys
import aiofiles.os, numpy, torch, PIL.Image
try: import uvloop
except ImportError: pass
from tests.support import training
faulthandler.enable()
"""
FRESH = f"""{IMPORTS}
training.write_line("ready")
training.SCRIPTS[sys.argv[1]]()
"""
# torch is not imported before the feeder imports it.
WITHOUT_TORCH = """
import asyncio, sys, time
import aiofiles.os, numpy
try: import uvloop
except ImportError: pass
print("ready", flush=True)
from aiofeed import Feeder

class Numbers:
    def __len__(self):
        return 1000

    def key(self, index):
        return str(index)

    async def read(self, index):
        await asyncio.sleep(0)
        return b"%d" % index

feeder = Feeder(Numbers(), decode=lambda data: int(data), batch_size=4, shuffle=True)
iterator = iter(feeder)
while sys.argv[1] == "endless":
    for batch in feeder:
        pass
while "torch" not in sys.modules:
    time.sleep(0.001)
"""
FORKED = """
import sys
from tests.support import training
training.write_line("ready")
training.SCRIPTS[sys.argv[1]]()
"""

# A KeyboardInterrupt inside an `except` block, as in some modules of the standard library, still counts as one report.
CHAINED = "During handling of the above exception, another exception occurred:"


def fresh(name: str, code: str = FRESH) -> Child:
    """A new interpreter, about to run a script."""
    with pipes() as (out, write, err):
        process = subprocess.Popen(
            [sys.executable, "-c", code, name],
            stdout=write,
            stderr=err,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )

    def reap(timeout_s: float) -> int | None:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    return Child(process.pid, out, err, reap)


# --- check how a child ended ------------------------------------------------------------------------------------------


def complaints(end: End, returncode: int, error: str | None, chained: bool = False) -> list[str]:
    """Return what is wrong with an end: return code, number of reports of `error`, time, leaks, other messages."""
    wrong = [f"leaked: {name}" for name in end.left]
    if end.returncode != returncode:
        wrong.append(f"return code {end.returncode}, expected {returncode}")
    if end.seconds > PROMISE_S + GRACE_S:
        wrong.append(f"it took {end.seconds:.1f} s to end")
    parts = end.err.split(CHAINED)
    if not chained and any(PACKAGE in part for part in parts[:-1]):
        wrong.append("raised while aiofeed handled another error")
    reports = end.err.count("Traceback (most recent call last)") + 1 - len(parts)
    if error is None:
        if end.err:
            wrong.append("stderr is not empty")
    elif reports != 1 or not re.search(rf"^{re.escape(error)}\Z", end.err.rstrip(), re.MULTILINE):
        wrong.append(f"stderr is not one traceback of {error}")
    wrong += [
        f"{words!r} in stderr"
        for words in ("Exception ignored", "never awaited", "was destroyed", "Fatal", "never retrieved", "Warning:")
        if words in end.err
    ]
    return wrong


def interrupted(end: End, name: str) -> list[str]:
    """Return what is wrong with the end of a script that received SIGINT."""
    # asyncio.run turns the CancelledError into a KeyboardInterrupt, and the report shows both.
    return complaints(end, -signal.SIGINT, "KeyboardInterrupt", chained=name.startswith("asynchronous"))


def terminated(end: End) -> list[str]:
    """Return what is wrong with the end of a script that received SIGTERM."""
    return complaints(end, -signal.SIGTERM, None)


@dataclass
class Totals:
    """The results of many signals."""

    signals: int = 0
    scripts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, case: str, name: str, end: End, wrong: list[str]) -> None:
        """Count one signal; keep a failure with the child's output."""
        self.signals += 1
        self.scripts[name] += 1
        self.slowest_s = max(self.slowest_s, end.seconds)
        if wrong:
            self.failures.append(f"{case}: {'; '.join(wrong)}\n--- stdout\n{end.out}\n--- stderr\n{end.err}")

    def check(self) -> None:
        """Raise an `AssertionError` with all failures, if there are any."""
        if self.failures:
            raise AssertionError(f"{len(self.failures)} of {self.signals} signals:\n" + "\n".join(self.failures))


def run_signal_cases(server: ForkServer, count: int, seed: int, number: int = signal.SIGINT) -> Totals:
    """Send `count` signals to training scripts, two at a time, each at a random moment drawn from `seed`.

    A failure names the seed, the script and the moment.
    """
    from tests.support.training import TRAINING

    random_ = random.Random(seed)
    scripts = itertools.islice(itertools.cycle(TRAINING), count)
    cases = [(name, random_.uniform(0, SPREAD_S)) for name in scripts]
    random_.shuffle(cases)
    totals = Totals()

    def run(case: tuple[str, float]) -> None:
        name, after_s = case
        child = server.start(FORKED, name)
        first = child.line()
        time.sleep(after_s)
        child.send(number)
        end = child.end()
        wrong = interrupted(end, name) if number == signal.SIGINT else terminated(end)
        wrong += ["the script did not start"] if first != "ready" else []
        totals.add(f"seed {seed}, {name} after {after_s:.4f} s", name, end, wrong)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, cases))
    return totals
