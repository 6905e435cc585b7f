"""A contender's process. It imports, then sets up and measures on requests from stdin, and answers in lines of JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from typing import Any, TextIO

from benchmarks.process_tree import tree_cpu_s

Measure = Callable[[], Mapping[str, float]]
"""Does the work once; returns measurements in addition to ``wall_s`` and ``cpu_s``, which the worker measures."""


def main() -> None:
    task = json.loads(sys.argv[1])
    # Redirect prints to stderr; stdout is for answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            work(task, answers)
        except Exception:  # noqa: BLE001 - the harness raises it
            answer(answers, {"error": traceback.format_exc()})


def work(task: dict[str, Any], answers: TextIO) -> None:
    for name in task["imports"]:
        resolve(name)
    function = resolve(task["function"])
    answer(answers, {})
    if not sys.stdin.readline():
        return
    with function(**task["options"]) as measure:
        answer(answers, {})
        while sys.stdin.readline():
            answer(answers, measured(measure))


def measured(measure: Measure) -> dict[str, float]:
    """Measure; adds ``wall_s`` and ``cpu_s`` (of the process tree) unless ``measure`` returns its own."""
    gc.collect()
    cpu_s = tree_cpu_s()
    started = time.perf_counter()
    sample = measure()
    wall_s = time.perf_counter() - started
    return {"wall_s": wall_s, "cpu_s": tree_cpu_s() - cpu_s, **sample}


def resolve(name: str) -> Any:
    """Import "module" or "module:attribute"."""
    module, _, attributes = name.partition(":")
    return reduce(getattr, attributes.split(".") if attributes else (), import_module(module))


def answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
