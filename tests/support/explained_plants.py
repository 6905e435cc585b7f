"""What the tests of ``explain()`` do with the plants of its benchmark: recorded counters, and two ranks.

The tests explain counters that ``record()`` has written, so that they need no quiet machine. Call it again if counters
are added: ``python -m tests.support.explained_plants``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from aiofeed.reports.feeder import measurements
from benchmarks.explain import PLANTS, Numbers, Plant, decode, explained, feeder_of, limits_of
from benchmarks.harness import PROJECT

RECORDED = PROJECT / "tests" / "reports" / "explain_counters.json"


def record() -> None:
    """Write the counters of an epoch of each plant, those that are 0 or the default left out."""
    recorded = {}
    for name, plant in PLANTS.items():
        if plant.loader is not None or plant.prefetch:
            continue
        with feeder_of(plant) as feeder, plant.around():
            found = explained(plant, feeder)
            measured = measurements(feeder._session)
        if (found.stage, found.resource) != (plant.stage, plant.resource or found.resource):
            raise RuntimeError(f"{name}: other work on this machine changes the limit. Begin again.\n{found}")
        recorded[name] = _changed(measured) | {"stats": _changed(measured.stats)}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


def _changed(counters: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not their defaults, as far as JSON has them."""
    values = {entry.name: (getattr(counters, entry.name), entry.default) for entry in fields(counters)}
    left_out = ("events", "allows", "asked_at", "cpu_started_s")
    return {name: value for name, (value, default) in values.items() if value != default and name not in left_out}


def slow_rank() -> dict[str, Any]:
    """The explanation by rank 0 of two processes, of which rank 1 reads slowly."""
    with tempfile.TemporaryDirectory() as folder:
        program = "import sys; from tests.support.explained_plants import rank_main; rank_main(*sys.argv[1:])"
        ranks = [
            subprocess.Popen([sys.executable, "-c", program, str(rank), folder], cwd=PROJECT, stdout=subprocess.PIPE)
            for rank in range(2)
        ]
        try:
            answers = [process.communicate(timeout=100)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        result: dict[str, Any] = json.loads(answers[0])
        return result


def rank_main(rank: str, folder: str) -> None:
    from torch import distributed

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    distributed.init_process_group("gloo", init_method=rendezvous, rank=int(rank), world_size=2)
    source = partial(Numbers, read_s=0.04 if rank == "1" else 0.0)
    plant = Plant("read", "storage latency", source, {"decode": decode, "limits": limits_of(read_concurrency=4)})
    with feeder_of(plant) as feeder:
        for _ in feeder:
            time.sleep(plant.step_s)
            distributed.barrier()  # as the all-reduce of gradients
        found = feeder.explain(ranks=True)
    distributed.destroy_process_group()
    print(json.dumps(found.to_dict()))


if __name__ == "__main__":
    record()
