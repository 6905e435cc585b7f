"""`python -m tests.soak --minutes 3 --seed 1`; `--episode K` replays one episode of that seed."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tests.soak.configurations import ViolationError
from tests.soak.runner import EXTRAS, Soak

MAX_FAILURES = 5


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=3.0,
        help="time for episodes (default 3); the signal and image tests after them take longer",
    )
    parser.add_argument("--seed", type=int, default=None, help="seed of all random choices (default: the time)")
    parser.add_argument("--episode", type=int, default=None, help="run only this episode")
    parser.add_argument("--times", type=int, default=1, help="repetitions of --episode (default 1)")
    return parser.parse_args()


def _numbers(arguments: argparse.Namespace) -> Iterator[int]:
    if arguments.episode is not None:
        for _ in range(arguments.times):
            yield arguments.episode
        return
    ends = time.monotonic() + 60 * arguments.minutes
    for number in count():
        if time.monotonic() > ends:
            return
        yield number


def main() -> int:
    """Run the soak and print the totals; return 1 after a failure."""
    arguments = _arguments()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell masks it for a background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % (1 << 31)
    print(f"seed: {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(seed, Path(folder), fatal=True)
        for number in _numbers(arguments):
            if not soak.run(number):
                print(soak.failures[-1], flush=True)
                traceback.print_exception(soak.error)
                if len(soak.failures) >= MAX_FAILURES:
                    break
    if arguments.episode is None:
        for name, function in EXTRAS.items():
            print(f"{name}: ", end="", flush=True)
            try:
                print(function(seed), flush=True)
            except Exception as error:  # continue, to print the totals
                soak.failures.append(f"{name}: {type(error).__name__}: {error}")
                print(soak.failures[-1], flush=True)
        try:
            soak.checks.check_growth()
        except ViolationError as error:
            soak.failures.append(str(error))
            print(error)
    print(soak.totals())
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
